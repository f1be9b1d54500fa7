"""Where a job stands in its regions: in its store, or, with `places = "ledger"`, beside its claims in the ledger.

    work_of          what the checkpoints of a job are of
    checkpoints_of   where a job stands, wherever that lies
    SharedPlaces     the places of one job in the ledger
    reset_shared     begin regions anew whose places lie there

The store decides in both cases: a run takes over what the ledger has, and gives back what its store made of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

import quota
from quota import Session
from quota.common.text import many
from quota.jobs.job import Cursor
from quota.jobs.lock import hashed
from quota.jobs.store.checkpoints import Checkpoint, digest_of, place_of, read_place
from quota.jobs.store.store import Store
from quota.rules.claims import MAX_REGIONS, Claim, Claimed
from quota.settings.model import JobSettings
from quota.terms.attribution import machine_name
from quota.terms.limits import MINUTE_MS

OWNER = "ledger"
"""Who owns the regions of a job whose places lie in the ledger: no store, so any machine may go on with them."""

MAX_CURSOR_BYTES = 65_536
"""The longest cursor, as JSON, that a ledger keeps."""

KNOWN_CURSORS = 100
"""How many of the last cursors of a pass the next machine knows, so that it notices a circle."""

READ_AT_ONCE = 100


def work_of(session: Session, job: JobSettings) -> str:
    """What the checkpoints of a job are of: its project, its fetch function and, where it has any, its options. With
    others the cursor of a pass names pages of another list."""
    work = f"{session.credential(job.credential).project}|{job.fetch}"
    return f"{work}|{hashed(json.dumps(job.options, sort_keys=True, default=str), 8)}" if job.options else work


def checkpoints_of(session: Session, job: JobSettings, store: Store | None) -> list[Checkpoint]:
    """Where a job stands in each of its regions. `store`: this machine's; None if there is none yet: then nothing is
    said of a job whose places lie there. Raises LedgerError and StoreError."""
    if session.settings.store.places_in_ledger:
        regions, work = job.regions or ("",), work_of(session, job)
        found = {one.region: one for one in SharedPlaces(session, job).read(regions)}
        return [found.get(region) or Checkpoint(job.name, region, work=work) for region in regions]
    return [] if store is None else store.checkpoints(job.name, job.regions, work_of(session, job))


def check_cursor(cursor: Cursor | None) -> None:
    """Raises BadAnswer for one that the ledger cannot keep."""
    size = len(json.dumps(cursor))
    if size > MAX_CURSOR_BYTES:
        raise quota.BadAnswer(
            f"the page's cursor has {many(size, 'byte')}, over {MAX_CURSOR_BYTES:,}: "
            'with [store] places = "ledger" it cannot be longer'
        )


class SharedPlaces:
    """The places of one job in the ledger. It remembers what was read and kept, and writes what differs."""

    def __init__(self, session: Session, job: JobSettings) -> None:
        self._state = session.project(job.credential).state
        self._job = job.name
        self._work = work_of(session, job)
        self._name = f"{self._work}|{job.name}"
        self._known: dict[str, str] = {}
        self._cursors: dict[str, tuple[bytes, ...]] = {}

    def read(self, regions: Sequence[str]) -> list[Checkpoint]:
        """Where the job stands in those of these regions that have a place."""
        found = []
        for part in parts_of(regions, READ_AT_ONCE):
            for region, text in self._state.places(self._name, part).items():
                if (place := read_place(text, self._job, region, self._work)) is not None:
                    self._known[region] = text
                    self._cursors[region] = place[1]
                    found.append(place[0])
        return found

    def bring(self, store: Store, regions: Sequence[str]) -> None:
        """Make the store stand where the ledger says. A region without a place there stays as the store has it."""
        store.stand([(one, self._cursors[one.region]) for one in self.read(regions)])

    def keep(self, claim: Claim, checkpoints: Iterable[Checkpoint]) -> Iterator[tuple[Sequence[str], Claimed]]:
        """Keep where the job stands, and renew the claim: a thousand regions at a time, each time with the answer."""
        places = {}
        for one in checkpoints:
            cursors, digest = self._cursors.get(one.region, ()), digest_of(one.cursor)
            if one.cursor is None:
                cursors = ()
            elif digest not in cursors:
                cursors = (*cursors, digest)[-KNOWN_CURSORS:]
            self._cursors[one.region] = cursors
            text = place_of(one, cursors)
            if text != self._known.get(one.region):
                places[one.region] = text
        for part in parts_of(claim.regions):
            those = {region: places[region] for region in part if region in places}
            claimed = self._state.keep_places(claim._replace(regions=part), self._name, those)
            self._known.update(those)
            yield part, claimed


def reset_shared(session: Session, job: JobSettings, checkpoints: Sequence[Checkpoint]) -> None:
    """Make the next page of each its first, in the round that is under way or in the next one. Raises QuotaError where
    a run covers one of them now."""
    claim = Claim(
        name=claim_name(job),
        owner=OWNER,
        run=f"reset {session.run}",
        machine=f"reset {session.run}",
        host=machine_name(),
        regions=tuple(one.region for one in checkpoints),
        hold_ms=MINUTE_MS,
        lease_ms=MINUTE_MS,
    )
    state, shared = session.project(job.credential).state, SharedPlaces(session, job)
    afresh = [
        one._replace(pending=True, cursor=None, pages=0, items=0, ranks=0, started_at_ms=None) for one in checkpoints
    ]
    try:
        parts = parts_of(claim.regions)
        answers = [state.claim(claim._replace(regions=part)) for part in parts]
        for holder in (holder for claimed in answers for holder in claimed.elsewhere.values()):
            raise quota.QuotaError(f"job {job.name!r} is running on {holder.host}; reset it when the run has ended")
        for _ in shared.keep(claim, afresh):
            pass
    finally:
        state.end_claim(claim._replace(regions=()), "done")


def claim_name(job: JobSettings) -> str:
    """Whatever claims under this name shares its regions."""
    return f"{job.fetch}|{job.name}"


def parts_of(regions: Sequence[str], size: int = MAX_REGIONS) -> Iterator[tuple[str, ...]]:
    """As many regions at a time as the ledger takes."""
    for start in range(0, len(regions), size):
        yield tuple(regions[start : start + size])
