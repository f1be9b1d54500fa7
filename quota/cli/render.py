"""Renders the output of `status`, `spend` and `log` as tables and lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from quota.cli.tables import Column, FirstThatFits, line, stacked, tables
from quota.common.clock import moment, second
from quota.common.text import listed, many, spell
from quota.decision import Decision, enforced
from quota.reports.spending import Bought, KeptRefusal, Spending, refused_by
from quota.rules.spent import Spent
from quota.settings.model import BUILT_IN_NOTICE
from quota.wording.of_status import clock, closed, early_of, notes_of
from quota.wording.parts import Part, Table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from quota.common.findings import Finding
    from quota.reports.status import CredentialRow, Status


def render_status(status: Status) -> RenderableType:
    """Render a status: a headline, a table of limits and warnings for each credential."""
    where = "shared by every machine that reaches it" if status.shared else "shared by this machine only"
    parts: list[RenderableType] = [line(BUILT_IN_NOTICE, "yellow")] if status.built_in else []
    parts += [line(f"ledger {status.ledger}, {where}")]
    for credential in status.credentials:
        parts.append(line(""))
        shared = f", one budget with {', '.join(credential.shared_with)}" if credential.shared_with else ""
        parts.append(line(f"{credential.name}: project {credential.project}, {credential.api}{shared}", "bold"))
        parts.append(line(_verdict(credential, status.at_ms), "bold green" if credential.open else "bold red"))
        parts += _told(early_of(credential))
        parts.append(_limit_table(credential, status.at_ms))
        for edge_ms, zone in dict.fromkeys((row.resets_ms, row.zone) for row in credential.limits):
            if edge_ms is not None:
                at, soon = clock(edge_ms, zone), spell(edge_ms - status.at_ms)
                parts.append(line(f"upstream resets {at} {zone} ({clock(edge_ms)} here), in {soon}"))
        parts += _told(notes_of(credential, status.at_ms))
    return stacked(parts)


def _limit_table(credential: CredentialRow, at_ms: int) -> RenderableType:
    paced = any(row.limit.paced for row in credential.limits)
    again = any(row.room_ms is not None for row in credential.limits)  # a limit with room has no such time
    columns = [Column("limit"), Column("window"), Column("used", number=True)]
    columns += [Column("now", number=True)] if paced else []
    columns += [Column("limit", number=True), Column("remaining", number=True)]
    columns += [Column("room again")] if again else []
    rows, styles = [], []
    for row in credential.limits:
        state = row.state
        styles.append(_LEVEL_OF_LIMIT[row.level])
        rows.append(
            (
                row.limit.name,
                row.limit.view.window.name,
                f"{state.used_units:,}",
                *([f"{state.limit_units:,}"] if paced else []),
                f"{row.enforced_units:,}",
                f"{state.remaining_units:,}",
                *([] if not again else ["" if row.room_ms is None else f"in {spell(row.room_ms - at_ms)}"]),
            )
        )
    # On a narrow terminal, leave out the window (the name implies it) and the limit (it is used plus remaining).
    return FirstThatFits(tables(columns, rows, styles=styles, without=(1, 4 if paced else 3)))


_LEVEL_OF_LIMIT = {"full": "red", "near": "yellow", "open": ""}


def render_spending(spending: Spending) -> RenderableType:
    """Render one table, the most expensive row first. If it is too wide, the fields it sums by share one column."""
    counts = [Column("charges", number=True), Column("units", number=True)]
    columns = [*(Column(f"{field} (UTC)" if field in ("hour", "day") else field) for field in spending.by), *counts]
    rows = []
    for values, charges, units in spending.rows:
        named = (  # an hour is `2026-11-21T10:00:00.000Z`, and shown as `2026-11-21 10:00`
            f"{value[:10]} {value[11:16]}" if field == "hour" else value or "-"
            for field, value in zip(spending.by, values, strict=True)
        )
        rows.append((*named, f"{charges:,}", f"{units:,}"))
    total = ("total", *[""] * (len(spending.by) - 1), f"{sum(row[1] for row in spending.rows):,}")
    total += (f"{spending.total_units:,}",)
    together = [Column(" ".join(column.heading for column in columns[:-2])), *counts]
    joined = [(" ".join(row[:-2]), *row[-2:]) for row in rows]
    narrow = tables(together, joined, footer=("total", *total[-2:]))
    return FirstThatFits(chain(tables(columns, rows, footer=total), narrow))


def render_bought(bought: Sequence[Bought]) -> RenderableType:
    """Render what the pages of each job brought, by their number."""
    numbers = ("pages", "units", "items", "new", "new per unit")
    columns = [Column("job"), Column("page"), *(Column(name, number=True) for name in numbers)]
    rows = [
        (one.job, f"{one.page}", f"{one.pages:,}", f"{one.units:,}", f"{one.items:,}", f"{one.new:,}", _per_unit(one))
        for one in bought
    ]
    return FirstThatFits(tables(columns, rows))


def _per_unit(one: Bought) -> str:
    return f"{one.new / one.units:,.1f}" if one.units else "-"


def spending_notes(spending: Spending) -> Iterator[str]:
    """The lines below the table of a spending: what was refused meanwhile, and what the table cannot tell."""
    for refused, said, see in (
        (spending.refused, "refused", "; see `quota log --refused`"),
        (spending.would_refuse, "left that a shadow limit would have refused", ""),
    ):
        if refused:
            calls = many(sum(one.calls for one in refused), "call")
            named = listed(f"{count:,} by {name}" for name, count in refused_by(refused).items())
            yield f"{calls} {said}: {named}{see}"
    if spending.adds_buckets_up:
        apart = ",".join([*spending.by, "bucket"])
        yield f"units of several buckets are added up; `quota spend --by {apart}` tells them apart"


def render_charges(charges: Sequence[tuple[str, str, Spent]], *, projects: bool) -> RenderableType:
    """Render single charges, each with its project and the id of its call, which begins its key with the run. Where the
    columns are too wide, they fold, and some are left out: the region first."""
    corrected = any(charge.units != charge.charged_units for _, _, charge in charges)
    columns = [Column("time"), Column("id", whole=True), Column("units", number=True)]
    columns += [Column("charged", number=True)] if corrected else []
    columns += [*map(Column, ["method", "job", "region"]), *([Column("project")] if projects else [])]
    rows = [
        [
            second(charge.id[0]),
            call_id,
            f"{charge.units:,}",
            *([f"{charge.charged_units:,}" if charge.units != charge.charged_units else ""] if corrected else []),
            charge.method,
            charge.job or "-",
            charge.region or "-",
            *([project] if projects else []),
        ]
        for project, call_id, charge in charges
    ]
    names = [column.heading for column in columns]
    narrow = ("region", "job", "project", "method", "charged", "time", "units")
    return FirstThatFits(tables(columns, rows, without=[names.index(name) for name in narrow if name in names]))


def render_refusals(refusals: Sequence[KeptRefusal]) -> RenderableType:
    """Render refusals, one a row. Of several calls together it has the first one's method, how many more they are, and
    the units of all."""
    columns = [Column("time"), Column("method"), Column("units", number=True)]
    columns += map(Column, ["job", "region", "refused by", "reason", "next"])
    rows = [
        [
            second(one.at_ms),
            one.method if one.calls == 1 else f"{one.method} +{one.calls - 1:,}",
            f"{one.cost_units:,}",
            one.job or "-",
            one.region or "-",
            one.refused_by or "-",
            one.reason,
            "-" if one.retry_at_ms is None else moment(one.retry_at_ms, one.at_ms),
        ]
        for one in refusals
    ]
    return FirstThatFits(tables(columns, rows, without=[6, 2]))


# -- the lines of a status ---------------------------------------------------------------------------------------------


def told(parts: Iterable[Part]) -> RenderableType:
    """Render lines and tables."""
    return stacked(_told(parts))


def _told(parts: Iterable[Part]) -> list[RenderableType]:
    return [_table(one) if isinstance(one, Table) else line(one.text, _TONE_STYLE[one.tone]) for one in parts]


def _table(table: Table) -> RenderableType:
    columns = [Column(heading, n in table.numbers) for n, heading in enumerate(table.headings)]
    styles = ["red" if n in table.bad else "" for n in range(len(table.rows))]
    return FirstThatFits(tables(columns, table.rows, styles=styles, footer=table.footer, without=table.without))


_TONE_STYLE = {"": "", "strong": "bold", "note": "yellow", "bad": "red", "verdict": "bold red"}


def _verdict(credential: CredentialRow, at_ms: int) -> str:
    """The headline of a credential: whether calls may leave now, and if not, why and until when."""
    outlook = credential.outlook
    if outlook.closed is not None:
        later_ms = outlook.next_ms if outlook.then_full else None
        then = "" if later_ms is None else f"; then full until {moment(later_ms, at_ms)}"
        return f"{closed(outlook.closed, at_ms).replace('closed', 'CLOSED', 1)}{then}"
    if outlook.full is not None:
        until = "" if outlook.next_ms is None else f" until {moment(outlook.next_ms, at_ms)}"
        return f"FULL{until}: {outlook.full.why()}"
    left = credential.remaining_units
    units = "no limit counts its units" if left is None else many(left, "unit")
    return f"OPEN: {units}{_calls_left(outlook.dearest, left or 0, at_ms)}"


def _calls_left(dearest: Decision | None, units: int, at_ms: int) -> str:
    """` = 94 searches`: how many calls of the most expensive method of the credential's jobs the units allow."""
    if dearest is None:
        return ""
    resource = dearest.method.partition(".")[0]
    if not dearest.admitted:
        until = "" if dearest.retry_at_ms is None else f" until {moment(dearest.retry_at_ms, at_ms)}"
        return f", no {'searches' if resource == 'search' else dearest.method}{until}"
    left = min((state.remaining_units // state.cost_units for state in enforced(dearest.limits)), default=units)
    if left == units:
        return ""  # a unit a call
    calls = many(left, "search") if resource == "search" else f"{many(left, 'call')} of {dearest.method}"
    return f"{' =' if left == units // dearest.cost_units else ','} {calls}"


# -- doctor ------------------------------------------------------------------------------------------------------------

_LEVEL_STYLE = {"error": "bold red", "warning": "yellow", "ok": "green"}


def render_findings(findings: Sequence[Finding]) -> RenderableType:
    """Render findings: one paragraph each, with its remedy on a line of its own, and the sum at the end."""
    from rich.padding import Padding
    from rich.text import Text

    parts: list[RenderableType] = []
    for finding in findings:
        head = Text(f"{finding.level:<8}", _LEVEL_STYLE[finding.level])
        parts.append(Text.assemble(head, (finding.location, "bold")))
        parts.append(Padding(line(finding.message), (0, 0, 0, 8)))
        if finding.remedy:
            parts.append(Padding(line(f"-> {finding.remedy}"), (0, 0, 0, 8)))
    levels = [finding.level for finding in findings]
    errors, warnings = (many(levels.count(level), level) for level in ("error", "warning"))
    parts.append(line(f"{errors}, {warnings}, {levels.count('ok')} ok", "bold"))
    return stacked(parts)
