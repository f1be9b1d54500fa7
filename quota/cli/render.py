"""The tables and lines that `status`, `spend`, `log` and `explain` print for people."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from quota.cli.output import (
    Column,
    FirstThatFits,
    line,
    output_lost,
    print_csv,
    print_json,
    print_rich,
    say,
    stacked,
    tables,
)
from quota.common.clock import moment, rfc3339
from quota.common.text import listed, many, members, spell
from quota.deciding.history import whole_since_ms
from quota.deciding.project import Project
from quota.decision import Decision, enforced
from quota.reports.runs import Bought
from quota.reports.spending import KeptRefusal, Spending, read_charges, read_refusals, refused_by
from quota.rules.spent import Spent
from quota.settings.model import BUILT_IN_NOTICE
from quota.terms.costs import CostBook
from quota.wording import Part, Table, closed, early_of, jobs_of, notes_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from quota.reports.status import CredentialRow, Status

TABLE_ROWS = 1_000
"""The most rows of a table; then another table begins."""

_LEVEL_STYLE = {"full": "red", "near": "yellow", "open": ""}
_TONE_STYLE = {"": "", "strong": "bold", "note": "yellow", "bad": "red", "verdict": "bold red"}


def render_parts(parts: Iterable[Part]) -> RenderableType:
    """Render lines and tables."""
    return stacked(_drawn(parts))


def _drawn(parts: Iterable[Part]) -> list[RenderableType]:
    return [_table(part) if isinstance(part, Table) else line(part.text, _TONE_STYLE[part.tone]) for part in parts]


def _table(table: Table) -> RenderableType:
    columns = [Column(heading, n in table.numbers) for n, heading in enumerate(table.headings)]
    styles = ["red" if n in table.bad else "" for n in range(len(table.rows))]
    return FirstThatFits(tables(columns, table.rows, styles=styles, footer=table.footer, without=table.without))


# -- status ------------------------------------------------------------------------------------------------------------


def render_status(status: Status) -> RenderableType:
    """Render a status: a headline, a table of limits and warnings for each credential."""
    where = "shared by every machine that reaches it" if status.shared else "shared by this machine only"
    parts: list[RenderableType] = [line(BUILT_IN_NOTICE, "yellow")] if status.built_in else []
    parts += [line(f"ledger {status.ledger}, {where}")]
    for credential in status.credentials:
        parts.append(line(""))
        settings = credential.settings
        shared = f", one budget with {', '.join(credential.shared_with)}" if credential.shared_with else ""
        parts.append(line(f"{settings.name}: project {settings.project}, {settings.api}{shared}", "bold"))
        parts.append(line(_verdict(credential), "bold green" if credential.open else "bold red"))
        parts += _drawn(early_of(credential))
        parts.append(_limit_table(credential, status.at_ms))
        for edge_ms, zone in dict.fromkeys((row.resets_ms, row.zone) for row in credential.limits):
            if edge_ms is not None:
                at, soon = moment(edge_ms, zone), spell(edge_ms - status.at_ms)
                parts.append(line(f"upstream resets {at}, in {soon}"))
        parts += _drawn(jobs_of(credential))
        parts += _drawn(notes_of(credential))
    return stacked(parts)


def _verdict(credential: CredentialRow) -> str:
    """The headline of a credential: whether calls may leave now, and if not, why and until when."""
    outlook = credential.outlook
    if outlook.closed is not None:
        later_ms = outlook.next_ms if outlook.then_full else None
        then = "" if later_ms is None else f"; then full until {moment(later_ms)}"
        return f"{closed(outlook.closed).replace('closed', 'CLOSED', 1)}{then}"
    if outlook.full is not None:
        until = "" if outlook.next_ms is None else f" until {moment(outlook.next_ms)}"
        return f"FULL{until}: {outlook.full.why()}"
    left, stopped = credential.remaining_units, credential.stopped
    if stopped is not None:
        until = "" if stopped.retry_ms is None else f" until {moment(stopped.retry_ms)}"
        other = "" if left is None else f"; calls of no job have {many(left, 'unit')}"
        word = "CLOSED" if stopped.refusal is not None and stopped.refusal.reason in ("exhausted", "closed") else "FULL"
        return f"{word} for its jobs{until}: job {stopped.job}: {stopped.why}{other}"
    units = "no limit counts its units" if left is None else many(left, "unit")
    return f"OPEN: {units}{_calls_left(outlook.dearest, left or 0)}"


def _calls_left(dearest: Decision | None, units: int) -> str:
    """` = 94 searches`: how many calls of the most expensive method of the credential's jobs the units allow."""
    if dearest is None:
        return ""
    resource = dearest.method.partition(".")[0]
    if not dearest.admitted:
        until = "" if dearest.retry_at_ms is None else f" until {moment(dearest.retry_at_ms)}"
        return f", no {'searches' if resource == 'search' else dearest.method}{until}"
    left = min((state.remaining_units // state.cost_units for state in enforced(dearest.limits)), default=units)
    if left == units:
        return ""  # a unit a call
    calls = many(left, "search") if resource == "search" else f"{many(left, 'call')} of {dearest.method}"
    return f"{' =' if left == units // dearest.cost_units else ','} {calls}"


def _limit_table(credential: CredentialRow, at_ms: int) -> RenderableType:
    columns = [Column("limit"), Column("window"), Column("used", number=True), Column("now", number=True)]
    columns += [Column("limit", number=True), Column("remaining", number=True), Column("room again")]
    hidden = [] if any(row.limit.paced for row in credential.limits) else [3]
    if all(row.room_ms is None for row in credential.limits):  # a limit with room has no such time
        hidden.append(6)
    rows, styles = [], []
    for row in credential.limits:
        state = row.state
        styles.append(_LEVEL_STYLE[row.level])
        rows.append(
            (
                row.limit.name,
                row.limit.view.window.name,
                f"{state.used_units:,}",
                f"{state.limit_units:,}",
                f"{row.enforced_units:,}",
                f"{state.remaining_units:,}",
                "" if row.room_ms is None else f"in {spell(row.room_ms - at_ms)}",
            )
        )
    # On a narrow terminal, leave out the window (the name implies it) and the limit (it is used plus remaining).
    return FirstThatFits(tables(columns, rows, styles=styles, hidden=hidden, without=(1, 4)))


# -- spend -------------------------------------------------------------------------------------------------------------


def render_spending(spending: Spending) -> RenderableType:
    """Render one table, the most expensive row first. If it is too wide, the fields of `by` share one column."""
    counts = [Column("charges", number=True), Column("units", number=True)]
    columns = [*map(Column, spending.by), *counts]
    rows = []
    for values, charges, units in spending.rows[: spending.most]:
        rows.append((*(value or "-" for value in values), f"{charges:,}", f"{units:,}"))
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
        (
            row.job,
            f"{row.page}",
            *(f"{number:,}" for number in (row.pages, row.units, row.items, row.new)),
            f"{row.new / row.units:,.1f}" if row.units else "-",
        )
        for row in bought
    ]
    return FirstThatFits(tables(columns, rows))


def spending_notes(spending: Spending) -> Iterator[str]:
    """The lines below the table of a spending: the refused calls, and what the table does not show."""
    if spending.most is not None and (more := len(spending.rows) - spending.most) > 0:
        yield f"{many(more, 'more row')}; the total includes them"
    for refused, happened, see in (
        (spending.refused, "refused", "; see `quota log --refused`"),
        (spending.would_refuse, "left that a shadow limit would have refused", ""),
    ):
        if refused:
            calls = many(sum(refusal.calls for refusal in refused), "call")
            named = listed(f"{count:,} by {name}" for name, count in refused_by(refused).items())
            yield f"{calls} {happened}: {named}{see}"
    if spending.adds_buckets_up:
        apart = ",".join([*spending.by, "bucket"])
        yield f"units of several buckets are added up; `quota spend --by {apart}` shows them apart"


# -- log: single charges, and single refusals --------------------------------------------------------------------------


class Wanted(NamedTuple):
    """Which rows `log` shows: of these projects, each with its cost book; since `start_ms`, which the user wrote as
    `since`; of one job or method, if the user names it; and the newest `limit` of them."""

    books: Mapping[str, CostBook]
    since: str
    start_ms: int
    job: str | None
    method: str | None
    limit: int | None

    def has(self, project: str, job: str, method: str) -> bool:
        named = self.books[project].canonical
        return self.job in (None, job) and (self.method is None or named(self.method) == named(method))

    def nothing(self, done: str) -> str:
        like = "" if self.job is None is self.method else "like that "
        return f"nothing {like}was {done} in the last {self.since}"


def print_charges(projects: Sequence[Project], wanted: Wanted, *, as_json: bool, as_csv: bool) -> None:
    """The charges, oldest first."""
    start_ms = wanted.start_ms
    since_ms = max(map(whole_since_ms, projects))
    charges = iter([row for row in read_charges(projects, start_ms) if wanted.has(row[0], row[2].job, row[2].method)])
    if wanted.limit is not None:
        charges = iter(deque(charges, wanted.limit))
    if as_csv:
        print_csv(CHARGE_FIELDS, (_charge_json(*row) for row in charges))
        return
    nothing = True
    while output_lost() is None and (rows := list(islice(charges, TABLE_ROWS))):
        nothing = False
        if as_json:
            for row in rows:
                print_json(_charge_json(*row), indent=None)
        else:
            print_rich(_charges_table(rows, projects=len(projects) > 1))
    if as_json:
        return
    if nothing:
        say(wanted.nothing("charged"))
    if since_ms > start_ms:
        say(only_since(since_ms, wanted.since))


def only_since(since_ms: int, since: str) -> str:
    """The line below charges that do not reach as far back as the user wants."""
    return f"only since {moment(since_ms)}, not {since}: the ledger has dropped older charges"


def print_refusals(projects: Sequence[Project], wanted: Wanted, *, as_json: bool, as_csv: bool) -> None:
    """The last refusals, oldest first."""
    kept = (refusal for project in projects for refusal in read_refusals(project))
    refusals = [x for x in kept if x.at_ms >= wanted.start_ms and wanted.has(x.project, x.job, x.method)]
    refusals.sort(key=lambda refusal: refusal.at_ms)
    refusals = refusals[-(wanted.limit or 0) :]
    if as_csv:
        print_csv([*REFUSAL_FIELDS, "calls"], ({**refusal.data, "calls": refusal.calls} for refusal in refusals))
    elif as_json:
        for refusal in refusals:
            print_json({**refusal.data, "calls": refusal.calls}, indent=None)
    elif refusals:
        print_rich(_refusals_table(refusals))
    else:
        say(wanted.nothing("refused"))


CHARGE_FIELDS = ("id", "at", "project", "method", "bucket", "units", "charged_units", "job", "region", "run")
REFUSAL_FIELDS = [
    *("at", "credential", "project", "method", "cost_units", "job", "region", "run", "machine", "reason"),
    *("refused_by", "retry_at", "why", "limits"),
]


def _charge_json(project: str, call_id: str, charge: Spent) -> dict[str, object]:
    return {
        "id": call_id,
        "at": rfc3339(charge.id[0]),
        "project": project,
        **members(charge, "method bucket units charged_units job region run"),
    }


def _charges_table(charges: Sequence[tuple[str, str, Spent]], *, projects: bool) -> RenderableType:
    """Render single charges, each with its project and the id of its call. If the columns are too wide, they fold, and
    then some of them go: the region first."""
    columns = [Column("time"), Column("id", whole=True), Column("units", number=True), Column("charged", number=True)]
    columns += map(Column, ["method", "job", "region", "project"])
    rows = [
        [
            moment(charge.id[0]),
            call_id,
            f"{charge.units:,}",
            f"{charge.charged_units:,}" if charge.units != charge.charged_units else "",
            charge.method,
            charge.job or "-",
            charge.region or "-",
            project,
        ]
        for project, call_id, charge in charges
    ]
    hidden = [3] if all(charge.units == charge.charged_units for _, _, charge in charges) else []
    hidden += [] if projects else [7]
    return FirstThatFits(tables(columns, rows, hidden=hidden, without=(6, 5, 7, 4, 3, 0, 2)))


def _refusals_table(refusals: Sequence[KeptRefusal]) -> RenderableType:
    """Render refusals, each in a row. For several calls that were charged together, the row has the method of the first
    call, the number of the others, and the units of all calls."""
    columns = [Column("time"), Column("method"), Column("units", number=True)]
    columns += map(Column, ["job", "region", "refused by", "reason", "next"])
    rows = [
        [
            moment(refusal.at_ms),
            refusal.method if refusal.calls == 1 else f"{refusal.method} +{refusal.calls - 1:,}",
            f"{refusal.cost_units:,}",
            refusal.job or "-",
            refusal.region or "-",
            refusal.refused_by or "-",
            refusal.reason,
            "-" if refusal.retry_at_ms is None else moment(refusal.retry_at_ms),
        ]
        for refusal in refusals
    ]
    return FirstThatFits(tables(columns, rows, without=[2, 6]))
