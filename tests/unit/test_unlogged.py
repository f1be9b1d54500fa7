"""How two reports of one loss are merged, row by row (L17), and which texts are none."""

from __future__ import annotations

import pytest

from quota.common.clock import LATEST_MS, NEVER
from quota.ledger.unlogged import Expiries, UnloggedUsage, read_expiries

UNTIL_MS = 10_000
NOW_MS = 500


def report(units: int, last_ms: int, kept: tuple[int, int, int] = (0, 0, 0), since_ms: int = 0) -> UnloggedUsage:
    """What a machine saw after `since_ms` and up to `last_ms`, and what the ledger still had by its report."""
    return UnloggedUsage("view", "epoch", ((units, UNTIL_MS),), (last_ms, 0), *kept, since_ms=since_ms)


@pytest.mark.parametrize(
    ("first", "second", "expiries"),
    [
        pytest.param(report(8, 100), report(2, 100), ((8, UNTIL_MS),), id="of two that go as far the larger counts"),
        pytest.param(
            report(8, 101),
            report(2, 101, kept=(5, 0, 100)),
            ((3, UNTIL_MS),),
            id="what the ledger had again is taken from a report that goes further",
        ),
        pytest.param(
            report(8, 100),
            report(2, 100, kept=(5, 0, 100)),
            ((3, UNTIL_MS),),
            id="and from one that goes just as far",
        ),
        pytest.param(
            report(8, 99),
            report(2, 99, kept=(5, 0, 100)),
            ((8, UNTIL_MS),),
            id="but not from one that ends before: it may hold none of it",
        ),
        pytest.param(
            report(8, 100, since_ms=10),
            report(2, 100, kept=(5, 10, 100)),
            ((3, UNTIL_MS),),
            id="from one that begins where the ledger's part begins",
        ),
        pytest.param(
            report(8, 100, since_ms=11),
            report(2, 100, kept=(5, 10, 100)),
            ((8, UNTIL_MS),),
            id="but not from one that begins after it",
        ),
    ],
)
def test_two_reports_of_one_loss(first: UnloggedUsage, second: UnloggedUsage, expiries: Expiries) -> None:
    """In either order."""
    assert first.with_report(second, NOW_MS).expiries == expiries
    assert second.with_report(first, NOW_MS).expiries == expiries


@pytest.mark.parametrize(
    "text",
    ["-1:5", "-1:5,2:6", f"{NEVER}:5,1:6", "1:6,1:5", "1:-1", f"1:{LATEST_MS}", "", "1", "1:5:6", "one:5", "1:5,"],
)
def test_a_text_with_one_thing_wrong_in_it_is_no_unlogged_usage(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no unlogged usage|unpack|invalid literal"):
        read_expiries(text)


def test_unlogged_usage_at_its_bounds_is_read() -> None:
    assert read_expiries(f"0:5,{NEVER}:{LATEST_MS - 1}") == ((0, 5), (NEVER, LATEST_MS - 1))
