"""`quota plan` says whether a schedule fits, when it runs dry, and what would fit."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest

from quota.cli.output import render_parts
from quota.jobs.job import load_fetch
from quota.jobs.plan import suggestions
from quota.jobs.plan.plan import Plan, make_plan, plan_parts
from quota.jobs.plan.simulation import State, pass_steps, step_at
from quota.jobs.plan.suggestions import slower
from quota.jobs.store.checkpoints import Checkpoint, by_rotation
from quota.rules.entry import Entry
from quota.settings.load import load_settings
from quota.settings.model import JobSettings, Settings
from quota.terms.limits import DAY_MS
from support.commands import Quota, one_line
from support.configurations import both_windows

MONDAY = date(2026, 11, 23)
NOON_MS = 1_795_464_000_000
"""Noon of that day in Los Angeles."""

STORES = '[ledger]\nurl = "sqlite:///ledger.db"\n[store]\nurl = "sqlite:///videos.db"\n'
LIMITS = STORES + both_windows(10_000)
# A function of one's own: one search for each keyword, and nothing else.
KEYWORDS = """
[jobs.keywords]
fetch = "keywords:fetch"
regions = ["cats", "dogs", "birds", "fish", "frogs", "bats", "owls"]
schedule = "every 45m"
"""
KEYWORDS_PY = """
from quota.jobs.job import Page, first_attempt

@first_attempt("search.list")
def fetch(client, region, cursor):
    client.search().list(part="id", q=region).execute()
    return Page()
"""


@pytest.fixture
def folder(tmp_path: Path, state_dir: Path) -> Path:
    (tmp_path / "keywords.py").write_text(KEYWORDS_PY)
    return tmp_path


def settings(folder: Path, text: str) -> Settings:
    path = folder / "quota.toml"
    path.write_text(text)
    return load_settings(path)


def shown(plan: Plan) -> list[str]:
    from rich.console import Console

    console = Console(width=80)
    with console.capture() as capture:
        console.print(render_parts(plan_parts(plan)))
    return capture.get().splitlines()


@pytest.fixture(scope="module")
def too_much(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "keywords.py").write_text(KEYWORDS_PY)
    return make_plan(settings(folder, LIMITS + KEYWORDS), 0, first_day=MONDAY)


# -- the bug report ----------------------------------------------------------------------------------------------------


def test_seven_keywords_every_45_minutes_do_not_fit_into_10000_units(too_much: Plan) -> None:
    plan = too_much
    assert not plan.fits
    assert [row.needs_units for row in plan.limits] == [22_400, 22_400]
    (job,) = plan.jobs
    first = plan.outcome.refusals[0]
    # The interval counts from 1970, so on this day the first tick is at 00:15.
    assert job.first_refused_ms == int(datetime(2026, 11, 23, 18, 45, tzinfo=UTC).timestamp() * 1000)
    assert first.regions == 5
    assert plan.limits[0].days[0].left_units == 0
    assert sum(day.used_units for day in plan.limits[1].days) == 70_000
    assert [(x.setting, x.after) for x in plan.changes] == [("schedule", '"every 103m"'), ("regions", "3")]


def test_a_run_that_may_not_spend_enough_may_spend_more(folder: Path) -> None:
    plan = make_plan(settings(folder, LIMITS + KEYWORDS.replace("45m", "3h") + "max_units = 600"), 0, first_day=MONDAY)
    assert [(x.setting, x.after) for x in plan.changes] == [("regions", "6"), ("max_units", "700")]


def test_the_search_for_changes_has_an_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suggestions, "SEARCH_WITHIN_S", -1.0)
    plan = make_plan(settings(folder, LIMITS + KEYWORDS), NOON_MS)
    assert (plan.fits, plan.changes) == (False, ())
    assert "the search for changes ended after -1 s; smaller ones may fit" in plan.notes


def test_a_plan_names_limits_without_a_whole_window(folder: Path) -> None:
    limits = LIMITS.replace("America/Los_Angeles", "UTC")
    for days, named in ((1, ["pacific-day; leave --days out"]), (2, [])):
        notes = make_plan(settings(folder, limits), NOON_MS, days=days, first_day="next").notes
        assert [text.partition("no whole window is in the plan: ")[2] for text in notes] == named


def test_a_job_of_each_machine_is_counted_for_all_of_them(folder: Path) -> None:
    text = """
[ledger]
url = "redis://127.0.0.1:1/0"
unavailable = {{ max_cost = 1, allowance = 1, machines = {} }}
[credentials.main]
api = "youtube-v3"
limits = [{{ name = "day", quota = 100, headroom = 10, window = "24h" }}]
[jobs.t]
fetch = "trending"
regions = ["US", "DE"]
schedule = "every 1h"
{}
"""
    at_ms = 1_795_204_800_000
    once, ignored, twice = (
        make_plan(settings(folder, text.format(*given)), at_ms, days=1)
        for given in ((1, ""), (2, ""), (2, 'machines = "each"'))
    )
    assert (once.fits, ignored.fits, twice.fits) == (True, True, False)
    ticks_of = [plan.jobs[0].ticks for plan in (once, ignored, twice)]
    assert ticks_of == [ticks_of[0], ticks_of[0], 2 * ticks_of[0]]
    assert "counted 2 times, for as many machines as `unavailable` names: t" in twice.notes


def test_a_plan_of_nothing_does_not_say_that_it_fits(folder: Path) -> None:
    for schedule, verdict in (
        ("", 'nothing is scheduled: no job has a schedule, such as "*/30 * * * *"'),
        ('schedule = "0 0 1 1 *"', "nothing is due in this time, so nothing would be refused"),
    ):
        text = LIMITS + KEYWORDS.replace('schedule = "every 45m"', schedule)
        plan = make_plan(settings(folder, text), 0, first_day=MONDAY)
        assert (plan.fits, plan.as_json()["ticks"]) == (True, 0), "nothing is refused"
        assert shown(plan)[1] == verdict


# -- days and charts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("day", "hours"), [(date(2026, 3, 8), 23), (date(2026, 11, 1), 25), (MONDAY, 24)])
def test_days_have_their_own_number_of_hours(folder: Path, day: date, hours: int) -> None:
    hourly = KEYWORDS.replace('"every 45m"', '"30 * * * *"')
    plan = make_plan(settings(folder, LIMITS + hourly), 0, first_day=day, days=2, find_changes=False)
    assert [len(row.hours) for row in plan.limits[1].days] == [hours, 24]
    assert plan.limits[1].days[0].hours[:15] == (700,) * 14 + (200,)
    assert plan.jobs[0].ticks == hours + 24


def test_the_chart_fits_80_columns_and_shows_each_day(too_much: Plan) -> None:
    lines = shown(too_much)
    assert all(len(line) <= 80 for line in lines), max(lines, key=len)
    (monday,) = [line for line in lines if "Mon 23 " in line]
    assert monday.split()[-3:] == ["10,000", "0", "2026-11-23T18:45:00+00:00"]
    assert "  keywords: 3 regions instead of 7" in lines


def test_searches_have_a_bucket_of_their_own(folder: Path) -> None:
    """95 searches a day under the newer allocation: half an hour for two regions, one page, is one too many."""
    text = """
    [credentials.main]
    api = "youtube-v3-buckets"
    [jobs.concerts]
    fetch = "search"
    regions = ["DE", "FR"]
    schedule = "*/30 * * * *"
    options = { words = "live" }
    """
    plan = make_plan(settings(folder, text), 0, first_day=MONDAY)
    needs = {row.limit.name: row.needs_units for row in plan.limits}
    assert (needs["search-day"], needs["day"], needs["uploads-day"]) == (96, 96, 0)
    assert {refusal.limit for refusal in plan.outcome.refusals} <= {"search-day", "search-pacific-day"}
    assert [(x.setting, x.after) for x in plan.changes] == [("schedule", '"0 * * * *"'), ("regions", "1")]
    assert "not used: uploads-day, uploads-pacific-day, batch-stats-day," in "\n".join(shown(plan))


def test_a_plan_counts_the_need_of_24_hours_over_a_midnight(folder: Path) -> None:
    night = KEYWORDS.replace('"every 45m"', '"0 18-23 * * mon"\ntimezone = "America/Los_Angeles"')
    morning = night.replace("jobs.keywords", "jobs.early").replace("18-23 * * mon", "0-5 * * tue")
    text = STORES + both_windows(5_000) + night + morning
    plan = make_plan(settings(folder, text), 0, days=2, first_day=MONDAY, find_changes=False)
    assert {row.limit.name: row.needs_units for row in plan.limits} == {"day": 12 * 700, "pacific-day": 6 * 700}
    assert {refusal.limit for refusal in plan.outcome.refusals} == {"day"}


def test_a_shadow_is_in_the_plan_and_refuses_nothing(folder: Path) -> None:
    trial = '[[credentials.main.limits]]\nname = "trial"\nunits = 500\nwindow = "24h"\nshadow = true\n'
    plan = make_plan(settings(folder, LIMITS + trial + KEYWORDS.replace("45m", "2h")), 0, first_day=MONDAY)
    assert plan.fits
    assert "trial (24h, a shadow: it refuses nothing): needs 8,400 units a day, holds 500" in shown(plan)
    assert [row["shadow"] for row in plan.as_json()["limits"]] == [False, False, True]  # type: ignore[attr-defined]
    assert [row.days[0].left_units for row in plan.limits] == [1_600, 1_600, None], "what refuses is what is left"


# -- what a tick costs -------------------------------------------------------------------------------------------------


def job(fetch: str, pages: int, **options: object) -> JobSettings:
    return JobSettings("job", "main", fetch, ("US",), pages, None, 0, {}, options, 600_000, 16, 120, 10_000)


@pytest.mark.parametrize(
    ("job_settings", "methods"),
    [
        (job("trending", 3), ["videos.list"] * 3),
        (job("search", 2, words="x"), ["search.list", "videos.list"] * 2),
        (job("search", 2, words=["x", "y", "z"]), ["search.list", "videos.list"] * 6),
        (job("channels", 5), ["channels.list"] * 5),
        (job("channels", 5, ids=[str(n) for n in range(120)]), ["channels.list"] * 3),
        (job("channels", 2, ids=[str(n) for n in range(120)]), ["channels.list"] * 2),
        (job("uploads", 3), ["playlistItems.list"] * 3),
        (job("videos", 3), ["videos.list"] * 3),
        (job("comments", 3), ["commentThreads.list"] * 3),
    ],
)
def test_a_pass_makes_these_calls(job_settings: JobSettings, methods: list[str]) -> None:
    assert [*pass_steps(job_settings, load_fetch(job_settings.fetch, job_settings.options))] == methods


@pytest.mark.parametrize(
    ("cursor", "pages", "step"),
    [({"token": "a"}, 1, 2), ({"ids": ["a"], "next": None}, 0, 1), ({"ids": ["a"], "next": "b"}, 1, 3)],
)
def test_a_place_in_the_middle_of_a_search_is_a_step_of_its_pass(cursor: dict[str, Any], pages: int, step: int) -> None:
    searches = job("search", 2, words="x")
    assert step_at(searches, Checkpoint("job", "US", True, cursor, pages, started_at_ms=1)) == step
    assert step_at(searches, Checkpoint("job", "US", True)) == 0


def test_a_region_in_the_middle_of_its_pass_comes_first_then_the_one_done_longest_ago() -> None:
    checkpoints = [
        Checkpoint("job", "new", True, completed_at_ms=30),
        Checkpoint("job", "old", True, completed_at_ms=10),
        Checkpoint("job", "failed", True, completed_at_ms=5, failed_at_ms=20),
        Checkpoint("job", "done", False, completed_at_ms=1),
        Checkpoint("job", "begun", True, {"token": "a"}, completed_at_ms=40),
    ]
    assert [checkpoint.region for checkpoint in by_rotation(checkpoints)] == ["begun", "old", "failed", "new"]


@pytest.mark.parametrize(
    ("schedule", "first", "last"),
    [
        ("*/5 * * * *", ["*/6 * * * *", "*/10 * * * *", "*/12 * * * *"], "0 0 * * *"),
        ("5-59/20 * * * 1-5", ["5-59/30 * * * 1-5", "5 * * * 1-5"], "5 0 * * 1-5"),
        ("*/30 6-20 * * *", ["0 6-20 * * *"], "0 6 * * *"),
        ("0 0 * * *", [], None),
        ("every 45m", ["every 46m", "every 47m"], "every 24h"),
    ],
)
def test_slower_schedules_are_of_the_same_kind(schedule: str, first: list[str], last: str | None) -> None:
    ladder = slower(job("trending", 1)._replace(schedule=schedule))
    assert ladder[: len(first)] == first
    assert (ladder[-1] if ladder else None) == last


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_says_no_with_exit_1_and_prints_json(folder: Path) -> None:
    quota = Quota(folder)
    quota.configure(LIMITS + KEYWORDS)
    plan = quota.json("plan", "--from", "2026-11-23", "--days", "2", status=1)
    assert (plan["fits"], plan["ticks"], plan["from"]) == (False, 64, "2026-11-23T08:00:00.000Z")
    assert plan["limits"][0]["needs_units_per_day"] == 22_400
    assert plan["limits"][0]["days"][0]["dry_at"] == "2026-11-23T18:45:00.000Z"
    assert plan["changes"][0] == {
        "job": "keywords",
        "credential": "main",
        "setting": "schedule",
        "before": '"every 45m"',
        "after": '"every 103m"',
    }
    assert not (folder / "ledger.db").exists(), "a plan from empty touches no ledger"
    quota.configure(LIMITS + KEYWORDS.replace("45m", "3h"))
    assert quota("plan", "--from", "empty").returncode == 0


def test_the_command_begins_with_what_the_ledger_holds(folder: Path) -> None:
    quota = Quota(folder)
    quota.configure(LIMITS + KEYWORDS.replace("45m", "3h"))
    assert quota("plan").returncode == 0
    assert quota("charge", "videos.list", "--units", "9500").returncode == 0
    plan = quota.json("plan")
    assert plan["jobs"][0]["first_refused_by"] in ("day", "pacific-day")
    assert max(day["used_units"] for day in plan["limits"][0]["days"]) >= 9_500


def spent_now(units: int) -> State:
    charge = Entry((NOON_MS - 1, 0), units, "units", "videos.list", "by-hand", "", "k")
    return State(entries={"main": [charge]})


def test_a_schedule_that_only_todays_spending_stops_fits(folder: Path) -> None:
    plan = make_plan(settings(folder, LIMITS + KEYWORDS.replace("45m", "3h")), NOON_MS, state=spent_now(9_900))
    assert (plan.fits, plan.changes) == (True, ())
    refused = [refusal.at_ms for refusal in plan.outcome.refusals]
    assert refused[-1] < NOON_MS + DAY_MS
    now = f"fits; current spending or a closed bucket refuses {len(refused)} of {plan.jobs[0].ticks} ticks, the last at"
    assert " ".join(shown(plan)[1:3]).startswith(now)


def test_a_schedule_is_held_against_a_month_that_is_longer_than_the_plan(folder: Path) -> None:
    month = (STORES + both_windows(20_000)).replace('"24h"', '{ calendar = "month", zone = "UTC" }')
    planned = settings(folder, month + KEYWORDS.replace("every 45m", "0 0 * * *"))
    assert not make_plan(planned, NOON_MS, state=spent_now(19_900)).fits
    assert not make_plan(planned, NOON_MS).fits, "it is looked at for a whole month"
    assert make_plan(planned, NOON_MS, days=7).fits


def test_bad_input_is_one_line(folder: Path) -> None:
    quota = Quota(folder)
    quota.configure(LIMITS + KEYWORDS)
    assert "--days 0: choose 1 to 92 days" in one_line(quota("plan", "--days", "0"), 2)
    says = "--from 'tomorrow': write now, empty, or a date such as 2026-11-01"
    assert says in one_line(quota("plan", "--from", "tomorrow"), 2)
