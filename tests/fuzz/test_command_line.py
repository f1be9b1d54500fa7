"""Random arguments: an exit status that is documented, at most one line on stderr, and no traceback."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

import quota
from fuzz.generate import ODD_TEXT, text
from fuzz.house import STATUSES, run_quota
from fuzz.inputs import PARTS, Input, check_line, every
from quota.cli.program import cli
from quota.jobs.job import Page
from quota.jobs.store.store import Store
from quota.terms.limits import DAY_MS

ARGUMENTS = {
    "charge": ("videos.list",), "peek": ("search.list",), "refund": ("1795233255077-0",), "exec": ("videos.list",),
    "settle": ("1795233255077-0", "5"), "status": (), "spend": (), "reopen": ("units",), "costs": ("videos.list",),
    "init": (), "check": (), "prove": (), "run": ("trending",), "plan": (), "search": ("live",),
}  # fmt: skip
PARAMS = {name: cli.get_command(click.Context(cli), name).params for name in ARGUMENTS}  # type: ignore[union-attr]
OPTIONS = {name: [o for param in params for o in param.opts if o[0] == "-"] for name, params in PARAMS.items()}
FLAGS = {o for params in PARAMS.values() for param in params if getattr(param, "is_flag", False) for o in param.opts}
VALUES = {
    "--config": ("quota.toml", "quota.toml", "missing.toml", "\udcff", "/"),
    "--units": ("1", "0", "-1", "1000000001", "9" * 30),
    "--credential": ("main", "maim", ""),
    "--job": ("trending", "\udcff", "x" * 65, "\x1b[31m"),
    "--region": ("US", "DE", "\udcff", ""),
    "--by": ("job,region", "hour", "method,method", ",", "\udcff"),
    "--since": ("1ms", "999999999999d", "7d", "0s", "-1d"),
    "--because": ("x", "\udcff", "\x1b[31m"),
    "--format": ("text", "json", "csv", "xml", ""),
    "--days": ("1", "2", "0", "-1", "93", "9" * 30),
    "--from": (
        "now",
        "empty",
        "2026-11-01",
        "9999-12-31",
        "9999-12-25",
        "0001-01-01",
        "1969-12-31",
        "2026-13-01",
        "20261101",
    ),
    "--limit": ("1", "0", "1000", "1001", "9" * 30),
}
WORDS = (
    "videos.list", "youtube.search.list", "search", "trending", "other", "main", "US", "DE", "units", "quota.toml",
    "1795233255077-0", "allowance-1", "day,job", "method", "hour", "7d", "2026-11-01", "9999-12-31", "0001-01-01",
    "youtube-v3", "gmail-v1", "1", "20", "-5", "2147483648", "99999999999999999999", "9" * 5_000, "1e3", "0x5",
    "\udcff", "live", "\udcff.toml", "missing.toml", ".", "/", "",
)  # fmt: skip
CONFIG = """
[ledger]
url = "sqlite:///ledger.db"
unavailable = { max_cost = 1, allowance = 50, machines = 1 }
[credentials.main]
api = "youtube-v3"
[jobs.trending]
fetch = "trending"
regions = ["US", "DE"]
schedule = "*/30 * * * *"
leave = 500
[jobs.other]
fetch = "no_such_module_at_all:fetch"
[store]
url = "sqlite:///videos.db"
"""


@pytest.fixture
def _here(tmp_path: Path, state_dir: Path) -> None:
    """A configuration in the working folder, whose job can reach nothing: its limits are spent."""
    closed = CONFIG.replace(
        "[jobs.trending]", "limits = [{ name = 'day', units = 120, window = '24h' }]\n[jobs.trending]"
    )
    (tmp_path / "quota.toml").write_text(closed.replace("leave = 500", "leave = 120"))
    with Store(str(tmp_path / "videos.db"), retention_ms=DAY_MS) as store:
        (checkpoint,) = store.start_round("trending", ["US"])
        store.save_page(
            checkpoint, Page([{"id": "v", "snippet": {"title": "live"}}], ranked=True), started_at_ms=1, finished=True
        )
    with quota.open(tmp_path / "quota.toml") as session:
        assert session.budget().charge("videos.list").admitted


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.usefixtures("_here")
def test_any_arguments_end_in_a_documented_status(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", logger="quota")  # what is logged is no part of what is said

    def attempt(r: Input) -> None:
        args = r.data = _arguments(r)
        status, out, err = run_quota(monkeypatch, args)
        assert status in STATUSES or (args[0] == "exec" and status in (126, 127)), (status, err)
        _check_streams(status, out, err)
        _check_remedies(args, err)

    every("command-line", part, attempt)


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (["search", "live", "--region", "\udcff"], 0, "nothing found; known: DE, US\n"),
        (["init", "\udcff.toml"], 0, "wrote \\udcff.toml; follow its comments, then run: quota check"),
        (["reopen", "\udcff", "--because", "x"], 1, "quota: bucket '\\udcff' of project 'main' is not closed;"),
        (["check", "\x1b[31m"], 2, "quota: Got unexpected extra argument (\\x1b[31m); see `quota check --help`\n"),
    ],
)
@pytest.mark.usefixtures("_here")
def test_an_argument_that_is_no_text_is_printed_escaped(
    args: list[str], status: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a stream that takes text only, half of a surrogate pair would end the command after its work was done."""
    ended, out, err = run_quota(monkeypatch, args)
    assert ended == status
    assert (out + err).startswith(message)


def _check_streams(status: int, out: str, err: str) -> None:
    assert "Traceback" not in out + err
    if status == 0 or (status == 78 and "error: " in err):  # findings of `check`, a line each
        lines = err.splitlines()
    else:
        lines = [err.removesuffix("\n")] if err else []
        assert lines or out, "nothing is said"
    for line in lines:
        check_line(line)


def _check_remedies(args: list[str], err: str) -> None:
    """The options that a message names are the command's own, unless the user wrote them."""
    command = cli.get_command(click.Context(cli), args[0])
    options = {name for param in command.params for name in param.opts} if command is not None else set()
    written = " ".join(args)
    for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", err):
        assert option in options | {"--help"} or option in written, (option, err)


def _arguments(r: Input) -> list[str]:
    command = r.choice(list(ARGUMENTS))
    args = list(ARGUMENTS[command])
    for n in range(len(args)):
        if r.random() < 0.3:
            args[n] = _word(r)
    for _ in range(r.randrange(4)):
        option = r.choice(OPTIONS[command])
        kind = r.random()
        if kind < 0.05:
            option = r.choice(("--help", "-h", "--", "-", "--" + _word(r), "-" + _word(r), _word(r), "--units=x"))
        elif kind < 0.6 and option in VALUES:
            option += f"={r.choice(VALUES[option])}"
        elif option not in FLAGS:
            option += f"={_word(r)}"
        args.insert(r.randrange(len(args) + 1), option)
    if command == "exec":
        args += ["--", "/no/such/folder/" + _word(r), _word(r)]
    if command == "init":
        # It writes, so only where it may.
        args = [arg for arg in args if arg.startswith("--f")] + ["new/" + _word(r).replace("/", "_")]
    if r.random() < 0.02:
        command, args = "x" + _word(r), args
    # No argument of a process has a NUL in it.
    args = [arg.replace("\0", "") for arg in (command, *args)]
    return [arg for arg in args if not arg.startswith("--watch")]


def _word(r: Input) -> str:
    return r.choice(WORDS) if r.random() < 0.6 else r.choice(ODD_TEXT) if r.random() < 0.5 else text(r)
