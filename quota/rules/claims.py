"""Claims: each region of a job belongs to one store at a time, and each tick of a schedule is run once. Pure.

    Claim      what a run asks for
    Holder     whose a region is that it did not get
    Claimed    the answer
    Record     what the state holds of one job, and the rules that change it

A region is given to a run if no store holds it, if the hold has lapsed, or if the run's own store holds it and its last
run has ended or is dead: on the same machine, where the run holds the lock, or silent for its lease. A run renews by
claiming again, and loses what another took over. Times are those of the ledger's clock, and what is dated ahead of it
is dated now.

Where a job stands in a region, its place, may lie beside its claims, as a text that says nothing to the ledger. It is
written in the step that renews the claim, and only if no other run has had the region since this one got it. So a run
that is late puts no job back to where it stood before another went on.

A field of either begins with the time until which it counts: `UNTIL_MS TEXT`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from quota.errors import UsageError
from quota.terms.arguments import MAX_NUMBER, text, whole
from quota.terms.limits import DAY_MS, HOUR_MS

MAX_HOLD_MS = 49 * HOUR_MS
"""A region stays with its store no longer than this after the store's run was last heard of."""

MAX_TICK_MS = 8 * DAY_MS
"""A tick that was run is remembered no longer than this."""

MAX_TICKS = 1_000
"""The most ticks of a job that are remembered: of more, those that were to be remembered longest. The record is read
and written with each page."""

MAX_REGIONS = 1_000
"""The most regions that are claimed at once."""

MAX_PLACE_BYTES = 70_000
"""The longest text that says where a job stands in a region. The longest cursor in it has 64 kB."""

PLACE_KEPT_MS = 35 * DAY_MS
"""A place is forgotten so long after it was kept last."""

Ending = Literal["done", "stopped", "failed"]


class Claim(NamedTuple):
    """What one run of a job asks for.

    `name` is the job's: whatever claims under it shares its regions. `owner` is the store that the run writes to.
    `machine` names a lock that the run holds: of two runs with the same one, the earlier is dead. `host` is for people.
    The regions stay with the owner for `hold_ms` after the run was last heard of. A run that is silent for `lease_ms`
    counts as dead. `tick`, if not empty, names the tick of a schedule that this run is; a tick that was run is
    remembered for `tick_ms`. A region's name may be empty.
    """

    name: str
    owner: str
    run: str
    machine: str
    host: str
    regions: tuple[str, ...]
    hold_ms: int
    lease_ms: int
    tick: str = ""
    tick_ms: int = HOUR_MS


class Holder(NamedTuple):
    """Whose a region is, and since when nothing was heard of it.

    `host` is where the owner's last run was, heard of at `seen_ms`; `running`: it has not ended. At `until_ms` the
    region is free, if nothing is heard of the owner before. If the asking run is of that owner too, this is when the
    other one counts as dead.
    """

    owner: str
    host: str
    seen_ms: int
    until_ms: int
    running: bool


class Claimed(NamedTuple):
    """The answer to a claim. `elsewhere` has the regions that the run did not get; the others are its own now.

    `tick` is "" if the run may run its tick, "done" if another has run it, and "running" if another is running it. In
    the last two cases nothing was claimed. `now_ms` is the ledger's clock.
    """

    now_ms: int
    elsewhere: Mapping[str, Holder]
    tick: Literal["", "done", "running"] = ""


def checked_claim(claim: Claim) -> Claim:
    """The claim with each value of its type and in its bounds. Raises UsageError."""
    if len(claim.regions) > MAX_REGIONS:
        raise UsageError(f"{len(claim.regions):,} regions: at most {MAX_REGIONS:,} are claimed at once")
    for value in (claim.name, claim.owner, claim.run):
        if text(value, "claim") == "":
            raise UsageError("a claim needs a name, an owner and a run")
    return claim._replace(
        machine=text(claim.machine, "machine"),
        host=text(claim.host, "host"),
        regions=tuple(text(region, "region") for region in claim.regions),
        hold_ms=whole(claim.hold_ms, "ms: how long a region stays with its store", 1, MAX_HOLD_MS),
        lease_ms=whole(claim.lease_ms, "ms: how long a run may be silent", 1, MAX_HOLD_MS),
        tick=text(claim.tick, "tick"),
        tick_ms=whole(claim.tick_ms, "ms: how long a tick is remembered", 1, MAX_TICK_MS),
    )


CLAIM, PLACE = "claim:", "place:"
"""Begin the names of the fields of the state that hold the claims of a job, and where it stands in a region."""


def claim_field(name: str) -> str:
    """The field of the state that holds the claims of a job."""
    return CLAIM + name


def place_field(name: str, region: str) -> str:
    """The field of the state that holds where a job stands in a region."""
    return f"{PLACE}{text(name, 'name')}|{text(region, 'region')}"


def checked_place(place: str) -> str:
    """Raises UsageError for one that is too long."""
    size = len(text(place, "place").encode())
    if size > MAX_PLACE_BYTES:
        raise UsageError(f"a place of {size:,} bytes: a ledger keeps at most {MAX_PLACE_BYTES:,} of a region")
    return place


def stored_place(place: str, now_ms: int) -> str:
    """`UNTIL_MS TEXT`."""
    return f"{now_ms + PLACE_KEPT_MS} {place}"


def read_place(stored: str, now_ms: int) -> str | None:
    """The place; None if it has lapsed, or is none of ours."""
    until_ms, _, place = stored.partition(" ")
    return place if until_ms.isascii() and until_ms.isdigit() and int(until_ms[:16]) > now_ms else None


class _Run(NamedTuple):
    """A store's hold on regions: the run that claimed them last. `run` is empty once it has ended."""

    owner: str
    run: str
    machine: str
    host: str
    seen_ms: int
    alive_until_ms: int
    until_ms: int
    tick: str
    regions: tuple[str, ...]

    def holder(self) -> Holder:
        return Holder(self.owner, self.host, self.seen_ms, self.until_ms, self.run != "")

    def blocks(self, claim: Claim, now_ms: int) -> bool:
        """Whether this run is another one than the claim's, and may be alive."""
        return self.run not in ("", claim.run) and self.machine != claim.machine and self.alive_until_ms > now_ms


class Record:
    """The claims of one job as the state holds them: `UNTIL_MS JSON`, and nothing of it counts after that time."""

    def __init__(self, stored: str, now_ms: int) -> None:
        """Read it, without what has lapsed. What a wrong clock dated ahead of `now_ms` is dated now."""
        self.now_ms = now_ms
        try:
            data = json.loads(stored.partition(" ")[2]) if stored else {}
            runs = [_run(row, now_ms) for row in data.get("runs") or ()]
            ticks = dict(data.get("ticks") or {})
            self.ticks = {tick: min(whole(ms, "", 0, MAX_NUMBER), now_ms + MAX_TICK_MS) for tick, ms in ticks.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, UsageError):
            runs, self.ticks = [], {}  # not ours: the next claim writes it anew
        self.runs = [run for run in runs if run.until_ms > now_ms]
        self.ticks = {tick: until_ms for tick, until_ms in self.ticks.items() if until_ms > now_ms}

    def claim(self, claim: Claim, *, take_over: bool) -> Claimed:
        """Give the run its tick and those of its regions that are free, lapsed or its store's own."""
        if claim.tick:
            if claim.tick in self.ticks:
                return Claimed(self.now_ms, {}, "done")
            if any(run.tick == claim.tick and run.blocks(claim, self.now_ms) for run in self.runs):
                return Claimed(self.now_ms, {}, "running")
        elsewhere = {}
        for run in self.runs:
            own = run.owner == claim.owner
            if take_over or (own and not run.blocks(claim, self.now_ms)):
                continue
            holder = run.holder()._replace(until_ms=run.alive_until_ms) if own else run.holder()
            elsewhere.update(dict.fromkeys(set(run.regions) & set(claim.regions), holder))
        got = [region for region in claim.regions if region not in elsewhere]
        if got or not claim.regions:
            self._give(claim, got)
        return Claimed(self.now_ms, elsewhere)

    def renew(self, claim: Claim) -> Claimed:
        """As `claim`, but only of regions that no other run had since this one got them: what it wants to write about
        one of the others may be out of date."""
        elsewhere = {}
        for region in claim.regions:
            has = [run for run in self.runs if region in run.regions]
            if not any((run.owner, run.run) == (claim.owner, claim.run) for run in has):
                free = Holder("", "", self.now_ms, self.now_ms, False)
                elsewhere[region] = max((run.holder() for run in has), key=lambda holder: holder.until_ms, default=free)
        kept = [region for region in claim.regions if region not in elsewhere]
        if kept:
            self._give(claim, kept)
        return Claimed(self.now_ms, elsewhere)

    def _give(self, claim: Claim, regions: list[str]) -> None:
        before: tuple[str, ...] = ()
        kept = []
        for run in self.runs:
            if (run.owner, run.run) == (claim.owner, claim.run):
                before = run.regions
                continue
            left = tuple(region for region in run.regions if region not in regions)
            if left or (run.tick and run.blocks(claim, self.now_ms)):
                kept.append(run._replace(regions=left))
        self.runs = [
            *kept,
            _Run(
                claim.owner,
                claim.run,
                claim.machine,
                claim.host,
                self.now_ms,
                self.now_ms + claim.lease_ms,
                self.now_ms + claim.hold_ms,
                claim.tick,
                tuple(dict.fromkeys((*before, *regions))),
            ),
        ]

    def end(self, claim: Claim, ending: Ending) -> None:
        """The run has ended: its regions stay with its store. Not after "failed": then they are free. Its tick was run,
        unless it was stopped."""
        kept = []
        for run in self.runs:
            if (run.owner, run.run) != (claim.owner, claim.run):
                kept.append(run)
            elif ending != "failed" and run.regions:
                kept.append(run._replace(run="", tick="", seen_ms=self.now_ms, until_ms=self.now_ms + claim.hold_ms))
        self.runs = kept
        if claim.tick and ending != "stopped":
            self.ticks[claim.tick] = self.now_ms + claim.tick_ms
            by_end = sorted(self.ticks, key=lambda tick: (self.ticks[tick], tick))
            self.ticks = {tick: self.ticks[tick] for tick in by_end[-MAX_TICKS:]}

    def stored(self) -> str | None:
        """What the ledger stores; None if nothing is left."""
        until_ms = max([*(run.until_ms for run in self.runs), *self.ticks.values()], default=None)
        data = {"runs": [run._asdict() for run in self.runs], "ticks": self.ticks}
        return None if until_ms is None else f"{until_ms} {json.dumps(data, ensure_ascii=False)}"


def _run(row: Any, now_ms: int) -> _Run:
    """A line of the record, each time at most as far from now as it was from its own `seen_ms`."""
    owner, run, machine, host, tick = (text(row[name], name) for name in ("owner", "run", "machine", "host", "tick"))
    seen_ms, alive_until_ms, until_ms = (
        whole(row[name], name, 0, MAX_NUMBER) for name in ("seen_ms", "alive_until_ms", "until_ms")
    )
    ahead_ms = max(0, seen_ms - now_ms)
    regions = tuple(text(region, "region") for region in row["regions"] or ())
    alive_until_ms, until_ms = alive_until_ms - ahead_ms, min(until_ms - ahead_ms, now_ms + MAX_HOLD_MS)
    return _Run(owner, run, machine, host, seen_ms - ahead_ms, alive_until_ms, until_ms, tick, regions)
