"""How a run ended.

refused_report   the report of a run that a decision ended
failed_report    of a run that an error ended
keep             completes the run's row in the store
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import quota
from quota import Decision, Session
from quota.common.log import line
from quota.common.redact import redact
from quota.common.text import describe
from quota.jobs.job import RunReport
from quota.jobs.store.file import StoreError
from quota.jobs.store.store import Store
from quota.reports.runs import RegionOfRun
from quota.settings.model import JobSettings

RegionOutcome = Literal["done", "partial", "skipped", "failed"]

log = logging.getLogger("quota.jobs")


def skipped(regions: Sequence[str], covered: Sequence[str] = ()) -> tuple[RegionOfRun, ...]:
    """The regions that a run did not cover."""
    return tuple(RegionOfRun(region, "skipped") for region in regions if region not in covered)


def failed_report(session: Session, name: str, error: BaseException) -> RunReport:
    """The report of a run that this error ended."""
    ours = error if isinstance(error, quota.QuotaError) else quota.QuotaError(redact(describe(error)))
    return RunReport(session.run, name, "failed", why=str(ours), exit_status=ours.exit_status)


def refused_report(session: Session, job: JobSettings, decision: Decision) -> RunReport:
    """The report of a run that this decision ended."""
    if decision.misconfigured:
        return failed_report(session, job.name, quota.ConfigError(decision.why()))
    return RunReport(
        session.run,
        job.name,
        "stopped",
        refused=True,
        refused_by=decision.refused_by,
        retry_at_ms=decision.retry_at_ms,
        why="; ".join(filter(None, (decision.why(), decision.remedy()))),
        # Waiting helps against neither, so cron must see it.
        exit_status=quota.LedgerError.exit_status if decision.reason in ("ledger-unavailable", "clock") else 0,
        refusal=decision.as_json(),
    )


def keep(store: Store, row: int, report: RunReport) -> RunReport:
    """Complete the run's row in the store. If that fails, the report, which it returns, still says what the run did."""
    try:
        store.runs.end(row, report)
    except StoreError as error:
        log.warning("%s: %s", line("run_not_kept", run=report.run, job=report.job), error)
    return report
