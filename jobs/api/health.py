"""/healthz of the API: whether the store can be read, the ledger answers, and what is served is fresh."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from quota.common.clock import host_clock, rfc3339
from quota.jobs.store.checkpoints import is_stale
from quota.jobs.store.reader import Pass, Reader
from quota.session import Session, ledger_answers
from quota.web.documents import Check, health


class Read(Protocol):
    def __call__(self, question: Callable[[Reader], list[Pass]]) -> Awaitable[list[Pass]]: ...


KEPT_S = 2.0
"""Anybody may ask, and each question asks the ledger: it is asked this often at most."""


class Health:
    """How the store and the ledger are, at most KEPT_S old."""

    def __init__(self, session: Session, read: Read) -> None:
        self._session = session
        self._read = read
        self._lock = asyncio.Lock()
        self._answer: tuple[int, dict[str, object]] = (503, {})
        self._examined_s = -KEPT_S

    async def examine(self) -> tuple[int, dict[str, object]]:
        async with self._lock:
            if time.monotonic() - self._examined_s >= KEPT_S:
                self._answer = health([*await self._store(), await asyncio.to_thread(self._ledger)])
                self._examined_s = time.monotonic()
        return self._answer

    async def _store(self) -> list[Check]:
        try:
            passes = await self._read(lambda reader: reader.passes())
        except Exception as error:  # the store is away: `read` has logged why
            return [Check("store", "fail", str(error))]
        return [Check("store"), self._freshness(passes)]

    def _freshness(self, passes: list[Pass]) -> Check:
        """How old what is served is, of the jobs in the configuration. It warns where that says what is stale."""
        now_ms = host_clock()
        jobs = self._session.settings.jobs
        completed = [
            of_region.completed_ms
            for of_region in passes
            if of_region.completed_ms is not None
            and of_region.job in jobs
            and of_region.region in (jobs[of_region.job].regions or ("",))
        ]
        if not completed:
            return Check("freshness", "warn", "no pass of a region is complete yet")
        notify = self._session.settings.notify
        stale_ms = None if notify is None else notify.stale_ms
        oldest_ms, newest_ms = min(completed), max(completed)
        members: dict[str, Any] = {
            "newest": rfc3339(newest_ms),
            "oldest": rfc3339(oldest_ms),
            "age_s": max(0, now_ms - newest_ms) // 1_000,
            "oldest_age_s": max(0, now_ms - oldest_ms) // 1_000,
        }
        if stale_ms is not None and any(is_stale(completed_ms, now_ms, stale_ms) for completed_ms in completed):
            return Check("freshness", "warn", "a region is stale", members)
        return Check("freshness", members=members)

    def _ledger(self) -> Check:
        """Only whether it answers. What is stored is served without it."""
        answers = ledger_answers(self._session)
        if answers is None:
            return Check("ledger", "warn", "nothing was charged yet")
        return (
            Check("ledger")
            if answers
            else Check("ledger", "warn", "the ledger does not answer; what is stored is served")
        )
