"""A call to a language model is charged the most that it may cost before it leaves, and settled by its answer, whatever
client reads it and however it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import redis

import quota
from quota.reports.status import read_status
from quota.session import Session
from quota.settings.load import load_settings
from support.http_clients import BROKEN, CLIENTS, Httpx, Requests
from support.model import Model
from support.setup import charges_at

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from quota.budget import Budget
    from quota.rules.spent import Spent
    from support.servers import RedisServer

BOOK = """
api = "model"
source = "https://model.example/limits"
read_on = 2026-11-21
hosts = ["{host}"]
[routes]
"POST /v1/chat" = "chat"
[answers]
units = {units}
[buckets.requests]
quota = 1_000
resets = "24h"
[buckets.tokens]
quota = 1_000_000
resets = "24h"
[default]
get = 1
other = 5
[methods]
chat = [
  {{ bucket = "tokens", reserve = {{ json = "/max_tokens", default = 4_096, bytes_per_unit = 3 }} }},
  {{ units = 1, bucket = "requests" }},
]
"""

CONFIG = """
[ledger]
url = "{url}"
[credentials.main]
api = "model.toml"
project = "model"
[[credentials.main.limits]]
name = "tokens"
bucket = "tokens"
units = 10_000
window = "24h"
"""

BODY_JSON = '{ json = "/usage/total_tokens" }'
HEADER = '{ header = "X-Cost" }'


class World:
    def __init__(self, url: str, folder: Path, model: Model) -> None:
        self.model = model
        self._folder, self._url = folder, url
        self.session = self._open(BODY_JSON)

    def _open(self, units: str) -> Session:
        (self._folder / "model.toml").write_text(BOOK.format(host=self.model.host, units=units))
        config = self._folder / "quota.toml"
        config.write_text(CONFIG.format(url=self._url))
        return Session(load_settings(config))

    def where_answers_say_it_in(self, units: str) -> None:
        self.session.close()
        self.session = self._open(units)

    @property
    def budget(self) -> Budget:
        return self.session.budget()

    def tokens(self) -> list[Spent]:
        log = charges_at(self.session.ledger, "model")
        assert [entry.units for entry in log if entry.bucket == "requests"] == [1] * (len(log) // 2)
        return [entry for entry in log if entry.bucket == "tokens"]


@pytest.fixture
def model() -> Iterator[Model]:
    with Model() as model:
        yield model


@pytest.fixture
def world(state_dir: Path, tmp_path: Path, model: Model) -> Iterator[World]:
    world = World(f"sqlite:///{tmp_path}/ledger.db", tmp_path, model)
    yield world
    world.session.close()


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest, world: World) -> Iterator[Any]:
    client = request.param(world.budget)
    yield client
    client.close()


def asking(how: str, use: int, max_tokens: int = 1_000) -> tuple[dict[str, Any], int]:
    """A request, and its bound but for what its bytes add."""
    data = {"how": how, "use": use, "max_tokens": max_tokens}
    return data, max_tokens


# -- what is charged ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "use"),
    [("json", 70), ("json", 1_500), ("gzip", 70), ("br", 70), ("events", 70), ("no-done", 70), ("packed", 70)],
)
def test_an_answer_with_its_usage_settles_the_call(world: World, client: Any, how: str, use: int) -> None:
    data, bound = asking(how, use)
    client.ask(world.model.url, "POST", json=data)
    (entry,) = world.tokens()
    assert bound < entry.charged_units <= bound + 40, "with a unit for three bytes of the body"
    assert (entry.units, entry.settled, entry.reserved_units) == (use, True, 0)
    assert read_status(world.session).credentials[0].limits[0].reserved_units == 0


@pytest.mark.parametrize("how", ["silent", "quiet", "cut", "hang-up"])
def test_an_answer_without_a_figure_keeps_the_reservation(world: World, client: Any, how: str) -> None:
    data, bound = asking(how, 70)
    if how in ("cut", "hang-up"):
        with pytest.raises(BROKEN):
            client.ask(world.model.url, "POST", json=data)
    else:
        client.ask(world.model.url, "POST", json=data)
    (entry,) = world.tokens()
    assert bound < entry.units == entry.charged_units == entry.reserved_units
    assert read_status(world.session).credentials[0].limits[0].reserved_units == entry.units


def test_a_header_may_have_the_units_of_a_call(world: World) -> None:
    world.where_answers_say_it_in(HEADER)
    for number, kind in enumerate(CLIENTS):
        client = kind(world.budget)
        client.ask(world.model.url, "POST", json=asking("header", 30 + number)[0])
        client.close()
    assert [entry.units for entry in world.tokens()] == [30, 31, 32, 33]


PEEKED = """
free = [{ json = "/free" }]
closed = [{ status = 200, json = "/error", bucket = "requests", lasts = "60s" }]"""
"""With these rules every body is read ahead of its caller."""


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("units", [BODY_JSON, HEADER, BODY_JSON + PEEKED, HEADER + PEEKED])
def test_an_answer_that_is_shorter_than_announced_settles_and_frees_nothing(
    world: World, units: str, kind: Any
) -> None:
    world.where_answers_say_it_in(units)
    client = kind(world.budget)
    with pytest.raises(BROKEN):
        client.ask(world.model.url, "POST", json=asking("short", 0)[0])
    client.close()
    (entry,) = world.tokens()
    assert entry.units == entry.charged_units == entry.reserved_units


@pytest.mark.parametrize("units", [BODY_JSON, HEADER, BODY_JSON + PEEKED, HEADER + PEEKED])
def test_an_answer_that_nobody_reads_settles_nothing(world: World, units: str) -> None:
    world.where_answers_say_it_in(units)
    url, data = world.model.url, asking("header" if HEADER in units else "json", 0)[0]
    by_requests, by_httpx = Requests(world.budget), Httpx(world.budget)
    by_requests.session.post(url, json=data, timeout=100, stream=True).close()
    with by_httpx.client.stream("POST", url, json=data):
        pass
    by_requests.close()
    by_httpx.close()
    assert [entry.units - entry.charged_units for entry in world.tokens()] == [0, 0]


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_whole_answer_that_closes_a_bucket_by_its_body_settles_as_it_is_read(world: World, kind: Any) -> None:
    world.where_answers_say_it_in(BODY_JSON + PEEKED)
    client = kind(world.budget)
    client.ask(world.model.url, "POST", json=asking("closed", 12)[0])
    with pytest.raises(quota.Refused):
        client.ask(world.model.url, "POST", json=asking("json", 1)[0])
    client.close()
    assert [entry.units for entry in world.tokens()] == [12]


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_whole_answer_may_be_free_by_its_body(world: World, kind: Any) -> None:
    world.where_answers_say_it_in(BODY_JSON + PEEKED)
    client = kind(world.budget)
    client.ask(world.model.url, "POST", json=asking("free", 12)[0])
    client.close()
    assert [entry.units for entry in charges_at(world.session.ledger, "model")] == [0, 0]


def test_a_run_may_spend_the_unused_part_of_a_reservation(world: World) -> None:
    with Requests(world.budget, max_units=1_200).session as session:
        for use in (70, 80, 600):
            session.post(world.model.url, json=asking("json", use)[0], timeout=100)
        with pytest.raises(quota.Refused) as refused:
            session.post(world.model.url, json=asking("json", 70)[0], timeout=100)
        assert (refused.value.decision.reason, refused.value.decision.remaining_units) == ("run", 450)
        session.post(world.model.url, json=asking("json", 1_500, max_tokens=400)[0], timeout=100)
        with pytest.raises(quota.Refused) as refused:
            session.post(world.model.url, json=asking("json", 1, max_tokens=1)[0], timeout=100)
    assert (refused.value.decision.reason, refused.value.decision.remaining_units) == ("run", 0)
    assert [entry.units for entry in world.tokens()] == [70, 80, 600, 1_500]


# -- streams -----------------------------------------------------------------------------------------------------------


def test_a_caller_settles_only_if_it_reads_to_the_end(world: World, client: Any) -> None:
    for way in getattr(client, "WAYS", ("",)):
        client.way = way
        client.stream(world.model.url, lambda piece: b"[DONE]" in piece, asking("events", 70, 500)[0])
        world.model.go_on.release()
        client.stream(world.model.url, lambda piece: b"data" in piece, asking("steps", 70, 500)[0])
        settled, kept = world.tokens()[-2:]
        assert (settled.units, kept.units) == (70, kept.charged_units), way
        world.model.forget()


def test_each_event_is_handed_on_before_the_next_one_comes(world: World, client: Any) -> None:
    data, _ = asking("steps", 70)
    told: list[bytes] = []

    def stop(piece: bytes) -> bool:
        if piece.strip():
            told.append(piece)
            world.model.go_on.release()
        return False

    world.model.go_on.release()
    client.stream(world.model.url, stop, data)
    assert b"".join(told).count(b"data: ") == 5
    assert world.tokens()[0].units == 70


# -- what it costs -----------------------------------------------------------------------------------------------------


def test_an_answer_with_usage_adds_one_settle_and_nothing_else(
    state_dir: Path, tmp_path: Path, model: Model, redis_server: RedisServer
) -> None:
    world = World(redis_server.url, tmp_path, model)
    with redis.Redis(port=redis_server.port, decode_responses=True) as server:

        def trips(client: Any, how: str) -> dict[str, int]:
            client.ask(model.url, "POST", json=asking(how, 70, max_tokens=100)[0])
            server.config_resetstat()
            client.ask(model.url, "POST", json=asking(how, 70, max_tokens=100)[0])
            stats = server.info("commandstats")
            asked = {name.removeprefix("cmdstat_"): one["calls"] for name, one in stats.items()}
            return {name: calls for name, calls in asked.items() if name.startswith(("eval", "get", "set", "hget"))}

        for kind in CLIENTS:
            client = kind(world.budget)
            assert trips(client, "silent")["evalsha"] == 1
            assert trips(client, "json")["evalsha"] == 2
            assert trips(client, "events")["evalsha"] == 2
            client.close()
    world.session.close()
