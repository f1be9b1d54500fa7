"""The order in which a run covers its regions. Pure: the store uses it, and so does the simulation of a schedule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeVar


class RegionState(Protocol):
    """Where one region stands, as far as the order depends on it. `quota.jobs.store.checkpoints.Checkpoint` is one."""

    @property
    def pending(self) -> bool: ...

    @property
    def cursor(self) -> Any: ...

    @property
    def completed_at_ms(self) -> int | None: ...

    @property
    def failed_at_ms(self) -> int | None: ...


S = TypeVar("S", bound=RegionState)


def by_rotation(checkpoints: Iterable[S]) -> list[S]:
    """The pending checkpoints, in the order in which a run covers their regions.

    Regions with a cursor come first, because their pass is older than any other. Then come those whose last pass ended
    longest ago. Otherwise the given order stays.
    """
    return sorted(
        (checkpoint for checkpoint in checkpoints if checkpoint.pending),
        key=lambda one: (one.cursor is None, max(one.completed_at_ms or 0, one.failed_at_ms or 0)),
    )
