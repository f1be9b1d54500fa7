"""A user of the server who has the rights that `quota doctor --acl` prints, and no others; or not even all of them.

That no script stops halfway where a right is missing is shown in `contract.log.test_redis_log`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from quota.deciding.moves import carry_out, plan_move
from quota.deciding.repairs import ahead, repair
from quota.inbound import redis_storage
from quota.ledger.factory import open_ledger
from quota.ledger.redis_log import keys_of, script, script_names
from quota.ledger.redis_needs import COMMANDS, PASSWORD, acl_line, pattern_of
from quota.ledger.sqlite_log import SqliteLog
from quota.rules.entry import END, START, Entry
from quota.rules.facts import Grant
from quota.rules.refusals import RefusalCount
from quota.terms.limits import DAY_MS, HOUR_MS
from support.servers import RedisServer, executables, immortal
from support.setup import NOW_MS, budget_of, charges_at, claim_of, limit, state_at

ROOT = Path(__file__).parents[3]
LEAST = acl_line("quota", [pattern_of("*")], COMMANDS)
P = "p"
KEYS = keys_of(P)


@pytest.fixture(scope="module", params=executables())
def started(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    with RedisServer(executable=executables()[request.param]) as server:
        yield server


@pytest.fixture
def admin(started: RedisServer) -> Iterator[redis.Redis]:
    """The server's administrator. Afterwards no key may be left without a lifetime."""
    with redis.Redis(port=started.port, decode_responses=True) as client:
        client.flushall()
        client.script_flush()
        yield client
        assert immortal(client) == []


def url_of(admin: redis.Redis, rights: str, user: str = "quota") -> str:
    """A url of the user whom this line of an administrator makes."""
    admin.execute_command(*rights.split())
    port = admin.get_connection_kwargs()["port"]
    return f"redis://{user}:{PASSWORD}@127.0.0.1:{port}/0?socket_timeout=20&socket_connect_timeout=20"


@contextmanager
def client_of(admin: redis.Redis, rights: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(url_of(admin, rights), decode_responses=True) as client:
        yield client


def without(command: str) -> str:
    return acl_line("quota", [pattern_of("*")], [right for right in COMMANDS if right != command])


class Work:
    """Each thing that programs do with a ledger, in an order in which each has something to do."""

    def __init__(self, url: str, folder: Path, admin: redis.Redis) -> None:
        self.now_ms = NOW_MS
        self.admin = admin
        self.ledger = open_ledger(url, clock=lambda: self.now_ms)
        self.elsewhere = SqliteLog(clock=lambda: self.now_ms)
        self.budget = budget_of(self.ledger, limit(5_000), clock=lambda: self.now_ms, folder=folder)
        self.state = state_at(self.ledger)
        self.charge_id = ""

    def steps(self) -> list[Callable[[], object]]:
        return [
            *(self.charge, self.correct, self.give_back, self.ask_again, self.read),
            *(self.close_a_bucket, self.claim, self.note_refusals, self.examine, self.keep_views),
            *(self.trim, self.add_to_the_past, self.put_back, self.mend_the_clock, self.move),
        ]

    def charge(self) -> None:
        decisions = [self.budget.charge("search.list"), *self.budget.charge_many(["videos.list", "videos.list"])]
        assert all(decision.admitted for decision in decisions), decisions[0].detail
        self.charge_id = str(decisions[0].id)

    def correct(self) -> None:
        assert self.budget.settle(self.charge_id, 7).units == 100

    def give_back(self) -> None:
        assert self.budget.refund(self.charge_id).units == 7

    def ask_again(self) -> None:
        fresh = budget_of(self.ledger, limit(5_000), limit(9_000, HOUR_MS, name="hour"), clock=lambda: self.now_ms)
        assert [state.used_units for state in fresh.usage()] == [2, 2]
        assert not budget_of(self.ledger, limit(3), clock=lambda: self.now_ms).peek("videos.list", units=2).admitted

    def read(self) -> None:
        assert len(charges_at(self.ledger)) == 3
        assert self.ledger.now_ms() == self.now_ms
        self.ledger.names(P)

    def close_a_bucket(self) -> None:
        self.budget.exhaust("units", self.now_ms, self.now_ms + DAY_MS, "upstream says so", "here")
        assert not self.budget.charge("videos.list").admitted
        assert self.budget.reopen("units", "it was wrong")
        self.budget.grant([Grant("units", 4_000, self.now_ms, self.now_ms + DAY_MS)])
        self.budget.add_others("units", 5, self.now_ms, self.now_ms + HOUR_MS, "usage")

    def claim(self) -> None:
        self.state.claim(claim_of("a"))
        self.state.keep_places(claim_of("a"), "job", {"US": "page 2"})
        assert self.state.places("job", ["US"]) == {"US": "page 2"}
        self.state.end_claim(claim_of("a"), "done")

    def note_refusals(self) -> None:
        self.state.add_refusals([RefusalCount(self.now_ms, "day", "nightly", "limit", 3)], ["{}"])
        assert self.state.refused_sums()[0].calls == 3

    def examine(self) -> None:
        rights, *_ = self.ledger.examine(P)
        assert rights.level == "ok"

    def keep_views(self) -> None:
        for _ in range(2):
            assert all(decision.admitted for decision in self.budget.charge_many(["videos.list"] * 60))

    def trim(self) -> None:
        self.now_ms += 3 * DAY_MS
        assert self.ledger.trim(P, self.now_ms - DAY_MS) > 100
        assert len(self.ledger.past(P, START, END, 5_000)) == self.ledger.past_length(P)
        assert self.budget.charge("videos.list").admitted

    def add_to_the_past(self) -> None:
        old = Entry((self.now_ms - 9 * DAY_MS, 1), 1, "units", "videos.list", "", "", "old")
        self.ledger.add_past(P, [old])
        assert self.ledger.past(P, START, END, 1)[0].key == "old"

    def put_back(self) -> None:
        for _ in range(2):
            self.admin.flushall()
            assert self.budget.charge("videos.list").admitted
        assert self.budget.usage()[0].used_units == 3

    def mend_the_clock(self) -> None:
        self.now_ms += HOUR_MS
        assert self.budget.charge("videos.list").admitted
        self.now_ms -= HOUR_MS
        assert ahead(self.ledger, P).charges == 1
        repair(self.ledger, P, self.now_ms)
        assert ahead(self.ledger, P).charges == 0

    def move(self) -> None:
        for old, new in ((self.ledger, self.elsewhere), (self.elsewhere, self.ledger)):
            (step,) = plan_move(old, new, [P])
            assert carry_out(old, new, step, lambda *_: None).charges == 4


def test_the_least_rights_are_enough_for_all_that_programs_do_and_each_is_needed(
    started: RedisServer, admin: redis.Redis, tmp_path: Path
) -> None:
    """The server counts the commands."""
    work = Work(url_of(admin, LEAST), tmp_path, admin)
    admin.config_resetstat()
    with closing(work.ledger):
        for step in work.steps():
            step()
    used = {name.removeprefix("cmdstat_") for name in admin.info("commandstats")}
    assert set(COMMANDS) - used == set()


NEEDED_TO_CHARGE = sorted({*COMMANDS} - {"hkeys", "hlen", "info", "rename", "xlen", "pttl"})
"""Those without which the first charge of a project is refused."""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_user_without_a_right_is_refused_in_one_line_and_charges_nothing(
    command: str, started: RedisServer, admin: redis.Redis
) -> None:
    with closing(open_ledger(url_of(admin, without(command)))) as ledger:
        decision = budget_of(ledger, limit(500)).charge("search.list")
    assert decision.admitted == (command not in NEEDED_TO_CHARGE), decision.detail
    if not decision.admitted:
        assert admin.exists(KEYS.log) == 0
        assert decision.reason == "ledger-unavailable"
        assert DENIED.fullmatch(decision.detail), decision.detail


DENIED = re.compile(
    r"ledger redis://127\.0\.0\.1:\d+/0: user quota lacks a right; "
    r"give it those that `quota doctor --acl` prints"
)


def commands_of(name: str) -> set[str]:
    return {command.lower() for command in re.findall(r"\b(?:call|pcall)\('([A-Z]+)'", script(name)[0])}


@pytest.mark.parametrize("command", sorted(commands_of("charge")))
def test_a_program_of_another_language_that_lacks_a_right_charges_nothing_or_all(
    command: str, started: RedisServer, admin: redis.Redis
) -> None:
    def charge(client: redis.Redis, key: str) -> list[Any]:
        call = (1, "units", "videos.list", "", "", "units|*|*", 500, 1, DAY_MS)
        answer: list[Any] = client.eval(script("charge")[0], 3, *KEYS[:3], 0, 0, "", key, *call)
        return answer

    for number in range(2):  # the first charge of all, and one behind it
        before = stored(admin)
        with client_of(admin, without(command)) as poor:
            try:
                outcome = charge(poor, f"poor{number}")[0]
            except redis.ResponseError as error:
                outcome = str(error)
        if outcome == "ADMITTED":
            assert f"poor{number}" in admin.xrevrange(KEYS.log, count=1)[0][1]["e"]
        else:
            assert re.search("can't run|[Nn]o permission", outcome), outcome
            assert stored(admin) == before
        with client_of(admin, LEAST) as rich:
            assert charge(rich, f"rich{number}")[0] == "ADMITTED"


def stored(admin: redis.Redis) -> dict[str, Any]:
    readers = {"hash": admin.hgetall, "stream": admin.xrange}
    return {key: readers[admin.type(key)](key) for key in admin.keys("*")}


def test_the_scripts_run_no_command_that_is_not_among_the_rights() -> None:
    scripts = {name for name in script_names() if not name.startswith("inbound")}
    assert set().union(*map(commands_of, scripts)) - {*COMMANDS} == set()


def test_the_readme_of_the_scripts_names_the_rights_of_an_inbound_storage() -> None:
    text = (ROOT / "lua" / "README.md").read_text()
    line = acl_line("inbound", [redis_storage.KEYS], redis_storage.COMMANDS)
    assert re.findall(r"^ACL SETUSER .*", text, re.MULTILINE) == [line]
    assert "`quota doctor --acl`" in text


def commands_with_arguments(client: redis.Redis) -> Iterator[list[str]]:
    """Every command of a server, and of those that are several, each: with as many words as it takes at least."""
    for name, described in client.command().items():
        yield [name, *["1"] * (abs(described["arity"]) - 1)]
        for subcommand in described.get("subcommands", ()):
            words = str(subcommand[0]).split("|")
            yield [*words, *["1"] * (abs(int(subcommand[1])) - len(words))]


def test_every_other_command_is_refused(started: RedisServer, admin: redis.Redis) -> None:
    open_to_all = {"auth", "hello", "quit", "reset"}
    with client_of(admin, LEAST) as user:
        for words in commands_with_arguments(admin):
            if words[0] in open_to_all or words[0] in COMMANDS:
                continue
            with pytest.raises(redis.ResponseError, match=r"[Nn]o permission|nknown subcommand|command not allowed"):
                user.execute_command(*words)
        for words in (["FLUSHALL"], ["KEYS", "*"], ["CONFIG", "GET", "*"], ["SCRIPT", "FLUSH"], ["SCAN", "0"]):
            with pytest.raises(redis.exceptions.NoPermissionError):
                user.execute_command(*words)


@pytest.mark.parametrize(
    ("pattern", "closed"),
    [("*", ["other", "quota:inbound:x"]), (P, ["other", "quota:{q}:ledger:state", "quota:{pp}:ledger:state"])],
)
def test_a_users_rights_open_only_the_keys_of_the_ledger_or_project(
    pattern: str, closed: list[str], started: RedisServer, admin: redis.Redis
) -> None:
    rights = acl_line("quota", [pattern_of(pattern)], COMMANDS)
    with closing(open_ledger(url_of(admin, rights))) as ledger:
        assert budget_of(ledger, limit(500), project=P).charge("search.list").admitted
        if pattern == P:
            detail = budget_of(ledger, limit(500), project="q").charge("search.list").detail
            assert "user quota lacks a right; " in detail
    for key in closed:
        admin.hset(key, "f", "v")
    with client_of(admin, rights) as user:
        for key in closed:
            for words in (["HGET", key, "f"], ["DEL", key], ["RENAME", KEYS.log, key], ["EVAL", "return 1", "1", key]):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    user.execute_command(*words)
            with pytest.raises(redis.ResponseError, match=r"(?:access|No permission)"):
                user.eval("return redis.call('HGET', ARGV[1], 'f')", 0, key)
    admin.delete(*closed)
