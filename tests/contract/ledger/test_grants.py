"""What upstream says it grants lowers the limits, for every caller of a ledger and at once (L28)."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from quota.common.clock import LATEST_MS
from quota.deciding.checklist import granted_units
from quota.errors import CostExceedsLimit, UsageError
from quota.ledger.compared import MAX_COMPARED, Compared, compared_text, read_compared
from quota.ledger.contract import ChargeRequest, Exhaustion, LimitCheck
from quota.ledger.entry import Charge
from quota.ledger.grants import Grant, grants_text, read_grants
from quota.terms.limits import DAY_MS, HOUR_MS, Calendar, Limit, Selector, Sliding, View
from support.setup import limit

if TYPE_CHECKING:
    from quota.terms.limits import Window
    from support.setup import Setup

UNITS = Selector(buckets=("units",))
PACIFIC = View(UNITS, Calendar("day", "America/Los_Angeles"))


def day(headroom: int = 50) -> Limit:
    return Limit("day", 1_000 - headroom, View(UNITS, Sliding(DAY_MS)), 1_000, headroom)


def said(setup: Setup, units: int, *, believed_ms: int = DAY_MS, bucket: str = "units") -> Grant:
    return Grant(bucket, units, setup.now_ms, setup.now_ms + believed_ms)


@pytest.mark.topology
def test_a_smaller_grant_lowers_a_limit_for_everybody_at_once(setup: Setup) -> None:
    """Also for a process that has decided before, and for one that begins: neither admits a call too many."""
    one = setup.budget(day())
    assert one.charge("search.list").remaining_units == 850
    setup.ledger.grant(setup.project, [said(setup, 260)])
    begins = setup.budget(day())
    assert begins.charge("search.list").remaining_units == 10
    refused = one.charge("search.list")
    assert (refused.admitted, refused.reason, refused.refused_by) == (False, "limit", "day")
    assert refused.limits[0].limit_units == 210
    assert refused.retry_at_ms == setup.now_ms + DAY_MS
    assert one.charge("videos.list").admitted


def test_a_larger_grant_raises_nothing(setup: Setup) -> None:
    setup.ledger.grant(setup.project, [said(setup, 5_000)])
    assert setup.budget(day()).usage()[0].limit_units == 950


def test_a_later_grant_replaces_the_earlier(setup: Setup) -> None:
    budget = setup.budget(day())
    for units, expected in ((260, 210), (500, 450), (260, 210)):
        setup.ledger.grant(setup.project, [said(setup, units)])
        assert budget.usage()[0].limit_units == expected
    setup.ledger.grant(setup.project, [])
    assert budget.usage()[0].limit_units == 950
    assert setup.ledger.notes(setup.project).grants == ()


def test_a_grant_is_believed_for_a_time(setup: Setup) -> None:
    budget = setup.budget(day())
    setup.ledger.grant(setup.project, [said(setup, 260, believed_ms=HOUR_MS)])
    assert budget.usage()[0].limit_units == 210
    setup.now_ms += HOUR_MS - 1
    assert budget.usage()[0].limit_units == 210
    setup.now_ms += 1
    assert budget.usage()[0].limit_units == setup.budget(day()).usage()[0].limit_units == 950
    setup.now_ms -= HOUR_MS  # the clock stood ahead
    assert budget.usage()[0].limit_units == 210
    assert budget.peek("videos.list", units=211).reason == "closed"
    setup.now_ms -= DAY_MS + 1  # it was said by a clock that stood ahead
    assert budget.usage()[0].limit_units == 950
    setup.now_ms += 2
    assert budget.usage()[0].limit_units == 210


@pytest.mark.parametrize("window", [Sliding(DAY_MS), PACIFIC.window])
@pytest.mark.parametrize("paced", [False, True])
def test_a_refusal_names_the_moment_at_which_its_grant_lapses(setup: Setup, window: Window, paced: bool) -> None:
    """If the call fits then, or has room soon after; and no grant that lapses after the call has room."""
    one = Limit("day", 950, View(UNITS, window), 1_000, 50, paced and isinstance(window, Calendar))
    setup.now_ms = PACIFIC.window.edges(setup.now_ms)[0] + 2 * HOUR_MS  # type: ignore[union-attr]
    budget = setup.budget(one)
    for units in (100, 60, 40):
        assert budget.charge("videos.list", units=units).admitted
        setup.now_ms += HOUR_MS
    for granted, believed_ms in ((260, HOUR_MS), (260, 3 * HOUR_MS), (410, DAY_MS - 3 * HOUR_MS), (300, 2 * DAY_MS)):
        setup.ledger.grant(setup.project, [said(setup, granted, believed_ms=believed_ms)])
        for units in (30, 100, 240, 400, 751, 950):
            began_ms, refused = setup.now_ms, budget.peek("videos.list", units=units)
            if refused.admitted or refused.reason == "closed":
                continue
            assert refused.retry_at_ms is not None
            setup.now_ms = refused.retry_at_ms - 1
            assert not budget.peek("videos.list", units=units).admitted, (granted, believed_ms, units)
            setup.now_ms += 1
            assert budget.peek("videos.list", units=units).admitted, (granted, believed_ms, units)
            setup.now_ms = began_ms


@pytest.mark.parametrize(("closed_ms", "fits_ms"), [(HOUR_MS - 1, HOUR_MS - 1), (HOUR_MS, DAY_MS)])
def test_a_closed_bucket_opens_for_a_call_that_its_grant_was_too_small_for(
    setup: Setup, closed_ms: int, fits_ms: int
) -> None:
    """If the grant has lapsed by then: the limit says when it has room. Else nobody knows more than when it opens."""
    budget, began_ms = setup.budget(day()), setup.now_ms
    assert budget.charge("videos.list", units=900).admitted
    setup.ledger.grant(setup.project, [said(setup, 260, believed_ms=HOUR_MS)])
    setup.ledger.exhaust(setup.project, Exhaustion("units", began_ms, began_ms + closed_ms, "no more", "a test"))
    refused = budget.peek("videos.list", units=240)
    assert (refused.reason, refused.retry_at_ms) == ("exhausted", began_ms + fits_ms)


def test_a_call_that_a_grant_can_never_admit_is_refused_without_a_time(setup: Setup) -> None:
    """It is no error of the caller's: by the configuration it fits. Waiting does not help, and asking again might."""
    setup.ledger.grant(setup.project, [said(setup, 120)])
    pacific = Limit("pacific-day", 950, PACIFIC, 1_000, 50)
    budget = setup.budget(day(), pacific)
    refused = budget.charge("search.list")
    assert (refused.reason, refused.refused_by, refused.retry_at_ms) == ("closed", "day", None)
    assert "limit 'day' never has room for it: upstream grants 120, of which 50 stay unspent" in refused.sentence()
    assert refused.sentence().endswith("ask upstream for quota, then `quota reconcile`")
    assert budget.charge("videos.list").remaining_units == 69
    setup.ledger.grant(setup.project, [said(setup, 50)])
    outlook = budget.outlook(["search.list"])
    assert (outlook.full is not None and outlook.full.reason, outlook.next_ms) == ("closed", None)
    with pytest.raises(CostExceedsLimit):
        budget.charge("videos.list", units=951)


def test_what_a_job_leaves_and_a_pace_are_taken_from_the_grant(setup: Setup) -> None:
    paced = Limit("pacific-day", 950, PACIFIC, 1_000, 50, paced=True)
    setup.ledger.grant(setup.project, [said(setup, 250)])
    budget = setup.budget(day(), paced, leave={"trending": {"day": 150}})
    assert budget.usage("trending")[0].limit_units == 50
    assert budget.usage()[1].limit_units <= 200


def test_which_limits_a_grant_is_about() -> None:
    granted = {"units": 400, "search": 30}
    rows = [
        (limit(9_500), 400),
        (day(50), 350),
        (day(450), 0),
        (limit(9_500, HOUR_MS), 400),
        (limit(9_500, methods=("search.list",)), 400),
        (limit(9_500, buckets=("search",)), 30),
        (limit(9_500, buckets=("uploads",)), None),
        (limit(9_500, buckets=("search", "units")), None),
        (limit(9_500, buckets=()), None),
        (limit(9_500, count="calls"), None),
        (limit(9_500, 26 * HOUR_MS), None),
        (limit(9_500, 7 * DAY_MS), None),
    ]
    for one, expected in rows:
        assert granted_units(one, granted) == expected, one


def test_a_request_that_goes_by_other_grants_is_not_compared(setup: Setup) -> None:
    """One that does not care about grants is: callers in other languages make their own caps."""
    view = View(UNITS, Sliding(DAY_MS))

    def ask(granted: str | None, commit: bool = True) -> tuple[str, str]:
        key = f"k-{random.getrandbits(60)}"
        request = ChargeRequest(
            setup.project,
            Charge(1, "units", "videos.list", "", "", key),
            [LimitCheck(view, 10, 1, None)],
            (),
            setup.now_ms,
            granted=granted,
        )
        result = setup.ledger.decide(request, commit=commit)
        return result.outcome, result.granted

    assert ask(None) == ask("") == ("admitted", "")
    assert ask("units=1:1:2") == ("granted", "")
    grants = [said(setup, 8, bucket="b:-._9"), said(setup, 260)]
    setup.ledger.grant(setup.project, grants)
    text = grants_text(grants)
    for commit in (True, False):
        assert ask("", commit) == ask("units=1:1:2", commit) == ("granted", text)
        assert ask(text, commit) == ask(None, commit) == ("admitted", "")
    assert len(setup.ledger.read(setup.project, (0, 0), setup.now_ms, 100)) == 4
    assert tuple(setup.ledger.notes(setup.project).grants) == tuple(sorted(grants))


def test_a_grant_changes_nothing_else(setup: Setup) -> None:
    budget = setup.budget(day())
    charged = budget.charge("search.list")
    epoch = setup.ledger.add_unlogged(setup.project, "x", [])
    setup.ledger.grant(setup.project, [said(setup, 260)])
    assert setup.ledger.add_unlogged(setup.project, "y", []) == epoch
    assert budget.refund(str(charged.id)).units == 100
    assert budget.usage()[0].used_units == 0


@pytest.mark.parametrize(
    "grant",
    [
        Grant("", 1, 1, 2),
        Grant("a b", 1, 1, 2),
        Grant("a;b", 1, 1, 2),
        Grant("a=b", 1, 1, 2),
        Grant("units", -1, 1, 2),
        Grant("units", 10**15, 1, 2),
        Grant("units", 1, 2, 2),
        Grant("units", 1, 1, 10**14),
    ],
)
def test_a_grant_that_cannot_be_stored_is_refused(setup: Setup, grant: Grant) -> None:
    with pytest.raises(UsageError):
        setup.ledger.grant(setup.project, [grant])
    assert setup.ledger.notes(setup.project).grants == ()


@pytest.mark.parametrize(
    "text",
    [
        *(";", "units", "units=1", "units=1:2", "units=1:2:1", "units=1:1:2;", "=1:1:2", "u=x:1:2"),
        *("units=1:1:1", f"units=1:1:{LATEST_MS}"),
    ],
)
def test_a_text_that_is_no_grant_is_not_read(text: str) -> None:
    with pytest.raises(ValueError, match="no grant"):
        read_grants(text)


def test_grants_at_their_bounds_are_read() -> None:
    longest = Grant("b" * 64, 0, LATEST_MS - 2, LATEST_MS - 1)
    assert read_grants(f"units=5:0:1;{longest.bucket}=0:{LATEST_MS - 2}:{LATEST_MS - 1}") == (
        Grant("units", 5, 0, 1),
        longest,
    )


def test_random_grants_and_charges_admit_what_the_arithmetic_says(setup: Setup) -> None:
    """Several processes, grants that come and go: a call is admitted exactly if its units fit below both numbers."""
    pick = random.Random(7)
    budgets = [setup.budget(day()) for _ in range(3)]
    charged: list[tuple[int, int]] = []
    granted, until_ms = 1_000, 0
    for _ in range(400):
        setup.now_ms += pick.choice([0, 1, HOUR_MS // 4, HOUR_MS])
        if pick.random() < 0.2:
            granted, lasts_ms = pick.randint(0, 1_100), pick.choice([1, HOUR_MS, DAY_MS])
            until_ms = setup.now_ms + lasts_ms
            setup.ledger.grant(setup.project, [said(setup, granted, believed_ms=lasts_ms)])
        method, cost = pick.choice([("videos.list", 1), ("search.list", 100)])
        used = sum(units for ms, units in charged if ms > setup.now_ms - DAY_MS)
        most = min(950, max(0, granted - 50)) if setup.now_ms < until_ms else 950
        decision = pick.choice(budgets).charge(method)
        assert decision.admitted == (used + cost <= most), (used, cost, most)
        if decision.admitted:
            charged.append((setup.now_ms, cost))
        elif cost > most:
            assert (decision.reason, decision.retry_at_ms) == ("closed", None)
        else:
            assert decision.retry_at_ms is not None
            assert decision.retry_at_ms > setup.now_ms


# -- what upstream counted ---------------------------------------------------------------------------------------------


def test_what_upstream_counted_is_kept_beside_the_grants(setup: Setup) -> None:
    first = Compared("units", 210, 8, 202, 0, 1, 2, setup.now_ms)
    second = Compared("search", 0, 100, 0, 100, 1, 2, setup.now_ms)
    assert setup.ledger.notes(setup.project).compared == ()
    setup.ledger.grant(setup.project, [], [first])
    notes = setup.ledger.notes(setup.project)
    assert (tuple(notes.compared), tuple(notes.grants)) == ((first,), ())
    setup.ledger.grant(setup.project, [said(setup, 260)])
    assert setup.ledger.notes(setup.project).compared == (first,), "as long as nothing else is said of it"
    setup.ledger.grant(setup.project, [], [second, first])
    assert set(setup.ledger.notes(setup.project).compared) == {first, second}
    assert setup.ledger.notes(setup.project).grants == ()
    setup.ledger.grant(setup.project, [], [])
    assert setup.ledger.notes(setup.project).compared == ()


@pytest.mark.parametrize("change", [{"bucket": "a;b"}, {"bucket": ""}, {"drift_units": -1}, {"at_ms": 10**15}])
def test_a_comparison_that_cannot_be_stored_is_refused(setup: Setup, change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="no comparison"):
        setup.ledger.grant(setup.project, [], [Compared("units", 1, 1, 0, 0, 1, 2, 3)._replace(**change)])
    assert setup.ledger.notes(setup.project).compared == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "units",
        "units=",
        "units=1:2",
        "units=1:2:3:4:5:6:x",
        f"units=1:2:3:4:5:6:{'9' * 15}",
        "=1:1:1:1:1:1:1",
        ";;",
    ],
)
def test_what_is_damaged_is_left_out(text: str) -> None:
    """Nothing is decided by it, so nobody is stopped by it."""
    sound = Compared("search", 1, 2, 3, 4, 5, 6, 7)
    assert read_compared(f"{text};{compared_text([sound])}") == (sound,)


def test_of_very_many_the_newest_are_kept() -> None:
    several = [Compared(f"b{n}", 1, 2, 3, 4, 5, 6, n) for n in range(MAX_COMPARED + 7)]
    assert set(read_compared(compared_text(several))) == set(several[7:])
