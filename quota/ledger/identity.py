"""Which ledger a configuration means, whatever its url, and for whom."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple


class Identity(NamedTuple):
    """`ledger` is the name that the owner gave it, else the path of the configuration: see `quota.settings.load`.

    `endpoint` is empty for the API's own address. What a machine saw of a ledger, and what it owes, belong to an
    identity. Identities of one project and endpoint are one upstream project, and share an allowance.
    """

    ledger: str
    project: str
    endpoint: str = ""

    @property
    def hash(self) -> str:
        """128 bits, as 32 hexadecimal digits."""
        return _hash(self)

    @property
    def upstream_hash(self) -> str:
        """The same for project and endpoint alone."""
        return _hash(self[1:])


def _hash(names: Iterable[str]) -> str:
    return blake2b("\0".join(names).encode(errors="backslashreplace"), digest_size=16).hexdigest()
