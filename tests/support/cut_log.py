"""A log behind a connection that fails on request, where a test needs no server for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from quota.errors import LedgerError
from quota.ledger.log import Log, Moment

Fault = Literal["drop-request", "drop-reply"]


class CutLog:
    """A log of which writes fail: the next ones, as in `faults` (None: it passes). Then `afterwards` is called once,
    and `before_writes` before each write arrives."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.faults: list[Fault | None] = []
        self.afterwards: Callable[[], object] = lambda: None
        self.before_writes: Callable[[], object] = lambda: None
        self.writes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def change(self, project: str, expected: Any, becomes: Mapping[str, str | None], *rest: Any, **more: Any) -> Moment:
        if not becomes:
            return self._log.change(project, expected, becomes, *rest, **more)
        self.writes += 1
        self.before_writes()
        fault = self.faults.pop(0) if self.faults else None
        if fault == "drop-request":
            self._fail()
        changed = self._log.change(project, expected, becomes, *rest, **more)
        if fault == "drop-reply":
            self._fail()
        return changed

    def _fail(self) -> None:
        afterwards, self.afterwards = self.afterwards, lambda: None
        afterwards()
        raise LedgerError("the connection was cut")
