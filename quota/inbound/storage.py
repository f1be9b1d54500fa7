"""Opens the storage of inbound limits at a URL, and imports only the driver that it needs."""

from __future__ import annotations

from collections.abc import Callable

from quota.errors import ConfigError
from quota.inbound.contract import Storage
from quota.ledger.factory import REDIS_SCHEMES, canonical, file_of
from quota.ledger.file_url import check_options


def open_storage(url: str, *, clock: Callable[[], int] | None = None) -> Storage:
    """The storage at a URL: `sqlite:///path`, or a url of Redis as for a ledger.

    Nothing is contacted before the first use. `clock` (ms since 1970) replaces the storage's own clock, for tests and
    simulation only. Raises ConfigError for any other scheme.
    """
    url = canonical(url)
    scheme, slashes, _ = url.partition("://")
    if file_of(url) is not None and slashes:
        from quota.inbound.sqlite_storage import SqliteStorage

        check_options(url, "inbound storage")
        return SqliteStorage(url, clock=clock)
    if scheme in REDIS_SCHEMES and slashes:
        from quota.inbound.redis_storage import RedisStorage

        return RedisStorage(url, clock=clock)
    raise ConfigError(
        f"inbound storage of kind {scheme.partition(':')[0]!r} is not known; write sqlite:///PATH or redis://HOST:PORT/DB"
    )
