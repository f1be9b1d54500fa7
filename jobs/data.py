"""The commands about the local store and the places of the jobs: runs, search, tables, export, place."""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from typing import IO, TYPE_CHECKING, Any

import click

import quota
from quota.budget import project_of
from quota.cli.options import FETCHED_SINCE, PATH, Group, Options, list_options, shared, since_ms_of
from quota.cli.output import confirmed, json_text, print_as, print_parts, say, unwound
from quota.common.clock import host_clock, stamp
from quota.common.text import csv_writer, listed, many, members, nearest, one_line, printable, shorten, show, spell
from quota.jobs.progress import named
from quota.jobs.tick import configured
from quota.session import budgets_of
from quota.terms.limits import MINUTE_MS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from quota import Session
    from quota.jobs.job import Away
    from quota.jobs.store.checkpoints import Checkpoint
    from quota.jobs.store.reader import SearchResult
    from quota.jobs.store.store import Store
    from quota.reports.runs import Run
    from quota.settings.model import JobSettings
    from quota.wording import Table

NAMED_REGIONS = 3
"""The most regions of a run that a table names."""

MAX_WHY = 60
"""The most characters of a run's reason in a table on a terminal."""


@click.command("runs")
@list_options(since="7d", limit=50, most=10_000)
@shared(Options.format_of_rows, Options.config)
def runs(job: str | None, since: str, limit: int, form: str, config: str | None) -> None:
    """Show the past runs of this machine: how each ended, and why.

    The store keeps runs for 35 days. A run without an end is still running, was killed, or could not store its end.
    Each machine lists its own runs. A run that found its job on another machine is not listed.

    \b
    Example:
      quota runs
      quota runs --since 2d --json | jq '.runs[] | select(.outcome == "failed")'
    """
    from quota.jobs.store.runs import RUN_FIELDS, run_json
    from quota.jobs.store.store import Store

    since_ms = since_ms_of(since)
    with configured(config) as session, Store.existing(session.settings.store) as store:
        past_runs = _with_spending(session, store.runs.read(job, since_ms, limit))
    rows = list(map(run_json, past_runs))
    if print_as(form, {"runs": rows}, RUN_FIELDS, rows):
        return
    if past_runs:
        print_parts([_runs_table(past_runs, session.settings.jobs)])
    else:
        of = "" if job is None else f" of {show(job)}"
        say(f"no run{of} in the last {since} on this machine{_hint(session.settings.jobs, job, None)}")


def _with_spending(session: Session, past_runs: Sequence[Run]) -> Sequence[Run]:
    """The runs. The spending of a run without an end comes from the ledger's log, if the ledger answers."""
    began_ms = min((run.began_ms for run in past_runs if run.ended_ms is None), default=None)
    if began_ms is None:
        return past_runs
    from quota.reports.spending import read_spending

    try:
        rows = read_spending(map(project_of, budgets_of(session)), ["run"], began_ms - MINUTE_MS).rows
    except (quota.LedgerError, quota.ConfigError) as error:
        say(f"the units of runs without an end are not known: {error}", err=True)
        return past_runs
    spent: dict[str, Any] = {run: {"attempts": calls, "units": units} for (run,), calls, units in rows}
    return [replace(run, **spent.get(run.run, {})) if run.ended_ms is None else run for run in past_runs]


def _runs_table(runs: Sequence[Run], jobs: Mapping[str, JobSettings]) -> Table:
    """A table of runs, newest first. In a narrow terminal the columns `took` and `items` go first."""
    from quota.cli.output import ANY_WIDTH, new_console
    from quota.jobs.store.runs import UNFINISHED
    from quota.wording import Table, Tone

    most = MAX_WHY if new_console().width < ANY_WIDTH else ANY_WIDTH
    rows = [
        (
            stamp(run.began_ms),
            run.run,
            run.job,
            run.outcome,
            _regions(run, jobs.get(run.job)),
            "?" if run.outcome == UNFINISHED else f"{sum(region.items for region in run.regions):,}",
            f"{run.units:,}",
            "" if run.ended_ms is None else spell(run.ended_ms - run.began_ms),
            _why(run, most),
        )
        for run in runs
    ]
    headings = ("began", "run", "job", "outcome", "regions", "items", "units", "took", "why")
    by_outcome: dict[str, Tone] = {"failed": "bad", UNFINISHED: "note"}
    tones = [by_outcome.get(run.outcome, "") for run in runs]
    return Table(headings, rows, numbers=(5, 6, 7), tones=tones, without=(7, 5), least_fold=24)


def _regions(run: Run, job: JobSettings | None) -> str:
    """How many of its regions a run covered, with their names if they are few and not those of the job."""
    names = [region.region for region in run.regions]
    number = "?" if run.ended_ms is None else sum(region.outcome == "done" for region in run.regions)
    done = f"{number} of {len(names)}" if names else ""
    of_job = set(job.regions if job else ()) or {""}
    return f"{done}: {listed(names)}" if 0 < len(names) <= NAMED_REGIONS and set(names) != of_job else done


def _why(run: Run, most: int) -> str:
    """What refused a run, or the start of the first failed region's error, or of the run's reason."""
    if run.refused_by is not None and (run.refusal is None or run.refusal["reason"] != "run"):
        limit = run.why.startswith("limit ")
        return printable(f"limit {run.refused_by!r}" if limit else f"bucket {run.refused_by!r} closed")
    if run.ended_ms is None and not run.why:
        return "it runs, was killed, or stored no end"
    why, more = shorten(printable(run.causes[0]), most), len(run.causes) - 1
    return f"{why} (and {many(more, 'more region')})" if more > 0 else why


@click.command("search", short_help="Search the local store.")
@click.argument("words", nargs=-1, required=True)
@click.option("--region", metavar="R", help="Only videos that were ranked in this region.")
@list_options(since=None, what=FETCHED_SINCE, limit=20, most=1_000)
@shared(Options.format_of_rows, Options.config)
def search(
    words: tuple[str, ...],
    region: str | None,
    job: str | None,
    since: str | None,
    limit: int,
    form: str,
    config: str | None,
) -> None:
    """Search the local store for videos that have all WORDS in title, description, channel or tags.

    A search spends no quota. The best match comes first, and each video shows its newest chart position in every
    region. If more than 50,000 videos match, it ranks the newest 50,000.

    Accents and case do not matter. WORD* matches every word that begins with WORD. Emoji, C++ and C# are words.
    Punctuation separates words: rock-n-roll matches rock, n and roll in a row; wifi and Wi-Fi match each other.
    Chinese, Japanese, Korean and Thai words match inside longer text.

    \b
    Example:
      quota search music video --job trending --region DE --since 7d
      quota search news --format csv --limit 1000 > news.csv
      quota search 東京 'foot*'
    """
    from quota.jobs.store.reader import SearchResult
    from quota.jobs.store.store import Store

    since_ms = since_ms_of(since)
    with quota.open(config) as session, Store.existing(session.settings.store) as store:
        videos = store.search(" ".join(words), region, limit, since_ms=since_ms, job=job)
        elsewhere = store.elsewhere()
    names, rows = "job runs_on heard_at until asked_at fetched_at", [video.as_json() for video in videos]
    away = {"elsewhere": [members(other, names) for other in elsewhere]} if elsewhere else {}
    for other in () if form == "json" else elsewhere:
        age = f"what was fetched here until {stamp(other.fetched_ms)}" if other.fetched_ms else "nothing of it"
        old = f", {spell(host_clock() - other.fetched_ms)} ago" if other.fetched_ms else ""
        say(f"{other.job} runs on {other.runs_on} (as of {stamp(other.asked_ms)}); this store has {age}{old}", err=True)
    data = {"words": " ".join(words), "region": region, "job": job, "videos": rows, **away}
    if print_as(form, data, SearchResult._fields, rows):
        return
    say(*map(_video_line, videos))
    if not videos:
        say(f"nothing found{_hint(session.settings.jobs, job, region)}", err=True)


def _video_line(video: SearchResult) -> str:
    views = "?" if video.view_count is None else f"{video.view_count:,}"
    line = f"{video.video_id}  {video.title or '(no title)'}  [{video.channel_title or '?'}, {views} views]"
    regions = [ranking.region for ranking in video.rankings]
    ranks = ", ".join(
        f"{named(r.job, r.region) if regions.count(r.region) > 1 else r.region or r.job} #{r.rank}"
        for r in video.rankings
    )
    return f"{line}  {ranks}".rstrip()


@click.command("tables", short_help="List the tables that your own jobs fill.")
@click.option("--views", is_flag=True, help="Make a view of each table in the store.")
@shared(Options.format_of_rows, Options.config)
def tables(views: bool, form: str, config: str | None) -> None:
    """List the tables that your jobs fill: how many rows each has, and which fields.

    --views makes a view of each table in the store's file, for SQL: a column for each field, at most 200. Run it
    again when rows have new fields.

    \b
    Example:
      quota tables --views
      quota tables --json | jq '.tables[] | {name, rows}'
    """
    from quota.jobs.store.store import Store

    with configured(config) as session, Store.existing(session.settings.store) as store:
        if views:
            store.write_views()
        of_jobs = store.tables()
    names = "name rows oldest_at newest_at fields"
    rows = [members(table, names) for table in of_jobs]
    if print_as(form, {"tables": rows}, names.split(), rows):
        return
    for table in of_jobs:
        say(f"{table.name}: {many(table.rows, 'row')}, {many(len(table.fields), 'field')}: {', '.join(table.fields)}")
    if not of_jobs:
        say("no job has stored rows of its own; see docs/own-jobs.md", err=True)


@click.command("export", short_help="Write the fetched data as JSON lines or CSV.")
@click.argument("table")
@list_options(since=None, what=FETCHED_SINCE, limit=None, most=1_000_000_000)
@click.option("--region", metavar="R", help="Only this region.")
@shared(Options.format_of_records)
@click.option(
    "--output", metavar="FILE", type=PATH, help="Write to this file instead of stdout; it appears when complete."
)
@shared(Options.config)
def export(
    *,
    table: str,
    since: str | None,
    limit: int | None,
    job: str | None,
    region: str | None,
    output: str | None,
    form: str,
    config: str | None,
) -> None:
    """Write a table of the store: videos, rankings, channels, history, or a table of your job.

    JSON has one record on each line. The command streams a table of any size. Times are RFC 3339 in UTC.

    \b
    Example:
      quota export videos --since 7d --region DE --format csv --output videos.csv
      quota export comments | jq '.text'
    """
    from quota.jobs.store.reader import records_of, to_export
    from quota.jobs.store.store import Store

    since_ms, count = since_ms_of(since), 0
    with configured(config) as session:
        settings = session.settings
        ours = [os.path.realpath(file) for file in (settings.path, settings.store.file, settings.ledger.file) if file]
        # SQLite keeps two files beside each of its own.
        if output is not None and re.sub("-(wal|shm)$", "", os.path.realpath(output)) in ours:
            raise quota.UsageError(f"--output {show(output)} is a file of this configuration; name another")
        Store.existing(session.settings.store).close()  # raises if it cannot be opened
        with to_export(session.settings.store.file) as db:
            columns, records = records_of(db, table, since_ms, region, job, limit)
            with unwound(), _written(output) as file:
                write = (
                    csv_writer(file, columns) if form == "csv" else lambda record: file.write(f"{json_text(record)}\n")
                )
                for record in records:
                    write(record)
                    count += 1
    if output is not None:
        say(f"{one_line(output)}: {many(count, 'record')}", err=True)
    if not count:
        filters = ("job", job and show(job)), ("region", region and show(region)), ("the last", since)
        chosen = ", ".join(f"of {what} {value}" for what, value in filters if value is not None)
        why = f" {chosen}{_hint(session.settings.jobs, job, region)}" if chosen else "; `quota runs` lists the runs"
        say(f"{table}: nothing is stored{why}", err=True)


def _hint(jobs: Mapping[str, JobSettings], job: str | None, region: str | None) -> str:
    """What a job or a region that nobody configured may mean."""
    if job is not None and job not in jobs:
        return f"; {nearest(job, jobs)}"
    regions = {name for settings in jobs.values() if job in (None, settings.name) for name in settings.regions}
    return f"; {nearest(region, sorted(regions))}" if region is not None and region not in regions and regions else ""


@contextmanager
def _written(output: str | None) -> Iterator[IO[str]]:
    """The target of an export: stdout, or a file that appears when it is complete."""
    if output is None:
        yield sys.stdout
        return
    is_there = os.path.exists(output)
    # A device or a pipe would be gone, and the path of a folder names no file.
    if output in ("", "-") or output.endswith(os.sep) or (is_there and not os.path.isfile(output)):
        raise quota.UsageError(f"--output {show(output)} is not a file; leave it out to write to stdout")
    path = os.path.realpath(output)  # a link stays
    unfinished = os.path.join(os.path.dirname(path), f".quota-export-{secrets.token_hex(8)}")
    try:
        file = open(unfinished, "x", encoding="utf-8", newline="")  # noqa: SIM115 - closed below
    except OSError as error:
        raise quota.UsageError(f"--output {show(output)}: {error.strerror or error}") from None
    try:
        with file:
            if is_there:
                os.fchmod(file.fileno(), os.stat(path).st_mode & 0o777)
            yield file
        os.replace(unfinished, path)
    except BaseException as error:
        os.unlink(unfinished)
        if isinstance(error, OSError):
            raise quota.QuotaError(f"--output {show(output)}: {error.strerror or error}") from None
        raise


# -- places ------------------------------------------------------------------------------------------------------------


@click.group("place", cls=Group, short_help="Show where each region stands, or reset it.")
def place() -> None:
    """Show where each region of a job stands: the page that comes next.

    The store of this machine keeps the places. With places = "ledger" in [store], the ledger keeps them, and machines
    share them.

    \b
    Example:
      quota place list
      quota place reset trending DE
    """


@place.command("list")
@shared(Options.only_job, Options.format_of_rows, Options.config)
def list_(job: str | None, form: str, config: str | None) -> None:
    """List where each region of each job stands.

    \b
    Example:
      quota place list
    """
    from quota.jobs.places import checkpoints_of

    with configured(config) as session, _store_of_places(session) as store:
        chosen = [settings for name, settings in session.settings.jobs.items() if job in (None, name)]
        checkpoints = [place for settings in chosen for place in checkpoints_of(session, settings, store)]
        _print(session, checkpoints, form)
    jobs = session.settings.jobs
    none = "no job is configured" if job is None or not jobs else f"there is no job {show(job)}{_hint(jobs, job, None)}"
    if not checkpoints and form == "text":
        say(none, err=True)


@place.command("show")
@click.argument("job")
@click.argument("region", required=False)
@shared(Options.format_of_rows, Options.config)
def show_(job: str, region: str | None, form: str, config: str | None) -> None:
    """Show where one job stands, with the next page's cursor.

    \b
    Example:
      quota place show trending DE --json | jq '.places[0].cursor'
    """
    with configured(config) as session, _store_of_places(session) as store:
        _print(session, _chosen(session, store, job, region), form, cursors=True)


@place.command("reset")
@click.argument("job")
@click.argument("region", required=False)
@shared(Options.dry_run, Options.yes, Options.config)
def reset(job: str, region: str | None, dry_run: bool, yes: bool, config: str | None) -> int:
    """Reset a job, or one of its regions, to its first page.

    Fetched items stay in the store. On a terminal, the command asks first.

    \b
    Example:
      quota place reset trending DE
      quota place reset trending --dry-run
    """
    from quota.jobs.lock import only_one
    from quota.jobs.places import reset_shared

    with configured(config) as session, _store_of_places(session) as store:
        checkpoints, settings = _chosen(session, store, job, region), session.settings.jobs[job]
        names = ", ".join(checkpoint.region for checkpoint in checkpoints if checkpoint.region)
        where = f", in {names}" if names else ""
        if dry_run:
            say(f"{job} would begin anew with the next run{where}; nothing was changed")
            return 0
        if not confirmed(f"Begin {job} anew{where}?", yes=yes):
            say("nothing was changed")
            return 1
        if session.settings.store.places_in_ledger:
            reset_shared(session, settings, checkpoints)
        others: list[str] = []
        if store.path:
            with only_one(session.settings.store.url, job) as lock:
                if lock is None:
                    raise quota.QuotaError(f"job {job!r} is running on this machine; reset it when the run has ended")
                others = _reset(session, store, settings, checkpoints)
    say(f"{job} begins anew with the next run{where}")
    if others:
        say(f"the places of lists are shared: {listed(others)} begins the same lists anew, too")
    return 0


def _reset(session: Session, store: Store, job: JobSettings, checkpoints: Sequence[Checkpoint]) -> list[str]:
    """Reset these regions in the store, with the places of the lists that they read. Returns the other jobs and regions
    that read these lists, as messages name them."""
    from quota.jobs.fetches import WALKS
    from quota.jobs.job import fetch_to_look_at

    if job.fetch not in WALKS:
        for place in checkpoints:
            store.reset(place)
        return []
    lists: dict[tuple[str, str], list[str]] = {}
    for other in session.settings.jobs.values():
        if other.fetch == job.fetch:
            fetch_to_look_at(session.settings, other)  # raises if its options are invalid
            for region in other.regions or ("",):
                walks = WALKS[job.fetch](store, region, None, **other.options)
                lists[other.name, region] = walks.ids()
    read = [lists.pop((place.job, place.region)) for place in checkpoints]
    for place, ids in zip(checkpoints, read, strict=True):
        store.reset(place, walks.table, ids)
    return [named(*reader) for reader, ids in lists.items() if not {*ids}.isdisjoint(chain.from_iterable(read))]


def _store_of_places(session: Session) -> Store:
    """The store that has the places; an empty one if the ledger has them, and there is no store yet."""
    from quota.jobs.store.store import Store

    settings = session.settings.store
    return Store.if_made(settings) if settings.places_in_ledger else Store.existing(settings)


def _chosen(session: Session, store: Store, name: str, region: str | None) -> list[Checkpoint]:
    """Where a job stands in each region, or in one. Raises UsageError."""
    from quota.jobs.job import job_called, regions_of
    from quota.jobs.places import checkpoints_of

    job = job_called(session.settings, name)
    regions = regions_of(job, () if region is None else (region,))
    return [checkpoint for checkpoint in checkpoints_of(session, job, store) if checkpoint.region in regions]


def _print(session: Session, checkpoints: list[Checkpoint], form: str, *, cursors: bool = False) -> None:
    """Where jobs stand, and the machines that have regions, as far as the ledger answers."""
    from quota.jobs.places import away_now

    names = "job region pending pages items cursor started_at completed_at failed_at"
    rows = [members(checkpoint, names) for checkpoint in checkpoints]
    if print_as(form, {"places": rows}, names.split(), rows):
        return
    away: dict[str, dict[str, Away]] = {}
    with suppress(quota.LedgerError):
        for job in dict.fromkeys(checkpoint.job for checkpoint in checkpoints):
            away[job] = away_now(session, session.settings.jobs[job])
    for checkpoint in checkpoints:
        pages, items = many(checkpoint.pages, "page"), many(checkpoint.items, "item")
        stored = f"{pages} and {items} of this round stored" if checkpoint.begun else "the first of this round"
        completed_ms, failed_ms = checkpoint.completed_at_ms, checkpoint.failed_at_ms
        has_failed = (failed_ms or 0) > (completed_ms or 0)
        ended = "the next round tries it again" if has_failed else "this round is done"
        waits = ended if completed_ms or failed_ms else "page 1 comes next"
        is_due = checkpoint.pending or checkpoint.cursor
        stands = f"page {checkpoint.pages + 1} comes next, {stored}" if is_due else waits
        complete = "never complete" if completed_ms is None else f"complete {stamp(completed_ms)}"
        failed = f", failed {stamp(failed_ms or 0)}" if has_failed else ""
        there = away.get(checkpoint.job, {}).get(checkpoint.region)
        here = "" if there is None else f"runs on {there.runs_on}; here "
        say(f"{named(checkpoint.job, checkpoint.region)}: {here}{stands}; {complete}{failed}")
        if cursors and checkpoint.cursor is not None:
            say(f"  cursor {json.dumps(checkpoint.cursor)[:2_000]}")
