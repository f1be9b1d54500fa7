"""What lua/README.md shows is run: from redis-cli and PHP, on one budget with Python."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis

from quota.budget import Budget
from quota.ledger.factory import open_ledger
from quota.terms.limits import DAY_MS, Limit, Selector, Sliding, View
from support.proxy import Proxy
from support.setup import budget_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import RedisServer

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "lua" / "README.md").read_text(encoding="utf-8")
DAY = Limit("day", 9_500, View(Selector(buckets=("units",)), Sliding(DAY_MS)), 10_000, 500)

ONLY_A_SERVER = f"""#!{sys.executable}
import sys, redis
# As `redis-cli [-x] [--no-raw] COMMAND...` with the port of the test's server; prints what redis-cli prints.
words = [word for word in sys.argv[1:] if word not in ("-x", "--no-raw")]
if "-x" in sys.argv:
    words.append(sys.stdin.read())
reply = redis.Redis(port=PORT, decode_responses=True).execute_command(*words)
if isinstance(reply, str):
    print(f'"{{reply}}"' if "--no-raw" in sys.argv else reply)
else:
    for number, line in enumerate(reply, 1):
        print(f"{{number}}) (integer) {{line}}" if isinstance(line, int) else f'{{number}}) "{{line}}"')
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def budget(server: RedisServer) -> Iterator[Budget]:
    """The README's project and limit, in Python."""
    ledger = open_ledger(server.url)
    yield budget_of(ledger, DAY, project="demo")
    ledger.close()


def shell(server: RedisServer, folder: Path, *, with_cli: bool) -> dict[str, str]:
    """An environment in which `redis-cli` talks to the test's server."""
    command = folder / "redis-cli"
    real = shutil.which("redis-cli")
    if with_cli:
        if real is None:
            pytest.skip("no redis-cli on PATH")
        command.write_text(f'#!/bin/sh\nexec {real} -p {server.port} "$@"\n')
    else:
        command.write_text(ONLY_A_SERVER.replace("PORT", str(server.port)))
    command.chmod(0o700)
    ours = Path(sys.executable).parent
    return {**os.environ, "PATH": os.pathsep.join(map(str, (folder, ours, os.environ["PATH"])))}


def console() -> tuple[str, str]:
    """The commands of all console blocks in order, and the output that the README shows for them."""
    lines = "".join(blocks("console")).splitlines()
    commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return "\n".join(commands), "\n".join(line for line in lines if not line.startswith("$ "))


def timeless(text: str) -> str:
    return re.sub(r"\d{13}", "TIME", text.strip())


@pytest.mark.parametrize("with_cli", [True, False], ids=["redis-cli", "only a server"])
def test_the_commands_print_what_the_readme_shows(
    server: RedisServer, budget: Budget, tmp_path: Path, with_cli: bool
) -> None:
    commands, shown = console()
    assert commands.count("redis-cli") >= 4
    done = subprocess.run(
        ["bash", "-euc", commands],
        cwd=tmp_path,
        env=shell(server, tmp_path, with_cli=with_cli),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.stderr, done.returncode) == ("", 0)
    assert timeless(done.stdout) == timeless(shown)
    assert budget.usage()[0].used_units == 201, "Python sees the charges on its own view"
    assert budget.charge("videos.list", units=9_299).admitted
    assert not budget.peek("videos.list").admitted


# -- PHP, Go -----------------------------------------------------------------------------------------------------------

GO_PACKAGES = Path("/usr/share/gocode")
"""Where Debian has the packages that Go programs import."""


@pytest.fixture(scope="module")
def php(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs the README's program; the server's port follows it."""
    path = shutil.which("php")
    if path is None:
        pytest.skip("no php on PATH; on Debian: apt-get install php-cli php-redis")
    modules = subprocess.run([path, "-m"], capture_output=True, text=True, timeout=300, check=True).stdout
    if "redis" not in modules.split():
        pytest.skip("php has no redis extension; on Debian: apt-get install php-redis")
    program, _ = blocks("php")
    assert program.count("= 6379") == 1
    source = tmp_path_factory.mktemp("php") / "charge.php"
    source.write_text(program.replace("new Ledger()", "new Ledger(port: (int) $argv[1])"), encoding="utf-8")
    return [path, str(source)]


@pytest.fixture(scope="module")
def go(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """As `php`, compiled."""
    path = shutil.which("go")
    if path is None or not (GO_PACKAGES / "src/github.com/gomodule/redigo").is_dir():
        pytest.skip("no go, or no redigo; on Debian: apt-get install golang-go golang-github-gomodule-redigo-dev")
    folder = tmp_path_factory.mktemp("go")
    (program,) = blocks("go")
    assert program.count('"127.0.0.1:6379"') == 1
    (folder / "charge.go").write_text(program.replace('127.0.0.1:6379"', '127.0.0.1:" + os.Args[1]'), encoding="utf-8")
    env = {
        **os.environ,
        "GO111MODULE": "off",
        "GOPATH": str(GO_PACKAGES),
        "GOCACHE": str(folder / "cache"),
        "CGO_ENABLED": "0",
    }
    subprocess.run([path, "build", "charge.go"], cwd=folder, env=env, timeout=600, check=True)
    return [str(folder / "charge")]


@pytest.fixture(params=["php", "go"])
def program(request: pytest.FixtureRequest) -> list[str]:
    command: list[str] = request.getfixturevalue(request.param)
    return command


def run(program: list[str], port: int, folder: Path) -> list[dict[str, object]]:
    """What the README's program prints with the server at this port."""
    done = subprocess.run([*program, str(port)], cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert (done.stderr, done.returncode) == ("", 0), done.stdout
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_other_languages_and_python_share_one_budget(
    server: RedisServer, budget: Budget, program: list[str], home: Path
) -> None:
    for _ in range(94):
        assert budget.charge("search.list").admitted
    (last,) = run(program, server.port, home)
    assert (last["outcome"], last["used_units"]) == ("ADMITTED", 9_500)
    assert not budget.charge("videos.list").admitted
    assert budget.refund(str(last["id"])).job == "nightly"
    assert budget.charge("search.list").admitted
    assert run(program, server.port, home) == [{"outcome": "REFUSED", "id": "-", "used_units": 9_500}]


def test_they_read_on_where_there_is_more(server: RedisServer, budget: Budget, program: list[str], home: Path) -> None:
    others = budget_of(budget.ledger, project="demo")
    for _ in range(2_100):
        others.charge("videos.list")
    (answer,) = run(program, server.port, home)
    assert (answer["outcome"], answer["used_units"]) == ("ADMITTED", 2_200)


@pytest.mark.parametrize("kind", ["drop-reply", "swallow-reply", "drop-request"])
def test_they_charge_once_when_an_answer_is_lost(
    server: RedisServer, budget: Budget, program: list[str], home: Path, kind: str
) -> None:
    assert budget.charge("videos.list").admitted, "and the server knows the script"
    with Proxy(server.port) as proxy:
        proxy.fail(kind)  # type: ignore[arg-type]
        (answer,) = run(program, proxy.port, home)
        assert proxy.requests == 2
    assert (answer["outcome"], answer["used_units"]) == ("ADMITTED", 101)
    assert budget.usage()[0].used_units == 101


def test_what_the_server_refuses_is_an_error_that_names_it_and_is_not_asked_again(
    server: RedisServer, budget: Budget, program: list[str], home: Path
) -> None:
    assert budget.charge("videos.list").admitted, "and the server knows the script"
    with redis.Redis(port=server.port) as client:
        client.set("quota:{demo}:log", "not a log", ex=600)
    with Proxy(server.port) as proxy:
        command = [*program, str(proxy.port)]
        done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=300, check=False)
        assert proxy.requests == 1
    assert done.returncode != 0
    assert "WRONGTYPE" in done.stdout + done.stderr


def test_every_script_is_in_the_readme() -> None:
    for path in (ROOT / "lua").glob("*.lua"):
        assert f"| `{path.name}` |" in README, path.name
