"""Metered transports for HTTP clients other than Google's: they charge every attempt before it is sent.

    session = requests.Session()
    session.mount("https://", requests_adapter(budget))

    client = httpx.Client(transport=httpx_transport(budget, name_of, hosts=["api.example.com"]))

The cost book says which hosts are metered and which method a request is. Where it has no `hosts` or no `routes`, or for
others, give them: the second argument is the API method, one name for all requests, or a function of verb and URL.
Requests to other hosts are not charged, so a redirect is charged if it stays on a metered host. Both clients call their
transport once for each attempt and each redirect. urllib3's own retries are off, because they would not be seen.

A refusal raises quota.Refused from the client's call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from requests.exceptions import RequestException
from requests.structures import CaseInsensitiveDict

from quota.budget import Budget
from quota.clients.answer_limits import AnswerLimits
from quota.clients.caller import Caller
from quota.clients.gate import HostGate, HostNames, MethodOf, has_passed
from quota.clients.urllib3 import never_left, noted
from quota.common.redact import redact
from quota.terms.api import RequestBody


def requests_adapter(
    budget: Budget,
    method: MethodOf | None = None,
    *,
    hosts: HostNames | None = None,
    max_units: int | None = None,
    timeout_s: float | None = None,
    max_body_mb: int | None = None,
    caller: Caller | None = None,
    **options: Any,
) -> HTTPAdapter:
    """An adapter for `requests.Session.mount`. `options` are HTTPAdapter's own, except `max_retries`, which is 0.

    `hosts` are the metered hosts, one or several: `api.example.com` (any port) or `127.0.0.1:8765`; by default those
    of the cost book, whose `routes` name the `method`. `max_units` is the most that is spent in all, and `timeout_s`
    the timeout of requests that name none. A body of more than `max_body_mb`, as received or unpacked, raises
    quota.BadAnswer while it is read. `caller` signs what leaves; the client's own request stays unsigned.
    """
    gate = HostGate(budget, method, hosts, max_units)
    limits = AnswerLimits(max_body_mb).validated()
    options["max_retries"] = 0

    class MeteredAdapter(HTTPAdapter):
        def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
            if timeout_s is not None and kwargs.get("timeout") is None:
                kwargs["timeout"] = timeout_s
            response = self._sent(request, *args, **kwargs)
            _bound(response, limits)
            return response

        def _sent(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
            if caller is None:
                return self._attempt(request, *args, **kwargs)
            response = self._signed(caller, request, *args, **kwargs)
            again = request.body is None or isinstance(request.body, bytes | str)
            if again and caller.renewed(request.url or "", response.status_code):
                response.close()
                response = self._signed(caller, request, *args, **kwargs)
            return response

        def _signed(
            self, caller: Caller, request: requests.PreparedRequest, *args: Any, **kwargs: Any
        ) -> requests.Response:
            leaving = request.copy()
            leaving.url, headers = caller.signed(request.method or "GET", request.url or "", request.headers)
            leaving.headers = CaseInsensitiveDict(headers)
            try:
                response = self._attempt(leaving, *args, **kwargs)
            except RequestException as error:  # it quotes the URL, and so a key in its query
                raise type(error)(redact(str(error)), request=request) from None
            response.request, response.url = request, request.url or ""
            return response

        def _attempt(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
            body = RequestBody.of(request.body, request.headers.get("content-length"))
            attempt = gate.charge(request.method or "GET", request.url or "", body, request.headers)
            if attempt is None:
                return super().send(request, *args, **kwargs)
            try:
                with gate.sending():
                    response = super().send(request, *args, **kwargs)
            except Exception as error:
                if body.makes_no_requests and _never_left(error):
                    attempt.never_left()
                raise
            try:
                response.raw = noted(attempt, response.raw)
            except BaseException:  # interrupted: nobody else knows of the response
                response.close()
                raise
            return response

    return MeteredAdapter(**options)


def _never_left(error: Exception) -> bool:
    """Whether the request failed before its first byte: no address, no connection, no way through a proxy, no trusted
    certificate."""
    if not isinstance(error, RequestException):
        # A network failure is always a RequestException; this error is about the arguments. But the user's own body
        # may fail when a part of it has left.
        outside = isinstance(error, (OSError, ValueError)) and not has_passed(error, "urllib3.connectionpool")
        return outside or never_left(error)
    if isinstance(error, (requests.ConnectTimeout, requests.exceptions.InvalidURL)):
        return True
    return never_left(getattr(error.args[0] if error.args else None, "reason", None))


def _bound(response: requests.Response, limits: AnswerLimits) -> None:
    """End the body, while it is read through the response, where it is longer than it may be."""
    most = limits.max_bytes
    if most is None:
        return
    unbounded = response.raw.stream

    def stream(*args: Any, **options: Any) -> Iterator[bytes]:
        size = 0
        for piece in unbounded(*args, **options):
            size += len(piece)
            if size > most:
                response.close()
                raise limits.too_large()
            yield piece

    response.raw.stream = stream
