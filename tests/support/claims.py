"""A claim on the regions of a job, of which a test says what it is about."""

from __future__ import annotations

from typing import Any

from quota.rules.claims import Claim
from quota.terms.limits import HOUR_MS, MINUTE_MS

HOLD_MS, LEASE_MS = 2 * HOUR_MS, 10 * MINUTE_MS


def claim_of(owner: str, run: str = "", *regions: str, **more: Any) -> Claim:
    """A claim of a store, whose machine and host have its name; by default of the regions US and DE."""
    given = {
        "name": "trending|trending",
        "owner": owner,
        "run": run or f"run of {owner}",
        "machine": f"machine of {owner}",
        "host": f"host of {owner}",
        "regions": regions or ("US", "DE"),
        "hold_ms": HOLD_MS,
        "lease_ms": LEASE_MS,
    }
    return Claim(**{**given, **more})
