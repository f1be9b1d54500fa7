"""One run of a job: one cron tick. `run_job` is the door.

A *round* is one pass over all regions of a job. A run that stops leaves the regions it did not reach pending, and the
next run covers only those; with none pending it begins a new round. So ticks that the budget cuts short add up to
exactly one round, with nothing fetched twice and no region forgotten. What decides the order and what a page's storage
means stands at `Store.begin` and `Store.keep`.

How a step may end, and what follows:

    a page                          stored with the moved cursor, in one transaction; on to the next
    refused by the budget           the run stops at once: outcome "stopped"
    upstream's quota has run out    the same
    trouble that may pass           up to ATTEMPTS attempts; then the region fails and keeps its place
    an answer beyond its limits     the region fails and keeps its place
    the region's own trouble        the region fails; the others go on
    configuration, ledger, store    the run fails at once
    SIGINT, SIGTERM                 the page in flight is stored if it arrives within STOP_WITHIN_S, then the run stops

A region that fails counts as covered by its round: were it left pending, the next runs would cover nothing else.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import quota
from quota.arguments import texts
from quota.common.clock import host_clock
from quota.common.log import line
from quota.jobs.failure import Failure, classify_failure
from quota.jobs.job import Page, RegionReport, RunReport, attempt_of, load_fetch, wants_store
from quota.jobs.store.store import Checkpoint, Store, StoreError
from quota.ledger.contract import CLOCK_SLACK_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from quota import Budget, Decision, Session
    from quota.jobs.job import Fetch, RegionOutcome, RunOutcome
    from quota.ledger.entry import Charge, Entry
    from quota.settings.model import JobSettings

ATTEMPTS = 4
MAX_WAIT_S = 4.0
"""Between two attempts. With ATTEMPTS it bounds what one step may wait to 3 x 5 s, jitter included."""

MAX_STEPS = 10
"""Steps in a row without a complete page, after which a fetch function is taken to be going round in circles."""

STOP_WITHIN_S = 8.0
"""How long the page in flight may take once told to stop."""

END_WITHIN_S = 9.0
"""How long a process may live once told to stop, whatever it waits for. Supervisors begin to kill after 10 s."""

log = logging.getLogger("quota.jobs")


class Watcher(Protocol):
    """Who is told how a run gets on. It must not raise."""

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
    in_turn: bool = False,
    stop: Callable[[], int] = lambda: 0,
    watcher: Watcher | None = None,
    wait: Any = None,
    clock: Callable[[], int] | None = None,
) -> RunReport:
    """Run one tick of the job called `name`, over `regions` (default: all of the job's), and say how it ended.

    `in_turn` covers as many regions as are named, but those whose turn it is in the job's round. A schedule that starts
    the regions one by one needs that: whenever a few ticks a day are admitted, they would always be the same regions'.
    `stop` is asked before every attempt; the number of a signal ends the run there. `wait` is a tenacity wait between
    attempts, and `clock` (ms since the epoch) dates what is stored; both are for tests.
    Raises UsageError for a job or region that does not exist and for a call whose cost can never fit, ConfigError for
    a fetch function that cannot be used. What goes wrong later is in the report.
    """
    job = _job(session, name)
    chosen = _regions(job, texts(regions, "region"))
    most = len(chosen)
    if in_turn:
        chosen = _regions(job, ())
    path = session.settings.path
    folder = None if path is None else path.absolute().parent
    fetch = load_fetch(job.fetch, job.options, folder)
    with _only_one(session.settings.store.url, job.name) as free:
        if not free:
            return RunReport(session.run, job.name, "overlap", why="already running on this machine; nothing done")
        store_settings = session.settings.store
        try:
            with Store(store_settings.url, retention_ms=store_settings.retention_ms, clock=clock) as store:
                return _Run(session, job, chosen, most, fetch, store, stop, watcher or Silent(), wait, clock).run()
        except StoreError as error:
            return RunReport(session.run, job.name, "failed", why=str(error), exit_status=error.exit_status)


@dataclass(frozen=True, slots=True)
class _End:
    """Why a run goes no further."""

    outcome: RunOutcome
    why: str
    exit_status: int = 0
    refused: bool = False
    refused_by: str | None = None
    retry_at_ms: int | None = None


class _Interrupted(Exception):  # noqa: N818 - no error: it was asked for
    """A signal came, and there is no page to wait for any longer."""


class _Run:
    def __init__(
        self,
        session: Session,
        job: JobSettings,
        regions: Sequence[str],
        most: int,
        fetch: Fetch,
        store: Store,
        stop: Callable[[], int],
        watcher: Watcher,
        wait: Any,
        clock: Callable[[], int] | None,
    ) -> None:
        self.session = session
        self.job = job
        self.regions = regions
        self.most = most
        self.store = store
        self.stop = stop
        self.watcher = watcher
        self.wait = wait
        self.clock = clock or host_clock
        self.budget: Budget = session.budget(job.credential)
        self.fetch = fetch
        self.options = dict(job.options) | ({"store": store} if wants_store(fetch) else {})
        self.client: Any = None
        self.told_s: float | None = None  # when it was told to stop, while a page was in flight
        self.since_ms = 0
        self.tokens_before = 0
        self.end: _End | None = None
        self.here = Checkpoint(job.name, "")  # as far as the region in hand got
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
        checkpoints = self.store.start_round(self.job.name, self.regions)[: self.most]
        self.watcher.began(checkpoints)
        left: Checkpoint | None = None
        for checkpoint in checkpoints:
            self.here = checkpoint
            if self.end is None:
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
        """Fetch and store page after page, until the pass is complete or something ends it."""
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
                failure = self._judge(error, checkpoint)
                trouble = line(
                    "step_failed",
                    job=checkpoint.job,
                    region=checkpoint.region,
                    page=checkpoint.pages + 1,
                    kind=failure.kind,
                )
                log.debug("%s", trouble, exc_info=True)
                if failure.kind == "cursor" and inherited:
                    # Upstream forgot the place that an earlier run left: its pages are of no use without the rest.
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
            if finished:
                return self._outcome("done")
        # The job asks for fewer pages than it did when this pass began.
        self.here = self.store.finish(self.here)
        return self._outcome("done")

    def _step(self, checkpoint: Checkpoint) -> Page:
        """One step of the fetch function, with attempts again where that may help."""
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
        # A copy for each attempt: whatever a failed one did to it is forgotten.
        page = retrying(
            lambda: self.fetch(self.client, checkpoint.region, copy.deepcopy(checkpoint.cursor), **self.options)
        )
        if not isinstance(page, Page):
            raise TypeError(f"fetch returned {type(page).__name__}, not a quota.jobs.job.Page")
        items, most = len(page.videos) + len(page.channels), self.job.max_items
        if items > most:
            raise quota.BadAnswer(f"a page holds {items:,} items, over {most:,}; if it may, raise max_items")
        return page

    def _connect(self, checkpoint: Checkpoint) -> None:
        """Make the client. Its import takes longer than all else in a refused tick, so the budget is asked first."""
        method = attempt_of(self.fetch, checkpoint.cursor)
        if method is not None:
            decision = self.budget.peek(method, job=self.job.name, region=checkpoint.region)
            if not decision.admitted:
                raise quota.Refused(decision)
        try:
            self.since_ms = self.session.ledger.now_ms()
        except quota.LedgerError:
            # The allowance carries the run. What it repays is dated later than this, as no caller's clock may run
            # further ahead of the ledger's.
            self.since_ms = self.clock() - CLOCK_SLACK_MS
        self.tokens_before = _number(self.session.attempt_keys.next())
        book = self.budget.book
        version = re.search(r"\bv[0-9]\w*", book.name)
        self.client = self.session.google(
            self.job.credential,
            book.api,
            version[0] if version else "v3",
            max_body_mb=self.job.max_body_mb,
            max_answer_s=self.job.max_answer_s,
            max_items=self.job.max_items,
            waiting=self._wait_for_answer,
        )

    def _wait_for_answer(self) -> None:
        """Called again and again while an answer is awaited: once told to stop, that is not for long."""
        if self.stop():
            now_s = time.monotonic()
            self.told_s = self.told_s or now_s
            if now_s - self.told_s >= STOP_WITHIN_S:
                raise _Interrupted(f"; the page in flight took over {STOP_WITHIN_S:g} s and was abandoned")

    def _judge(self, error: Exception, checkpoint: Checkpoint) -> Failure:
        method = attempt_of(self.fetch, checkpoint.cursor) or ""
        return classify_failure(error, method=method, book=self.budget.book)

    def _worth_retrying(self, error: BaseException, checkpoint: Checkpoint) -> bool:
        if not isinstance(error, Exception) or isinstance(error, quota.QuotaError):
            return False
        return self._judge(error, checkpoint).kind == "transient"

    def _say_retry(self, state: Any, checkpoint: Checkpoint) -> None:
        message, wait_s = self._judge(state.outcome.exception(), checkpoint).message, state.next_action.sleep
        number, wait_ms = state.attempt_number, round(wait_s * 1_000)
        _debug(
            "attempt_failed", job=checkpoint.job, region=checkpoint.region, attempt=number, wait_ms=wait_ms, why=message
        )
        self.watcher.retry(checkpoint, message, wait_s)

    def _sleep(self, seconds: float) -> None:
        """Wait between two attempts, in short pieces: a signal ends the wait."""
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
                # What fails for a passing reason goes on where it stopped.
                self.here = self.store.fail(checkpoint, keep_cursor=True)
                advice = "" if answered else f" to reach {self._root()}; check network and endpoint, then run again"
                return self._outcome("failed", f"{failure.message}, in {ATTEMPTS} attempts{advice}")
            case _:
                # Beginning afresh, because the place itself may be what is wrong.
                self.here = self.store.fail(checkpoint, keep_cursor=False)
                return self._outcome("failed", failure.message)

    def _root(self) -> str:
        """Where the client sends its calls."""
        scheme, _, rest = self.client._baseUrl.partition("://")
        return f"{scheme}://{rest.partition('/')[0]}"

    def _exhausted(self, checkpoint: Checkpoint, failure: Failure) -> _End:
        """Upstream's own "no more". The metering has closed the bucket; the budget now knows until when."""
        method = attempt_of(self.fetch, checkpoint.cursor)
        decision = None if method is None else self.budget.peek(method, job=self.job.name, region=checkpoint.region)
        if decision is None or decision.admitted:
            return _End("stopped", failure.message, refused=True, refused_by=failure.bucket)
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
        end = self.end or _End("failed" if failed else "done", _count_failed(failed, regions) if failed else "")
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
        )

    def _spent(self) -> tuple[dict[str, int], int]:
        """Units by region and the number of attempts, from the ledger's own log and what was drawn without it: this
        run's tokens name its charges."""
        units: dict[str, int] = {}
        attempts = 0
        if self.client is None:
            return units, attempts
        for charge in self._charges():
            mine = (
                charge.idempotency_key.startswith(self.session.run)
                and _number(charge.idempotency_key) > self.tokens_before
            )
            if mine and charge.job == self.job.name and charge.units:
                units[charge.region] = units.get(charge.region, 0) + charge.units
                attempts += 1
        return units, attempts

    def _charges(self) -> Iterable[Charge | Entry]:
        """The charges of this run, and maybe others. What was drawn and repaid stands in both books and counts once."""
        from quota.common.clock import NEVER
        from quota.ledger.contract import read_entries

        project, run = self.budget.project, self.session.run
        asked = _number(self.session.attempt_keys.next()) - self.tokens_before - 1
        found: dict[str, Charge | Entry] = {}
        try:
            if self.budget.allowance is not None:
                found.update(
                    (charge.idempotency_key, charge) for charge in self.budget.allowance.drawn_by(project, run)
                )
            log_of_all = read_entries(self.session.ledger, project, self.since_ms, NEVER)
            found.update(
                (entry.idempotency_key, entry) for entry in log_of_all if entry.idempotency_key.startswith(run)
            )
        except quota.LedgerError as error:
            if len(found) < asked:
                known = line("spending_known_in_part", run=run, job=self.job.name, attempts=asked, known=len(found))
                log.warning("%s: %s", known, error)
        return found.values()


_CIRCLE = Failure("region", "upstream names a page that this pass has fetched already; the next round begins afresh")


def _refused(decision: Decision) -> _End:
    status = quota.LedgerError.exit_status if decision.reason == "ledger-unavailable" else 0
    return _End("stopped", decision.why(), status, True, decision.refused_by, decision.retry_at_ms)


def _count_failed(failed: Sequence[RegionReport], regions: Sequence[RegionReport]) -> str:
    if len(regions) == 1:
        return failed[0].error or ""
    return f"{len(failed)} of {len(regions)} regions failed ({', '.join(o.region for o in failed)})"


def _debug(event: str, **fields: object) -> None:
    """A line of the log for QUOTA_LOG=debug."""
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s", line(event, **fields))


def _number(idempotency_key: str) -> int:
    """The attempt's counter in a token; 0 for what is none."""
    return int(idempotency_key[8:]) if idempotency_key[8:].isdigit() else 0


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


@contextmanager
def _only_one(store_url: str, job: str) -> Iterator[bool]:
    """Whether no other run of this job into this store is under way on this machine, held for the block.

    A lock on a file: the kernel lets go of it however the process ends.
    """
    import fcntl

    descriptor = _lock_file(store_url, job)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        # The file stays: removing it would let a third run lock a new one beside a second run's.
        yield True
    finally:
        os.close(descriptor)


def _lock_file(store_url: str, job: str) -> int:
    """The file to lock, open: in the state folder; where none can be made there, beside the store, which every run of
    this job writes."""
    import hashlib

    from quota.settings.folders import make_state_folder

    digest = hashlib.blake2b(f"{store_url}\n{job}".encode(), digest_size=6).hexdigest()
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", job)[:64]
    name = f"run-{readable}-{digest}.lock"
    try:
        return _opened(make_state_folder() / name)
    except quota.ConfigError as error:
        try:
            descriptor = _opened(Path(store_url.partition(":///")[2]).parent / name)
        except quota.ConfigError:
            raise error from None
        log.warning("%s: %s", line("lock_beside_store", job=job), error)
        return descriptor


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # made while the folder could be written, and as good
        except OSError:
            raise quota.ConfigError(
                f"{path}: {error.strerror}; set QUOTA_STATE_DIR to a folder that can be written"
            ) from error
