"""Processes under a wrong clock, by Debian's package faketime."""

from __future__ import annotations

from pathlib import Path

FAKETIME = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)
"""The library that does it; None where it is not installed."""


def wrong_clock(ahead_s: int) -> dict[str, str]:
    """Environment variables for a process whose clock is so far ahead."""
    return {"LD_PRELOAD": str(FAKETIME), "FAKETIME": f"{ahead_s:+d}s", "FAKETIME_DISABLE_SHM": "1"}
