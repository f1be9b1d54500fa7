"""Redis servers that stand together: a cluster of three primaries, each with a replica, and three sentinels over one
primary and two replicas."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from hashlib import sha1
from pathlib import Path
from typing import Self
from urllib.parse import quote

import redis
from redis.crc import key_slot

from support.certificates import Certificates
from support.servers import RedisServer, Server, free_port, redis_executable, until

SLOTS = 16_384
NODE_TIMEOUT_MS = 500
SERVICE = "main"
DOWN_AFTER_MS = 400


class Together:
    """The common part of both: servers, a password, TLS, and an end.

    With certificates, all listen with TLS at `tls_ports` too; `port` of each stays plain.
    """

    def __init__(self, executable: str | None, certificates: Certificates | None, password: str) -> None:
        self.executable, self.certificates = executable or redis_executable(), certificates
        self._password = password
        self._stack = ExitStack()
        self.servers: list[RedisServer] = []
        self.tls_ports: dict[int, int] = {}  # by port

    def start(self, options: Sequence[str]) -> None:
        """If that fails, nothing is left."""
        own = [*options, "--repl-diskless-sync-delay", "0"]
        if self._password:
            own += ["--requirepass", self._password, "--masterauth", self._password]
        try:
            self._start(own)
        except BaseException:
            self.close()
            raise

    def _start(self, options: Sequence[str]) -> None:
        raise NotImplementedError

    def _start_server(self, port: int, *options: str) -> None:
        server = RedisServer(*options, executable=self.executable, port=port)
        self.servers.append(self._stack.enter_context(server))

    def _url(self, kind: str, ports: Sequence[int], rest: str = "") -> str:
        """A url with the TLS ports of these servers, if they have any."""
        scheme, user, more = "redis", "", ""
        if self.certificates is not None:
            scheme, more = "rediss", f"?ssl_ca_certs={self.certificates.ca}"
        if self._password:
            user = f":{quote(self._password, safe='')}@"
        hosts = ",".join(f"127.0.0.1:{self.tls_ports.get(port, port)}" for port in ports)
        return f"{scheme}+{kind}://{user}{hosts}{rest}{more}"

    def _client_of(self, server: RedisServer) -> redis.Redis:
        return redis.Redis(port=server.port, password=self._password or None, decode_responses=True)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _follows(client: redis.Redis) -> bool:
    return client.info("replication").get("master_link_status") == "up"


class Nodes(Together):
    """A cluster. `servers` are three primaries, then the replica of each.

    Clients that come with TLS are told the TLS ports of all. A node that is silent for `node_timeout_ms` is taken for
    dead.
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
        super().__init__(executable, certificates, password)
        self.node_timeout_ms = node_timeout_ms
        self.start(options)

    def _start(self, options: Sequence[str]) -> None:
        own = ["--cluster-enabled", "yes", "--cluster-node-timeout", str(self.node_timeout_ms)]
        own += ["--cluster-replica-validity-factor", "0", *options]
        for _ in range(6):
            port = free_port()
            self._start_server(port, *own, *self._tls(port))
        clients = [self._stack.enter_context(self.client(server)) for server in self.servers]
        for number, client in enumerate(clients[:3]):
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            client.execute_command("CLUSTER ADDSLOTS", *range(SLOTS * number // 3, SLOTS * (number + 1) // 3))
        for server in self.servers[1:]:
            port = self.tls_ports.get(server.port, server.port)
            clients[0].execute_command("CLUSTER MEET", "127.0.0.1", port)
        until(lambda: all(_knows(client, 6) for client in clients), "the nodes do not know each other")
        for replica, primary in zip(clients[3:], clients[:3], strict=True):
            replica.execute_command("CLUSTER REPLICATE", primary.execute_command("CLUSTER MYID"))
        until(lambda: all(_is_well(client) for client in clients), "the cluster is not up")
        until(lambda: all(_follows(client) for client in clients[3:]), "the replicas have no link")

    def _tls(self, port: int) -> list[str]:
        if self.certificates is None:
            return []
        self.tls_ports[port] = free_port()
        return [*self.certificates.options(self.tls_ports[port]), "--tls-cluster", "yes", "--tls-replication", "yes"]

    @property
    def url(self) -> str:
        return self._url("cluster", [server.port for server in self.servers[:3]])

    def client(self, server: RedisServer) -> redis.Redis:
        """The client of an administrator, to one node."""
        return self._client_of(server)

    def owner(self, key: str) -> RedisServer:
        """The node that has this key now, by the first node that is alive."""
        for server in self.servers:
            try:
                with self.client(server) as client:
                    shards = client.execute_command("CLUSTER SLOTS")
            except redis.ConnectionError:
                continue
            slot = key_slot(key.encode())
            port = next(int(primary[1]) for first, last, primary, *_ in shards if first <= slot <= last)
            return next(server for server in self.servers if server.port == port)
        raise AssertionError("no node lives")


def _knows(client: redis.Redis, count: int) -> bool:
    return len(client.execute_command("CLUSTER NODES")) == count


def _is_well(client: redis.Redis) -> bool:
    return bool(client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")


class SentinelServer(Server):
    """One sentinel, told of all the others: nobody has to wait until it has heard of them."""

    def __init__(self, port: int, lines: Sequence[str], executable: str) -> None:
        folder = Path(tempfile.mkdtemp(prefix="quota-sentinel-"))
        config = folder / "sentinel.conf"
        own = [f"port {port}", "bind 127.0.0.1", f"dir {folder}"]
        config.write_text("\n".join([*own, *lines]) + "\n")
        super().__init__(port, [executable, str(config), "--sentinel"], folder)


class Sentinels(Together):
    """`servers` are the primary and its replicas, as they were at the start; `sentinels` watch them.

    `password` is that of the servers, `sentinel_password` the sentinels' own. With certificates everybody names TLS
    ports to the others if `links_are_secure`. A primary that is silent for `down_after_ms` is taken for dead.
    """

    def __init__(
        self,
        *,
        executable: str | None = None,
        certificates: Certificates | None = None,
        links_are_secure: bool = True,
        password: str = "",
        sentinel_password: str = "",
        down_after_ms: int = DOWN_AFTER_MS,
        options: Sequence[str] = (),
    ) -> None:
        super().__init__(executable, certificates, password)
        self._links_are_secure = links_are_secure
        self._sentinel_password = sentinel_password
        self.down_after_ms = down_after_ms
        self.sentinels: list[SentinelServer] = []
        self.start(options)

    def _start(self, options: Sequence[str]) -> None:
        for _ in range(3):
            port = free_port()
            following = ["--replicaof", "127.0.0.1", str(self._seen(self.servers[0].port))] if self.servers else []
            self._start_server(port, *options, *self._tls(port), *following)
        ports = {free_port() for _ in range(3)}
        tls = {port: self._tls(port) for port in ports}
        for port in ports:
            lines = [f"sentinel myid {_id(port)}"]
            lines += [f"sentinel monitor {SERVICE} 127.0.0.1 {self._seen(self.servers[0].port)} 2"]
            lines += [f"sentinel down-after-milliseconds {SERVICE} {self.down_after_ms}"]
            lines += [f"sentinel failover-timeout {SERVICE} 2000", f"sentinel parallel-syncs {SERVICE} 2"]
            if self._password:
                lines += [f"sentinel auth-pass {SERVICE} {self._password}"]
            if self._sentinel_password:
                lines += [f"requirepass {self._sentinel_password}", f"sentinel sentinel-pass {self._sentinel_password}"]
            lines += [
                f"sentinel known-replica {SERVICE} 127.0.0.1 {self._seen(each.port)}" for each in self.servers[1:]
            ]
            lines += [
                f"sentinel known-sentinel {SERVICE} 127.0.0.1 {self._seen(other)} {_id(other)}"
                for other in ports
                if other != port
            ]
            lines += [" ".join(pair).removeprefix("--") for pair in zip(*[iter(tls[port])] * 2, strict=True)]
            self.sentinels.append(self._stack.enter_context(SentinelServer(port, lines, self.executable)))
        until(self.is_well, "the replicas do not follow, or the sentinels do not know each other")

    def _tls(self, port: int) -> list[str]:
        if self.certificates is None:
            return []
        self.tls_ports[port] = free_port()
        secure = "yes" if self._links_are_secure else "no"
        return [*self.certificates.options(self.tls_ports[port]), "--tls-replication", secure]

    def _seen(self, port: int) -> int:
        """The port at which others see the server with this port."""
        return self.tls_ports.get(port, port) if self._links_are_secure else port

    @property
    def url(self) -> str:
        return self._url("sentinel", [sentinel.port for sentinel in self.sentinels], f"/{SERVICE}/0")

    def client(self, server: RedisServer | None = None) -> redis.Redis:
        """The client of an administrator, to a server; by default to the primary as the sentinels see it."""
        return self._client_of(server or self.primary())

    def ask(self, sentinel: SentinelServer, *command: str) -> object:
        password = self._sentinel_password or None
        with redis.Redis(port=sentinel.port, password=password, decode_responses=True) as client:
            return client.execute_command(*command)

    def primary(self, sentinel: SentinelServer | None = None) -> RedisServer:
        """The primary, as a sentinel sees it."""
        answer = self.ask(sentinel or self.sentinels[0], "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        assert isinstance(answer, list)
        return next(server for server in self.servers if self._seen(server.port) == int(answer[1]))

    def is_well(self) -> bool:
        """Whether two servers follow the third, and the sentinels could promote one of them."""
        followers = 0
        for server in self.servers:
            with self.client(server) as client:
                followers += _follows(client)
        try:
            return followers == 2 and all(self.ask(each, "SENTINEL", "CKQUORUM", SERVICE) for each in self.sentinels)
        except redis.ResponseError:
            return False


def _id(port: int) -> str:
    return sha1(str(port).encode(), usedforsecurity=False).hexdigest()
