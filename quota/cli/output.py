"""Printing, failing and logging: one line on stderr for every way to fail."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from quota.common.text import printable, show
from quota.errors import LedgerError, Refused

if TYPE_CHECKING:
    from quota.decision import Decision

REFUSED_STATUS = Refused.exit_status
MAX_LINE = 1_000
LOG_LEVELS = ("debug", "info", "warning", "error")


def decision_status(decision: Decision) -> int:
    """The exit status that a decision means."""
    if decision.admitted:
        return 0
    return LedgerError.exit_status if decision.reason == "ledger-unavailable" else REFUSED_STATUS


# -- printing and failing ----------------------------------------------------------------------------------------------


def print_json(data: object, indent: int | None = 2) -> None:
    """One JSON document on stdout; without `indent` on one line. It is UTF-8, as JSON must be: where stdout has another
    encoding it is ASCII, with escapes. What would move a terminal's cursor is escaped everywhere.
    """
    import json

    plain = (getattr(sys.stdout, "encoding", None) or "").lower() not in ("utf-8", "utf8")
    text = json.dumps(data, indent=indent, ensure_ascii=plain)
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
    click.echo(text)


def print_rich(renderable: Any) -> None:
    """A table or text for people; colour only on a terminal, 80 columns where there is none."""
    from rich.console import Console

    Console(highlight=False, soft_wrap=False).print(renderable)


def say(line: str, *, err: bool = False) -> None:
    """One line for people, whatever is quoted in it."""
    click.echo(printable(line), err=err)


def fail(message: str) -> None:
    """One line on stderr, without secrets and control characters; of what is very long, the beginning and the end."""
    from quota.common.redact import redact

    line = printable(" ".join(redact(message).splitlines()))
    if len(line) > MAX_LINE:
        line = f"{line[: MAX_LINE - 200]}...{line[-197:]}"
    click.echo(f"quota: {line}", err=True)


def log_to_stderr() -> None:
    """Warnings on stderr as `quota: ...`; with QUOTA_LOG=info or debug the whole log. Secrets are redacted.

    For commands that load `logging` anyway: a refused `quota charge` does not.
    """
    import logging

    from quota.common.redact import LineFormatter, install

    level = os.environ.get("QUOTA_LOG", "").lower()
    if level not in ("", *LOG_LEVELS):
        raise click.UsageError(f"QUOTA_LOG={show(level)}: choose from {', '.join(LOG_LEVELS)}")
    handler = logging.StreamHandler()
    form = "%(asctime)s %(levelname)s %(name)s %(message)s" if level else "quota: %(message)s"
    handler.setFormatter(LineFormatter(form))
    logging.basicConfig(level=(level or "warning").upper(), handlers=[handler])
    install()
    quiet_libraries()


def quiet_libraries() -> None:
    """Let no library warn of upstream's error answers: the command says itself what they mean."""
    import logging

    if not os.environ.get("QUOTA_LOG"):
        logging.getLogger("googleapiclient.http").setLevel(logging.ERROR)


class _Output(io.FileIO):
    """Standard output or error. What cannot be written there is dropped and stops no work; `lost` says why."""

    lost: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
            if written is None:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        except OSError as error:
            self.lost = error
            return len(data)
        return written


def guard_streams() -> None:
    """Let nothing that is printed or logged raise, whatever standard output and error are."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Closed: the next file of ours would get this number, and what others print. This one takes no byte.
            os.open(os.devnull, os.O_RDONLY)
    sys.stdout, sys.stderr = _guarded(1, sys.stdout), _guarded(2, sys.stderr)


def _guarded(number: int, before: Any) -> io.TextIOWrapper:
    """A stream on this file descriptor like the one `before`, which is None where that was closed."""
    file = io.BufferedWriter(_Output(number, "w", closefd=False))
    encoding, errors = getattr(before, "encoding", None), getattr(before, "errors", None)
    return io.TextIOWrapper(file, encoding, errors, line_buffering=getattr(before, "line_buffering", False))


def output_lost() -> OSError | None:
    """Why something that was printed did not get through to stdout; None as long as everything did."""
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    lost: OSError | None = getattr(raw, "lost", None)
    return lost


def unprinted(result: str = "") -> bool:
    """Whether stdout could not take what was printed. One line on stderr says so, with the `result` that it hid.

    A reader that went away (`quota status | head -1`) has all it wanted.
    """
    lost = output_lost()
    if lost is None or lost.errno == errno.EPIPE:
        return False
    fail(f"stdout cannot be written: {lost.strerror}" + (f"; {result}" if result else ""))
    sys.stdout = io.StringIO()  # said once
    return True
