"""What a run gives reason to tell somebody: `quota.reports.notify` delivers it, once for each thing.

near_limit     80% of a limit is used                              once in its window
refused        the budget stopped a run, not its own `max_units`   once in the limit's window
exhausted      upstream has closed a bucket                        once for each time
reopened       somebody opened it again                            once for each time
stale          a region's last complete pass is too long ago       once a day
run_failed     a run failed                                        once a day
ledger_lost    the ledger had lost charges, and got them back      once for each machine that put some back
ledger_away    a run lived on the machine's allowance              once a day, on each machine
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quota.common.clock import host_clock, rfc3339
from quota.common.members import members
from quota.common.text import many, spell
from quota.jobs.job import RunReport
from quota.jobs.store.checkpoints import Checkpoint, is_stale
from quota.reports.notify import Notice, notify
from quota.reports.status import LimitRow, Status
from quota.session import Session
from quota.terms.limits import DAY_MS, Calendar

NEAR_PERCENT = 80


def tell(
    session: Session,
    job: str,
    exit_status: int,
    report: RunReport,
    status: Status | None,
    checkpoints: Sequence[Checkpoint],
) -> None:
    """Tell whom `[notify]` names what there is to say after a run. Raises nothing."""
    settings = session.settings.notify
    if settings is None:
        return
    credential = session.settings.jobs[job].credential
    project = session.credential(credential).project
    notices = [*_of_run(project, job, exit_status, report, status)]
    notices += _of_regions(project, job, settings.stale_ms, checkpoints)
    if status is not None:
        notices += _of_budget(project, status)
    elif exit_status in (0, 75) and (owed_units := session.budget(credential).owed_units()):
        owes = f"{many(owed_units, 'unit')} of this machine's allowance"
        message = f"ledger {session.ledger.label} does not answer; job {job} goes on with {owes}"
        notices.append(Notice("ledger_away", project, "", message, DAY_MS, {"owed_units": owed_units}, here=True))
    notify(session, notices)


def _of_run(project: str, job: str, exit_status: int, report: RunReport, status: Status | None) -> Iterator[Notice]:
    if report.outcome == "failed" or (exit_status not in (0, 75) and exit_status < 128):  # else a signal ended it
        message = f"job {job} failed with exit status {exit_status}" + (f": {report.why}" if report.why else "")
        yield Notice("run_failed", project, job, message, DAY_MS, {"job": job, "exit_status": exit_status})
    elif report.refused and not _expected(report):
        named = report.refused_by or ""
        said = (_in_window(row, status.at_ms) for row in _rows(status) if row.limit.name == named) if status else ()
        by, once_ms = next(iter(said), (named, DAY_MS))
        retry_at = None if report.retry_at_ms is None else rfc3339(report.retry_at_ms)
        facts = {"job": job, "refused_by": report.refused_by, "retry_at": retry_at}
        message = f"job {job} was stopped: {report.why}"
        yield Notice("refused", project, f"{job} {by}".rstrip(), message, once_ms, facts)


def _expected(report: RunReport) -> bool:
    """Whether it was refused only because the ledger counts first, or because it had spent what one run of it may: the
    next run goes on with that."""
    return report.refusal is not None and report.refusal["reason"] in ("counting", "run")


def _rows(status: Status | None) -> Iterator[LimitRow]:
    for credential in status.credentials if status is not None else ():
        yield from credential.limits


def _in_window(row: LimitRow, now_ms: int) -> tuple[str, int]:
    """What is told once of a limit, and for how long. A calendar limit is named with its period: the next one's notice
    may come at an earlier hour."""
    window, name = row.limit.view.window, row.limit.name
    period = f" {window.edges(now_ms)[0]}" if isinstance(window, Calendar) else ""
    return f"{name}{period}", window.longest_ms


def _of_budget(project: str, status: Status) -> Iterator[Notice]:
    for row in _rows(status):
        name, used, number = row.limit.name, row.state.used_units, row.enforced_units
        if number and used * 100 >= number * NEAR_PERCENT:
            subject, once_ms = _in_window(row, status.at_ms)
            facts = {"limit": name, "used_units": used, "limit_units": number}
            kind = "shadow limit" if row.limit.shadow else "limit"
            message = f"{kind} {name} of project {project} has {used:,} of {many(number, row.state.noun)} used"
            yield Notice("near_limit", project, subject, message, once_ms, facts)
    for credential in status.credentials:
        for loss in credential.put_back:
            lost = f"{many(loss.charges, 'charge')} of {many(loss.units, 'unit')}"
            message = f"the ledger had lost {lost} of project {project}; {loss.machine} has put them back"
            put_back_at = rfc3339(loss.at_ms)
            facts = {"put_back_at": put_back_at, **members(loss, "machine charges units")}
            yield Notice("ledger_lost", project, f"{put_back_at} {loss.machine}", message, DAY_MS, facts)
        for x in credential.exhausted:
            event, since_ms = ("reopened", x.reopened_ms) if x.reopened_ms else ("exhausted", x.since_ms)
            said = x.reopened_because if x.reopened_ms else x.evidence
            state = "was opened again" if x.reopened_ms else "is closed by upstream"
            message = f"bucket {x.bucket} of project {project} {state}: {said}"
            yield Notice(event, project, f"{x.bucket} {since_ms}", message, 7 * DAY_MS, {"bucket": x.bucket})


def _of_regions(project: str, job: str, stale_ms: int | None, checkpoints: Sequence[Checkpoint]) -> Iterator[Notice]:
    now_ms = host_clock()
    for one in checkpoints:
        if stale_ms is None or one.completed_at_ms is None or not is_stale(one.completed_at_ms, now_ms, stale_ms):
            continue
        where = f"region {one.region} of job {job}" if one.region else f"job {job}"
        message = f"{where} was last complete {spell(now_ms - one.completed_at_ms)} ago"
        if (ahead_ms := one.completed_at_ms - now_ms) > 0:
            message = f"{where} was last complete while a clock was wrong: it is dated {spell(ahead_ms)} ahead"
        facts = {"job": job, "region": one.region, "completed_at": rfc3339(one.completed_at_ms)}
        yield Notice("stale", project, f"{job} {one.region}".rstrip(), message, DAY_MS, facts)
