"""What a decision asks a Redis server: packed once for many, it must say what its arguments say."""

from __future__ import annotations

import random

import hiredis
import pytest

from quota.deciding.checklist import NO_CAP
from quota.ledger.contract import NOTHING_EXPECTED, ChargeRequest, Expected, LimitCheck
from quota.ledger.entry import Charge
from quota.ledger.redis_decision import Question, arguments
from quota.ledger.redis_ledger import RedisLedger
from quota.ledger.redis_scripts import keys_of, script
from quota.terms.limits import DAY_MS, Calendar, Selector, Sliding, View
from support.servers import RedisServer
from support.setup import Setup, limit

NAMES = ("", "a", "videos.list", "café", "日本", "x=1", "a b\r\n$3\r\nend", "💶")


def a_request(r: random.Random, checks: tuple[LimitCheck, ...]) -> ChargeRequest:
    ids = tuple((r.choice((0, 1_793_000_000_000)), r.randrange(3)) for _ in range(r.choice((0, 1, 1, 3))))
    return ChargeRequest(
        project=r.choice(("p", "q.1")),
        charge=Charge(
            r.choice((0, 1, 100)),
            r.choice(("units", "search", "é")),
            r.choice(NAMES),
            r.choice(NAMES),
            r.choice(NAMES),
            r.choice(("1f2cbe161", "é", "key")),
        ),
        checks=checks,
        closed_by=r.choice(((), ("units",), ("search", "é"))),
        caller_ms=r.choice((0, 1, 1_793_000_000_000 + r.randrange(10**6))),
        jitter_ms=r.choice((0, 5)),
        expected=r.choice((NOTHING_EXPECTED, Expected("e", ids), Expected("é/2", ids))),
        retention_ms=r.choice((DAY_MS, 3 * DAY_MS)),
        granted=r.choice((None, "", "units=5:1:2")),
    )


def some_checks(r: random.Random) -> tuple[LimitCheck, ...]:
    windows = (Sliding(DAY_MS), Calendar("day", "UTC"))
    checks = []
    for _ in range(r.choice((0, 1, 2, 3))):
        window = r.choice(windows)
        edges = (1, 2 + r.randrange(3), 9) if isinstance(window, Calendar) else None
        view = View(Selector(buckets=("units",), methods=r.choice(((), ("é", "a")))), window)
        checks.append(LimitCheck(view, r.choice((0, 9_500, NO_CAP)), r.choice((0, 1, 100)), edges))
    return tuple(checks)


@pytest.mark.parametrize("seed", range(5))
def test_a_packed_question_says_what_its_arguments_say(seed: int) -> None:
    r = random.Random(seed)
    for _ in range(100):
        request, commit = a_request(r, some_checks(r)), r.random() < 0.5
        question = Question(request, commit)
        for _ in range(4):
            now, again = r.choice(("0", "1793000000000")), a_request(r, request.checks)
            own = request.charge._replace(idempotency_key=again.charge.idempotency_key)
            again = request._replace(charge=own, caller_ms=again.caller_ms, expected=again.expected)
            again = again._replace(granted=request.granted)
            replies = hiredis.Reader(encoding="utf-8")
            replies.feed(b"".join(question.words(again, now)))
            args = arguments(again, now, commit)
            assert replies.gets() == ["EVALSHA", script("charge")[1], "3", *keys_of(request.project), *args]
            assert not replies.has_data()


def test_kinds_of_calls_beyond_number_are_not_all_kept(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a process asks may name a region that nobody names again. What is not kept is decided as well."""
    monkeypatch.setattr("quota.ledger.redis_ledger.MAX_KEPT", 5)
    setup = Setup.open(redis_server.url)
    budget = setup.budget(limit(20))
    decisions = [budget.charge("videos.list", region=f"r{n % 10}") for n in range(20)]
    decisions += [budget.charge("videos.list", region="another")]
    assert [decision.admitted for decision in decisions] == [True] * 20 + [False]
    assert isinstance(setup.ledger, RedisLedger)
    assert len(setup.ledger._questions) <= 5
    setup.ledger.close()
