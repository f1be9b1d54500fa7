"""The account of a run: what it did in its regions, and how it ended.

Account          the regions as they end, and the report of them
ended            the report of a run with this outcome
refused_report   of a run that a decision ended
failed_report    of a run that an error ended
keep             completes the run's row in the store
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import quota
from quota import Decision, Session
from quota.common.log import line, warn
from quota.common.redact import redact
from quota.common.text import describe, listed, show
from quota.jobs.job import Away, Page, RunReport
from quota.jobs.store.checkpoints import Checkpoint
from quota.jobs.store.file import StoreError
from quota.jobs.store.store import Store
from quota.reports.runs import RegionOfRun
from quota.settings.model import JobSettings

RegionOutcome = Literal["done", "partial", "skipped", "failed"]
RunOutcome = Literal["done", "stopped", "failed", "overlap", "elsewhere"]

log = logging.getLogger("quota.jobs")


def ended(session: Session, job: JobSettings, outcome: RunOutcome, why: str) -> RunReport:
    return RunReport(session.run, job.name, outcome, why=why)


def skipped(regions: Sequence[str], covered: Sequence[str] = ()) -> tuple[RegionOfRun, ...]:
    """The regions that a run did not cover."""
    return tuple(RegionOfRun(region, "skipped") for region in regions if region not in covered)


def failed_report(session: Session, name: str, error: BaseException) -> RunReport:
    """The report of a run that this error ended."""
    if isinstance(error, quota.QuotaError):
        return RunReport(session.run, name, "failed", why=str(error), exit_status=error.exit_status)
    return RunReport(session.run, name, "failed", why=redact(describe(error)), exit_status=quota.QuotaError.exit_status)


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


class Account:
    """What one run has done. `earlier`: the regions that its round had covered before."""

    def __init__(self, session: Session, job: JobSettings) -> None:
        self._session, self._job = session, job
        self.outcomes: list[RegionOfRun] = []
        self.earlier: list[str] = []
        self.added: dict[str, tuple[int, int]] = {}  # region -> pages and items that this run stored
        self._idle: list[str] = []  # the regions that had nothing to ask for
        self.unknown: list[str] = []  # the ids that upstream does not know

    def stored(self, before: Checkpoint, page: Page, *, finished: bool) -> None:
        """Count a page that was stored at this checkpoint."""
        pages, items = self.added.get(before.region, (0, 0))
        self.added[before.region] = pages + page.complete, items + page.items
        if finished and not page.complete and not before.begun:
            self._idle.append(before.region)

    def outcome(self, place: Checkpoint, outcome: RegionOutcome, error: str | None) -> RegionOfRun:
        """How a region ends that now stands at this place."""
        pages, items = self.added.get(place.region, (0, 0))
        cursor = None if outcome == "done" else place.cursor
        return RegionOfRun(place.region, outcome, items=items, pages=pages, cursor=cursor, error=error)

    def report(
        self, end: RunReport | None, units: Mapping[str, int], away: Mapping[str, Away], passed_over: Sequence[str]
    ) -> RunReport:
        """The report of the run, which spent these units by region. `end` is how it ended; None: it came to the end of
        its regions. `away` are regions that other runs have; `passed_over` those with a call that was refused."""
        regions = tuple(replace(o, units=units.get(o.region, 0)) for o in self.outcomes)
        notes = "; ".join(self._notes(units, passed_over))
        end = end or self._own_end(regions, away, notes)
        has_failed = any(region.outcome == "failed" for region in regions)
        status = end.exit_status or (quota.QuotaError.exit_status if has_failed else 0)
        return replace(end, regions=regions, units=sum(units.values()), exit_status=status, elsewhere=away)

    def _own_end(self, regions: Sequence[RegionOfRun], away: Mapping[str, Away], notes: str) -> RunReport:
        failed = [region for region in regions if region.outcome == "failed"]
        if failed:
            why, only = failed[0].error or "", failed[0].region if len(self._job.regions) > 1 else ""
            if len(regions) > 1:
                names, only = ", ".join(region.region for region in failed), ""
                why = f"{len(failed)} of {len(regions)} regions failed ({names})"
            return replace(ended(self._session, self._job, "failed", why), failed_region=only)
        replaced = any(o.region in away and o.outcome in ("partial", "skipped") for o in regions)
        return ended(self._session, self._job, "elsewhere" if replaced else "done", notes)

    def _notes(self, units: Mapping[str, int], passed_over: Sequence[str]) -> Iterator[str]:
        """What a run says of calls that it did not make, and of ids that upstream does not know."""
        if idle := [region for region in self._idle if not units.get(region)]:
            yield "there was nothing to fetch" + (f" in {listed(idle)}" if units else "")
        if self.earlier:
            yield f"its round had covered {listed(self.earlier)} before"
        if self.unknown:
            unknown = f"upstream does not know {', '.join(map(show, self.unknown))}: correct or remove them"
            warn("unknown_ids", unknown, job=self._job.name)
            yield unknown
        if passed_over:
            distinct = [*dict.fromkeys(passed_over)]
            where = f", in {listed(distinct)}" if any(distinct) else ""
            lacks = f"the fetch function went on without a call that was refused{where}"
            warn("page_lacks_a_call", lacks, job=self._job.name)
            yield lacks
