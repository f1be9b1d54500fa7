"""What an operator, a full disk or another program does to a storage: nobody gains an allowance by it, and what
cannot be read is one error."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import redis

from quota.errors import StorageAway
from quota.inbound.contract import MAX_SCALE, Limit, Policy, Storage
from quota.inbound.names import ROTATION_LEAD_MS
from quota.inbound.redis_storage import RedisStorage
from quota.inbound.rules import open_storage
from support.inbound import ALGORITHMS, MINUTE_MS, Clock, policy, run_sql
from support.losses import LedgerStorage, SqliteStorage
from support.losses import RedisStorage as RedisPlace
from support.servers import RedisServer, free_port

HOUR_MS, DAY_MS = 3_600_000, 86_400_000


def away(ask: Callable[[], object]) -> str:
    with pytest.raises(StorageAway) as raised:
        ask()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def all_asks(storage: Storage, rule: Policy) -> list[Callable[[], object]]:
    of_rule: list[Callable[[], object]] = [partial(ask, rule) for ask in (storage.alive, storage.top)]
    decide, add = partial(storage.decide, rule, "ann"), partial(storage.add_totals, {"n": 1})
    return [decide, add, storage.totals, *of_rule, storage.rotate]


@pytest.mark.parametrize("kind", ["redis", "unix", "redis+sentinel", "redis+cluster"])
def test_a_storage_that_is_not_there_is_one_error(kind: str, tmp_path: Path) -> None:
    place = f"{tmp_path}/none.sock" if kind == "unix" else f"u:secret@127.0.0.1:{free_port()}/0"
    with closing(open_storage(f"{kind}://{place}")) as storage:
        for ask in all_asks(storage, policy("log", 1)):
            message = away(ask)
            assert ("cannot be reached" in message, "secret" in message) == (True, False)


def test_all_workers_start_one_new_file_after_a_deletion(tmp_path: Path, clock: Clock) -> None:
    """The old salts and the numbers of the limits went with it. The rules meet the new file in another order."""
    url = f"sqlite:///{tmp_path / 'inbound.db'}"
    running, new = open_storage(url, clock=clock), open_storage(url, clock=clock)
    rules = [policy(algorithm, 3, HOUR_MS, rule=algorithm) for algorithm in ALGORITHMS]
    for rule in rules:
        running.decide(rule, "ann")
        running.decide(rule, "ann")
    for path in tmp_path.iterdir():
        path.unlink()
    for rule in reversed(rules):
        assert new.decide(rule, "ann").limits[0].remaining == 2
    for rule in (*rules, *rules):
        assert running.decide(rule, "ann").admitted
    for rule in rules:
        assert not running.decide(rule, "ann").admitted
        assert [entry.used for entry in new.top(rule)] == [3]
    running.close()
    new.close()


def test_a_failed_transaction_leaves_nothing_in_a_workers_memory(path: Path, clock: Clock) -> None:
    first, second = (open_storage(f"sqlite:///{path}", clock=clock) for _ in range(2))
    first.totals()
    run_sql(path, "CREATE TRIGGER t BEFORE INSERT ON states BEGIN SELECT RAISE(ABORT, 'as if the disk were full'); END")
    for storage in (first, second):
        for algorithm in ALGORITHMS:
            away(partial(storage.decide, policy(algorithm, 4), "ann"))
    run_sql(path, "DROP TRIGGER t")
    for algorithm in ALGORITHMS:
        rule = policy(algorithm, 4)
        asked = (first, second, first, second)
        assert [storage.decide(rule, "ann").limits[0].remaining for storage in asked] == [3, 2, 1, 0]
    for storage in (first, second):
        storage.add_totals({})
    clock.ms += 10_000
    assert first.alive(policy("counter", 4)) == 3, "one identity for each algorithm"


def test_a_report_can_be_read_during_a_write(on_sqlite: Storage, path: Path) -> None:
    """No decision waits for the report: reading all identities takes longer than a decision may."""
    on_sqlite.decide(policy("counter"), "ann")
    on_sqlite.add_totals({"n": 1})
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        assert on_sqlite.totals() == {"n": 1}
        assert [consumer.used for consumer in on_sqlite.top(policy("counter"))] == [1]
        assert on_sqlite.alive(policy("counter")) in (0, 1)


def test_the_file_is_swept_by_workers_that_live_for_a_few_requests(path: Path, clock: Clock) -> None:
    """I5 in SQLite: little more than two windows are ever kept."""
    for window in range(6):
        for n in range(20):
            storage = open_storage(f"sqlite:///{path}", clock=clock)
            for m in range(10):
                storage.decide(policy("counter", 5, 10_000), f"{window} {n} {m}")
            storage.close()
        clock.ms += 10_000
    assert run_sql(path, "SELECT COUNT(*) FROM states")[0][0] <= 700, "of 1200, two or three windows"


SQL: dict[str, tuple[str, list[object]]] = {
    "states": ("UPDATE states SET state = ?", [b"xyz", "text", 1.5, -5]),
    "salts": ("UPDATE salts SET salt = ?", ["zz", "", "é" * 64, b"\0"]),
    "names of salts": ("UPDATE salts SET name = ? WHERE name = '0'", ["zz", "-1", "²"]),
    "totals": ("UPDATE totals SET total = ?", ["x", 1.5]),
}


def spoilt(path: Path, clock: Clock, rule: Policy, statement: str, value: object) -> Storage:
    path.unlink(missing_ok=True)
    storage = open_storage(f"sqlite:///{path}", clock=clock)
    storage.decide(rule, "ann")
    storage.add_totals({"n": 1})
    storage.close()
    run_sql(path, statement, value)
    return storage


@pytest.mark.parametrize("what", SQL)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_damaged_row_of_the_file_is_one_error(path: Path, clock: Clock, algorithm: str, what: str) -> None:
    statement, values = SQL[what]
    rule = policy(algorithm)

    def decide_in_the_next_window() -> None:
        clock.ms += MINUTE_MS
        storage.decide(rule, "ann")

    for value in values:
        storage = spoilt(path, clock, rule, statement, value)
        asks: dict[str, list[Callable[[], object]]] = {
            "states": [partial(storage.decide, rule, "ann"), partial(storage.top, rule), decide_in_the_next_window],
            "salts": [partial(storage.decide, rule, "ann")],
            "names of salts": [partial(storage.decide, rule, "ann"), storage.rotate],
            "totals": [storage.totals],
        }
        for ask in asks[what]:
            assert "is damaged; move it away, with its -wal and -shm (all limits begin at zero)" in away(ask), value


def fill(client: redis.Redis, url: str, rule: Policy, clock: Clock) -> list[bytes]:
    client.flushall()
    storage = open_storage(url, clock=clock)
    storage.decide(rule, "ann")
    storage.add_totals({"n": 1})
    storage.close()
    return sorted(client.keys("*"))


def spoil(client: redis.Redis, key: bytes, how: str) -> None:
    kind = client.type(key)
    if how == "content" and kind == b"hash":
        client.hset(key, mapping=dict.fromkeys([*client.hkeys(key), "zz"], "z" * 40))
    elif how == "content" and kind == b"list":
        client.rpush(key, "zz")
    elif how in ("content", "string"):
        client.set(key, "zz")
    else:
        client.delete(key)
        client.sadd(key, "zz")


@pytest.mark.parametrize("how", ["content", "string", "set"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_foreign_data_is_one_error(redis_server: RedisServer, clock: Clock, algorithm: str, how: str) -> None:
    rule = policy(algorithm)
    clock.ms += MINUTE_MS - clock.ms % MINUTE_MS + 30_000  # `alive` reads what was handed over ten seconds ago
    with redis.Redis(port=redis_server.port) as client:
        for n in range(len(fill(client, redis_server.url, rule, clock))):
            spoil(client, fill(client, redis_server.url, rule, clock)[n], how)
            storage = open_storage(redis_server.url, clock=clock)
            messages = []
            for ask in all_asks(storage, rule):
                try:
                    ask()
                except StorageAway as error:
                    messages.append(str(error))
            assert 0 < len(messages) < 6
            assert [text for text in messages if "\n" in text] == []
            storage.close()
        client.flushall()


def test_a_worker_puts_back_the_salts_that_a_full_server_dropped(
    on_redis: Storage, client: redis.Redis, redis_server: RedisServer, clock: Clock
) -> None:
    """Those of all its rules. The counts are still there, under the names that these salts make."""
    rules = [policy("counter", 3, hours * HOUR_MS, rule=f"{hours}") for hours in (1, 2, 3)]
    rules += [policy("log", 3, HOUR_MS, rule="log"), policy("gcra", 3, HOUR_MS, rule="gcra")]
    clock.ms -= clock.ms % (6 * HOUR_MS)
    for rule in rules:
        assert [on_redis.decide(rule, "ann").admitted for _ in range(4)] == [True, True, True, False]
    client.delete(*client.keys("quota:inbound:{salts}:*"))
    clock.ms += MINUTE_MS + 1
    assert [on_redis.decide(rule, "ann").admitted for rule in rules] == [False] * len(rules)
    new = open_storage(redis_server.url, clock=clock)
    assert [new.decide(rule, "ann").admitted for rule in rules] == [False] * len(rules)
    new.close()


@pytest.mark.parametrize("algorithm", ["gcra", "log"])
def test_salts_that_a_full_server_dropped_come_back_as_they_were_rotated(
    algorithm: str, on_redis: Storage, client: redis.Redis, clock: Clock
) -> None:
    """Else the counts would stand under other names, and `quota inbound rotate` would be undone."""
    rule = policy(algorithm, 3, HOUR_MS)
    clock.ms -= clock.ms % HOUR_MS
    on_redis.decide(rule, "ann")
    on_redis.rotate()
    clock.ms += 3 * HOUR_MS
    assert [on_redis.decide(rule, "ann").admitted for _ in range(4)] == [True, True, True, False]
    client.delete("quota:inbound:{salts}:fixed")
    clock.ms += MINUTE_MS + 1
    assert not on_redis.decide(rule, "ann").admitted


def test_a_worker_forgets_the_salts_of_days_that_are_over(on_redis: Storage, clock: Clock) -> None:
    assert isinstance(on_redis, RedisStorage)
    for _ in range(40):
        for hours in (1, 7):
            on_redis.decide(policy("counter", 3, hours * HOUR_MS, rule=f"{hours}"), "ann")
        clock.ms += 24 * HOUR_MS
    assert len(on_redis._days) <= 6


def test_rejected_requests_count_up_to_a_bound(storage: Storage) -> None:
    most = MAX_SCALE // 1_000
    rule = Policy("a", (Limit(most, 1_000),), count_rejected=True)
    cost = most * 2 // 3
    answers = [storage.decide(rule, "ann", cost) for _ in range(3)]
    assert [answer.admitted for answer in answers] == [True, False, False]
    assert [answer.limits[0].remaining for answer in answers] == [most - cost, 0, 0]


# -- I3 and I4: what is stored of an identity, and how its names change without freeing anybody ------------------------


def everything(place: LedgerStorage) -> Iterator[bytes]:
    """All that a storage holds: every key, field and value."""
    if isinstance(place, SqliteStorage):
        for (table,) in run_sql(place.path, "SELECT name FROM sqlite_master WHERE type = 'table'"):
            for row in run_sql(place.path, f"SELECT * FROM {table}"):  # noqa: S608  # of our own schema
                yield repr(row).encode()
        return
    with place.open() as client:
        for key in place.keys("*"):
            kind = client.type(key)
            value = {
                b"hash": client.hgetall,
                b"list": lambda key: client.lrange(key, 0, -1),
                b"string": client.get,
            }[kind](key)
            yield key + repr(value).encode()


def salts(place: LedgerStorage) -> set[str]:
    if isinstance(place, SqliteStorage):
        return {name for (name,) in run_sql(place.path, "SELECT name FROM salts")}
    with place.open(decode_responses=True) as client:
        days = {key.decode().rpartition("{salts}:")[2] for key in place.keys("quota:inbound:{salts}:*")} - {"fixed"}
        return days | set(client.hgetall("quota:inbound:{salts}:fixed"))


@pytest.mark.parametrize("identity", ["203.0.113.7", "k" * 10_000, "ключ", "\udcff\udc80", "", "a\0b", "2001:db8::/64"])
def test_no_identity_is_stored(storage: Storage, ledger_place: LedgerStorage, identity: str) -> None:
    for algorithm in ALGORITHMS:
        assert storage.decide(policy(algorithm), identity).limits[0].remaining == 2
        assert storage.decide(policy(algorithm), identity).limits[0].remaining == 1
        assert storage.decide(policy(algorithm), identity + "x").limits[0].remaining == 2
    stored = list(everything(ledger_place))
    assert len(stored) >= 8
    clear = identity.encode("utf-8", "surrogatepass")
    for text in {clear, clear[:64], repr(identity).strip("'").encode("utf-8", "backslashreplace")} - {b"", b"a"}:
        assert [row for row in stored if text in row] == []
    assert max(map(len, stored)) < 600, "nothing of a long identity is kept"


def test_the_names_of_two_days_have_nothing_in_common(storage: Storage, clock: Clock) -> None:
    names = set()
    for _ in range(3):
        storage.decide(policy("counter"), "ann")
        names |= {rule.name for rule in storage.top(policy("counter"))}
        clock.ms += DAY_MS
    assert len(names) == 3


def test_a_days_salt_goes_when_its_windows_end(storage: Storage, clock: Clock, ledger_place: LedgerStorage) -> None:
    clock.ms = 20_833 * DAY_MS + HOUR_MS
    storage.decide(policy("counter"), "ann")
    assert salts(ledger_place) == {"shard", "0", "60000:20833"}
    if isinstance(ledger_place, RedisPlace):
        with ledger_place.open() as client:
            left_ms = client.pttl("quota:inbound:{salts}:60000:20833")
            assert 23 * HOUR_MS < left_ms <= 23 * HOUR_MS + 2 * MINUTE_MS
        return
    clock.ms = 20_834 * DAY_MS + MINUTE_MS
    storage.decide(policy("counter"), "ann")
    assert salts(ledger_place) == {"shard", "0", "60000:20833", "60000:20834"}
    clock.ms = 20_834 * DAY_MS + 2 * MINUTE_MS
    storage.decide(policy("counter"), "ann")
    assert salts(ledger_place) == {"shard", "0", "60000:20834"}


def test_a_quiet_time_deletes_the_states_of_a_busy_time(on_sqlite: Storage, path: Path, clock: Clock) -> None:
    for number in range(600):
        on_sqlite.decide(policy("counter"), f"visitor {number}")
    clock.ms += 2 * DAY_MS
    for _ in range(3):
        on_sqlite.add_totals({})
    assert run_sql(path, "SELECT COUNT(*) FROM states") == [(0,)]
    assert run_sql(path, "SELECT name FROM salts ORDER BY name") == [("0",), ("shard",)]


@pytest.mark.parametrize("algorithm", ["gcra", "log"])
def test_a_rotation_changes_names_and_frees_nobody(storage: Storage, url: str, clock: Clock, algorithm: str) -> None:
    clock.ms -= clock.ms % MINUTE_MS
    clock.ms += 30_000
    other = open_storage(url, clock=clock)
    rule = policy(algorithm, 3, 3 * MINUTE_MS)
    assert [workers.decide(rule, "ann").admitted for workers in (storage, other, storage)] == [True] * 3
    names = {entry.name for entry in storage.top(rule)}
    since_ms = storage.rotate()
    assert since_ms == clock.ms + ROTATION_LEAD_MS
    admitted_ms = []
    for _ in range(14 * 12):
        clock.ms += 5_000
        for worker in (other, storage):
            if worker.decide(rule, "ann").admitted:
                admitted_ms.append(clock.ms)
    if algorithm == "log":
        assert all(late - early >= 3 * MINUTE_MS for early, late in zip(admitted_ms, admitted_ms[3:], strict=False))
    assert len(admitted_ms) == pytest.approx(14, abs=2), "one a minute"
    assert {entry.name for entry in other.top(rule)} & names == set()
    other.close()


def test_a_storage_that_nobody_used_has_nothing_to_rotate(storage: Storage, clock: Clock) -> None:
    assert storage.rotate() == clock.ms
