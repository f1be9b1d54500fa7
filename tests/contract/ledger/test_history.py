"""What was spent in each hour of 35 days, whatever happened meanwhile (L29), and what was refused (L30)."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Thread
from typing import TYPE_CHECKING

import pytest
import redis

from quota.common.clock import NEVER
from quota.errors import LedgerError
from quota.ledger.contract import ChargeRequest, read_entries
from quota.ledger.entry import Charge
from quota.ledger.factory import open_movable
from quota.ledger.history import (
    HISTORY_MS,
    MAX_CELLS,
    MAX_COUNTS,
    MAX_REFUSAL_BYTES,
    MAX_REFUSALS,
    OTHER,
    RefusalCount,
    RefusedSum,
)
from quota.ledger.move import carry_out, plan_move
from quota.reports.spending import read_spending
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS
from support.losses import RedisStorage
from support.processes import Children
from support.proxy import Proxy
from support.setup import Setup

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from quota.ledger.entry import Entry, Id
    from quota.ledger.history import History
    from support.losses import LedgerStorage
    from support.servers import RedisServer

METHODS = ("videos.list", "search.list", "odd|name%, with\u2028spaces")
JOBS = ("trending", "", "back fill", "日本")
REGIONS = ("US", "DE", "")
BUCKETS = ("units", "units", "search")
KEYS = ("log", "state", "corrections", "history")


@dataclass
class Made:
    """One charge, as the test remembers it."""

    ms: int
    seq: int
    names: tuple[str, str, str, str]
    charged_units: int
    units: int
    logged_units: int
    """What the log and the corrections say of it."""
    lost: bool = False
    summed: bool = True
    unsure: bool = False

    @property
    def id(self) -> Id:
        return self.ms, self.seq


@dataclass
class Months:
    """Some weeks of a project, and what its history must say of them."""

    setup: Setup
    seed: int
    client: redis.Redis | None = None
    made: list[Made] = field(default_factory=list)
    corrected: Counter[tuple[str, str]] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    has_hint: bool = False
    gaps: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.end_ms = self.setup.now_ms + 37 * DAY_MS
        self.latest_ms = self.setup.now_ms

    def run(self) -> None:
        while self.setup.now_ms < self.end_ms:
            self.turn_clock()
            act = self.dice.choices(
                [self.charge, self.repay, self.settle, self.roll_up, self.check, self.lose],
                [60, 6, 25, 12, 1, 0.4 if self.client else 0],
            )[0]
            act()
            self.counts[act.__name__] += 1
        self.check()

    def turn_clock(self) -> None:
        steps = [
            0,
            1,
            MINUTE_MS,
            10 * MINUTE_MS,
            HOUR_MS,
            5 * HOUR_MS,
            60 * HOUR_MS,
            -HOUR_MS,
            -3 * HOUR_MS,
            30 * HOUR_MS,
        ]
        self.setup.now_ms += self.dice.choices(steps, [20, 20, 30, 20, 12, 3, 0.4, 1, 0.3, 0.3])[0]
        self.latest_ms = max(self.latest_ms, self.setup.now_ms)

    # -- what happens -----------------------------------------------------------------------------------------------

    def a_charge(self) -> Charge:
        names = [self.dice.choice(some) for some in (METHODS, JOBS, REGIONS, BUCKETS)]
        return Charge(
            self.dice.choice((1, 5, 100)), names[3], names[0], names[1], names[2], f"k{len(self.made)}-{self.seed}"
        )

    def charge(self) -> None:
        charge = self.a_charge()
        request = ChargeRequest(self.setup.project, charge, (), (), self.setup.now_ms)
        result = self.setup.ledger.decide(request, commit=True)
        assert result.outcome == "admitted"
        self.remember(result.last, charge)
        self.look()

    def repay(self) -> None:
        charges = [
            self.a_charge()._replace(idempotency_key=f"r{len(self.made)}-{n}") for n in range(self.dice.randint(1, 40))
        ]
        number = len(self.made) + 1_000
        numbered = [(number + n, charge) for n, charge in enumerate(charges)]
        self.setup.ledger.repay(self.setup.project, "m", numbered)
        newest = self.made[-1].id if self.made else (0, 0)
        for entry, charge in zip(self.log(newest), charges, strict=True):
            self.remember((entry.ms, entry.seq), charge)
        self.look()

    def remember(self, at: Id, charge: Charge) -> None:
        names = charge.method, charge.job, charge.region, charge.bucket
        self.made.append(Made(*at, names, charge.units, charge.units, charge.units))

    def settle(self) -> None:
        whole_after_ms = self.setup.ledger.whole_after_ms(self.setup.project)
        known = [one for one in self.made[-400:] if not one.unsure and one.ms > whole_after_ms]
        if not known:
            return
        one, units = self.dice.choice(known), self.dice.choice((0, 1, 7, 100, 250))
        before = self.setup.ledger.settle(self.setup.project, f"{one.ms}-{one.seq}", units, ())
        if before is not None:
            assert before.units == one.units
            self.corrected[one.names[0], one.names[1]] += abs(one.units - units)
            one.units = one.logged_units = units

    def roll_up(self) -> None:
        present_hour = self.dice.random() < 0.3
        for _ in range(self.dice.choice((1, 1, 5, 200))):
            more = self.setup.ledger.roll_up(self.setup.project, self.setup.now_ms, present_hour=present_hour)
            self.look()
            if not more:
                break
        self.has_hint = self.has_hint or bool(self.made)  # before the first charge there is nothing to begin

    def lose(self) -> None:
        """One of the four keys is deleted or evicted."""
        assert self.client is not None
        name = self.dice.choice(KEYS)
        kept = {(entry.ms, entry.seq) for entry in self.log()}
        rolled = self.history().rolled_up
        hint = self.hint()
        if not self.client.delete(f"quota:{{{self.setup.project}}}:{name}"):
            return
        self.counts.update([name, "lost"])
        for one in self.made:
            if name == "log":
                if one.id in kept:
                    one.unsure = True
                    if one.id > rolled:
                        one.lost, one.summed = True, False
            elif name == "history":
                one.lost = one.lost or one.id not in kept
                one.units = one.logged_units
                one.summed = one.id in kept and not (hint and one.id <= id_of(hint))
            elif name == "corrections":
                one.logged_units, one.unsure = one.charged_units, True
                if one.id > rolled:
                    one.units = one.charged_units
        if name == "history":
            self.corrected.clear()
        if name == "state":
            self.has_hint = False
            if not self.client.exists(f"quota:{{{self.setup.project}}}:history"):  # nobody knows what had been summed
                for one in self.made:
                    one.summed = one.id in kept

    # -- what must be -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """What the log lets go of, the history has already, or would not show any more."""
        oldest = self.setup.ledger.read(self.setup.project, (0, 0), NEVER, 1)
        first = (oldest[0].ms, oldest[0].seq) if oldest else (NEVER, 0)
        rolled = self.setup.ledger.history(self.setup.project, self.setup.now_ms, self.setup.now_ms).rolled_up
        for one in self.made:
            if one.lost or not rolled < one.id < first:
                continue
            hint = id_of(self.hint() or "0-0")  # what it names, a history had that was lost since
            assert not self.has_hint or one.id <= hint or one.ms <= self.setup.now_ms - HISTORY_MS, "not rolled up"
            one.lost, one.summed = True, False

    def hint(self) -> str | None:
        """The state's copy of `rolled_up`, which trimming obeys."""
        return self.client and self.client.hget(f"quota:{{{self.setup.project}}}:state", "rolled_up")

    def history(self) -> History:
        return self.setup.ledger.history(self.setup.project, 0, self.setup.now_ms)

    def log(self, after: Id = (0, 0)) -> list[Entry]:
        entries = read_entries(self.setup.ledger, self.setup.project, after[0], NEVER)
        return [entry for entry in entries if (entry.ms, entry.seq) > after]

    def check(self) -> None:
        history = self.history()
        end = self.log(history.rolled_up)
        since_ms = (self.latest_ms - HISTORY_MS) // HOUR_MS * HOUR_MS + HOUR_MS
        found: Counter[tuple[int, tuple[str, ...]]] = Counter()
        charges: Counter[tuple[int, tuple[str, ...]]] = Counter()
        for hour in history.hours:
            found[hour.hour_ms, hour[1:5]] += hour.units
            charges[hour.hour_ms, hour[1:5]] += hour.charges
        for entry in end:
            key = entry.ms // HOUR_MS * HOUR_MS, (entry.method, entry.job, entry.region, entry.bucket)
            found[key] += entry.units
            charges[key] += 1
        expected: Counter[tuple[int, tuple[str, ...]]] = Counter()
        numbers: Counter[tuple[int, tuple[str, ...]]] = Counter()
        for one in self.made:
            if not one.lost:
                expected[one.ms // HOUR_MS * HOUR_MS, one.names] += one.units
                numbers[one.ms // HOUR_MS * HOUR_MS, one.names] += 1
        assert {k: v for k, v in charges.items() if k[0] >= since_ms} == {
            k: v for k, v in numbers.items() if k[0] >= since_ms
        }
        assert {k: v for k, v in found.items() if k[0] >= since_ms and v} == {
            k: v for k, v in expected.items() if k[0] >= since_ms and v
        }
        self.check_sums(history, end)
        self.check_spending()

    def check_sums(self, history: History, end: list[Entry]) -> None:
        sums = {(one.method, one.job): one for one in history.sums_with(end)}
        units: Counter[tuple[str, str]] = Counter()
        for one in self.made:
            if one.summed:
                units[one.names[0], one.names[1]] += one.charged_units
        assert {name: one.units for name, one in sums.items() if one.units} == dict(units)
        corrected = {name: one.corrected_units for name, one in sums.items() if one.corrected_units}
        assert corrected == +self.corrected

    def check_spending(self) -> None:
        now_ms = self.setup.now_ms
        for back_ms in (HOUR_MS, DAY_MS + 7, 20 * DAY_MS, 34 * DAY_MS):
            spending = read_spending(self.setup.ledger, self.setup.project, ("job", "day"), now_ms - back_ms)
            found: Counter[str] = Counter()
            for (job, _), _, units in spending.rows:
                found[job] += units
            least = self.spent_since(spending.since_ms)
            # After the log or its corrections were lost, the first hour may have charges from before `since_ms`.
            first_ms = spending.since_ms // HOUR_MS * HOUR_MS if self.counts["lost"] else spending.since_ms
            assert least <= +found <= self.spent_since(first_ms), (back_ms, spending.since_ms)

    def spent_since(self, since_ms: int) -> Counter[str]:
        spent: Counter[str] = Counter()
        for one in self.made:
            if one.ms >= since_ms and not one.lost:
                spent[one.names[1]] += one.units
        return +spent


def id_of(text: str) -> Id:
    ms, seq = text.split("-")
    return int(ms), int(seq)


SEEDS = int(os.environ.get("QUOTA_TEST_SEEDS", "1"))


@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
def test_the_history_is_the_sum_of_what_was_charged(setup: Setup, ledger_place: LedgerStorage, seed: int) -> None:
    """L29. Charges, repayments, corrections, clocks that step, trims; in Redis each key is lost now and then."""
    client = None
    if isinstance(ledger_place, RedisStorage):
        client = ledger_place.open(decode_responses=True)
    months = Months(setup, seed, client)
    months.run()
    assert months.counts["charge"] > 300
    if client is not None:
        client.close()


# -- bounds ------------------------------------------------------------------------------------------------------------


def charge(setup: Setup, count: int = 1, **names: str) -> list[str]:
    """So many charges of 10 units, a millisecond apart; their ids."""
    ids = []
    for _ in range(count):
        setup.now_ms += 1
        made = {"method": "search.list", "job": "a", "region": "DE", **names}
        charge = Charge(10, "units", made["method"], made["job"], made["region"], f"k{setup.now_ms}")
        request = ChargeRequest(setup.project, charge, (), (), setup.now_ms)
        result = setup.ledger.decide(request, commit=True)
        assert result.id is not None
        ids.append(result.id)
    return ids


def roll_up(setup: Setup) -> int:
    """All that is over; in how many pieces."""
    pieces = 1
    while setup.ledger.roll_up(setup.project, setup.now_ms):
        pieces += 1
    return pieces


def read(setup: Setup) -> History:
    return setup.ledger.history(setup.project, 0, setup.now_ms)


@pytest.mark.topology
def test_a_hundred_charges_are_rolled_up_at_once_once_their_hour_is_over(setup: Setup) -> None:
    charge(setup, 250)
    assert roll_up(setup) == 1
    assert read(setup).hours == (), "the hour is not over"
    setup.now_ms += HOUR_MS
    found = []
    for _ in range(4):
        more = setup.ledger.roll_up(setup.project, setup.now_ms)
        found.append((sum(row.charges for row in read(setup).hours), more))
    assert found == [(100, True), (200, True), (250, False), (250, False)]
    assert {row.units for row in read(setup).hours} == {2_500}


def test_an_hour_has_two_hundred_rows_and_one_for_the_rest(setup: Setup) -> None:
    """And a correction finds its row."""
    for n in range(MAX_CELLS + 5):
        (charge_id,) = charge(setup, region=f"R{n}")
    setup.now_ms += HOUR_MS
    roll_up(setup)
    setup.ledger.settle(setup.project, charge_id, 3, ())
    hours = read(setup).hours
    assert len(hours) == MAX_CELLS + 1
    (other,) = (row for row in hours if row.region == OTHER)
    assert (other.charges, other.units) == (5, 43)
    spending = read_spending(setup.ledger, setup.project, "region", setup.now_ms - DAY_MS)
    assert len(spending.rows) == MAX_CELLS + 5, "the log still tells them apart"
    assert spending.total_units == 10 * (MAX_CELLS + 5) - 7


def test_a_project_has_two_hundred_sums_and_one_for_the_rest(setup: Setup) -> None:
    for n in range(MAX_CELLS + 5):
        (charge_id,) = charge(setup, job=f"j{n}")
    before = {(one.method, one.job): one for one in read(setup).sums_with(log_of(setup))}
    setup.now_ms += HOUR_MS
    roll_up(setup)
    sums = {(one.method, one.job): one for one in read(setup).sums}
    assert sums == before
    assert (len(sums), sums[OTHER, OTHER].charges, sums[OTHER, OTHER].units) == (MAX_CELLS + 1, 5, 50)
    setup.ledger.settle(setup.project, charge_id, 0, ())
    setup.ledger.settle(setup.project, charge_id, 4, ())
    (other,) = (one for one in read(setup).sums if one.job == OTHER)
    assert (other.units, other.corrected_units) == (50, 14), "neither is ever lowered"


def log_of(setup: Setup) -> list[Entry]:
    return list(read_entries(setup.ledger, setup.project, 0, NEVER))


def test_each_charge_is_rolled_up_once_by_several_at_once(setup: Setup) -> None:
    charge(setup, 500)
    setup.now_ms += HOUR_MS
    threads = [Thread(target=roll_up, args=(setup,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(row.charges for row in read(setup).hours) == 500


def _charge_for_ever(url: str, project: str, now_ms: int) -> Iterator[None]:
    mine = Setup.open(url, now_ms=now_ms)
    mine.project = project
    for turn in itertools.count():
        mine.now_ms += MINUTE_MS
        ids = charge(mine, 3)
        mine.ledger.settle(mine.project, ids[0], 1, ())
        roll_up(mine)
        if turn == 1:
            yield


def test_processes_that_are_killed_lose_no_charge_and_count_none_twice(ledger_url: str) -> None:
    """Kill -9 anywhere: in the middle of a charge, of a correction, of a roll-up."""
    dice = random.Random(5)
    setup = Setup.open(ledger_url)
    charge(setup)
    for _ in range(12):
        child = Children(_charge_for_ever, (ledger_url, setup.project, setup.now_ms))
        child.first_answers()
        time.sleep(dice.uniform(0.05, 0.15))  # whatever it is doing then
        child.kill()
        setup.now_ms = log_of(setup)[-1].ms
    assert len(log_of(setup)) > 50
    check_against_the_log(setup)
    setup.now_ms += HOUR_MS
    roll_up(setup)
    assert rest_of(setup) == []
    check_against_the_log(setup)
    setup.ledger.close()


def check_against_the_log(setup: Setup) -> None:
    """In each hour that the log still has as a whole, the history and the log's end are what it has."""
    whole_after_ms = setup.ledger.whole_after_ms(setup.project)
    found: Counter[int] = Counter({row.hour_ms: row.units for row in read(setup).hours})
    for entry in rest_of(setup):
        found[entry.ms // HOUR_MS * HOUR_MS] += entry.units
    logged: Counter[int] = Counter()
    for entry in log_of(setup):
        logged[entry.ms // HOUR_MS * HOUR_MS] += entry.units
    trimmed = [hour_ms for hour_ms in found if hour_ms <= whole_after_ms]
    for hour_ms in trimmed:
        del found[hour_ms], logged[hour_ms]
    assert found == logged
    assert logged, "some hours are whole"


def test_a_roll_up_whose_answer_is_lost_is_done_or_not(redis_server: RedisServer) -> None:
    with Proxy(redis_server.port) as proxy:
        setup = Setup.open(proxy.url)
        charge(setup, 250)
        setup.now_ms += HOUR_MS
        for fault in ("drop-reply", "drop-request", "cut-reply", "drop-reply"):
            proxy.fail(fault, times=1)
            with suppress(LedgerError):
                setup.ledger.roll_up(setup.project, setup.now_ms)
            check_against_the_log(setup)
        roll_up(setup)
        check_against_the_log(setup)
        setup.ledger.close()
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()


def test_a_charge_waits_in_the_log_until_it_is_rolled_up(setup: Setup) -> None:
    """L13. But not for longer than the history shows it; and where nobody ever looked there is nothing to wait for."""

    def charge_and_trim(after_ms: int) -> int:
        setup.now_ms += after_ms
        for _ in range(3):
            charge(setup)
            setup.now_ms += 2 * MINUTE_MS
        return len(log_of(setup))

    charge(setup)
    assert charge_and_trim(60 * HOUR_MS) == 3, "nobody has looked"
    roll_up(setup)
    assert charge_and_trim(30 * DAY_MS) == 6
    roll_up(setup)
    assert charge_and_trim(HOUR_MS) < 9, "rolled up"
    assert charge_and_trim(36 * DAY_MS) == 3, "too old to be shown"


def rest_of(setup: Setup) -> list[Entry]:
    rolled = read(setup).rolled_up
    return [entry for entry in log_of(setup) if (entry.ms, entry.seq) > rolled]


def test_an_idle_project_keeps_its_log_for_as_long_as_the_history_shows_it(redis_server: RedisServer) -> None:
    """L12. It may have charges that nobody has rolled up."""
    setup = Setup.open(redis_server.url)
    charge(setup)
    setup.ledger.repay(setup.project, "m", [(1, Charge(1, "units", "m", "", "", "r1"))])
    with redis.Redis.from_url(redis_server.url, decode_responses=True) as client:
        for key in client.keys(f"quota:{{{setup.project}}}:*"):
            assert HISTORY_MS - DAY_MS < client.pttl(key) <= HISTORY_MS, key
        client.flushall()
    setup.ledger.close()


def test_a_history_that_was_lost_is_rebuilt_from_the_log_and_counts_nothing_twice(redis_server: RedisServer) -> None:
    setup = Setup.open(redis_server.url)
    charge(setup, 3)
    setup.now_ms += HOUR_MS
    roll_up(setup)
    with redis.Redis.from_url(redis_server.url) as client:
        client.delete(f"quota:{{{setup.project}}}:history")
    charge(setup, 2)
    assert sum(one.charges for one in read(setup).sums_with(rest_of(setup))) == 2, "the sums had the first three"
    setup.now_ms += HOUR_MS
    roll_up(setup)
    assert sum(row.charges for row in read(setup).hours) == 5
    assert sum(one.charges for one in read(setup).sums) == 2
    setup.ledger.close()


def test_what_the_log_lost_before_it_was_rolled_up_lies_in_the_gap(redis_server: RedisServer) -> None:
    """L14."""
    setup = Setup.open(redis_server.url)
    charge(setup, 2)
    setup.now_ms += HOUR_MS
    roll_up(setup)
    from_ms = read(setup).rolled_up[0]
    charge(setup, 2)
    lost_ms = setup.now_ms
    with redis.Redis.from_url(redis_server.url) as client:
        client.delete(f"quota:{{{setup.project}}}:log")
    setup.now_ms += HOUR_MS
    charge(setup)
    roll_up(setup)
    assert read(setup).gap == (from_ms, lost_ms)
    spending = read_spending(setup.ledger, setup.project, "method", setup.now_ms - DAY_MS)
    assert (spending.gap_ms, spending.total_units) == ((from_ms, lost_ms), 30)
    setup.ledger.close()


# -- what changes ids --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead_ms", [10 * MINUTE_MS, 5 * HOUR_MS, 20 * DAY_MS])
def test_a_repair_keeps_each_charge_in_the_history_once(setup: Setup, ahead_ms: int) -> None:
    """L26. Three hours were rolled up while the clock stood ahead; afterwards all is dated now, and rolled up then."""
    charge(setup, 5)
    right_ms = setup.now_ms
    setup.now_ms += ahead_ms
    for _ in range(3):
        charge(setup, 150)
        setup.now_ms += HOUR_MS
        roll_up(setup)
    charge(setup, 7)
    sums = read(setup).sums_with(rest_of(setup))
    setup.now_ms = right_ms + MINUTE_MS
    assert setup.ledger.repair(setup.project, "e9", setup.now_ms) is not None
    assert read(setup).sums_with(rest_of(setup)) == sums, "no sum is lowered, and none counts twice"
    setup.now_ms += HOUR_MS
    charge(setup, 2)
    setup.now_ms += HOUR_MS
    roll_up(setup)
    hours = read(setup).hours
    assert sum(row.charges for row in hours) == 5 + 3 * 150 + 7 + 2
    assert max(row.hour_ms for row in hours) < setup.now_ms
    assert sum(one.charges for one in read(setup).sums) == 5 + 3 * 150 + 7 + 2


@pytest.mark.parametrize(("here", "there"), [("sqlite", "redis"), ("redis", "sqlite"), ("redis", "redis")])
def test_the_history_moves_with_its_ledger(tmp_path: Path, redis_server: RedisServer, here: str, there: str) -> None:
    """L27. And goes on there: hours, sums, refusals, and which charge was rolled up last."""
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
    numbers = itertools.count(1)
    urls = {"sqlite": f"sqlite:///{tmp_path / 'ledger.db'}", "redis": redis_server.url}
    setup = Setup.open(urls[here])
    charge(setup, 3, region="odd|%, *")
    charge(setup, 2)
    setup.now_ms += HOUR_MS
    roll_up(setup)
    (charge_id,) = charge(setup)
    setup.ledger.settle(setup.project, charge_id, 4, ())
    for n in (0, 70):
        texts = [f'{{"n": {m}}}' for m in range(n, n + 70)]
        setup.ledger.add_refusals(setup.project, [RefusalCount(setup.now_ms, "day", "a", "limit", 2)], texts)
    before, refusals = read(setup), setup.ledger.refusals(setup.project)
    assert len(refusals) == MAX_REFUSALS
    old = open_movable(urls[here], clock=lambda: setup.now_ms)
    url = urls[there] if there != here else urls[there].removesuffix("0") + str(next(numbers))
    new = open_movable(url, clock=lambda: setup.now_ms)
    for step in plan_move(old, new, [setup.project]):
        carry_out(old, new, step, lambda *_: None)
    setup.ledger.close()
    setup.ledger = new
    moved = read(setup)
    assert sorted(moved.hours) == sorted(before.hours)
    assert moved._replace(hours=before.hours) == before
    setup.ledger.add_refusals(setup.project, [RefusalCount(setup.now_ms, "day", "a", "limit", 1)], [])
    assert [one.calls for one in read(setup).refused_sums] == [5], "and goes on there"
    assert setup.ledger.refusals(setup.project) == refusals
    setup.now_ms += HOUR_MS
    roll_up(setup)
    assert sum(row.units for row in read(setup).hours) == 54
    assert sum(one.charges for one in read(setup).sums) == 6
    old.close()
    new.close()
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.topology
def test_refusals_are_counted_by_hour_and_the_last_hundred_are_kept(setup: Setup) -> None:
    """L30."""
    hour_ms = setup.now_ms // HOUR_MS * HOUR_MS
    charge(setup)
    setup.ledger.add_refusals(setup.project, [RefusalCount(hour_ms, "day", "a", "limit", 2)], ["first"])
    more = [RefusalCount(hour_ms, "day", "a", "limit", 3), RefusalCount(hour_ms - HOUR_MS, "", "", "clock", 1)]
    setup.ledger.add_refusals(setup.project, more, [f"r{n}" for n in range(100)])
    assert sorted(read(setup).refused) == sorted(
        [RefusalCount(hour_ms, "day", "a", "limit", 5), RefusalCount(hour_ms - HOUR_MS, "", "", "clock", 1)]
    )
    assert setup.ledger.refusals(setup.project) == [f"r{n}" for n in range(100)]
    setup.ledger.add_refusals(setup.project, [], ["newest"])
    assert setup.ledger.refusals(setup.project) == [*(f"r{n}" for n in range(1, 100)), "newest"]
    counts = [RefusalCount(hour_ms, f"l{n}", "a", "limit", 1) for n in range(MAX_CELLS)]
    setup.ledger.add_refusals(setup.project, counts, [])
    of_hour = [one for one in read(setup).refused if one.hour_ms == hour_ms]
    assert (len(of_hour), sum(one.calls for one in of_hour)) == (MAX_CELLS + 1, MAX_CELLS + 5)
    sums = read(setup).refused_sums
    assert {RefusedSum("day", "a", "limit", 5), RefusedSum("", "", "clock", 1), RefusedSum(*[OTHER] * 3, 2)} <= {*sums}
    assert (len(sums), sum(one.calls for one in sums)) == (MAX_CELLS + 1, MAX_CELLS + 6)
    setup.now_ms += HISTORY_MS + 2 * HOUR_MS
    charge(setup)
    roll_up(setup)
    assert (read(setup).refused, sorted(read(setup).refused_sums)) == ((), sorted(sums)), "for 35 days; sums never fall"


def test_refusals_from_anywhere_add_up_to_sums_that_never_fall(setup: Setup) -> None:
    """L30. Random counts by names that need escaping, in hours that come and go, against sums in Python."""
    dice = random.Random(17)
    charge(setup)
    expected: Counter[tuple[str, str, str]] = Counter()
    for _ in range(40):
        counts = [
            RefusalCount(
                setup.now_ms // HOUR_MS * HOUR_MS - dice.randrange(3) * HOUR_MS,
                dice.choice(["day", "a|b", "50%", "two words", "\n", ""]),
                dice.choice(["", "nightly", "ü"]),
                dice.choice(["limit", "clock"]),
                dice.randint(1, 10**9 - 1),
            )
            for _ in range(dice.randint(0, 9))
        ]
        setup.ledger.add_refusals(setup.project, counts, [])
        for one in counts:
            expected[one.limit, one.job, one.reason] += one.calls
        found = {(one.limit, one.job, one.reason): one.calls for one in read(setup).refused_sums}
        assert found == expected
        setup.now_ms += dice.choice([0, HOUR_MS, 12 * HOUR_MS, 40 * DAY_MS])
        roll_up(setup)


@pytest.mark.parametrize(
    ("counts", "texts"),
    [(MAX_COUNTS + 1, []), (0, ["x"] * (MAX_REFUSALS + 1)), (0, ["x" * (MAX_REFUSAL_BYTES + 1)])],
)
def test_more_refusals_than_fit_are_an_error(redis_server: RedisServer, counts: int, texts: list[str]) -> None:
    setup = Setup.open(redis_server.url)
    charge(setup)
    with pytest.raises(LedgerError, match=r"add_refusals\.lua"):
        setup.ledger.add_refusals(setup.project, [RefusalCount(0, "day", "a", "limit", 1)] * counts, texts)
    assert setup.ledger.refusals(setup.project) == []
    setup.ledger.close()


@pytest.mark.parametrize("field", ["rolled_up", "sums_after", "whole_after_ms", "gap"])
@pytest.mark.parametrize(
    "found", [f"{'9' * 20}-0", f"5-{'9' * 20}", f"{10**14}-0", "-1-0", f"{10**14}", f"5 {'9' * 20}"]
)
def test_a_history_that_no_program_of_ours_writes_is_named(field: str, found: str, redis_server: RedisServer) -> None:
    setup = Setup.open(redis_server.url)
    setup.budget().charge("search.list")
    setup.ledger.roll_up(setup.project, setup.now_ms, present_hour=True)
    with redis.Redis(port=redis_server.port) as client:
        client.hset(f"quota:{{{setup.project}}}:history", field, found)
    with pytest.raises(LedgerError, match="holds what no quota program writes"):
        read_spending(setup.ledger, setup.project, "job", 0)


@pytest.mark.parametrize("found", ["-" + "9" * 20, "9" * 20, "nan", "-1e400"])
def test_a_roll_up_ends_whatever_it_finds(found: str, redis_server: RedisServer) -> None:
    setup = Setup.open(redis_server.url)
    setup.budget().charge("search.list")
    with redis.Redis(port=redis_server.port) as client:
        client.hset(f"quota:{{{setup.project}}}:history", "swept_hour", found)
        setup.ledger.roll_up(setup.project, setup.now_ms)
        assert int(client.hget(f"quota:{{{setup.project}}}:history", "swept_hour") or 0) <= setup.now_ms // HOUR_MS
