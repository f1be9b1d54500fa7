"""What a process has read of one project's log, and the totals over it. Pure: `quota.deciding.project` asks the log.

All numbers of a decision are of one reading: of one epoch, up to one entry, at one time. Answers may come in another
order than they were asked for, because threads share a reading. So an answer is taken only where it goes on from what
was read, and of each answer only what is new.

The clock is the ledger's, as far as it is known: that of the last answer, and the time that has passed since by a clock
of this process that never jumps. That is a lower bound, so nothing leaves its window too early.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quota.rules.entry import START, Entry, Id
from quota.rules.facts import Facts
from quota.rules.total import RunningTotal, Wanted
from quota.terms.limits import View

MAX_TOTALS = 1_000
"""The most totals of a process: a limit of each job may have any name."""

WALL_SLACK_MS = 5_000
"""How far the ledger's clock may be ahead of the caller's without being doubted: windows end by whichever is behind."""


class Mark(NamedTuple):
    """How far a process has read: which log, and up to which entry."""

    epoch: str
    seen: Id


class Reading:
    """See above. `totals` are those of all limits that were asked about, each read up to `seen` or still behind it."""

    def __init__(self) -> None:
        self.began = False
        self.epoch = ""
        self.seen = START
        self.trimmed = START
        self.totals: dict[View, RunningTotal] = {}
        self.facts: Facts = Facts()
        self.markers = 0
        """How many markers were read. Each says that the facts have changed."""
        self.facts_markers = 0
        """How many had been read when the facts were."""
        self.pending: dict[str, Id | None] = {}
        """The keys of charges that may be in the log although no answer has said so, with their ids once read."""
        self.unkept = 0
        """How many entries were taken since the totals were kept last."""
        self._clock_ms = 0
        self._clock_at_ms = 0

    # -- the clock ---------------------------------------------------------------------------------------------------

    def hear_clock(self, clock_ms: int, elapsed_ms: int, *, went_back: bool = False) -> None:
        """The ledger's clock, as an answer of now says it. It lowers the bound only where it `went_back`."""
        if went_back or clock_ms > self._clock_ms + elapsed_ms - self._clock_at_ms:
            self._clock_ms, self._clock_at_ms = clock_ms, elapsed_ms + 1  # that millisecond has begun

    def now_ms(self, elapsed_ms: int, wall_ms: int) -> int:
        """The time by which to decide: the lower bound of the ledger's clock, or the caller's and its slack if that is
        behind."""
        return min(self._clock_ms + elapsed_ms - self._clock_at_ms, wall_ms + WALL_SLACK_MS)

    # -- beginning ---------------------------------------------------------------------------------------------------

    def begin(self, epoch: str, tip: Id, trimmed: Id, facts: Facts) -> None:
        """Begin anew, at a log of this epoch that is read up to `tip`. No total holds any more."""
        self.epoch, self.seen, self.trimmed = epoch, max(tip, trimmed), trimmed
        self.facts, self.facts_markers = facts, self.markers
        self.totals = {}
        self.unkept = 0
        self.began = True

    def open(self, view: View, kept: str | None, now_ms: int, tip: Id, entries: Sequence[Entry] | None) -> None:
        """Begin the total of a view: where what was `kept` of it ends, or behind what has left its window. `entries`
        are those behind the head of what was kept, up to `tip`; None where they are not all of these."""
        total = RunningTotal(view, floor=self.trimmed)
        if kept is None or not total.resume(kept, self.epoch, min(tip, self.seen), self.trimmed, now_ms):
            total.start_at(now_ms)
        elif entries is not None:
            for entry in entries:
                if total.head < entry.id <= self.seen:
                    total.take(entry)
            total.skip_to(min(tip, self.seen))
        if len(self.totals) >= MAX_TOTALS:
            del self.totals[next(iter(self.totals))]
        self.totals[view] = total

    # -- reading on --------------------------------------------------------------------------------------------------

    def take(self, asked: Mark, epoch: str, entries: Iterable[Entry]) -> list[Entry]:
        """Take what an answer showed behind what was `asked`; returns what of it is new. An answer about another log
        than this process reads now changes nothing."""
        if asked.epoch != self.epoch or asked.seen > self.seen:
            return []
        self.epoch = epoch  # an empty log may have begun
        seen = self.seen
        new = [entry for entry in entries if entry.id > seen]
        if not new:
            return new
        totals = [total for total in self.totals.values() if total.head >= seen]
        for entry in new:
            if entry.kind == "marker" or entry.kind == "unreadable":
                self.markers += 1
            elif entry.key in self.pending:
                self.pending[entry.key] = entry.id
            for total in totals:
                if entry.id > total.head:
                    total.take(entry)
        self.seen = new[-1].id
        for total in totals:
            total.skip_to(self.seen)
        self.unkept += len(new)
        return new

    def take_behind(self, total: RunningTotal, wanted: Wanted, entries: Sequence[Entry]) -> None:
        """Take what a total that is behind the others has wanted to read."""
        if total.head != wanted.after:
            return  # another thread was quicker
        for entry in entries:
            total.take(entry)
        if len(entries) < wanted.most:
            total.skip_to(wanted.through)
        self.unkept += len(entries)

    def learn_facts(self, facts: Facts, markers: int) -> None:
        """Take the facts that were read after so many markers."""
        self.facts, self.facts_markers = facts, markers

    @property
    def facts_are_old(self) -> bool:
        return self.facts_markers != self.markers

    def kept_views(self) -> dict[str, str]:
        """What to keep of the totals, by the names of their views."""
        return {view.name: total.kept(self.epoch) for view, total in self.totals.items() if total.head != START}
