"""All that reads or changes a ledger beside decisions: an answer, or an error in one line, whatever is stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from fuzz.inputs import Input, check_line
from quota.common.clock import rfc3339
from quota.common.text import one_line
from quota.dashboard.reading import forecast_of, read_curves, read_now, read_spent
from quota.deciding.history import whole_since_ms
from quota.deciding.moves import carry_out, plan_move
from quota.deciding.repairs import ahead, repair
from quota.errors import LedgerError, QuotaError, UnknownCharge
from quota.ledger.sqlite_log import SqliteLog
from quota.reports.spending import SPEND_FIELDS, explain_charge, read_charges, read_refusals, read_spending, read_sums
from quota.reports.status import read_status
from quota.rules.refusals import RefusalCount
from quota.session import Session
from quota.settings.model import Settings
from quota.terms.limits import DAY_MS, HOUR_MS
from support.setup import claim_of

NOW_MS = 1_795_204_800_000
LIMIT = 500
CREDENTIAL = f"""
[credentials.main]
api = "youtube-v3"
limits = [
  {{ name = "day", units = {LIMIT}, window = "24h" }},
  {{ name = "pacific-day", units = {LIMIT}, window = {{ calendar = "day", zone = "America/Los_Angeles" }} }},
]
"""


def check_all(r: Input, settings: Settings, charge_id: str) -> None:
    """Two sessions, one after the other."""
    with opened(settings, NOW_MS + 10) as session:
        check_decisions(session)
        check_readings(r, session, charge_id)
        check_changes(r, session, charge_id)
    with opened(settings, NOW_MS + 20) as session:
        check_decisions(session)


def opened(settings: Settings, now_ms: int = NOW_MS) -> Session:
    return Session(settings, clock=lambda: now_ms)


def check_decisions(session: Session) -> None:
    """A peek and a charge are refused for a reason, or admitted within the limit, and given back."""
    budget = session.budget()
    for decide in (budget.peek, budget.charge):
        decision = decide("videos.list", job="trending", region="US")
        check_line(decision.sentence())
        json.dumps(decision.as_json(), allow_nan=False)
        assert decision.reason in REASONS
        assert decision.admitted == (decision.reason == "ok")
        for state in decision.limits:
            assert type(state.used_units) is int
            assert 0 <= state.used_units < 2**54, state
            if decision.admitted:
                assert state.used_units <= LIMIT, state
                assert 0 <= state.remaining_units <= LIMIT, state
        if decision.admitted and decision.id is not None:
            answered(partial(budget.refund, decision.id))


REASONS = ("ok", "limit", "exhausted", "closed", "clock", "counting", "ledger-unavailable")


def check_readings(r: Input, session: Session, charge_id: str) -> None:
    """Some of what people read."""
    ledger, project = session.ledger, session.project()
    readings: tuple[Callable[[], object], ...] = (
        lambda: read_status(session).as_json(),
        lambda: read_spending([project], SPEND_FIELDS, 0).as_json(),
        lambda: read_spending([project], ["job", "hour"], ledger.now_ms() - 5_000_000).as_json(),
        lambda: list(read_charges([project], 0)),
        lambda: list(read_refusals(project)),
        lambda: read_sums(project),
        lambda: rfc3339(whole_since_ms(project)),
        lambda: explain_charge(session, charge_id).as_json(),
        lambda: read_now(session),
        lambda: read_curves(session, forecast_of(())),
        lambda: read_spent(session),
        lambda: session.budget().usage(),
        lambda: session.budget().owed_units(),
        lambda: project.state.places("job", ["FR"]),
        lambda: rfc3339(ahead(ledger, project.name).newest_ms),
        lambda: ledger.examine(project.name),
        ledger.projects,
    )
    for reading in r.sample(readings, 6):
        answered(reading)


def check_changes(r: Input, session: Session, charge_id: str) -> None:
    """Some of what programs and operators change."""
    ledger, project, budget = session.ledger, session.project(), session.budget()
    state, now_ms, elsewhere = project.state, ledger.now_ms(), SqliteLog(clock=session.ledger.now_ms)

    def move() -> None:
        for old, new in ((ledger, elsewhere), (elsewhere, ledger)):
            for step in plan_move(old, new, [project.name]):
                carry_out(old, new, step, lambda *_: None)

    changes: tuple[Callable[[], object], ...] = (
        lambda: budget.settle(charge_id, 3),
        lambda: budget.exhaust("x", now_ms, now_ms + DAY_MS, "e", "r"),
        lambda: budget.reopen("x", "because"),
        lambda: budget.add_others("units", 5, now_ms, now_ms + HOUR_MS, "usage"),
        lambda: rfc3339(max([now_ms, *(other.until_ms for other in state.claim(claim_of("b")).elsewhere.values())])),
        lambda: state.end_claim(claim_of("a"), "done"),
        lambda: state.keep_places(claim_of("b"), "job", {"US": "page 3"}),
        lambda: state.add_refusals([RefusalCount(now_ms // HOUR_MS * HOUR_MS, "day", "", "limit", 3)], ["{}"]),
        project.keep,
        lambda: ledger.trim(project.name, now_ms - HOUR_MS),
        lambda: repair(ledger, project.name, now_ms),
        move,
    )
    for change in r.sample(changes, 4):
        answered(change)


def answered(ask: Callable[[], object]) -> None:
    """An answer, or one line."""
    try:
        ask()
    except UnknownCharge as error:
        check_line(one_line(str(error)))
    except (LedgerError, QuotaError) as error:
        check_line(str(error))
