"""Projects that a configuration charged, and names no more: one that got another name begins its budget anew."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from quota.journal.journal import FOLDER, upstream_folder
from quota.ledger.identity import Identity


def left_behind(folder: Path, identities: Sequence[Identity], now_ms: int, longest_ms: int) -> list[tuple[str, int]]:
    """The projects of a state folder that the configurations of these identities charged and that none of them is of,
    as the names of folders spell them; and until when what this machine noted of each may count: `longest_ms` after it
    was noted last.

    A project at another endpoint has the same name, and is none of these.
    """
    spelled = {os.path.basename(upstream_folder(folder, identity)).rpartition("-")[0] for identity in identities}
    configurations = {identity.ledger for identity in identities}
    left: dict[str, int] = {}
    with suppress(OSError):
        for name in sorted(os.listdir(folder / FOLDER)):
            project, _, upstream = name.rpartition("-")
            if project in spelled or not re.fullmatch(r"[0-9a-f]{16}", upstream):
                continue
            hashes = {Identity(ledger, project).hash for ledger in configurations}
            for own in os.scandir(folder / FOLDER / name):
                if own.name in hashes and own.is_dir(follow_symlinks=False):
                    until_ms = _noted_ms(own.path) + longest_ms
                    if until_ms > now_ms:
                        left[project] = max(until_ms, left.get(project, 0))
    return sorted(left.items())


def _noted_ms(path: str) -> int:
    """When something was noted in a journal last; 0 for an empty one."""
    return max((entry.stat().st_mtime_ns // 1_000_000 for entry in os.scandir(path)), default=0)
