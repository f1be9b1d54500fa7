"""A googleapiclient service that charges every HTTP attempt at the moment it leaves this machine.

    youtube = service(budget, "youtube", "v3", key=...)
    youtube.videos().list(part="snippet", chart="mostPopular").execute()      # raises quota.Refused

The session's adapter makes the charge where it sends, below the client's own retries, redirects, repeats after a 401,
batches and pages: each attempt passes through it once.

    layer            class              what it adds
    HttpRequest      MeteredRequest     records which API method is being sent
    Http             SessionHttp        limits the answers
    HTTPAdapter      MeteredAdapter     signs each attempt, charges it at the GoogleGate, and passes it the answer

Importing this file takes a quarter of a second. No module of the package imports it before a call is allowed to leave.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from email.parser import BytesParser
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from google.auth.credentials import with_scopes_if_required
from googleapiclient.discovery import Resource, build_from_document
from googleapiclient.errors import HttpError
from googleapiclient.http import BatchHttpRequest, HttpRequest

from quota.budget import Budget
from quota.clients.answer_fields import AnswerLimits
from quota.clients.caller import Caller
from quota.clients.deadline import Watch
from quota.clients.discovery import Routes, description, scopes_of
from quota.clients.gate import HostGate
from quota.clients.metering import Attempt, Meter
from quota.clients.session_http import SessionHttp, checked
from quota.clients.upstream import Google, Sent
from quota.common.hosts import is_http_address, is_loopback, is_readable_on_the_way
from quota.common.redact import redact, register
from quota.common.text import show
from quota.errors import ConfigError, UsageError
from quota.terms.api import GOOGLES_KEY, NO_BODY, Hosts, RequestBody
from quota.terms.arguments import instance, seconds, text

TIMEOUT_S = 60.0

_SHARED_HOST = "www.googleapis.com"
"""This host serves all of Google's older APIs."""


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
    waiting: Callable[[float], None] | None = None,
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
    JSON that the API promises. The service sends a request once, unless its `execute` is told to retry. It calls
    `waiting` several times a second while it waits for an answer; an exception from `waiting` ends the request.
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
    root: str = document["rootUrl"]
    limits = AnswerLimits(max_body_mb, max_answer_s, max_items).validated()
    gate = GoogleGate(Meter(budget, max_units), document)
    if credentials is not None:
        credentials = with_scopes_if_required(credentials, scopes_of(document))  # type: ignore[no-untyped-call]
    elif key is not None:
        register(key)
    hosts, insecure = (urlsplit(root).netloc, *gate.shared), insecure_endpoint and is_readable_on_the_way(root)
    caller = Caller(hosts, key=key, place=GOOGLES_KEY, credentials=credentials, insecure=insecure, googles=True)
    caller.check(root)
    return build_from_document(
        document,
        http=SessionHttp(root, Watch(limits, waiting), caller, timeout_s=timeout_s, gate=gate),
        requestBuilder=MeteredRequest,
        client_options={"api_endpoint": root + document["servicePath"]},
    )


def _root(endpoint: str) -> str:
    endpoint = text(endpoint, "endpoint")
    if not is_http_address(endpoint) or "?" in endpoint or "#" in endpoint:
        why = f"endpoint {show(redact(endpoint))} is not the root of an API"
        raise ConfigError(f"{why}; write for example http://127.0.0.1:8765")
    return endpoint.rstrip("/") + "/"


# -- what is being sent ------------------------------------------------------------------------------------------------

_sending: ContextVar[HttpRequest | None] = ContextVar("quota_sending", default=None)


class MeteredRequest(HttpRequest):  # type: ignore[misc]  # the client ships no types
    """A request that records which API method it calls while it is being sent. Copies made by `*_next` do the same.

    It can only be sent on a metered Http: see `_check_metered`.
    """

    def __init__(self, http: Any, postproc: Any, *args: Any, **options: Any) -> None:
        watch: Watch | None = getattr(http, "watch", None)
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
    gate = _gate_of(http)
    if gate is None or not gate.hosts.serve(uri):
        raise UsageError("this http would bypass the budget: leave it out, threads may share one service")


def _gate_of(http: Any) -> GoogleGate | None:
    """The gate of a metered Http; None for another."""
    return http.gate if isinstance(http, SessionHttp) else None


_send_batch = BatchHttpRequest._execute


def _send_checked_batch(self: Any, http: Any, order: Any, requests: Any) -> Any:
    payers = {gate.payer for name in order if (gate := _gate_of(requests[name].http)) is not None}
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


class GoogleGate(HostGate):
    """Charges the requests to the API of a discovery document, by the method that is being sent, or else by what is on
    the wire."""

    def __init__(self, meter: Meter, document: Mapping[str, Any]) -> None:
        root = urlsplit(document["rootUrl"])
        host = root.hostname or ""
        # On loopback, the port distinguishes servers. Elsewhere, all ports of a host share one quota.
        own = root.netloc if is_loopback(host) and root.port else root.netloc.removesuffix(f":{root.port}")
        self._own = Hosts([own])
        self._routes = Routes(document)
        self.payer = meter.budget.project, meter.budget.credential
        self.shared = [_SHARED_HOST] if host.endswith(".googleapis.com") else []
        super().__init__(meter, self._method_of, [own, *self.shared])
        self.upstream = Google(meter.budget.book)

    async def charge(  # type: ignore[override]  # a Batch is used like an Attempt
        self, verb: str, url: str, body: RequestBody = NO_BODY, headers: Sent = ()
    ) -> Attempt | Batch | None:
        """Charge one request that is about to leave. Returns None if it does not call this API. Raises Refused."""
        if not self.hosts.serve(url):
            return None
        sent_verb, verb = verb, self.verb(verb, url, headers).upper()
        is_batch = self._routes.is_batch(verb, url)
        if not is_batch and not self._own.serve(url) and self._on_the_wire(verb, url) is None:
            return None
        request = _sending.get()
        if request is None and is_batch:
            return self._charge_batch(body, headers)
        continues = self._routes.is_part(sent_verb, url)
        if request is not None:
            continues = request.resumable is not None and request.resumable_uri is not None
        if continues:  # the request that opened the upload was charged
            return None
        return self.meter.attempt(self.name(verb, url), verb, body)

    def _on_the_wire(self, verb: str, url: str) -> str | None:
        return self.upstream.named(self._routes, verb, urlsplit(url).path)

    def _method_of(self, verb: str, url: str) -> str:
        """The method that is being sent, or else the one on the wire."""
        request = _sending.get()
        sent = None if request is None else request.methodId
        return sent or self._on_the_wire(verb, url) or f"{verb} {urlsplit(url).path}"

    def _charge_batch(self, body: RequestBody, headers: Sent) -> Attempt | Batch:
        calls, ids = [], []
        for content_id, line, _ in _parts(str(dict(headers).get("content-type", "")), body.content or b""):
            verb, _, target = line.partition(" ")
            verb, path = verb.upper() or "?", urlsplit(target.partition(" ")[0]).path
            calls.append((self._on_the_wire(verb, path) or f"{verb} {path}", verb))
            ids.append(content_id)
        if not calls:
            return self.meter.attempt("batch", "POST")  # unreadable, but the client sends it anyway
        return Batch(list(zip(ids, self.meter.attempts(calls), strict=True)))


class Batch:
    """The attempts of the calls that travel in one request, each with its content id. Like an Attempt; and, like its
    usage, it collects the answer while the client reads it, because each call has an answer of its own."""

    def __init__(self, attempts: Sequence[tuple[str, Attempt]]) -> None:
        self._attempts = attempts
        self._status, self._content_type, self._body = 0, "", bytearray()

    def never_left(self) -> None:
        for _, attempt in self._attempts:
            attempt.never_left()

    def reads_body(self, status: int, headers: Mapping[str, str]) -> bool:
        return status >= 400

    def answered(self, status: int, body: bytes, headers: Mapping[str, str], *, whole: bool) -> None:
        self._status, self._content_type = status, headers.get("content-type", "")
        if status >= 400:
            for _, attempt in self._attempts:
                attempt.answered(status, body, headers, whole=whole)

    def usage(self, headers: Mapping[str, str]) -> Batch | None:
        return self if self._status < 400 else None

    def settle(self, used_units: None) -> None:
        """Do nothing: each call is settled by its own answer."""

    def feed(self, piece: bytes) -> None:
        self._body += piece

    def end(self, _: Any = None) -> None:
        answers = batched_answers(self._content_type, bytes(self._body))
        by_id = {content_id: (status, body) for status, body, content_id in answers}
        for content_id, attempt in self._attempts:
            attempt.answered(*by_id.get(content_id, (self._status, b"")))


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
        _, *bodies = re.split(rb"\r?\n\r?\n", rest, maxsplit=1)
        yield status, b"".join(bodies).strip(), content_id
