"""What a process tells its ledger beside its decisions: refusals, and that an hour is over (L29, L30)."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest
import redis

from quota.deciding import recorder
from quota.deciding.recorder import ATTEND_EVERY_MS, KEPT, Recorder, refusal_text
from quota.errors import LedgerError
from quota.ledger.contract import Exhaustion
from quota.ledger.factory import open_ledger
from quota.ledger.history import MAX_REFUSAL_BYTES
from quota.session import Session
from quota.settings.load import load_settings
from quota.terms.limits import HOUR_MS, SECOND_MS
from support.processes import in_child
from support.proxy import Proxy
from support.setup import Setup, limit

if TYPE_CHECKING:
    from pathlib import Path

    from quota.budget import Budget
    from support.servers import RedisServer


def recorded(setup: Setup, *limits: object, **more: object) -> tuple[Budget, Recorder]:
    recorder = Recorder(setup.ledger, setup.project, lambda: setup.now_ms)
    return setup.budget(*limits, recorder=recorder, **more), recorder  # type: ignore[arg-type]


def counted(setup: Setup) -> list[tuple[str, str, str, int]]:
    history = setup.ledger.history(setup.project, 0, setup.now_ms)
    return sorted((one.limit, one.job, one.reason, one.calls) for one in history.refused)


def test_refusals_are_kept_and_handed_over_with_an_answer_ten_seconds_later(setup: Setup) -> None:
    budget, _ = recorded(setup, limit(2), limit(1, name="searches", methods=("search.list",)))
    budget.charge("videos.list", units=2)
    for job in ("a", "b", "a"):
        assert not budget.charge("videos.list", job=job, region="DE").admitted
    assert not budget.peek("videos.list").admitted, "a question, not a refusal"
    assert counted(setup) == []
    setup.now_ms += ATTEND_EVERY_MS - 1
    budget.peek("videos.list")
    assert counted(setup) == []
    setup.now_ms += 1
    budget.peek("videos.list")
    assert counted(setup) == [("day", "a", "limit", 2), ("day", "b", "limit", 1)]
    newest = json.loads(setup.ledger.refusals(setup.project)[-1])
    assert (newest["job"], newest["region"], newest["refused_by"]) == ("a", "DE", "day")
    assert newest["why"] == "limit 'day' has 2 of 2 units used"
    assert newest["limits"][0]["used_units"] == 2
    setup.now_ms += ATTEND_EVERY_MS
    budget.peek("videos.list")
    assert len(setup.ledger.refusals(setup.project)) == 3, "once"


@pytest.mark.topology
def test_at_the_end_of_the_process_the_rest_is_handed_over_and_the_hour_rolled_up(setup: Setup) -> None:
    budget, recorder = recorded(setup, limit(1))
    budget.charge("videos.list")
    setup.now_ms += HOUR_MS
    budget.charge("videos.list")
    recorder.close()
    recorder.close()
    assert counted(setup) == [("day", "", "limit", 1)]
    history = setup.ledger.history(setup.project, 0, setup.now_ms)
    assert [row.charges for row in history.hours] == [1]


def test_what_the_end_may_take_is_known_when_it_comes(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests wait longer."""
    budget, rec = recorded(setup, limit(1))
    budget.charge("videos.list", units=1)
    budget.charge("videos.list")
    monkeypatch.setattr(recorder, "END_WITHIN_S", 0.0)
    rec.close()
    assert counted(setup) == []


def test_an_hour_is_rolled_up_by_decisions_ten_seconds_apart(setup: Setup) -> None:
    """A hundred charges at a time: nobody waits for all of them."""
    budget, _ = recorded(setup, limit(10_000))
    for _ in range(250):
        budget.charge("videos.list")
    setup.now_ms += HOUR_MS
    found = []
    for _ in range(5):
        budget.peek("videos.list")
        found.append(sum(row.charges for row in setup.ledger.history(setup.project, 0, setup.now_ms).hours))
        setup.now_ms += ATTEND_EVERY_MS
    assert found == [100, 200, 250, 250, 250]


def test_of_many_refusals_all_are_counted_and_a_hundred_kept(setup: Setup) -> None:
    budget, recorder = recorded(setup, limit(1))
    budget.charge("videos.list")
    calls = 2 * KEPT + 10
    for n in range(calls):
        budget.charge("videos.list", region=f"R{n}")
    assert len(recorder._pending) < KEPT
    recorder.close()
    assert counted(setup) == [("day", "", "limit", calls)]
    regions = [json.loads(text)["region"] for text in setup.ledger.refusals(setup.project)]
    assert regions == [f"R{n}" for n in range(calls - 100, calls)]


def test_a_refusal_takes_at_most_four_thousand_bytes(setup: Setup) -> None:
    limits = [limit(1 if n == 150 else 500, window_ms=(n + 1) * SECOND_MS, name=f"limit-{n}") for n in range(200)]
    budget = setup.budget(*limits)
    budget.charge("videos.list")
    refused = budget.charge("videos.list")
    text = refusal_text(refused, "a", "DE", "run")
    assert len(text.encode()) <= MAX_REFUSAL_BYTES
    data = json.loads(text)
    assert [one["name"] for one in data["limits"]] == ["limit-150"]
    assert data["limits_left_out"] == 199
    setup.ledger.exhaust(setup.project, exhaustion(setup, "no more! " * 5_000))
    closed = budget.charge("videos.list")
    assert closed.reason == "exhausted"
    assert len(refusal_text(closed, "日" * 64, "本" * 64, "run").encode()) <= MAX_REFUSAL_BYTES


def exhaustion(setup: Setup, evidence: str) -> Exhaustion:
    return Exhaustion("units", setup.now_ms, setup.now_ms + HOUR_MS, evidence, "host:1 job")


def test_a_ledger_that_does_not_answer_is_told_when_it_does(redis_server: RedisServer) -> None:
    with Proxy(redis_server.port) as proxy:
        there = Setup.open(proxy.url)
        budget, recorder = recorded(there, limit(1))
        budget.charge("videos.list")
        proxy.fail("drop-request", times=1_000)
        assert budget.charge("videos.list").reason == "ledger-unavailable"
        asked = proxy.requests
        recorder.close()
        assert proxy.requests == asked, "nobody is asked who has just not answered"
        proxy.heal()
        there.now_ms += SECOND_MS
        budget.charge("videos.list")
        there.now_ms += ATTEND_EVERY_MS
        budget.charge("videos.list")
        recorder.close()
        reasons = {reason: calls for _, _, reason, calls in counted(there)}
        assert reasons == {"ledger-unavailable": 1, "limit": 2}
        there.ledger.close()


def test_all_counts_together_take_no_longer_than_they_may(setup: Setup) -> None:
    """A ledger that takes its time for each two hundred."""
    budget, recorder = recorded(setup, *(limit(1, name=f"limit-{n}", jobs=(f"job-{n}",)) for n in range(300)))
    for n in range(300):
        for _ in "12":
            budget.charge("videos.list", job=f"job-{n}")
    given: list[float] = []

    class Slow:
        def add_refusals(self, *args: object) -> None:
            within_s = args[-1]
            assert isinstance(within_s, float)
            given.append(within_s)
            time.sleep(0.01)

        def roll_up(self, *args: object) -> bool:
            return False

    recorder.ledger = Slow()  # type: ignore[assignment]
    recorder.close(0.5)
    assert len(given) == 2
    assert given[1] <= given[0] - 0.01


def test_a_child_does_not_tell_what_its_parent_was_refused(setup: Setup) -> None:
    budget, recorder = recorded(setup, limit(1))
    budget.charge("videos.list")
    budget.charge("videos.list")

    def be_refused() -> None:
        budget.charge("videos.list", job="child")
        recorder.close()

    in_child(be_refused)
    recorder.close()
    assert counted(setup) == [("day", "", "limit", 1), ("day", "child", "limit", 1)]


def test_a_session_tells_at_its_end(ledger_url: str, state_dir: Path, tmp_path: Path) -> None:
    config = tmp_path / "quota.toml"
    config.write_text(
        f'[ledger]\nurl = "{ledger_url}"\n[credentials.main]\napi = "youtube-v3"\nproject = "p"\n'
        '[[credentials.main.limits]]\nname = "day"\nunits = 100\nwindow = "24h"\n'
    )
    with Session(load_settings(config)) as session:
        session.budget().charge("search.list")
        session.budget().charge("search.list")
    ledger = open_ledger(ledger_url)
    assert len(ledger.refusals("p")) == 1
    ledger.close()


def test_a_flush_whose_answer_is_lost_is_not_repeated(redis_server: RedisServer) -> None:
    with Proxy(redis_server.port) as proxy:
        setup = Setup.open(proxy.url)
        budget, recorder = recorded(setup, limit(1))
        budget.charge("videos.list")
        budget.charge("videos.list")
        recorder.close(10)  # from now on the server knows the script
        assert counted(setup) == [("day", "", "limit", 1)]
        budget.charge("videos.list")
        proxy.fail("drop-reply", times=1)
        recorder.close(10)
        assert counted(setup) == [("day", "", "limit", 2)], "it arrived"
        budget.charge("videos.list")
        recorder.close(10)
        assert counted(setup) == [("day", "", "limit", 3)]
        assert len(setup.ledger.refusals(setup.project)) == 3
        setup.ledger.close()
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()


def test_who_gives_up_after_some_time_waits_no_longer(redis_server: RedisServer) -> None:
    """It asks on the connection that is open, and opens none."""
    with Proxy(redis_server.port) as proxy:
        setup = Setup.open(proxy.url)
        with pytest.raises(LedgerError):
            setup.ledger.add_refusals(setup.project, [], ["x"], 0.05)
        setup.budget().charge("videos.list")
        setup.ledger.add_refusals(setup.project, [], ["x"], 5)
        proxy.fail("swallow-reply", times=1)
        with pytest.raises(LedgerError):
            setup.ledger.add_refusals(setup.project, [], ["y"], 0.001)
        setup.ledger.close()
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
