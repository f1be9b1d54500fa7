"""Users of the server who may not run every command: each command of each script is taken away once.

Redis takes nothing back when a script fails in the middle. So either a script does all that it is for, or it changes
nothing. And with the first charge of a minute a user is refused who lacks any right that any script needs.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis

from contract.ledger.test_charge_script import (
    ALL,
    CALLS,
    CORRECTIONS,
    LOG,
    MIN_RETENTION_MS,
    NOW,
    SEARCHES,
    STATE,
    Scripts,
    keys_of,
)
from contract.ledger.test_redis_ledger import round_trip
from quota.async_budget import AsyncBudget, Awaiter
from quota.budget import Budget
from quota.inbound import redis_storage
from quota.ledger.factory import open_ledger
from quota.ledger.redis_errors import is_denied
from quota.ledger.redis_rights import COMMANDS, OF_A_CLUSTER, OF_A_SENTINEL, PASSWORD, acl_line, pattern_of
from quota.ledger.redis_scripts import script
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS
from support.books import BOOK
from support.random_operations import RandomOperations
from support.replies import words_of
from support.servers import RedisServer, executables, immortal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DAY = (ALL, 1_000, 1, DAY_MS)
SCRIPTS = ("charge", "settle", "read", "exhaust", "swap", "repay", "repair", "roll_up")
SCRIPTS += ("add_refusals",)
TRIED = sorted(set(COMMANDS) - {"eval", "evalsha", "info"})
"""What the scripts may run, and must be allowed to."""

MOVING = ("fence", "fill", "clear")
"""Those of `quota ledger move`: see `contract.ledger.test_move`."""


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
        """Whoever is refused for want of a right has changed nothing."""
        keys = keys_of(name)
        before = contents(self.client) if self.asked is not self.client else {}
        try:
            reply = self.asked.eval(script(name)[0], len(keys), *keys, *map(str, args))
            return words_of(reply) if name == "charge" else reply
        except redis.ResponseError as error:
            said, after = str(error), contents(self.client)
            if name == "charge" and "this user may not run" not in said:  # who says this has tried all of them
                before, after = without_progress(before), without_progress(after)
            assert (is_denied(said), after) == (True, before), said
            raise

    def log(self) -> dict[str, int]:
        """What each charge in the log counts now."""
        counted = {charge_id: int(entry["u"]) for charge_id, entry in self.client.xrange(LOG)}
        return {
            charge_id: int(self.client.hget(CORRECTIONS, charge_id) or units) for charge_id, units in counted.items()
        }

    def live(self) -> int:
        """The sum of the last day, from the log itself."""
        return sum(units for i, units in self.log().items() if int(i.split("-")[0]) > self.now_ms - DAY_MS)


def contents(client: redis.Redis) -> dict[str, Any]:
    """All that the server holds, but how long it lives."""
    readers = {"hash": client.hgetall, "stream": client.xrange, "string": client.get}
    return {key: readers[client.type(key)](key) for key in client.keys("*")}


def without_progress(held: dict[str, Any]) -> dict[str, Any]:
    """A charge that is not due to keep house may leave its views further in the log, and the key of its retry."""
    state = {field: held.get(STATE, {})[field] for field in held.get(STATE, {}) if not field.startswith(PROGRESS)}
    return {**held, STATE: state}


PROGRESS = ("view:", "retried:", "maintained_ms")


def refusal_of(work: Callable[[], Any]) -> Any:
    """What it answers, or, as a string, that it was not allowed."""
    try:
        return work()
    except redis.ResponseError as error:
        return str(error)


FIRST = next(iter(executables()))
"""The server on which everything is tried. What a script had done before it was refused is the same on each: on the
others one case of each script is tried, for the words of the refusal."""


@pytest.fixture(scope="module", params=executables())
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    own = RedisServer(executable=executables()[request.param])
    yield own
    own.close()


@pytest.fixture
def limited(server: RedisServer) -> Iterator[Limited]:
    with redis.Redis(port=server.port, decode_responses=True) as client:
        client.flushall()
        yield Limited(client, server.port)
        assert immortal(client) == [], "keys without a lifetime"


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
    scripts.lose(ALL, (5, NOW + 9))
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


def another_minute(scripts: Limited) -> None:
    scripts.charge(DAY)
    scripts.charge(DAY)
    scripts.now_ms += MINUTE_MS


DUE = (nothing, another_minute, a_lost_state)
"""Where the next charge is the first one of a minute."""

SCENES: tuple[Callable[[Limited], None], ...] = (
    nothing,
    a_busy_second,
    others,
    another_minute,
    housekeeping,
    a_lost_log,
    a_lost_state,
)


@pytest.mark.parametrize(
    ("server", "scene"),
    [(name, scene) for name in executables() for scene in SCENES if name == FIRST or scene is housekeeping],
    indirect=["server"],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
    scope="module",
)
@pytest.mark.parametrize("command", TRIED)
def test_a_charge_is_made_whole_or_not_at_all(limited: Limited, command: str, scene: Callable[[Limited], None]) -> None:
    """L22."""
    scene(limited)
    lost = limited.used() - limited.live() if scene is a_lost_log else 0
    before = limited.log()
    for retry_age_ms in (-1, 3):
        with limited.without(command):
            reply = refusal_of(lambda age_ms=retry_age_ms: limited.to_verdict(DAY, retry_age_ms=age_ms)[0])
        if isinstance(reply, str):
            assert limited.log() == before, "an error, and nothing was charged"
        else:
            assert scene not in DUE or retry_age_ms >= 0, "it is found before anything is charged"
            assert reply[0] == "ADMITTED"
            assert set(limited.log()) - set(before) == {reply[1]}, "admitted, and charged once"
            assert int(reply[7]) == limited.live() + lost
        before = limited.log()
        assert immortal(limited.client) == []
        assert limited.used() == limited.live() + lost
        assert limited.charge(DAY)[0] == "ADMITTED", "and with the right to it all goes on"
        assert limited.used() == limited.live() + lost
        before = limited.log()


# -- the others --------------------------------------------------------------------------------------------------------


def settle(scripts: Limited) -> None:
    scripts.run("settle", scripts.client.xrange(LOG)[0][0], 5)


def repay(scripts: Limited) -> None:
    scripts.run("repay", scripts.now_ms, 0, "m", MIN_RETENTION_MS, 1, 3, "videos.list", "", "", "m1")


def exhaust(scripts: Limited) -> None:
    scripts.run("exhaust", scripts.now_ms, "units", f"{scripts.now_ms + 9} {scripts.now_ms} x", MIN_RETENTION_MS)


def swap(scripts: Limited) -> None:
    """A field is set, and removed."""
    for becomes in ("=1", "-"):
        words = (scripts.now_ms, MIN_RETENTION_MS)
        _, seen, _ = scripts.run("swap", *words, "", 1, "compared")
        assert scripts.run("swap", *words, seen, 1, "compared", "compared", becomes) == 1


def read(scripts: Limited) -> None:
    scripts.run("read", "-", "+", 10)


def repair(scripts: Limited) -> None:
    """An hour is ahead; of what it has, one charge was corrected."""
    while scripts.run("repair", scripts.now_ms and scripts.now_ms - HOUR_MS, 0, "r1") == "MORE":
        pass


def roll_up(scripts: Limited) -> None:
    scripts.run("roll_up", scripts.now_ms and scripts.now_ms + HOUR_MS, 0)


def add_refusals(scripts: Limited) -> None:
    scripts.run("add_refusals", 1, NOW // HOUR_MS, "day", "nightly", "limit", 3, "{}")


DONE: dict[str, tuple[Callable[[Limited], None], int]] = {
    "settle": (settle, 4),
    "repay": (repay, 3),
    "exhaust": (exhaust, 0),
    "swap": (swap, 0),
    "read": (read, 0),
    "repair": (repair, 0),
    "roll_up": (roll_up, 0),
    "add_refusals": (add_refusals, 0),
}
"""What each does, and how much more is used then."""


@pytest.mark.parametrize(
    ("server", "lost"),
    [(FIRST, lost) for lost in ("nothing", "log", "state")]
    + [(name, "nothing") for name in executables() if name != FIRST],
    indirect=["server"],
    scope="module",
)
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
    assert immortal(limited.client) == []
    assert limited.used() == used + done
    work(limited)
    work(limited)
    assert limited.used() == used + units
    if lost != "log":
        assert limited.used(CALLS) == limited.used("*|*|*|25h|calls", 25 * HOUR_MS), "as counted afresh from the log"


def at_the_servers_time(scripts: Limited, name: str) -> None:
    scripts.now_ms = 0
    DONE.get(name, (lambda scripts: scripts.charge(DAY), 0))[0](scripts)


@pytest.mark.parametrize("name", ["charge", "exhaust", "swap", "repay", "repair", "roll_up"])
def test_without_the_time_nothing_is_written(limited: Limited, name: str) -> None:
    with limited.without("time"), pytest.raises(redis.ResponseError, match=r"can't run|no permission"):
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
    for name in ("charge", "exhaust", "swap", "repay", "repair", "roll_up"):
        at_the_servers_time(limited, name)
    called = {name.removeprefix("cmdstat_") for name in limited.client.info("commandstats")}
    assert {command for name in SCRIPTS for command in commands_of(name)} <= called


# -- a move ------------------------------------------------------------------------------------------------------------

MOVE: tuple[tuple[object, ...], ...] = (
    ("fence", NOW, "", "", "", "", "", ""),
    ("fence", NOW, "open ", "filling", "m1", "redis://a/0", "e1", ""),
    ("clear", "m1", ""),
    (
        "fill",
        "m1",
        MIN_RETENTION_MS,
        "0-0",
        1,
        "5-0",
        3,
        "m",
        "j",
        "g",
        "k",
        2,
        f"view:{ALL}",
        "2 5-0 5-0 4",
        "history:h",
        "v",
    ),
    ("fence", NOW, "filling m1", "open", "m1", "", "", 1),
    ("fence", NOW, "open m1", "fenced", "m2", "redis://b/0", "", ""),
    ("fence", NOW, "fenced m2", "sealed", "m2", "redis://b/0", "", 1),
)


@pytest.mark.parametrize("command", TRIED)
def test_no_step_of_a_move_stops_halfway(limited: Limited, command: str) -> None:
    """L22."""
    limited.charge(DAY, (SEARCHES, 10, 1, DAY_MS))
    limited.run("settle", limited.client.xrange(LOG)[0][0], 7)
    for name, *words in MOVE:
        with limited.without(command):
            reply = refusal_of(lambda name=name, words=words: limited.run(str(name), *words))
        if isinstance(reply, str) and is_denied(reply):
            limited.run(str(name), *words)
    assert limited.client.hmget(STATE, "fence", "move", "epoch") == ["sealed", "m2", "!redis://b/0"]
    assert limited.log() == {"5-0": 2}


# -- what an operator is told ------------------------------------------------------------------------------------------


def said_to(server: RedisServer, rights: list[str], project: str = "p") -> str:
    """What a charge says to a user who has these rights alone."""
    with redis.Redis(port=server.port) as client:
        client.execute_command("ACL", "SETUSER", "some", "reset", "on", ">any", *rights)
    with closing(open_ledger(f"redis://some:any@127.0.0.1:{server.port}/0")) as ledger:
        budget = Budget(credential="main", project=project, book=BOOK, limits=(), ledger=ledger)
        decision = budget.charge("search.list")
    assert (decision.admitted, decision.reason) == (False, "ledger-unavailable")
    said = decision.detail.removeprefix(f"ledger redis://127.0.0.1:{server.port}/0: user some may not ")
    return said.removesuffix("; give it the rights that `quota doctor --acl` prints")


def test_a_budget_names_the_user_and_the_right_that_is_missing(server: RedisServer, limited: Limited) -> None:
    for command in ("eval", "evalsha", *TRIED):
        limited.client.script_flush()
        assert said_to(server, ["~*", "+@all", f"-{command}"]) == f"run {command.upper()}"
        assert limited.client.keys() == []


def test_all_that_is_missing_is_named_at_once(server: RedisServer, limited: Limited) -> None:
    for had in (set(), {"hmget"}, {"hmget", "exists", "time", "xrevrange"}):
        said = said_to(server, ["~*", "+eval", "+evalsha", *(f"+{one}" for one in had)])
        assert set(said.removeprefix("run ").lower().split(", ")) == set(TRIED) - had
    assert limited.client.keys() == []


def test_the_keys_of_another_project_are_no_right_of_its_user(server: RedisServer, limited: Limited) -> None:
    assert said_to(server, ["~quota:{p}:*", "+@all"], "other") == "use the keys of this project"
    assert limited.client.keys() == []


@pytest.mark.parametrize("command", ["time", "hmget", "xadd"])
def test_whoever_awaits_a_charge_is_told_too(server: RedisServer, limited: Limited, command: str) -> None:
    limited.client.acl_setuser("some", enabled=True, nopass=True, keys="*", commands=["+@all", f"-{command}"])

    async def charge() -> str:
        with closing(open_ledger(f"redis://some:any@127.0.0.1:{server.port}/0")) as ledger:
            blocking = Budget(credential="main", project="p", book=BOOK, limits=(), ledger=ledger)
            return (await AsyncBudget(blocking, Awaiter(ledger)).charge("search.list")).detail

    assert f"user some may not run {command.upper()};" in asyncio.run(charge())


# -- the rights that are enough ----------------------------------------------------------------------------------------


ROOT = Path(__file__).parents[3]
LEAST = acl_line("quota", [pattern_of("*")], COMMANDS)


@contextmanager
def as_user(server: RedisServer, line: str, user: str = "quota") -> Iterator[tuple[redis.Redis, str]]:
    """A client and a url of a user who has the rights of this line."""
    with redis.Redis(port=server.port) as client:
        client.execute_command(*line.split())
    with redis.Redis(port=server.port, username=user, password=PASSWORD, decode_responses=True) as client:
        yield client, f"redis://{user}:{PASSWORD}@127.0.0.1:{server.port}/0"


def test_the_readme_names_these_rights() -> None:
    text = (ROOT / "lua" / "README.md").read_text()
    assert re.findall(r"^ACL SETUSER .*", text, re.MULTILINE) == [
        LEAST,
        acl_line("inbound", [redis_storage.KEYS], redis_storage.COMMANDS),
    ]
    for right in (*OF_A_CLUSTER, *OF_A_SENTINEL, "select", "scan"):
        assert f"+{right}".replace("|", "\\|") in text


def test_the_scripts_try_every_command_that_any_of_them_runs() -> None:
    assert {command for name in (*SCRIPTS, *MOVING) for command in commands_of(name)} - {"info"} <= set(TRIED)
    tried = (ROOT / "lua" / "parts" / "rights.lua").read_text()
    assert sorted(command.lower() for command in re.findall(r"\{ '([A-Z]+)'", tried)) == TRIED


def test_the_least_rights_are_enough(server: RedisServer, limited: Limited) -> None:
    with as_user(server, LEAST) as (_, url):
        round_trip(url)
        run = RandomOperations(lambda clock: open_ledger(url, clock=clock), 5)
        run.run(150)
        run.close()
        run.ledger.close()


def commands_with_arguments(client: redis.Redis) -> Iterator[list[str]]:
    """Every command of a server, and of those that are several, each: with as many words as it takes at least."""
    for name, known in client.command().items():
        subcommands = known.get("subcommands", ())
        yield [name, *["1"] * (abs(known["arity"]) - 1)]
        for one in subcommands:
            words = str(one[0]).split("|")
            yield [*words, *["1"] * (abs(int(one[1])) - len(words))]


def test_every_other_command_is_refused(server: RedisServer, limited: Limited) -> None:
    open_to_all = {"auth", "hello", "quit", "reset"}
    with as_user(server, LEAST) as (user, _):
        for words in commands_with_arguments(limited.client):
            if words[0] in open_to_all or words[0] in COMMANDS:
                continue
            with pytest.raises(redis.ResponseError, match=r"[Nn]o permission|nknown subcommand|command not allowed"):
                user.execute_command(*words)
        for words in (["FLUSHALL"], ["KEYS", "*"], ["CONFIG", "GET", "*"], ["SCRIPT", "FLUSH"], ["SCAN", "0"]):
            with pytest.raises(redis.exceptions.NoPermissionError):
                user.execute_command(*words)


def test_only_the_keys_of_a_ledger_are_open_and_of_a_project_only_its_own(
    server: RedisServer, limited: Limited
) -> None:
    limited.charge(DAY)
    limited.client.hset("other", "f", "v")
    limited.client.hset("quota:{q}:state", "f", "v")
    of_p = acl_line("quota", [pattern_of("p")], COMMANDS)
    for line, closed in (
        (LEAST, ["other", "quota:inbound:x"]),
        (of_p, ["other", "quota:{q}:state", "quota:{pp}:state"]),
    ):
        with as_user(server, line) as (user, _):
            assert user.hget(STATE, "format") == "5"
            for key in closed:
                for words in (["HGET", key, "f"], ["DEL", key], ["RENAME", LOG, key], ["EVAL", "return 1", "1", key]):
                    with pytest.raises(redis.exceptions.NoPermissionError):
                        user.execute_command(*words)
                with pytest.raises(redis.ResponseError, match=r"(?:access|No permission)"):
                    user.eval("return redis.call('HGET', ARGV[1], 'f')", 0, key)
    limited.client.delete("other", "quota:{q}:state")
