"""Random histories of wrong clocks, with repairs, losses and old copies around them: nothing is minted, and all ends
well (L26).

Three machines charge one ledger. All clocks may stand ahead, from a minute to two years, for a burst of charges: then
one clock agrees with the other, and that budget is granted. But whatever was charged, then or before or after, counts
for a window of true time once the clocks are right: in the log, in the repaired log, and, where it was lost, if a
machine saw it by a right clock. Nobody is refused for the clock when all clocks are right and the ledger is repaired.
An hour after the last window everything is free.

What FAULTS.md does not promise is not asked for: see `all_clocks_ahead` and `hidden`.

`QUOTA_TEST_EXAMPLES` says how many histories are tried on each ledger.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from quota.ledger.state_fields import read_id
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS
from support.losses import Machine, RedisStorage, SqliteStorage
from support.setup import NOW_MS, limit

if TYPE_CHECKING:
    from pathlib import Path

    from quota.decision import Decision
    from quota.ledger.contract import Repair
    from quota.ledger.entry import Id
    from support.servers import RedisServer

HISTORIES = int(os.environ.get("QUOTA_TEST_EXAMPLES", "15"))
STEPS = 40
UNITS = 100
DAY = limit(UNITS)
AHEAD_MS = (MINUTE_MS, 50 * MINUTE_MS, 5 * HOUR_MS, 23 * HOUR_MS, 26 * HOUR_MS, 3 * DAY_MS, 365 * DAY_MS, 730 * DAY_MS)


class Log(NamedTuple):
    """What a ledger has: which of the logs that were begun, the marks of its repairs, and the charges by number."""

    number: int
    repairs: tuple[Repair, ...] = ()
    charges: frozenset[int] = frozenset()


class Spent(NamedTuple):
    """A charge: when, in true time, its units and its id, and after which repairs."""

    ms: int
    units: int
    id: Id
    repairs: tuple[Repair, ...]


@dataclass
class History:
    storage: Any
    folder: Path
    seed: int
    counts: Counter[str]
    true_ms: int = NOW_MS
    wrong_ms: int = 0
    """How far all clocks are ahead."""
    server_wrong_ms: int = 0
    log: Log = field(default_factory=lambda: Log(0))
    spent: list[Spent] = field(default_factory=list)
    accounted: set[int] = field(default_factory=set)
    """Those that the ledger has, or was told of."""
    saw: dict[str, set[int]] = field(default_factory=dict)
    """What each machine saw by a right clock, and has not seen less of since."""
    saw_log: dict[str, Log] = field(default_factory=dict)
    """What the ledger had then."""
    copies: list[tuple[Any, set[int], Log]] = field(default_factory=list)
    was_ahead: bool = False
    """Whether any charge was ever dated more than a day ahead."""
    unrepaired: bool = False
    """Whether one may be now."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.machines = {
            name: Machine(name, self.folder / str(self.seed), self.storage.url, self.server_clock) for name in "abc"
        }
        self.saw = {name: set() for name in self.machines}
        self.saw_log = dict.fromkeys(self.machines, self.log)

    def server_clock(self) -> int:
        return self.true_ms + self.wrong_ms + self.server_wrong_ms

    def close(self) -> None:
        for machine in self.machines.values():
            machine.stop()

    # -- asking ------------------------------------------------------------------------------------------------------

    def ask(self, name: str, units: int = 0) -> Decision:
        """Charge so many units, or peek; by the machine's own clock, which goes with the others but the server's."""
        machine = self.machines[name]
        machine.skew_ms = -self.server_wrong_ms
        budget = machine.budget(DAY)
        decision = budget.charge("videos.list", units=units) if units else budget.peek("videos.list")
        self.counts[decision.reason] += 1
        if decision.reason == "clock":
            return decision
        if not self.wrong_ms:
            self.accounted |= self.saw[name] - self.hidden(name)
            live = [n for n in self.accounted if self.spent[n].ms > self.true_ms - DAY_MS]
            least = sum(self.spent[n].units for n in live)
            used = decision.limits[0].used_units - (units if decision.admitted else 0)
            assert used >= least, f"counts {used} of {least}: minted"
            assert not decision.admitted or least + max(units, 1) <= UNITS
        if decision.admitted and units:
            self.accounted.add(len(self.spent))
            self.log = self.log._replace(charges=self.log.charges | {len(self.spent)})
            self.spent.append(Spent(self.true_ms, units, read_id(str(decision.id)), self.log.repairs))
            self.was_ahead = self.was_ahead or self.wrong_ms > DAY_MS
            self.unrepaired = self.unrepaired or self.wrong_ms > 0
        # By a clock that stands ahead, a machine forgets what that clock has let expire.
        self.saw[name] = set() if self.wrong_ms else self.accounted.copy()
        self.saw_log[name] = self.log
        return decision

    def hidden(self, name: str) -> set[int]:
        """What a machine saw charged in an old copy, and a newer one in its place may hide: see FAULTS.md."""
        log, now = self.saw_log[name], self.log
        if log.number != now.number or not set(log.repairs) <= set(now.repairs):
            return set()
        charged = {n: self.spent[n] for n in sorted(log.charges) if self.spent[n].repairs == log.repairs}
        newest = max((one.id for one in charged.values()), default=(0, 0))
        lacking = {n: one for n, one in charged.items() if n not in now.charges}
        # Of later repairs: what was charged after one, under an earlier date than that found, passes for dated by it.
        later = [mark for mark in now.repairs if mark not in log.repairs and newest[0] > mark.begun_ms]
        ends_ms = [mark.at_ms for mark in later if newest <= mark.newest]
        hidden = {n for n, one in lacking.items() if ends_ms and one.ms >= min(ends_ms)}
        # Without one that concerns it: what the newer copy has of the same time passes for the oldest of it.
        others = [self.spent[n] for n in now.charges - log.charges] if not later else []
        units = sum(one.units for one in others if one.repairs == log.repairs and one.id < newest)
        for n, one in lacking.items():
            if units > 0:
                hidden.add(n)
                units -= one.units
        self.counts["hidden"] += not hidden <= self.accounted
        return hidden

    def any_machine(self) -> str:
        return self.random.choice("abc")

    def repair(self) -> None:
        name = self.any_machine()
        assert self.machines[name].ledger.repair("p", f"r{len(self.spent)}x{self.random.random()}", self.server_clock())
        self.counts["repairs"] += 1
        self.unrepaired = False
        self.log = self.log._replace(repairs=tuple(self.machines[name].ledger.repairs("p")))

    # -- what may happen -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        for _ in range(STEPS):
            self.true_ms += self.random.choice((1, MINUTE_MS, HOUR_MS, 3 * HOUR_MS, 9 * HOUR_MS))
            happens = self.random.choices(
                (
                    self.charge,
                    self.all_clocks_ahead,
                    self.one_clock_wrong,
                    self.repair,
                    self.copy,
                    self.lose,
                    self.restart,
                ),
                (12, 3, 3, 2, 1, 1.5, 1),
            )[0]
            happens()
        self.end_well()

    def charge(self) -> None:
        if self.ask(self.any_machine(), self.random.randrange(1, 15)).reason == "clock":
            self.refused_for_the_clock()

    def all_clocks_ahead(self) -> None:
        """For a burst of charges; the clocks are then set right one after the other."""
        if self.unrepaired:  # by the second charge ahead of it, a ledger forgets what was charged before: see FAULTS.md
            forgotten = self.accounted | self.saw["a"] | self.saw["b"] | self.saw["c"]
            self.counts["forgotten"] += len(forgotten)
            self.accounted, self.saw = set(), {name: set() for name in "abc"}
        self.wrong_ms = self.random.choice(AHEAD_MS) + self.random.randrange(1_000)
        for _ in range(self.random.randrange(1, 5)):
            self.ask(self.any_machine(), self.random.randrange(1, 15))
        self.counts["bursts"] += 1
        if self.random.random() < 0.5:  # the machines' first: the server is ahead of them
            self.server_wrong_ms, self.wrong_ms = self.wrong_ms, 0
            if self.server_wrong_ms > HOUR_MS:
                assert self.ask(self.any_machine(), 1).reason == "clock"
        self.server_wrong_ms = self.wrong_ms = 0
        if self.random.random() < 0.7:
            self.everybody_asks()
        if self.random.random() < 0.5:
            self.repair()

    def one_clock_wrong(self) -> None:
        self.server_wrong_ms = self.random.choice(AHEAD_MS) * self.random.choice((1, -1))
        decision = self.ask(self.any_machine(), self.random.randrange(1, 15))
        assert (decision.reason == "clock") == (not -5_000 <= self.server_wrong_ms <= HOUR_MS) or self.was_ahead
        self.server_wrong_ms = 0

    def copy(self) -> None:
        self.copies.append((self.storage.copy(), self.accounted.copy(), self.log))

    def lose(self) -> None:
        """The ledger is emptied, or an old copy put back. Everybody finds out, in any order."""
        self.counts["losses"] += 1
        if self.copies and self.random.random() < 0.6:
            copy, accounted, self.log = self.random.choice(self.copies)
            self.storage.restore(copy)
            self.unrepaired = self.was_ahead
            self.accounted = accounted.copy()
        else:
            self.storage.empty()
            self.accounted, self.log = set(), Log(self.counts["losses"])
        self.true_ms += MINUTE_MS
        if self.random.random() < 0.3:
            self.repair()
        self.everybody_asks()

    def restart(self) -> None:
        machine = self.machines[self.any_machine()]
        machine.stop()
        machine.start()

    def everybody_asks(self) -> None:
        for name in self.random.sample("abc", 3):
            if self.ask(name).reason == "clock":
                self.refused_for_the_clock()
                assert self.ask(name).reason != "clock"

    def refused_for_the_clock(self) -> None:
        """By right clocks only for what was seen ahead of them, until somebody says that they are right."""
        assert self.was_ahead
        self.counts["told to repair"] += 1
        self.repair()

    def end_well(self) -> None:
        """The clocks are right and the ledger is repaired: an hour and a window later all is free."""
        self.everybody_asks()
        self.repair()
        self.everybody_asks()
        self.true_ms += DAY_MS + HOUR_MS
        for name in "abc":
            decision = self.ask(name)
            assert (decision.admitted, decision.limits[0].used_units, decision.ahead_ms) == (True, 0, 0)
        assert self.ask(self.any_machine(), UNITS).admitted


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_histories_of_wrong_clocks_mint_nothing_and_end_well(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    counts: Counter[str] = Counter()
    for seed in range(HISTORIES):
        folder = tmp_path / str(seed)
        folder.mkdir()
        if kind == "sqlite":
            storage: Any = SqliteStorage(folder)
        else:
            server: RedisServer = request.getfixturevalue("redis_server")
            storage = RedisStorage(server.url)
            storage.empty()
        history = History(storage, folder, seed, counts)
        try:
            history.run()
        except AssertionError as error:
            raise AssertionError(f"history {seed} on {kind}: {error}") from error
        finally:
            history.close()
        counts["charges"] += len(history.spent)
    print(f"{HISTORIES} histories on {kind}: {dict(counts)}")
    if HISTORIES >= 25:
        assert min(counts[what] for what in ("bursts", "repairs", "losses", "limit", "clock", "told to repair")) > 5
        assert counts["hidden"] <= 5 + counts["losses"] / 100, "the exception is no rule"
