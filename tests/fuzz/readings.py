"""Everything that reads a ledger without deciding: an answer, or LedgerError in one line, whatever is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuzz.inputs import check_line
from quota.common.clock import rfc3339
from quota.common.text import one_line
from quota.dashboard.reading import read_curves, read_now, read_spent
from quota.errors import LedgerError, UnknownCharge
from quota.explain.charge import explain_charge
from quota.ledger.history import RefusalCount
from quota.reports.spending import SPEND_FIELDS, read_charges, read_refusals, read_spending, read_sums
from quota.reports.status import read_status
from support.setup import charges_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from quota.session import Session


def keep_history(session: Session, now_ms: int) -> None:
    """Give the ledger something of everything that is read, beside its charges."""
    ledger = session.ledger
    ledger.add_refusals("main", [RefusalCount(now_ms, "day", "trending", "limit", 3)], ["{}"])
    while ledger.roll_up("main", now_ms, present_hour=True):
        pass
    ledger.repair("main", "mended", now_ms)


def check_readings(session: Session, charge_id: str) -> None:
    ledger = session.ledger
    readings: tuple[Callable[[], object], ...] = (
        lambda: read_status(session).as_json(),
        lambda: read_spending(ledger, ["main"], SPEND_FIELDS, 0).as_json(),
        lambda: read_spending(ledger, ["main"], ["job", "hour"], 0).as_json(),
        lambda: read_spending(ledger, ["main"], ["day"], ledger.now_ms() - 5_000_000).as_json(),
        lambda: read_sums(ledger, "main"),
        lambda: list(read_charges(ledger, ["main"], 0)),
        lambda: list(read_refusals(ledger, "main")),
        lambda: rfc3339(ledger.whole_after_ms("main")),
        lambda: [rfc3339(one.begun_ms) + rfc3339(one.at_ms) for one in ledger.repairs("main")],
        lambda: explain_charge(session, charge_id).as_json(),
        lambda: read_now(session),
        lambda: read_curves(session),
        lambda: read_spent(session),
        lambda: charges_at(ledger, "main"),
        lambda: ledger.notes("main").exhaustions,
        lambda: ledger.notes("main").grants,
        lambda: ledger.notes("main").compared,
        lambda: rfc3339(ledger.ahead("main").newest_ms),
    )
    for reading in readings:
        try:
            reading()
        except LedgerError as error:
            check_line(str(error))
        except UnknownCharge as error:
            check_line(one_line(str(error)))
