"""Who may cover the regions of a job, and where the job stands in them: in its store, or, with `places = "ledger"`,
beside the claims in the ledger.

    Hold             one run's hold on its regions, and on its tick; it lasts for `hold_ms` after the run
    SharedPlaces     the places of one job in the ledger
    runs_on          the machines that hold the regions of a job
    away_now         the regions of a job that a run here would not get now
    work_of          names the work that the checkpoints of a job belong to
    checkpoints_of   where a job stands, in the store or in the ledger
    reset_shared     resets regions whose places are in the ledger
    release          gives up the regions of this machine's store

`quota search` reads one store, so a round must not be split over the stores of several machines. On a shared ledger
each region of a job therefore belongs to one store at a time. A run claims all its regions at once, renews its hold
with every page, and says when it ends. If the ledger does not answer, the run goes on: then only the local allowance
admits anything, and that bounds the spending of two machines on the same regions.

If the ledger is on one machine, a run asks it for ticks only: the machine's lock (`quota.jobs.lock`) keeps runs apart.

With `[store] places = "ledger"` the regions belong to no store. Any run may take regions that no other run covers now,
and goes on where the last run stopped. The store still decides: the run copies the places from the ledger into the
store, and writes the store's new places back. Without the ledger the run does not know its places, and ends.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import chain, islice
from typing import TYPE_CHECKING

import quota
from quota import Session
from quota.common.clock import host_clock
from quota.common.log import line
from quota.common.text import listed, many
from quota.jobs.job import Away, Cursor, pages_of
from quota.jobs.lock import Lock, hashed, is_running, is_taken, kept_id, lock_name, made_lock, noted_id, store_id_of
from quota.jobs.store.checkpoints import FIRST_PAGE, Checkpoint, digest_of, place_of, read_place
from quota.jobs.store.file import StoreError
from quota.jobs.store.store import Store
from quota.jobs.ticks import Tick
from quota.rules.claims import MAX_HOLD_MS, MAX_REGIONS, Claim, Claimed, Ending, Holder
from quota.settings.model import JobSettings, Settings
from quota.settings.schedules import parse_schedule
from quota.terms.arguments import machine_name
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS

if TYPE_CHECKING:
    from quota.reports.status import JobRow

log = logging.getLogger("quota.jobs")

LEASE_SLACK_MS = MINUTE_MS
"""A run that is silent for longer than its longest step and this counts as dead."""

REMEMBER_SLACK_MS = HOUR_MS
"""The ledger remembers a tick this much longer than its grace: clocks may differ, and a tick may wait for a run."""

OWNER = "ledger"
"""The owner of regions whose places are in the ledger: no store owns them, so any machine may go on with them."""

MAX_CURSOR_BYTES = 65_536
"""The longest cursor, as JSON, that a ledger keeps."""

KEPT_CURSORS = 100
"""How many of a pass's last cursors the next machine gets, to notice a circle."""

READ_AT_ONCE = 100


class Hold(AbstractContextManager["Hold"]):
    """One run's hold. `away` has the regions that the run did not get, or has lost since.

    `tick_is` says why the run must not run its tick: "done" or "running". `step_ms` is the longest time between two
    pages. At its end the run says its `ending`; without one it is "done", or after an error "failed" or "stopped".
    """

    def __init__(
        self, session: Session, job: JobSettings, store: Store, lock: Lock, step_ms: int, tick: Tick | None
    ) -> None:
        self._is_shared = session.ledger.shared
        shared = session.settings.store.places_in_ledger
        self._places = SharedPlaces(session, job) if shared else None
        self._state = session.project(job.credential).state
        self._job = job.name
        store_id = store_id_of(store, lock)
        if self._is_shared:
            noted_id(store.path, store_id)
        self._owner = OWNER if shared else session.settings.store.name or store_id
        gap_ms = store.start_run(job.name, work_of(session.settings, job))
        self._new = gap_ms is None
        name = _claim_name(job)
        self._claim = Claim(
            name=f"{name}|{self._owner}" if job.on_each_machine else name,
            owner=self._owner,
            run=session.run,
            machine=lock_name(lock),
            host=machine_name(),
            regions=(),
            hold_ms=hold_ms(job, store.now_ms(), gap_ms),
            lease_ms=min(MAX_HOLD_MS, step_ms + LEASE_SLACK_MS),
            tick="" if tick is None else tick.name,
            tick_ms=job.misfire_grace_ms + REMEMBER_SLACK_MS,
            due=() if tick is None else tick.regions,
        )
        self.away: dict[str, Away] = {}
        self.tick_is = ""
        self.ending: Ending | None = None
        self._began = False

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """Say that the run has ended, if it began."""
        if not self._began:
            return
        after_error: Ending = "failed" if isinstance(error, quota.QuotaError) else "stopped"
        ending = self.ending or ("done" if error is None else after_error)
        try:
            self._state.end_claim(self._claim._replace(regions=()), ending)
        except quota.LedgerError as unanswered:
            log.debug("%s: %s", line("claim_unanswered", job=self._job), unanswered)

    def begin(self, regions: Sequence[str], *, here: bool = False) -> None:
        """Claim these regions. With `here`, also claim regions that belong to other stores. A tick that is due for some
        regions gets all or, if those are away, none."""
        due = self._claim.due or tuple(regions)
        if self._is_shared or self._places is not None:
            self._claim = self._claim._replace(regions=tuple(dict.fromkeys((*self._claim.due, *regions))))
        elif not self._claim.tick:
            return
        self._ask(self._claim.regions, here=here)
        has_due = not self.away.keys() >= set(due)
        if has_due and self._claim.regions:
            self.tick_is = ""  # the answer was about another part of the regions
        elif self.tick_is:
            self.away.clear()
        self._began = has_due and not self.tick_is

    def bring(self, store: Store) -> None:
        """If the places are in the ledger, copy them into the store. A region without one keeps the store's place."""
        if self._places is not None:
            store.stand(self._places.read(self._held(), store))

    def check(self, cursor: Cursor | None) -> None:
        """Raises BadAnswer for a cursor that the ledger would have to keep, and cannot."""
        if self._places is not None and (size := len(json.dumps(cursor))) > MAX_CURSOR_BYTES:
            why = f"the page's cursor has {many(size, 'byte')}, over {MAX_CURSOR_BYTES:,}"
            raise quota.BadAnswer(f'{why}: with [store] places = "ledger" it cannot be longer')

    def renew(self, *checkpoints: Checkpoint) -> None:
        """Say that the run goes on and now stands here, and learn which regions it has lost."""
        if self._places is not None:
            self.keep(*checkpoints)
        elif self._began:
            self._ask(self._held())

    def keep(self, *checkpoints: Checkpoint) -> None:
        """If the places are in the ledger, write where the run stands. A region that another run took meanwhile is
        away, and keeps that run's place."""
        if self._places is None or not self._began:
            return
        for regions, claimed in self._places.keep(self._claim._replace(regions=self._held()), checkpoints):
            self._take(regions, claimed)

    def _held(self) -> tuple[str, ...]:
        return tuple(region for region in self._claim.regions if region not in self.away)

    def _ask(self, regions: Sequence[str], *, here: bool = False) -> None:
        """Claim regions, a thousand at a time. Regions that the ledger does not give are away."""
        for part in _parts_of(regions) or [()]:  # without regions, it claims the tick
            claim = self._claim._replace(regions=part, due=() if self._began else self._claim.due)
            try:
                claimed = self._state.claim(claim, take_over=here)
            except quota.LedgerError as error:
                if self._places is not None:
                    raise
                # The budget then bounds what the run spends.
                level = logging.WARNING if self._claim.tick and not self._began else logging.DEBUG
                log.log(level, "%s", line("claim_unanswered", job=self._job, why=str(error)))
                return
            self._take(part, claimed)
            if claim.due and self.away.keys() >= set(claim.due):
                return

    def _take(self, regions: Iterable[str], claimed: Claimed) -> None:
        if claimed.tick:  # another run has it: this one does not begin, or, if it had begun, it has been replaced
            self.tick_is, now_ms = claimed.tick, claimed.now_ms
            away = Away("another machine", now_ms, now_ms, now_ms, same_store=True)
            self.away.update(dict.fromkeys(regions, away))
        for region, holder in claimed.elsewhere.items():
            same = holder.owner == self._owner
            host = holder.host or "another machine"
            is_new = self._new and not same
            self.away[region] = Away(host, holder.seen_ms, holder.until_ms, claimed.now_ms, same, is_new)


def hold_ms(job: JobSettings, now_ms: int, gap_ms: int | None) -> int:
    """How long the job's regions stay with their store after a run: twice the time between two runs, 1 to 49 h.

    A schedule says that time; without a schedule it is `gap_ms`, or a day until that is known.
    """
    if job.schedule is not None:
        fires = parse_schedule(job.schedule, job.timezone).fires(now_ms + 1, now_ms + MAX_HOLD_MS)
        following = list(islice(fires, 2))
        if len(following) < 2:
            return MAX_HOLD_MS
        gap_ms = max(following[0] - now_ms, following[1] - following[0])
    return min(MAX_HOLD_MS, max(HOUR_MS, 2 * (gap_ms or DAY_MS)))


def runs_on(session: Session, job: JobSettings, *, answers: bool) -> JobRow:
    """The machines that hold the regions of a job. If the ledger does not answer, only a run here is known."""
    from quota.reports.status import JobRow  # a run needs none

    nobody = JobRow(job.name, job.credential, runs_on="", seen_ms=None, next_ms=None)
    if job.on_each_machine:
        return nobody._replace(runs_on="each machine")
    here, store = machine_name(), session.settings.store
    holders = None
    if answers:
        with suppress(quota.LedgerError):  # a ledger that tells its time may have moved, or be of another format
            holders = _holders(session, job)
    if holders is None:
        seen_ms = host_clock() if is_running(store.url, job.name) else None
        host = here if seen_ms or not session.ledger.shared else ""
        return nobody._replace(runs_on=host, seen_on=host, seen_ms=seen_ms)
    killed = ""  # the lock of a run here that has ended
    with suppress(quota.ConfigError, StoreError), made_lock(store.url, job.name) as lock:
        killed = "" if lock is None or is_taken(lock) else lock_name(lock)
    away = _away(session, job, holders)
    is_elsewhere = away.keys() >= set(job.regions or ("",))
    until_ms = min(there.until_ms for there in away.values()) if is_elsewhere else None
    hosts = listed(dict.fromkeys(holder.host for holder in holders))
    running = [(holder.seen_ms, holder.host) for holder in holders if holder.running and holder.machine != killed]
    seen_ms, seen_on = max(running, default=(None, ""))
    return nobody._replace(runs_on=hosts, seen_on=seen_on, seen_ms=seen_ms, until_ms=until_ms)


def away_now(session: Session, job: JobSettings) -> dict[str, Away]:
    """The regions that a run here would not get now. It claims nothing. Raises LedgerError."""
    holders = None if job.on_each_machine else _holders(session, job)
    return {} if holders is None else _away(session, job, holders, session.ledger.now_ms())


def _holders(session: Session, job: JobSettings) -> list[Holder] | None:
    """The current holders; None if the ledger is on one machine and has no claims. Raises LedgerError."""
    if not session.ledger.shared and not session.settings.store.places_in_ledger:
        return None
    return session.project(job.credential).state.holders(_claim_name(job))


def _away(session: Session, job: JobSettings, holders: Iterable[Holder], now_ms: int = 0) -> dict[str, Away]:
    """The regions that another store holds, or a run of this store on another machine. Without `now_ms`, none of them
    says how long ago that was heard."""
    store, claim = session.settings.store, _brief_claim(job, "", session.run, job.regions or ("",))
    with suppress(quota.ConfigError, StoreError), made_lock(store.url, job.name) as lock:
        if lock is not None:
            claim = claim._replace(owner=kept_id(lock), machine=lock_name(lock))
    claim = claim._replace(owner=OWNER if store.places_in_ledger else store.name or claim.owner)
    away: dict[str, Away] = {}
    for holder in holders:
        there = holder.away_from(claim, now_ms)
        if there is not None:
            same = there.owner == claim.owner
            machine = Away(there.host or "another machine", there.seen_ms, there.until_ms, now_ms, same)
            away.update(dict.fromkeys(set(there.regions).intersection(claim.regions), machine))
    return away


# -- where a job stands ---------------------------------------------------------------------------------------------


def work_of(settings: Settings, job: JobSettings) -> str:
    """Names the work that a job's checkpoints belong to: its project, its fetch function and any options. With other
    options, a pass's cursor would name pages of another list."""
    work = f"{settings.credentials[job.credential].project}|{job.fetch}"
    return f"{work}|{hashed(json.dumps(job.options, sort_keys=True, default=str), 8)}" if job.options else work


def checkpoints_of(session: Session, job: JobSettings, store: Store) -> list[Checkpoint]:
    """Where a run would begin in each region of a job, in their order. `store` is this machine's. A region without a
    place in the ledger has the store's. Raises LedgerError and StoreError."""
    regions, work = job.regions or ("",), work_of(session.settings, job)
    places = {place.region: place for place in store.checkpoints(job.name, regions, work)}
    if session.settings.store.places_in_ledger:
        places.update((place.region, place) for place, _ in SharedPlaces(session, job).read(regions, store))
    cutoff_ms = store.cutoff_ms()
    stand = (place._replace(**FIRST_PAGE) if place.begins_before(cutoff_ms) else place for place in places.values())
    return [place.completed() if place.is_complete(pages_of(job)) else place for place in stand]


class SharedPlaces:
    """The places of one job in the ledger. It remembers what it read and wrote, and writes only changes."""

    def __init__(self, session: Session, job: JobSettings) -> None:
        self._state = session.project(job.credential).state
        self._job = job.name
        self._work = work_of(session.settings, job)
        self._name = f"{self._work}|{job.name}"
        self._texts: dict[str, str] = {}
        self._cursors: dict[str, tuple[bytes, ...]] = {}

    def read(self, regions: Sequence[str], store: Store) -> list[tuple[Checkpoint, tuple[bytes, ...]]]:
        """The checkpoints of these regions, as far as they have a place, each with digests of its pass's cursors.
        If the store has completed a later pass, the place is too old: the ledger was restored, or out of use for a
        while."""
        places = []
        for part in _parts_of(regions, READ_AT_ONCE):
            for region, text in self._state.places(self._name, part).items():
                place = read_place(text, self._job, region, self._work)
                if place is None:
                    continue
                own = store.checkpoint(self._job, region, self._work)
                if (own.completed_at_ms or 0) <= (place[0].completed_at_ms or 0):
                    self._texts[region] = text
                    self._cursors[region] = place[1]
                    places.append(place)
        return places

    def keep(self, claim: Claim, checkpoints: Iterable[Checkpoint]) -> Iterator[tuple[Sequence[str], Claimed]]:
        """Write the places and renew the claim, a thousand regions at a time. Yields each answer."""
        places = {}
        for checkpoint in checkpoints:
            region, cursor = checkpoint.region, checkpoint.cursor
            digests = () if cursor is None else (*self._cursors.get(region, ()), digest_of(cursor))
            cursors = tuple(dict.fromkeys(digests))[-KEPT_CURSORS:]
            self._cursors[region] = cursors
            text = place_of(checkpoint, cursors)
            if text != self._texts.get(region):
                places[region] = text
        for part in _parts_of(claim.regions):
            changed = {region: places[region] for region in part if region in places}
            claimed = self._state.keep_places(claim._replace(regions=part), self._name, changed)
            self._texts.update(changed)
            yield part, claimed


def reset_shared(session: Session, job: JobSettings, checkpoints: Sequence[Checkpoint]) -> None:
    """Reset each region to its first page, in the current round or in the next one. Raises QuotaError if a run covers a
    region now."""
    claim = _brief_claim(job, OWNER, f"reset {session.run}", tuple(checkpoint.region for checkpoint in checkpoints))
    state, shared = session.project(job.credential).state, SharedPlaces(session, job)
    afresh = [checkpoint._replace(pending=True, **FIRST_PAGE) for checkpoint in checkpoints]
    try:
        for part in _parts_of(claim.regions):
            for holder in state.claim(claim._replace(regions=part)).elsewhere.values():
                raise quota.QuotaError(f"job {job.name!r} is running on {holder.host}; reset it when the run has ended")
        list(shared.keep(claim, afresh))  # it writes as its answers are read
    finally:
        state.end_claim(claim._replace(regions=()), "done")


def release(session: Session, jobs: Iterable[JobSettings]) -> None:
    """Let other machines have the regions of these jobs that this machine's store holds and no run covers: this machine
    cannot run the jobs, or will not. The store need not be readable. Raises nothing."""
    settings = session.settings.store
    with suppress(quota.QuotaError):  # they are free when this machine has been silent for long enough
        owner = settings.name or noted_id(settings.file)
        for job in jobs if owner and session.ledger.shared and not settings.places_in_ledger else ():
            state = session.project(job.credential).state
            held = [holder.regions for holder in state.holders(_claim_name(job)) if holder.owner == owner]
            for part in _parts_of([*chain.from_iterable(held)]):
                claim = _brief_claim(job, owner, session.run, part)
                state.claim(claim)
                state.end_claim(claim, "failed")


def _brief_claim(job: JobSettings, owner: str, run: str, regions: tuple[str, ...]) -> Claim:
    """The claim of a step that fetches nothing."""
    host = machine_name()
    return Claim(_claim_name(job), owner, run, run, host, regions, hold_ms=MINUTE_MS, lease_ms=MINUTE_MS)


def _claim_name(job: JobSettings) -> str:
    """The name of the claim. Jobs with the same name share their regions."""
    return f"{job.fetch}|{job.name}"


def _parts_of(regions: Sequence[str], size: int = MAX_REGIONS) -> list[tuple[str, ...]]:
    """The regions in parts of `size`."""
    return [tuple(regions[start : start + size]) for start in range(0, len(regions), size)]
