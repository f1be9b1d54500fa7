"""L27: a ledger moves with all that counts; wherever a move is stopped, at most one of both ledgers is open."""

from __future__ import annotations

import itertools
import os
import re
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import redis

from contract.ledger.test_formats import WORK
from contract.ledger.test_rights import MOVING, commands_of
from quota.common.clock import NEVER
from quota.errors import LedgerError, MoveRefused
from quota.ledger import movable_sqlite, move
from quota.ledger.claims import MAX_PLACE_BYTES
from quota.ledger.compared import Compared
from quota.ledger.contract import (
    MIN_RETENTION_MS,
    ChargeRequest,
    Exhaustion,
    Expected,
    LimitCheck,
    read_entries,
)
from quota.ledger.entry import Charge
from quota.ledger.factory import open_movable
from quota.ledger.fence import NOT_MOVED, Wanted
from quota.ledger.grants import Grant
from quota.ledger.move import carry_out, plan_move
from quota.ledger.unlogged import UnloggedUsage
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS, Calendar, Selector, Sliding, View
from support.claims import claim_of
from support.interrupts import Interrupted, at_place, interrupt
from support.servers import immortal
from support.setup import NOW_MS, Setup

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quota.ledger.contract import ChargeResult
    from quota.ledger.fence import Movable
    from support.losses import LedgerStorage
    from support.servers import RedisServer

ROOT = Path(__file__).parents[3]
DAY = View(Selector(buckets=("units",)), Sliding(DAY_MS))
CALLS = View(Selector(methods=("search.list",), count="calls"), Sliding(HOUR_MS))
PACIFIC = View(Selector(), Calendar("day", "America/Los_Angeles"))
STORAGE = tuple(str(ROOT / "quota" / name) for name in ("ledger/redis_connection.py", "common/sqlite_file.py"))
STEP = 1 if os.environ.get("QUOTA_TEST_KILLS") else 41
"""Every so manyth place at which a move can be stopped is tried."""

PAIRS = list(itertools.product(("sqlite", "redis"), repeat=2))

FIRST = {pair: 10 * number % STEP for number, pair in enumerate(PAIRS)}
"""Each pair begins at another place."""


class Places:
    """Ledgers of both kinds, each at a place of its own, under one clock."""

    def __init__(self, folder: Path, server: RedisServer) -> None:
        self.folder, self.server = folder, server
        self.numbers = itertools.count()
        self.now_ms = NOW_MS
        self.opened: list[Movable] = []
        self.urls: dict[Movable, str] = {}
        with redis.Redis(port=server.port) as client:
            client.flushall()

    def url(self, kind: str) -> str:
        number = next(self.numbers)
        if kind == "sqlite":
            return f"sqlite:///{self.folder}/ledger-{number}.db"
        return f"redis://127.0.0.1:{self.server.port}/{number % 16}"

    def open(self, url: str) -> Movable:
        self.opened.append(open_movable(url, clock=lambda: self.now_ms))
        self.urls[self.opened[-1]] = url
        return self.opened[-1]

    def pair(self, here: str, there: str) -> tuple[Movable, Movable]:
        """Two empty ledgers, at the first moment; those opened before are given up."""
        self.close()
        self.now_ms = NOW_MS
        with redis.Redis(port=self.server.port) as client:
            client.flushall()
        return self.new(here), self.new(there)

    def new(self, kind: str) -> Movable:
        return self.open(self.url(kind))

    def forget(self, ledger: Movable, *, log_alone: bool = False) -> None:
        """As a server that was emptied, or a file that was deleted."""
        kind, _, place = self.urls[ledger].partition("://")
        if kind == "redis":
            with redis.Redis(port=self.server.port, db=int(place.rpartition("/")[2])) as client:
                client.delete(*client.keys("quota:*:log" if log_alone else "*"))
        elif log_alone:
            with closing(sqlite3.connect(place[1:])) as db, db:
                db.execute("DELETE FROM charges")
        else:
            for path in Path(place[1:]).parent.glob(f"{Path(place).name}*"):
                path.unlink()

    def close(self) -> None:
        while self.opened:
            self.opened.pop().close()


@pytest.fixture
def places(tmp_path: Path, redis_server: RedisServer) -> Iterator[Places]:
    places = Places(tmp_path, redis_server)
    yield places
    places.close()
    for number in range(16):
        with redis.Redis(port=redis_server.port, db=number) as client:
            assert immortal(client) == [], "keys without a lifetime"


def decide(ledger: Movable, key: str, units: int = 1, *, commit: bool = True, **more: Any) -> ChargeResult:
    charge = Charge(units, "units", "search.list", "nightly", "DE", key)
    now_ms = ledger.now_ms()
    checks = (
        LimitCheck(DAY, 1_000_000, units, None),
        LimitCheck(CALLS, 1_000_000, 1, None),
        LimitCheck(PACIFIC, 1_000_000, units, PACIFIC.window.edges(now_ms)),  # type: ignore[union-attr]
    )
    return ledger.decide(ChargeRequest("p", charge, checks, ("units",), now_ms, **more), commit=commit)


def used_up(places: Places, ledger: Movable, charges: int = 7) -> None:
    """A ledger with something of everything."""
    places.now_ms += 26 * HOUR_MS
    decide(ledger, "ahead", 2)
    places.now_ms -= 26 * HOUR_MS
    assert ledger.repair("p", "mended", places.now_ms)
    for number in range(charges):
        places.now_ms += 0 if number % 3 else 1_000
        found = decide(ledger, f"k{number}", 3 + number)
        if number % 5 in (1, 2):  # to another number, and to the same
            ledger.settle("p", str(found.id), number if number % 5 == 1 else 3 + number, [DAY])
    ledger.exhaust("p", Exhaustion("search", NOW_MS, NEVER, "limit: 0\nof 0", "web1"))
    ledger.exhaust("p", Exhaustion("uploads", NOW_MS, NOW_MS + DAY_MS, "quota", "web1"))
    ledger.reopen("p", "uploads", "raised: they said so")
    ledger.repay("p", "web1", [(4, Charge(7, "search", "m", "", "", "r4"))], 60 * DAY_MS)
    usages = [
        UnloggedUsage(
            DAY.name,
            "e1",
            ((50, NOW_MS + HOUR_MS), (5, NOW_MS + DAY_MS)),
            (NOW_MS - 5, 0),
            2,
            NOW_MS - 9,
            NOW_MS - 7,
            3,
            1,
        ),
        UnloggedUsage(DAY.name, "e0/*", ((2, NOW_MS + DAY_MS),), (NOW_MS - 5, 0)),
        UnloggedUsage(CALLS.name, "e1", ((1, NOW_MS + HOUR_MS),), (NOW_MS - 5, 0)),
    ]
    ledger.add_unlogged("p", "lost", usages)
    ledger.claim("p", claim_of("web1"))
    ledger.keep_places("p", claim_of("web1"), "work|t", {"US": "page 2\n'\"é", "DE": "x" * MAX_PLACE_BYTES})
    compared = Compared("units", 40, 45, 0, 5, NOW_MS - HOUR_MS, NOW_MS - 9, NOW_MS)
    ledger.grant("p", [Grant("units", 900, NOW_MS, NOW_MS + DAY_MS)], [compared])
    decide(ledger, "after")


class Content(NamedTuple):
    """All that anybody can see of a project."""

    log: list[Any]
    decision: Any
    exhaustions: Any
    claimed: Any
    places: Any
    repairs: Any
    whole_after_ms: int
    grants: Any
    compared: Any

    @classmethod
    def of(cls, ledger: Movable) -> Content:
        peek = decide(ledger, "", commit=False)
        peek = peek._replace(unlogged=tuple(tuple(sorted(usages)) for usages in peek.unlogged))
        log = list(read_entries(ledger, "p", 0, NEVER))
        claimed = ledger.claim("p", claim_of("web2"))
        places = ledger.places("p", "work|t", ["US", "DE", "FR"])
        repairs, whole_after_ms = ledger.repairs("p"), ledger.whole_after_ms("p")
        from_upstream = tuple(ledger.notes("p").grants), tuple(ledger.notes("p").compared)
        return cls(log, peek, ledger.notes("p").exhaustions, claimed, places, repairs, whole_after_ms, *from_upstream)


def moves(old: Movable, new: Movable) -> list[str]:
    return [carry_out(old, new, step, lambda *_: None).kind for step in plan_move(old, new, ["p"])]


def stopped(number: int, old: Movable, new: Movable) -> bool:
    """Move, and stop at the place of this number; whether there are as many places."""
    try:
        at_place(number, interrupt, lambda: moves(old, new), STORAGE)
    except Interrupted:
        return True
    return False


UNDER_WAY = r"another `quota ledger move` .*run this again|is being moved to|has moved to|is locked|in use"


def try_to_move(old: Movable, new: Movable) -> str:
    """Another mover may be in the way. What was told then."""
    try:
        moves(old, new)
    except (LedgerError, MoveRefused) as error:
        told = str(error)
    else:
        told = ""
    assert "\n" not in told
    return told


def roles(*ledgers: Movable) -> list[str]:
    return [ledger.standing("p").role for ledger in ledgers]


# -- what moves --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_all_that_counts_moves_there_and_back(
    places: Places, here: str, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(move, "PIECE", 3)  # several pieces
    old, new = places.new(here), places.new(there)
    used_up(places, old)
    held = Content.of(old)
    assert len(held.log) == 10
    assert moves(old, new) == ["move"]
    assert Content.of(new) == held
    assert roles(old, new) == ["sealed", "open"]
    assert moves(old, new) == ["moved already"]

    # What machines saw of the old one is there; a number that was repaid is repaid; the keep time holds.
    seen = Expected(held.decision.epoch, (held.decision.last,))
    assert decide(new, "", commit=False, expected=seen).outcome == "admitted"
    new.repay("p", "web1", [(4, Charge(7, "search", "m", "", "", "r4"))])
    assert Content.of(new) == held
    places.now_ms += 55 * DAY_MS
    decide(new, "much-later")
    assert len(Content.of(new).log) == 11
    places.now_ms -= 55 * DAY_MS

    held = Content.of(new)
    assert moves(new, old) == ["move"], "the way back"
    assert Content.of(old) == held
    assert moves(new, old) == ["moved already"]
    decide(old, "again")
    held = Content.of(old)
    assert moves(old, new) == ["move"]
    assert Content.of(new) == held
    third = places.new(here)
    assert moves(new, third) == ["move"]
    assert moves(old, third) == ["moved already"], "by way of the second"
    assert moves(third, old) == ["move"], "past the second"
    assert Content.of(old) == held


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_a_decision_after_the_move_is_the_one_before(places: Places, here: str, there: str) -> None:
    """The views move too: nothing is counted afresh, and nothing leaves a window at another time."""
    old, new = places.new(here), places.new(there)
    for number in range(30):
        decide(old, f"k{number}", 1 + number)
        places.now_ms += HOUR_MS
    moves(old, new)
    first = decide(new, "", commit=False).used_units
    for number in range(40):
        expected = sum(e.units for e in read_entries(new, "p", places.now_ms - DAY_MS + 1, NEVER))
        assert decide(new, "", commit=False).used_units[0] == expected
        if number % 7 == 0:
            decide(new, f"n{number}")
        places.now_ms += HOUR_MS
    assert first[0] == sum(range(8, 31))


def fields_of(ledger: Movable, prefix: str) -> dict[str, str]:
    return {name: value for piece in ledger.state("p") for name, value in piece if name.startswith(prefix)}


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_what_machines_repaid_is_forgotten_a_retention_later_wherever_it_has_moved(
    places: Places, here: str, there: str
) -> None:
    """L19, L23. Each pod that is started anew has a journal of its own, and a number here."""
    old, new = places.pair(here, there)
    places.now_ms -= places.now_ms % MINUTE_MS  # a millisecond sooner is another minute
    dated = []
    for number in range(3):
        old.repay("p", f"pod-{number}", [(7, Charge(1, "units", "m", "", "", f"r{number}"))])
        dated.append(places.now_ms)
        places.now_ms += 10 * HOUR_MS
    old.repay("p", "pod-0", [(7, Charge(1, "units", "m", "", "", "r0"))])  # again: it was appended already
    moves(old, new)
    assert fields_of(new, "repaid_at:") == {f"repaid_at:pod-{n}": str(at_ms) for n, at_ms in enumerate(dated)}
    for after_ms, kept in ((-1, {"pod-0", "pod-1", "pod-2"}), (0, {"pod-1", "pod-2"}), (10 * HOUR_MS, {"pod-2"})):
        places.now_ms = dated[0] + MIN_RETENTION_MS + after_ms
        decide(new, f"d{after_ms}")  # Redis tidies up with the first decision of a minute
        new.repay("p", "web", [(1 + after_ms + HOUR_MS, Charge(1, "units", "m", "", "", f"w{after_ms}"))])
        known = fields_of(new, "repaid")
        assert {name.partition(":")[2] for name in known} == kept | {"web"}, after_ms
        assert len(known) == 2 * len(kept | {"web"})
    new.repay("p", "pod-2", [(7, Charge(1, "units", "m", "", "", "r2"))])
    log = [entry.idempotency_key for entry in read_entries(new, "p", 0, NEVER)]
    assert log.count("r2") == 1


def test_a_number_and_its_time_arrive_in_any_order(places: Places) -> None:
    """A hash of Redis has no order."""
    fields = [("repaid:web", "3"), ("repaid_at:web", str(NOW_MS)), ("repaid:db", "4")]
    for order in itertools.permutations(fields):
        old, new = places.pair("redis", "sqlite")
        decide(old, "k1")
        _, theirs = move._fence(old, new, plan_move(old, new, ["p"])[0])
        for _ in new.clear("p", theirs.move):
            pass
        for field in order:
            new.put_state("p", theirs.move, (0, 0), [field], MIN_RETENTION_MS)
        assert fields_of(new, "repaid") == dict(fields), "a time that is not known is never too long ago"


def test_every_table_and_every_field_of_the_state_moves_or_is_left_on_purpose() -> None:
    schema = (ROOT / "quota" / "ledger" / "schema.sql").read_text()
    assert set(re.findall(r"CREATE TABLE (\w+)", schema)) == set(movable_sqlite.TABLES)
    head = (ROOT / "lua" / "charge.lua").read_text().partition("--       3 corrections")[0]
    documented = set(re.findall(r"^--                      (\w+)", head.partition("2 state")[2], re.MULTILINE))
    taken = set(re.findall(r"^--   (\w+)[ :]", schema, re.MULTILINE))
    assert documented - taken - NOT_MOVED == {"last", "retried", "rolled_up"}, (
        "SQLite has no use for them (L10, L16, L29)"
    )


@pytest.mark.parametrize("lost", ["log", "corrections"])
def test_what_a_server_evicted_counts_on_in_a_file(places: Places, lost: str) -> None:
    """L14: in Redis the views know of it, and in SQLite it is unlogged usage."""
    old, new = places.new("redis"), places.new("sqlite")
    for number in range(5):
        found = decide(old, f"k{number}", 100)
        places.now_ms += 60_000
    old.settle("p", str(found.id), 40, [DAY])
    with redis.Redis.from_url(old._url) as client:  # type: ignore[attr-defined]
        client.delete(f"quota:{{p}}:{lost}")
    seen = decide(old, "", commit=False)
    assert seen.used_units[0] == 440
    moves(old, new)
    told = decide(new, "", commit=False, expected=Expected(seen.epoch, (seen.last,)))
    if lost == "log":
        assert told.outcome == "behind", "every machine is asked for what it knows"
    assert decide(new, "", commit=False).used_units[0] >= 440
    places.now_ms += DAY_MS
    assert decide(new, "", commit=False).used_units[0] == 0


@pytest.mark.parametrize("here", ["sqlite", "redis"])
def test_what_has_moved_lives_as_long_as_before(places: Places, here: str) -> None:
    """L12, L31. Also where nobody charges for weeks; and where the state was evicted, which said how long that is."""
    old, new = places.new(here), places.new("redis")
    retention_ms, kept_ms = (MIN_RETENTION_MS, 34 * DAY_MS) if here == "sqlite" else (40 * DAY_MS, 39 * DAY_MS)
    decide(old, "k1", retention_ms=retention_ms)
    if here == "redis":
        with redis.Redis.from_url(old._url) as client:  # type: ignore[attr-defined]
            client.delete("quota:{p}:state")
    moves(old, new)
    with redis.Redis.from_url(new._url) as client:  # type: ignore[attr-defined]
        assert min(client.pttl(f"quota:{{p}}:{key}") for key in ("log", "state")) > kept_ms


def test_several_projects_move_and_one_that_holds_nothing_is_closed(places: Places) -> None:
    old, new = places.new("sqlite"), places.new("redis")
    decide(old, "k1")
    steps = plan_move(old, new, ["p", "nothing"])
    assert [step.kind for step in steps] == ["move", "nothing"]
    for step in steps:
        carry_out(old, new, step, lambda *_: None)
    with pytest.raises(LedgerError, match="has moved to redis://"):
        old.repay("nothing", "m", [(1, Charge(1, "units", "m", "", "", "m1"))])
    assert [step.kind for step in plan_move(old, new, ["p", "nothing"])] == ["moved already"] * 2
    assert old.projects() == ["nothing", "p"]
    new.repay("nothing", "m", [(1, Charge(1, "units", "m", "", "", "m1"))])
    assert new.projects() == ["nothing", "p"]
    for step in plan_move(new, old, ["p", "nothing"]):
        assert carry_out(new, old, step, lambda *_: None).kind == "move"


# -- the fence ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
@pytest.mark.parametrize("standing", ["moved", "moving", "filling"])
@pytest.mark.parametrize("work", WORK)
def test_a_fenced_ledger_refuses_everything_but_its_log(places: Places, kind: str, standing: str, work: str) -> None:
    """Also callers that expect nothing of it: the ledger itself answers."""
    here, there = places.new("redis"), places.new(kind)
    if standing != "filling":
        here, there = there, here
    used_up(places, here)
    steps = plan_move(here, there, ["p"])
    if standing == "moved":
        carry_out(here, there, steps[0], lambda *_: None)
        fenced, told = here, f"has moved to {there.label} and takes no charge any more; write that url into the"
    else:
        move._fence(here, there, steps[0])
        interrupted = f"if that move was interrupted, finish it: quota ledger move {here.label} {there.label}"
        fenced, told = (
            there,
            f"is being filled from {here.label} and takes no charge until all of it is here; {interrupted}",
        )
        if standing == "moving":
            fenced = here
            told = (
                f"is being moved to {there.label}, which takes no charge either until all of it is there; {interrupted}"
            )
    setup = Setup(fenced, places.now_ms, "p")
    before = list(read_entries(fenced, "p", 0, NEVER)), fenced.standing("p")
    if work == "read":
        WORK[work](setup)
    else:
        with pytest.raises(LedgerError) as raised:
            WORK[work](setup)
        assert told in str(raised.value)
        assert raised.value.exit_status == 69
    assert (list(read_entries(fenced, "p", 0, NEVER)), fenced.standing("p")) == before


def test_a_label_with_odd_characters_is_told_as_it_is(places: Places) -> None:
    old, new = places.new("redis"), places.open(f"sqlite:///{places.folder}/a ledger, 100% ours ü.db")
    decide(old, "k1")
    moves(old, new)
    with pytest.raises(LedgerError, match=re.escape(f"has moved to {new.label} and takes")):
        decide(old, "k2")


# -- what may be moved where -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_what_cannot_be_moved_is_one_line_and_nothing_changes(places: Places, here: str, there: str) -> None:
    old, new, other = places.new(here), places.new(there), places.new(there)

    def refused(a: Movable, b: Movable, told: str) -> None:
        before = [(ledger.standing("p"), list(read_entries(ledger, "p", 0, NEVER))) for ledger in (old, new, other)]
        with pytest.raises(MoveRefused) as raised:
            plan_move(a, b, ["p"])
        assert told in str(raised.value)
        assert "\n" not in str(raised.value)
        assert [(x.standing("p"), list(read_entries(x, "p", 0, NEVER))) for x in (old, new, other)] == before

    refused(old, new, "holds nothing of project p")
    decide(old, "k1")
    refused(old, old, "is both the old ledger and the new one")
    decide(other, "o1")
    refused(old, other, "is in use (1 charge); name an empty ledger")
    move._fence(old, new, plan_move(old, new, ["p"])[0])
    third = places.new(here)
    refused(old, third, f"is being moved to {new.label}; finish that, or take it back: quota ledger move {new.label}")
    refused(new, third, f"is being filled from {old.label}; finish that first")
    moves(old, new)
    refused(old, third, f"has moved to {new.label} already")
    refused(other, old, f"has moved to {new.label}; name an empty ledger")
    refused(new, other, "is in use (1 charge)")


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_a_target_that_was_emptied_and_charged_says_what_to_do(places: Places, here: str, there: str) -> None:
    """Both directions name the way out, and each of them is one once it is taken."""
    for back in (False, True):
        old, new = places.pair(here, there)
        decide(old, "k1")
        move._fence(old, new, plan_move(old, new, ["p"])[0])
        places.forget(new)
        new = places.open(places.urls[new])
        decide(new, "n1")
        way = (new, old) if back else (old, new)
        with pytest.raises(MoveRefused) as raised:
            plan_move(*way, ["p"])
        assert str(raised.value) == (
            f"project 'p' of ledger {new.label} lost what was being moved there, and was charged since (1 charge): "
            "nothing was changed; delete its file, or its keys quota:{p}:*, and run this again: machines that charged "
            "it tell the ledger that remains"
        )
        places.forget(new)
        new = places.open(places.urls[new])
        assert moves(*((new, old) if back else (old, new))) == ["take back" if back else "move"]
        assert decide(old if back else new, "k2").outcome == "admitted"


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_a_ledger_that_lost_what_was_moved_to_it_stays_in_use(places: Places, here: str, there: str) -> None:
    old, new = places.pair(here, there)
    decide(old, "k1")
    moves(old, new)
    places.forget(new)
    for charges, told in ((0, "which has lost it: nothing"), (1, "which has lost it, and stays in use: nothing")):
        new = places.open(places.urls[new])
        if charges:
            decide(new, "n1")
        with pytest.raises(MoveRefused, match=re.escape(f"has moved to {new.label} already, {told} was changed")):
            plan_move(old, new, ["p"])


def test_nothing_is_made_where_nothing_is_moved(places: Places) -> None:
    old, new = places.new("sqlite"), places.new("sqlite")
    with pytest.raises(MoveRefused):
        moves(old, new)
    assert os.listdir(places.folder) == []


@pytest.mark.parametrize("there", ["sqlite", "redis"])
def test_a_ledger_that_holds_more_than_the_one_that_moves_there_is_kept(places: Places, there: str) -> None:
    """An old copy of the log was put back: it is not the ledger that the fenced one moved to."""
    old, new = places.new("sqlite"), places.new(there)
    copy = Path(f"{old.label.removeprefix('sqlite:///')}")
    decide(old, "k1")
    old.close()
    before = copy.read_bytes(), Path(f"{copy}-wal").read_bytes() if Path(f"{copy}-wal").exists() else b""
    decide(old, "k2")
    moves(old, new)
    moves(new, third := places.new("redis"))
    old.close()
    for suffix in ("", "-wal", "-shm"):
        Path(f"{copy}{suffix}").unlink(missing_ok=True)
    copy.write_bytes(before[0])
    with pytest.raises(MoveRefused, match="holds charges that"):
        moves(old, new)
    with pytest.raises(MoveRefused, match="hold one log, or are one ledger"):
        moves(old, third)


# -- stopped anywhere --------------------------------------------------------------------------------------------------


def check_one_is_open(old: Movable, new: Movable) -> None:
    found = roles(old, new)
    assert found.count("open") <= 1, found
    assert found in (
        ["open", "empty"],
        ["open", "sealed"],
        ["open", "filling"],
        ["fenced", "filling"],
        ["sealed", "filling"],
        ["sealed", "open"],
    ), found


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_a_move_that_is_stopped_anywhere_goes_on(
    places: Places, here: str, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two commands, and between a command and its answer. Then it is stopped a second time."""
    monkeypatch.setattr(move, "PIECE", 4)
    for number in itertools.count(FIRST[here, there], STEP):
        old, new = places.pair(here, there)
        used_up(places, old)
        held = Content.of(old)
        stops = 0
        for where in (number, number // 2):
            stops += stopped(where, old, new)
            check_one_is_open(old, new)
        moves(old, new)
        assert roles(old, new) == ["sealed", "open"]
        assert Content.of(new) == held
        if not stops:
            break
    assert number > 230


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_a_move_that_is_stopped_can_be_taken_back(
    places: Places, here: str, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until OLD is sealed; and taking it back may be stopped too."""
    monkeypatch.setattr(move, "PIECE", 4)
    taken_back = 0
    for number in itertools.count(FIRST[here, there], STEP):
        old, new = places.pair(here, there)
        used_up(places, old)
        held = Content.of(old)
        if not stopped(number, old, new):
            break
        found = roles(old, new)
        if found == ["fenced", "filling"]:
            stopped(number // 2, new, old)
            check_one_is_open(old, new)
            if roles(old, new) != ["open", "sealed"]:
                assert moves(new, old) == ["take back"]
            assert roles(old, new) == ["open", "sealed"]
            assert moves(new, old) == ["moved already"]
            assert Content.of(old) == held
            taken_back += 1
        elif found == ["sealed", "filling"]:
            with pytest.raises(MoveRefused, match="finish that first"):
                moves(new, old)
    assert taken_back > 3


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_a_way_back_that_is_taken_back_leaves_no_open_ledger_behind(places: Places, here: str, there: str) -> None:
    """Machines may still have the first url: it must not grant a new budget."""
    old, new = places.new(here), places.new(there)
    used_up(places, old)
    moves(old, new)
    held = Content.of(new)
    move._fence(new, old, plan_move(new, old, ["p"])[0])
    assert moves(old, new) == ["take back"]
    assert roles(old, new) == ["sealed", "open"]
    assert Content.of(new) == held
    with pytest.raises(LedgerError, match=re.escape(f"has moved to {new.label} and takes no charge")):
        decide(old, "k")
    assert moves(new, old) == ["move"]
    assert Content.of(old) == held


def test_a_move_is_taken_back_when_its_target_is_gone(places: Places, own_server: RedisServer) -> None:
    old = places.new("sqlite")
    decide(old, "k1")
    new = places.open(own_server.url)
    move._fence(old, new, plan_move(old, new, ["p"])[0])
    own_server.kill()
    assert moves(new, old) == ["take back"]
    assert decide(old, "k2").outcome == "admitted"


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_a_move_is_taken_back_when_its_target_has_lost_all(places: Places, here: str, there: str) -> None:
    """The target takes no charge afterwards: machines may have its url already."""
    old, new = places.new(here), places.new(there)
    used_up(places, old)
    held = Content.of(old)
    move._fence(old, new, plan_move(old, new, ["p"])[0])
    places.forget(new)
    assert moves(new, old) == ["take back"]
    assert roles(old, new) == ["open", "sealed"]
    assert Content.of(old) == held
    assert moves(old, new) == ["move"]


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_two_moves_at_once_end_in_one_open_ledger(
    places: Places, here: str, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second mover does all of the same move, or of one to another ledger, at any step of the first. Who comes too
    late for the same move finds it done; for another one it is told where the ledger moves."""
    monkeypatch.setattr(move, "PIECE", 4)
    monkeypatch.setattr(movable_sqlite.MovableSqliteLedger, "_deadline_s", 0.1)  # the first holds the file until then
    for number, same in itertools.product(range(0, 400, 2 * STEP), (True, False)):
        old, new = places.pair(here, there)
        third = new if same else places.new(there)
        used_up(places, old)
        held = Content.of(old)
        others = places.open(places.urls[old]), places.open(places.urls[third])
        told: list[str] = []

        def beside(movers: tuple[Movable, Movable] = others, told: list[str] = told) -> None:
            told.append(try_to_move(*movers))

        def first(movers: tuple[Movable, Movable] = (old, new), told: list[str] = told) -> None:
            told.append(try_to_move(*movers))

        at_place(number, beside, first, STORAGE)
        for one in told:
            assert not one or re.search(UNDER_WAY, one), (number, same, told)
        if same and told[-1]:  # the other one was stopped on its way, by a file that the first one held
            assert "is locked" in told[0], (number, told)
            told.append(try_to_move(old, new))
        if same:
            assert told[-1] == "", (number, told)
        found = roles(old, new, third)
        assert found[: 2 if same else 3].count("open") <= 1
        if "open" not in found:
            try_to_move(old, third)
            try_to_move(old, new)
            found = roles(old, new, third)
        assert found[: 2 if same else 3].count("open") == 1, found
        assert Content.of((old, new, third)[found.index("open")]) == held


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_a_mover_that_is_late_clears_nothing_that_another_one_has_filled(places: Places, here: str, there: str) -> None:
    old, new = places.new(here), places.new(there)
    used_up(places, old)
    held = Content.of(old)
    ours, theirs = move._fence(old, new, plan_move(old, new, ["p"])[0])
    theirs = move._copy(old, new, "p", ours, theirs, lambda *_: None)
    for _ in places.open(places.urls[new]).clear("p", ours.move):
        pass
    move._changed(old, "p", ours, Wanted("sealed", ours.move, peer=new.label, charges=ours.charges))
    move._changed(new, "p", theirs, Wanted("open", ours.move, charges=ours.charges))
    assert Content.of(new) == held


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_a_sealed_ledger_is_copied_again_where_the_new_one_lost_its_log_before_it_opened(
    places: Places, here: str, there: str
) -> None:
    old, new = places.new(here), places.new(there)
    used_up(places, old)
    held = Content.of(old)
    ours, theirs = move._fence(old, new, plan_move(old, new, ["p"])[0])
    move._copy(old, new, "p", ours, theirs, lambda *_: None)
    move._changed(old, "p", ours, Wanted("sealed", ours.move, peer=new.label, charges=ours.charges))
    places.forget(new, log_alone=True)
    with pytest.raises(LedgerError, match="it lost some; see its server's log, and run the move again"):
        moves(old, new)
    assert moves(old, new) == ["go on"]
    assert Content.of(new) == held


@pytest.mark.parametrize("command", sorted({one for name in MOVING for one in commands_of(name)}))
def test_a_move_that_lacks_a_right_goes_on_with_it(places: Places, redis_server: RedisServer, command: str) -> None:
    """L22. There, and over what an earlier move has left."""
    with redis.Redis(port=redis_server.port) as client:
        client.acl_setuser("some", enabled=True, nopass=True, keys="*", commands=["+@all", f"-{command}"])
    old, new = places.pair("redis", "redis")
    some = [places.open(places.urls[ledger].replace("://", "://some:any@")) for ledger in (old, new)]
    used_up(places, old, 40)  # more than a hash keeps in one piece
    held = Content.of(old)
    for _ in range(2):
        with suppress(LedgerError):
            moves(some[0], some[1])
        check_one_is_open(old, new)
        if roles(old, new) != ["sealed", "open"]:
            moves(old, new)
        assert Content.of(new) == held
        moves(new, old)
    assert Content.of(old) == held
    with redis.Redis(port=redis_server.port) as client:
        client.acl_deluser("some")


# -- every kind of server ----------------------------------------------------------------------------------------------


@pytest.mark.topology
def test_a_ledger_moves_to_every_kind_of_server_and_back(places: Places, ledger_place: LedgerStorage) -> None:
    old, new = places.new("sqlite"), places.open(ledger_place.url)
    used_up(places, old)
    held = Content.of(old)
    for here, there in ((old, new), (new, old), (old, new)):
        assert moves(here, there) == ["move"]
        assert Content.of(there) == held
        assert there.projects() == ["p"]
