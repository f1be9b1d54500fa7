"""A call that is charged to several buckets, and a free one, as users of the command line have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from quota import open as open_session
from quota.common.clock import NEVER
from support.commands import Quota, one_line

BOOK = """
api = "forge"
source = "the tests"
read_on = 2026-11-01
[buckets.core]
quota = 5_000
resets = "1h"
[buckets.points]
windows = [{ quota = 900, resets = "1m" }, { quota = 9_000, resets = { calendar = "quarter-hour", zone = "UTC" } }]
[default]
get = 1
other = 1
[methods]
read = [{ bucket = "core", units = 1 }, { bucket = "points", units = 1 }]
write = [{ bucket = "core", units = 1 }, { bucket = "points", units = 5 }]
status = 0
later = { prices = [{ units = 0 }, { parts = [{ units = 1 }, { bucket = "points", units = 9 }], since = 2099-12-01 }] }
"""


@pytest.fixture
def quota(tmp_path: Path) -> Quota:
    quota = Quota(tmp_path)
    (tmp_path / "forge.toml").write_text(BOOK)
    quota.configure('[ledger]\nurl = "sqlite:///ledger.db"\n[credentials.main]\napi = "./forge.toml"\n')
    return quota


def used(quota: Quota) -> dict[str, int]:
    (credential,) = quota.json("status")["credentials"]
    return {limit["name"]: limit["used_units"] for limit in credential["limits"]}


def test_the_book_is_shown_with_all_buckets(quota: Quota) -> None:
    assert [" ".join(line.split()) for line in quota("costs").stdout.splitlines()[:4]] == [
        "later free; 1 core and 9 points from 2099-12-01",
        "read 1 core, 1 points",
        "status free",
        "write 1 core, 5 points",
    ]
    (later,) = quota.json("costs", "later")["methods"]
    assert (later["units"], later["bucket"], later["parts"]) == (0, None, [])
    parts = [{"bucket": "core", "units": 1}, {"bucket": "points", "units": 9}]
    assert later["next"] == {"units": 1, "bucket": "core", "parts": parts, "since": "2099-12-01"}


def test_one_id_explains_settles_and_refunds_a_call_of_two_buckets(quota: Quota) -> None:
    decision = quota.json("charge", "write")
    charge_id = decision["id"]
    assert [limit["cost_units"] for limit in decision["limits"]] == [1, 5, 5, 5]
    explained = quota.json("explain", charge_id)
    assert (explained["id"], explained["bucket"], explained["units"]) == (charge_id, "core", 1)
    assert [(each["bucket"], each["units"]) for each in explained["also"]] == [("points", 5)]
    explanation = quota("explain", charge_id).stdout
    assert "CHARGED 1 unit for write" in explanation
    assert "CHARGED 5 units for write" in explanation
    assert quota("settle", charge_id, "3").stdout == f"write {charge_id}: now 3 units, before 1\n"
    limits = {"points-minute": 5, "points-quarter-hour": 5, "points-utc-quarter-hour": 5}
    assert used(quota) == {"hour": 3, **limits}
    assert quota("refund", charge_id).stdout == f"write {charge_id}: now 0 units, before 3\n"
    assert set(used(quota).values()) == {0}
    assert "It was refunded, or settled at 0: it counts nothing now" in quota("explain", charge_id).stdout
    assert one_line(quota("settle", charge_id, "-3"), 2).startswith("-3 units: a settled charge")
    first = charge_id.partition("+")[0]
    assert one_line(quota("refund", f"{first}+"), 1).startswith(f"project 'main' has no charge '{first}+'")


def test_a_refusal_by_two_closed_buckets_names_both(quota: Quota) -> None:
    with open_session(quota.folder / "quota.toml") as session:
        for bucket in ("core", "points"):
            session.budget().exhaust(bucket, 0, NEVER, "used up")
    quota("charge", "write")
    assert [[change["name"] for change in both] for both in quota.json("explain")["admits"]] == [["core", "points"]]


def test_spend_counts_a_call_once(quota: Quota) -> None:
    for method in ("write", "read", "status"):
        quota("charge", method)
    shown = quota("spend").stdout
    assert [line.split() for line in shown.splitlines() if "write" in line] == [["write", "1", "6"]]
    assert "units of several buckets are added up; `quota spend --by method,bucket` shows them apart" in shown
    by_bucket = quota("spend", "--by", "bucket").stdout
    rows = [["points", "2", "6"], ["core", "2", "2"], ["total", "2", "8"]]
    assert [row for line in by_bucket.splitlines() if len(row := line.split()) == 3 and row[1] != "charges"] == rows
    assert "added up" not in by_bucket


def test_the_log_names_the_bucket_of_each_charge_of_a_call(quota: Quota) -> None:
    quota("charge", "write", "--job", "nightly")
    quota("settle", quota.json("charge", "other", "--units", "2")["id"], "3")
    lines = [line.split()[2:-1] for line in quota("log", COLUMNS="200").stdout.splitlines()]
    of_write = [["1", "1", "write", "core", "nightly", "-"], ["5", "5", "write", "points", "nightly", "-"]]
    assert lines[2:] == [*of_write, ["3", "2", "other", "core", "-", "-"]]
    quota.configure('[ledger]\nurl = "sqlite:///ledger.db"\n[credentials.main]\napi = "youtube-v3"\nproject = "one"\n')
    quota("charge", "videos.list")
    assert "bucket" not in quota("log").stdout, "no call is charged to several"


def test_a_limit_shows_the_reset_of_its_own_window(quota: Quota) -> None:
    (credential,) = quota.json("status")["credentials"]
    resets = [limit["name"] for limit in credential["limits"] if limit["resets_at"] is not None]
    assert resets == ["points-quarter-hour", "points-utc-quarter-hour"]
    book = BOOK.replace('"1h"', '{ calendar = "month", zone = "UTC" }').replace(
        '"quarter-hour", zone = "UTC"', '"day", zone = "America/Los_Angeles"'
    )
    (quota.folder / "forge.toml").write_text(book)
    lines = [line.split(": ")[0] for line in quota("status").stdout.splitlines() if line.startswith("upstream resets")]
    assert lines == ["upstream resets month, utc-month", "upstream resets points-day, points-pacific-day"]
