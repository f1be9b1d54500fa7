"""The commands that tell what happened: status, spend, log, explain; and reopen, which acts on it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import click

import quota
from quota.budget import Budget, project_of
from quota.cli.options import Options, apart, duration_ms, list_options, shared
from quota.cli.output import (
    fail,
    new_console,
    now_and_then,
    opened,
    output_lost,
    print_as,
    print_json,
    print_parts,
    render_parts,
    say,
    unprinted,
)
from quota.common.clock import host_clock, moment, rfc3339, stamp
from quota.common.log import line
from quota.common.redact import redact
from quota.common.text import listed, many, members, nearest, one_line, show
from quota.deciding.corrections import catch_up
from quota.deciding.history import whole_since_ms
from quota.errors import LedgerError, QuotaError
from quota.reports.refusal import explain_refusal, unreported
from quota.reports.runs import Bought, stands_out
from quota.reports.spending import (
    SPEND_FIELDS,
    KeptRefusal,
    Spending,
    explain_charge,
    read_charges,
    read_refusals,
    read_spending,
    refused_by,
)
from quota.reports.status import Status, all_jobs, read_status, unread_json
from quota.rules.entry import others_units
from quota.rules.spent import Spent
from quota.session import Session, budgets_of
from quota.wording import Line, Part, Table, charge_parts, jobs_alone, refusal_parts, status_parts

WATCH_S = 2

NEVER_KEPT = "; a call that can never fit is not kept"

TABLE_ROWS = 1_000
"""The most rows of a table; then another table begins."""

T = TypeVar("T")


@click.command()
@click.option("--watch", is_flag=True, help="Refresh every two seconds until Ctrl-C.")
@click.option(
    "--check", "checks", is_flag=True, help="Exit 75 if a credential admits no call, or none of its jobs could go on."
)
@shared(Options.clock, Options.format, Options.config)
def status(watch: bool, checks: bool, at: str | None, form: str, config: str | None) -> int:
    """Show whether calls are admitted and what each limit has left.

    OPEN: the cheapest call would be admitted now and, if you have jobs, a job could go on. FULL: a limit is used up
    until the time shown. CLOSED: upstream reported that its quota is used up. STOPPED: no job could run here, or the
    ledger accepts no charges. For each job it shows the machine, the next tick, and whether a run could go on now. If
    the ledger does not answer, it shows the jobs and the allowances, and exits with 69.

    \b
    Example:
      quota status
      quota status --check > /dev/null || echo "not now"
      quota status --json | jq '.credentials[].limits[].remaining_units'
      quota status --watch --json     # one line of JSON each time
      quota status --clock +6h        # if nobody charges until then
    """
    apart(watch=watch, check=checks)
    apart(watch=watch, clock=at)
    as_json = form == "json"
    if at is not None:
        from quota.cli.rehearsal import rehearsed

        with quota.open(config) as session, rehearsed(session, at, as_json=as_json, store=False) as copy:
            current, shown = _status_now(copy, as_json, here=False)
            return _print_status(current, {"rehearsal": True, **shown} if as_json else shown, form, checks)
    with opened(config, err=True) if as_json else quota.open(config) as session:
        if watch:
            _watch(session, as_json)
            return 0
        current, shown = _status_now(session, as_json, now_and_then() if sys.stderr.isatty() else None)
        return _print_status(current, shown, form, checks)


def _status_now(
    session: Session, as_json: bool, progress: Callable[[str], None] | None = None, *, here: bool = True
) -> tuple[Status | LedgerError, Any]:
    """The status, with its JSON or its parts; or why the ledger does not answer, with what is known nevertheless."""
    try:
        current = read_status(session, progress=progress, next_capacity=as_json, jobs=True, here=here)
    except LedgerError as error:
        if as_json:
            return error, unread_json(session, error)
        return error, [*jobs_alone(list(all_jobs(session, here=True)), host_clock())]
    return current, current.as_json() if as_json else [*status_parts(current)]


def _print_status(current: Status | LedgerError, shown: Any, form: str, checks: bool) -> int:
    """Print a status, or what is known without the ledger. Returns the exit status."""
    print_as(form, shown, parts=shown)
    if isinstance(current, LedgerError):
        raise current
    if not checks:
        return 0
    unprinted()
    return current.exit_status


def _watch(session: Session, as_json: bool) -> None:
    """Show the status again and again, until nobody reads it."""

    def parts() -> list[Part]:
        current, shown = _status_now(session, as_json=False)
        why = [Line(f"{stamp(host_clock())}: {current}")] if isinstance(current, LedgerError) else []
        return [*why, *shown]

    if as_json or not sys.stdout.isatty():
        while output_lost() is None:
            if as_json:
                print_json(_status_now(session, as_json)[1], indent=None)
            else:
                print_parts(parts())
            time.sleep(WATCH_S)
        return
    from rich.live import Live

    with Live(render_parts(parts()), console=new_console(), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(WATCH_S)
            live.update(render_parts(parts()), refresh=True)


@click.command()
@click.option("--by", metavar="FIELDS", help="Any of method,job,region,run,day,hour,bucket.  [default: method]")
@list_options(since="24h", limit=None)
@click.option("--bought", is_flag=True, help="Show what the units bought, by job and page number.")
@shared(Options.only_credential, Options.format_of_rows, Options.config)
def spend(
    *,
    by: str | None,
    since: str,
    limit: int | None,
    job: str | None,
    bought: bool,
    credential: str | None,
    form: str,
    config: str | None,
) -> None:
    """Show who spent the budget: charges and units, largest first.

    The ledger keeps 35 days of charges (up to 500,000) and of hourly refusal counts. If --since reaches further
    back, a line says where the charges begin.

    With --bought it shows, for each page number of a job, how many new entries this machine's runs stored, and what
    those pages cost. A line names the pages that yield little. This report begins at midnight UTC
    of the day on which --since begins.

    \b
    Example:
      quota spend --by job,region --since 2d
      quota spend --by run --job trending --format csv > spend.csv
      quota spend --bought --since 7d
      quota spend --by day --since 30d
    """
    apart(bought=bought, by=by)
    apart(bought=bought, credential=credential)
    fields = ["method"] if by is None else list(dict.fromkeys(field.strip() for field in by.split(",")))
    for field in fields:
        if field not in SPEND_FIELDS:
            raise click.UsageError(f"--by has no field {show(field)}; {nearest(field, SPEND_FIELDS)}")
    since_ms = duration_ms("--since", since)
    if bought:
        _show_bought(since, since_ms, job, limit, form, config)
        return
    with opened(config, err=form != "text") as session:
        budgets = budgets_of(session, credential)
        start_ms = max(0, session.ledger.now_ms() - since_ms)
        spending = read_spending(map(project_of, budgets), fields, start_ms, job=job, local=form == "text")
        others = 0 if job is not None else sum(map(_upstream_units, budgets))
        spending = spending._replace(most=limit, upstream_units=others)
        owed_units = sum(budget.owed_units() for budget in budgets)
    if print_as(form, spending.as_json(), spending.columns, spending.rows_json()):
        return
    cut = spending.since_ms > start_ms
    if spending.rows:
        print_parts([_spending_table(spending)])
    else:
        like = "" if job is None else "like that "
        when = f"since {moment(spending.since_ms)}" if cut else f"in the last {since}"
        say(f"nothing {like}was charged {when}{_hint(session, job)}")
    say(*_spending_notes(spending))
    if cut:
        say(_only_since(spending.since_ms, since))
    if spending.upstream_units:
        units = many(spending.upstream_units, "unit")
        see = "; see `quota reconcile`" if any(budget.book.monitoring is not None for budget in budgets) else ""
        say(f"not listed: {units} used by others, as upstream said{see}")
    _say_owed(owed_units)


def _say_owed(units: int) -> None:
    """Say what the ledger does not have yet."""
    if units:
        say(f"not listed: {many(units, 'unit')} that this machine drew without the ledger")


def _hint(session: Session, job: str | None, method: str | None = None) -> str:
    """What a job or method that nobody configured may mean. Scripts may charge for such a job or method."""
    jobs, books = session.settings.jobs, [c.book for c in session.settings.credentials.values()]
    if job is not None and jobs and job not in jobs:
        return f"; {nearest(job, jobs)}"
    if method and not any(book.canonical(method) in book.methods for book in books):
        return f"; {nearest(method, [name for book in books for name in book.methods])}"
    return ""


def _spending_table(spending: Spending) -> Table:
    """The most expensive row first. In a narrow terminal the fields of `by` share a column."""
    shown = spending.rows[: spending.most]
    rows = [(*[value or "-" for value in values], f"{charges:,}", f"{units:,}") for values, charges, units in shown]
    sums = (f"{spending.total_charges:,}", f"{spending.total_units:,}")
    fields = len(spending.by)
    return Table(
        spending.columns,
        rows,
        numbers=(fields, fields + 1),
        footer=("total", *[""] * (fields - 1), *sums),
        joined=range(fields),
    )


def _spending_notes(spending: Spending) -> Iterator[str]:
    """The lines below the table of a spending: the refused calls, and what the table does not show."""
    if spending.most is not None and (more := len(spending.rows) - spending.most) > 0:
        yield f"{many(more, 'more row')}; the total includes them"
    for refused, happened, see in (
        (spending.refused, "refused", "; see `quota log --refused`"),
        (spending.would_refuse, "would have been refused by a shadow limit", ""),
    ):
        if refused:
            calls = many(sum(refusal.calls for refusal in refused), "call")
            named = listed(f"{count:,} by {name}" for name, count in refused_by(refused).items())
            yield f"{calls} {happened}: {named}{see}"
    if spending.adds_buckets_up:
        apart = ",".join([*spending.by, "bucket"])
        yield f"units of several buckets are added up; `quota spend --by {apart}` shows them apart"


def _only_since(since_ms: int, since: str) -> str:
    """The line below charges that do not reach as far back as the user wants."""
    return f"only since {moment(since_ms)}, not {since}: the ledger has no older charges"


def _upstream_units(budget: Budget) -> int:
    """The units that only upstream has counted, in the limit that counts most of them now."""
    project, _ = project_of(budget), budget.usage()
    views = [limit.view for limit in budget.limits if limit.view.selector.count == "units"]
    return max((others_units(project.others(view)) for view in views), default=0)


def _show_bought(since: str, since_ms: int, job: str | None, limit: int | None, form: str, config: str | None) -> None:
    from importlib.metadata import entry_points

    start_ms = max(0, host_clock() - since_ms)
    with opened(config, err=form != "text") as session:
        rows = [row for point in entry_points(group="quota.bought") for row in point.load()(session, start_ms)]
    rows = [row for row in rows if job in (None, row.job)][:limit]
    in_json = [row._asdict() for row in rows]
    if print_as(form, {"since": rfc3339(start_ms), "bought": in_json}, Bought._fields, in_json):
        return
    if not rows:
        say(f"nothing was fetched in the last {since}")
        return
    headings = ("job", "page", "pages", "units", "items", "new", "new per unit")
    cells = [
        (
            row.job,
            f"{row.page}",
            *(f"{number:,}" for number in (row.pages, row.units, row.items, row.new)),
            f"{row.new / row.units:,.1f}" if row.units else "-",
        )
        for row in rows
    ]
    print_parts([Table(headings, cells, numbers=range(2, len(headings)))])
    say(*stands_out(rows))


# -- log: single charges, and single refusals --------------------------------------------------------------------------


@click.command()
@list_options(since="24h", limit=None)
@click.option("--method", metavar="M", help="Only calls of this API method.")
@click.option("--refused", is_flag=True, help="Show refused calls instead: the last 100 of a project.")
@shared(Options.only_credential, Options.format_of_lines, Options.config)
def log(
    *,
    since: str,
    limit: int | None,
    job: str | None,
    method: str | None,
    refused: bool,
    credential: str | None,
    form: str,
    config: str | None,
) -> None:
    """Show individual charges with their ids, newest last.

    --limit selects the newest charges. The ids are for `quota refund`, `quota settle` and `quota explain`. The ledger
    keeps 35 days, up to 500,000 charges.

    \b
    Example:
      quota log --since 1h --job trending
      quota log --method search.list --json | jq -r .id
      quota log --refused --limit 5
    """
    since_ms = duration_ms("--since", since)
    with opened(config, err=form != "text") as session:
        budgets = {budget.project: budget for budget in budgets_of(session, credential)}
        projects = [*map(project_of, budgets.values())]
        start_ms = max(0, session.ledger.now_ms() - since_ms)

        def is_wanted(project: str, of_job: str, of_method: str) -> bool:
            named = budgets[project].book.canonical
            return job in (None, of_job) and (method is None or named(method) == named(of_method))

        begin = None if limit is None else -limit
        refusals: list[KeptRefusal] = []
        if refused:
            whole_ms = 0
            kept = (refusal for project in projects for refusal in read_refusals(project))
            refusals = [row for row in kept if row.at_ms >= start_ms and is_wanted(row.project, row.job, row.method)]
            refusals.sort(key=lambda refusal: refusal.at_ms)
            printed = _print_rows(refusals[begin:], form, REFUSAL_FIELDS, _refusal_json, _refusals_table)
        else:
            whole_ms = max(map(whole_since_ms, projects))
            rows = read_charges(projects, start_ms)
            charges = [row for row in rows if is_wanted(row[0], row[2].job, row[2].method)]
            table = partial(_charges_table, several=len(projects) > 1)
            printed = _print_rows(charges[begin:], form, CHARGE_FIELDS, _charge_json, table)
        owed_units = 0 if refused else sum(budget.owed_units() for budget in budgets.values())
    if form != "text":
        return
    if not printed:
        like = "" if job is None is method else "like that "
        what, more = ("refused", NEVER_KEPT) if refused else ("charged", "")
        say(f"nothing {like}was {what} in the last {since}{more}{_hint(session, job, method)}")
    newest_ms = max((kept.at_ms for kept in refusals), default=start_ms)
    if refused and method is None and (unheard := unreported(session, credential, job, newest_ms)):
        say(f"not listed: {unheard}")
    if whole_ms > start_ms:
        say(_only_since(whole_ms, since))
    _say_owed(owed_units)


def _print_rows(
    rows: Sequence[T],
    form: str,
    fields: Sequence[str],
    in_json: Callable[[T], Mapping[str, Any]],
    table: Callable[[Sequence[T]], Table],
) -> int:
    """Print rows as CSV, as lines of JSON, or in tables, until nobody reads them. Returns the number of rows."""
    if form == "csv":
        print_as(form, None, fields, map(in_json, rows))
        return len(rows)
    for first in range(0, len(rows), TABLE_ROWS):
        if output_lost() is not None:
            break
        some = rows[first : first + TABLE_ROWS]
        if form == "json":
            for row in some:
                print_json(in_json(row), indent=None)
        else:
            print_parts([table(some)])
    return len(rows)


CHARGE_FIELDS = ("id", "at", "project", "method", "bucket", "units", "charged_units", "job", "region", "run")
REFUSAL_FIELDS = (
    *("at", "credential", "project", "method", "cost_units", "job", "region", "run", "machine", "reason"),
    *("refused_by", "retry_at", "why", "limits", "calls"),
)


def _charge_json(row: tuple[str, str, Spent]) -> dict[str, object]:
    project, call_id, charge = row
    fields = members(charge, "method bucket units charged_units job region run")
    return {"id": call_id, "at": rfc3339(charge.id[0]), "project": project, **fields}


def _refusal_json(refusal: KeptRefusal) -> dict[str, object]:
    return {**refusal.data, "calls": refusal.calls}


def _charges_table(charges: Sequence[tuple[str, str, Spent]], *, several: bool) -> Table:
    """Single charges, each with the id of its call; with what was charged if one was corrected, with their buckets if a
    call is charged to several buckets, and with their projects if there are `several`."""
    corrected = any(charge.units != charge.charged_units for _, _, charge in charges)
    has_parts = any("+" in call_id for _, call_id, _ in charges)
    rows = [
        (
            stamp(charge.id[0]),
            call_id,
            f"{charge.units:,}",
            f"{charge.charged_units:,}" if corrected else "",
            charge.method,
            charge.bucket if has_parts else "",
            project if several else "",
            charge.job or "-",
            charge.region or "-",
            charge.run or "-",
        )
        for project, call_id, charge in charges
    ]
    return Table(
        ("time", "id", "units", "charged", "method", "bucket", "project", "job", "region", "run"),
        rows,
        numbers=(2, 3),
        whole=(1,),
        joined=range(4, 10),
        without=(0, 3, 4, 2),
    )


def _refusals_table(refusals: Sequence[KeptRefusal]) -> Table:
    """Refusals, each in a row. For several calls that were charged together, the row has the method of the first call,
    the number of the others, and the units of all calls."""
    rows = [
        (
            stamp(refusal.at_ms),
            refusal.method if refusal.calls == 1 else f"{refusal.method} +{refusal.calls - 1:,}",
            f"{refusal.cost_units:,}",
            refusal.job or "-",
            refusal.region or "-",
            refusal.run or "-",
            refusal.refused_by or "-",
            refusal.reason,
            "-" if refusal.retry_at_ms is None else moment(refusal.retry_at_ms),
        )
        for refusal in refusals
    ]
    headings = ("time", "method", "units", "job", "region", "run", "refused by", "reason", "next")
    return Table(headings, rows, numbers=(2,), joined=(3, 4, 5), without=(2, 7))


@click.command()
@click.argument("charge_id", metavar="[ID]", required=False)
@click.option("--last", is_flag=True, hidden=True)  # what it does without ID: other programs call it so
@shared(Options.only_job, Options.only_credential, Options.format, Options.config)
def explain(
    charge_id: str | None, last: bool, job: str | None, credential: str | None, form: str, config: str | None
) -> None:
    """Explain the last refusal, or the charge with this ID.

    For a refusal, show which limit decided, what fills it, when it has room again, and which change would have admitted
    the call.
    For a charge, show who made it, its corrections, each limit before and after it, and when it stops counting.

    It charges nothing. The ledger keeps the last 100 refusals of a project, and 35 days of charges, up to 500,000. If
    the ledger has no such refusal or charge, the exit status is 1. If a newer refusal of this machine never reached the
    ledger, a line on stderr names the refused run. If `quota charge` is refused because the ledger did not answer,
    nothing is recorded.

    \b
    Example:
      quota explain
      quota explain --job backfill
      quota explain $(quota log --json | tail -n 1 | jq -r .id)
      quota explain --json | jq '.admits'
    """
    if charge_id is not None and (last or job is not None):
        raise click.UsageError(
            f"ID explains a charge, and {'--last' if job is None else '--job'} a refusal; leave one out"
        )
    with opened(config, err=form == "json") as session:
        if charge_id is not None:
            charge = explain_charge(session, charge_id, credential)
            data, parts = charge.as_json(), charge_parts(charge)
        else:
            refusal = explain_refusal(session, credential, job)
            unheard = unreported(session, credential, job, 0 if refusal is None else refusal.kept.at_ms)
            if refusal is None:
                of = "" if job is None else f" of job {show(job)}"
                late = f"a process reports a refusal within 10 s, or when it ends{NEVER_KEPT}"
                raise QuotaError(unheard or f"the ledger has no refused call{of}; {late}{_hint(session, job)}")
            if unheard:
                fail(f"{unheard}; the last refusal that the ledger has:")
            data, parts = refusal.as_json(), refusal_parts(refusal)
    print_as(form, data, parts=parts)


@click.command()
@click.argument("bucket")
@click.option("--because", required=True, metavar="TEXT", help="Why upstream will admit calls again.")
@shared(Options.dry_run, Options.credential, Options.config)
def reopen(bucket: str, because: str, dry_run: bool, credential: str | None, config: str | None) -> None:
    """Open a bucket that upstream reported as used up. Its limits still apply, and units used by others stay counted.

    `quota status` shows the text of --because until upstream closes the bucket again. If the bucket is not closed, the
    exit status is 1.

    \b
    Example:
      quota reopen units --because "quota raised to 50,000 today"
    """
    import logging

    reason = one_line(redact(because)).strip()
    if not reason:
        raise click.UsageError("--because needs a reason")
    with opened(config, err=False) as session:
        project = session.project(credential)
        catch_up(project)  # the ledger may have just lost the exhaustion
        closed = [fact.bucket for fact in project.state.facts().exhaustions if not fact.reopened_ms]
        lifted = bucket in closed if dry_run else project.state.reopen(bucket, reason)
    if not lifted:
        raise QuotaError(
            f"bucket {show(bucket)} of project {project.name!r} is not closed; closed: {', '.join(closed) or 'none'}"
        )
    if dry_run:
        say(f"bucket {bucket} of project {project.name} would no longer be closed: {reason}")
        return
    reopened = line("bucket_reopened", project=project.name, bucket=bucket, because=reason)
    logging.getLogger("quota").info("%s", reopened)
    say(f"bucket {bucket} of project {project.name} is no longer closed: {reason}")
    unprinted("the bucket is no longer closed")
