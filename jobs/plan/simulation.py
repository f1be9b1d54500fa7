"""The configured schedule, run ahead of time: the real budget over a ledger in memory, with a clock that jumps.

    pass_steps      the methods that one pass over one region calls: the model of each fetch function
    State           the beginning of the simulation: a live ledger and store, or nothing
    simulate        runs ticks in their order, and reports what was spent, wanted and refused

A simulated tick follows the rules of `quota.jobs.runner`. It covers a round in the order of `by_rotation`, its
first refusal ends it, and the rest stays pending, with its cursor, for the next tick. A tick takes no time, and
upstream always answers: there are no errors and no retries, and each region has as many pages as the job asks for.

The budget decides the calls as it decides real calls, as many together as fit. After a refusal, the simulation does not
ask about such a call again before the time in the refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from quota.budget import MAX_CHARGES, Budget, Call
from quota.common.clock import NEVER
from quota.deciding.history import entries as entries_of
from quota.deciding.project import Project
from quota.deciding.run_limit import RunLimit
from quota.decision import Decision
from quota.errors import CostExceedsLimit, UsageError
from quota.jobs.fetches import PAGE_ITEMS
from quota.jobs.job import Fetch, attempt_of, fetch_to_look_at, pages_of
from quota.jobs.store.checkpoints import Checkpoint, by_rotation, in_round, is_empty
from quota.jobs.ticks import Tick, ticks
from quota.ledger.log import EPOCH
from quota.ledger.sqlite_log import SqliteLog
from quota.reports.runs import Bought
from quota.rules.entry import START, Entry, just_before
from quota.rules.facts import FACTS, Facts
from quota.session import Session, machine_jitter_ms
from quota.settings.model import JobSettings, Settings
from quota.terms.costs import Part, Price
from quota.terms.limits import DAY_MS, MINUTE_MS

UNNAMED = "unknown"
"""The method of a call that the fetch function does not name. It costs the book's default price of reading."""


# -- the cost of a pass ------------------------------------------------------------------------------------------------


def pass_steps(job: JobSettings, fetch: Fetch, refused: str | None = None) -> tuple[str, ...]:
    """The methods of the most calls of one pass over one region: upstream may have fewer pages than the job asks for.

    A user's own fetch function is assumed to make the call that it names, or else the `refused` one, once per page.
    """
    if job.fetch == "search":
        return ("search.list", "videos.list") * pages_of(job)
    pages = job.pages
    if job.fetch == "channels" and "ids" in job.options:
        ids = job.options["ids"]
        wanted = len(set(ids)) if isinstance(ids, (list, tuple)) else 1
        pages = min(pages, -(-wanted // PAGE_ITEMS))
    return (attempt_of(fetch, None) or refused or UNNAMED,) * pages


def step_at(job: JobSettings, checkpoint: Checkpoint) -> int:
    """The index of the step at which a checkpoint from the store continues."""
    if not checkpoint.begun or checkpoint.cursor is None:
        return 0
    # Only the search takes two steps for a page, and may stop between them.
    return checkpoint.pages * 2 + ("ids" in checkpoint.cursor) if job.fetch == "search" else checkpoint.pages


# -- the result --------------------------------------------------------------------------------------------------------


SLOT_MS = 15 * MINUTE_MS
"""Spending is summed over slots of this length, because days and hours begin with a slot in every time zone."""


@dataclass(slots=True)
class SlotSums:
    """Charged units and calls of one method of one job, by slot since 1970; or, if nothing were refused, the wanted
    units and calls."""

    project: str
    bucket: str
    method: str
    job: str
    units: dict[int, int] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)

    def add(self, when: int, units: int, calls: int = 1) -> None:
        self.units[when] = self.units.get(when, 0) + units
        self.calls[when] = self.calls.get(when, 0) + calls


class RefusedTick(NamedTuple):
    """A tick that met a refusal. It left `regions` regions.

    `limit` refused when the budget was last asked about such a call.
    """

    at_ms: int
    job: str
    limit: str | None
    regions: int


@dataclass(slots=True)
class JobPlan:
    """One job. `refused_ticks` met a refusal, at their start or later, and left `refused_regions` to a later tick.
    `passes` is how often each region is completed."""

    name: str
    passes: dict[str, int]
    ticks: int = 0
    refused_ticks: int = 0
    refused_regions: int = 0
    first_refused_ms: int | None = None
    first_refused_by: str | None = None

    def add(self, refusal: RefusedTick) -> None:
        if not self.refused_ticks:
            self.first_refused_ms, self.first_refused_by = refusal.at_ms, refusal.limit
        self.refused_ticks += 1
        self.refused_regions += refusal.regions


@dataclass(slots=True)
class Simulated:
    """The result of a simulation."""

    start_ms: int
    until_ms: int
    spent: list[SlotSums]
    wanted: list[SlotSums]
    refusals: list[RefusedTick]
    jobs: dict[str, JobPlan]


@dataclass(frozen=True, slots=True)
class State:
    """The beginning of a simulation: the ledger's entries and facts of each project, and the checkpoints of each job.
    `bought` has the results of pages in the last 7 days."""

    entries: Mapping[str, Sequence[Entry]] = field(default_factory=dict)
    facts: Mapping[str, Facts] = field(default_factory=dict)
    checkpoints: Mapping[str, Sequence[Checkpoint]] = field(default_factory=dict)
    bought: Sequence[Bought] = ()

    def facts_of(self, project: str) -> Facts:
        return self.facts.get(project, Facts())

    def lasting(self, until_ms: int) -> State:
        """The part that no reset before this time changes: upstream's grants, and buckets that are closed for
        longer."""
        return State(
            facts={
                project: Facts(tuple(fact for fact in facts.exhaustions if fact.until_ms > until_ms), facts.grants)
                for project, facts in self.facts.items()
            }
        )


EMPTY = State()


def read_state(session: Session) -> State:
    """The live state of a session's ledger and store. Changes neither, except that it first puts back lost charges.
    Raises LedgerError and StoreError."""
    from quota.jobs.places import checkpoints_of
    from quota.jobs.store.store import Store

    settings, now_ms = session.settings, session.ledger.now_ms()
    entries, facts = {}, {}
    for credential in settings.credentials.values():
        session.budget(credential.name).usage()  # puts back lost charges
        project = session.project(credential.name)
        entries[project.name] = list(entries_of(project, just_before(now_ms - project.longest_ms)))
        facts[project.name] = project.state.facts()
    checkpoints: dict[str, list[Checkpoint]] = {}
    with Store.if_made(settings.store) as store:
        for job in settings.jobs.values():
            checkpoints[job.name] = checkpoints_of(session, job, store)
        bought = tuple(store.runs.bought(max(0, now_ms - 7 * DAY_MS)))
    is_new = all(map(is_empty, chain.from_iterable(checkpoints.values()))) and set(facts.values()) <= {Facts()}
    return EMPTY if is_new and not any([*entries.values(), bought]) else State(entries, facts, checkpoints, bought)


# -- the simulation ----------------------------------------------------------------------------------------------------


def simulate(
    settings: Settings,
    start_ms: int,
    until_ms: int,
    *,
    state: State = EMPTY,
    fetches: Mapping[str, Fetch] | None = None,
    stops_at_refusal: bool = False,
    progress: Callable[[int], None] = lambda ticks: None,
) -> Simulated:
    """Run the ticks of all jobs from `start_ms` to `until_ms`. `progress` hears how many ticks have run.

    With `stops_at_refusal` the simulation ends at the first refusal. `fetches` are fetch functions by job, if they are
    already loaded. As the run itself, raises ConfigError if a function does not load, and UsageError, with the job's
    name, for a call that can never fit.
    """
    simulation = _Simulation(settings, start_ms, state, fetches)
    refusals: list[RefusedTick] = []
    for number, tick in enumerate(ticks(settings.jobs.values(), start_ms, until_ms)):
        progress(number)
        with naming(tick.job):
            answers = [simulation.tick(machine, tick) for machine in simulation.machines[tick.job]]
        refused = [refusal for refusal in answers if refusal is not None]
        for refusal in refused:
            simulation.jobs[tick.job].add(refusal)
        refusals += refused
        if refused and stops_at_refusal:
            break
    spent, wanted = [*simulation.spent.values()], [*simulation.wanted.values()]
    return Simulated(start_ms, until_ms, spent, wanted, refusals, simulation.jobs)


@contextmanager
def naming(job: str) -> Iterator[None]:
    """The errors of the block, about calls of this job, have its name."""
    try:
        yield
    except UsageError as error:
        raise type(error)(f"{job}: {error}") from None


class PricedCall(NamedTuple):
    """A call of a pass, with the price of one time. `unknown` has its charges if the book does not have the method.
    `knows` has everything that a refusal depends on. `units` is its cost for `max_units`: its units in the first
    bucket."""

    method: str
    parts: tuple[Part, ...]
    unknown: tuple[Part, ...] | None
    knows: tuple[Any, ...]
    units: int


class Pass:
    """What a run of one job does in each of its regions."""

    def __init__(self, job: JobSettings, budget: Budget, fetch: Fetch, refused: str | None = None) -> None:
        self.job = job
        self.budget = budget
        refused = refused if refused in budget.book.methods else None
        self._methods = list(map(budget.book.canonical, pass_steps(job, fetch, refused)))
        # If the budget cannot tell two jobs apart, a refusal of one is a refusal of the other.
        selected = any(limit.view.selector.jobs for limit in budget.limits)
        self._knows = budget.project, budget.credential, tuple(sorted(job.leave.items())), job.name if selected else ""
        # If a limit is paced, calls are charged one by one: the pace has room for the first charge of a period,
        # whatever it costs.
        is_paced = any(limit.paced for limit in budget.limits_of(job.name))
        self.at_once = 1 if is_paced else MAX_CHARGES // budget.book.most_parts
        """How many calls `admit` may charge together."""

    def calls(self, at_ms: int) -> list[PricedCall]:
        """The calls over one region, at the prices of this time. A call without a name costs the default. Raises
        UnknownMethod."""
        book, priced = self.budget.book, {}
        for method in dict.fromkeys(self._methods):
            price = book.default_get if method == UNNAMED else book.price_at(method, at_ms)[0]
            unknown = None if method in book.methods else price.parts
            if price.reserved and not self._can_fit(method, price):
                price = price.least  # a request of this job may ask for less than the default
                unknown = price.parts
            units = price.parts[0].units if price.parts else 0
            knows = (method, price.parts, *self._knows)
            priced[method] = PricedCall(method, price.parts, unknown, knows, units)
        return [priced[method] for method in self._methods]

    def _can_fit(self, method: str, price: Price) -> bool:
        """Whether a run can ever make a call of a method at a price."""
        if self.job.max_units is not None and price.units > self.job.max_units:
            return False
        try:
            self.budget.checklists.make((method, None, price.parts, self.job.name))
        except CostExceedsLimit:
            return False
        return True

    def of_run(self) -> RunLimit | None:
        """The limit of one run."""
        return None if self.job.max_units is None else RunLimit(self.job.max_units)

    def admit(self, calls: Sequence[PricedCall], of_run: RunLimit | None) -> tuple[int, Decision | None]:
        """Charge the first of these calls, as many together as fit: all that may be charged together, or half, or half
        of that. Returns their number, or 0 and the decision that refuses the first call. Raises CostExceedsLimit if
        that can never fit."""
        budget, units = self.budget, [call.units for call in calls[: self.at_once]]
        asked = len(units)
        if of_run is not None:
            asked = next((n for n, cost in enumerate(units) if not of_run.take(cost)), asked)
            if not asked:
                return 0, of_run.refusal(budget.credential, budget.project, calls[0].method, units[0], 0)
        while True:
            try:
                together = [Call(call.method, parts=call.unknown) for call in calls[:asked]]
                decision = budget._decide(together, self.job.name, commit=True)[0]
            except CostExceedsLimit:  # perhaps all calls together
                if asked == 1:
                    raise
            else:
                if decision.admitted:
                    return asked, None
                if asked == 1:
                    return 0, decision
            half = asked // 2
            if of_run is not None:
                of_run.give_back(sum(units[half:asked]))
            asked = half


@dataclass(slots=True)
class _Machine:
    """One machine that runs a whole job. The cursor of a region is the index of its next step. `covered` has the
    regions in the order in which the next tick covers them; it is empty if that is not known."""

    work: Pass
    regions: dict[str, Checkpoint]
    covered: list[Checkpoint] = field(default_factory=list)


class _Simulation:
    def __init__(self, settings: Settings, start_ms: int, state: State, fetches: Mapping[str, Fetch] | None) -> None:
        self.now_ms = start_ms
        self.spent: dict[tuple[str, ...], SlotSums] = {}
        self.wanted: dict[tuple[str, ...], SlotSums] = {}
        self.jobs: dict[str, JobPlan] = {}
        # A ledger in memory with the live log of each project, each entry at its own time, and the facts.
        log = SqliteLog(clock=lambda: self.now_ms)
        for project in {credential.project for credential in settings.credentials.values()}:
            _, fence = log.fence(project, "", "replay")
            log.replace(project, fence, START, state.entries.get(project, ()), fence)
            log.change(project, {EPOCH: fence}, {EPOCH: "replayed", FACTS: state.facts_of(project).text()})
        budgets = {}
        for credential in settings.credentials.values():
            of_credential = [job for job in settings.jobs.values() if job.credential == credential.name]
            budgets[credential.name] = Budget(
                credential=credential.name,
                book=credential.book,
                limits=credential.limits,
                project=Project(log, credential.project, clock=lambda: self.now_ms, jitter_ms=machine_jitter_ms()),
                leave={job.name: job.leave for job in of_credential},
            )
        self.machines: dict[str, list[_Machine]] = {}
        for job in settings.jobs.values():
            fetch = (fetches or {}).get(job.name) or fetch_to_look_at(settings, job)
            work = Pass(job, budgets[job.credential], fetch)
            regions = {region: Checkpoint(job.name, region) for region in job.regions or ("",)}
            for place in state.checkpoints.get(job.name, ()):
                if place.region in regions:
                    step = step_at(job, place)
                    regions[place.region] = place._replace(cursor={"step": step} if step else None)
            self.machines[job.name] = [_Machine(work, {**regions}) for _ in range(settings.machines_of(job))]
            self.jobs[job.name] = JobPlan(job.name, dict.fromkeys(regions, 0))
        self._refused_until: dict[tuple[Any, ...], tuple[int, str | None]] = {}

    def tick(self, machine: _Machine, tick: Tick) -> RefusedTick | None:
        """Run a tick on a machine that has its job. Returns the refusal that it met."""
        self.now_ms = tick.at_ms
        work, regions = machine.work, machine.regions
        job, calls = self.jobs[tick.job], work.calls(tick.at_ms)
        max_regions = len(tick.regions) or len(regions)
        job.ticks += 1
        for call in calls:
            self._note(self.wanted, work, call, max_regions)
        if not machine.covered:
            machine.covered = list(map(in_round, by_rotation(regions.values())))
            regions.update((place.region, place) for place in machine.covered)
        todo = [(place, place.cursor["step"] if place.cursor else 0) for place in machine.covered[:max_regions]]
        for call in calls[todo[0][1] :][:1]:
            until_ms, refused_by = self._refused_until.get(call.knows, (0, None))
            if self.now_ms < until_ms:
                return RefusedTick(tick.at_ms, tick.job, refused_by, len(todo))
        machine.covered = []
        coming = [call for _, first in todo for call in calls[first:]]
        of_run = work.of_run()
        admitted = 0  # how many of the next calls
        for done, (place, first) in enumerate(todo):
            for step in range(first, len(calls)):
                if not admitted:
                    admitted, refused_by = self._admit(work, coming, of_run)
                    if not admitted:
                        regions[place.region] = place._replace(cursor={"step": step} if step else None)
                        return RefusedTick(tick.at_ms, tick.job, refused_by, len(todo) - done)
                    del coming[:admitted]
                admitted -= 1
                self._note(self.spent, work, calls[step], 1)
            regions[place.region] = place._replace(pending=False, cursor=None, completed_at_ms=tick.at_ms)
            job.passes[place.region] += 1
        return None

    def _note(self, sums: dict[tuple[str, ...], SlotSums], work: Pass, call: PricedCall, times: int) -> None:
        for part in call.parts:
            key = work.budget.project, part.bucket, call.method, work.job.name
            if key not in sums:
                sums[key] = SlotSums(*key)
            sums[key].add(self.now_ms // SLOT_MS, part.units * times, times)

    def _admit(self, work: Pass, coming: Sequence[PricedCall], of_run: RunLimit | None) -> tuple[int, str | None]:
        """How many of the next calls are admitted now, at least; and, if none is, the limit that refuses.

        Without pace, the budget admits several calls together if it would admit them one after the other.
        """
        asked: list[PricedCall] = []
        for call in coming[: work.at_once]:
            # A refusal's time is exact, and no charge makes it earlier. Until then the answer stays the same.
            until_ms, refused_by = self._refused_until.get(call.knows, (0, None))
            if self.now_ms < until_ms:
                break
            asked.append(call)
        if not asked:
            return 0, refused_by
        count, refusal = work.admit(asked, of_run)
        if refusal is None:
            return count, None
        if refusal.reason != "run":
            next_ms = NEVER if refusal.retry_at_ms is None else refusal.retry_at_ms
            self._refused_until[asked[0].knows] = next_ms, refusal.refused_by
        return 0, refusal.refused_by
