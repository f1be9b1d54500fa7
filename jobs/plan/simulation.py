"""The configured schedule, run ahead of time: the real budget over a ledger in memory, with a clock that jumps.

    Step            one call of a pass, as the budget sees it
    pass_steps      the calls of one pass over one region: the model of each fetch function
    State           the beginning of the simulation: a live ledger and store, or nothing
    simulate        runs ticks in their order, and reports what was spent, wanted and refused

A simulated tick follows the rules of `quota.jobs.runner`. It covers a round in the order of `by_rotation`, its
first refusal ends it, and the rest stays pending, with its cursor, for the next tick. A tick takes no time, and
upstream always answers: there are no errors and no retries, and each region has as many pages as the job asks for.

The budget decides the calls as it decides real calls, as many together as fit. After a refusal, the simulation does not
ask about such a call again before the time in the refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from quota.budget import MAX_CHARGES, Budget, Call
from quota.common.clock import NEVER
from quota.deciding.history import entries as entries_of
from quota.deciding.project import Project
from quota.deciding.run_limit import RunLimit
from quota.decision import Decision
from quota.errors import CostExceedsLimit
from quota.jobs.fetches import PAGE_ITEMS
from quota.jobs.job import Fetch, attempt_of, fetch_to_look_at, pages_of
from quota.jobs.store.checkpoints import Checkpoint, by_rotation, in_round, is_empty
from quota.jobs.ticks import Tick, ticks
from quota.ledger.log import EPOCH
from quota.ledger.memory_log import MemoryLog
from quota.reports.runs import Bought
from quota.rules.entry import START, Entry, just_before
from quota.rules.facts import FACTS, Facts
from quota.session import Session, machine_jitter_ms
from quota.settings.model import CredentialSettings, JobSettings, Settings
from quota.terms.costs import CostBook, Part, Price
from quota.terms.limits import DAY_MS, MINUTE_MS

UNNAMED = "unknown"
"""The method of a call that the fetch function does not name. It costs the book's default price of reading."""


class Step(NamedTuple):
    """One call."""

    method: str
    completes_page: bool


# -- the cost of a pass ------------------------------------------------------------------------------------------------


def pass_steps(job: JobSettings, fetch: Fetch) -> tuple[Step, ...]:
    """The most calls of one pass over one region: upstream may have fewer pages than the job asks for.

    A user's own fetch function is assumed to make the call that it names, once per page.
    """
    if job.fetch == "search":
        return (Step("search.list", False), Step("videos.list", True)) * pages_of(job)
    pages = job.pages
    if job.fetch == "channels" and "ids" in job.options:
        ids = job.options["ids"]
        wanted = len(set(ids)) if isinstance(ids, (list, tuple)) else 1
        pages = min(pages, -(-wanted // PAGE_ITEMS))
    return (Step(attempt_of(fetch, None) or UNNAMED, True),) * pages


def step_at(steps: Sequence[Step], checkpoint: Checkpoint) -> int:
    """The index of the step at which a checkpoint from the store continues."""
    if not checkpoint.begun or checkpoint.cursor is None:
        return 0
    pages, index = 0, 0
    while index < len(steps) and pages < checkpoint.pages:
        pages += steps[index].completes_page
        index += 1
    # Only the search stops between two steps of one page.
    return index + 1 if "ids" in checkpoint.cursor and index < len(steps) and not steps[index].completes_page else index


def price_of(book: CostBook, method: str, at_ms: int) -> tuple[Price, int]:
    """The price of a call, and until when it holds. The default if the call has no name. Raises UnknownMethod."""
    if method == UNNAMED:
        return book.default_get, NEVER
    price, (_, until_ms) = book.price_at(method, at_ms)
    return price, until_ms


# -- the result --------------------------------------------------------------------------------------------------------


SLOT_MS = 15 * MINUTE_MS
"""Spending is summed over slots of this length, because days and hours begin with a slot in every time zone."""


@dataclass(slots=True)
class Spent:
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


class Refusal(NamedTuple):
    """A tick that met a refusal. It left `regions` regions.

    `limit` refused when the budget was last asked about such a call.
    """

    at_ms: int
    job: str
    limit: str | None
    regions: int


@dataclass(slots=True)
class JobTotals:
    """One job's ticks, and how often each of its regions was completed."""

    ticks: int = 0
    passes: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Simulated:
    """The result of a simulation."""

    start_ms: int
    until_ms: int
    spent: list[Spent]
    wanted: list[Spent]
    refusals: list[Refusal]
    jobs: dict[str, JobTotals]


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
                project: Facts(tuple(x for x in facts.exhaustions if x.until_ms > until_ms), facts.grants)
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
        bought = () if store is None else tuple(store.runs.bought(max(0, now_ms - 7 * DAY_MS)))
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
    already loaded. As the run itself, raises ConfigError if a function does not load, and UsageError for a call that
    can never fit.
    """
    simulation, refusals = _Simulation(settings, start_ms, state, fetches), []
    for number, tick in enumerate(ticks(settings.jobs.values(), start_ms, until_ms)):
        progress(number)
        refused = simulation.tick(tick)
        refusals += refused
        if refused and stops_at_refusal:
            break
    jobs = [first for first, *_ in simulation.jobs.values()]
    return Simulated(
        start_ms,
        until_ms,
        [spent for job in jobs for spent in job.spent.values()],
        [wanted for job in jobs for wanted in job.wanted.values()],
        refusals,
        {job.name: job.totals for job in jobs},
    )


@dataclass(slots=True, eq=False)
class _Call:
    """A kind of call, with the prices of one time.

    `unknown` has its charges if the book does not have the method. `knows` has everything that a refusal depends on.
    `spent` and `wanted` have a sum for each of the buckets in `parts`. A pass over one region makes it `times` times.
    """

    method: str
    parts: tuple[Part, ...]
    unknown: tuple[Part, ...] | None
    knows: tuple[Any, ...]
    spent: list[Spent]
    wanted: list[Spent]
    times: int = 0

    @property
    def units(self) -> int:
        """Its cost for `max_units`: its units in the first bucket."""
        return self.parts[0].units if self.parts else 0


class _Job:
    """One job's constants and its regions.

    `covered` has the regions in the order in which the next tick covers them; it is empty if that is not known.
    `calls` are the calls of a pass over one region, and `kinds` the different calls among them, with the prices of the
    last call of `price`.
    """

    def __init__(self, job: JobSettings, budget: Budget, fetch: Fetch, places: Mapping[str, Checkpoint]) -> None:
        self.name = job.name
        self.budget = budget
        self.max_units = job.max_units
        self.at_once = most_at_once(budget, job.name)
        self.steps = pass_steps(job, fetch)
        self.regions = {name: self._place(places.get(name), name) for name in job.regions or ("",)}
        self.totals = JobTotals(passes=dict.fromkeys(self.regions, 0))
        self.methods = [budget.book.canonical(step.method) for step in self.steps]
        self.spent: dict[tuple[str, str], Spent] = {}
        self.wanted: dict[tuple[str, str], Spent] = {}
        self.covered: list[Checkpoint] = []
        self.calls: list[_Call] = []
        self.kinds: list[_Call] = []
        self.priced_until_ms = 0
        # If the budget cannot tell two jobs apart, a refusal of one is a refusal of the other.
        selected = any(limit.view.selector.jobs for limit in budget.limits)
        self.knows = (budget.project, budget.credential, tuple(sorted(job.leave.items())), job.name if selected else "")

    def _place(self, checkpoint: Checkpoint | None, region: str) -> Checkpoint:
        """A checkpoint whose cursor is the index of the next step."""
        if checkpoint is None:
            return Checkpoint(self.name, region)
        step = step_at(self.steps, checkpoint)
        return checkpoint._replace(cursor={"step": step} if step else None)

    def price(self, at_ms: int) -> None:
        """Use the prices at `at_ms`, which is never earlier than in the last call."""
        if at_ms < self.priced_until_ms:
            return
        book, until_ms = self.budget.book, NEVER
        kinds: dict[str, _Call] = {}
        self.calls = []
        for method in self.methods:
            price, price_until_ms = price_of(book, method, at_ms)
            until_ms = min(until_ms, price_until_ms)
            unknown = None if method in book.methods else price.parts
            spent, wanted = self._sums(self.spent, method, price), self._sums(self.wanted, method, price)
            knows = (method, price.parts, *self.knows)
            call = kinds.setdefault(method, _Call(method, price.parts, unknown, knows, spent, wanted))
            call.times += 1
            self.calls.append(call)
        self.kinds = list(kinds.values())
        self.priced_until_ms = until_ms

    def _sums(self, sums: dict[tuple[str, str], Spent], method: str, price: Price) -> list[Spent]:
        """The sums of this method in the buckets of its price."""
        of_buckets = [Spent(self.budget.project, part.bucket, method, self.name) for part in price.parts]
        return [sums.setdefault((method, empty.bucket), empty) for empty in of_buckets]


class _Simulation:
    def __init__(self, settings: Settings, start_ms: int, state: State, fetches: Mapping[str, Fetch] | None) -> None:
        self.now_ms = start_ms
        log = self._replay(settings, state)
        budgets = {c.name: self._budget(settings, c, log) for c in settings.credentials.values()}
        self.jobs: dict[str, list[_Job]] = {}  # one for each machine that runs the whole job
        for job in settings.jobs.values():
            fetch = (fetches or {}).get(job.name) or fetch_to_look_at(settings, job)
            checkpoints = {checkpoint.region: checkpoint for checkpoint in state.checkpoints.get(job.name, ())}
            budget = budgets[job.credential]
            first, *others = (_Job(job, budget, fetch, checkpoints) for _ in range(settings.machines_of(job)))
            for other in others:
                other.spent, other.wanted, other.totals = first.spent, first.wanted, first.totals
            self.jobs[job.name] = [first, *others]
        self.refused_until: dict[tuple[Any, ...], tuple[int, str | None]] = {}

    def _budget(self, settings: Settings, credential: CredentialSettings, log: MemoryLog) -> Budget:
        return Budget(
            credential=credential.name,
            book=credential.book,
            limits=credential.limits,
            project=Project(log, credential.project, clock=lambda: self.now_ms, jitter_ms=machine_jitter_ms()),
            leave={job.name: job.leave for job in settings.jobs.values() if job.credential == credential.name},
        )

    def _replay(self, settings: Settings, state: State) -> MemoryLog:
        """A ledger in memory with the live log of each project, each entry at its own time, and the facts."""
        log = MemoryLog(clock=lambda: self.now_ms, past_ms=0)  # nothing reads the past
        for project in {credential.project for credential in settings.credentials.values()}:
            _, fence = log.fence(project, "", "replay")
            log.replace(project, fence, START, state.entries.get(project, ()), fence)
            log.change(project, {EPOCH: fence}, {EPOCH: "replayed", FACTS: state.facts_of(project).text()})
        return log

    def tick(self, tick: Tick) -> list[Refusal]:
        """Run a tick on each machine that has its job. Returns the refusals that it met."""
        self.now_ms = tick.at_ms
        return [refusal for job in self.jobs[tick.job] if (refusal := self._tick(job, tick)) is not None]

    def _tick(self, job: _Job, tick: Tick) -> Refusal | None:
        at_ms = tick.at_ms
        slot = at_ms // SLOT_MS
        max_regions = len(tick.regions) or len(job.regions)
        job.totals.ticks += 1
        job.price(at_ms)
        for call in job.kinds:
            calls = call.times * max_regions
            for wanted, part in zip(call.wanted, call.parts, strict=True):
                wanted.add(slot, part.units * calls, calls)
        if not job.covered:
            job.covered = list(map(in_round, by_rotation(job.regions.values())))
            job.regions.update((place.region, place) for place in job.covered)
        todo = [(place, place.cursor["step"] if place.cursor else 0) for place in job.covered[:max_regions]]
        for call in job.calls[todo[0][1] :][:1]:
            until_ms, refused_by = self.refused_until.get(call.knows, (0, None))
            if at_ms < until_ms:
                return Refusal(at_ms, job.name, refused_by, len(todo))
        job.covered = []
        of_run = None if job.max_units is None else RunLimit(job.max_units)
        coming = [call for _, step in todo for call in job.calls[step:]]
        admitted = 0  # how many of the next calls
        for done, (place, first) in enumerate(todo):
            for step in range(first, len(job.calls)):
                if not admitted:
                    admitted, refused_by = self._admit(job, coming, of_run)
                    if not admitted:
                        job.regions[place.region] = place._replace(cursor={"step": step} if step else None)
                        return Refusal(at_ms, job.name, refused_by, len(todo) - done)
                    del coming[:admitted]
                admitted -= 1
                call = job.calls[step]
                for spent, part in zip(call.spent, call.parts, strict=True):
                    spent.add(slot, part.units)
            job.regions[place.region] = place._replace(pending=False, cursor=None, completed_at_ms=at_ms)
            job.totals.passes[place.region] += 1
        return None

    def _admit(self, job: _Job, coming: Sequence[_Call], of_run: RunLimit | None) -> tuple[int, str | None]:
        """How many of the next calls are admitted now, at least; and, if none is, the limit that refuses.

        Without pace, the budget admits several calls together if it would admit them one after the other.
        """
        asked: list[_Call] = []
        refused_by: str | None = None
        for call in coming[: job.at_once]:
            # A refusal's time is exact, and no charge makes it earlier. Until then the answer stays the same.
            until_ms, refused_by = self.refused_until.get(call.knows, (0, None))
            if self.now_ms < until_ms:
                break
            asked.append(call)
        if not asked:
            return 0, refused_by
        calls = [(call.method, None, call.unknown) for call in asked]
        count, refusal = admit(job.budget, job.name, calls, [call.units for call in asked], of_run)
        if refusal is None:
            return count, None
        if refusal.reason != "run":
            next_ms = NEVER if refusal.retry_at_ms is None else refusal.retry_at_ms
            self.refused_until[asked[0].knows] = next_ms, refusal.refused_by
        return 0, refusal.refused_by


def most_at_once(budget: Budget, job: str) -> int:
    """How many calls of a job `admit` may charge together. If a limit is paced, it is one: the pace has room for the
    first charge of a period, whatever it costs."""
    is_paced = any(limit.paced for limit in budget.limits_of(job))
    return 1 if is_paced else MAX_CHARGES // budget.book.most_parts


def admit(
    budget: Budget, job: str, calls: Sequence[Call], units: Sequence[int], of_run: RunLimit | None
) -> tuple[int, Decision | None]:
    """Charge the first of these calls, as many together as fit: all of them, or half, or half of that. Returns their
    number, or 0 and the decision that refuses the first call. Raises CostExceedsLimit if that can never fit."""
    asked = len(calls)
    if of_run is not None:
        asked = next((n for n, cost in enumerate(units) if not of_run.take(cost)), asked)
        if not asked:
            return 0, of_run.refusal(budget.credential, budget.project, calls[0][0], units[0], 0)
    while True:
        try:
            decision = budget._decide(calls[:asked], job, commit=True)[0]
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
