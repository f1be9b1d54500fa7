"""Processes of a test's own. What fails in one of them fails the test at once, with that process's traceback."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import traceback
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from support.patience import be_patient

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self


class Children:
    """One process for each row of arguments. Each tells what `target` returns.

    A `target` that yields tells what it yields first, and goes on from there.

    Nothing of the parent runs in a forked child but `target`, whatever that raises. With `start="anew"` they have
    nothing of the parent's: the process that forks them has only imported `quota`.
    """

    def __init__(self, target: Callable[..., Any], *rows: tuple[Any, ...], start: str = "fork") -> None:
        context = multiprocessing.get_context("forkserver" if start == "anew" else start)
        context.set_forkserver_preload(["quota.session", "redis", "support.patience"])
        self._told: list[connection.Connection] = []
        self.processes: list[Any] = []
        for row in rows:
            told, tell = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(target, row, tell, dict(os.environ)), daemon=True)  # type: ignore[attr-defined]
            process.start()
            tell.close()  # it has to be the child's alone: then its end is the end of the pipe
            self._told.append(told)
            self.processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill those that still run."""
        for process, told in zip(self.processes, self._told, strict=True):
            process.kill()
            process.join()
            told.close()

    def first_answers(self) -> list[Any]:
        """What each of them tells, in the order of the rows."""
        numbers: dict[Any, int] = {told: number for number, told in enumerate(self._told)}
        answers: dict[int, Any] = {}
        while numbers:
            for told in connection.wait(list(numbers)):
                number = numbers.pop(told)
                answers[number] = self._read(number)
        return [answers[number] for number in range(len(self._told))]

    def answers(self) -> list[Any]:
        """What each of them tells, once all have ended."""
        with self:
            answers = self.first_answers()
            for process in self.processes:
                process.join()
        return answers

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
            went_well, told = self._told[number].recv()
        except EOFError:
            self.processes[number].join()
            status = self.processes[number].exitcode
            raise AssertionError(f"process {number} ended with {status} and told nothing") from None
        assert went_well, f"in process {number}:\n{told}"
        return told


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
