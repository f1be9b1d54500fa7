"""Three sentinels over one primary and two replicas."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from hashlib import sha1
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import redis

from support.servers import RedisServer, Server, free_port, redis_executable, until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.certificates import Certificates

SERVICE = "main"
DOWN_AFTER_MS = 400


class SentinelServer(Server):
    """One sentinel, told of all the others: nobody has to wait until it has heard of them."""

    def __init__(self, port: int, lines: Sequence[str], executable: str) -> None:
        folder = Path(tempfile.mkdtemp(prefix="quota-sentinel-"))
        config = folder / "sentinel.conf"
        own = [f"port {port}", "bind 127.0.0.1", f"dir {folder}"]
        config.write_text("\n".join([*own, *lines]) + "\n")
        super().__init__(port, [executable, str(config), "--sentinel"], folder)


class Sentinels:
    """`servers` are the primary and its replicas, as they were at the start; `sentinels` watch them.

    `password` is that of the servers, `sentinel_password` the sentinels' own. With certificates, everybody also listens
    with TLS at `tls_ports`, and names these to the others if `links_are_secure`; `port` of each stays plain. A primary
    that is silent for `down_after_ms` is taken for dead.
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
        self.executable, self.certificates = executable or redis_executable(), certificates
        self._links_are_secure = links_are_secure
        self._password, self._sentinel_password = password, sentinel_password
        self.down_after_ms = down_after_ms
        self._stack = ExitStack()
        self.servers: list[RedisServer] = []
        self.sentinels: list[SentinelServer] = []
        self.tls_ports: dict[int, int] = {}  # by port
        try:
            self._start(options)
        except BaseException:
            self.close()
            raise

    def _start(self, options: Sequence[str]) -> None:
        told = [*options, "--repl-diskless-sync-delay", "0"]
        if self._password:
            told += ["--requirepass", self._password, "--masterauth", self._password]
        for _ in range(3):
            port = free_port()
            following = ["--replicaof", "127.0.0.1", str(self._seen(self.servers[0].port))] if self.servers else []
            one = RedisServer(*told, *self._tls(port), *following, executable=self.executable, port=port)
            self.servers.append(self._stack.enter_context(one))
        ports: set[int] = set()
        while len(ports) < 3:
            ports.add(free_port())
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
            lines += [f"sentinel known-replica {SERVICE} 127.0.0.1 {self._seen(one.port)}" for one in self.servers[1:]]
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
        return [
            *self.certificates.options(self.tls_ports[port]),
            "--tls-replication",
            "yes" if self._links_are_secure else "no",
        ]

    def _seen(self, port: int) -> int:
        """The port at which others see whoever has this one."""
        return self.tls_ports.get(port, port) if self._links_are_secure else port

    @property
    def url(self) -> str:
        scheme, user, more = "redis+sentinel", "", ""
        if self.certificates is not None:
            scheme, more = "rediss+sentinel", f"?ssl_ca_certs={self.certificates.ca}"
        if self._password:
            user = f":{quote(self._password, safe='')}@"
        hosts = ",".join(f"127.0.0.1:{self.tls_ports.get(one.port, one.port)}" for one in self.sentinels)
        return f"{scheme}://{user}{hosts}/{SERVICE}/0{more}"

    def client(self, server: RedisServer | None = None) -> redis.Redis:
        """Of an administrator, to a server; without one, to the primary as the sentinels see it."""
        server = server or self.primary()
        return redis.Redis(port=server.port, password=self._password or None, decode_responses=True)

    def ask(self, sentinel: SentinelServer, *command: str) -> object:
        password = self._sentinel_password or None
        with redis.Redis(port=sentinel.port, password=password, decode_responses=True) as client:
            return client.execute_command(*command)

    def primary(self, sentinel: SentinelServer | None = None) -> RedisServer:
        """As a sentinel sees it."""
        found = self.ask(sentinel or self.sentinels[0], "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        assert isinstance(found, list)
        return next(one for one in self.servers if self._seen(one.port) == int(found[1]))

    def is_well(self) -> bool:
        """Whether two servers of three follow the other, and the sentinels could put one of them in its place."""
        followers = 0
        for server in self.servers:
            with self.client(server) as client:
                followers += client.info("replication").get("master_link_status") == "up"
        try:
            return followers == 2 and all(self.ask(one, "SENTINEL", "CKQUORUM", SERVICE) for one in self.sentinels)
        except redis.ResponseError:
            return False

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Sentinels:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _id(port: int) -> str:
    return sha1(str(port).encode(), usedforsecurity=False).hexdigest()
