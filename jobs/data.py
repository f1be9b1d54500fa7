"""The commands of `quota` about what the jobs keep: tables, export, place."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import contextmanager, nullcontext
from typing import IO, TYPE_CHECKING

import click

import quota
from quota.cli.options import FETCHED_SINCE, Group, config_option, json_option, since_ms_of, since_option
from quota.cli.output import json_text, print_json, say
from quota.common.clock import host_clock, moment
from quota.common.members import members
from quota.common.text import many, nearest, one_line, show
from quota.jobs.tick import configured

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from quota import Session
    from quota.jobs.store.checkpoints import Checkpoint
    from quota.jobs.store.store import Store


@click.command("tables", short_help="List the tables of your jobs' own rows.")
@click.option("--views", is_flag=True, help="Make a view of each in the store, with a column for each field.")
@json_option
@config_option
def tables(views: bool, as_json: bool, config: str | None) -> None:
    """List the tables that jobs have named: how many rows each has, and which fields.

    With --views each becomes a view in the store's file, with a column for each field (at most 200), for SQL. Run it
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
        found = store.tables()
    if as_json:
        print_json({"tables": [members(one, "name rows oldest_at newest_at fields") for one in found], "views": views})
        return
    for one in found:
        say(f"{one.name}: {many(one.rows, 'row')}, {many(len(one.fields), 'field')}: {', '.join(one.fields)}")
    if not found:
        say("no job has stored rows of its own; docs/own-jobs.md says how", err=True)


@click.command("export", short_help="Write what was fetched as JSON lines or CSV.")
@click.argument("table")
@since_option(what=FETCHED_SINCE)
@click.option("--region", metavar="R", help="Only what is of this region.")
@click.option("--format", "kind", type=click.Choice(["jsonl", "csv"]), default="jsonl", show_default=True)
@click.option("--output", metavar="FILE", help="Write here instead of to stdout: the whole file, or none.")
@config_option
def export(
    table: str, since: str | None, region: str | None, kind: str, output: str | None, config: str | None
) -> None:
    """Write a table of the store: videos, rankings, channels, history, or one that a job has named.

    It is streamed, whatever its size. Times are RFC 3339 in UTC.

    \b
    Example:
      quota export videos --since 7d --region DE --format csv --output videos.csv
      quota export comments | jq '.text'
    """
    from quota.jobs.store.export import Export, to_export
    from quota.jobs.store.store import Store

    since_ms = since_ms_of("--since", since)
    with configured(config) as session:
        Store.existing(session.settings.store).close()  # one that cannot be opened says why
        with to_export(session.settings.store.file) as db:
            wanted = Export(db, table, since_ms, region)
            with _written(output) as file:
                count = wanted.write(file, None if kind == "csv" else json_text)
    if output is not None:
        say(f"{one_line(output)}: {many(count, 'record')}", err=True)


@contextmanager
def _written(output: str | None) -> Iterator[IO[str]]:
    """Where an export goes: stdout, or a file that appears when it is whole."""
    if output is None:
        yield sys.stdout
        return
    if os.path.exists(output) and not os.path.isfile(output):  # a device or a pipe would be gone
        raise quota.UsageError(f"--output {show(output)} is no file; leave it out to write to stdout")
    path = os.path.realpath(output)  # a link stays
    folder = os.path.dirname(path)
    try:
        file = tempfile.NamedTemporaryFile(  # noqa: SIM115 - it is renamed, not deleted
            "w", encoding="utf-8", newline="", dir=folder, prefix=".quota-export-", delete=False
        )
    except OSError as error:
        raise quota.UsageError(f"--output {show(output)}: {error.strerror or error}") from None
    try:
        with file:
            yield file.file
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(file.name, 0o666 & ~umask)
        os.replace(file.name, path)
    except BaseException as error:
        os.unlink(file.name)
        if isinstance(error, OSError):
            raise quota.QuotaError(f"--output {show(output)}: {error.strerror or error}") from None
        raise


# -- places ------------------------------------------------------------------------------------------------------------


@click.group("place", cls=Group, short_help="Show where each region stands, or begin it anew.")
def place() -> None:
    """Where each region of a job stands: the page that comes next. It lies in this machine's store, or, with [store]
    places = "ledger", in the ledger that machines share.

    \b
    Example:
      quota place list
      quota place reset trending DE
    """


@place.command("list")
@json_option
@config_option
def list_(as_json: bool, config: str | None) -> None:
    """List where the regions of all jobs stand.

    \b
    Example:
      quota place list
    """
    from quota.jobs.places import checkpoints_of

    with configured(config) as session, _store_of_places(session) as store:
        found = [one for job in session.settings.jobs.values() for one in checkpoints_of(session, job, store)]
    _print(found, as_json)


@place.command("show")
@click.argument("job")
@click.argument("region", required=False)
@json_option
@config_option
def show_(job: str, region: str | None, as_json: bool, config: str | None) -> None:
    """Show where one job stands, with the next page's cursor.

    \b
    Example:
      quota place show trending DE --json | jq '.places[0].cursor'
    """
    from quota.jobs.places import checkpoints_of
    from quota.jobs.runner import job_called

    with configured(config) as session, _store_of_places(session) as store:
        found = _chosen(checkpoints_of(session, job_called(session, job), store), job, region)
    _print(found, as_json, cursors=True)


@place.command("reset")
@click.argument("job")
@click.argument("region", required=False)
@config_option
def reset(job: str, region: str | None, config: str | None) -> None:
    """Begin a job, or one of its regions, anew.

    The next run fetches its first page. What is stored stays.

    \b
    Example:
      quota place reset trending DE
    """
    from quota.jobs.lock import only_one
    from quota.jobs.places import checkpoints_of, reset_shared
    from quota.jobs.runner import job_called

    with configured(config) as session, _store_of_places(session) as store:
        chosen = job_called(session, job)
        found = _chosen(checkpoints_of(session, chosen, store), job, region)
        if store is None:
            reset_shared(session, chosen, found)
        else:
            with only_one(session.settings.store.url, job) as lock:
                if lock is None:
                    raise quota.QuotaError(f"job {job!r} is running on this machine; reset it when the run has ended")
                for one in found:
                    store.reset(one)
    regions = ", ".join(one.region for one in found if one.region)
    say(f"{job} begins anew with the next run{f', in {regions}' if regions else ''}")


def _store_of_places(session: Session) -> AbstractContextManager[Store | None]:
    """The store where the places lie; None if they lie in the ledger."""
    from quota.jobs.store.store import Store

    settings = session.settings.store
    return nullcontext() if settings.places_in_ledger else Store.existing(settings)


def _chosen(found: list[Checkpoint], job: str, region: str | None) -> list[Checkpoint]:
    known = [one.region for one in found]
    if region is not None and region not in known:
        raise quota.UsageError(f"job {job!r} has no region {show(region)}; {nearest(region, known)}")
    return [one for one in found if region in (None, one.region)]


def _print(found: list[Checkpoint], as_json: bool, *, cursors: bool = False) -> None:
    if as_json:
        names = "job region pending pages items cursor started_at completed_at failed_at"
        print_json({"places": [members(one, names) for one in found]})
        return
    now_ms = host_clock()
    for one in found:
        name = f"{one.job} {one.region}".rstrip()
        stored = f"{many(one.pages, 'page')} and {many(one.items, 'item')} stored" if one.begun else "nothing stored"
        ended = one.completed_at_ms or one.failed_at_ms  # neither: no run has come to it
        due = one.pending or one.cursor or not ended
        stands = f"page {one.pages + 1} comes next, {stored}" if due else "this round is done"
        complete = (
            "never complete" if one.completed_at_ms is None else f"complete {moment(one.completed_at_ms, now_ms)}"
        )
        failed = "" if one.failed_at_ms is None else f", failed {moment(one.failed_at_ms, now_ms)}"
        say(f"{name}: {stands}; {complete}{failed}")
        if cursors and one.cursor is not None:
            import json

            say(f"  cursor {json.dumps(one.cursor)[:2_000]}")
    if not found:
        say("no job is configured", err=True)
