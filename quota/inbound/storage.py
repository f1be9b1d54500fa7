"""Opens the storage of inbound limits, by rules or by URL. Imports only the driver that it needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from quota.errors import ConfigError
from quota.inbound.contract import Storage
from quota.inbound.rules import Rule, Rules
from quota.ledger.factory import REDIS_SCHEMES, canonical, file_of
from quota.ledger.files import check_options
from quota.settings.folders import make_state_folder

STATE_FILE = "inbound.db"


def open_storage(url: str, *, clock: Callable[[], int] | None = None) -> Storage:
    """The storage at a URL: `sqlite:///path`, or a Redis url as for a ledger.

    It connects at the first use. `clock` (ms since 1970) replaces the storage's own clock, for tests and simulation
    only. Raises ConfigError for any other scheme.
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


def opened(rules: Rules | Sequence[Rule]) -> tuple[Rules, Storage]:
    """The rules and their storage, which connects at the first use. Raises ConfigError."""
    whole = rules if isinstance(rules, Rules) else Rules(rules)
    return whole, open_storage(_url_of(whole))


def is_there(rules: Rules) -> bool:
    """Whether the storage exists. A missing file is left to the first worker, whose user then owns it."""
    path = file_of(_url_of(rules))
    return path is None or os.path.exists(path)


def _url_of(rules: Rules) -> str:
    """The url of the storage. Default: SQLite in the state folder, for the workers of one machine."""
    if rules.url is not None:
        return rules.url
    return f"sqlite:///{make_state_folder() / STATE_FILE}"
