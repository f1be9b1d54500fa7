"""Mutants of the core: one token is changed at a time, and the tests must know it.

    python -m mutants [--count 200] [--seed 1] [FILE ...]      (in the folder `tests`)

The project is copied to a temporary folder. There a comparison is turned round or off by one, a whole number is one
larger, an `and` is an `or`, a `not` is gone; then the tests run until one fails. A mutant that none of them knows
survives, and is printed. Some survivors change nothing that anybody can see: read each of them.
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
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]

CORE = (
    "quota/budget.py",
    *(f"quota/deciding/{name}.py" for name in ("account", "answer", "checklist", "retry_at")),
    *(f"quota/ledger/{name}.py" for name in ("sqlite_decision", "sqlite_ledger", "sqlite_views", "unlogged", "claims")),
    *(f"lua/{name}.lua" for name in ("charge", "settle", "repay")),
    *(f"lua/parts/{name}.lua" for name in ("bucket_and_units", "cells", "clocks_agree", "ids", "what_a_view_counts")),
)

_DECISIONS = (
    *(
        f"unit/test_{name}.py"
        for name in ("answer", "checklist", "retry_at", "unlogged", "state_fields", "pacing", "limits", "spending")
    ),
    *(f"contract/test_{name}.py" for name in ("tour", "prices", "closed_and_full", "explain", "charge_many", "owners")),
    *(f"contract/test_{name}.py" for name in ("shadow", "evidence", "several_buckets", "reservations")),
)
_LEDGERS = (
    *(
        f"contract/ledger/test_{name}.py"
        for name in (
            *("rules", "retention", "rooms", "counting", "clocks", "charge_script", "several_charges", "ledger"),
            *("grants", "claims", "script_bounds", "formats", "refusal_history", "history", "random_operations"),
            *("rights", "places"),
        )
    ),
    "contract/recovery/test_repaired.py",
    "contract/ledger/test_move.py",
)
"""Of each group the quick ones are first: most mutants fall to those."""

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
        text = (ROOT / self.path).read_text(encoding="utf-8")
        line = text.count("\n", 0, self.begin)
        return f"{self.path}:{line + 1}: `{self.old}` -> `{self.new}` in: {text.splitlines()[line].strip()}"


def mutants_of(path: str) -> Iterator[Mutant]:
    text = (ROOT / path).read_text(encoding="utf-8")
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
    for found in _LUA.finditer(text):
        if found["token"]:
            yield found.start(), found["token"]


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

    def passes(self, tests: tuple[str, ...]) -> bool:
        """Whether all of these tests pass, in two processes."""
        files = [f"tests/{test}" for test in tests]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "2", "--timeout", "60", "-p", "no:cacheprovider"]
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
                return run.wait(RUN_S) == 0
            except subprocess.TimeoutExpired:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
                return False

    def log(self) -> str:
        return (self._root / "pytest.log").read_text(encoding="utf-8", errors="replace")[-2_000:]


def tests_of(path: str) -> tuple[str, ...]:
    of_ledger = path.startswith(("quota/ledger/", "lua/"))
    return (*_LEDGERS, *_DECISIONS) if of_ledger else (*_DECISIONS, *_LEDGERS)


def falls(copy: Copy, path: str, text: str) -> bool:
    """Whether a test fails with this text in the place of a file's own."""
    copy.write(path, text)
    try:
        return not copy.passes(tests_of(path))
    finally:
        copy.write(path, (ROOT / path).read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mutants", description="Change one token of the core at a time.")
    parser.add_argument("--count", type=int, default=200, help="so many mutants (200)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (1)")
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="of these files, as `lua/charge.lua`; else of the core"
    )
    options = parser.parse_args()
    every = [mutant for path in options.files or CORE for mutant in mutants_of(path)]
    chosen = random.Random(options.seed).sample(every, min(options.count, len(every)))
    with tempfile.TemporaryDirectory(prefix="quota-mutants-") as folder:
        copy = Copy(Path(folder))
        if not copy.passes((*_DECISIONS, *_LEDGERS)):
            raise SystemExit(f"the tests fail on what nobody changed: {copy.log()}")
        for path, text in (
            ("quota/deciding/retry_at.py", "raise ImportError\n"),
            ("lua/parts/ids.lua", "error('mutant')\n"),
        ):
            if not falls(copy, path, text):
                raise SystemExit(f"the tests do not read {path} of the copy: no mutant of it would fall")
        survivors = 0
        for number, mutant in enumerate(chosen, 1):
            if not falls(copy, mutant.path, mutant.applied((ROOT / mutant.path).read_text(encoding="utf-8"))):
                survivors += 1
                print(f"survived: {mutant}", flush=True)
            print(f"{number - survivors} of {number} fell", end="\r", file=sys.stderr, flush=True)
    fell = len(chosen) - survivors
    share = f"{fell} of {len(chosen)} mutants fell, {fell / max(len(chosen), 1):.0%}"
    print(f"seed {options.seed}: {share}; {len(every)} can be made")


if __name__ == "__main__":
    main()
