"""What a limit counted, by the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quota.ledger.contract import entries_between
from quota.ledger.history import hours_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quota.ledger.contract import Ledger
    from quota.ledger.entry import Id
    from quota.ledger.history import HourOfLog


def added_up(ledger: Ledger, project: str, after: Id, through: Id, *, calls: bool) -> Iterator[HourOfLog]:
    """What was charged there; charge by charge where `calls` are counted, because one that was given back is none."""
    if calls:
        return hours_of(entries_between(ledger, project, after, through))
    return ledger.add_up(project, after, through)
