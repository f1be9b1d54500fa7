"""A TCP proxy that fails on request: what a network between a ledger and its server can do.

    with Proxy(server.port) as proxy:
        ledger = open_ledger(proxy.url)
        proxy.fail("drop-reply")          # the next script call arrives and is executed; its answer does not come back

A request is what one `recv` brings that holds `match`, by default a script call; everything else passes.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

Kind = Literal[
    "drop-request",  # the connection ends before the request is passed on
    "swallow-request",  # the request is lost, and all that would follow it; the connection stays open
    "hold-request",  # the request is kept, and passed on by `release`, whatever its sender did since
    "delay-request",  # the request is passed on after `delay_s`
    "drop-reply",  # the request is passed on, and the connection ends before the reply
    "cut-reply",  # the same, but `keep_bytes` of the reply still come through
    "swallow-reply",  # the reply is lost, and all that would follow it; the connection stays open
]


@dataclass(frozen=True)
class Fault:
    kind: Kind
    match: bytes
    delay_s: float
    keep_bytes: int


class Proxy:
    """Passes connections to 127.0.0.1:`port` on inside `with`. Faults are used up in the order they were asked for."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.requests = 0
        self.trips = 0
        """What any client sent, scripts or not."""
        self.most_at_once = 0
        """So many script calls came in one piece."""
        self.connections = 0
        self._faults: list[Fault] = []
        self._held: list[tuple[socket.socket, bytes]] = []
        self._lock = threading.Lock()
        self._running = threading.Event()
        self._running.set()
        self._open: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def fail(
        self, kind: Kind, *, times: int = 1, match: bytes = b"EVALSHA", delay_s: float = 0.0, keep_bytes: int = 0
    ) -> None:
        """Let the next `times` requests that hold `match` fail in this way."""
        with self._lock:
            self._faults += [Fault(kind, match, delay_s, keep_bytes)] * times

    def pass_next(self, match: bytes = b"EVALSHA") -> None:
        """Let the next request through unharmed, before the faults asked for after this."""
        self.fail("delay-request", match=match)

    def heal(self) -> None:
        """Forget the faults that are still to come."""
        with self._lock:
            self._faults.clear()

    def pause(self) -> None:
        """Pass nothing on, in either direction, until `resume`; connections are still accepted."""
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    @property
    def held(self) -> int:
        return len(self._held)

    def release(self) -> int:
        """Pass on the held requests now, late; how many."""
        with self._lock:
            held, self._held = self._held, []
        for server, data in held:
            server.sendall(data)
        return len(held)

    def drop_all(self) -> None:
        """End every connection, as a server that dies."""
        for each in tuple(self._open):
            _end(each)

    def __enter__(self) -> Self:
        self._spawn(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._listener)
        self._listener.close()
        self._running.set()
        self.drop_all()
        while threads := tuple(self._threads):  # until the one that starts others has ended
            for thread in threads:
                thread.join(100)
                self._threads.discard(thread)

    def _spawn(self, work: Callable[..., None], *args: object) -> None:
        def run() -> None:
            work(*args)
            self._threads.discard(thread)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._threads.add(thread)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                try:
                    server = socket.create_connection(("127.0.0.1", self._server_port))
                except OSError:
                    client.close()
                    continue
                for each in (client, server):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._open.add(each)
                self._spawn(self._pass, client, server)

    def _pass(self, client: socket.socket, server: socket.socket) -> None:
        """Both directions of one connection, until both have ended."""
        replies: list[Fault] = []
        back = threading.Thread(target=self._pass_replies, args=(server, client, replies), daemon=True)
        back.start()
        self._pass_requests(client, server, replies)
        back.join()
        for each in (client, server):
            self._open.discard(each)
            each.close()

    def _next_fault(self, data: bytes) -> Fault | None:
        with self._lock:
            if self._faults and self._faults[0].match in data:
                return self._faults.pop(0)
        return None

    def _pass_requests(self, client: socket.socket, server: socket.socket, replies: list[Fault]) -> None:
        holding = swallowing = False  # a stream never goes on behind a part of it that is lost
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 20):
                self._running.wait()
                if swallowing:
                    continue
                self.requests += b"EVALSHA" in data
                self.most_at_once = max(self.most_at_once, data.count(b"EVALSHA"))
                self.trips += 1
                fault = self._next_fault(data)
                kind = fault.kind if fault else None
                if fault is None or kind == "delay-request":
                    time.sleep(fault.delay_s if fault else 0)
                elif kind == "drop-request":
                    break
                elif kind == "swallow-request":
                    swallowing = True
                    continue
                elif kind == "hold-request":
                    holding = True
                    with self._lock:
                        self._held.append((server, data))
                    continue
                else:
                    replies.append(fault)
                server.sendall(data)
        _end(client)
        if not holding:
            _end(server)

    def _pass_replies(self, server: socket.socket, client: socket.socket, replies: list[Fault]) -> None:
        silent = False  # a stream never goes on behind a part of it that is lost
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 20):
                self._running.wait()
                fault = replies.pop(0) if replies else None
                silent = silent or (fault is not None and fault.kind == "swallow-reply")
                if silent:
                    continue
                if fault is None:
                    client.sendall(data)
                else:
                    client.sendall(data[: fault.keep_bytes])
                    break
        _end(client)
        _end(server)


def _end(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
