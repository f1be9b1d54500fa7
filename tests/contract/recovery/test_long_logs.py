"""A log of thousands of charges: it is read in pieces, and what was read is not read, or lost, again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from quota.deciding import project
from quota.errors import LedgerError
from quota.ledger.log import MAX_ENTRIES, MAX_UNSEEN, Append
from quota.rules.entry import START, Entry
from quota.terms.limits import DAY_MS
from support.losses import Site
from support.setup import limit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quota.ledger.log import Log
    from quota.rules.entry import Id

THOUSANDS = 9
DAY, DAYS = limit(100_000), limit(100_000, 3 * DAY_MS, name="days")


def charge_thousands(site: Site, ledger: Log) -> None:
    """Others have charged, and kept what they counted."""
    for n in range(THOUSANDS):
        made = [Entry(START, 1, "units", "videos.list", "", "", f"{n}-{m}") for m in range(MAX_ENTRIES)]
        beginning = ledger.begin("p")
        ask = Append(beginning.epoch, beginning.tip, made, 2**53, new_epoch="e", clock_ms=site.now_ms, keep_ms=DAY_MS)
        assert ledger.append("p", ask).word == "APPENDED"
        site.now_ms += 1


@pytest.mark.parametrize("decisions", [3, 2 * THOUSANDS])
def test_a_machine_that_has_no_journal_yet_reads_back_what_it_only_counted(
    site: Site, decisions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece after each decision. What of it was read, a loss takes no more."""
    monkeypatch.setattr(project, "AGAIN_S", 0.0)
    others = site.machine("others")
    charge_thousands(site, others.ledger)
    assert others.budget(DAY).usage()[0].used_units == 1_000 * THOUSANDS
    opened = others.budget(DAY)
    opened.usage()
    opened._project.keep()
    budget = site.machine().budget(DAY)
    for n in range(decisions):
        assert budget.charge("videos.list").limits[0].used_units == 1_000 * THOUSANDS + n + 1
    site.empty()
    assert site.machines[-1].budget(DAY).usage()[0].used_units == min(decisions * MAX_UNSEEN, 9_000) + decisions


class Slow:
    """A ledger that takes its time for each piece of the log."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.now_s, self.pieces = 0.0, 0

    def read(self, name: str, after: Id, through: Id, count: int) -> Sequence[Entry]:
        self.now_s += 0.2
        self.pieces += 1
        return self._log.read(name, after, through, min(count, 1_000))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


class Busy:
    """A ledger that is too slow for long pieces of the log."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def read(self, name: str, after: Id, through: Id, count: int) -> Sequence[Entry]:
        if count > 100:
            raise LedgerError("ledger: too slow")
        return self._log.read(name, after, through, count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


def test_a_busy_ledger_is_asked_for_short_pieces_of_what_leaves_next(site: Site) -> None:
    """A refusal says when to come back, also where the log is long and its ledger slow."""
    machine = site.machine()
    charge_thousands(site, machine.ledger)
    full = limit(1_000 * THOUSANDS)
    opened = machine.budget(full)
    opened.usage()
    opened._project.keep()
    machine.ledger = Busy(machine.ledger)
    decision = machine.budget(full).charge("videos.list", units=1_500)
    assert decision.reason == "limit"
    assert decision.retry_at_ms == site.now_ms - THOUSANDS + 1 + DAY_MS


@pytest.mark.parametrize("restarted", [False, True], ids=["one process", "killed each time"])
def test_a_longer_limit_is_refused_until_it_has_read_the_log_and_goes_on_where_it_was(
    site: Site, restarted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = site.machine()
    charge_thousands(site, machine.ledger)
    machine.budget(DAY).charge("videos.list")
    slow = Slow(machine.ledger)
    monkeypatch.setattr(project, "elapsed_s", lambda: slow.now_s)
    monkeypatch.setattr(project, "COUNT_WITHIN_S", 0.7)
    monkeypatch.setattr(project, "MAX_READ", 1_000)
    machine.ledger = slow
    budget, refused = machine.budget(DAYS), 0
    while (decision := budget.charge("videos.list")).reason == "counting":
        refused += 1
        assert decision.retry_at_ms is not None
        if restarted:
            budget = machine.budget(DAYS)
    assert (refused, decision.limits[0].used_units) == (2, 1_000 * THOUSANDS + 2)
    assert slow.pieces <= THOUSANDS + 2
