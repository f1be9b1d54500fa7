"""`Budget.charge_many`: several calls charged in one step, all or none, by whatever rules one call is charged."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import quota
from quota.budget import Budget, project_of
from quota.deciding.allowance import Allowance, say_used
from quota.errors import CostExceedsLimit, UnknownMethod, UsageError
from quota.ledger.factory import open_ledger
from quota.ledger.redis_log import RedisLog
from quota.rules.facts import Exhaustion
from quota.terms import arguments
from quota.terms.limits import DAY_MS, HOUR_MS, Limit, Selector, Sliding, View
from support.proxy import Kind, Proxy
from support.servers import RedisServer
from support.setup import Setup, budget_of, charges_at, ids_of, limit

SEARCHES = Limit("searches", 2, View(Selector(methods=("search.list",), count="calls"), Sliding(HOUR_MS)), 2, 0)


@pytest.mark.parametrize("step", [lambda work: work(), lambda work: contextvars.copy_context().run(work)])
def test_labels_in_a_generator_that_end_elsewhere_say_so(
    step: Callable[[Any], object], setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a dependency of FastAPI, which has a copy of the context, or before a later block: no label is left."""
    arguments.warn_crossed.cache_clear()

    def labelled(job: str) -> Iterator[None]:
        with quota.labels(job=job):
            yield

    blocks = labelled("a"), labelled("b")
    for block in blocks:
        step(partial(next, block))
    assert [list(block) for block in blocks] == [[], []]
    setup.budget(limit(500)).charge("videos.list")
    assert [entry.job for entry in setup.entries()] == [""]
    assert caplog.text.count("labels_crossed") == 1
    with pytest.raises(UsageError, match="inside it"):
        quota.labels(job="a")(labelled)


@pytest.mark.topology
def test_each_call_has_its_own_charge_in_the_order_given(setup: Setup) -> None:
    budget = setup.budget(limit(500), SEARCHES)
    with quota.labels(job="nightly", region="DE"):
        decisions = budget.charge_many(["search.list", ("videos.list", 7), "suggest.list", ("videos.list", 2)])
    assert [(each.method, each.cost_units, each.source, each.reason) for each in decisions] == [
        ("search.list", 100, "ledger", "ok"),
        ("videos.list", 7, "ledger", "ok"),
        ("suggest.list", 1, "ledger", "ok"),
        ("videos.list", 2, "ledger", "ok"),
    ]
    entries = setup.entries()
    assert [each.id for each in decisions] == ids_of(entries)
    assert [(e.method, e.units, e.bucket, e.job, e.region) for e in entries] == [
        ("search.list", 100, "units", "nightly", "DE"),
        ("videos.list", 7, "units", "nightly", "DE"),
        ("suggest.list", 1, "search", "nightly", "DE"),
        ("videos.list", 2, "units", "nightly", "DE"),
    ]
    assert len({e.key for e in entries}) == 4
    for each in decisions:
        assert [(s.name, s.cost_units, s.used_units) for s in each.limits] == [("day", 109, 109), ("searches", 1, 1)]
        assert (each.remaining_units, each.decided_at_ms) == (1, setup.now_ms)


def test_the_job_and_the_region_may_be_said_for_all(setup: Setup) -> None:
    budget = setup.budget(limit(500, jobs=("a",)), leave={"a": {"day": 450}})
    with quota.labels(job="b", region="DE"):
        budget.charge_many(["videos.list"] * 2, job="a", region="FR")
        with quota.labels(region="IN"):
            budget.charge("videos.list")
    budget.listener.of_run = ("run", "US")
    with quota.labels(region="BR"):
        budget.charge("videos.list")
    named = [(entry.job, entry.region) for entry in setup.entries()]
    assert named == [("a", "FR"), ("a", "FR"), ("b", "IN"), ("run", "BR")]
    with pytest.raises(CostExceedsLimit, match="holds 50 after leaving 450"):
        budget.charge_many([("videos.list", 26)] * 2, job="a")


@pytest.mark.topology
def test_if_one_limit_refuses_all_are_refused_for_the_sum(setup: Setup) -> None:
    budget = setup.budget(limit(500), SEARCHES)
    for n in range(3):
        setup.now_ms = 1_793_000_000_000 + n * 1_000
        budget.charge("videos.list", units=150)
    before = setup.entries()
    refused = budget.charge_many(["search.list", ("videos.list", 100), "suggest.list"])
    assert setup.entries() == before
    assert [(each.method, each.cost_units) for each in refused] == [
        ("search.list", 100),
        ("videos.list", 100),
        ("suggest.list", 1),
    ]
    for each in refused:
        assert (each.admitted, each.id, each.source, each.reason, each.refused_by) == (
            False,
            None,
            None,
            "limit",
            "day",
        )
        assert each.retry_at_ms == 1_793_000_000_000 + DAY_MS, "when 200 fit, not one of them"
        assert each.why() == "limit 'day' has 450 of 500 units used, and these 3 calls need 200 together"
    assert budget.peek("suggest.list").admitted
    refused = budget.charge_many(["videos.list"] * 50 + ["search.list"] * 2)
    assert {each.refused_by for each in refused} == {"day"}
    setup.now_ms = int(refused[0].retry_at_ms or 0) - 1
    assert not budget.charge_many(["videos.list"] * 50 + ["search.list"] * 2)[0].admitted
    setup.now_ms += 1
    assert budget.charge_many(["videos.list"] * 50 + ["search.list"] * 2)[0].admitted
    assert budget.charge_many(["search.list", "videos.list"])[1].refused_by == "searches"


def test_a_closed_bucket_of_one_call_refuses_all_calls(setup: Setup) -> None:
    budget = setup.budget(limit(500))
    setup.state.exhaust(Exhaustion("search", setup.now_ms, setup.now_ms + 9_000, "said so", "a test"))
    for calls in (["videos.list", "suggest.list"], ["search.list", "videos.list"]):
        for each in budget.charge_many(calls):
            assert (each.reason, each.refused_by, each.retry_at_ms) == ("exhausted", "search", setup.now_ms + 9_000)
    assert setup.entries() == []
    assert budget.charge_many(["videos.list", "captions.list"])[0].admitted


@pytest.mark.parametrize(
    ("calls", "error", "word"),
    [
        ([], UsageError, "1 to 100 calls are charged together, and here are none"),
        (("videos.list" for _ in iter(int, 1)), UsageError, "here are more than 100"),
        (None, UsageError, "calls None: give a list"),
        ({"videos.list": 5}, UsageError, "calls {'videos.list': 5}: give a list of methods, or of .method, units."),
        ("", UsageError, "method ''"),
        ([7], UsageError, "call 7 is not a method"),
        ([("videos.list", 1, 2)], UsageError, "is not a method"),
        ([("videos.list", 0)], UsageError, "0 units: a charge is a whole number from 1"),
        ([("videos.list", True)], UsageError, "True units"),
        (["videos.list", "video.list"], UnknownMethod, "did you mean 'videos.list'"),
    ],
)
def test_a_call_of_the_wrong_shape_is_an_error(setup: Setup, calls: Any, error: Any, word: str) -> None:
    with pytest.raises(error, match=word):
        setup.budget().charge_many(calls)
    assert setup.entries() == []


def test_a_price_that_changes_between_two_clocks_is_asked_for_again(setup: Setup) -> None:
    change_ms = 1_764_835_200_000
    times = iter([change_ms - 1])  # of the plan; all later
    setup.now_ms = change_ms
    budget = budget_of(setup.ledger, limit(50_000), project=setup.project, clock=lambda: next(times, change_ms))
    assert [each.cost_units for each in budget.charge_many(["videos.insert", "videos.insert"])] == [100, 100]
    assert [e.units for e in setup.entries()] == [100, 100]


def away(setup: Setup, tmp_path: Path) -> Budget:
    (tmp_path / "a-file").touch()
    ledger, allowance = open_ledger(f"sqlite:///{tmp_path}/a-file/ledger.db"), Allowance(5, 12)
    clock = lambda: setup.now_ms  # noqa: E731 - one line
    return budget_of(ledger, limit(500), project=setup.project, clock=clock, folder=tmp_path, allowance=allowance)


def test_without_a_ledger_all_are_drawn_or_none(setup: Setup, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cut_off = away(setup, tmp_path)
    assert not cut_off.charge_many([("videos.list", 1), ("videos.list", 6)])[0].admitted, "the second is too dear"
    drawn = cut_off.charge_many([("videos.list", 5), ("videos.list", 2)])
    assert [(each.source, each.remaining_units, each.cost_units) for each in drawn] == [
        ("allowance", 5, 5),
        ("allowance", 5, 2),
    ]
    assert caplog.messages[0].startswith(f"allowance_drawn project={setup.project} method=videos.list units=7 left=5: ")
    refused = cut_off.charge_many([("videos.list", 3)] * 2)
    assert {(each.admitted, each.id, each.reason) for each in refused} == {(False, None, "ledger-unavailable")}
    assert cut_off.owed_units() == 7
    cut_off.refund(str(drawn[1].id))
    assert [each.remaining_units for each in cut_off.charge_many([("videos.list", 2)] * 3)] == [1] * 3
    back = budget_of(setup.ledger, limit(500), project=setup.project, clock=lambda: setup.now_ms, folder=tmp_path)
    assert back.charge_many(["videos.list"] * 2)[0].limits[0].used_units == 13
    assert [charge.units for charge in charges_at(setup.ledger, setup.project)] == [5, 0, 2, 2, 2, 1, 1]
    say_used(project_of(cut_off))
    lines = [f"{event} project={setup.project} charges=4 units=11" for event in ("debt_repaid", "allowance_used")]
    assert caplog.messages[1:] == lines, "without the draw that was refunded"


@pytest.mark.parametrize("kind", ["drop-reply", "cut-reply", "drop-request"])
def test_calls_on_a_bad_line_are_charged_once(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: Kind
) -> None:
    monkeypatch.setattr(RedisLog, "_timeout_s", 2.0)
    with Proxy(server.port) as proxy, closing(open_ledger(proxy.url)) as ledger:
        budget = budget_of(ledger, limit(500))
        assert budget.charge_many(["videos.list"] * 2)[0].admitted
        proxy.fail(kind, keep_bytes=20)
        decisions = budget.charge_many(["videos.list"] * 10)
        assert [each.id for each in decisions] == ids_of(charges_at(ledger)[2:])
        assert decisions[0].limits[0].used_units == 12
        proxy.fail("drop-reply", times=5)
        refused = budget.charge_many(["videos.list"] * 10)
        assert {each.reason for each in refused} == {"ledger-unavailable"}
        proxy.heal()
        assert budget.usage()[0].used_units == 22, "in doubt they count as spent, once"
        (warning,) = [line for line in caplog.messages if line.startswith("refused_but_charged")]
        assert "method=videos.list units=10" in warning
        assert budget.refund(warning.partition("charge=")[2].strip('"').partition(",")[0]).units == 1
