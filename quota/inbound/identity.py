"""The identity of a request: an API key, else the authenticated user, else the client's address.

An identity is a short text: `k:` and the hash of a key, `u:` and a user, or `a:` and an address. The storage keeps only
a salted hash of it, and the log never shows it.

A client may write anything into its request. So this module believes only:

- an API key that the application knows (`keys`). Otherwise a client could invent a new key for each request;
- a user that the application authenticated. No client can write `scope["user"]` or REMOTE_USER;
- the address at the other end of the connection. If it is a trusted proxy: the last address in the forwarded field that
  is not a trusted proxy, **counted from the right**, where our own proxies write. Many examples take the leftmost
  address, but the client can write that itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

from quota.common.log import warn
from quota.common.text import nearest, show
from quota.errors import ConfigError, UsageError

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
KnowsKey = Callable[[str], bool] | None
"""Tells whether an API key is valid. None: no key counts."""
UserOf = Callable[[Any], str | None] | None
"""Finds the user in a scope or environ. None: the user that the application authenticated."""

X_FORWARDED_FOR, FORWARDED, CF_CONNECTING_IP = "x-forwarded-for", "forwarded", "cf-connecting-ip"
FIELDS = (X_FORWARDED_FOR, FORWARDED, CF_CONNECTING_IP)
"""The fields in which proxies name the client: the usual list, the field of RFC 7239, Cloudflare's single address."""
UNIX = "unix"
"""Names the other end of a unix socket, which has no address."""

_OF_UNIX = ("localhost", UNIX, "<local>", "0.0.0.0")  # noqa: S104
"""How waitress, eventlet, Werkzeug and Tornado name it. Other servers leave it empty."""

MAX_CHARS = 64
"""The most characters of an identity. A longer identity is replaced by its hash."""

MAX_HOPS = 32
"""How many entries of a forwarded field are read, from the right. Nobody has more proxies than this."""

IPV6_BITS = 64
"""The network that a provider gives to one customer, who can use any address in it."""

_EMBEDDING = (IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96"))
"""IPv6 networks whose last four bytes are an IPv4 address: of dual-stack sockets, and of NAT64 (RFC 6052)."""


def several(key: str, value: Any, what: str) -> tuple[Any, ...]:
    """`value` as a tuple. A lone string is a mistake: each character would become an item."""
    if not isinstance(value, str):
        with suppress(TypeError):
            return tuple(value)
    given = "a string" if isinstance(value, str) else show(value)
    raise ConfigError(f"{key}: {given} where a list of {what} is needed")


def at_once(key: str, answer: Any) -> Any:
    """The answer of a function of the application. Raises UsageError for an awaitable: it is always true and never
    equal to another, so each request would be a new visitor."""
    if hasattr(answer, "__await__"):
        raise UsageError(f"{key}: the function returned an awaitable; pass a function that is not async")
    return answer


class Proxies:
    """The trusted proxies: addresses, networks, and `"unix"`. Raises ConfigError for anything else."""

    def __init__(self, trusted: Iterable[str] = (), field: str = X_FORWARDED_FOR) -> None:
        if not isinstance(field, str) or field not in FIELDS:
            raise ConfigError(f"forwarded: {show(field)}: {nearest(field, FIELDS)}")
        self.field = field
        self._unix = False
        networks: list[Network] = []
        for text in several("trusted_proxies", trusted, "addresses and networks"):
            if text == UNIX:
                self._unix = True
                continue
            try:
                network = ip_network(text if isinstance(text, str) else "")
            except ValueError:
                raise ConfigError(
                    f"trusted_proxies: {show(text)} is not an address, a network such as 10.0.0.0/8 (its last bits "
                    f'zero), or "{UNIX}"'
                ) from None
            if not network.prefixlen:
                raise ConfigError(f"trusted_proxies: {show(text)} trusts everybody; name your proxies")
            if isinstance(network, IPv6Network) and any(network.subnet_of(within) for within in _EMBEDDING):
                raise ConfigError(f"trusted_proxies: {show(text)}: write the IPv4 address that it contains")
            networks.append(network)
        self._is_warned = False
        self._is_trusted = lru_cache(maxsize=4096)(lambda address: any(address in network for network in networks))

    def client(self, peer: str | None, lines: Callable[[], Sequence[str]]) -> str:
        """The identity of the client by its address. `lines` returns the values of the forwarded field, in order."""
        client = parse_address(peer) if peer else None
        is_trusted = self._is_trusted(client) if client is not None else self._unix and not peer
        if not is_trusted:
            if client is not None and client.is_private and lines():
                remedy = "if that is your proxy, add it to trusted_proxies"
                self._warn(f"requests from a private address have {self.field}", remedy)
            return self._address(client, peer)
        parse = _forwarded_for if self.field == FORWARDED else parse_address
        for entry in _from_the_right(",".join(lines()), quotes=self.field == FORWARDED):
            address = parse(entry)
            if address is None:  # "unknown", a name, garbage: count the proxy that wrote it
                break
            client = address
            if not self._is_trusted(address):
                break
        return self._address(client, peer)

    def _address(self, client: Address | None, peer: str | None) -> str:
        """The identity of an address. An IPv6 address is cut to its network."""
        if isinstance(client, IPv6Address):
            client = IPv6Address(int(client) >> IPV6_BITS << IPV6_BITS)
        if client is not None or peer:
            return _named("a", str(client or peer))
        trust = "" if self._unix else f'add "{UNIX}" to trusted_proxies, and '
        self._warn("requests over a unix socket name no client", f"{trust}have the proxy send {self.field}")
        return f"a:{UNIX}"

    def _warn(self, why: str, remedy: str) -> None:
        """Log once that requests of several visitors count as those of one."""
        if not self._is_warned:
            self._is_warned = True
            warn("inbound_one_visitor", f"{why}, so all of them share one limit; {remedy}")


class Identify:
    """Finds the identity of a request. `user` is a function of yours that gets the scope or environ.

    `key_field` is the header field with the API key. `knows_key` tells whether a key is valid.
    """

    def __init__(
        self, proxies: Proxies, *, key_field: str | None = None, knows_key: KnowsKey = None, user: UserOf = None
    ) -> None:
        self._proxies = proxies
        self._keys = None if key_field is None or knows_key is None else (key_field.lower(), knows_key)
        self._user = user

    def asgi(self, scope: Mapping[str, Any]) -> str:
        """The identity of an ASGI request."""
        client = scope.get("client")
        return self._who(scope, client[0] if client else None, _asgi_user, _asgi_lines)

    def wsgi(self, environ: Mapping[str, Any]) -> str:
        """The identity of a WSGI request."""
        peer = environ.get("REMOTE_ADDR")
        peer = None if peer in _OF_UNIX else peer
        return self._who(environ, peer, lambda environ: environ.get("REMOTE_USER"), _wsgi_lines)

    def _who(
        self,
        request: Mapping[str, Any],
        peer: str | None,
        user_of: Callable[[Mapping[str, Any]], str | None],
        lines_of: Callable[[Mapping[str, Any], str], list[str]],
    ) -> str:
        if self._keys is not None:
            field, knows_key = self._keys
            lines = lines_of(request, field)
            # Of several different keys none counts: the application may use any of them.
            if len(set(lines)) == 1 and lines[0]:
                key = as_text(lines[0])
                if any(at_once("keys", knows_key(text)) for text in dict.fromkeys((lines[0], key))):
                    return f"k:{digest(key)}"
        name = at_once("user", (user_of if self._user is None else self._user)(request))
        if name:
            return _named("u", name)
        return self._proxies.client(peer, lambda: lines_of(request, self._proxies.field))


def as_text(characters: str) -> str:
    """A key from its bytes as characters. Clients and editors write letters as UTF-8 or as Latin-1."""
    try:
        return characters.encode("latin-1").decode()
    except UnicodeError:
        return characters


def digest(text: str) -> str:
    """32 hexadecimal digits of a text of any length."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _named(kind: str, name: str) -> str:
    identity = f"{kind}:{name}"
    return identity if len(identity) <= MAX_CHARS else f"{kind}#{digest(name)}"


# -- addresses ---------------------------------------------------------------------------------------------------------


def parse_address(text: str) -> Address | None:
    """Parse an address as proxies write it: with or without a port, in brackets, with a zone. None for other text.

    An IPv4 address inside an IPv6 address becomes the IPv4 address. Otherwise all of these would be one /64 network.
    """
    return _parsed(text.strip()) if len(text) <= MAX_CHARS * 2 else None


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Address | None:
    if text.startswith("["):  # [2001:db8::1]:4711
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:  # 192.0.2.1:4711
        text = text.partition(":")[0]
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and any(address in network for network in _EMBEDDING):
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address


def _from_the_right(text: str, *, quotes: bool) -> Iterable[str]:
    """The entries of a list from the last to the first, at most MAX_HOPS.

    A client can write the left part, with quotes that never close. So quotes are paired from the right, where our own
    proxies wrote.
    """
    end = len(text)
    for _ in range(MAX_HOPS):
        comma = _comma_before(text, end) if quotes else text.rfind(",", 0, end)
        if comma < 0 and quotes and end > MAX_ENTRY:  # the beginning of the entry is unknown
            return
        entry = text[comma + 1 : end].strip()
        if entry:
            yield entry
        if comma < 0:
            return
        end = comma


MAX_ENTRY = 1_024
"""The longest element of a Forwarded field that is read."""


def _comma_before(text: str, end: int) -> int:
    """The last comma before `end` outside quotes; -1 if there is none within MAX_ENTRY."""
    quoted = False
    for at in range(end - 1, max(-1, end - 1 - MAX_ENTRY), -1):
        if text[at] == '"':
            before = text[max(0, at - MAX_ENTRY) : at]
            backslashes = len(before) - len(before.rstrip("\\"))
            if backslashes % 2 == 0:  # else the quote is escaped
                quoted = not quoted
        elif text[at] == "," and not quoted:
            return at
    return -1


def _forwarded_for(element: str) -> Address | None:
    """The address in the `for` of one element of Forwarded (RFC 7239): `for="[2001:db8::1]:4711";proto=https`. None for
    several: a text of the client's may stand in front, as in `host="a;for=192.0.2.1"`."""
    pairs = [pair.partition("=") for pair in element.split(";")]
    named = [value for name, _, value in pairs if name.strip().lower() == "for"]
    return parse_address(named[0].strip().strip('"').replace("\\", "")) if len(named) == 1 else None


# -- requests of ASGI and WSGI -----------------------------------------------------------------------------------------


_BLANKS = " \t"
"""Blanks around a value. `strip()` alone would also remove bytes of UTF-8 letters."""


def _asgi_lines(scope: Mapping[str, Any], field: str) -> list[str]:
    name = field.encode("latin-1")
    return [value.decode("latin-1").strip(_BLANKS) for key, value in scope.get("headers", ()) if key == name]


def _wsgi_lines(environ: Mapping[str, Any], field: str) -> list[str]:
    value = environ.get(f"HTTP_{field.upper().replace('-', '_')}")
    return [] if value is None else [str(value).strip(_BLANKS)]


def _asgi_user(scope: Mapping[str, Any]) -> str | None:
    """The user that an earlier middleware authenticated, as Starlette and Django's Channels pass it on."""
    user = scope.get("user")
    if user is None or not getattr(user, "is_authenticated", False):
        return None
    for attribute in ("identity", "pk", "display_name"):
        try:
            name = getattr(user, attribute, None)
        except NotImplementedError:  # Starlette's SimpleUser has no identity
            continue
        if name:
            return str(name)
    return None
