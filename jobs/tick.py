"""`quota run`: one run of a job, and what its configuration asks for around it.

Every tick loads this module, even one that is refused: only what all of them need is imported at the top.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from quota.cli.options import Options, shared
from quota.cli.output import fail, log_to_stderr, naming_allowances, print_json, say, unprinted
from quota.common.text import printable, show
from quota.errors import ConfigError, LedgerError, QuotaError, Refused
from quota.jobs.interruption import interruptible
from quota.jobs.progress import named, watching

if TYPE_CHECKING:
    from quota.jobs.job import RunReport
    from quota.reports.notify import Ping
    from quota.session import Session


@click.command("run", short_help="Run JOB once.")
@click.argument("job", required=False)
@click.option("--all", "all_jobs", is_flag=True, help="Run each job once, in the order of the configuration.")
@click.option("--region", "regions", multiple=True, metavar="R", help="Only this region of the job; may be repeated.")
@click.option("--fail-on-refusal", is_flag=True, help=f"Exit with {Refused.exit_status} if the budget stops the run.")
@click.option("--here", is_flag=True, help="Take over the regions that run on another machine.")
@click.option("--dry-run", is_flag=True, help="Show what the run would cost and how much fits now. Send nothing.")
@shared(Options.clock)
@click.option("--quiet", is_flag=True, help="Print only failures and warnings.")
@shared(Options.textfile, Options.format, Options.config)
def run(
    *,
    job: str | None,
    all_jobs: bool,
    dry_run: bool,
    at: str | None,
    textfile: str | None,
    config: str | None,
    **options: Any,
) -> int:
    """Run JOB once: fetch its regions until all are done or the budget refuses a call.

    When the budget is spent, a run saves its progress, prints where and when it will resume, and exits at once with
    status 0. The next run resumes there, even days later.

    On a terminal it shows pages, units and the time left; elsewhere it prints its place once a minute.

    If machines share a ledger, only one of them fetches a region. On the others, a run prints that machine's name
    and exits with 0.

    --clock makes the run a rehearsal: it works on copies of the ledger and the store, calls only an `endpoint` on this
    machine, and starts each line with "rehearsal: ".

    --all runs one job after another and exits with the worst status.

    \b
    Example:
      quota run trending
      quota run trending --region DE --region FR --json
      quota run trending --dry-run    # what would it cost?
      quota run trending --clock +1d  # tomorrow, against `quota emulate`
      quota run trending --quiet      # for cron, which mails all output
      quota run trending --here       # take it over from another machine
      quota run --all
    """
    if (job is None) is not all_jobs:
        raise click.UsageError("name a job, or give --all without a job, which runs each of them")
    documents: list[dict[str, object]] = []  # with --all they are printed together
    put: Callable[[dict[str, object]], None] = documents.append if all_jobs else print_json
    how = How(**options, emit=put if at is None else lambda fields: put({"rehearsal": True, **fields}))
    if all_jobs and how.regions:
        raise click.UsageError("`quota run --all` takes no region; name one job")
    statuses = []
    with ExitStack() as block:
        how = how._replace(stop=block.enter_context(interruptible(says=not how.quiet or sys.stderr.isatty())))
        session = block.enter_context(configured(config, textfile))
        names = list(session.settings.jobs) if job is None else [job]
        if not names:
            raise ConfigError(f"{session.settings.source} has no jobs; add a table [jobs.NAME]")
        if at is not None:
            from quota.cli.rehearsal import rehearsed

            session = block.enter_context(rehearsed(session, at, as_json=how.form == "json"))
        log_to_stderr()
        if dry_run:
            statuses = _look_ahead(session, names, how)
        else:
            if at is not None:
                _check_endpoints(session, names)
            for name in names:
                report = _run_and_go_on(session, name, how) if all_jobs else _tick(session, name, how)
                statuses.append(report.exit_status)
                how = how._replace(silent=report.silent)
        if how.form == "json" and all_jobs and (documents or not how.quiet):
            print_json(documents)
    # The worst: a failure, whatever its number, comes before a refusal.
    return max(statuses, key=lambda status: (status not in (0, Refused.exit_status), status))


class How(NamedTuple):
    """The options of `quota run`. `emit` prints its JSON; `silent` as in RunOptions."""

    form: str
    regions: Sequence[str] = ()
    here: bool = False
    fail_on_refusal: bool = False
    quiet: bool = False
    emit: Callable[[dict[str, object]], None] = print_json
    stop: Callable[[], int] = lambda: 0
    silent: str = ""


def _tick(session: Session, job: str, how: How) -> RunReport:
    """Run a job once, print how it ended, and do what its configuration asks for then."""
    from quota.jobs.endings import failed_report
    from quota.jobs.job import apart, job_called
    from quota.jobs.runner import RunOptions, run_job

    settings, ping = job_called(session.settings, job), None
    if settings.ping_ref is not None and not how.stop():  # else the run does not begin
        from quota.reports.notify import Ping

        ping = Ping(settings.ping_ref, job, insecure=settings.insecure_endpoint)
    try:
        with apart(), watching(job, how.quiet) as watcher:
            refusal = (lambda: None) if ping is None else ping.start
            options = RunOptions(how.regions, how.here, None, refusal, how.stop, watcher, how.silent)
            report = run_job(session, job, options)
    except Exception as error:  # a signal raises nothing here
        _follow_up(session, failed_report(session, job, error), ping)
        raise
    if how.fail_on_refusal and report.refused and not report.exit_status:
        report = replace(report, exit_status=Refused.exit_status)
    print_report(session, report, how)
    _follow_up(session, report, ping)
    return report


def _run_and_go_on(session: Session, job: str, how: How) -> RunReport:
    """The same for one job of several. It prints an error, and the next job runs. Each run has its own session, and so
    its own id; those of a rehearsal share one ledger in memory."""
    from quota.jobs.endings import failed_report

    with type(session)(session.settings) if session.clock is None else nullcontext(session) as own:
        try:
            return _tick(own, job, how)
        except QuotaError as error:
            report = failed_report(own, job, error)
            print_report(own, report, how)
            return report


def _look_ahead(session: Session, jobs: Sequence[str], how: How) -> list[int]:
    """Print what runs of these jobs would cost, one after the other, and which of several could not begin. Returns
    their exit statuses."""
    from quota.cli.rehearsal import copied
    from quota.jobs.job import functions_of, job_called
    from quota.jobs.places import away_now
    from quota.jobs.plan.plan import look_ahead

    statuses = []
    with copied(session, store=False) as copy:
        for job in jobs:
            settings = job_called(session.settings, job)
            try:
                project = session.credential(settings.credential).project
                if session.clock is None and (why := session.ledger.unwritable(project)):  # the copy could be charged
                    raise LedgerError(why)
                fetch, _ = functions_of(session.settings, settings)  # a copy has no sink
                ahead = look_ahead(copy, job, fetch, how.regions, {} if how.here else away_now(session, settings))
            except QuotaError as error:
                if len(jobs) == 1:
                    raise
                fail(f"{job}: {str(error).removeprefix(f'{job}: ')}")
                statuses.append(error.exit_status)
                continue
            statuses.append(Refused.exit_status if ahead.refusal is not None and how.fail_on_refusal else 0)
            if how.form == "json":
                how.emit({"dry_run": True, **ahead.as_json()})
            else:
                say(*ahead.lines())
    return statuses


def _check_endpoints(session: Session, jobs: Sequence[str]) -> None:
    """Raises ConfigError if a rehearsal of one of these jobs would call another machine."""
    from urllib.parse import urlsplit

    from quota.common.hosts import is_loopback
    from quota.jobs.job import job_called

    for job in jobs:
        chosen = session.credential(job_called(session.settings, job).credential)
        if not is_loopback(urlsplit(chosen.endpoint or "").hostname or ""):
            raise ConfigError(
                f"a rehearsal calls only servers on this machine, and credential {show(chosen.name)} has no endpoint "
                'there: start `quota emulate`, and set endpoint = "http://127.0.0.1:8765" for the credential'
            )


def _follow_up(session: Session, report: RunReport, ping: Ping | None) -> None:
    """Do what the configuration asks for after a run. Nothing is imported for a run that asks for nothing."""
    settings = session.settings
    if settings.textfile is not None or settings.notify is not None or ping is not None:
        from quota.jobs.afterwards import follow_up

        follow_up(session, report, ping)


@contextmanager
def configured(config: str | None, textfile: str | None = None) -> Iterator[Session]:
    """A session over a configuration file, perhaps with another folder for metrics.

    The built-in configuration has no key to call the API with.
    """
    import quota
    from quota.settings.model import NO_FILE

    with quota.open(config) as session, naming_allowances(session):
        if session.settings.path is None:
            raise quota.ConfigError(f"{NO_FILE}; run `quota init`, or name a file with --config")
        if textfile is not None:
            session.settings = session.settings._replace(textfile=os.path.abspath(textfile))
        yield session


def print_report(session: Session, report: RunReport, how: How) -> None:
    """Print how a run ended. If `quiet`, nothing if its status is 0 and it is done, somebody else runs it or the
    budget stopped it, its errors if it failed, and otherwise why it stopped."""
    from quota.common.clock import host_clock

    for region in report.regions:
        if region.error is not None and region.error != report.why:
            fail(f"{named(report.job, region.region)}: {printable(region.error)}")
    is_error = report.outcome == "failed" or report.exit_status == LedgerError.exit_status
    if is_error:
        fail(f"{named(report.job, report.failed_region)}: {printable(report.why)}")
    is_regular = not report.exit_status and (report.refused or report.outcome in ("done", "elsewhere", "overlap"))
    if how.quiet and (is_regular or (is_error and how.form == "text")):
        return
    sentence = printable(report.sentence((session.clock or host_clock)()))
    if how.form == "json":
        how.emit(report.as_json())
    else:
        say(sentence)
    unprinted(sentence)
