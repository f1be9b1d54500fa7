"""`quota log` and what `quota spend` says of refusals, as their users have them."""

from __future__ import annotations

import json
import time
from contextlib import closing

import pytest

from quota.budget import project_of
from quota.ledger.factory import open_ledger
from quota.rules.entry import END, START
from quota.terms.limits import HOUR_MS
from support.commands import Quota, one_line
from support.configurations import limited
from support.setup import budget_of, limit

OTHER = """
[credentials.other]
api = "youtube-v3"
project = "q"
"""


@pytest.fixture
def quota(quota: Quota) -> Quota:
    quota.configure(limited(102))
    return quota


def test_single_charges_are_listed_with_ids_for_a_correction_newest_last(quota: Quota) -> None:
    searched = quota.json("charge", "search.list", "--job", "backfill", "--region", "DE")["id"]
    listed = quota.json("charge", "videos.list", "--job", "trending")["id"]
    lines = [json.loads(line) for line in quota("log", "--json").stdout.splitlines()]
    assert [line["id"] for line in lines] == [searched, listed]
    assert (lines[0]["units"], lines[0]["method"], lines[0]["job"]) == (100, "search.list", "backfill")
    assert (lines[0]["region"], lines[0]["project"], len(lines[0]["run"])) == ("DE", "p", 8)
    assert quota("refund", lines[0]["id"]).returncode == 0
    shown = quota("log", COLUMNS="120").stdout
    assert [word in shown for word in (searched, listed, "charged", "backfill", "DE")] == [True] * 5
    (first,) = [json.loads(line) for line in quota("log", "--json", "--job", "backfill").stdout.splitlines()]
    assert (first["units"], first["charged_units"]) == (0, 100)
    by_method = quota("log", "--json", "--method", "youtube.videos.list").stdout.splitlines()
    assert [json.loads(line)["id"] for line in by_method] == [listed]
    assert quota("log", "--job", "nobody").stdout == "nothing like that was charged in the last 24h\n"
    assert quota("log", "--method", "").stdout == "nothing like that was charged in the last 24h\n"
    assert quota("spend", "--job", "nobody").stdout == "nothing like that was charged in the last 24h\n"


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_an_id_is_whole_in_a_terminal_of_any_width(quota: Quota, columns: str) -> None:
    """It is there to be copied."""
    charged = quota.json("charge", "search.list", "--job", "a-job-of-this-name", "--region", "DE")["id"]
    shown = quota("log", COLUMNS=columns).stdout
    assert charged in shown
    assert max(map(len, shown.splitlines())) <= int(columns)
    assert ("a-job-of-" in shown, "DE" in shown) == (int(columns) >= 80, int(columns) >= 120)


def test_in_a_pipe_each_charge_is_one_line_with_whole_names(quota: Quota) -> None:
    for _ in range(2):
        quota("charge", "commentThreads.list", "--job", "a-job-with-a-long-name-of-its-own", "--region", "r" * 64)
    lines = quota("log", COLUMNS="").stdout.splitlines()
    assert sum("commentThreads.list" in line and "a-job-with-a-long-name-of-its-own" in line for line in lines) == 2


def test_charges_of_several_projects_are_in_order_and_named(quota: Quota) -> None:
    quota.configure(limited(102) + OTHER)
    ids = [
        quota.json("charge", "videos.list", "--credential", name)["id"] for name in ("main", "other", "main", "other")
    ]
    lines = [json.loads(line) for line in quota("log", "--json").stdout.splitlines()]
    assert [(line["id"], line["project"]) for line in lines] == list(zip(ids, "pqpq", strict=True))
    assert "project" in quota("log").stdout
    assert len(quota("log", "--json", "--credential", "other").stdout.splitlines()) == 2


def test_a_refused_charge_is_counted_and_kept_after_the_command_has_ended(quota: Quota) -> None:
    assert quota("charge", "search.list").returncode == 0
    assert quota("charge", "search.list", "--job", "backfill", "--region", "DE").returncode == 75
    assert quota("exec", "search.list", "--", "true").returncode == 75
    spent = quota.json("spend")
    assert spent["refused"] == [
        {"limit": "day", "job": "", "reason": "limit", "calls": 1},
        {"limit": "day", "job": "backfill", "reason": "limit", "calls": 1},
    ]
    assert quota("spend").stdout.splitlines()[-1] == "2 calls refused: 2 by day; see `quota log --refused`"
    kept = [json.loads(line) for line in quota("log", "--refused", "--json").stdout.splitlines()]
    assert [one["region"] for one in kept] == ["DE", ""]
    assert kept[0]["retry_at"] is not None
    shown = quota("log", "--refused").stdout
    assert [word in shown for word in ("backfill", "DE", "day", "limit")] == [True] * 4
    assert quota("log", "--refused", "--job", "x").stdout == "nothing like that was refused in the last 24h\n"


def test_a_bad_since_is_wrong_usage(quota: Quota) -> None:
    for command, since in (
        ("log", "yesterday"),
        ("log", ""),
        ("log", "-1h"),
        ("spend", "1.5d"),
        ("spend", f"{9**40}d"),
    ):
        assert "--since" in one_line(quota(command, "--since", since), 2)


def test_charges_that_left_the_log_are_listed_and_summed(quota: Quota) -> None:
    end_ms = time.time_ns() // 1_000_000
    now_ms = end_ms - 120 * HOUR_MS
    with closing(open_ledger(f"sqlite:///{quota.folder / 'ledger.db'}", clock=lambda: now_ms)) as ledger:
        budget = budget_of(ledger, limit(1_000), clock=lambda: now_ms)
        while now_ms < end_ms:
            assert budget.charge("videos.list").admitted
            now_ms += HOUR_MS
        project_of(budget).close()
        assert 0 < len(ledger.past("p", START, END, 1_000)) < 120
    assert len(quota("log", "--since", "30d", "--json").stdout.splitlines()) == 120
    assert "not 30d" not in quota("log", "--since", "30d").stdout
    assert quota.json("spend", "--since", "30d", "--by", "day")["total_units"] == 120
