"""The running total of one limit over the log. Pure: its caller reads the log.

    RunningTotal   the total of a view, the last entry that it has counted, and the next charges to leave its window
    Leaving        a charge that is still in the window
    Reading        (quota.rules.reading) the totals of all limits

A total counts the entries after `gone` and up to `head`. `take` counts the next entry, `drop` drops the entries that
have left the window, and `frees_at_ms` tells when so many units will have left. If one of these needs more entries, it
names them as `Wanted`.

    window 24 h    gone          leaving ...... leaving_to                head
    log       ..... | ..... 09:00 10:00 11:00 ......| ..................... | ...... not read yet

So a new process does not read a log of a million charges, but the kept total, a few charges after its head, and the
next charges to leave.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from heapq import merge
from typing import NamedTuple

from quota.rules.entry import END, START, Entry, Id, Others, id_text, others_units, read_id
from quota.terms.limits import SLACK_MS, Calendar, View, as_long, cutoff, leaves_at

MAX_LEAVING = 2_000
"""The most leaving charges that a total holds. It reads more when these have left."""

READ_LEAVING, MOST_AT_ONCE = 200, 5_000
"""How many entries it reads at once to find leaving charges: at least, or as many as it has found; and at most."""

MAX_SUM = 2**53
"""The most that a kept total may count. A larger number is not ours: the log is read instead."""


class Wanted(NamedTuple):
    """Entries that a total needs: at most `most` entries with after < id <= through."""

    after: Id
    through: Id
    most: int


class Leaving:
    """A charge in the window, with the cost that it counts now."""

    __slots__ = ("cost", "id", "key")

    def __init__(self, entry_id: Id, cost: int, key: str) -> None:
        self.id, self.cost, self.key = entry_id, cost, key


class RunningTotal:
    """The running total of one view: see above. `charged` is the sum of the charges; `used_units` also includes the
    units that only upstream has counted."""

    __slots__ = (
        *("view", "trimmed", "at_ms", "charged", "others"),
        *("gone", "head", "leaving", "leaving_to", "next_ms", "_by_key"),
    )

    def __init__(self, view: View, trimmed: Id = START) -> None:
        self.view = view
        self.trimmed = trimmed
        """The log was trimmed up to here. Corrections of charges up to here change no counted charge."""
        self.at_ms = 0
        """The time of the last `drop`."""
        self.start(START)

    def start(self, gone: Id) -> None:
        """Begin with nothing, after the entry `gone`, which has left the window."""
        self.charged = 0
        self.gone = self.head = self.leaving_to = gone
        self.leaving: deque[Leaving] = deque()
        self._by_key: dict[str, Leaving] = {}
        self.next_ms = gone[0]
        """Every counted charge that is not in `leaving` is at least this new."""
        self.others: dict[tuple[str, int], int] = {}
        """The units that others used, by the name of their source and the time when they leave."""

    def start_at(self, now_ms: int) -> None:
        """Begin with nothing, after the entries that have left the window at a time."""
        self.start((max(0, cutoff(self.view.window, now_ms)), END[1]))

    # -- reading on --------------------------------------------------------------------------------------------------

    def take(self, entry: Entry) -> None:
        """Count the next entry after the head."""
        entry_id, units, bucket, method, job, _, key, kind, of, at, before_units = entry
        selector = self.view.selector
        expects = self.leaving_to == self.head and len(self.leaving) < MAX_LEAVING
        if kind == "charge":
            if selector.counts(bucket, method, job):
                cost = selector.cost(units)
                self.charged += cost
                if expects:
                    self._by_key[key] = expected = Leaving(entry_id, cost, key)
                    self.leaving.append(expected)
        elif kind == "correction":
            if at > self.gone and at > self.trimmed and selector.counts(bucket, method, job):
                cost, leaving = selector.cost(units), self._by_key.get(of)
                # The charge may have left the log, and then the author of the correction did not know its last units.
                self.charged += cost - (selector.cost(before_units) if leaving is None else leaving.cost)
                if leaving is not None:
                    leaving.cost = cost
        elif kind == "others":
            self._take_others(entry)
        if expects:
            self.leaving_to = entry_id
        self.head = entry_id

    def _take_others(self, entry: Entry) -> None:
        """Count units of others if the view counts every unit of their bucket, in a window as long as upstream's."""
        selector, window = self.view.selector, self.view.window
        if not selector.counts_bucket(entry.bucket) or selector.methods or selector.jobs:
            return
        fits = selector.count == "units" or entry.of_calls
        if (length_ms := entry.window_ms) is not None and not (fits and as_long(window.longest_ms, length_ms)):
            return
        # They leave at the end of their period, or of the calendar period in which it began, but no later than a charge
        # of the same time.
        since_ms, until_ms = entry.period
        leaves_ms = min(until_ms, leaves_at(window, entry.id[0]))
        if isinstance(window, Calendar) and since_ms:
            leaves_ms = min(leaves_ms, leaves_at(window, since_ms))
        heard = entry.of, leaves_ms
        self.others[heard] = max(entry.units, self.others.get(heard, 0))

    def take_all(self, entries: Iterable[Entry], through: Id = START) -> None:
        """Count those of these entries that are after the head. The log has no others up to `through`."""
        for entry in entries:
            if entry.id > self.head:
                self.take(entry)
        if through > self.head:
            if self.leaving_to == self.head:
                self.leaving_to = through
            self.head = through

    # -- what leaves -------------------------------------------------------------------------------------------------

    def drop(self, now_ms: int) -> Wanted | None:
        """Drop the entries that have left the window at a time. Returns None when done, or the entries to read
        first."""
        cutoff_ms = cutoff(self.view.window, now_ms)
        self.at_ms = now_ms
        if self.gone[0] > max(0, cutoff_ms):
            self.start_at(now_ms)  # the clock went back: entries that had left may count again
        if self.others:  # a clock may go back, so ended periods may count again
            self.others = {heard: units for heard, units in self.others.items() if heard[1] > now_ms - SLACK_MS}
        if self.head[0] <= cutoff_ms:
            self.skip_left(cutoff_ms)
            return None
        leaving = self.leaving
        while leaving and leaving[0].id[0] <= cutoff_ms:
            left = leaving.popleft()
            self.charged -= left.cost
            self.gone = left.id
            self._by_key.pop(left.key, None)
        # Other counted charges come after `leaving`, up to the head. None has left if one of `leaving` is still here.
        if leaving or self.leaving_to >= self.head or self.next_ms > cutoff_ms:
            return None
        if isinstance(self.view.window, Calendar) and self.gone[0] < cutoff_ms:
            self.start_at(now_ms)  # a period ended: the new period has fewer entries than have left
            return None
        return self.wants_leaving()

    def skip_left(self, cutoff_ms: int) -> None:
        """If all entries up to the head have left the window, begin after them."""
        if self.head[0] <= cutoff_ms:
            self.start(max(self.head, (cutoff_ms, END[1])))

    def wants_leaving(self) -> Wanted | None:
        """The entries to read for the next charges to leave; None if all are known."""
        if self.leaving_to >= self.head:
            return None
        return Wanted(self.leaving_to, self.head, min(max(READ_LEAVING, len(self.leaving)), MOST_AT_ONCE))

    def take_leaving(self, wanted: Wanted, entries: Sequence[Entry], units: Mapping[str, int]) -> None:
        """Take the wanted entries: the leaving charges, with their `units` after all corrections up to the head."""
        if wanted.after != self.leaving_to or wanted.through != self.head:
            return  # another thread was quicker
        selector = self.view.selector
        for entry in entries:
            if entry.kind == "charge" and selector.counts(entry.bucket, entry.method, entry.job):
                leaving = Leaving(entry.id, selector.cost(units.get(entry.key, entry.units)), entry.key)
                self._by_key[entry.key] = leaving
                self.leaving.append(leaving)
        self.leaving_to = entries[-1].id if len(entries) == wanted.most else wanted.through
        self.next_ms = max(self.next_ms, self.leaving_to[0])

    # -- numbers -----------------------------------------------------------------------------------------------------

    def others_after(self, at_ms: int) -> list[Others]:
        """The units of others that still count at a time."""
        heard = [Others(name, units, until_ms) for (name, until_ms), units in self.others.items() if until_ms > at_ms]
        return sorted(heard)

    def others_leave(self, after_ms: int) -> list[tuple[int, int]]:
        """When units of others leave after a time, in order, and how many."""
        before_units = others_units(self.others_after(after_ms))
        leave = []
        for at_ms in sorted({heard.until_ms for heard in self.others_after(after_ms)}):
            units = others_units(self.others_after(at_ms))
            leave.append((at_ms, before_units - units))
            before_units = units
        return leave

    @property
    def used_units(self) -> int:
        """The units in the window. Never below 0, though a log may have corrections without their charges."""
        charged = self.charged if self.charged > 0 else 0
        return charged + others_units(self.others_after(self.at_ms)) if self.others else charged

    def frees_at_ms(self, units: int) -> int | None:
        """When so many of the used units (1 or more) will have left the window, if nothing more is charged. None: read
        `wants_leaving` first; if that is None too, fewer units are used."""
        window = self.view.window
        leaving = ((leaves_at(window, left.id[0]), left.cost) for left in self.leaving)
        for at_ms, cost in merge(leaving, self.others_leave(self.at_ms)):
            units -= cost
            if units <= 0:
                # Unread charges may leave earlier.
                is_next = self.leaving_to >= self.head or at_ms <= leaves_at(window, self.leaving_to[0])
                return at_ms if is_next else None
        return None

    def used_after(self, at_ms: int) -> int | None:
        """The units still used at a time, if nothing more is charged; None: read `wants_leaving` first."""
        cutoff_ms = cutoff(self.view.window, at_ms)
        others = others_units(self.others_after(at_ms)) if self.others else 0
        if self.head[0] <= cutoff_ms:
            return others
        if self.leaving_to < self.head and self.leaving_to[0] <= cutoff_ms:
            return None
        left = 0
        for leaving in self.leaving:
            if leaving.id[0] > cutoff_ms:
                break
            left += leaving.cost
        return max(0, self.charged - left) + others

    # -- keeping it --------------------------------------------------------------------------------------------------

    def kept(self, epoch: str) -> str:
        """The text to keep: `EPOCH TOTAL GONE HEAD NEXT_MS OTHERS`. No entry up to GONE is counted, because it has left
        the window or the log."""
        next_ms = self.leaving[0].id[0] if self.leaving else max(self.next_ms, self.leaving_to[0])
        gone = max(self.gone, min(self.trimmed, self.head))
        others = ",".join(f"{units}:{leaves_ms}:{name}" for (name, leaves_ms), units in self.others.items()) or "-"
        return f"{epoch} {self.charged} {id_text(gone)} {id_text(self.head)} {next_ms} {others}"

    def resume(self, kept: str, epoch: str, tip: Id, trimmed: Id, now_ms: int) -> bool:
        """Continue from a kept total. False if it is not valid: it is of another epoch, its head is after the tip or
        outside the window, or the log lacks charges that must still leave."""
        try:
            of_epoch, total, gone_text, head_text, next_text, others_text = kept.split(" ", 5)
            gone, head = read_id(gone_text), read_id(head_text)
            charged, next_ms = int(total), int(next_text)
            heard = [part.split(":", 2) for part in others_text.split(",")] if others_text != "-" else []
            others = {(name, int(leaves_ms)): int(units) for units, leaves_ms, name in heard}
        except ValueError:
            return False
        numbers = (charged, next_ms, *others.values())
        cutoff_ms = cutoff(self.view.window, now_ms)
        if (
            of_epoch != epoch
            or min(numbers) < 0
            or max(numbers) > MAX_SUM
            or not trimmed <= gone <= head <= tip
            or (gone[0] > max(0, cutoff_ms) and gone != trimmed)
            or head[0] <= cutoff_ms
        ):
            return False
        self.start(min(gone, (max(0, cutoff_ms), END[1])))
        self.charged, self.head, self.next_ms, self.others = charged, head, next_ms, others
        return True


def total_of(view: View, entries: Iterable[Entry], now_ms: int, trimmed: Id = START) -> RunningTotal:
    """The total of a view over a whole log, without a kept total. Corrections of charges up to `trimmed` change
    nothing."""
    total = RunningTotal(view, trimmed)
    total.start_at(now_ms)
    total.at_ms = now_ms
    total.take_all(entries)
    return total
