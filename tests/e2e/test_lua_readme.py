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

from quota.budget import Budget
from quota.ledger.factory import open_ledger
from quota.terms.limits import DAY_MS, Limit, Selector, Sliding, View
from support.books import BOOK
from support.proxy import Proxy

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
    yield Budget(credential="main", project="demo", book=BOOK, limits=(DAY,), ledger=ledger)
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


# -- PHP ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def php() -> str:
    path = shutil.which("php")
    if path is None:
        pytest.skip("no php on PATH; on Debian: apt-get install php-cli php-redis")
    modules = subprocess.run([path, "-m"], capture_output=True, text=True, timeout=300, check=True).stdout
    if "redis" not in modules.split():
        pytest.skip("php has no redis extension; on Debian: apt-get install php-redis")
    return path


def run_php(php: str, port: int, folder: Path, more: str = "") -> list[dict[str, object]]:
    """The README's program on another port, and what it prints."""
    program, _ = blocks("php")
    assert program.count("6379") == 1
    path = folder / "charge.php"
    path.write_text(program.replace("6379", str(port)) + more, encoding="utf-8")
    done = subprocess.run([php, path], cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert (done.stderr, done.returncode) == ("", 0), done.stdout
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_php_and_python_share_one_budget(server: RedisServer, budget: Budget, php: str, home: Path) -> None:
    for _ in range(94):
        assert budget.charge("search.list").admitted
    (last,) = run_php(php, server.port, home)
    assert (last["outcome"], last["used_units"]) == ("ADMITTED", 9_500)
    assert not budget.charge("videos.list").admitted
    assert budget.refund(str(last["id"])).job == "nightly"
    assert budget.charge("search.list").admitted
    assert run_php(php, server.port, home) == [{"outcome": "REFUSED", "id": "-", "used_units": 9_500}]


def test_php_reads_on_where_there_is_more(server: RedisServer, budget: Budget, php: str, home: Path) -> None:
    others = Budget(credential="main", project="demo", book=BOOK, limits=(), ledger=budget.ledger)
    for _ in range(2_100):
        others.charge("videos.list")
    (answer,) = run_php(php, server.port, home)
    assert (answer["outcome"], answer["used_units"]) == ("ADMITTED", 2_200)


@pytest.mark.parametrize("kind", ["drop-reply", "swallow-reply", "drop-request"])
def test_php_charges_once_when_an_answer_is_lost(
    server: RedisServer, budget: Budget, php: str, home: Path, kind: str
) -> None:
    assert budget.charge("videos.list").admitted, "and the server knows the script"
    with Proxy(server.port) as proxy:
        proxy.fail(kind)  # type: ignore[arg-type]
        (answer,) = run_php(php, proxy.port, home)
        assert proxy.requests == 2
    assert (answer["outcome"], answer["used_units"]) == ("ADMITTED", 101)
    assert budget.usage()[0].used_units == 101


def test_a_mistake_in_php_is_an_exception_that_names_it(server: RedisServer, php: str, home: Path) -> None:
    mistake = (
        "try { $ledger->charge('demo', 'search.list', -5); }\n"
        "catch (RuntimeException $error) { echo json_encode(['error' => $error->getMessage()]), \"\\n\"; }\n"
    )
    said = run_php(php, server.port, home, mistake)[1]["error"]
    assert str(said).startswith("ERR charge.lua: u is N or BUCKET=N")


def test_every_script_is_in_the_readme() -> None:
    for path in (ROOT / "lua").glob("*.lua"):
        assert f"| `{path.name}` |" in README, path.name
