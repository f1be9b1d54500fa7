"""Several looks at one ledger, side by side: what they ask a Redis server leaves in one piece, and what they ask a
file is read in one transaction.

Each of them is a generator of steps (`quota.common.steps`). A BATCH of them goes on until each needs an answer of the
ledger; then all questions are asked together, and each generator gets its own answer. So a batch takes as many round
trips as the one of its generators that asks most, and the server answers each question as a command of its own: nobody
else waits for a batch. Two batches take turns: the server answers one while we go on with the other. A cluster, whose
nodes each have some of the keys, is asked one by one.

What is raised is what doing one after the other would have raised: the error of the first that fails. Those after it
are given up.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from quota.common.steps import InSteps, run
from quota.ledger.contract import Inquiry, Question
from quota.ledger.redis_errors import Lost

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from quota.common.steps import Steps
    from quota.ledger.contract import Ledger
    from quota.ledger.redis_connection import Connections
    from quota.ledger.redis_ledger import Command, RedisLedger

    Ask = Callable[[Sequence[Any]], Generator[None, None, list[Any]]]

T = TypeVar("T")

BATCH = 50
"""So many go on side by side."""

AT_ONCE = 2
"""So many batches take turns: their questions and replies are all that is kept. A look that finds something new has its
file open until it ends, and a process has MAX_FILES of these (`quota.recovery.high_water_mark`)."""


def run_side_by_side(ledger: Ledger, all_steps: Iterable[Steps[T]]) -> Iterator[T]:
    """What each of them leads to, in their order."""
    waiting, ask, leaves = iter(all_steps), *_together(ledger)
    if ask is None:
        yield from map(run, waiting)
        return
    for steps in islice(waiting, 1):  # alone: it loads the scripts, and finds out whether there is an answer
        yield run(_left(steps, leaves))
    running: list[_Turns[T]] = []
    while True:
        while len(running) < AT_ONCE and (batch := list(islice(waiting, BATCH))):
            running.append(_Turns(_run_batch(ask, [_left(steps, leaves) for steps in batch])))
        for one in running:
            one.go_on()
        if not running:
            return
        if running[0].is_over:
            yield from running.pop(0).results()


def _together(ledger: Ledger) -> tuple[Ask | None, Callable[[Any], bool]]:
    """How several steps of looks at a ledger are done together, and which these are. None where each is done alone."""
    # Only Redis has connections, and none that serve for all where it is a cluster; only a file has answers.
    connections_of: Callable[[], Connections | None] | None = getattr(ledger, "connections", None)
    connections = None if connections_of is None else connections_of()
    if connections is not None:
        return partial(_asking, connections), lambda step: hasattr(step, "words")
    if hasattr(ledger, "answers"):
        return partial(_reading, ledger.answers), lambda step: isinstance(step, (Question, Inquiry))
    return None, bool


class _Turns(Generic[T]):
    """A batch that goes on whenever it is its turn, and says at last what it led to, or raises."""

    def __init__(self, batch: Generator[None, None, list[T]]) -> None:
        self._batch = batch
        self._results: list[T] = []
        self._failed: Exception | None = None
        self.is_over = False

    def go_on(self) -> None:
        try:
            if not self.is_over:
                next(self._batch)
        except StopIteration as ended:
            self._results, self.is_over = ended.value, True
        except Exception as error:
            self._failed, self.is_over = error, True

    def results(self) -> list[T]:
        if self._failed is not None:
            raise self._failed
        return self._results


def _run_batch(ask: Ask, batch: list[Steps[T]]) -> Generator[None, None, list[T]]:
    results: dict[int, T] = {}
    failed: Exception | None = None
    replies: list[tuple[int, Any]] = [(n, None) for n in range(len(batch))]
    while replies:
        asked: list[tuple[int, Any]] = []
        for n, reply in replies:
            try:
                steps = batch[n]
                asked.append((n, steps.throw(reply) if isinstance(reply, Exception) else steps.send(reply)))
            except StopIteration as ended:
                results[n] = ended.value
            except Exception as error:  # nobody after it would have been asked, had they been asked in turn
                failed = error
                break
        answers = yield from ask([step for _, step in asked])
        replies = list(zip([n for n, _ in asked], answers, strict=True))
    if failed is not None:
        raise failed
    return [results[n] for n in range(len(batch))]


def _asking(connections: Connections, several: Sequence[Command]) -> Generator[None, None, list[Any]]:
    """The replies, each a Failed where there is none. Of what is only looked at, all that is lost is asked once more:
    some of these generators have waited for the others, and have no time left to do so themselves."""
    commands = [command.words for command in several]
    replies = (yield from connections.asking_all(commands)) if commands else []
    lost = [n for n, reply in enumerate(replies) if isinstance(reply, Lost)]
    if lost:
        again = yield from connections.asking_all([commands[n] for n in lost])
        for n, reply in zip(lost, again, strict=True):
            replies[n] = reply
    return replies


def _reading(
    answers_of: Callable[[Sequence[Any]], Sequence[Any] | None], several: Sequence[Callable[[], Any]]
) -> Generator[None, None, list[Any]]:
    """The answers of a file, each an error where there is none. It answers at once."""
    yield from ()
    answers = (answers_of(several) if several else None) or [None] * len(several)
    return [_answer(step) if answer is None else answer for step, answer in zip(several, answers, strict=True)]


def _answer(step: Callable[[], Any]) -> Any:
    try:
        return step()
    except Exception as error:
        return error


def _left(steps: Steps[T], leaves: Callable[[Any], bool]) -> Steps[T]:
    """The same, with no steps left but those that are done together: the others are taken apart, or done."""
    try:
        step: Any = next(steps)
        while True:
            try:
                if leaves(step):
                    answer = yield step
                else:
                    apart = _apart(step)
                    answer = step() if apart is None else (yield from _left(apart, leaves))
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]


def _apart(step: Any) -> Steps[Any] | None:
    """The smaller steps of a step; None where it has none."""
    if isinstance(step, InSteps):
        return step.steps()
    if isinstance(step, (Question, Inquiry)):
        ledger: RedisLedger = step.ledger  # type: ignore[assignment]
        if isinstance(step, Question):
            return ledger.deciding(step.request, commit=step.commit)
        return (ledger.noting if step.name == "notes" else ledger.reading)(*step.args)
    return None
