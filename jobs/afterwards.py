"""Follows up a run: metrics for node_exporter, notices, and a health check. `follow_up` is the entry point.

Each run writes two files of metrics, one of its project and one of its job: see `quota.reports.metrics`.
`quota.reports.notify` delivers these notices, each only once:

near_limit     80% of a limit is used                              once in its window
refused        the budget, not `max_units`, stopped a run          once in the limit's window
exhausted      upstream closed a bucket                            once for each closing
reopened       somebody reopened a bucket                          once for each reopening
stale          a region was last complete too long ago, or never   once a day until it is complete
run_failed     a run failed                                        once a day for each exit status, until a run succeeds
ledger_lost    a machine put lost charges back into the ledger     once for each machine
ledger_away    a run spent the machine's allowance                 once a day until the ledger answers, on each machine
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import quota
from quota.common.clock import host_clock, moment, rfc3339
from quota.common.log import warn
from quota.common.text import many, members, one_line, spell
from quota.jobs.job import Away, RunReport
from quota.jobs.places import away_now, checkpoints_of
from quota.jobs.progress import named
from quota.jobs.store.checkpoints import Checkpoint, is_stale
from quota.jobs.store.file import StoreError
from quota.jobs.store.store import Store
from quota.reports.metrics import Sample, exposition, file_name, of_silence, of_status, of_sums, write_file
from quota.reports.notify import Notice, Ping, forget, notify
from quota.reports.runs import Run
from quota.reports.spending import read_sums
from quota.reports.status import LimitRow, Status, read_status
from quota.rules.refusals import OTHER
from quota.session import Session
from quota.terms.limits import DAY_MS, Calendar
from quota.wording import closed

NEAR_PERCENT = 80


class _Region(NamedTuple):
    """Where the job stands in a region. The region is due since `due_ms` (None: unknown), unless it is `away`."""

    place: Checkpoint
    due_ms: int | None
    away: Away | None


def follow_up(session: Session, report: RunReport, ping: Ping | None) -> None:
    """Follow up a run, as the configuration asks. Raises nothing.

    A run that found another run under way reports only regions that are stale: the other run reports the rest, and if
    it hangs, the silence must show. A run that found its job on another machine sends no health check.
    """
    if report.outcome == "overlap":
        if session.settings.notify is not None:
            regions, now_ms = _regions(session, report), ledgers_clock(session)
            notify(session, list(_notices_of_regions(session, report, now_ms, regions)))
        return
    if session.settings.textfile is not None or session.settings.notify is not None:
        status, trouble = None, ""
        try:
            status = read_status(session, session.settings.jobs[report.job].credential)
        except (quota.LedgerError, quota.ConfigError) as error:
            trouble = str(error)
        regions = _regions(session, report)
        _write_metrics(session, report, status, regions)
        _tell(session, report, status, trouble, regions)
    if ping is not None and (ping.began or report.outcome != "elsewhere"):
        ping.end(report.exit_status)


def ledgers_clock(session: Session) -> int:
    """The ledger's clock, since this machine's may be wrong now; this machine's if the ledger does not answer."""
    with suppress(quota.QuotaError):
        return session.ledger.now_ms()
    return host_clock()


def _regions(session: Session, report: RunReport) -> list[_Region]:
    """The regions of the job. If the ledger does not say whose they are, only those of this run are due. Empty if the
    store cannot be read."""
    settings, job = session.settings.store, session.settings.jobs[report.job]
    try:
        with Store(settings.url, retention_ms=settings.retention_ms) as store:
            places = checkpoints_of(session, job, store)
            away, judged = dict(report.elsewhere), {place.region for place in places}
            try:
                away = {**away_now(session, job), **away}
            except (quota.LedgerError, quota.ConfigError):
                judged = {region.region for region in report.regions}
            return [
                _Region(place, store.due_since(place) if place.region in judged else None, away.get(place.region))
                for place in places
            ]
    except quota.QuotaError as error:
        if session.settings.textfile is not None:
            warn("textfile_without_store", error, job=job.name)
        return []


# -- metrics -----------------------------------------------------------------------------------------------------------


def _write_metrics(session: Session, report: RunReport, status: Status | None, regions: Sequence[_Region]) -> None:
    """Write both files after a run, if the configuration names a folder for them.

    If all the job is on other machines, the file has no last run: an old run would hide that the runs there fail.
    `status` is of the job's credential; None: the ledger did not answer. Raises nothing: an error becomes one line of
    the log.
    """
    folder, job = session.settings.textfile, session.settings.jobs[report.job]
    if folder is None:
        return
    project = session.credential(job.credential).project
    written = Sample("quota_textfile_written_timestamp_seconds", {"project": project}, host_clock() / 1000)
    labels = {"project": project, "quota_job": job.name}
    of_job, of_project = [written._replace(labels=labels)], [written]
    ended: list[Run] = []
    if report.outcome != "elsewhere":
        ended = [replace(report, ended_ms=host_clock())]
    elif any(region.away is None for region in regions):
        with suppress(OSError, quota.ConfigError, StoreError), Store.if_made(session.settings.store) as store:
            ended = store.runs.read(job.name, count=1, ended=True)
    of_job += samples_of_job(labels, ended, [region.place for region in regions])
    if status is None:
        with suppress(quota.ConfigError):  # no run can use this ledger
            of_project += of_silence(project, session.budget(job.credential).owed_units())
    else:
        of_project += of_status(status, project)
        session.budget(job.credential).hand_over_refusals()
        try:
            sums, refusals = read_sums(session.project(job.credential))
        except quota.LedgerError as error:
            warn("textfile_without_history", error, project=project)
        else:
            for samples, jobs in ((of_job, (job.name,)), (of_project, ("", OTHER))):
                charged = [charges for charges in sums if charges.job in jobs]
                samples += of_sums(project, charged, [refused for refused in refusals if refused.job in jobs])
    try:
        write_file(folder, file_name(project), exposition(of_project))
        write_file(folder, file_name(project, job.name), exposition(of_job))
    except OSError as error:
        warn("textfile_not_written", error.strerror or error, folder=one_line(folder))


def samples_of_job(labels: dict[str, str], ended: Iterable[Run], checkpoints: Iterable[Checkpoint]) -> Iterator[Sample]:
    """The metrics of a job: of its last run, if it is among `ended`, and of the regions that were ever complete."""
    for run in ended:
        if run.ended_ms is not None and run.exit_status is not None:
            yield Sample("quota_run_last_end_timestamp_seconds", labels, run.ended_ms / 1000)
            yield Sample("quota_run_last_exit_status", labels, run.exit_status)
    for checkpoint in checkpoints:
        if checkpoint.completed_at_ms is not None:
            of_region = {**labels, "region": checkpoint.region}
            yield Sample("quota_region_completed_timestamp_seconds", of_region, checkpoint.completed_at_ms / 1000)


# -- notices -----------------------------------------------------------------------------------------------------------


def _tell(session: Session, report: RunReport, status: Status | None, trouble: str, regions: Sequence[_Region]) -> None:
    """Send the notices after a run to the targets in `[notify]`. Without a status, `trouble` says why. Raises
    nothing."""
    settings, job = session.settings.notify, session.settings.jobs[report.job]
    if settings is None:
        return
    project = session.credential(job.credential).project
    notices = [*_notices_of_run(project, report, status)]
    if report.outcome != "elsewhere" or report.elsewhere:  # else the machine that runs the tick reports them
        now_ms = host_clock() if status is None else ledgers_clock(session)
        notices += _notices_of_regions(session, report, now_ms, regions)
    if status is not None:
        notices += _notices_of_budget(project, status)
        trouble = status.unwritable
    away = Notice("ledger_away", project, "", "", DAY_MS, here=True)
    if not trouble:
        forget(session, [away], here=True)
    elif report.exit_status in (0, 75) and (owed_units := session.budget(job.credential).owed_units()):
        allowance = session.budget(job.credential).allowance()
        left = "" if allowance is None else f", {allowance.remaining_units:,} left"
        message = f"job {job.name} drew {many(owed_units, 'unit')} of this machine's allowance{left}: {trouble}"
        notices.append(away._replace(message=message, facts={"owed_units": owed_units}))
    failures = [Notice("run_failed", project, job.name, "", DAY_MS, cause=status) for status in _FAILURES]
    if report.outcome == "elsewhere" or _succeeds(report, regions):
        forget(session, failures, here=report.outcome == "elsewhere")
    notify(session, notices)


_FAILURES = [str(error.exit_status) for error in (quota.QuotaError, quota.LedgerError, quota.ConfigError)]
"""The exit statuses of a run that failed."""


def _succeeds(report: RunReport, regions: Sequence[_Region]) -> bool:
    """Whether the job runs without a failure: this run has covered something, and no region's last pass failed."""
    places = [region.place for region in regions]
    has_failed = not places or any((place.failed_at_ms or 0) > (place.completed_at_ms or 0) for place in places)
    covers = report.outcome == "done" or report.attempts > 0
    return covers and not (report.exit_status or report.elsewhere or has_failed)


def _notices_of_run(project: str, report: RunReport, status: Status | None) -> Iterator[Notice]:
    job, exit_status = report.job, report.exit_status
    # "counting": the ledger counts first. "run": the run spent its max_units. The next run goes on in both cases.
    expected = report.refusal is not None and report.refusal["reason"] in ("counting", "run")
    failed = report.outcome == "failed" or (exit_status not in (0, 75) and exit_status < 128)  # else a signal ended it
    if failed and exit_status != quota.UsageError.exit_status:
        message = f"job {named(job, report.failed_region)} failed with exit status {exit_status}"
        message += "".join(f": {why}" for why in dict.fromkeys((report.why, report.causes[0])) if why)
        facts = members(report, "job exit_status")
        yield Notice("run_failed", project, job, message, DAY_MS, facts, cause=str(exit_status))
    elif report.refused and not expected:
        by, once_ms = report.refused_by or "", DAY_MS
        if status is not None:
            rows = [row for credential in status.credentials for row in credential.limits if row.limit.name == by]
            by, once_ms = _in_window(rows[0], status.at_ms) if rows else (by, once_ms)
        facts = members(report, "job refused_by retry_at")
        then = "" if report.retry_at_ms is None else f"; a run goes on from {moment(report.retry_at_ms)}"
        message = f"job {job} was stopped: {report.why}{then}"
        yield Notice("refused", project, f"{job} {by}".rstrip(), message, once_ms, facts)


def _in_window(row: LimitRow, now_ms: int) -> tuple[str, int]:
    """The subject of a limit's notice, and how long it is sent only once. The subject of a calendar limit names its
    period: the next period's notice may come at an earlier hour."""
    window, name = row.limit.view.window, row.limit.name
    period = f" {window.edges(now_ms)[0]}" if isinstance(window, Calendar) else ""
    return f"{name}{period}", window.longest_ms


def _notices_of_budget(project: str, status: Status) -> Iterator[Notice]:
    for credential in status.credentials:
        for row in credential.limits:
            name, used, number = row.limit.name, row.state.used_units, row.enforced_units
            if number and used * 100 >= number * NEAR_PERCENT:
                subject, once_ms = _in_window(row, status.at_ms)
                facts = {"limit": name, "used_units": used, "limit_units": number}
                kind = "shadow limit" if row.limit.shadow else "limit"
                message = f"{kind} {name} of project {project} has {used:,} of {many(number, row.state.noun)} used"
                yield Notice("near_limit", project, subject, message, once_ms, facts)
        for loss in credential.losses[-1:]:  # earlier runs reported the others; the ledger may have lost that
            lost = f"{many(loss.charges, 'charge')} of {many(loss.units, 'unit')}"
            message = f"the ledger had lost {lost} of project {project}; {loss.machine} put them back"
            facts = {"put_back_at": rfc3339(loss.at_ms), **members(loss, "machine charges units")}
            yield Notice("ledger_lost", project, rfc3339(loss.at_ms), message, DAY_MS, facts)
        for exhaustion in credential.exhausted:
            event, since_ms, state = "exhausted", exhaustion.since_ms, f"is closed{closed(exhaustion).rest}"
            if exhaustion.reopened_ms:
                event, since_ms = "reopened", exhaustion.reopened_ms
                state = f"was opened again: {exhaustion.reopened_because}"
            bucket = exhaustion.bucket
            message = f"bucket {bucket} of project {project} {state}"
            yield Notice(event, project, f"{bucket} {since_ms}", message, 7 * DAY_MS, {"bucket": bucket})


def _notices_of_regions(
    session: Session, report: RunReport, now_ms: int, regions: Sequence[_Region]
) -> Iterator[Notice]:
    """The notices of stale regions at a time. A region on another machine is stale if that machine is silent for as
    long."""
    job, settings = session.settings.jobs[report.job], session.settings.notify
    project = session.credential(job.credential).project
    for checkpoint, due_ms, away in regions:
        region, completed_ms = checkpoint.region, checkpoint.completed_at_ms
        did = "was last complete" if completed_ms is not None else "was never complete: its job first ran"
        if away is not None:
            due_ms = now_ms - away.now_ms + away.heard_ms
            did = f"runs on {away.runs_on}, which was last heard of"
        if settings is None or due_ms is None or not is_stale(due_ms, now_ms, settings.stale_ms):
            continue
        where = f"region {region} of job {job.name}" if region else f"job {job.name}"
        message = f"{where} {did} {spell(now_ms - due_ms)} ago"
        if (ahead_ms := due_ms - now_ms) > 0:
            message = f"{where} {did} while a clock was wrong: it is dated {spell(ahead_ms)} ahead"
        facts = members(checkpoint, "job region completed_at")
        yield Notice("stale", project, named(job.name, region), message, DAY_MS, facts, cause=str(due_ms))
