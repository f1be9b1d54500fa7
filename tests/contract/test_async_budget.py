"""A budget on an event loop decides as a budget does, and the loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import closing, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import quota
from quota.deciding.history import entries
from quota.ledger.log import Append, Reply
from quota.ledger.sqlite_log import SqliteLog
from support.configurations import limited
from support.patience import patient
from support.processes import KINDS, Run, each_loop, in_child, in_threads, runner
from support.proxy import Proxy
from support.servers import RedisServer, until
from support.setup import charges_at, ids_of

FAULTS = int(os.environ.get("QUOTA_TEST_FAULTS", "30"))

Configure = Callable[..., Path]


@pytest.fixture
def configure(state_dir: Path, tmp_path: Path) -> Configure:
    def write(url: str, units: int = 500, of_ledger: str = "") -> Path:
        path = tmp_path / "quota.toml"
        path.write_text(limited(units, ledger=url).replace("[credentials", f"{of_ledger}\n[credentials"))
        return path

    return write


def charged(config: Path) -> list[str]:
    """The ids of all charges, also of one that is in the log twice."""
    with quota.open(config) as q:
        return ids_of(entry for entry in entries(q.project()) if entry.kind == "charge")


async def in_session(config: Path, work: Callable[[quota.AsyncSession], Awaitable[Any]]) -> Any:
    async with quota.open_async(config) as q:
        return await work(q)


class Scene:
    """A configuration over an empty ledger, and a loop."""

    def __init__(self, url: str, configure: Configure, run: Run) -> None:
        self._url, self._configure, self.run = url, configure, run
        self.config = configure(url)

    def work(self, work: Callable[[quota.AsyncSession], Awaitable[Any]], units: int = 500) -> Any:
        """The result of work in a session of its own, with a limit of these units."""
        self.config = self._configure(self._url, units)
        return self.run(in_session(self.config, work))


@pytest.fixture
def loop(ledger_url: str) -> str:
    """A kind of loop for each ledger: neither depends on the other."""
    return KINDS[ledger_url.startswith("redis")]


@pytest.fixture
def scene(ledger_url: str, configure: Configure, loop: str) -> Scene:
    return Scene(ledger_url, configure, runner(loop))


# -- the same answers --------------------------------------------------------------------------------------------------


@pytest.mark.topology
def test_an_async_budget_answers_like_a_budget(ledger_url: str, configure: Configure, run: Run) -> None:
    config = configure(ledger_url, 100)

    async def main(q: quota.AsyncSession) -> None:
        budget = q.budget()
        assert q.budget("main") is budget
        assert (budget.credential, budget.project, budget.book.name) == ("main", "p", blocking.book.name)
        assert budget.limits == blocking.limits
        first = await budget.charge("captions.list", job="nightly", region="DE")
        assert (first.admitted, first.cost_units, first.remaining_units, first.source) == (True, 50, 50, "ledger")
        with quota.labels(job="labelled", region="FR"):
            second = await budget.charge("videos.list", units=9)
        charges = charges_at(s.ledger, "p")
        assert [(i, e.job, e.region, e.units) for i, e in zip(ids_of(charges), charges, strict=True)] == [
            (first.id, "nightly", "DE", 50),
            (second.id, "labelled", "FR", 9),
        ]
        ours, theirs = await budget.peek("captions.list"), blocking.peek("captions.list")
        assert ours == theirs._replace(decided_at_ms=ours.decided_at_ms)
        assert (ours.admitted, ours.reason) == (False, "limit")
        ours, theirs = await budget.charge("captions.list"), blocking.charge("captions.list")
        assert ours == theirs._replace(decided_at_ms=ours.decided_at_ms)
        assert (await budget.peek("videos.list")).admitted
        assert second.id is not None
        for before, units in ((await budget.settle(second.id, 4), 9), (await budget.refund(second.id), 4)):
            assert (before.id, before.key, before.units) == (charges[1].id, charges[1].key, units)
        assert await budget.usage() == blocking.usage()
        assert await budget.usage("nightly") == blocking.usage("nightly")
        outlook = await budget.outlook(["captions.list"])
        assert outlook.states == blocking.outlook(["captions.list"]).states
        assert await budget.owed_units() == 0
        together = await budget.charge_many(["videos.list", ("videos.insert", 2)], job="nightly", region="DE")
        assert [decision.id for decision in together] == ids_of(charges_at(s.ledger, "p"))[2:]
        assert [decision.cost_units for decision in together] == [1, 2]
        with pytest.raises(quota.UsageError, match="1 to 100 calls"):
            await budget.charge_many([])

    with quota.open(config) as s:
        blocking = s.budget()
        run(in_session(config, main))


def test_a_closed_session_stays_closed(scene: Scene) -> None:
    async def main() -> None:
        q = quota.open_async(scene.config)
        await q.aclose()
        with pytest.raises(quota.UsageError, match="closed"):
            q.budget()
        async with quota.open_async(scene.config) as q:
            budget = q.budget()
            await budget.charge("videos.list")
        await q.aclose()
        decisions: list[Any] = [budget.charge("videos.list"), budget.peek("videos.list"), budget.usage()]
        decisions += [budget.outlook(), budget.owed_units(), budget.refund("1795233255077-0")]
        decisions += [budget.settle("1795233255077-0", 1), budget.spend("videos.list").__aenter__(), q.__aenter__()]
        for decision in decisions:
            with pytest.raises(quota.UsageError, match="closed"):
                await decision

    scene.run(main())
    assert len(charged(scene.config)) == 1


# -- around a block or a function --------------------------------------------------------------------------------------


def test_spend_charges_around_a_block_and_a_refusal_leaves_it_out(scene: Scene) -> None:
    async def main(q: quota.AsyncSession) -> None:
        budget = q.budget()
        async with budget.spend("videos.list", job="nightly") as decision:
            assert decision.admitted
        with pytest.raises(ValueError, match="body"):
            async with budget.spend("videos.list"):
                raise ValueError("body")
        with pytest.raises(quota.Refused) as refused:
            async with budget.spend("videos.list"):
                raise AssertionError("its body has run")
        assert refused.value.decision.reason == "limit"

    scene.work(main, 2)
    assert len(charged(scene.config)) == 2


def test_a_decorated_coroutine_function_is_charged_when_it_is_awaited(scene: Scene) -> None:
    async def main(q: quota.AsyncSession) -> None:
        budget = q.budget()

        @budget.spend("videos.list")
        async def fetch(city: str, *, days: int = 1) -> str:
            """Fetches."""
            return f"{city} {days}"

        assert inspect.iscoroutinefunction(fetch)
        assert (fetch.__name__, fetch.__doc__) == ("fetch", "Fetches.")
        waiting = [fetch("Bonn", days=2), fetch("Berlin")]
        assert (await budget.usage())[0].used_units == 0
        assert await waiting[0] == "Bonn 2"
        assert (await budget.usage())[0].used_units == 1
        assert await waiting[1] == "Berlin 1"
        with pytest.raises(quota.Refused):
            await fetch("Paris")

    scene.work(main, 2)


def test_a_decorated_async_generator_is_charged_when_its_first_item_is_asked_for(scene: Scene) -> None:
    async def main(q: quota.AsyncSession) -> None:
        budget, ended = q.budget(), []

        @budget.spend("videos.list")
        async def pages(first: int) -> AsyncGenerator[int, int]:
            try:
                while True:
                    try:
                        first += (yield first) or 1
                    except KeyError:
                        first = 0
            finally:
                ended.append(first)

        assert inspect.isasyncgenfunction(pages)
        items = pages(5)
        assert (await budget.usage())[0].used_units == 0
        assert await anext(items) == 5
        assert (await budget.usage())[0].used_units == 1
        assert [await anext(items), await items.asend(10), await items.athrow(KeyError())] == [6, 16, 0]
        await items.aclose()
        assert ended == [0]

        @budget.spend("videos.list")
        async def two() -> AsyncIterator[str]:
            yield "a"
            yield "b"

        assert [item async for item in two()] == ["a", "b"]
        with pytest.raises(quota.Refused):
            await anext(aiter(two()))
        assert (await budget.usage())[0].used_units == 2

    scene.work(main, 2)


def test_decorating_a_plain_function_raises_and_names_open(configure: Configure) -> None:
    def plain() -> None: ...

    def generator() -> Any:
        yield 1

    budget = quota.open_async(configure("redis://127.0.0.1:1/0")).budget()
    for function in (plain, generator, len, lambda: 1):
        with pytest.raises(quota.UsageError, match=r"quota\.open\(\)"):
            budget.spend("videos.list")(function)  # type: ignore[type-var]
    for wrong in (int, None, staticmethod(plain)):
        with pytest.raises(quota.UsageError, match=r"spend decorates functions|spend below @staticmethod"):
            budget.spend("videos.list")(wrong)  # type: ignore[arg-type]


# -- while the server is away ------------------------------------------------------------------------------------------


@each_loop
@pytest.mark.usefixtures("real_walls")
@pytest.mark.parametrize("of_ledger", ["", "unavailable = { max_cost = 1, allowance = 5 }"])
def test_a_silent_server_holds_up_neither_a_decision_nor_the_loop(
    server: RedisServer, configure: Configure, run: Run, of_ledger: str
) -> None:
    async def decision_s(budget: quota.AsyncBudget) -> float:
        began = time.monotonic()
        decision = await budget.charge("videos.list")
        assert (decision.reason, decision.source) in (("ledger-unavailable", None), ("ok", "allowance"))
        return time.monotonic() - began

    async def beat() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.001)
            held_s.append(time.monotonic() - began)

    async def main() -> None:
        async with quota.open_async(config) as q:
            assert (await q.budget().charge("videos.list")).admitted
            proxy.pause()
            beating = asyncio.ensure_future(beat())
            taken_s = []
            for _ in range(2):  # the second time, this machine owes what it drew the first time
                taken_s += await asyncio.gather(*(decision_s(q.budget()) for _ in range(100)))
            beating.cancel()
            proxy.resume()
        print(f"longest decision {max(taken_s):.3f} s, longest pause of the loop {max(held_s):.3f} s")
        assert max(taken_s) < 10
        assert sorted(held_s)[len(held_s) // 2] < 0.35, "the loop goes on"

    held_s: list[float] = []
    with Proxy(server.port) as proxy:
        config = configure(proxy.url, of_ledger=of_ledger)
        run(main())


@pytest.mark.usefixtures("real_walls")
def test_corrections_at_a_silent_server_delay_no_decision(server: RedisServer, configure: Configure, run: Run) -> None:
    async def main(q: quota.AsyncSession) -> None:
        budget = q.budget()
        ids = [decision.id for decision in await budget.charge_many(["videos.list"] * 40)]
        proxy.pause()
        given_back = [asyncio.ensure_future(budget.refund(charge_id or "")) for charge_id in ids]
        await asyncio.sleep(0)
        assert (await budget.charge("videos.list")).reason == "ledger-unavailable"
        assert not all(task.done() for task in given_back), "the decision waited for all of them"
        for task in given_back:
            task.cancel()
        await asyncio.gather(*given_back, return_exceptions=True)
        proxy.resume()

    with Proxy(server.port) as proxy:
        config = configure(proxy.url)
        run(in_session(config, main))


# -- cancellations, loops, forks ---------------------------------------------------------------------------------------


def attack(proxy: Proxy, r: random.Random, over: threading.Event) -> None:
    faults: list[Any] = ["drop-request", "delay-request", "drop-reply", "cut-reply"]
    for _ in range(FAULTS):
        time.sleep(r.uniform(0.005, 0.05))
        if r.random() < 0.1:
            proxy.drop_all()
        else:
            proxy.fail(r.choice(faults), delay_s=r.uniform(0, 0.1), keep_bytes=r.randrange(60))
    over.set()


@each_loop
def test_no_call_is_charged_twice_and_each_confirmed_charge_is_there(
    server: RedisServer, configure: Configure, run: Run
) -> None:
    r, over = random.Random(7), threading.Event()
    confirmed: list[str] = []
    cancelled = unconfirmed = 0

    async def work(budget: quota.AsyncBudget) -> None:
        nonlocal cancelled, unconfirmed
        for _ in count():
            if over.is_set():
                return
            charging = asyncio.ensure_future(budget.charge("videos.list"))
            if r.random() < 0.2:
                await asyncio.sleep(r.choice([0, 0, 0.001, 0.003]))
                charging.cancel()
            try:
                decision = await charging
            except asyncio.CancelledError:
                cancelled += 1
            else:
                if decision.id is None:  # lost twice, or others compare what came late
                    assert decision.reason in ("ledger-unavailable", "counting")
                    unconfirmed += 1
                else:
                    confirmed.append(decision.id)

    async def main(q: quota.AsyncSession) -> None:
        await asyncio.gather(*(work(q.budget()) for _ in range(64)))

    with Proxy(server.port) as proxy:
        config = configure(proxy.url, 10_000_000)
        attacking = threading.Thread(target=attack, args=(proxy, r, over))
        attacking.start()
        run(in_session(config, main))
        attacking.join()
        time.sleep(0.2)  # what was delayed has arrived by now
        proxy.heal()
        log = charged(config)
    assert len(set(log)) == len(log)
    assert len(set(confirmed)) == len(confirmed)
    assert set(confirmed) <= set(log)
    assert len(log) <= len(confirmed) + cancelled + unconfirmed
    assert cancelled > 0


@each_loop
def test_a_charge_of_a_cancelled_task_is_refunded(configure: Configure, run: Run, tmp_path: Path) -> None:
    """The task is cancelled while another program locks the ledger's file."""
    config = configure(f"sqlite:///{tmp_path / 'ledger.db'}")

    def units() -> list[int]:
        with quota.open(config) as q:
            return [charge.units for charge in charges_at(q.ledger, "p")]

    async def main() -> None:
        begun, append = asyncio.Event(), SqliteLog.append
        tell = partial(asyncio.get_running_loop().call_soon_threadsafe, begun.set)
        async with quota.open_async(config) as q:
            assert (await q.budget().charge("videos.list")).admitted
            with pytest.MonkeyPatch.context() as patch, closing(sqlite3.connect(tmp_path / "ledger.db")) as other:
                patch.setattr(SqliteLog, "append", lambda *a: (tell(), append(*a))[1])
                other.execute("BEGIN EXCLUSIVE")
                charging = asyncio.ensure_future(q.budget().charge("captions.list"))
                await begun.wait()
                charging.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await charging
                other.rollback()
            await asyncio.to_thread(until, lambda: units() == [1, 0])

    run(main())


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_file_that_is_busy_is_waited_for_no_longer_than_a_decision_takes(
    configure: Configure, run: Run, tmp_path: Path, *, cancelled: bool
) -> None:
    """One thread asks a file for all tasks. A task that waits too long for it is refused, and is not charged: also a
    task that was cancelled before, and charges while it cleans up."""

    async def charge(budget: quota.AsyncBudget) -> quota.Decision:
        task = asyncio.current_task()
        if cancelled and task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        return await budget.charge("videos.list")

    async def main(q: quota.AsyncSession) -> None:
        assert (await q.budget().charge("videos.list")).admitted
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("quota.async_budget.WAIT_S", 0.05)
            patch.setattr(SqliteLog, "append", slow)
            decisions = await asyncio.gather(*(charge(q.budget()) for _ in range(20)))
        waited = [decision for decision in decisions if not decision.admitted]
        assert len(waited) > 10
        assert {decision.reason for decision in waited} == {"ledger-unavailable"}
        assert "nothing was charged" in waited[0].detail
        admitted.extend(decision for decision in decisions if decision.admitted)

    def slow(*args: Any) -> Reply:
        time.sleep(0.03)
        return append(*args)

    append = SqliteLog.append
    admitted: list[quota.Decision] = []
    config = configure(f"sqlite:///{tmp_path / 'ledger.db'}")
    run(in_session(config, main))
    assert len(charged(config)) == 1 + len(admitted)


def test_a_decision_behind_a_delayed_decision_does_not_wait_twice(
    configure: Configure, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SqliteLog, "_deadline_s", 0.3)
    config = configure(f"sqlite:///{tmp_path / 'ledger.db'}")
    askers: set[str] = set()

    async def main(q: quota.AsyncSession) -> None:
        budget = q.budget()
        assert (await budget.charge("videos.list")).admitted
        with pytest.MonkeyPatch.context() as patch, closing(sqlite3.connect(tmp_path / "ledger.db")) as other:
            patch.setattr(SqliteLog, "append", noted)
            other.execute("BEGIN EXCLUSIVE")
            decisions = await asyncio.gather(*(budget.charge("videos.list") for _ in range(10)))
            other.rollback()
        assert {decision.reason for decision in decisions} == {"ledger-unavailable"}
        assert sum("was not asked this; nothing was charged" in decision.detail for decision in decisions) == 9
        assert (await budget.charge("videos.list")).admitted

    def noted(log: SqliteLog, project: str, request: Append) -> Reply:
        askers.add(request.entries[0].key)
        return append(log, project, request)

    append = SqliteLog.append
    run(in_session(config, main))
    assert len(askers) == 1
    assert len(charged(config)) == 2


def test_one_session_serves_loops_after_each_other_and_in_threads(scene: Scene) -> None:
    async def main() -> None:
        decisions = await asyncio.gather(*(q.budget().charge("videos.list") for _ in range(20)))
        assert all(decision.admitted for decision in decisions)

    q = quota.open_async(scene.config)
    for _ in range(2):
        scene.run(main())
    in_threads(lambda: scene.run(main()), *[()] * 4)
    scene.run(q.aclose())
    assert len(charged(scene.config)) == 120


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif(sys.platform == "win32", reason="no fork there")
def test_a_child_forked_in_a_loop_charges_and_so_does_its_parent(scene: Scene) -> None:
    async def charge() -> bool:
        decisions = await asyncio.gather(*(q.budget().charge("videos.list") for _ in range(20)))
        return all(decision.admitted for decision in decisions)

    async def main() -> None:
        assert await charge()
        under_way = asyncio.ensure_future(charge())
        for _ in range(2):
            await asyncio.sleep(0)
        assert in_child(lambda: scene.run(charge())) is True
        assert await under_way
        assert await charge()

    q = quota.open_async(scene.config)
    scene.run(main())
    scene.run(q.aclose())
    assert len(charged(scene.config)) == len(set(charged(scene.config))) == 80


ENDING = """
import asyncio, atexit, quota, sys, time
budget = quota.open_async(sys.argv[1]).budget()
async def main():
    for _ in range(5):
        await asyncio.gather(asyncio.wait_for(budget.refund("1-none"), 1e-9), return_exceptions=True)
        await budget.charge("videos.list")
    time.sleep(0.1)  # a cancelled refund fails as the loop ends
loop = asyncio.new_event_loop()
loop.run_until_complete(main())
loop.close()
@atexit.register
def late():
    try:
        print(asyncio.run(budget.charge("videos.list")).reason)
    except quota.LedgerError as error:
        print(type(error).__name__)
"""


def test_a_session_that_is_left_open_makes_no_noise_and_answers_as_its_process_ends(
    ledger_url: str, configure: Configure
) -> None:
    command = patient(ENDING, str(configure(ledger_url)), options=("-X", "warn_default_encoding", "-W", "error"))
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.strip() in ("ok", "ledger-unavailable", "LedgerError")


def test_work_that_ends_after_its_loop_logs_nothing(configure: Configure, caplog: pytest.LogCaptureFixture) -> None:
    over, loop = threading.Event(), asyncio.new_event_loop()
    awaiter = quota.open_async(configure("memory:")).budget()._awaiter

    async def main() -> None:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(awaiter.in_thread(over.wait), 0.01)

    loop.run_until_complete(main())
    loop.close()
    vars(loop)["is_closed"] = lambda: False  # as for a thread that looks just before
    over.set()
    awaiter._reporter.shutdown()
    del vars(loop)["is_closed"]
    assert caplog.records == []


def test_an_error_without_an_asyncio_loop_has_the_remedy(scene: Scene) -> None:
    def awaited_elsewhere(awaitable: Awaitable[Any]) -> None:
        with pytest.raises(
            quota.UsageError, match=r"loop of asyncio or uvloop; .* trio, call a budget of quota.open\(\)"
        ):
            awaitable.__await__().send(None)  # type: ignore[attr-defined]

    q = quota.open_async(scene.config)
    charge_id = scene.run(q.budget().charge("videos.list")).id
    awaited_elsewhere(q.budget().charge("videos.list"))
    awaited_elsewhere(q.budget().peek("videos.list"))
    awaited_elsewhere(q.budget().refund(charge_id))
    awaited_elsewhere(q.aclose())
    assert scene.run(q.budget().usage())[0].used_units == 1
    scene.run(q.aclose())
