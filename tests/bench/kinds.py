"""The kinds of decisions that are measured of each ledger."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

CHEAP, DEAR = "videos.list", "search.list"
DEAR_UNITS = 100


class Labels(TypedDict):
    """Who spends."""

    job: str
    region: str


LABELS: Labels = {"job": "trending", "region": "US"}


class Kind(NamedTuple):
    """A call, how many limits count it, and whether they are full of charges of 1."""

    method: str
    units: int
    limits: int = 1
    refused: bool = False


DECISIONS = {
    "1 unit": Kind(CHEAP, 1),
    "100 units": Kind(DEAR, DEAR_UNITS),
    "3 limits, 1 unit": Kind(DEAR, 1, 3),
    "refused, 1 unit": Kind(DEAR, 1, refused=True),
    "refused, 100 units": Kind(DEAR, DEAR_UNITS, refused=True),
    "3 limits, refused, 100 units": Kind(DEAR, DEAR_UNITS, 3, refused=True),
}
