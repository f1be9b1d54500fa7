"""A cluster of servers: which of its nodes has a key, and connections to each.

Any node says who has which slots. That is remembered until a node is lost, or says that a slot has moved (MOVED) or
moves just now (ASK): then it has done nothing, and who it points to is asked. A command whose answer was lost is not
sent again here.
"""

from __future__ import annotations

import time
from binascii import crc_hqx
from typing import TYPE_CHECKING, Any

from quota.common.clock import elapsed_s
from quota.ledger.redis_connection import SPARE_S, Connections
from quota.ledger.redis_errors import ErrorReply, Failed, Lost, NotRedis
from quota.ledger.redis_several import Several
from quota.ledger.resp import pack

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from quota.ledger.redis_connection import Server
    from quota.ledger.redis_several import Node

SLOTS = 16_384
SLOTS_PLEASE = pack(("CLUSTER", "SLOTS"))
ASKING = pack(("ASKING",))

MAX_REDIRECTIONS = 8
"""A command goes from node to node so often. Then the nodes do not agree, and the call is refused."""

PAUSE_S = 0.05
"""Between two tries while some of a project's keys have moved and others have not."""


class Cluster:
    """Connects at the first command, to any of the `seeds`. Safe to use from several threads and after a fork."""

    def __init__(self, seeds: Sequence[Server]) -> None:
        self._seeds = seeds
        self._informants = Several(seeds)
        self._owners: list[Node | None] = []
        """By slot; empty while it is not known."""
        self._connections: dict[Node, Connections] = {}
        self.timeout_s = seeds[0].timeout_s
        self.wall_s = 2 * self.timeout_s + SPARE_S

    def execute_command(self, *command: str | bytes, ends_s: float | None = None) -> Any:
        """The reply of the node that has the command's key, unchanged. Raises Failed. TIME has none: then it is the
        clock that is furthest behind, of the nodes that answer."""
        ends_s = elapsed_s() + self.wall_s if ends_s is None else ends_s
        if command[0] == "TIME":
            return self._earliest(ends_s)
        key = command[3] if command[0] in ("EVAL", "EVALSHA") else command[1]
        return self.ask(key, pack(command), ends_s)

    def ask(self, key: str | bytes, words: bytes, ends_s: float) -> Any:
        """The same for a command that is packed already. It ends by then (`elapsed_s`)."""
        slot = slot_of(key)
        owners = self._owners or self._learned(ends_s)
        node, asking = owners[slot], False
        for _ in range(MAX_REDIRECTIONS):
            if node is None:
                self._owners = []
                raise ErrorReply("no node has this slot", "CLUSTERDOWN")
            try:
                if asking:
                    return self._at(node)._replace(ends_s=ends_s).ask(ASKING, words)
                return self._connected(node).ask(words, ends_s)
            except Lost:
                self._distrust(node)
                raise
            except ErrorReply as error:
                if error.code == "TRYAGAIN" and elapsed_s() + PAUSE_S + self.timeout_s < ends_s:
                    time.sleep(PAUSE_S)
                    node, asking = owners[slot], False
                    continue
                if error.code not in ("MOVED", "ASK"):
                    raise
                node, asking = _pointed_to(error, node), error.code == "ASK"
                if not asking:
                    owners[slot] = node
        self._owners = []
        raise ErrorReply("its nodes do not agree who has this slot", "TRYAGAIN")

    def scan(self, pattern: str) -> Iterator[str]:
        """The keys that match, of all nodes."""
        for node in self._nodes(elapsed_s() + self.wall_s):
            cursor = "0"
            while True:
                cursor, found = self._connected(node).execute_command("SCAN", cursor, "MATCH", pattern, "COUNT", "1000")
                yield from found
                if cursor == "0":
                    break

    def close(self) -> None:
        """Close all connections. The next command connects again."""
        for connections in list(self._connections.values()):
            connections.close()

    # -- the nodes -----------------------------------------------------------------------------------------------------

    def _earliest(self, ends_s: float) -> list[str]:
        times, failed = [], Failed("no node")
        for node in self._nodes(ends_s):
            try:
                times.append(self._connected(node).ask(pack(("TIME",)), ends_s))
            except Lost as error:
                self._distrust(node)
                failed = error
        if not times:
            raise failed
        return min(times, key=lambda said: [int(number) for number in said])

    def _nodes(self, ends_s: float) -> list[Node]:
        """Those that have slots."""
        return [node for node in dict.fromkeys(self._owners or self._learned(ends_s)) if node is not None]

    def _at(self, node: Node) -> Server:
        return self._seeds[0]._replace(host=node[0], port=node[1])

    def _connected(self, node: Node) -> Connections:
        connections = self._connections.get(node)
        if connections is None:
            connections = self._connections.setdefault(node, self._at(node).connections())
        return connections

    def _distrust(self, node: Node) -> None:
        """Ask again who has what, and others first: it did not answer, and whoever named it may have lost the rest."""
        self._owners = []
        self._informants.distrust(node)

    def _learned(self, ends_s: float) -> list[Node | None]:
        """Who has which slot. There is time left for a question to the one who has it."""

        def owners(server: Server) -> tuple[list[Node | None], list[Node]]:
            try:
                return _owners(server.ask(SLOTS_PLEASE), server.host)
            except (ValueError, TypeError, IndexError):
                raise NotRedis("no slots") from None

        found, nodes = self._informants.first(owners, ends_s, self.timeout_s)
        self._informants.know((*self._seeds, *map(self._at, nodes)))
        self._owners = found
        return found


def slot_of(key: str | bytes) -> int:
    """Keys with the same word in braces lie in one slot."""
    name = key.encode() if isinstance(key, str) else key
    begin = name.find(b"{") + 1
    end = name.find(b"}", begin)
    return crc_hqx(name[begin:end] if 0 < begin < end else name, 0) % SLOTS


def _owners(reply: Any, told: str) -> tuple[list[Node | None], list[Node]]:
    """The owner of each slot, and all nodes. A node without a host is at the host that says so."""
    owners: list[Node | None] = [None] * SLOTS
    known = []
    for first, last, *nodes in reply:
        places = [(host if host and host != "?" else told, int(port)) for host, port, *_ in nodes]
        owners[first : last + 1] = [places[0]] * (last + 1 - first)
        known += places
    if len(owners) != SLOTS:
        raise ValueError("other slots than there are")
    return owners, known


def _pointed_to(error: ErrorReply, asked: Node) -> Node:
    """Where `MOVED SLOT HOST:PORT` points to."""
    host, _, port = str(error).rpartition(" ")[2].rpartition(":")
    if not port.isdecimal():
        raise error
    return host or asked[0], int(port)
