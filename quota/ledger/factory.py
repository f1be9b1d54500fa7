"""Opens the ledger at a URL, and imports only the driver that it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quota.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from quota.ledger.contract import Ledger
    from quota.ledger.fence import Movable


REDIS_SCHEMES = (
    *("redis", "rediss", "unix"),
    *("redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"),
)
LEDGER_SCHEMES = ("sqlite", *REDIS_SCHEMES)
"""The schemes of a ledger's URL: the embedded ledger's, then those of Redis."""

ALIASES = {
    "redis+unix": "unix",
    "valkey": "redis",
    "valkeys": "rediss",
    "valkey+unix": "unix",
    "valkey+sentinel": "redis+sentinel",
    "valkeys+sentinel": "rediss+sentinel",
    "valkey+cluster": "redis+cluster",
    "valkeys+cluster": "rediss+cluster",
}
"""What other drivers call the same."""


def canonical(url: str) -> str:
    """The URL with the scheme that we use for it: two spellings of one ledger are one label."""
    scheme, slashes, rest = url.partition("://")
    return f"{ALIASES.get(scheme, scheme)}{slashes}{rest}"


def check_file_url(url: str, what: str) -> None:
    """Raises ConfigError for an SQLite URL with an option: it would be part of the file's name."""
    place, mark, option = url.partition("?")
    name, equals, _ = option.partition("=")
    if mark and equals and name.isidentifier():
        raise ConfigError(f"{what} {place}: it has no option {name!r}; an SQLite url has none, so remove it")


def open_ledger(url: str, *, clock: Callable[[], int] | None = None) -> Ledger:
    """The ledger at a URL: `sqlite:///path`, or one of REDIS_SCHEMES or ALIASES.

    Nothing is contacted before the first use. `clock` (ms since 1970) replaces the ledger's own clock, for tests and
    simulation only. Raises ConfigError for any other scheme.
    """
    url = canonical(url)
    scheme = url.partition(":")[0]
    if scheme == "sqlite":
        from quota.ledger.sqlite_ledger import SqliteLedger

        check_file_url(url, "ledger url")
        return SqliteLedger(url, clock=clock)
    if scheme in REDIS_SCHEMES:
        from quota.ledger.redis_ledger import RedisLedger

        return RedisLedger(url, clock=clock)
    raise ConfigError(f"ledger url of kind {scheme!r} is not known; write sqlite:///PATH or redis://HOST:PORT/DB")


def open_movable(url: str, *, clock: Callable[[], int] | None = None) -> Movable:
    """The ledger at a URL, as `quota.ledger.move` needs it. Raises ConfigError as `open_ledger` does."""
    if url.partition(":")[0] == "sqlite":
        from quota.ledger.movable_sqlite import MovableSqliteLedger

        check_file_url(url, "ledger url")
        return MovableSqliteLedger(url, clock=clock)
    open_ledger(url).close()  # raises for an unknown scheme
    from quota.ledger.movable_redis import MovableRedisLedger

    return MovableRedisLedger(canonical(url), clock=clock)
