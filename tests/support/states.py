"""The state of a project under a clock that a test moves."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from quota.ledger.state import State

if TYPE_CHECKING:
    from quota.ledger.log import Log

NOW_MS = 1_793_000_000_000


@dataclass
class Clocked:
    """A state, and its clock. The keys of its changes are `k0`, `k1` and so on, each with the `name`."""

    log: Log
    project: str = "p"
    name: str = ""
    now_ms: int = NOW_MS

    def __post_init__(self) -> None:
        keys = count()
        self.state = State(self.log, self.project, lambda: f"k{next(keys)}{self.name}", lambda: self.now_ms)
