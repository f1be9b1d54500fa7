"""Every argument that takes several values: a lone str is one value, never its characters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quota.async_budget import AsyncBudget, Awaiter
from quota.budget import Budget
from quota.clients.httpx import httpx_async_transport, httpx_transport
from quota.clients.requests import requests_adapter
from quota.deciding.project import Project
from quota.errors import UsageError
from quota.jobs.fetches import channels
from quota.ledger.sqlite_log import SqliteLog
from quota.reports.spending import read_spending
from quota.terms.api import Hosts
from quota.terms.limits import DAY_MS, Limit, Selector, Sliding, View
from support.books import BOOK

DAY = Sliding(DAY_MS)
FIVE_HUNDRED = Limit("day", 500, View(Selector(), DAY), 500, 0)


@pytest.fixture
def ledger() -> Iterator[SqliteLog]:
    ledger = SqliteLog("sqlite://")
    yield ledger
    ledger.close()


def make_budget(ledger: SqliteLog, limits: Any = FIVE_HUNDRED) -> Budget:
    return Budget(credential="main", book=BOOK, limits=limits, project=Project(ledger, "p"))


@pytest.mark.parametrize("field", ["buckets", "methods", "jobs"])
def test_a_limit_that_selects_one_name_selects_it_whole(field: str) -> None:
    charge = {"buckets": ("units", "", ""), "methods": ("", "search.list", ""), "jobs": ("", "", "backfill")}[field]
    name = "".join(charge)
    alone, listed = Selector(**{field: name}), Selector(**{field: [name]})  # type: ignore[arg-type]
    assert alone == listed == Selector(**{field: (name,)})  # type: ignore[arg-type]
    assert View(alone, DAY).name == View(listed, DAY).name
    assert alone.counts(*charge)
    piece = tuple(part[1:3] for part in charge)  # a piece of the name, which is none
    assert not alone.counts(*piece)


def test_a_limit_without_a_list_is_enforced(ledger: SqliteLog) -> None:
    budget = make_budget(ledger, Limit("day", 1, View(Selector(), DAY), 1, 0))
    assert [budget.charge("videos.list").admitted for _ in range(2)] == [True, False]


def test_read_spending_sums_one_project_by_one_field(ledger: SqliteLog) -> None:
    make_budget(ledger).charge("videos.list")
    assert read_spending([Project(ledger, "p")], "method", 0).rows == ((("videos.list",), 1, 1),)


def test_one_id_of_a_channel_is_asked_for_whole() -> None:
    asked: list[str] = []

    class Client:
        def channels(self) -> Client:
            return self

        def list(self, **parameters: Any) -> Client:
            asked.append(parameters["id"])
            return self

        def execute(self) -> dict[str, Any]:
            return {"items": []}

    channels(Client(), "", None, store=None, ids="UC-one")  # type: ignore[arg-type]
    assert asked == ["UC-one"]


GATES: list[Callable[..., Any]] = [requests_adapter, httpx_transport, httpx_async_transport]


@pytest.mark.parametrize("hosts", ["localhost", ["localhost"], ("localhost",), {"localhost"}, iter(["localhost"])])
def test_a_lone_host_is_one_host(hosts: Any) -> None:
    assert ("localhost", 80) in Hosts(hosts)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("hosts", [[], "", (), None, 80, [80], b"localhost", [b"localhost"], ["http://x"], "[::1"])
def test_hosts_that_would_meter_nothing_are_an_error(ledger: SqliteLog, gate: Callable[..., Any], hosts: Any) -> None:
    with pytest.raises(UsageError, match="host") as refused:
        gate(make_budget(ledger), "videos.list", hosts=hosts)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("gate", GATES)
def test_a_method_of_a_client_is_a_name_or_a_function(ledger: SqliteLog, gate: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="method"):
        gate(make_budget(ledger), ["videos.list"], hosts="localhost")


@pytest.mark.parametrize("gate", [requests_adapter, httpx_transport])
def test_a_client_that_is_not_awaited_takes_no_budget_that_is(ledger: SqliteLog, gate: Callable[..., Any]) -> None:
    budget = AsyncBudget(make_budget(ledger), Awaiter(ledger))
    with pytest.raises(UsageError, match=r"needs a budget of quota\.open\(\)"):
        gate(budget, "videos.list", hosts="localhost")


@pytest.mark.parametrize("names", [None, 5, [5], [None], [""], "", [b"x"]])
def test_invalid_names_are_an_error(ledger: SqliteLog, names: Any) -> None:
    for take in (
        lambda: Selector(buckets=names),
        lambda: Selector(methods=names),
        lambda: Selector(jobs=names),
        lambda: read_spending([], names, 0),
    ):
        with pytest.raises(UsageError) as refused:
            take()
        assert str(refused.value).isprintable()
