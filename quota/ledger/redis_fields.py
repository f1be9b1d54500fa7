"""What stands in the keys of Redis, as the ledger gives it: entries of the log, and what they add up to.

Whatever none of us wrote there raises one of UNREADABLE.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING

from quota.common.clock import NEVER
from quota.ledger.entry import DEFAULT_BUCKET, Entry
from quota.ledger.history import (
    RUN_CHARS,
    HourOfLog,
)
from quota.ledger.state_fields import checked_count, read_id
from quota.terms.limits import HOUR_MS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quota.ledger.entry import Charge, Id

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError)
"""What is raised where a reply is none of ours."""


def units_text(charge: Charge) -> str:
    """The field `u` of an entry."""
    return str(charge.units) if charge.bucket == DEFAULT_BUCKET else f"{charge.bucket}={charge.units}"


def range_arguments(after: Id, until_ms: int, count: int) -> list[str]:
    """The arguments of read.lua."""
    return [range_start(after), str(until_ms), str(count)]


def leading_ms(text: str) -> int:
    return int(text.partition(" ")[0])


def read_entry(row: Sequence[str]) -> Entry:
    charge_id, u, method, job, region, idempotency_key, corrected = row
    ms, seq = read_id(charge_id)
    bucket, charged = _bucket_and_units(u)
    counted = checked_count(int(corrected)) if corrected else charged
    return Entry(
        ms=ms,
        seq=seq,
        units=counted,
        charged_units=charged,
        bucket=bucket,
        method=method,
        job=job,
        region=region,
        idempotency_key=idempotency_key,
    )


def _bucket_and_units(u: str) -> tuple[str, int]:
    """What the field `u` of an entry says."""
    bucket, equals, units = u.rpartition("=")
    return bucket if equals else DEFAULT_BUCKET, checked_count(int(units))


def range_start(after: Id) -> str:
    """Where a range begins that has what comes after this id."""
    return f"{after[0] + 1}-0" if after[1] == NEVER else f"({after[0]}-{after[1]}"


def added_up(rows: Sequence[tuple[str, Sequence[str]]], corrected: Sequence[str | None]) -> list[HourOfLog]:
    """Entries as the server has them, and what was corrected of them: by hour, and by all that they say except their
    number."""

    def ms_of(row: tuple[str, Sequence[str]]) -> int:
        return int(row[0].partition("-")[0])

    hours, begin = [], 0
    while begin < len(rows):
        hour_ms = ms_of(rows[begin]) // HOUR_MS * HOUR_MS
        end = bisect_left(rows, hour_ms + HOUR_MS, begin, key=ms_of)
        said = [(f[1], f[3], f[5], f[7], f[9][:RUN_CHARS]) for _, f in rows[begin:end]]
        more = dict.fromkeys(said, 0)
        for what, now in zip(said, corrected[begin:end], strict=False):  # empty where there are none
            if now is not None:
                more[what] += checked_count(int(now)) - _bucket_and_units(what[0])[1]
        for what, charges in Counter(said).items():
            u, method, job, region, run = what
            bucket, units = _bucket_and_units(u)
            hours.append(HourOfLog(hour_ms, method, job, region, bucket, run, charges, charges * units + more[what]))
        begin = end
    return hours
