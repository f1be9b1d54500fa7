"""The log: every line begins with a stable name and carries its values, and none a secret."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quota.common.log import line
from quota.common.log_lines import parse_line
from support.commands import Quota, one_line
from support.emulator import Emulator

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
LEVELS = ("debug", "info", "warning", "error", "exception", "critical", "log", "warn")


WRITERS = ("line", "warn", "_debug", "_say", "_warn_once")
"""The functions that take the name of an event."""


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


@cache
def all_calls() -> list[tuple[Path, ast.Call]]:
    """Every call in the code that may write to a log, with its file."""
    calls_of_files = []
    for path in sorted([*ROOT.glob("quota/**/*.py"), *ROOT.glob("jobs/**/*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and name_of(node) in (*LEVELS, *WRITERS):
                calls_of_files.append((path, node))
    return calls_of_files


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Every call that writes to a log, with its place."""
    for path, node in all_calls():
        if path.name != "log.py":  # it hands on what it is given
            of = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
            if name_of(node) in LEVELS and "log" in of.lower() and "math" not in of:
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


def events() -> set[str]:
    """The names in the code: in a line's format, or the first argument of `line` and what hands on to it."""
    found = set()
    for _, call in calls():
        texts = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        found |= {texts[0].split(" ")[0]} - {"%s", "%s:"}
    for _, node in all_calls():
        if getattr(node.func, "id", "") in WRITERS and node.args:
            name = getattr(node.args[0], "value", None)
            found |= {name} if isinstance(name, str) and re.fullmatch(r"[a-z]+(_[a-z]+)+", name) else set()
    return found


def test_every_event_is_on_the_page_about_the_log() -> None:
    page = (ROOT / "docs" / "logs.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (.*?) \| (?:debug|info|warning|error|, )+ \| ", page, flags=re.MULTILINE)
    listed = [name for cell in cells for name in re.findall(r"`([a-z_]+)`", cell)]
    assert len(listed) == len(set(listed))
    assert {*listed, "emulator_failed"} == events()


# -- as JSON -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("run_ended run=abc units=12 why=", {"event": "run_ended", "run": "abc", "units": 12, "why": ""}),
        ('page_stored job="a \\"job\\" = x" done=True', {"event": "page_stored", "job": 'a "job" = x', "done": True}),
        (
            "ledger_behind project=p ledger=redis://h:1/0 lost_units=9: charges are missing (emptied?); they count",
            {
                "event": "ledger_behind",
                "project": "p",
                "ledger": "redis://h:1/0",
                "lost_units": 9,
                "message": "charges are missing (emptied?); they count",
            },
        ),
        (
            "memory_unusable path=/a folder/x: Permission denied; what it sees is lost",
            {"event": "memory_unusable", "path": "/a folder/x", "message": "Permission denied; what it sees is lost"},
        ),
        ("some_event message=1 time=2", {"event": "some_event", "message_": 1, "time_": 2}),
        ("some_event id=-12345678901234567 n=007", {"event": "some_event", "id": "-12345678901234567", "n": 7}),
        (
            "file_cache is only supported with oauth2client<4.0.0",
            {"message": "file_cache is only supported with oauth2client<4.0.0"},
        ),
        (
            "URL being requested: GET https://h/?key=[redacted]",
            {"message": "URL being requested: GET https://h/?key=[redacted]"},
        ),
        ("", {"message": ""}),
    ],
)
def test_a_line_is_taken_apart_as_it_was_put_together(text: str, parsed: dict[str, object]) -> None:
    assert parse_line(text) == parsed


def test_a_log_line_can_be_parsed_whatever_its_values() -> None:
    """`line` and `parse_line` are each other's opposite, for all that a name of a job may hold."""
    for name in ("plain", "two words", 'a "quote"', "a=b", "a: b", "a; b", "\\", "x\ny", "ü 東京", '"', "a=", "'"):
        assert parse_line(line("some_event", job=name, region="DE")) == {
            "event": "some_event",
            "job": name,
            "region": "DE",
        }


def test_the_log_as_json_is_one_object_a_line(tmp_path: Path) -> None:
    quota = Quota(tmp_path)
    with Emulator() as upstream:
        quota.configure(CONFIG.format(upstream.address))
        done = quota("run", "a job", QUOTA_LOG="debug", QUOTA_LOG_FORMAT="json", KEY="a-key-for-the-log")
    rows = [json.loads(one) for one in done.stderr.splitlines() if one.startswith("{")]
    assert all(list(row)[:3] == ["time", "level", "logger"] for row in rows)
    assert "a-key-for-the-log" not in done.stderr
    (ended,) = [row for row in rows if row.get("event") == "run_ended"]
    assert (ended["job"], ended["outcome"], ended["units"], ended["level"]) == ("a job", "stopped", 4, "debug")
    (failed,) = [row for row in rows if row.get("event") == "step_failed"]
    assert failed["traceback"].startswith("Traceback")
    others = [one for one in done.stderr.splitlines() if not one.startswith("{")]
    assert all(one.startswith(("quota: ", "a job")) for one in others), "the rest is what the command says to people"


def test_warnings_are_json_without_a_level_too(tmp_path: Path) -> None:
    quota = Quota(tmp_path)
    quota.configure(
        CONFIG.format("http://127.0.0.1:1") + '[ledger]\nurl = "redis://127.0.0.1:1/0"\nunavailable = '
        "{ max_cost = 1, allowance = 2, machines = 1 }\n"
    )
    done = quota("charge", "videos.list", QUOTA_LOG_FORMAT="json")
    drawn = json.loads(done.stderr.splitlines()[0])
    assert (drawn["event"], drawn["units"], drawn["level"]) == ("allowance_drawn", 1, "warning")
    assert "cannot be reached" in drawn["message"]
    assert one_line(quota("status", QUOTA_LOG_FORMAT="xml"), 2).startswith(
        "QUOTA_LOG_FORMAT='xml': choose from text, json"
    )


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


def test_each_step_of_a_run_is_logged_with_its_values(lines: list[str]) -> None:
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
