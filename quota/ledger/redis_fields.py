"""What stands in the keys of Redis, as the ledger gives it: entries of the log, and what they add up to.

Whatever none of us wrote there raises one of UNREADABLE.
"""

from __future__ import annotations

from collections.abc import Sequence

from quota.common.clock import NEVER
from quota.ledger.entry import DEFAULT_BUCKET, Charge, Entry, Id
from quota.ledger.state_fields import checked_count, read_id

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What is raised where a reply is none of ours. Python reads no JSON that is nested very deep."""


def units_text(charge: Charge) -> str:
    """The field `u` of an entry."""
    return str(charge.units) if charge.bucket == DEFAULT_BUCKET else f"{charge.bucket}={charge.units}"


def range_arguments(after: Id, until_ms: int, count: int) -> list[str]:
    """The arguments of read.lua."""
    begin = f"{after[0] + 1}-0" if after[1] == NEVER else f"({after[0]}-{after[1]}"
    return [begin, str(until_ms), str(count)]


def read_entry(row: Sequence[str]) -> Entry:
    charge_id, u, method, job, region, idempotency_key, corrected = row
    ms, seq = read_id(charge_id)
    bucket, _, units = u.rpartition("=")
    charged = checked_count(int(units))
    counted = checked_count(int(corrected)) if corrected else charged
    return Entry(
        ms=ms,
        seq=seq,
        units=counted,
        charged_units=charged,
        bucket=bucket if "=" in u else DEFAULT_BUCKET,
        method=method,
        job=job,
        region=region,
        idempotency_key=idempotency_key,
        settled=bool(corrected),
    )
