"""Who may cover the regions of a job, and where the job stands in them: in its store, or, with `places = "ledger"`,
beside the claims in the ledger.

    Hold             one run's hold on its regions, and on its tick; it lasts for `hold_ms` after the run
    SharedPlaces     the places of one job in the ledger
    runs_on          the machines that hold the regions of a job
    work_of          names the work that the checkpoints of a job belong to
    checkpoints_of   where a job stands, in the store or in the ledger
    reset_shared     resets regions whose places are in the ledger

`quota search` reads one store, so a round must not be split over the stores of several machines. On a shared ledger
each region of a job therefore belongs to one store at a time. A run claims all its regions at once, renews its hold
with every page, and says when it ends. If the ledger does not answer, the run goes on: then only the local allowance
admits anything, and that bounds the spending of two machines on the same regions.

If the ledger is on one machine, a run asks it for ticks only: the machine's lock keeps runs apart.

With `[store] places = "ledger"` the regions belong to no store. Any run may take regions that no other run covers now,
and goes on where the last run stopped. The store still decides: the run copies the places from the ledger into the
store, and writes the store's new places back. Without the ledger the run does not know its places, and ends.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import quota
from quota import Session
from quota.common.log import line
from quota.common.text import listed, many
from quota.jobs.job import Away, Cursor
from quota.jobs.lock import hashed
from quota.jobs.store.checkpoints import Checkpoint, digest_of, place_of, read_place
from quota.jobs.store.store import Store
from quota.rules.claims import MAX_HOLD_MS, MAX_REGIONS, Claim, Claimed, Ending
from quota.settings.model import JobSettings
from quota.terms.arguments import machine_name
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS

MIN_HOLD_MS = HOUR_MS
UNKNOWN_GAP_MS = DAY_MS
LEASE_SLACK_MS = MINUTE_MS
"""A run that is silent for longer than its longest step and this counts as dead."""

OWNER = "ledger"
"""The owner of regions whose places are in the ledger: no store owns them, so any machine may go on with them."""

MAX_CURSOR_BYTES = 65_536
"""The longest cursor, as JSON, that a ledger keeps."""

KEPT_CURSORS = 100
"""How many of a pass's last cursors the next machine gets, to notice a circle."""

READ_AT_ONCE = 100

log = logging.getLogger("quota.jobs")


class Hold:
    """One run's hold. `away` has the regions that the run did not get, or has lost since.

    `tick_is` says why the run must not run its tick: "done" or "running". `store_id` names the store, `machine` the
    run's lock. `now_ms` is the machine's clock. `gap_ms` is the time between two runs of the job in this store, None if
    unknown. `step_ms` is the longest time between two pages.
    """

    def __init__(
        self,
        session: Session,
        job: JobSettings,
        store_id: str,
        machine: str,
        gap_ms: int | None,
        step_ms: int,
        now_ms: int,
        *,
        tick: str = "",
        tick_ms: int = HOUR_MS,
    ) -> None:
        self._is_shared = session.ledger.shared
        shared = session.settings.store.places_in_ledger
        self._places = SharedPlaces(session, job) if shared else None
        self._state = session.project(job.credential).state
        self._job = job.name
        self._owner = OWNER if shared else session.settings.store.name or store_id
        self._new = gap_ms is None
        name = _claim_name(job)
        self._claim = Claim(
            name=f"{name}|{self._owner}" if job.on_each_machine else name,
            owner=self._owner,
            run=session.run,
            machine=machine,
            host=machine_name(),
            regions=(),
            hold_ms=hold_ms(job, now_ms, gap_ms),
            lease_ms=min(MAX_HOLD_MS, step_ms + LEASE_SLACK_MS),
            tick=tick,
            tick_ms=tick_ms,
        )
        self.away: dict[str, Away] = {}
        self.tick_is = ""
        self._began = False

    def begin(self, regions: Sequence[str], *, here: bool = False) -> None:
        """Claim these regions. With `here`, also claim regions that belong to other stores."""
        if self._is_shared or self._places is not None:
            self._claim = self._claim._replace(regions=tuple(regions))
        elif not self._claim.tick:
            return
        self._ask(self._claim.regions, here=here)
        self._began = not self.tick_is and (len(self.away) < len(regions) or not self._claim.regions)
        if self._began:  # from now on, only what it has
            self._claim = self._claim._replace(regions=tuple(r for r in self._claim.regions if r not in self.away))

    def bring(self, store: Store) -> None:
        """If the places are in the ledger, copy them into the store."""
        if self._places is not None:
            self._places.bring(store, self._held())

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

    def end(self, ending: Ending) -> None:
        """Say that the run has ended, if it began."""
        if not self._began:
            return
        try:
            self._state.end_claim(self._claim._replace(regions=()), ending)
        except quota.LedgerError as error:
            log.debug("%s: %s", line("claim_unanswered", job=self._job), error)

    def _ask(self, regions: Sequence[str], *, here: bool = False) -> None:
        """Claim regions, a thousand at a time. Regions that the ledger does not give are away."""
        for part in _parts_of(regions) if regions else ((),):
            claim = self._claim._replace(regions=part)
            try:
                claimed = self._state.claim(claim, take_over=here)
            except quota.LedgerError as error:
                if self._places is not None:
                    raise
                # The budget then bounds what the run spends.
                level = logging.WARNING if self._claim.tick else logging.DEBUG
                log.log(level, "%s", line("claim_unanswered", job=self._job, why=str(error)))
                return
            self._take(regions, claimed)
            if claimed.tick:
                return

    def _take(self, regions: Iterable[str], claimed: Claimed) -> None:
        if claimed.tick:  # another run has it: this one does not begin, or, if it had begun, it has been replaced
            self.tick_is, now_ms = claimed.tick, claimed.now_ms
            if self._began:
                away = Away("another machine", now_ms, now_ms, now_ms, same_store=True)
                self.away.update(dict.fromkeys(regions, away))
        for region, holder in claimed.elsewhere.items():
            same = holder.owner == self._owner
            times_ms = holder.seen_ms, holder.until_ms, claimed.now_ms
            self.away[region] = Away(holder.host or "another machine", *times_ms, same, self._new and not same)

    def furthest(self) -> Away | None:
        """The holder of the region that is away for longest; None if no region is away."""
        return max(self.away.values(), key=lambda away: away.until_ms, default=None)


def hold_ms(job: JobSettings, now_ms: int, gap_ms: int | None) -> int:
    """How long the job's regions stay with their store after a run: twice the time between two runs, 1 to 49 h.

    A schedule says that time; without a schedule it is `gap_ms`, or a day until that is known.
    """
    if job.schedule is not None:
        from quota.settings.schedules import parse_schedule

        fires = parse_schedule(job.schedule, job.timezone).fires(now_ms + 1, now_ms + MAX_HOLD_MS)
        following = list(islice(fires, 2))
        if len(following) < 2:
            return MAX_HOLD_MS
        gap_ms = max(following[0] - now_ms, following[1] - following[0])
    return min(MAX_HOLD_MS, max(MIN_HOLD_MS, 2 * (gap_ms or UNKNOWN_GAP_MS)))


def runs_on(session: Session, job: JobSettings) -> tuple[str, bool]:
    """The machines that hold the job's regions, empty if there are none; and whether a run is under way there, as far
    as the ledger knows. Raises LedgerError."""
    if job.on_each_machine:
        return "each machine", False
    if not session.ledger.shared:
        return machine_name(), False
    holders = session.project(job.credential).state.holders(_claim_name(job))
    return listed(dict.fromkeys(holder.host for holder in holders)), any(holder.running for holder in holders)


# -- where a job stands -----------------------------------------------------------------------------------------------


def work_of(session: Session, job: JobSettings) -> str:
    """Names the work that a job's checkpoints belong to: its project, its fetch function and any options. With other
    options, a pass's cursor would name pages of another list."""
    work = f"{session.credential(job.credential).project}|{job.fetch}"
    return f"{work}|{hashed(json.dumps(job.options, sort_keys=True, default=str), 8)}" if job.options else work


def checkpoints_of(session: Session, job: JobSettings, store: Store | None) -> list[Checkpoint]:
    """Where a job stands in each of its regions. `store` is this machine's, or None if there is none yet: then a job
    with its places there has no checkpoints. Raises LedgerError and StoreError."""
    if session.settings.store.places_in_ledger:
        regions, work = job.regions or ("",), work_of(session, job)
        places = {checkpoint.region: checkpoint for checkpoint in SharedPlaces(session, job).read(regions)}
        return [places.get(region) or Checkpoint(job.name, region, work=work) for region in regions]
    return [] if store is None else store.checkpoints(job.name, job.regions, work_of(session, job))


def check_cursor(cursor: Cursor | None) -> None:
    """Raises BadAnswer for a cursor that the ledger cannot keep."""
    size = len(json.dumps(cursor))
    if size > MAX_CURSOR_BYTES:
        raise quota.BadAnswer(
            f"the page's cursor has {many(size, 'byte')}, over {MAX_CURSOR_BYTES:,}: "
            'with [store] places = "ledger" it cannot be longer'
        )


class SharedPlaces:
    """The places of one job in the ledger. It remembers what it read and wrote, and writes only changes."""

    def __init__(self, session: Session, job: JobSettings) -> None:
        self._state = session.project(job.credential).state
        self._job = job.name
        self._work = work_of(session, job)
        self._name = f"{self._work}|{job.name}"
        self._texts: dict[str, str] = {}
        self._cursors: dict[str, tuple[bytes, ...]] = {}

    def read(self, regions: Sequence[str]) -> list[Checkpoint]:
        """The checkpoints of these regions, as far as they have a place."""
        checkpoints = []
        for part in _parts_of(regions, READ_AT_ONCE):
            for region, text in self._state.places(self._name, part).items():
                if (place := read_place(text, self._job, region, self._work)) is not None:
                    self._texts[region] = text
                    self._cursors[region] = place[1]
                    checkpoints.append(place[0])
        return checkpoints

    def bring(self, store: Store, regions: Sequence[str]) -> None:
        """Copy the ledger's places into the store. A region without a place in the ledger keeps the store's place."""
        store.stand([(checkpoint, self._cursors[checkpoint.region]) for checkpoint in self.read(regions)])

    def keep(self, claim: Claim, checkpoints: Iterable[Checkpoint]) -> Iterator[tuple[Sequence[str], Claimed]]:
        """Write the places and renew the claim, a thousand regions at a time. Yields each answer."""
        places = {}
        for checkpoint in checkpoints:
            region = checkpoint.region
            cursors, digest = self._cursors.get(region, ()), digest_of(checkpoint.cursor)
            if checkpoint.cursor is None:
                cursors = ()
            elif digest not in cursors:
                cursors = (*cursors, digest)[-KEPT_CURSORS:]
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
    claim = Claim(
        name=_claim_name(job),
        owner=OWNER,
        run=f"reset {session.run}",
        machine=f"reset {session.run}",
        host=machine_name(),
        regions=tuple(checkpoint.region for checkpoint in checkpoints),
        hold_ms=MINUTE_MS,
        lease_ms=MINUTE_MS,
    )
    state, shared = session.project(job.credential).state, SharedPlaces(session, job)
    afresh = [
        checkpoint._replace(pending=True, cursor=None, pages=0, items=0, ranks=0, started_at_ms=None)
        for checkpoint in checkpoints
    ]
    try:
        parts = _parts_of(claim.regions)
        answers = [state.claim(claim._replace(regions=part)) for part in parts]
        for holder in (holder for claimed in answers for holder in claimed.elsewhere.values()):
            raise quota.QuotaError(f"job {job.name!r} is running on {holder.host}; reset it when the run has ended")
        for _ in shared.keep(claim, afresh):
            pass
    finally:
        state.end_claim(claim._replace(regions=()), "done")


def _claim_name(job: JobSettings) -> str:
    """The name of the claim. Jobs with the same name share their regions."""
    return f"{job.fetch}|{job.name}"


def _parts_of(regions: Sequence[str], size: int = MAX_REGIONS) -> Iterator[tuple[str, ...]]:
    """The regions in parts of `size`."""
    for start in range(0, len(regions), size):
        yield tuple(regions[start : start + size])
