"""`quota run`: one run of a job, and what its configuration asks for around it.

Every tick loads this module, even one that is refused: only what all of them need is imported at the top.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from quota.cli.options import config_option, json_option, textfile_option
from quota.cli.output import fail, log_to_stderr, print_json, say, unprinted
from quota.common.text import printable
from quota.errors import LedgerError, QuotaError, Refused
from quota.jobs.interruption import interruptible
from quota.jobs.progress import named, watching

if TYPE_CHECKING:
    from quota.jobs.job import RunReport
    from quota.reports.notify import Ping
    from quota.session import Session


@click.command("run", short_help="Run one tick of JOB.")
@click.argument("job")
@click.option("--region", "regions", multiple=True, metavar="R", help="Only this region of the job; may be repeated.")
@click.option(
    "--fail-on-refusal", is_flag=True, help=f"Exit with {Refused.exit_status} when the budget stopped the run."
)
@click.option("--here", is_flag=True, help="Take over the regions that run on another machine.")
@click.option("--quiet", is_flag=True, help="Print only errors.")
@click.option("--verbose", is_flag=True, help="Print each decision, too.")
@textfile_option
@json_option
@config_option
def run(
    *,
    job: str,
    regions: Sequence[str],
    fail_on_refusal: bool,
    here: bool,
    quiet: bool,
    verbose: bool,
    textfile: str | None,
    as_json: bool,
    config: str | None,
) -> int:
    """Run one tick of JOB: fetch its regions until it is done or the budget refuses a call.

    When the budget is spent, a run exits at once with status 0 and prints where and when it will resume. Progress is
    saved; the next run resumes there, even days later.

    On a terminal it shows pages, units and the time to go; elsewhere it says once a minute where it is.

    Where machines share a ledger, a job runs on one of them. On the others a run says where, and exits with status 0.

    \b
    Example:
      quota run trending
      quota run trending --region DE --region FR --json
      quota run trending --quiet    # for cron, which mails all output
      quota run trending --verbose  # what each call was told
      quota run trending --here     # and not where it ran until now
    """
    from quota.jobs.runner import failed_report, run_job

    if quiet and verbose:
        raise click.UsageError("a run is quiet or verbose, not both; leave one out")
    log_to_stderr()
    says = not quiet or sys.stderr.isatty()
    with interruptible(says=says) as stop, configured(config, textfile) as session:
        ping = _ping(session, job)
        try:
            # What a fetch function prints does not get into the report.
            with redirect_stdout(sys.stderr), watching(job, quiet, verbose) as watcher:
                begins = (lambda: None) if ping is None else ping.start
                report = run_job(session, job, regions=regions, here=here, refusal=begins, stop=stop, watcher=watcher)
        except BaseException as error:
            report = failed_report(session, job, error)
            _ended(session, job, ping, report.exit_status, report)
            if isinstance(error, Exception):
                raise
            # Our own signals raise nothing here.
            raise QuotaError(f"{job}: fetch ended with {report.why}; let it return a page, or raise an error") from None
        status = report.exit_status
        if fail_on_refusal and report.refused and not status:
            status = Refused.exit_status
        print_report(report, as_json, quiet and status != Refused.exit_status)
        _ended(session, job, ping, status, report)
    return status


def _ping(session: Session, job: str) -> Ping | None:
    """The health check of the job, where its configuration names one."""
    settings = session.settings.jobs.get(job)
    if settings is None or settings.ping_ref is None:
        return None
    from quota.reports.notify import Ping

    return Ping(settings.ping_ref, job, insecure=settings.insecure_endpoint)


def _ended(session: Session, job: str, ping: Ping | None, exit_status: int, report: RunReport) -> None:
    """Do what the configuration asks for after a run. Nothing is imported for a run that asks for nothing."""
    settings = session.settings
    asks = settings.textfile is not None or settings.notify is not None or ping is not None
    if job in settings.jobs and asks:
        from quota.jobs.afterwards import follow_up

        follow_up(session, job, exit_status, report, ping)


@contextmanager
def configured(config: str | None, textfile: str | None = None) -> Iterator[Session]:
    """A session over a configuration file, perhaps with another folder for metrics.

    The built-in configuration has no key to call the API with.
    """
    import quota
    from quota.settings.model import NO_FILE

    with quota.open(config) as session:
        if session.settings.path is None:
            raise quota.ConfigError(f"{NO_FILE}; run `quota init`, or name a file with --config")
        if textfile is not None:
            session.settings = replace(session.settings, textfile=os.path.abspath(textfile))
        yield session


def print_report(report: RunReport, as_json: bool, quiet: bool = False) -> None:
    """Print how a run ended. With `quiet` nothing if it is done, somebody else runs it or the budget stopped it, its
    errors if it failed, and otherwise why it stopped."""
    from quota.common.clock import host_clock

    for region in report.regions:
        if region.error is not None and region.error != report.why:
            fail(f"{named(report.job, region.region)}: {printable(region.error)}")
    is_error = report.outcome == "failed" or report.exit_status == LedgerError.exit_status
    if is_error:
        fail(f"{report.job}: {printable(report.why)}")
    is_regular = report.outcome in ("done", "elsewhere", "overlap") or (report.refused and not is_error)
    if quiet and (is_regular or (is_error and not as_json)):
        return
    sentence = printable(report.sentence(host_clock()))
    if as_json:
        print_json(report.as_json())
    else:
        say(sentence)
    unprinted(sentence)
