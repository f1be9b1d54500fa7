"""What upstream itself says it grants, where the configuration says more (L28 in docs/ledger-rules.md). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from quota.common.clock import LATEST_MS
from quota.terms.limits import DAY_MS


class Grant(NamedTuple):
    """Upstream grants `quota_units` of a bucket in each of its periods: said at `since_ms`, believed until
    `until_ms`."""

    bucket: str
    quota_units: int
    since_ms: int
    until_ms: int

    def believed_at(self, now_ms: int) -> bool:
        """Whether it still lowers a limit. Not if it was said in what is now the future: that clock was wrong."""
        since_ms, until_ms = self.believed_ms
        return since_ms <= now_ms < until_ms

    @property
    def believed_ms(self) -> tuple[int, int]:
        """From and until when it is believed."""
        return self.since_ms - DAY_MS, self.until_ms


def grants_text(grants: Iterable[Grant]) -> str:
    """As both ledgers store them: `BUCKET=UNITS:SINCE_MS:UNTIL_MS;...`, sorted. Raises ValueError for a grant that
    `read_grants` would not read."""
    text = ";".join(f"{g.bucket}={g.quota_units}:{g.since_ms}:{g.until_ms}" for g in sorted(grants))
    read_grants(text)
    return text


def read_grants(text: str) -> tuple[Grant, ...]:
    """The grants in a text. Raises ValueError for one that `grants_text` never makes."""
    grants = []
    for part in text.split(";") if text else ():
        found = re.fullmatch(_GRANT, part, re.ASCII)
        if found is None or not int(found[3]) < int(found[4]) < LATEST_MS:
            raise ValueError(f"{part!r:.100} is no grant")
        grants.append(Grant(found[1], *map(int, found.groups()[1:])))
    return tuple(grants)


_GRANT = r"([A-Za-z0-9._:-]{1,64})=(\d{1,15}):(\d{1,15}):(\d{1,15})"
