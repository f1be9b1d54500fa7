"""What is Redis's own: evicted keys, missing rights, lifetimes, foreign writers, lost answers, a killed server."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import pytest
import redis

from quota.errors import LedgerError, UnusableLedger
from quota.ledger.log import ANY, LEASE_MS, PAST_MS, SLACK_MS, Append, Log, Reply, Room, is_fence
from quota.ledger.memory_log import MemoryLog
from quota.ledger.redis_log import RedisLog, keys_of, script
from quota.rules.entry import END, START, Entry, Id, id_text
from quota.terms.limits import DAY_MS, Selector
from support.clusters import Nodes
from support.sentinels import Sentinels
from support.servers import RedisServer, immortal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

P = "p"
LOG, STATE, CORRECTED, PAST = keys_of(P)
NOW_MS = 1_793_000_000_000
NEVER = "~:0"

SCRIPTS = (
    *("append", "begin", "change", "fence", "build", "replace"),
    *("trim", "add_past", "replace_past"),
)


@pytest.fixture(scope="module")
def started() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def admin(started: RedisServer) -> Iterator[redis.Redis]:
    """The server's administrator. Afterwards no key may be left without a lifetime."""
    with redis.Redis(port=started.port, decode_responses=True) as client:
        client.flushall()
        yield client
        assert immortal(client) == []


@pytest.fixture
def log(started: RedisServer, admin: redis.Redis) -> Iterator[RedisLog]:
    with closing(RedisLog(patient(started.url))) as log:
        yield log


def patient(url: str) -> str:
    return f"{url}?socket_timeout=20&socket_connect_timeout=20"


def charge(key: str, units: int = 5, bucket: str = "units", job: str = "nightly") -> Entry:
    return Entry(START, units, bucket, "videos.list", job, "DE", key)


def correction(of: Entry, key: str, units: int) -> Entry:
    return of._replace(id=START, units=units, key=key, kind="correction", of=of.key, at=of.id, before_units=of.units)


MARKER = Entry(START, 0, "", "", "", "", "marker", "marker")


def append(log: Log, epoch: str, seen: Id, *entries: Entry, **more: Any) -> Reply:
    return log.append(P, Append(epoch, seen, entries, **{"new_epoch": "e1", **more}))


def begun(log: Log, corrected: bool = True) -> Id:
    """A log of the epoch `e1` with a few charges, and, if so, a correction; its tip."""
    first = append(log, "", START, charge("k1"), charge("k2")).id
    assert first is not None
    tip = (first[0], first[1] + 1)
    if corrected:
        tip = append(log, "e1", tip, correction(charge("k1")._replace(id=first), "c1", 1), room=ANY).id or START
    return tip


def put_together(log: Log, entries: list[Entry], epoch: str = "e2") -> bool:
    beginning = log.begin(P)
    done, fence = log.fence(P, beginning.epoch, "token")
    assert done
    return log.replace(P, fence, beginning.tip, entries, epoch)


# -- the contract, in another way than the suite ----------------------------------------------------------------------


def as_lists(answer: Any) -> Any:
    """A log may answer with any kind of sequence."""
    return [*map(as_lists, answer)] if isinstance(answer, list | tuple) else answer


class Pair:
    """The same of the log in Redis and of that in memory, under one clock."""

    def __init__(self, url: str, seed: int) -> None:
        self.now_ms, self.random = NOW_MS, random.Random(seed)
        self.logs: list[Log] = [RedisLog(url, clock=lambda: self.now_ms), MemoryLog(clock=lambda: self.now_ms)]
        self.marks: list[tuple[str, Id]] = [("", START)]
        self.charges: list[Entry] = []
        self.fences: list[str] = []
        self.keys = 0

    def ask(self, what: Callable[[Log], Any]) -> Any:
        ours, theirs = map(what, self.logs)
        assert as_lists(ours) == as_lists(theirs)
        return theirs

    def key(self) -> str:
        self.keys += 1
        return f"k{self.keys}"

    def step(self) -> None:
        pick = self.random
        self.now_ms += pick.choice((0, 0, 1, 50, -20, 3_600_000))
        getattr(
            self, pick.choice(("append",) * 14 + ("correct", "change", "fence", "replace", "trim", "begin", "read"))
        )()

    def append(self, entries: list[Entry] | None = None, room: int | None = None) -> None:
        pick = self.random
        epoch, seen = pick.choice(self.marks[-6:])
        if entries is None:
            bucket = pick.choice(("units", "search"))
            entries = [charge(self.key(), pick.randrange(9), bucket) for _ in range(pick.choice((0, 1, 1, 1, 3)))]
        rooms = [Room(Selector(("search",), count=pick.choice(("units", "calls"))), pick.randrange(-1, 9))]
        request = Append(
            *(epoch, seen, entries, pick.choice((-1, 0, 5, 20, ANY)) if room is None else room),
            now_ms=self.now_ms - pick.choice((0, 0, 0, -1)),
            must=pick.choice(self.marks)[1] if pick.random() < 0.1 else START,
            rooms=rooms if pick.random() < 0.2 else (),
            seq=pick.randrange(2**40),
            new_epoch=self.key(),
        )
        reply = self.ask(lambda log: log.append(P, request))
        if reply.word == "BEHIND":
            beginning = self.ask(lambda log: log.begin(P))
            self.marks.append((beginning.epoch, beginning.tip))
            return
        self.charges += [entry for entry in reply.unseen if entry.kind == "charge"]
        if reply.word == "APPENDED":
            self.charges += [x._replace(id=reply.id) for x in entries[:1] if x.kind == "charge"]
            last = reply.id[0], reply.id[1] + len(entries) - 1
            self.marks.append((reply.epoch, last))
        elif reply.unseen:
            self.marks.append((reply.epoch, reply.unseen[-1].id))

    def correct(self) -> None:
        if self.charges:
            of = self.random.choice(self.charges[-5:])
            self.append([correction(of, self.key(), self.random.randrange(9))], ANY)

    def change(self) -> None:
        pick, names = self.random, ("facts", "claim:a")
        read = self.ask(lambda log: log.change(P, dict.fromkeys(names), {}))
        wanted = {name: read.state.get(name) for name in names} if pick.random() < 0.8 else {"facts": "other"}
        becomes = {pick.choice(names): pick.choice(("x", "y", "", None))}
        # The marker has a number at random, as a charge does: no two histories give one id twice.
        self.ask(lambda log: log.change(P, wanted, becomes))

    def fence(self) -> None:
        epoch, token = self.ask(lambda log: log.begin(P)).epoch, self.random.choice("AB")
        self.fences.append(self.ask(lambda log: log.fence(P, epoch, token))[1])
        self.now_ms += self.random.choice((0, LEASE_MS + 1))

    def replace(self) -> None:
        pick = self.random
        if not self.fences:
            return
        tip, fence = self.ask(lambda log: log.begin(P)).tip, self.fences.pop()
        entries = [x for x in self.logs[1].read(P, START, END, 5_000) if pick.random() < 0.9]
        epoch = self.key()
        views = {"v": f"{epoch} 1 0-0 {id_text(tip)} 0 -"}
        self.ask(lambda log: log.replace(P, fence, tip, entries, epoch, views))
        self.marks.append((epoch, entries[-1].id if entries else START))

    def trim(self) -> None:
        before_ms = self.now_ms - self.random.choice((0, 3_600_000, 7_200_000))
        self.ask(lambda log: log.trim(P, before_ms, 20))
        self.ask(lambda log: log.past(P, START, END, 5_000))

    def begin(self) -> None:
        beginning = self.ask(lambda log: log.begin(P, ["v", "w"], ["facts"]))
        heads = [self.random.choice(self.marks)[1] for _ in "vw"]
        kept = {n: f"{beginning.epoch} 1 0-0 {id_text(head)} 0 -" for n, head in zip("vw", heads, strict=True)}
        if beginning.epoch and not is_fence(beginning.epoch):
            self.ask(lambda log: log.keep_views(P, beginning.epoch, kept))
        self.ask(lambda log: log.begin(P, ["v", "w"], ["facts"]))

    def read(self) -> None:
        after, through = sorted(self.random.choice(self.marks)[1] for _ in "ab")
        self.ask(lambda log: list(log.read(P, after, through, 7)))
        self.ask(lambda log: log.corrections(P, [entry.key for entry in self.charges[-20:]]))


@pytest.mark.parametrize("seed", range(6))
def test_it_answers_as_the_log_in_memory_does(seed: int, started: RedisServer, admin: redis.Redis) -> None:
    pair = Pair(patient(started.url), seed)
    for _ in range(400):
        pair.step()
    assert len(pair.logs[1].past(P, START, END, 5_000)) > 0
    assert len(pair.charges) > 20


# -- evicted keys -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [LOG, STATE, CORRECTED])
def test_a_key_that_was_evicted_alone_lets_nobody_append_until_the_log_is_put_together(
    key: str, log: RedisLog, admin: redis.Redis
) -> None:
    tip = begun(log)
    entries = [*log.read(P, START, END, 10)]
    admin.delete(key)
    for epoch, seen in (("e1", tip), ("", START), ("e1", START)):
        reply = append(log, epoch, seen, charge("k9"), room=ANY)
        assert (reply.word, reply.epoch) == ("BEHIND", NEVER)
    assert log.begin(P).epoch == NEVER
    assert not log.change(P, {}, {"facts": "x"}, MARKER).done
    assert log.trim(P, 2**43) == 0
    assert put_together(log, entries)
    assert append(log, "e2", tip, charge("k9")).word == "APPENDED"
    assert log.corrections(P, ["k1"])["k1"].units == 1


def test_an_emptied_server_has_an_empty_log(log: RedisLog, admin: redis.Redis) -> None:
    tip = begun(log)
    admin.flushall()
    assert append(log, "e1", tip, charge("k9")).word == "BEHIND"
    assert log.begin(P).epoch == ""
    assert append(log, "", START, charge("k9")).word == "APPENDED"


def test_an_empty_union_is_a_log_of_its_epoch(log: RedisLog, admin: redis.Redis) -> None:
    begun(log)
    assert put_together(log, [])
    assert admin.exists(LOG, CORRECTED) == 0
    assert log.begin(P)[1:3] == ("e2", START)
    assert append(log, "e2", START, charge("k9")).word == "APPENDED"
    admin.delete(LOG)
    assert append(log, "e2", START, charge("k10")).word == "BEHIND"


def test_facts_need_no_log(log: RedisLog) -> None:
    assert log.change(P, {"claim:a": None}, {"claim:a": "x"}).done
    assert append(log, "", START, charge("k1")).word == "APPENDED"


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


# -- lifetimes --------------------------------------------------------------------------------------------------------


def test_what_is_built_and_never_put_in_place_goes_by_itself(log: RedisLog, admin: redis.Redis) -> None:
    begun(log)
    entries = [*log.read(P, START, END, 10)] * 1
    log._build([f"{LOG}:building:x", f"{CORRECTED}:building:x"], entries)
    assert {admin.pttl(key) > 0 for key in admin.keys("*:building:*")} == {True}


def test_all_keys_live_on_before_half_their_time_is_over(started: RedisServer, admin: redis.Redis) -> None:
    log = RedisLog(patient(started.url))
    tip = begun(log)
    for key in (LOG, STATE, CORRECTED):
        admin.pexpire(key, 1_000_000)
    later_ms = log.now_ms() + PAST_MS // 3
    tip = append(log, "e1", tip, charge("k5"), clock_ms=later_ms).id or START
    assert admin.pttl(LOG) <= 1_000_000
    append(log, "e1", tip, charge("k6"), clock_ms=later_ms + PAST_MS // 4)
    assert min(admin.pttl(key) for key in (LOG, STATE, CORRECTED)) > PAST_MS - DAY_MS


def test_the_longest_window_ever_named_is_how_long_all_keys_live(log: RedisLog, admin: redis.Redis) -> None:
    tip = begun(log)
    tip = append(log, "e1", tip, charge("k5"), keep_ms=60 * DAY_MS).id or START
    tip = append(log, "e1", tip, charge("k6"), keep_ms=DAY_MS).id or START
    log.change(P, {}, {"facts": "x"}, MARKER)
    assert put_together(log, [*log.read(P, START, END, 10)])
    lifetimes_ms = [admin.pttl(key) for key in (LOG, STATE, CORRECTED)]
    assert min(lifetimes_ms) > 60 * DAY_MS + SLACK_MS - DAY_MS


# -- other programs ---------------------------------------------------------------------------------------------------


def test_what_another_program_wrote_leaves_no_room_and_makes_nothing_fail(log: RedisLog, admin: redis.Redis) -> None:
    tip = begun(log, corrected=False)
    for fields in ({"foo": "bar"}, {"e": "junk"}, {"e": "1\tk", "f": "x"}, {"e": "x5\tk\t\t\t\t"}, {"e": ""}):
        admin.xadd(LOG, fields)
    reply = append(log, "e1", tip, charge("k5"), room=1_000)
    assert (reply.word, {entry.kind for entry in reply.unseen}) == ("AGAIN", {"unreadable"})
    assert append(log, "e1", tip, charge("k5"), room=ANY).word == "APPENDED"
    assert {entry.kind for entry in log.read(P, START, END, 10)} == {"charge", "unreadable"}
    assert log.trim(P, 2**43) == 8
    assert {entry.key for entry in log.past(P, START, END, 10)} == {"k1", "k2", "k5"}


@pytest.mark.parametrize("key", [LOG, STATE, CORRECTED, PAST])
def test_a_key_of_another_type_is_an_error_and_changes_nothing(key: str, log: RedisLog, admin: redis.Redis) -> None:
    tip = begun(log, corrected=False)
    admin.set(key, "x", ex=100)
    before = stored(admin)
    of_old = correction(charge("k1")._replace(id=(1, 1)), "c2", 1)
    with pytest.raises(UnusableLedger, match="type that is not ours"):
        log.trim(P, 2**43) if key == PAST else append(log, "e1", tip, of_old, room=ANY)
    assert stored(admin) == before


def test_a_state_with_numbers_that_are_none_makes_no_script_fail(log: RedisLog, admin: redis.Redis) -> None:
    tip = begun(log)
    admin.hset(STATE, mapping={"keep_ms": "x", "until_ms": "?"})
    assert append(log, "e1", tip, charge("k5")).word == "APPENDED"
    admin.hset(STATE, "holds", "many")
    assert append(log, "e1", tip, charge("k6"), room=ANY).word == "BEHIND"


# -- rights -----------------------------------------------------------------------------------------------------------


def commands() -> list[str]:
    """Those of all scripts."""
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
    yield lambda: append(log, "", START, charge("k1"), charge("k2"))
    first, second = (entry.id for entry in reader.read(P, START, END, 2))
    yield lambda: append(log, "e1", second, charge("k3"))
    yield lambda: append(log, "e1", START, correction(charge("k1")._replace(id=first), "c1", 1), room=ANY)
    yield lambda: append(log, "e1", START, correction(charge("k2")._replace(id=second), "c2", 1), room=ANY)
    yield lambda: log.change(P, {}, {"facts": "x", "gone": None}, MARKER)
    yield lambda: log.keep_views(P, "e1", {"v": "e1 1 0-0 1-1 0 -"})
    yield lambda: log.fence(P, "e1", "token")
    beginning = reader.begin(P)
    entries = reader.read(P, START, END, 100)
    yield lambda: log.replace(P, beginning.epoch, beginning.tip, entries, "e2", {"v": "e2 1 0-0 1-1 0 -"})
    yield lambda: log.trim(P, 2**43, 3)
    yield lambda: log.trim(P, 2**43)
    yield lambda: log.add_past(P, [charge("old")._replace(id=(1_700_000_000_000, 1))])
    yield lambda: log.fence(P, "e2", "token")
    yield lambda: log.seal(P, reader.begin(P).epoch, "redis://elsewhere/0")


@pytest.mark.parametrize("command", commands())
def test_a_user_without_one_right_changes_nothing_or_all(
    command: str, log: RedisLog, started: RedisServer, admin: redis.Redis
) -> None:
    admin.execute_command("ACL", "SETUSER", "poor", "reset", "on", ">x", "~*", "+@all", f"-{command.lower()}")
    failed = 0
    with closing(RedisLog(patient(started.url).replace("://", "://poor:x@"))) as poor:
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


# -- servers that fail ------------------------------------------------------------------------------------------------


def test_a_server_that_forgot_its_scripts_gets_them_again(log: RedisLog, admin: redis.Redis) -> None:
    tip = begun(log)
    admin.script_flush()
    assert append(log, "e1", tip, charge("k5")).word == "APPENDED"


def test_a_lost_answer_is_an_error_and_the_same_key_is_not_charged_twice(admin: redis.Redis) -> None:
    with RedisServer() as own, closing(RedisLog(f"{own.url}?socket_timeout=0.5")) as log:
        tip = begun(log)
        os.kill(own.pid, signal.SIGSTOP)
        try:
            with pytest.raises(LedgerError, match="did not answer"):
                append(log, "e1", tip, charge("k5"))
        finally:
            os.kill(own.pid, signal.SIGCONT)
        with closing(RedisLog(patient(own.url))) as again:
            time.sleep(0.1)  # the server reads what was sent before it takes new connections
            reply = append(again, "e1", tip, charge("k5"))
            assert reply.word == "APPENDED"
            assert [entry.key for entry in again.read(P, tip, END, 10)] == ["k5"]


def test_a_killed_server_is_an_error_until_it_is_back(admin: redis.Redis) -> None:
    with RedisServer() as own, closing(RedisLog(patient(own.url))) as log:
        tip = begun(log)
        own.kill()
        for ask in (lambda: append(log, "e1", tip, charge("k5")), lambda: log.begin(P), log.now_ms, log.projects):
            with pytest.raises(LedgerError, match="cannot be reached"):
                ask()
        own.start()
        assert append(log, "e1", tip, charge("k5")).word == "BEHIND"
        assert append(log, "", START, charge("k5")).word == "APPENDED"


@pytest.mark.parametrize("kind", [Nodes, Sentinels])
def test_all_of_it_works_where_there_are_several_servers(kind: Any) -> None:
    with kind() as servers, closing(RedisLog(patient(servers.url))) as log:
        with suppress(StopIteration):
            for step in walk(log, log):
                assert step() is not False
        assert log.projects() == [P] or log.begin(P).epoch.startswith("!")
        assert len(log.past(P, START, END, 100)) == 7


# -- the past ---------------------------------------------------------------------------------------------------------


def test_the_past_takes_what_is_older_than_all_of_it_and_each_entry_once(log: RedisLog) -> None:
    begun(log, corrected=False)
    log.trim(P, 2**43)
    newest_ms = log.now_ms() - DAY_MS
    older = [charge(f"o{n}")._replace(id=(newest_ms + n, 1)) for n in range(600)]
    log.add_past(P, older[300:])
    log.add_past(P, older[:400])
    assert [entry.key for entry in log.past(P, START, END, 5_000)] == [*(f"o{n}" for n in range(600)), "k1", "k2"]


def test_a_charge_of_the_past_has_the_units_that_it_counted_last(log: RedisLog, admin: redis.Redis) -> None:
    begun(log)
    assert log.trim(P, 2**43) == 3
    assert [(entry.key, entry.units) for entry in log.past(P, START, END, 9)] == [("k1", 1), ("k2", 5), ("c1", 1)]
    assert admin.exists(CORRECTED) == 0
    assert append(log, "e1", log.begin(P).trimmed, charge("k9")).word == "APPENDED"
