"""Signs each request to the API's hosts as it leaves, and no other request.

A redirect is a new request. So no other host sees the key, whatever a client does with its headers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote_plus, urlencode, urlsplit, urlunsplit

from quota.common.hosts import is_readable_on_the_way
from quota.common.redact import redact
from quota.common.text import show
from quota.errors import ConfigError
from quota.terms.api import GOOGLES_FIELDS, GOOGLES_HEADERS, Hosts, KeyPlace

R = TypeVar("R", bound=Any)


@dataclass(eq=False, repr=False)
class Caller:
    """Signs requests to `hosts` with a `key` in its `place`, or with `credentials` of google-auth; without either it
    signs nothing. It renews the credentials in time, free of charge. `insecure` allows plain HTTP, where others on the
    way can read the secret. `googles`: the API is one of Google's. `prepare` gets the connection of each request."""

    hosts: tuple[str, ...]
    _: KW_ONLY
    key: str | None = None
    place: KeyPlace
    credentials: Any = None
    insecure: bool = False
    googles: bool = False
    prepare: Callable[[Any], None] = lambda conn: None

    def __post_init__(self) -> None:
        self.takes_secret = partial(Hosts(self.hosts).serve, any_port=False)

    def signed(self, verb: str, url: str, headers: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The URL and the headers as they leave. Raises ConfigError for a request that would expose a secret on its
        way, and google-auth's own error if there is no token."""
        signed = dict(headers)
        if not self.signs or not self.takes_secret(url):
            return url, signed
        self.check(url)
        # A credential of the program's own would leave beside ours.
        if self.googles:
            signed = {name: value for name, value in signed.items() if name.lower() not in GOOGLES_HEADERS}
        if "?" in url and (self.googles or self.place.query):
            url = with_query(url, without=(self.place.query, *(GOOGLES_FIELDS if self.googles else ())))
        if self.credentials is not None:
            fields = signed if self.googles else {}
            self.credentials.before_request(self._ask, verb, url, fields)
            # Only Google takes the other fields, where a key or nothing may be the login.
            if "authorization" in fields:
                signed["authorization"] = fields["authorization"].strip()  # clients' errors quote one with a line's end
        elif self.place.query:
            own = urlencode([(self.place.query, self.key)])
            return with_query(url, own, without=()), signed
        else:
            signed = {name: value for name, value in signed.items() if name.lower() != self.place.header.lower()}
            signed[self.place.header] = f"{self.place.scheme} {self.key}".strip()
        return url, signed

    def check(self, url: str) -> None:
        """Raises ConfigError for a URL that would get a secret in plain text."""
        if self.signs and not self.insecure and is_readable_on_the_way(url):
            why = f"{show(redact(url))} would get the secret in plain text"
            raise ConfigError(f"{why}; give an https:// address, or insecure_endpoint = true")

    @property
    def signs(self) -> bool:
        return self.key is not None or self.credentials is not None

    def take(self, conn: Any) -> None:
        """Prepare a connection of http.client for a request, or for a request to a proxy."""
        conn.debuglevel = 0  # http.client would print whole requests, including the secret
        self.prepare(conn)

    def send(self, attempt: Callable[[], R], url: str, *, again: bool) -> R:
        """The answer to an attempt. If it refused a token and the attempt can be made `again`, the answer to another
        attempt, with a new token."""
        response = attempt()
        headers: MutableMapping[str, str] = response.headers
        target = headers.get("location", "")
        if self.key is not None and self.place.query and self.key in unquote_plus(target):
            # A redirect repeats the query: take the key out, because no other host may see it.
            with suppress(ValueError):  # no address, so nobody follows it
                headers["location"] = with_query(target, without=(self.place.query,))
        renewable = again and self.credentials is not None and getattr(self.credentials, "renewable", True)
        if response.status_code != 401 or not renewable or not self.takes_secret(url):
            return response
        response.close()
        self.credentials.refresh(self._ask)
        return attempt()

    def _ask(self, *args: Any, **options: Any) -> Any:
        """The transport with which google-auth fetches tokens. It is not metered."""
        from google.auth.transport.requests import Request
        from requests import Session

        with Session() as session:
            session.auth = lambda request: request  # else requests reads the login of ~/.netrc
            for adapter in session.adapters.values():
                pool_for = getattr(adapter, "get_connection_with_tls_context", None)  # since requests 2.32.2
                vars(adapter)["get_connection_with_tls_context"] = partial(self._pool, pool_for)
            return Request(session)(*args, **{"timeout": RENEW_S} | options)

    def _pool(self, pool_for: Any, *args: Any, **options: Any) -> Any:
        pool = pool_for(*args, **options)
        make = pool.ConnectionCls

        def prepared(*args: Any, **options: Any) -> Any:
            conn = make(*args, **options)
            self.take(conn)
            return conn

        pool.ConnectionCls = prepared
        return pool


def with_query(url: str, more: str = "", *, without: Iterable[str]) -> str:
    """The URL without these fields of its query, and with one more. The other fields stay as they are."""
    parts, names = urlsplit(url), set(without)
    fields = [field for field in parts.query.split("&") if field and unquote_plus(field.partition("=")[0]) not in names]
    return urlunsplit(parts._replace(query="&".join([*fields, *([more] if more else [])])))


RENEW_S = 10.0
"""How long a token server may be silent."""
