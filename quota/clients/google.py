"""A googleapiclient service that charges every HTTP attempt at the moment it leaves this machine.

    youtube = service(budget, "youtube", "v3", key=...)
    youtube.videos().list(part="snippet", chart="mostPopular").execute()      # raises quota.Refused

The connection's `request()` makes the charge, after it connects the socket and before it sends the first byte. No layer
above it sees every attempt. The client's own retries, redirects, repeats after a 401, batches and pages all pass
through it, once each. So does the hidden resend of httplib2 when a kept-alive connection turns out to be dead.

    layer            class              what it adds
    HttpRequest      MeteredRequest     records which API method is being sent
    Http             MeteredHttp        keeps connections for each thread; passes answers to the meter
    HTTPConnection   _Connection        charges each attempt; refunds it if no byte was sent

Importing this file takes a quarter of a second. No module of the package imports it before a call is allowed to leave.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from email.parser import BytesParser
from functools import partial
from http.client import HTTPException, HTTPResponse, RemoteDisconnected, ResponseNotReady
from typing import Any
from urllib.parse import urlsplit

import google_auth_httplib2
import httplib2
from google.auth.api_key import Credentials as KeyCredentials
from google.auth.credentials import with_scopes_if_required
from googleapiclient.discovery import Resource, build_from_document
from googleapiclient.errors import HttpError
from googleapiclient.http import BatchHttpRequest, HttpRequest

from quota.budget import Budget
from quota.clients.answer_fields import AnswerLimits
from quota.clients.answers import LimitedResponse, PatientConnection, PatientHttp, Watch, checked, no_http
from quota.clients.metering import Attempt, Meter
from quota.clients.upstream import Google, Routes, description, scopes_of, verb_of
from quota.common.fork import start_over_in_child
from quota.common.hosts import (
    default_port,
    has_hung_up,
    is_http_address,
    is_loopback,
    is_readable_on_the_way,
)
from quota.common.redact import redact, register
from quota.common.text import show
from quota.errors import ConfigError, UsageError
from quota.terms.api import GOOGLES_KEY, Hosts, RequestBody
from quota.terms.arguments import instance, seconds, text

TIMEOUT_S = 60.0

_SHARED_HOST = "www.googleapis.com"
"""This host serves all of Google's older APIs, and their token endpoint."""

_TOKEN_PATH = re.compile("(/o)?/oauth2(/v[0-9]+)?/token")
"""The paths on which that host grants tokens, which costs nothing."""


def service(
    budget: Budget,
    api: str = "youtube",
    version: str = "v3",
    *,
    key: str | None = None,
    endpoint: str | None = None,
    insecure_endpoint: bool = False,
    credentials: Any = None,
    timeout_s: float = TIMEOUT_S,
    max_body_mb: int | None = None,
    max_answer_s: float | None = None,
    max_items: int | None = None,
    max_units: int | None = None,
    waiting: Callable[[], None] | None = None,
) -> Resource:
    """Build a googleapiclient service that charges every HTTP attempt to `budget`.

    `endpoint` replaces the API's own root URL, for calls, batches and uploads alike. Only with `insecure_endpoint` does
    a secret go to an `http://` endpoint on another machine. `credentials` (google-auth) replace `key`. Any number of
    threads may share one service. Close it, or use it in a `with` block.

    Three options limit what upstream may send; None means no limit:

    max_body_mb      the size of a body in units of 1,000,000 bytes, both as received and unpacked
    max_answer_s     the time from the first byte sent to the last byte received, including redirects
    max_items        the length of any list in an answer

    If any of them is set, the service raises quota.BadAnswer for an answer that exceeds a limit, or that is not the
    JSON that the API promises, and sends no request again by itself when a connection dies. The service calls `waiting`
    several times a second while it waits for an answer; an exception from `waiting` ends the request.
    `max_units` is the most that the service spends in all; then it raises quota.Refused. None: no such limit.
    A redirect to anything but HTTP raises BadAnswer, with and without limits. Only the API's host and port get the key.
    Raises ConfigError if the installed client does not describe the API, or if `endpoint` is not a usable URL.
    """
    timeout_s = seconds(timeout_s, "timeout_s")
    api, version = text(api, "api"), text(version, "version")
    insecure_endpoint = instance(insecure_endpoint, bool, "insecure_endpoint", "write True or False")
    if key is not None and not isinstance(key, str):
        raise UsageError("key is not a str")  # not shown, because it may be the secret as bytes
    if credentials is not None and not hasattr(credentials, "before_request"):
        raise UsageError("credentials are not those of google-auth; give for example google.auth.default()[0]")
    document = description(api, version)
    if endpoint is not None:
        document["rootUrl"] = document["mtlsRootUrl"] = _root(endpoint)
        if (key is not None or credentials is not None) and not insecure_endpoint and is_readable_on_the_way(endpoint):
            raise ConfigError(
                f"endpoint {redact(endpoint)!r} would get the secret in plain text; give an https:// address, or "
                "insecure_endpoint = true"
            )
    root: str = document["rootUrl"]
    limits = AnswerLimits(max_body_mb, max_answer_s, max_items).validated()
    http = MeteredHttp(Meter(budget, max_units), document, Watch(limits, waiting), timeout_s=timeout_s)
    authorized: Any = http
    if credentials is not None:
        credentials = with_scopes_if_required(credentials, scopes_of(document))  # type: ignore[no-untyped-call]
        authorized = google_auth_httplib2.AuthorizedHttp(credentials, http=http)
    elif key is not None:
        register(key)
        # A key cannot be refreshed: repeating the call twice after a 401 would only spend more units.
        credentials = KeyCredentials(key)  # type: ignore[no-untyped-call]
        authorized = google_auth_httplib2.AuthorizedHttp(credentials, http=http, refresh_status_codes=())
    return build_from_document(
        document,
        http=authorized,
        requestBuilder=MeteredRequest,
        client_options={"api_endpoint": root + document["servicePath"]},
    )


def _root(endpoint: str) -> str:
    endpoint = text(endpoint, "endpoint")
    if not is_http_address(endpoint) or "?" in endpoint or "#" in endpoint:
        raise ConfigError(
            f"endpoint {show(redact(endpoint))} is not the root of an API; write for example http://127.0.0.1:8765"
        )
    return endpoint.rstrip("/") + "/"


# -- what is being sent ------------------------------------------------------------------------------------------------

_sending: ContextVar[HttpRequest | None] = ContextVar("quota_sending", default=None)


class MeteredRequest(HttpRequest):  # type: ignore[misc]  # the client ships no types
    """A request that records which API method it calls while it is being sent. Copies made by `*_next` do the same.

    It can only be sent on a metered Http: see `_check_metered`.
    """

    def __init__(self, http: Any, postproc: Any, *args: Any, **options: Any) -> None:
        watch: Watch | None = getattr(getattr(http, "http", http), "watch", None)
        if watch is not None and any(watch.limits):
            postproc = checked(postproc, watch.limits)
        super().__init__(http, postproc, *args, **options)

    @property
    def http(self) -> Any:
        """The Http that sends this request, unless a call names another."""
        return self.__dict__["http"]  # the client's own `to_json` looks here

    @http.setter
    def http(self, http: Any) -> None:
        _check_metered(http, self.uri)
        self.__dict__["http"] = http

    @staticmethod
    def from_json(s: str, http: Any, postproc: Any) -> HttpRequest:
        """Like the client's own `from_json`, but only for a metered Http, and metered itself."""
        saved = HttpRequest.from_json(s, http, postproc)
        names = ("uri", "method", "body", "headers", "methodId", "resumable")
        return MeteredRequest(http, postproc, **{name: getattr(saved, name) for name in names})

    def execute(self, http: Any = None, num_retries: int = 0) -> Any:
        """Like the client's own `execute`, but charges every attempt, including each of `num_retries`.

        Raises quota.Refused at once, without a retry, when the budget has no room.
        """
        return self._sent(http, partial(super().execute, http=http, num_retries=num_retries))

    def next_chunk(self, http: Any = None, num_retries: int = 0) -> Any:
        """Like the client's own `next_chunk`, but charges the request that opens the upload. Its chunks are free."""
        return self._sent(http, partial(super().next_chunk, http=http, num_retries=num_retries))

    def _sent(self, http: Any, send: Callable[[], Any]) -> Any:
        _check_metered(self.http if http is None else http, self.uri)
        before = _sending.get()
        # Set the variable inside the `try`, and use no context manager: a signal handler may raise between any two
        # steps. If that left the variable set, the next request would be charged as this call.
        try:
            _sending.set(self)
            return send()
        finally:
            _sending.set(before)


_init_http_error = HttpError.__init__


def _init_without_secrets(self: Any, resp: Any, content: bytes, uri: Any = None) -> None:
    _init_http_error(self, resp, content, uri=redact(uri) if isinstance(uri, str) else uri)


# The error's text includes the URI, and so a key in its query. Batches and downloads raise it outside of every method
# of a request, so the constructor redacts it.
HttpError.__init__ = _init_without_secrets


def _check_metered(http: Any, uri: str) -> None:
    """Raise UsageError if `http` does not charge requests to `uri`."""
    metered = _metered(http)
    if metered is None or not metered.gate.serves(uri):
        raise UsageError("this http would bypass the budget: leave it out, threads may share one service")


MAX_WRAPPINGS = 5
"""How deep Http objects may wrap each other. The Http that adds a key, for example, wraps another."""


def _metered(http: Any) -> MeteredHttp | None:
    """The metered Http inside `http`, if there is one."""
    for _ in range(MAX_WRAPPINGS):
        if isinstance(http, MeteredHttp):
            return http
        http = getattr(http, "http", None)
    return None


_send_batch = BatchHttpRequest._execute


def _send_checked_batch(self: Any, http: Any, order: Any, requests: Any) -> Any:
    payers = {metered.gate.payer for name in order if (metered := _metered(requests[name].http)) is not None}
    if payers:
        _check_metered(http, self._batch_uri)
    if len(payers) > 1:
        # Each call travels with its own key or token, so upstream charges several.
        raise UsageError("these calls belong to several credentials, and a batch charges one: make a batch for each")
    return _send_batch(self, http, order, requests)


# A caller can build a batch without the service, and the batch does not ask its requests which Http to use. Only this
# method sees every batch that would bypass the budget. It does not change batches of other services' requests.
BatchHttpRequest._execute = _send_checked_batch


# -- charging it -------------------------------------------------------------------------------------------------------


_Sent = tuple[Attempt, str]
"""One charged attempt that was sent, and its content id inside a batch."""


class _Gate:
    """Charges each request before a connection sends it, and remembers the charge until the answer arrives."""

    def __init__(self, meter: Meter, document: Mapping[str, Any]) -> None:
        root = urlsplit(document["rootUrl"])
        host = root.hostname or ""
        # On loopback, the port distinguishes servers. Elsewhere, all ports of a host share one quota.
        self._hosts = Hosts([root.netloc if is_loopback(host) and root.port else host])
        self._also = Hosts([_SHARED_HOST] if host.endswith(".googleapis.com") else [])
        self._secure = root.scheme == "https"
        self._port = root.port or default_port(root.scheme)
        self._routes = Routes(document)
        self._meter = meter
        self._upstream = Google(meter.budget.book)
        self.payer = meter.budget.project, meter.budget.credential
        self._waiting = threading.local()

    def serves(self, uri: str) -> bool:
        """Whether `uri` is on a host and port of the API."""
        return self._hosts.serve(uri) or self._also.serve(uri)

    def keeps_key(self, uri: str) -> bool:
        """Whether `uri` may receive the API key: only the API may, on its own port, and never over plain HTTP if the
        API uses HTTPS."""
        parts = urlsplit(uri)
        own_port = (parts.port or default_port(parts.scheme)) == self._port
        return own_port and self.serves(uri) and (parts.scheme == "https" or not self._secure)

    def charge(self, place: tuple[str, int], verb: str, url: str, headers: Mapping[str, Any], body: Any) -> list[_Sent]:
        """Charge one request that is about to leave. Returns [] if it does not call this API. Raises Refused."""
        self.forget()
        path, sent_verb = urlsplit(url).path, verb
        verb = verb_of(self._upstream, verb, headers).upper()
        on_the_wire = self._upstream.named(self._routes, verb, path)
        is_batch = self._routes.is_batch(verb, url)
        if place not in self._hosts and not (place in self._also and (on_the_wire or is_batch)):
            return []
        if place[0].lower() == _SHARED_HOST and not on_the_wire and _TOKEN_PATH.fullmatch(path):
            return []
        request = _sending.get()
        if request is None and is_batch:
            sent = self._charge_batch(headers, body)
        elif self._is_chunk(request, sent_verb, url):
            sent = []
        else:
            method = (request.methodId if request is not None else None) or on_the_wire or f"{verb} {path}"
            sent = [(self._meter.attempt(method, verb, RequestBody.of(body)), "")]
        self._waiting.sent = sent
        return sent

    def _is_chunk(self, request: HttpRequest | None, verb: str, url: str) -> bool:
        """Whether this request continues an upload. The request that opened the upload was charged."""
        if request is not None:
            return request.resumable is not None and request.resumable_uri is not None
        return self._routes.is_part(verb, url)

    def _charge_batch(self, headers: Mapping[str, Any], body: Any) -> list[_Sent]:
        content_type = next((value for name, value in headers.items() if name.lower() == "content-type"), "")
        calls, ids = [], []
        for content_id, line, _ in _parts(str(content_type), body):
            verb, _, target = line.partition(" ")
            verb, path = verb.upper() or "?", urlsplit(target.partition(" ")[0]).path
            calls.append((self._upstream.named(self._routes, verb, path) or f"{verb} {path}", verb))
            ids.append(content_id)
        if not calls:
            return [(self._meter.attempt("batch", "POST"), "")]  # unreadable, but the client sends it anyway
        return [*zip(self._meter.attempts(calls), ids, strict=True)]

    def forget(self) -> None:
        """Forget the attempts of this thread that still wait for an answer."""
        self._waiting.sent = []

    def never_left(self) -> None:
        """Refund what this thread charged last: no byte of it left, or a mock answered."""
        for attempt, _ in self._waiting.sent:
            attempt.never_left()

    def answered(self, response: Any, content: bytes) -> None:
        """Pass the answer to the attempts that this thread sent last."""
        sent: list[_Sent] = self._waiting.sent
        self.forget()
        status = int(response.status)
        answers = batched_answers(response.get("content-type", ""), content) if status < 400 else ()
        by_id = {content_id: (inner, body) for inner, body, content_id in answers}
        for attempt, content_id in sent:
            if status < 400 and content_id:
                attempt.answered(*by_id.get(content_id, (status, b"")))
            else:
                attempt.answered(status, content, response)


# -- batches -----------------------------------------------------------------------------------------------------------


def _parts(content_type: str, body: Any) -> Iterator[tuple[str, str, bytes]]:
    """(content id, first line, the rest) of each application/http part of a multipart body.

    A request and its answer share the id: upstream answers `<x + 1>` as `<response-x + 1>`. A part without an id gets
    its position in the batch.
    """
    raw = body.encode("utf-8", "replace") if isinstance(body, str) else body
    if not isinstance(raw, bytes) or not content_type.lower().startswith("multipart/"):
        return
    message = BytesParser().parsebytes(
        b"content-type: " + content_type.encode("latin-1", "replace") + b"\r\n\r\n" + raw
    )
    for number, part in enumerate(message.get_payload() if message.is_multipart() else ()):
        payload: bytes = part.get_payload(decode=True) or b""
        line, _, rest = payload.lstrip().partition(b"\n")
        given = str(part.get("content-id", "")).strip().strip("<>")
        content_id = " ".join(given.removeprefix("response-").split()) or f"#{number}"
        yield content_id, line.decode("latin-1").strip(), rest


def batched_answers(content_type: str, body: Any) -> Iterator[tuple[int, bytes, str]]:
    """(status, body, content id) of each answer in the answer to a batch."""
    for content_id, line, rest in _parts(content_type, body):
        words = line.split()
        status = int(words[1]) if len(words) > 1 and re.fullmatch("[0-9]{3}", words[1]) else 0
        head_and_body = re.split(rb"\r?\n\r?\n", rest, maxsplit=1)
        yield status, head_and_body[-1].strip() if len(head_and_body) == 2 else b"", content_id


# -- the connection ----------------------------------------------------------------------------------------------------


class _Connection(PatientConnection):
    """Charges each request to the API with its `gate`, after connecting and before the first byte leaves."""

    gate: _Gate
    charges = True  # `quota exec --auto` leaves it alone
    _left = False
    _used = False
    _has_answered = False
    _mocked: Callable[[], HTTPResponse] | None = None
    """Reads the answer of a mock (pook), which puts this function into a connection."""

    def connect(self) -> None:
        super().connect()
        self._used = self._has_answered = False

    def send(self, data: Any) -> None:
        self._left = True
        super().send(data)

    def request(
        self, method: str, url: str, body: Any = None, headers: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """Charge and send one request. Raises Refused before any byte of it leaves."""
        if self.sock is not None and self._used and has_hung_up(self.sock):
            self.close()  # a request on this connection would be charged and never arrive
        if self.sock is None:
            self.connect()
        self.sock.settimeout(self.patience_s())
        self.gate.charge((self.host, self.port), method, url, headers or {}, body)
        self._left = False
        try:
            super().request(method, url, body, headers or {}, **options)
        except BaseException:
            if not self._left:
                self.gate.never_left()
            # http.client's buffer holds half a request, and would send it ahead of the next one.
            self.spoiled = True
            self.close()
            raise
        self._mocked = vars(self).pop("getresponse", None)
        self._used = True

    def getresponse(self) -> HTTPResponse:
        """Read the head of the next answer.

        httplib2 takes any bad head for a connection that died while idle, and sends the request again, which costs
        another charge. That is allowed only after an earlier answer, and only if nothing arrived. With limits no
        request is sent again here: the caller decides how often to try.
        """
        limited = any(self.watch.limits)
        try:
            answer = (self._mocked or super().getresponse)()
        except ResponseNotReady:
            raise
        except RemoteDisconnected:
            if self._has_answered and not limited:
                raise
            raise ConnectionResetError("upstream closed the connection without an answer") from None
        except HTTPException as error:
            if limited:
                raise no_http() from error
            raise HTTPException(f"upstream's answer is no HTTP: {type(error).__name__}") from error
        self._has_answered = True
        if not self._left and not isinstance(answer, LimitedResponse):  # a mock made it
            self.gate.never_left()
        return answer


_Pools = dict[threading.Thread, dict[str, _Connection]]


class MeteredHttp(PatientHttp):
    """An httplib2.Http that charges every request to the API on its connections.

    Unlike httplib2.Http, threads may share it: each thread has its own connections, so that no thread reads another's
    answer. `close()` closes all connections. The connections of a thread that has ended are closed when a new thread
    opens its first one.
    """

    def __init__(self, meter: Meter, document: Mapping[str, Any], watch: Watch, *, timeout_s: float) -> None:
        self.gate = _Gate(meter, document)
        self._start_pool()
        start_over_in_child(self)
        super().__init__(document["rootUrl"], _Connection, watch=watch, timeout_s=timeout_s, gate=self.gate)
        # To Google, 308 means "upload not complete", not "moved".
        self.redirect_codes: frozenset[int] = httplib2.REDIRECT_CODES - {308}

    def _leaving(self, uri: str, headers: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        self.gate.forget()
        if headers and not self.gate.keeps_key(uri):
            return {name: value for name, value in headers.items() if name.lower() != GOOGLES_KEY.header}
        return headers

    def _answered(self, response: Any, content: bytes) -> None:
        self.gate.answered(response, content)

    # -- a pool of connections for each thread -------------------------------------------------------------------------

    def _start_pool(self) -> None:
        self._pools: _Pools = {}
        self._pools_lock = threading.Lock()

    def start_over_in_child(self) -> None:
        """Close the sockets that a forked child inherits: it would read its parent's answers from them.

        The parent's connections stay open.
        """
        inherited = self._pools
        self._start_pool()
        _close_all(inherited)

    @property
    def connections(self) -> dict[str, _Connection]:
        """This thread's open connections, by scheme and authority."""
        thread = threading.current_thread()
        pool = self._pools.get(thread)
        if pool is None:
            with self._pools_lock:
                pool = self._pools[thread] = {}
                ended = {other: self._pools.pop(other) for other in list(self._pools) if not other.is_alive()}
            _close_all(ended)
        return pool

    @connections.setter
    def connections(self, value: dict[str, _Connection]) -> None:
        self._pools[threading.current_thread()] = value

    def close(self) -> None:
        """Close the connections of all threads. A later request opens new ones."""
        with self._pools_lock:
            pools = dict(self._pools)
        _close_all(pools)
        self.certificates.clear()
        self.clear_credentials()


def _close_all(pools: _Pools) -> None:
    for pool in pools.values():
        while pool:
            pool.popitem()[1].close()
