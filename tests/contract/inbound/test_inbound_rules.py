"""The numbered rules of docs/inbound-algorithms.md, and what stands in several scripts and in Python."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from quota.inbound import contract, names
from quota.inbound.contract import Limit, Policy
from quota.inbound.rules import open_storage
from quota.ledger.redis_log import script
from quota.terms.limits import DAY_MS
from support.servers import RedisServer

ROOT = Path(__file__).parents[3]
SCRIPTS = {path.stem: script(path.stem)[0] for path in sorted((ROOT / "lua").glob("inbound_*.lua"))}
CODE = [*(ROOT / "quota" / "inbound").iterdir(), *(ROOT / "lua").rglob("inbound_*.lua")]
RULES = re.findall(r"^\*\*(I[0-9]+)\. ", (ROOT / "docs" / "inbound-algorithms.md").read_text(), re.MULTILINE)


def cited_in(paths: list[Path]) -> set[str]:
    texts = [path.read_text(encoding="utf-8") for path in paths if path.suffix in (".py", ".lua", ".sql")]
    return {rule for text in texts for rule in re.findall(r"\bI[0-9]+\b", text)}


def test_every_rule_is_cited_by_the_code_and_by_a_test_and_no_other_rule_is() -> None:
    assert [f"I{n}" for n in range(1, 9)] == RULES
    tests = [path for path in (ROOT / "tests").rglob("inbound/*.py") if path != Path(__file__)]
    assert cited_in(CODE) == set(RULES)
    assert cited_in(tests) == set(RULES)


def test_a_bound_is_the_same_in_lua_and_in_python() -> None:
    constants: dict[str, set[str]] = {}
    for text in SCRIPTS.values():
        for line in re.findall(r"^local ([A-Z_, ]+ = [0-9A-Z_', >]+)", text, re.MULTILINE):
            left, _, right = line.partition(" = ")
            for name, value in zip(left.split(", "), right.split(", "), strict=True):
                constants.setdefault(name, set()).add(value.strip())
    assert constants == {
        "FIRST": {"4", "2"},  # places in ARGV
        "FIELDS": {"6"},
        "MAX_LIMITS": {str(contract.MAX_LIMITS)},
        "MAX_SCALE": {str(contract.MAX_SCALE)},
        "MAX_LOG": {str(contract.MAX_LOG)},
        "MAX_WINDOW_MS": {str(contract.MAX_WINDOW_MS)},
        "MAX_TOTALS": {str(contract.MAX_TOTALS)},
        "TOTALS_KEPT_MS": {str(35 * DAY_MS)},
        "COUNT": {"500"},
        "CHUNK": {"16"},
        "ENTRY": {"'>I4I6I2'"},
    }
    program = (ROOT / "docs" / "examples" / "login_limit.php").read_text(encoding="utf-8")
    assert f"& {names.SHARDS - 1};" in program
    assert f"'{{salts}}:fixed', {names.SALTS_KEPT_MS // DAY_MS} * 86400000)" in program


@pytest.fixture
def run(redis_server: RedisServer) -> Iterator[Callable[..., Any]]:
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()

        def run(name: str, keys: int, *words: object) -> Any:
            return client.eval(SCRIPTS[f"inbound_{name}"], keys, *[f"k{n}" for n in range(keys)], *words)

        yield run
        assert client.keys("*") == [], "nothing was written"


NOW_MS = 1_800_000_000_000
MINUTE = 60_000
WINDOW = NOW_MS // MINUTE


@pytest.mark.parametrize("name", ["counter", "gcra", "log"])
@pytest.mark.parametrize(
    "words",
    [
        (),
        (NOW_MS, 1, 0, 5, MINUTE, 1, WINDOW, "n"),
        *((odd, 1, 0, 5, MINUTE, 1, WINDOW, "n", "n") for odd in ("soon", NOW_MS + 0.5)),
        (NOW_MS, 1.5, 0, 5, MINUTE, 5, WINDOW, "n", "n"),
        (NOW_MS, 6, 0, 5, MINUTE, 0, WINDOW, "n", "n"),
        (NOW_MS, 2, 0, 5, MINUTE, 1, WINDOW, "n", "n"),
        (NOW_MS, 1, 0, 0, MINUTE, 0, WINDOW, "n", "n"),
        (NOW_MS, 1, 0, 5, 0, 1, WINDOW, "n", "n"),
        (NOW_MS, 1, 0, 5, MINUTE, 6, WINDOW, "n", "n"),
        *((NOW_MS, 1, 0, 5, MINUTE, 1, odd, "n", "n") for odd in ("nan?", WINDOW + 1e-6)),
        (NOW_MS, 1, 0, contract.MAX_SCALE // MINUTE + 1, MINUTE, 1, WINDOW, "n", "n"),
    ],
)
def test_invalid_arguments_are_an_error(run: Callable[..., Any], name: str, words: tuple[object]) -> None:
    with pytest.raises(redis.ResponseError, match="inbound: "):
        run(name, 2, *words)


def test_one_limit_too_many_is_an_error(run: Callable[..., Any]) -> None:
    limits = [word for _ in range(9) for word in (5, MINUTE, 1, WINDOW, "n", "n")]
    for keys in (0, 1, 18):
        with pytest.raises(redis.ResponseError, match="1 to 8 limits"):
            run("counter", keys, NOW_MS, 1, 0, *limits)


def test_a_log_of_a_thousand_and_one_and_a_gcra_without_a_burst_are_errors(run: Callable[..., Any]) -> None:
    with pytest.raises(redis.ResponseError, match=r"inbound_log.lua: number is at most 1000"):
        run("log", 2, NOW_MS, 1, 0, 1_001, MINUTE, 0, WINDOW, "n", "n")
    longer_ms = contract.MAX_WINDOW_MS + 1
    with pytest.raises(redis.ResponseError, match=r"inbound_log.lua: .* window_ms 2678400000"):
        run("log", 2, NOW_MS, 1, 0, 5, longer_ms, 0, NOW_MS // longer_ms, "n", "n")
    with pytest.raises(redis.ResponseError, match=r"inbound_gcra.lua: burst"):
        run("gcra", 2, NOW_MS, 1, 0, 5, MINUTE, 0, WINDOW, "n", "n")


@pytest.mark.parametrize("name", ["counter", "gcra", "log"])
def test_a_caller_in_another_window_gets_the_time_and_counts_nothing(run: Callable[..., Any], name: str) -> None:
    """I7."""
    for window in (WINDOW - 1, WINDOW + 1, 0, 10**9):
        assert run(name, 2, NOW_MS, 1, 1, 5, MINUTE, 1, window, "n", "n") == [-1, NOW_MS]


def test_invalid_totals_are_an_error(run: Callable[..., Any]) -> None:
    """I8."""
    for keys, words in ((0, ("0",)), (1, ()), (1, ("1", "a")), (2, ("0", "1", "1")), (1, ("1001", *["1"] * 2_002))):
        with pytest.raises(redis.ResponseError, match=r"inbound_totals.lua: "):
            run("totals", keys, *words)
    with pytest.raises(redis.ResponseError, match=r"inbound_top.lua: "):
        run("top", 1, "x", "0")


def test_the_rights_that_the_readme_names_are_enough(redis_server: RedisServer) -> None:
    readme = (ROOT / "lua" / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^ACL SETUSER inbound .*", readme, re.MULTILINE)
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
        client.execute_command(*line.split())
        storage = open_storage(f"redis://inbound:PASSWORD@127.0.0.1:{redis_server.port}/0")
        for algorithm in ("counter", "gcra", "log"):
            for count_rejected in (False, True):
                limit = Limit(2, MINUTE, 2 * (algorithm == "gcra"))
                policy = Policy(f"rule{count_rejected}", (limit,), algorithm, count_rejected)  # type: ignore[arg-type]
                assert [storage.decide(policy, "ann").admitted for _ in range(9)] == [True] * 2 + [False] * 7
                assert len(storage.top(policy)) == 1
                storage.add_totals({"n": 1})
                assert storage.alive(policy) >= 0
        assert storage.totals() == {"n": 6}
        storage.rotate()
        storage.close()
        client.acl_deluser("inbound")
        client.flushall()
