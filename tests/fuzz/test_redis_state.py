"""What other programs wrote into a project's keys in Redis: a decision of the right shape, or LedgerError."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis

import quota
from fuzz.generate import text
from fuzz.inputs import PARTS, Input, check_line, every
from fuzz.readings import check_readings, keep_history
from quota.common.clock import rfc3339
from quota.errors import LedgerError, UnknownCharge
from quota.ledger.contract import Exhaustion
from quota.terms.limits import DAY_MS, HOUR_MS
from support.claims import claim_of

if TYPE_CHECKING:
    from support.servers import RedisServer

LIMIT = 500
NOW_MS = 1_795_204_800_000
CONFIG = """
[ledger]
url = "{}"
[credentials.main]
api = "youtube-v3"
limits = [
  {{ name = "day", units = 500, window = "24h" }},
  {{ name = "pacific-day", units = 500, window = {{ calendar = "day", zone = "America/Los_Angeles" }} }},
]
"""
VIEWS = [
    f"{total} {NOW_MS - 5}-0 {NOW_MS + expected}-0 5".encode()
    for total in ("-400", "0", "9" * 20)
    for expected in (-1, 0, 9)
]
LOG, STATE, CORRECTIONS, HISTORY = (f"quota:{{main}}:{name}" for name in ("log", "state", "corrections", "history"))


@pytest.mark.parametrize("part", range(PARTS))
def test_what_other_programs_wrote_is_answered_or_named(
    part: int, redis_server: RedisServer, tmp_path: Path, state_dir: Path
) -> None:
    (tmp_path / "quota.toml").write_text(CONFIG.format(redis_server.url))
    with redis.Redis(port=redis_server.port) as client:

        def attempt(r: Input) -> None:
            client.flushall()
            shutil.rmtree(
                state_dir / "high-water-marks", ignore_errors=True
            )  # else what was there before would be missed, rightly
            with quota.open("quota.toml", clock=lambda: NOW_MS) as session:
                for _ in range(2):
                    charge = session.budget().charge("search.list", job="trending", region="US")
                session.budget().settle(str(charge.id), 7)
                session.ledger.exhaust("main", Exhaustion("uploads", NOW_MS, NOW_MS + DAY_MS, "said so", "host:1"))
                session.ledger.exhaust("main", Exhaustion("units", 5, NOW_MS - 1, "said so", "host:1"))
                session.ledger.claim("main", claim_of("a"))
                keep_history(session, NOW_MS)
            r.data = [_damage(r, client) for _ in range(r.choice((1, 1, 2, 4)))]
            _use(str(charge.id))
            client.ping()  # no script goes on for ever

        every("redis", part, attempt)


def _damage(r: Input, client: redis.Redis) -> tuple[object, ...]:
    fields = (
        [field for field in client.hkeys(STATE) or () if isinstance(field, bytes)]
        if client.type(STATE) == b"hash"
        else []
    )
    put = _put(r)
    kind = r.random()
    with contextlib.suppress(redis.ResponseError):  # a key of another kind by now, or an id that is not the newest
        if kind < 0.2:
            known = [b"rolled_up", b"sums_after", b"whole_after_ms", b"gap", b"hour:%d" % (NOW_MS // HOUR_MS)]
            found = client.hkeys(HISTORY) if client.type(HISTORY) == b"hash" else []
            field = r.choice([*known, *found])  # type: ignore[misc]
            client.hset(HISTORY, field, put)
            return HISTORY, field, put
        if kind < 0.6:
            if r.random() < 0.3:
                put = r.choice(VIEWS)
            others = (
                b"last",
                b"format",
                b"view:units|*|*|24h",
                b"retried:t1",
                b"housekeeping_cursor",
                b"maintained_ms",
                b"rolled_up",
                b"repaired",
                b"claim:trending|trending",
                b"granted",
                b"compared",
                b"retention_ms",
                b"trimmed_through_ms",
                b"closed:units",
                b"closed:x",
                b"reopened:x",
            )
            usages = (b"epoch", b"unlogged_until_ms", b"unlogged:units|*|*|24h")
            field = r.choice([*fields, *others, *usages])
            client.hset(STATE, field, put)
            return STATE, field, put
        if kind < 0.75:
            last = r.choice(("*", f"{NOW_MS + 1}-0", "18446744073709551615-18446744073709551615"))
            entry = {field: _put(r) for field in r.choice(("umjgk", "umjgk", "u", "kgj"))}
            client.xadd(LOG, entry, id=last)  # type: ignore[arg-type]
            return LOG, last, entry
        if kind < 0.85:
            newest = client.xrevrange(LOG, count=1)
            field = newest[0][0] if newest else b"1-1"
            client.hset(CORRECTIONS, field, put)
            return CORRECTIONS, field, put
        if kind < 0.92:
            key = r.choice((LOG, STATE, CORRECTIONS))
            client.set(key, put)
            return "SET", key, put
        key = r.choice((LOG, STATE, CORRECTIONS, HISTORY))
        client.delete(key)
        return "DEL", key
    return ()


def _put(r: Input) -> bytes:
    numbers = (
        "e 5 9999999999999 1-0",
        "e -5 9999999999999 1-0",
        "",
        "-1",
        "0",
        "1e400",
        "nan",
        "9" * 20,
        "-" + "9" * 20,
        "0x10",
        "5-5",
        f"{NOW_MS}-{'9' * 20}",
        f"{'9' * 20}-0",
        f"{10**14}-0",
        f"{2**53}-{2**53}",
        f"5 {'9' * 20}",
        f"{10**14} {10**15}",
        f"1-0 {'9' * 20} {10**15} {'9' * 20}-0",
        f"{'9' * 20} {{}}",
        "-5 1-1 2-2 3",
        "1.5",
    )
    records = (
        "5 5 {}",
        "9999999999999999999999 1 []",
        '1 1 {"bucket": 1, "evidence": null, "reported_by": []}',
        "99999999999999 5 [",
    )
    records += tuple(
        until + ' 5 {"bucket": "units", "evidence": "e", "reported_by": "r"}'
        for until in ("9" * 20, f"{2**53 - 1}", "-5")
    )
    made = r.choice((*numbers, "-300", *records, text(r), text(r)))
    return made.encode("utf-8", "surrogatepass")[:5_000]


def _use(charge_id: str) -> None:
    """Whatever one may ask of a ledger: an answer of the right shape, or one line."""
    with quota.open("quota.toml", clock=lambda: NOW_MS + 10) as session:
        budget = session.budget()
        for commit in (False, True):
            decision = (budget.charge if commit else budget.peek)("videos.list", job="trending", region="US")
            check_line(decision.sentence())
            decision.as_json()
            assert decision.admitted == (decision.reason == "ok")
            for state in decision.limits:
                assert type(state.used_units) is int
                if decision.admitted:
                    assert 0 <= state.used_units <= LIMIT, state
            if decision.admitted and commit:
                with contextlib.suppress(LedgerError, UnknownCharge):
                    budget.refund(str(decision.id))
        check_readings(session, charge_id)
        for change in (
            lambda: session.ledger.exhaust("main", Exhaustion("x", NOW_MS, NOW_MS + DAY_MS, "e", "r")),
            lambda: session.ledger.reopen("main", "x"),
            lambda: [rfc3339(one.until_ms) for one in session.ledger.claim("main", claim_of("b")).elsewhere.values()],
            lambda: session.ledger.end_claim("main", claim_of("a"), "done"),
            lambda: session.ledger.roll_up("main", NOW_MS, present_hour=True),
            lambda: session.ledger.repair("main", "again", NOW_MS),
        ):
            try:
                change()
            except LedgerError as error:
                check_line(str(error))
