"""Charges the requests that an unchanged program sends through Python's HTTP libraries and gRPC.

    quota.instrument()      # from now on each attempt to a host that a cost book names is charged before it leaves
    quota.uninstrument()    # restores the libraries

`quota exec --auto -- python etl.py` does the first for a program and its Python children.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import TYPE_CHECKING

from quota.clients.instrument import TALLY
from quota.clients.instrument.patches import NAMED, Patches, call_before

if TYPE_CHECKING:
    from quota.clients.instrument.payers import Payers
    from quota.session import Session

# Every Python under `quota exec --auto` imports this file. It imports the rest with the first HTTP library.

LIBRARIES = (
    "aiohttp", "eventlet.green.http.client", "grpc", "http.client", "httplib2", "httpx", "httpx2", "requests",
    "urllib3", "urllib3_future",
)  # fmt: skip


class _Instrumented:
    """The instrumentation of this process, with the configuration, the credential and the job of the first call."""

    def __init__(self, session: Session, payers: Payers, credential: str | None, job: str) -> None:
        from quota.clients.instrument.seams import seams_of

        self.session = session
        path = session.settings.path
        self.given = {"config": path and path.absolute(), "credential": credential, "job": job}
        self.patches = Patches(seams_of(payers))
        self._payers = payers

    def end(self) -> None:
        self.patches.take_off()
        self._payers.close()
        self.session.close()


_lock = RLock()
_now: _Instrumented | None = None


def instrument(config: str | Path | None = None, *, credential: str | None = None, job: str | None = None) -> None:
    """From now on charge every attempt of this process to a host that the cost book of a credential names.

    `config` is the configuration, as in `quota.open()`. If several credentials could pay for a request, `credential`
    pays, else the credential whose book knows most of the path. `job` names who spends where no `labels` do; the
    default is $QUOTA_JOB. A library that is imported later is patched then. A second call changes nothing; a warning
    names its arguments that differ.

    Raises ConfigError for an unusable configuration, or one whose cost books name no host.
    """
    import http.client  # noqa: F401  # first: `call_before` may wait for it, and the imports below import it, too

    from quota.common.log import warn
    from quota.session import open_session
    from quota.terms.arguments import label_process

    global _now
    _close_at_exit()
    with _lock:
        if _now is None:
            session = open_session(config)
            payers = payers_of(session, credential)
            job = os.environ.get("QUOTA_JOB", "") if job is None else job
            label_process(job)
            begun = _Instrumented(session, payers, credential, job)
            try:
                begun.patches.put_on()
                _now = begun
            except BaseException:  # interrupted: half of the patches would charge half of the requests
                begun.end()
                raise
        else:
            asked = {"config": config and Path(config).absolute(), "credential": credential, "job": job}
            if names := ", ".join(name for name, value in asked.items() if value not in (None, _now.given[name])):
                why = f"{names}: this process is instrumented with another one; call `quota.uninstrument()` before"
                warn("instrument_ignored", why)


def uninstrument() -> None:
    """Stop charging, and restore the libraries. A second call changes nothing."""
    global _now
    with _lock:
        ended, _now = _now, None
        if ended is not None:
            from quota.terms.arguments import label_process

            ended.end()
            label_process("")


@cache
def _close_at_exit() -> None:
    """Close the session when the process ends, after every exit handler that is registered later."""
    atexit.register(lambda: None if _now is None else _now.session.close())


def payers_of(session: Session, named: str | None) -> Payers:
    """The credentials that can pay. Raises ConfigError if there are none, and UsageError if the `named` credential
    cannot."""
    from quota.clients.instrument.payers import Payer, Payers
    from quota.clients.upstream import upstream_of
    from quota.common.text import listed
    from quota.errors import ConfigError, UsageError

    credentials = session.settings.credentials
    able = [each for each in credentials.values() if each.hosts and upstream_of(each.book).knows_methods]
    if named is not None and session.credential(named) not in able:
        raise UsageError(
            f"the cost book of credential {named!r} names no hosts or no routes; see docs/own-cost-book.md"
        )
    if not able:
        raise ConfigError(
            f"{session.settings.source}: no cost book of {listed(credentials)} names hosts and routes, so nothing is "
            "charged; see docs/own-cost-book.md"
        )
    return Payers([Payer(credential, partial(session.budget, credential.name)) for credential in able], named)


# -- a program under `quota exec --auto` -------------------------------------------------------------------------------


def instrument_by_environment(given: Mapping[str, str]) -> None:
    """Instrument a Python that `quota exec --auto` started, by the variables `given` in its environment, when it
    imports its first HTTP library. If that fails, end the Python: its requests would not be charged."""

    def begin() -> None:
        for name, text in given.items():  # the program may have changed its environment
            os.environ.setdefault(name, text)
        try:
            instrument(credential=os.environ.get("QUOTA_AUTO_CREDENTIAL") or None)
        except Exception as error:
            line = f"quota: {sys.executable} cannot be instrumented, so it does not run: {error}\n"
            os.write(2, line.encode("utf-8", "replace"))
            os._exit(getattr(error, "exit_status", 78))

    _close_at_exit()
    if given.get(TALLY):
        with suppress(OSError):  # says that a Python ran
            os.close(os.open(os.path.join(given[TALLY], "python"), os.O_CREAT | os.O_CLOEXEC, 0o600))
    if any(name in sys.modules for name in (*LIBRARIES, *NAMED)):  # a .pth file came first
        begin()
    else:
        call_before((*LIBRARIES, *NAMED), begin)
    before = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        from quota.errors import QuotaError, Refused, behind, decision_status

        for cause in behind(error) if isinstance(error, Exception) else ():  # Ctrl-C is no refusal
            if isinstance(cause, QuotaError):
                raise SystemExit(decision_status(cause.decision) if isinstance(cause, Refused) else cause.exit_status)

    sys.excepthook = excepthook


def name_program(command: Sequence[object]) -> None:
    """Warn once of each program that such a Python starts and whose requests nobody charges."""
    from quota.clients.instrument.processes import unseen_program, warn_of

    program = unseen_program(command)
    if program is not None:
        warn_of(program)
