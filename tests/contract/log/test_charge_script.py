"""`charge.lua`, for programs of other languages: it counts as `quota` does, in the same log."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import redis

from quota.ledger.log import ANY, Append
from quota.ledger.redis_log import RedisLog, keys_of, script
from quota.rules.entry import END, START, Entry
from quota.rules.total import total_of
from quota.terms.limits import HOUR_MS, MAX_UNITS, Selector, Sliding, View

NOW_MS = 1_793_000_000_000
P = "p"
KEYS = keys_of(P)[:3]


@pytest.fixture
def log(admin: redis.Redis) -> Iterator[RedisLog]:
    with closing(RedisLog(f"redis://127.0.0.1:{admin.get_connection_kwargs()['port']}/0?socket_timeout=20")) as log:
        yield log


def charge(admin: redis.Redis, key: str, units: int = 1, *, now_ms: int = NOW_MS, **more: Any) -> list[Any]:
    limits = more.get("limits", [("units|*|*", 10, units, HOUR_MS)])
    call = [units, more.get("bucket", "units"), more.get("method", "videos.list"), more.get("job", "nightly"), "DE"]
    words = [now_ms, more.get("caller_ms", 0), more.get("epoch", ""), key, *call, *(word for x in limits for word in x)]
    reply: list[Any] = admin.eval(script("charge")[0], 3, *KEYS, *words)
    return reply


def test_the_script_refuses_a_unit_too_many_until_the_first_has_left(admin: redis.Redis) -> None:
    outcomes = [charge(admin, f"k{n}", 5)[0] for n in range(3)]
    assert outcomes == ["ADMITTED", "ADMITTED", "REFUSED"]
    assert charge(admin, "k3", 5, now_ms=NOW_MS + HOUR_MS - 1)[0] == "REFUSED"
    assert charge(admin, "k4", 5, now_ms=NOW_MS + HOUR_MS)[0] == "ADMITTED"


def test_a_key_is_charged_once_in_the_longest_window(admin: redis.Redis, log: RedisLog) -> None:
    call = {"method": "\u00fc" * 64, "limits": [("units|*|*", MAX_UNITS, MAX_UNITS, HOUR_MS)]}
    first, again = (charge(admin, "k", MAX_UNITS, **call) for _ in range(2))
    assert first[:2] == again[:2]
    assert [entry.units for entry in log.read(P, START, END, 9)] == [MAX_UNITS]
    assert charge(admin, "k", MAX_UNITS, now_ms=NOW_MS + HOUR_MS, **call)[1] != first[1]


def test_several_limits_admit_together_or_not_at_all(admin: redis.Redis, log: RedisLog) -> None:
    limits = [("units|*|*", 10, 5, HOUR_MS), ("*|videos.list,search|*|calls", 1, 1, HOUR_MS)]
    assert charge(admin, "k1", 5, limits=limits)[4:] == [5, 1]
    assert charge(admin, "k2", 5, limits=limits)[0] == "REFUSED"
    assert len(log.read(P, START, END, 9)) == 1


def test_a_fence_or_another_epoch_admits_nothing(admin: redis.Redis, log: RedisLog) -> None:
    epoch = charge(admin, "k1", now_ms=0)[3]
    assert charge(admin, "k2", now_ms=0, epoch="other")[0] == "BEHIND"
    log.fence(P, epoch, "token")
    assert charge(admin, "k3", now_ms=0)[0] == "BEHIND"
    admin.delete(KEYS[0])
    assert charge(admin, "k4", now_ms=0)[0] == "BEHIND"


def test_clocks_that_disagree_charge_nothing(admin: redis.Redis) -> None:
    assert charge(admin, "k1", caller_ms=NOW_MS + 5_001)[0] == "CLOCK"
    assert charge(admin, "k2", caller_ms=NOW_MS - HOUR_MS - 1)[0] == "CLOCK"
    assert charge(admin, "k3", caller_ms=NOW_MS + 5_000)[0] == "ADMITTED"


def test_a_window_of_more_than_20_000_entries_is_an_error(admin: redis.Redis, log: RedisLog) -> None:
    assert charge(admin, "k")[0] == "ADMITTED"
    entries = [Entry((NOW_MS + 1, n), 1, "search", "m", "j", "DE", f"x{n}") for n in range(20_000)]
    _, fence = log.fence(P, "k", "token")
    assert log.replace(P, fence, log.begin(P).tip, [*log.read(P, START, END, 1), *entries], "e2")
    with pytest.raises(redis.ResponseError, match="more than 20,000"):
        charge(admin, "k2")


@pytest.mark.parametrize(
    "wrong",
    [
        *({"key": "a b"}, {"key": ""}, {"units": -1}, {"units": "0" * 16}, {"job": "a\tb"}, {"method": "m" * 65}),
        *(
            {"limits": []},
            {"limits": [("units", 1, 1, 1)]},
            {"limits": [("units|*|*", 1, 1, 3_650 * 24 * HOUR_MS + 1)]},
        ),
        *({name: odd} for name in ("now_ms", "caller_ms") for odd in ("x", "1.5", -1, "nan", 2**53)),
    ],
)
def test_invalid_arguments_write_nothing(wrong: dict[str, Any], admin: redis.Redis) -> None:
    with pytest.raises(redis.ResponseError, match=r"charge\.lua"):
        charge(admin, **{"key": "k", **wrong})
    assert admin.keys("*") == []


def test_the_charge_script_counts_as_running_totals_do(admin: redis.Redis, log: RedisLog) -> None:
    pick, now_ms = random.Random(0), NOW_MS
    log._clock = lambda: now_ms
    views = [
        (View(Selector(("units",)), Sliding(HOUR_MS)), "units|*|*"),
        (View(Selector((), ("a", "b"), (), "calls"), Sliding(HOUR_MS // 2)), "*|a,b|*|calls"),
        (View(Selector((), (), ("j1",)), Sliding(HOUR_MS // 4)), "*|*|j1"),
    ]
    limits = [(counts, 10**6, 0, view.window.longest_ms) for view, counts in views]
    for number in range(150):
        now_ms += pick.choice((0, 1, 60_000, 300_000))
        names = {"bucket": ("units", "search"), "method": "abc", "job": ("j1", "j2")}
        call = {name: pick.choice(choices) for name, choices in names.items()}
        reply = charge(admin, f"k{number}", pick.randrange(5), now_ms=now_ms, limits=limits, **call)
        entries = log.read(P, START, END, 5_000)
        before = [entry for entry in entries if entry.id < next(x.id for x in entries if x.key == f"k{number}")]
        for used, (view, _) in zip(reply[4:], views, strict=True):
            total = total_of(view, before, now_ms, log.begin(P).trimmed)
            assert total.drop(now_ms) is None
            assert used == total.used_units
        of = pick.choice(entries)
        more = [Entry(START, 3, "units", str(HOUR_MS), "", "", f"o{number}", "others", "h", (0, now_ms + 90_000))]
        if of.kind == "charge" and not log.corrections(P, [of.key]):
            fields = {"kind": "correction", "of": of.key, "at": of.id, "before_units": of.units}
            more.append(of._replace(id=START, key=f"c{number}", units=pick.randrange(9), **fields))
        request = Append(reply[3], entries[-1].id, more[pick.randrange(2) :], ANY)
        assert log.append(P, request).word in ("APPENDED", "READ")
        log.trim(P, now_ms - pick.choice((HOUR_MS, HOUR_MS // 2)))
        ms, seq = log.begin(P).tip
        line = pick.choice((f"9\tx{number}\tunits\ta\tj1\t\ttoo long", f"{10**15}\tx{number}\tunits\ta\tj1\t"))
        admin.xadd(keys_of(P).log, {"e": line}, f"{ms}-{seq + 1}")
