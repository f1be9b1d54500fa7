"""What follows a run: metrics for Prometheus, and whom to tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import quota
from quota.jobs.alarms import tell
from quota.jobs.textfile import write_metrics
from quota.status import read_status

if TYPE_CHECKING:
    from quota.jobs.job import RunReport
    from quota.session import Session


def follow_up(session: Session, job: str, exit_status: int, report: RunReport | None) -> None:
    """Do what the configuration asks for, after a run of `job` that ended with this exit status.

    Without a `report` the run raised an error. Raises nothing.
    """
    if session.settings.textfile is None and session.settings.notify is None:
        return
    try:
        status = read_status(session, session.settings.jobs[job].credential)
    except quota.LedgerError:
        status = None
    write_metrics(session, job, exit_status, status)
    tell(session, job, exit_status, report, status)
