"""The log: every line begins with a stable name and carries its values, and none a secret."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quota.jobs.emulator import Emulator
from support.commands import Quota

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
LEVELS = ("debug", "info", "warning", "error", "exception", "critical", "log", "warn")


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Every call that writes to a log, with its place."""
    for path in sorted([*ROOT.glob("quota/**/*.py"), *ROOT.glob("jobs/**/*.py")]):
        if path.name == "log.py":
            continue  # it hands on what it is given
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            named = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            of = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
            if (named in LEVELS and "log" in of.lower() and "math" not in of) or named == "warn":
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_every_line_of_the_log_begins_with_a_name_and_carries_values() -> None:
    found = dict(calls())
    assert len(found) > 15
    for place, call in found.items():
        texts = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        # "%s" is for what `quota.common.log.line` made, which takes a name and values.
        assert texts, place
        assert texts[0] in ("%s", "%s: %s") or re.match(r"[a-z]+(_[a-z]+)+( [a-z_]+=%[sdr])+(: |$|;)", texts[0]), place
        assert not [keyword for keyword in call.keywords if keyword.arg == "extra"], f"{place}: no formatter shows it"


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


@pytest.fixture
def lines(tmp_path: Path) -> list[str]:
    """What a run says with QUOTA_LOG=debug: a region done, one that fails, one that is refused in the middle."""
    quota = Quota(tmp_path)
    with Emulator() as upstream:
        quota.configure(CONFIG.format(upstream.address))
        done = quota("run", "a job", QUOTA_LOG="debug", KEY="a-key-for-the-log")
        upstream.fault("status", status=503)
        assert upstream.usage()["requests"] == 4
    assert "a-key-for-the-log" not in done.stderr
    return [line.split(" ", 4)[4] for line in done.stderr.splitlines() if re.match(r"\d{4}-.* quota", line)]


def test_each_step_of_a_run_is_told_with_its_values(lines: list[str]) -> None:
    told = [re.sub(r"(charge|took_ms|bytes|run)=\S+", r"\1=?", line) for line in lines]
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
        assert event in told, told
    (ended,) = [line for line in told if line.startswith("run_ended")]
    assert f"run_ended run=? {job} outcome=stopped regions=3 units=4 attempts=4 status=" in ended
