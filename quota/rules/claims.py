"""Claims: each region of a job belongs to one store at a time, and each tick of a schedule covers it once. Pure.

    Claim      the request of a run
    Holder     the store that holds a region which the run did not get
    Claimed    the answer
    Record     the claims of one job in the state, and the rules that change them

A run gets a region if no store holds it, if the hold has lapsed, or if the run's own store holds it and that store's
last run has ended or is dead. A run is dead if another run holds its lock on the same machine, or if it was silent for
its lease. A store whose run had the same lock is the run's own: the configuration has given it another name. A run
renews its claim by claiming again, and loses the regions that another run took over. All times are times of the
ledger's clock; a time ahead of it counts as now.

If several stores hold the regions of a job, each covers its own regions in a tick. So the end of a run does not end its
tick for regions that another store holds then, or that another run of the tick covers.

The state may also keep the place of a job in a region, as a text that the ledger does not read. The step that renews
the claim writes it, unless another run has had the region since this run got it. So a late run does not set the job
back.

Either field begins with the time until which it counts: `UNTIL_MS TEXT`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

from quota.common.text import number_in
from quota.errors import UsageError
from quota.terms.arguments import MAX_NUMBER, checked, text, whole
from quota.terms.limits import DAY_MS, HOUR_MS

MAX_HOLD_MS = 49 * HOUR_MS
"""The longest time that a region stays with its store after the last sign of the store's run."""

MAX_TICK_MS = 8 * DAY_MS
"""The longest time that a tick is remembered."""

MAX_TICKS = 1_000
"""The most ticks of a job that are remembered: those with the latest ends. Every page reads and writes the record."""

MAX_REGIONS = 1_000
"""The most regions that are claimed at once."""

MAX_PLACE_BYTES = 70_000
"""The longest place of a job in a region. Its cursor may have 64 kB."""

PLACE_KEPT_MS = 35 * DAY_MS
"""How long a place is kept after it was last written."""

Ending = Literal["done", "stopped", "failed"]


class Claim(NamedTuple):
    """The request of one run of a job.

    All claims with the same `name`, the job's, share its regions. `owner` is the store that the run writes to.
    `machine` names a lock that the run holds: of two runs with the same lock, the earlier is dead. `host` is for
    people. The regions stay with the owner for `hold_ms` after the last sign of the run. A run that is silent for
    `lease_ms` counts as dead. `tick`, if not empty, names the run's tick of a schedule, which is remembered for
    `tick_ms`. If the tick is due for some regions only, `due` has them. A region's name may be empty.
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
    due: tuple[str, ...] = ()


class Holder(NamedTuple):
    """The store that holds these `regions`, and its `run` that claimed them last: "" once that has ended.

    The run was on `host`, had the lock `machine`, and gave its last sign at `seen_ms`; without another sign it counts
    as dead at `alive_until_ms`. The regions are free at `until_ms`, unless the owner gives a sign before. In an answer,
    the run of a store that is dead has ended; and if the asking run has the same owner, `until_ms` is when the other
    run counts as dead.
    """

    owner: str
    run: str
    machine: str
    host: str
    seen_ms: int
    alive_until_ms: int
    until_ms: int
    tick: str
    regions: tuple[str, ...]

    @property
    def running(self) -> bool:
        """Whether its run has not ended, and may be alive."""
        return self.run != ""

    def holder_at(self, now_ms: int) -> Holder:
        """The holder as an answer of this time has it."""
        return self if self.alive_until_ms > now_ms else self._replace(run="")

    def is_of(self, claim: Claim) -> bool:
        return (self.owner, self.run) == (claim.owner, claim.run)

    def blocks(self, claim: Claim, now_ms: int) -> bool:
        """Whether this is another run than the claim's, and may be alive."""
        return self.run not in ("", claim.run) and self.machine != claim.machine and self.alive_until_ms > now_ms

    def away_from(self, claim: Claim, now_ms: int) -> Holder | None:
        """The holder as the claim's run hears of it; None if the run gets these regions."""
        if self.owner != claim.owner and self.machine != claim.machine:
            return self.holder_at(now_ms)
        return self._replace(until_ms=self.alive_until_ms) if self.blocks(claim, now_ms) else None


class Claimed(NamedTuple):
    """The answer to a claim. `elsewhere` has the regions that the run did not get; it has the others now.

    If it has none of the regions that are due, nothing was claimed, nor if `tick` is "done" (the tick has been run for
    all of them) or "running" (another run is doing it, of a claim without regions). `now_ms` is the ledger's clock.
    """

    now_ms: int
    elsewhere: Mapping[str, Holder]
    tick: Literal["", "done", "running"] = ""


def checked_claim(claim: Claim) -> Claim:
    """The claim with each value of its type and in its bounds. Raises UsageError."""
    if len(claim.regions) > MAX_REGIONS:
        raise UsageError(f"{len(claim.regions):,} regions: at most {MAX_REGIONS:,} are claimed at once")
    claim = checked(claim)
    if "" in (claim.name, claim.owner, claim.run):
        raise UsageError("a claim needs a name, an owner and a run")
    whole(claim.hold_ms, "ms: how long a region stays with its store", 1, MAX_HOLD_MS)
    whole(claim.lease_ms, "ms: how long a run may be silent", 1, MAX_HOLD_MS)
    whole(claim.tick_ms, "ms: how long a tick is remembered", 1, MAX_TICK_MS)
    return claim


CLAIM, PLACE = "claim:", "place:"
"""Begin the names of the fields of the state with the claims of a job, and with its place in a region."""


def place_field(name: str, region: str) -> str:
    """The field of the state with the place of a job in a region."""
    return f"{PLACE}{text(name, 'name')}|{text(region, 'region')}"


def stored_place(place: str, now_ms: int) -> str:
    """`UNTIL_MS TEXT`. Raises UsageError if the place is too long."""
    size = len(text(place, "place").encode())
    if size > MAX_PLACE_BYTES:
        raise UsageError(f"a place of {size:,} bytes: a ledger keeps at most {MAX_PLACE_BYTES:,} of a region")
    return f"{now_ms + PLACE_KEPT_MS} {place}"


def read_place(stored: str, now_ms: int) -> str | None:
    """The place; None if it has lapsed, or the text is not ours."""
    until_ms, _, place = stored.partition(" ")
    return place if number_in(until_ms, now_ms + 1, MAX_NUMBER) is not None else None


class _Tick(NamedTuple):
    """A tick that was run, except for the regions in `left`."""

    until_ms: int
    left: tuple[str, ...]


class Record:
    """The claims of one job in the state: `UNTIL_MS JSON`. Nothing in it counts after that time."""

    def __init__(self, stored: str, now_ms: int) -> None:
        """Read the claims that have not lapsed. A time that a wrong clock dated ahead of `now_ms` counts as now."""
        self.now_ms = now_ms
        try:
            data = json.loads(stored.partition(" ")[2]) if stored else {}
            runs = [_run(row, now_ms) for row in data.get("runs") or ()]
            ticks = {name: checked(_Tick(*row)) for name, row in dict(data.get("ticks") or {}).items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, UsageError):
            runs, ticks = [], {}  # not ours: the next claim rewrites it
        self.runs = [run for run in runs if run.until_ms > now_ms]
        latest_ms = now_ms + MAX_TICK_MS
        self.ticks = {
            name: tick._replace(until_ms=min(tick.until_ms, latest_ms))
            for name, tick in ticks.items()
            if tick.until_ms > now_ms
        }

    def holders(self) -> list[Holder]:
        """The current holders. Of the runs that had one lock, only the last may be alive."""
        last = {run.machine: run.seen_ms for run in sorted(self.runs, key=lambda run: run.seen_ms)}
        holders = [run.holder_at(self.now_ms) for run in self.runs]
        return [x if x.seen_ms == last[x.machine] else x._replace(run="") for x in holders]

    def claim(self, claim: Claim, *, take_over: bool) -> Claimed:
        """Give the run its tick, and its regions that are free, lapsed or its store's own."""
        due = set(claim.due).intersection(claim.regions) or set(claim.regions)
        elsewhere = {}
        if claim.tick in self.ticks:
            covered = set(claim.regions).difference(self.ticks[claim.tick].left)
            if due <= covered:
                return Claimed(self.now_ms, {}, "done")
            elsewhere = dict.fromkeys(covered, self._free())
        same_tick = [run for run in self.runs if run.tick == claim.tick]
        if claim.tick and not due and any(run.blocks(claim, self.now_ms) for run in same_tick):
            return Claimed(self.now_ms, {}, "running")
        for run in self.runs:
            holder = None if take_over else run.away_from(claim, self.now_ms)
            if holder is not None:
                elsewhere.update(dict.fromkeys(set(run.regions) & set(claim.regions), holder))
        if not due or not due <= elsewhere.keys():
            self._give(claim, [region for region in claim.regions if region not in elsewhere])
        return Claimed(self.now_ms, elsewhere)

    def renew(self, claim: Claim) -> Claimed:
        """As `claim`, but only for regions that no other run has had since this run got them: its place in other
        regions may be out of date."""
        elsewhere = {}
        for region in claim.regions:
            runs = [run for run in self.runs if region in run.regions]
            if not any(run.is_of(claim) for run in runs):
                holders = [run.holder_at(self.now_ms) for run in runs]
                elsewhere[region] = max([self._free(), *holders], key=lambda holder: holder.until_ms)
        kept = [region for region in claim.regions if region not in elsewhere]
        if kept:
            self._give(claim, kept)
        return Claimed(self.now_ms, elsewhere)

    def _free(self) -> Holder:
        """The holder of a region that no store holds."""
        return Holder("", "", "", "", self.now_ms, self.now_ms, self.now_ms, "", ())

    def _give(self, claim: Claim, regions: list[str]) -> None:
        before: tuple[str, ...] = ()
        kept = []
        for run in self.runs:
            if run.is_of(claim):
                before = run.regions
                continue
            left = tuple(region for region in run.regions if region not in regions)
            if left or (run.tick and run.blocks(claim, self.now_ms)):
                kept.append(run._replace(regions=left))
        own = Holder(
            owner=claim.owner,
            run=claim.run,
            machine=claim.machine,
            host=claim.host,
            seen_ms=self.now_ms,
            alive_until_ms=self.now_ms + claim.lease_ms,
            until_ms=self.now_ms + claim.hold_ms,
            tick=claim.tick,
            regions=tuple(dict.fromkeys((*before, *regions))),
        )
        self.runs = [*kept, own]

    def end(self, claim: Claim, ending: Ending) -> None:
        """Note that the run has ended. Its regions stay with its store, unless it "failed": then they are free. Unless
        it was "stopped", its tick counts as done for all regions but those of other stores and runs."""
        kept = []
        for run in self.runs:
            if not run.is_of(claim):
                kept.append(run)
            elif ending != "failed" and run.regions:
                kept.append(run._replace(run="", tick="", seen_ms=self.now_ms, until_ms=self.now_ms + claim.hold_ms))
        self.runs = kept
        if claim.tick and ending != "stopped":
            others = [run for run in kept if run.owner != claim.owner or run.tick == claim.tick]
            left = {region for run in others for region in run.regions}
            if claim.due:
                left.intersection_update(claim.due)
            if claim.tick in self.ticks:
                left.intersection_update(self.ticks[claim.tick].left)
            self.ticks[claim.tick] = _Tick(self.now_ms + claim.tick_ms, tuple(sorted(left)))
            by_end = sorted(self.ticks, key=lambda tick: (self.ticks[tick].until_ms, tick))
            self.ticks = {tick: self.ticks[tick] for tick in by_end[-MAX_TICKS:]}

    def forget(self, ticks: Collection[str]) -> None:
        """Let these ticks be claimed again."""
        self.ticks = {name: tick for name, tick in self.ticks.items() if name not in ticks}

    def stored(self) -> str | None:
        """The text that the ledger stores; None if nothing is left."""
        ends = [*(run.until_ms for run in self.runs), *(tick.until_ms for tick in self.ticks.values())]
        data = {"runs": [run._asdict() for run in self.runs], "ticks": self.ticks}
        return f"{max(ends)} {json.dumps(data, ensure_ascii=False)}" if ends else None


def _run(row: Any, now_ms: int) -> Holder:
    """A run of the record. If `seen_ms` is ahead of now, all its times are moved back by as much."""
    run = checked(Holder(**row))
    ahead_ms = max(0, run.seen_ms - now_ms)
    return run._replace(
        seen_ms=run.seen_ms - ahead_ms,
        alive_until_ms=run.alive_until_ms - ahead_ms,
        until_ms=min(run.until_ms - ahead_ms, now_ms + MAX_HOLD_MS),
    )
