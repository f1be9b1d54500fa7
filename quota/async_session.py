"""One open configuration for event loops. `quota.open_async()` makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from quota.async_budget import AsyncBudget, Awaiter, running_loop
from quota.common.fork import OfOneProcess
from quota.session import Session, open_session
from quota.settings.model import Settings
from quota.terms.arguments import instance


class AsyncSession(OfOneProcess):
    """An open configuration, like `quota.Session`, with awaited budgets. Close it with `aclose`, or use it in an `async
    with` block. Opening it contacts nothing.

    After `aclose`, its budgets raise UsageError. One session serves several loops and threads, and works in forked
    children.
    """

    def __init__(self, session: Session) -> None:
        self._session = instance(session, Session, "session", "open one with quota.open_async(path)")
        self._awaiter: Awaiter | None = None
        self._budgets: dict[str, AsyncBudget] = {}

    def __repr__(self) -> str:
        return repr(self._session).replace("Session", "AsyncSession", 1)

    @property
    def settings(self) -> Settings:
        return self._session.settings

    @property
    def run(self) -> str:
        """The 8-character id of this process's run. Every key of its charges begins with it."""
        return self._session.run

    def budget(self, credential: str | None = None) -> AsyncBudget:
        """The budget of a credential (None: the only credential). Returns the same object each time."""
        with self._session._lock:  # if several threads call, one makes it
            blocking = self._session.budget(credential)
            budget = self._budgets.get(blocking.credential)
            if budget is None:
                if self._awaiter is None:
                    self._awaiter = Awaiter(self._session.ledger)
                budget = self._budgets[blocking.credential] = AsyncBudget(blocking, self._awaiter)
            return budget

    async def aclose(self) -> None:
        """Close the ledger and the connections, for good. A second call changes nothing."""
        loop, thread = running_loop(), ThreadPoolExecutor(1, thread_name_prefix="quota-close")
        try:
            await loop.run_in_executor(thread, self._session.close)
        finally:
            thread.shutdown(wait=False)
            if self._awaiter is not None:
                self._awaiter.close()

    async def __aenter__(self) -> AsyncSession:
        self._session.__enter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


def open_async(
    config: str | Path | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    clock: Callable[[], int] | None = None,
) -> AsyncSession:
    """Open a configuration for event loops: the file `config`, else the configuration that the command line would find.

    `settings` has the tables of a configuration instead; then neither a file nor the environment is read. `clock` (ms
    since 1970) replaces the clocks of the host and the ledger, for tests and simulation. Raises ConfigError for an
    unusable configuration.
    """
    return AsyncSession(open_session(config, settings=settings, clock=clock))
