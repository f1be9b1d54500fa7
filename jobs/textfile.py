"""Writes the metrics of a run for node_exporter, of the project and of the job: see `quota.reports.metrics`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from quota.common.clock import host_clock
from quota.common.log import warn
from quota.common.text import one_line
from quota.errors import LedgerError
from quota.jobs.store.checkpoints import Checkpoint
from quota.reports.metrics import Sample, exposition, file_name, of_silence, of_status, of_sums, write_file
from quota.reports.spending import read_sums
from quota.reports.status import Status
from quota.rules.refusals import OTHER, RefusedSum
from quota.rules.sums import ChargedSum
from quota.session import Session
from quota.settings.model import JobSettings


def write_metrics(
    session: Session, job: str, exit_status: int | None, status: Status | None, checkpoints: Sequence[Checkpoint]
) -> None:
    """Write both files after a run of `job` ended with this exit status, if the configuration names a folder for them.

    Without an exit status the job was on another machine, and the file says nothing of a last run: an old one would
    hide that the runs there fail.
    `status` is that of the job's credential; None: the ledger did not answer. `checkpoints` say where the job stands in
    each region. Raises nothing: what prevents it is one line of the log.
    """
    folder, settings = session.settings.textfile, session.settings.jobs[job]
    if folder is None:
        return
    project = session.credential(settings.credential).project
    written = Sample("quota_textfile_written_timestamp_seconds", {"project": project}, host_clock() / 1000)
    labels = {"project": project, "quota_job": job}
    of_job = [written._replace(labels=labels)]
    of_job += [] if exit_status is None else of_run(labels, host_clock(), exit_status)
    of_job += of_regions(labels, checkpoints)
    sums, refused = _sums(session, settings) if status is not None else ((), ())
    of_project = [written]
    if status is not None:
        of_project += of_status(status, project)
    else:
        of_project += of_silence(project, session.budget(settings.credential).owed_units())
    for samples, jobs in ((of_job, (job,)), (of_project, ("", OTHER))):
        charged = [one for one in sums if one.job in jobs]
        samples += of_sums(project, charged, [one for one in refused if one.job in jobs])
    try:
        write_file(folder, file_name(project), exposition(of_project))
        write_file(folder, file_name(project, job), exposition(of_job))
    except OSError as error:
        warn("textfile_not_written", error.strerror or error, folder=one_line(folder))


def _sums(session: Session, job: JobSettings) -> tuple[Sequence[ChargedSum], Sequence[RefusedSum]]:
    session.budget(job.credential).hand_over_refusals()
    project = session.project(job.credential)
    try:
        return read_sums(project)
    except LedgerError as error:
        warn("textfile_without_history", error, project=project.name)
        return (), ()


def of_run(labels: dict[str, str], ended_ms: int, exit_status: int) -> Iterator[Sample]:
    """The series of the last run of a job."""
    yield Sample("quota_run_last_end_timestamp_seconds", labels, ended_ms / 1000)
    yield Sample("quota_run_last_exit_status", labels, exit_status)


def of_regions(labels: dict[str, str], checkpoints: Iterable[Checkpoint]) -> Iterator[Sample]:
    """The series of a job's regions, of those that were ever complete."""
    for one in checkpoints:
        if one.completed_at_ms is not None:
            of_region = {**labels, "region": one.region}
            yield Sample("quota_region_completed_timestamp_seconds", of_region, one.completed_at_ms / 1000)
