"""The storage of a set of rules."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

from quota.common.text import show
from quota.errors import ConfigError
from quota.inbound.contract import Storage
from quota.inbound.rules import Rule, Rules
from quota.inbound.storage import open_storage
from quota.ledger.factory import file_of
from quota.settings.folders import make_state_folder

T = TypeVar("T")

STATE_FILE = "inbound.db"


def opened(rules: Rules | Sequence[Rule]) -> tuple[Rules, Storage]:
    """The rules and their storage, which contacts nothing before its first use. Raises ConfigError."""
    whole = rules if isinstance(rules, Rules) else Rules(rules)
    return whole, open_storage(_url_of(whole))


def callable_app(app: T) -> T:
    """`app`, if it can be one. Raises ConfigError, which is seen at the start and not by the first visitor."""
    if not callable(app):
        raise ConfigError(f"{show(app)} is no application; give what answers requests")
    return app


def is_there(rules: Rules) -> bool:
    """Whether the storage can hold anything. A file that is not there yet is made by the first worker, as its own."""
    path = file_of(_url_of(rules))
    return path is None or os.path.exists(path)


def _url_of(rules: Rules) -> str:
    """Without a url of their own: SQLite in the state folder, for the workers of one machine."""
    if rules.url is not None:
        return rules.url
    return f"sqlite:///{make_state_folder() / STATE_FILE}"
