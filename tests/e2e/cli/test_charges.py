"""`quota log` and what `quota spend` says of refusals, as their users have them."""

from __future__ import annotations

import json

import pytest

from support.commands import Quota, one_line
from support.configurations import limited

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
    for words in (["log", "--job", "nobody"], ["log", "--method", ""], ["spend", "--job", "nobody"]):
        assert quota(*words).stdout == "nothing like that was charged in the last 24h\n"
    assert "24h; did you mean 'search.list'?" in quota("log", "--method", "Search.lists").stdout


@pytest.mark.parametrize("command", ["spend", "log --refused", "explain"])
def test_a_job_that_nobody_configured_is_answered_with_the_nearest(quota: Quota, command: str) -> None:
    with (quota.folder / "quota.toml").open("a") as file:
        file.write('[jobs.trending]\nfetch = "trending"\nregions = ["US"]\n')
    done = quota(*command.split(), "--job", "tredning")
    assert "; did you mean 'trending'?" in done.stdout + done.stderr
    assert "did you mean" not in quota(*command.split(), "--job", "trending").stdout


@pytest.mark.parametrize("columns", ["40", "80", "120"])
def test_an_id_is_whole_in_a_terminal_of_any_width(quota: Quota, columns: str) -> None:
    """It is there to be copied. In 80 columns a reader also sees who spent it."""
    charged = quota.json("charge", "search.list", "--job", "a-job-of-this-name", "--region", "DE")["id"]
    run = json.loads(quota("log", "--json").stdout)["run"]
    shown = quota("log", COLUMNS=columns).stdout
    assert charged in shown
    assert max(map(len, shown.splitlines())) <= int(columns)
    who = [word in shown.replace(charged, "") for word in ("a-job-of-", "DE", run)]
    assert who == [int(columns) >= 80] * 3


def test_a_long_name_pushes_out_no_other_column_of_the_log(quota: Quota) -> None:
    quota("charge", "search.list", "--job", "x" * 60)
    shown = quota("log", COLUMNS="80").stdout
    assert ["search." in shown, f"{'x' * 27}..." in shown] == [True, True]


def test_charges_of_several_projects_are_in_order_and_named(quota: Quota) -> None:
    quota.configure(limited(102) + OTHER)
    ids = [quota.json("charge", "videos.list", "--credential", name)["id"] for name in ("main", "other") * 2]
    lines = [json.loads(line) for line in quota("log", "--json").stdout.splitlines()]
    assert [(line["id"], line["project"]) for line in lines] == list(zip(ids, "pqpq", strict=True))
    assert "project" in quota("log").stdout
    assert len(quota("log", "--json", "--credential", "other").stdout.splitlines()) == 2


def test_a_refused_charge_is_counted_and_kept_after_the_command_has_ended(quota: Quota) -> None:
    assert quota("charge", "search.list").returncode == 0
    assert quota("charge", "search.list", "--job", "backfill", "--region", "DE").returncode == 75
    assert quota("exec", "search.list", "--", "touch", "ran").returncode == 75
    assert not (quota.folder / "ran").exists()
    spent = quota.json("spend")
    assert spent["refused"] == [
        {"limit": "day", "job": "", "reason": "limit", "calls": 1},
        {"limit": "day", "job": "backfill", "reason": "limit", "calls": 1},
    ]
    assert quota("spend").stdout.splitlines()[-1] == "2 calls refused: 2 by limit 'day'; see `quota log --refused`"
    kept = [json.loads(line) for line in quota("log", "--refused", "--json").stdout.splitlines()]
    assert [each["region"] for each in kept] == ["DE", ""]
    assert kept[0]["retry_at"] is not None
    shown = quota("log", "--refused").stdout
    assert [word in shown for word in ("backfill", "DE", "day", "limit")] == [True] * 4
    narrow = quota("log", "--refused", COLUMNS="80").stdout
    assert [kept[0]["run"] in narrow, "\n\n" in narrow] == [True, False]
    assert "units what job" in quota("explain").stdout
    nothing = "nothing like that was refused in the last 24h; a call that can never fit is not kept\n"
    assert quota("log", "--refused", "--job", "x").stdout == nothing


@pytest.mark.parametrize("since", ["yesterday", "", f"{9**40}d"], ids=len)
def test_a_bad_since_is_wrong_usage(quota: Quota, since: str) -> None:
    assert one_line(quota("log", "--since", since), 2).startswith("--since ")
