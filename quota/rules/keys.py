"""The key of each attempt: by it, an entry of the log is known wherever it stands.

    RUN MACHINE RANDOM    8, 4 and 11 characters, then `~` for a reservation, then `+1` to `+9` for further charges

RUN names the run, and begins every key of a process. MACHINE is the same for all processes of a machine. RANDOM are 64
bits, drawn for each attempt, so a process that was copied while it ran repeats no key.
"""

from __future__ import annotations

import os
from base64 import urlsafe_b64encode
from hashlib import blake2b
from pathlib import Path

from quota.common.fork import start_over_in_child

RESERVED = "~"
"""Ends the key of a charge that is an upper bound, until the true cost is known. It tells those who read the log; no
decision goes by it."""

FURTHER = "+"
"""Before the number of a further charge of one call, where a call is charged to several buckets."""

RUN_CHARS = 8
MACHINE_CHARS = 4


class Keys:
    """Makes the keys of a process. A forked child gets a run of its own."""

    def __init__(self, run: str | None = None, folder: Path | None = None) -> None:
        self.machine = machine_mark(folder)
        self._prefix = f"{run or _run()}{self.machine}"
        start_over_in_child(self)

    def start_over_in_child(self) -> None:
        self._prefix = f"{_run()}{self.machine}"

    @property
    def run(self) -> str:
        return self._prefix[:RUN_CHARS]

    def next(self) -> str:
        return self._prefix + urlsafe_b64encode(os.urandom(8)).decode()[:11]

    def is_of_this_machine(self, key: str) -> bool:
        return key.startswith(self.machine, RUN_CHARS)


def machine_mark(folder: Path | None) -> str:
    """What tells this machine's keys from those of others: its host, its start, and where its state folder lies. A copy
    of the folder has another mark."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = ""
    place = ""
    if folder is not None:
        try:
            place = f"{folder}{folder.stat().st_ino}"
        except OSError:
            place = str(folder)
    name = f"{os.uname().nodename}\0{boot}\0{place}"
    return blake2b(name.encode(errors="backslashreplace"), digest_size=2).hexdigest()


def is_reservation(key: str) -> bool:
    """Whether a charge is one: of a call of several charges, the first."""
    return key.endswith(RESERVED)


def is_first(key: str) -> bool:
    """Whether a charge is the first of its call, or the only one."""
    return not (key[-2:-1] == FURTHER and key[-1] in "123456789")


def _run() -> str:
    return os.urandom(4).hex()
