"""Corrects entries that a wrong clock dated ahead of the ledger's clock: it dates them now.

    ahead    counts what a repair would change
    repair   does it, while others wait for a moment

The charges keep their keys and their order, so no machine takes them for other charges.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from quota.common.text import number_in
from quota.deciding.fence import Fence, given_back
from quota.decision import SET_THE_CLOCK, both_clocks
from quota.errors import QuotaError
from quota.ledger.log import Log, all_entries, entries_held
from quota.ledger.state import LONGEST, begin, longest_of
from quota.rules.claims import CLAIM, Record
from quota.rules.entry import END, Entry, just_before
from quota.rules.facts import FACTS, Facts
from quota.rules.spent import SUMS, Sums, spent
from quota.rules.union import union
from quota.terms.arguments import MAX_NUMBER
from quota.terms.limits import SLACK_MS

SAME_CLOCK_MS = 5_000
"""If two clocks differ by more, one of them is wrong."""

CLAIMS_AT_ONCE = 100
"""The most jobs whose claims are read at once."""


class Ahead(NamedTuple):
    """What a project has that is dated ahead of its ledger's clock, `now_ms`: `charges` of `units` together,
    exhaustions, and claims of jobs. `newest_ms` is the time of the newest entry of the whole log (0: it is empty)."""

    now_ms: int
    newest_ms: int
    charges: int
    units: int
    exhaustions: int
    claims: int

    @property
    def needs_repair(self) -> bool:
        return self.newest_ms > self.now_ms or self.exhaustions > 0 or self.claims > 0


def ahead(log: Log, project: str) -> Ahead:
    """Count what a repair would change now. Raises LedgerError."""
    beginning = begin(log, project, (FACTS,))
    now_ms, facts = beginning.clock_ms, Facts.read(beginning.state.get(FACTS, ""))
    charges = spent(all_entries(log, project, (now_ms, END[1])))  # a clock further ahead moved some to the past
    return Ahead(
        now_ms=now_ms,
        newest_ms=max(beginning.tip, beginning.trimmed)[0],
        charges=len(charges),
        units=sum(charge.units for charge in charges),
        exhaustions=len(facts.exhaustions) - len(facts.happened(now_ms).exhaustions),
        claims=len(_claims_ahead(log, project, now_ms)),
    )


def repair(log: Log, project: str, host_ms: int) -> None:
    """Date entries of the future by the ledger's clock, and remove exhaustions of the future.

    If a clock that was ahead moved entries to the past that some window may still count, this brings them back.

    Raises QuotaError, and changes nothing, if the machine's clock, `host_ms`, and the ledger's differ by more than
    SAME_CLOCK_MS. Raises LedgerError if the ledger does not answer; the next call continues.
    """
    check_clocks(log.now_ms(), host_ms)
    if not ahead(log, project).needs_repair:
        return
    fence = Fence(log, project, os.urandom(8).hex())
    with given_back(fence):
        fence.take()
        with fence.renewed():
            beginning = log.begin(project, (FACTS, LONGEST, SUMS))
            now_ms, state = beginning.clock_ms, beginning.state
            trimmed = min(beginning.trimmed, just_before(now_ms - longest_of(state) - SLACK_MS))
            before = entries_held(log, project, trimmed)
            after = union([_period_from(entry, now_ms) for entry in before], (), now_ms, trimmed, ahead_ms=0)
            becomes: dict[str, str | None] = {**_claims_ahead(log, project, now_ms)}
            if FACTS in state:
                facts = Facts.read(state[FACTS])
                granted_ms = min(facts.granted_ms, now_ms)
                becomes[FACTS] = replace(facts.happened(now_ms), granted_ms=granted_ms).text()
            if SUMS in state:
                becomes[SUMS] = _summed_to(Sums.read(state[SUMS]), before, after).text()
            if becomes:
                fence.change(becomes)
            fence.replace(after, trimmed)
        fence.open()


def check_clocks(ledger_ms: int, host_ms: int) -> None:
    """Raises QuotaError if the two differ by more than SAME_CLOCK_MS."""
    if abs(ledger_ms - host_ms) > SAME_CLOCK_MS:
        raise QuotaError(f"{both_clocks(host_ms, ledger_ms)}; {SET_THE_CLOCK}")


def _claims_ahead(log: Log, project: str, now_ms: int) -> Mapping[str, str | None]:
    """The claims that last longer than a claim that is made now, with the times that they would have then. Without a
    repair, each reading would date them anew."""
    names = [name for name in log.names(project) if name.startswith(CLAIM)]
    becomes: dict[str, str | None] = {}
    for at in range(0, len(names), CLAIMS_AT_ONCE):
        state = log.change(project, dict.fromkeys(names[at : at + CLAIMS_AT_ONCE]), {}).state
        for name, stored in state.items():
            dated = Record(stored, now_ms).stored()
            if _until_ms(stored) > max(now_ms, _until_ms(dated or "")):
                becomes[name] = dated
    return becomes


def _until_ms(stored: str) -> int:
    return number_in(stored.partition(" ")[0], 0, MAX_NUMBER) or 0


def _period_from(entry: Entry, now_ms: int) -> Entry:
    """The entry. If it is of others and its period begins in the future, the period begins now."""
    since_ms, until_ms = entry.period
    if entry.kind != "others" or since_ms <= now_ms:
        return entry
    return entry._replace(at=(now_ms, now_ms + until_ms - since_ms))


def _summed_to(sums: Sums, before: Sequence[Entry], after: Sequence[Entry]) -> Sums:
    """The sums, with the new id of the last entry that they include."""
    places = {entry.key: entry.id for entry in after}
    summed = [places[entry.key] for entry in before if entry.id <= sums.head and entry.key in places]
    return Sums(max(summed), sums.rows()) if summed else sums
