"""Which hosts are this machine, or Google's, how ports and paths are read, and whether a connection still stands."""

from __future__ import annotations

import re
import select
from functools import lru_cache
from ipaddress import ip_address
from typing import Any
from urllib.parse import unquote, urlsplit

MAX_KNOWN = 1_000
"""How many hosts are remembered: each request asks about its own. A crawler meets more."""


@lru_cache(MAX_KNOWN)
def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`, an address or a name. 0.0.0.0 means every address."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        address = ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def is_http_address(url: str) -> bool:
    """Whether it is an address of HTTP: of a host, on a port that one may have, and with nobody's name in it."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.username is None and parts.port != 0
    except ValueError:  # a port out of range, an unmatched bracket
        return False


def default_port(scheme: str) -> int:
    """The port of an address that names none."""
    return 443 if scheme in ("https", "wss") else 80


def is_readable_on_the_way(url: str) -> bool:
    """Whether what is sent to this address leaves the machine in plain text."""
    parts = urlsplit(url)
    return parts.scheme.lower() != "https" and not is_loopback(parts.hostname or "")


def plain_path(path: str) -> str:
    """The path as a server may read it: decoded, with one slash for several, and none at its end."""
    return "/" + "/".join(unquote(part).replace("/", "%2F") for part in path.split("/") if part)


def is_googles(host: str) -> bool:
    """Whether a host, with a port or a path or without, is one of Google's APIs."""
    return re.split("[:/]", host)[0].lower().rstrip(".").endswith(".googleapis.com")


def has_hung_up(sock: Any) -> bool:
    """Whether the other side of an idle connection has closed it: it is readable, although nothing was asked. What is
    sent on it would not arrive."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(0))
