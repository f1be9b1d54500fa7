"""The hosts of an API, as people write them and as clients spell them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

from quota.common.hosts import MAX_KNOWN, default_port, is_loopback, plain_path
from quota.common.text import show
from quota.errors import UsageError
from quota.terms.arguments import texts


class Hosts:
    """The metered hosts: names such as `api.example.com`, which means any port, or `127.0.0.1:8765`. Where a host has
    several APIs, a name goes on with the beginning of the path: `www.googleapis.com/calendar/v3`.

    The names of loopback (`localhost`, `127.0.0.1`, `::1`) are one host, and so are `bücher.example` and the
    `xn--bcher-kva.example` that clients make of it, and the ways to write an address (`10.1`, `0xa.1`, `10.0.0.1`).
    Raises UsageError for an invalid host name.
    """

    def __init__(self, names: str | Iterable[str]) -> None:
        self._known: dict[tuple[str, int | None], list[str]] = {}
        for name in texts(names, "host"):
            host, port, path = _split_host(name)
            self._known.setdefault((host, port), []).append(path)

    def __contains__(self, host_port: tuple[str, int | None]) -> bool:
        """Whether anything of a host is meant."""
        return bool(self._paths(*host_port))

    def serve(self, url: str) -> bool:
        """Whether a URL is on one of them. Raises ValueError for a port that is none."""
        parts = urlsplit(url)
        port = parts.port or default_port(parts.scheme)
        paths = self._paths(parts.hostname or "", port)
        if not paths or "" in paths:
            return bool(paths)
        path = plain_path(parts.path).lower()
        return any(path == begins or path.startswith(f"{begins}/") for begins in paths)

    def _paths(self, host: str, port: int | None) -> list[str]:
        """What the paths begin with that are meant of a host: "" for all."""
        try:
            host = _host(host)
        except ValueError:  # no name that a request could go to, as upstream may redirect to one
            return []
        return [*self._known.get((host, port), ()), *(self._known.get((host, None), ()) if port is not None else ())]


@lru_cache(MAX_KNOWN)
def _host(name: str) -> str:
    name = name.strip("[]").rstrip(".").lower()
    if name.rpartition(".")[2][:1].isdigit():  # no name's last part begins so: the system reads all of it as an address
        import socket  # late: few hosts are addresses

        with suppress(OSError, ValueError):
            name = socket.inet_ntoa(socket.inet_aton(name))
    if is_loopback(name):
        return "localhost"
    if ":" in name:
        with suppress(ValueError):
            address = ip_address(name)
            return str(getattr(address, "ipv4_mapped", None) or address)
    return name if name.isascii() else _in_ascii(name)


def _in_ascii(name: str) -> str:
    """A name as clients write it into URLs. They encode it with `idna`, which comes with each of them."""
    try:
        from idna import encode
    except ImportError:
        return name.encode("idna").decode()
    return encode(name, uts46=True).decode().rstrip(".")


def _split_host(name: str) -> tuple[str, int | None, str]:
    try:
        parts = urlsplit(f"//{name}")
        host, port = _host(parts.hostname or ""), parts.port
    except ValueError:  # a port out of range, an unmatched bracket, a label that no name has
        host, port = "", None
    is_host = re.fullmatch(r"[A-Za-z0-9._:%-]{1,253}", host) is not None
    is_path = re.fullmatch(r"(/[A-Za-z0-9._~-]+)*", parts.path) is not None if is_host else False
    if not is_host or not is_path or parts.query or "@" in name or not name.isprintable():
        raise UsageError(f"{show(name)} is not a host; write for example 'api.example.com' or '127.0.0.1:8765'")
    return host, port, parts.path.lower()
