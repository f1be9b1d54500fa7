"""Corrections of charges, wherever they were charged: in the ledger, or on this machine's allowance.

settle         what a charge counts from now on; `refund` gives it back
Settlement     settles a call once, by what it is said to have cost; `LetThrough` has one
joined         the id of a call that was charged to several buckets; `charges_in` takes it apart
repay          what this machine drew on its allowance, to the ledger
draw_of        what the journal has of one draw; `drawn_by` of a run's; `drawn_units` of all at a time
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from quota.common.clock import NEVER
from quota.common.log import warn
from quota.common.text import many, show
from quota.deciding.checklist import MAX_CHARGE_UNITS
from quota.decision import Decision
from quota.errors import UnknownCharge, UsageError
from quota.ledger.contract import MAX_CHARGES, RETENTION_SLACK_MS
from quota.ledger.entry import Charge, Entry
from quota.ledger.parts import correctable
from quota.ledger.state_fields import is_id
from quota.terms.arguments import text, whole
from quota.terms.limits import DAY_MS

if TYPE_CHECKING:
    from quota.deciding.account import Account
    from quota.recovery.allowance import Allowance, Draw

_JOINT = "+"

MAX_TELLINGS = 10
"""How often a process tells the ledger of one draw at most, while others correct it."""

ALLOWANCE_ID = "allowance-"
"""The prefix of the id of a charge that the local allowance admitted."""


def joined(ids: Iterable[str]) -> str | None:
    """The id of one call from those of its charges, the first bucket's first; None where there is none."""
    return _JOINT.join(ids) or None


def settle(account: Account, charge_id: str, units: int) -> Charge | Entry:
    """See `quota.Budget.settle`."""
    return _settle(account, charges_in(charge_id)[0], _settled_units(units))


def _settled_units(units: object) -> int:
    return whole(units, "units: what a charge counts, 0 after a refund,", 0, MAX_CHARGE_UNITS)


def refund(account: Account, charge_id: str) -> Charge | Entry:
    """See `quota.Budget.refund`."""
    first, *others = charges_in(charge_id)
    if all(map(is_id, (first, *others))):
        return _settle(account, first, 0, others)
    before, *_ = [_settle(account, one, 0) for one in (first, *others)]
    return before


def charges_in(charge_id: str) -> list[str]:
    """The ids of the charges of one call, the first bucket's first. One that cannot be right stays whole, so that none
    of its charges is changed."""
    parts = text(charge_id, "charge").split(_JOINT, MAX_CHARGES)
    return parts if all(is_id(one) or one.startswith(ALLOWANCE_ID) for one in parts) else [charge_id]


def _settle(account: Account, charge_id: str, units: int, also: Sequence[str] = ()) -> Charge | Entry:
    before: Charge | Entry | None = None
    remedy = "give the id that the charge returned, while the ledger's log still has it"
    if charge_id.startswith(ALLOWANCE_ID):
        remedy = "it was drawn on another machine, which can correct it, or this one's journal no longer has it"
        before = _settle_drawn(account, charge_id, units)
    elif is_id(charge_id):
        before = correctable(account.ledger).settle(account.project, charge_id, units, account.views, also)
    if before is None:
        raise UnknownCharge(f"project {account.project!r} has no charge {show(charge_id)}; {remedy}")
    return before


def _settle_drawn(account: Account, charge_id: str, units: int) -> Charge | Entry | None:
    """Correct a charge that the allowance admitted: in its journal, or in the ledger once it was repaid there."""
    draw = draw_of(account, charge_id)
    if account.allowance is None or draw is None:
        return None
    before: Charge | Entry | None = account.allowance.settle(account.identity, draw.number, units)
    if before is None:
        before = _settle_repaid(account, draw, units)
        if before is not None:
            account.allowance.correct_repaid(account.identity, draw.number, units)
            _tell(account, account.allowance, draw._replace(charge=draw.charge._replace(units=units)))
    return before


def _settle_repaid(account: Account, draw: Draw, units: int) -> Entry | None:
    """Correct the ledger's entry for a repaid draw; None where the log no longer has it.

    The newest entry with the draw's idempotency key is the draw. An earlier one is the charge of the same call, whose
    answer was lost. It counted while its outcome was unknown, and can now be corrected.
    """
    log = account.entries(draw.drawn_ms - RETENTION_SLACK_MS, NEVER)
    found = [entry for entry in log if entry.idempotency_key == draw.charge.idempotency_key]
    for entry in found:
        counted = units if entry is found[-1] else 0
        correctable(account.ledger).settle(account.project, entry.id, counted, account.views)
    return found[-1] if found else None


def repay(account: Account) -> None:
    """Hand the ledger what this machine drew on its allowance, if it may owe anything. Raises LedgerError."""
    allowance = account.allowance
    if allowance is not None and allowance.may_owe(account.identity):
        repaid = allowance.repay(account.identity, account.ledger, account.retention_ms, account.clock())
        for corrected in repaid:
            _tell(account, allowance, corrected)


def _tell(account: Account, allowance: Allowance, draw: Draw) -> None:
    """Tell the ledger what a draw counts, and again where the journal has another number by then: who corrected it may
    have told the ledger so before, and this came late."""
    last: Draw | None = draw
    for _ in range(MAX_TELLINGS):
        if last is not None:
            _settle_repaid(account, last, last.charge.units)
            last = allowance.told(account.identity, last)


# -- what a call really cost -------------------------------------------------------------------------------------------


class Settlement:
    """Settles a call, once: of several buckets, in the first one. If it cost more than was charged, it counts in full,
    and a line in the log says so: one a day for each method."""

    def __init__(self, settle: Callable[[str, int], Charge | Entry], decision: Decision) -> None:
        self._settle = settle
        self._decision = decision
        self._used_units: int | None = None

    def settle(self, used_units: int) -> None:
        """See `quota.deciding.spend.SpentCall.settle`."""
        known, decision, used_units = self._used_units, self._decision, _settled_units(used_units)
        if used_units == known:
            return
        if known is not None:
            raise UsageError(
                f"this call of {decision.method} was settled with {many(known, 'unit')} already; "
                "`budget.settle(call.id, units)` corrects that"
            )
        before = self._settle(decision.id or "", used_units)
        self._used_units = used_units
        if used_units > before.units:
            _say_more(decision, before.units, used_units)


class LetThrough(Decision):
    """The decision about a call that was let through, and can be settled."""

    _settlement: Settlement

    def __reduce__(self) -> tuple[type[Decision], tuple[object, ...]]:
        """A copy for another process is the decision alone."""
        return Decision, tuple(self)


MAX_TOLD = 1_000
"""The most methods for which a process remembers that it said so."""

_told: dict[tuple[str, str], int] = {}
"""The day on which a process last said that a method of a project cost more than was reserved."""


def _say_more(decision: Decision, reserved_units: int, used_units: int) -> None:
    project, method, day = decision.project, decision.method, decision.decided_at_ms // DAY_MS
    if _told.get((project, method)) == day:
        return
    if len(_told) >= MAX_TOLD:
        _told.clear()
    _told[project, method] = day
    said = "it counts in full, and a limit may be exceeded; reserve more"
    warn("reserved_too_little", said, project=project, method=method, reserved=reserved_units, used=used_units)


# -- what was drawn on the allowance -----------------------------------------------------------------------------------


def draw_of(account: Account, charge_id: str) -> Draw | None:
    """What this machine's journal has of a charge that the allowance admitted. Raises LedgerError."""
    allowance, name = account.allowance, charge_id.removeprefix(ALLOWANCE_ID)
    number = None if allowance is None or name == charge_id else allowance.number(name)
    return None if allowance is None or number is None else allowance.find(account.identity, number)


def drawn_by(account: Account, run: str) -> list[Charge]:
    """The charges that a run drew on this machine's local allowance, repaid or not. Raises LedgerError."""
    return [] if account.allowance is None else account.allowance.drawn_by(account.identity, run)


def drawn_units(account: Account, at_ms: int) -> int:
    """What this machine had drawn on its allowance at a time, and what counted then. Raises LedgerError."""
    if account.allowance is None:
        return 0
    return account.allowance.drawn_units(account.identity, at_ms, account.longest_ms)
