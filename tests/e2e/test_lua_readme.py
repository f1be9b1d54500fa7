"""The commands of lua/README.md, and its examples in PHP, Go, Node and Python, on one budget."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from e2e.inbound.test_examples import SEND
from quota.budget import Budget
from quota.ledger.factory import open_ledger
from quota.ledger.redis_log import keys_of, script
from quota.ledger.redis_needs import COMMANDS, PASSWORD, acl_line, pattern_of
from quota.rules.facts import Exhaustion
from quota.terms.limits import DAY_MS, Limit, Selector, Sliding, View
from support.proxy import Proxy
from support.servers import RedisServer
from support.setup import budget_of, state_at

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "lua" / "README.md").read_text(encoding="utf-8")
DAY = Limit("day", 9_500, View(Selector(buckets=("units",)), Sliding(DAY_MS)), 10_000, 500)
KEYS = keys_of("demo")


def example(file: str) -> str:
    return (ROOT / "docs" / "examples" / file).read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def budget(server: RedisServer, tmp_path: Path) -> Iterator[Budget]:
    ledger = open_ledger(server.url)
    yield budget_of(ledger, DAY, project="demo", folder=tmp_path)
    ledger.close()


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.port, decode_responses=True) as client:
        yield client


def charge(
    client: redis.Redis, key: str, *, epoch: str = "", now_ms: int = 0, cap_units: int = 9_500, window_ms: int = DAY_MS
) -> list[Any]:
    """The reply to a charge of 100 units, by another program."""
    call = (100, "units", "search.list", "nightly", "DE", "units|*|*", cap_units, 100, window_ms)
    reply: Any = client.eval(script("charge")[0], 3, *KEYS[:3], now_ms, 0, epoch, key, *call)
    return [*reply]


def shell(server: RedisServer, folder: Path) -> dict[str, str]:
    """An environment in which `redis-cli` talks to the test's server, as the user of `quota doctor --acl`."""
    command = folder / "redis-cli"
    real = shutil.which("redis-cli")
    if real is None:
        pytest.skip("no redis-cli on PATH")
    command.write_text(f'#!/bin/sh\nREDISCLI_AUTH={PASSWORD} exec {real} -p {server.port} --user quota "$@"\n')
    command.chmod(0o700)
    subprocess.run([real, "-p", str(server.port), *acl_line("quota", [pattern_of("*")], COMMANDS).split()], check=True)
    ours = Path(sys.executable).parent
    return {**os.environ, "PATH": os.pathsep.join(map(str, (folder, ours, os.environ["PATH"])))}


def console() -> tuple[str, str]:
    """The commands of all console blocks in order, and the output that the README shows for them."""
    lines = "".join(blocks("console")).splitlines()
    commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return "\n".join(commands), "\n".join(line for line in lines if not line.startswith("$ "))


def timeless(text: str) -> str:
    return re.sub(r"\d{13}", "TIME", text.strip())


def test_the_commands_print_what_the_readme_shows(server: RedisServer, budget: Budget, tmp_path: Path) -> None:
    commands, shown = console()
    assert commands.count("redis-cli") >= 2
    done = subprocess.run(
        ["bash", "-euc", commands],
        cwd=tmp_path,
        env=shell(server, tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.stderr, done.returncode) == ("", 0)
    assert timeless(done.stdout) == timeless(shown)
    assert budget.usage()[0].used_units == 200, "Python sees the charges on its own view"
    assert budget.charge("videos.list", units=9_300).admitted
    assert not budget.peek("videos.list").admitted


GO_PACKAGES = Path("/usr/share/gocode")
"""Where Debian has the packages that Go programs import."""

GO_WALLS = 'const address, patience = "127.0.0.1:6379", 350 * time.Millisecond'

GO_WALLS_OF_THE_TEST = """
var address = "127.0.0.1:" + os.Args[1]
var patience, _ = time.ParseDuration(os.Args[2] + "s")
"""

NODE_MAIN = """
(async () => {
  const { send, close } = connect(process.argv[2]);
  let losing = process.argv[4] === 'losing';
  const sendAndLose = async (...words) => {
    const reply = await send(...words);
    if (losing) {
      losing = false;
      throw new Error('the answer is lost');
    }
    return reply;
  };
  console.log(JSON.stringify(await charge(sendAndLose, 'demo', 'search.list', 100, 'nightly', 'DE')));
  close();
})();
"""
"""Behind the example's function: one charge. With `losing`, its first answer arrives here and no further."""


@pytest.fixture(scope="module")
def php(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs the example; the server's port and the program's patience in s follow it."""
    path = shutil.which("php")
    if path is None:
        pytest.skip("no php on PATH; on Debian: apt-get install php-cli php-redis")
    modules = subprocess.run([path, "-m"], capture_output=True, text=True, timeout=300, check=True).stdout
    if "redis" not in modules.split():
        pytest.skip("php has no redis extension; on Debian: apt-get install php-redis")
    program = example("charge.php")
    assert (program.count("'DE')"), program.count("0.35")) == (1, 2)
    program = program.replace("'DE')", "'DE', (int) $argv[1])").replace("0.35", "(float) $GLOBALS['argv'][2]")
    source = tmp_path_factory.mktemp("php") / "charge.php"
    source.write_text(program, encoding="utf-8")
    return [path, str(source)]


@pytest.fixture(scope="module")
def go(made_once: Callable[[str, Callable[[Path], None]], Path]) -> list[str]:
    """As `php`, compiled."""
    path = shutil.which("go")
    if path is None or not (GO_PACKAGES / "src/github.com/gomodule/redigo").is_dir():
        pytest.skip("no go, or no redigo; on Debian: apt-get install golang-go golang-github-gomodule-redigo-dev")

    def build(folder: Path) -> None:
        program = example("charge.go")
        assert program.count(GO_WALLS) == 1
        (folder / "charge.go").write_text(program.replace(GO_WALLS, GO_WALLS_OF_THE_TEST), encoding="utf-8")
        env = {"GO111MODULE": "off", "GOPATH": str(GO_PACKAGES), "GOCACHE": str(folder / "cache"), "CGO_ENABLED": "0"}
        subprocess.run([path, "build", "charge.go"], cwd=folder, env=os.environ | env, timeout=600, check=True)

    return [str(made_once("go", build) / "charge")]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """As `php`."""
    path = shutil.which("node")
    if path is None:
        pytest.skip("no node on PATH; on Debian: apt-get install nodejs")
    program = example("charge.js")
    source = tmp_path_factory.mktemp("node") / "charge.js"
    source.write_text(program + SEND + NODE_MAIN, encoding="utf-8")
    return [path, str(source)]


@pytest.fixture(params=["php", "go", "node"])
def program(request: pytest.FixtureRequest) -> list[str]:
    command: list[str] = request.getfixturevalue(request.param)
    return command


@pytest.fixture(params=["php", "go"])
def connecting(request: pytest.FixtureRequest) -> list[str]:
    """A program that makes its own connections."""
    command: list[str] = request.getfixturevalue(request.param)
    return command


def run_at(
    program: list[str], port: int, folder: Path, *words: str, patience_s: float = 20
) -> subprocess.CompletedProcess[str]:
    """Run an example with the server at this port."""
    command = [*program, str(port), str(patience_s), *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def run(program: list[str], port: int, folder: Path, *words: str) -> dict[str, Any]:
    done = run_at(program, port, folder, *words)
    assert (done.stderr, done.returncode) == ("", 0), done.stdout
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_other_languages_and_python_share_one_budget(
    server: RedisServer, budget: Budget, program: list[str], home: Path
) -> None:
    for _ in range(94):
        assert budget.charge("search.list").admitted
    last = run(program, server.port, home)
    assert (last["outcome"], last["used_units"]) == ("ADMITTED", 9_500)
    assert not budget.charge("videos.list").admitted
    assert budget.refund(last["id"]).job == "nightly"
    assert budget.charge("search.list").admitted
    assert run(program, server.port, home) == {"outcome": "REFUSED", "id": "", "used_units": 9_500}


def test_a_bucket_that_upstream_has_closed_is_closed_to_other_languages_too(
    server: RedisServer, budget: Budget, program: list[str], home: Path
) -> None:
    state, now_ms = state_at(budget.ledger, "demo"), budget.ledger.now_ms()
    state.exhaust(Exhaustion("search", now_ms, now_ms + DAY_MS, "quotaExceeded", "test"))
    assert run(program, server.port, home)["outcome"] == "ADMITTED", "another bucket is closed"
    state.exhaust(Exhaustion("units", now_ms, now_ms + DAY_MS, "quotaExceeded", "test"))
    assert run(program, server.port, home) == {"outcome": "EXHAUSTED", "id": "", "used_units": 100}
    assert state.reopen("units", "upstream was wrong")
    assert run(program, server.port, home)["outcome"] == "ADMITTED"


@pytest.mark.parametrize("kind", ["drop-reply", "drop-request"])
def test_the_lua_examples_charge_once_if_an_answer_is_lost(
    server: RedisServer, client: redis.Redis, budget: Budget, connecting: list[str], home: Path, kind: str
) -> None:
    charge(client, "tick0900-1")
    with Proxy(server.port) as proxy:
        proxy.fail(kind)  # type: ignore[arg-type]
        answer = run(connecting, proxy.port, home)
        assert proxy.requests == 2
    assert (answer["outcome"], answer["used_units"]) == ("ADMITTED", 200)
    assert budget.usage()[0].used_units == 200


def test_node_charges_once_when_an_answer_is_lost(
    server: RedisServer, budget: Budget, node: list[str], home: Path
) -> None:
    answer = run(node, server.port, home, "losing")
    assert (answer["outcome"], answer["used_units"]) == ("ADMITTED", 100)
    assert budget.usage()[0].used_units == 100


def test_the_lua_examples_fail_if_two_answers_do_not_come_in_time(
    server: RedisServer, client: redis.Redis, connecting: list[str], home: Path
) -> None:
    charge(client, "tick0900-1")
    with Proxy(server.port) as proxy:
        proxy.fail("swallow-request", times=2)
        done = run_at(connecting, proxy.port, home, patience_s=0.2)
    assert done.returncode != 0
    assert "ADMITTED" not in done.stdout


def test_an_error_of_the_server_is_named_and_not_retried(
    server: RedisServer, client: redis.Redis, connecting: list[str], home: Path
) -> None:
    charge(client, "tick0900-1")
    client.set(KEYS.log, "not a log", ex=600)
    with Proxy(server.port) as proxy:
        done = run_at(connecting, proxy.port, home)
        assert proxy.requests == 1
    assert done.returncode != 0
    assert "WRONGTYPE" in done.stdout + done.stderr


def test_a_charge_counts_as_long_as_another_programs_window_whatever_limits_python_has(
    client: redis.Redis, budget: Budget
) -> None:
    three_days_ago_ms = budget.ledger.now_ms() - 3 * DAY_MS
    assert charge(client, "tick0900-1", now_ms=three_days_ago_ms, cap_units=350, window_ms=7 * DAY_MS)[4] == 100
    for _ in range(110):
        assert budget.charge("videos.list").admitted, "after some of them Python trims the log"
    assert charge(client, "tick0900-2", cap_units=350, window_ms=7 * DAY_MS)[::4] == ["ADMITTED", 310]


def test_every_script_is_in_the_readme() -> None:
    for path in (ROOT / "lua").glob("*.lua"):
        assert f"`{path.name}`" in README, path.name
