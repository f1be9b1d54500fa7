"""The upstream emulator: YouTube Data API v3 on loopback, for development without spending quota.

    with Emulator(allocation="pool", quota=10_000) as upstream:
        ...                                   # point a client at upstream.address
        upstream.fault("status", status=503, method="videos.list", after=2)
        upstream.usage()                      # {"requests": 3, "by_method": {...}, "units": {...}}

The emulator counts every request that it has read to its end. It counts and charges the request
before it acts on it, because upstream charges invalid and failed requests too. A fault, or a refusal
for lack of quota, therefore does not make a request free. The emulator does not count a request that
a client wrote to a connection that had already closed, because nobody read it. A client that charges
each attempt may therefore book more than the emulator counts, but never less.

The emulator counts some requests separately, as "free", because they carry calls but are not calls:
the envelope of a batch, whose calls count one by one, and the chunks of an upload, whose opening
call counts.

Cloud Monitoring's calls are served and counted separately too, as "monitoring". They spend no units.

A request without a usable key counts as a request, but no project is charged for it. The emulator
accepts bearer tokens, and any key that does not start with "invalid" or "disabled". It also accepts
writes that carry only a key; upstream requires a token for them.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from email.message import Message
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import urlencode

from quota.common.clock import host_clock
from quota.common.text import many
from quota.jobs.emulator import replies
from quota.jobs.emulator.api import Api, Call, is_upload, method_of
from quota.jobs.emulator.batch import BatchedCall, compose_batch, parse_batch, split_multipart
from quota.jobs.emulator.data import GeneratedCatalogue, RecordedCatalogue
from quota.jobs.emulator.faults import CHUNK, ENVELOPE, KINDS, MONITORING, REPLY_KINDS, Fault, FaultQueue
from quota.jobs.emulator.monitoring import project_of, time_series
from quota.jobs.emulator.replies import Json, Rejected, Reply
from quota.jobs.emulator.uploads import Uploads
from quota.jobs.emulator.usage import UNKNOWN, Allocation, Charge, Meter
from quota.jobs.emulator.wire import Handled, Request, Server, encode_body, make_request

__all__ = ["Allocation", "Emulator", "Fault"]

_CONTROL = "/emulator/"
_BATCH_PATHS = ("/batch", "/batch/youtube/v3")
_POLL_SECONDS = 0.02


class _Arrival(NamedTuple):
    """One API call as it was booked. Where nobody could be charged, it has upstream's answer in place of a `charge`."""

    method: str
    charge: Charge | Reply
    fault: Fault | None


class Emulator:
    """The upstream, on loopback. It listens from the start, and serves inside `with` or `serve_forever`.

    `port` 0 takes a free port. `recorded` is a folder of saved pages to serve instead of generated
    ones (ValueError when it holds none). `quota` is the number of units that each project has per
    day in the bucket `units`. `projects` maps keys to projects; any other key is a project of its
    own. `clock` gives milliseconds since 1970; the quota resets when it passes Pacific midnight. Cloud
    Monitoring, which it serves too (see `quota.jobs.emulator.monitoring`), knows of a call after `lag_ms`.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        recorded: Path | None = None,
        allocation: Allocation = "pool",
        quota: int = 10_000,
        projects: Mapping[str, str] | None = None,
        clock: Callable[[], int] = host_clock,
        lag_ms: int = 0,
    ) -> None:
        if allocation not in ("pool", "buckets"):
            raise ValueError(f"allocation must be 'pool' or 'buckets', not {allocation!r}")
        if quota < 0:
            raise ValueError(f"quota must be 0 or more, not {quota}")
        if lag_ms < 0:
            raise ValueError(f"lag_ms must be 0 or more, not {lag_ms}")
        self._projects = dict(projects or {})
        self._api = Api(RecordedCatalogue(recorded) if recorded else GeneratedCatalogue())
        self._uploads = Uploads(self._api.stored)
        self._lock = threading.Lock()  # guards the meter and the faults, together
        self._meter = Meter(allocation, quota, clock)
        self._faults = FaultQueue()
        self._lag_ms = lag_ms
        self._thread: threading.Thread | None = None
        self._serving = False
        self._server = Server(port, self._serve)

    # --- start and stop ------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """The address, without a slash at the end. A client's `rootUrl` needs one."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def announcement(self) -> str:
        """One line that says where the emulator listens and what it grants."""
        units = many(self._meter.quota_units["units"], "unit")
        return f"YouTube Data API v3 emulator: {self.address} ({self._meter.allocation}, {units} a day)"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self.serve_forever, name="emulator", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def serve_forever(self, ready: Callable[[str], object] | None = None) -> None:
        """Serve in this thread until interrupted or stopped. `ready` gets the announcement first."""
        self._serving = True
        try:
            if ready is not None:
                ready(self.announcement)
            self._server.serve_forever(_POLL_SECONDS)
        finally:
            self._serving = False
            self._server.close()

    def stop(self) -> None:
        """Stop serving and close open connections. Call it from another thread than the serving one."""
        if self._thread is not None or self._serving:
            self._server.shutdown()
        if self._thread is not None:
            self._thread.join()
        self._server.close()

    # --- for tests -----------------------------------------------------------------------------------

    def usage(self) -> Json:
        """The requests counted since the start or the last reset, as GET /emulator/usage returns them.

        `units` holds the units of every charged call, by bucket. `refused_units` is the part of them
        that the day's quota did not cover.
        """
        with self._lock:
            return self._meter.usage()

    def fault(self, kind: str, **fields: Any) -> None:
        """Queue a fault, with the fields of Fault, like POST /emulator/faults. Raises ValueError for what makes no
        sense."""
        self._queue(Fault.from_json({"kind": kind, **fields}))

    def reset(self) -> None:
        """Start a fresh day: nothing counted, nothing exhausted, no fault queued."""
        with self._lock:
            self._meter.reset()
            self._faults.clear()

    def _queue(self, *faults: Fault) -> int:
        with self._lock:
            for fault in faults:
                self._faults.add(fault)
            return len(self._faults)

    # --- one request ---------------------------------------------------------------------------------

    def _serve(self, request: Request) -> Handled:
        if request.path.startswith(_CONTROL):
            return Handled(self._control(request))
        asked = project_of(request) if request.verb == "GET" else None
        if asked is not None:
            return self._serve_monitoring(request, asked)
        if request.verb == "POST" and request.path.rstrip("/") in _BATCH_PATHS:
            return self._serve_batch(request)
        if request.verb == "PUT" and is_upload(request.path) and "upload_id" in request.params:
            return self._serve_chunk(request)
        arrival = self._arrive(request, request.headers, KINDS)
        if arrival.fault is not None and arrival.fault.kind == "close-before":
            return Handled(None, arrival.fault)
        return Handled(self._answer(request, arrival), arrival.fault)

    def _serve_batch(self, request: Request) -> Handled:
        """Count and answer the calls of a batch one by one. Connection faults do not apply to them."""
        fault = self._arrive_free("batches", ENVELOPE)
        answers = []
        for call in parse_batch(request.headers.get("Content-Type", ""), request.body):
            inner = make_request(call.verb, call.target, call.headers, call.body)
            arrival = self._arrive(inner, _batch_headers(request, call), REPLY_KINDS)
            reply = self._answer(inner, arrival)
            body = b"" if reply.body is None else encode_body(reply.body)
            answers.append((call.content_id, reply.status, body))
        return Handled(_fault_reply(fault, request) or compose_batch(answers), fault)

    def _serve_monitoring(self, request: Request, asked: str) -> Handled:
        """Answer Cloud Monitoring's timeSeries.list from this upstream's own count."""

        def answer() -> Reply:
            token = _bearer(request.headers)
            if not token or token.startswith("invalid"):
                return replies.error("401 authError")
            if asked.startswith("denied"):
                return replies.error("permission_denied", project=asked)
            with self._lock:
                return time_series(request, asked, self._meter, self._lag_ms)

        return self._serve_free("monitoring", MONITORING, request, answer)

    def _serve_chunk(self, request: Request) -> Handled:
        upload_id, content_range = request.params["upload_id"], request.headers.get("Content-Range")
        feed = partial(self._uploads.feed, upload_id, content_range, len(request.body))
        return self._serve_free("upload_chunks", CHUNK, request, feed)

    def _serve_free(self, kind: str, method: str, request: Request, answer: Callable[[], Reply]) -> Handled:
        """Answer what is no call of the API, and counts apart."""
        fault = self._arrive_free(kind, method)
        if fault is not None and fault.kind == "close-before":
            return Handled(None, fault)
        try:
            return Handled(_fault_reply(fault, request) or answer(), fault)
        except Rejected as rejected:
            return Handled(rejected.reply, fault)

    def _arrive(self, request: Request, headers: Message, kinds: frozenset[str]) -> _Arrival:
        """Count and charge a call before anything else, and find the fault that hits it."""
        method = method_of(request.verb, request.path) or UNKNOWN
        known = self._identify(request.params, headers)
        with self._lock:
            self._meter.count(method)
            charge = self._meter.charge(known, method) if isinstance(known, str) else known
            bucket = charge.bucket if isinstance(charge, Charge) else None
            fault = self._faults.strike(method, request.params.get("regionCode"), bucket, kinds=kinds)
            if fault is not None and fault.kind == "exhaust" and isinstance(charge, Charge):
                charge = self._meter.exhaust(method, charge)
        return _Arrival(method, charge, fault)

    def _arrive_free(self, kind: str, method: str) -> Fault | None:
        with self._lock:
            self._meter.count_free(kind)
            return self._faults.strike(method, None, None)

    def _identify(self, params: Mapping[str, str], headers: Message) -> str | Reply:
        """The project, or upstream's reply to a caller that it does not know."""
        secret = params.get("key") or headers.get("X-Goog-Api-Key")
        unusable = replies.error("key_invalid")
        if not secret:
            secret, unusable = _bearer(headers), replies.error("401 authError")
            if not secret:
                return replies.error("unregistered_caller")
        # Anybody who reads the usage sees the project's name, but nobody sees the key.
        project = self._projects.get(secret) or f"key-{_digest(secret)}"
        if secret.startswith("invalid"):
            return unusable
        if secret.startswith("disabled"):
            return replies.error("service_disabled", number=replies.project_number(project))
        return project

    def _answer(self, request: Request, arrival: _Arrival) -> Reply:
        struck = _fault_reply(arrival.fault, request)
        if struck is not None:
            return struck
        if request.malformed:
            return replies.bad_request("Bad Request")
        charge = arrival.charge
        if isinstance(charge, Reply):
            return charge
        if arrival.fault is not None and arrival.fault.kind == "limit-zero":
            return replies.daily_limit(charge.bucket, charge.project, 0)
        if charge.refused and charge.bucket == "units":
            return replies.error("403 quotaExceeded")
        if charge.refused:
            return replies.daily_limit(charge.bucket, charge.project, self._meter.quota_units[charge.bucket])
        try:
            return self._perform(request, arrival.method)
        except Rejected as rejected:
            return rejected.reply

    def _perform(self, request: Request, method: str) -> Reply:
        if method == UNKNOWN:
            return replies.error("method_not_found")
        upload = request.params.get("uploadType") if is_upload(request.path) else None
        if upload == "resumable":
            call = Call(method, request.params, _json_object(request.body))
            return Reply(200, headers=(("Location", self._session_url(request, call)),))
        body: Json = {}
        if upload == "multipart":
            parts = split_multipart(request.headers.get("Content-Type", ""), request.body)
            body = _json_object(parts[0][1] if parts else b"")
        elif upload is None and request.verb != "GET":
            body = _json_object(request.body)
        return self._api.answer(Call(method, request.params, body))

    def _session_url(self, request: Request, call: Call) -> str:
        """The session's URL, without the key, on the address that the client used (which may be forwarded)."""
        host = request.headers.get("Host") or self.address.removeprefix("http://")
        query = urlencode({"uploadType": "resumable", "upload_id": self._uploads.open(call)})
        return f"http://{' '.join(host.split())}{request.path}?{query}"

    # --- paths under /emulator -----------------------------------------------------------------------

    def _control(self, request: Request) -> Reply:
        match request.verb, request.path.removeprefix(_CONTROL):
            case "GET", "usage":
                return Reply(200, self.usage())
            case "POST", "reset":
                self.reset()
                return Reply(200, self.usage())
            case "POST", "faults":
                return self._queue_json(request.body)
            case _:
                return replies.error("method_not_found")

    def _queue_json(self, body: bytes) -> Reply:
        """Queue one fault or a list of them: either all of them or none."""
        try:
            document = json.loads(body)
            listed = document if isinstance(document, list) else [document]
            queued = self._queue(*[Fault.from_json(item) for item in listed])
        except (ValueError, RecursionError) as error:
            return replies.bad_request(str(error))
        return Reply(200, {"queued": queued})


def _fault_reply(fault: Fault | None, request: Request) -> Reply | None:
    """The reply that a fault dictates, whatever the request."""
    if fault is not None and fault.kind == "status":
        return replies.faulted(fault.status or 503, fault.reason)
    if fault is not None and fault.kind == "redirect":
        return Reply(fault.status or 302, headers=(("Location", request.target),))
    return None


def _bearer(headers: Message) -> str:
    """The bearer token of a request; empty if it has none."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _batch_headers(request: Request, call: BatchedCall) -> Message:
    """The headers of a call in a batch: its own, and the envelope's where it has none."""
    headers = Message()
    for name in ("Authorization", "X-Goog-Api-Key"):
        value = call.headers.get(name) or request.headers.get(name)
        if value is not None:
            headers[name] = value
    return headers


def _json_object(body: bytes) -> Json:
    try:
        document: Any = json.loads(body) if body.strip() else {}
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise Rejected(replies.bad_request("Invalid JSON payload received."))
    return document


def _digest(secret: str) -> str:
    return hashlib.blake2b(secret.encode("utf-8", "replace"), digest_size=4).hexdigest()
