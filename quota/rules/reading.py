"""The part of a project's log that a process has read, and the totals over it. Pure: `quota.deciding.project` asks the
log.

All numbers of a decision come from one reading: of one epoch, up to one entry, at one time. Threads share a reading, so
answers may come out of order. A reading takes an answer only if it continues what was read, and only its new entries.

The clock is a lower bound of the ledger's clock: the clock of the last answer, plus the time since then by a clock of
this process that never jumps. So nothing leaves its window too early.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quota.rules.entry import END, START, Entry, Id, Others
from quota.rules.facts import Facts
from quota.rules.total import RunningTotal, Wanted
from quota.terms.limits import View

MAX_TOTALS = 1_000
"""The most totals of a process: each job may have its own limits."""


class Mark(NamedTuple):
    """How far a process has read: the log, and the last entry."""

    epoch: str
    seen: Id


class Reading:
    """See above. `totals` has the total of each limit that was asked about, by the name of its view; it has
    counted up to `seen` or less."""

    def __init__(self) -> None:
        self.began = False
        self.epoch = ""
        self.seen = START
        self.trimmed = START
        self.totals: dict[str, RunningTotal] = {}
        self.facts: Facts = Facts()
        self.markers = 0
        """How many markers were read. Each means that the facts have changed."""
        self.facts_markers = 0
        """How many markers had been read when the facts were read."""
        self.pending: dict[str, Id | None] = {}
        """The keys of charges whose answers were lost, which may be in the log, with their ids once read."""
        self.unkept = 0
        """How many entries were taken since the totals were last kept."""
        self._clock_ms = 0
        self._clock_at_ms = 0
        self._missing = self.mark

    @property
    def mark(self) -> Mark:
        return Mark(self.epoch, self.seen)

    def appended(self, entries: Sequence[Entry]) -> Id | None:
        """The id of the first of these entries if an earlier try appended them, whose answer was lost."""
        return self.pending.get(entries[0].key) if entries else None

    # -- the clock ---------------------------------------------------------------------------------------------------

    def hear_clock(self, clock_ms: int, elapsed_ms: int, *, went_back: bool = False) -> None:
        """Take the ledger's clock from an answer. It lowers the bound only if the clock `went_back`."""
        if went_back or clock_ms > self.clock_ms(elapsed_ms):
            self._clock_ms, self._clock_at_ms = clock_ms, elapsed_ms + 1  # that millisecond has begun

    def clock_ms(self, elapsed_ms: int) -> int:
        """The lower bound of the ledger's clock."""
        return self._clock_ms + elapsed_ms - self._clock_at_ms

    # -- beginning ---------------------------------------------------------------------------------------------------

    def begin(self, epoch: str, tip: Id, trimmed: Id, facts: Facts) -> None:
        """Begin again at a log of this epoch, read up to `tip`. All totals are dropped."""
        self.epoch, self.seen, self.trimmed = epoch, max(tip, trimmed), trimmed
        self.facts, self.facts_markers = facts, self.markers
        self.totals = {}
        self.unkept = 0
        self.began = True

    def open(self, view: View, kept: str | None, now_ms: int, tip: Id) -> None:
        """Begin the total of a view: from the `kept` total of a log with this `tip`, or with nothing, after the entries
        that have left its window."""
        total = RunningTotal(view, self.trimmed)
        if kept is None or not total.resume(kept, self.epoch, min(tip, self.seen), self.trimmed, now_ms):
            total.start_at(now_ms)
        if len(self.totals) >= MAX_TOTALS:
            del self.totals[next(iter(self.totals))]
        self.totals[view.name] = total

    def forget(self) -> None:
        """Let the next question begin to read again, as a new process does."""
        self.began = False

    # -- reading on --------------------------------------------------------------------------------------------------

    def take(self, asked: Mark, epoch: str, entries: Iterable[Entry]) -> None:
        """Take the new entries of an answer, which has those after the `asked` mark. An answer of another log changes
        nothing."""
        if asked.epoch != self.epoch or asked.seen > self.seen:
            return
        self.epoch = epoch  # an empty log gets its epoch with the first entry
        seen = self.seen
        new = [entry for entry in entries if entry.id > seen]
        if not new:
            return
        totals = [total for total in self.totals.values() if total.head >= seen]
        for entry in new:
            if entry.kind == "marker" or entry.kind == "unreadable":
                self.markers += 1
            elif entry.key in self.pending:
                self.pending[entry.key] = entry.id
        self.seen = new[-1].id
        for total in totals:
            total.take_all(new, self.seen)
        self.unkept += len(new)

    def take_behind(self, epoch: str, wanted: Wanted, entries: Sequence[Entry]) -> bool:
        """Take the wanted entries of the log of this epoch, for all totals that have not counted them yet. Takes
        nothing, and returns False, if the log lost them meanwhile: the last of them was there."""
        if epoch != self.epoch:
            return True  # another thread has begun again
        through = entries[-1].id if entries else START
        if len(entries) < wanted.most:
            if self.note_missing(wanted.through, through):
                return False
            through = wanted.through
        for total in self.totals.values():
            if wanted.after <= total.head < through:
                total.take_all(entries, through)
        self.unkept += len(entries)
        return True

    def note_missing(self, through: Id, newest: Id) -> bool:
        """Note that the log lacks `through`, if it was read with `newest` as the last entry. Returns whether it was
        lost meanwhile: if the same entry is missing twice, the log is only damaged."""
        missing = Mark(self.epoch, through)
        if newest >= through or not self.trimmed < through <= END or missing == self._missing:
            return False
        self._missing = missing
        return True

    def learn_facts(self, facts: Facts, markers: int) -> None:
        """Take the facts, which were read after so many markers."""
        self.facts, self.facts_markers = facts, markers

    def others(self, view: View) -> list[Others]:
        """The units in a view that only upstream has counted."""
        total = self.totals.get(view.name)
        return [] if total is None else total.others_after(total.at_ms)

    def kept_views(self) -> dict[str, str]:
        """The texts to keep of the totals, by the names of their views."""
        return {name: total.kept(self.epoch) for name, total in self.totals.items() if total.head != START}
