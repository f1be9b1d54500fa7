"""What one run would cost, and how much of it fits now: `quota run --dry-run`. It sends nothing and writes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from quota.budget import MAX_CHARGES, Call
from quota.common.clock import moment, rfc3339
from quota.common.text import listed, many, spell
from quota.deciding.run_limit import RunLimit
from quota.decision import Decision
from quota.jobs.places import checkpoints_of
from quota.jobs.plan.simulation import admit, pass_steps, step_at
from quota.jobs.runner import functions_of, job_called, regions_of
from quota.jobs.store.checkpoints import Checkpoint, by_rotation, in_round
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
    fetch, _ = functions_of(copy.settings, job)
    steps = pass_steps(job, fetch)
    budget = copy.budget(job.credential)
    book = budget.book
    places = _places(copy, job, regions_of(job, regions))
    methods = [book.canonical(step.method or UNNAMED) for place in places for step in steps[step_at(steps, place) :]]
    costs = {method: book.default_get.units if method == UNNAMED else book.price(method).units for method in {*methods}}
    calls: list[Call] = [(name, None if name in book.methods else costs[name], None) for name in methods]
    units = [costs[method] for method in methods]
    of_run = None if job.max_units is None else RunLimit(job.max_units)
    done, refusal, at_once = 0, None, MAX_CHARGES // book.most_parts
    while done < len(calls) and refusal is None:
        several = slice(done, done + at_once)
        count, refusal = admit(budget, job.name, calls[several], units[several], of_run)
        done += count
    counts = Counter(methods)
    return Ahead(
        job.name,
        places,
        counts,
        {method: count * costs[method] for method, count in counts.items()},
        done,
        sum(units[:done]),
        refusal,
        copy.ledger.now_ms(),
    )


def _places(session: Session, job: JobSettings, regions: Sequence[str]) -> list[Checkpoint]:
    """The places where the run begins, in the order of its regions: the same as in `Store.start_round`."""
    with Store.if_made(session.settings.store) as store:
        places = checkpoints_of(session, job, store)
    return list(map(in_round, by_rotation(place for place in places if place.region in regions)))
