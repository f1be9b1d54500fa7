"""Several processes, processes that die, wrong clocks, servers that go away, and what is left behind."""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest
import redis

from quota.errors import StorageAway
from quota.inbound import redis_storage, sqlite_storage
from quota.inbound.contract import WALL_S, Algorithm, Limit, Policy, Storage
from quota.inbound.rules import open_storage
from support.clusters import Nodes
from support.inbound import ALGORITHMS, MINUTE_MS, Clock, policy, run_sql
from support.losses import LedgerStorage, SqliteStorage
from support.patience import PATIENCE_S
from support.processes import Children, in_child, in_threads
from support.proxy import Kind, Proxy
from support.servers import RedisServer, stopped, until

TESTS = Path(__file__).resolve().parents[2]


def test_a_log_is_exact_in_any_window_under_several_processes(url: str) -> None:
    """One of them has a clock that is an hour ahead, and one is killed."""
    command = [sys.executable, "-m", "support.inbound_worker", url, "log", "20", "1000", "1500"]
    workers = [
        subprocess.Popen([*command, ahead_ms], cwd=TESTS, stdout=subprocess.PIPE, text=True)
        for ahead_ms in ("0", "3600000", "0")
    ]
    workers[2].send_signal(signal.SIGSTOP)
    workers[2].send_signal(signal.SIGCONT)
    threading.Timer(0.8, workers[2].kill).start()
    times_ms = sorted(int(line) for worker in workers for line in worker.communicate(timeout=300)[0].splitlines())
    spans_ms = [late - early for early, late in zip(times_ms, times_ms[20:], strict=False)]
    assert min(spans_ms) >= 1_000, "a 21st within a second of the first"
    assert len(times_ms) >= 39, "and it does not hold up who may go; the killed one may not have said its last"


def test_a_signal_handler_that_raises_leaves_no_lock_behind(tmp_path: Path) -> None:
    """In a process of its own, where it interrupts no finalizer of another test."""

    def interrupt(*_: object) -> None:
        raise TimeoutError

    def interrupted() -> tuple[int, bool]:
        storage, interruptions = open_storage(f"sqlite:///{tmp_path}/inbound.db"), 0
        storage.decide(policy("counter", 1_000_000), "ann")
        signal.signal(signal.SIGALRM, interrupt)
        for _ in range(600):
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(0.000_02, 0.000_2))
                for _ in range(50):  # Python swallows an exception in a finalizer
                    storage.decide(policy("counter", 1_000_000), "ann")
            except TimeoutError:
                interruptions += 1
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        return interruptions, storage.decide(policy("counter", 1_000_000), "ann").admitted

    interruptions, admitted = in_child(interrupted)
    assert interruptions > 100
    assert admitted


def test_a_forked_child_asks_on_connections_of_its_own(url: str) -> None:
    storage = open_storage(url)
    assert storage.decide(policy("log", 9), "ann").limits[0].remaining == 8

    def left_for(identity: str) -> list[int]:
        return [storage.decide(policy("log", 9), identity).limits[0].remaining for _ in range(3)]

    child = Children(left_for, ("bob",))
    assert left_for("ann") == [7, 6, 5]
    assert child.answers() == [[8, 7, 6]]
    storage.close()


@pytest.mark.parametrize("ahead_ms", [-3 * 86_400_000, -45_000, 45_000, 3 * 86_400_000])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_servers_clock_decides(
    server: RedisServer, algorithm: str, ahead_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = open_storage(server.url), open_storage(server.url)
    rule = policy(algorithm, 3, 3_600_000)
    assert right.decide(rule, "ann").admitted
    monkeypatch.setattr("quota.inbound.redis_storage.host_clock", lambda: time.time_ns() // 1_000_000 + ahead_ms)
    answers = [wrong.decide(rule, "ann") for _ in range(3)]
    assert [answer.admitted for answer in answers] == [True, True, False]
    assert abs(answers[0].now_ms - time.time_ns() // 1_000_000) < 5_000
    right.close()
    wrong.close()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_clock_that_goes_back_grants_at_most_one_further_limit(
    storage: Storage, clock: Clock, algorithm: str
) -> None:
    """I7. It grants nothing within its window, else the units that the older window has not counted yet."""
    clock.ms += MINUTE_MS - clock.ms % MINUTE_MS + 30_000
    rule = policy(algorithm, 10)
    assert sum(storage.decide(rule, "ann").admitted for _ in range(15)) == 10
    for back_ms in (1, 29_999):
        clock.ms -= back_ms
        assert not storage.decide(rule, "ann").admitted, "within the window"
    clock.ms -= 1
    assert sum(storage.decide(rule, "ann").admitted for _ in range(25)) <= 10
    clock.ms += 30_000
    assert not storage.decide(rule, "ann").admitted, "and nothing was forgotten"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_clock_that_was_far_ahead_locks_nobody_out(storage: Storage, clock: Clock, algorithm: str) -> None:
    clock.ms += 365 * 86_400_000
    storage.decide(policy(algorithm, 1), "ann")
    clock.ms -= 365 * 86_400_000
    assert storage.decide(policy(algorithm, 1), "ann").admitted


def test_a_log_frees_nobody_after_a_clock_went_back_within_a_window(storage: Storage, clock: Clock) -> None:
    """I7. What came after it is dated like what came before, or it would seem that all of the window has ended."""
    clock.ms += MINUTE_MS - clock.ms % MINUTE_MS + 50_000
    for _ in range(3):
        assert storage.decide(policy("log", 4), "ann").admitted
    clock.ms -= 30_000
    assert storage.decide(policy("log", 4), "ann").admitted
    clock.ms += MINUTE_MS + 10_000
    assert storage.decide(policy("log", 4), "ann").retry_after_ms == 20_000


def test_gcra_waits_for_no_more_than_a_burst_after_a_clock_went_back(storage: Storage, clock: Clock) -> None:
    """I7."""
    clock.ms += MINUTE_MS - clock.ms % MINUTE_MS + 50_000
    for _ in range(10):
        assert storage.decide(policy("gcra", 10), "ann").admitted
    clock.ms -= 40_000
    refused = storage.decide(policy("gcra", 10), "ann")
    assert (refused.retry_after_ms, refused.limits[0].reset_ms) == (6_000, MINUTE_MS)


def test_every_key_expires_within_two_windows(redis_server: RedisServer) -> None:
    """I5."""
    with redis.Redis(port=redis_server.port, decode_responses=True) as client:
        client.flushall()
        storage = open_storage(redis_server.url)
        for algorithm in ALGORITHMS:
            for n in range(20):
                for _ in range(3):
                    storage.decide(policy(algorithm, 2, 10_000), f"{n}")
        keys = [key for key in client.keys("*") if "{salts}" not in key]
        assert len(keys) >= 50, "a few of the twenty names may share a hash"
        assert all(0 < client.pttl(key) <= 20_000 for key in keys)
        assert all(client.pttl(key) > 0 for key in client.keys("*"))
        storage.close()


def test_a_log_never_outgrows_its_limit(storage: Storage, ledger_place: LedgerStorage, clock: Clock) -> None:
    """I6."""
    rule = Policy("a", (Limit(7, 10_000),), "log", count_rejected=True)
    for _ in range(60):
        storage.decide(rule, "ann")
        clock.ms += 350
        if isinstance(ledger_place, SqliteStorage):
            states = run_sql(ledger_place.path, "SELECT state FROM states WHERE expires_ms > ?", clock.ms)
            sizes = [len(state) // 6 for (state,) in states]
        else:
            with ledger_place.open() as client:
                sizes = [client.llen(key) for key in ledger_place.keys("quota:inbound:*:r7.10000:*")]
        assert max(sizes) <= 7


@pytest.mark.parametrize("algorithm", ["counter", "log"])
def test_workers_with_two_limits_exceed_neither_limit(storage: Storage, algorithm: Algorithm) -> None:
    numbers = (20, 5)
    admitted = dict.fromkeys(numbers, 0)
    for _ in range(100):
        for number in numbers:
            rule = Policy("a", (Limit(number, 3_600_000),), algorithm, count_rejected=True)
            admitted[number] += storage.decide(rule, "ann").admitted
    assert all(0 < admitted[number] <= number for number in numbers)


def test_gcra_does_not_misread_the_states_of_another_limit(storage: Storage) -> None:
    for number in (10, 20, 7):
        assert storage.decide(policy("gcra", number), "ann", number).admitted
        assert not storage.decide(policy("gcra", number), "ann").admitted


@pytest.mark.usefixtures("real_walls")
def test_a_file_that_another_process_holds_is_away_after_the_wall_and_admits_once_it_is_let_go(
    on_sqlite: Storage, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert on_sqlite.decide(policy("log", 3), "ann").admitted
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        began_s = time.monotonic()
        with pytest.raises(StorageAway, match="is locked by another process"):
            on_sqlite.decide(policy("log", 3), "ann")
        assert WALL_S <= time.monotonic() - began_s < WALL_S + 10
        monkeypatch.setattr(sqlite_storage, "WALL_S", PATIENCE_S)
        letting_go = threading.Timer(0.05, lambda: holder.execute("COMMIT"))
        letting_go.start()
        assert on_sqlite.decide(policy("log", 3), "ann").limits[0].remaining == 1
        letting_go.join()  # a connection that is closed while it commits crashes Python


def test_a_slow_server_is_waited_for_and_asked_once(
    on_redis: Storage, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert on_redis.decide(policy("log", 3), "ann").limits[0].remaining == 2
    with ThreadPoolExecutor(1) as thread:
        with stopped(redis_server):
            under_way = thread.submit(on_redis.decide, policy("log", 3), "ann")
            with pytest.raises(TimeoutError):
                under_way.result(0.05)
        assert under_way.result().limits[0].remaining == 1
    began_s = time.monotonic()
    with stopped(redis_server), monkeypatch.context() as usual:
        usual.setattr(redis_storage, "WALL_S", WALL_S)
        with pytest.raises(StorageAway, match="did not answer within"):
            on_redis.decide(policy("log", 3), "ann")
    assert time.monotonic() - began_s < WALL_S + 10
    assert on_redis.decide(policy("log", 3), "bob").limits[0].remaining == 2, "no reply of another call is taken"


@pytest.mark.usefixtures("real_walls")
def test_no_thread_is_given_the_answer_of_another(server: RedisServer) -> None:
    """On a line that loses, cuts and delays replies. Each thread has a limit that nobody else has, and counts its own
    costs: what may remain is known."""
    wrong: list[tuple[object, ...]] = []

    def ask(storage: Storage, n: int) -> None:
        rng = random.Random(n)
        number = 100_000 * (n + 1)
        rule, least, most = policy("counter", number, 31 * 86_400_000, rule=f"r{n}"), 0, 0
        for _ in range(60):
            cost = rng.randint(1, 9)
            most += cost
            try:
                answer = storage.decide(rule, "ann", cost)
            except StorageAway:
                continue
            least += cost
            if not number - most <= answer.limits[0].remaining <= number - least:
                wrong.append((n, answer, least, most))

    with Proxy(server.port) as proxy:
        storage = open_storage(proxy.url)
        rng = random.Random(1)
        for _ in range(80):  # of four requests one fails; some replies come when nobody waits any more
            kind: Kind = rng.choice(("drop-reply", "cut-reply", "delay-request", "delay-request"))
            proxy.fail(kind, delay_s=rng.choice((0.02, WALL_S + 0.03)), keep_bytes=rng.randint(0, 20))
            for _ in range(3):
                proxy.pass_next()
        in_threads(ask, *[(storage, n) for n in range(6)])
        proxy.heal()
        assert wrong == []
        storage.close()


def test_a_server_that_was_restarted_is_asked_anew(on_redis: Storage, client: redis.Redis) -> None:
    assert on_redis.decide(policy("log", 3), "ann").admitted
    client.script_flush()
    client.flushall()  # the salts too
    client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    for remaining in (2, 1):
        assert on_redis.decide(policy("log", 3), "bob").limits[0].remaining == remaining


POLICIES = (
    Policy("a", (Limit(5, 3_600_000), Limit(6, 86_400_000))),
    Policy("a", (Limit(5, 3_600_000, 5),), "gcra"),
    Policy("a", (Limit(5, 3_600_000),), "log"),
)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with Nodes() as nodes:
        yield nodes


def test_a_cluster_decides_and_survives_a_failover(nodes: Nodes) -> None:
    storage, other = open_storage(nodes.url), open_storage(nodes.url)

    # Several limits of a visitor are decided in one script: their keys lie in one slot, or this would be an error.
    for n in range(60):
        for rule in POLICIES:
            for worker in (storage, other):
                assert worker.decide(rule, f"visitor {n}").admitted
    assert storage.decide(POLICIES[2], "visitor 0", 3).limits[0].remaining == 0
    assert not other.decide(POLICIES[2], "visitor 0").admitted

    # No hot node. Each visitor's node is drawn by chance: one in ten millions of draws leaves a node so few.
    held = []
    for node in nodes.servers[:3]:
        with nodes.client(node) as client:
            held.append(sum("{salts}" not in key for key in client.keys("quota:inbound:*")))
    assert min(held) > 0.05 * sum(held), held

    # Totals and names are those of the whole cluster.
    for worker in (storage, other):
        worker.add_totals({"requests": 60})
    assert storage.totals() == {"requests": 120}
    for rule in POLICIES:
        assert len(storage.top(rule, 100)) == 60
    assert Counter(rule.used for rule in storage.top(POLICIES[0], 100)) == {2: 60}

    # The first node dies, and its replica takes over.
    first, replica = nodes.servers[0], nodes.servers[3]
    with nodes.client(replica) as asked, nodes.client(first) as client:
        client.wait(1, 5_000)
        first.kill()
        until(lambda: asked.info("replication")["role"] == "master", "the replica did not take over")
    admitted: list[bool] = []

    def decided() -> bool:
        with suppress(StorageAway):  # until the client has asked the nodes again
            admitted.append(storage.decide(POLICIES[2], f"visitor {len(admitted)}").admitted)
        return len(admitted) == 60

    until(decided, "the cluster does not answer")
    assert admitted == [False] + [True] * 59, "and nothing that was counted is lost"
    storage.close()
    other.close()
