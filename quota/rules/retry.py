"""The time when a refused call fits. Pure: the current totals go in, a time comes out.

    LimitAtCall   the state of one limit at a call: its cap, its used units, and the cost of the call
    FutureUsage   tells when units leave a view's window
    room_at       the time when one limit has room
    retry_at      the time when all limits have room, and the limit that delays the call longest

L = 500 over 24 h, charges of 100 at 09:00, 10:00, 11:00, 12:00, 13:00. A call for 200 at 14:00 is refused until
10:00 tomorrow, when two of the five have left. (The oldest charge's expiry, 09:00, would be too early.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quota.common.clock import LATEST_MS, NEVER
from quota.rules.entry import Others
from quota.terms.limits import Calendar, Limit, View, paced_until


class LimitAtCall(NamedTuple):
    """The state of one limit at a call. `cap_units` is its cap without the pace; `refuses`: it had no room. If
    upstream's grant lowers the limit, the grant counts until `lapses_ms` (else NEVER), and then the cap is
    `lapsed_units`."""

    limit: Limit
    cap_units: int
    cost_units: int
    used_units: int
    refuses: bool
    lapses_ms: int = NEVER
    lapsed_units: int = 0


class FutureUsage(Protocol):
    """When units leave the window of a view, if nothing more is charged. See `quota.deciding.project.Project`."""

    def frees_at_ms(self, view: View, units: int) -> int | None: ...

    def used_after(self, view: View, at_ms: int) -> int: ...

    def others(self, view: View) -> list[Others]: ...


def retry_at(limits: Sequence[LimitAtCall], usage: FutureUsage, from_ms: int) -> tuple[int, int]:
    """The time when every limit has room (`from_ms` or later, or NEVER), and the index of the limit that delays the
    call longest. At least one of the limits refuses or is paced."""
    times = [room_at(state, usage, from_ms) if state.refuses else -1 for state in limits]
    at_ms = max(from_ms, *times)
    longest = times.index(max(times))
    # A limit keeps its room, except a paced limit, which has less after its edge than before. So even a paced limit
    # that does not refuse now must have room at the time when the others have it.
    # The time only rises, from edge to edge, and `room_at` looks no further than LATEST_MS.
    paced = [state for state in limits if state.limit.paced]
    while (later_ms := max((room_at(state, usage, at_ms) for state in paced), default=at_ms)) > at_ms:
        at_ms = later_ms
    return at_ms, longest


def room_at(state: LimitAtCall, usage: FutureUsage, from_ms: int) -> int:
    """The first millisecond, `from_ms` or later, at which a limit has room. NEVER if upstream grants less than the call
    costs."""
    if state.lapses_ms != NEVER:
        granted = state._replace(lapses_ms=NEVER)
        at_ms = room_at(granted, usage, from_ms) if from_ms < state.lapses_ms else NEVER
        if at_ms < state.lapses_ms:
            return at_ms
        from_ms = max(from_ms, state.lapses_ms)
        state = granted._replace(cap_units=state.lapsed_units)
    if state.cost_units > state.cap_units:
        return NEVER
    if isinstance(state.limit.view.window, Calendar):
        return _calendar_room_at(state, state.limit.view.window, usage, from_ms)
    too_many = state.used_units + state.cost_units - state.cap_units
    frees_ms = usage.frees_at_ms(state.limit.view, too_many) if too_many > 0 else None
    return from_ms if frees_ms is None else max(from_ms, frees_ms)


def _calendar_room_at(state: LimitAtCall, window: Calendar, usage: FutureUsage, from_ms: int) -> int:
    """When a calendar window has room. It frees everything at its edge; if the clock went back and left charges dated
    after that edge, at the next edge. Before the edge, its pace may make room."""
    view, at_ms = state.limit.view, from_ms
    while at_ms < LATEST_MS:
        edges = window.edges(at_ms)
        used_units = usage.used_after(view, at_ms)
        next_ms = min([edges[1], *(heard.until_ms for heard in usage.others(view) if heard.until_ms > at_ms)])
        if used_units + state.cost_units <= state.cap_units:
            if not state.limit.paced or not used_units:
                return at_ms
            paced_ms = max(at_ms, paced_until(state.cap_units, edges, used_units + state.cost_units))
            # Otherwise units leave before the pace makes room.
            if paced_ms < next_ms:
                return paced_ms
        else:  # there is no room until units leave, which may be dated far ahead
            left_units = usage.used_after(view, from_ms) - used_units
            next_ms = max(next_ms, usage.frees_at_ms(view, left_units + 1) or 0)
        at_ms = next_ms
    return NEVER
