"""A program: clients ask for each target on its stdin, with little memory to spare. A line of JSON for each says how
that ended and how much memory it took. It imports only what its clients need."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import quota

SPARE_BYTES = 200_000_000
Ask = Callable[[str], object]


def memory_bytes(what: str) -> int:
    (line,) = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(f"{what}:")]
    return int(line.split()[1]) * 1024


def client(kind: str, session: quota.Session, address: str) -> Ask:
    """What asks `address` for a target. The body of an answer that is no error is read, as far as the client goes."""
    if kind == "google":
        youtube = session.google(max_body_mb=1, max_answer_s=2, max_items=100, timeout_s=2)

        def with_google(target: str) -> object:
            return youtube.videos().list(part="snippet", id=target).execute()

        return with_google
    if kind == "monitoring":
        from quota.reconcile.monitoring import read_figures

        credential = session.credential()
        assert credential.book.monitoring is not None

        def with_monitoring(target: str) -> object:
            Path("target").write_text(target)
            return read_figures(credential, credential.book.monitoring, 1, int(time.time() * 1000))  # type: ignore[arg-type]

        return with_monitoring
    if kind == "notify":
        from quota.reports.notify import _send

        return lambda target: _send(f"{address}/{target}", b"{}", 2)
    from support import http_clients

    metered = getattr(http_clients, kind)(session.budget(), "videos.list", hosts=[address.removeprefix("http://")])
    return lambda target: metered.stream(f"{address}/{target}", lambda piece: True, wait_s=2)


def main(address: str, *kinds: str) -> None:
    with quota.open("quota.toml") as session:
        asks = {kind: client(kind, session, address) for kind in kinds}
        for line in sys.stdin:
            kind, _, target = line.strip().partition(" ")
            if kind == "spare":  # what was imported and opened by the first requests is none of the others' matter
                most = memory_bytes("VmSize") + SPARE_BYTES
                resource.setrlimit(resource.RLIMIT_AS, (most, most))
                continue
            Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
            before, began_s = memory_bytes("VmRSS"), time.monotonic()
            ended: Any
            try:
                answer = asks[kind](target)
                ended = {"answered": answer if isinstance(answer, int) else "object"}
            except Exception as error:
                ended = {"raised": type(error).__name__, "said": str(error)[:3_000]}
            took = {"memory": memory_bytes("VmHWM") - before, "seconds": time.monotonic() - began_s}
            closed = [each.bucket for each in session.project("main").state.facts().exhaustions if not each.reopened_ms]
            for bucket in closed:
                session.project("main").state.reopen(bucket, "a test")
            took["closed"] = len(closed)
            print(json.dumps({**ended, **took}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
