"""Charges what a program sends through requests, urllib3, httpx, aiohttp and httplib2, without a change to it.

    quota.instrument()      # from now on each attempt to a host that a cost book names is charged before it leaves
    quota.uninstrument()    # as before

`quota exec --auto -- python etl.py` does the first for a program and its Python children.
"""

from __future__ import annotations

import atexit
from threading import RLock
from typing import TYPE_CHECKING

from quota.clients.instrument import aiohttp, httplib2, httpx, requests, urllib3
from quota.clients.instrument.patches import Patches
from quota.clients.instrument.payers import Payer, Payers
from quota.clients.upstream import upstream_of
from quota.common.text import listed
from quota.errors import ConfigError, UsageError
from quota.session import Session, open_session
from quota.terms.attribution import label_process

if TYPE_CHECKING:
    from pathlib import Path

    from quota.clients.metering import Tally


class _Instrumented:
    """This process, while it is instrumented."""

    def __init__(self, session: Session, payers: Payers) -> None:
        self._session = session
        self._payers = payers
        self._patches = Patches(
            [
                *urllib3.seams(payers),
                *requests.seams(),
                *httpx.seams(payers),
                *aiohttp.seams(payers),
                *httplib2.seams(payers),
            ]
        )

    def begin(self) -> None:
        self._patches.put_on()
        atexit.register(self._session.close)

    def end(self) -> None:
        self._patches.take_off()
        self._payers.forget()
        atexit.unregister(self._session.close)
        self._session.close()


_lock = RLock()
_now: _Instrumented | None = None


def instrument(
    config: str | Path | None = None,
    *,
    credential: str | None = None,
    job: str | None = None,
    tally: Tally | None = None,
) -> None:
    """Charge every attempt of this process, from now on, to a host that the cost book of a credential names.

    `config` is the configuration, as in `quota.open()`. Where several credentials could pay for a request it is
    `credential`, else the one whose book knows most of its path. `job` says who spends where no `labels` do. Libraries
    that are imported later are patched then. Called again it changes nothing.

    Raises ConfigError for a configuration that cannot be used, or that names no host.
    """
    global _now
    with _lock:
        if _now is not None:
            return
        session = open_session(config)
        payers = _payers(session, credential, tally)
        label_process(job or "")
        _now = _Instrumented(session, payers)
        _now.begin()


def uninstrument() -> None:
    """Charge nothing more by itself, and leave the libraries as they were. It may be called twice."""
    global _now
    with _lock:
        ended, _now = _now, None
        if ended is not None:
            ended.end()
            label_process("")


def _payers(session: Session, named: str | None, tally: Tally | None) -> Payers:
    credentials = session.settings.credentials
    if named is not None:
        session.credential(named)  # raises UsageError for one that is not there
    able = [one for one in credentials.values() if one.hosts and upstream_of(one.book).knows_methods]
    if not able:
        raise ConfigError(
            f"{session.settings.source}: no cost book of {listed(credentials)} names hosts and routes, so nothing is "
            "charged; see docs/own-cost-book.md"
        )
    if named is not None and named not in [one.name for one in able]:
        raise UsageError(
            f"the cost book of credential {named!r} names no hosts or no routes; see docs/own-cost-book.md"
        )

    def payer(name: str) -> Payer:
        one = credentials[name]
        return Payer(
            name,
            one.project,
            one.book,
            one.hosts,
            lambda: session.budget(name),
            answers_429=one.on_refusal == "429",
            tally=tally,
        )

    return Payers([payer(one.name) for one in able], named)
