"""A window counts all of its charges, however long it is, whoever makes them and by whichever door they come."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pytest
import redis

import quota
from quota.budget import Budget
from quota.common.clock import NEVER, host_clock
from quota.ledger.contract import (
    MIN_RETENTION_MS,
    NOTHING_EXPECTED,
    RETENTION_SLACK_MS,
    ChargeRequest,
    ChargeResult,
    Exhaustion,
    Expected,
    read_entries,
)
from quota.ledger.entry import Charge
from quota.ledger.factory import open_ledger
from quota.ledger.identity import Identity
from quota.ledger.unlogged import UnloggedUsage
from quota.recovery.allowance import Allowance
from quota.reports.status import exact_from
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS, Calendar, Limit, Selector, Sliding, View
from support.books import BOOK
from support.commands import Quota
from support.losses import RedisStorage
from support.setup import limit

if TYPE_CHECKING:
    from pathlib import Path

    from quota.terms.limits import Window
    from support.losses import LedgerStorage
    from support.servers import RedisServer
    from support.setup import Setup

MONTH_MS = 30 * DAY_MS
MONTH = limit(3, MONTH_MS, name="month", methods=("captions.list",), count="calls")
CALENDAR_MONTH = Limit(
    "month", 3, View(Selector(methods=("captions.list",), count="calls"), Calendar("month", "UTC")), 3, 0
)
DAY = limit(10**6)
OWES = Charge(50, "units", "captions.list", "", "", "t")


def month_budget(setup: Setup) -> Budget:
    """As one configuration has it: a window of a month for a dear method beside the day's."""
    return setup.budget(DAY, MONTH)


def day_budget(setup: Setup) -> Budget:
    """As another configuration of the same project has it, which knows of nothing longer than a day."""
    return setup.budget(DAY)


@pytest.mark.parametrize(
    ("narrow", "expected"),
    [(MONTH, [0, 0, 1, 30, 30, 31, 60, 60]), (CALENDAR_MONTH, [0, 0, 1, 30, 30, 31])],
    ids=["sliding", "calendar"],
)
def test_a_month_is_a_month_whatever_is_charged_just_before(setup: Setup, narrow: Limit, expected: list[int]) -> None:
    """The cheap call of each minute comes first, and no window of a month counts it."""
    setup.now_ms = int(datetime(2026, 6, 1, tzinfo=UTC).timestamp() * 1000)
    budget = setup.budget(DAY, narrow)
    admitted = []
    for day in range(61):
        assert budget.charge("videos.list").admitted
        setup.now_ms += 200
        admitted += [day for _ in range(2) if budget.charge("captions.list").admitted]
        setup.now_ms += DAY_MS - 200
    assert admitted == expected


def test_a_month_used_up_in_an_outage_stays_used_up(setup: Setup, tmp_path: Path) -> None:
    """What is repaid counts like what was charged. The days after bring only calls that the month does not count."""
    allowance = Allowance(str(tmp_path / "allowance.db"), 50, 150, lambda: setup.now_ms)
    budget = setup.budget(DAY, MONTH, allowance=allowance)
    (tmp_path / "no-folder").touch()
    away = open_ledger(f"sqlite:///{tmp_path}/no-folder/ledger.db")
    cut_off = Budget(
        credential="main",
        project=setup.project,
        book=BOOK,
        limits=budget.limits,
        ledger=away,
        clock=lambda: setup.now_ms,
        allowance=allowance,
    )
    assert [cut_off.charge("captions.list").source for _ in range(4)] == ["allowance"] * 3 + [None]
    for _ in range(29):
        assert budget.charge("videos.list").admitted
        assert not budget.charge("captions.list").admitted
        setup.now_ms += DAY_MS
    setup.now_ms += DAY_MS
    assert budget.charge("captions.list").admitted
    allowance.close()


# -- every door through which something is written ---------------------------------------------------------------------


def _charged(setup: Setup) -> None:
    assert month_budget(setup).charge("captions.list").admitted


def _charged_for_another(setup: Setup) -> None:
    """A call that the long window does not count, and before it three that it does, of a caller who knows no month."""
    for _ in range(3):
        assert day_budget(setup).charge("captions.list").admitted
    assert month_budget(setup).charge("videos.list").admitted


def _refused(setup: Setup) -> None:
    for _ in range(3):
        assert day_budget(setup).charge("captions.list").admitted
    assert month_budget(setup).charge("captions.list").reason == "limit"


def _exhausted(setup: Setup) -> None:
    assert day_budget(setup).charge("captions.list").admitted
    said = Exhaustion("units", setup.now_ms, setup.now_ms + HOUR_MS, "no more", "the test")
    setup.ledger.exhaust(setup.project, said)
    assert month_budget(setup).charge("captions.list").reason == "exhausted"


def _repaid(setup: Setup) -> None:
    setup.ledger.repay(setup.project, "m", [(1, OWES)], month_budget(setup)._account.retention_ms)


def _repaid_to_a_log_in_use(setup: Setup) -> None:
    assert day_budget(setup).charge("videos.list").admitted
    _repaid(setup)


def _unlogged(setup: Setup) -> None:
    assert day_budget(setup).charge("captions.list").admitted
    lost = UnloggedUsage(DAY.view.name, "lost", ((5, setup.now_ms + DAY_MS),), (1, 1))
    setup.ledger.add_unlogged(setup.project, "e", [lost], month_budget(setup)._account.retention_ms)


def _unlogged_again(setup: Setup) -> None:
    """Another machine reports the same loss: there is nothing new in it but how long its windows are."""
    assert day_budget(setup).charge("captions.list").admitted
    lost = UnloggedUsage(DAY.view.name, "lost", ((5, setup.now_ms + DAY_MS),), (1, 1))
    setup.ledger.add_unlogged(setup.project, "e1", [lost])
    setup.ledger.add_unlogged(setup.project, "e2", [lost], month_budget(setup)._account.retention_ms)


def _settled(setup: Setup) -> None:
    """A correction of a charge whose log lives longer than it did when that was made."""
    made = day_budget(setup).charge("captions.list")
    month_budget(setup).charge("captions.list")
    day_budget(setup).refund(str(made.id))


def _settled_before(setup: Setup) -> None:
    """What is corrected first, and kept for longer only then by a charge, or by one that is repaid."""
    made = day_budget(setup).charge("captions.list")
    day_budget(setup).refund(str(made.id))
    _repaid(setup)


DOORS = {
    _charged: 1,
    _charged_for_another: 3,
    _refused: 3,
    _exhausted: 1,
    _repaid: 1,
    _repaid_to_a_log_in_use: 1,
    _unlogged: 1,
    _unlogged_again: 1,
    _settled: 1,
    _settled_before: 1,
}


@pytest.mark.parametrize("write", DOORS, ids=lambda write: write.__name__.strip("_"))
def test_whatever_is_written_names_the_longest_window(setup: Setup, write: Any, ledger_place: LedgerStorage) -> None:
    """L12. Then a month of another configuration's cheap calls, after which all that the month counts is there."""
    write(setup)
    if isinstance(ledger_place, RedisStorage):
        with ledger_place.open() as client:
            names = ("log", "state", "corrections")
            log, state, corrections = (client.pttl(f"quota:{{{setup.project}}}:{name}") for name in names)
            assert state > MONTH_MS + DAY_MS
            assert log > MONTH_MS + DAY_MS
            assert state >= log - SECOND_MS
            assert corrections == -2 or corrections >= log - SECOND_MS
    for _ in range(29):
        setup.now_ms += DAY_MS
        assert day_budget(setup).charge("videos.list").admitted
    assert month_budget(setup).usage()[1].used_units == DOORS[write]
    assert setup.ledger.whole_after_ms(setup.project) == 0


def test_an_entry_that_was_trimmed_is_not_missed(setup: Setup) -> None:
    """L18. Who returns after days expects an entry that the ledger has rightly trimmed; a newer one is missed."""

    def decide(expected: Expected, commit: bool = False) -> ChargeResult:
        charge = Charge(1, "units", "videos.list", "", "", "k")
        request = ChargeRequest(setup.project, charge, (), (), setup.now_ms, expected=expected)
        return setup.ledger.decide(request, commit=commit)

    first = decide(NOTHING_EXPECTED, commit=True)
    for _ in range(60):
        setup.now_ms += HOUR_MS
        last = decide(NOTHING_EXPECTED, commit=True)
    assert setup.ledger.whole_after_ms(setup.project) >= first.last[0]
    assert decide(Expected(first.epoch, (first.last,))).outcome == "admitted"
    missing = (last.last[0] - 1, 0)
    assert decide(Expected(first.epoch, (first.last, missing))).outcome == "behind"


def test_the_keys_live_as_long_as_unlogged_usage_counts(redis_server: RedisServer) -> None:
    """L12, L17. A machine reports what it saw of a limit that is configured no more; the others go on charging."""
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
        ledger = open_ledger(redis_server.url)
        budget = Budget(credential="main", project="p", book=BOOK, limits=(DAY,), ledger=ledger)
        until_ms = ledger.now_ms() + MONTH_MS
        ledger.add_unlogged("p", "e", [UnloggedUsage(MONTH.view.name, "lost", ((3, until_ms),), (1, 1))])
        assert budget.charge("videos.list").admitted
        assert client.pttl("quota:{p}:state") > MONTH_MS
        ledger.close()
        client.flushall()


def test_a_machines_draws_are_kept_for_the_longest_window_of_all_its_configurations(tmp_path: Path) -> None:
    """Two configurations of one project on one machine have one journal."""
    now_ms = 1_793_000_000_000
    allowance = Allowance(str(tmp_path / "allowance.db"), 50, 150, lambda: now_ms)
    for _ in range(2):
        assert allowance.draw(Identity("", "p"), [OWES], MONTH_MS, commit=True) is not None
    for _ in range(9):
        now_ms += 3 * DAY_MS
        assert allowance.draw(Identity("", "p"), [OWES], DAY_MS, commit=True) is not None
    assert allowance.draw(Identity("", "p"), [OWES], MONTH_MS, commit=True) is None
    assert allowance.owed_units(Identity("", "p")) == 11 * 50
    allowance.close()


# -- a longer window that joins later ----------------------------------------------------------------------------------


def test_a_longer_window_that_joins_later_starts_with_what_is_there(setup: Setup) -> None:
    for _ in range(10):
        assert day_budget(setup).charge("captions.list").admitted
        setup.now_ms += DAY_MS
    whole_after_ms = setup.ledger.whole_after_ms(setup.project)
    assert setup.now_ms - MIN_RETENTION_MS - 3 * DAY_MS <= whole_after_ms < setup.now_ms - MIN_RETENTION_MS
    here = [e for e in read_entries(setup.ledger, setup.project, 0, NEVER) if e.ms > whole_after_ms]
    assert [state.used_units for state in month_budget(setup).usage()] == [0, len(here)]
    assert not month_budget(setup).charge("captions.list").admitted
    for _ in range(25):
        setup.now_ms += DAY_MS
        assert day_budget(setup).charge("videos.list").admitted
    assert setup.ledger.whole_after_ms(setup.project) == whole_after_ms, "nothing was let go of since"
    setup.now_ms += MONTH_MS + RETENTION_SLACK_MS
    for _ in range(2):
        assert setup.ledger.whole_after_ms(setup.project) == whole_after_ms, "the clock may be wrong this once"
        day_budget(setup).charge("videos.list")
        setup.now_ms += MINUTE_MS
    assert setup.ledger.whole_after_ms(setup.project) > whole_after_ms


CONFIGURATION = """
[ledger]
url = "{url}"
[credentials.main]
api = "youtube-v3"
project = "joined"
key = "env:KEY"
[[credentials.main.limits]]
name = "day"
units = 9_500
window = "24h"
"""
LONGER = """
[[credentials.main.limits]]
name = "month"
units = 100_000
window = "30d"
[[credentials.main.limits]]
name = "calendar"
units = 100_000
window = { calendar = "month", zone = "Pacific/Kiritimati" }
"""


def test_status_and_doctor_say_since_when_a_window_counts(ledger_url: str, tmp_path: Path) -> None:
    """A configuration with only a day's window charges for some weeks, then longer windows join."""
    command = Quota(tmp_path)
    text = CONFIGURATION.replace("{url}", ledger_url)
    path = command.configure(text)
    now_ms = host_clock()
    at_ms = 0
    with quota.open(path, clock=lambda: at_ms) as session:
        for offset_ms in range(-30 * DAY_MS, 0, DAY_MS):
            at_ms = now_ms + offset_ms
            assert session.budget().charge("videos.list").admitted
    (day,) = command.json("status")["credentials"][0]["limits"]
    assert "counts_since" not in day
    assert "counts since" not in command("doctor", KEY="k").stdout

    command.configure(text + LONGER)
    day, month, calendar = command.json("status")["credentials"][0]["limits"]
    assert "counts_since" not in day
    since = datetime.fromisoformat(month["counts_since"])
    assert now_ms - 6 * DAY_MS < since.timestamp() * 1000 < now_ms - 2 * DAY_MS
    assert datetime.fromisoformat(month["exact_from"]) - since == timedelta(days=30)
    began = datetime.fromtimestamp(now_ms / 1000, ZoneInfo("Pacific/Kiritimati")).replace(
        day=1, hour=0, minute=0, second=0, microsecond=0
    )
    if since >= began:
        edge = (began + timedelta(days=32)).replace(day=1)
        assert datetime.fromisoformat(calendar["exact_from"]) == edge
    else:
        assert "exact_from" not in calendar
    shown = " ".join(command("status").stdout.split())
    assert f"month: counts since {since.astimezone():%a %d %b %H:%M}, exact from " in shown
    assert "day: counts since" not in shown
    findings = [f for f in command.json("doctor", KEY="k")["findings"] if "counts since" in f["message"]]
    locations = ["limit month"] + ["limit calendar"] * (since >= began)
    assert [(f["level"], f["location"]) for f in findings] == [("warning", location) for location in locations]
    assert f"counts since {month['counts_since']}, exact from" in findings[0]["message"]


def test_check_makes_no_ledger(tmp_path: Path) -> None:
    command = Quota(tmp_path)
    command.configure(CONFIGURATION.replace("{url}", f"sqlite:///{tmp_path}/ledger.db"))
    assert command("check", KEY="k").returncode == 0
    assert not (tmp_path / "ledger.db").exists()


@pytest.mark.parametrize(
    ("window", "since", "at", "exact"),
    [
        (Sliding(10), 0, 100, None),
        (Sliding(10), 89, 100, None),
        (Sliding(10), 90, 100, None),
        (Sliding(10), 91, 100, 101),
        (Calendar("hour", "UTC"), HOUR_MS - 1, HOUR_MS, None),
        (Calendar("hour", "UTC"), HOUR_MS, HOUR_MS, 2 * HOUR_MS),
        # the clock was set back
        (Calendar("hour", "UTC"), 3 * HOUR_MS, HOUR_MS, 4 * HOUR_MS),
    ],
)
def test_a_window_is_exact_from_the_first_moment_at_which_the_log_reaches_back_over_it(
    window: Window, since: int, at: int, exact: int | None
) -> None:
    """A charge at the time up to which the log was trimmed may be missing; it counts until one window later."""
    assert exact_from(window, since, at) == exact
