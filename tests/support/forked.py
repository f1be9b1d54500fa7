"""`quota` commands in processes that a server forks: it has imported what the interpreter, `quota` and Google's client
need for half a second.

A command is a process of its own, with its own arguments, environment, folder and streams. What is different: modules
are imported that it may not need, in the server's order. With QUOTA_TEST_EXEC=1 every command starts from nothing, as a
user's does; `make soak` runs the tests of commands so.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, Self

IMPORTED = (
    *("json", "random", "sqlite3", "ssl", "tomllib", "zoneinfo", "redis", "rich.console", "rich.table"),
    *("quota.cli.program", "quota.cli.output", "quota.ledger.redis_log", "quota.ledger.sqlite_log"),
    *("quota.cli.reports", "quota.cli.doctor", "quota.cli.book", "quota.inbound.configured"),
    *("quota.session", "quota.jobs.commands", "quota.jobs.contributions", "quota.clients.google"),
    *("quota.dashboard.app", "uvicorn.protocols.http.h11_impl"),
)

LONGEST = 60_000
"""A longer message does not go through the socket in one piece."""

_OF_THE_INTERPRETER = ("PYTHON", "LC_", "LANG", "LD_")


def can_be_forked(args: Sequence[str], env: Mapping[str, str], script: str = "") -> bool:
    """Whether nothing is set that the interpreter reads at its start."""

    def of_the_interpreter(names: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in names.items() if name.startswith(_OF_THE_INTERPRETER)}

    return (
        os.environ.get("QUOTA_TEST_EXEC") != "1"
        and hasattr(os, "pidfd_open")  # Linux
        and of_the_interpreter(env) == of_the_interpreter(os.environ)
        and len(_message(args, "", env, script)) < LONGEST
    )


class Forked:
    """A process that the server forks, with the words of `subprocess.Popen`: a command of `quota`, or the Python
    program `script` with these arguments. Nobody writes to it but through `stdin=subprocess.PIPE`."""

    def __init__(
        self,
        args: Sequence[str],
        folder: Path,
        env: Mapping[str, str],
        *,
        script: str = "",
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
    ) -> None:
        self.args = ["-c" if script else "quota", *args]
        self.returncode: int | None = None
        self._answers, answering = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ExitStack() as given:
            given.enter_context(answering)
            fds = []
            for name, wanted, number in (("stdin", stdin, 0), ("stdout", stdout, 1), ("stderr", stderr, 2)):
                stream = None
                if wanted == subprocess.PIPE:
                    read, written = os.pipe()
                    ours, theirs = (written, read) if number == 0 else (read, written)
                    stream = open(ours, "w" if number == 0 else "r", encoding="utf-8")  # noqa: SIM115  # as Popen
                    given.callback(os.close, theirs)
                elif wanted == subprocess.DEVNULL:
                    theirs = given.enter_context(open(os.devnull, "r+b", buffering=0)).fileno()
                else:
                    theirs = wanted
                setattr(self, name, stream)
                fds.append(theirs)
            message = _message(args, str(folder), env, script)
            socket.send_fds(_server(), [message], [*fds, answering.fileno()])
        self.pid = int(self._answers.recv(20))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams():
            stream.close()
        self.wait()

    def _streams(self) -> list[Any]:
        return [stream for stream in (self.stdin, self.stdout, self.stderr) if stream is not None]

    def poll(self) -> int | None:
        with contextlib.suppress(TimeoutError, BlockingIOError):
            return self._ended(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        try:
            return self._ended(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(self.args, timeout or 0) from None

    def _ended(self, timeout: float | None) -> int:
        if self.returncode is None:
            self._answers.settimeout(timeout)
            self.returncode = int(self._answers.recv(20))
            self._answers.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it writes until its end; of a stream that is no pipe, nothing."""
        if self.stdin is not None:
            self.stdin.close()
        ends_s = None if timeout is None else time.monotonic() + timeout
        read = ["", ""]

        def read_all(number: int, stream: Any) -> None:
            read[number] = stream.read()

        pipes = [(n, stream) for n, stream in enumerate((self.stdout, self.stderr)) if stream and not stream.closed]
        threads = [threading.Thread(target=read_all, args=pipe, daemon=True) for pipe in pipes]
        for thread in threads:
            thread.start()
        for thread, (_, stream) in zip(threads, pipes, strict=True):
            thread.join(None if ends_s is None else ends_s - time.monotonic())
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            stream.close()
        self.wait(None if ends_s is None else max(0.0, ends_s - time.monotonic()))
        return read[0], read[1]


def for_a_shell(env: Mapping[str, str]) -> tuple[list[str], list[int]]:
    """What a shell may run as `quota`, and the descriptors that it has to inherit."""
    if not can_be_forked([], env):
        return [sys.executable, "-m", "quota"], []
    server = _server().fileno()
    return [sys.executable, "-I", "-S", str(Path(__file__).with_name("asking.py")), str(server)], [server]


def _message(args: Sequence[str], folder: str, env: Mapping[str, str], script: str = "") -> bytes:
    umask = os.umask(0)
    os.umask(umask)
    return json.dumps([list(args), folder, dict(env), umask, script]).encode()


@lru_cache(maxsize=1)
def _server() -> socket.socket:
    """The socket of this process's server, which ends with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        code = f"from support.forked import serve; serve({theirs.fileno()})"
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        server = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[theirs.fileno()], env=env, stdin=subprocess.DEVNULL
        )
    atexit.register(_end, ours, server)
    return ours


def _end(ours: socket.socket, server: subprocess.Popen[bytes]) -> None:
    ours.close()
    server.wait()


def serve(fd: int) -> None:
    """Start a process for each message and tell how it ends, until nobody is there to send one."""
    for name in IMPORTED:
        import_module(name)
    gc.collect()
    gc.freeze()  # or each process would copy all of it, only to look for what is garbage
    messages = socket.socket(fileno=fd)
    running: dict[int, tuple[int, int]] = {}
    """The pid of each process and where its status is told, by what is readable once it has ended."""
    events = select.poll()
    events.register(messages, select.POLLIN)
    while True:
        for ready, _ in events.poll():
            if ready == fd:
                message, fds, _, _ = socket.recv_fds(messages, 2 * LONGEST, 4)
                if not message:
                    return
                *streams, answer = fds
                pid = os.fork()
                if pid == 0:
                    for ended, (_, others) in running.items():
                        os.close(ended)
                        os.close(others)
                    messages.close()
                    os.close(answer)
                    _answer(message, streams)
                for each in streams:
                    os.close(each)
                ended = os.pidfd_open(pid)
                running[ended] = pid, answer
                events.register(ended, select.POLLIN)
                _tell(answer, pid)
            else:
                pid, answer = running.pop(ready)
                events.unregister(ready)
                os.close(ready)
                _tell(answer, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os.close(answer)


def _tell(answer: int, number: int) -> None:
    with contextlib.suppress(OSError):  # who asked has gone
        os.write(answer, str(number).encode())


def _answer(message: bytes, streams: list[int]) -> NoReturn:
    for target, each in enumerate(streams):
        os.dup2(each, target)
        os.close(each)
    _go_on(*json.loads(message))


def _go_on(args: list[str], folder: str, env: dict[str, str], umask: int, script: str) -> NoReturn:
    """Do what `python -m quota` does in this folder and environment, or `python -c`, and end as it does, except that
    what is in memory is left to the system: to take it apart takes longer than most commands."""
    os.chdir(folder)
    os.umask(umask)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    sys.path[:] = [folder, *_without_tests()]
    sys.argv = ["-c" if script else "quota", *args]
    status: object = 0
    try:
        if script:
            exec(compile(script, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102  # a test's own
        else:
            runpy.run_module("quota", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        status = 1
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        status = 120
    os._exit(status if isinstance(status, int) else 0)


def _without_tests() -> list[str]:
    """The module search path without the checkout and its tests, which pytest adds."""
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return [path for path in sys.path[1:] if path not in (tests, os.path.dirname(tests))]
