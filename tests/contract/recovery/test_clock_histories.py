"""Clocks that are wrong by minutes to a year, on either side, and a repair in the middle.

Random histories: machines that charge, peek and start anew under clocks of their own, a server with another, a ledger
that is emptied, and an owner who repairs it once the clocks are right, or while they are not. `History` knows at what
time each charge was really made, and under which date the ledger has it. What must hold:

    who is ahead of the server by more than 5 s, or behind by more than an hour, is told so, and nothing is written
    under right clocks nothing that this machine or the ledger knows of the last window is granted again
    nothing counts for longer than a window after its date, but for what the machines cannot know of it (`oldest`),
    and no date is ahead of a repair
    once the clocks are right and the ledger is repaired, nobody is refused for a clock
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from quota.common.clock import NEVER
from quota.ledger.contract import CLOCK_SLACK_MS, RETENTION_SLACK_MS, read_entries
from quota.ledger.factory import open_ledger
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS, Calendar, Limit, Selector, Sliding, View
from support.histories import Step, WrongError, hold, run_all
from support.losses import Machine, RedisStorage, SqliteStorage
from support.setup import NOW_MS, limit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quota.decision import Decision
    from support.servers import RedisServer

HISTORIES = int(os.environ.get("QUOTA_TEST_HISTORIES", "40"))
SEED = int(os.environ.get("QUOTA_TEST_SEED", "1"))
NAMES = ("a", "b", "c")
METHODS = {"videos.list": 1, "search.list": 100, "captions.list": 50}
SLICES = 24
BEHIND_MS = HOUR_MS
RETENTION_MS = 49 * HOUR_MS
FAR_MS = 25 * HOUR_MS
OFFSETS_MS = (
    2 * MINUTE_MS,
    40 * MINUTE_MS,
    HOUR_MS - 1,
    HOUR_MS + 1_000,
    3 * HOUR_MS,
    20 * HOUR_MS,
    26 * HOUR_MS,
    30 * DAY_MS,
    365 * DAY_MS,
)
STEPS_MS = (1, 20, MINUTE_MS, 17 * MINUTE_MS, HOUR_MS, 5 * HOUR_MS, DAY_MS - 17 * MINUTE_MS, DAY_MS, 3 * DAY_MS)

LIMITS = (
    limit(900),
    Limit("pacific", 800, View(Selector(buckets=("units",)), Calendar("day", "America/Los_Angeles")), 800, 0),
    limit(20, HOUR_MS, name="calls", count="calls"),
)


def plan(dice: random.Random) -> list[Step]:
    names = NAMES[: dice.choice((1, 2, 3))]
    others = ["time_passes"] * 3 + ["all_right"] * 2 + ["server", "machine", "everybody"] * dice.choice((0, 1))
    others += dice.choice(([], ["emptied"]))
    others += dice.choice(([], ["starts_anew"]))
    others += dice.choice((["repair"], ["repair_while_right"], ["repair_while_right", "repair_while_right"]))
    steps: list[Step] = []
    for _ in range(dice.randint(10, 60)):
        name = dice.choice(names)
        wrong_ms = dice.choice((-1, 1)) * dice.choice(OFFSETS_MS)
        if dice.random() < 0.6:
            steps.append(("asks", (name, dice.choice(sorted(METHODS)), dice.random() < 0.85)))
            continue
        match dice.choice(others):
            case "time_passes":
                steps.append(("time_passes", (dice.choice(STEPS_MS),)))
            case "server":
                steps.append(("server", (wrong_ms,)))
            case "machine":
                steps.append(("machine", (name, wrong_ms)))
            case "everybody":
                steps += [("server", (wrong_ms,)), *(("machine", (one, wrong_ms)) for one in names)]
            case "repair_while_right":
                steps += [("all_right", ()), ("repair", (name,))]
            case ("all_right" | "emptied") as other:
                steps.append((other, ()))
            case other:
                steps.append((other, (name,)))
    return steps


@dataclass
class Made:
    """A charge: when it was really made, the date that the ledger gave it, and in which log."""

    ms: int
    dated_ms: int
    units: int
    log: int


Known = set[tuple[str, int]]
"""Charges, by limit and number: each limit is remembered for its own window."""


class History:
    def __init__(self, storage: SqliteStorage | RedisStorage, folder: Path, asked: Counter[str]) -> None:
        self.storage, self.asked = storage, asked
        self.one_clock = isinstance(storage, SqliteStorage)
        storage.empty()
        self.now_ms = NOW_MS
        self.server_ms = 0
        self.offsets_ms = dict.fromkeys(NAMES, 0)
        self.machines = {name: Machine(name, folder, storage.url, self._server_clock) for name in NAMES}
        self.bystander = open_ledger(storage.url, clock=self._server_clock)
        self.made: list[Made] = []
        self.log = 0
        self.trimmed_ms: dict[int, int] = {}
        self.known: Known = set()
        self.seen: dict[str, Known] = {name: set() for name in NAMES}
        self.oldest: Known = set()
        self.repairs = 0
        self.unaware: set[str] = set()
        self.mixed = False
        self.ran_ahead = self.lost_ahead = False
        self.latest_ms: dict[str, int] = {}
        self.marks_lost_for: set[str] = set()

    def _server_clock(self) -> int:
        return self.now_ms + self.server_ms

    def run(self, steps: Sequence[Step]) -> None:
        for name, arguments in steps:
            getattr(self, name)(*arguments)

    def close(self) -> None:
        for machine in self.machines.values():
            machine.stop()
        self.bystander.close()
        if isinstance(self.storage, RedisStorage):
            self.storage.client.close()

    # -- clocks ------------------------------------------------------------------------------------------------------

    def time_passes(self, step_ms: int) -> None:
        self.now_ms += step_ms

    def server(self, wrong_ms: int) -> None:
        self.asked["wrong clocks"] += 1
        self.server_ms = wrong_ms
        if self.one_clock:
            self.offsets_ms = dict.fromkeys(NAMES, wrong_ms)

    def machine(self, name: str, wrong_ms: int) -> None:
        if not self.one_clock:
            self.asked["wrong clocks"] += 1
            self.offsets_ms[name] = wrong_ms

    def all_right(self) -> None:
        self.server_ms = 0
        self.offsets_ms = dict.fromkeys(NAMES, 0)

    # -- the ledger --------------------------------------------------------------------------------------------------

    def starts_anew(self, name: str) -> None:
        self.machines[name].stop()
        self.machines[name].start()

    def emptied(self) -> None:
        self.asked["emptied"] += 1
        self.mixed = self.mixed or bool(self.unaware)
        self.marks_lost_for |= self.unaware
        self.lost_ahead = self.lost_ahead or self.ran_ahead
        self.storage.empty()
        self.log += 1
        self.known = set()
        self.now_ms += 1

    def repair(self, name: str) -> None:
        self.now_ms += 1
        caller_ms, ledger_ms = self.now_ms + self.offsets_ms[name], self._server_clock()
        self.repairs += 1
        epoch = self.machines[name].ledger.repair("p", f"repair{self.repairs}", caller_ms)
        agree = abs(caller_ms - ledger_ms) <= CLOCK_SLACK_MS
        hold((epoch is not None) == agree, f"repaired while the clocks were {caller_ms - ledger_ms} ms apart")
        if not agree:
            self.asked["repairs refused"] += 1
            return
        self.asked["repairs"] += 1
        self.unaware = {one for one, seen in self.seen.items() if seen}
        self.marks_lost_for = set()
        # Where the newest entry of a log that is gone was dated ahead, all that was seen of it counts for a window.
        seen = {n for known in self.seen.values() for _, n in known}
        gone = {self.made[n].log for n in seen if self.made[n].dated_ms > ledger_ms} - {self.log}
        self.oldest |= {(one.name, n) for one in LIMITS for n, made in enumerate(self.made) if made.log in gone}
        # Of what a log has no more, because it was emptied or a clock a year ahead let it be trimmed, the machines
        # remember the date, and hear of the repair when they ask. All that was seen with it then counts for a day, also
        # where a calendar's ends before.
        ahead = {number for number, made in enumerate(self.made) if made.dated_ms > ledger_ms}
        for known in self.seen.values():
            together = {number for _, number in known}
            if together & ahead:
                self.oldest |= {("pacific", number) for number in together}
        for number in ahead:
            self.made[number].dated_ms = ledger_ms
            self.oldest.add(("pacific", number))

    def _entries(self) -> list[Any]:
        return list(read_entries(self.bystander, "p", 0, NEVER))

    # -- asking ------------------------------------------------------------------------------------------------------

    def asks(self, name: str, method: str, commit: bool) -> None:
        machine = self.machines[name]
        machine.skew_ms = self.offsets_ms[name] - self.server_ms
        before = self._entries()
        budget = machine.budget(*LIMITS)
        decision = budget.charge(method) if commit else budget.peek(method)
        after = self._entries()
        self.asked["asked"] += 1
        caller_ms, ledger_ms = self.now_ms + self.offsets_ms[name], self._server_clock()
        apart = not ledger_ms - BEHIND_MS <= caller_ms <= ledger_ms + CLOCK_SLACK_MS
        if decision.reason == "clock":
            self.asked["refused for a clock"] += 1
            hold(before == after, "a decision that was refused for a clock has written")
            hold(apart or self._excused(name, caller_ms, ledger_ms), f"refused for a clock: {decision.detail}")
            return
        hold(not apart, f"decided while the clocks were {caller_ms - ledger_ms} ms apart")
        hold(decision.reason in ("ok", "limit"), f"{decision.reason}: {decision.detail}")
        self._check(name, decision, commit=commit)

    def _excused(self, name: str, caller_ms: int, ledger_ms: int) -> bool:
        """The caller stands in another Pacific day, or saw what only a repair can date, and that is not known here."""
        if name in self.marks_lost_for:
            return True
        window = LIMITS[1].view.window
        assert isinstance(window, Calendar)
        if window.edges(caller_ms) != window.edges(ledger_ms):
            return True
        right = abs(self.server_ms) <= CLOCK_SLACK_MS and abs(self.offsets_ms[name]) <= CLOCK_SLACK_MS
        seen = self.seen[name] - self.known if right else self.seen[name]
        return any(self.made[n].dated_ms > ledger_ms + FAR_MS for _, n in seen)

    def _cutoff_ms(self, one: Limit, now_ms: int, *, caution: bool = False) -> int:
        window = one.view.window
        if isinstance(window, Calendar):
            return window.edges(now_ms)[0] - 1
        assert isinstance(window, Sliding)
        return now_ms - window.window_ms - (window.window_ms // SLICES if caution else 0)

    def _check(self, name: str, decision: Decision, *, commit: bool) -> None:
        caller_ms, ledger_ms = self.now_ms + self.offsets_ms[name], self._server_clock()
        now_ms = min(ledger_ms, caller_ms + CLOCK_SLACK_MS)
        seen = self.seen[name]
        # What has expired by these clocks is not told.
        self.known |= {
            (one.name, n)
            for one in LIMITS
            for view, n in self.seen[name]
            if view == one.name and self.made[n].dated_ms > self._cutoff_ms(one, now_ms)
        }
        if self.lost_ahead:
            # While a clock ran ahead each machine saw another part of what counts again: only its own is sure then.
            self.known &= seen | self._of_this_log()
        self.trimmed_ms[self.log] = max(self.trimmed_ms.get(self.log, 0), now_ms - RETENTION_MS)
        charged = METHODS[decision.method] if decision.admitted and commit else 0
        for state in decision.limits:
            one = next(x for x in LIMITS if x.name == state.name)
            cost = one.view.selector.cost
            used = state.used_units - (cost(charged) if charged else 0)
            if now_ms <= self.now_ms + CLOCK_SLACK_MS:
                # What is dated early, by a clock that was behind, expires early.
                cutoff_ms = self._cutoff_ms(one, max(self.now_ms, now_ms))
                least = [self.made[n] for view, n in self.known if view == one.name]
                least = [m for m in least if m.dated_ms > self._forgotten_ms(one, m.log)]
                units = sum(cost(m.units) for m in least if min(m.ms, m.dated_ms) > cutoff_ms)
                hold(used >= units, f"{one.name} counts {used} of {units} that were seen: granted again")
                self.asked["counts checked"] += 1
            cutoff_ms = self._cutoff_ms(one, now_ms, caution=True)
            units = sum(
                cost(m.units) for n, m in enumerate(self.made) if m.dated_ms > cutoff_ms or (one.name, n) in self.oldest
            )
            # Of machines that knew a lost ledger before and after its repair, both reports count.
            self.asked["too much"] += self.mixed and used > units
            hold(used <= units or self.mixed, f"{one.name} counts {used}, and {units} were made that may count")
        if charged:
            assert decision.id is not None
            dated_ms = int(decision.id.partition("-")[0])
            self.known |= {(one.name, len(self.made)) for one in LIMITS}
            self.made.append(Made(self.now_ms, dated_ms, charged, self.log))
        self.ran_ahead = self.ran_ahead or now_ms > self.now_ms + CLOCK_SLACK_MS
        self._forget(name, now_ms)
        self.unaware.discard(name)

    def _forgotten_ms(self, one: Limit, log: int) -> int:
        """Up to when the charges of a log may be forgotten. Of another log than this the ledger has what it was told,
        and keeps that for each limit's own window."""
        trimmed_ms = self.trimmed_ms.get(log, 0)
        if log == self.log:
            return trimmed_ms
        latest_ms = self.trimmed_ms.get(self.log, 0) + RETENTION_MS
        return max(trimmed_ms, latest_ms - one.view.window.longest_ms - RETENTION_SLACK_MS)

    def _of_this_log(self) -> Known:
        return {(view, n) for view, n in self.known if self.made[n].log == self.log}

    def _forget(self, name: str, now_ms: int) -> None:
        """What had left its window by the clocks is not remembered by the machine, and what was trimmed is gone."""
        self.known = {(view, n) for view, n in self.known if self.made[n].dated_ms > now_ms - RETENTION_MS}
        self.seen[name] = set()
        for one in LIMITS:
            cutoff_ms = self._cutoff_ms(one, now_ms)
            live = {(view, n) for view, n in self.known if view == one.name and self.made[n].dated_ms > cutoff_ms}
            self.seen[name] |= live
            # After a clock that was ahead, the log may still have what has not been trimmed yet.
            ours = ((n, made) for n, made in enumerate(self.made) if made.log == self.log)
            shown = live | {(one.name, n) for n, made in ours if made.dated_ms > cutoff_ms}
            if isinstance(one.view.window, Sliding):
                # Who sees a slice that has partly left the window knows only that it counts no longer than the newest.
                newer_ms = cutoff_ms + one.view.window.window_ms // SLICES
                back = now_ms < self.latest_ms.get(name, 0)  # what it sees again, it knows no slices of
                self.oldest |= {(view, n) for view, n in shown if back or self.made[n].dated_ms <= newer_ms}
            elif isinstance(one.view.window, Calendar):
                # And of a calendar where the newest entry lies in a later day: it counts no longer than that.
                far_ms = one.view.window.edges(now_ms)[1]
                if any(self.made[n].dated_ms >= far_ms for _, n in shown):
                    self.oldest |= shown
        self.latest_ms[name] = max(now_ms, self.latest_ms.get(name, 0))


class Runner:
    def __init__(self, folder: Path, server: RedisServer | None) -> None:
        self._folder, self._server = folder, server
        self.asked: Counter[str] = Counter()

    def run(self, steps: Sequence[Step]) -> str | None:
        """What was wrong."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        storage = SqliteStorage(folder) if self._server is None else RedisStorage(self._server.url)
        history = History(storage, folder, self.asked)
        try:
            history.run(steps)
        except WrongError as wrong:
            return str(wrong)
        finally:
            history.close()
            shutil.rmtree(folder)
        return None

    def all(self, histories: int) -> None:
        run_all(histories, SEED, plan, self.run)
        print(f"{histories} histories: {dict(sorted(self.asked.items()))}")


SEEN_AGAIN: list[Step] = [
    ("asks", ("a", "videos.list", True)),
    ("time_passes", (DAY_MS,)),
    ("server", (365 * DAY_MS,)),
    ("asks", ("a", "search.list", True)),
    ("all_right", ()),
    ("repair", ("a",)),
    ("server", (-3 * HOUR_MS,)),
    ("asks", ("a", "captions.list", True)),
    ("emptied", ()),
    ("time_passes", (5 * HOUR_MS,)),
    ("asks", ("a", "videos.list", True)),
]
"""Set back over midnight, the clock shows yesterday's charge with today's. What is seen of a calendar's day is one sum,
which counts as long as its newest charge: that of yesterday too, once the ledger is emptied."""


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_yesterday_seen_again_counts_with_today(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    runner = Runner(tmp_path, request.getfixturevalue("redis_server") if kind == "redis" else None)
    assert runner.run(SEEN_AGAIN) is None


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_wrong_clock_grants_nothing_again_and_closes_nothing_once_it_is_right(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    Runner(tmp_path, request.getfixturevalue("redis_server") if kind == "redis" else None).all(HISTORIES)
