"""Who calls, for clients other than Google's: a request to the API's hosts is signed as it leaves, any other is not.

A redirect is a request of its own, so that no other host sees the key, whatever a client does with its headers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any
from urllib.parse import unquote_plus, urlencode, urlsplit, urlunsplit

from quota.common.hosts import is_readable_on_the_way
from quota.common.redact import redact
from quota.common.text import show
from quota.errors import ConfigError
from quota.terms.api import Hosts, KeyPlace


@dataclass(eq=False, repr=False)
class Caller:
    """Signs requests to `hosts` with a `key` in its `place`, or with `credentials` of google-auth, which are renewed in
    time; that is not charged. With neither it signs nothing. `insecure`: also where others on the way can read it.
    `googles`: the API is one of Google's."""

    hosts: tuple[str, ...]
    _: KW_ONLY
    key: str | None = None
    place: KeyPlace
    credentials: Any = None
    insecure: bool = False
    googles: bool = False

    def __post_init__(self) -> None:
        self._hosts = Hosts(self.hosts)

    def signed(self, verb: str, url: str, headers: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The URL and the headers as they leave. Raises ConfigError for a request that would show a secret on its way,
        and what google-auth raises where it gets no token."""
        signed = dict(headers)
        if not self.signs or not self._hosts.serve(url):
            return url, signed
        if not self.insecure and is_readable_on_the_way(url):
            raise ConfigError(
                f"{show(redact(url))} would get the secret in plain text; give an https:// address, or "
                "insecure_endpoint = true"
            )
        if self.credentials is not None:
            fields = signed if self.googles else {}
            with _renewing() as ask:
                self.credentials.before_request(ask, verb, url, fields)
            signed["authorization"] = fields["authorization"]  # the others are for Google alone
        elif self.place.query:
            own = urlencode([(self.place.query, self.key)])
            return with_query(url, own, without=(self.place.query,)), signed
        else:
            signed = {name: value for name, value in signed.items() if name.lower() != self.place.header.lower()}
            signed[self.place.header] = f"{self.place.scheme} {self.key}".strip()
        return url, signed

    @property
    def signs(self) -> bool:
        return self.key is not None or self.credentials is not None

    @property
    def waits(self) -> bool:
        """Whether `signed` asks for a token first."""
        return self.credentials is not None and not self.credentials.valid

    @property
    def secret(self) -> str | None:
        """What it signs with now."""
        return self.key if self.credentials is None else self.credentials.token

    def renewed(self, url: str, status: int) -> bool:
        """Whether an answer refused a token that is now renewed, so that the request may be sent once more."""
        renewable = self.credentials is not None and getattr(self.credentials, "renewable", True)
        if status != 401 or not renewable or not self._hosts.serve(url):
            return False
        with _renewing() as ask:
            self.credentials.refresh(ask)
        return True


def with_query(url: str, more: str = "", *, without: Iterable[str]) -> str:
    """The URL without the fields of its query that have these names, and with one more. What stays is not rewritten."""
    parts, names = urlsplit(url), set(without)
    fields = [field for field in parts.query.split("&") if field and unquote_plus(field.partition("=")[0]) not in names]
    return urlunsplit(parts._replace(query="&".join([*fields, *([more] if more else [])])))


@contextmanager
def _renewing() -> Iterator[Any]:
    """What google-auth asks for tokens with. It passes every transport of ours by."""
    import google_auth_httplib2
    import httplib2

    http = httplib2.Http(timeout=RENEW_S)
    try:
        yield google_auth_httplib2.Request(http)
    finally:
        http.close()


RENEW_S = 10.0
"""The longest silence of a server that grants tokens."""
