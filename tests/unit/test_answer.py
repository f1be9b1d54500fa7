"""What a caller is told of a ledger's result, row by row: who is named, why, when, and what is left."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from quota.common.clock import NEVER
from quota.deciding.answer import Answers, ahead_ms, clocks_of, occupancies_of, states_of
from quota.deciding.checklist import Checklists, believed
from quota.errors import LedgerError
from quota.ledger.contract import COUNT_AGAIN_MS, RETENTION_SLACK_MS, ChargeRequest, ChargeResult, Exhaustion
from quota.ledger.entry import Charge, Entry
from quota.ledger.unlogged import UnloggedUsage, upstream_epoch
from quota.terms.limits import DAY_MS, HOUR_MS, Calendar, Limit, Selector, Sliding, View
from support.books import BOOK

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from quota.deciding.checklist import Checklist
    from quota.decision import Decision

MIDNIGHT = int(datetime(2026, 7, 1, tzinfo=UTC).timestamp()) * 1000
NOW = MIDNIGHT + 14 * HOUR_MS
EDGE = MIDNIGHT + DAY_MS
ANSWERS = Answers("main", "project", 7)


def limit(units: int, name: str = "day", **more: object) -> Limit:
    window = more.pop("window", Calendar("day", "UTC"))
    view = View(Selector(**{"buckets": ("units",), **more}), window)  # type: ignore[arg-type]
    return Limit(name, units, view, units, 0)


def asked(
    *limits: Limit, cost: int = 100, leave: Mapping[str, int] | None = None, also: int = 0, caller_ms: int = NOW
) -> tuple[Checklist, ChargeRequest]:
    """A call of so many units by the job "job", and how the ledger is asked about it."""
    checklists = Checklists("main", BOOK, limits, {"job": leave or {}}, lambda: NOW)
    made = checklists["videos.list", cost, None, "job"]
    if also:
        each = [checklists["videos.list", cost // (1 + also), None, "job"]] * (1 + also)
        made = checklists.sum_of(each, "job")
    charge = Charge(cost, "units", made.method, "job", "", "key")
    checks = made.checks_at(caller_ms)
    return made, ChargeRequest("project", charge, checks, made.closed_by, caller_ms, also=(charge,) * also)


def result(outcome: str, *used: int, newest_ms: int = NOW, **more: object) -> ChargeResult:
    return ChargeResult(outcome, "1-1" if outcome == "admitted" else None, NOW, (newest_ms, 0), used, **more)  # type: ignore[arg-type]


def unread(first_ms: int, last_ms: int) -> Iterable[Entry]:
    raise AssertionError("the answer follows from the result")


def decided(request: tuple[Checklist, ChargeRequest], found: ChargeResult) -> Decision:
    return ANSWERS.decision(*request, found, unread, commit=True)


# -- refused by a limit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used", "full"),
    [
        ((400, 400), []),
        ((401, 400), ["day"]),
        ((400, 401), ["other"]),
        ((401, 401), ["day", "other"]),
    ],
)
def test_a_limit_is_full_if_the_call_would_take_it_above_its_cap(used: tuple[int, int], full: list[str]) -> None:
    request = asked(limit(500), limit(500, "other"))
    occupancies, clocks = occupancies_of(*request, result("refused", *used))
    assert [one.limit.name for one in occupancies if one.full] == full
    of_full, _ = occupancies_of(*request, result("refused", *used), of_all=False)
    assert [one.limit.name for one in of_full] == full
    assert (clocks.now_ms, clocks.caller_ms, clocks.newest_ms) == (NOW, NOW, NOW)


HOUR = Calendar("hour", "UTC")


@pytest.mark.parametrize(
    ("limits", "used", "refused_by", "retry_at_ms"),
    [
        # The limit that holds back longest is named, wherever it stands; of two that hold back equally, the first.
        ([limit(500, "a"), limit(500, "b")], (450, 450), "a", EDGE),
        ([limit(500, "b"), limit(500, "a")], (450, 450), "b", EDGE),
        ([limit(500, "a", window=HOUR), limit(500, "b")], (450, 450), "b", EDGE),
        ([limit(500, "a"), limit(500, "b", window=HOUR)], (450, 450), "a", EDGE),
        # One that has room is not named, though its window is longer.
        ([limit(500, "a", window=HOUR), limit(500, "b")], (450, 400), "a", NOW + HOUR_MS),
        ([limit(500, "a"), limit(500, "b", window=HOUR)], (400, 450), "b", NOW + HOUR_MS),
    ],
)
def test_the_limit_that_holds_back_longest_is_named(
    limits: list[Limit], used: tuple[int, int], refused_by: str, retry_at_ms: int
) -> None:
    decision = decided(asked(*limits), result("refused", *used))
    assert (decision.admitted, decision.reason) == (False, "limit")
    assert (decision.refused_by, decision.retry_at_ms) == (refused_by, retry_at_ms)


@pytest.mark.parametrize(
    ("leave", "used", "reason", "detail"),
    [
        # It would fit, were nothing left to others: up to 500 - 100.
        (200, 301, "leave", "this job leaves 200 to others"),
        (200, 400, "leave", "this job leaves 200 to others"),
        (200, 401, "limit", "this job leaves 200 to others"),
        (1, 400, "leave", "this job leaves 1 to others"),
        (0, 401, "limit", ""),
    ],
)
def test_what_a_job_leaves_is_the_reason_if_the_call_would_fit_without(
    leave: int, used: int, reason: str, detail: str
) -> None:
    decision = decided(asked(limit(500), leave={"day": leave}), result("refused", used))
    assert (decision.reason, decision.detail, decision.refused_by) == (reason, detail, "day")


def test_several_calls_are_told_what_they_need_together() -> None:
    assert decided(asked(limit(500), also=1), result("refused", 450)).detail == "and these 2 calls need 100 together"
    assert decided(asked(limit(500), also=0), result("refused", 450)).detail == ""


@pytest.mark.parametrize(("granted", "reason"), [(100, "limit"), (99, "closed")])
def test_a_call_above_what_upstream_grants_is_closed(granted: int, reason: str) -> None:
    """A call of 100 units. One that upstream's grant could hold waits for the edge."""
    made, request = asked(limit(500))
    grants = believed(f"units={granted}:{NOW - DAY_MS}:{EDGE + 1}", NOW)
    known = Checklists("main", BOOK, (limit(500),), {}, lambda: NOW).with_grants(made, grants)
    request = request._replace(checks=known.checks_at(NOW))
    decision = decided((known, request), result("refused", 450))
    assert (decision.reason, decision.refused_by) == (reason, "day")
    assert (decision.retry_at_ms, decision.detail) == ((None, "99") if reason == "closed" else (EDGE, ""))


def test_of_a_log_that_cannot_be_read_the_first_full_limit_is_named_without_a_time() -> None:
    def away(first_ms: int, last_ms: int) -> Iterable[Entry]:
        raise LedgerError("away")

    request = asked(limit(500, "a"), limit(500, "b", window=Sliding(DAY_MS)), limit(500, "c"))
    decision = ANSWERS.decision(*request, result("refused", 400, 401, 401), away, commit=True)
    assert (decision.refused_by, decision.reason, decision.retry_at_ms) == ("b", "limit", None)
    told = ANSWERS.decision(
        *request, result("refused", 400, 401, 401, leaving_ms=(None, NOW - HOUR_MS, None)), away, commit=True
    )
    assert (told.refused_by, told.retry_at_ms) == ("b", NOW - HOUR_MS + DAY_MS)


# -- refused for another reason ----------------------------------------------------------------------------------------


def exhaustion(until_ms: int) -> Exhaustion:
    return Exhaustion("units", NOW, until_ms, "quotaExceeded", "upstream")


@pytest.mark.parametrize(
    ("until_ms", "used", "reason", "retry_at_ms"),
    [
        # After the end of an exhaustion and the jitter, if the limits have room then.
        (NOW + 100, 400, "exhausted", NOW + 107),
        (NOW + 100, 401, "exhausted", EDGE),
        (EDGE - 8, 401, "exhausted", EDGE),
        (EDGE - 7, 401, "exhausted", EDGE),
        (EDGE - 6, 401, "exhausted", EDGE + 1),
        (NEVER - 8, 400, "exhausted", NEVER - 1),
        # What has no end is closed.
        (NEVER, 400, "closed", None),
    ],
)
def test_an_exhausted_bucket_is_open_again_when_limits_have_room_too(
    until_ms: int, used: int, reason: str, retry_at_ms: int | None
) -> None:
    decision = decided(asked(limit(500)), result("exhausted", used, exhaustion=exhaustion(until_ms)))
    assert (decision.reason, decision.refused_by, decision.detail) == (reason, "units", "quotaExceeded")
    assert decision.retry_at_ms == retry_at_ms


def test_a_ledger_that_still_counts_is_asked_again_after_a_second() -> None:
    decision = decided(asked(limit(500)), result("counting"))
    assert (decision.reason, decision.retry_at_ms, decision.remaining_units) == ("counting", NOW + COUNT_AGAIN_MS, 0)


def test_clocks_that_differ_are_both_told() -> None:
    made, request = asked(limit(500), caller_ms=NOW + HOUR_MS)
    decision = decided((made, request), result("clock"))
    assert (decision.reason, decision.retry_at_ms) == ("clock", None)
    assert (
        decision.detail == "this machine's clock reads 2026-07-01T15:00:00.000Z, the ledger's 2026-07-01T14:00:00.000Z"
    )
    assert "charges dated 1970-01-01T00:00:00.001Z" in clocks_of(request, result("clock", seen_ahead_ms=1))


# -- admitted ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "used", "remaining"),
    [
        # The limit that allows the fewest further calls of this cost says how much is left; of several, the first.
        ([limit(500)], (499,), 1),
        ([limit(500)], (500,), 0),
        ([limit(500)], (501,), 0),
        ([limit(500), limit(600, "b")], (300, 300), 200),
        ([limit(600, "b"), limit(500)], (300, 300), 200),
        ([limit(500), limit(550, "b")], (300, 300), 200),
        ([limit(550, "b"), limit(500)], (300, 300), 250),
        ([limit(500), limit(3, "calls", count="calls")], (100, 1), 2),
        ([limit(500), limit(9, "calls", count="calls")], (300, 1), 200),
        ([limit(9, "a", count="calls"), limit(8, "b", count="calls")], (6, 6), 2),
    ],
)
def test_what_remains_is_told_of_the_limit_with_the_fewest_further_calls(
    limits: list[Limit], used: tuple[int, ...], remaining: int
) -> None:
    decision = decided(asked(*limits), result("admitted", *used))
    assert (decision.admitted, decision.reason, decision.source) == (True, "ok", "ledger")
    assert (decision.remaining_units, decision.retry_at_ms, decision.refused_by) == (remaining, None, None)


def test_what_a_limit_counts_by_calls_is_told_in_calls() -> None:
    request = asked(limit(500), limit(3, "calls", count="calls"))
    assert decided(request, result("admitted", 100, 1)).sentence().endswith("on main; 2 calls left")
    assert decided(request, result("admitted", 399, 1)).sentence().endswith("on main; 101 units left")
    assert decided(request, result("refused", 100, 3)).why() == "limit 'calls' has 3 of 3 calls used"
    assert decided(request, result("refused", 500, 1)).why() == "limit 'day' has 500 of 500 units used"


def test_a_look_has_no_source() -> None:
    assert ANSWERS.decision(*asked(limit(500)), result("admitted", 1), unread, commit=False).source is None
    assert decided(asked(limit(500)), result("refused", 500)).source is None


def test_unlogged_usage_is_shown_until_before_its_end() -> None:
    lost = UnloggedUsage("view", "epoch", ((1, NOW), (2, NOW + 1), (4, NOW + 9)), (0, 0))
    upstream = UnloggedUsage("view", upstream_epoch("units", MIDNIGHT), ((8, NOW), (16, NOW + 5)), (0, 0))
    ended = UnloggedUsage("view", "epoch", ((32, NOW),), (0, 0))
    request = asked(limit(500), limit(500, "b"), limit(500, "c"))
    of_both, of_none, of_nothing = states_of(
        *request, result("admitted", 50, 50, 50, unlogged=((lost, upstream), (), (ended,)))
    )
    assert of_both[5:9] == (22, NOW + 1, NOW + 9, 16)
    assert of_none[5:9] == of_nothing[5:9] == (0, 0, 0, 0)
    assert of_both[:5] == ("day", 100, 50, 500, 450)


@pytest.mark.parametrize(
    ("newest_ms", "told_ms"),
    [
        (0, 0),
        (NOW, 0),
        (NOW + RETENTION_SLACK_MS, 0),
        (NOW + RETENTION_SLACK_MS + 1, NOW + RETENTION_SLACK_MS + 1),
    ],
)
def test_a_charge_dated_further_ahead_than_a_clock_may_go_back_is_told(newest_ms: int, told_ms: int) -> None:
    assert ahead_ms(result("admitted", 1, newest_ms=newest_ms)) == told_ms
    assert decided(asked(limit(500)), result("admitted", 1, newest_ms=newest_ms)).ahead_ms == told_ms
