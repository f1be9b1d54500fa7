"""Makes the key of each attempt, which identifies its entry in every log: see `quota.rules.entry`."""

from __future__ import annotations

import os
from base64 import urlsafe_b64encode
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from quota.common.clock import boot_id
from quota.common.findings import existing
from quota.common.fork import start_over_in_child
from quota.rules.entry import MACHINE_CHARS, RUN_CHARS


class Keys:
    """Makes the keys of a process for one journal. A forked child gets its own run, the same for all its journals."""

    def __init__(self, run: str | None = None, folder: Path | None = None, journal: str = "") -> None:
        self.run = run or os.urandom(RUN_CHARS // 2).hex()
        self.machine = machine_mark(folder, journal)
        start_over_in_child(self)

    def start_over_in_child(self) -> None:
        self.run = _hashed(f"{self.run}\0{os.getpid()}", RUN_CHARS)

    def next(self) -> str:
        return self.run + self.machine + urlsafe_b64encode(os.urandom(8)).decode()[:11]

    def is_of_this_machine(self, key: str) -> bool:
        """Whether a process that shares this journal made the key."""
        return key.startswith(self.machine, RUN_CHARS)


def machine_mark(folder: Path | None, journal: str = "") -> str:
    """The mark of this machine in its keys: it depends on the host, its start, the place of the state folder, and the
    journal. A copy of the folder has another mark, and so has the same path in another container."""
    place = "" if folder is None else str(folder)
    if folder is not None:
        with suppress(OSError):
            status = os.stat(existing(place))
            place = f"{place}{status.st_dev}-{status.st_ino}"
    return _hashed(f"{os.uname().nodename}\0{boot_id()}\0{place}\0{journal}", MACHINE_CHARS)


def _hashed(text: str, chars: int) -> str:
    return blake2b(text.encode(errors="backslashreplace"), digest_size=chars // 2).hexdigest()
