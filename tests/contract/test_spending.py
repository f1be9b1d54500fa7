"""What was spent: the past and the log, read together, since when they are whole, and their sums."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from quota.budget import Budget, project_of
from quota.cli.output import render_parts
from quota.deciding import project as project_module
from quota.deciding.history import charges, entries, whole_since_ms
from quota.deciding.recorder import Recorder
from quota.ledger import sqlite_log
from quota.ledger.factory import open_ledger
from quota.ledger.log import PAST_MS
from quota.reports.spending import read_charges, read_spending, read_sums
from quota.reports.status import read_status
from quota.rules.entry import END, START, Entry
from quota.rules.facts import Loss
from quota.session import Session
from quota.settings.load import load_settings
from quota.terms.limits import DAY_MS, HOUR_MS, SLACK_MS
from quota.wording import status_parts
from support.commands import Quota
from support.explaining import shown_lines
from support.losses import Fault, FaultyLog
from support.setup import NOW_MS, Setup, budget_of, limit

STEP_MS, STEPS = 3 * HOUR_MS, 400


@pytest.fixture
def _trims_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(project_module, "KEEP_AFTER", 100)


def charge_for_long(setup: Setup, budget: Budget, steps: int = STEPS) -> None:
    """A charge every three hours for fifty days."""
    for _ in range(steps):
        assert budget.charge("videos.list").admitted
        setup.now_ms += STEP_MS


@pytest.mark.usefixtures("_trims_often")
def test_a_spending_says_since_when_all_charges_are_there(setup: Setup) -> None:
    budget = setup.budget()
    begun_ms = setup.now_ms
    charge_for_long(setup, budget)
    spending = read_spending([project_of(budget)], ["method"], 0)
    assert begun_ms < spending.since_ms <= setup.now_ms - PAST_MS + DAY_MS
    since = sum(begun_ms + step * STEP_MS >= spending.since_ms for step in range(STEPS))
    assert spending.rows == ((("videos.list",), since, since),)
    assert len(read_charges([project_of(budget)], spending.since_ms)) == since
    recent_ms = setup.now_ms - 10 * DAY_MS
    assert read_spending([project_of(budget)], [], recent_ms).since_ms == recent_ms, "that is there"
    sums, _ = read_sums(project_of(budget))
    assert [(charged.charges, charged.units) for charged in sums] == [(since, since)]


@pytest.mark.usefixtures("_trims_often")
def test_several_projects_are_summed_over_the_same_time(setup: Setup) -> None:
    budget = setup.budget()
    setup.project += "-other"
    other = setup.budget()
    assert other.charge("videos.list").admitted
    charge_for_long(setup, budget)
    assert other.charge("videos.list").admitted
    first, second = project_of(budget), project_of(other)
    both, alone = read_spending([first, second], [], 0), read_spending([first], [], 0)
    assert read_spending([second], [], 0).total_units == 2
    assert (both.since_ms, both.total_units) == (alone.since_ms, alone.total_units + 1)


@pytest.mark.usefixtures("_trims_often")
def test_the_sums_of_all_charges_never_fall(setup: Setup) -> None:
    budget = setup.budget()

    def summed() -> dict[tuple[str, str], tuple[int, int, int]]:
        sums, _ = read_sums(project_of(setup.budget()))
        return {(x.method, x.job): (x.charges, x.units, x.corrected_units) for x in sums}

    kept = budget.charge("videos.list", units=5, job="nightly").id
    assert summed() == {("videos.list", "nightly"): (1, 5, 0)}
    budget.settle(str(kept), 2)
    budget.settle(str(kept), 4)
    budget.charge("search.list")
    assert summed() == {("videos.list", "nightly"): (1, 5, 5), ("search.list", ""): (1, 100, 0)}
    charge_for_long(setup, budget, STEPS // 2)
    assert summed()["videos.list", ""] == (STEPS // 2, STEPS // 2, 0)
    charge_for_long(setup, budget, STEPS // 2)
    assert summed() == {
        ("videos.list", "nightly"): (1, 5, 5),
        ("search.list", ""): (1, 100, 0),
        ("videos.list", ""): (STEPS, STEPS, 0),
    }
    assert read_spending([project_of(budget)], [], 0).total_units < STEPS


def test_refusals_are_summed_since_an_hour_and_since_the_beginning(setup: Setup) -> None:
    project_of(budget := setup.budget(limit(1))).recorder = Recorder(setup.state)
    budget.charge("videos.list")
    for _ in range(2):
        assert not budget.charge("videos.list", job="nightly").admitted
        budget.hand_over_refusals()
        setup.now_ms += 2 * HOUR_MS
    project = project_of(budget)
    assert read_spending([project], [], 0).refused == (("day", "nightly", "limit", 2),)
    assert read_spending([project], [], setup.now_ms - 2 * HOUR_MS).refused == (("day", "nightly", "limit", 1),)
    setup.now_ms += 40 * DAY_MS
    assert read_sums(project)[1] == [("day", "nightly", "limit", 2)]


@pytest.mark.usefixtures("_trims_often")
def test_the_command_names_in_one_line_where_the_charges_begin(any_ledger_url: str, tmp_path: Path) -> None:
    quota = Quota(tmp_path)
    quota.configure(f'[ledger]\nurl = "{any_ledger_url}"\n[credentials.main]\napi = "youtube-v3"\n')
    end_ms = time.time_ns() // 1_000_000
    now_ms = end_ms - STEPS * STEP_MS
    with closing(open_ledger(any_ledger_url, clock=lambda: now_ms)) as ledger:
        budget = budget_of(ledger, limit(500), project="main", clock=lambda: now_ms)
        while now_ms < end_ms:
            assert budget.charge("videos.list").admitted
            now_ms += STEP_MS
    for command in ("spend", "log"):
        shown = quota(command, "--since", "60d").stdout.splitlines()
        assert shown[-1].endswith(", not 60d: the ledger has no older charges")
        assert "not 24h" not in quota(command).stdout
    assert quota.json("spend", "--since", "7d", "--by", "day")["total_units"] in (55, 56)


RESETS = [
    ("youtube-v3", '"24h"', True),
    ("youtube-v3", '{ calendar = "month", zone = "Europe/Berlin" }', True),
    ("gmail-v1", '{ calendar = "day", zone = "UTC" }', False),
]


@pytest.mark.parametrize(("api", "window", "resets"), RESETS)
def test_a_reset_is_upstreams_own_or_none(state_dir: Path, tmp_path: Path, api: str, window: str, resets: bool) -> None:
    Quota(tmp_path).configure(
        f'[credentials.main]\napi = "{api}"\n[[credentials.main.limits]]\nname = "it"\nunits = 100\nwindow = {window}\n'
    )
    midnight_ms = 1_795_334_400_000  # on the Pacific coast, 08:00 in UTC
    with Session(load_settings(), clock=lambda: midnight_ms - 1) as session:
        status = read_status(session)
    (row,) = status.credentials[0].limits
    assert (row.resets_ms, row.zone) == ((midnight_ms, "America/Los_Angeles") if resets else (None, None))
    assert ('"resets_at": null' not in json.dumps(status.as_json())) is resets
    assert ("upstream resets" in " ".join(shown_lines(render_parts(status_parts(status))))) is resets


def charge(setup: Setup, count: int = 1, *, every_ms: int = 1_000) -> None:
    budget = setup.budget(limit(1_000_000))
    for _ in range(count):
        assert budget.charge("videos.list").admitted
        setup.now_ms += every_ms


def trim(setup: Setup, count: int) -> None:
    assert setup.ledger.trim(setup.project, setup.now_ms + 1, count) == count


def old(*days: int) -> list[Entry]:
    return [Entry((NOW_MS - day * DAY_MS, 0), 1, "units", "videos.list", "", "", f"old{day}") for day in days]


def stored(setup: Setup) -> tuple[Sequence[Entry], Sequence[Entry]]:
    ledger, project = setup.ledger, setup.project
    return ledger.past(project, START, END, 1_000), ledger.read(project, START, END, 1_000)


@pytest.mark.parametrize("most", [1, 3, 100])
def test_the_history_is_past_and_log_in_any_pieces(setup: Setup, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    charge(setup, 7)
    setup.ledger.add_past(setup.project, old(2, 1))
    monkeypatch.setattr("quota.ledger.log.MAX_READ", most)
    for count in (0, 4):  # 0: as if the state had lost how far the log is trimmed
        trim(setup, count)
        past, log = stored(setup)
        assert (len(past), len(log)) == (2 + count, 7 - count)
        assert [*entries(setup.opened())] == [*past, *log]
        for at in range(9):
            assert [*entries(setup.opened(), [*past, *log][at].id)] == [*past, *log][at + 1 :]


def test_charges_since_a_time_come_with_all_corrections_until_now(setup: Setup) -> None:
    budget = setup.budget(limit(500))
    _, second, _ = (budget.charge("videos.list", units=units) for units in (10, 20, 30))
    setup.now_ms += HOUR_MS
    budget.charge("videos.list", units=40)
    budget.settle(second.id or "", 5)
    for count in (2, 2, 1):
        rows = charges(setup.opened(), NOW_MS)
        assert [(row.units, row.charged_units) for row in rows] == [(10, 10), (5, 20), (30, 30), (40, 40)]
        assert [row.units for row in charges(setup.opened(), NOW_MS + 1)] == [40]
        trim(setup, count)


@pytest.mark.parametrize(
    ("method", "count", "most"), [("begin", 1, 1), ("begin", 3, 100), ("past", 2, 100), ("past", 3, 1), ("read", 3, 1)]
)
def test_an_entry_trimmed_during_a_read_comes_once(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, method: str, count: int, most: int
) -> None:
    """As the reading begins, between the past and the log, or between two pieces of the log."""
    charge(setup, 5)
    trim(setup, 2)
    every = [entry for part in stored(setup) for entry in part]
    monkeypatch.setattr("quota.ledger.log.MAX_READ", most)
    project = setup.opened()
    trims = {1: Fault(after=lambda: trim(setup, count))}
    monkeypatch.setattr(project, "log", FaultyLog(setup.ledger, trims, method))
    assert [*entries(project)] == every


def test_a_past_dated_ahead_hides_nothing_of_the_log(setup: Setup) -> None:
    """A machine may add entries to the past that are dated after the trimmed ones. The log is read all the same, each
    entry once, and entries dated ahead are left out."""
    charge(setup, 4)
    trim(setup, 2)
    every = [entry for part in stored(setup) for entry in part]
    setup.ledger.add_past(setup.project, old(-3))
    assert setup.ledger.past(setup.project, every[-1].id, END, 10), "the past ends behind the log"
    assert [*entries(setup.opened())] == every
    assert [*entries(setup.opened(), every[2].id)] == every[3:]


def test_a_history_that_has_dropped_nothing_is_whole(setup: Setup) -> None:
    assert whole_since_ms(setup.opened()) == 0
    charge(setup, 3)
    assert whole_since_ms(setup.opened()) == 0
    trim(setup, 2)
    assert whole_since_ms(setup.opened()) == 0
    setup.now_ms += PAST_MS - 2 * DAY_MS
    assert whole_since_ms(setup.opened()) == 0


def test_a_history_that_was_lost_is_whole_as_far_as_journals_reach(setup: Setup) -> None:
    charge(setup)
    setup.state.lose(Loss(setup.now_ms, "web1", 1, 1, setup.now_ms), setup.now_ms)
    project = setup.opened()
    whole_ms = setup.now_ms - project.longest_ms - SLACK_MS
    assert whole_since_ms(project) == whole_ms
    setup.ledger.add_past(setup.project, [old(3)[0]._replace(id=(whole_ms - HOUR_MS, 0))])
    assert whole_since_ms(project) == whole_ms, "that came back from a machine whose clock was behind"
    setup.ledger.add_past(setup.project, old(9))
    assert whole_since_ms(project) == 0, "the past was not lost"


@pytest.mark.parametrize("pause_ms", [HOUR_MS, 20 * DAY_MS])
def test_a_history_whose_past_dropped_entries_is_whole_since_the_oldest_left(setup: Setup, pause_ms: int) -> None:
    """The past is kept for 35 days. Also if nothing was charged for a long time."""
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


def test_a_history_that_fills_the_past_is_whole_since_its_oldest(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_log, "MAX_PAST", 3)
    monkeypatch.setattr("quota.deciding.history.MAX_PAST", 3)
    charge(setup, 5)
    trim(setup, 2)
    assert whole_since_ms(setup.opened()) == 0
    trim(setup, 2)
    assert whole_since_ms(setup.opened()) == stored(setup)[0][0].id[0]


def test_a_history_without_a_past_is_whole_since_its_last_trim(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_log, "MAX_PAST", 0)
    charge(setup, 3)
    trim(setup, 2)
    project = setup.opened()
    monkeypatch.setattr(project.log, "past", lambda *_: [])  # Redis has lost it
    assert whole_since_ms(project) == setup.ledger.begin(setup.project).trimmed[0]
