"""The union of two histories of one log. Pure.

Keys identify entries. An entry of both histories keeps the log's id and units; an entry of one keeps its own time. Of
two entries with the same id, the later one moves up, so ids are unique. If a charge has two branches of corrections,
the later ids win: each correction starts from the units of the correction before it. Unreadable entries are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quota.rules.entry import START, Entry, Id
from quota.terms.limits import HOUR_MS

MAX_AHEAD_MS = HOUR_MS
"""An entry further ahead of the clock is dated by the clock, because a wrong clock dated it."""


def missing(log: Iterable[Entry], journal: Iterable[Entry], trimmed: Id, oldest_ms: int) -> list[Entry]:
    """The entries that a journal has and a log should still have but lacks, each once. A repair dates entries earlier,
    so the earliest time holds."""
    keys = {entry.key for entry in log}
    lost: dict[str, Entry] = {}
    for entry in journal:
        if entry.key not in keys:
            lost[entry.key] = min(entry, lost.get(entry.key, entry))
    return [entry for entry in lost.values() if entry.id > trimmed and entry.id[0] >= oldest_ms]


def union(
    log: Sequence[Entry], lost: Sequence[Entry], clock_ms: int, trimmed: Id = START, ahead_ms: int = MAX_AHEAD_MS
) -> list[Entry]:
    """The entries of a log and its lost entries, in order. A correction without its charge brings the charge back,
    unless the log has `trimmed` it. An entry further ahead of the clock than `ahead_ms` is dated by the clock."""
    together = [entry for entry in (*log, *lost) if entry.kind != "unreadable"]
    places = {entry.key: entry.id for entry in together if entry.kind == "charge"}
    corrections = sorted([entry for entry in together if entry.kind == "correction"], key=lambda entry: entry.id)
    for entry in corrections:  # the first correction has the units of the charge
        if entry.of not in places and entry.at > trimmed:
            places[entry.of] = entry.at
            charge = Entry(entry.at, entry.before_units, entry.bucket, entry.method, entry.job, entry.region, entry.of)
            together.append(charge)
    # A wrong clock may have dated a charge after its corrections.
    together.sort(key=lambda entry: (max(entry.id, places.get(entry.of, START)), entry.kind != "charge", entry.id))
    placed: list[Entry] = []
    last: Id = START
    units: dict[str, int] = {}
    for entry in together:
        ms, seq = entry.id
        dated = (clock_ms if ms > clock_ms + ahead_ms else ms, seq)
        last = dated if dated > last else (last[0], last[1] + 1)
        entry = entry._replace(id=last)
        if entry.kind == "correction":
            entry = entry._replace(
                at=places.get(entry.of, entry.at), before_units=units.get(entry.of, entry.before_units)
            )
            units[entry.of] = entry.units
        else:
            places[entry.key], units[entry.key] = last, entry.units
        placed.append(entry)
    return placed
