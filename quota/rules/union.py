"""Which entries two histories of one log have together. Pure.

Entries are known by their keys. What both have keeps the log's place and units; what only one has keeps its own time.
Of two entries with one id the later one moves up, so places are unique. Of two branches of corrections of one charge
the later ids win: each correction begins with what the one before it said. What nobody can read is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quota.rules.entry import START, Entry, Id
from quota.terms.limits import HOUR_MS

MAX_AHEAD_MS = HOUR_MS
"""What lies further ahead of the ledger's clock is dated by that clock: the one that dated it was wrong."""


def missing(log: Iterable[Entry], journal: Iterable[Entry], trimmed: Id, oldest_ms: int) -> list[Entry]:
    """What a journal has and a log lacks, of what the log should still have: each entry once."""
    keys = {entry.key for entry in log}
    lost: list[Entry] = []
    for entry in journal:
        if entry.key not in keys and entry.id > trimmed and entry.id[0] >= oldest_ms:
            keys.add(entry.key)
            lost.append(entry)
    return lost


def union(
    log: Sequence[Entry], lost: Sequence[Entry], clock_ms: int, trimmed: Id = START, ahead_ms: int = MAX_AHEAD_MS
) -> list[Entry]:
    """The entries of a log, and those that it has lost, in order. A correction whose charge is missing brings it back,
    unless that has left the log: it was `trimmed`. What lies further ahead of the clock than `ahead_ms` is dated by the
    clock."""
    together = [entry for entry in (*log, *lost) if entry.kind != "unreadable"]
    charges = {entry.key for entry in together if entry.kind == "charge"}
    corrections = sorted([entry for entry in together if entry.kind == "correction"], key=lambda entry: entry.id)
    for entry in corrections:  # a charge counted what the first of them began with
        if entry.of not in charges and entry.at > trimmed:
            charges.add(entry.of)
            together.append(_charge_of(entry))
    together.sort(key=lambda entry: (entry.id, entry.kind != "charge"))
    placed: list[Entry] = []
    last: Id = START
    places: dict[str, Id] = {}
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


def _charge_of(correction: Entry) -> Entry:
    """The charge that a correction corrects, as far as it says."""
    return correction._replace(
        id=correction.at,
        units=correction.before_units,
        key=correction.of,
        kind="charge",
        of="",
        at=START,
        before_units=0,
    )
