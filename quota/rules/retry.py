"""When will it fit? Pure: what counts now goes in, a moment comes out.

    Full        one limit as a call met it: what it holds, what is used, what the call adds
    Leaves      what will have left a view's window, and when
    room_at     when one limit has room
    retry_at    when all limits have room, and which of them holds the call back longest

L = 500 over 24 h, charges of 100 at 09:00, 10:00, 11:00, 12:00, 13:00. A call for 200 at 14:00 is refused until
10:00 tomorrow, when two of the five have left. (The oldest charge's expiry, 09:00, would be too early.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quota.common.clock import LATEST_MS, NEVER
from quota.terms.limits import Calendar, Limit, View, paced_until


class Full(NamedTuple):
    """One limit as a call met it. `cap_units` is what it holds at most, without its pace; `refuses` whether it had no
    room. Where upstream's grant lowers the limit, that is believed until `lapses_ms`, and the limit holds
    `lapsed_units` from then on; else NEVER."""

    limit: Limit
    cap_units: int
    cost_units: int
    used_units: int
    refuses: bool
    lapses_ms: int = NEVER
    lapsed_units: int = 0


class Leaves(Protocol):
    """What will have left the window of a view, if nothing more is charged. See `quota.deciding.project.Project`."""

    def frees_at_ms(self, view: View, units: int) -> int | None: ...

    def used_after(self, view: View, at_ms: int) -> int: ...

    def others_leave_ms(self, view: View) -> list[int]: ...


def retry_at(limits: Sequence[Full], leaves: Leaves, from_ms: int) -> tuple[int, int]:
    """(when every limit has room, `from_ms` or later, or NEVER; which of them holds the call back longest). At least
    one of them refuses or is paced."""
    times = [room_at(full, leaves, from_ms) if full.refuses else -1 for full in limits]
    at_ms = max(from_ms, *times)
    longest = times.index(max(times))
    # Room once there stays, except in a paced limit, which has less after its edge than before it: whether it refuses
    # now or not, it must have room when the others have.
    paced = [full for full in limits if full.limit.paced]
    before_ms = -1 if paced else at_ms
    while before_ms < at_ms < NEVER:
        before_ms, at_ms = at_ms, max(room_at(full, leaves, at_ms) for full in paced)
    return at_ms, longest


def room_at(full: Full, leaves: Leaves, from_ms: int) -> int:
    """The first millisecond, `from_ms` or later, at which a limit has room. NEVER where upstream grants less than the
    call costs."""
    if full.lapses_ms != NEVER:
        granted = full._replace(lapses_ms=NEVER)
        at_ms = room_at(granted, leaves, from_ms) if from_ms < full.lapses_ms else NEVER
        if at_ms < full.lapses_ms:
            return at_ms
        from_ms = max(from_ms, full.lapses_ms)
        full = granted._replace(cap_units=full.lapsed_units)
    if full.cost_units > full.cap_units:
        return NEVER
    if isinstance(full.limit.view.window, Calendar):
        return _calendar_room_at(full, full.limit.view.window, leaves, from_ms)
    too_many = full.used_units + full.cost_units - full.cap_units
    frees_ms = leaves.frees_at_ms(full.limit.view, too_many) if too_many > 0 else None
    return from_ms if frees_ms is None else max(from_ms, frees_ms)


def _calendar_room_at(full: Full, window: Calendar, leaves: Leaves, from_ms: int) -> int:
    """A calendar window frees everything at its edge (unless the clock went back and left charges dated behind that
    edge: then the edge after it, and so on); before that, its pace may make room."""
    view, at_ms = full.limit.view, from_ms
    while at_ms < LATEST_MS:
        edges = window.edges(at_ms)
        used_units = leaves.used_after(view, at_ms)
        next_ms = min([edges[1], *(leaves_ms for leaves_ms in leaves.others_leave_ms(view) if leaves_ms > at_ms)])
        if used_units + full.cost_units <= full.cap_units:
            if not full.limit.paced or not used_units:
                return at_ms
            paced_ms = max(at_ms, paced_until(full.cap_units, edges, used_units + full.cost_units))
            # Else something leaves before the pace makes room.
            if paced_ms < next_ms:
                return paced_ms
        else:  # there is no room until something leaves, which may be dated far ahead
            left_units = leaves.used_after(view, from_ms) - used_units
            next_ms = max(next_ms, leaves.frees_at_ms(view, left_units + 1) or 0)
        at_ms = next_ms
    return NEVER
