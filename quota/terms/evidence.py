"""What upstream's answers say of its buckets, beside what the ledger counts."""

from __future__ import annotations

from typing import NamedTuple


class Level(NamedTuple):
    """What an answer of upstream says of one bucket: `remaining_units` of `limit_units` until `reset_ms`.

    `limit_units` and `reset_ms` (ms since 1970, by this machine's clock) are None where the answer does not say.
    """

    bucket: str
    remaining_units: int
    limit_units: int | None = None
    reset_ms: int | None = None
