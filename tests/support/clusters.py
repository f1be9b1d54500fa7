"""A cluster of three primaries, each with a replica."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING
from urllib.parse import quote

import redis
from redis.crc import key_slot

from support.servers import RedisServer, port_of_a_node, until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.certificates import Certificates

SLOTS = 16_384
NODE_TIMEOUT_MS = 500


class Nodes:
    """`servers` are three primaries, then the replica of each.

    With certificates, all listen with TLS at `tls_ports` too, and clients that come with TLS are told these; `port` of
    each stays plain. A node that is silent for `node_timeout_ms` is taken for dead.
    """

    def __init__(
        self,
        *,
        executable: str | None = None,
        certificates: Certificates | None = None,
        password: str = "",
        node_timeout_ms: int = NODE_TIMEOUT_MS,
        options: Sequence[str] = (),
    ) -> None:
        self._executable, self._certificates, self._password = executable, certificates, password
        self.node_timeout_ms = node_timeout_ms
        self._stack = ExitStack()
        self.servers: list[RedisServer] = []
        self.tls_ports: dict[int, int] = {}  # by port
        try:
            self._start(options)
        except BaseException:
            self.close()
            raise

    def _start(self, options: Sequence[str]) -> None:
        told = ["--cluster-enabled", "yes", "--cluster-node-timeout", str(self.node_timeout_ms)]
        told += ["--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0", *options]
        if self._password:
            told += ["--requirepass", self._password, "--masterauth", self._password]
        for _ in range(6):
            port = port_of_a_node()
            one = RedisServer(*told, *self._tls(port), executable=self._executable, port=port)
            self.servers.append(self._stack.enter_context(one))
        clients = [self._stack.enter_context(self.client(server)) for server in self.servers]
        for number, client in enumerate(clients[:3]):
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            client.execute_command("CLUSTER ADDSLOTS", *range(SLOTS * number // 3, SLOTS * (number + 1) // 3))
        for server in self.servers[1:]:
            clients[0].execute_command("CLUSTER MEET", "127.0.0.1", self._seen(server.port))
        until(lambda: all(_knows(client, 6) for client in clients), "the nodes do not know each other")
        for replica, primary in zip(clients[3:], clients[:3], strict=True):
            replica.execute_command("CLUSTER REPLICATE", primary.execute_command("CLUSTER MYID"))
        until(lambda: all(_is_well(client) for client in clients), "the cluster is not up")
        until(lambda: all(_follows(client) for client in clients[3:]), "the replicas have no link")

    def _tls(self, port: int) -> list[str]:
        if self._certificates is None:
            return []
        self.tls_ports[port] = port_of_a_node()
        return [
            *self._certificates.options(self.tls_ports[port]),
            *("--tls-cluster", "yes", "--tls-replication", "yes"),
        ]

    def _seen(self, port: int) -> int:
        """The port at which others see whoever has this one."""
        return self.tls_ports.get(port, port)

    @property
    def url(self) -> str:
        scheme, user, more = "redis+cluster", "", ""
        if self._certificates is not None:
            scheme, more = "rediss+cluster", f"?ssl_ca_certs={self._certificates.ca}"
        if self._password:
            user = f":{quote(self._password, safe='')}@"
        return f"{scheme}://{user}{','.join(f'127.0.0.1:{self._seen(one.port)}' for one in self.servers[:3])}{more}"

    def client(self, server: RedisServer) -> redis.Redis:
        """Of an administrator, to one node."""
        return redis.Redis(port=server.port, password=self._password or None, decode_responses=True)

    def owner(self, key: str) -> RedisServer:
        """The node that has this key now, as the first that lives says."""
        for server in self.servers:
            try:
                with self.client(server) as client:
                    shards = client.execute_command("CLUSTER SLOTS")
            except redis.ConnectionError:
                continue
            slot = key_slot(key.encode())
            port = next(int(primary[1]) for first, last, primary, *_ in shards if first <= slot <= last)
            return next(one for one in self.servers if one.port == port)
        raise AssertionError("no node lives")

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _knows(client: redis.Redis, count: int) -> bool:
    return len(client.execute_command("CLUSTER NODES")) == count


def _is_well(client: redis.Redis) -> bool:
    return bool(client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")


def _follows(client: redis.Redis) -> bool:
    return client.info("replication").get("master_link_status") == "up"
