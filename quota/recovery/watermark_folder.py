"""The folder of watermark files: which file is whose, and what else lies there.

    PROJECT-UPSTREAM/HASH    what the processes of this machine saw of one identity (quota.recovery.watermark_file)
    PROJECT-UPSTREAM/told    its time is when somebody said last that this project has two ledgers

Identities of one upstream project lie in one folder: the files of the others are *siblings*. However many projects a
machine has, to look for the siblings of one reads a folder of a few files.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from math import inf
from pathlib import Path

from quota.common.folders import first_within, make_folder
from quota.ledger.identity import Identity
from quota.terms.limits import DAY_MS

FOLDER = "high-water-marks"
"""Part of the state folder. It has one folder for each project and endpoint."""

FORGET_AFTER_DAYS = 400
"""After how many days a file is removed that nobody wrote: more than any window in use has."""

_swept_at_s: dict[str, float] = {}
"""When this process last looked for what is to be forgotten in a folder."""

_OF_AN_IDENTITY = re.compile(r"[0-9a-f]{32}")


def watermark_path(folder: Path, identity: Identity) -> str:
    """Where in a state folder the file of an identity is."""
    spelled = re.sub(r"[^A-Za-z0-9._-]", "_", identity.project)
    return os.sep.join((str(folder), FOLDER, f"{spelled}-{identity.upstream_hash[:16]}", identity.hash))


def siblings_of(path: str) -> list[str]:
    """The files of other identities of the same upstream project; none where there is no folder that can be read."""
    folder, _, name = path.rpartition(os.sep)
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [os.path.join(folder, one) for one in names if one != name and _OF_AN_IDENTITY.fullmatch(one)]


def project_folders(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Each project of a state folder, as its folder spells it, with its files."""
    marks = folder / FOLDER
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(marks)):
            spelled, _, upstream = name.rpartition("-")
            if not re.fullmatch(r"[0-9a-f]{16}", upstream):
                continue
            with contextlib.suppress(OSError):
                own = os.path.join(marks, name)
                yield spelled, [os.path.join(own, one) for one in os.listdir(own) if _OF_AN_IDENTITY.fullmatch(one)]


def first_today(path: str) -> bool:
    """Whether nobody on this machine has said for a day that this project has two ledgers. Then somebody has now."""
    try:
        return first_within(os.path.join(os.path.dirname(path), "told"), DAY_MS)
    except OSError:  # else it would be said with every tick
        return False


def make_room(path: str) -> None:
    """Before a new file: make its folder, and remove files that nobody has written for longer than any window lasts.

    Raises OSError.
    """
    own = os.path.dirname(path)
    folder = os.path.dirname(own)
    now_s = time.monotonic()
    is_due = now_s - _swept_at_s.get(folder, -inf) >= DAY_MS / 1000
    make_folder(own)
    if is_due:
        _swept_at_s[folder] = now_s
        _sweep(folder)


def _sweep(folder: str) -> None:
    """Remove what nobody has written for long. A folder goes that has been empty for as long."""
    since_s = time.time() - FORGET_AFTER_DAYS * 86_400
    for project in os.scandir(folder):
        if not project.is_dir(follow_symlinks=False):
            continue
        changed_s = project.stat().st_mtime
        with contextlib.suppress(FileNotFoundError):  # another process removed it first
            for entry in os.scandir(project.path):
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat().st_mtime < since_s:
                        os.unlink(entry.path)
        if changed_s < since_s:
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(project.path)
