"""What was seen before a repair, as it would have been seen since."""

from __future__ import annotations

import pytest

from quota.ledger.contract import Repair
from quota.ledger.unlogged import UnloggedUsage
from quota.recovery.observations import Watermark
from quota.recovery.repaired import as_repaired
from quota.terms.limits import DAY_MS, HOUR_MS

NOW_MS = 1_793_000_000_000
REPAIRED_MS = NOW_MS - 78 * HOUR_MS
UNTIL_MS = NOW_MS + 3 * HOUR_MS


@pytest.mark.parametrize(
    ("seen_ms", "until_ms"),
    [
        (REPAIRED_MS - HOUR_MS, REPAIRED_MS + DAY_MS),
        # The ledger that showed it was a copy of before that repair, which was put back after it.
        (NOW_MS - 12 * HOUR_MS, UNTIL_MS),
        # By a clock that stood ahead: nobody knows whether it was seen before the repair or after.
        (NOW_MS + HOUR_MS, REPAIRED_MS + DAY_MS),
    ],
)
def test_a_repair_shortens_what_was_seen_before_it(seen_ms: int, until_ms: int) -> None:
    usage = UnloggedUsage("units|*|*|24h", "e/lost", ((82, UNTIL_MS),), (0, 0))
    seen = Watermark("e/copy@1", seen_ms, (), (usage,), {})
    repair = Repair((REPAIRED_MS, 0), REPAIRED_MS, REPAIRED_MS, (REPAIRED_MS, 0))
    (found,) = as_repaired([seen], [repair], f"e/mended@{NOW_MS}", (NOW_MS, 0), NOW_MS)
    assert [one.expiries for one in found.usages] == [((82, until_ms),)]
