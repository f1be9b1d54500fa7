"""How long `quota plan` takes for 100 and for 1,000 jobs over 7 days.

    python -m bench.plan        (in the folder `tests`)

Each job runs every half hour over four regions, two pages each. 100 jobs want 4 times the budget of 9,500 units a day,
1,000 jobs 40 times. "fits" is the same with a budget that carries all of it.
"""

from __future__ import annotations

import tempfile
import time
from datetime import date
from pathlib import Path

from quota.jobs.plan.plan import make_plan
from quota.settings.load import load_settings
from support.configurations import both_windows

DAY = date(2026, 11, 23)
SIZES = (100, 1_000)


def configuration(jobs: int, units: int) -> str:
    return both_windows(units) + "".join(
        f'[jobs.j{number}]\nfetch = "trending"\nregions = ["US", "GB", "DE", "FR"]\npages = 2\n'
        f'schedule = "{number % 30}-59/30 * * * *"\nleave = {number % 3 * 100}\n'
        for number in range(jobs)
    )


def measure(what: str, jobs: int, units: int, *, find_changes: bool) -> None:
    """Print how many jobs and ticks a plan has, how many ticks were refused, and the seconds it took."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "quota.toml"
        path.write_text(configuration(jobs, units))
        started_s = time.perf_counter()
        plan = make_plan(load_settings(path), 0, first_day=DAY, find_changes=find_changes)
        seconds = time.perf_counter() - started_s
    ticks, refused = sum(job.ticks for job in plan.jobs), len(plan.refusals)
    print(f"{what:<14}{jobs:>6,}{ticks:>10,}{refused:>10,}{seconds:>10.1f}")


def main() -> None:
    print("quota plan, 7 days")
    print(f"{'':<14}{'jobs':>6}{'ticks':>10}{'refused':>10}{'seconds':>10}")
    for jobs in SIZES:
        measure("simulated", jobs, 9_500, find_changes=False)
        measure("with changes", jobs, 9_500, find_changes=True)
    measure("fits", 100, 50_000, find_changes=True)


if __name__ == "__main__":
    main()
