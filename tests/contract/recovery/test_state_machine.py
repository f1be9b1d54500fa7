"""Whatever happens, in whatever order: no charge that a running machine has seen is granted again.

A Hypothesis state machine over the public API: machines that charge, peek, refund, and start anew; a ledger that is
emptied, copied and restored; clocks that step; connections that lose questions and answers. It knows every charge ever
made, and what each machine has seen of them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from quota.budget import Budget
from quota.common.clock import NEVER
from quota.ledger.contract import CLOCK_SLACK_MS, read_entries
from quota.ledger.factory import open_ledger
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS, Calendar, Limit, Selector, Sliding, View
from support.books import BOOK
from support.losses import Machine, RedisStorage, SqliteStorage
from support.proxy import Proxy
from support.servers import immortal
from support.setup import limit

if TYPE_CHECKING:
    from quota.decision import Decision
    from support.servers import RedisServer

EXAMPLES = int(os.environ.get("QUOTA_TEST_EXAMPLES", "25"))
STEPS = 40
NAMES = ("a", "b", "c")
METHODS = {"videos.list": 1, "search.list": 100, "captions.list": 50}
COPIES = 3

LIMITS = (
    limit(700),
    Limit("pacific", 600, View(Selector(buckets=("units",)), Calendar("day", "America/Los_Angeles")), 600, 0),
    limit(300, HOUR_MS, name="search", methods=("search.list",)),
    limit(12, HOUR_MS, name="calls", count="calls"),
)


@dataclass(frozen=True)
class Made:
    """A charge that was made: for good, whatever the ledger knows of it."""

    number: int
    ms: int
    seq: int
    method: str
    units: int


Known = dict[tuple[str, int], int]
"""What is known of charges: by limit and number, the units that they counted when they were seen. A machine that
checked another limit has not seen what this one counts."""


class LosingLedger(RuleBasedStateMachine):
    """`known` is what the ledger accounts for: the entries of its log, and what machines told it that it had lost."""

    folder: Path
    server: RedisServer | None = None

    @initialize()
    def begin(self) -> None:
        self.home = Path(tempfile.mkdtemp(dir=self.folder))
        self.proxy: Proxy | None = None
        self.storage: Any
        url: str
        if self.server is None:
            self.storage = SqliteStorage(self.home)
            url = self.storage.url
        else:
            self.storage = RedisStorage(self.server.url)
            self.storage.empty()
            self.proxy = Proxy(self.server.port).__enter__()
            url = self.proxy.url
        self.url = url
        self.now_ms = self.latest_ms = 1_793_000_000_000
        self.made: list[Made] = []
        self.known: Known = {}
        self.copies: list[tuple[Any, Known]] = []
        self.losses = 0
        self.hidden: Counter[str] = Counter()
        self.unnoticed = False
        self.unpromised: set[int] = set()
        self.machines: dict[str, Machine] = {}
        self.expected: dict[str, Known] = {}
        self.bystander = open_ledger(self.storage.url, clock=lambda: self.now_ms)

    def teardown(self) -> None:
        for machine in self.machines.values():
            machine.stop()
        self.bystander.close()
        if isinstance(self.storage, RedisStorage):
            assert immortal(self.storage.client) == []
            self.storage.client.close()
        if self.proxy is not None:
            self.proxy.__exit__(None, None, None)
        shutil.rmtree(self.home)

    # -- what machines do --------------------------------------------------------------------------------------------

    def _machine(self, name: str) -> Machine:
        if name not in self.machines:
            self.machines[name] = Machine(name, self.home, self.url, lambda: self.now_ms)
            self.expected[name] = {}
        return self.machines[name]

    def _newest(self) -> tuple[int, int]:
        return max(((entry.ms, entry.seq) for entry in read_entries(self.bystander, "p", 0, NEVER)), default=(0, 0))

    @rule(name=st.sampled_from(NAMES), method=st.sampled_from(sorted(METHODS)), commit=st.booleans())
    def decide(self, name: str, method: str, commit: bool) -> None:
        machine = self._machine(name)
        budget = machine.budget(*LIMITS)
        decision = budget.charge(method) if commit else budget.peek(method)
        if decision.reason == "clock":
            assert machine.skew_ms > CLOCK_SLACK_MS or self._edges_differ(machine)
            return
        self._check(name, decision, commit=commit)

    def _edges_differ(self, machine: Machine) -> bool:
        window = LIMITS[1].view.window
        assert isinstance(window, Calendar)
        return window.edges(self.now_ms) != window.edges(self.now_ms + machine.skew_ms)

    @rule(method=st.sampled_from(sorted(METHODS)))
    def charge_without_a_memory(self, method: str) -> None:
        """A caller in another language, or one that was killed before it could note the answer."""
        budget = Budget(
            credential="main",
            project="p",
            book=BOOK,
            limits=LIMITS,
            ledger=self.bystander,
            clock=lambda: self.now_ms,
        )
        decision = budget.charge(method)
        if decision.reason != "clock":
            self._check(None, decision, commit=True)

    @precondition(lambda self: self.proxy is not None)
    @rule(
        name=st.sampled_from(NAMES),
        kind=st.sampled_from(["drop-request", "drop-reply", "cut-reply"]),
        times=st.integers(1, 2),
        skip=st.integers(0, 2),
    )
    def charge_over_a_bad_line(self, name: str, kind: Any, times: int, skip: int) -> None:
        """A lost question or answer is asked for once more; it is never charged twice."""
        assert self.proxy is not None
        machine = self._machine(name)
        if machine.skew_ms > CLOCK_SLACK_MS:
            return
        before = self._newest()
        for _ in range(skip):
            self.proxy.pass_next()
        self.proxy.fail(kind, times=times)
        decision = machine.budget(*LIMITS).charge("videos.list")
        self.proxy.heal()
        newest = self._newest()
        if decision.reason == "ledger-unavailable":
            if newest != before:  # charged, and nobody was told
                self._remember(*newest, "videos.list")
        elif decision.reason != "clock":
            assert decision.id == (f"{newest[0]}-{newest[1]}" if newest != before else None)
            self._check(name, decision, commit=True)

    @rule(name=st.sampled_from(NAMES))
    def start_anew(self, name: str) -> None:
        machine = self._machine(name)
        machine.stop()
        machine.start()

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def refund(self, data: st.DataObject) -> None:
        entries = list(read_entries(self.bystander, "p", 0, NEVER))
        if not entries:
            return
        entry = data.draw(st.sampled_from(entries))
        self.bystander.settle("p", entry.id, 0, tuple(one.view for one in LIMITS[:2]))
        for index, made in enumerate(self.made):
            if (made.ms, made.seq) == (entry.ms, entry.seq) and ("day", made.number) in self.known:
                self.made[index] = Made(made.number, made.ms, made.seq, made.method, 0)

    # -- what happens to the ledger ----------------------------------------------------------------------------------

    @rule()
    def emptied(self) -> None:
        self.storage.empty()
        self._lost({})

    @precondition(lambda self: len(self.copies) < COPIES)
    @rule()
    def copied(self) -> None:
        self.copies.append((self.storage.copy(), dict(self.known)))

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def restored(self, data: st.DataObject) -> None:
        """A refund that the copy knows nothing of hides as much of what the copy lacks: the sums look right."""
        copy, known = data.draw(st.sampled_from(self.copies))
        self.storage.restore(copy)
        cost = {one.name: one.view.selector.cost for one in LIMITS}
        for (name, number), units in known.items():
            self.hidden[name] += cost[name](units) - cost[name](min(units, self.made[number].units))
        self._lost(dict(known))

    def _lost(self, known: Known) -> None:
        """What was spent while nobody knew of an earlier loss is not promised to be missed in the next."""
        self.unnoticed = self.unnoticed or bool(self.known.keys() - known.keys())
        self.known = known
        for name, expected in self.expected.items():
            self.expected[name] = {
                key: n for key, n in expected.items() if key in known or key[1] not in self.unpromised
            }
        self.losses += 1
        newest_ms = max((made.ms for made in self.made), default=0)
        self._set_clock(max(self.now_ms, newest_ms) + 1)

    # -- what happens to time ----------------------------------------------------------------------------------------

    @rule(step_ms=st.sampled_from([1, 20, MINUTE_MS, HOUR_MS - 1, HOUR_MS, 5 * HOUR_MS, DAY_MS]))
    def time_passes(self, step_ms: int) -> None:
        self._set_clock(self.now_ms + step_ms)

    def _set_clock(self, now_ms: int) -> None:
        """To no millisecond that had a charge: a server that lost its log would give the same ids again."""
        used = {made.ms for made in self.made}
        while now_ms in used:
            now_ms += 1
        self.now_ms = now_ms
        self.latest_ms = max(self.latest_ms, now_ms)

    @rule(name=st.sampled_from(NAMES), skew_ms=st.sampled_from([0, 0, 4_000, -4_000, -HOUR_MS, HOUR_MS, -DAY_MS]))
    def a_clock_is_wrong(self, name: str, skew_ms: int) -> None:
        self._machine(name).skew_ms = skew_ms

    @rule(back_ms=st.sampled_from([1, 1_000, HOUR_MS]))
    def the_ledgers_clock_steps_back(self, back_ms: int) -> None:
        """After a loss no further than to what was spent: new charges would get the ids of those that were lost."""
        newest_ms = max((made.ms for made in self.made), default=0) if self.losses else 0
        self._set_clock(max(self.now_ms - back_ms, newest_ms + 1))

    # -- what must hold ----------------------------------------------------------------------------------------------

    def _remember(self, ms: int, seq: int, method: str) -> None:
        made = Made(len(self.made), ms, seq, method, METHODS[method])
        self.made.append(made)
        if self.unnoticed:
            self.unpromised.add(made.number)
        for one in LIMITS:
            if one.view.selector.counts("units", method, ""):
                self.known[one.name, made.number] = made.units

    def _within(self, known: Known, one: Limit, now_ms: int, caller_ms: int, reach: int = 1) -> Known:
        """What is known of the charges in `reach` windows of a limit."""
        window = one.view.window
        if isinstance(window, Sliding):
            cutoff_ms = now_ms - reach * window.window_ms
        else:
            edges = window.edges(caller_ms)
            cutoff_ms = edges[1 if now_ms >= edges[1] else 0] - 1 - (reach - 1) * 25 * HOUR_MS
        return {key: n for key, n in known.items() if key[0] == one.name and self.made[key[1]].ms > cutoff_ms}

    def _check(self, name: str | None, decision: Decision, *, commit: bool) -> None:
        skew_ms = self.machines[name].skew_ms if name else 0
        caller_ms = self.now_ms + skew_ms
        now_ms = min(self.now_ms, caller_ms + CLOCK_SLACK_MS)
        if name is not None:
            self.unnoticed = self.unnoticed and not self.expected[name].keys() - self.known.keys()
            self.known = self.expected[name] | self.known
        charged = METHODS[decision.method] if decision.admitted and commit else 0
        by_name = {one.name: one for one in LIMITS}
        for state in decision.limits:
            one = by_name[state.name]
            cost = one.view.selector.cost
            used = state.used_units - cost(charged)
            # What has left its window once need not be known any more, should a clock go back; the log, while it is
            # whole, does know it.
            at_ms = (self.latest_ms, self.latest_ms) if self.losses else (now_ms, caller_ms)
            known = self._within(self.known, one, *at_ms)
            least = sum(cost(min(units, self.made[number].units)) for (_, number), units in known.items())
            expected = f"{state.name} counts {used} of {least} that were seen"
            assert used >= least - self.hidden[state.name], f"{expected}: granted again"
            if not self.losses:
                assert used == least, f"{state.name} counts {used} of {least}"
            everything = {
                (one.name, made.number): METHODS[made.method]
                for made in self.made
                if one.view.selector.counts("units", made.method, "")
            }
            most = sum(map(cost, self._within(everything, one, now_ms, caller_ms, reach=2).values())) * (
                1 + self.losses
            )
            assert used <= most, f"{state.name} counts {used}, with only {most} ever spent"
            if decision.admitted:
                assert least + cost(METHODS[decision.method]) <= one.limit_units
        if charged:
            assert decision.id is not None
            ms, seq = map(int, decision.id.split("-"))
            self._remember(ms, seq, decision.method)
        if name is not None:
            asked = {state.name for state in decision.limits}
            self.expected[name] = {key: units for key, units in self.expected[name].items() if key[0] not in asked}
            for one in asked:
                self.expected[name].update(self._within(self.known, by_name[one], now_ms, caller_ms))

    @invariant()
    def every_key_has_a_lifetime(self) -> None:
        if isinstance(getattr(self, "storage", None), RedisStorage):
            assert immortal(self.storage.client) == []


@pytest.fixture(params=["sqlite", "redis"])
def machine_class(request: pytest.FixtureRequest, tmp_path: Path) -> type[LosingLedger]:
    class Chosen(LosingLedger):
        folder = tmp_path
        server = request.getfixturevalue("redis_server") if request.param == "redis" else None

    return Chosen


@pytest.mark.timeout(3_600)
def test_nothing_that_was_seen_is_granted_again(machine_class: type[LosingLedger]) -> None:
    run_state_machine_as_test(
        machine_class,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize="QUOTA_TEST_EXAMPLES" not in os.environ,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
