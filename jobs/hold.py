"""Whose regions a run covers: on a shared ledger each region of a job belongs to one store at a time.

    Hold            one run's hold on its regions, and on its tick
    hold_ms         how long that lasts after the run

What a store fetched is what its own `search` reads, so a round must not be split over the stores of several machines. A
run asks for all of its regions at once, renews its hold with every page, and says when it ends. If the ledger does not
answer, the run goes on: without a ledger only the local allowance admits anything, and that bounds what two machines
may spend on the same regions.

A ledger on one machine is asked for ticks only: the lock on the machine keeps runs apart.

With `[store] places = "ledger"` the regions belong to no store. Any run may have those that no other run covers now,
and goes on where the last one stopped (`quota.jobs.places`). Without the ledger it does not know where: it ends.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import islice

import quota
from quota import Session
from quota.common.log import line
from quota.jobs.job import Away
from quota.jobs.places import OWNER, SharedPlaces, claim_name, parts_of
from quota.jobs.store.checkpoints import Checkpoint
from quota.jobs.store.store import Store
from quota.rules.claims import MAX_HOLD_MS, Claim, Claimed, Ending
from quota.settings.model import JobSettings
from quota.terms.attribution import machine_name
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS

MIN_HOLD_MS = HOUR_MS
UNKNOWN_GAP_MS = DAY_MS
LEASE_SLACK_MS = MINUTE_MS
"""A run that is silent for longer than its longest step and this counts as dead."""

log = logging.getLogger("quota.jobs")


class Hold:
    """One run's hold. `away` has the regions that it did not get, or has lost since.

    `tick_is` says why a tick is not to be run: "done", or "running". `store_id` names the store, `machine` the lock
    that the run has. `now_ms` is the machine's clock. `gap_ms` is how far the store's runs of the job are apart, None
    if unknown. `step_ms` is the longest time between two pages.
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
        name = claim_name(job)
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
        """Claim these regions; `here`: also those of other stores."""
        if self._is_shared or self._places is not None:
            self._claim = self._claim._replace(regions=tuple(regions))
        elif not self._claim.tick:
            return
        self._ask(self._claim.regions, here=here)
        self._began = not self.tick_is and (len(self.away) < len(regions) or not self._claim.regions)
        if self._began:  # from now on, only what it has
            self._claim = self._claim._replace(regions=tuple(r for r in self._claim.regions if r not in self.away))

    def bring(self, store: Store) -> None:
        """Where the places lie in the ledger, make the store stand where that says."""
        if self._places is not None:
            self._places.bring(store, self._held())

    def renew(self, *checkpoints: Checkpoint) -> None:
        """Say that the run goes on and now stands here, and learn what it has lost."""
        if self._places is not None:
            self.keep(*checkpoints)
        elif self._began:
            self._ask(self._held())

    def keep(self, *checkpoints: Checkpoint) -> None:
        """Where the places lie in the ledger, say where the run stands. A region that another run has had meanwhile is
        away, and its place is that one's."""
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
        """Claim regions, a thousand at a time; those that are not given are away."""
        for part in parts_of(regions) if regions else ((),):
            claim = self._claim._replace(regions=part)
            try:
                claimed = self._state.claim(claim, take_over=here)
            except quota.LedgerError as error:
                if self._places is not None:
                    raise
                # What a run then spends is said by the budget.
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
        """The region that is away for longest; None if none is."""
        return max(self.away.values(), key=lambda away: away.until_ms, default=None)


def hold_ms(job: JobSettings, now_ms: int, gap_ms: int | None) -> int:
    """How long the job's regions stay with their store after a run: twice the time between two runs, 1 to 49 h.

    That time is the schedule's, where the job has one; else it is `gap_ms`, and a day until that is known.
    """
    if job.schedule is not None:
        from quota.settings.schedules import parse_schedule

        fires = parse_schedule(job.schedule, job.timezone).fires(now_ms + 1, now_ms + MAX_HOLD_MS)
        following = list(islice(fires, 2))
        if len(following) < 2:
            return MAX_HOLD_MS
        gap_ms = max(following[0] - now_ms, following[1] - following[0])
    return min(MAX_HOLD_MS, max(MIN_HOLD_MS, 2 * (gap_ms or UNKNOWN_GAP_MS)))
