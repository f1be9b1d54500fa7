"""The scripts themselves, as a caller in any language has them: bounded, never twice, never without a lifetime."""

from __future__ import annotations

import random
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import redis

from quota.ledger.factory import open_ledger
from quota.ledger.redis_scripts import script
from quota.ledger.unlogged import UnloggedUsage
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS
from support.random_scripts import RandomScripts
from support.replies import words_of
from support.servers import immortal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import RedisServer

LOG, STATE, CORRECTIONS = KEYS = ("quota:{p}:log", "quota:{p}:state", "quota:{p}:corrections")
HISTORY = "quota:{p}:history"
ALL, SEARCHES, CALLS = "*|*|*|24h", "*|search.list|*|24h", "*|*|*|24h|calls"
NOW = 1_793_000_000_000
MIN_RETENTION_MS = 49 * HOUR_MS
RETRY_KEPT_MS = 300_000


def keys_of(name: str) -> tuple[str, ...]:
    if name == "repair":
        return (*KEYS, "quota:{p}:repair:log", "quota:{p}:repair:corrections", HISTORY)
    return (*KEYS, HISTORY) if name in ("settle", "roll_up", "add_refusals", "fill", "clear") else KEYS


@dataclass
class Scripts:
    """Calls scripts with good arguments, of which a test changes what it is about."""

    client: redis.Redis
    now_ms: int = NOW
    attempt_keys: int = 0

    def run(self, name: str, *args: object) -> Any:
        keys = keys_of(name)
        reply = self.client.eval(script(name)[0], len(keys), *keys, *map(str, args))
        return words_of(reply) if name == "charge" else reply

    def arguments(self, *limits: tuple[object, ...], **given: object) -> list[object]:
        self.attempt_keys += 1
        first = {
            "now_ms": self.now_ms,
            "caller_ms": 0,
            "commit": 1,
            "u": 1,
            "method": "videos.list",
            "job": "",
            "region": "",
            "attempt": f"t{self.attempt_keys}",
            "retry_age_ms": -1,
            "retention_ms": MIN_RETENTION_MS,
            "jitter_ms": 0,
            "closed_by": "units",
            "expected": "",
        }
        assert given.keys() <= first.keys()
        return [*{**first, **given}.values(), *(part for limit in limits for part in limit)]

    def charge(self, *limits: tuple[object, ...], **given: object) -> Any:
        return self.run("charge", *self.arguments(*limits, **given))

    def to_verdict(self, *limits: tuple[object, ...], **given: object) -> tuple[Any, int]:
        """The verdict, and in how many parts it was reached."""
        args = self.arguments(*limits, **given)
        for parts in range(1, 50):
            reply = self.run("charge", *args)
            if reply[0] != "MORE":
                return reply, parts
        raise AssertionError("no verdict in 50 parts")

    def used(self, view: str = ALL, span: object = DAY_MS) -> int:
        reply, _ = self.to_verdict((view, 0, 0, span), commit=0, u=0, attempt="")
        return int(reply[7])

    def lose(self, view: str, *expiries: tuple[int, int]) -> None:
        """So many units of a view are missing, each until its time."""
        port = self.client.get_connection_kwargs()["port"]
        with closing(open_ledger(f"redis://127.0.0.1:{port}", clock=lambda: self.now_ms)) as ledger:
            ledger.add_unlogged("p", "e2", [UnloggedUsage(view, "e1", expiries, (1, 0))])

    def fill(self, entries: int) -> None:
        """So many charges of 1 unit in the log, a millisecond apart, that no view has read."""
        sha = self.client.script_load(script("charge")[0])
        with self.client.pipeline(transaction=False) as pipe:
            for _ in range(entries):
                self.now_ms += 1
                pipe.evalsha(sha, 3, *KEYS, *map(str, self.arguments()))
            pipe.execute()

    def retried_keys(self) -> list[str]:
        return sorted(field.removeprefix("retried:") for field, _ in self.client.hscan_iter(STATE, "retried:*"))


@pytest.fixture
def scripts(redis_server: RedisServer) -> Iterator[Scripts]:
    with redis.Redis(port=redis_server.port, decode_responses=True) as client:
        client.flushall()
        yield Scripts(client)
        assert immortal(client) == [], "keys without a lifetime"


# -- against a plain sum -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(1, 4))
def test_every_verdict_is_the_sum_of_the_log(redis_server: RedisServer, seed: int) -> None:
    """L3 to L9."""
    with redis.Redis(port=redis_server.port, decode_responses=True) as client:
        expected = RandomScripts(client, seed).run(700)
    assert (
        min(expected[what] for what in ("admitted", "refused", "several admitted", "more", "repeated", "late")) > 2
    ), expected


# -- bounded work ------------------------------------------------------------------------------------------------------


def head_of(scripts: Scripts, view: str) -> str:
    stored = scripts.client.hget(STATE, f"view:{view}")
    return str(stored).split()[2]


def test_no_call_reads_more_than_250_entries_and_the_next_goes_on_there(scripts: Scripts) -> None:
    """L7, L21."""
    scripts.fill(1_250)
    args = scripts.arguments((ALL, 1_250, 1, DAY_MS), (SEARCHES, 1, 1, DAY_MS))
    expected, head = 0, "-"
    while (reply := scripts.run("charge", *args))[0] == "MORE":
        at = head_of(scripts, ALL if expected < 1_250 else SEARCHES)
        expected += len(scripts.client.xrange(LOG, "-" if head == "-" else f"({head}", at))
        head = "-" if expected == 1_250 else at
        assert expected % 250 == 0, "as many more in each part"
        assert scripts.client.pttl(STATE) > 0
    assert (reply[0], reply[7:]) == ("REFUSED", ["1250", "0"])
    assert expected >= 2_250


def test_dropping_is_bounded_too(scripts: Scripts) -> None:
    """L8, L21."""
    scripts.fill(900)
    assert scripts.used() == 900
    scripts.now_ms += DAY_MS - 200
    reply, parts = scripts.to_verdict((ALL, 200, 1, DAY_MS))
    assert (reply[0], reply[7], parts) == ("REFUSED", "200", 3)


def test_a_view_that_has_wholly_expired_is_not_walked(scripts: Scripts) -> None:
    """L6."""
    scripts.fill(3_000)
    assert scripts.used() == 3_000
    scripts.now_ms += DAY_MS
    assert scripts.to_verdict((ALL, 500, 1, DAY_MS))[1] == 1


def test_two_limits_on_one_view_come_to_a_verdict(scripts: Scripts) -> None:
    """The log is just as long as one part; what the first limit has read must not be lost to the second."""
    scripts.fill(250)
    reply, parts = scripts.to_verdict((ALL, 2_000, 1, DAY_MS), (ALL, 251, 1, DAY_MS))
    assert (reply[0], reply[7:]) == ("ADMITTED", ["251", "251"])
    assert parts == 2
    assert scripts.used() == 251


def test_trimming_is_bounded_and_catches_up(scripts: Scripts) -> None:
    """L13."""
    scripts.fill(600)
    scripts.now_ms += MIN_RETENTION_MS + 1
    left = []
    for step_ms in (MINUTE_MS, MINUTE_MS, 1, 1, 1, MINUTE_MS):
        scripts.now_ms += step_ms
        scripts.charge()
        left.append(scripts.client.xlen(LOG))
    expected = [601, 352, 103, 4, 5, 6]
    assert left == expected, (
        "from the second charge on: a clock may be wrong for one; then with each, while there is more"
    )


def test_views_of_limits_that_are_configured_no_more_go_with_the_log(scripts: Scripts) -> None:
    """L23."""
    for n in range(30):
        scripts.charge((f"units|m{n}|*|24h", 10, 1, DAY_MS))
    scripts.now_ms += MIN_RETENTION_MS - 1_000
    scripts.charge((ALL, 10, 1, DAY_MS))
    scripts.now_ms += MINUTE_MS
    scripts.charge((CALLS, 10, 1, DAY_MS))
    assert sorted(field for field in scripts.client.hkeys(STATE) if "|" in field) == [f"view:{ALL}", f"view:{CALLS}"]


# -- what the log no longer has ----------------------------------------------------------------------------------------


def test_a_view_that_idled_while_the_log_was_trimmed_is_exact_again(scripts: Scripts) -> None:
    """What was trimmed can no longer be dropped piece by piece; the log still has all that the window needs."""
    month, retention_ms = ("*|*|*|720h", 10**6, 1, 30 * DAY_MS), 31 * DAY_MS
    for _ in range(30):
        scripts.charge(month, retention_ms=retention_ms)
        scripts.now_ms += DAY_MS
    for _ in range(29):  # others go on
        scripts.charge(retention_ms=retention_ms)
        scripts.now_ms += DAY_MS
    reply, _ = scripts.to_verdict((*month[:2], 0, month[3]), commit=0, retention_ms=retention_ms)
    assert reply[7] == "29"


def test_a_deleted_log_gives_no_budget_back_until_its_charges_would_have_expired(scripts: Scripts) -> None:
    """L14. Evicted or deleted by hand: the sum stands; once the window is past the loss it is the log's again."""
    day = (ALL, 10, 1, DAY_MS)
    for _ in range(7):
        scripts.charge(day)
        scripts.now_ms += HOUR_MS
    scripts.client.delete(LOG)
    for _ in range(3):
        assert scripts.charge(day)[0] == "ADMITTED"
        scripts.now_ms += HOUR_MS
    assert scripts.client.pttl(LOG) > 0
    lost_at_ms = NOW + 6 * HOUR_MS
    while scripts.now_ms < lost_at_ms + DAY_MS:
        assert scripts.charge(day)[0] == "REFUSED"
        scripts.now_ms += HOUR_MS
    assert scripts.used() == 3
    assert scripts.charge(day)[7] == "4"
    scripts.now_ms += HOUR_MS
    assert scripts.used() == 3, "and it drops what expires"


def test_a_log_deleted_within_a_second_has_a_lifetime_at_once(scripts: Scripts) -> None:
    scripts.charge((ALL, 10, 1, DAY_MS))
    scripts.client.delete(LOG)
    scripts.now_ms += 1
    scripts.charge((ALL, 10, 1, DAY_MS))
    assert scripts.client.pttl(LOG) > 0


def test_an_evicted_state_is_made_again_from_the_log(scripts: Scripts) -> None:
    """L14."""
    for _ in range(3):
        scripts.charge((ALL, 10, 1, DAY_MS))
    first = scripts.client.xrange(LOG)[0][0]
    scripts.run("settle", first, 5)
    scripts.client.delete(STATE)
    reply = scripts.charge((ALL, 10, 1, DAY_MS))
    assert (reply[0], reply[7]) == ("ADMITTED", "8")
    assert reply[1] == f"{NOW}-3", "ids go on from the log's last"


def test_a_repayment_after_the_state_was_evicted_stands_behind_the_log(scripts: Scripts) -> None:
    """L14. Also in the millisecond of the newest charge."""
    day = (ALL, 10, 1, DAY_MS)
    scripts.charge(day)
    scripts.client.delete(STATE)
    assert scripts.run("repay", NOW, 0, "m", MIN_RETENTION_MS, 1, 2, "videos.list", "", "", "m1") == 1
    assert [entry_id for entry_id, _ in scripts.client.xrange(LOG)] == [f"{NOW}-0", f"{NOW}-1"]
    assert scripts.charge(day)[7] == "4"


@pytest.mark.parametrize("first", ["charge", "repay", "repair"])
def test_whatever_meets_an_evicted_state_first_makes_it_again(scripts: Scripts, first: str) -> None:
    """L12, L14. Settled charges count as they were settled, and the log is kept as long as before."""
    day, retention_ms = (ALL, 10, 1, DAY_MS), 40 * DAY_MS
    scripts.run("settle", scripts.charge(day, retention_ms=retention_ms)[1], 5)
    scripts.client.delete(STATE)
    match first:
        case "charge":
            scripts.charge(day)
        case "repay":
            scripts.run("repay", NOW, 0, "m", MIN_RETENTION_MS, 1, 1, "videos.list", "", "", "m1")
        case "repair":
            scripts.run("repair", NOW, NOW, "e")
            scripts.charge(day)
    assert scripts.used() == 6
    assert int(scripts.client.hget(STATE, "retention_ms")) > retention_ms - HOUR_MS
    scripts.client.delete(CORRECTIONS)
    assert scripts.used() == 6, "that they are lost is noticed"
    scripts.now_ms += DAY_MS
    assert scripts.used() == 0


def test_a_repair_shortens_no_life(scripts: Scripts) -> None:
    """L12. What the state has of jobs is kept for 35 days (L31)."""
    scripts.charge((ALL, 10, 1, DAY_MS))
    scripts.run("repair", NOW, NOW, "e")
    assert min(scripts.client.pttl(LOG), scripts.client.pttl(STATE)) > 34 * DAY_MS


def test_lost_corrections_give_no_budget_back(scripts: Scripts) -> None:
    """L14. Each refund would be taken off twice: once when it was made, and again when its charge leaves the window."""
    day = (ALL, 10, 1, DAY_MS)
    for number in range(10):
        charge_id = scripts.charge(day)[1]
        if number < 4:
            scripts.run("settle", charge_id, 0)
        scripts.now_ms += HOUR_MS
    assert scripts.used() == 6
    scripts.client.delete(CORRECTIONS)
    scripts.now_ms = NOW + DAY_MS + 3 * HOUR_MS + 1  # the refunded ones have left
    assert scripts.used() == 6
    assert [scripts.charge(day)[0] for _ in range(5)] == ["ADMITTED"] * 4 + ["REFUSED"]
    scripts.now_ms = NOW + DAY_MS + 9 * HOUR_MS - 1
    assert scripts.charge(day)[0] == "REFUSED", "the sum stands until what was lost is out of the window"
    scripts.now_ms += 1
    assert scripts.used() == 4
    charge_id = scripts.charge(day)[1]
    scripts.run("settle", charge_id, 0)
    assert scripts.used() == 4
    scripts.now_ms += DAY_MS
    assert scripts.used() == 0, "and it is exact again"


@pytest.mark.parametrize("units", [0, 1, 3])
def test_a_correction_after_lost_ones_gives_nothing_back_either(scripts: Scripts, units: int) -> None:
    """L14, L15. Nobody knows any more what its charge counted: perhaps nothing."""
    day = (ALL, 10, 1, DAY_MS)
    first = scripts.charge(day)[1]
    scripts.charge(day)
    scripts.run("settle", first, 0)
    scripts.client.delete(CORRECTIONS)
    for _ in range(2):
        scripts.run("settle", first, units)
        assert scripts.used() == 1 + units
    later = scripts.charge(day, attempt="later")[1]
    scripts.now_ms += 1
    newer = scripts.charge(day)[1]
    scripts.run("settle", newer, 0)
    assert scripts.used() == 2 + units
    assert later != newer


def test_corrections_that_were_trimmed_are_not_taken_for_lost_ones(scripts: Scripts) -> None:
    scripts.run("settle", scripts.charge((ALL, 10, 1, DAY_MS))[1], 0)
    assert scripts.client.hget(STATE, "has_corrections") == "1"
    scripts.now_ms += MIN_RETENTION_MS + 1_000
    for _ in range(2):
        scripts.charge((ALL, 10, 1, DAY_MS))
        scripts.now_ms += MINUTE_MS
    assert (scripts.client.hget(STATE, "has_corrections"), scripts.client.exists(CORRECTIONS)) == ("0", 0)
    trimmed_through_ms = scripts.client.hget(STATE, "trimmed_through_ms")
    scripts.now_ms += MINUTE_MS
    scripts.charge((ALL, 10, 1, DAY_MS))
    assert scripts.client.hget(STATE, "trimmed_through_ms") == trimmed_through_ms


def test_an_evicted_state_forgets_no_longer_window(scripts: Scripts) -> None:
    """The log's own lifetime says how long it was to be kept, when others than those who need it come first."""
    month = ("*|*|*|720h", 3, 1, 30 * DAY_MS)
    for _ in range(3):
        scripts.charge(month, retention_ms=31 * DAY_MS)
    scripts.client.delete(STATE)
    for _ in range(4):
        scripts.now_ms += 3 * DAY_MS
        scripts.charge((ALL, 10, 1, DAY_MS))
    assert scripts.charge(month, retention_ms=31 * DAY_MS)[0] == "REFUSED"


LOSSES = [(LOG,), (CORRECTIONS,), (STATE,), (LOG, CORRECTIONS)]


@pytest.mark.parametrize("lost", LOSSES, ids=lambda keys: "+".join(key.split(":")[-1] for key in keys))
@pytest.mark.parametrize("seed", range(5))
def test_whatever_key_is_evicted_no_window_holds_more_than_its_number(
    scripts: Scripts, lost: tuple[str, ...], seed: int
) -> None:
    """Charges, refunds and clocks at random, and every now and then the keys are gone."""
    r = random.Random(seed)
    counted: dict[str, int] = {}
    admitted = 0
    for _ in range(500):
        scripts.now_ms += r.choice((1, 600_000, HOUR_MS, 3 * HOUR_MS))
        units = r.choice((1, 2, 9))
        reply = scripts.to_verdict((ALL, 40, units, DAY_MS), u=units)[0]
        if reply[0] == "ADMITTED":
            admitted += 1
            counted[reply[1]] = units
        window = [i for i in counted if int(i.split("-")[0]) > scripts.now_ms - DAY_MS]
        assert sum(counted[i] for i in window) <= 40
        if window and r.random() < 0.3:
            charge_id = r.choice(window)
            units = r.choice((0, counted[charge_id]))
            if scripts.run("settle", charge_id, units):
                counted[charge_id] = units
        if r.random() < 0.02:
            scripts.client.delete(*lost)
    assert admitted > 100


def test_the_longest_window_ever_asked_for_sets_the_lifetime_even_within_one_second(scripts: Scripts) -> None:
    """L12. Two jobs of one cron minute: the second one's window is longer."""
    scripts.charge((ALL, 10, 1, DAY_MS))
    scripts.charge(("*|*|*|720h", 10, 1, 30 * DAY_MS), retention_ms=31 * DAY_MS)
    scripts.now_ms += 2_000
    scripts.charge((ALL, 10, 1, DAY_MS))
    assert [scripts.client.pttl(key) > 30 * DAY_MS for key in (LOG, STATE)] == [True, True]


# -- never twice -------------------------------------------------------------------------------------------------------


def test_a_repeat_is_answered_with_the_first_charge(scripts: Scripts) -> None:
    """L16."""
    day = (ALL, 10, 1, DAY_MS)
    first = scripts.charge(day, attempt="x")
    scripts.now_ms += 400
    scripts.charge(day)
    again = scripts.charge(day, attempt="x", retry_age_ms=400)
    assert (again[0], again[1], again[7]) == ("ADMITTED", first[1], "2")
    assert scripts.client.xlen(LOG) == 2


def test_the_repeat_of_an_admitted_charge_is_admitted_when_the_budget_is_spent_by_now(scripts: Scripts) -> None:
    day = (ALL, 1, 1, DAY_MS)
    first = scripts.charge(day, attempt="x")
    assert scripts.charge(day, attempt="x", retry_age_ms=5)[:2] == ["ADMITTED", first[1]]


def test_an_original_that_comes_after_its_repeat_charges_nothing(scripts: Scripts) -> None:
    """L16."""
    day = (ALL, 10, 1, DAY_MS)
    assert scripts.charge(day, attempt="x", retry_age_ms=350)[0] == "ADMITTED"
    late = scripts.charge(day, attempt="x")
    assert (late[0], late[1]) == ("RETRIED", "")
    assert scripts.used() == scripts.client.xlen(LOG) == 1


def test_the_original_of_a_refused_repeat_charges_nothing_either(scripts: Scripts) -> None:
    """Its caller was told no and has gone on: room that came since must not be taken by a call nobody waits for."""
    assert scripts.charge((ALL, 0, 1, DAY_MS), attempt="x", retry_age_ms=350)[0] == "REFUSED"
    assert scripts.charge((ALL, 10, 1, DAY_MS), attempt="x")[0] == "RETRIED"
    assert not scripts.client.exists(LOG)


def test_a_retry_in_several_parts_leaves_its_key_with_the_result(scripts: Scripts) -> None:
    scripts.fill(400)
    args = scripts.arguments((ALL, 10**6, 1, DAY_MS), attempt="x", retry_age_ms=350)
    assert scripts.run("charge", *args)[0] == "MORE"
    assert scripts.retried_keys() == []
    assert scripts.run("charge", *args)[0] == "ADMITTED"
    assert scripts.retried_keys() == ["x"]


def test_every_repeat_is_remembered_however_many_there_are(scripts: Scripts) -> None:
    """All originals arrive late, the first of them behind 400 repeats."""
    attempt_keys = [f"r{number}" for number in range(400)]
    for idempotency_key in attempt_keys:
        scripts.now_ms += 1
        assert scripts.charge(attempt=idempotency_key, retry_age_ms=5)[0] == "ADMITTED"
    assert {scripts.charge(attempt=idempotency_key)[0] for idempotency_key in attempt_keys} == {"RETRIED"}
    assert scripts.used() == scripts.client.xlen(LOG) == 400


def test_keys_of_retries_older_than_five_minutes_are_forgotten(scripts: Scripts) -> None:
    """L16, L23."""
    scripts.charge(attempt="old", retry_age_ms=5)
    scripts.now_ms += RETRY_KEPT_MS - 1
    scripts.charge(attempt="young", retry_age_ms=5)
    assert scripts.retried_keys() == ["old", "young"]
    scripts.now_ms += 1
    scripts.charge(attempt="new", retry_age_ms=5)
    assert scripts.retried_keys() == ["new", "young"]
    scripts.now_ms += RETRY_KEPT_MS
    scripts.charge()
    assert scripts.retried_keys() == [], "no repeat is needed for that"


def test_a_clock_that_was_far_ahead_leaves_no_key_of_a_retry_behind(scripts: Scripts) -> None:
    scripts.now_ms += 365 * DAY_MS
    scripts.charge(attempt="ahead", retry_age_ms=5)
    scripts.now_ms = NOW
    scripts.charge()
    assert scripts.retried_keys() == []


def test_housekeeping_is_bounded_and_keeps_up(scripts: Scripts) -> None:
    """L23. 2,000 repeats within a minute: each later minute sweeps a piece of them, and nothing that still counts."""
    sha = scripts.client.script_load(script("charge")[0])
    with scripts.client.pipeline(transaction=False) as pipe:
        for number in range(2_000):
            scripts.now_ms += 20
            words = scripts.arguments(attempt=f"r{number}", retry_age_ms=0)
            pipe.evalsha(sha, 3, *KEYS, *map(str, words))
        pipe.execute()
    assert len(scripts.retried_keys()) == 2_000
    scripts.now_ms += RETRY_KEPT_MS
    scripts.to_verdict((ALL, 10**6, 1, DAY_MS), attempt="kept", retry_age_ms=5)
    left = [len(scripts.retried_keys())]
    while left[-1] > 0:
        scripts.now_ms += MINUTE_MS
        scripts.to_verdict((ALL, 10**6, 1, DAY_MS))
        left.append(len(scripts.retried_keys()))
        assert left[-2] - left[-1] < 600, "a piece at a time"
        assert len(left) < 100
        assert len(left) > 5 or "kept" in scripts.retried_keys(), "for five minutes"


def test_a_repeat_is_found_behind_all_that_came_since(scripts: Scripts) -> None:
    """A hundred charges may come in one step, and thousands before a lost answer is asked for again."""
    day = (ALL, 10**6, 1, DAY_MS)
    first, _ = scripts.to_verdict(day, attempt="x")
    scripts.fill(2_500)
    again, _ = scripts.to_verdict(day, attempt="x", retry_age_ms=2_600)
    assert again[:2] == ["ADMITTED", first[1]]
    assert scripts.client.xlen(LOG) == 2_501


def test_a_repeat_that_itself_comes_late_is_answered_with_the_first_charge(scripts: Scripts) -> None:
    """A server that stands still takes in what is sent to it, and answers when it goes on."""
    day = (ALL, 10, 1, DAY_MS)
    sent_ms = scripts.now_ms
    first = scripts.charge(day, attempt="x", caller_ms=sent_ms)
    scripts.now_ms += 20_000
    again = scripts.charge(day, attempt="x", caller_ms=sent_ms, retry_age_ms=350)
    assert again[:2] == ["ADMITTED", first[1]]
    assert scripts.client.xlen(LOG) == 1


def test_behind_ten_thousand_newer_charges_a_repeat_counts_as_spent_again(scripts: Scripts) -> None:
    """The search is bounded, and in doubt the charge counts."""
    day = (ALL, 10**6, 1, DAY_MS)
    scripts.charge(day, attempt="x")
    scripts.fill(9_999)
    reply, _ = scripts.to_verdict(day, attempt="x", retry_age_ms=15_000)
    assert scripts.client.xlen(LOG) == 10_000, "just within reach"
    scripts.fill(1)
    again, _ = scripts.to_verdict(day, attempt="x", retry_age_ms=15_000)
    assert (again[0], scripts.client.xlen(LOG)) == ("ADMITTED", 10_002)
    assert again[1] != reply[1]


def test_a_repeat_looks_no_further_back_than_its_first_try(scripts: Scripts) -> None:
    """Behind a thousand entries nothing is read that was there before it."""
    scripts.fill(3_000)
    scripts.to_verdict((ALL, 10**6, 1, DAY_MS))
    scripts.client.config_resetstat()
    scripts.charge((ALL, 10**6, 1, DAY_MS), attempt="x", retry_age_ms=5)
    calls = scripts.client.info("commandstats")["cmdstat_xrevrange"]["calls"]
    assert calls == 4, "250 at a time"


def test_a_repeat_looks_no_further_back_than_its_first_try_where_its_caller_had_seen_nothing_for_long(
    scripts: Scripts,
) -> None:
    day = (ALL, 10**6, 1, DAY_MS)
    seen = scripts.charge(day)
    scripts.fill(3_000)
    scripts.to_verdict(day)
    scripts.client.config_resetstat()
    scripts.charge(day, attempt="x", retry_age_ms=5, expected=f"{seen[5]} {seen[1]}")
    assert scripts.client.info("commandstats")["cmdstat_xrevrange"]["calls"] == 4


@pytest.mark.parametrize("arrived", [True, False])
def test_a_repeat_looks_no_further_back_than_what_its_caller_had_seen(scripts: Scripts, arrived: bool) -> None:
    """Where many are repeated at once, they would else hold up the server for longer than it may be silent."""
    day = (ALL, 10**6, 1, DAY_MS)
    scripts.fill(3_000)
    seen, _ = scripts.to_verdict(day)
    expected = f"{seen[5]} {seen[1]}"
    first = scripts.charge(day, attempt="x", expected=expected) if arrived else None
    scripts.now_ms += 100
    scripts.charge(day)
    scripts.client.config_resetstat()
    again = scripts.charge(day, attempt="x", retry_age_ms=5, expected=expected)
    assert (again[0], scripts.client.xlen(LOG)) == ("ADMITTED", 3_003)
    assert first is None or again[1] == first[1]
    assert scripts.client.info("commandstats")["cmdstat_xrevrange"]["calls"] == 1


# -- corrections and exhaustions ---------------------------------------------------------------------------------------


def test_a_correction_needs_the_exact_id(scripts: Scripts) -> None:
    """Redis reads 01-0 as 1-0: a correction under that name would be lost when a view is made again."""
    charge_id = scripts.charge((ALL, 10, 1, DAY_MS))[1]
    for other in (f"0{charge_id}", charge_id.split("-")[0], f"{charge_id}0"):
        assert scripts.run("settle", other, 0) == []
    assert scripts.used() == 1
    assert scripts.run("settle", charge_id, 0)
    assert scripts.used() == 0


def test_a_correction_keeps_every_view_up_to_date_and_takes_nothing_else_for_one(scripts: Scripts) -> None:
    charge_id = scripts.charge((ALL, 10, 1, DAY_MS), (CALLS, 10, 1, DAY_MS))[1]
    scripts.run("exhaust", NOW, "a|b|c|d", f"{NOW + 5} {NOW} x", MIN_RETENTION_MS)
    scripts.run("repay", NOW, 0, "a|b|c|d", MIN_RETENTION_MS, 7, 1, "videos.list", "", "", "m7")
    before = scripts.client.hgetall(STATE)
    scripts.run("settle", charge_id, 3)
    after = scripts.client.hgetall(STATE)
    assert {field for field in after if after[field] != before.get(field)} == {f"view:{ALL}", "has_corrections"}
    assert (scripts.used(), scripts.used(CALLS)) == (4, 2)
    scripts.run("settle", charge_id, 0)
    assert (scripts.used(), scripts.used(CALLS)) == (1, 1)


def test_an_exhaustion_alone_lives_and_ends(scripts: Scripts) -> None:
    scripts.run("exhaust", NOW, "units", f"{NOW + 5} {NOW} x", MIN_RETENTION_MS)
    assert 0 < scripts.client.pttl(STATE) <= MIN_RETENTION_MS
    assert scripts.charge((ALL, 10, 1, DAY_MS))[0] == "EXHAUSTED"
    scripts.now_ms += 5
    assert scripts.charge((ALL, 10, 1, DAY_MS))[0] == "ADMITTED"


def test_an_exhaustion_late_in_the_keys_life_lengthens_it(scripts: Scripts) -> None:
    scripts.charge((ALL, 10, 1, DAY_MS))
    scripts.client.pexpire(STATE, 1_000)
    scripts.run("exhaust", NOW, "units", f"{NOW + HOUR_MS} {NOW} x", MIN_RETENTION_MS)
    assert scripts.client.pttl(STATE) > HOUR_MS


def test_the_longest_of_several_exhaustions_answers(scripts: Scripts) -> None:
    """L9."""
    never = 2**53 - 1
    for bucket, until_ms in (("units", NOW + 5), ("search", never), ("uploads", NOW + 9)):
        scripts.run("exhaust", NOW, bucket, f"{until_ms} {NOW} {bucket}", MIN_RETENTION_MS)
    reply = scripts.charge((ALL, 10, 1, DAY_MS), closed_by="units,search,uploads", jitter_ms=60_000)
    assert (reply[0], reply[4]) == ("EXHAUSTED", f"{never} {NOW} search")


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_sums_are_exact_beyond_32_bits_and_a_moment_before_the_epoch_is_the_epoch(scripts: Scripts) -> None:
    scripts.now_ms = 5_000
    for _ in range(9):
        scripts.charge((ALL, 2**53 - 1, 10**9, DAY_MS), u=10**9)
    first = scripts.client.xrange(LOG)[0][0]
    scripts.run("settle", first, 999_999_999)
    assert scripts.used() == 9 * 10**9 - 1


@pytest.mark.parametrize(
    ("what", "given", "limit"),
    [
        ("now_ms", {"now_ms": "soon"}, ()),
        ("now_ms", {"now_ms": "nan"}, ()),
        ("now_ms", {"now_ms": -1}, ()),
        ("now_ms", {"now_ms": 10**14 + 1}, ()),
        ("caller_ms", {"caller_ms": "inf"}, ()),
        ("retry_age_ms", {"retry_age_ms": "nan"}, ()),
        ("retention_ms", {"retention_ms": 10**14 + 1}, ()),
        ("jitter_ms", {"jitter_ms": "nan"}, ()),
        ("caller_ms", {"caller_ms": "soon"}, ()),
        ("retry_age_ms", {"retry_age_ms": ""}, ()),
        ("jitter_ms", {"jitter_ms": "some"}, ()),
        ("retention_ms", {"retention_ms": "long"}, ()),
        ("retention_ms", {"retention_ms": 0}, ()),
        ("commit", {"commit": "true"}, ()),
        ("u is", {"u": "ten"}, ()),
        ("u is", {"u": -1}, ()),
        ("u is", {"u": "1.5"}, ()),
        ("u is", {"u": ""}, ()),
        ("u is", {"u": 10**9 + 1}, ()),
        ("u is", {"u": "search="}, ()),
        ("idempotency key", {"attempt": ""}, ()),
        ("idempotency key", {"attempt": "a b"}, ()),
        ("idempotency key", {"attempt": "a@1"}, ()),
        ("cap and cost", {}, (ALL, "many", 1, DAY_MS)),
        ("cap and cost", {}, (ALL, 10, "one", DAY_MS)),
        ("cap and cost", {"commit": 0}, (ALL, 10, -1, DAY_MS)),
        ("cap and cost", {}, (ALL, 10, "nan", DAY_MS)),
        ("cap and cost", {}, (ALL, "nan", 1, DAY_MS)),
        ("cap and cost", {}, (ALL, 10, 1, DAY_MS, SEARCHES, 10, "one", DAY_MS)),
        ("the cost of", {"u": 100}, (ALL, 10, 1, DAY_MS)),
        ("the cost of", {"u": 100}, (CALLS, 10, 2, DAY_MS)),
        ("span", {}, (ALL, 10, 1, "24h")),
        ("span", {}, (ALL, 10, 1, "nan")),
        ("span", {}, (ALL, 10, 1, 0)),
        ("span", {}, (ALL, 10, 1, f"{NOW} {NOW + 1}")),
        ("span", {}, (ALL, 10, 1, MIN_RETENTION_MS + 1)),
        ("the view last", {}, ("last", 10, 1, DAY_MS)),
        ("the view repeat:t", {}, ("repeat:t", 10, 1, DAY_MS)),
        ("the view units", {}, ("units|24h", 10, 1, DAY_MS)),
        ("4 for each limit", {}, (ALL, 10, 1)),
    ],
)
def test_arguments_that_cannot_be_right_are_an_error_and_charge_nothing(
    scripts: Scripts, what: str, given: dict[str, object], limit: tuple[object, ...]
) -> None:
    """Nor is anything else written, although a first limit's view has more to read than one call may."""
    scripts.charge((ALL, 10, 1, DAY_MS))
    scripts.fill(1_001)
    before = (scripts.client.xlen(LOG), scripts.client.hgetall(STATE))
    with pytest.raises(redis.ResponseError, match=f"charge.lua: .*{what}"):
        scripts.charge(limit, **given)
    assert (scripts.client.xlen(LOG), scripts.client.hgetall(STATE)) == before


@pytest.mark.parametrize(
    "given",
    [
        {"retention_ms": 1},
        {"retention_ms": 10**14},
        {"now_ms": 10**14},
        {"retry_age_ms": -1},
        {"retry_age_ms": 2**53 - 1},
        {"jitter_ms": 0},
        {"jitter_ms": 2**53 - 1},
        {"u": 10**9},
    ],
)
def test_a_number_at_its_bound_is_right(scripts: Scripts, given: dict[str, int]) -> None:
    view = ("*|*|*|1ms", 10**9, 1, 1) if given.get("retention_ms") == 1 else (ALL, 10**9, given.get("u", 1), DAY_MS)
    assert scripts.charge(view, **given)[0] == "ADMITTED"


def test_what_is_repaid_may_be_kept_for_a_millisecond_and_no_less(scripts: Scripts) -> None:
    with pytest.raises(redis.ResponseError, match=r"repay.lua: now_ms"):
        scripts.run("repay", NOW, 0, "m", 0, 1, 3, "videos.list", "", "", "m1")
    assert scripts.run("repay", NOW, 0, "m", 1, 1, 3, "videos.list", "", "", "m1") == 1


def test_too_few_arguments_are_an_error(scripts: Scripts) -> None:
    for given in ((), ("1",), scripts.arguments()[:11]):
        with pytest.raises(redis.ResponseError, match="13 arguments"):
            scripts.run("charge", *given)


@pytest.mark.parametrize("units", ["", "-1", "1.5", "some"])
def test_a_correction_to_no_number_changes_nothing(scripts: Scripts, units: str) -> None:
    charge_id = scripts.charge((ALL, 10, 1, DAY_MS))[1]
    with pytest.raises(redis.ResponseError, match=r"settle.lua: units"):
        scripts.run("settle", charge_id, units)
    assert scripts.used() == 1


@pytest.mark.parametrize("args", [("x", "units", "1 1 x", 1), (NOW, "units", "soon", 1), (NOW, "units", "1 1 x", 0)])
def test_an_exhaustion_without_an_end_is_an_error(scripts: Scripts, args: tuple[object, ...]) -> None:
    with pytest.raises(redis.ResponseError, match=r"exhaust.lua: now_ms"):
        scripts.run("exhaust", *args)
    assert not scripts.client.exists(STATE)


# -- repaying ----------------------------------------------------------------------------------------------------------


def test_half_a_journal_is_not_appended(scripts: Scripts) -> None:
    """L19, L22."""
    good = (1, 3, "videos.list", "", "", "m1")
    for bad in ((2, "three", "videos.list", "", "", "m2"), (2, 3, "videos.list"), ("two", 3, "a", "", "", "m2")):
        with pytest.raises(redis.ResponseError, match=r"repay.lua: a charge is"):
            scripts.run("repay", NOW, 0, "m", MIN_RETENTION_MS, *good, *bad)
    assert not scripts.client.exists(LOG)
    assert [scripts.run("repay", NOW, 0, "m", MIN_RETENTION_MS, *good) for _ in range(2)] == [1, 0]
    assert scripts.used() == 3


def test_repaying_to_a_deleted_log_gives_no_budget_back_either(scripts: Scripts) -> None:
    """L14, L19."""
    day = (ALL, 10, 1, DAY_MS)
    for _ in range(7):
        scripts.charge(day)
    scripts.client.delete(LOG)
    scripts.now_ms += HOUR_MS
    scripts.run("repay", scripts.now_ms, 0, "m", MIN_RETENTION_MS, 1, 1, "videos.list", "", "", "m1")
    assert scripts.charge(day)[7] == "9"
    scripts.now_ms = NOW + DAY_MS + 30 * 60_000
    assert scripts.used() == 2


# -- arguments that contradict each other ------------------------------------------------------------------------------


def test_a_clock_outside_the_edges_of_a_later_limit_reads_and_writes_nothing(scripts: Scripts) -> None:
    """L11. However much there is to be read for the limits before it."""
    scripts.fill(300)
    before, tomorrow_ms = scripts.client.hgetall(STATE), scripts.now_ms + DAY_MS
    edges = f"{tomorrow_ms} {tomorrow_ms + DAY_MS} {tomorrow_ms + 2 * DAY_MS}"
    assert scripts.charge((ALL, 10**6, 1, DAY_MS), ("units|*|*|day@UTC", 10**6, 1, edges))[0] == "CLOCK"
    assert scripts.client.hgetall(STATE) == before
    assert scripts.to_verdict((ALL, 10**6, 1, DAY_MS))[1] == 2, "300 entries were left to be read"


@pytest.mark.parametrize("charges", [0, 1])
def test_who_saw_a_ledger_before_its_first_charge_expects_nothing(scripts: Scripts, charges: int) -> None:
    """L18. EPOCH and LAST of that reply, passed on as they are."""
    day = (ALL, 10, 1, DAY_MS)
    said = scripts.client.eval(script("charge")[0], 3, *KEYS, *map(str, scripts.arguments(day, commit=0)))
    last, epoch = said.split(" ")[3:5]
    assert (epoch, last) == ("-", "0-0")
    for _ in range(charges):
        scripts.charge(day)
    assert scripts.charge(day, expected=f"{epoch} {last}")[0] == "ADMITTED"


@pytest.mark.parametrize("spans", [(3, DAY_MS), (DAY_MS, 3)])
def test_of_a_view_that_is_named_with_two_windows_what_is_stored_is_true(
    scripts: Scripts, spans: tuple[int, int]
) -> None:
    """L3. No caller should: a view's name has its window. But nobody who shares the view may count wrongly by it."""
    scripts.fill(10)
    assert scripts.used() == 10
    counted = {3: "4", DAY_MS: "11"}
    reply = scripts.charge(*((ALL, 100, 1, span) for span in spans))
    assert reply[7:] == [counted[span] for span in spans]
    total, tail, head, _ = str(scripts.client.hget(STATE, f"view:{ALL}")).split()
    assert int(total) == len(scripts.client.xrange(LOG, tail, head))
    assert head == reply[3]
    assert [scripts.used(span=span) for span in (*spans, *spans)] == [int(counted[span]) for span in (*spans, *spans)]


# -- what is text stays text -------------------------------------------------------------------------------------------


def test_a_refusal_names_the_first_charge_where_all_came_in_one_millisecond(scripts: Scripts) -> None:
    """As charges do that are made together."""
    for _ in range(5):
        scripts.charge((ALL, 5, 1, DAY_MS))
    for cost in range(1, 6):
        reply = scripts.charge((ALL, 5, cost, DAY_MS), u=cost)
        assert (reply[:5], reply[7:]) == (["REFUSED", "", str(NOW), f"{NOW}-4", str(NOW)], ["5"])


def test_a_longer_window_lengthens_all_lives_at_once(scripts: Scripts) -> None:
    limit, retention_ms = (ALL, 10**6, 1, HOUR_MS), 40 * DAY_MS
    for _ in range(2):
        scripts.charge(limit)
    scripts.run("settle", scripts.charge(limit)[1], 0)
    for _ in range(2):
        scripts.charge(limit, retention_ms=retention_ms)
        assert scripts.client.hget(STATE, "retention_ms") == str(retention_ms)
        assert all(scripts.client.pttl(key) > retention_ms - HOUR_MS for key in KEYS)


def test_the_servers_own_clock_is_read_to_the_millisecond(scripts: Scripts) -> None:
    """It tells microseconds without leading zeros."""
    scripts.now_ms = 0
    scripts.charge((ALL, 10, 1, DAY_MS))
    sha = scripts.client.script_load(script("charge")[0])
    words = scripts.arguments((ALL, 10, 0, DAY_MS), commit=0, u=0)
    digits: set[int] = set()
    deadline = time.monotonic() + 20
    while not digits >= {5, 6} and time.monotonic() < deadline:
        with scripts.client.pipeline(transaction=False) as pipe:
            pipe.time()
            pipe.evalsha(sha, 3, *KEYS, *map(str, words))
            pipe.time()
            before, reply, after = pipe.execute()
        now_ms = int(words_of(reply)[2])
        assert before[0] * 1_000 + before[1] // 1_000 <= now_ms <= after[0] * 1_000 + after[1] // 1_000
        digits.add(len(str(before[1])))
    assert digits >= {5, 6}
