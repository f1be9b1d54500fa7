"""What is printed is text whatever others wrote: no control sequence reaches a terminal, and JSON is JSON anywhere."""

from __future__ import annotations

import json
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from quota.common.clock import NEVER
from quota.deciding.corrections import add
from quota.deciding.project import Project
from quota.ledger.factory import open_ledger
from quota.rules.entry import START, Entry
from quota.rules.facts import Exhaustion
from support.commands import QUOTA, Quota
from support.setup import state_at

ODD = "\x1b[31m\x9b2J\u202ex\ny\x7f"
"""Red, clear the screen, right to left, a second line, delete."""

BOOK = """
api = "youtube"
source = "the vendor's table\\u001b[31m\\u009b2J\\u202e\\nquota: all is well"
read_on = 2026-11-21
buckets.units = { quota = 10_000, resets = { calendar = "day", zone = "America/Los_Angeles" } }
default = { get = 1, other = 50 }
methods = { "search.list" = 100, "videos.list" = 1 }
"""
CONFIG = """
[ledger]
url = "{url}"
[credentials.main]
api = "./book\\u001b[31m\\u202e.toml"
key = "file:quota.toml"
[jobs.trending]
fetch = "trending"
schedule = "every 45m"
"""


@pytest.fixture
def quota(quota: Quota, ledger_url: str) -> Quota:
    """A ledger in which another program wrote whatever it liked."""
    (quota.folder / "book\x1b[31m\u202e.toml").write_text(BOOK, encoding="utf-8")
    quota.configure(CONFIG.format(url=ledger_url))
    quota("charge", "videos.list")
    with closing(open_ledger(ledger_url)) as ledger:
        now_ms = ledger.now_ms()
        for bucket, until_ms in (("other", now_ms + 3_600_000), ("search", NEVER), ("third", NEVER)):
            state_at(ledger, "main").exhaust(Exhaustion(bucket, now_ms, until_ms, f"no{ODD}", ODD))
        assert state_at(ledger, "main").reopen("third", f"it{ODD}")
        odd = Entry(START, 5, f"b{ODD}", f"m{ODD}", f"j{ODD}", f"r{ODD}", f"k{ODD}")
        added = add(Project(ledger, "main"), lambda: [odd])
    assert added is not None
    quota.env["THE_ID"] = f"{added[0]}-{odd.key}"
    return quota


COMMANDS = [
    *(["status"], ["status", "--json"], ["check"], ["check", "--json"], ["costs"], ["plan"]),
    *(["init", f"new{ODD}.toml"], ["settle", "ID", "3"], ["refund", "ID"]),
    ["spend", "--by", "method,job,region,run,bucket"],
    ["spend", "--by", "job,region", "--json"],
    *(["reopen", bucket, "--because", f"it{ODD}"] for bucket in ("other", "search", "units")),
    *(["charge", "videos.list", "--json"], ["charge", f"m{ODD}", "--units", "1"]),
]


def test_no_control_sequence_reaches_the_terminal(quota: Quota) -> None:
    for args in COMMANDS:
        done = quota(*(quota.env["THE_ID"] if arg == "ID" else arg for arg in args))
        assert done.returncode in (0, 1, 2), done.stderr
        printed = done.stdout + done.stderr
        assert printed, args
        assert [char for char in printed if not char.isprintable() and char != "\n"] == [], args
        assert "quota: all is well" not in printed.splitlines(), args
        if "--json" in args:
            json.loads(done.stdout)


def test_a_width_of_0_is_an_unknown_width(tmp_path: Path) -> None:
    """Where a pseudo-terminal has no size, a shell may export COLUMNS=0."""
    quota = Quota(tmp_path)
    quota("charge", "videos.list")
    shown = quota("spend", COLUMNS="0").stdout
    assert shown == quota("spend").stdout
    assert "videos.list" in shown


@pytest.mark.parametrize("encoding", ["ascii", "shift_jis"])
def test_json_is_json_whatever_the_encoding_of_stdout(tmp_path: Path, encoding: str) -> None:
    quota = Quota(tmp_path)
    quota("charge", "search.list", "--job", "nuit é € 東京 😀", "--region", "日本")
    done = subprocess.run(
        [*QUOTA, "spend", "--by", "job,region", "--json"],
        cwd=quota.folder,
        env={**quota.env, "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=True,
    )
    rows = json.loads(done.stdout.decode("utf-8"))["rows"]
    assert rows == [{"job": "nuit é € 東京 😀", "region": "日本", "charges": 1, "units": 100}]
