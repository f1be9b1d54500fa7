"""What is Redis's own: evicted keys, missing rights, lifetimes, foreign writers, and a cluster."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from contract.log.logs import P, charge, correction, fence, marker
from quota.deciding.repairs import repair
from quota.errors import LedgerError, UnusableLedger
from quota.ledger.log import ANY, PAST_MS, Append, Log, Reply
from quota.ledger.redis_log import RedisLog, keys_of, script
from quota.ledger.state import LONGEST
from quota.rules.entry import END, START, Entry, Id
from quota.terms.limits import DAY_MS, SLACK_MS
from support.clusters import Nodes
from support.servers import RedisServer
from support.setup import budget_of, limit

LOG, STATE, CORRECTED, PAST = keys_of(P)
NEVER = "~:0"

SCRIPTS = ("append", "change", "build", "replace", "trim", "replace_past")


@pytest.fixture
def log(server: RedisServer, admin: redis.Redis) -> Iterator[RedisLog]:
    with closing(RedisLog(server.url)) as log:
        yield log


def append(log: Log, epoch: str, seen: Id, *entries: Entry, **more: Any) -> Reply:
    return log.append(P, Append(epoch, seen, entries, **{"new_epoch": "e1", **more}))


def begun(log: Log, corrected: bool = True) -> Id:
    """A log of the epoch `e1` with a few charges, and, if so, a correction; its tip."""
    first = append(log, "", START, charge(5, key="k1"), charge(5, key="k2")).id
    assert first is not None
    tip = (first[0], first[1] + 1)
    if corrected:
        tip = append(log, "e1", tip, correction(charge(5, key="k1", id=first), 1, key="c1"), room=ANY).id or START
    return tip


def put_together(log: Log, entries: list[Entry]) -> bool:
    return log.replace(P, fence(log), log.begin(P).tip, entries, "e2")


@pytest.mark.parametrize("key", [LOG, STATE, CORRECTED])
def test_nobody_appends_after_an_eviction_until_the_log_is_repaired(
    key: str, log: RedisLog, admin: redis.Redis
) -> None:
    tip = begun(log)
    entries = [*log.read(P, START, END, 10)]
    admin.delete(key)
    for epoch, seen in (("e1", tip), ("", START), ("e1", START)):
        reply = append(log, epoch, seen, charge(5, key="k9"), room=ANY)
        assert (reply.word, reply.epoch) == ("BEHIND", NEVER)
    assert log.begin(P).epoch == NEVER
    assert not log.change(P, {}, {"facts": "x"}, marker()).done
    assert log.trim(P, 2**43) == 0
    assert put_together(log, entries)
    assert append(log, "e2", tip, charge(5, key="k9")).word == "APPENDED"
    assert log.corrections(P, ["k1"])["k1"].units == 1


@pytest.mark.parametrize("lost", [LOG, CORRECTED])
def test_a_log_that_lost_a_part_while_it_was_built_is_not_put_in_place(
    lost: str, log: RedisLog, admin: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(log)
    entries = [*log.read(P, START, END, 10)]
    build = log._build

    def built_and_lost(built: list[str], entries: list[Entry]) -> None:
        build(built, entries)
        admin.delete(*(key for key in built if key.startswith(lost)))

    monkeypatch.setattr(log, "_build", built_and_lost)
    assert not put_together(log, entries)
    assert admin.keys("*:building:*") == []
    assert [*log.read(P, START, END, 10)] == entries


def test_a_log_built_and_never_put_in_place_expires(log: RedisLog, admin: redis.Redis) -> None:
    begun(log)
    entries = [*log.read(P, START, END, 10)]
    log._build([f"{LOG}:building:x", f"{CORRECTED}:building:x"], entries)
    assert {admin.pttl(key) > 0 for key in admin.keys("*:building:*")} == {True}


def test_all_keys_live_on_before_half_their_time_is_over(log: RedisLog, admin: redis.Redis) -> None:
    tip = begun(log)
    for rest_ms, renewed in ((PAST_MS * 3 // 4, False), (PAST_MS // 3, True)):
        for key in (LOG, STATE, CORRECTED):
            admin.pexpire(key, rest_ms)
        tip = append(log, "e1", tip, charge(5, key=f"k{rest_ms}")).id or START
        assert {admin.pttl(key) > PAST_MS - DAY_MS for key in (LOG, STATE, CORRECTED)} == {renewed}


def test_all_keys_live_as_long_as_the_longest_window_ever_named(log: RedisLog, admin: redis.Redis) -> None:
    tip = begun(log)
    log.change(P, {}, {LONGEST: str(60 * DAY_MS)})
    assert admin.pttl(LOG) > 60 * DAY_MS
    admin.pexpire(LOG, 59 * DAY_MS)
    append(log, "e1", tip, charge(5, key="k6"))
    log.change(P, {}, {"facts": "x"}, marker())
    assert put_together(log, [*log.read(P, START, END, 10)])
    lifetimes_ms = [admin.pttl(key) for key in (LOG, STATE, CORRECTED)]
    assert min(lifetimes_ms) > 60 * DAY_MS + SLACK_MS - DAY_MS
    assert log.seal(P, fence(log), "redis://elsewhere/0")
    assert admin.pttl(STATE) > 399 * DAY_MS, "the seal"


@pytest.mark.parametrize(
    "fields",
    [
        {"foo": "bar"},
        {"e": "junk"},
        {"e": "1\tk", "f": "x"},
        {"e": "x5\tk\t\t\t\t"},
        {"e": ""},
        {"e": "1\tk\tunits\tm\tj\tr\tmore"},
        {"e": "c1\tk\tunits\tm\tj\tr"},
        {"e": f"{10**15}\tk\tunits\tm\tj\tr"},
    ],
)
def test_foreign_data_leaves_no_room_and_raises_nothing(
    log: RedisLog, admin: redis.Redis, fields: dict[str, str]
) -> None:
    tip = begun(log, corrected=False)
    admin.xadd(LOG, fields)
    reply = append(log, "e1", tip, charge(5, key="k5"), room=1_000)
    assert (reply.word, {entry.kind for entry in reply.unseen}) == ("AGAIN", {"unreadable"})
    assert append(log, "e1", tip, charge(5, key="k5"), room=ANY).word == "APPENDED"
    assert {entry.kind for entry in log.read(P, START, END, 10)} == {"charge", "unreadable"}
    assert log.trim(P, 2**43) == 4
    assert {entry.key for entry in log.past(P, START, END, 10)} == {"k1", "k2", "k5"}


@pytest.mark.parametrize(
    ("field", "stored"),
    [*(("longest_ms", text) for text in (b"9000\xb0", "9" * 5_000, "²")), ("epoch", b"\xb0"), ("epoch", b"~\xb0")],
)
def test_a_field_that_another_program_wrote_is_replaced(
    log: RedisLog, admin: redis.Redis, field: str, stored: bytes | str, tmp_path: Path
) -> None:
    begun(log)
    admin.hset(STATE, field, stored)
    assert budget_of(log, limit(10), project=P, folder=tmp_path).charge("videos.list").admitted
    assert (admin.hget(STATE, "longest_ms"), admin.hget(STATE, "epoch").isascii()) == (str(DAY_MS), True)


def test_a_repair_mends_a_log_with_the_last_possible_id(log: RedisLog, admin: redis.Redis) -> None:
    tip = begun(log)
    admin.xadd(LOG, {"e": "junk"}, f"{2**64 - 1}-{2**64 - 1}")
    with pytest.raises(LedgerError, match="dated too far ahead; run `quota ledger repair`"):
        append(log, "e1", tip, charge(5, key="k5"), room=ANY)
    repair(log, P, log.now_ms())
    beginning = log.begin(P)
    assert append(log, beginning.epoch, beginning.tip, charge(5, key="k5")).word == "APPENDED"


@pytest.mark.parametrize("key", [LOG, STATE, CORRECTED, PAST])
def test_a_key_of_another_type_is_an_error_and_changes_nothing(key: str, log: RedisLog, admin: redis.Redis) -> None:
    tip = begun(log, corrected=False)
    admin.set(key, "x", ex=100)
    before = stored(admin)
    of_old = correction(charge(5, key="k1", id=(1, 1)), 1, key="c2")
    with pytest.raises(UnusableLedger, match="type that is not ours"):
        log.trim(P, 2**43) if key == PAST else append(log, "e1", tip, of_old, room=ANY)
    assert stored(admin) == before


def test_a_state_with_invalid_numbers_fails_no_script(log: RedisLog, admin: redis.Redis) -> None:
    tip = begun(log)
    admin.hset(STATE, mapping={"longest_ms": "9" * 400})
    assert append(log, "e1", tip, charge(5, key="k5")).word == "APPENDED"
    admin.hset(STATE, "holds", "many")
    assert append(log, "e1", tip, charge(5, key="k6"), room=ANY).word == "BEHIND"
    admin.hset(STATE, "trimmed", "many")
    with pytest.raises(LedgerError, match=r"no quota program writes, .*'many'.*; give the ledger a database"):
        log.begin(P)


def commands() -> list[str]:
    calls = r"(?:redis\.call|\bcall)\('(\w+)'|\{ '(H\w+)', corrected \}"
    return sorted({a or b for name in SCRIPTS for a, b in re.findall(calls, script(name)[0])})


def stored(admin: redis.Redis) -> dict[str, Any]:
    raw = redis.Redis(
        connection_pool=redis.ConnectionPool(**{**admin.get_connection_kwargs(), "decode_responses": False})
    )
    with raw:
        return {key: raw.dump(key) for key in sorted(raw.keys("*"))}


def walk(log: Log, reader: Log) -> Iterator[Callable[[], object]]:
    """One of each thing to be done, as the log stands then: for that it is read."""
    yield lambda: append(log, "", START, charge(5, key="k1"), charge(5, key="k2"))
    first, second = (entry.id for entry in reader.read(P, START, END, 2))
    yield lambda: append(log, "e1", second, charge(5, key="k3"))
    yield lambda: append(log, "e1", START, correction(charge(5, key="k1", id=first), 1, key="c1"), room=ANY)
    yield lambda: append(log, "e1", START, correction(charge(5, key="k2", id=second), 1, key="c2"), room=ANY)
    yield lambda: log.change(P, {}, {"facts": "x", "gone": None}, marker())
    yield lambda: log.keep_views(P, "e1", {"v": "e1 1 0-0 1-1 0 -"})
    yield lambda: log.fence(P, "e1", "token")
    beginning = reader.begin(P)
    entries = reader.read(P, START, END, 100)
    yield lambda: log.replace(P, beginning.epoch, beginning.tip, entries, "e2")
    yield lambda: log.trim(P, 2**43, 3)
    yield lambda: log.trim(P, 2**43)
    yield lambda: log.add_past(P, [charge(5, key="old", id=(1_700_000_000_000, 1))])
    yield lambda: log.fence(P, "e2", "token")
    yield lambda: log.seal(P, reader.begin(P).epoch, "redis://elsewhere/0")


@pytest.mark.parametrize("command", commands())
def test_a_user_without_one_right_changes_nothing_or_all(
    command: str, log: RedisLog, server: RedisServer, admin: redis.Redis
) -> None:
    admin.execute_command("ACL", "SETUSER", "poor", "reset", "on", ">x", "~*", "+@all", f"-{command.lower()}")
    failed = 0
    with closing(RedisLog(server.url.replace("://", "://poor:x@"))) as poor:
        steps = zip(walk(poor, log), walk(log, log), strict=True)
        for without, with_all in steps:
            before = stored(admin)
            try:
                without()
            except UnusableLedger:
                failed += 1
                half_written = {key for key, dump in stored(admin).items() if before.get(key) != dump}
                assert {key for key in half_written if b":building:" not in key} == set()
                with_all()
    assert failed > 0
    admin.acl_deluser("poor")


def test_a_trim_does_not_read_the_whole_past(log: RedisLog, admin: redis.Redis) -> None:
    begun(log)
    log.add_past(P, [charge(id=(log.now_ms() - DAY_MS, 0))])
    admin.config_resetstat()
    assert log.trim(P, 2**43) == 3
    assert admin.info("commandstats")["cmdstat_xrevrange"]["calls"] == 2, "the newest entry, and a right is tried"


def test_the_log_works_on_the_nodes_of_a_cluster() -> None:
    with Nodes() as servers, closing(RedisLog(servers.url)) as log:
        with suppress(StopIteration):
            for step in walk(log, log):
                assert step() is not False
        assert log.projects() == [P] or log.begin(P).epoch.startswith("!")
        assert len(log.past(P, START, END, 100)) == 7
