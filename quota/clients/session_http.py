"""What Google's client sends over, and limits on an answer of upstream: its size, its time, its shape.

A hostile or broken upstream may send an endless body, one byte every two seconds, a few bytes that unpack to gigabytes,
a page of 400,000 items, or HTML instead of JSON. Each of these raises `BadAnswer` with one line.

    SessionHttp      what Google's client asks of an Http, over a session of requests
    digestible       an error's body, if the client can parse it
    checked          checks the shape of a body before the client parses it
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.client import HTTPException, IncompleteRead, RemoteDisconnected
from http.cookiejar import DefaultCookiePolicy
from socket import gaierror
from typing import Any
from urllib.parse import urljoin, urlsplit

import httplib2
import requests
from googleapiclient.errors import HttpError
from googleapiclient.model import JsonModel
from requests.exceptions import ChunkedEncodingError, ContentDecodingError, RequestException, TooManyRedirects
from urllib3.exceptions import HTTPError, InvalidChunkLength

from quota.clients.answer_fields import AnswerLimits
from quota.clients.caller import Caller
from quota.clients.deadline import Watch, connect_within_s
from quota.clients.requests import MeteredAdapter, SignedSession
from quota.clients.urllib3 import NO_TUNNEL
from quota.common.fork import start_here_and_in_child
from quota.common.hosts import is_http_address, is_loopback
from quota.common.redact import redact
from quota.common.text import show, spaced
from quota.errors import BadAnswer, NoAnswer

BYTES_PER_VALUE = 16
"""A body may hold one value per 16 bytes of its size limit: a value of three bytes takes a hundred once parsed."""

MAX_TOKEN_LENGTH = 8_192
"""The longest page token. It travels in a URL."""

MAX_CONNECTIONS = 100
"""The most idle connections to one host that stay open."""


class _Session(SignedSession):
    """A session that sends what it is told to, and nothing of its own: no fields and no cookies. Each of its requests,
    redirects too, waits within the watch."""

    def __init__(self, http: SessionHttp, adapter: MeteredAdapter) -> None:
        super().__init__()
        self._http = http
        self.headers.clear()
        self.cookies.set_policy(DefaultCookiePolicy(allowed_domains=()))
        self.adapters.clear()
        self.mount("http://", adapter)
        self.mount("https://", adapter)

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        silent_s = self._http.timeout
        options["timeout"] = min(connect_within_s(request.body, silent_s), self._http.watch.left_s()), silent_s
        return super().send(request, **options)

    def get_redirect_target(self, resp: requests.Response) -> str | None:
        """Where an answer redirects to. A request that changes something goes nowhere else, except to look at its
        result. To Google, 308 means "upload not complete", not "moved". Nobody reads the body of a redirect."""
        reads = resp.request.method in ("GET", "HEAD", "OPTIONS") or resp.status_code == 303
        if not reads or resp.status_code == 308 or not resp.is_redirect:
            return None
        resp.close()
        target = resp.headers["location"].encode("latin-1").decode("utf-8", "replace").strip()
        # Only a path is joined to the address: `urljoin` would mend an address without a host.
        address = target
        if target.startswith("//"):
            address = f"{urlsplit(resp.url).scheme}:{target}"
        elif not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", target):
            address = urljoin(resp.url, target)
        # A file, another protocol, or a user's name is no HTTP address.
        if not is_http_address(address) or not address.isprintable() or " " in address:
            why = f"upstream redirects to {show(redact(address))}, which is no http address"
            raise BadAnswer(f"{why}; check endpoint and proxies")
        return target

    def rebuild_auth(self, prepared_request: requests.PreparedRequest, response: requests.Response) -> None:
        super().rebuild_auth(prepared_request, response)
        prepared_request.headers.pop("cookie", None)


class SessionHttp:
    """What Google's client asks of an Http for the API at `root`. Threads may share it.

    It sends over a session of requests, whose adapter signs each attempt as the `caller`, and charges it at the `gate`,
    if there is one. Errors are those of the connection, as with httplib2: the client's own retries look at their class.
    """

    def __init__(
        self, root: str, watch: Watch, caller: Caller, *, timeout_s: float, gate: Any = None, follows: bool = True
    ) -> None:
        self.watch, self.timeout, self.gate = watch, timeout_s, gate
        self.caller, caller.prepare = caller, watch.over
        self.credentials = caller.credentials  # a batch renews them after a 401
        self._options: dict[str, Any] = {"allow_redirects": follows, "stream": True}
        if is_loopback(urlsplit(root).hostname or ""):  # a proxy cannot reach this machine's
            self._options["proxies"] = {"http": "", "https": ""}  # so requests asks the environment for none
        start_here_and_in_child(self)

    def start_over_in_child(self) -> None:
        """A forked child would read its parent's answers."""
        adapter = MeteredAdapter(self.gate, self.watch.limits, caller=self.caller, pool_maxsize=MAX_CONNECTIONS)
        self._session = _Session(self, adapter)

    def request(
        self, uri: str, method: str = "GET", body: Any = None, headers: Mapping[str, Any] | None = None, **_: Any
    ) -> tuple[httplib2.Response, bytes]:
        """The answer and its unpacked body. Ignores `redirections` and `connection_type`.

        Raises BadAnswer for an answer above a limit, and for a redirect to something that is not HTTP.
        """
        headers = dict(headers or {})
        if {name.lower(): text for name, text in headers.items()}.get("content-length") == "0":
            body = b""  # requests would send an empty stream in chunks
        with self.watch.request():
            try:
                with self._session.request(method, uri, data=body, headers=headers, **self._options) as response:
                    content = _content(response)
            except (RequestException, HTTPError, HTTPException) as error:
                raise self._error(error) from None
        answer = httplib2.Response({**response.headers, "status": str(response.status_code)})
        answer.reason = response.reason
        if answer.pop("content-encoding", ""):
            answer["content-length"] = str(len(content))
        if response.ok and self.caller.takes_secret(response.url):
            answer["content-location"] = response.url  # a download continues at this address
        return answer, digestible(answer, content)

    def _error(self, error: Exception) -> Exception:
        """The error of the connection below an error of requests."""
        if isinstance(error, TooManyRedirects):
            return NoAnswer("upstream redirects in circles, or nowhere; check endpoint and proxies")
        if isinstance(error, ContentDecodingError):
            return BadAnswer("upstream's answer does not unpack; check endpoint and proxies")
        below: BaseException | None = error
        while isinstance(below, (RequestException, HTTPError)) and not isinstance(below, HTTPException):
            context = None if below.__suppress_context__ else below.__context__
            wrapped = [part for part in below.args if isinstance(part, BaseException)]  # by urllib3, behind a proxy
            below = below.__cause__ or context or next(iter(wrapped), None)
        if isinstance(below, gaierror):
            host = urlsplit(getattr(getattr(error, "request", None), "url", "")).hostname
            no_address: Exception = httplib2.ServerNotFoundError(f"Unable to find the server at {host}")
            return no_address
        if isinstance(below, RemoteDisconnected):
            return ConnectionResetError("upstream closed the connection without an answer")
        if str(below).startswith(NO_TUNNEL):  # http.client has no class for a proxy's refusal
            return ConnectionError(str(below))
        is_cut = isinstance(below, IncompleteRead) and not isinstance(below, InvalidChunkLength)
        if isinstance(below, HTTPException) and not is_cut:
            no_http = "upstream's answer is no HTTP"
            if any(self.watch.limits):
                return NoAnswer(f"{no_http}; check endpoint and proxies")
            return HTTPException(f"{no_http}: {type(below).__name__}")
        if isinstance(error, ChunkedEncodingError) and below is None:
            return ConnectionResetError("upstream closed the connection within its answer")
        return below if isinstance(below, Exception) else httplib2.HttpLib2Error(redact(str(error)))

    def close(self) -> None:
        """Close all connections. A later request opens new ones."""
        self._session.close()


def digestible(response: Any, content: bytes) -> bytes:
    """The body of an answer, or b"" for an error answer whose body the client cannot parse.

    The client looks for a message in the body of an error. If the message is not text, or the JSON is nested too deep,
    the client fails with one of Python's own exceptions, and the caller never learns the status.
    """
    if int(response.status) >= 300:
        try:
            HttpError(response, content)
        except Exception:
            return b""
    return content


def _content(response: requests.Response) -> bytes:
    try:
        return response.content
    except ValueError as error:  # a chunk of negative size
        raise HTTPException(str(error)) from error


# -- its shape ---------------------------------------------------------------------------------------------------------


def checked(postproc: Callable[[Any, Any], Any], limits: AnswerLimits) -> Callable[[Any, Any], Any]:
    """`postproc`, which parses a body for the client, with a check of the limits and of the API's shapes."""
    promises_json = type(getattr(postproc, "__self__", None)) is JsonModel  # not for media or empty bodies

    def check(response: Any, content: Any) -> Any:
        if int(response.status) >= 300 or not promises_json:
            return postproc(response, content)
        if limits.max_bytes is not None:
            most_values = limits.max_bytes // BYTES_PER_VALUE
            text = content.encode() if isinstance(content, str) else content
            # An upper bound: characters inside strings count, too.
            if text.count(b",") + text.count(b"[") + text.count(b"{") > most_values:
                why = f"upstream's answer holds over {most_values:,} values"
                raise BadAnswer(f"{why}; if this is expected, raise max_body_mb")
        answer = None
        with suppress(ValueError, RecursionError):
            answer = postproc(response, content)
        # The client returns an unparseable body unchanged, and makes an object without items of a 204.
        if not isinstance(answer, dict) or int(response.status) == 204:
            kind = _word(str(response.get("content-type", "")))
            why = f"upstream's answer is no JSON object ({kind}, {len(content):,} bytes)"
            raise NoAnswer(f"{why}; check endpoint and proxies")
        _check_page(answer, limits)
        return answer

    return check


def _check_page(answer: dict[str, Any], limits: AnswerLimits) -> None:
    for name, value in answer.items():
        if limits.max_items is not None and isinstance(value, list) and len(value) > limits.max_items:
            why = f"upstream's answer holds {len(value):,} {_word(name)}, over {limits.max_items:,}"
            raise BadAnswer(f"{why}; if this is expected, raise max_items")
    if isinstance(answer.get("error"), dict) and "items" not in answer:
        why = f"upstream's answer holds an error, but no status of one: {show(answer['error'].get('message'))}"
        raise BadAnswer(f"{why}; check endpoint and proxies")
    items, token = answer.get("items", []), answer.get("nextPageToken")
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise BadAnswer("upstream's answer has items that are not a list of objects; check endpoint and proxies")
    if token is not None and not (isinstance(token, str) and len(token) <= MAX_TOKEN_LENGTH and token.isprintable()):
        raise BadAnswer("upstream's answer has an invalid nextPageToken; check endpoint and proxies")


def _word(text: str) -> str:
    """A word from upstream, fit for a message."""
    return spaced(text[:40]).strip() or "text"
