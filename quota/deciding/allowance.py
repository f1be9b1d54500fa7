"""Lets a machine spend while the ledger does not answer, and charges that to the ledger afterwards.

    draw         admits cheap calls, and writes them to the disk (`quota.journal.draws`) before they leave
    hand_over    charges the draws to the ledger, once any process of this machine reaches it
    repay        the same, now and then

A draw is a charge with its own key, and counts from the time of its hand-over. Its call may have reached the ledger
before the answer was lost. So `hand_over` first looks for the key in the log and its past: after the entry that the
first try had read, or, under another epoch, everywhere.

A process logs two lines for an outage, for any number of draws: `allowance_drawn` at the first draw, with the fault of
the ledger; then `debt_repaid`, or `allowance_used` if the process ends before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from quota.common.clock import elapsed_s
from quota.common.log import warn
from quota.common.text import listed
from quota.deciding.corrections import add, correct, find
from quota.deciding.losses import StillCountingError, restored
from quota.deciding.project import Project
from quota.decision import Allowance, AllowanceState
from quota.errors import LedgerError
from quota.journal.draws import Draw
from quota.journal.journal import Journal
from quota.ledger.log import all_between
from quota.rules.entry import END, START, Entry, just_before
from quota.rules.reading import Mark
from quota.terms.limits import SLACK_MS

HANDED_AT_ONCE = 500
"""The most draws that are handed over in one step."""

AGAIN_S = 1.0
"""How often a process checks for draws of other processes of this machine."""


def allowance_state(project: Project, allowance: Allowance, costs: Sequence[int] = ()) -> AllowanceState | None:
    """How much of the allowance is drawn, and when it has room for calls of these `costs` together (none: for more than
    now). None if this project has no allowance."""
    if project.journal is None:
        return None
    draws, now_ms, window_ms, uptime = project.journal.draws, project.wall(), project.longest_ms, project.since_boot()
    state, drawn = AllowanceState(*allowance[:2], 0, None), []
    try:
        drawn = [draw.entry for draw in draws.drawn(now_ms, window_ms, uptime) if draw.entry.units]
        draws.check_writable()
    except LedgerError as error:
        state = state._replace(trouble=str(error))
    drawn_units = sum(entry.units for entry in drawn)
    left_units, frees_ms = allowance.allowance_units - drawn_units, None
    wanted_units = sum(costs) or left_units + 1
    never = wanted_units > allowance.allowance_units or max(costs, default=0) > allowance.max_cost_units
    for entry in () if never else sorted(drawn, key=lambda entry: entry.id):
        if left_units >= wanted_units:
            break
        left_units, frees_ms = left_units + entry.units, entry.id[0] + window_ms
    return state._replace(drawn_units=drawn_units, frees_ms=frees_ms)


def draw(
    project: Project, allowance: Allowance, charges: Sequence[Entry], because: str, *, read: Mark, commit: bool
) -> int | None:
    """Admit these calls without the ledger, if each is cheap enough and the allowance has room for all; returns the
    remaining units. None: refused. Without `commit` it draws nothing. `read` is how far the process had read before
    their first try. Raises LedgerError if the disk fails."""
    if project.journal is None or any(charge.units > allowance.max_cost_units for charge in charges):
        return None
    draws, now_ms, window_ms, uptime = project.journal.draws, project.wall(), project.longest_ms, project.since_boot()
    units = sum(charge.units for charge in charges)
    left_units = allowance.allowance_units - draws.drawn_units(now_ms, window_ms, uptime) - units
    if not commit:
        draws.check_writable()
        return left_units if left_units >= 0 else None
    limits = {"now_ms": now_ms, "window_ms": window_ms, "allowance_units": allowance.allowance_units}
    if not draws.draw(charges, read.epoch, read.seen, uptime, **limits):
        return None
    left_units = max(0, left_units)
    if not project.drawn:
        methods = listed(dict.fromkeys(charge.method for charge in charges))
        warn("allowance_drawn", because, project=project.name, method=methods, units=units, left=left_units)
    project.drawn.update((charge.key, charge.units) for charge in charges)
    return left_units


def repay(project: Project, *, must: bool = True) -> None:
    """Hand over this machine's draws, now and then. Unless it `must`, a file that cannot be written may still be read.
    Raises LedgerError and StillCountingError."""
    if project.drawn or elapsed_s() >= project.owes_again_s:
        project.owes_again_s = elapsed_s() + AGAIN_S
        try:
            hand_over(project)
        except LedgerError:
            if must or project.log.shared or not project.log.unwritable(project.name):
                raise


def try_to_repay(project: Project) -> None:
    """The same. Never raises: if it fails, the machine still owes them."""
    with suppress(LedgerError, StillCountingError):
        repay(project)


def hand_over(project: Project) -> None:
    """Charge this machine's draws, and their corrections, to the ledger, unless another process is doing it. Raises
    LedgerError."""
    journal = project.journal
    if journal is None or not journal.draws.owed(journal.of_one_log):
        return
    restored(project, project.read_on)  # before the lock: nobody must wait with it for a ledger that does not answer
    try:
        lock = journal.locked()
    except LedgerError:
        return
    units: list[int] = []
    with lock:
        owed = journal.draws.owed(lambda: _of_this_log(project, journal))
        for at in range(0, len(owed), HANDED_AT_ONCE):
            units += _hand_over(project, journal, owed[at : at + HANDED_AT_ONCE])
    if units:
        warn("debt_repaid", project=project.name, charges=len(units), units=sum(units))
    project.drawn.clear()


def _of_this_log(project: Project, journal: Journal) -> list[str]:
    """The configurations whose draws this log gets: it has what they noted last, which a copy of their log lacks."""
    mark, noted = restored(project, project.mark), journal.of_one_log().items()
    return [name for name, last in noted if not project.log.lacks(project.name, *mark, [last])]


def _hand_over(project: Project, journal: Journal, owed: Sequence[Draw]) -> list[int]:
    """Hand over some draws; returns the units of those that were not refunded, or nothing if the journal could not note
    it."""
    new = [draw for draw in owed if draw.handed_id is None]
    places = {draw.entry.key: draw.handed_id for draw in owed if draw.handed_id is not None}

    def lacking() -> Sequence[Entry]:
        """The draws that the log lacks. Notes the places of the others, whose answers were lost before the draws."""
        after = min(draw.seen if draw.epoch == project.reading.epoch else START for draw in new)
        there = find(project, {draw.entry.key for draw in new}, after)
        if there:  # their processes got no answer, and did not note them
            journal.write(project.reading.epoch, [*there.values()])
        oldest_ms = min(draw.entry.id[0] for draw in new)
        gone = all_between(project.log.past, project.name, just_before(oldest_ms - SLACK_MS))
        places.update((entry.key, entry.id) for entry in (*there.values(), *gone))
        return [draw.entry._replace(units=draw.charged_units) for draw in new if draw.entry.key not in places]

    if new and add(project, lacking) is not None:
        lacking()  # notes what was added: not all of it, if a late first try came first, with fewer draws
    handed = [(draw, places[draw.entry.key]) for draw in owed if draw.entry.key in places]
    for draw, at in handed:
        if draw.settled_ms:
            correct(project, at[0], [draw.entry.key], draw.entry.units, (draw.settled_ms, END[1]))
    is_noted = journal.draws.handed_over(handed)
    return [draw.entry.units for draw, _ in handed if draw.handed_id is None and draw.entry.units] if is_noted else []


def say_used(project: Project) -> None:
    """At the end of a process, log its draws that it neither handed over nor refunded. A single draw needs no second
    line after `allowance_drawn`. If the ledger answers, draws that only this process has are handed over first."""
    if project.journal is not None and project.journal.draws.unwritten:
        with suppress(LedgerError, StillCountingError):
            hand_over(project)
    units = [*filter(None, project.drawn.values())]
    if len(units) > 1:
        warn("allowance_used", project=project.name, charges=len(units), units=sum(units))


def owed_units(project: Project) -> int:
    """The drawn units that the ledger does not have yet."""
    if project.journal is None:
        return 0
    journal = project.journal
    return sum(owed.entry.units for owed in journal.draws.owed(journal.of_one_log) if owed.handed_id is None)


def settle_draws(project: Project, units: Mapping[str, int]) -> list[Entry] | None:
    """Set the units of draws of this machine, by their keys; returns the draws as they were. Returns None, and sets
    nothing, if any of them is not here. The ledger learns it now if it has the draws, else by their hand-over. Raises
    LedgerError."""
    if project.journal is None:
        return None
    before = project.journal.draws.settle(units, project.latest_ms())
    if before is None:
        return None
    project.drawn.update((key, units[key]) for key in units.keys() & project.drawn.keys())
    if before[0].handed_id is not None:  # another machine may settle it next
        with suppress(LedgerError, StillCountingError):
            hand_over(project)
    return [draw.entry for draw in before]


def owe_correction(project: Project, charged_ms: int, key: str, units: int) -> None:
    """Keep the true cost of a charge that the ledger did not take: the next process of this machine hands it over."""
    if project.journal is not None:
        project.journal.draws.keep(charged_ms, key, units, project.latest_ms(), project.since_boot())
        project.owes_again_s = 0
