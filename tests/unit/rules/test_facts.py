"""Facts: which exhaustion closes what and until when, what a reopening holds open, and what two histories have."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from quota.common.clock import LATEST_MS, NEVER
from quota.errors import UsageError
from quota.rules.facts import (
    MAX_COMPARED,
    MAX_EXHAUSTIONS,
    MAX_GRANTS,
    MAX_TEXT_CHARS,
    Compared,
    Exhaustion,
    Facts,
    Grant,
    closing,
    exhaust,
    grant,
    reopen,
    union,
)
from quota.terms.arguments import machine_name
from quota.terms.limits import DAY_MS, HOUR_MS

NOW = 1_795_233_255_077
END = NOW + HOUR_MS


def exhaustion(bucket: str = "units", since_ms: int = NOW, until_ms: int = END, **more: Any) -> Exhaustion:
    return Exhaustion(bucket, since_ms, until_ms, "quotaExceeded", "a test")._replace(**more)


def closed(*exhaustions: Exhaustion) -> Facts:
    return Facts(exhaustions=tuple(sorted(exhaustions)))


LIFTED = exhaustion(reopened_ms=NOW + 10, reopened_because="raised")

ROWS = [
    # what stands, what upstream says, when it is recorded, whether it is what stands then
    # nothing
    (None, exhaustion(), NOW, True),
    # closed: a repeat extends nothing, be it of an earlier or a later call
    (exhaustion(), exhaustion(until_ms=NOW + DAY_MS), NOW + 5, False),
    (exhaustion(), exhaustion(since_ms=NOW + 5, until_ms=NOW + DAY_MS), END - 1, False),
    (exhaustion(until_ms=NEVER), exhaustion(since_ms=NOW + DAY_MS), NOW + 400 * DAY_MS, False),
    # that is over
    (exhaustion(), exhaustion(since_ms=NOW - 5, until_ms=END + DAY_MS), END, True),
    (exhaustion(), exhaustion(since_ms=END - 1, until_ms=END + DAY_MS), END, True),
    # reopened: late answers of calls that left before do not close it
    (LIFTED, exhaustion(since_ms=NOW + 9, until_ms=NEVER), NOW + 20, False),
    # one of a call that left at that moment, or later, does
    (LIFTED, exhaustion(since_ms=NOW + 10), NOW + 20, True),
    # a reopening in the clock's future holds nothing open
    (LIFTED, exhaustion(since_ms=NOW - HOUR_MS), NOW + 9, True),
    (LIFTED, exhaustion(since_ms=NOW - HOUR_MS), NOW + 10, False),
    # nor does one of a time that is over
    (LIFTED, exhaustion(since_ms=NOW + 9, until_ms=END + DAY_MS), END - 1, False),
    (LIFTED, exhaustion(since_ms=NOW + 9, until_ms=END + DAY_MS), END, True),
]


@pytest.mark.parametrize(("before", "new", "now_ms", "stands"), ROWS)
def test_the_right_exhaustion_stands(before: Exhaustion | None, new: Exhaustion, now_ms: int, stands: bool) -> None:
    other = exhaustion("search")
    facts = closed(*([before] if before else []), other)
    becomes = exhaust(facts, new, now_ms)
    standing = becomes.exhaustion("units")
    assert standing is not None
    assert standing._replace(since_ms=new.since_ms) == new if stands else standing == before
    assert union(facts.happened(now_ms), becomes) == becomes
    assert becomes.exhaustion("search") == other
    if not stands:
        assert becomes is facts


def test_reopening_lifts_what_stands_and_keeps_why() -> None:
    """Also what is over: somebody may look whether it was lifted."""
    facts = closed(exhaustion(), exhaustion("search"))
    because = 'raised to "50,000"\né 東京'
    lifted = exhaustion(reopened_ms=NOW + 5, reopened_because=because)
    becomes = reopen(facts, "units", because, NOW + 5)
    assert becomes == closed(lifted, exhaustion("search"))
    assert reopen(becomes, "units", "again", NOW + 6) is becomes
    assert reopen(becomes, "uploads", "never closed", NOW + 6) is becomes
    assert Facts.read(becomes.text()) == becomes


DAY = exhaustion("day", until_ms=NOW + DAY_MS)


@pytest.mark.parametrize(
    ("facts", "buckets", "now_ms", "jitter_ms", "expected"),
    [
        (Facts(), ("units",), NOW, 0, None),
        # until its end and the jitter, to the millisecond
        (closed(exhaustion()), ("units",), END - 1, 0, "units"),
        (closed(exhaustion()), ("units",), END, 0, None),
        (closed(exhaustion()), ("units",), END + 29_999, 30_000, "units"),
        (closed(exhaustion()), ("units",), END + 30_000, 30_000, None),
        # the one that opens last
        (closed(exhaustion("a"), exhaustion("b", since_ms=END - 999, until_ms=END + 1)), ("a", "b"), NOW, 30_000, "a"),
        # the jitter is at most a tenth of that time
        (closed(exhaustion(until_ms=NOW + 1_500)), ("units",), NOW + 1_649, 30_000, "units"),
        (closed(exhaustion(until_ms=NOW + 1_500)), ("units",), NOW + 1_650, 30_000, None),
        # and for other machines than the one that got the answer, unless that time is long
        (closed(exhaustion(reported_by=f"{machine_name()}:7 etl")), ("units",), END, 30_000, None),
        (closed(DAY._replace(reported_by=f"{machine_name()}:7 etl")), ("day",), NOW + DAY_MS, 30_000, "day"),
        # for ever
        (closed(exhaustion(until_ms=NEVER)), ("units",), NOW + 4_000 * DAY_MS, 60_000, "units"),
        # only what the call needs
        (closed(exhaustion()), ("search",), NOW, 0, None),
        # not what was lifted
        (closed(LIFTED), ("units",), NOW, 60_000, None),
        (closed(exhaustion("units", until_ms=NEVER, reopened_ms=1), DAY), ("units", "day"), NOW, 0, "day"),
        # of several the longest, wherever it stands; of two as long that of the first bucket, whatever its name
        (closed(exhaustion(), DAY), ("units", "day"), NOW, 0, "day"),
        (closed(exhaustion("a"), exhaustion("b", until_ms=END + 1)), ("a", "b"), NOW, 0, "b"),
        (closed(exhaustion("b"), exhaustion("a")), ("b", "a"), NOW, 0, "b"),
        (closed(exhaustion("b"), exhaustion("a")), ("a", "b"), NOW, 0, "a"),
        # the longest of those that the jitter keeps closed
        (closed(exhaustion("a"), exhaustion("b", until_ms=END - 5)), ("a", "b"), END + 1, 3, "a"),
    ],
)
def test_an_exhaustion_closes_a_call(
    facts: Facts, buckets: Sequence[str], now_ms: int, jitter_ms: int, expected: str | None
) -> None:
    closes = closing(facts, buckets, now_ms, jitter_ms)
    assert (closes and closes.bucket) == expected


def test_grants_replace_those_before_and_comparisons_stay_until_others_come() -> None:
    units, search = Grant("units", 260, NOW, NOW + DAY_MS), Grant("search", 5, NOW, NOW + DAY_MS)
    compared = Compared("units", 210, 8, 202, 0, 1, 2, NOW)
    facts = grant(closed(DAY), [units, search], [compared], NOW)
    assert (facts.grants, facts.compared, facts.granted_ms) == ((search, units), (compared,), NOW)
    facts = grant(facts, [units], None, NOW + 1)
    assert (facts.grants, facts.compared, facts.granted_ms) == ((units,), (compared,), NOW + 1)
    facts = grant(facts, [], [], NOW + 2)
    assert facts == Facts(exhaustions=(DAY,), granted_ms=NOW + 2)


@pytest.mark.parametrize(
    ("now_ms", "is_believed"),
    [(NOW - DAY_MS - 1, False), (NOW - DAY_MS, True), (NOW + HOUR_MS - 1, True), (NOW + HOUR_MS, False)],
)
def test_a_grant_is_believed_for_its_time_and_not_if_it_is_dated_a_day_ahead(now_ms: int, is_believed: bool) -> None:
    assert Grant("units", 1, NOW, NOW + HOUR_MS).believed_at(now_ms) == is_believed


def facts_with(value: Exhaustion | Grant | Compared) -> Facts:
    match value:
        case Exhaustion():
            return exhaust(Facts(), value, 0)
        case Grant():
            return grant(Facts(), [value], None, NOW)
        case Compared():
            return grant(Facts(), [], [value], NOW)


@pytest.mark.parametrize(
    "wrong",
    [
        exhaustion(""),
        exhaustion(since_ms=-1),
        exhaustion(since_ms=LATEST_MS),
        exhaustion(until_ms=LATEST_MS),
        exhaustion(until_ms=NEVER + 1),
        exhaustion(evidence=None),
        Grant("a;b", 1, 1, 2),
        Grant("units", -1, 1, 2),
        Grant("units", 1, 2, 2),
        Compared("units", 1, 1, 0, -1, 1, 2, 3),
        Compared("units", 1, 1, 0, 0, 1, 2, LATEST_MS),
    ],
)
def test_a_value_that_no_fact_can_have_is_refused_and_in_a_text_left_out(wrong: Any) -> None:
    with pytest.raises(UsageError):
        facts_with(wrong)
    sound = Facts((DAY,), (Grant("units", 1, 1, 2),), NOW, (Compared("units", 1, 1, 0, 0, 1, 2, 3),))
    data = json.loads(sound.text())
    field = {Exhaustion: "exhaustions", Grant: "grants", Compared: "compared"}[type(wrong)]
    data[field].append(wrong)
    assert Facts.read(json.dumps(data)) == sound


@pytest.mark.parametrize(
    "value",
    [
        exhaustion(since_ms=LATEST_MS - 1, until_ms=NEVER, evidence="\ud800 \n", reported_by=""),
        exhaustion(since_ms=1, until_ms=LATEST_MS - 1, reopened_ms=LATEST_MS - 1, reopened_because="é"),
        Grant("b" * 64, 0, LATEST_MS - 2, LATEST_MS - 1),
        Compared("units", *[10**14 - 1] * 7),
    ],
)
def test_facts_at_their_bounds_are_read(value: Any) -> None:
    facts = facts_with(value)
    assert [*facts.exhaustions, *facts.grants, *facts.compared] == [value]
    assert Facts.read(facts.text()) == facts
    assert facts.text().isascii()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{}",
        '{"version": 2, "granted_ms": 5}',
        '{"version": 1, "exhaustions": 7, "grants": {"a": 1}, "compared": null, "granted_ms": "1"}',
        '{"version": 1, "exhaustions": [7, null, [], ["units"], "sevenxx"]}',
        '{"version": 1, "granted_ms": -1}',
        f'{{"version": 1, "granted_ms": {LATEST_MS}}}',
        "[" * 100_000,
    ],
)
def test_an_unreadable_text_is_read_as_no_facts(text: str) -> None:
    assert Facts.read(text) == Facts()


def test_evidence_and_reasons_are_cut() -> None:
    facts = exhaust(Facts(), exhaustion(evidence="no more! " * 5_000, reported_by="x" * 5_000), NOW)
    facts = reopen(facts, "units", "y" * 5_000, NOW)
    (kept,) = facts.exhaustions
    assert {len(kept.evidence), len(kept.reported_by), len(kept.reopened_because)} == {MAX_TEXT_CHARS}


def test_the_facts_keep_the_buckets_that_are_closed_longest() -> None:
    facts = Facts()
    for number in range(MAX_EXHAUSTIONS):
        facts = exhaust(facts, exhaustion(f"b{number}", until_ms=END + number), NOW)
    facts = reopen(facts, "b50", "raised", NOW)
    for number in (500, 501):
        facts = exhaust(facts, exhaustion(f"b{number}", until_ms=END + number), NOW)
    gone = {f"b{number}" for number in range(MAX_EXHAUSTIONS)} - {kept.bucket for kept in facts.exhaustions}
    assert gone == {"b50", "b0"}
    assert len(facts.exhaustions) == MAX_EXHAUSTIONS


def test_very_many_grants_are_refused_and_of_comparisons_the_newest_kept() -> None:
    with pytest.raises(UsageError, match="101 grants: a project has at most 100"):
        grant(Facts(), [Grant(f"b{n}", 1, 1, 2) for n in range(MAX_GRANTS + 1)], None, NOW)
    several = [Compared(f"b{n}", 1, 2, 3, 4, 5, 6, n) for n in range(MAX_COMPARED + 7)]
    assert {*grant(Facts(), [], several, NOW).compared} == {*several[7:]}


RAISED = Grant("units", 260, NOW, NOW + DAY_MS)

UNIONS = [
    # an older closing does not undo a reopening, nor an older reopening a closing
    (closed(exhaustion()), closed(LIFTED), closed(LIFTED)),
    (closed(exhaustion()), closed(LIFTED._replace(reopened_ms=NOW)), closed(LIFTED._replace(reopened_ms=NOW))),
    (closed(exhaustion(since_ms=NOW + 9)), closed(LIFTED), closed(LIFTED)),
    (closed(exhaustion(since_ms=NOW + 10)), closed(LIFTED), closed(exhaustion(since_ms=NOW + 10))),
    # each bucket by itself
    (closed(exhaustion("a"), LIFTED), closed(exhaustion("b")), closed(exhaustion("a"), exhaustion("b"), LIFTED)),
    # grants come together, and were taken back together
    (Facts(grants=(RAISED,), granted_ms=NOW), Facts(), Facts(grants=(RAISED,), granted_ms=NOW)),
    (Facts(grants=(RAISED,), granted_ms=NOW), Facts(granted_ms=NOW + 1), Facts(granted_ms=NOW + 1)),
    # other grants outlast those that a wrong clock dated
    (Facts(grants=(RAISED,), granted_ms=NOW + 9).happened(NOW), Facts(granted_ms=1), Facts(granted_ms=1)),
    # what was counted last
    (
        Facts(compared=(Compared("units", 1, 1, 0, 0, 1, 2, 3),)),
        Facts(compared=(Compared("search", 1, 1, 0, 0, 1, 2, 3), Compared("units", 2, 1, 0, 0, 1, 2, 4))),
        Facts(compared=(Compared("search", 1, 1, 0, 0, 1, 2, 3), Compared("units", 2, 1, 0, 0, 1, 2, 4))),
    ),
]


@pytest.mark.parametrize(("first", "second", "together"), UNIONS)
def test_the_union_of_facts_ignores_the_order(first: Facts, second: Facts, together: Facts) -> None:
    assert union(first, second) == union(second, first) == together


def test_histories_united_in_any_order_give_the_same_log() -> None:
    dice = random.Random(5)
    for _ in range(150):
        facts, more, others = (random_facts(dice) for _ in range(3))
        assert union(facts, more) == union(more, facts)
        assert union(facts, facts) == facts
        assert union(union(facts, more), more) == union(facts, more)
        assert union(union(facts, more), others) == union(facts, union(more, others))
        assert Facts.read(union(facts, more).text()) == union(facts, more)


def random_facts(dice: random.Random) -> Facts:
    """Some changes, at times that often coincide."""
    facts, now_ms = Facts(), NOW
    for number in range(dice.randrange(8)):
        now_ms += dice.choice((0, 1, 2, HOUR_MS))
        bucket = dice.choice("abc")
        match dice.randrange(4):
            case 0 | 1:
                since_ms, until_ms = now_ms - dice.choice((0, 1, 2)), dice.choice((END, now_ms + 5, NEVER))
                facts = exhaust(facts, exhaustion(bucket, since_ms, until_ms), now_ms)
            case 2:
                facts = reopen(facts, bucket, dice.choice("xy"), now_ms)
            case _:
                grants = [Grant(name, dice.randrange(3), now_ms, now_ms + 5) for name in dice.sample("ab", 1)]
                facts = grant(facts, grants, [Compared(bucket, number, 0, 0, 0, 0, 0, now_ms)], now_ms)
    return facts
