"""Claims (L25): each region of a job belongs to one store at a time, and each tick is run once. On every ledger."""

from __future__ import annotations

import json
import multiprocessing
import random
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import redis

from quota.errors import LedgerError, UsageError
from quota.ledger.claims import MAX_HOLD_MS, MAX_REGIONS, MAX_TICK_MS, MAX_TICKS, Claim, Claimed, Holder
from quota.ledger.factory import open_ledger
from quota.ledger.history import HISTORY_MS
from quota.ledger.redis_scripts import FORMAT
from quota.terms.limits import HOUR_MS, MINUTE_MS
from support.claims import HOLD_MS, LEASE_MS, claim_of
from support.losses import SqliteStorage
from support.processes import Children
from support.proxy import Proxy
from support.servers import RedisServer
from support.setup import NOW_MS, Setup

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier

    from support.losses import LedgerStorage


def asked(setup: Setup, claim: Claim, **more: bool) -> Claimed:
    return setup.ledger.claim(setup.project, claim, **more)


def lost(setup: Setup, claim: Claim, **more: bool) -> list[str]:
    return sorted(asked(setup, claim, **more).elsewhere)


def end(setup: Setup, claim: Claim, ending: Any = "done") -> None:
    setup.ledger.end_claim(setup.project, claim, ending)


# -- regions -----------------------------------------------------------------------------------------------------------


def test_free_regions_go_to_the_first_and_the_other_learns_whose_they_are(setup: Setup) -> None:
    a, b = claim_of("a"), claim_of("b")
    assert asked(setup, a) == Claimed(setup.now_ms, {})
    setup.now_ms += MINUTE_MS
    answer = asked(setup, b)
    assert sorted(answer.elsewhere) == ["DE", "US"]
    assert answer.elsewhere["DE"] == ("a", "host of a", setup.now_ms - MINUTE_MS, NOW_MS + HOLD_MS, True)
    end(setup, a)
    answer = asked(setup, b)
    assert answer.elsewhere["DE"] == ("a", "host of a", setup.now_ms, setup.now_ms + HOLD_MS, False)


def test_they_stay_with_the_store_until_its_hold_lapses(setup: Setup) -> None:
    asked(setup, claim_of("a"))
    setup.now_ms += MINUTE_MS
    end(setup, claim_of("a"))
    setup.now_ms += HOLD_MS - 1
    assert lost(setup, claim_of("b")) == ["DE", "US"]
    setup.now_ms += 1
    assert lost(setup, claim_of("b")) == []
    assert lost(setup, claim_of("a", "next run of a")) == ["DE", "US"]


def test_a_run_renews_by_claiming_again(setup: Setup) -> None:
    for _ in range(5):
        assert lost(setup, claim_of("a")) == []
        setup.now_ms += HOLD_MS - 1
        assert lost(setup, claim_of("b")) == ["DE", "US"]


def test_a_store_has_its_regions_at_its_next_run(setup: Setup) -> None:
    asked(setup, claim_of("a"))
    end(setup, claim_of("a"))
    assert lost(setup, claim_of("a", "next", machine="another machine")) == []


@pytest.mark.topology
def test_two_hosts_with_one_store_never_run_at_once(setup: Setup) -> None:
    """The same name or a copied file."""
    asked(setup, claim_of("a"))
    other = claim_of("a", "other run", machine="another machine")
    answer = asked(setup, other)
    assert answer.elsewhere["US"] == ("a", "host of a", setup.now_ms, setup.now_ms + LEASE_MS, True)
    setup.now_ms += LEASE_MS - 1
    assert lost(setup, claim_of("a")) == [], "it is alive, and says so"
    setup.now_ms += 1
    assert lost(setup, other) == ["DE", "US"]
    end(setup, claim_of("a"))
    assert lost(setup, other) == []
    assert lost(setup, claim_of("a")) == ["DE", "US"]


def test_a_killed_run_does_not_hold_up_the_next_on_its_machine(setup: Setup) -> None:
    asked(setup, claim_of("a"))
    assert lost(setup, claim_of("a", "next")) == []


def test_a_killed_run_holds_up_its_store_elsewhere_for_its_lease(setup: Setup) -> None:
    asked(setup, claim_of("a"))
    setup.now_ms += LEASE_MS
    assert lost(setup, claim_of("a", "next", machine="after a boot")) == []


def test_taking_over_takes_all_and_the_other_learns_it_at_its_next_page(setup: Setup) -> None:
    asked(setup, claim_of("a", "", "US", "DE", "FR"))
    assert lost(setup, claim_of("b", "", "US", "DE"), take_over=True) == []
    assert lost(setup, claim_of("a", "", "US", "DE", "FR")) == ["DE", "US"]
    end(setup, claim_of("a"))
    assert lost(setup, claim_of("b", "", "US", "DE", "FR")) == ["FR"]


def test_the_end_of_a_run_that_was_replaced_changes_nothing(setup: Setup) -> None:
    asked(setup, claim_of("a"))
    asked(setup, claim_of("b"), take_over=True)
    for ending in ("done", "stopped", "failed"):
        end(setup, claim_of("a"), ending)
    assert lost(setup, claim_of("c")) == ["DE", "US"]
    assert asked(setup, claim_of("c")).elsewhere["DE"].owner == "b"


def test_a_run_that_failed_gives_its_regions_back(setup: Setup) -> None:
    asked(setup, claim_of("a"))
    end(setup, claim_of("a"), "failed")
    assert lost(setup, claim_of("b")) == []


def test_some_regions_may_be_here_and_some_elsewhere(setup: Setup) -> None:
    assert lost(setup, claim_of("a", "", "US")) == []
    assert lost(setup, claim_of("b", "", "US", "DE")) == ["US"]
    end(setup, claim_of("b"))
    assert lost(setup, claim_of("a", "next", "US", "DE")) == ["DE"]


def test_a_run_may_ask_for_further_regions(setup: Setup) -> None:
    asked(setup, claim_of("a", "", "US"))
    asked(setup, claim_of("a", "", "DE"))
    end(setup, claim_of("a"))
    assert lost(setup, claim_of("b")) == ["DE", "US"]


def test_a_job_without_regions_has_one_without_a_name(setup: Setup) -> None:
    assert lost(setup, claim_of("a", "", "")) == []
    assert lost(setup, claim_of("b", "", "")) == [""]


def test_jobs_and_projects_are_apart(setup: Setup) -> None:
    asked(setup, claim_of("a"))
    assert lost(setup, claim_of("b", name="search|trending")) == []
    assert not setup.ledger.claim(f"{setup.project}-other", claim_of("b")).elsewhere


def test_what_is_dated_ahead_of_the_clock_is_dated_now(setup: Setup) -> None:
    """The ledger's clock was a year ahead: nothing stays closed for a year."""
    setup.now_ms += 365 * 24 * HOUR_MS
    asked(setup, claim_of("a", tick="tick:1"))
    end(setup, claim_of("a"))
    setup.now_ms = NOW_MS
    assert asked(setup, claim_of("b")).elsewhere["US"] == ("a", "host of a", NOW_MS, NOW_MS + HOLD_MS, False)
    setup.now_ms += HOLD_MS
    assert lost(setup, claim_of("b")) == []


def test_a_claim_costs_nothing(setup: Setup) -> None:
    budget = setup.budget()
    asked(setup, claim_of("a"))
    assert [state.used_units for state in budget.usage()] == [0]


# -- ticks -------------------------------------------------------------------------------------------------------------


@pytest.mark.topology
def test_a_tick_is_run_once(setup: Setup) -> None:
    a, b = (claim_of("a", run, tick="tick:1", machine=f"machine {run}") for run in ("1", "2"))
    assert asked(setup, a).tick == ""
    assert asked(setup, b).tick == "running"
    end(setup, a)
    assert asked(setup, b).tick == "done"
    assert asked(setup, b._replace(tick="tick:2")).tick == ""
    setup.now_ms += HOUR_MS
    assert asked(setup, b).tick == "", "it is forgotten"


def test_a_tick_that_was_stopped_is_run_to_its_end(setup: Setup) -> None:
    for run in ("1", "2", "3"):
        assert asked(setup, claim_of("a", run, tick="tick:1", machine=run)).tick == ""
        end(setup, claim_of("a", run, tick="tick:1"), "stopped")
    assert asked(setup, claim_of("a", "4", tick="tick:1")).tick == ""
    end(setup, claim_of("a", "4", tick="tick:1"), "failed")
    assert asked(setup, claim_of("a", "5", tick="tick:1")).tick == "done"


@pytest.mark.parametrize("regions", [("US",), None])
def test_a_tick_whose_run_was_killed_is_run_by_the_next(setup: Setup, regions: tuple[str, ...] | None) -> None:
    more = {"tick": "tick:1", "regions": regions or ()}
    asked(setup, claim_of("a", "1", **more))
    elsewhere = claim_of("a", "2", **more, machine="another")
    assert asked(setup, elsewhere).tick == "running"
    assert asked(setup, claim_of("a", "3", **more)).tick == "", "the lock on the machine says that run 1 is dead"
    setup.now_ms += LEASE_MS
    assert asked(setup, elsewhere).tick == ""


def test_a_thousand_ticks_are_remembered_and_of_more_those_that_end_last(setup: Setup) -> None:
    """However often a job runs, and for how long its ticks are remembered: the record is read with each page."""
    claims = [claim_of("a", tick=f"tick:{-n % 10_000}", tick_ms=HOUR_MS + n // 2) for n in range(MAX_TICKS + 3)]
    for claim in claims:
        end(setup, claim)
    kept = [asked(setup, claim_of("b", tick=claim.tick, regions=())).tick for claim in (*claims[:5], claims[-1])]
    assert kept == ["", "", "done", "", "done", "done"], "of 2 and 3, which end at once, the later name stays"


def test_without_regions_only_ticks_are_apart(setup: Setup) -> None:
    assert asked(setup, claim_of("a", tick="tick:1", regions=())) == Claimed(setup.now_ms, {})
    assert asked(setup, claim_of("b", tick="tick:1", regions=())).tick == "running"
    assert asked(setup, claim_of("b", tick="tick:2", regions=())).tick == ""


# -- bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hold_ms": MAX_HOLD_MS + 1}, "how long a region stays"),
        ({"hold_ms": 0}, "how long a region stays"),
        ({"lease_ms": MAX_HOLD_MS + 1}, "how long a run may be silent"),
        ({"tick_ms": MAX_TICK_MS + 1}, "how long a tick is remembered"),
        ({"regions": tuple(map(str, range(MAX_REGIONS + 1)))}, "at most 1,000 are claimed at once"),
        ({"owner": ""}, "a claim needs a name, an owner and a run"),
        ({"regions": (None,)}, "is not a str"),
    ],
)
def test_a_claim_out_of_its_bounds_is_one_line(setup: Setup, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        asked(setup, claim_of("a")._replace(**wrong))


def test_a_thousand_regions_are_claimed_at_once(setup: Setup) -> None:
    regions = tuple(f"region {n}" for n in range(MAX_REGIONS))
    assert lost(setup, claim_of("a", "", *regions, hold_ms=MAX_HOLD_MS)) == []
    assert lost(setup, claim_of("b", "", *regions)) == sorted(regions)


NAMES = ('a "quoted" \\ name', "東京", "a|b:{x}", "/\u2028", "x" * 64)


def test_any_name_will_do(setup: Setup) -> None:
    for name in NAMES:
        claim = claim_of(name, name, *NAMES, name=name, tick=name, machine=name, host=name)
        assert asked(setup, claim) == Claimed(setup.now_ms, {})
        other = asked(setup, claim._replace(owner="b", run="b", machine="b", tick=""))
        assert {region: holder[:2] for region, holder in other.elsewhere.items()} == dict.fromkeys(NAMES, (name, name))
        end(setup, claim)
        assert asked(setup, claim._replace(run="c")).tick == "done"


# -- both ledgers are one rule -----------------------------------------------------------------------------------------


@dataclass
class Held:
    """A run, and what became of it."""

    claim: Claim
    seen_ms: int
    alive_ms: int
    until_ms: int
    ended: bool = False

    def may_be_alive(self, claim: Claim, now_ms: int) -> bool:
        return (
            not self.ended
            and self.claim.run != claim.run
            and self.claim.machine != claim.machine
            and (self.alive_ms > now_ms)
        )


@dataclass
class Plain:
    """L25 said once more, region by region: `of` has the run that each belongs to, `idle` the runs without any."""

    of: dict[str, Held] = field(default_factory=dict)
    idle: list[Held] = field(default_factory=list)
    ticks: dict[str, int] = field(default_factory=dict)

    def runs(self) -> list[Held]:
        return [*{id(held): held for held in (*self.of.values(), *self.idle)}.values()]

    def pass_to(self, now_ms: int) -> None:
        for held in self.runs():
            ahead_ms = max(0, held.seen_ms - now_ms)
            held.seen_ms, held.alive_ms = held.seen_ms - ahead_ms, held.alive_ms - ahead_ms
            held.until_ms = min(held.until_ms - ahead_ms, now_ms + MAX_HOLD_MS)
        self.of = {region: held for region, held in self.of.items() if held.until_ms > now_ms}
        self.idle = [held for held in self.idle if held.until_ms > now_ms]
        self.ticks = {tick: min(ms, now_ms + MAX_TICK_MS) for tick, ms in self.ticks.items() if ms > now_ms}

    def claim(self, claim: Claim, now_ms: int, *, take_over: bool) -> Claimed:
        self.pass_to(now_ms)
        if claim.tick in self.ticks:
            return Claimed(now_ms, {}, "done")
        same_tick = [held for held in self.runs() if claim.tick and not held.ended and held.claim.tick == claim.tick]
        if any(held.may_be_alive(claim, now_ms) for held in same_tick):
            return Claimed(now_ms, {}, "running")
        elsewhere = {}
        for region in {*claim.regions} & self.of.keys():
            held = self.of[region]
            own, alive = held.claim.owner == claim.owner, held.may_be_alive(claim, now_ms)
            if not (take_over or (own and not alive)):
                until_ms = held.alive_ms if own else held.until_ms
                elsewhere[region] = Holder(held.claim.owner, held.claim.host, held.seen_ms, until_ms, not held.ended)
        got = {*claim.regions} - elsewhere.keys()
        if got or not claim.regions:
            for held in self.runs():
                if not held.ended and (held.claim.owner, held.claim.run) == (claim.owner, claim.run):
                    got |= {region for region, its in self.of.items() if its is held}
            now = Held(claim, now_ms, now_ms + claim.lease_ms, now_ms + claim.hold_ms)
            before = self.runs()
            self.of |= dict.fromkeys(got, now)
            kept = [*self.of.values(), now]
            others = [held for held in before if not any(held is one for one in kept) and held.claim.tick]
            self.idle = [held for held in others if held.may_be_alive(claim, now_ms)]
            if not got:
                self.idle.append(now)
        return Claimed(now_ms, elsewhere)

    def end(self, claim: Claim, now_ms: int, ending: str) -> None:
        self.pass_to(now_ms)
        for held in self.runs():
            if not held.ended and (held.claim.owner, held.claim.run) == (claim.owner, claim.run):
                held.ended, held.seen_ms, held.until_ms = True, now_ms, now_ms + claim.hold_ms
                self.idle = [one for one in self.idle if one is not held]
                if ending == "failed":
                    self.of = {region: its for region, its in self.of.items() if its is not held}
        if claim.tick and ending != "stopped":
            self.ticks[claim.tick] = now_ms + claim.tick_ms


def test_every_answer_is_that_of_a_plain_account(setup: Setup) -> None:
    """Also where the clock jumps: 3,000 random asks of 3 stores on 4 machines."""
    plain, dice = Plain(), random.Random(11)
    for step in range(3_000):
        setup.now_ms += dice.choice((0, 1, MINUTE_MS, LEASE_MS, HOUR_MS, -HOUR_MS if dice.random() < 0.1 else 0))
        claim = claim_of(
            dice.choice("abc"),
            f"run {dice.randrange(6)}",
            machine=dice.choice("MNOP"),
            regions=tuple(dice.sample(("", "US", "DE", "FR"), dice.randrange(4))),
            hold_ms=dice.choice((1, HOUR_MS, 2 * HOUR_MS, MAX_HOLD_MS)),
            lease_ms=dice.choice((1, MINUTE_MS, HOUR_MS)),
            tick=dice.choice(("", f"tick {dice.randrange(4)}")),
        )
        if dice.random() < 0.3:
            ending: Any = dice.choice(("done", "stopped", "failed"))
            end(setup, claim, ending)
            plain.end(claim, setup.now_ms, ending)
            continue
        take_over = dice.random() < 0.1
        expected = plain.claim(claim, setup.now_ms, take_over=take_over)
        assert asked(setup, claim, take_over=take_over) == expected, (step, claim)


# -- many processes ----------------------------------------------------------------------------------------------------


def _claim_all(url: str, me: str, jobs: int, barrier: Barrier) -> list[str]:
    ledger = open_ledger(url)
    barrier.wait()
    got = []
    for n in range(jobs):
        claim = claim_of(me, name=f"job {n}")
        answer = ledger.claim("shared", claim)
        got += [f"{n} {region}" for region in claim.regions if region not in answer.elsewhere]
    ledger.close()
    return got


def test_of_many_processes_exactly_one_gets_each_region(ledger_url: str) -> None:
    processes, jobs = 6, 40
    barrier = multiprocessing.get_context("forkserver").Barrier(processes)
    rows = [(ledger_url, f"store {n}", jobs, barrier) for n in range(processes)]
    winners = [region for won in Children(_claim_all, *rows, start="anew").answers() for region in won]
    assert sorted(winners) == sorted(f"{n} {region}" for n in range(jobs) for region in ("US", "DE"))


def _renew(url: str, me: str, times: int, barrier: Barrier) -> list[str]:
    ledger = open_ledger(url)
    barrier.wait()
    lost = [region for _ in range(times) for region in ledger.claim("shared", claim_of(me, "", me)).elsewhere]
    ledger.close()
    return lost


def test_many_processes_renew_what_one_record_has_and_none_loses_its_own(ledger_url: str) -> None:
    processes = 8
    barrier = multiprocessing.get_context("forkserver").Barrier(processes)
    names = [f"store {n}" for n in range(processes)]
    rows = [(ledger_url, name, 30, barrier) for name in names]
    assert Children(_renew, *rows, start="anew").answers() == [[]] * processes
    ledger = open_ledger(ledger_url)
    answer = ledger.claim("shared", claim_of("late", "", *names))
    assert {region: holder.owner for region, holder in answer.elsewhere.items()} == {name: name for name in names}
    ledger.close()


# -- storage -----------------------------------------------------------------------------------------------------------


def test_in_redis_a_job_is_one_field_of_the_state_with_a_lifetime(redis_server: RedisServer) -> None:
    ledger = open_ledger(redis_server.url)
    with redis.Redis(port=redis_server.port, decode_responses=True) as client:
        client.flushall()
        for n in range(20):
            ledger.claim("p", claim_of("a", f"{n}", tick=f"tick:{n}", tick_ms=MAX_TICK_MS))
            ledger.end_claim("p", claim_of("a", f"{n}", tick=f"tick:{n}", tick_ms=MAX_TICK_MS), "done")
        assert client.keys("*") == ["quota:{p}:state"]
        state = client.hgetall("quota:{p}:state")
        assert state.keys() == {"format", "claim:trending|trending"}
        until_ms, _, record = state["claim:trending|trending"].partition(" ")
        assert HISTORY_MS - 60_000 < client.pttl("quota:{p}:state") <= HISTORY_MS
        assert int(until_ms) == max(json.loads(record)["ticks"].values())
        assert [len(json.loads(record)[key]) for key in ("runs", "ticks")] == [1, 20]
        assert ledger.notes("p").exhaustions == []
    ledger.close()


def test_what_other_programs_wrote_there_is_written_anew(redis_server: RedisServer) -> None:
    ledger = open_ledger(redis_server.url)
    with redis.Redis(port=redis_server.port, decode_responses=True) as client:
        for nonsense in (
            "",
            "x",
            "1 {",
            "9e99 {}",
            '5 {"runs":[{}],"ticks":{}}',
            '5 {"runs":7}',
            '5 {"runs":[],"ticks":{"a":"b"}}',
        ):
            client.flushall()
            client.hset("quota:{p}:state", mapping={"format": FORMAT, "claim:trending|trending": nonsense})
            assert ledger.claim("p", claim_of("a")).elsewhere == {}
            assert sorted(ledger.claim("p", claim_of("b")).elsewhere) == ["DE", "US"]
    ledger.close()


def test_in_redis_a_lost_answer_asked_for_again_is_the_same_claim(redis_server: RedisServer) -> None:
    with Proxy(redis_server.port) as proxy:
        ledger = open_ledger(proxy.url)
        ledger.claim("lost", claim_of("z", name="another job"))
        proxy.fail("drop-reply", match=b"trending|trending")
        assert ledger.claim("lost", claim_of("a")).elsewhere == {}
        assert proxy.connections == 2, "the answer was lost and asked for again"
        assert sorted(ledger.claim("lost", claim_of("b")).elsewhere) == ["DE", "US"]
        ledger.close()


def test_a_ledger_that_cannot_answer_says_so() -> None:
    server = RedisServer()
    ledger = open_ledger(server.url)
    assert ledger.claim("p", claim_of("a")).elsewhere == {}
    server.kill()
    with pytest.raises(LedgerError, match="cannot be reached"):
        ledger.claim("p", claim_of("a"))
    with pytest.raises(LedgerError, match="cannot be reached"):
        ledger.end_claim("p", claim_of("a"), "done")
    ledger.close()
    server.close()


def test_claims_that_lapsed_are_forgotten(setup: Setup, ledger_place: LedgerStorage) -> None:
    """L23: with a charge, a minute after they lapsed."""
    budget = setup.budget()
    for n in range(5):
        asked(setup, claim_of("a", name=f"job {n}", hold_ms=(n + 1) * MINUTE_MS))
    left = []
    for _ in range(7):
        budget.charge("videos.list")
        left.append(len(stored_jobs(setup, ledger_place)))
        setup.now_ms += MINUTE_MS
    at_once = [5, 4, 3, 2, 1, 0, 0]
    assert left == ([5, *at_once[:-1]] if isinstance(ledger_place, SqliteStorage) else at_once)


def test_a_job_of_which_nothing_is_left_is_forgotten(setup: Setup, ledger_place: LedgerStorage) -> None:
    asked(setup, claim_of("a"))
    assert len(stored_jobs(setup, ledger_place)) == 1
    end(setup, claim_of("a"), "failed")
    assert stored_jobs(setup, ledger_place) == []


def stored_jobs(setup: Setup, place: LedgerStorage) -> list[str]:
    if isinstance(place, SqliteStorage):
        with closing(sqlite3.connect(place.url.removeprefix("sqlite:///"))) as db:
            return [name for (name,) in db.execute("SELECT name FROM state WHERE name LIKE 'claim:%'")]
    with place.open(decode_responses=True) as client:
        return [field for field in client.hkeys(f"quota:{{{setup.project}}}:state") if field.startswith("claim:")]
