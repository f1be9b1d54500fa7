"""What each page of a job brought: new entries, and the units that they cost. Rows of the table `bought`.

entries        how many entries were ever new
note_page      count a page that is stored
note_units     count what the attempts at pages cost
read_bought    the sums by job and page number
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

from quota.reports.spending import Bought
from quota.terms.limits import DAY_MS

MAX_PAGE = 100
"""Pages behind this one are counted as this one."""

_ADD = (
    "INSERT INTO bought (day_ms, job, page, pages, items, new, units) VALUES (?, ?, ?, ?, ?, ?, ?)"
    " ON CONFLICT (day_ms, job, page) DO UPDATE SET pages = pages + excluded.pages, items = items + excluded.items,"
    " new = new + excluded.new, units = units + excluded.units"
)


def entries(db: sqlite3.Connection) -> int:
    """A number that grows by one with each new entry, in one transaction: row ids rise, and a refreshed row keeps its
    own."""
    count = "(SELECT ifnull(max(rowid), 0) FROM {})"
    tables = " + ".join(count.format(table) for table in ("videos", "channels", "rows"))
    (number,) = db.execute(f"SELECT {tables}").fetchone()
    return int(number)


def note_page(
    db: sqlite3.Connection, job: str, page: int, now_ms: int, *, complete: bool, items: int, new: int
) -> None:
    if complete or items:
        db.execute(_ADD, (now_ms // DAY_MS * DAY_MS, job, min(page, MAX_PAGE), int(complete), items, new, 0))


def note_units(db: sqlite3.Connection, job: str, units: Mapping[int, int], now_ms: int) -> None:
    """`units` by page number."""
    day_ms = now_ms // DAY_MS * DAY_MS
    db.executemany(_ADD, [(day_ms, job, min(page, MAX_PAGE), 0, 0, 0, cost) for page, cost in units.items()])


def read_bought(db: sqlite3.Connection, since_ms: int) -> list[Bought]:
    sql = (
        "SELECT job, page, sum(pages), sum(items), sum(new), sum(units) FROM bought WHERE day_ms > ? - ?"
        " GROUP BY job, page ORDER BY job, page"
    )
    return [Bought(*row) for row in db.execute(sql, (since_ms, DAY_MS))]
