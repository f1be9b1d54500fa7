"""Metered transports for HTTP clients other than Google's: they charge every attempt before it is sent.

    session = requests.Session()
    session.mount("https://", requests_adapter(budget))

    client = httpx.Client(transport=httpx_transport(budget, name_of, hosts=["api.example.com"]))

The cost book names the metered hosts, and the method of each request. If it lacks `hosts` or `routes`, or to replace
them, give `hosts` and as second argument the API method: one name, or a function of verb and URL. Requests to other
hosts are not charged; a redirect is charged if it stays on a metered host. Both clients call their transport once for
each attempt and each redirect; what httpcore sends again over HTTP/2 is charged, too. urllib3's own retries are off,
because the transport would not see them.

A refusal raises quota.Refused from the client's call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import ref

import requests
from requests.__version__ import __version__ as version
from requests.adapters import BaseAdapter, HTTPAdapter
from requests.exceptions import RequestException

from quota.budget import Budget
from quota.clients.answer_fields import AnswerLimits
from quota.clients.caller import Caller
from quota.clients.deadline import connect_within_s
from quota.clients.gate import MAX_REDIRECTS, HostGate, HostNames, MethodOf, at_once
from quota.clients.metering import Meter
from quota.clients.urllib3 import send
from quota.common.hosts import url_on
from quota.common.redact import redact
from quota.errors import BadAnswer, UsageError


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
    """An adapter for `requests.Session.mount`. `options` are HTTPAdapter's own, except `max_retries`.

    `hosts` are the metered hosts, one or several: `api.example.com` (any port) or `127.0.0.1:8765`; by default those
    of the budget, whose cost book names the `method` by its `routes`. The adapter spends at most `max_units` in all.
    Requests without a timeout get `timeout_s`, and at most 10 s of it for a connection if they send no long body. An
    answer above `max_body_mb`, as received or unpacked, raises quota.BadAnswer while the caller reads it. `caller`
    signs what leaves; the client's own request stays unsigned.
    """
    if "max_retries" in options:
        raise UsageError("max_retries: this adapter sends each request once; retry around the call, as with tenacity")
    gate = HostGate(Meter(budget, max_units), method, hosts)
    limits = AnswerLimits(max_body_mb).validated()
    return MeteredAdapter(gate, limits, timeout_s=timeout_s, caller=caller, **options)


class MeteredAdapter(HTTPAdapter):
    """Charges each attempt at a `gate`, if there is one."""

    def __init__(
        self,
        gate: HostGate | None,
        limits: AnswerLimits,
        *,
        timeout_s: float | None = None,
        caller: Caller | None = None,
        **options: Any,
    ) -> None:
        if not hasattr(HTTPAdapter, "get_connection_with_tls_context"):
            raise UsageError(f"requests {version} is too old to be metered; install 2.32.2 or newer")
        self._gate, self._limits, self._timeout_s, self.caller = gate, limits, timeout_s, caller
        super().__init__(**options)

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
        if self._timeout_s is not None and kwargs.get("timeout") is None:
            kwargs["timeout"] = connect_within_s(request.body, self._timeout_s), self._timeout_s
        caller = self.caller
        if caller is None:
            response = super().send(request, *args, **kwargs)
        else:
            attempt = partial(self._signed, caller, request, *args, **kwargs)
            again = request.body is None or isinstance(request.body, bytes | str)
            response = caller.send(attempt, request.url or "", again=again)
        _bound(response, self._limits)
        return response

    def _signed(
        self, caller: Caller, request: requests.PreparedRequest, *args: Any, **kwargs: Any
    ) -> requests.Response:
        leaving = request.copy()
        leaving.url, headers = caller.signed(request.method or "GET", request.url or "", request.headers)
        leaving.prepare_headers(headers)  # `http.client` would quote a token with a line's end
        try:
            response = super().send(leaving, *args, **kwargs)
        except RequestException as error:  # the error quotes the URL, and so a key in its query
            if not caller.place.query:
                raise
            raise type(error)(redact(str(error)), request=request) from None
        response.request, response.url, response.raw.url = request, request.url or "", request.path_url
        return response

    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> Any:
        """The connections, charged below every mock of requests and of `urlopen`."""
        pool: Any = super().get_connection_with_tls_context(*args, **kwargs)
        gate = self._gate
        take: Callable[[Any], None] = (lambda conn: None) if self.caller is None else self.caller.take
        pool_of: Callable[[], Any] = ref(pool)  # a strong reference to itself would keep the pool open

        def make_request(conn: Any, method: str, url: str, **given: Any) -> Any:
            own = pool_of()
            take(conn)
            make = partial(type(own)._make_request, own, conn, method, url, **given)
            if gate is None:
                return make()
            return at_once(send(gate, conn, method, url_on(own.scheme, own.host, own.port, url), given, make))

        def prepare_proxy(conn: Any) -> None:
            take(conn)  # it reads the proxy's answer, too
            own = pool_of()
            type(own)._prepare_proxy(own, conn)

        pool._make_request, pool._prepare_proxy = make_request, prepare_proxy
        return pool


class MeteredSession(requests.Session):
    """A session that takes no adapter beside the metered one: its requests would leave uncharged."""

    def __init__(self) -> None:
        super().__init__()
        self.max_redirects = MAX_REDIRECTS

    def mount(self, prefix: str, adapter: BaseAdapter) -> None:
        metered = any(isinstance(mounted, MeteredAdapter) for mounted in self.adapters.values())
        if metered and isinstance(adapter, HTTPAdapter) and not isinstance(adapter, MeteredAdapter):
            why = "its requests would leave uncharged; retry around the call, as with tenacity"
            raise UsageError(f"mount: q.requests() takes no other adapter: {why}")
        super().mount(prefix, adapter)


class SignedSession(MeteredSession):
    """A session that reads no ~/.netrc: a login from there would leave beside the adapter's own signature."""

    def __init__(self) -> None:
        super().__init__()
        self.auth = lambda request: request  # else requests reads it

    def rebuild_auth(self, prepared_request: requests.PreparedRequest, response: requests.Response) -> None:
        if self.should_strip_auth(response.request.url or "", prepared_request.url or ""):
            prepared_request.headers.pop("authorization", None)


def _bound(response: requests.Response, limits: AnswerLimits) -> None:
    """Raise BadAnswer while the caller reads the body, once the body is above the limit."""
    most = limits.max_bytes
    if most is None:
        return
    unbounded, read_on = response.raw.stream, response.raw.read

    def bounded(size: int) -> None:
        if size > most:
            response.close()
            why = f"upstream's answer is larger than {limits.max_body_mb} MB"
            raise BadAnswer(f"{why}; if this is expected, raise max_body_mb")

    def stream(*args: Any, **options: Any) -> Iterator[bytes]:
        size = 0
        for piece in unbounded(*args, **options):
            size += len(piece)
            bounded(size)
            yield piece

    def read(amt: int | None = None, *args: Any, **options: Any) -> bytes:
        """requests calls this to read a body that does not unpack."""
        piece: bytes = read_on(most + 1 if amt is None else amt, *args, **options)
        bounded(len(piece))
        return piece

    response.raw.stream, response.raw.read = stream, read
