"""A ledger that is emptied, restored or cut off at any call of an operation. Afterwards each charge is in the log once,
with its own units, and everybody counts what is in the log.

`QUOTA_TEST_LOSSES` says how many histories are tried on each ledger; its default takes some seconds.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from contextlib import suppress
from functools import partial

import pytest

from quota.deciding import losses
from quota.deciding.history import entries
from quota.deciding.project import Project
from quota.decision import Allowance, Decision
from quota.errors import LedgerError
from quota.ledger import state
from quota.ledger.log import LEASE_MS
from quota.rules.entry import parts_of_id
from quota.rules.spent import spent
from quota.terms.limits import DAY_MS
from support.losses import Fault, FaultyLog, RedisStorage, Site
from support.setup import limit

HISTORIES = int(os.environ.get("QUOTA_TEST_LOSSES", "60"))
HUNDRED, ALLOWANCE = limit(100), Allowance(max_cost_units=50, allowance_units=100)

OPERATIONS = ("charge", "a new process charges", "charge_many", "settle", "refund", "exhaust", "others", "usage")
HAND_OVERS = ("a draw", "a draw that had arrived", "a draw that others had read", "a settled draw")


class Trial:
    """Two machines, each with a charge that the other has read, and the units that each charge must have."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.ours, self.theirs = site.machine("ours"), site.machine("theirs").budget(HUNDRED, allowance=ALLOWANCE)
        self.ledger = self.ours.ledger
        self.ours.ledger = self.log = FaultyLog(self.ledger, {})  # type: ignore[assignment]
        self.units: Counter[str] = Counter()
        self.budget = self.ours.budget(HUNDRED, allowance=ALLOWANCE)
        self.first = self.admitted(self.theirs.charge("videos.list", units=5))
        self.second = self.admitted(self.budget.charge("videos.list", units=10))
        self.theirs.usage()
        self.budget.usage()

    def admitted(self, decision: Decision) -> str:
        if decision.id is None:
            return ""
        self.units[parts_of_id(decision.id)[1]] = decision.cost_units
        return decision.id

    def faults(self) -> list[Fault]:
        site, lose, notice = self.site, self.site.clear, self.theirs.usage
        copy = site.place.copy() if isinstance(site.place, RedisStorage) else None

        def lose_and_notice() -> None:
            site.clear()
            notice()

        def read_lose_and_notice() -> None:
            notice()
            lose_and_notice()

        restore = lose if copy is None else partial(site.place.restore, copy)
        return [
            *(Fault(lose), Fault(lose, notice), Fault(lose_and_notice), Fault(restore), Fault(restore, notice)),
            *(Fault(is_lost=True), Fault(down), Fault(after=lose, is_lost=True), Fault(after=lose)),
            *(Fault(after=lose_and_notice), Fault(after=read_lose_and_notice)),
            *(Fault(after=read_lose_and_notice, is_lost=True), Fault(self.charge_elsewhere)),
        ]

    def charge_elsewhere(self) -> None:
        self.admitted(self.theirs.charge("videos.list", units=2))

    def draw(self, kind: str) -> None:
        """Draw a call whose first try may have arrived, and end the process."""
        self.log.faults = {1: Fault(down) if kind == "a draw" else Fault(is_lost=True), 2: Fault(down)}
        self.log.calls.clear()
        draw = self.admitted(self.budget.charge("videos.list", units=7))
        self.log.faults = {}
        if kind in ("a draw that others had read", "a settled draw"):
            self.theirs.usage()
        if kind == "a settled draw":
            self.budget.settle(draw, 3)
            self.units[parts_of_id(draw)[1]] = 3
        self.budget = self.ours.budget(HUNDRED, allowance=ALLOWANCE)

    def do(self, operation: str) -> None:
        budget, now_ms = self.budget, self.site.now_ms
        if operation == "a new process charges":
            budget = self.ours.budget(HUNDRED, allowance=ALLOWANCE)
        if "charges" in operation or operation == "charge":
            self.admitted(budget.charge("videos.list", units=20))
        elif operation == "charge_many":
            for decision in budget.charge_many([("videos.list", 20), ("videos.list", 30)]):
                self.admitted(decision)
        elif operation == "settle":
            budget.settle(self.second, 4)
            self.units[parts_of_id(self.second)[1]] = 4
        elif operation == "refund":
            budget.refund(self.first)
            self.units[parts_of_id(self.first)[1]] = 0
        elif operation == "exhaust":
            budget.exhaust("units", now_ms, now_ms + DAY_MS, "403 quotaExceeded")
        elif operation == "others":
            budget.add_others("units", 33, now_ms, now_ms + DAY_MS, "monitoring")
        else:
            budget.usage()


def down() -> None:
    raise LedgerError("nothing arrives")


def holds(trial: Trial, operation: str, *, is_done: bool) -> None:
    for budget in [trial.ours.budget(HUNDRED, allowance=ALLOWANCE), trial.theirs, trial.budget] * 2:
        budget.peek("videos.list")
    log = [*entries(Project(trial.ledger, "p"))]
    charges = spent(log)
    assert not [key for key, times in Counter(entry.key for entry in log).items() if times > 1]
    units = {charge.key: charge.units for charge in charges}
    asked = {"settle": trial.second, "refund": trial.first}.get(operation)
    for key, wanted in trial.units.items():
        if is_done or asked is None or key != parts_of_id(asked)[1]:  # a correction without an answer may be made
            assert units.get(key) == wanted, f"charge {key} was not put back, or with other units"
    others = sum(entry.units for entry in log if entry.kind == "others")
    assert others == 33 or operation != "others" or not is_done
    for budget in (trial.budget, trial.theirs, trial.site.machine("new").budget(HUNDRED)):
        assert budget.usage()[0].used_units == sum(units.values()) + others
        assert budget.peek("videos.list").reason == "exhausted" or operation != "exhaust" or not is_done


@pytest.mark.parametrize("history", range(HISTORIES))
def test_no_loss_of_a_log_loses_or_doubles_a_charge(site: Site, history: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "WAIT_S", 0.01)
    monkeypatch.setattr(state, "FENCED_WITHIN_S", 0.01)
    dice, trial = random.Random(history), Trial(site)
    operation = dice.choice((*OPERATIONS, *HAND_OVERS))
    if operation in HAND_OVERS:
        trial.draw(operation)
    trial.log.calls.clear()
    trial.log.faults = {dice.randint(1, 10): dice.choice(trial.faults()) for _ in range(dice.choice((1, 2, 2)))}
    is_done = False
    with suppress(LedgerError):
        trial.do(operation)
        is_done = True
    trial.log.faults = {}
    site.now_ms += LEASE_MS + 1
    holds(trial, operation, is_done=is_done)
