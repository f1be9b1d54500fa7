"""The upstream emulator: YouTube Data API v3 on loopback, for development without spending quota.

    with Emulator(allocation="pool", quota=10_000) as upstream:
        ...                                   # point a client at upstream.address
        upstream.usage()                      # {"requests": 3, "by_method": {...}, "units": {...}}

The emulator counts every request that it has read to its end. It counts and charges the request
before it acts on it, because upstream charges invalid and failed requests too. A refusal for lack of
quota therefore does not make a request free. The emulator does not count a request that a client wrote
to a connection that had already closed, because nobody read it. A client that charges each attempt may
therefore book more than the emulator counts, but never less.

A request without a usable key counts as a request, but is charged to no project. The emulator accepts
any key and any token that does not start with "invalid" or "disabled", in Google's places: a key in the
header X-Goog-Api-Key or the query's `key`, a token as a bearer or as `access_token`. A secret is a key if
it starts with "AIza", has a project here, or came as a key before. Writes need a token. The emulator
takes an upload's first request for the whole upload, and ignores its content.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import re
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from quota.common.clock import host_clock
from quota.common.log import line
from quota.common.text import number_in
from quota.jobs.emulator import replies
from quota.jobs.emulator.api import Api, Call, is_upload, method_of
from quota.jobs.emulator.catalogue import GeneratedCatalogue, RecordedCatalogue
from quota.jobs.emulator.replies import Json, Rejected, Reply
from quota.jobs.emulator.usage import UNKNOWN, Allocation, Charge, Meter

MAX_BODY_BYTES = 64 * 1024 * 1024
_GZIP_ABOVE_BYTES = 1024
_IDLE_SECONDS = 300
_MAX_PARAMETERS = 1_000

_log = logging.getLogger(__name__)


class Request(NamedTuple):
    """One request, read in full. If its target does not decode, it has no `params`."""

    verb: str
    path: str
    params: Mapping[str, str]
    headers: Message
    body: bytes
    target: str


def make_request(verb: str, target: str, headers: Message, body: bytes) -> Request:
    """Decode a request's target. A client sends an overlong GET as a POST with the query as its body."""
    override = headers.get("X-HTTP-Method-Override")
    try:
        if re.search(r"%(?![0-9A-Fa-f]{2})", target):
            raise ValueError("a percent sign without two hexadecimal digits")
        split = urlsplit(target)
        query, path = split.query, unquote(split.path, errors="strict")
        if override and verb == "POST":
            verb = override.upper()
            if headers.get_content_type() == "application/x-www-form-urlencoded":
                query, body = body.decode(), b""
        params: dict[str, str] = {}
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=_MAX_PARAMETERS)
        for name, value in pairs:
            params[name] = f"{params[name]},{value}" if name in params else value
    except ValueError:
        path, params = target.partition("?")[0], {}
    return Request(verb, path, params, headers, body, target)


def encode_body(body: object) -> bytes:
    """The body in UTF-8, as upstream sends it. A lone surrogate, which UTF-8 cannot encode, becomes a JSON escape."""
    if isinstance(body, bytes):
        return body
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


class Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # without this, a page on a kept-alive connection takes 44 ms
    timeout = _IDLE_SECONDS
    wbufsize = -1  # so that a short reply leaves in one packet
    headers = Message()  # for a request too malformed to have any

    def _serve(self) -> None:
        body = self._read_body()
        if body is None:
            return
        verb = "GET" if self.command == "HEAD" else self.command
        request = make_request(verb, self.path, self.headers, body)
        try:
            reply = self.server.service(request)
        except Rejected as rejected:
            reply = rejected.reply
        except Exception as error:  # one bad request must not stop the emulator
            # Print only the kind of error: its text might quote a key.
            _log.error("%s", line("emulator_failed", path=request.path, error=type(error).__name__))
            reply = replies.error("internal_error")
        self.send_reply(reply)

    # The base class looks these names up.
    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = _serve  # noqa: N815

    def _read_body(self) -> bytes | None:
        """The request's body. None when it is incomplete: the client gets an error, or has disconnected."""
        length = number_in(self.headers.get("Content-Length", "0"), 0, MAX_BODY_BYTES)
        if length is None or "Transfer-Encoding" in self.headers:
            self.send_error(411)
            return None
        body = self.rfile.read(length)
        if len(body) < length:
            self.close_connection = True
            return None
        return body

    def send_reply(self, reply: Reply) -> None:
        content = self.send_head(reply)
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_head(self, reply: Reply) -> bytes:
        """Send the status and the headers of a reply. Returns its content as it is to be sent."""
        content = b"" if reply.body is None else encode_body(reply.body)
        headers = dict(reply.headers)
        if reply.body is not None:
            headers["Content-Type"] = reply.content_type
        if len(content) > _GZIP_ABOVE_BYTES and "gzip" in self.headers.get("Accept-Encoding", ""):
            content = gzip.compress(content, compresslevel=1, mtime=0)
            headers["Content-Encoding"] = "gzip"
        if reply.status != 204:  # a 204 has neither a body nor a length, by definition
            headers["Content-Length"] = str(len(content))
        if self.close_connection:
            headers["Connection"] = "close"
        self.send_response(reply.status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        return content

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that cannot be read in upstream's shape, and close the connection."""
        self.close_connection = True
        self.send_reply(replies.bad_request(self.responses.get(code, ("Bad Request", ""))[0], code))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Log nothing: a request line may hold a key."""


class Server(ThreadingHTTPServer):
    """Serves on loopback with one thread per connection. Stopping does not wait for idle clients."""

    request_queue_size = 128
    daemon_threads = True
    handler: type[Handler] = Handler

    def __init__(self, port: int, service: Callable[[Request], Reply]) -> None:
        """`service` answers a request, or raises Rejected."""
        self.service = service
        super().__init__(("127.0.0.1", port), self.handler)

    def server_bind(self) -> None:
        # HTTPServer's own method looks up the host's name, which may take seconds without a network.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stay silent: clients may disconnect at any time, and the server must not print a traceback."""


_POLL_SECONDS = 0.02
_MAX_SECRETS = 10_000


@dataclass(kw_only=True, eq=False, repr=False)
class Emulator:
    """The upstream, on loopback. It listens from the start, and serves inside `with` or `serve_forever`.

    `port` 0 takes a free port. `recorded` is a folder of saved pages to serve instead of generated
    ones (ValueError when it holds none). `quota` is the number of units that each project has per
    day in the bucket `units`. `projects` maps keys to projects; any other key is a project of its
    own. `clock` gives milliseconds since 1970; the quota resets when it passes Pacific midnight.
    Each answer comes `delay_ms` late. `errors_percent` of the calls get a 503, spread evenly.
    """

    port: int = 0
    recorded: str | Path | None = None
    allocation: Allocation = "pool"
    quota: int = 10_000
    projects: Mapping[str, str] = field(default_factory=dict)
    clock: Callable[[], int] = host_clock
    delay_ms: int = 0
    errors_percent: int = 0

    _server_class: ClassVar[type[Server]] = Server

    def __post_init__(self) -> None:
        if self.quota < 0:
            raise ValueError(f"quota must be 0 or more, not {self.quota}")
        self._secrets = dict.fromkeys(self.projects, "key")  # or "token"
        self._api = Api(GeneratedCatalogue() if self.recorded is None else RecordedCatalogue(Path(self.recorded)))
        self._lock = threading.RLock()  # held around calls of the meter
        self._meter = Meter(self.allocation, self.quota, self.clock)
        self._calls = count(1)
        self._thread = threading.Thread(target=self.serve_forever, name="emulator", daemon=True)
        self._server = self._server_class(self.port, self._serve)

    # --- start and stop ------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """The address, without a slash at the end. A client's `rootUrl` needs one."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def serve_forever(self) -> None:
        """Serve in this thread until interrupted or stopped."""
        try:
            self._server.serve_forever(_POLL_SECONDS)
        finally:
            self._server.server_close()

    def stop(self) -> None:
        """Stop serving, after `with` began."""
        self._server.shutdown()
        self._thread.join()

    # --- counts --------------------------------------------------------------------------------------

    def usage(self) -> Json:
        """The requests counted since the start, as GET /emulator/usage returns them. `units` holds the units of every
        charged call, by bucket."""
        with self._lock:
            return self._meter.usage()

    # --- one request ---------------------------------------------------------------------------------

    def _serve(self, request: Request) -> Reply:
        if request.path == "/emulator/usage":
            return Reply(200, self.usage())
        return self._serve_call(request)

    def _serve_call(self, request: Request) -> Reply:
        method, charge = self._arrive(request)
        return self._answer(request, method, charge)

    def _arrive(self, request: Request) -> tuple[str, Charge | Reply]:
        """Count and charge a call before anything else. Returns its method, and its charge, or upstream's answer if
        there is nobody to charge."""
        method = method_of(request.verb, request.path) or UNKNOWN
        caller = self._identify(request.params, request.headers)
        with self._lock:
            self._meter.by_method[method] += 1
            charge = self._meter.charge(caller, method) if isinstance(caller, str) else caller
        return method, charge

    def _identify(self, params: Mapping[str, str], headers: Message) -> str | Reply:
        """The project, or upstream's reply to a caller that it does not know."""
        key, token = params.get("key") or headers.get("X-Goog-Api-Key") or "", _token(params, headers)
        if token and not self._is("token", token):
            return replies.error("401 authError")
        if key and not self._is("key", key):
            return replies.error("key_invalid")
        secret = key or token
        if not secret:
            return replies.error("unregistered_caller")
        # Everybody who reads the usage sees the project's name, but never the key.
        digest = hashlib.blake2b(secret.encode("utf-8", "replace"), digest_size=4).hexdigest()
        project = self.projects.get(secret) or f"key-{digest}"
        if secret.startswith("disabled"):
            return replies.error("service_disabled", number=replies.project_number(project))
        return project

    def _is(self, kind: str, secret: str) -> bool:
        """Whether a secret may be a key or a token, as `kind` says. It stays what it was when it first came."""
        of_others = {"key": "ya29.", "token": "AIza"}[kind]
        if secret.startswith(("invalid", of_others)):
            return False
        with self._lock:
            if len(self._secrets) < _MAX_SECRETS:
                self._secrets.setdefault(secret, kind)
            return self._secrets.get(secret, kind) == kind

    def _answer(self, request: Request, method: str, charge: Charge | Reply) -> Reply:
        """The answer to a counted call. Raises Rejected."""
        time.sleep(self.delay_ms / 1_000)
        number = next(self._calls)
        if number * self.errors_percent // 100 > (number - 1) * self.errors_percent // 100:
            return replies.error("backend_error")
        if isinstance(charge, Reply):
            return charge
        if charge.refused and charge.bucket == "units":
            return replies.error("403 quotaExceeded")
        if charge.refused:
            return replies.daily_limit(charge.bucket, charge.project, self._meter.quota_units[charge.bucket])
        needs_token = method == "captions.download" or (request.verb != "GET" and method != UNKNOWN)
        if needs_token and not _token(request.params, request.headers):
            return replies.error("401 required", method=replies.long_name(method))
        if method in (UNKNOWN, "captions.download"):  # nobody has a caption here
            return replies.error("method_not_found")
        return self._perform(request, method)

    def _perform(self, request: Request, method: str) -> Reply:
        body = {} if request.verb == "GET" or is_upload(request.path) else json_object(request.body)
        return self._api.answer(Call(method, request.params, body))


def _token(params: Mapping[str, str], headers: Message) -> str:
    """The token of a request; empty if it has none."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else params.get("access_token", "")


def json_object(body: bytes) -> Json:
    """The JSON object in a body, {} if that is empty. Raises Rejected."""
    try:
        document: Any = json.loads(body) if body.strip() else {}
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise Rejected(replies.bad_request("Invalid JSON payload received."))
    return document
