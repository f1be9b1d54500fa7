"""The upstream emulator: YouTube Data API v3 on loopback. `Emulator` is the door; `server.py` tells what it counts."""

from quota.jobs.emulator.server import Emulator

__all__ = ["Emulator"]
