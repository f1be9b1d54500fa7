"""Projects that a configuration charged, and names no more: one that got another name begins its budget anew."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from quota.ledger.identity import Identity
from quota.recovery.observations import Watermark
from quota.recovery.watermark_file import read_slots
from quota.recovery.watermark_folder import project_folders, watermark_path


def left_behind(folder: Path, identities: Sequence[Identity], now_ms: int) -> list[tuple[str, int]]:
    """The projects of a state folder that the configurations of these identities charged and that none of them is of,
    as the names of folders spell them; and until when what this machine saw of each counts.

    A project at another endpoint has the same name, and is none of these.
    """
    folders = list(project_folders(folder))
    if not folders:
        return []
    known = [os.path.dirname(watermark_path(folder, one)) for one in identities]
    names = {os.path.basename(path).rpartition("-")[0] for path in known}
    configurations = {one.ledger for one in identities}
    found: dict[str, int] = {}
    for name, paths in folders:
        if name in names:
            continue
        marks = [mark for path in paths for slot in read_slots(path) if (mark := Watermark.from_slot(*slot))]
        until_ms = max(
            (
                observation.until_ms
                for mark in marks
                if mark.configuration in configurations
                for observation in mark.observations
                if observation.units
            ),
            default=0,
        )
        if until_ms > now_ms:
            found[name] = max(until_ms, found.get(name, 0))
    return sorted(found.items())
