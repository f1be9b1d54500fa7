"""Each reader of a text of the state, at its bounds: what is one, and what is none for one reason alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from quota.common.clock import LATEST_MS, NEVER
from quota.ledger.contract import Exhaustion
from quota.ledger.state_fields import checked_count, exhaustion_text, read_epoch, read_exhaustion, read_id, read_ms

if TYPE_CHECKING:
    from collections.abc import Callable

TOLD = json.dumps({"bucket": "units", "evidence": "403", "reported_by": "a"})
LAST_MS = LATEST_MS - 1


def told(**changed: object) -> str:
    return json.dumps(json.loads(TOLD) | changed)


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (read_id, f"{LAST_MS}-{NEVER}", (LAST_MS, NEVER)),
        (read_id, "0-0", (0, 0)),
        (read_ms, "0", 0),
        (read_ms, str(LAST_MS), LAST_MS),
        (read_epoch, "e" * 200, "e" * 200),
        (read_exhaustion, f"0 0 {TOLD}", Exhaustion("units", 0, 0, "403", "a")),
        (read_exhaustion, f"{NEVER} {LAST_MS} {TOLD}", Exhaustion("units", LAST_MS, NEVER, "403", "a")),
        (read_exhaustion, f'{LAST_MS} "why"\n2 1 {TOLD}', Exhaustion("units", 1, 2, "403", "a", LAST_MS, "why")),
    ],
)
def test_what_stands_at_a_bound_is_read(read: Callable[[str], object], text: str, value: object) -> None:
    found = read(text)
    assert found == value
    if isinstance(found, Exhaustion):
        assert read_exhaustion(exhaustion_text(found)) == found


@pytest.mark.parametrize(
    ("read", "text", "why"),
    [
        *((read_id, text, "far future") for text in (f"{LATEST_MS}-0", f"0-{NEVER + 1}")),
        *((read_id, text, "no id") for text in ("00-0", "0-00", "+1-0")),
        *((read_id, text, "invalid literal|unpack") for text in ("-1-0", "1", "1-2-3", "")),
        *((read_ms, text, "far future, or before 1970") for text in ("-1", str(LATEST_MS))),
        *((read_ms, text, "invalid literal") for text in ("", "1.0")),
        *((read_epoch, text, "one word") for text in ("e" * 201, "two words", "a\nb", "a\tb")),
        *(
            (read_exhaustion, text, "an exhaustion of other types, or in the far future")
            for text in (
                f"-1 0 {TOLD}",
                f"0 -1 {TOLD}",
                f"{LATEST_MS} 0 {TOLD}",
                f"0 {LATEST_MS} {TOLD}",
                f"{NEVER + 1} 0 {TOLD}",
                *(f"2 1 {told(**{name: 1})}" for name in ("bucket", "evidence", "reported_by")),
            )
        ),
        *(
            (read_exhaustion, f"{lifted}\n2 1 {TOLD}", "reopened in the far future")
            for lifted in ('-1 "why"', f'{LATEST_MS} "why"', "3 1")
        ),
    ],
)
def test_what_is_wrong_in_one_thing_is_refused(read: Callable[[str], object], text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read(text)


def test_a_count_is_from_nothing_to_what_can_be_counted() -> None:
    assert (checked_count(0), checked_count(NEVER)) == (0, NEVER)
    for units in (-1, NEVER + 1):
        with pytest.raises(ValueError, match="counted"):
            checked_count(units)
