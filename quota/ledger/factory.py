"""Finds the ledger of a configuration, and opens it. BACKENDS has a row for each kind: its URLs, and its log.

A new kind needs a row in BACKENDS. Opening a ledger imports its driver, and no other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from hashlib import blake2b
from importlib import import_module
from typing import NamedTuple

from quota.errors import ConfigError
from quota.ledger.files import check_options, path_of
from quota.ledger.log import Log

Clock = Callable[[], int]
"""The time in ms since 1970."""


class Backend(NamedTuple):
    """One kind of ledger, and the class of its `log`.

    `is_server`: its URL names no file, and `quota doctor --acl` can print the rights that its users need.
    """

    schemes: tuple[str, ...]
    log: str
    is_server: bool


REDIS_SCHEMES = (
    *("redis", "rediss", "unix"),
    *("redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"),
)

BACKENDS = (
    Backend(("sqlite", "memory"), "quota.ledger.sqlite_log:SqliteLog", is_server=False),
    Backend(REDIS_SCHEMES, "quota.ledger.redis_log:RedisLog", is_server=True),
)

SCHEMES = tuple(scheme for backend in BACKENDS for scheme in backend.schemes)


def canonical(url: str) -> str:
    """The URL with the scheme that we use for it, so that two spellings of one ledger give one label. Other drivers
    write `valkey` or `redis+unix`."""
    scheme, slashes, rest = url.partition("://")
    ours = scheme.replace("valkey", "redis", 1)
    return f"{'unix' if ours == 'redis+unix' else ours}{slashes}{rest}"


def backend_of(url: str) -> Backend:
    """The kind of ledger that a URL names. Raises ConfigError for an unknown scheme or option."""
    scheme = canonical(url).partition(":")[0]
    for backend in BACKENDS:
        if scheme in backend.schemes:
            if scheme == "sqlite":
                check_options(url, "ledger url")
            return backend
    message = f"ledger url{shown_scheme(url)} has an unknown scheme"
    raise ConfigError(f"{message}; write sqlite:///PATH, redis://HOST:PORT/DB or memory:")


def shown_scheme(url: str) -> str:
    """` SCHEME://` of an unknown URL, for a message; empty if the text may be anything, such as a password."""
    scheme, slashes, _ = url.partition("://")
    return f" {scheme}://" if slashes and re.fullmatch(r"[a-z][a-z0-9+.-]{0,19}", scheme) else ""


def file_of(url: str) -> str | None:
    """The path of the file that a URL names, empty for a ledger in memory; None for a server."""
    scheme = url.partition(":")[0]
    return path_of(url) if any(scheme in kind.schemes and not kind.is_server for kind in BACKENDS) else None


def open_ledger(url: str, *, clock: Clock | None = None) -> Log:
    """The ledger at a URL: `sqlite:///path`, `memory:`, or one of REDIS_SCHEMES, perhaps in another spelling.

    It contacts nothing before the first use. `clock` (ms since 1970) replaces the ledger's own clock, for tests and
    simulation only. Raises ConfigError for any other scheme.
    """
    module, _, name = backend_of(url).log.partition(":")
    log: Log = getattr(import_module(module), name)(canonical(url), clock=clock)
    return log


class Identity(NamedTuple):
    """A ledger, whatever its URL: its journal and its unpaid draws on a machine are filed under this.

    `ledger` is the configured name, else the path of the configuration: see `quota.settings.load`. `endpoint` is empty
    for the API's own address. Identities with the same project, endpoint and api mean one upstream project, and share
    an allowance.
    """

    ledger: str
    project: str
    endpoint: str = ""
    api: str = ""

    @property
    def hash(self) -> str:
        return hash_of(self[:3])


def hash_of(names: Iterable[str]) -> str:
    """128 bits, as 32 hexadecimal digits."""
    return blake2b("\0".join(names).encode(errors="backslashreplace"), digest_size=16).hexdigest()
