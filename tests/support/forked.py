"""`quota` commands in processes that a server forks: it has imported what the interpreter and `quota` need for 0.1 s.

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
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

IMPORTED = (
    *("json", "random", "sqlite3", "ssl", "tomllib", "zoneinfo", "redis", "rich.console", "rich.table"),
    *("quota.cli.program", "quota.cli.render", "quota.ledger.redis_ledger", "quota.ledger.sqlite_ledger"),
    *("quota.reports.status", "quota.session", "quota.jobs.runner", "quota.jobs.store"),
)

LONGEST = 60_000
"""A longer message does not go through the socket in one piece."""

_OF_THE_INTERPRETER = ("PYTHON", "LC_", "LANG", "LD_")


def can_be_forked(args: Sequence[str], env: Mapping[str, str]) -> bool:
    """Not where something is set that the interpreter reads as it starts."""

    def of_the_interpreter(names: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in names.items() if name.startswith(_OF_THE_INTERPRETER)}

    return (
        os.environ.get("QUOTA_TEST_EXEC") != "1"
        and of_the_interpreter(env) == of_the_interpreter(os.environ)
        and len(_message(args, "", env)) < LONGEST
    )


def run_forked(
    args: Sequence[str], folder: Path, env: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` does it, with nothing to read, and what is written captured as text."""
    out, out_written = os.pipe()
    err, err_written = os.pipe()
    answers, answering = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with answers:
        with answering, open(os.devnull) as nothing:
            fds = [nothing.fileno(), out_written, err_written, answering.fileno()]
            socket.send_fds(_server(), [_message(args, str(folder), env)], fds)
        os.close(out_written)
        os.close(err_written)
        answers.settimeout(timeout_s)
        pid = int(answers.recv(20))
        try:
            stdout, stderr = _read([out, err], time.monotonic() + timeout_s)
            status = int(answers.recv(20))
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(["quota", *args], timeout_s) from None
    return subprocess.CompletedProcess(["quota", *args], status, stdout, stderr)


def _message(args: Sequence[str], folder: str, env: Mapping[str, str]) -> bytes:
    umask = os.umask(0)
    os.umask(umask)
    return json.dumps([list(args), folder, dict(env), umask]).encode()


def _read(fds: list[int], ends_s: float) -> list[str]:
    """All that comes from these pipes."""
    parts: dict[int, list[bytes]] = {fd: [] for fd in fds}
    with selectors.DefaultSelector() as waiting:
        for fd in fds:
            waiting.register(fd, selectors.EVENT_READ)
        try:
            while waiting.get_map():
                ready = waiting.select(ends_s - time.monotonic())
                if not ready:
                    raise TimeoutError
                for key, _ in ready:
                    data = os.read(key.fd, 2**16)
                    parts[key.fd].append(data)
                    if not data:
                        waiting.unregister(key.fd)
        finally:
            for fd in fds:
                os.close(fd)
    return [b"".join(parts[fd]).decode().replace("\r\n", "\n") for fd in fds]


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
    """Start a process for each message, until nobody is there to send one."""
    for name in IMPORTED:
        import_module(name)
    gc.collect()
    gc.freeze()  # or each process would copy all of it, only to look for what is garbage
    with socket.socket(fileno=fd) as messages:
        while True:
            message, fds, _, _ = socket.recv_fds(messages, 2 * LONGEST, 4)
            if not message:
                return
            if os.fork() == 0:
                messages.close()
                _answer(message, fds)
            for one in fds:
                os.close(one)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _answer(message: bytes, fds: list[int]) -> None:
    *streams, answer = fds
    pid = os.fork()
    if pid == 0:
        os.close(answer)
        for target, one in enumerate(streams):
            os.dup2(one, target)
            os.close(one)
        _go_on(*json.loads(message))
    for one in streams:
        os.close(one)
    with contextlib.suppress(OSError):  # who asked has gone
        os.write(answer, str(pid).encode())
        os.write(answer, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    os._exit(0)


def _go_on(args: list[str], folder: str, env: dict[str, str], umask: int) -> NoReturn:
    """Do what `python -m quota` does in this folder and environment, and end as it does, except that what is in memory
    is left to the system: to take it apart takes longer than most commands."""
    os.chdir(folder)
    os.umask(umask)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    sys.path[:] = [folder, *_without_tests()]
    sys.argv = ["quota", *args]
    status: object = 0
    try:
        runpy.run_module("quota", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code
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
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return [path for path in sys.path[1:] if path != tests]
