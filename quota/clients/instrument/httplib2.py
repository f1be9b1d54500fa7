"""Where the bytes of httplib2 leave, and so those of Google's client: each `request` of a connection is an attempt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http.client import HTTPSConnection
from typing import Any

from quota.clients.instrument.patches import Seam
from quota.clients.instrument.payers import Payer, Payers, answer_to
from quota.clients.instrument.urllib3 import address_of
from quota.clients.metering import Attempt
from quota.common.sockets import has_hung_up
from quota.errors import Refused
from quota.terms.reserve import RequestBody


def seams(payers: Payers) -> Iterator[Seam]:
    def charging(conn_request: Callable[..., Any]) -> Callable[..., Any]:
        def _conn_request(http: Any, conn: Any, request_uri: str, method: str, body: Any, headers: Any) -> Any:
            if getattr(http, "charges", False) or not payers.knows(conn.host, conn.port):
                return conn_request(http, conn, request_uri, method, body, headers)
            scheme = "https" if isinstance(conn, HTTPSConnection) else "http"
            address = address_of(scheme, conn.host, conn.port, request_uri)
            payer = payers.of(method, address)
            if payer is None:
                return conn_request(http, conn, request_uri, method, body, headers)
            charged = _Charged(conn, payer, address)
            try:
                response, content = conn_request(http, charged, request_uri, method, body, headers)
            except Refused as refusal:
                return _refused(refusal, payer, method)
            charged.answered(response, content)
            return response, content

        return _conn_request

    yield Seam("httplib2", "Http", "_conn_request", ("conn", "request_uri", "method", "body", "headers"), charging)


class _Charged:
    """A connection of httplib2 that charges each request when it is connected, before the first byte leaves."""

    def __init__(self, conn: Any, payer: Payer, address: str) -> None:
        self._conn = conn
        self._payer = payer
        self._address = address
        self._attempt: Attempt | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._conn, name)

    def request(self, method: str, request_uri: str, body: Any, headers: Any) -> None:
        conn, left = self._conn, False
        if conn.sock is not None and has_hung_up(conn.sock):
            conn.close()
            conn.connect()

        def send(data: Any) -> None:
            nonlocal left
            left = True
            type(conn).send(conn, data)

        said = {name.lower(): value for name, value in (headers or {}).items()}
        asked = RequestBody.of(body, said.get("content-length"))
        attempt = self._payer.gate.charge(method, self._address, asked, said)
        if attempt is None:
            conn.request(method, request_uri, body, headers)
            return
        self._attempt = attempt
        conn.send = send
        try:
            conn.request(method, request_uri, body, headers)
        except BaseException:
            if not left:
                attempt.never_left()
            raise
        finally:
            del conn.send

    def answered(self, response: Any, content: bytes) -> None:
        attempt, status = self._attempt, int(response.status)
        if attempt is None:
            return
        attempt.answered(status, content, response)
        attempt.settle_by(status, response, content)


def _refused(refusal: Refused, payer: Payer, method: str) -> tuple[Any, bytes]:
    import httplib2

    if not payer.answers_429:
        raise ConnectionRefusedError(str(refusal)) from refusal
    answer = answer_to(refusal)
    response = httplib2.Response({**answer.headers, "status": str(answer.status)})
    response.reason = answer.reason
    return response, b"" if method == "HEAD" else answer.body
