"""When the charges of a sliding view expire, slice by slice: a 24th of its window. Pure.

A loss is known by a sum, and a sum says nothing of when its charges leave the window. So when a slice is over, a
process reads it from the log once, a piece after each decision, and keeps its units. `unread_slices` says what is to be
read next, and `read_on` adds what was read. `with_slices` gives an observation the slices that lie in it.

For example with a window of 24 h a slice is an hour. At 15:15 the hour until 15:00 is over: what was charged from 14:00
on expires at 15:00 tomorrow, all of it. What came after 15:00 expires with the newest charge that was seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from quota.common.clock import NEVER
from quota.ledger.entry import Entry, Id
from quota.ledger.unlogged import Expiries
from quota.recovery.observations import SlicedUsage, ViewObservation, Watermark
from quota.terms.limits import Sliding, View

SLICES = 24
"""The number of slices of a sliding window."""

MIN_SLICE_MS = 1_000
"""No slice is shorter: each of them costs one more read of the ledger."""


class Unread(NamedTuple):
    """What of the log is in no slice of a view yet: after an entry, up to the end of a slice."""

    view: View
    sliced: SlicedUsage | None
    after: Id
    end_ms: int


def slice_ms_of(window_ms: int) -> int:
    """How long a slice of a sliding window is: an hour of a day."""
    return max(MIN_SLICE_MS, window_ms // SLICES)


def slice_end_ms(ms: int, slice_ms: int) -> int:
    """The last ms of the slice in which an entry lies."""
    return -(-ms // slice_ms) * slice_ms


def next_slice_end_ms(view: View, sliced: Mapping[str, SlicedUsage]) -> int:
    """How new an entry must be to complete the next slice of a view; any entry is, if no slice is known.

    A calendar period has no slices: all of it expires at once. Nor has a window shorter than two slices.
    """
    window = view.window
    if not isinstance(window, Sliding) or window.window_ms < 2 * MIN_SLICE_MS:
        return NEVER
    known = sliced.get(view.name)
    if known is None:
        return 0
    ms, seq = known.through
    return slice_end_ms(ms + (seq == NEVER), slice_ms_of(window.window_ms)) + 1


def unread_slices(views: Iterable[View], sliced: Mapping[str, SlicedUsage], newest: Id, now_ms: int) -> list[Unread]:
    """From where to where the log is to be read for each view that has slices which are over and not read.

    The last one ends before the newest entry, so no charge is added to it any more.
    """
    found = []
    for view in dict.fromkeys(views):
        if newest[0] >= next_slice_end_ms(view, sliced):
            slice_ms = slice_ms_of(view.window.longest_ms)
            end_ms = (newest[0] - 1) // slice_ms * slice_ms
            since_ms = (now_ms - view.window.longest_ms) // slice_ms * slice_ms
            known = sliced.get(view.name)
            after = max((max(since_ms, 0), NEVER), (0, 0) if known is None else known.through)
            found.append(Unread(view, known, after, end_ms))
    return found


def read_on(
    sliced: Mapping[str, SlicedUsage], unread: Sequence[Unread], entries: Sequence[Entry], now_ms: int, *, more: bool
) -> dict[str, SlicedUsage]:
    """The slices with these entries of the log, the next ones of what was `unread`. `more`: further ones follow."""
    found = dict(sliced)
    read_through = (entries[-1].ms, entries[-1].seq) if more else (NEVER, NEVER)
    for view, known, after, end_ms in unread:
        if found.get(view.name) is known:  # else another thread has read more
            through = min(max(after, read_through), (end_ms, NEVER))
            live = [] if known is None else [part for part in known.expiries if part[1] > now_ms]
            found[view.name] = SlicedUsage(through, _with_entries(live, view, entries, after, through))
    return found


def _with_entries(
    known: Sequence[tuple[int, int]], view: View, entries: Sequence[Entry], after: Id, through: Id
) -> Expiries:
    """The slices of a view with what it counts of the entries in after < id <= through."""
    selector, window_ms = view.selector, view.window.longest_ms
    slice_ms = slice_ms_of(window_ms)
    units = {until_ms: n for n, until_ms in known}
    for entry in entries:
        if after < (entry.ms, entry.seq) <= through and selector.counts(entry.bucket, entry.method, entry.job):
            until_ms = slice_end_ms(entry.ms, slice_ms) + window_ms
            units[until_ms] = units.get(until_ms, 0) + selector.cost(entry.units)
    return tuple((n, until_ms) for until_ms, n in units.items() if n)


def furthest_slices(watermarks: Iterable[Watermark], epoch: str) -> dict[str, SlicedUsage]:
    """The slices of each view that reach furthest, of all that were read from the log in this epoch."""
    best: dict[str, SlicedUsage] = {}
    for watermark in watermarks:
        if watermark.epoch == epoch:
            for view, sliced in watermark.sliced.items():
                best[view] = max(sliced, best.get(view, sliced))
    return best


def with_slices(observation: ViewObservation, sliced: Mapping[str, SlicedUsage]) -> ViewObservation:
    """The observation with the slices that lie wholly in it. Of a slice that has partly left the window nothing is
    known, so its units count with the rest, until the last entry expires.
    """
    window_ms = observation.until_ms - observation.last[0]
    known = sliced.get(observation.view)
    if known is None:
        return observation
    # A slice lies in the observation if it begins where that does or later, and ends before the last entry.
    first_ms = observation.since_ms + slice_ms_of(window_ms) + window_ms
    within = tuple((n, until_ms) for n, until_ms in known.expiries if first_ms <= until_ms < observation.until_ms)
    return observation._replace(slices=within)
