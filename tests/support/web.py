"""Processes that serve HTTP. Run as a program, it is one itself: an application that can hang in several ways."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any, Self

from quota.errors import ConfigError, QuotaError
from quota.web import serving
from quota.web.documents import Problem, send_problem
from quota.web.serving import address_of, listen, names_of, protected, serve
from support.commands import Quota, program

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import uvicorn

    from quota.web.documents import App
    from support.forked import Forked


class Served:
    """A process that says on stdout where it listens. `address` is that."""

    def __init__(self, process: subprocess.Popen[str] | Forked, listens: str = "http://") -> None:
        self.process = process
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline()
        self.address = next((word for word in self.first_line.split() if word.startswith(listens)), "")
        if not self.address:
            _, stderr = self.process.communicate()
            raise AssertionError(f"it does not listen: {stderr}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.communicate()

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def end(self, number: int) -> tuple[int, str]:
        """Send a signal. The exit status and what stderr got."""
        self.process.send_signal(number)
        _, stderr = self.process.communicate(timeout=300)
        return self.process.returncode, stderr


@contextmanager
def in_a_thread(server: uvicorn.Server, listener: socket.socket) -> Iterator[int]:
    """Serve until the block ends. Yields the port."""
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.005)
        assert server.started
        yield int(listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(100)
        listener.close()


def served(app: App, *, passes_on: bool = False) -> AbstractContextManager[int]:
    """Serve on loopback, as our applications are, until the block ends. Yields the port."""
    return in_a_thread(serving._server(app, None, passes_on=passes_on), listen("127.0.0.1", 0))


def served_by(command: Sequence[str], cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Served:
    """A program that starts from nothing."""
    pipe = subprocess.PIPE
    return Served(subprocess.Popen(command, cwd=cwd, env=env, stdout=pipe, stderr=pipe, text=True))


def hanging(*options: str, path: Path | None = None) -> Served:
    """This module as a program. `path` has further modules."""
    env = {"PYTHONPATH": str(path)} if path else {}
    return Served(Quota(Path(gettempdir())).start(*options, script=program("support.web"), env=env))


def helped_by(command: Sequence[str], listener: socket.socket, count: int) -> list[subprocess.Popen[str]]:
    """Start so many processes that serve the same socket: `command` with its number, for `shared_socket`. They end with
    this process. Returns once each serves, and has said `ready`."""
    number = listener.fileno()
    return ready_processes([*command, str(number)], count, pass_fds=[number])


def ready_processes(command: Sequence[str], count: int, **options: Any) -> list[subprocess.Popen[str]]:
    """Start so many processes. Returns once each has said `ready`."""
    pipe = subprocess.PIPE
    started = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, **options) for _ in range(count)]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    return started


def begin(started: Iterable[subprocess.Popen[str]]) -> None:
    """End the stdin of each: what waits for that begins."""
    for process in started:
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None


def shared_socket(number: str) -> socket.socket:
    """In one of these processes: the socket that it serves."""

    def end_with_the_other() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=end_with_the_other, daemon=True).start()
    return socket.socket(fileno=int(number))


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        raise NotImplementedError
    match scope["path"]:
        case "/waits":
            await asyncio.sleep(1_000)
        case "/blocks":
            time.sleep(1_000)
        case "/waits-for-a-thread":
            await asyncio.to_thread(time.sleep, 1_000)
        case "/begins":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
            await asyncio.sleep(1_000)
        case "/large":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": bytes(20_000_000)})
            return
        case "/fails":
            raise RuntimeError("two\nlines")
    await send_problem(send, Problem(404, f"process {os.getpid()}"))


def main(fault: str = "") -> None:
    def make_app() -> Any:
        if fault == "misconfigured":
            raise ConfigError("quota.toml: no")
        return protected(app, hosts=names_of("127.0.0.1"))

    if fault == "impatient":
        serving.HEAD_WITHIN_S = serving.READ_WITHIN_S = 0.2
        fault = ""
    listener = listen("127.0.0.1", 0)
    if fault:
        print(address_of(listener), flush=True)
    try:
        serve(make_app, listener, ready=lambda: print(address_of(listener), flush=True))
    except QuotaError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_status)


if __name__ == "__main__":
    main(*sys.argv[1:])
