"""The folder of watermark files: which file is whose, and what else lies there.

    PROJECT-UPSTREAM-HASH    what the processes of this machine saw of one identity (quota.recovery.watermark_file)
    PROJECT-UPSTREAM-told    its time is when somebody said last that this project has two ledgers

Identities of one upstream project have PROJECT-UPSTREAM in common: the files of the others are *siblings*.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from math import inf
from typing import TYPE_CHECKING

from quota.common.folders import first_within, make_folder
from quota.common.log import warn
from quota.limits import DAY_MS

if TYPE_CHECKING:
    from pathlib import Path

    from quota.ledger.contract import Identity

FOLDER = "watermarks"
"""Part of the state folder. It has one file for each project and endpoint of each identity."""

FORMER_FOLDER = "seen"
"""An older version wrote here. It is not read any more."""

FORGET_AFTER_DAYS = 400
"""A file that nobody wrote for so long, longer than any window in use, is removed."""

SETTLED_NS = 3_000_000_000
"""A folder that changed longer ago has another time with its next change, whatever its file system."""

_listed: dict[str, tuple[int, dict[str, list[str]]]] = {}
"""Of each folder its time and the files of identities then, by what siblings have in common. Who opens the budgets of
many projects would else read all the folder for each."""

_swept_at_s: dict[str, float] = {}
"""When this process last looked for what is to be forgotten in a folder."""

_OF_AN_IDENTITY = re.compile(r".+-[0-9a-f]{16}-[0-9a-f]{32}")


def watermark_path(folder: Path, identity: Identity) -> str:
    """Where in a state folder the file of an identity is."""
    spelled = re.sub(r"[^A-Za-z0-9._-]", "_", identity.project)
    return str(folder / FOLDER / f"{spelled}-{identity.upstream_hash[:16]}-{identity.hash}")


def siblings_of(path: str) -> list[str]:
    """The files of other identities of the same upstream project; none where the folder cannot be read."""
    folder, name = os.path.split(path)
    with contextlib.suppress(OSError):
        return [os.path.join(folder, one) for one in _identities(folder, _shared(name)) if one != name]
    return []


def _shared(name: str) -> str:
    """What the files of siblings have in common: PROJECT-UPSTREAM."""
    return name.rpartition("-")[0]


def _identities(folder: str, shared: str) -> list[str]:
    """The files of identities in a folder that have this in common. Raises OSError."""
    changed_ns = os.stat(folder).st_mtime_ns
    if time.time_ns() - changed_ns <= SETTLED_NS:
        names = (entry.name for entry in os.scandir(folder) if entry.name.startswith(shared))
        return [name for name in names if _shared(name) == shared and _OF_AN_IDENTITY.fullmatch(name)]
    known = _listed.get(folder)
    if known is None or known[0] != changed_ns:
        known = _listed[folder] = changed_ns, {}
        for entry in os.scandir(folder):
            if _OF_AN_IDENTITY.fullmatch(entry.name):
                known[1].setdefault(_shared(entry.name), []).append(entry.name)
    return known[1].get(shared, [])


def first_today(path: str) -> bool:
    """Whether nobody on this machine has said for a day that this project has two ledgers. Then somebody has now."""
    try:
        return first_within(f"{path.rpartition('-')[0]}-told", DAY_MS)
    except OSError:  # else it would be said with every tick
        return False


def make_room(path: str) -> None:
    """Before a new file: make the folder, and remove files that nobody has written for longer than any window lasts.

    Raises OSError.
    """
    if os.path.exists(path):
        return
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        make_folder(folder)
        former = os.path.join(os.path.dirname(folder), FORMER_FOLDER)
        if os.path.isdir(former):
            warn(
                "memory_unusable path=%s: an older quota-ledger wrote it and this one does not read it; delete it",
                former,
            )
    now_s = time.monotonic()
    if now_s - _swept_at_s.get(folder, -inf) < DAY_MS / 1000:
        return
    _swept_at_s[folder] = now_s
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # another process removed it first
            if time.time() - entry.stat().st_mtime > FORGET_AFTER_DAYS * 86_400:
                os.unlink(entry.path)
