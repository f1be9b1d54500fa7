"""What one run would cost, and how much of it fits now: `quota run --dry-run`. It sends nothing and writes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

from quota.budget import MAX_CHARGES, Budget
from quota.common.clock import moment, rfc3339
from quota.common.text import listed, many, spell
from quota.deciding.run_limit import RunLimit
from quota.decision import Decision
from quota.errors import CostExceedsLimit
from quota.jobs.places import checkpoints_of
from quota.jobs.plan.simulation import pass_steps, step_at
from quota.jobs.runner import functions_of, job_called, regions_of
from quota.jobs.store.checkpoints import Checkpoint, by_rotation
from quota.jobs.store.file import is_made
from quota.jobs.store.store import Store
from quota.session import Session
from quota.settings.model import JobSettings

UNNAMED = "unknown"
"""The name of a call here, if the fetch function does not name it."""


class Ahead(NamedTuple):
    """What a run would do: the regions that it covers, in their order, and the most calls and units, by method. The
    first `fitting_calls` fit now; `refusal` is the decision about the next call, None if all fit."""

    job: str
    regions: Sequence[Checkpoint]
    calls: Mapping[str, int]
    units: Mapping[str, int]
    fitting_calls: int
    fitting_units: int
    refusal: Decision | None
    now_ms: int

    def as_json(self) -> dict[str, object]:
        refusal = self.refusal
        retry_ms = None if refusal is None else refusal.retry_at_ms
        return {
            "job": self.job,
            "regions": [{"region": place.region, "page": place.pages + 1} for place in self.regions],
            "calls": [{"method": name, "calls": n, "units": self.units[name]} for name, n in self.calls.items()],
            "units": sum(self.units.values()),
            "fits": refusal is None,
            "fitting_calls": self.fitting_calls,
            "fitting_units": self.fitting_units,
            "refused_by": None if refusal is None else refusal.refused_by,
            "retry_at": None if retry_ms is None else rfc3339(retry_ms),
        }

    def lines(self) -> Iterator[str]:
        """The lines for people."""
        names = [place.region + (f" from page {place.pages + 1}" if place.pages else "") for place in self.regions]
        if names != [""]:
            yield f"{self.job}: would cover {', '.join(names)}"
        calls = listed([f"{many(n, 'call')} of {name}" for name, n in self.calls.items()])
        yield f"{self.job}: at most {calls}, {many(sum(self.units.values()), 'unit')}"
        if self.refusal is None:
            yield f"{self.job}: all of it fits now"
            return
        fits = "none of it fits now"
        if self.fitting_calls:
            fits = f"the first {many(self.fitting_calls, 'call')} ({many(self.fitting_units, 'unit')}) fit now"
        retry_ms = self.refusal.retry_at_ms
        again = (
            "" if retry_ms is None else f"; the next fits at {moment(retry_ms)} (in {spell(retry_ms - self.now_ms)})"
        )
        yield f"{self.job}: {fits}: {self.refusal.why()}{again}"


def look_ahead(copy: Session, name: str, regions: Sequence[str] = ()) -> Ahead:
    """What a run of the job `name` would do now. It charges the ledger of `copy`, which must be a copy of the real one
    (`quota.cli.rehearsal.copied`). Raises as `run_job` does, StoreError and LedgerError."""
    job = job_called(copy, name)
    chosen = regions_of(job, regions)
    fetch, _ = functions_of(copy.settings, job)
    steps = pass_steps(job, fetch)
    budget = copy.budget(job.credential)
    places = _places(copy, job, chosen)
    calls = []
    for place in places:
        for step in steps[step_at(steps, place) :]:
            method = budget.book.canonical(step.method or UNNAMED)
            calls.append((place.region, method))
    costs = {method: _cost(budget, method) for _, method in calls}
    methods = Counter(method for _, method in calls)
    count, refusal = _charge([method for _, method in calls], costs, budget, job)
    return Ahead(
        job.name,
        places,
        methods,
        {method: n * costs[method] for method, n in methods.items()},
        count,
        sum(costs[method] for _, method in calls[:count]),
        refusal,
        copy.ledger.now_ms(),
    )


def _places(session: Session, job: JobSettings, regions: Sequence[str]) -> list[Checkpoint]:
    """The places where the run begins, in the order of its regions: the same as in `Store.start_round`."""
    settings = session.settings.store
    with Store.existing(settings) if is_made(settings.url) else nullcontext() as store:
        here = {place.region: place for place in checkpoints_of(session, job, store)}
    places = [here.get(region) or Checkpoint(job.name, region) for region in regions]
    if not any(place.pending for place in places):
        places = [place._replace(pending=True) for place in places]
        places = [place if place.cursor else place._replace(pages=0, started_at_ms=None) for place in places]
    return by_rotation(places)


def _cost(budget: Budget, method: str) -> int:
    """The units of one call; the book's default for reading if the fetch function names no method. Raises
    UnknownMethod."""
    return budget.book.default_get.units if method == UNNAMED else budget.book.price(method).units


def _charge(
    methods: Sequence[str], costs: Mapping[str, int], budget: Budget, job: JobSettings
) -> tuple[int, Decision | None]:
    """How many of these calls fit, one after the other, and the decision that refuses the next call."""
    of_run = None if job.max_units is None else RunLimit(job.max_units)
    done, size = 0, MAX_CHARGES // budget.book.most_parts
    while done < len(methods):
        asked = methods[done : done + size]
        units = sum(costs[method] for method in asked)
        if of_run is not None and len(asked) > 1 and of_run.spent_units + units > of_run.max_units:
            size = len(asked) // 2
            continue
        if of_run is not None and not of_run.take(units):
            return done, of_run.refusal(budget.credential, budget.project, asked[0], units, 0)
        named = [method if method in budget.book.methods else (method, costs[method]) for method in asked]
        try:
            decision = budget.charge_many(named, job=job.name)[0]
        except CostExceedsLimit:  # all calls together
            if len(asked) == 1:
                raise
        else:
            if decision.admitted:
                done += len(asked)
                continue
            if len(asked) == 1:
                return done, decision
        if of_run is not None:
            of_run.give_back(units)
        size = len(asked) // 2
    return done, None
