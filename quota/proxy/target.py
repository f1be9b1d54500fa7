"""To whom the requests for a credential go: its API, the gate that charges them, and who calls."""

from __future__ import annotations

from urllib.parse import urlsplit

from quota.async_session import AsyncSession
from quota.clients.caller import with_query
from quota.clients.gate import AsyncHostGate
from quota.clients.upstream import upstream_of, verb_of
from quota.errors import UsageError
from quota.proxy.asked import Asked, Fields, UnfitError

SENT_INSTEAD = ("authorization", "x-goog-api-key")
"""Where programs put keys: what a caller sent there does not leave."""


class Target:
    """The API of one credential. Raises ConfigError and UsageError where the configuration does not say enough."""

    def __init__(self, session: AsyncSession, credential: str) -> None:
        inner = session._session
        chosen = inner.credential(credential)
        upstream = upstream_of(chosen.book)
        access = upstream.access(chosen.endpoint)
        host = urlsplit(access.root).netloc
        self.credential = credential
        self.root = access.root
        self.host = host
        self.is_batch = access.is_batch
        self._upstream = upstream
        self.gate = AsyncHostGate(session.budget(credential), access.method, host)
        self.reads_good_answers = chosen.book.answers.units is not None or chosen.book.answers.reads_body(200)
        self.caller = inner._signing(chosen, (host,), access.place, access.scopes)
        self._secret_fields = tuple(filter(None, (access.place.query, *access.secret_fields)))
        self._secret_headers = {access.place.header.lower(), *SENT_INSTEAD}

    def url(self, asked: Asked) -> str:
        """Where a request goes, without a key of its caller's own."""
        url = f"{self.root}{asked.target}"
        if not (self.caller.signs and self._secret_fields and "?" in url):
            return url
        return with_query(url, without=self._secret_fields)

    def verb(self, asked: Asked) -> str:
        """By which verb the API reads a request. Raises UnfitError where that is not clear."""
        try:
            return verb_of(self._upstream, asked.verb, asked.fields)
        except UsageError as error:
            raise UnfitError(400, f"{error}.") from None

    def signed(self, asked: Asked, url: str) -> tuple[str, Fields, str | None]:
        """The URL and the header fields as they leave, and the secret in them. May wait for a token, where the caller
        `waits`."""
        if not self.caller.signs:
            return url, asked.fields, None
        signed, own = self.caller.signed(asked.verb, url, {})
        kept = [(name, value) for name, value in asked.fields if name not in self._secret_headers]
        return signed, [*kept, *own.items()], self.caller.secret
