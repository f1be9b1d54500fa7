"""L24: a ledger of another format is met with one line, whatever is asked of it, and stays as it is."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
import redis

from contract.ledger.test_charge_script import ALL, KEYS, NOW, STATE, Scripts, scripts
from quota.common.clock import NEVER
from quota.errors import UnusableLedger
from quota.ledger import parts
from quota.ledger.contract import ChargeRequest, Exhaustion, Ledger
from quota.ledger.entry import Charge
from quota.ledger.grants import Grant
from quota.ledger.redis_scripts import FORMAT
from quota.ledger.sqlite_ledger import SCHEMA_VERSION
from quota.ledger.unlogged import UnloggedUsage
from quota.terms.limits import DAY_MS
from support.claims import claim_of
from support.losses import SqliteStorage
from support.setup import Setup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.losses import LedgerStorage
    from support.servers import RedisServer

__all__ = ["scripts"]  # a fixture


def decide(setup: Setup) -> Any:
    charge = Charge(1, "units", "videos.list", "", "", "k1")
    return setup.ledger.decide(ChargeRequest(setup.project, charge, (), ("units",), setup.now_ms), commit=True)


WORK: dict[str, Callable[[Setup], Any]] = {
    "decide": decide,
    "settle": lambda setup: setup.ledger.settle(setup.project, f"{NOW}-0", 3, []),
    "repay": lambda setup: setup.ledger.repay(setup.project, "m", [(1, Charge(1, "units", "m", "", "", "m1"))]),
    "add_unlogged": lambda setup: setup.ledger.add_unlogged(
        setup.project, "e2", [UnloggedUsage(ALL, "e1", ((5, NOW + DAY_MS),), (1, 0))]
    ),
    "read": lambda setup: setup.ledger.read(setup.project, (0, 0), NEVER, 10),
    "exhaust": lambda setup: setup.ledger.exhaust(setup.project, Exhaustion("units", 1, NEVER, "said so", "test")),
    "reopen": lambda setup: setup.ledger.reopen(setup.project, "units"),
    "ahead": lambda setup: setup.ledger.ahead(setup.project),
    "repair": lambda setup: setup.ledger.repair(setup.project, "r1", setup.now_ms),
    "repairs": lambda setup: setup.ledger.repairs(setup.project),
    "whole_after_ms": lambda setup: setup.ledger.whole_after_ms(setup.project),
    "grant": lambda setup: setup.ledger.grant(setup.project, [Grant("units", 9, NOW, NOW + DAY_MS)]),
    "notes": lambda setup: setup.ledger.notes(setup.project),
    "claim": lambda setup: setup.ledger.claim(setup.project, claim_of("web1")),
    "places": lambda setup: setup.ledger.places(setup.project, "work", ["US"]),
    "keep_places": lambda setup: setup.ledger.keep_places(setup.project, claim_of("web1"), "work", {"US": "here"}),
    "end_claim": lambda setup: setup.ledger.end_claim(setup.project, claim_of("web1"), "done"),
    "roll_up": lambda setup: setup.ledger.roll_up(setup.project, setup.now_ms),
    "history": lambda setup: setup.ledger.history(setup.project, 0, setup.now_ms),
    "add_refusals": lambda setup: setup.ledger.add_refusals(setup.project, [], ["{}"]),
    "refusals": lambda setup: setup.ledger.refusals(setup.project),
}
"""Everything that reads or writes a project's state."""

OTHER_FORMATS = {
    "older": "was written by an older quota-ledger (its {what} {found}, ours {ours}); ",
    "newer": "was written by a newer quota-ledger (its {what} {found}, ours {ours}): upgrade this machine",
}


def test_everything_that_asks_for_a_project_is_tried_here() -> None:
    of_parts = [part for part in vars(parts).values() if isinstance(part, type) and part.__module__ == parts.__name__]
    methods = {name: method for part in (Ledger, *of_parts) for name, method in vars(part).items()}
    asked = {name for name, method in methods.items() if "project" in getattr(method, "__annotations__", ())}
    asked |= {"decide"}  # its request names the project
    assert asked == WORK.keys() | {"examine"}, "that one is about the server"


@pytest.mark.parametrize("age", OTHER_FORMATS)
@pytest.mark.parametrize("work", WORK)
def test_another_format_is_one_line_and_nothing_is_touched(
    setup: Setup, ledger_place: LedgerStorage, work: str, age: str, tmp_path: Path
) -> None:
    decide(setup)
    setup.ledger.exhaust(setup.project, Exhaustion("search", 1, NEVER, "said so", "test"))
    setup.ledger.close()
    if isinstance(ledger_place, SqliteStorage):
        found = SCHEMA_VERSION + (1 if age == "newer" else -1)
        with closing(sqlite3.connect(tmp_path / "ledger.db")) as db:
            db.execute(f"PRAGMA user_version = {found}")
            before: Any = list(db.iterdump())
        expected = OTHER_FORMATS[age].format(what="version", found=found, ours=SCHEMA_VERSION)
    else:
        found = int(FORMAT) + 1 if age == "newer" else 0
        with ledger_place.open() as client:
            state = f"quota:{{{setup.project}}}:state"
            if age == "older":
                client.hdel(state, "format")  # as the ledgers before the mark
            else:
                client.hset(state, "format", found)
            before = {key: client.dump(key) for key in ledger_place.keys("*")}
        expected = OTHER_FORMATS[age].format(what="format", found=found, ours=FORMAT)
    with pytest.raises(UnusableLedger) as raised:
        WORK[work](setup)
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)
    decision = setup.budget().peek("videos.list")
    assert decision.reason == "ledger-unavailable"
    assert decision.sentence().endswith(decision.detail), "the ledger says what to do, and it is not to run again"
    if age == "older":
        assert "move it away" in str(raised.value) or "delete its keys quota:{...}" in str(raised.value)
    if isinstance(ledger_place, SqliteStorage):
        with closing(sqlite3.connect(tmp_path / "ledger.db")) as db:
            assert list(db.iterdump()) == before
    else:
        with ledger_place.open() as client:
            assert {key: client.dump(key) for key in ledger_place.keys("*")} == before


@pytest.fixture
def on_redis(server: RedisServer) -> Iterator[Setup]:
    setup = Setup.open(server.url)
    yield setup
    setup.ledger.close()


@pytest.mark.parametrize("work", ["decide", "repay", "add_unlogged", "exhaust"])
def test_whatever_begins_a_state_in_redis_marks_it(on_redis: Setup, server: RedisServer, work: str) -> None:
    setup = on_redis
    WORK[work](setup)
    with redis.Redis(port=server.port, decode_responses=True) as client:
        assert client.hget(f"quota:{{{setup.project}}}:state", "format") == FORMAT
    assert decide(setup).outcome in ("admitted", "exhausted")


def test_a_state_that_was_evicted_is_no_older_format(on_redis: Setup, server: RedisServer) -> None:
    setup = on_redis
    decide(setup)
    with redis.Redis(port=server.port) as client:
        client.delete(f"quota:{{{setup.project}}}:state")
    assert len(setup.ledger.read(setup.project, (0, 0), NEVER, 10)) == 1
    assert decide(setup).outcome == "admitted"


def test_the_format_costs_a_decision_no_command_of_its_own(scripts: Scripts) -> None:
    scripts.charge((ALL, 10, 1, DAY_MS))
    scripts.client.config_resetstat()
    scripts.charge((ALL, 10, 1, DAY_MS))
    said = scripts.client.info("commandstats")
    called = {name: said.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("hmget", "hget", "exists")}
    assert called == {"hmget": 1, "hget": 0, "exists": 0}


def test_any_language_is_told_what_to_do(scripts: Scripts) -> None:
    scripts.charge()
    scripts.client.hset(STATE, "format", "7")
    with pytest.raises(redis.ResponseError, match=rf"^the ledger has format 7, and this script needs {FORMAT}: use "):
        scripts.run("read", "-", "+", 10)
    assert sorted(scripts.client.keys("*")) == sorted(KEYS[:2])
