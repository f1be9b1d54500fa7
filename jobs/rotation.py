"""In which order a run covers its regions. Pure: the store goes by it, and so does the simulation of a schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable


class Standing(Protocol):
    """What the order is made from: where one region stands. `quota.jobs.store.store.Place` is one."""

    @property
    def pending(self) -> bool: ...

    @property
    def cursor(self) -> Any: ...

    @property
    def completed_at_ms(self) -> int | None: ...

    @property
    def failed_at_ms(self) -> int | None: ...


S = TypeVar("S", bound=Standing)


def by_rotation(checkpoints: Iterable[S]) -> list[S]:
    """The pending places, in the order in which a run covers them.

    Regions with a cursor come first (their pass is older than any other), then those whose last pass ended longest
    ago, then the order given.
    """
    return sorted(
        (checkpoint for checkpoint in checkpoints if checkpoint.pending),
        key=lambda p: (p.cursor is None, max(p.completed_at_ms or 0, p.failed_at_ms or 0)),
    )
