"""`quota schedule`: all jobs on their schedules in one process. The only file that knows APScheduler.

    run_schedule    the door: run until told to stop
    _JobQueue       one job's ticks, one at a time

APScheduler keeps the time: it wakes up when the next tick of a stream (see `quota.jobs.ticks`) is due. Each
tick then passes these stages:

    queue           runs the ticks of a job one after the other; keeps only the newest waiting tick of each stream
    late            skips a tick that waited longer than the job's misfire_grace
    hold            claims the regions for this store, and the tick for those that it gets (`quota.jobs.places`)
    refusal         does not start a tick whose first call the budget would refuse; the log says when it could start
    run             runs the job as `quota run` does

Each tick asks the budget and remembers nothing: one peek takes less than a millisecond, and the next tick notices that
somebody raised, refunded or reopened a budget.

If the ledger does not answer, the tick runs. Without a ledger only the local allowance admits calls, and it limits what
two machines can spend on the same tick.

If somebody sets the clock back by more than SET_BACK_MS, each stream begins anew at the new time, as at a start: the
timer would otherwise wait until the wrong time comes again. No tick runs twice: the earlier run has claimed it.

A scheduler that starts runs the newest tick of each stream that is within its misfire_grace, unless somebody has
completed it. So a restart at the wrong moment does not cost a daily job its day.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from apscheduler.executors.base import BaseExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.base import BaseTrigger

import quota
from quota import Decision, Session
from quota.common.clock import elapsed_s, host_clock, rfc3339, utc
from quota.common.log import line
from quota.common.text import describe, many
from quota.jobs import interruption, runner
from quota.jobs.afterwards import follow_up
from quota.jobs.attempts import refusal_of
from quota.jobs.endings import failed_report
from quota.jobs.job import RunReport, functions_of
from quota.jobs.places import checkpoints_of, release
from quota.jobs.store.checkpoints import by_rotation
from quota.jobs.store.store import Store
from quota.jobs.ticks import Stream, Tick, streams
from quota.reports.notify import Ping
from quota.settings.model import JobSettings
from quota.terms.limits import MINUTE_MS

WORKERS = 32
"""The most jobs that run at the same time. They mostly wait for the network."""

REPORT_WITHIN_S = 0.5
"""How long a run may take to end after it has abandoned its page."""

POLL_S = 0.1
"""How often the main thread checks for a signal."""

WAKE_S = 10.0
"""The timer's clock stops while the machine is suspended, so the timer is woken this often to look at the time."""

SET_BACK_MS = MINUTE_MS
"""If a clock is set back by less, the schedule waits for it: what is due until then has run."""

ASK_AGAIN_S = 1.0
"""How often a tick asks whether another machine has ended its run for the same store."""

MAX_MISSED = 100_000
"""The most missed ticks that the schedule counts: somebody may correct a clock that was years behind."""

log = logging.getLogger("quota.schedule")


def run_schedule(session: Session, *, stop: Callable[[], int]) -> int:
    """Run all scheduled jobs until `stop` returns the number of a signal. The pages in flight are then stored, and
    other machines may have the regions. Returns the exit status: SIGTERM from a supervisor is the regular way to end.

    Raises ConfigError, before anything runs, if no job has a schedule or a job could never run.
    """
    jobs = [job for job in session.settings.jobs.values() if job.schedule is not None]
    if not jobs:
        source = session.settings.source
        raise quota.ConfigError(f'{source}: no job has a schedule; add schedule = "*/30 * * * *" to one')
    workers = min(WORKERS, len(jobs))
    with ExitStack() as end, ThreadPoolExecutor(workers, thread_name_prefix="job") as pool:
        end.callback(release, session, jobs)
        _start_threads(pool, workers)
        queues = {job.name: _JobQueue(session, job, pool, stop) for job in jobs}
        executors = {"default": _AtOnce()}
        scheduler = BackgroundScheduler(timezone=UTC, executors=executors, job_defaults={"coalesce": False})
        of_jobs = streams(jobs)
        for stream in of_jobs:
            queue = queues[stream.job]
            scheduler.add_job(queue.put, _Fires(stream, queue.job.misfire_grace_ms), args=(stream,))
        following = min((stream.after(host_clock()) for stream in of_jobs), key=lambda tick: tick.at_ms)
        ledger, at = session.ledger.label, rfc3339(following.at_ms)
        _say("schedule_started", jobs=len(jobs), streams=len(of_jobs), ledger=ledger, next=following.job, at=at)
        scheduler.start()
        try:
            _wait(scheduler, queues.values(), stop)
        finally:
            scheduler.shutdown(wait=False)
        running = [queue for queue in queues.values() if queue.running is not None]
        _say("schedule_stopping", signal=stop(), running=",".join(queue.job.name for queue in running) or None)
        status = 0 if stop() == signal.SIGTERM else 128 + stop()
        _finish(queues.values(), status)
    _say("schedule_stopped")
    return status


def _start_threads(pool: ThreadPoolExecutor, workers: int) -> None:
    """Start all threads now: a job whose first tick finds no free thread would never run. Raises QuotaError."""
    together = threading.Barrier(workers)
    try:
        for future in [pool.submit(together.wait) for _ in range(workers)]:
            future.result()
    except RuntimeError as error:
        together.abort()
        why = f"{many(workers, 'thread')} for the jobs cannot be started: {error}"
        raise quota.QuotaError(f"{why}; raise the limit of threads") from error


def _wait(scheduler: Any, queues: Collection[_JobQueue], stop: Callable[[], int]) -> None:
    woken_s, seen_ms = elapsed_s(), host_clock()
    while not stop():
        time.sleep(POLL_S)
        now_ms = host_clock()
        if now_ms < seen_ms - SET_BACK_MS:
            _say("clock_set_back", level=logging.WARNING, to=rfc3339(now_ms), by_ms=seen_ms - now_ms)
            for queue in queues:
                queue.since_ms = now_ms
            for job in scheduler.get_jobs():
                job.reschedule(job.trigger)
        seen_ms = now_ms
        if elapsed_s() - woken_s >= WAKE_S:
            scheduler.wakeup()
            woken_s = elapsed_s()


def _finish(queues: Collection[_JobQueue], status: int) -> None:
    """Wait for the pages in flight. If a page does not arrive in time, end the process with `status`: only that page is
    lost, because the store works in transactions."""
    until_s = elapsed_s() + interruption.STOP_WITHIN_S + REPORT_WITHIN_S
    while elapsed_s() < until_s:
        if not any(queue.running for queue in queues):
            return
        time.sleep(POLL_S / 4)
    for queue in queues:
        if queue.running is not None:
            why = f"it took over {interruption.STOP_WITHIN_S:g} s"
            _say("tick_abandoned", queue.running, level=logging.WARNING, why=why)
    logging.shutdown()
    os._exit(status)


# -- APScheduler's side ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Fires(BaseTrigger):  # type: ignore[misc]  # apscheduler ships no types
    """A stream's ticks as APScheduler asks for them, without those that are too late to run."""

    stream: Stream
    grace_ms: int

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime:
        after_ms = _ms(now) - self.grace_ms - 1
        if previous_fire_time is not None:
            after_ms = max(after_ms, _ms(previous_fire_time))
        return utc(self.stream.after(after_ms).at_ms)


class _AtOnce(BaseExecutor):  # type: ignore[misc]  # apscheduler ships no types
    """Calls the function of a job at once, with the times when it was due: APScheduler's own executors drop them."""

    def submit_job(self, job: Any, run_times: Sequence[datetime]) -> None:
        job.func(*job.args, *map(_ms, run_times))

    _do_submit_job = submit_job  # abstract in the base class


def _ms(at: datetime) -> int:
    return round(at.timestamp() * 1_000)


# -- one job -----------------------------------------------------------------------------------------------------------


class _JobQueue:
    """The ticks of one job, run one after the other. `running` is the current one. A tick that was due before
    `since_ms` does not count as missed."""

    def __init__(self, session: Session, job: JobSettings, pool: ThreadPoolExecutor, stop: Callable[[], int]) -> None:
        self.settings = session.settings
        self.job = job
        # Load now what every tick needs, so that a mistake shows at once and not at three in the morning.
        self.fetch, _ = functions_of(session.settings, job)
        session.check_key(job.credential)
        self.running: Tick | None = None
        self.since_ms = host_clock()
        self._pool = pool
        self._stop = stop
        self._lock = threading.Lock()
        self._due: dict[Stream, Tick] = {}
        self._busy = False

    def put(self, stream: Stream, *due_ms: int) -> None:
        """Run the stream's tick that is due at this time after those that already wait. Does not block.

        If several are due at once, because the machine slept, the newest runs.
        """
        last = Tick(due_ms[-1], stream.job, stream.regions)
        # APScheduler knows only the first of the ticks that are older than their grace.
        until_ms = max(last.at_ms + 1, host_clock() - self.job.misfire_grace_ms)
        due = list(islice(stream.ticks(due_ms[0], until_ms), MAX_MISSED))
        tick = max(last, *due)
        missed = [earlier for earlier in due if self.since_ms <= earlier.at_ms < tick.at_ms]
        if missed:
            why = "newer ticks were due before this machine came to it"
            _say("tick_skipped", missed[-1], reason="coalesced", ticks=len(missed), why=why)
        with self._lock:
            older = self._due.get(stream)
            self._due[stream] = tick
            start, self._busy = not self._busy, True
            running = self.running
        if older is not None:
            _say("tick_skipped", older, reason="coalesced", why="the next tick is due and this one was still waiting")
        elif running is not None and running.regions == tick.regions:  # its function may hang
            _say("tick_waits", tick, running=rfc3339(running.at_ms), why="the run of the tick before has not ended")
        if start:
            self._pool.submit(self._drain)

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._due or self._stop():
                    self.running, self._busy = None, False
                    return
                self.running = self._due.pop(next(iter(self._due)))
            try:
                self._tick(self.running)
            except quota.QuotaError as error:
                _say("tick_failed", self.running, level=logging.ERROR, why=str(error))
            except BaseException as error:  # the job's next ticks must run
                _say("tick_failed", self.running, level=logging.ERROR, why=describe(error))
                log.debug("%s", line("tick_traceback", job=self.job.name, run=self.running.name), exc_info=True)

    def _tick(self, tick: Tick) -> None:
        late_ms = host_clock() - tick.at_ms
        if late_ms > self.job.misfire_grace_ms:
            _say("tick_skipped", tick, reason="late", late_ms=late_ms)
            return
        started_s = None
        ping = Ping(self.job.ping_ref, self.job.name, insecure=self.job.insecure_endpoint)

        def refusal() -> Decision | None:
            nonlocal started_s
            ping.start()
            with Store.existing(self.settings.store) as store:
                place = by_rotation(checkpoints_of(session, self.job, store))[0]
            refused = refusal_of(session.budget(self.job.credential), self.job, self.fetch, place)
            if refused is None:
                _say("tick_started", tick, run=session.run, late_ms=late_ms)
                started_s = elapsed_s()
            else:
                retry_at = None if refused.retry_at_ms is None else rfc3339(refused.retry_at_ms)
                why = refused.why()
                _say("tick_refused", tick, reason=refused.reason, by=refused.refused_by, why=why, next=retry_at)
            return refused

        # Each tick gets a session of its own, as if it were a process, so that its charges have a run id of their own.
        with quota.Session(self.settings) as session:
            try:
                report = self._run(session, tick, refusal)
            except BaseException as error:
                follow_up(session, failed_report(session, self.job.name, error), ping)
                raise
            follow_up(session, report, ping)
        if started_s is not None or report.outcome != "stopped":
            took_s = 0.0 if started_s is None else elapsed_s() - started_s
            self._say_ended(tick, report, round(took_s * 1000))

    def _run(self, session: Session, tick: Tick, refusal: Callable[[], Decision | None]) -> RunReport:
        """One run. The tick waits for a run of the job on this machine, or of the same store on another."""
        how = runner.RunOptions(tick=tick, refusal=refusal, stop=self._stop)
        while True:
            report = runner.run_job(session, self.job.name, how)
            if not report.waits or self._stop() or host_clock() - tick.at_ms > self.job.misfire_grace_ms:
                return report
            time.sleep(ASK_AGAIN_S)

    def _say_ended(self, tick: Tick, report: RunReport, took_ms: int) -> None:
        for region in report.regions:
            if region.outcome == "failed":
                _say("region_failed", tick, level=logging.WARNING, failed=region.region, why=region.error)
        of_due = (report.elsewhere[region] for region in tick.regions if region in report.elsewhere)
        away = next(of_due, report.away)
        if report.outcome == "overlap":
            _say("tick_skipped", tick, reason="overlap", why=report.why)
        elif report.outcome == "elsewhere" and away is None:
            _say("tick_skipped", tick, reason="claimed", why=report.why)
        elif report.outcome == "elsewhere" and away is not None and not report.attempts:
            _say("tick_skipped", tick, reason="elsewhere", runs_on=away.runs_on, until=rfc3339(away.until_ms))
        else:
            _say(
                "tick_ended",
                tick,
                level=logging.ERROR if report.outcome == "failed" else logging.INFO,
                run=report.run,
                outcome=report.outcome,
                covered=",".join(region.region for region in report.regions if region.outcome != "skipped"),
                pages=sum(region.pages for region in report.regions),
                items=sum(region.items for region in report.regions),
                units=report.units,
                took_ms=took_ms,
                why=report.why,
                next=None if report.retry_at_ms is None else rfc3339(report.retry_at_ms),
            )


# -- the log -----------------------------------------------------------------------------------------------------------


def _say(event: str, tick: Tick | None = None, *, level: int = logging.INFO, **fields: object) -> None:
    """One line in the log; see `quota.common.log.line`."""
    if tick is not None:
        fields = {"job": tick.job, "due_region": ",".join(tick.regions), "at": rfc3339(tick.at_ms), **fields}
    log.log(level, "%s", line(event, **fields))


def log_schedule() -> None:
    """Log to stderr, each line with the time in UTC and without secrets. With QUOTA_LOG=debug, log everything, also of
    APScheduler."""
    from quota.cli.output import log_to_stderr
    from quota.common.log_lines import LineFormatter

    log_to_stderr(LineFormatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S"))
    level = logging.getLogger().level
    log.setLevel(min(logging.INFO, level))
    if level > logging.DEBUG:
        logging.getLogger("apscheduler").setLevel(logging.WARNING)
