"""What a simulation must find, computed the slow and obvious way: each call is a charge of the real budget over a real
ledger, one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quota.common.clock import NEVER
from quota.deciding.corrections import add
from quota.jobs.job import load_fetch
from quota.jobs.plan.simulation import SLOT_MS, JobTotals, Refusal, Simulated, Spent, State, pass_steps, step_at
from quota.jobs.store.checkpoints import Checkpoint, by_rotation
from quota.session import Session
from quota.settings.model import LedgerSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from quota.jobs.plan.simulation import Step
    from quota.jobs.ticks import Tick
    from quota.settings.model import JobSettings, Settings
    from quota.terms.costs import Part


class Region:
    def __init__(self, name: str, checkpoint: Checkpoint | None, steps: Sequence[Step]) -> None:
        self.name = name
        self.pending = checkpoint is not None and checkpoint.pending
        self.cursor = (step_at(steps, checkpoint) or None) if checkpoint is not None else None
        self.completed_at_ms = None if checkpoint is None else checkpoint.completed_at_ms
        self.failed_at_ms = None if checkpoint is None else checkpoint.failed_at_ms


class PlainSimulation:
    """`quota.jobs.plan.simulation.simulate`, call by call."""

    def __init__(self, settings: Settings, start_ms: int, until_ms: int, state: State) -> None:
        self.settings = settings
        self.now_ms = self.start_ms = start_ms
        self.until_ms = until_ms
        self.session = Session(settings._replace(ledger=LedgerSettings("sqlite://", None)), clock=lambda: self.now_ms)
        self.replay(state)
        self.steps: dict[str, tuple[Step, ...]] = {}
        self.machines: dict[str, list[dict[str, Region]]] = {}
        folder = None if settings.path is None else settings.path.absolute().parent
        for job in settings.jobs.values():
            steps = self.steps[job.name] = pass_steps(job, load_fetch(job.fetch, job.options, folder))
            known = {checkpoint.region: checkpoint for checkpoint in state.checkpoints.get(job.name, ())}
            self.machines[job.name] = [
                {name: Region(name, known.get(name), steps) for name in job.regions or ("",)}
                for _ in range(settings.machines_of(job))
            ]
        self.totals = {
            job.name: JobTotals(passes=dict.fromkeys(job.regions or ("",), 0)) for job in settings.jobs.values()
        }
        self.spent: dict[tuple[str, str, str], Spent] = {}
        self.wanted: dict[tuple[str, str, str], Spent] = {}
        self.refused_until: dict[Any, tuple[int, str | None]] = {}

    def replay(self, state: State) -> None:
        start_ms, replayed = self.now_ms, set[str]()
        for name, credential in self.settings.credentials.items():
            project = self.session.project(name)
            if project.name in replayed:
                continue
            replayed.add(project.name)
            for entry in state.entries.get(credential.project, ()):
                self.now_ms = entry.id[0]
                add(project, [entry].copy)
            self.now_ms = start_ms
            project.state.unite(state.facts_of(project.name))

    def run(self, ticks: Iterable[Tick]) -> Simulated:
        refusals = []
        for tick in ticks:
            self.now_ms = tick.at_ms
            for regions in self.machines[tick.job]:
                refusal = self.tick(self.settings.jobs[tick.job], regions, tick)
                if refusal is not None:
                    refusals.append(refusal)
        self.session.close()
        return Simulated(
            self.start_ms, self.until_ms, [*self.spent.values()], [*self.wanted.values()], refusals, self.totals
        )

    def tick(self, job: JobSettings, machine: dict[str, Region], tick: Tick) -> Refusal | None:
        regions, steps = list(machine.values()), self.steps[job.name]
        most = len(tick.regions) or len(regions)
        self.totals[job.name].ticks += 1
        prices = [self.price(job, step) for step in steps]
        for method, parts, _ in prices:
            for part in parts:
                row = self.row(self.wanted, job, method, part.bucket)
                row.add(tick.at_ms // SLOT_MS, part.units * most, most)
        if not any(region.pending for region in regions):
            for region in regions:
                region.pending = True
        todo = by_rotation(regions)[:most]
        budget = self.session.budget(job.credential)
        selected = any(limit.view.selector.jobs for limit in budget.limits)
        started, of_run = False, 0
        for done, region in enumerate(todo):
            for index in range(region.cursor or 0, len(steps)):
                method, parts, default_units = prices[index]
                first_units = parts[0].units if parts else 0
                key = (
                    method,
                    parts,
                    job.credential,
                    tuple(sorted(job.leave.items())),
                    job.name if selected else "",
                )
                until_ms, by = self.refused_until.get(key, (0, None))
                if tick.at_ms < until_ms:
                    return Refusal(tick.at_ms, job.name, by, len(todo) - done, started)
                if job.max_units is not None and of_run + first_units > job.max_units:
                    return Refusal(tick.at_ms, job.name, "max_units", len(todo) - done, started)
                decision = budget.charge(method, units=default_units, job=job.name, region=region.name)
                if not decision.admitted:
                    again_ms = NEVER if decision.retry_at_ms is None else decision.retry_at_ms
                    self.refused_until[key] = (again_ms, decision.refused_by)
                    return Refusal(tick.at_ms, job.name, decision.refused_by, len(todo) - done, started)
                started, of_run = True, of_run + first_units
                for part in parts:
                    self.row(self.spent, job, method, part.bucket).add(tick.at_ms // SLOT_MS, part.units)
                region.cursor = index + 1
            region.pending, region.cursor, region.completed_at_ms = False, None, tick.at_ms
            self.totals[job.name].passes[region.name] += 1
        return None

    def price(self, job: JobSettings, step: Step) -> tuple[str, tuple[Part, ...], int | None]:
        """Method, what it costs, and its units where the book does not know it."""
        book = self.settings.credentials[job.credential].book
        method = book.canonical(step.method)
        if method in book.methods:
            price, _ = book.price_at(method, self.now_ms)
            return method, price.parts, None
        return method, book.default_get.parts, book.default_get.units

    def row(self, rows: dict[tuple[str, str, str], Spent], job: JobSettings, method: str, bucket: str) -> Spent:
        project = self.settings.credentials[job.credential].project
        return rows.setdefault((job.name, method, bucket), Spent(project, bucket, method, job.name))
