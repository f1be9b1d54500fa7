"""`quota prove`: the same bursts around midnight through a fixed window and through our sliding window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import click

from quota.budget import Budget
from quota.cli.options import format_option
from quota.cli.output import print_json
from quota.common.text import many
from quota.deciding.project import Project
from quota.ledger.factory import open_ledger
from quota.settings.books import load_book
from quota.terms.limits import DAY_MS, MINUTE_MS, Limit, Selector, Sliding, View

LIMIT_UNITS = 500
MIDNIGHT_MS = 20_000 * DAY_MS


@click.command("prove", short_help="Show a fixed window and a sliding window at midnight.")
@format_option
def prove_(as_json: bool) -> None:
    """Show that a fixed window can admit twice its limit, and a sliding window cannot.

    It charges the same bursts around midnight to both windows, in memory.

    \b
    Example:
      quota prove
    """
    rows = list(_admitted())
    fixed_units = _peak([(row.offset_ms, row.fixed_units) for row in rows])
    sliding_units = _peak([(row.offset_ms, row.sliding_units) for row in rows])
    if as_json:
        peaks = {"fixed_peak_units": fixed_units, "sliding_peak_units": sliding_units}
        print_json({"limit_units": LIMIT_UNITS, **peaks, "rows": [row._asdict() for row in rows]})
        return
    limit = many(LIMIT_UNITS, "unit")
    click.echo(f"Searches of 100 units around midnight, against a limit of {limit} in 24 hours:\n")
    click.echo(f"{'time':>16}  {'asked':>6}  {'fixed window':>13}  {'sliding window':>14}")
    for row in rows:
        minutes, millis = divmod(row.offset_ms % DAY_MS, 60_000)
        day = "Mon" if row.offset_ms < 0 else "Tue"
        at = f"{day} {minutes // 60:02}:{minutes % 60:02}:{millis // 1000:02}.{millis % 1000:03}"
        click.echo(f"{at:>16}  {row.asked_units:>6}  {row.fixed_units:>13}  {row.sliding_units:>14}")
    click.echo(
        f"\nMost in any 24 hours: fixed {fixed_units:,}, sliding {sliding_units:,}; the limit is {LIMIT_UNITS:,}."
    )


class Row(NamedTuple):
    """One burst, at a time after midnight: the units that its searches asked for, and the units that each kind of
    window admitted."""

    offset_ms: int
    asked_units: int
    fixed_units: int
    sliding_units: int


def _peak(spent: Sequence[tuple[int, int]]) -> int:
    """The most units in any 24 hours."""
    return max(sum(units for ms, units in spent if at - DAY_MS < ms <= at) for at, _ in spent)


def _admitted() -> Iterator[Row]:
    """Charge bursts of searches around one midnight, to a ledger in memory whose clock this function sets."""
    now_ms = MIDNIGHT_MS
    ledger = open_ledger("memory:", clock=lambda: now_ms)
    budget = Budget(
        credential="proof",
        book=load_book("youtube-v3"),
        limits=[Limit("day", LIMIT_UNITS, View(Selector(), Sliding(DAY_MS)), LIMIT_UNITS, 0)],
        project=Project(ledger, "proof", clock=lambda: now_ms),
    )
    fixed_used: dict[int, int] = {}
    for offset_ms, searches in _BURSTS:
        now_ms = MIDNIGHT_MS + offset_ms
        sliding_units = fixed_units = 0
        for _ in range(searches):
            sliding_units += 100 if budget.charge("search.list").admitted else 0
            day = now_ms // DAY_MS
            if fixed_used.get(day, 0) + 100 <= LIMIT_UNITS:
                fixed_used[day] = fixed_used.get(day, 0) + 100
                fixed_units += 100
        yield Row(offset_ms, searches * 100, fixed_units, sliding_units)
    ledger.close()


_BURSTS = (
    (-2 * MINUTE_MS, 3),
    (-MINUTE_MS, 3),
    (-1, 2),
    (0, 3),
    (MINUTE_MS, 3),
    (DAY_MS - 2 * MINUTE_MS - 1, 1),
    (DAY_MS - 2 * MINUTE_MS, 4),
)
