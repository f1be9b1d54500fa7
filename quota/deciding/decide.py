"""Decides about calls that leave together. Here a call is refused.

A decision takes these steps (`decide`):

1. **Read**: the totals of the limits count all entries that this process has read, and drop those that left the window.
2. **Compare**: a call fits if every limit has room for it, and no bucket that it needs is closed.
3. **Append**: the ledger appends the charge, unless an unread entry might change the decision. One round trip.
4. **Refuse**: only after a reading that left nothing unread. One round trip, too.

If the ledger has lost entries that this machine has read, `quota.deciding.losses` puts them back, and the decision
begins again.

The question is a checklist (`quota.rules.calls`) and the charges. They have no ids yet; their keys are unique to this
attempt. An Outcome is the answer, with the numbers that were compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from quota.common.clock import elapsed_s
from quota.deciding.allowance import repay
from quota.deciding.losses import StillCountingError, restored
from quota.deciding.project import MAX_CLOCK_AHEAD_MS, BehindError, Project
from quota.decision import Reason
from quota.ledger.log import ANY, Room
from quota.rules.calls import Checklist
from quota.rules.entry import START, Entry, Id
from quota.rules.facts import Exhaustion, Facts, closing
from quota.rules.reading import Mark
from quota.terms.limits import View, cutoff

COUNT_WITHIN_S = 0.7
"""How long a decision reads for its totals, once it has begun to read the log. Then it answers "counting", and the next
decision continues."""

ROOMS_AFTER = 2
"""After so many tries that others overtook, a decision names what each of its limits counts."""

MAX_CLOCK_TRIES = 3
"""How often a decision begins again because the ledger's clock went back."""


class Outcome(NamedTuple):
    """The outcome of a decision. Its windows end at `now_ms`.

    `reason` is "ok", "limit" (a limit has no room), "exhausted" (upstream has closed a bucket: `closing`), "clock" (the
    ledger's clock, `clock_ms`, and this machine's disagree) or "counting" (a total has many entries to read; nothing
    was compared). `used_units` has the units of each view, with the new charges, and `caps` the most that each may
    hold. `first` is the id of the first charge; the other ids follow it. The log was read up to `mark`, and others may
    take `room` units meanwhile.
    """

    reason: Reason
    now_ms: int
    used_units: tuple[int, ...] = ()
    caps: tuple[int, ...] = ()
    closing: Exhaustion | None = None
    facts: Facts = Facts()
    first: Id | None = None
    clock_ms: int = 0
    mark: Mark = Mark("", START)
    room: int = 0


def decide(project: Project, checklist: Checklist, charges: Sequence[Entry] = (), *, commit: bool) -> Outcome:
    """Decide about calls that leave together. With `commit`, admitted calls are charged when this returns. Without
    charges, it only looks.

    Raises LedgerError if the ledger does not answer. It may have charged the calls even then.
    """
    try:
        repay(project, must=commit)
        if not project.reading.began:  # not counted: a busy machine takes long to connect
            restored(project, partial(project.begin, checklist.views))
        ends_s = elapsed_s() + COUNT_WITHIN_S
        outcome = restored(project, partial(_decide, project, checklist, charges if commit else (), ends_s))
    except StillCountingError:
        project.keep()
        return Outcome("counting", project.now_ms())
    finally:
        if commit and charges:
            project.reading.pending.pop(charges[0].key, None)
    project.maintain()
    return outcome


def _decide(project: Project, checklist: Checklist, charges: Sequence[Entry], ends_s: float) -> Outcome:
    """Raises BehindError if the log lacks entries that this machine has read."""
    all_read, clock_tries, overtaken = False, 0, 0
    while True:
        outcome = _compared(project, checklist, ends_s)  # steps 1 and 2
        first = project.reading.appended(charges)
        if first is not None:
            return outcome._replace(reason="ok", first=first)
        fits = outcome.reason == "ok"
        if all_read and not (fits and charges):
            return outcome  # step 4
        request = project.request(outcome.mark, outcome.now_ms, charges if fits else (), outcome.room)
        if overtaken >= ROOMS_AFTER and request.entries:
            request = request._replace(rooms=_rooms(checklist, outcome))
        if project.journal is not None and project.journal.is_late(request.epoch):
            raise BehindError
        reply, used_units = project.ask(request, checklist.views)  # step 3, or reads what step 4 needs
        first = reply.id or project.reading.appended(charges)
        if first is not None:
            if used_units is None:  # another thread noticed a loss meanwhile
                each = zip(outcome.used_units, checklist.checks, strict=True)
                used_units = tuple([used + check.cost_units for used, check in each])
            return Outcome("ok", outcome.now_ms, used_units, outcome.caps, facts=outcome.facts, first=first)
        clock_tries += reply.word == "CLOCK"
        if clock_tries > MAX_CLOCK_TRIES or reply.clock_ms > project.wall() + MAX_CLOCK_AHEAD_MS:
            return Outcome("clock", outcome.now_ms, clock_ms=reply.clock_ms)
        overtaken += reply.word == "AGAIN" and reply.whole
        all_read = reply.whole and reply.word != "CLOCK"


def _compared(project: Project, checklist: Checklist, ends_s: float) -> Outcome:
    """The outcome by the entries read so far. Reads what is missing; raises StillCountingError after `ends_s`."""

    def step() -> Outcome | Callable[[], None]:
        now_ms = project.now_ms()
        return _missing(project, checklist.views, now_ms) or _compare(project, checklist, now_ms)

    while callable(outcome := project.in_turn(step)):
        outcome()  # not in turn, where other threads wait
        if elapsed_s() > ends_s:
            raise StillCountingError
    return outcome


def _missing(project: Project, views: Sequence[View], now_ms: int) -> Callable[[], None] | None:
    """The read of the next missing part of the log; None: all is read. Drops the entries that left these windows."""
    reading, behind = project.reading, []
    totals = [total for view in views if (total := reading.totals.get(view.name))]
    if not reading.began or len(totals) < len(views):
        return partial(project.begin, views)
    if reading.facts_markers != reading.markers:  # they have changed
        return project.read_facts
    if project.stored_ms < project.longest_ms:
        return project.store_longest_window
    for total in totals:
        if total.head < reading.seen:
            total.skip_left(cutoff(total.view.window, now_ms))
        if total.head >= reading.seen and (wanted := total.drop(now_ms)) is not None:
            return partial(project.in_turn, partial(project.read_leaving, total, wanted))
        if total.head < reading.seen:
            behind.append(total.head)
    return partial(project.read_behind, min(behind)) if behind else None


def _compare(project: Project, checklist: Checklist, now_ms: int) -> Outcome:
    """The outcome by the totals, once all is read."""
    reading = project.reading
    used_units = tuple([reading.totals[view.name].used_units for view in checklist.views])
    caps = checklist.caps_at(now_ms, reading.facts.granted(now_ms))
    closed = closing(reading.facts, checklist.closed_by, now_ms, project.jitter_ms)
    # Here a call is refused: a limit has no room for it, or upstream has closed its bucket.
    room = room_of(checklist, caps, used_units)
    reason: Reason = "exhausted" if closed is not None else "limit" if room < 0 else "ok"
    return Outcome(reason, now_ms, used_units, caps, closed, reading.facts, mark=reading.mark, room=room)


def room_of(checklist: Checklist, caps: Sequence[int], used_units: Sequence[int]) -> int:
    """How many units others may take meanwhile without changing the decision; below 0: the calls do not fit. A shadow
    limit refuses nothing."""
    each = zip(checklist.checks, caps, used_units, strict=True)
    rooms = [cap - used - check.cost_units for check, cap, used in each if check.cost_units and not check.limit.shadow]
    return min(rooms, default=ANY - 1)  # ANY would overlook facts


def _rooms(checklist: Checklist, outcome: Outcome) -> list[Room]:
    """The room of each limit that may refuse."""
    each = zip(checklist.checks, outcome.caps, outcome.used_units, strict=True)
    refusing = [(check, cap - used) for check, cap, used in each if not check.limit.shadow]
    return [Room(check.limit.view.selector, left - check.cost_units) for check, left in refusing]
