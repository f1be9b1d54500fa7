"""The history of a project: the past and the log, read as one, and since when nothing is missing in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from quota.deciding.history import charges, entries, whole_since_ms
from quota.ledger import sqlite_log
from quota.ledger.log import PAST_MS
from quota.rules.entry import END, START, Entry
from quota.terms.limits import DAY_MS, HOUR_MS
from support.setup import NOW_MS, limit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quota.rules.entry import Id
    from support.setup import Setup


def charge(setup: Setup, count: int = 1, *, every_ms: int = 1_000) -> None:
    """Charge so many calls of one unit, a second apart."""
    budget = setup.budget(limit(1_000_000))
    for _ in range(count):
        assert budget.charge("videos.list").admitted
        setup.now_ms += every_ms


def trim(setup: Setup, count: int) -> None:
    """Move the oldest entries to the past."""
    assert setup.ledger.trim(setup.project, setup.now_ms + 1, count) == count


def old(*days: int) -> list[Entry]:
    return [Entry((NOW_MS - day * DAY_MS, 0), 1, "units", "videos.list", "", "", f"old{day}") for day in days]


def stored(setup: Setup) -> tuple[Sequence[Entry], Sequence[Entry]]:
    """What the past has, and what the log has."""
    ledger, project = setup.ledger, setup.project
    return ledger.past(project, START, END, 1_000), ledger.read(project, START, END, 1_000)


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 3, 100])
def test_the_history_is_the_past_and_then_the_log_in_pieces_of_any_size(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    charge(setup, 7)
    trim(setup, 4)
    monkeypatch.setattr("quota.deciding.history.MAX_READ", most)
    past, log = stored(setup)
    assert (len(past), len(log)) == (4, 3)
    counts: list[int] = []
    assert [*entries(setup.opened(), progress=counts.append)] == [*past, *log]
    assert counts == sorted(set(counts))
    assert counts[-1] == 7
    for at in range(7):
        assert [*entries(setup.opened(), [*past, *log][at].id)] == [*past, *log][at + 1 :]


def test_charges_of_a_time_come_with_all_corrections_until_now(setup: Setup) -> None:
    budget = setup.budget(limit(500))
    _, second, _ = (budget.charge("videos.list", units=units) for units in (10, 20, 30))
    setup.now_ms += HOUR_MS
    budget.charge("videos.list", units=40)
    budget.settle(second.id or "", 5)
    for count in (2, 2, 1):
        rows = charges(setup.opened(), NOW_MS, NOW_MS)
        assert [(row.units, row.charged_units) for row in rows] == [(10, 10), (5, 20), (30, 30)]
        assert [row.units for row in charges(setup.opened(), NOW_MS + 1)] == [40]
        trim(setup, count)


class Trimming:
    """A ledger that somebody trims just after something was read of it."""

    def __init__(self, setup: Setup, method: str, count: int) -> None:
        self._setup, self._method, self._count = setup, method, count

    def __getattr__(self, name: str) -> Any:
        ask = getattr(self._setup.ledger, name)
        if name != self._method or not self._count:
            return ask

        def and_trim(*args: Any) -> Any:
            answer = ask(*args)
            count, self._count = self._count, 0
            if count:
                trim(self._setup, count)
            return answer

        return and_trim


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("method", ["begin", "past", "read"])
@pytest.mark.parametrize("most", [1, 100])
def test_an_entry_trimmed_during_a_read_comes_once(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, method: str, count: int, most: int
) -> None:
    """As the reading begins, between the past and the log, or between two pieces of the log."""
    charge(setup, 5)
    trim(setup, 2)
    every = [entry for part in stored(setup) for entry in part]
    monkeypatch.setattr("quota.deciding.history.MAX_READ", most)
    project = setup.opened()
    monkeypatch.setattr(project, "log", Trimming(setup, method, count))
    assert [*entries(project)] == every


def test_a_past_dated_ahead_hides_nothing_of_the_log(setup: Setup) -> None:
    """What a machine adds to the past may be dated behind what was trimmed. The log is read all the same, each entry
    once, and what is dated ahead is left out."""
    charge(setup, 4)
    trim(setup, 2)
    every = [entry for part in stored(setup) for entry in part]
    setup.ledger.add_past(setup.project, old(-3))
    assert setup.ledger.past(setup.project, every[-1].id, END, 10), "the past ends behind the log"
    assert [*entries(setup.opened())] == every
    assert [*entries(setup.opened(), every[2].id)] == every[3:]


def test_a_reader_gets_what_others_charge_meanwhile(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    charge(setup, 2)
    monkeypatch.setattr("quota.deciding.history.MAX_READ", 1)
    read: list[Id] = []
    for entry in entries(setup.opened()):
        read.append(entry.id)
        if len(read) < 4:
            charge(setup)
    assert read == [entry.id for entry in stored(setup)[1]]
    assert len(read) == 5


# -- since when it is whole --------------------------------------------------------------------------------------------


def test_a_history_that_has_dropped_nothing_is_whole(setup: Setup) -> None:
    assert whole_since_ms(setup.opened()) == 0
    charge(setup, 3)
    assert whole_since_ms(setup.opened()) == 0
    trim(setup, 2)
    assert whole_since_ms(setup.opened()) == 0
    setup.now_ms += PAST_MS - 2 * DAY_MS
    assert whole_since_ms(setup.opened()) == 0


@pytest.mark.parametrize("pause_ms", [HOUR_MS, 20 * DAY_MS])
def test_a_history_of_which_the_past_has_dropped_entries_is_whole_since_the_oldest_that_is_left(
    setup: Setup, pause_ms: int
) -> None:
    """The past is kept for 35 days. Also where nothing was charged for a long time then."""
    charge(setup, 250, every_ms=1)  # Redis drops a hundred at a time
    setup.now_ms = NOW_MS + pause_ms
    charge(setup, 5)
    trim(setup, 255)
    setup.now_ms = NOW_MS + PAST_MS + HOUR_MS // 2
    charge(setup)
    trim(setup, 1)
    oldest_ms = stored(setup)[0][0].id[0]
    assert NOW_MS < oldest_ms < NOW_MS + 250
    assert whole_since_ms(setup.opened()) == oldest_ms


def test_a_history_that_fills_the_past_is_whole_since_its_oldest_entry(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_log, "MAX_PAST", 3)
    monkeypatch.setattr("quota.deciding.history.MAX_PAST", 3)
    charge(setup, 5)
    trim(setup, 2)
    assert whole_since_ms(setup.opened()) == 0
    trim(setup, 2)
    assert whole_since_ms(setup.opened()) == stored(setup)[0][0].id[0]


def test_a_history_whose_past_is_gone_is_whole_since_its_log_was_trimmed(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_log, "MAX_PAST", 0)
    charge(setup, 3)
    trim(setup, 2)
    project = setup.opened()
    monkeypatch.setattr(project.log, "past", lambda *_: [])  # Redis has lost it
    assert whole_since_ms(project) == setup.ledger.begin(setup.project).trimmed[0]
