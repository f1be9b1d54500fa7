"""What was spent, and since when the log can say so; when upstream starts counting anew, and where it never does."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from quota.ledger.contract import MIN_RETENTION_MS
from quota.ledger.factory import open_ledger
from quota.reports.spending import read_spending
from quota.reports.status import read_status
from quota.session import Session
from quota.settings.load import load_settings
from quota.terms.limits import DAY_MS, HOUR_MS
from support.commands import Quota
from support.losses import LedgerStorage, RedisStorage
from support.setup import limit

if TYPE_CHECKING:
    from pathlib import Path

    from support.setup import Setup


def test_a_spending_says_since_when_the_log_is_whole(setup: Setup) -> None:
    budget = setup.budget()
    begun_ms = setup.now_ms
    for _ in range(120):
        assert budget.charge("videos.list").admitted
        setup.now_ms += HOUR_MS
    spending = read_spending(setup.ledger, [setup.project], ["method"], setup.now_ms - 7 * DAY_MS)
    assert begun_ms < spending.since_ms <= setup.now_ms - MIN_RETENTION_MS + 2 * HOUR_MS
    since = sum(begun_ms + hour * HOUR_MS >= spending.since_ms for hour in range(120))
    assert spending.rows == ((("videos.list",), since, since),)
    recent_ms = setup.now_ms - 10 * HOUR_MS
    assert read_spending(setup.ledger, [setup.project], [], recent_ms).since_ms == recent_ms, "that is there"


def test_a_log_that_let_go_of_nothing_answers_for_all_that_was_asked(setup: Setup) -> None:
    setup.budget().charge("videos.list")
    since_ms = setup.now_ms - 300 * DAY_MS
    assert read_spending(setup.ledger, [setup.project], [], since_ms).since_ms == since_ms
    assert read_spending(setup.ledger, [setup.project], [], 0).since_ms == 0, "nor is anything missing since 1970"


def test_several_projects_are_summed_over_the_same_time(setup: Setup) -> None:
    budget = setup.budget()
    setup.project += "-other"
    other = setup.budget()
    for _ in range(120):
        assert budget.charge("videos.list").admitted
        setup.now_ms += HOUR_MS
    setup.now_ms -= 100 * HOUR_MS
    assert other.charge("videos.list").admitted
    setup.now_ms += 100 * HOUR_MS
    projects = [budget.project, other.project]
    both = read_spending(setup.ledger, projects, [], setup.now_ms - 7 * DAY_MS)
    assert both.since_ms == read_spending(setup.ledger, projects[:1], [], setup.now_ms - 7 * DAY_MS).since_ms
    assert read_spending(setup.ledger, projects[1:], [], setup.now_ms - 7 * DAY_MS).total_units == 1
    assert both.total_units == read_spending(setup.ledger, projects[:1], [], setup.now_ms - 7 * DAY_MS).total_units


def test_the_command_says_so_in_one_line(ledger_place: LedgerStorage, tmp_path: Path) -> None:
    quota = Quota(tmp_path)
    quota.configure(f'[ledger]\nurl = "{ledger_place.url}"\n[credentials.main]\napi = "youtube-v3"\n')
    end_ms = time.time_ns() // 1_000_000
    now_ms = end_ms - 100 * HOUR_MS

    with closing(open_ledger(ledger_place.url, clock=lambda: now_ms)) as ledger:
        session = Session(load_settings(tmp_path / "quota.toml"), clock=lambda: now_ms)
        session._ledger = ledger
        while now_ms < end_ms:
            assert session.budget().charge("videos.list").admitted
            now_ms += HOUR_MS
    # The session has rolled the hours up: all of them are known.
    assert quota.json("spend", "--since", "7d", "--by", "day")["total_units"] in (100, 101)
    by_run = quota("spend", "--since", "7d", "--by", "run")
    assert by_run.stdout.splitlines()[-1].endswith(", not 7d: the history does not keep runs")
    forget_history(ledger_place, tmp_path / "ledger.db")
    asked = quota("spend", "--since", "7d")
    assert asked.returncode == 0, asked.stderr
    assert ", not 7d: the ledger has dropped older charges" in asked.stdout.splitlines()[-1]
    assert "not 24h" not in quota("spend").stdout
    spent = quota.json("spend", "--since", "7d")
    assert spent["since"] > spent["until"].replace(spent["until"][:10], "0000-00-00")
    assert 48 <= spent["total_units"] <= 51


def test_a_refusal_says_why_the_number_is_below_the_limits_own(setup: Setup) -> None:
    """With `leave` it is lower, whichever of the two the call would exceed."""
    budget = setup.budget(limit(10), leave={"modest": {"day": 4}})
    said = {}
    for units in (5, 4):
        budget.charge("videos.list", units=units)
        refused = budget.peek("videos.list", units=2, job="modest")
        said[refused.reason] = refused.why()
    assert said == {
        "leave": "limit 'day' has 5 of 6 units used, this job leaves 4 to others",
        "limit": "limit 'day' has 9 of 6 units used, this job leaves 4 to others",
    }
    assert budget.peek("videos.list").sentence() == "would admit videos.list (1 unit) on main; 1 unit left"
    assert budget.charge("videos.list").sentence() == "admitted videos.list (1 unit) on main; 0 units left"


def forget_history(place: LedgerStorage, path: Path) -> None:
    if isinstance(place, RedisStorage):
        with place.open() as client:
            client.delete(*place.keys("*:history"))
    else:
        with closing(sqlite3.connect(path)) as db, db:
            db.execute("DELETE FROM state WHERE name LIKE 'history:%'")


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
    quota = Quota(tmp_path)
    quota.configure(
        f'[credentials.main]\napi = "{api}"\n[[credentials.main.limits]]\nname = "it"\nunits = 100\nwindow = {window}\n'
    )
    midnight_ms = 1_795_334_400_000  # on the Pacific coast, 08:00 in UTC
    with Session(load_settings(), clock=lambda: midnight_ms - 1) as session:
        (row,) = read_status(session).credentials[0].limits
    assert (row.resets_ms, row.zone) == ((midnight_ms, "America/Los_Angeles") if resets else (None, None))
    assert (quota.json("status")["credentials"][0]["limits"][0]["resets_at"] is not None) is resets
    assert ("upstream resets" in quota("status").stdout) is resets
