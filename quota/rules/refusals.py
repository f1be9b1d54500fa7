"""Refusals: the number of refused calls in each hour, and the newest refusals in full. Pure.

    RefusalCount   refused calls of one job, for one reason, in one hour
    RefusedSum     the same since the beginning
    Refusals       all of these, for people

    refusal_text          the text of a refusal that a process hands over; `bounded` keeps it short
    names_to_add, add     change the state
    names_to_read, read   read the state

The fields of the state:

    refusals       how many refusals were ever kept in full; the hours that have counts; the keys of the last additions
    refusal:N      one of the newest refusals in full, N from 0 to 99
    refused:MS     the counts of the hour that begins at MS: rows of limit, job, reason, calls
    refused_sums   the counts since the beginning

Each addition reads and changes the field `refusals`, so simultaneous additions do not overwrite each other. An addition
has a key. If its answer is lost, the process adds again with the same key, and it counts once, unless a hundred other
additions came between.

No decision reads any of this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from quota.common.clock import rfc3339
from quota.common.text import one_line
from quota.errors import UsageError
from quota.terms.arguments import MAX_NUMBER, checked, text
from quota.terms.limits import DAY_MS, HOUR_MS

if TYPE_CHECKING:
    from quota.decision import Decision

REFUSALS = "refusals"
REFUSED_SUMS = "refused_sums"

KEPT_MS = 35 * DAY_MS
"""How long hours are kept."""

MAX_ROWS = 200
"""The most rows of an hour, and of the sums. Further rows count under OTHER."""

OTHER = "(other)"
"""Each name in the row for the calls after MAX_ROWS."""

MAX_NAME_BYTES = 256
"""Longer names are cut."""

MAX_REFUSALS = 100
MAX_REFUSAL_BYTES = 4_000
"""The most refusals of a project that are kept in full, and the most bytes of each."""

MAX_KEYS = 100
"""How many additions the state remembers."""

Row = tuple[str, str, str]
"""Limit, job, reason."""


class RefusalCount(NamedTuple):
    """How many calls of a job were refused for this reason, in the hour that begins at `hour_ms`. `limit` is the limit,
    or the bucket that upstream closed; empty if neither refused."""

    hour_ms: int
    limit: str
    job: str
    reason: str
    calls: int


class RefusedSum(NamedTuple):
    """The refused calls of a job for one reason: all that ever were, or those of a report. `limit` as in
    RefusalCount."""

    limit: str
    job: str
    reason: str
    calls: int


class Refusals(NamedTuple):
    """The refusals in the state. `newest` has the last refusals in full, the oldest first, each a JSON text."""

    counts: Sequence[RefusalCount]
    sums: Sequence[RefusedSum]
    newest: Sequence[str]


class _Head(NamedTuple):
    """The field `refusals`."""

    kept: int = 0
    hours_ms: tuple[int, ...] = ()
    keys: tuple[str, ...] = ()

    @classmethod
    def read(cls, stored: str) -> _Head:
        """The field in a text. Never raises: a text that cannot be read counts as empty."""
        try:
            return checked(cls(*json.loads(stored)))
        except (ValueError, TypeError, RecursionError, UsageError):
            return cls()


# -- the text of a refusal ---------------------------------------------------------------------------------------------


def refusal_text(decision: Decision, job: str, region: str, run: str, machine: str, calls: int = 1) -> str:
    """The text of a refusal: the JSON of the decision, with the time, the caller, the machine and the reason. `calls`
    is the number of calls that were refused together."""
    data = {
        "at": rfc3339(decision.decided_at_ms),
        "job": job,
        "region": region,
        "run": run,
        "machine": one_line(machine)[:64],
        **decision.as_json(),
        "why": one_line(decision.why()),
        **({"calls": calls} if calls > 1 else {}),
    }
    return json.dumps(bounded(data), ensure_ascii=False)


def bounded(refusal: Mapping[str, Any]) -> Mapping[str, Any]:
    """A refusal as JSON. If it is longer than MAX_REFUSAL_BYTES, it leaves out the limits that did not refuse."""
    if len(json.dumps(refusal, ensure_ascii=False).encode("utf-8", "replace")) <= MAX_REFUSAL_BYTES:
        return refusal
    limits = [limit for limit in refusal["limits"] if limit["name"] == refusal["refused_by"]]
    return {**refusal, "limits": limits, "limits_left_out": len(refusal["limits"]) - len(limits)}


# -- adding -----------------------------------------------------------------------------------------------------------


def names_to_add(counts: Sequence[RefusalCount]) -> tuple[str, ...]:
    """The fields that `add` reads, which must not change meanwhile."""
    return REFUSALS, REFUSED_SUMS, *{_hour_field(count.hour_ms): None for count in _checked_counts(counts)}


def add(
    fields: Mapping[str, str], now_ms: int, key: str, counts: Sequence[RefusalCount], newest: Sequence[str]
) -> dict[str, str | None]:
    """The fields that change when these refusals are added; none if an addition with this key was made before.

    It drops hours that ended 35 days ago. A count of such an hour, or of an hour as far ahead, is only in the sums.
    Raises UsageError for a value that cannot be stored.
    """
    head = _Head.read(fields.get(REFUSALS, ""))
    if key in head.keys:
        return {}
    sums = _read_rows(fields.get(REFUSED_SUMS, ""))
    hours: dict[int, dict[Row, int]] = {}
    for count in _checked_counts(counts):
        row = _cut(count.limit), _cut(count.job), _cut(count.reason)
        _add_to(sums, row, count.calls)
        if _is_kept(count.hour_ms, now_ms):
            stored = fields.get(_hour_field(count.hour_ms), "")
            _add_to(hours.setdefault(count.hour_ms, _read_rows(stored)), row, count.calls)
    becomes: dict[str, str | None] = {_hour_field(hour_ms): _text(rows) for hour_ms, rows in hours.items()}
    for hour_ms in head.hours_ms:
        if not _is_kept(hour_ms, now_ms):
            becomes[_hour_field(hour_ms)] = None
    for number, refusal in enumerate(newest[-MAX_REFUSALS:], head.kept):
        size = len(text(refusal, "refusal").encode("utf-8", "replace"))
        if size > MAX_REFUSAL_BYTES:
            raise UsageError(f"a refusal of {size:,} bytes: a ledger keeps at most {MAX_REFUSAL_BYTES:,} of each")
        becomes[_refusal_field(number)] = refusal
    all_hours = sorted(hour_ms for hour_ms in {*head.hours_ms, *hours} if _is_kept(hour_ms, now_ms))
    keys = [*head.keys, text(key, "key")][-MAX_KEYS:]
    becomes[REFUSED_SUMS] = _text(sums)
    becomes[REFUSALS] = json.dumps([head.kept + len(newest[-MAX_REFUSALS:]), all_hours, keys], separators=(",", ":"))
    return becomes


# -- reading -----------------------------------------------------------------------------------------------------------


def names_to_read(stored: str, since_ms: int) -> tuple[str, ...]:
    """The fields that `read` needs for the hours that end after `since_ms`. `stored` is the field `refusals`."""
    head = _Head.read(stored)
    hours = [_hour_field(hour_ms) for hour_ms in head.hours_ms if hour_ms + HOUR_MS > since_ms]
    texts = [_refusal_field(number) for number in range(min(head.kept, MAX_REFUSALS))]
    return REFUSALS, REFUSED_SUMS, *hours, *texts


def read(fields: Mapping[str, str]) -> Refusals:
    """The refusals in these fields. Never raises: it leaves out values that it cannot read."""
    head = _Head.read(fields.get(REFUSALS, ""))
    numbers = range(max(0, head.kept - MAX_REFUSALS), head.kept)
    return Refusals(
        counts=[
            RefusalCount(hour_ms, *row, calls)
            for hour_ms in head.hours_ms
            for row, calls in _read_rows(fields.get(_hour_field(hour_ms), "")).items()
        ],
        sums=[RefusedSum(*row, calls) for row, calls in _read_rows(fields.get(REFUSED_SUMS, "")).items()],
        newest=[fields[field] for number in numbers if (field := _refusal_field(number)) in fields],
    )


# -- rows --------------------------------------------------------------------------------------------------------------


def _hour_field(hour_ms: int) -> str:
    return f"refused:{hour_ms}"


def _refusal_field(number: int) -> str:
    return f"refusal:{number % MAX_REFUSALS}"


def _is_kept(hour_ms: int, now_ms: int) -> bool:
    """Whether an hour is neither too old, nor, by a wrong clock, as far ahead."""
    return now_ms - KEPT_MS < hour_ms + HOUR_MS and hour_ms < now_ms + KEPT_MS


def _read_rows(stored: str) -> dict[Row, int]:
    rows: dict[Row, int] = {}
    try:
        for row in json.loads(stored or "[]"):
            limit, job, reason, calls = checked(RefusedSum(*row))
            rows[limit, job, reason] = calls
    except (ValueError, TypeError, RecursionError, UsageError):
        pass  # not ours: keep the rows read so far
    return rows


def _text(rows: Mapping[Row, int]) -> str:
    return json.dumps([[*row, calls] for row, calls in rows.items()], separators=(",", ":"))


def _add_to(rows: dict[Row, int], row: Row, calls: int) -> None:
    if row not in rows and len(rows) >= MAX_ROWS:
        row = OTHER, OTHER, OTHER
    rows[row] = min(rows.get(row, 0) + calls, MAX_NUMBER)


def _cut(name: str) -> str:
    return name.encode("utf-8", "replace")[:MAX_NAME_BYTES].decode("utf-8", "replace")


def _checked_counts(counts: Sequence[RefusalCount]) -> list[RefusalCount]:
    return [count._replace(hour_ms=count.hour_ms // HOUR_MS * HOUR_MS) for count in map(checked, counts)]
