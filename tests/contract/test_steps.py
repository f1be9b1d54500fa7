"""A decision in steps is the decision: who awaits the steps is told what who blocks for them is told."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from quota.attribution import labels
from quota.budget import charging_attempt, deciding
from quota.common.clock import NEVER, elapsed_s
from quota.decision import Decision
from quota.errors import UnknownMethod
from quota.ledger import redis_ledger
from quota.ledger.contract import Identity, Question, read_entries
from quota.ledger.entry import Charge
from quota.ledger.redis_errors import Failed, Lost, NoAnswer, error_of
from quota.ledger.redis_ledger import Command, RedisLedger
from quota.ledger.resp import INCOMPLETE, RawError, new_replies
from quota.ledger.unlogged import UnloggedUsage
from quota.limits import DAY_MS, HOUR_MS
from quota.recovery.allowance import Allowance
from quota.recovery.high_water_mark import HighWaterMark
from support.setup import Setup, limit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from quota.common.steps import Steps
    from quota.ledger.contract import ChargeRequest, ChargeResult, Ledger
    from support.servers import RedisServer


async def awaited(steps: Steps[Any], ask: Callable[[bytes], Awaitable[Any]] | None = None) -> Any:
    """Do the steps in threads; with `ask`, what a Redis server is asked on a connection that is awaited."""
    try:
        step = next(steps)
        while True:
            try:
                if ask is not None and isinstance(step, Question) and isinstance(step.ledger, RedisLedger):
                    answer = await awaited(step.ledger.deciding(step.request, commit=step.commit), ask)
                elif ask is not None and isinstance(step, Command):
                    answer = await ask(step.words)
                else:
                    answer = await asyncio.to_thread(step)
            except Exception as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as ended:
        return ended.value


class Waiting:
    """Waits for a decision in threads; with `ask`, for what a Redis server is asked on a connection of one's own."""

    def __init__(self, ask: Callable[[bytes], Awaitable[Any]] | None = None) -> None:
        self._ask = ask

    async def ask(self, repeated: Any, at: Any) -> ChargeResult:
        if self._ask is None:
            return await asyncio.to_thread(repeated, *at)
        started_s, reply = elapsed_s(), None
        try:
            reply = await self._ask(repeated.words(at))
        except Failed as error:
            reply = error
        return repeated.result(at, reply) or await self.do(repeated.concluding(at, started_s, reply))

    async def do(self, steps: Steps[Any]) -> Any:
        return await awaited(steps, self._ask)


class Line:
    """An awaited connection. It loses the answers of these commands, counted from 0."""

    def __init__(self, port: int, lost: tuple[int, ...] = ()) -> None:
        self.port, self.lost, self.asked = port, lost, 0

    async def __call__(self, words: bytes) -> Any:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(words)
        replies, number = new_replies(), self.asked
        self.asked += 1
        while (reply := replies.gets()) is INCOMPLETE:
            replies.feed(await reader.read(65_536))
        writer.close()
        if number in self.lost:
            raise Lost("closed by the server")
        if isinstance(reply, RawError):
            raise error_of(str(reply))
        return reply


def test_awaited_it_is_decided_as_it_is_blocking(setup: Setup) -> None:
    """By turns, until the limit is full: each goes on from where the other one came to."""
    budget = setup.budget(limit(10), limit(8, DAY_MS // 2, name="half"))

    def charge(number: int) -> Decision:
        if number % 2:
            return budget.charge("videos.list", job="j", region="DE")
        decision: Decision = asyncio.run(deciding(budget, Waiting(), "videos.list", job="j", region="DE", commit=True))
        return decision

    decisions = [charge(number) for number in range(10)]
    assert [decision.admitted for decision in decisions] == [True] * 8 + [False] * 2
    assert [decision.limits[0].used_units for decision in decisions] == [*range(1, 9), 8, 8]
    blocking, in_steps = decisions[-1], decisions[-2]
    assert in_steps._replace(decided_at_ms=0) == blocking._replace(decided_at_ms=0)
    peek = asyncio.run(deciding(budget, Waiting(), "videos.list", commit=False))
    assert (peek.admitted, peek.reason, peek.id) == (False, "limit", None)


def test_every_value_of_a_decision_has_all_its_fields(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are made of a bare tuple, and nothing else would complain about a short one."""
    seen: list[Any] = []
    decide = setup.ledger.decide

    def note(request: ChargeRequest, *, commit: bool) -> ChargeResult:
        result = decide(request, commit=commit)
        seen.extend((request, request.charge, request.expected, result))
        return result

    monkeypatch.setattr(setup.ledger, "decide", note)
    budget = setup.budget(limit(2), high_water_mark=HighWaterMark(None, setup.project))
    decisions = [budget.charge("videos.list") for _ in range(4)]
    assert [decision.admitted for decision in decisions] == [True, True, False, False]
    seen += [*decisions, *(state for decision in decisions for state in decision.limits)]
    assert [one for one in seen if len(one) != len(type(one)._fields)] == []


def test_labels_are_those_of_the_task_that_begins(setup: Setup) -> None:
    budget = setup.budget()

    async def charge(job: str) -> str:
        with labels(job=job, region="FR"):
            decision: Decision = await deciding(budget, Waiting(), "videos.list", commit=True)
        return str(decision.id)

    async def both() -> list[str]:
        return await asyncio.gather(charge("a"), charge("b"))

    ids = asyncio.run(both())
    entries = read_entries(setup.ledger, setup.project, 0, NEVER)
    log = {entry.id: (entry.job, entry.region) for entry in entries}
    assert [log[one] for one in ids] == [("a", "FR"), ("b", "FR")]


def test_an_attempt_costs_what_it_costs_blocking(setup: Setup) -> None:
    budget = setup.budget()
    decision: Decision = asyncio.run(charging_attempt(budget, Waiting(), "of.nobody", "POST"))
    with pytest.raises(UnknownMethod):
        asyncio.run(deciding(budget, Waiting(), "of.nobody", commit=True))
    assert (decision.admitted, decision.cost_units) == (True, budget.book.default_price("POST").units)


# -- on a connection of one's own --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lost", "asked"), [((), 2), ((0,), 3), ((1,), 3)])
def test_it_is_asked_on_a_connection_of_ones_own_and_again_when_the_answer_is_lost(
    redis_server: RedisServer, lost: tuple[int, ...], asked: int
) -> None:
    """It is charged once. A server that lacks the script is sent its text."""
    setup = Setup.open(redis_server.url)
    assert isinstance(setup.ledger, RedisLedger)
    setup.ledger._command("SCRIPT", "FLUSH")
    line = Line(redis_server.port, lost)
    decision = asyncio.run(deciding(setup.budget(), Waiting(line), "videos.list", commit=True))
    assert (decision.admitted, decision.source, decision.limits[0].used_units) == (True, "ledger", 1)
    assert line.asked == asked
    assert [entry.id for entry in read_entries(setup.ledger, setup.project, 0, NEVER)] == [decision.id]
    setup.ledger.close()


def test_where_no_answer_comes_it_is_refused(redis_server: RedisServer) -> None:
    """The charge may be in the log: then it counts there."""
    setup = Setup.open(redis_server.url)
    decision = asyncio.run(
        deciding(setup.budget(), Waiting(Line(redis_server.port, (0, 1, 2, 3))), "videos.list", commit=True)
    )
    assert (decision.admitted, decision.reason) == (False, "ledger-unavailable")
    assert len(list(read_entries(setup.ledger, setup.project, 0, NEVER))) == 1
    setup.ledger.close()


def test_a_ledger_that_counts_is_said_to_count_where_there_was_no_time_to_ask_it_again(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of that has left, so nothing is charged. What has left may be: then the ledger did not answer."""

    def decision(error: Lost) -> Decision:
        async def ask(words: bytes) -> Any:
            if line.asked:
                raise error
            return await line(words)

        line = Line(redis_server.port)
        budget = setup.budget(limit(10**6, name=f"new-{error.left}", window_ms=(2 + error.left) * HOUR_MS))
        decided: Decision = asyncio.run(deciding(budget, Waiting(ask), "videos.list", commit=True))
        return decided

    setup = Setup.open(redis_server.url)
    for _ in range(6):
        setup.budget(limit(10**6)).charge_many(["videos.list"] * 100)
    monkeypatch.setattr(redis_ledger, "RETRY_WITHIN_S", -1)
    assert decision(NoAnswer("not sent", left=False)).reason == "counting"
    assert decision(NoAnswer("no answer")).reason == "ledger-unavailable"
    setup.ledger.close()


# -- what blocks -------------------------------------------------------------------------------------------------------


class Watched:
    """A ledger that notes which of its methods were called, and whether in this thread."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._thread = ledger, threading.get_ident()
        self.called: set[tuple[str, bool]] = set()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ledger, name)

        def call(*args: Any, **more: Any) -> Any:
            self.called.add((name, threading.get_ident() == self._thread))
            return found(*args, **more)

        return call if callable(found) else found


def test_the_ledger_is_asked_in_steps_alone(setup: Setup, tmp_path: Path) -> None:
    """Also when a debt is repaid, the epoch has changed, and the log must be read."""
    memory = HighWaterMark(str(tmp_path / "watermark"), setup.project)
    allowance = Allowance(str(tmp_path / "allowance.db"), 1, 50, lambda: setup.now_ms)
    budget = setup.budget(limit(5), high_water_mark=memory, allowance=allowance)
    watched = Watched(setup.ledger)
    budget.ledger = watched  # type: ignore[assignment]

    def charge() -> Decision:
        decision: Decision = asyncio.run(deciding(budget, Waiting(), "videos.list", commit=True))
        return decision

    assert charge().admitted
    allowance.draw(Identity("", setup.project), [Charge(1, "units", "m", "", "", "k")], DAY_MS, commit=True)
    allowance._checked_ms.clear()
    assert charge().limits[0].used_units == 3
    usage = UnloggedUsage(budget.limits[0].view.name, "lost", ((2, setup.now_ms + HOUR_MS),), (0, 0))
    setup.ledger.add_unlogged(setup.project, "after", [usage])
    refused = charge()
    assert (refused.reason, refused.retry_at_ms) == ("limit", setup.now_ms + HOUR_MS)
    prepared = {("repeating", True)}  # asks nobody
    assert watched.called - prepared == {("decide", False), ("repay", False), ("read", False)}
