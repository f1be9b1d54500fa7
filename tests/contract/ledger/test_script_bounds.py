"""Every number in the scripts and their twins at which something ends, and what comes one beyond it."""

from __future__ import annotations

import re
import time
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import pytest
import redis

import quota.ledger.redis_ledger
import quota.ledger.sqlite_decision
from contract.ledger.test_charge_script import ALL, LOG, MIN_RETENTION_MS, NOW, STATE, Scripts, scripts
from contract.ledger.test_redis_ledger import calls, opened, server
from quota.budget import Budget
from quota.common.clock import NEVER
from quota.errors import LedgerError
from quota.ledger.entry import Charge
from quota.ledger.factory import open_ledger
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS
from support.books import BOOK
from support.proxy import Proxy
from support.setup import limit

if TYPE_CHECKING:
    from support.servers import RedisServer

__all__ = ["scripts", "server"]  # fixtures

BOUNDS = {
    "CLOCK_SLACK_MS": "a caller so far ahead is answered; one more millisecond is CLOCK",
    "CLOCK_BEHIND_MS": "a caller so far behind is answered; one more millisecond is CLOCK",
    "RETENTION_SLACK_MS": "what has expired so long ago is removed; a millisecond less and it stays",
    "MAX_SEQ": "numbers up to it are exact; more is an error",
    "CHUNK": "so many entries are trimmed at once, the rest with the next; or fields removed, the rest a minute later",
    "MAX_ENTRIES": "so many are read by one call; more is MORE, or not said of a refusal",
    "MAX_BEFORE": "so many of before its first try a retry reads that saw nothing",
    "MAX_LOOKED": "so many a retry reads at most. A retry of a charge further back counts as spent again",
    "MAX_UNITS": "the dearest charge; more is an error",
    "LATEST_MS": "the latest time; more is an error",
    "MAX_FIELDS": "so many fields are read, and changed, by one swap; more is an error",
    "MAX_LIMITS": "so many limits, and names in closed_by, in one call; more is an error",
    "MAINTENANCE_EVERY_MS": "with the first charge of each, what has expired is removed",
    "CHECK_EVICTION_EVERY_MS": "the server is asked for its policy so often",
    "RETRIED_KEPT_MS": "a retry is remembered for so long",
    "MAX_CHARGES": "so many are repaid, or settled, by one call; more is an error",
    "HISTORY_MS": "hours are kept so long, and all keys; an hour before that is removed",
    "MAX_CELLS": "so many rows an hour has; what is more counts as other",
    "MAX_NAME": "a longer name is cut in the history",
    "MAX_COUNTS": "so many counts of refusals by one call; more is an error",
    "MAX_REFUSALS": "so many refusals by one call, and kept; more is an error",
    "MAX_REFUSAL": "so many bytes has a refusal; more is an error",
    "PIECE": "settle.lua and repair.lua read so many fields at once, clear.lua removes so many, and then the next",
    "ASIDE_KEPT_MS": "so long a repair that was stopped can be taken up; then it is begun again",
    "MIN_RETENTION_MS": "the keys live for so long at least",
    "FENCE_KEPT_MS": "a fence lives so long",
    "LONGEST_CLAIM_MS": "a claim beyond it is removed by a repair",
    "MAX_REPAIRS": "so many marks are kept",
    "MAX_REPAIR_MS": "a copy begun longer ago is begun again",
    "MONTH_MS": "unlogged usage of a month's view counts for so long after a repair",
    "UNITS_MS": "spans by the names of views",
    "PERIODS_MS": "the same of calendars",
}
"""The bounds of the scripts, and what happens at one more. Other capitals are places in ARGV."""

PLACES = {
    "FURTHER_IDS",
    "FIRST_LIMIT",
    "LIMIT_SIZE",
    "FIRST_CLOSED",
    "FIELDS_BEFORE",
    "FIRST_CHARGE",
    "CHARGE_SIZE",
    "FIRST_ENTRY",
    "ENTRY_SIZE",
    "FIRST_COUNT",
    "FIRST_NAME",
    "CHANGE_SIZE",
    "COUNT_SIZE",
}


def test_every_bound_of_the_scripts_is_listed_here() -> None:
    paths = (Path(__file__).parents[3] / "lua").rglob("*.lua")
    text = "".join(
        path.read_text() for path in paths if not path.name.startswith("inbound_")
    )  # have a test of their own
    names = {name for line in re.findall(r"^local ([A-Z_, ]+) =", text, re.MULTILINE) for name in line.split(", ")}
    assert names - PLACES - {"FORMAT", "KEPT", "OTHER", "HOUR_MS"} == BOUNDS.keys()
    # A bound without a name would not be found by the line above.
    assert set(re.findall(r"'COUNT', (\w+)", text)) <= {
        "CHUNK",
        "MAX_ENTRIES",
        "PIECE",
        "room",
        "size",
        "count",
        "1",
    }


# -- the scripts -------------------------------------------------------------------------------------------------------


def views(count: int) -> list[object]:
    return [word for n in range(count) for word in (f"units|m{n}|*|24h", 10, 1, DAY_MS)]


def test_a_thousand_limits_are_decided_at_once_and_one_more_is_an_error(scripts: Scripts) -> None:
    assert scripts.charge(tuple(views(1_000)))[0] == "ADMITTED"
    with pytest.raises(redis.ResponseError, match=r"charge.lua: more than 1000 limits"):
        scripts.charge(tuple(views(1_001)))
    assert scripts.client.xlen(LOG) == 1


def test_a_thousand_names_close_a_call_and_one_more_is_an_error(scripts: Scripts) -> None:
    scripts.run("exhaust", NOW, "b999", f"{NOW + 5} {NOW} x", MIN_RETENTION_MS)
    names = [f"b{n}" for n in range(1_001)]
    assert scripts.charge((ALL, 10, 1, DAY_MS), closed_by=",".join(names[:1_000]))[0] == "EXHAUSTED"
    with pytest.raises(redis.ResponseError, match=r"charge.lua: more than 1000 names"):
        scripts.charge((ALL, 10, 1, DAY_MS), closed_by=",".join(names))
    assert scripts.client.xlen(LOG) == 0


@pytest.mark.parametrize(
    ("ahead_ms", "agree"), [(5_000, True), (5_001, False), (-HOUR_MS, True), (-HOUR_MS - 1, False)]
)
def test_how_far_a_caller_may_be_ahead_and_behind(scripts: Scripts, ahead_ms: int, agree: bool) -> None:
    """L11, in charge.lua and repay.lua; where the clocks disagree nothing is written."""
    repay = ("repay", NOW, NOW + ahead_ms, "m", MIN_RETENTION_MS, 1, 1, "videos.list", "", "", "m1")
    assert scripts.run(*repay) == (1 if agree else "CLOCK")
    answer = scripts.charge((ALL, 10, 1, DAY_MS), caller_ms=NOW + ahead_ms)
    assert answer[:3] == (["ADMITTED", f"{NOW}-1", answer[2]] if agree else ["CLOCK", "", str(NOW)])
    assert bool(scripts.client.keys("*")) == agree


def test_a_hundred_debts_are_repaid_at_once_and_one_more_is_an_error(scripts: Scripts) -> None:
    debts = [(number, 1, "videos.list", "", "", f"m{number}") for number in range(1, 102)]
    with pytest.raises(redis.ResponseError, match=r"repay.lua: more than 100 charges"):
        scripts.run("repay", NOW, 0, "m", MIN_RETENTION_MS, *[word for debt in debts for word in debt])
    assert not scripts.client.exists(LOG)
    assert scripts.run("repay", NOW, 0, "m", MIN_RETENTION_MS, *[word for debt in debts[:100] for word in debt]) == 100
    assert scripts.used() == 100


@pytest.mark.parametrize("count", [0, 251, "all", ""])
def test_reading_none_or_more_than_250_is_an_error(scripts: Scripts, count: object) -> None:
    scripts.fill(1)
    assert len(scripts.run("read", "-", "+", 250)) == 1
    with pytest.raises(redis.ResponseError, match=r"read.lua: count is 1 to 250"):
        scripts.run("read", "-", "+", count)


def test_unlogged_usage_is_removed_25_hours_after_it_expired(scripts: Scripts) -> None:
    until_ms, slack_ms = NOW + 10, 25 * 60 * MINUTE_MS
    scripts.lose(ALL, (5, until_ms))
    for after_ms, kept in ((slack_ms - 1, True), (slack_ms, False)):
        scripts.now_ms = until_ms + after_ms
        for more in (0, 1):  # the second finds the first; a longer retention is housekeeping's time
            scripts.charge(retention_ms=MIN_RETENTION_MS + 2 * after_ms + more)
        assert (
            scripts.client.hexists(STATE, f"unlogged:{ALL}")
            == scripts.client.hexists(STATE, "unlogged_until_ms")
            == kept
        )


def test_what_a_machine_repaid_is_forgotten_once_the_log_has_let_go_of_it(scripts: Scripts) -> None:
    """Each pod that is started anew has a journal of its own, and a number here. One that is still in use stays."""
    for number in range(3):
        scripts.run("repay", scripts.now_ms, 0, f"pod-{number}", MIN_RETENTION_MS, 1, "1", "m", "j", "r", f"k{number}")
    repaid_ms = scripts.now_ms
    scripts.now_ms += MIN_RETENTION_MS - 1
    scripts.run("repay", scripts.now_ms, 0, "pod-0", MIN_RETENTION_MS, 2, "1", "m", "j", "r", "k9")
    known = []
    for scripts.now_ms in (repaid_ms + MIN_RETENTION_MS - 1, repaid_ms + MIN_RETENTION_MS + MINUTE_MS):
        scripts.charge()
        known.append(sorted(field for field in scripts.client.hkeys(STATE) if field.startswith("repaid")))
    assert known == [
        [f"{field}:pod-{number}" for field in ("repaid", "repaid_at") for number in range(3)],
        ["repaid:pod-0", "repaid_at:pod-0"],
    ]


def test_a_correction_reaches_every_view_however_many_fields_there_are(scripts: Scripts) -> None:
    charge_id = scripts.charge((ALL, 10, 1, DAY_MS))[1]
    scripts.client.hset(STATE, mapping={f"retried:r{n}": NOW for n in range(3_000)})
    scripts.run("settle", charge_id, 7)
    assert scripts.used() == 7


def test_100_charges_are_settled_at_once_and_no_more(scripts: Scripts) -> None:
    first, *others = [scripts.charge((ALL, 1_000, 1, DAY_MS))[1] for _ in range(101)]
    with pytest.raises(redis.ResponseError, match=r"settle.lua: .* of at most 100 charges"):
        scripts.run("settle", first, 0, *others)
    assert scripts.used() == 101
    assert scripts.run("settle", first, 0, *others[:-1])
    assert scripts.used() == 1


# -- their twins -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["sqlite", "redis"])
def test_more_projects_and_questions_than_are_kept_in_mind(server: RedisServer, url: str) -> None:
    """Keys and arguments are kept for 256 of them."""
    ledger = open_ledger(server.url if url == "redis" else "sqlite://")
    try:
        for number in [*range(257), 0]:
            budget = Budget(
                credential="c", project=f"p{number}", book=BOOK, limits=(limit(1_000 + number),), ledger=ledger
            )
            decision = budget.charge("videos.list")
            assert decision.limits[0].limit_units == 1_000 + number
        assert decision.limits[0].used_units == 2
    finally:
        ledger.close()


def test_the_embedded_ledger_trims_a_bounded_number_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota.ledger.sqlite_decision, "TRIM_AT_ONCE", 10)
    now_ms = [NOW]
    ledger = open_ledger("sqlite://", clock=lambda: now_ms[0])
    budget = Budget(
        credential="c", project="p", book=BOOK, limits=(limit(10**6),), ledger=ledger, clock=lambda: now_ms[0]
    )
    left = []
    try:
        for _ in range(25):
            budget.charge("videos.list")
            now_ms[0] += 1
        now_ms[0] += MIN_RETENTION_MS
        for _ in range(4):
            assert budget.charge("videos.list").admitted
            left.append(len(ledger.read("p", (0, 0), now_ms[0], 1_000)))
            now_ms[0] += MINUTE_MS
    finally:
        ledger.close()
    assert left == [26, 17, 8, 4], "from the second charge on: a clock may be wrong for one"


def test_a_debt_larger_than_one_call_is_refused_as_a_whole(server: RedisServer) -> None:
    """The allowance sends 100 at a time; who sends more is told so."""
    debts = [(number, Charge(1, "units", "videos.list", "", "", f"m{number}")) for number in range(1, 102)]
    with opened(server.url) as (budget, ledger):
        with pytest.raises(LedgerError, match="more than 100 charges"):
            ledger.repay("p", "m", debts)
        ledger.repay("p", "m", debts[:100])
        ledger.repay("p", "m", debts[100:])
        assert budget.usage()[0].used_units == 101


# -- repeats -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("real_walls")
def test_originals_that_arrive_after_150_repeats_charge_nothing(server: RedisServer) -> None:
    """Each first try is held on its way; its repeat is answered; then all of the first tries arrive."""
    first_try = b"\r\n$2\r\n-1\r\n"
    with Proxy(server.port) as proxy, opened(proxy.url, 10**6) as (budget, ledger):
        assert budget.charge("videos.list").admitted
        with redis.Redis(port=server.port) as client:
            client.config_resetstat()
        proxy.fail("hold-request", match=first_try, times=150)

        def work() -> None:
            while proxy.held < 150 or calls(server) < 101:
                budget.charge("videos.list")

        threads = [Thread(target=work) for _ in range(15)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        repeats = calls(server)
        assert proxy.release() == 150
        deadline = time.monotonic() + 100
        while calls(server) < repeats + 150 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert calls(server) >= repeats + 150, "all of them did arrive"
        attempt_keys = [entry.idempotency_key for entry in ledger.read("p", (0, 0), NEVER, 1_000)]
    assert len(attempt_keys) == len(set(attempt_keys)) > 100, "each was charged once"
