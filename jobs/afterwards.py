"""What follows a run: metrics for Prometheus, whom to tell, and a health check."""

from __future__ import annotations

import quota
from quota.common.log import warn
from quota.jobs.alarms import tell
from quota.jobs.job import RunReport
from quota.jobs.places import checkpoints_of
from quota.jobs.store.checkpoints import Checkpoint
from quota.jobs.store.file import StoreError
from quota.jobs.store.store import Store
from quota.jobs.textfile import write_metrics
from quota.reports.notify import Ping
from quota.reports.status import read_status
from quota.session import Session


def follow_up(session: Session, job: str, exit_status: int, report: RunReport, ping: Ping | None) -> None:
    """Do what the configuration asks for, after a run of `job` that ended with this exit status. Raises nothing.

    Of a run that found another one under way nothing is told: that one tells of itself, and if it hangs, somebody must
    notice. A health check hears nothing of one that found the job on another machine.
    """
    if report.outcome == "overlap":
        return
    _tell(session, job, exit_status, report)
    if ping is not None and (ping.began or report.outcome != "elsewhere"):
        ping.end(exit_status)


def _tell(session: Session, job: str, exit_status: int, report: RunReport) -> None:
    if session.settings.textfile is None and session.settings.notify is None:
        return
    try:
        status = read_status(session, session.settings.jobs[job].credential)
    except quota.LedgerError:
        status = None
    checkpoints = _checkpoints(session, job)
    ended = None if report.outcome == "elsewhere" else exit_status
    write_metrics(session, job, ended, status, checkpoints)
    tell(session, job, exit_status, report, status, checkpoints)


def _checkpoints(session: Session, name: str) -> list[Checkpoint]:
    """Where the job is in each region; nothing if the store cannot be read."""
    job, settings, notify = session.settings.jobs[name], session.settings.store, session.settings.notify
    if session.settings.textfile is None and (notify is None or notify.stale_ms is None):
        return []
    try:
        with Store(settings.url, retention_ms=settings.retention_ms) as store:
            return checkpoints_of(session, job, store)
    except (StoreError, quota.LedgerError) as error:
        if session.settings.textfile is not None:
            warn("textfile_without_store", error, job=name)
        return []
