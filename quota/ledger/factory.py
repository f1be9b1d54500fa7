"""Opens the ledger at a URL, and imports only the driver that it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quota.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from quota.ledger.contract import Ledger
    from quota.ledger.fence import Movable


LEDGER_SCHEMES = ("sqlite", "redis", "rediss", "unix", "redis+sentinel", "redis+cluster")
"""The schemes of a ledger's URL: the embedded ledger's, then those of Redis."""


def open_ledger(url: str, *, clock: Callable[[], int] | None = None) -> Ledger:
    """The ledger at a URL: `sqlite:///path`, or `redis://`, `rediss://`, `unix://`, `redis+sentinel://`, `redis+cluster://`.

    Nothing is contacted before the first use. `clock` (ms since 1970) replaces the ledger's own clock, for tests and
    simulation only. Raises ConfigError for any other scheme.
    """
    scheme = url.partition(":")[0]
    if scheme == "sqlite":
        from quota.ledger.sqlite_ledger import SqliteLedger

        return SqliteLedger(url, clock=clock)
    if scheme in LEDGER_SCHEMES:
        from quota.ledger.redis_ledger import RedisLedger

        return RedisLedger(url, clock=clock)
    raise ConfigError(f"ledger url of kind {scheme!r} is not known; write sqlite:///PATH or redis://HOST:PORT/DB")


def open_movable(url: str, *, clock: Callable[[], int] | None = None) -> Movable:
    """The ledger at a URL, as `quota.ledger.move` needs it. Raises ConfigError as `open_ledger` does."""
    if url.partition(":")[0] == "sqlite":
        from quota.ledger.movable_sqlite import MovableSqliteLedger

        return MovableSqliteLedger(url, clock=clock)
    open_ledger(url).close()  # raises for an unknown scheme
    from quota.ledger.movable_redis import MovableRedisLedger

    return MovableRedisLedger(url, clock=clock)
