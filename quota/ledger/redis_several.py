"""Several servers that know the same, of which one that answers is enough: sentinels, and the nodes of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from quota.common.clock import elapsed_s
from quota.ledger.redis_errors import Failed, Lost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from quota.ledger.redis_connection import Server

    Node = tuple[str, int]
    """A host and a port."""

T = TypeVar("T")

LEAST_S = 0.05
"""Nobody is given less time than this: of very many that are silent, not all are asked."""


class Several:
    """Whoever answered is asked first from now on, before those that were silent. Safe to use from several threads."""

    def __init__(self, servers: Iterable[Server]) -> None:
        self._servers = list(servers)  # replaced, and never changed in place

    def first(self, ask: Callable[[Server], T], ends_s: float, then_s: float) -> T:
        """What the first of them says to whom `ask` does not fail. Those still to be asked share the time until
        `ends_s` (`elapsed_s`) evenly, less that which is needed for what comes then: `then_s`, or half of it. Raises
        the error that says most."""
        ends_s -= min(then_s, (ends_s - elapsed_s()) / 2)
        servers = self._servers
        failed: Failed = Lost("nobody to ask")
        for number, server in enumerate(servers):
            now_s = elapsed_s()
            share_s = max((ends_s - now_s) / (len(servers) - number), LEAST_S)
            try:
                said = ask(server._replace(ends_s=min(now_s + share_s, ends_s)))
            except Failed as error:
                if isinstance(failed, Lost):
                    failed = error
                continue
            if number:
                self._servers = [*servers[number:], *servers[:number]]
            return said
        raise failed

    def know(self, servers: Iterable[Server]) -> None:
        """These and no others; those known already are asked before the new ones."""
        named = {_node(server): server for server in servers}
        known = [server for server in self._servers if named.pop(_node(server), None) is not None]
        self._servers = [*known, *named.values()]

    def distrust(self, node: Node) -> None:
        """This one was silent: it is asked last, and before it whoever came first, who may have named it."""
        first, *others = self._servers
        self._servers = sorted([*others, first], key=lambda server: _node(server) == node)


def _node(server: Server) -> Node:
    return server.host, server.port
