"""After a clock that was wrong: dates from now on what is dated ahead of the ledger's clock.

    ahead    what a repair would change
    repair   does it, while others wait for a moment

The charges keep their keys and their order, so what machines have seen of them is not taken for other charges.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

from quota.common.clock import rfc3339
from quota.deciding.fence import Fence, given_back
from quota.decision import SET_THE_CLOCK
from quota.errors import RepairRefused
from quota.ledger.log import MAX_READ, Log
from quota.rules.entry import END, START, Entry, Id, just_before
from quota.rules.facts import FACTS, Facts
from quota.rules.union import union

SAME_CLOCK_MS = 5_000
"""Clocks that differ by more are not both right."""


class Ahead(NamedTuple):
    """What a log has that is dated ahead of its clock, `now_ms`: `charges` of `units` in all, and exhaustions. The
    newest
    entry of the whole log is of `newest_ms` (0: there is none)."""

    now_ms: int
    newest_ms: int
    charges: int
    units: int
    exhaustions: int

    @property
    def found(self) -> bool:
        return self.newest_ms > self.now_ms or self.exhaustions > 0


def ahead(log: Log, project: str) -> Ahead:
    """What a repair would change now. Raises LedgerError."""
    beginning = log.begin(project, (), (FACTS,))
    now_ms, newest_ms = beginning.clock_ms, beginning.tip[0]
    charges = [entry for entry in _entries(log, project, (now_ms, END[1])) if entry.kind == "charge"]
    exhaustions = Facts.read(beginning.state.get(FACTS, "")).exhaustions
    return Ahead(
        now_ms,
        newest_ms,
        len(charges),
        sum(charge.units for charge in charges),
        sum(exhaustion.since_ms > now_ms for exhaustion in exhaustions),
    )


def repair(log: Log, project: str, host_ms: int) -> None:
    """Date what is dated ahead by the ledger's clock, and take exhaustions of the future away.

    Raises RepairRefused, and changes nothing, where the machine's clock, `host_ms`, and the ledger's differ by more
    than
    SAME_CLOCK_MS. Raises LedgerError where the ledger does not answer; run again, it goes on.
    """
    check_clocks(log.now_ms(), host_ms)
    if not ahead(log, project).found:
        return
    fence = Fence(log, project, os.urandom(8).hex())
    with given_back(fence):
        fence.take()
        with fence.renewed():
            beginning = log.begin(project, (), (FACTS,))
            now_ms = beginning.clock_ms
            entries = union(_entries(log, project, START), (), now_ms, beginning.trimmed, ahead_ms=0)
            trimmed = min(beginning.trimmed, just_before(now_ms))
            facts = Facts.read(beginning.state.get(FACTS, ""))
            happened = tuple(exhaustion for exhaustion in facts.exhaustions if exhaustion.since_ms <= now_ms)
            if happened != facts.exhaustions:
                fence.change({FACTS: replace(facts, exhaustions=happened).text()})
        fence.replace(entries, trimmed)
        fence.open()


def check_clocks(ledger_ms: int, host_ms: int) -> None:
    """Raises RepairRefused where the two differ by more than SAME_CLOCK_MS."""
    if abs(ledger_ms - host_ms) > SAME_CLOCK_MS:
        raise RepairRefused(
            f"this machine's clock reads {rfc3339(host_ms)}, the ledger's {rfc3339(ledger_ms)}; {SET_THE_CLOCK}"
        )


def _entries(log: Log, project: str, after: Id) -> list[Entry]:
    entries: list[Entry] = []
    while piece := log.read(project, after, END, MAX_READ):
        entries += piece
        after = piece[-1].id
    return entries
