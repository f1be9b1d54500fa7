"""The same proof over HTTP: `prove --http` sends bursts to a real server, behind a fixed window and each algorithm.

The server is in a thread of this process. One identity sends `LIMIT` requests late in a fixed window, and as many
again half a window later, when the next one has begun.
"""

from __future__ import annotations

import http.client
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from quota.errors import QuotaError

LIMIT = 20
BURST = 5
WINDOWS_MS = (2_000, 6_000, 18_000)
"""Tried one after the other, until the machine is quick enough."""

FIXED = "fixed window"
KINDS = (FIXED, "counter", "gcra", "log")
_PATHS = {kind: f"/{kind.partition(' ')[0]}" for kind in KINDS}


class HttpRow(NamedTuple):
    """What one kind of limit admitted of two bursts, and the most of it in any window."""

    kind: str
    first: int
    second: int
    most: int

    def as_json(self) -> dict[str, object]:
        return {"kind": self.kind, "first": self.first, "second": self.second, "most_in_any_window": self.most}


class HttpProof(NamedTuple):
    """What each kind admitted, against LIMIT in `window_ms`."""

    window_ms: int
    rows: tuple[HttpRow, ...]

    def as_json(self) -> dict[str, object]:
        return {"limit": LIMIT, "window_ms": self.window_ms, "rows": [row.as_json() for row in self.rows]}


def prove_http() -> HttpProof:
    """Start the server, send the bursts, stop it: 5 s, or longer on a machine that is too busy for a window of 2 s.

    Raises QuotaError where the server cannot be started, or the machine is too busy for any of the windows.
    """
    from quota.web.lifecycle import require_web

    require_web()
    for window_ms in WINDOWS_MS:
        rows = _proved(window_ms)
        if rows is not None:
            return HttpProof(window_ms, rows)
    raise QuotaError("this machine is too busy to send its bursts in time; run it again later")


def _proved(window_ms: int) -> tuple[HttpRow, ...] | None:
    """What was admitted of the bursts; None if they took too long to say anything."""
    from quota.web.lifecycle import served

    # SIGTERM alone would leave the folder behind.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with (
            tempfile.TemporaryDirectory(prefix="quota-prove-") as folder,
            served(_make_app(str(Path(folder) / "inbound.db"), window_ms)) as (host, port),
            closing(http.client.HTTPConnection(host, port, timeout=10)) as connection,
        ):
            return _sent(connection, window_ms / 1000)
    finally:
        signal.signal(signal.SIGTERM, before)


def _sent(connection: http.client.HTTPConnection, window_s: float) -> tuple[HttpRow, ...] | None:
    for path in _PATHS.values():  # outside of what is measured: connections, files and scripts are made
        _status(connection, f"{path}/warm-up")
    edge_s = (time.time() // window_s + 2) * window_s
    admitted_at: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    for start_s in (edge_s - window_s / 4, edge_s + window_s / 4):
        time.sleep(max(0.0, start_s - time.time()))
        connection.close()  # the next request opens it again: a server ends one that was idle for some seconds
        for kind in KINDS:
            sent = [(time.time(), _status(connection, _PATHS[kind])) for _ in range(LIMIT)]
            if not {status for _, status in sent} <= {200, 429}:
                return None
            admitted_at[kind].append([at for at, status in sent if status == 200])
        if time.time() > start_s + window_s / 5:
            return None
    return tuple(
        HttpRow(kind, len(first), len(second), _most([*first, *second], window_s))
        for kind, (first, second) in admitted_at.items()
    )


def _status(connection: http.client.HTTPConnection, path: str) -> int:
    connection.request("GET", path)
    response = connection.getresponse()
    response.read()
    return response.status


def _most(times_s: Sequence[float], window_s: float) -> int:
    return max((sum(end - window_s < at <= end for at in times_s) for end in times_s), default=0)


# -- the server --------------------------------------------------------------------------------------------------------


class _Fixed:
    """What most examples show: a counter that is set to zero as each window begins."""

    def __init__(self, window_ms: int) -> None:
        self._window_ms = window_ms
        self._window = self._count = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            raise NotImplementedError(scope["type"])  # what servers expect of an application without lifespan
        status = 200
        if scope["path"] == _PATHS[FIXED]:
            window = int(time.time() * 1000) // self._window_ms
            if window != self._window:
                self._window, self._count = window, 0
            self._count += 1
            status = 200 if self._count <= LIMIT else 429
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


def _make_app(file: str, window_ms: int) -> Any:
    from quota.inbound import Limit, Rule, Rules, asgi

    limit = Limit(LIMIT, window_ms)
    rules = [
        Rule("counter", limit, path="/counter", fail="closed"),
        Rule("gcra", limit._replace(burst=BURST), path="/gcra", algorithm="gcra", fail="closed"),
        Rule("log", limit, path="/log", algorithm="log", fail="closed"),
        Rule("warm-up", Limit(1_000, 60_000)),
    ]
    return asgi(_Fixed(window_ms), Rules(rules, url=f"sqlite:///{file}", exempt=[_PATHS[FIXED]]))
