"""I3 and I4. What is stored of an identity, and how its names change without freeing anybody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quota.inbound.contract import Policy, Storage
from quota.inbound.names import ROTATION_LEAD_MS
from quota.inbound.rules import open_storage
from support.inbound import ALGORITHMS, Clock, policy, run_sql
from support.losses import LedgerStorage, RedisStorage, SqliteStorage

MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000


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
            found = {
                b"hash": client.hgetall,
                b"list": lambda key: client.lrange(key, 0, -1),
                b"string": client.get,
            }[kind](key)
            yield key + repr(found).encode()


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


def test_two_storages_have_different_names(url: str, storage: Storage, clock: Clock, tmp_path: object) -> None:
    other = open_storage(f"sqlite:///{tmp_path}/other.db", clock=clock)
    for one in (storage, other):
        one.decide(policy("log"), "203.0.113.7")
    assert storage.top(policy("log"))[0].name != other.top(policy("log"))[0].name
    other.close()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_midnight_frees_no_refused_visitor(storage: Storage, clock: Clock, algorithm: str) -> None:
    """Windows that divide a day, that do not, and one of several days; beginning a while before midnight."""
    for number, window_ms in enumerate((MINUTE_MS, 7 * HOUR_MS, 5 * DAY_MS)):
        one = Policy(f"a{number}", policy(algorithm, 3, window_ms).limits, algorithm)  # type: ignore[arg-type]
        clock.ms = (20_833 + number) * DAY_MS - 10
        for _ in range(3):
            assert storage.decide(one, "ann").admitted
        for _ in range(20):
            clock.ms += 1
            assert not storage.decide(one, "ann").admitted, clock.ms % DAY_MS


def test_the_names_of_two_days_have_nothing_in_common(storage: Storage, clock: Clock) -> None:
    names = set()
    for _ in range(3):
        storage.decide(policy("counter"), "ann")
        names |= {one.name for one in storage.top(policy("counter"))}
        clock.ms += DAY_MS
    assert len(names) == 3


def test_a_days_salt_goes_when_its_windows_end(storage: Storage, clock: Clock, ledger_place: LedgerStorage) -> None:
    clock.ms = 20_833 * DAY_MS + HOUR_MS
    storage.decide(policy("counter"), "ann")
    assert salts(ledger_place) == {"shard", "0", "60000:20833"}
    if isinstance(ledger_place, RedisStorage):
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
    one = policy(algorithm, 3, 3 * MINUTE_MS)
    assert [workers.decide(one, "ann").admitted for workers in (storage, other, storage)] == [True] * 3
    names = {found.name for found in storage.top(one)}
    since_ms = storage.rotate()
    assert since_ms == clock.ms + ROTATION_LEAD_MS
    admitted_ms = []
    for _ in range(14 * 12):
        clock.ms += 5_000
        for worker in (other, storage):
            if worker.decide(one, "ann").admitted:
                admitted_ms.append(clock.ms)
    if algorithm == "log":
        assert all(late - early >= 3 * MINUTE_MS for early, late in zip(admitted_ms, admitted_ms[3:], strict=False))
    assert len(admitted_ms) == pytest.approx(14, abs=2), "one a minute"
    assert {found.name for found in other.top(one)} & names == set()
    other.close()


def test_a_storage_that_nobody_used_has_nothing_to_rotate(storage: Storage, clock: Clock) -> None:
    assert storage.rotate() == clock.ms
