"""Hosts, ports, paths and connections: which hosts are local or Google's, and whether a connection is still open."""

from __future__ import annotations

import re
import select
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from ipaddress import ip_address
from typing import Any
from urllib.parse import unquote, urlsplit

MAX_HOSTS = 1_000
"""How many hosts the cache holds. Each request looks up its own host; a crawler meets more."""


@lru_cache(MAX_HOSTS)
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


def is_ambiguous(url: str) -> bool:
    """Whether a parser could drop a part of a url, or take it for another part: a fragment, text beside the brackets of
    a host, a control character, a password with unescaped separators, or a user for each of several hosts."""
    userinfo, _, place = url.partition("://")[2].partition("?")[0].rpartition("@")
    beside_brackets = re.search(r"[^,]\[|\][^:,]", place.partition("/")[0]) is not None
    unclear_user = re.search("/|@.*,", userinfo) is not None
    return beside_brackets or unclear_user or "#" in url or not url.isprintable()


def is_http_address(url: str) -> bool:
    """Whether it is an HTTP address with a host, a valid port, and no user name."""
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.username is None
        return sound and parts.port != 0 and not is_ambiguous(url)
    except ValueError:  # a port out of range, an unmatched bracket
        return False


def default_port(scheme: str) -> int:
    """The port of an address without one."""
    return 443 if scheme in ("https", "wss") else 80


def is_url(target: str) -> bool:
    """Whether the target of a request is its URL, as on a connection to a proxy."""
    return target[:1] != "/" and "://" in target.partition("?")[0]


def url_on(scheme: str, host: str, port: int | None, target: str) -> str:
    """The URL of a request for `target` on a connection. A # that is sent is a letter of the path to some servers."""
    target = target.replace("#", "%23")
    if is_url(target):
        return target
    target = target if target[:1] in "/?" else f"/{target}"
    shown = f"[{host}]" if ":" in host and not host.startswith("[") else host
    named = "" if port in (None, default_port(scheme)) else f":{port}"
    return f"{scheme}://{shown}{named}{target}"


def is_readable_on_the_way(url: str) -> bool:
    """Whether a request to this address leaves the machine in plain text."""
    parts = urlsplit(url)
    return parts.scheme.lower() != "https" and not is_loopback(parts.hostname or "")


def plain_path(path: str) -> str:
    """The path as a server may read it: decoded, with one slash for several, and none at its end."""
    return "/" + "/".join(unquote(part).replace("/", "%2F") for part in path.split("/") if part)


_FORMAT = re.compile(r"\.[^./]+\.*/*$")
"""The end of a path that some frameworks, as Rails, read as the format of the answer, whatever it is."""


@lru_cache(1)  # one request needs them for each verb
def readings_of(path: str) -> tuple[str, ...]:
    """All paths that a server may read in `path`, as `plain_path` writes them, the plain path first. The others have
    slashes decoded (once or twice, also as `%C0%AF` or `%u002F`), full-width characters in ASCII, no invisible ones,
    backslashes as slashes, no name behind `//` (Node reads a host there), no text after a semicolon (up to a slash, or
    all) or an encoded end of the path, no format (`.json`), no dots or spaces at the end of a name, and `..`
    resolved."""
    plain = plain_path(path)
    if path.isascii() and not re.search(r"^//|[%;\\]|/\.|[.\s+](/|$)", path):
        return tuple(dict.fromkeys((plain, _FORMAT.sub("", plain))))
    once = _decoded(path)
    twice = _decoded(once)
    texts = dict.fromkeys((plain, once, twice, _decoded(twice)))
    for ways in _WAYS:
        texts |= {way(text): None for text in texts for way in ways}
    readings = dict.fromkeys([plain])
    for text in texts:
        parts = [part for part in text.split("/") if part]
        readings[f"/{'/'.join(parts)}"] = None
        readings[f"/{'/'.join(without_dots(parts))}"] = None
    return tuple(readings)


_OLD_LETTER = re.compile(
    "%(?:c|(?:e0|f0%80|f8%80%80|fc%80%80%80)%8)([01])%([89ab][0-9a-f])|%u([0-9a-f]{4})", re.IGNORECASE
)
"""An ASCII letter in two to six bytes, which UTF-8 forbids, or a letter as `%u002F`: old servers read both."""


def _decoded(text: str) -> str:
    return unquote(re.sub(_OLD_LETTER, _old_letter, text))


def _old_letter(escape: re.Match[str]) -> str:
    return chr(int(escape[3], 16) if escape[3] else int(escape[1]) << 6 | int(escape[2], 16) & 63)


def _plain_letters(text: str) -> str:
    """The text without what no screen shows, each character with its marks in one spelling. The whole text at once
    would take the square of its marks."""
    if text.isascii() and text.isprintable():
        return text
    shown = "".join([char for char in text if char.isprintable() and char != "\ufffd"])
    return "".join(map(one_spelling, re.findall(r".\W{0,9}", shown))).translate(_SLASHES)


def one_spelling(text: str) -> str:
    """The text in one spelling for all letters that are equal without case or in a Unicode normal form, and for all
    digits that `\\d` and int() take for equal."""
    from unicodedata import normalize  # late: few paths have other than ASCII

    # upper() turns a dotless i into I. casefold() leaves the dot of a dotted I as a mark, which a plain i lacks.
    folded = normalize("NFKC", normalize("NFKD", text).upper().casefold()).replace("\u0307", "")
    return re.sub(r"\d", lambda digit: str(int(digit[0])), folded)


_SLASHES = str.maketrans("\u2044\u2215\u2216", "//\\")
"""Slashes of mathematics, which IIS reads as plain ones."""

_WAYS: tuple[tuple[Callable[[str], str], ...], ...] = (
    (_plain_letters,),
    (lambda text: text.replace("\\", "/"),),
    (partial(re.compile(";[^/]*").sub, ""),),
    (partial(re.compile(r"[?#;\0].*", re.DOTALL).sub, ""), partial(re.compile("^//+[^/]*").sub, "")),
    (partial(_FORMAT.sub, ""),),
    (partial(re.compile(r"(?<![/.\s+])[.\s+]+(?=/|$)").sub, ""),),
)
"""What servers do to a path, in their order. A server does none, or one, of each."""


def without_dots(parts: Iterable[str]) -> list[str]:
    """The parts of a path with `.` and `..` resolved."""
    resolved: list[str] = []
    for part in parts:
        if part == "..":
            del resolved[-1:]
        elif part != ".":
            resolved.append(part)
    return resolved


def is_googles(host: str) -> bool:
    """Whether a host, with a port or a path or without, is one of Google's APIs."""
    return re.split("[:/]", host)[0].lower().rstrip(".").endswith(".googleapis.com")


def has_hung_up(sock: Any) -> bool:
    """Whether the other side of an idle connection has closed it: it is readable, although nothing was asked. A request
    on it would not arrive."""
    return is_readable(sock, 0)


def is_readable(file: Any, within_ms: int) -> bool:
    """Whether a file or socket has something to read, or its end, within this time."""
    if not hasattr(select, "poll"):  # eventlet takes it away
        return bool(select.select([file], [], [], within_ms / 1_000)[0])
    poller = select.poll()
    poller.register(file, select.POLLIN)
    return bool(poller.poll(within_ms))
