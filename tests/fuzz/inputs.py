"""Numbered random inputs. QUOTA_TEST_INPUTS says how many in all, QUOTA_TEST_SEED which.

An input is made from the seed, its target's name and its number alone, so each can be had again by itself. One that
fails is printed with the line that repeats it:

    QUOTA_TEST_SEED=1 QUOTA_TEST_INPUT=217 python -m pytest -n 0 tests/fuzz/test_configuration.py
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

from quota.common.text import printable

SEED = os.environ.get("QUOTA_TEST_SEED", "1")
INPUTS = int(os.environ.get("QUOTA_TEST_INPUTS", "800"))
ONLY = os.environ.get("QUOTA_TEST_INPUT")

PARTS = 4 if INPUTS > 10_000 else 2
"""Each target is tested in so many parts, which different processes can take. Each part furnishes a house anew."""

MAX_S = 10.0
"""What takes longer is as good as a hang. The slowest inputs take tenths of a second where nothing else runs."""

MAX_SHOWN = 5

PERCENT = {
    "configuration": 30,
    "cost-book": 10,
    "answer": 36,
    "batch": 3,
    "client": 1,
    "command-line": 6,
    "checkpoint": 1,
    "ledger-file": 5,
    "journal": 5,
    "store": 1,
    "redis": 8,
    "neighbours-of-files": 0.5,
    "neighbours-of-keys": 0.5,
}
"""How the inputs are shared out. Those that take no time have as many for themselves."""


class Input(random.Random):
    """The source of one input. What was made from it is put into `data`, to be shown if it fails."""

    data: object = None


def every(target: str, part: int, attempt: Callable[[Input], None]) -> None:
    """Try each input of this part of a target. Those that fail are printed; after a few of them it ends."""
    if ONLY is not None:
        numbers = [int(ONLY)] if int(ONLY) % PARTS == part else []
    else:
        numbers = list(range(part, int(INPUTS * PERCENT[target]) // 100, PARTS))
    failed: list[BaseException] = []
    for number in numbers:
        made = Input(f"{SEED} {target} {number}")
        started = time.process_time()
        try:
            attempt(made)
            took_s = time.process_time() - started
            assert took_s < MAX_S, f"it took {took_s:.1f} s of the processor"
        except BaseException as error:
            print(f"input {number} of {target}: QUOTA_TEST_SEED={SEED} QUOTA_TEST_INPUT={number}")
            print(f"    {made.data!r:.20000}")
            print(f"    {type(error).__name__}: {error}"[:2_000])
            failed.append(error)
            if len(failed) == MAX_SHOWN or not isinstance(error, Exception):
                break
    if failed:
        raise failed[0]


def check_line(line: str, longest: int = 1_500) -> None:
    """What is said about an error is one line, for a terminal and a log: bounded, without control characters."""
    assert line, "nothing is said"
    assert line == printable(line), f"control characters: {line!r}"
    assert len(line) <= longest, f"{len(line)} characters: {line[:300]!r}"
    assert "Traceback" not in line
    assert "please report it" not in line, line
