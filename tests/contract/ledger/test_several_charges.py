"""Several charges in one step, on every ledger: all or none, each with an id of its own, adjacent in the log."""

from __future__ import annotations

import os
import random
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import redis

from quota.ledger.contract import MAX_CHARGES, ChargeRequest, Exhaustion, LimitCheck
from quota.ledger.entry import Charge
from quota.ledger.factory import open_ledger
from quota.ledger.redis_decision import arguments, result_of
from quota.ledger.redis_ledger import RedisLedger
from quota.ledger.redis_scripts import keys_of, script
from quota.terms.limits import HOUR_MS, Calendar, Limit, Selector, Sliding, View
from support.oracle import Oracle, Spent, cost, counted, counts, cutoff
from support.proxy import Kind, Proxy
from support.replies import words_of
from support.setup import NOW_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from quota.ledger.contract import ChargeResult, Ledger
    from support.servers import RedisServer

BUCKETS = {"search.list": "units", "videos.list": "units", "suggest.list": "search", "odd,na|me*%": "units"}
JOBS = ("", "trending", "odd|job,%*")
SELECTORS = (
    Selector(),
    Selector(buckets=("units",)),
    Selector(buckets=("search",)),
    Selector(methods=("search.list", "odd,na|me*%")),
    Selector(jobs=("trending",)),
    Selector(buckets=("search", "units"), count="calls"),
    Selector(methods=("videos.list",), count="calls"),
)
WINDOWS = (Sliding(50), Sliding(300), Sliding(2_000), Calendar("hour", "America/Los_Angeles"))
LOST: tuple[Kind, ...] = ("drop-reply", "cut-reply", "drop-request")


def charges_of(spents: Sequence[Spent], attempt: str) -> list[Charge]:
    return [
        Charge(spent.units, spent.bucket, spent.method, spent.job, "DE", f"{attempt}.{number}")
        for number, spent in enumerate(spents)
    ]


def request_of(limits: Sequence[Limit], spents: Sequence[Spent], attempt: str, caller_ms: int) -> ChargeRequest:
    first, *also = charges_of(spents, attempt)
    checks = []
    for limit in limits:
        if any(counts(limit, spent) for spent in spents):
            window = limit.view.window
            edges = window.edges(caller_ms) if isinstance(window, Calendar) else None
            checks.append(LimitCheck(limit.view, limit.limit_units, cost(limit, spents), edges))
    closed_by = tuple(sorted({spent.bucket for spent in spents}))
    return ChargeRequest("p", first, tuple(checks), closed_by, caller_ms, also=tuple(also))


def leaving_ms(oracle: Oracle, limit: Limit, spents: Sequence[Spent], now_ms: int) -> int | None:
    """The charge that must leave a sliding window before all of them fit."""
    left, room = oracle.used(limit.view, now_ms), limit.limit_units - cost(limit, spents)
    if not isinstance(limit.view.window, Sliding) or not 0 <= room < left:
        return None
    for spent in oracle.log:
        if spent.ms > cutoff(limit.view, now_ms):
            left -= counted(limit.view, spent)
            if left <= room:
                return spent.ms
    raise AssertionError("more is counted than was charged")


@pytest.fixture(params=["sqlite", "redis"])
def behind_a_bad_line(
    request: pytest.FixtureRequest, tmp_path: Any
) -> Iterator[tuple[Callable[[Callable[[], int]], Ledger], Callable[[Kind], None]]]:
    """Opens a ledger; and spoils the line to it for its next script call."""
    if request.param == "sqlite":
        yield lambda clock: open_ledger(f"sqlite:///{tmp_path}/ledger.db", clock=clock), lambda _kind: None
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    with redis.Redis(port=server.port) as client:
        client.flushall()
    with Proxy(server.port) as proxy:
        yield lambda clock: open_ledger(proxy.url, clock=clock), lambda kind: proxy.fail(kind, keep_bytes=7)


@pytest.mark.parametrize("seed", range(int(os.environ.get("QUOTA_TEST_SEEDS", "1"))))
def test_all_are_charged_or_none_as_the_oracle_says(
    behind_a_bad_line: tuple[Callable[[Callable[[], int]], Ledger], Callable[[Kind], None]], seed: int
) -> None:
    """L1, L4, L9, L10, L16, L20: decision by decision, while connections end in between, charges are corrected and
    buckets close."""
    open_it, spoil = behind_a_bad_line
    dice, now_ms, oracle = random.Random(seed), NOW_MS, Oracle()
    seen: dict[str, int] = {}
    with closing(open_it(lambda: now_ms)) as ledger:
        for attempt in range(600):
            now_ms += dice.choice((0, 0, 1, 1, 5, 30, 400 if dice.random() < 0.05 else 2))
            chance = dice.random()
            if chance < 0.1 and oracle.log:
                corrected = dice.choice(oracle.log[-100:])
                corrected.units = dice.choice((0, corrected.units + 2))
                corrected.known.clear()
                assert ledger.settle("p", corrected.id, corrected.units, ()) is not None
                continue
            if chance < 0.12:
                bucket, until_ms = dice.choice(("units", "search")), now_ms + dice.choice((3, 40))
                standing = ledger.exhaust("p", Exhaustion(bucket, now_ms, until_ms, "said so", "the test"))
                oracle.closed[bucket] = standing.until_ms
                continue
            number = dice.choice((1, 2, 2, 3, 5, 10, MAX_CHARGES))
            methods = [dice.choice(list(BUCKETS)) for _ in range(number)]
            spents = [
                Spent(0, 0, dice.choice((1, 2, 7)), BUCKETS[method], method, dice.choice(JOBS)) for method in methods
            ]
            limits = []
            for _ in range(dice.randrange(5)):
                one = Limit("", 1, View(dice.choice(SELECTORS), dice.choice(WINDOWS)), 1, 0)
                least = max(cost(one, spents), 1)  # a budget asks for nothing that can never fit
                limits.append(replace(one, limit_units=least + dice.choice((0, 4, 30, 90, 400, 3_000))))
            asked = request_of(limits, spents, f"t{attempt}", now_ms)
            commit = dice.random() < 0.8
            if dice.random() < 0.15:
                spoil(dice.choice(LOST))
            got = ledger.decide(asked, commit=commit)
            want = oracle.answer(
                [(x, x.limit_units) for x in limits], spents, asked.closed_by, now_ms, now_ms, commit=commit
            )
            assert (got.outcome, list(got.ids), list(got.used_units)) == (want.outcome, want.ids, want.used)
            assert got.last == oracle.newest
            if got.leaving_ms:  # a ledger may leave that to the caller
                counting = [limit for limit in limits if any(counts(limit, spent) for spent in spents)]
                full = [
                    u + check.cost_units > check.cap_units for u, check in zip(want.used, asked.checks, strict=True)
                ]
                wanted = [
                    leaving_ms(oracle, limit, spents, now_ms) if is_full else None
                    for limit, is_full in zip(counting, full, strict=True)
                ]
                told = [want if said is None else said for said, want in zip(got.leaving_ms, wanted, strict=True)]
                assert told == wanted
            seen[got.outcome] = seen.get(got.outcome, 0) + 1
        log = ledger.read("p", (0, 0), now_ms + HOUR_MS, 1_000)
        newest = oracle.log[-len(log) :] if len(log) < 1_000 else oracle.log[:1_000]
        assert [(e.id, e.units, e.bucket, e.method, e.job) for e in log] == [
            (spent.id, spent.units, spent.bucket, spent.method, spent.job) for spent in newest
        ]
    assert min(seen[outcome] for outcome in ("admitted", "refused", "exhausted")) > 5, seen


def three(attempt: str = "t", **more: Any) -> ChargeRequest:
    """Two searches and a call of videos.list; one limit counts all of them, the other the searches."""
    spents = [Spent(0, 0, units, "units", method, "") for units, method in ((5, "search.list"), (1, "videos.list"))]
    spents.append(Spent(0, 0, 7, "units", "search.list", ""))
    limits = [
        Limit("day", 100, View(Selector(), Sliding(HOUR_MS)), 100, 0),
        Limit("searches", 5, View(Selector(methods=("search.list",), count="calls"), Sliding(HOUR_MS)), 5, 0),
    ]
    return request_of(limits, spents, attempt, NOW_MS)._replace(**more)


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    with closing(open_ledger(ledger_url, clock=lambda: NOW_MS)) as ledger:
        yield ledger


def test_each_has_its_own_entry_and_the_costs_are_sums_of_what_each_limit_counts(ledger: Ledger) -> None:
    result = ledger.decide(three(), commit=True)
    assert (result.outcome, result.used_units) == ("admitted", (13, 2))
    assert result.ids == (f"{NOW_MS}-0", f"{NOW_MS}-1", f"{NOW_MS}-2")
    assert result.last == (NOW_MS, 2)
    log = ledger.read("p", (0, 0), NOW_MS, 10)
    assert [(e.id, e.units, e.method, e.region, e.idempotency_key) for e in log] == [
        (result.ids[0], 5, "search.list", "DE", "t.0"),
        (result.ids[1], 1, "videos.list", "DE", "t.1"),
        (result.ids[2], 7, "search.list", "DE", "t.2"),
    ]
    assert ledger.decide(three("u"), commit=True).ids[0] == f"{NOW_MS}-3"
    refused = ledger.decide(three("v"), commit=True)
    assert (refused.outcome, refused.ids, refused.used_units) == ("refused", (), (26, 4))
    assert refused.leaving_ms == ((None, NOW_MS) if isinstance(ledger, RedisLedger) else ())


def test_a_limit_that_has_room_again_is_not_told_as_full_beside_another(ledger_url: str) -> None:
    now_ms = NOW_MS
    limits = [Limit(name, 1, View(Selector(), Sliding(ms)), 1, 0) for name, ms in (("short", 300), ("long", 2_000))]
    with closing(open_ledger(ledger_url, clock=lambda: now_ms)) as ledger:
        told = []
        for now_ms in (NOW_MS, NOW_MS + 1, NOW_MS + 300):
            asked = request_of(limits, [Spent(0, 0, 1, "units", "videos.list", "")], f"t{now_ms}", now_ms)
            told.append(ledger.decide(asked, commit=now_ms == NOW_MS).leaving_ms)
        assert told == ([(), (NOW_MS, NOW_MS), (None, NOW_MS)] if isinstance(ledger, RedisLedger) else [()] * 3)


def test_a_peek_at_several_charges_nothing(ledger: Ledger) -> None:
    peeked = ledger.decide(three(), commit=False)
    assert (peeked.outcome, peeked.ids, peeked.used_units, peeked.last) == ("admitted", (), (0, 0), (0, 0))


def test_each_can_be_corrected_by_its_own_id(ledger: Ledger) -> None:
    ids = ledger.decide(three(), commit=True).ids
    before = ledger.settle("p", ids[2], 0, ())
    assert before is not None
    assert (before.units, before.idempotency_key) == (7, "t.2")
    assert ledger.decide(three("peek"), commit=False).used_units == (6, 1)


def test_the_first_of_a_ledger_names_its_epoch(ledger: Ledger) -> None:
    """L18."""
    assert ledger.decide(three(), commit=True).epoch == "t.0"


@pytest.mark.parametrize("repaid", [False, True])
def test_the_first_charge_begins_an_epoch_also_one_that_is_repaid(ledger: Ledger, repaid: bool) -> None:
    """L18."""
    assert ledger.decide(three(), commit=False).epoch == ""
    if repaid:
        ledger.repay("p", "machine", [(n, Charge(1, "units", "videos.list", "", "", f"drawn{n}")) for n in (1, 2)])
        assert ledger.decide(three(), commit=False).epoch == "drawn1"
    begun = "drawn1" if repaid else "t.0"
    assert ledger.decide(three(), commit=True).epoch == begun
    assert ledger.decide(three("u"), commit=False).epoch == begun


# -- the script, for callers in any language ---------------------------------------------------------------------------


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=redis_server.port, decode_responses=True) as client:
        client.flushall()
        yield client


def run(client: redis.Redis, asked: ChargeRequest, *, age_ms: int = -1, **given: str) -> Any:
    args = arguments(asked, str(NOW_MS), True)
    args[8] = str(age_ms)
    for name, text in given.items():
        args[("u", "method", "job", "region", "key").index(name) + 3] = text
    return words_of(client.eval(script("charge")[0], 3, *keys_of("p"), *args))


IDS = [f"{NOW_MS}-{n}" for n in range(3)]


@pytest.mark.parametrize("since", ["nothing", "settled", "trimmed", "charged", "lost state"])
def test_a_repeat_finds_them_all_whatever_was_done_since(client: redis.Redis, since: str) -> None:
    """L16."""
    assert run(client, three())[:2] == ["ADMITTED", " ".join(IDS)]
    if since == "settled":
        for charge_id in IDS:
            client.eval(script("settle")[0], 4, *keys_of("p"), "quota:{p}:history", charge_id, 0)
    elif since == "trimmed":
        client.xtrim(keys_of("p").log, minid=IDS[2], approximate=False)
    elif since == "charged":
        assert run(client, three("u"))[0] == "ADMITTED"
    elif since == "lost state":
        client.delete(keys_of("p").state)
    kept = client.xlen(keys_of("p").log)
    again = run(client, three(), age_ms=300)
    assert again[:2] == ["ADMITTED", " ".join(IDS)]
    assert client.xlen(keys_of("p").log) == kept
    assert run(client, three())[:2] == ["RETRIED", ""], "the first try, should it come after its repeat"


def test_a_repeat_of_what_never_arrived_charges_all(client: redis.Redis) -> None:
    """L16."""
    assert run(client, three(), age_ms=300)[:2] == ["ADMITTED", " ".join(IDS)]
    assert run(client, three())[:2] == ["RETRIED", ""]
    assert client.xlen(keys_of("p").log) == 3


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"u": "5\n1"}, "several charges"),
        ({"u": "5\n1\n7\n1"}, "several charges"),
        ({"method": "search.list"}, "several charges"),
        ({"job": ""}, "several charges"),
        ({"region": "DE\nDE"}, "several charges"),
        ({"key": "a\nb"}, "several charges"),
        ({"key": "a"}, "u is N"),
        ({"u": "5\n1\nx"}, "u is N"),
        ({"u": "5\n1\n1000000001"}, "u is N"),
        ({"key": "a\n\nb"}, "idempotency key"),
        ({"key": "a\nb c\nd"}, "idempotency key"),
        ({"u": "5\n2\n7"}, "the sum"),
        ({"method": "search.list\nvideos.list\nvideos.list"}, "the sum"),
        (
            {name: "\n".join(["1"] * (MAX_CHARGES + 1)) for name in ("u", "method", "job", "region", "key")},
            "at most 100",
        ),
    ],
)
def test_words_that_cannot_be_right_are_an_error_and_nothing_is_charged(
    client: redis.Redis, given: dict[str, str], word: str
) -> None:
    with pytest.raises(redis.ResponseError, match=f"charge.lua: .*{word}"):
        run(client, three(), **given)
    assert client.keys("*") == []


def test_a_server_out_of_memory_charges_none(client: redis.Redis) -> None:
    """L22."""
    client.config_set("maxmemory", "1")
    try:
        with pytest.raises(redis.ResponseError, match="used memory"):
            run(client, three())
    finally:
        client.config_set("maxmemory", "0")
    assert client.keys("*") == []


def test_a_log_that_cannot_be_written_charges_none(client: redis.Redis) -> None:
    """L22: the state is put back."""
    assert run(client, three())[0] == "ADMITTED"
    before = client.hgetall(keys_of("p").state)
    client.execute_command("ACL", "SETUSER", "default", "-xadd")
    try:
        with pytest.raises(redis.ResponseError, match="can't run"):
            run(client, three("u"))
    finally:
        client.execute_command("ACL", "SETUSER", "default", "+xadd")
    assert client.hgetall(keys_of("p").state) == before
    assert client.xlen(keys_of("p").log) == 3


# -- the answer --------------------------------------------------------------------------------------------------------


def test_an_answer_with_fewer_ids_than_charges_is_no_answer() -> None:
    reply = f"ADMITTED {{}} {NOW_MS} {IDS[2]} e 13 2"
    assert result_of(three(), reply.format(",".join(IDS))).ids == tuple(IDS)
    with pytest.raises(ValueError, match="an id for each charge"):
        result_of(three(), reply.format(IDS[0]))


def test_a_line_of_an_answer_that_says_nothing_makes_it_none() -> None:
    reply = f"ADMITTED {','.join(IDS)} {NOW_MS} {IDS[2]} e 13 2"
    for more in ("\n", "\nsomething else", "\n\nevicts allkeys-lru"):
        with pytest.raises(ValueError, match="says nothing"):
            result_of(three(), reply + more)


def test_one_call_asks_as_it_always_did(redis_server: RedisServer) -> None:
    alone = three()._replace(also=())
    assert "\n" not in "".join(arguments(alone, "0", True))
    result: ChargeResult
    with closing(RedisLedger(redis_server.url)) as ledger:
        result = ledger.decide(alone._replace(checks=(), caller_ms=ledger.now_ms()), commit=True)
    assert (result.also, len(result.ids)) == ((), 1)
