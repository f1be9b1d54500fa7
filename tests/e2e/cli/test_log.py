"""The log: every line begins with a stable name and carries its values, and none a secret."""

from __future__ import annotations

import ast
import json
import logging
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from quota.common.log import line
from quota.common.log_lines import JsonFormatter, RedactingFilter
from quota.common.redact import register
from support.commands import Quota, one_line
from support.emulator import Emulator

ROOT = Path(__file__).resolve().parents[3]
LEVELS = ("debug", "info", "warning", "error", "exception", "critical", "log", "warn")

WRITERS = ("line", "warn", "_debug", "_say", "_warn_once")
"""The functions that take the name of an event."""


class Logged(NamedTuple):
    """A call that writes to a log, or that hands a line on; and the first text among its arguments."""

    place: str
    call: ast.Call
    by_logger: bool
    first: str


@cache
def calls() -> list[Logged]:
    rows = []
    for path in sorted([*ROOT.glob("quota/**/*.py"), *ROOT.glob("jobs/**/*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                of, _, name = ast.unparse(node.func).rpartition(".")
                by_logger = name in LEVELS and "log" in of.lower() and "math" not in of and path.name != "log.py"
                if by_logger or (not of and name in WRITERS):
                    texts = [x.value for x in node.args if isinstance(x, ast.Constant) and isinstance(x.value, str)]
                    place = f"{path.relative_to(ROOT)}:{node.lineno}"
                    rows.append(Logged(place, node, by_logger, next(iter(texts), "")))
    return rows


def test_every_line_of_the_log_begins_with_a_name_and_carries_values() -> None:
    by_logger = [each for each in calls() if each.by_logger]
    assert len(by_logger) > 15
    for place, call, _, first in by_logger:
        assert first in ("%s", "%s: %s"), f"{place}: `quota.common.log.line` makes the line, and quotes its values"
        assert not [keyword for keyword in call.keywords if keyword.arg == "extra"], f"{place}: no formatter shows it"


def test_every_event_is_on_the_page_about_the_log() -> None:
    page = (ROOT / "docs" / "logs.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (.*?) \| (?:debug|info|warning|error|, )+ \| ", page, flags=re.MULTILINE)
    listed = [name for cell in cells for name in re.findall(r"`([a-z_]+)`", cell)]
    assert len(listed) == len(set(listed))
    words = {each.first.partition(" ")[0] for each in calls()}
    assert {*listed, "emulator_failed"} == {word for word in words if re.fullmatch(r"[a-z]+(_[a-z]+)+", word)}


NAMES = ("plain", "two words", 'a "quote"', "a=b", "a: b", "a; b", "\\", "x\ny", "ü 東京", '"', "a=", "'", "12", "True")


@pytest.mark.parametrize("name", NAMES)
def test_a_line_is_an_object_with_the_values_that_were_given(name: str) -> None:
    """Whatever they look like: a job may be called `12`."""
    register(secret := "a-secret-of-the-log")
    given = {"job": name, "units": 12, "done": True, "message": 1, "why": f"no {secret}"}
    record = logging.makeLogRecord({"msg": "%s: %s", "args": (line("some_event", **given, none=""), f"gone: {secret}")})
    assert RedactingFilter().filter(record)
    parsed = json.loads(JsonFormatter().format(record))
    about = {
        "job": name,
        "units": 12,
        "done": True,
        "message_": 1,
        "why": "no [redacted]",
        "message": "gone: [redacted]",
    }
    assert {**parsed} == {**parsed, "event": "some_event", **about}
    assert not {"none", "traceback"} & {*parsed}


def test_the_log_as_json_is_one_object_a_line(quota: Quota, upstream: Emulator) -> None:
    quota.configure(CONFIG.format(upstream.address))
    done = quota("run", "a job", QUOTA_LOG="debug", QUOTA_LOG_FORMAT="json", KEY="a-key-for-the-log")
    rows = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert all(list(row)[:3] == ["time", "level", "logger"] for row in rows)
    assert "a-key-for-the-log" not in done.stderr
    (ended,) = [row for row in rows if row.get("event") == "run_ended"]
    assert (ended["job"], ended["outcome"], ended["units"], ended["level"]) == ("a job", "stopped", 4, "debug")
    (failed,) = [row for row in rows if row.get("event") == "step_failed"]
    assert failed["traceback"].startswith("Traceback")
    others = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert all(line.startswith(("quota: ", "a job")) for line in others), "the rest is what the command says to people"


def test_warnings_are_json_without_a_level_too(quota: Quota) -> None:
    ledger = '[ledger]\nurl = "redis://127.0.0.1:1/0"\nunavailable = { max_cost = 1, allowance = 2 }\n'
    quota.configure(CONFIG.format("http://127.0.0.1:1") + ledger)
    done = quota("charge", "videos.list", QUOTA_LOG_FORMAT="json")
    drawn = json.loads(done.stderr.splitlines()[0])
    assert (drawn["event"], drawn["units"], drawn["level"]) == ("allowance_drawn", 1, "warning")
    assert "cannot be reached" in drawn["message"]
    for name, allowed in (("QUOTA_LOG", "debug, info"), ("QUOTA_LOG_FORMAT", "text, json")):
        wrong = one_line(quota("status", **{name: "xml"}), 78)
        assert wrong.startswith(f"{name}='xml': choose from {allowed}")


CONFIG = """
[credentials.main]
api = "youtube-v3"
key = "env:KEY"
endpoint = "{}"
limits = [{{ name = "day", units = 4, window = "24h" }}]
[jobs."a job"]
fetch = "trending"
regions = ["US", "XX", "DE"]
pages = 2
"""


def test_each_step_of_a_run_is_logged_with_its_values(quota: Quota, upstream: Emulator) -> None:
    """A region done, one that fails, one that is refused in the middle."""
    quota.configure(CONFIG.format(upstream.address))
    done = quota("run", "a job", QUOTA_LOG="debug", KEY="a-key-for-the-log")
    assert upstream.usage()["requests"] == 4
    assert "a-key-for-the-log" not in done.stderr
    lines = [line.split(" ", 4)[4] for line in done.stderr.splitlines() if re.match(r"\d{4}-.* quota", line)]
    steps = [re.sub(r"(charge|took_ms|bytes|run)=\S+", r"\1=?", line) for line in lines]
    job = 'job="a job"'
    for event in (
        f"attempt_charged {job} region=US method=videos.list units=1 charge=? remaining=3",
        "attempt_answered charge=? status=200 bytes=?",
        f"page_stored {job} region=US page=1 complete=True items=50 items_of_pass=50 took_ms=? finished=False",
        f"page_stored {job} region=US page=2 complete=True items=50 items_of_pass=100 took_ms=? finished=True",
        "attempt_answered charge=? status=400 bytes=?",
        f"step_failed {job} region=XX page=1 kind=region",
        f"region_ended run=? {job} region=US outcome=done pages=2 items=100 units=2",
        f"region_ended run=? {job} region=DE outcome=partial pages=1 items=50 units=1",
    ):
        assert event in steps, steps
    (ended,) = [line for line in steps if line.startswith("run_ended")]
    assert f"run_ended run=? {job} outcome=stopped regions=3 units=4 attempts=4 status=" in ended
