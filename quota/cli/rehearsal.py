"""A command at another time: over copies of the ledger and the store, with the clock moved. Nothing real is written,
but like every reader it first gives the ledger what this machine drew, and what the ledger lost.

rehearsed    a session over the copies, for a command with `--clock`
copied       the same with no other clock
variables    other environment variables, for as long as a block lasts
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, redirect_stderr, redirect_stdout
from datetime import UTC, datetime, timedelta
from pathlib import Path
from shutil import get_terminal_size
from typing import Any
from urllib.parse import quote

import click

from quota.cli.output import fail, naming_allowances, temporary_folder
from quota.clients.instrument import TALLY
from quota.common.clock import host_clock
from quota.common.hosts import is_loopback
from quota.common.text import show
from quota.deciding.allowance import try_to_repay
from quota.deciding.history import entries, hand_in
from quota.deciding.project import Project
from quota.errors import ConfigError, QuotaError
from quota.ledger.log import EPOCH, Log
from quota.ledger.state import begin
from quota.rules.entry import START
from quota.session import Session, projects_of
from quota.settings.model import Settings
from quota.terms.limits import parse_duration

PREFIX = "rehearsal: "

MAX_AHEAD = timedelta(days=3_660)


@contextmanager
def rehearsed(session: Session, at: str, *, as_json: bool, store: bool = True) -> Iterator[Session]:
    """A session over copies of this session's ledger and of its `store`, whose clock is `at` now and goes on.

    It connects to this machine only. What is printed in the block begins with PREFIX on each line; with `as_json` only
    stderr does. A QuotaError is printed, and ends the command.
    """
    ahead_ms = _ahead_ms(at)
    with _prefixed(as_json):
        try:
            ahead = copied(session, lambda: host_clock() + ahead_ms, store=store)
            with naming_allowances(session), ahead as copy, _alone():
                yield copy
        except QuotaError as error:
            fail(str(error))
            raise click.exceptions.Exit(error.exit_status) from None


@contextmanager
def copied(session: Session, clock: Callable[[], int] | None = None, *, store: bool = True) -> Iterator[Session]:
    """A session over copies of this session's ledger and of its `store`, perhaps with another clock. It writes no
    metrics, tells nobody, and calls no sink. Raises LedgerError, and QuotaError where the store cannot be copied."""
    credentials = projects_of(session)
    for credential in credentials.values():
        project = session.project(credential.name)
        journal = project.journal
        try_to_repay(project)
        if journal is not None and journal.exists and project.is_behind(begin(project.log, project.name)):
            hand_in(project)
    with (
        temporary_folder("rehearsal") as temporary,
        variables(QUOTA_STATE_DIR=f"{temporary}/state", **{TALLY: ""}),
    ):
        settings = _of_copies(session.settings, Path(temporary) / "store.db" if store else None)
        with Session(settings, clock=clock or session.clock) as copy:
            for name in credentials:
                _copy(session, copy.ledger, name)
            yield copy


def _ahead_ms(at: str) -> int:
    """How far ahead of now the time is that the option names. Raises UsageError."""
    ahead_ms = -1
    try:
        if at.startswith("+"):
            ahead_ms = parse_duration(at[1:])
        elif (named := datetime.fromisoformat(at)).tzinfo is not None:
            ahead_ms = round((named - datetime.now(UTC)).total_seconds() * 1_000)
    except (ValueError, OverflowError):
        pass
    if not 0 <= ahead_ms <= MAX_AHEAD // timedelta(milliseconds=1):
        raise click.UsageError(
            f"--clock {show(at)}: write how far ahead, +1d or +6h, or a time to come with its zone, "
            "2026-11-29T09:00:00+01:00, within ten years"
        )
    return ahead_ms


def _of_copies(settings: Settings, store: Path | None) -> Settings:
    """The configuration over copies, which tells nobody anything; the store is copied to `store`. Raises QuotaError."""
    if store is not None:
        if os.path.isfile(settings.store.file) and os.path.getsize(settings.store.file):
            _copy_file(settings.store.file, store)
        settings = settings._replace(store=settings.store._replace(url=f"sqlite:///{store}"))
    return settings._replace(
        ledger=settings.ledger._replace(url="memory:", unavailable=None),
        jobs={name: job._replace(ping_ref=None, sink="") for name, job in settings.jobs.items()},
        textfile=None,
        notify=None,
    )


def _copy_file(path: str, copy: Path) -> None:
    """Copy an SQLite file as its last transaction left it. Raises QuotaError."""
    try:
        with (
            closing(sqlite3.connect(f"file:{quote(os.fsencode(path))}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target)
    except sqlite3.Error as error:
        raise QuotaError(f"store {path} cannot be copied: {error}; see `quota doctor`") from error


def _copy(session: Session, log: Log, project: str) -> None:
    """Copy a project's log and state, and write nothing where they come from. Raises LedgerError."""
    path = session.settings.ledger.file
    if path and not os.path.exists(path):
        return  # nothing was ever charged
    source = session.ledger
    log.label = f"copy of {source.label}"
    names = [name for name in source.names(project) if name != EPOCH]
    beginning = begin(source, project, names)
    _, fence = log.fence(project, "", "rehearsal")
    log.replace(project, fence, START, list(entries(Project(source, project), beginning.trimmed)), fence)
    log.change(project, {EPOCH: fence}, {EPOCH: "rehearsal", **{name: beginning.state[name] for name in names}})


@contextmanager
def variables(**texts: str) -> Iterator[None]:
    """Set environment variables. With QUOTA_STATE_DIR, what a command remembers stays apart from this machine's own."""
    before = {name: os.environ.get(name) for name in texts}
    os.environ.update(texts)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                del os.environ[name]
            else:
                os.environ[name] = text


# -- nobody else is called ---------------------------------------------------------------------------------------------


class _Guard:
    """Python cannot take an audit hook away again: it is added once, and `on` in a rehearsal."""

    added = False
    on = False


@contextmanager
def _alone() -> Iterator[None]:
    """Refuse connections to other machines, whatever opens them."""
    if not _Guard.added:
        _Guard.added = True
        sys.addaudithook(_refuse)
    _Guard.on = True
    try:
        yield
    finally:
        _Guard.on = False


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if not _Guard.on or event not in ("socket.connect", "socket.sendto"):
        return
    address = args[1]
    if isinstance(address, tuple) and not is_loopback(str(address[0])):
        raise ConfigError(
            f"a rehearsal does not call {address[0]}; it calls servers on this machine, as `quota emulate`"
        )


# -- what is printed ---------------------------------------------------------------------------------------------------


@contextmanager
def _prefixed(as_json: bool) -> Iterator[None]:
    columns = get_terminal_size((0, 0)).columns  # 0: nobody knows the width
    with ExitStack() as streams:
        if columns:
            streams.enter_context(variables(COLUMNS=str(max(1, columns - len(PREFIX)))))
        streams.enter_context(redirect_stderr(_Prefixed(sys.stderr)))
        if not as_json:
            streams.enter_context(redirect_stdout(_Prefixed(sys.stdout)))
        yield


class _Prefixed:
    """A stream that puts PREFIX before each line. It is no terminal: nothing is drawn over."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._begins = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> int:
        if not isinstance(text, str):  # click tries bytes
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        for line in text.splitlines(keepends=True):
            self._stream.write(f"{PREFIX if self._begins else ''}{line}")
            self._begins = line.endswith("\n")
        return len(text)
