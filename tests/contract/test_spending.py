"""What was spent, and since when the ledger can say so; when upstream starts counting anew, and where it never does."""

from __future__ import annotations

import json
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from quota.budget import Budget, project_of
from quota.cli.output import render_parts
from quota.deciding import project as project_module
from quota.deciding.recorder import Recorder
from quota.ledger.factory import open_ledger
from quota.ledger.log import PAST_MS
from quota.reports.spending import read_spending, read_sums
from quota.reports.status import read_status
from quota.session import Session
from quota.settings.load import load_settings
from quota.terms.limits import DAY_MS, HOUR_MS
from quota.wording import status_parts
from support.commands import Quota
from support.explaining import shown_lines
from support.setup import budget_of, limit

if TYPE_CHECKING:
    from pathlib import Path

    from support.setup import Setup

STEP_MS, STEPS = 3 * HOUR_MS, 400


@pytest.fixture(autouse=True)
def _trims_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(project_module, "KEEP_AFTER", 100)


def charge_for_long(setup: Setup, budget: Budget, steps: int = STEPS) -> None:
    """A charge every three hours for fifty days."""
    for _ in range(steps):
        assert budget.charge("videos.list").admitted
        setup.now_ms += STEP_MS


def test_a_spending_says_since_when_all_charges_are_there(setup: Setup) -> None:
    budget = setup.budget()
    begun_ms = setup.now_ms
    charge_for_long(setup, budget)
    spending = read_spending([project_of(budget)], ["method"], 0)
    assert begun_ms < spending.since_ms <= setup.now_ms - PAST_MS + DAY_MS
    since = sum(begun_ms + step * STEP_MS >= spending.since_ms for step in range(STEPS))
    assert spending.rows == ((("videos.list",), since, since),)
    recent_ms = setup.now_ms - 10 * DAY_MS
    assert read_spending([project_of(budget)], [], recent_ms).since_ms == recent_ms, "that is there"
    sums, _ = read_sums(project_of(budget))
    assert [(charged.charges, charged.units) for charged in sums] == [(since, since)]


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


def test_the_sums_of_all_charges_never_fall(setup: Setup) -> None:
    """Whoever reads them, and whatever was corrected or has left the past meanwhile."""
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
    budget = setup.budget(limit(1), recorder=Recorder(setup.state))
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


def test_the_command_names_in_one_line_where_the_charges_begin(ledger_url: str, tmp_path: Path) -> None:
    quota = Quota(tmp_path)
    quota.configure(f'[ledger]\nurl = "{ledger_url}"\n[credentials.main]\napi = "youtube-v3"\n')
    end_ms = time.time_ns() // 1_000_000
    now_ms = end_ms - STEPS * STEP_MS
    with closing(open_ledger(ledger_url, clock=lambda: now_ms)) as ledger:
        budget = budget_of(ledger, limit(500), project="main", clock=lambda: now_ms)
        while now_ms < end_ms:
            assert budget.charge("videos.list").admitted
            now_ms += STEP_MS
    for command in ("spend", "log"):
        shown = quota(command, "--since", "60d").stdout.splitlines()
        assert shown[-1].endswith(", not 60d: the ledger has dropped older charges")
        assert "not 24h" not in quota(command).stdout
    assert quota.json("spend", "--since", "7d", "--by", "day")["total_units"] in (55, 56)


def test_a_refusal_shows_the_limits_own_number_and_what_the_job_leaves_of_it(setup: Setup) -> None:
    budget = setup.budget(limit(10), leave={"modest": {"day": 4}})
    said = {}
    for units in (5, 4):
        budget.charge("videos.list", units=units)
        refused = budget.peek("videos.list", units=2, job="modest")
        said[refused.reason] = refused.why()
    assert said == {
        "leave": "limit 'day' has 5 of 10 units used, this job leaves 4 to others",
        "limit": "limit 'day' has 9 of 10 units used, this job leaves 4 to others",
    }
    assert budget.peek("videos.list").sentence() == "would admit videos.list (1 unit) on main; 1 unit left"
    assert budget.charge("videos.list").sentence() == "admitted videos.list (1 unit) on main; 0 units left"


RESETS = [
    ("youtube-v3", '"24h"', True),
    ("youtube-v3", '{ calendar = "day", zone = "UTC" }', True),
    ("youtube-v3", '{ calendar = "day", zone = "America/Los_Angeles" }', True),
    ("youtube-v3", '{ calendar = "month", zone = "Europe/Berlin" }', True),
    ("gmail-v1", '"24h"', False),
    ("gmail-v1", '"1m"', False),
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
