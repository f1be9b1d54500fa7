"""Who calls, for clients other than Google's: a request to the API's hosts is signed as it leaves, any other is not.

A redirect is a request of its own, so that no other host sees the key, whatever a client does with its headers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote_plus, urlencode, urlsplit, urlunsplit

from quota.common.hosts import is_readable_on_the_way
from quota.common.redact import redact
from quota.common.text import show
from quota.errors import ConfigError
from quota.terms.api import KeyPlace
from quota.terms.hosts import Hosts


class Caller:
    """Signs requests to `hosts` with a `key` in its `place`, or with `credentials` of google-auth, which are renewed in
    time; that is not charged. With neither it signs nothing. `insecure`: also where others on the way can read it."""

    def __init__(
        self,
        hosts: tuple[str, ...],
        *,
        key: str | None = None,
        place: KeyPlace,
        credentials: Any = None,
        insecure: bool = False,
    ) -> None:
        self._hosts = Hosts(hosts)
        self._key = key
        self._place = place
        self._credentials = credentials
        self._insecure = insecure

    def signed(self, verb: str, url: str, headers: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The URL and the headers as they leave. Raises ConfigError for a request that would show a secret on its way,
        and what google-auth raises where it gets no token."""
        signed = dict(headers)
        if not self.signs or not self._hosts.serve(url):
            return url, signed
        if not self._insecure and is_readable_on_the_way(url):
            raise ConfigError(
                f"{show(redact(url))} would get the secret in plain text; give an https:// address, or "
                "insecure_endpoint = true"
            )
        if self._credentials is not None:
            with _renewing() as ask:
                self._credentials.before_request(ask, verb, url, signed)
        elif self._place.query:
            own = urlencode([(self._place.query, self._key)])
            return with_query(url, own, without=(self._place.query,)), signed
        else:
            signed = {name: value for name, value in signed.items() if name.lower() != self._place.header.lower()}
            signed[self._place.header] = f"{self._place.scheme} {self._key}".strip()
        return url, signed

    @property
    def signs(self) -> bool:
        return self._key is not None or self._credentials is not None

    @property
    def waits(self) -> bool:
        """Whether `signed` asks for a token first."""
        return self._credentials is not None and not self._credentials.valid

    @property
    def secret(self) -> str | None:
        """What it signs with now."""
        return self._key if self._credentials is None else self._credentials.token

    def renewed(self, url: str, status: int) -> bool:
        """Whether an answer refused a token that is now renewed, so that the request may be sent once more."""
        renewable = self._credentials is not None and getattr(self._credentials, "renewable", True)
        if status != 401 or not renewable or not self._hosts.serve(url):
            return False
        with _renewing() as ask:
            self._credentials.refresh(ask)
        return True


def with_query(url: str, more: str = "", *, without: Iterable[str]) -> str:
    """The URL without the fields of its query that have these names, and with one more. What stays is not rewritten."""
    parts, names = urlsplit(url), set(without)
    fields = [one for one in parts.query.split("&") if one and unquote_plus(one.partition("=")[0]) not in names]
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
