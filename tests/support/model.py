"""A small language model over HTTP: it says what each answer used, in every way in which such APIs say it, or does not.

A request's JSON says what is to happen: `max_tokens`, `use` (what it really costs), and `how`:

    json      one document with `usage`         events    a stream of events, the last with `usage`, then [DONE]
    silent    one document without              no-done   the same stream without [DONE]
    header    the header X-Cost                 quiet     a stream without `usage`
    gzip, br  a packed document                 cut       a stream that breaks off after an event with a part of `usage`
    packed    a packed stream                   hang-up   no answer at all
    torn      a packed stream without its end, as torn-br
    short     as json, but less than announced  closed    as json, with an `error`
    free      as json, with `free`
                                                steps     a stream whose every event waits for `go_on`
"""

from __future__ import annotations

import gzip
import json
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import brotli

from support.plain_http import Reached, Upstream, answer, head

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "packed": gzip.compress,
    "torn": lambda data: (packer := zlib.compressobj(wbits=31)).compress(data) + packer.flush(zlib.Z_SYNC_FLUSH),
    "torn-br": lambda data: (packer := brotli.Compressor()).process(data) + packer.flush(),
}


class Model(Upstream):
    """Serves inside `with`, on loopback. `asked` lists the requests that arrived, in order."""

    def __init__(self) -> None:
        super().__init__(self._answer_to)
        self.asked: list[dict[str, Any]] = []
        self.go_on = threading.Semaphore(0)
        self.url = f"{self.address}/v1/chat"

    def _answer_to(self, request: Reached) -> Iterable[bytes]:
        asked = json.loads(request.body)
        self.asked.append(asked)
        how, use = asked.get("how", "json"), asked["use"]
        if how == "hang-up":
            return []
        if how in ("events", "no-done", "quiet", "cut", *PACKERS, "steps"):
            return self._stream(how, use)
        return self._document(how, use)

    def _document(self, how: str, use: int) -> list[bytes]:
        usage: dict[str, Any] = {} if how in ("silent", "header") else {"usage": {"total_tokens": use}}
        usage |= {"closed": {"error": "slow"}, "free": {"free": True}, "short": {"free": True}}.get(how, {})
        body = json.dumps({"choices": ["x" * 100], **usage}).encode()
        headers = ["Content-Type: application/json"]
        if how in ("header", "short"):
            headers.append(f"X-Cost: {use}")
        if how == "short":
            return [head(*headers, f"Content-Length: {len(body) + 800}", keeps=True) + b"\r\n" + body, b""]
        if how == "gzip":
            body = gzip.compress(body)
        elif how == "br":
            body = brotli.compress(body)
        if how in ("gzip", "br"):
            headers.append(f"Content-Encoding: {how}")
        return [answer(body, *headers)]

    def _stream(self, how: str, use: int) -> Iterator[bytes]:
        go_on = self.go_on
        headers = ["Content-Type: text/event-stream; charset=utf-8", "Transfer-Encoding: chunked"]
        pieces = list(events(how, use))
        if how in PACKERS:
            whole = PACKERS[how](b"".join(pieces))
            pieces = [whole[at : at + 7] for at in range(0, len(whole), 7)]
            headers.append(f"Content-Encoding: {'br' if how == 'torn-br' else 'gzip'}")
        yield head(*headers, keeps=True) + b"\r\n"
        for piece in pieces:
            if how == "steps":
                go_on.acquire()
            yield b"%x\r\n%b\r\n" % (len(piece), piece)
        yield b"" if how == "cut" else b"0\r\n\r\n"

    def forget(self) -> None:
        """Whoever waits to go on does so, and the next ones wait for another `go_on`."""
        self.go_on.release(100)
        self.go_on = threading.Semaphore(0)

    def __exit__(self, *_: object) -> None:
        self.forget()
        super().__exit__()


def events(how: str, use: int) -> Iterator[bytes]:
    for n in range(3):
        usage = {"total_tokens": use // 2} if how == "cut" else None
        yield b"data: " + json.dumps({"choices": [str(n)], "usage": usage}).encode() + b"\r\n\r\n"
    if how == "cut":
        return
    if how != "quiet":
        yield b"event: last\ndata: " + json.dumps({"choices": [], "usage": {"total_tokens": use}}).encode() + b"\n\n"
    if how not in ("no-done", "torn", "torn-br"):
        yield b"data: [DONE]\n\n"
