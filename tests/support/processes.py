"""Processes, threads and event loops of a test's own. What fails in one of them fails the test.

A process fails it at once, with its traceback.
"""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from threading import Barrier
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from support.patience import be_patient

if TYPE_CHECKING:
    import random
    from typing import Self

    from support.installation import Installation

T = TypeVar("T")


class Children:
    """One process for each row of arguments. Each tells what `target` returns.

    A `target` that yields tells what it yields first, and goes on from there.

    Nothing of the parent runs in a forked child but `target`, whatever that raises. With `start="anew"` they have
    nothing of the parent's: the process that forks them has only imported `quota`, and this module.
    """

    def __init__(self, target: Callable[..., Any], *rows: tuple[Any, ...], start: str = "fork") -> None:
        context = multiprocessing.get_context("forkserver" if start == "anew" else start)
        imported = ["quota.session", "quota.clients.google", "quota.jobs.runner", "redis", __name__]
        context.set_forkserver_preload(imported)
        self._readers: list[connection.Connection] = []
        self.processes: list[Any] = []
        for row in rows:
            reader, tell = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(target, row, tell, dict(os.environ)), daemon=True)  # type: ignore[attr-defined]
            process.start()
            tell.close()  # it has to be the child's alone: then its end is the end of the pipe
            self._readers.append(reader)
            self.processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill those that still run."""
        for process, reader in zip(self.processes, self._readers, strict=True):
            process.kill()
            process.join()
            reader.close()

    def answers(self) -> list[Any]:
        """What each of them tells, in the order of the rows, once all have ended."""
        numbers: dict[Any, int] = {reader: number for number, reader in enumerate(self._readers)}
        answers: dict[int, Any] = {}
        with self:
            while numbers:
                for reader in connection.wait(list(numbers)):
                    number = numbers.pop(reader)
                    answers[number] = self._read(number)
            for process in self.processes:
                process.join()
        return [answers[number] for number in range(len(self._readers))]

    def kill(self) -> None:
        """Kill them, whatever they are doing. Whoever failed before fails the test."""
        with self:
            for number, process in enumerate(self.processes):
                process.kill()
                process.join()
                if process.exitcode != -9:
                    self._read(number)

    def _read(self, number: int) -> Any:
        try:
            went_well, answer = self._readers[number].recv()
        except EOFError:
            self.processes[number].join()
            status = self.processes[number].exitcode
            raise AssertionError(f"process {number} ended with {status} and told nothing") from None
        assert went_well, f"in process {number}:\n{answer}"
        return answer


def in_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked child."""
    return Children(work, ()).answers()[0]


def _run(
    target: Callable[..., Any], row: tuple[Any, ...], tell: connection.Connection, environment: dict[str, str]
) -> None:
    os.environ.clear()  # a child that begins anew has that of the first test which had such children
    os.environ.update(environment)
    be_patient()
    try:
        answer = target(*row)
        if inspect.isgenerator(answer):
            tell.send((True, next(answer)))
            next(answer, None)
        else:
            tell.send((True, answer))
    except BaseException:
        tell.send((False, traceback.format_exc()))
        os._exit(1)


# -- commands that die in the middle -----------------------------------------------------------------------------------

KILLED = """
import os, sys
from quota.cli.program import main
event, where, nth, then = sys.argv[1:5]
nth, seen = int(nth), 0
(module, function), (then_module, then_function) = where.split(":"), then.split(":")
def any_of_ours(frame, what, _):
    global seen
    name = frame.f_globals.get("__name__") or ""
    # The store takes nine of ten calls, to put a page's texts together.
    if what == "call" and name.startswith("quota.") and name not in ("quota.jobs.store.store", "quota.jobs.store.rows"):
        seen += 1
        if seen == nth:
            os.kill(os.getpid(), 9)
def this_one(frame, what, _):
    global seen
    if what == event and frame.f_code.co_qualname == function and frame.f_globals.get("__name__") == module:
        seen += 1
        if seen == nth:
            if not then_function:
                os.kill(os.getpid(), 9)
            sys.setprofile(that_one)
def that_one(frame, what, _):
    if what == "call" and frame.f_code.co_qualname == then_function and frame.f_globals.get("__name__") == then_module:
        os.kill(os.getpid(), 9)
del sys.argv[1:5]
sys.setprofile(this_one if function else any_of_ours)
main()
"""


def killed_anywhere(machine: Installation, dice: random.Random, calls: int, *command: str) -> bool:
    """Run a command of `quota` that dies at one of its first `calls` of functions of ours. Returns whether it died."""
    nth = str(dice.randint(1, calls))
    with machine.start("call", ":", nth, ":", *command, script=KILLED) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode in (0, -signal.SIGKILL), (process.returncode, out, err)
    return process.returncode != 0


# -- threads and event loops -------------------------------------------------------------------------------------------


def in_threads(target: Callable[..., T], *rows: tuple[object, ...]) -> list[T]:
    """What `target` returns for each row of arguments. Each has a thread of its own, and all begin together."""
    ready = Barrier(len(rows))

    def begin(row: tuple[object, ...]) -> T:
        ready.wait()
        return target(*row)

    with ThreadPoolExecutor(len(rows)) as threads:
        return list(threads.map(begin, rows))


Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine in a loop of its own."""

KINDS = ["asyncio", "uvloop"]
each_loop = pytest.mark.parametrize("run", KINDS, indirect=True)


def runner(kind: str) -> Run:
    if kind == "asyncio":
        return asyncio.run
    return pytest.importorskip("uvloop").run  # type: ignore[no-any-return]
