"""After a clock that was wrong: `Ledger.repair` dates from now on what is dated ahead of now (L26)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import redis

from quota.common.clock import NEVER
from quota.ledger.contract import CLOCK_SLACK_MS, MAX_REPAIRS, Exhaustion, Repair, read_entries, repaired_ms_of, root_of
from quota.ledger.entry import Entry
from quota.ledger.unlogged import UnloggedUsage
from quota.terms.limits import DAY_MS, HOUR_MS, Calendar, Limit, Selector, Sliding, View
from support.proxy import Proxy
from support.servers import immortal
from support.setup import NOW_MS, Setup, limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from quota.terms.limits import Window
    from support.servers import RedisServer

YEAR_MS = 365 * DAY_MS
DAY = limit(9_500)
PACIFIC = Limit("pacific", 9_500, View(Selector(buckets=("units",)), Calendar("day", "America/Los_Angeles")), 9_500, 0)


def used(setup: Setup, *limits: Limit) -> list[int]:
    return [state.used_units for state in setup.budget(*(limits or (DAY,))).usage()]


def log(setup: Setup) -> list[Entry]:
    return list(read_entries(setup.ledger, setup.project, 0, NEVER))


def spend(setup: Setup, *units: int, at_ms: int | None = None) -> list[str]:
    """Charges made while the clocks, both, read `at_ms`; then they are set back."""
    before, setup.now_ms = setup.now_ms, setup.now_ms if at_ms is None else at_ms
    ids = [str(setup.budget(limit(10**6)).charge("videos.list", units=n, job="j").id) for n in units]
    setup.now_ms = before
    return ids


def repair(setup: Setup) -> str:
    epoch = setup.ledger.repair(setup.project, f"r{setup.now_ms}", setup.now_ms)
    assert epoch is not None
    return epoch


def test_one_charge_a_year_ahead(setup: Setup) -> None:
    """It counts until its time, and all that follows is dated behind it. Repaired, it counts for a day from now."""
    spend(setup, 100, at_ms=NOW_MS + YEAR_MS)
    budget = setup.budget(DAY, PACIFIC)
    assert len([n for n in range(95) if budget.charge("search.list").admitted]) == 94
    setup.now_ms += 300 * DAY_MS
    assert not budget.charge("search.list").admitted, "it would be closed for a year"
    setup.now_ms = NOW_MS + HOUR_MS
    epoch = repair(setup)
    assert [(entry.ms, entry.seq) for entry in log(setup)] == [(setup.now_ms, n) for n in range(95)]
    assert used(setup, DAY, PACIFIC) == [9_500, 9_500]
    assert budget.charge("search.list").retry_at_ms == setup.now_ms + DAY_MS
    setup.now_ms += DAY_MS
    assert budget.charge("search.list").admitted
    assert repaired_ms_of(epoch) == NOW_MS + HOUR_MS


@pytest.mark.topology
def test_only_what_is_ahead_gets_another_id_and_keeps_its_order_and_its_correction(setup: Setup) -> None:
    before = spend(setup, 1, 2)
    setup.now_ms += 1_000
    ahead = spend(setup, 3, 4, 5, at_ms=NOW_MS + 40 * DAY_MS)
    for charge_id, units in ((before[0], 7), (ahead[1], 0), (ahead[2], 9)):
        setup.ledger.settle(setup.project, charge_id, units, [])
    sound = log(setup)[:2]
    keys = [entry.idempotency_key for entry in log(setup)]
    newest = (log(setup)[-1].ms, log(setup)[-1].seq)
    repair(setup)
    repaired = log(setup)
    assert repaired[:2] == sound
    assert [entry.idempotency_key for entry in repaired] == keys
    assert [(entry.units, entry.charged_units) for entry in repaired] == [(7, 1), (2, 2), (3, 3), (0, 4), (9, 5)]
    assert [(entry.ms, entry.seq) for entry in repaired[2:]] == [(setup.now_ms, n) for n in range(3)]
    assert used(setup) == [21]
    assert setup.ledger.repairs(setup.project) == [Repair(newest, setup.now_ms, setup.now_ms, (setup.now_ms, 2))]
    assert setup.ledger.settle(setup.project, repaired[3].id, 4, []) is not None
    assert used(setup) == [25]
    assert setup.ledger.settle(setup.project, ahead[0], 0, []) is None, "its id is gone"


def test_the_new_epoch_has_the_same_root_and_says_when(setup: Setup) -> None:
    spend(setup, 1)
    view = DAY.view.name
    first = setup.ledger.add_unlogged(setup.project, "e2", [UnloggedUsage(view, "e1", ((5, NOW_MS + 9),), (1, 0))])
    repaired = repair(setup)
    assert (root_of(repaired), repaired_ms_of(repaired)) == (root_of(first), NOW_MS)
    later = setup.ledger.add_unlogged(setup.project, "e3", [UnloggedUsage(view, "e1", ((6, NOW_MS + 9),), (1, 1))])
    assert later == f"{root_of(first)}/e3@{NOW_MS}", "a loss after it is a loss of the repaired ledger"


def test_what_is_not_in_the_log_and_lies_ahead_is_mended_too(setup: Setup) -> None:
    """Unlogged usage counts for a window from now at most; what upstream said later than now is not so."""
    ahead_ms, view = NOW_MS + YEAR_MS, DAY.view.name
    soon = UnloggedUsage(PACIFIC.view.name, "e1", ((2, NOW_MS + HOUR_MS),), (NOW_MS, 0))
    setup.ledger.add_unlogged(
        setup.project, "e2", [UnloggedUsage(view, "e1", ((3, NOW_MS + HOUR_MS), (4, ahead_ms)), (ahead_ms, 0)), soon]
    )
    setup.ledger.exhaust(setup.project, Exhaustion("units", ahead_ms, ahead_ms + HOUR_MS, "said so", "test"))
    setup.ledger.exhaust(setup.project, Exhaustion("search", NOW_MS, NOW_MS + HOUR_MS, "said so", "test"))
    found = setup.ledger.ahead(setup.project)
    assert (found.unlogged_units, found.exhaustions, found.found) == (4, 1, True)
    repair(setup)
    assert not setup.ledger.ahead(setup.project).found
    assert [x.bucket for x in setup.ledger.notes(setup.project).exhaustions] == ["search"]
    assert used(setup, DAY, PACIFIC) == [7, 2]
    setup.now_ms = NOW_MS + HOUR_MS
    assert used(setup, DAY, PACIFIC) == [4, 0]
    setup.now_ms = NOW_MS + DAY_MS
    assert used(setup, DAY, PACIFIC) == [0, 0]


@pytest.mark.parametrize(
    "window",
    [
        Calendar("quarter-hour", "UTC"),
        Calendar("hour", "UTC"),
        Calendar("week", "UTC"),
        Calendar("week", "Asia/Tokyo", starts="sunday"),
        Calendar("month", "UTC"),
        Calendar("month", "UTC", 15),
        Sliding(90_000),
    ],
    ids=lambda window: window.name,
)
def test_unlogged_usage_of_any_window_then_counts_for_its_length_at_most(setup: Setup, window: Window) -> None:
    one = Limit("one", 9, View(Selector(buckets=("units",)), window), 9, 0)
    expiries = ((3, NOW_MS + YEAR_MS),)
    spend(setup, 1)
    usage = UnloggedUsage(one.view.name, "e1", expiries, (NOW_MS + YEAR_MS, 0))
    setup.ledger.add_unlogged(setup.project, "e2", [usage])
    repair(setup)
    for setup.now_ms, units in ((NOW_MS + window.longest_ms - 1, 3), (NOW_MS + window.longest_ms, 0)):
        (state,) = setup.budget(one).usage()
        assert state.unlogged_units == units


@pytest.mark.parametrize("apart_ms", [CLOCK_SLACK_MS + 1, -CLOCK_SLACK_MS - 1, YEAR_MS, -YEAR_MS])
def test_while_the_clocks_disagree_nothing_is_done(setup: Setup, apart_ms: int) -> None:
    spend(setup, 1, at_ms=NOW_MS + YEAR_MS)
    before = log(setup)
    assert setup.ledger.repair(setup.project, "r1", NOW_MS + apart_ms) is None
    assert (log(setup), setup.ledger.repairs(setup.project)) == (before, [])
    assert setup.ledger.repair(setup.project, "r1", NOW_MS + CLOCK_SLACK_MS) is not None


def test_an_empty_ledger_gets_the_mark_too(setup: Setup) -> None:
    epoch = repair(setup)
    assert setup.ledger.repairs(setup.project) == [Repair((0, 0), NOW_MS, NOW_MS, (0, 0))]
    assert setup.budget(DAY).charge("videos.list").admitted
    assert setup.budget(DAY).ledger.add_unlogged(setup.project, "e2", []) == epoch


def test_only_the_last_marks_are_kept(setup: Setup) -> None:
    spend(setup, 1)
    for _ in range(MAX_REPAIRS + 2):
        setup.now_ms += 1_000
        repair(setup)
    kept = [mark.at_ms for mark in setup.ledger.repairs(setup.project)]
    assert kept == [NOW_MS + n * 1_000 for n in range(3, MAX_REPAIRS + 3)]
    assert used(setup) == [1]


def test_repaired_twice_changes_nothing_more(setup: Setup) -> None:
    spend(setup, 1, 2, at_ms=NOW_MS + YEAR_MS)
    repair(setup)
    before = log(setup)
    setup.now_ms += 1
    repair(setup)
    assert log(setup) == before
    assert used(setup) == [3]


# -- on Redis, a piece at a time ---------------------------------------------------------------------------------------


@dataclass
class Pieces:
    """A ledger on Redis whose repair is called piece by piece; between two pieces something happens."""

    setup: Setup
    client: redis.Redis
    between: list[Callable[[int], Any]] = field(default_factory=list)

    def keys(self, name: str) -> list[str]:
        return sorted(self.client.keys(f"quota:{{{self.setup.project}}}:{name}"))

    def run(self) -> int:
        """To its end; returns how many calls it took."""
        ledger: Any = self.setup.ledger
        calls, now = 0, ledger._now
        here = True

        def counted() -> Any:  # what every call of a script begins with
            nonlocal calls, here
            if here:
                here = False
                calls += 1
                for happen in self.between:
                    happen(calls)
                here = True
            return now()

        ledger._now = counted
        try:
            repair(self.setup)
        finally:
            ledger._now = now
        return calls

    @property
    def seen(self) -> list[int]:
        return [entry.units for entry in log(self.setup)]


@pytest.fixture
def pieces(redis_server: RedisServer) -> Iterator[Pieces]:
    with redis.Redis(port=redis_server.port, decode_responses=True) as client:
        client.flushall()
        setup = Setup.open(redis_server.url)
        yield Pieces(setup, client)
        assert immortal(client) == [], "keys without a lifetime"
        setup.ledger.close()


def test_a_long_log_is_copied_in_pieces_and_what_is_charged_meanwhile_is_not_lost(pieces: Pieces) -> None:
    setup = pieces.setup
    spend(setup, *[1] * 300)
    spend(setup, *[2] * 400, at_ms=NOW_MS + YEAR_MS)
    setup.now_ms += HOUR_MS
    keys = {entry.idempotency_key for entry in log(setup)}

    def charge(call: int) -> None:
        setup.now_ms += 1_000
        spend(setup, *[4] * 100 if call < 4 else [4])

    pieces.between = [charge]
    assert pieces.run() == 5
    assert pieces.seen == [1] * 300 + [2] * 400 + [4] * 302
    assert keys <= {entry.idempotency_key for entry in log(setup)}
    assert all(entry.ms == NOW_MS for entry in log(setup)[:300])
    assert all(setup.now_ms - 10_000 <= entry.ms <= setup.now_ms for entry in log(setup)[300:])
    assert used(setup) == [300 + 800 + 4 * 302]
    assert pieces.keys("repair*") == []


def test_no_charge_counts_for_a_shorter_time_than_if_it_were_made_when_it_was(pieces: Pieces) -> None:
    """What is copied late is dated late: a charge made during a repair does not expire before its time."""
    setup = pieces.setup
    spend(setup, *[1] * 249, at_ms=NOW_MS + YEAR_MS)
    made: list[int] = []

    def charge(call: int) -> None:
        setup.now_ms += 1_000
        made.append(setup.now_ms)
        spend(setup, call + 1)

    pieces.between = [charge]
    assert pieces.run() == 2
    dated = {entry.units: entry.ms for entry in log(setup)}
    assert [dated[units] for units in (1, 2, 3)] == [made[0], made[0], made[1]]


@pytest.mark.parametrize("stopped_after", [1, 2, 3])
@pytest.mark.parametrize("later_ms", [0, HOUR_MS])
def test_a_repair_that_was_stopped_is_finished_by_the_next_one(
    pieces: Pieces, stopped_after: int, later_ms: int
) -> None:
    """At any step, and whenever; the copy may have been lost meanwhile."""
    setup = pieces.setup
    spend(setup, *[1] * 200)
    charged = spend(setup, *[2] * 600, at_ms=NOW_MS + YEAR_MS)
    setup.ledger.settle(setup.project, charged[-1], 5, [])

    def stop(call: int) -> None:
        if call > stopped_after:
            raise KeyboardInterrupt

    pieces.between = [stop]
    with pytest.raises(KeyboardInterrupt):
        pieces.run()
    assert pieces.keys("repair*") != []
    assert used(setup) == [200 + 1_200 + 3]
    pieces.between = []
    setup.now_ms += later_ms
    spend(setup, 7)
    if stopped_after == 2:
        pieces.client.delete(*pieces.keys("repair*"))
    repair(setup)
    assert pieces.keys("repair*") == []
    assert pieces.seen == [1] * 200 + [2] * 599 + [5, 7]
    assert all(entry.ms <= setup.now_ms for entry in log(setup))
    assert setup.ledger.ahead(setup.project).found is False


def test_a_repair_whose_answer_is_lost_is_made_once(redis_server: RedisServer) -> None:
    with Proxy(redis_server.port) as proxy:
        setup = Setup.open(proxy.url)
        repair(setup)  # from now on the server knows the script
        setup.now_ms += HOUR_MS
        spend(setup, 1, at_ms=NOW_MS + YEAR_MS)
        proxy.fail("drop-reply", match=b":repair:")
        asked = proxy.requests
        repair(setup)
        assert (proxy.requests - asked, len(setup.ledger.repairs(setup.project))) == (2, 2)
        setup.ledger.close()


@pytest.mark.parametrize(("number", "calls"), [(100, 5), (550, 3)])
def test_a_charge_that_is_settled_meanwhile_keeps_its_correction(pieces: Pieces, number: int, calls: int) -> None:
    """One that is copied already begins the copy anew; one that is not yet is copied as it is."""
    setup = pieces.setup
    charged = spend(setup, *[2] * 600, at_ms=NOW_MS + YEAR_MS)

    def settle(call: int) -> None:
        if call == 3:
            assert setup.ledger.settle(setup.project, charged[number], 9, []) is not None

    pieces.between = [settle]
    assert pieces.run() == calls
    assert pieces.seen == [2] * number + [9] + [2] * (599 - number)
    assert used(setup) == [1_207]


def test_two_repairs_at_once_are_one_copy(pieces: Pieces) -> None:
    setup = pieces.setup
    spend(setup, *[1] * 900, at_ms=NOW_MS + YEAR_MS)
    others: list[str | None] = []

    def another(call: int) -> None:
        if call == 2:
            others.append(setup.ledger.repair(setup.project, "other", setup.now_ms))

    pieces.between = [another]
    pieces.run()
    assert pieces.seen == [1] * 900
    assert used(setup) == [900]
    assert len(setup.ledger.repairs(setup.project)) == 2


def test_flushed_in_the_middle_it_mends_what_is_there_then(pieces: Pieces) -> None:
    setup = pieces.setup
    spend(setup, *[1] * 600, at_ms=NOW_MS + YEAR_MS)

    def flush(call: int) -> None:
        if call == 2:
            pieces.client.delete(*pieces.keys("log"), *pieces.keys("state"), *pieces.keys("corrections"))
            spend(setup, 5)

    pieces.between = [flush]
    pieces.run()
    assert pieces.seen == [5]
    assert (used(setup), pieces.keys("repair*")) == ([5], [])


@pytest.mark.parametrize("charged_since", [0, 3])
def test_where_the_log_was_lost_what_the_views_know_stands(pieces: Pieces, charged_since: int) -> None:
    """L14: a log that was evicted is not counted again from what is left of it."""
    setup = pieces.setup
    spend(setup, 100)
    setup.now_ms += HOUR_MS
    spend(setup, 200, at_ms=NOW_MS + 30 * HOUR_MS)
    assert used(setup) == [300]
    budget = setup.budget(DAY)
    assert budget.charge("videos.list").admitted
    pieces.client.delete(*pieces.keys("log"))
    for _ in range(charged_since):
        assert budget.charge("videos.list").admitted
    repair(setup)
    assert used(setup) == [301 + charged_since]
    assert budget.charge("videos.list").limits[0].used_units == 302 + charged_since
    assert log(setup)[-1].ms == setup.now_ms
    setup.now_ms += DAY_MS + 1
    assert used(setup) == [0]


@pytest.mark.parametrize("again_ms", [NOW_MS + 24 * HOUR_MS, NOW_MS + YEAR_MS])
def test_what_clocks_ahead_let_expire_counts_again_although_they_had_the_log_trimmed(
    setup: Setup, again_ms: int
) -> None:
    """The views were begun after what was trimmed: they know no more than the log."""
    spend(setup, 100)
    setup.now_ms += 1_000
    spend(setup, 200, at_ms=NOW_MS + 3 * DAY_MS)
    spend(setup, 400, at_ms=NOW_MS + 2 * YEAR_MS)
    repair(setup)
    kept = sum(entry.units for entry in log(setup))
    assert kept >= 600
    assert used(setup) == [kept]
    setup.now_ms += HOUR_MS
    spend(setup, 800, at_ms=again_ms)
    repair(setup)
    assert used(setup) == [kept + 800]


def test_a_call_copies_a_bounded_number_of_entries(pieces: Pieces) -> None:
    """20,000 entries in one call would stop the server for a third of a second."""
    setup = pieces.setup
    spend(setup, *[1] * 1_001, at_ms=NOW_MS + YEAR_MS)
    pieces.client.config_resetstat()
    copied: list[int] = []
    pieces.between = [
        lambda call: copied.append(int(pieces.client.info("commandstats")["cmdstat_xadd"]["calls"]) if call > 1 else 0)
    ]
    assert pieces.run() == 5
    assert copied == [0, 251, 502, 753, 1_004], "each call also tries once whether it may"
