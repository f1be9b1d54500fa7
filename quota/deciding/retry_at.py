"""When will it fit? Pure: what counts now and the log's entries go in, a moment comes out.

Occupancy   one limit as a call found it: what it holds, what is used, what the call adds
Clocks      what time it is, by the ledger and by the caller
room_at     when one limit has room
retry_at    when all limits have room, and which of them holds the call back longest
counted     what a view counts of an entry

L = 500 over 24 h, charges of 100 at 09:00, 10:00, 11:00, 12:00, 13:00. A call for 200 at 14:00 is refused until
10:00 tomorrow, when two of the five have left. (The oldest charge's expiry, 09:00, would be too early.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import merge
from typing import NamedTuple

from quota.common.clock import NEVER
from quota.ledger.entry import Entry, counted
from quota.ledger.unlogged import UnloggedUsage
from quota.terms.limits import Calendar, Limit, Sliding, paced_until

ReadEntries = Callable[[int, int], Iterable[Entry]]
"""The log's entries from one time in ms to another, both included, in order."""


class Occupancy(NamedTuple):
    """One limit as a call found it. `cap_units` is what it holds at most, without its pace; `full` whether it refused.

    `used_units` includes what of it is not in the log, `unlogged`. `leaving_ms` is the time of the charge that must
    leave a sliding window first, where the ledger said it. Where upstream's grant lowers the limit (L28), that is
    believed until `lapses_ms`, and the limit holds `lapsed_units` from then on; else NEVER.
    """

    limit: Limit
    cap_units: int
    cost_units: int
    used_units: int
    unlogged: tuple[UnloggedUsage, ...]
    full: bool
    leaving_ms: int | None = None
    lapses_ms: int = NEVER
    lapsed_units: int = 0


class Clocks(NamedTuple):
    """`now_ms` is where windows end, by the ledger; `caller_ms` what paces go by; `newest_ms` the newest entry's
    time."""

    now_ms: int
    caller_ms: int
    newest_ms: int


def retry_at(occupancies: Sequence[Occupancy], clocks: Clocks, read: ReadEntries, from_ms: int) -> tuple[int, int]:
    """(when every limit has room, `from_ms` or later, or NEVER; which of them holds the call back longest). At least
    one of them is full or paced."""
    times = [room_at(one, clocks, read, from_ms) if one.full else -1 for one in occupancies]
    at_ms = max(from_ms, *times)
    longest = times.index(max(times))
    # Room once there stays, except in a paced limit, which has less after its edge than before it: whether it refuses
    # now or not, it must have room when the others have.
    paced = [one for one in occupancies if one.limit.paced]
    before_ms = -1 if paced else at_ms
    while before_ms < at_ms < NEVER:
        before_ms, at_ms = at_ms, max(room_at(one, clocks, read, at_ms) for one in paced)
    return at_ms, longest


def room_at(occupancy: Occupancy, clocks: Clocks, read: ReadEntries, from_ms: int) -> int:
    """The first millisecond, `from_ms` or later, at which a limit has room, if nothing more is charged. NEVER where
    upstream grants less than the call costs."""
    lapses_ms = occupancy.lapses_ms
    if lapses_ms != NEVER:
        granted = occupancy._replace(lapses_ms=NEVER)
        at_ms = room_at(granted, clocks, read, from_ms) if from_ms < lapses_ms else NEVER
        if at_ms < lapses_ms:
            return at_ms
        from_ms = max(from_ms, lapses_ms)
        occupancy = granted._replace(cap_units=occupancy.lapsed_units, leaving_ms=None)
    if occupancy.cost_units > occupancy.cap_units:
        return NEVER
    if occupancy.leaving_ms is not None and isinstance(occupancy.limit.view.window, Sliding):
        return max(from_ms, occupancy.leaving_ms + occupancy.limit.view.window.window_ms)
    now_ms = clocks.now_ms
    expiring = sorted((until, n) for usage in occupancy.unlogged for n, until in usage.expiries if until > now_ms)
    window = occupancy.limit.view.window
    if isinstance(window, Calendar):
        return _calendar_room_at(occupancy, window, expiring, clocks, read, from_ms)
    # A sliding window frees its charges one by one, oldest first: walk the log until enough is free.
    freed_units = 0
    if occupancy.used_units + occupancy.cost_units <= occupancy.cap_units:
        return from_ms
    entries = read(now_ms - window.window_ms + 1, clocks.newest_ms)
    leaving = ((entry.ms + window.window_ms, counted(occupancy.limit.view.selector, entry)) for entry in entries)
    for at_ms, units in merge(leaving, expiring):
        freed_units += units
        if occupancy.used_units - freed_units <= occupancy.cap_units - occupancy.cost_units:
            return max(from_ms, at_ms)
    return from_ms  # what refused it was given back while we looked


def _calendar_room_at(
    occupancy: Occupancy,
    window: Calendar,
    expiring: list[tuple[int, int]],
    clocks: Clocks,
    read: ReadEntries,
    from_ms: int,
) -> int:
    """A calendar window frees everything at its edge (unless the clock went back and left charges dated behind that
    edge: then the edge after it, and so on); before that, its pace may make room.
    """
    limit, cost_units = occupancy.limit, occupancy.cost_units
    logged_units = occupancy.used_units - sum(n for _, n in expiring)
    # A pace goes by the caller's clock, which makes the cap; what has left the window by the ledger's.
    ahead_ms = clocks.now_ms - clocks.caller_ms if limit.paced else 0
    at_ms = from_ms
    while True:
        edges = window.edges(at_ms)
        if edges[0] <= clocks.now_ms:
            used = logged_units
        elif edges[0] <= clocks.newest_ms:
            used = sum(counted(limit.view.selector, entry) for entry in read(edges[0], clocks.newest_ms))
        else:
            used = 0
        later = [(until_ms, n) for until_ms, n in expiring if until_ms > at_ms]
        used += sum(n for _, n in later)
        next_ms = min([edges[1], *(until_ms for until_ms, _ in later)])
        if used + cost_units <= occupancy.cap_units:
            if not limit.paced or not used:
                return at_ms
            pace_edges = window.edges(at_ms - ahead_ms)
            paced_ms = max(at_ms, paced_until(occupancy.cap_units, pace_edges, used + cost_units) + ahead_ms)
            # Else something leaves before the pace makes room, as where the caller is past an edge.
            if paced_ms < next_ms:
                return paced_ms
        at_ms = next_ms
