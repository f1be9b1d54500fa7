"""The contract over one topology: every test of `tests/contract` that has a ledger, with the ledger there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support.servers import executables

ROOT = Path(__file__).resolve().parents[2]


def run(place: str, *, marked_only: bool) -> tuple[int, int, str]:
    """How many tests passed and failed there, and what pytest said."""
    environment = {"QUOTA_TEST_TOPOLOGY": place, "QUOTA_TEST_REDIS": executables()[place.partition("@")[2]]}
    command = [sys.executable, "-m", "pytest", "-n", "auto", "-q", "tests/contract"]
    if marked_only:
        command += ["-m", "topology"]
    said = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    ).stdout
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?)\b", said[-2_000:])}
    wrong = sum(number for word, number in counts.items() if word != "passed")
    return counts.get("passed", 0), wrong, said
