"""Which hosts are this machine."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit


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


def is_readable_on_the_way(url: str) -> bool:
    """Whether what is sent to this address leaves the machine in plain text."""
    parts = urlsplit(url)
    return parts.scheme.lower() != "https" and not is_loopback(parts.hostname or "")
