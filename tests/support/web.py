"""Processes that serve HTTP. Run as a program, it is one itself: an application that can hang in several ways."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from quota.errors import ConfigError, QuotaError
from quota.web import lifecycle
from quota.web.lifecycle import address_of, listen, serve
from quota.web.problem import Problem, send_problem
from quota.web.protection import names_of, protected

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence

TESTS = Path(__file__).resolve().parents[1]


class Served:
    """A process that says on stdout where it listens. `address` is that."""

    def __init__(
        self, command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self.process = subprocess.Popen(
            command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()
        self.address = next((word for word in self.said.split() if word.startswith("http://")), "")
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


def hanging(*options: str, path: Path | None = None) -> Served:
    """This module as a program. `path` has further modules."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS, *([path] if path else ()))))}
    return Served([sys.executable, "-m", "support.web", *options], env=env)


def serve_by_workers(make_app: str, listener: socket.socket, workers: int) -> None:
    """Serve `module:name`, which makes an application, by uvicorn's own workers, until a signal ends them."""
    import uvicorn
    from uvicorn.supervisors import Multiprocess

    config = uvicorn.Config(make_app, factory=True, workers=workers, log_config=None, access_log=False)
    Multiprocess(config, target=uvicorn.Server(config).run, sockets=[listener]).run()


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
        lifecycle.HEAD_WITHIN_S = lifecycle.READ_WITHIN_S = 0.2
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
