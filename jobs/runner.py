"""One run of a job: one cron tick. `run_job` is the door.

A *round* is one pass over every region of a job. A run that stops early leaves some regions pending, and the next run
covers only those. When no region is pending, a run begins a new round. So runs that the budget cuts short add up to
exactly one round: no page is fetched twice and no region is forgotten. See `quota.jobs.rotation` for the order of the
regions and `Store.save_page` for what is stored with a page.

How a step may end, and what follows:

    a page                           stored with the new cursor, in one transaction; then the next step
    a refusal by the budget          the run stops at once: outcome "stopped"
    upstream's quota has run out     the same
    a transient error                up to ATTEMPTS attempts; then the region fails and keeps its cursor
    an answer beyond its limits      the region fails and keeps its cursor
    an error of this region alone    the region fails and begins its next pass with the first page
    configuration, ledger, store     the run fails at once
    SIGINT, SIGTERM                  the page in flight is stored if it arrives within STOP_WITHIN_S; the run stops
    another machine took over        the page in hand is stored; the run goes on with the regions that it still has

A failed region counts as covered in its round: if it stayed pending, the next runs would cover nothing else.
"""

from __future__ import annotations

import copy
import json
import logging
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import quota
from quota.budget import account_of
from quota.common.clock import host_clock
from quota.common.log import line
from quota.common.text import describe
from quota.jobs.failure import Failure, classify_failure
from quota.jobs.hold import Hold
from quota.jobs.job import Page, RegionReport, RunReport, attempt_of, load_fetch, wants_store
from quota.jobs.lock import hashed, lock_name, only_one, store_id_of
from quota.jobs.store.store import Checkpoint, Store, StoreError
from quota.ledger.contract import CLOCK_SLACK_MS
from quota.terms.arguments import texts
from quota.terms.attribution import attempt_number
from quota.terms.limits import HOUR_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from quota import Budget, Decision, Session
    from quota.jobs.job import Fetch, RegionOutcome, RunOutcome
    from quota.ledger.claims import Ending
    from quota.ledger.entry import Charge, Entry
    from quota.settings.model import JobSettings

ATTEMPTS = 4
MAX_WAIT_S = 4.0
"""The longest wait between two attempts. With ATTEMPTS, one step waits at most 3 x 5 s, jitter included."""

MAX_STEPS = 10
"""A fetch function that takes more steps than this without completing a page is going round in circles."""

STOP_WITHIN_S = 8.0
"""How long the page in flight may take after a signal to stop."""

END_WITHIN_S = 9.0
"""How long a process may live after a signal to stop, whatever it waits for. Supervisors kill after 10 s."""

log = logging.getLogger("quota.jobs")


class Watcher(Protocol):
    """Follows the progress of a run. Its methods must not raise."""

    def began(self, checkpoints: Sequence[Checkpoint]) -> None: ...

    def page(self, checkpoint: Checkpoint) -> None: ...

    def retry(self, checkpoint: Checkpoint, message: str, wait_s: float) -> None: ...

    def ended(self, outcome: RegionReport) -> None: ...


class Silent:
    """A watcher that says nothing."""

    def began(self, checkpoints: Sequence[Checkpoint]) -> None: ...

    def page(self, checkpoint: Checkpoint) -> None: ...

    def retry(self, checkpoint: Checkpoint, message: str, wait_s: float) -> None: ...

    def ended(self, outcome: RegionReport) -> None: ...


def run_job(
    session: Session,
    name: str,
    *,
    regions: str | Sequence[str] = (),
    by_rotation: bool = False,
    here: bool = False,
    tick: str = "",
    tick_ms: int = HOUR_MS,
    refusal: Callable[[], Decision | None] = lambda: None,
    stop: Callable[[], int] = lambda: 0,
    watcher: Watcher | None = None,
    wait: Any = None,
    clock: Callable[[], int] | None = None,
) -> RunReport:
    """Run one tick of the job called `name` over `regions` (default: all of the job's), and report how it ended.

    With `by_rotation` the number of `regions` counts, not their names: the run covers those whose turn it is in the
    job's round. A schedule that starts the regions one by one needs that. If the budget admits only a few ticks a day,
    those would otherwise be the same regions every day.
    On a ledger that machines share, the run covers only regions that are free or its own store's (`quota.jobs.hold`);
    `here`: it takes over the others too. `tick` names the tick of a schedule, which is run once, and remembered for
    `tick_ms`. With its regions and its tick in hand the run asks for a `refusal`; if there is one, it ends with that.
    The run calls `stop` before every attempt and ends when it returns the number of a signal. `wait` is a tenacity wait
    between attempts, and `clock` (ms since 1970) dates what is stored; both are for tests.
    Raises UsageError for a job or region that does not exist and for a call whose cost can never fit, and ConfigError
    for a fetch function that cannot be used. Later errors are in the report.
    """
    job = _job(session, name)
    chosen = _regions(job, texts(regions, "region"))
    max_regions = len(chosen)
    if by_rotation:
        chosen = _regions(job, ())
    path = session.settings.path
    folder = None if path is None else path.absolute().parent
    fetch = load_fetch(job.fetch, job.options, folder)
    with only_one(session.settings.store.url, job.name) as lock:
        if lock is None:
            return RunReport(session.run, job.name, "overlap", why="already running on this machine; nothing done")
        store_settings = session.settings.store
        try:
            with Store(store_settings.url, retention_ms=store_settings.retention_ms, clock=clock) as store:
                hold = _hold(session, job, store, lock, (clock or host_clock)(), tick, tick_ms)
                with _ending(hold) as endings:
                    hold.begin(chosen, here=here)
                    mine = [region for region in chosen if region not in hold.away]
                    elsewhere = _elsewhere(session, job, store, hold, chosen[:max_regions], mine)
                    if elsewhere is not None:
                        return elsewhere
                    row = store.runs.begin(session.run, session.credential(job.credential).project, job.name)
                    refused = refusal()
                    if refused is not None:
                        report = _refused_report(session, job, refused)
                        _keep(store, row, report)
                        return report
                    run = _Run(
                        session, job, mine, max_regions, fetch, store, hold, stop, watcher or Silent(), wait, clock
                    )
                    try:
                        report = run.run()
                    except BaseException as error:
                        _keep(store, row, failed_report(session, name, error))
                        raise
                    _keep(store, row, report)
                    if stop() and any(region.outcome in ("partial", "skipped") for region in report.regions):
                        endings.append("stopped")  # its tick goes on with the next start
                    if run.end is not None and run.end.outcome == "failed" and not run.added:
                        endings.append("failed")  # a machine that cannot run the job must not keep it from others
                    if max_regions < len(chosen):
                        return report
                    skipped = [RegionReport(region, "skipped") for region in chosen if region not in mine]
                    return replace(report, regions=(*report.regions, *skipped))
        except StoreError as error:
            return failed_report(session, name, error)


def _hold(session: Session, job: JobSettings, store: Store, lock: int, now_ms: int, tick: str, tick_ms: int) -> Hold:
    store_id = store_id_of(store, lock)
    gap_ms = store.start_run(job.name, work_of(session, job))
    step_ms, machine = longest_step_ms(job), lock_name(lock)
    return Hold(session, job, store_id, machine, gap_ms, step_ms, now_ms, tick=tick, tick_ms=tick_ms)


def _keep(store: Store, row: int, report: RunReport) -> None:
    """Complete the run's row in the store. Where that fails, the report still says what the run did."""
    try:
        store.runs.end(row, report)
    except StoreError as error:
        if report.why != str(error):
            log.warning("%s: %s", line("run_not_kept", run=report.run, job=report.job), error)


@contextmanager
def _ending(hold: Hold) -> Iterator[list[Ending]]:
    """Ends the hold with the block: as the last ending in the list that it yields says; "done" if that is empty."""
    endings: list[Ending] = []
    try:
        yield endings
    except BaseException as error:
        endings.append("failed" if isinstance(error, quota.QuotaError) else "stopped")
        raise
    finally:
        hold.end(endings[-1] if endings else "done")


def _elsewhere(
    session: Session, job: JobSettings, store: Store, hold: Hold, regions: Sequence[str], mine: Sequence[str]
) -> RunReport | None:
    """The report of a run that has nothing to do here; None if it has. The store notes where the job runs instead."""
    away = hold.furthest()
    noted = (None, 0, 0) if away is None else (away.runs_on, away.heard_ms, away.until_ms)
    store.note_elsewhere(job.name, work_of(session, job), *noted)
    if hold.tick_is:
        why, waits = _TICK_IS[hold.tick_is], hold.tick_is == "running"
        return RunReport(session.run, job.name, "elsewhere", why=why, waits=waits)
    if away is None or mine:
        return None
    skipped = tuple(RegionReport(region, "skipped") for region in regions)
    return RunReport(session.run, job.name, "elsewhere", skipped, away=away, waits=away.same_store)


_TICK_IS = {
    "done": "a scheduler has run this tick already",
    "running": "another scheduler is running this tick",
}


def work_of(session: Session, job: JobSettings) -> str:
    """What the checkpoints of a job are of: its project, its fetch function and, where it has any, its options. With
    others the cursor of a pass names pages of another list."""
    work = f"{session.credential(job.credential).project}|{job.fetch}"
    return f"{work}|{hashed(json.dumps(job.options, sort_keys=True, default=str), 8)}" if job.options else work


def longest_step_ms(job: JobSettings) -> int:
    """The longest time between two pages, where upstream is waited for and nothing else."""
    return round(ATTEMPTS * (job.max_answer_s + MAX_WAIT_S + 1)) * 1_000


def failed_report(session: Session, name: str, error: BaseException) -> RunReport:
    """The report of a run that this error has ended."""
    if isinstance(error, quota.QuotaError):
        return RunReport(session.run, name, "failed", why=str(error), exit_status=error.exit_status)
    from quota.common.redact import redact

    return RunReport(session.run, name, "failed", why=redact(describe(error)), exit_status=quota.QuotaError.exit_status)


def _refused_report(session: Session, job: JobSettings, decision: Decision) -> RunReport:
    end = _refused(decision)
    return RunReport(
        session.run,
        job.name,
        "stopped",
        refused_by=end.refused_by,
        retry_at_ms=end.retry_at_ms,
        refused=True,
        why=end.why,
        exit_status=end.exit_status,
        refusal=decision,
    )


@dataclass(frozen=True)
class _End:
    """Why a run ends here."""

    outcome: RunOutcome
    why: str
    exit_status: int = 0
    refused: bool = False
    refused_by: str | None = None
    retry_at_ms: int | None = None
    refusal: Decision | None = None


class _Interrupted(Exception):  # noqa: N818 - not an error: somebody asked for it
    """A signal came, and the run waits for no page any longer."""


class _Run:
    def __init__(
        self,
        session: Session,
        job: JobSettings,
        regions: Sequence[str],
        max_regions: int,
        fetch: Fetch,
        store: Store,
        hold: Hold,
        stop: Callable[[], int],
        watcher: Watcher,
        wait: Any,
        clock: Callable[[], int] | None,
    ) -> None:
        self.session = session
        self.job = job
        self.regions = regions
        self.max_regions = max_regions
        self.store = store
        self.hold = hold
        self.work = work_of(session, job)
        self.stop = stop
        self.watcher = watcher
        self.wait = wait
        self.clock = clock or host_clock
        self.budget: Budget = session.budget(job.credential)
        self.fetch = fetch
        self.given = {"store": store} if wants_store(fetch) else {}
        self.client: Any = None
        self.told_s: float | None = None  # when a signal came while a page was in flight
        self.since_ms = 0
        self.attempts_before = 0  # attempts that this process counted before this run
        self.end: _End | None = None
        self.here = Checkpoint(job.name, "", work=self.work)  # of the current region
        self.added: dict[str, tuple[int, int]] = {}  # region -> pages and items that this run stored

    def run(self) -> RunReport:
        try:
            return self._run()
        finally:
            if self.client is not None:
                self.client.close()

    def _run(self) -> RunReport:
        outcomes: list[RegionReport] = []
        self.store.delete_expired()
        checkpoints = self.store.start_round(self.job.name, self.regions, self.work)[: self.max_regions]
        self.watcher.began(checkpoints)
        left: Checkpoint | None = None
        for checkpoint in checkpoints:
            self.here = checkpoint
            if self.end is None and checkpoint.region not in self.hold.away:
                with quota.labels(job=self.job.name, region=checkpoint.region):
                    outcome = self._region()
            else:
                outcome = self._unfinished()
            if left is None and outcome.outcome in ("partial", "skipped"):
                left = self.here
            outcomes.append(outcome)
            self.watcher.ended(outcome)
        return self._report(outcomes, left)

    # -- one region --------------------------------------------------------------------------------------------------

    def _region(self) -> RegionReport:
        try:
            return self._pass()
        except quota.UsageError:
            raise
        except quota.Refused as refusal:
            self.end = _refused(refusal.decision)
            if self.end.exit_status:
                return self._unfinished(self.end.why)
        except quota.QuotaError as error:
            self.end = _End("failed", str(error), error.exit_status)
            return self._outcome("failed", str(error))
        except _Interrupted as interrupt:
            self.end = _End("stopped", f"interrupted{interrupt}")
        return self._unfinished()

    def _pass(self) -> RegionReport:
        """Fetch and store one page after another until the pass is complete or something ends it."""
        inherited = self.here.cursor is not None
        steps = 0
        while self.here.pages < self.job.pages:
            checkpoint = self.here
            if self.stop():
                raise _Interrupted
            self.store.check_space()
            started_at_ms = self.clock()
            try:
                page = self._step(checkpoint)
                steps = 0 if page.complete else steps + 1
                if steps > MAX_STEPS:
                    raise RuntimeError(f"fetch made {steps} steps in a row without completing a page")
            except Exception as error:
                ends_all = isinstance(error, (quota.QuotaError, _Interrupted, MemoryError))
                if ends_all and not isinstance(error, quota.BadAnswer):
                    raise
                failure = self._classify(error, checkpoint)
                trouble = line(
                    "step_failed",
                    job=checkpoint.job,
                    region=checkpoint.region,
                    page=checkpoint.pages + 1,
                    kind=failure.kind,
                )
                log.debug("%s", trouble, exc_info=True)
                if failure.kind == "cursor" and inherited:
                    # Upstream no longer knows the cursor of an earlier run, so the rest of that pass cannot be fetched.
                    self.here, inherited = self.store.restart(checkpoint), False
                    continue
                return self._give_up(checkpoint, failure, answered=hasattr(error, "resp"))
            inherited = False
            finished = page.cursor is None or (page.complete and checkpoint.pages + 1 >= self.job.pages)
            if not finished and self.store.was_at(checkpoint, page.cursor):
                return self._give_up(checkpoint, _CIRCLE, answered=True)
            self.here = self.store.save_page(checkpoint, page, started_at_ms=started_at_ms, finished=finished)
            pages, items = self.added.get(checkpoint.region, (0, 0))
            self.added[checkpoint.region] = pages + page.complete, items + len(page.videos) + len(page.channels)
            self.watcher.page(self.here)
            _debug(
                "page_stored",
                job=checkpoint.job,
                region=checkpoint.region,
                page=checkpoint.pages + 1,
                complete=page.complete,
                items=len(page.videos) + len(page.channels),
                items_of_pass=self.here.items,
                took_ms=self.clock() - started_at_ms,
                finished=finished,
            )
            self.hold.renew()
            if finished:
                return self._outcome("done")
            if checkpoint.region in self.hold.away:
                return self._unfinished()
        # The job now asks for fewer pages than when this pass began.
        self.here = self.store.finish(self.here)
        return self._outcome("done")

    def _step(self, checkpoint: Checkpoint) -> Page:
        """One step of the fetch function, attempted again where that may help."""
        if self.client is None:
            self._connect(checkpoint)
        from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential_jitter

        retrying = Retrying(
            stop=stop_after_attempt(ATTEMPTS),
            wait=self.wait or wait_exponential_jitter(initial=1, max=MAX_WAIT_S, jitter=1),
            retry=retry_if_exception(lambda error: self._worth_retrying(error, checkpoint)),
            before_sleep=lambda state: self._say_retry(state, checkpoint),
            sleep=self._sleep,
            reraise=True,
        )

        def attempt() -> Any:
            # A copy of the cursor and of the options: another attempt may have changed its own.
            cursor, options = copy.deepcopy((checkpoint.cursor, dict(self.job.options)))
            return self.fetch(self.client, checkpoint.region, cursor, **options, **self.given)

        page = retrying(attempt)
        if not isinstance(page, Page):
            raise TypeError(f"fetch returned {type(page).__name__}, not a quota.jobs.job.Page")
        items, max_items = len(page.videos) + len(page.channels), self.job.max_items
        if items > max_items:
            raise quota.BadAnswer(
                f"a page holds {items:,} items, more than {max_items:,}; if that is right, raise max_items"
            )
        return page

    def _connect(self, checkpoint: Checkpoint) -> None:
        """Make the client, but only after the budget would admit its first call: importing the client takes long."""
        method = attempt_of(self.fetch, checkpoint.cursor)
        if method is not None:
            decision = self.budget.peek(method, job=self.job.name, region=checkpoint.region)
            if not decision.admitted:
                account_of(self.budget).note_refusal(decision, self.job.name, checkpoint.region)
                raise quota.Refused(decision)
        try:
            self.since_ms = self.session.ledger.now_ms()
        except quota.LedgerError:
            # The run lives on the allowance. What it repays later gets a later date than this: a caller's clock may
            # be ahead of the ledger's by no more than this.
            self.since_ms = self.clock() - CLOCK_SLACK_MS
        self.attempts_before = self.session.attempt_number()
        book = self.budget.book
        self.client = self.session.google(
            self.job.credential,
            book.api,
            book.version,
            max_body_mb=self.job.max_body_mb,
            max_answer_s=self.job.max_answer_s,
            max_items=self.job.max_items,
            waiting=self._wait_for_answer,
        )

    def _wait_for_answer(self) -> None:
        """The client calls this again and again while it waits for an answer. After a signal it waits STOP_WITHIN_S."""
        if self.stop():
            now_s = time.monotonic()
            self.told_s = self.told_s or now_s
            if now_s - self.told_s >= STOP_WITHIN_S:
                raise _Interrupted(f"; the page in flight took over {STOP_WITHIN_S:g} s and was abandoned")

    def _classify(self, error: Exception, checkpoint: Checkpoint) -> Failure:
        method = attempt_of(self.fetch, checkpoint.cursor) or ""
        return classify_failure(error, method=method, book=self.budget.book)

    def _worth_retrying(self, error: BaseException, checkpoint: Checkpoint) -> bool:
        if not isinstance(error, Exception) or isinstance(error, quota.QuotaError):
            return False
        return self._classify(error, checkpoint).kind == "transient"

    def _say_retry(self, state: Any, checkpoint: Checkpoint) -> None:
        message, wait_s = self._classify(state.outcome.exception(), checkpoint).message, state.next_action.sleep
        number, wait_ms = state.attempt_number, round(wait_s * 1_000)
        _debug(
            "attempt_failed", job=checkpoint.job, region=checkpoint.region, attempt=number, wait_ms=wait_ms, why=message
        )
        self.watcher.retry(checkpoint, message, wait_s)

    def _sleep(self, seconds: float) -> None:
        """Wait between two attempts. A signal ends the wait, which therefore comes in short pieces."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            if self.stop():
                break
            time.sleep(min(left_s, 0.1))
        if self.stop():
            raise _Interrupted

    def _give_up(self, checkpoint: Checkpoint, failure: Failure, *, answered: bool) -> RegionReport:
        match failure.kind:
            case "exhausted":
                self.end = self._exhausted(checkpoint, failure)
                return self._unfinished()
            case "config":
                self.end = _End("failed", failure.message, quota.ConfigError.exit_status)
                return self._outcome("failed", failure.message)
            case "answer":
                self.here = self.store.fail(checkpoint, keep_cursor=True)
                return self._outcome("failed", failure.message)
            case "transient":
                # The next pass continues from here.
                self.here = self.store.fail(checkpoint, keep_cursor=True)
                advice = "" if answered else f" to reach {self._root()}; check network and endpoint, then run again"
                return self._outcome("failed", f"{failure.message}, in {ATTEMPTS} attempts{advice}")
            case _:
                # The cursor itself may be the cause, so the next pass begins with the first page.
                self.here = self.store.fail(checkpoint, keep_cursor=False)
                return self._outcome("failed", failure.message)

    def _root(self) -> str:
        """The address to which the client sends its calls."""
        scheme, _, rest = self.client._baseUrl.partition("://")
        return f"{scheme}://{rest.partition('/')[0]}"

    def _exhausted(self, checkpoint: Checkpoint, failure: Failure) -> _End:
        """Upstream says that its quota is spent. The metering has closed the bucket; the budget knows until when."""
        method = attempt_of(self.fetch, checkpoint.cursor)
        decision = None if method is None else self.budget.peek(method, job=self.job.name, region=checkpoint.region)
        if decision is None or decision.admitted:
            return _End("stopped", failure.message, refused=True, refused_by=failure.bucket)
        account_of(self.budget).note_refusal(decision, self.job.name, checkpoint.region)
        return _refused(decision)

    # -- outcomes ----------------------------------------------------------------------------------------------------

    def _outcome(self, outcome: RegionOutcome, error: str | None = None) -> RegionReport:
        checkpoint = self.here
        pages, items = self.added.get(checkpoint.region, (0, 0))
        cursor = None if outcome == "done" else checkpoint.cursor
        return RegionReport(checkpoint.region, outcome, items=items, pages=pages, cursor=cursor, error=error)

    def _unfinished(self, error: str | None = None) -> RegionReport:
        return self._outcome("partial" if self.here.begun else "skipped", error)

    def _report(self, outcomes: list[RegionReport], left: Checkpoint | None) -> RunReport:
        units, attempts = self._spent()
        regions = tuple(replace(o, units=units.get(o.region, 0)) for o in outcomes)
        run, job = self.session.run, self.job.name
        for one in regions:
            _debug(
                "region_ended",
                run=run,
                job=job,
                region=one.region,
                outcome=one.outcome,
                pages=one.pages,
                items=one.items,
                units=one.units,
                why=one.error,
            )
        failed = [o for o in regions if o.outcome == "failed"]
        replaced = any(o.region in self.hold.away and o.outcome in ("partial", "skipped") for o in regions)
        outcome: RunOutcome = "failed" if failed else "elsewhere" if replaced else "done"
        end = self.end or _End(outcome, _count_failed(failed, regions) if failed else "")
        status = end.exit_status
        if not status and failed:
            status = quota.QuotaError.exit_status
        if self.stop():
            status = 128 + self.stop()
        _debug(
            "run_ended",
            run=run,
            job=job,
            outcome=end.outcome,
            regions=len(regions),
            units=sum(units.values()),
            attempts=attempts,
            status=status,
            why=end.why,
        )
        return RunReport(
            run=self.session.run,
            job=self.job.name,
            outcome=end.outcome,
            regions=regions,
            units=sum(units.values()),
            attempts=attempts,
            refused_by=end.refused_by,
            retry_at_ms=end.retry_at_ms,
            refused=end.refused,
            why=end.why,
            exit_status=status,
            next_step="" if left is None else f"{left.region} page {left.pages + 1}".strip(),
            away=self.hold.furthest(),
            refusal=end.refusal,
        )

    def _spent(self) -> tuple[dict[str, int], int]:
        """Units by region and the number of attempts, from the ledger's log and from what was drawn on the allowance.
        The idempotency keys tell this run's charges from others."""
        units: dict[str, int] = {}
        attempts = 0
        if self.client is None:
            return units, attempts
        for charge in self._charges():
            key = charge.idempotency_key
            of_this_run = key.startswith(self.session.run) and attempt_number(key) > self.attempts_before
            if of_this_run and charge.job == self.job.name and charge.units:
                units[charge.region] = units.get(charge.region, 0) + charge.units
                attempts += 1
        return units, attempts

    def _charges(self) -> Iterable[Charge | Entry]:
        """The charges of this run, and maybe others. A repaid draw is in the journal and in the log; it counts once."""
        from quota.common.clock import NEVER
        from quota.deciding.corrections import drawn_by
        from quota.ledger.contract import read_entries

        project, run = self.budget.project, self.session.run
        asked = self.session.attempt_number() - self.attempts_before - 1
        found: dict[str, Charge | Entry] = {}
        try:
            found.update((charge.idempotency_key, charge) for charge in drawn_by(account_of(self.budget), run))
            entries = read_entries(self.session.ledger, project, self.since_ms, NEVER)
            found.update((entry.idempotency_key, entry) for entry in entries if entry.idempotency_key.startswith(run))
        except quota.LedgerError as error:
            if len(found) < asked:
                known = line("spending_known_in_part", run=run, job=self.job.name, attempts=asked, known=len(found))
                log.warning("%s: %s", known, error)
        return found.values()


_CIRCLE = Failure(
    "region", "upstream named a page that this pass has already fetched; the next round begins with the first page"
)


def _refused(decision: Decision) -> _End:
    status = quota.LedgerError.exit_status if decision.reason == "ledger-unavailable" else 0
    return _End("stopped", decision.why(), status, True, decision.refused_by, decision.retry_at_ms, decision)


def _count_failed(failed: Sequence[RegionReport], regions: Sequence[RegionReport]) -> str:
    if len(regions) == 1:
        return failed[0].error or ""
    return f"{len(failed)} of {len(regions)} regions failed ({', '.join(o.region for o in failed)})"


def _debug(event: str, **fields: object) -> None:
    """One line in the log, shown with QUOTA_LOG=debug."""
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s", line(event, **fields))


# -- what is to be run -------------------------------------------------------------------------------------------------


def _job(session: Session, name: str) -> JobSettings:
    jobs = session.settings.jobs
    if name not in jobs:
        from quota.common.text import nearest, show

        raise quota.UsageError(f"{session.settings.source} has no job {show(name)}; {nearest(name, jobs)}")
    return jobs[name]


def _regions(job: JobSettings, wanted: Sequence[str]) -> tuple[str, ...]:
    unknown = [region for region in wanted if region not in job.regions]
    if unknown:
        known = f"it has {', '.join(job.regions)}" if job.regions else "it has none"
        raise quota.UsageError(f"job {job.name!r} has no region {unknown[0][:64]!r}; {known}")
    if wanted:
        return tuple(region for region in job.regions if region in wanted)
    return job.regions or ("",)
