"""One run of a job: one cron tick. `run_job` is the entry point.

A *round* is one pass over every region of a job. A run that stops early leaves some regions pending, and the next run
covers only those. When no region is pending, a run begins a new round. So runs that the budget cuts short add up to
exactly one round: they fetch no page twice and forget no region. See `by_rotation` for the order of the
regions and `Store.save_page` for the transaction of a page.

How a step may end, and what follows:

    a page                           stored with the new cursor, in one transaction; then the next step
    a refusal by the budget          the run stops at once: outcome "stopped". A page of such a step is not stored,
                                     unless its function made another call after the refused one
    upstream's quota has run out     the same
    a transient error                up to ATTEMPTS attempts; then the region fails and keeps its cursor, and the next
                                     steps have one attempt, until upstream answers
    no answer, a late or foreign one the same; if the next region has none from the same address, the run fails
    an answer over its bounds        the region fails and keeps its cursor
    a sink that fails                the region fails and keeps its cursor: the next pass fetches the page again
    an error of this region alone,   the region fails and begins its next pass with the first page
    or of the user's own function
    configuration, a call that       the run fails at once; the region keeps its cursor, behind the others
    can never fit
    ledger, store, a missing key     the run fails at once, and the next one begins with the same region
    SIGINT, SIGTERM, SIGHUP          the page in flight is stored if it arrives within STOP_WITHIN_S; the run stops
    another machine took over        the run stores the page in hand, and goes on with its remaining regions

A failed region counts as covered in its round: if it stayed pending, the next runs would cover nothing else. If one of
several searches or lists fails, the pass goes on without it (`leave_out`) and the region fails at the end, or at once
after two failures in a row. If configuration or network end the run before the first page of the region, the region
stays pending, behind the others.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import quota
from quota import Decision, Session
from quota.common.clock import elapsed_s, host_clock
from quota.common.log import line, warn
from quota.common.redact import redact
from quota.common.text import describe, listed, many, members, show
from quota.jobs.attempts import ATTEMPTS, Attempts, Failure, Interrupted, ends_program, longest_step_ms, refusal_of
from quota.jobs.endings import RegionOutcome, failed_report, keep, refused_report, skipped
from quota.jobs.job import Page, RunReport, functions_of, job_called, left_out_by, line_of, pages_of, regions_of
from quota.jobs.lock import POLL_S, Covers, Lock, note_covers, only_one
from quota.jobs.places import Hold, checkpoints_of, release, work_of
from quota.jobs.progress import Watcher
from quota.jobs.store.checkpoints import Checkpoint, ended_at
from quota.jobs.store.file import StoreError, lack_of_space
from quota.jobs.store.rows import MAX_KEY_CHARACTERS, Row, rows_of
from quota.jobs.store.store import Store
from quota.jobs.ticks import Tick
from quota.reports.runs import RegionOfRun
from quota.settings.model import UNKNOWN_IDS, JobSettings
from quota.terms.arguments import in_run, texts
from quota.terms.limits import format_duration

MAX_STEPS = 10
"""A fetch function that takes more steps than this without completing a page loops."""

log = logging.getLogger("quota.jobs")


class RunOptions(NamedTuple):
    """How to run a job: over which `regions` (default: all of the job's), and with what.

    A `tick` that is due for some regions runs only where these regions are. It covers as many regions as are due, but
    those whose turn it is in the job's round: if the budget admits only a few ticks a day, the same regions would
    otherwise run every day. The ledger admits each tick once for each region.
    On a shared ledger, the run covers only regions that are free or belong to its store (`quota.jobs.places`); with
    `here` it takes over the others too. When the run has its regions and its tick, it calls `refusal`, and ends if that
    returns a decision. It calls `stop` before every attempt, and ends if that returns the number of a signal. `silent`
    is an address that did not answer the job before: the run tries it once.
    """

    regions: str | Sequence[str] = ()
    here: bool = False
    tick: Tick | None = None
    refusal: Callable[[], Decision | None] = lambda: None
    stop: Callable[[], int] = lambda: 0
    watcher: Watcher = Watcher()
    silent: str = ""


def run_job(session: Session, name: str, how: RunOptions | None = None) -> RunReport:
    """Run the job called `name` once, and report how it ended. The session's clock dates stored data.

    If another run of the job on this machine covers other regions, or another thread runs a job over this session, this
    run waits for its end: at most the job's `misfire_grace`, which begins with the tick.
    Raises UsageError for an unknown job or region, and ConfigError for an unusable function or lock.
    """
    return _Start(session, job_called(session.settings, name), how or RunOptions()).run()


@dataclass(eq=False)
class _Start:
    """The start of a run: it waits for its turn on this machine, claims its regions, and covers those that it gets."""

    session: Session
    job: JobSettings
    how: RunOptions
    before: Covers | None = None  # the work of the run that has the lock

    def __post_init__(self) -> None:
        tick = self.how.tick
        self.everything = regions_of(self.job, ())
        self.due = regions_of(self.job, texts(self.how.regions, "region") if tick is None else tick.regions)
        self.whole = self.due == self.everything
        self.clock = self.session.clock or host_clock
        self.asked_ms = self.clock()
        wait_ms = self.job.misfire_grace_ms + (0 if tick is None else tick.at_ms - self.asked_ms)
        self.until_s = elapsed_s() + wait_ms / 1_000

    def run(self) -> RunReport:
        """Run the job when its turn comes. A machine that cannot begin it lets others have its regions."""
        settings = self.session.settings
        try:
            self._load()
            with only_one(settings.store.url, self.job.name, Covers(self.whole), self._waits) as lock:
                return self._missed() if lock is None else self._locked(lock)
        except (StoreError, quota.ConfigError) as error:
            release(self.session, [self.job])
            if isinstance(error, quota.ConfigError):
                raise
            return failed_report(self.session, self.job.name, lack_of_space(settings.store.file) or error)

    def _load(self) -> None:
        """Load the job's functions. If that fails, the store notes it as a run."""
        try:
            self.fetch, self.sink = functions_of(self.session.settings, self.job)
        except quota.ConfigError as error:
            with suppress(StoreError, quota.ConfigError), self._open_store() as store:
                keep(store, self._row(store), failed_report(self.session, self.job.name, error))
            raise

    def _waits(self, before: Covers) -> bool:
        """Whether to wait for the run that has the lock, which covers this."""
        begins, self.before = self.before is None, before
        if begins and not self._overlaps():
            self.how.watcher.waits()
        return not self._overlaps() and elapsed_s() < self.until_s and self.how.stop() == 0

    def _overlaps(self) -> bool:
        """Whether that run does all the work of this one. A tick is work of its own."""
        if self.before is None or self.how.tick is not None:
            return False
        return (self.whole and self.before.whole) or {*self.due} <= {*self.before.regions}

    def _locked(self, lock: Lock) -> RunReport:
        """Hold the regions that are still due, as soon as no other thread's run uses this budget."""
        with self._listening() as listening, self._open_store() as store:
            if not listening:
                return self._missed()
            due = self._still_due(store)
            if self.before and not due:
                return RunReport(self.session.run, self.job.name, "overlap", why="another run has covered it meanwhile")
            with Hold(self.session, self.job, store, lock, longest_step_ms(self.job), self.how.tick) as hold:
                return self._held(store, lock, hold, due)

    @contextmanager
    def _listening(self) -> Iterator[bool]:
        """Whether this run may use the budget: another thread may run a job, and perhaps wait for this run."""
        lock = self.session.listening[self.job.credential]
        while not (taken := lock.acquire(timeout=POLL_S)) and elapsed_s() < self.until_s and not self.how.stop():
            pass
        try:
            yield taken
        finally:
            if taken:
                lock.release()

    def _held(self, store: Store, lock: Lock, hold: Hold, due: Sequence[str]) -> RunReport:
        """Claim the regions, and cover those that the run gets: as many as are due."""
        session, job = self.session, self.job
        chosen = due if self.how.tick is None else self.everything
        try:
            hold.begin(chosen, here=self.how.here)
            elsewhere = self._elsewhere(store, hold, due)
            if elsewhere is not None:
                session.budget(job.credential).repay()  # no decision of this run will repay
                return elsewhere
            refused = self.how.refusal()
        except quota.QuotaError as error:
            keep(store, self._row(store), failed_report(session, job.name, error))
            raise
        row = self._row(store)
        if refused is not None:
            report = refused_report(session, job, refused)
            if report.cannot_run:
                hold.ending = "failed"
            return keep(store, row, report)
        mine = [region for region in chosen if region not in hold.away]
        attempts = Attempts(session, job, self.fetch, store, self.how.stop, self.how.watcher)
        report = _Run(self, store, lock, hold, attempts).cover(row, mine, len(due))
        if len(due) < len(chosen):
            return report
        return replace(report, regions=(*report.regions, *skipped(chosen, mine)))

    def _open_store(self) -> Store:
        settings = self.session.settings.store
        return Store(settings.url, retention_ms=settings.retention_ms, clock=self.clock)

    def _row(self, store: Store) -> int:
        """Note in the store that a run begins. Returns its row, for `keep`."""
        return store.runs.begin(self.session.run, self.session.credential(self.job.credential).project, self.job.name)

    def _still_due(self, store: Store) -> list[str]:
        """The regions that are due, without those that runs have covered while this one waited for its turn."""
        covered: set[str] = set()
        if self.before and self.how.tick is None:
            with suppress(quota.LedgerError):  # then the claim fails, too
                places, now_ms = checkpoints_of(self.session, self.job, store), self.clock()
                covered = {place.region for place in places if self.asked_ms <= ended_at(place) <= now_ms}
        return [region for region in self.due if region not in covered]

    def _missed(self) -> RunReport:
        """The report of a run whose turn did not come, or before that a signal. The report and the store name the
        regions that it did not fetch; a tick has none of its own, and the schedule reports it."""
        if self._overlaps():
            why = "already running on this machine; nothing done"
            return RunReport(self.session.run, self.job.name, "overlap", why=why)
        with self._open_store() as store:
            regions, number = self.due if self.how.tick is None else (), self.how.stop()
            why = f"{', '.join(regions)} not fetched" if any(regions) else "nothing fetched"
            why += f": {'another run of the job' if self.before else 'a run of another job'} has not ended"
            if number:
                why, status = f"interrupted; {why}", 128 + number
            else:
                grace, status = format_duration(self.job.misfire_grace_ms), 0
                why += f" within misfire_grace ({grace}); if it hangs, end it"
            report = RunReport(
                self.session.run, self.job.name, "overlap", skipped(regions), why=why, exit_status=status
            )
            if regions and not number:
                warn("run_skipped", why, job=self.job.name)
            return keep(store, self._row(store), report)

    def _elsewhere(self, store: Store, hold: Hold, due: Sequence[str]) -> RunReport | None:
        """The report of a run that has no region that is due; None if it has work. The store notes where the job runs
        instead."""
        report = RunReport(self.session.run, self.job.name, "elsewhere", skipped(due), elsewhere=hold.away)
        store.note_elsewhere(self.job.name, work_of(self.session.settings, self.job), report.away)
        if hold.tick_is:
            waits = hold.tick_is == "running"
            why = "another scheduler is running this tick" if waits else "a scheduler has run this tick already"
            return RunReport(self.session.run, self.job.name, "elsewhere", why=why, waits=waits)
        if any(region not in hold.away for region in due):
            return None
        return replace(report, waits=any(away.same_store for away in hold.away.values()))


@dataclass(eq=False)
class _Run:
    """Covers the regions of one run. `end` is set as soon as something ends the run."""

    start: _Start
    store: Store
    lock: Lock
    hold: Hold
    attempts: Attempts
    outcomes: list[RegionOfRun] = field(default_factory=list)
    added: dict[str, tuple[int, int]] = field(default_factory=dict)  # region -> pages and items that this run stored
    earlier: list[str] = field(default_factory=list)  # the regions that its round had covered before
    idle: list[str] = field(default_factory=list)  # the regions that had nothing to ask for
    unknown: list[str] = field(default_factory=list)  # the ids for which upstream has nothing
    failed: list[Checkpoint] = field(default_factory=list)  # the regions that failed since upstream last answered
    here: Checkpoint = field(init=False)  # of the current region
    end: RunReport | None = None
    left_out: str | None = None  # why the pass over the current region goes on without a part of it
    down: bool = False  # whether the last step had no answer but transient errors
    unusable: bool = False  # whether the store can keep nothing more

    def __post_init__(self) -> None:
        self.session, self.job = self.start.session, self.start.job
        # since upstream last answered: the address that did not answer in each region
        self.silent = [self.start.how.silent] if self.start.how.silent else []

    def cover(self, row: int, regions: Sequence[str], max_regions: int) -> RunReport:
        """Cover at most `max_regions` of these regions, in the order of the round, and note their names for others.
        Completes the row of the run, and says how its hold ends."""
        try:
            report = self._cover(row, regions, max_regions)
        except BaseException as error:
            self.end = failed_report(self.session, self.job.name, error)
            keep(self.store, row, self._report(None))
            raise
        keep(self.store, row, report)
        if self.start.how.stop() and any(region.outcome in ("partial", "skipped") for region in report.regions):
            self.hold.ending = "stopped"  # its tick goes on with the next start
        if self.end is not None and self.end.cannot_run and (self.unusable or not self.added):
            self.hold.ending = "failed"  # a machine that cannot run the job must not keep it from others
        return report

    def _cover(self, row: int, regions: Sequence[str], max_regions: int) -> RunReport:
        left: Checkpoint | None = None
        try:
            self.hold.bring(self.store)
            self.store.delete_expired()
            self.store.check_keys(self.job)
            work, most = work_of(self.session.settings, self.job), pages_of(self.job)
            complete = self.store.finish(self.job.name, regions, work, most)
            pending = self.store.start_round(self.job.name, regions, work)
            self.hold.keep(*complete, *pending)
            checkpoints = pending[:max_regions]
            names = tuple(checkpoint.region for checkpoint in checkpoints)
            if len(pending) == len(checkpoints):
                self.earlier = [region for region in regions if region not in names]
            note_covers(self.lock, Covers(self.start.whole, names))
            self.store.runs.cover(row, names)
            self.start.how.watcher.began(checkpoints, most)
            for checkpoint in checkpoints:
                self.here, self.left_out = checkpoint, None
                if self.end is None and len(self.silent) > 1 and self.silent[-1] == self.silent[-2]:
                    why = f"no usable answer from {self.silent[-1]}; the other regions wait for the next run"
                    self.end = RunReport(self.session.run, self.job.name, "failed", why=why)
                if self.end is None and checkpoint.region not in self.hold.away:
                    with in_run(self.session.run), quota.labels(job=self.job.name, region=checkpoint.region):
                        outcome = self._region()
                else:
                    outcome = self._unfinished()
                if left is None and outcome.outcome in ("partial", "skipped"):
                    left = self.here
                self.outcomes.append(outcome)
                self.start.how.watcher.ended(outcome)
            if self.end is not None and self.end.outcome == "failed":
                self._give_back(regions)
            return self._report(left)
        finally:
            self.attempts.close()

    # -- one region --------------------------------------------------------------------------------------------------

    def _region(self) -> RegionOfRun:
        try:
            return self._pass()
        except quota.Refused as refusal:
            self.end = refused_report(self.session, self.job, refusal.decision)
            if (never := self.attempts.too_dear(refusal.decision)) is not None:
                status = quota.ConfigError.exit_status
                self.end = replace(self.end, why=f"{self.end.why}; {never}", exit_status=status)
            if self.end.exit_status:
                return self._unfinished(self.end.why)
        except quota.QuotaError as error:
            keyless = isinstance(error, quota.ConfigError) and self.attempts.client is None
            if not keyless and not isinstance(error, (quota.LedgerError, StoreError)):
                with suppress(quota.QuotaError):  # it comes behind the others: the error may be about this region alone
                    self.here = self.store.fail(self.here, keep_cursor=True)
                    self.hold.keep(self.here)
                if self.attempts.client is None or isinstance(error, quota.ConfigError):
                    self.failed.append(self.here)
            self.unusable = isinstance(error, StoreError)
            self.end = failed_report(self.session, self.job.name, error)
            return self._outcome("failed", str(error))
        except Interrupted as interrupt:
            self.end = RunReport(self.session.run, self.job.name, "stopped", why=f"interrupted{interrupt}")
        return self._unfinished()

    def _give_back(self, regions: Sequence[str]) -> None:
        """Give the regions that failed before their first page their turn back, behind the others of the round: the
        error that ended the run is hardly about them alone. If all others have failed too, the round ends instead, and
        they come last in the next one."""
        units, _ = self.attempts.spent()
        early = {place.region for place in self.failed if not (units.get(place.region) and place.begun)}
        with suppress(quota.QuotaError):  # the run ends with an error already
            places = self.store.checkpoints(self.job.name, regions, work_of(self.session.settings, self.job))
            waiting = any(p.pending and (p.failed_at_ms or 0) <= (p.completed_at_ms or 0) for p in places)
            for place in sorted(places, key=lambda place: (place.region in early, ended_at(place))):
                if waiting and place.region in early:
                    self.hold.keep(self.store.change(place, pending=True))
                elif early and not waiting and (place.pending or place.region in early):
                    self.hold.keep(self.store.fail(place, keep_cursor=True))

    def _pass(self) -> RegionOfRun:
        """Fetch and store one page after another until the pass is complete or something ends it."""
        inherited = self.here.cursor is not None  # from an earlier run, so upstream may no longer know it
        steps, lost, most = 0, 0, pages_of(self.job)  # steps without a whole page, and without a part, in a row
        while True:
            if self.start.how.stop():
                raise Interrupted
            if lack := lack_of_space(self.store.path):
                raise lack
            started_at_ms = self.store.now_ms()
            attempts = 1 if self.down else ATTEMPTS
            try:
                page = self._note_unknown(self.attempts.step(self.here, attempts, self.silent))
                rows = rows_of(self.job.fetch, self.job.tables, {**page.rows, **page.places})
                self.hold.check(page.cursor)
                steps = 0 if page.complete else steps + 1
                if steps > MAX_STEPS:
                    raise RuntimeError(f"fetch made {steps} steps in a row without completing a page")
            except Exception as error:
                if self.attempts.ends_run(error):
                    raise
                failure = self._noted_failure(error)
                if failure.kind == "cursor" and inherited:
                    self.here, inherited = self.store.restart(self.here), False
                    self.hold.keep(self.here)
                    continue
                left_out = left_out_by(error)
                if left_out is None or not failure.of_one_call or failure.silent in self.silent:
                    return self._give_up(failure)
                part, page = left_out
                rows = rows_of(self.job.fetch, {}, page.places)
                self.left_out, lost = f"{part}: {failure.message}", lost + 1
                if page.cursor is None and not self.here.pages:  # no part succeeded: the next pass tries all
                    return self._give_up(failure._replace(kind="region"))
            else:
                lost, self.down = 0, False
                self.silent, self.failed = [], []
            inherited = False
            finished = page.cursor is None or (page.complete and self.here.pages + 1 >= most)
            if not finished and self.store.was_at(self.here, page.cursor):
                return self._give_up(Failure("region", _CIRCLE, answered=True))
            if (refused := self._hand_over(page)) is not None:
                return self._give_up(refused)
            self._save(page, rows, started_at_ms, finished=finished)
            if finished:
                break
            if self.here.region in self.hold.away:
                return self._unfinished()
            if lost > 1:  # all may fail at their full cost: the next pass tries the others first
                return self._give_up(failure._replace(kind="answer", message=str(self.left_out)))
        return self._outcome("failed" if self.left_out else "done")

    def _save(self, page: Page, rows: Sequence[Row], started_at_ms: int, *, finished: bool) -> None:
        """Store the page with its checkpoint, and tell everybody who follows the run."""
        checkpoint, units = self.here, self.attempts.unnoted()
        self.here = self.store.save_page(checkpoint, page, rows, units, started_at_ms=started_at_ms, finished=finished)
        pages, items = self.added.get(checkpoint.region, (0, 0))
        self.added[checkpoint.region] = pages + page.complete, items + page.items
        if finished and not page.complete and not checkpoint.begun:
            self.idle.append(checkpoint.region)
        self.start.how.watcher.page(self.here)
        stored = {"page": checkpoint.pages + 1, **members(page, "complete items"), "items_of_pass": self.here.items}
        took_ms = self.store.now_ms() - started_at_ms
        _debug("page_stored", **members(checkpoint, "job region"), **stored, took_ms=took_ms, finished=finished)
        self.hold.renew(self.here)

    def _noted_failure(self, error: Exception) -> Failure:
        """The failure of the last step. Notes what it says of upstream."""
        failure = self.attempts.failure_of(error)
        self.down = failure.kind == "transient"
        if failure.answered or (failure.kind == "answer" and not failure.silent):
            self.silent, self.failed = [], []
        here = members(self.here, "job region")
        _debug("step_failed", exc_info=True, **here, page=self.here.pages + 1, kind=failure.kind)
        return failure

    def _note_unknown(self, page: Page) -> Page:
        """The page, with a row for each id for which upstream has nothing. So the store knows which ids were
        already named."""
        if not page.unknown:
            return page
        sql = "SELECT key FROM rows WHERE name = :table AND key IN (SELECT value FROM json_each(:ids))"
        keys = {f"{self.job.name} {name}"[:MAX_KEY_CHARACTERS]: name for name in page.unknown}
        named = self.store.select(sql, table=UNKNOWN_IDS, ids=json.dumps([*keys]))
        self.unknown += sorted({*page.unknown} - {keys[key] for (key,) in named} - {*self.unknown})
        rows = [*page.places.get(UNKNOWN_IDS, ()), *({"id": key} for key in keys)]
        return replace(page, places={**page.places, UNKNOWN_IDS: rows})

    def _hand_over(self, page: Page) -> Failure | None:
        """Give a copy of the page to the job's sink. An error of the sink fails the step."""
        if self.start.sink is None or not page.items:
            return None
        try:
            returned = self.start.sink(copy.deepcopy(page), self.job.name, self.here.region)
            if isinstance(returned, Coroutine | Generator | AsyncGenerator):  # a wrapper hides what it wraps
                getattr(returned, "close", int)()  # Python warns of a coroutine that nobody awaited
                raise TypeError(
                    f"the sink returned {type(returned).__name__}, which nobody runs; write a plain function"
                )
        except BaseException as error:
            if ends_program(error):
                raise
            _debug("sink_failed", exc_info=True, job=self.job.name, region=self.here.region)
            why = redact(describe(error) + line_of(error, self.job.sink))
            return Failure("answer", f"sink = {self.job.sink!r}: {why}; the next round fetches the page again")
        return None

    def _give_up(self, failure: Failure) -> RegionOfRun:
        match failure.kind:
            case "exhausted":
                # The metering has closed the bucket; the budget knows until when.
                budget = self.session.budget(self.job.credential)
                decision = refusal_of(budget, self.job, self.attempts.fetch, self.here)
                if decision is None:
                    stopped = RunReport(self.session.run, self.job.name, "stopped", why=failure.message)
                    self.end = replace(stopped, refused=True, refused_by=failure.bucket)
                else:
                    self.end = refused_report(self.session, self.job, decision)
                return self._unfinished()
            case "config":
                raise quota.ConfigError(failure.message)
        # The next pass continues from here, unless the cursor itself may be the cause.
        self.here = self.store.fail(self.here, keep_cursor=failure.kind in ("answer", "transient"))
        self.hold.keep(self.here)
        message = failure.message
        if failure.kind == "transient":
            message += f", in {many(self.attempts.tries, 'attempt')}"
            if failure.silent:
                message += f" to reach {failure.silent}; check network, endpoint and proxies"
        if failure.silent:
            self.silent.append(failure.silent)
            self.failed.append(self.here)
        return self._outcome("failed", message)

    # -- outcomes ----------------------------------------------------------------------------------------------------

    def _outcome(self, outcome: RegionOutcome, error: str | None = None) -> RegionOfRun:
        """How the current region ends."""
        pages, items = self.added.get(self.here.region, (0, 0))
        cursor, error = None if outcome == "done" else self.here.cursor, error or self.left_out
        return RegionOfRun(self.here.region, outcome, items=items, pages=pages, cursor=cursor, error=error)

    def _unfinished(self, error: str | None = None) -> RegionOfRun:
        return self._outcome("partial" if self.here.begun else "skipped", error)

    def _report(self, left: Checkpoint | None) -> RunReport:
        units, attempts = self.attempts.spent()
        with suppress(StoreError):  # the run's own row has the error
            self.store.runs.note_units(self.job.name, self.attempts.unnoted())
        regions = tuple(replace(o, units=units.get(o.region, 0)) for o in self.outcomes)
        notes = "; ".join(self._notes(units))
        end = self.end or self._own_end(regions, notes)
        has_failed = any(region.outcome == "failed" for region in regions)
        status = end.exit_status or (quota.QuotaError.exit_status if has_failed else 0)
        report = replace(
            end,
            regions=regions,
            units=sum(units.values()),
            attempts=attempts,
            exit_status=128 + self.start.how.stop() if self.start.how.stop() else status,
            next_step="" if left is None else f"{left.region} page {left.pages + 1}".strip(),
            elsewhere=self.hold.away,
            silent=self.silent[-1] if self.silent else "",
        )
        run = {"run": self.session.run, "job": self.job.name}
        for region in report.regions:
            _debug("region_ended", **run, **members(region, "region outcome pages items units"), why=region.error)
        spent, status = members(report, "units attempts"), report.exit_status
        outcome, number, why = report.outcome, len(report.regions), report.why
        _debug("run_ended", **run, outcome=outcome, regions=number, **spent, status=status, why=why)
        return report

    def _own_end(self, regions: Sequence[RegionOfRun], notes: str) -> RunReport:
        """The end of a run that came to the end of its regions."""
        failed = [region for region in regions if region.outcome == "failed"]
        if failed:
            why, only = failed[0].error or "", failed[0].region if len(self.job.regions) > 1 else ""
            if len(regions) > 1:
                names, only = ", ".join(region.region for region in failed), ""
                why = f"{len(failed)} of {len(regions)} regions failed ({names})"
            return RunReport(self.session.run, self.job.name, "failed", why=why, failed_region=only)
        replaced = any(o.region in self.hold.away and o.outcome in ("partial", "skipped") for o in regions)
        return RunReport(self.session.run, self.job.name, "elsewhere" if replaced else "done", why=notes)

    def _notes(self, units: Mapping[str, int]) -> Iterator[str]:
        """What a run says of calls that it did not make, and of ids for which upstream has nothing."""
        if idle := [region for region in self.idle if not units.get(region)]:
            yield "there was nothing to fetch" + (f" in {listed(idle)}" if units else "")
        if self.earlier:
            yield f"this round had covered {listed(self.earlier)} before"
        if self.unknown:
            unknown = f"upstream has nothing for {', '.join(map(show, self.unknown))}: correct or remove them"
            warn("unknown_ids", unknown, job=self.job.name)
            yield unknown
        if self.attempts.passed_over:
            distinct = [*dict.fromkeys(self.attempts.passed_over)]
            where = f", in {listed(distinct)}" if any(distinct) else ""
            lacks = f"the fetch function went on without a call that was refused{where}"
            warn("page_lacks_a_call", lacks, job=self.job.name)
            yield lacks


_CIRCLE = "the next page is one that this pass has already fetched; the next round begins with the first page"


def _debug(event: str, *, exc_info: object = False, **fields: object) -> None:
    """One line in the log, shown with QUOTA_LOG=debug."""
    log.debug("%s", line(event, **fields), exc_info=bool(exc_info))
