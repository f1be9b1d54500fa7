"""How status and spend look."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quota.cli.tables import Column, FirstThatFits, tables
from quota.common.clock import utc
from quota.common.text import spell
from quota.settings.load import BUILT_IN_NOTICE
from quota.status import CredentialRow, LimitRow, Spending, Status, _closed, _line, _verdict, moment, weekday

if TYPE_CHECKING:
    from rich.console import RenderableType


# -- how it looks ------------------------------------------------------------------------------------------------------


def render_status(status: Status) -> RenderableType:
    """A table for each credential."""
    from rich.console import Group

    where = "shared by every machine that reaches it" if status.shared else "shared by this machine only"
    parts: list[RenderableType] = [_line(BUILT_IN_NOTICE, "yellow")] if status.built_in else []
    parts += [_line(f"ledger {status.ledger}, {where}")]
    for credential in status.credentials:
        parts.append(_line(""))
        shared = f", one budget with {', '.join(credential.shared_with)}" if credential.shared_with else ""
        parts.append(_line(f"{credential.name}: project {credential.project}, {credential.api}{shared}", "bold"))
        parts.append(_line(_verdict(credential, status.at_ms), "bold green" if credential.open else "bold red"))
        parts.append(_limit_table(credential, status.at_ms))
        for zone, edge_ms in {(row.zone, row.resets_ms): None for row in credential.limits}:
            if edge_ms is None:
                continue
            soon = spell(edge_ms - status.at_ms)
            parts.append(_line(f"upstream resets {_clock(edge_ms, zone)} {zone} ({_clock(edge_ms)} here), in {soon}"))
        for row in credential.limits:
            if row.state.unlogged_units:
                parts.append(_line(_carried(row), "yellow"))
        for row in credential.limits:
            if row.exact_from_ms is not None:
                since, exact = weekday(row.counts_since_ms), weekday(row.exact_from_ms)
                parts.append(_line(f"{row.limit.name}: counts since {since}, exact from {exact}", "yellow"))
        if credential.owed_units:
            line = f"{credential.owed_units} units drawn without the ledger are owed; the next charge repays them"
            parts.append(_line(line, "yellow"))
        for x in credential.exhausted:
            if x.reopened_ms:
                at = moment(x.reopened_ms, status.at_ms)
                parts.append(_line(f'bucket {x.bucket} was reopened at {at}: {x.reopened_because} ("{x.evidence}")'))
            elif x != credential.outlook.closed:
                parts.append(_line(f"bucket {x.bucket} is {_closed(x, status.at_ms)}", "red"))
    return Group(*parts)


def _carried(row: LimitRow) -> str:
    state = row.state
    until = _clock(state.unlogged_until_ms)
    return f"{row.limit.name}: {state.unlogged_units:,} units are of charges that the ledger lost, until {until}"


def _limit_table(credential: CredentialRow, at_ms: int) -> RenderableType:
    paced = any(row.limit.paced for row in credential.limits)
    columns = [Column("limit"), Column("window"), Column("used", number=True)]
    columns += [Column("now", number=True)] if paced else []
    columns += [Column("limit", number=True), Column("remaining", number=True)]
    again = any(row.room_ms is not None for row in credential.limits)  # of a limit with room nobody waits for more
    columns += [Column("room again")] if again else []
    rows, styles = [], []
    for row in credential.limits:
        state = row.state
        styles.append(
            "red"
            if row.shut or row.room_ms is not None
            else "yellow"
            if state.remaining_units * 10 < state.limit_units
            else ""
        )
        rows.append(
            (
                row.limit.name,
                row.limit.view.window.name,
                f"{state.used_units:,}",
                *([f"{state.limit_units:,}"] if paced else []),
                f"{row.limit.limit_units:,}",
                f"{state.remaining_units:,}",
                *([] if not again else ["" if row.room_ms is None else f"in {spell(row.room_ms - at_ms)}"]),
            )
        )
    # Of little width the name has to stand for the window, and what is used and remains for the limit's number.
    return FirstThatFits(tables(columns, rows, styles=styles, without=(1, 4 if paced else 3)))


def render_spending(spending: Spending) -> RenderableType:
    """One table, dearest first. Where it is too wide, what it is summed by shares one column."""
    counts = [Column("charges", number=True), Column("units", number=True)]
    columns = [*(Column("hour (UTC)" if field == "hour" else field) for field in spending.by), *counts]
    rows = []
    for values, charges, units in spending.rows:
        named = (
            _short_hour(value) if field == "hour" else value or "-"
            for field, value in zip(spending.by, values, strict=True)
        )
        rows.append((*named, f"{charges:,}", f"{units:,}"))
    total = ("total", *[""] * (len(spending.by) - 1), f"{sum(row[1] for row in spending.rows):,}")
    total += (f"{spending.total_units:,}",)
    together = [Column(" ".join(column.heading for column in columns[:-2])), *counts]
    joined = [(" ".join(row[:-2]), *row[-2:]) for row in rows]
    return FirstThatFits(
        [
            *tables(columns, rows, footer=total),
            *tables(together, joined, footer=("total", *total[-2:])),
        ]
    )


def _short_hour(rfc3339_text: str) -> str:
    """`2026-11-21T10:00:00.000Z` -> `2026-11-21 10:00`"""
    return f"{rfc3339_text[:10]} {rfc3339_text[11:16]}"


def _clock(at_ms: int, zone: str | None = None) -> str:
    """`Sun 09:00`, in the named zone or the local one."""
    from zoneinfo import ZoneInfo

    return utc(at_ms).astimezone(ZoneInfo(zone) if zone else None).strftime("%a %H:%M")
