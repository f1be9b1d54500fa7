"""Writes the metrics of a run for node_exporter: one file for the project, one for the job. See `quota.metrics`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quota.common.clock import host_clock
from quota.common.log import warn
from quota.common.text import one_line
from quota.errors import LedgerError
from quota.ledger.history import OTHER
from quota.metrics import Sample, exposition, file_name, of_silence, of_status, of_sums, write_file
from quota.spending import read_sums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quota.jobs.store.store import Checkpoint
    from quota.ledger.history import RunningSum
    from quota.session import Session
    from quota.settings.model import JobSettings
    from quota.status import Status


def write_metrics(
    session: Session, job: str, exit_status: int, status: Status | None, checkpoints: Sequence[Checkpoint]
) -> None:
    """Write both files after a run of `job` ended with this exit status, if the configuration names a folder for them.

    `status` is that of the job's credential; None: the ledger did not answer. `checkpoints` say where the job stands in
    each region. Raises nothing: what prevents it is one line of the log.
    """
    folder, settings = session.settings.textfile, session.settings.jobs[job]
    if folder is None:
        return
    project = session.credential(settings.credential).project
    written = Sample("quota_textfile_written_timestamp_seconds", {"project": project}, host_clock() / 1000)
    labels = {"project": project, "quota_job": job}
    of_job = [written._replace(labels=labels), *_of_job(labels, exit_status, checkpoints)]
    sums = _sums(session, project) if status is not None else ()
    of_job += of_sums(project, (one for one in sums if one.job == job))
    of_project = [written, *_of_project(session, settings, project, status)]
    of_project += of_sums(project, (one for one in sums if one.job in ("", OTHER)))
    try:
        write_file(folder, file_name(project), exposition(of_project))
        write_file(folder, file_name(project, job), exposition(of_job))
    except OSError as error:
        warn("textfile_not_written folder=%s: %s", one_line(folder), error.strerror or error)


def _sums(session: Session, project: str) -> tuple[RunningSum, ...]:
    try:
        return read_sums(session.ledger, project)
    except LedgerError:
        return ()


def _of_project(session: Session, job: JobSettings, project: str, status: Status | None) -> list[Sample]:
    if status is not None:
        return of_status(status, project)
    return of_silence(project, session.budget(job.credential).owed_units())


def _of_job(labels: dict[str, str], exit_status: int, checkpoints: Sequence[Checkpoint]) -> list[Sample]:
    return [
        Sample("quota_run_last_end_timestamp_seconds", labels, host_clock() / 1000),
        Sample("quota_run_last_exit_status", labels, exit_status),
        *(
            Sample(
                "quota_region_completed_timestamp_seconds",
                {**labels, "region": one.region},
                one.completed_at_ms / 1000,
            )
            for one in checkpoints
            if one.completed_at_ms is not None
        ),
    ]
