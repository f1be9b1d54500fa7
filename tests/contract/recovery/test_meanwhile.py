"""A ledger that is emptied or put back from a copy just while a machine looks for what it lacks: at random, once a
decision."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

from support.setup import limit
from support.site import Site

if TYPE_CHECKING:
    from collections.abc import Callable

HISTORIES = int(os.environ.get("QUOTA_TEST_EXAMPLES", "60"))


def test_what_a_machine_spent_counts_whatever_happens_while_it_looks(site: Site) -> None:
    """With one machine all that was ever charged is known, so nothing is excused. No copy is put back that is newer
    than the one before it (FAULTS.md)."""
    for seed in range(HISTORIES):
        wrong = _history(site, seed)
        assert wrong is None, f"history {seed}: {wrong}"


def _history(site: Site, seed: int) -> str | None:
    dice, copies, steps, total, quiet = random.Random(seed), list[Any](), list[str](), 0, True
    site.empty()
    machine = site.machine(f"m{seed}")
    budget = machine.budget(limit(100_000))

    def fault() -> None:
        if copies and dice.random() < 0.6:
            del copies[dice.randint(1, len(copies)) :]
            steps.append(f"restore {len(copies)}")
            site.restore(copies[-1])
        else:
            steps.append("empty")
            site.empty()

    def meanwhile(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            nonlocal quiet
            if not quiet and dice.random() < 0.3:
                quiet = True
                steps.append(f"before {call.__name__}")
                fault()
            return call(*args, **options)

        return called

    machine.ledger.read = meanwhile(machine.ledger.read)  # type: ignore[method-assign]
    machine.ledger.add_unlogged = meanwhile(machine.ledger.add_unlogged)  # type: ignore[attr-defined]
    for _ in range(dice.randint(6, 30)):
        site.now_ms += dice.randint(1, 50)
        match dice.randrange(10):
            case 0 if not any(step.startswith("restore") for step in steps):
                steps.append("copy")
                copies.append(site.storage.copy())
            case 1 | 2 | 3:
                fault()
            case _:
                units, quiet = dice.randint(1, 5), False
                decision = budget.charge("videos.list", units=units)
                steps.append(f"charge {units}: {decision.reason}")
                total += units if decision.admitted else 0
                if decision.admitted and decision.limits[0].used_units < total:
                    return f"{decision.limits[0].used_units} of {total} units count; {', '.join(steps)}"
    return None
