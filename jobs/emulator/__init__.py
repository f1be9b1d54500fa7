"""The upstream emulator: YouTube Data API v3 on loopback. Start with `Emulator`; `server.py` says what it counts."""

from quota.jobs.emulator.server import Emulator

__all__ = ["Emulator"]
