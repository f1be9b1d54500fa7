"""The emulator, and what only tests ask of it: faults, batches of calls, uploads in pieces, and Cloud Monitoring.

    with Emulator() as upstream:
        upstream.fault("status", status=503, method="videos.list", after=2)

A call that a fault hits is counted and charged before anything else, so a fault makes no call free. The envelope of a
batch and the chunks of an upload carry calls and are none: they are counted separately, as "free"; the calls of the
batch count one by one, and so does the call that opens the upload.
"""

import re
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from email.parser import Parser
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import urlencode
from weakref import WeakSet

from quota.jobs import emulator
from quota.jobs.emulator import replies, server
from quota.jobs.emulator.api import Call, is_upload
from quota.jobs.emulator.replies import Json, Rejected, Reply
from quota.jobs.emulator.server import Request, encode_body, json_object, make_request
from quota.jobs.emulator.usage import Charge, Meter
from support import monitoring

_BATCH_PATHS = ("/batch", "/batch/youtube/v3")


# --- faults ----------------------------------------------------------------------------------------------------------


REPLY_KINDS = frozenset({"status", "exhaust", "limit-zero"})
CONNECTION_KINDS = frozenset(
    {
        "close-after",  # the call is charged and done, then the connection closes without an answer
        "drop-idle",  # the call is answered, then the kept-alive connection closes without notice
        "hang",  # the call is charged and done, then silence for `ms`, then the connection closes without an answer
        "latency",  # the answer comes after `ms`
        "redirect",  # the answer redirects to the same address
        "truncate",  # the connection closes in the middle of the body
    }
)
KINDS = REPLY_KINDS | CONNECTION_KINDS

# Requests that are not API calls themselves. A fault hits them only when it names them.
ENVELOPE = "batch"
CHUNK = "upload-chunk"
MONITORING = "timeSeries.list"  # a call of Cloud Monitoring, another API


@dataclass(eq=False)
class Fault:
    """One fault: it lets `after` matching requests pass, then hits the next `times`. Both count down.

    `method` (as in "videos.list"), `region` (the request's regionCode) and `bucket` select requests;
    None matches any. `status` is for "status" (default 503) and "redirect" (default 302), `reason`
    for "status", `ms` for "latency" and "hang".
    """

    kind: str
    times: int = 1
    method: str | None = None
    region: str | None = None
    bucket: str | None = None
    after: int = 0
    status: int | None = None
    reason: str | None = None
    ms: int = 100

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown fault {self.kind!r}: use one of {', '.join(sorted(KINDS))}")

    def matches(self, method: str, region: str | None, bucket: str | None) -> bool:
        if method in (ENVELOPE, CHUNK, MONITORING):
            return self.method == method
        return self.method in (None, method) and self.region in (None, region) and self.bucket in (None, bucket)


def strike(
    faults: list[Fault], method: str, region: str | None, bucket: str | None, kinds: frozenset[str] = KINDS
) -> Fault | None:
    """The fault that hits this request: the first one due, the oldest first. Matching faults that wait count it as
    passed."""
    struck: Fault | None = None
    for fault in list(faults):
        if fault.kind not in kinds or not fault.matches(method, region, bucket):
            continue
        if fault.after:
            fault.after -= 1
        elif struck is None:
            struck = fault
            fault.times -= 1
            if not fault.times:
                faults.remove(fault)
    return struck


@dataclass(frozen=True)
class _Spoiled(Reply):
    """A reply that a fault spoils on its way."""

    fault: Fault = field(kw_only=True)


def _struck(fault: Fault | None, request: Request, answer: Callable[[], Reply]) -> Reply:
    """The answer to a request that a fault may have hit."""
    try:
        if fault is not None and fault.kind == "status":
            reply = faulted(fault.status or 503, fault.reason)
        elif fault is not None and fault.kind == "redirect":
            reply = Reply(fault.status or 302, headers=(("Location", request.target),))
        else:
            reply = answer()
    except Rejected as rejected:
        reply = rejected.reply
    if fault is None:
        return reply
    return _Spoiled(reply.status, reply.body, reply.headers, reply.content_type, fault=fault)


def faulted(status: int, reason: str | None) -> Reply:
    """The reply for a status that a fault chose. Where a status has several bodies, `reason` picks one."""
    usual = {401: "authError", 403: "rateLimitExceeded", 429: "rateLimitExceeded"}
    name = f"{status} {reason or usual.get(status)}"
    if name in replies.ERRORS:
        return replies.error(name, number=replies.project_number(""))
    if status >= 500:
        return replies.bad_request("Backend Error", status, reason or "backendError")
    return replies.bad_request("Bad Request", status, reason or "badRequest")


class _Handler(server.Handler):
    server: "_Server"

    def send_reply(self, reply: Reply) -> None:
        if not isinstance(reply, _Spoiled):
            super().send_reply(reply)
            return
        fault = reply.fault
        if fault.kind in ("latency", "hang"):
            self.server.stopping.wait(fault.ms / 1000)
        if fault.kind in ("close-after", "hang"):
            self.hang_up()
            return
        content = self.send_head(reply)
        self.wfile.write(content[: len(content) // 2] if fault.kind == "truncate" else content)
        if fault.kind in ("truncate", "drop-idle"):
            self.hang_up()

    def hang_up(self) -> None:
        """Close without notice, but cleanly: the client reads the end of the stream, not a reset. What the client still
        writes is discarded, as if the connection were dead."""
        self.close_connection = True
        with suppress(OSError):  # the client may have gone first
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(5)
            while self.connection.recv(65_536):
                pass


class _Server(server.Server):
    handler = _Handler

    def __init__(self, port: int, service: Callable[[Request], Reply]) -> None:
        self.stopping = threading.Event()
        self._connections: WeakSet[socket.socket] = WeakSet()
        super().__init__(port, service)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def server_close(self) -> None:
        """Stop listening, and close all connections."""
        self.stopping.set()
        super().server_close()
        for connection in self._connections:
            with suppress(OSError):  # the client may have gone first
                connection.shutdown(socket.SHUT_RDWR)


# --- batches: several calls in one multipart request ----------------------------------------------------------------


class BatchedCall(NamedTuple):
    """One call inside a batch. Its answer refers to it by `content_id`."""

    content_id: str | None
    verb: str
    target: str
    headers: Message
    body: bytes


def split_multipart(content_type: str, body: bytes) -> list[tuple[Message, bytes]]:
    """(headers, content) of each part."""
    whole = _parsed(b"Content-Type: " + content_type.encode("latin-1", "replace") + b"\r\n\r\n" + body)
    return [(part, _content(part)) for part in whole.get_payload() if isinstance(part, Message)]


def _parsed(section: bytes) -> Message:
    """Headers and content. As Latin-1 every byte is one character."""
    return Parser().parsestr(section.decode("latin-1"))


def _content(message: Message) -> bytes:
    content = message.get_payload(decode=True)
    return content if isinstance(content, bytes) else b""


def parse_batch(content_type: str, body: bytes) -> list[BatchedCall]:
    """The calls in a batch, in order."""
    calls = []
    for outer, content in split_multipart(content_type, body):
        line, _, rest = content.replace(b"\r\n", b"\n").lstrip().partition(b"\n")
        words = line.decode("utf-8", "replace").split()
        inner = _parsed(rest)
        calls.append(BatchedCall(outer["Content-ID"], words[0], words[1], inner, _content(inner)))
    return calls


def compose_batch(answers: Sequence[tuple[str | None, int, bytes]]) -> Reply:
    """The reply to a batch, from each call's (content_id, status, body)."""
    boundary = f"batch_{secrets.token_hex(16)}"
    parts = [
        b"".join(
            (
                f"--{boundary}\r\nContent-Type: application/http\r\n".encode(),
                _answered_id(content_id),
                f"\r\nHTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode(),
                b"Content-Type: application/json; charset=UTF-8\r\n",
                f"Content-Length: {len(body)}\r\n\r\n".encode(),
                body,
                b"\r\n",
            )
        )
        for content_id, status, body in answers
    ]
    whole = b"".join((*parts, f"--{boundary}--\r\n".encode()))
    return Reply(200, whole, content_type=f"multipart/mixed; boundary={boundary}")


def _answered_id(content_id: str | None) -> bytes:
    """The answer to `<one>` has the id `<response-one>`."""
    if content_id is None:
        return b""
    bare = " ".join(content_id.split()).strip("<>")
    return f"Content-ID: <response-{bare}>\r\n".encode("latin-1")


# --- uploads: one charged call opens a session, then uncharged chunks fill it ---------------------------------------

_RANGE = re.compile(r"bytes (?:([0-9]{1,15})-([0-9]{1,15})|\*)/([0-9]{1,15}|\*)")


@dataclass
class _Session:
    call: Call
    received_bytes: int = 0
    made: Json | None = None


class Uploads:
    """The open sessions by id. Of the bytes that arrived only their number is kept."""

    def __init__(self, store: Callable[[Call], Json]) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}

    def open(self, call: Call) -> str:
        """Open a session for `call` and return its id."""
        session_id = secrets.token_urlsafe(24)
        with self._lock:
            self._sessions[session_id] = _Session(call)
        return session_id

    def feed(self, session_id: str, content_range: str | None, length_bytes: int) -> Reply:
        """Take one chunk. The reply is 308 with the range received so far, or the new resource once all has arrived."""
        with self._lock:
            session = self._sessions[session_id]
            if session.made is None and self._complete(session, content_range, length_bytes):
                session.made = self._store(session.call)
            if session.made is not None:
                return Reply(200, session.made)
            if not session.received_bytes:
                return Reply(308)
            return Reply(308, headers=(("Range", f"bytes=0-{session.received_bytes - 1}"),))

    def _complete(self, session: _Session, content_range: str | None, length_bytes: int) -> bool:
        if content_range is None:  # the whole upload at once, or an empty request
            return True
        match = _RANGE.fullmatch(content_range)
        assert match is not None, content_range
        first, total = match[1], match[3]
        # A chunk that does not continue the upload changes nothing: the reply's Range says where to continue.
        if first is not None and int(first) == session.received_bytes:
            session.received_bytes += length_bytes
        return total != "*" and session.received_bytes >= int(total)


# --- the emulator ---------------------------------------------------------------------------------------------------


class _Meter(Meter):
    """Also counts what is no call ("free"), what the day's quota did not cover, and each project by itself."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.free: Counter[str] = Counter()
        self._charges: list[Charge] = []
        self._made: list[tuple[int, str]] = []  # when each call came, and its method

    def charge(self, project: str, method: str) -> Charge:
        self._charges.append(super().charge(project, method))
        self._made.append((self.now_ms(), method))
        return self._charges[-1]

    def usage(self) -> dict[str, Any]:
        refused = [charge for charge in self._charges if charge.refused]
        by_project: dict[str, Any] = {}
        for project in dict.fromkeys(charge.project for charge in self._charges):
            used = self.used_today()
            left = {bucket: units - used[project, bucket] for bucket, units in self.quota_units.items()}
            charged = [charge for charge in self._charges if charge.project == project]
            by_project[project] = {"units": self._sums(charged), "remaining_units": left}
        more = {"refused_units": self._sums(refused), "free": dict(self.free), "by_project": by_project}
        return {**super().usage(), **more}

    def _sums(self, charges: Sequence[Charge]) -> dict[str, int]:
        return {bucket: sum(c.units for c in charges if c.bucket == bucket) for bucket in self.quota_units}

    def time_series(self, params: Mapping[str, str], project: str) -> Json:
        made = zip(self._made, self._charges, strict=True)
        covered = [monitoring.Covered(*call, charge) for call, charge in made if not charge.refused]
        return monitoring.time_series(params, project, covered, self.quota_units, self.now_ms())

    def exhaust(self, charge: Charge) -> Charge:
        """Close a bucket until Pacific midnight; the call just charged is the first one refused."""
        self.used_today()[charge.project, charge.bucket] = self.quota_units[charge.bucket]
        self._charges[-1] = charge._replace(refused=True)
        return self._charges[-1]


class Emulator(emulator.Emulator):
    """The emulator with faults, batches and uploads."""

    _server_class = _Server
    _server: _Server
    _meter: _Meter

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._meter = _Meter(self._meter.allocation, self._meter.quota_units["units"], self._meter.now_ms)
        self._faults: list[Fault] = []
        self._uploads = Uploads(self._api.stored)

    def fault(self, kind: str, **fields: Any) -> None:
        """Queue a fault, with the fields of Fault."""
        with self._lock:
            self._faults.append(Fault(kind, **fields))

    def go_on(self) -> None:
        """End each wait of a fault, now and from now on."""
        self._server.stopping.set()

    # --- one request -------------------------------------------------------------------------------------------------

    def _serve(self, request: Request) -> Reply:
        if request.verb == "POST" and request.path.rstrip("/") in _BATCH_PATHS:
            return self._serve_batch(request)
        if request.verb == "PUT" and is_upload(request.path) and "upload_id" in request.params:
            return self._serve_chunk(request)
        if (project := monitoring.PATH.fullmatch(request.path)) is not None:
            return self._serve_monitoring(request, project[1])
        return super()._serve(request)

    def _serve_call(self, request: Request) -> Reply:
        return self._serve_with_faults(request, KINDS)

    def _arrive_with_faults(self, request: Request, kinds: frozenset[str]) -> tuple[str, Charge | Reply, Fault | None]:
        """As `_arrive`, and the fault that hits the call."""
        with self._lock:
            method, charge = self._arrive(request)
            bucket = charge.bucket if isinstance(charge, Charge) else None
            fault = strike(self._faults, method, request.params.get("regionCode"), bucket, kinds)
            if fault is not None and fault.kind == "exhaust" and isinstance(charge, Charge):
                charge = self._meter.exhaust(charge)
        return method, charge, fault

    def _serve_with_faults(self, request: Request, kinds: frozenset[str]) -> Reply:
        method, charge, fault = self._arrive_with_faults(request, kinds)

        def answer() -> Reply:
            if fault is not None and fault.kind == "limit-zero" and isinstance(charge, Charge):
                return replies.daily_limit(charge.bucket, charge.project, 0)
            return self._answer(request, method, charge)

        return _struck(fault, request, answer)

    def _serve_monitoring(self, request: Request, project: str) -> Reply:
        fault = self._strike_free("monitoring", MONITORING)
        if project.startswith("denied"):
            return replies.error("permission_denied", project=project)
        if not request.headers.get("Authorization", "").startswith("Bearer "):
            return replies.error("401 authError")
        with self._lock:
            return _struck(fault, request, lambda: Reply(200, self._meter.time_series(request.params, project)))

    def _strike_free(self, kind: str, method: str) -> Fault | None:
        with self._lock:
            self._meter.free[kind] += 1
            return strike(self._faults, method, None, None)

    def _serve_batch(self, request: Request) -> Reply:
        """Count and answer the calls of a batch one by one. Connection faults do not apply to them."""
        fault = self._strike_free("batches", ENVELOPE)
        answers = []
        for call in parse_batch(request.headers.get("Content-Type", ""), request.body):
            for name in ("Authorization", "X-Goog-Api-Key"):  # what a call lacks, it has from the envelope
                if name not in call.headers and name in request.headers:
                    call.headers[name] = request.headers[name]
            inner = make_request(call.verb, call.target, call.headers, call.body)
            reply = self._serve_with_faults(inner, REPLY_KINDS)
            body = b"" if reply.body is None else encode_body(reply.body)
            answers.append((call.content_id, reply.status, body))
        return _struck(fault, request, partial(compose_batch, answers))

    def _serve_chunk(self, request: Request) -> Reply:
        fault = self._strike_free("upload_chunks", CHUNK)
        upload_id, content_range = request.params["upload_id"], request.headers.get("Content-Range")
        return _struck(fault, request, partial(self._uploads.feed, upload_id, content_range, len(request.body)))

    def _perform(self, request: Request, method: str) -> Reply:
        upload = request.params.get("uploadType") if is_upload(request.path) else None
        if upload == "resumable":
            call = Call(method, request.params, json_object(request.body))
            return Reply(200, headers=(("Location", self._session_url(request, call)),))
        if upload == "multipart":
            parts = split_multipart(request.headers.get("Content-Type", ""), request.body)
            body = json_object(parts[0][1] if parts else b"")
            return self._api.answer(Call(method, request.params, body))
        return super()._perform(request, method)

    def _session_url(self, request: Request, call: Call) -> str:
        """The session's URL, without the key, on the address that the client used (which may be forwarded)."""
        host = request.headers.get("Host") or self.address.removeprefix("http://")
        query = urlencode({"uploadType": "resumable", "upload_id": self._uploads.open(call)})
        return f"http://{' '.join(host.split())}{request.path}?{query}"
