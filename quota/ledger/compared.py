"""What `quota reconcile` found last, kept for people and for metrics. Pure.

Nothing is decided by it. So what cannot be read is left out, and nobody who looks meets an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from quota.common.clock import LATEST_MS

MAX_COMPARED = 100
"""The most buckets that are remembered: of more, those compared last."""


class Compared(NamedTuple):
    """Upstream's count of a bucket beside ours, as they stood at `at_ms`: since upstream's reset at `since_ms`, and up
    to its newest point at `through_ms`. `unknown_units` only upstream counted, `drift_units` only we did."""

    bucket: str
    upstream_units: int
    our_units: int
    unknown_units: int
    drift_units: int
    since_ms: int
    through_ms: int
    at_ms: int


def compared_text(several: Iterable[Compared]) -> str:
    """As both ledgers store them: `BUCKET=UPSTREAM:OURS:UNKNOWN:DRIFT:SINCE_MS:THROUGH_MS:AT_MS;...`, sorted. Raises
    ValueError for one that `read_compared` would leave out."""
    newest = sorted(several, key=lambda one: -one.at_ms)[:MAX_COMPARED]
    text = ";".join(f"{one.bucket}={':'.join(map(str, one[1:]))}" for one in sorted(newest))
    if {*read_compared(text)} != {*newest}:
        raise ValueError(f"{text!r:.100} is no comparison")
    return text


def read_compared(text: str) -> tuple[Compared, ...]:
    """The comparisons in a text, each bucket once."""
    found: dict[str, Compared] = {}
    for part in text.split(";")[:MAX_COMPARED] if text else ():
        match = re.fullmatch(_COMPARED, part, re.ASCII)
        if match is not None:
            one = Compared(match[1], *map(int, match[2].split(":")))
            if max(one[5:]) < LATEST_MS:
                found[one.bucket] = one
    return tuple(found.values())


_COMPARED = r"([A-Za-z0-9._:-]{1,64})=(\d{1,15}(?::\d{1,15}){6})"
