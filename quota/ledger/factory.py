"""The kinds of ledgers, one row each: what a URL of theirs means, and how a ledger is opened there.

Another kind needs a row in BACKENDS. Only the driver of a ledger that is opened is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from quota.errors import ConfigError
from quota.ledger.contract import Ledger
from quota.ledger.file_url import check_options, path_of

if TYPE_CHECKING:
    from quota.ledger.fence import Movable

Clock = Callable[[], int]
"""The time in ms since 1970."""


class Backend(NamedTuple):
    """One kind of ledger.

    `file` makes the path of a file out of a URL, empty for one in memory; None where a server is. `has_acl`: `quota
    doctor --acl` knows which rights its users need.
    """

    schemes: tuple[str, ...]
    open: Callable[[str, Clock | None], Ledger]
    open_movable: Callable[[str, Clock | None], Movable]
    file: Callable[[str], str] | None = None
    has_acl: bool = False


def _open_sqlite(url: str, clock: Clock | None) -> Ledger:
    from quota.ledger.sqlite_ledger import SqliteLedger

    return SqliteLedger(url, clock=clock)


def _open_movable_sqlite(url: str, clock: Clock | None) -> Movable:
    from quota.ledger.movable_sqlite import MovableSqliteLedger

    return MovableSqliteLedger(url, clock=clock)


def _open_redis(url: str, clock: Clock | None) -> Ledger:
    from quota.ledger.redis_ledger import RedisLedger

    return RedisLedger(url, clock=clock)


def _open_movable_redis(url: str, clock: Clock | None) -> Movable:
    from quota.ledger.movable_redis import MovableRedisLedger

    return MovableRedisLedger(url, clock=clock)


REDIS_SCHEMES = (
    *("redis", "rediss", "unix"),
    *("redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"),
)

BACKENDS = (
    Backend(("sqlite",), _open_sqlite, _open_movable_sqlite, file=path_of),
    Backend(REDIS_SCHEMES, _open_redis, _open_movable_redis, has_acl=True),
)

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


def ledger_schemes() -> tuple[str, ...]:
    return tuple(scheme for one in BACKENDS for scheme in one.schemes)


def canonical(url: str) -> str:
    """The URL with the scheme that we use for it: two spellings of one ledger are one label."""
    scheme, slashes, rest = url.partition("://")
    return f"{ALIASES.get(scheme, scheme)}{slashes}{rest}"


def backend_of(url: str, what: str = "ledger url") -> Backend:
    """The kind that a URL, `what`, names. Raises ConfigError where there is none, or no such file."""
    scheme = canonical(url).partition(":")[0]
    for backend in BACKENDS:
        if scheme in backend.schemes:
            if backend.file is not None:
                check_options(url, what)
            return backend
    raise ConfigError(f"{what} of kind {scheme!r} is not known; write sqlite:///PATH or redis://HOST:PORT/DB")


def file_of(url: str) -> str | None:
    """The path of the file that a URL names, empty for one in memory; None for a server's."""
    scheme = url.partition(":")[0]
    return next((one.file(url) for one in BACKENDS if scheme in one.schemes and one.file is not None), None)


def open_ledger(url: str, *, clock: Clock | None = None) -> Ledger:
    """The ledger at a URL: `sqlite:///path`, or one of REDIS_SCHEMES or ALIASES.

    Nothing is contacted before the first use. `clock` (ms since 1970) replaces the ledger's own clock, for tests and
    simulation only. Raises ConfigError for any other scheme.
    """
    return backend_of(url).open(canonical(url), clock)


def open_movable(url: str, *, clock: Clock | None = None) -> Movable:
    """The ledger at a URL, as `quota.ledger.move` needs it. Raises ConfigError as `open_ledger` does."""
    return backend_of(url).open_movable(canonical(url), clock)
