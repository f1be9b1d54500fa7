"""/healthz of the API: whether the store is readable, the ledger answers, and the data is fresh."""

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

Passes = tuple[list[Pass], dict[str, int]]
"""The last passes of all jobs by region, and the first run of each job."""


class Read(Protocol):
    def __call__(self, question: Callable[[Reader], Passes]) -> Awaitable[Passes]: ...


KEPT_S = 2.0
"""How long an answer is kept. Anybody may call /healthz, and each examination asks the ledger."""


class Health:
    """The health of store and ledger, at most KEPT_S old."""

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
            passes, first_runs = await self._read(lambda reader: (reader.passes(), reader.first_runs()))
        except Exception as error:  # the store is away: `read` has logged why
            return [Check("store", "fail", str(error))]
        return [Check("store"), self._freshness(passes, first_runs)]

    def _freshness(self, passes: list[Pass], first_runs: dict[str, int]) -> Check:
        """The age of the data of the configured jobs. Warns if a region is older than the configured `stale`."""
        now_ms = host_clock()
        jobs = self._session.settings.jobs
        ended = {(of_region.job, of_region.region): of_region.completed_ms for of_region in passes}
        regions = [(job.name, region) for job in jobs.values() for region in job.regions or ("",)]
        due = [ended.get(region) or first_runs.get(region[0]) for region in regions]
        completed = [ms for region in regions if (ms := ended.get(region)) is not None]
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
        if any(is_stale(due_ms, now_ms, stale_ms) for due_ms in due):
            return Check("freshness", "warn", "a region is stale", members)
        return Check("freshness", members=members)

    def _ledger(self) -> Check:
        """Whether the ledger answers. The API serves the store without it."""
        answers = ledger_answers(self._session)
        if answers is None:
            return Check("ledger", "warn", "nothing was charged yet")
        return (
            Check("ledger") if answers else Check("ledger", "warn", "the ledger does not answer; the store is served")
        )
