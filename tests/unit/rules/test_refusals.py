"""Refusals: what was refused by hour, limit, job and reason, and the last hundred as a whole."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from quota.decision import Decision, LimitState
from quota.errors import UsageError
from quota.rules.refusals import (
    KEPT_MS,
    MAX_KEYS,
    MAX_NAME_BYTES,
    MAX_REFUSAL_BYTES,
    MAX_REFUSALS,
    MAX_ROWS,
    OTHER,
    REFUSALS,
    REFUSED_SUMS,
    RefusalCount,
    Refusals,
    RefusedSum,
    add,
    names_to_add,
    names_to_read,
    read,
    refusal_text,
)
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS

NOW = 1_795_233_255_077
HOUR = NOW // HOUR_MS * HOUR_MS


@dataclass
class Fields:
    """The fields of a state, and a clock. Each addition has a key of its own, if it gives none."""

    now_ms: int = NOW
    stored: dict[str, str] = field(default_factory=dict)
    additions: int = 0

    def add(self, counts: Sequence[RefusalCount], newest: Sequence[str] = (), key: str = "") -> None:
        self.additions += 1
        names = names_to_add(counts)
        seen = {name: text for name, text in self.stored.items() if name in names}
        for name, text in add(seen, self.now_ms, key or f"k{self.additions}", counts, newest).items():
            if text is None:
                del self.stored[name]
            else:
                self.stored[name] = text

    def read(self, since_ms: int = 0) -> Refusals:
        names = names_to_read(self.stored.get(REFUSALS, ""), since_ms)
        return read({name: text for name, text in self.stored.items() if name in names})


@pytest.fixture
def fields() -> Fields:
    return Fields()


def count(calls: int = 1, hour_ms: int = HOUR, limit: str = "day", job: str = "j", reason: str = "limit") -> Any:
    return RefusalCount(hour_ms, limit, job, reason, calls)


def test_an_addition_that_is_repeated_is_made_once(fields: Fields) -> None:
    fields.add([count(3)], ["{}"], key="k")
    for number in range(MAX_KEYS - 1):
        fields.add([count(1)], key=f"other {number}")
    before = dict(fields.stored)
    fields.add([count(3)], ["{}"], key="k")
    assert fields.stored == before
    fields.add([count(1)], key="one more")
    fields.add([count(3)], ["{}"], key="k")
    assert fields.read().counts == [count(3 + MAX_KEYS + 3)], "a hundred came between"


def test_an_hour_goes_when_it_is_over_for_35_days_and_the_sums_stay(fields: Fields) -> None:
    fields.add([count(1), count(1, HOUR - HOUR_MS)])
    fields.now_ms = HOUR + KEPT_MS - 1
    fields.add([count(1, HOUR + DAY_MS)])
    assert [row.hour_ms for row in fields.read().counts] == [HOUR - HOUR_MS, HOUR, HOUR + DAY_MS]
    fields.now_ms = HOUR + KEPT_MS
    fields.add([])
    assert [row.hour_ms for row in fields.read().counts] == [HOUR, HOUR + DAY_MS]
    fields.now_ms = HOUR + HOUR_MS + KEPT_MS
    fields.add([count(1)])
    assert [row.hour_ms for row in fields.read().counts] == [HOUR + DAY_MS], "nor is it counted anew"
    assert fields.read().sums == [RefusedSum("day", "j", "limit", 4)]
    assert {name for name in fields.stored if name.startswith("refused:")} == {f"refused:{HOUR + DAY_MS}"}


def test_hours_that_a_wrong_clock_dated_far_ahead_go(fields: Fields) -> None:
    fields.now_ms += 400 * DAY_MS
    fields.add([count(1, HOUR + 400 * DAY_MS)])
    fields.now_ms = NOW
    fields.add([count(1), count(1, HOUR + 401 * DAY_MS), count(1, HOUR + 2 * HOUR_MS)])
    assert [row.hour_ms for row in fields.read().counts] == [HOUR, HOUR + 2 * HOUR_MS]
    assert fields.read().sums == [RefusedSum("day", "j", "limit", 4)]


def test_after_two_hundred_rows_the_rest_counts_as_other(fields: Fields) -> None:
    for first in range(0, MAX_ROWS + 50, 50):
        fields.add([count(1, job=f"j{number}") for number in range(first, first + 50)])
    fields.add([count(5, job="j0"), count(7, job="new")])
    refusals = fields.read()
    others = RefusalCount(HOUR, OTHER, OTHER, OTHER, 50 + 7)
    assert len(refusals.counts) == len(refusals.sums) == MAX_ROWS + 1
    assert refusals.counts[0] == count(6, job="j0")
    assert refusals.counts[-1] == others
    assert refusals.sums[-1] == others[1:]


def test_long_names_are_cut(fields: Fields) -> None:
    fields.add([count(1, job="é" * 500), count(1, job="é" * 501)])
    assert fields.read().counts == [count(2, job="é" * (MAX_NAME_BYTES // 2))]


@pytest.mark.parametrize(
    ("counts", "newest", "message"),
    [
        ([count(-1)], [], "calls: that is a whole number"),
        ([count(1, hour_ms=1.5)], [], "hour_ms: that is a whole number"),  # type: ignore[arg-type]
        ([count(1, job=None)], [], "is not a str"),  # type: ignore[arg-type]
        ([], ["é" * 2_000 + "x"], "a refusal of 4,001 bytes: a ledger keeps at most 4,000 of each"),
    ],
)
def test_a_refusal_out_of_its_bounds_is_one_line(fields: Fields, counts: Any, newest: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fields.add(counts, newest)
    assert fields.stored == {}


@pytest.mark.parametrize(
    "nonsense", ["", "x", "7", "null", "[1]", "{}", "[[1]]", '[["a", "b", "c", -1]]', "[" * 100_000, '[1, ["x"], []]']
)
def test_a_foreign_text_is_replaced(fields: Fields, nonsense: str) -> None:
    fields.stored = {REFUSALS: nonsense, REFUSED_SUMS: nonsense, f"refused:{HOUR}": nonsense}
    assert fields.read() == ([], [], [])
    fields.add([count(2)], ["{}"])
    assert fields.read() == ([count(2)], [RefusedSum("day", "j", "limit", 2)], ["{}"])


def test_the_last_hundred_are_kept_as_a_whole_in_order(fields: Fields) -> None:
    texts: list[str] = []
    dice = random.Random(3)
    while len(texts) < 350:
        more = [
            f"refusal {len(texts) + number}"
            for number in range(dice.choice((0, 1, 7, 60, MAX_REFUSALS, MAX_REFUSALS + 30)))
        ]
        fields.add([], more)
        texts += more
        assert fields.read().newest == texts[-MAX_REFUSALS:]
    assert sum(name.startswith("refusal:") for name in fields.stored) == MAX_REFUSALS


def test_a_lost_refusal_is_left_out(fields: Fields) -> None:
    fields.add([], ["a", "b", "c"])
    del fields.stored["refusal:1"]
    assert fields.read().newest == ["a", "c"]


def decision(limits: int = 1, **more: Any) -> Decision:
    states = tuple(LimitState(f"limit {number}", 1, 100, 100, 0) for number in range(limits))
    return Decision(
        admitted=False,
        id=None,
        source="ledger",
        credential="main",
        project="p",
        method="videos.list",
        cost_units=1,
        reason="limit",
        refused_by="limit 0",
        remaining_units=0,
        decided_at_ms=NOW,
        retry_at_ms=NOW + MINUTE_MS,
        limits=states,
    )._replace(**more)


def test_a_refusal_is_kept_with_who_asked_and_why() -> None:
    refused = decision()
    data = json.loads(refusal_text(refused, "job", "DE", "run", "machine\n" * 20, calls=3))
    assert {**data, **refused.as_json()} == data
    assert (data["job"], data["region"], data["run"], data["calls"]) == ("job", "DE", "run", 3)
    assert (data["at"], data["why"]) == ("2026-11-21T03:54:15.077Z", refused.why())
    assert data["machine"] == r"machine\n" * 7 + r"machine\n"[:1]
    assert "calls" not in json.loads(refusal_text(refused, "job", "DE", "run", "machine"))


def test_a_refusal_by_very_many_limits_names_the_one_that_refused() -> None:
    text = refusal_text(decision(limits=200, detail="😀" * 500), "job", "DE", "run", "machine")
    data = json.loads(text)
    assert len(text.encode()) <= MAX_REFUSAL_BYTES
    assert ([limit["name"] for limit in data["limits"]], data["limits_left_out"]) == (["limit 0"], 199)
