"""The parts of a Redis url: the server, the options of the connection, and a label for people.

    checked_target    checks a url, and splits it
    label_of          the url without its secrets, with its database
    user_of           the user who logs in
    database_of       the number of the database

The schemes are `redis`, `unix`, `redis+sentinel`, `redis+cluster`, and with TLS `rediss`, `rediss+sentinel` and
`rediss+cluster`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from quota.common.hosts import is_ambiguous
from quota.common.text import nearest
from quota.errors import ConfigError
from quota.ledger.redis_errors import Misconfigured, check_files

TIMEOUTS = ("socket_timeout", "socket_connect_timeout")
_OPTIONS = ("db", "username", "password", "client_name", *TIMEOUTS)
_OF_TLS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_password", "ssl_cert_reqs", "ssl_check_hostname")
_OF_SENTINELS = ("sentinel_username", "sentinel_password", "sentinel_ssl")

_FORMS = {"": "HOST:PORT/DB", "sentinel": "HOST:PORT,HOST:PORT/SERVICE/DB", "cluster": "HOST:PORT,HOST:PORT"}

FALSE = ("0", "F", "FALSE", "N", "NO")
TRUE = ("1", "T", "TRUE", "Y", "YES")
_LONGEST_S = 1e6


def checked_target(url: str, timeout_s: float, what: str = "ledger url") -> Target:
    """The target of a url. Raises ConfigError, which calls the url `what`, if it cannot be used: it shows no more than
    the scheme, because any other part may be a password in the wrong place."""
    shown = f"{what} {url.partition(':')[0]}://..."
    try:
        return target_of(url, timeout_s)
    except Misconfigured as error:
        raise ConfigError(f"{shown}: {error}") from None
    except (ValueError, TypeError):
        raise ConfigError(
            f"{shown}: one of its parts cannot be read; write redis://HOST:PORT/DB, a password as "
            "USER:PASSWORD@ before HOST and with %XX for its special characters"
        ) from None


class _Parts(NamedTuple):
    """The parts of a url as it has them: not checked, nothing decoded. `kind` comes from the scheme: "", "unix",
    "sentinel" or "cluster"."""

    scheme: str
    kind: str
    userinfo: str
    hosts: str
    path: str
    query: str

    @classmethod
    def of(cls, url: str) -> _Parts:
        scheme, _, rest = url.partition("://")
        base, _, kind = scheme.partition("+")
        place, _, query = rest.partition("?")
        userinfo, _, place = place.rpartition("@")
        hosts, _, path = place.partition("/")
        return cls(scheme, "unix" if base == "unix" else kind, userinfo, hosts, path.strip("/"), query)

    def option(self, name: str) -> str:
        """The first value of an option; "" if there is none."""
        return parse_qs(self.query).get(name, [""])[0]

    @property
    def database_in_path(self) -> str:
        """The text of the database in the path; "" if there is none. A socket has another path, a cluster has none."""
        if self.kind in ("unix", "cluster"):
            return ""
        return self.path.partition("/")[2] if self.kind == "sentinel" else self.path


class Target(NamedTuple):
    """What a url names. `kind` comes from the scheme: "", "unix", "sentinel" or "cluster". `options` are redis-py's for
    a connection to the server. The `remedy` tells what to write if the server speaks TLS and the url has it without
    TLS, or the reverse. `sentinels` is the same for the sentinels; None if there are none."""

    kind: str
    is_secure: bool
    nodes: Sequence[tuple[str, int]]
    path: str
    timeout_s: float
    options: Mapping[str, Any]
    remedy: str
    sentinels: Target | None = None

    def __repr__(self) -> str:
        """Without the password, because debuggers and tracebacks show the values of variables."""
        return f"<Target {self.path or self.nodes}>"

    @property
    def service(self) -> str:
        """The sentinels' name for the server."""
        return self.path.partition("/")[0]

    def at(self, host: str, port: int) -> Target:
        """The target of a single node of a cluster, or of a single one of the sentinels."""
        return self._replace(kind="", nodes=((host, port),))


def target_of(url: str, timeout_s: float) -> Target:
    """The target of a url. Raises ValueError, TypeError or Misconfigured if it cannot be used."""
    if "://" not in url or is_ambiguous(url):
        raise ValueError("it is unclear which part is the host")
    parts = _Parts.of(url)
    kind, is_secure = parts.kind, parts.scheme.startswith("rediss")
    given = _given(parts, is_secure=is_secure)
    username, _, password = parts.userinfo.partition(":")
    for name, text in (("username", username), ("password", password)):
        if text:
            _only_once(name, name in given)
            given[name] = unquote(text)
    _check_path(parts)
    nodes = _nodes_of(parts)
    times = {name: float(given.get(name, timeout_s)) for name in TIMEOUTS}
    if not all(0 < time_s <= _LONGEST_S for time_s in times.values()):
        raise ValueError("no time to wait")
    sentinels_are_secure = kind == "sentinel" and given.get("sentinel_ssl", str(is_secure).lower()) == "true"
    tls = _of_tls(given) if is_secure or sentinels_are_secure else {}
    remedy, sentinel_remedy = _remedies(kind, is_secure=is_secure, sentinels_are_secure=sentinels_are_secure)
    shared = {"decode_responses": True, "encoding_errors": "replace", "protocol": 2, "driver_info": None, **times}

    def target(is_secure: bool, remedy: str, **options: Any) -> Target:
        return Target(
            kind=kind,
            is_secure=is_secure,
            nodes=nodes,
            path=f"/{unquote(parts.path)}" if kind == "unix" else parts.path,
            timeout_s=times["socket_timeout"],
            options={**shared, **(tls if is_secure else {}), **options},
            remedy=remedy,
        )

    login = {"username": given.get("username"), "password": given.get("password", "")}
    server = target(is_secure, remedy, **login, db=database_of(url), client_name=given.get("client_name"))
    if kind != "sentinel":
        return server
    login = {"username": given.get("sentinel_username"), "password": given.get("sentinel_password", "")}
    return server._replace(sentinels=target(sentinels_are_secure, sentinel_remedy, **login))


def _nodes_of(parts: _Parts) -> list[tuple[str, int]]:
    """The hosts and ports of a url. Raises ValueError or Misconfigured if it has the wrong ones for its scheme."""
    nodes = [urlsplit(f"//{node}") for node in parts.hosts.split(",")]
    names = [unquote(node.hostname or "") for node in nodes]
    if parts.kind == "unix" and parts.hosts:
        raise Misconfigured("a socket is on this machine and has no host; write unix:///PATH")
    if any("$" in name for name in names):
        raise Misconfigured('no variable is replaced in it; write url = "env:NAME", with the whole url in NAME')
    if not parts.kind and len(nodes) > 1:
        raise Misconfigured("it names several hosts; write redis+sentinel:// or redis+cluster://, or one host")
    if any(re.search(r"[^\w.:%-]", node.hostname or "") for node in nodes):
        raise ValueError("no host has such a character")
    if parts.kind != "unix" and not all(names):
        form = _FORMS[parts.kind]
        raise Misconfigured(f"it names no host; write {parts.scheme}://{form}, for this machine with localhost")
    usual_port = 26379 if parts.kind == "sentinel" else 6379
    ports = [usual_port if node.port is None else node.port for node in nodes]
    if not all(ports):
        raise ValueError("not a port")
    return list(zip(names, ports, strict=True))


def _check_path(parts: _Parts) -> None:
    """Raises Misconfigured for a database or a service that cannot be."""
    databases = (parts.database_in_path, parts.option("db"))
    if not all(re.fullmatch("[0-9]{0,9}", text) for text in databases):
        raise Misconfigured("its database is not a number; end it in /0, or in ?db=0 after a unix socket")
    _only_once("db", len({int(number) for number in databases if number}) > 1)
    if parts.kind == "cluster" and (parts.option("db").strip("0") or parts.path.strip("0")):
        raise Misconfigured("a cluster has no database numbers; remove this one")
    if parts.kind == "sentinel" and not parts.path.partition("/")[0]:
        raise Misconfigured(f"name the service too: {parts.scheme}://{_FORMS['sentinel']}")


def _remedies(kind: str, *, is_secure: bool, sentinels_are_secure: bool) -> tuple[str, str]:
    """What to write if the server, or a sentinel, speaks TLS and the url has it without TLS, or the reverse."""
    remedy = f"write redis{'' if is_secure else 's'}{'+' if kind else ''}{kind}://"
    if kind != "sentinel":
        return remedy, ""
    if sentinels_are_secure != is_secure:
        return remedy, "remove sentinel_ssl"
    only_they = f"{remedy}, or sentinel_ssl = {str(not is_secure).lower()} where only the sentinels differ"
    return f"{remedy} and sentinel_ssl = {str(is_secure).lower()}", only_they


def _given(parts: _Parts, *, is_secure: bool) -> dict[str, str]:
    """The options of a url. Raises ValueError or Misconfigured for an option that it cannot have."""
    kind, several = parts.kind, parse_qs(parts.query, keep_blank_values=True)
    given = {name: values[0] for name, values in several.items()}
    of_sentinels = _OF_SENTINELS if kind == "sentinel" else ()
    secure = _OF_TLS if is_secure or (of_sentinels and given.get("sentinel_ssl") == "true") else ()
    options = (*_OPTIONS, *secure, *of_sentinels)
    not_clear = "what looks like an option may be a piece of a password"
    if any("@" in field and field.partition("=")[0] not in _OF_TLS for field in parts.query.split("&")):
        raise ValueError(not_clear)
    for name in given:
        if name in options:
            _only_once(name, len(several[name]) > 1)
            continue
        if not given[name] or not re.fullmatch("[A-Za-z_][A-Za-z0-9_-]{0,39}", name):
            raise ValueError(not_clear)
        if name in _OF_TLS:
            remedy = "remove it" if kind == "unix" else f"write rediss{'+' if kind else ''}{kind}://"
            raise Misconfigured(f"{name} is an option of TLS, which this url does not speak; {remedy}")
        if name in _OF_SENTINELS:
            raise Misconfigured(f"{name} is an option of redis+sentinel:// only; remove it")
        raise Misconfigured(f"it has no option {name!r}; {nearest(name, options)}")
    if given.get("sentinel_ssl") not in (None, "", "true", "false"):
        raise Misconfigured("sentinel_ssl is true or false (by default as the scheme says)")
    return {name: text for name, text in given.items() if text}


def _only_once(name: str, again: bool) -> None:
    """Raises Misconfigured if a part of a url is there twice: redis-py would read only one of them."""
    if again:
        raise Misconfigured(f"it has two of {name}; keep one of them")


def _of_tls(given: Mapping[str, str]) -> dict[str, Any]:
    """redis-py's options for TLS. Raises Misconfigured if a file cannot be used."""
    if given.get("ssl_cert_reqs", "required") not in ("required", "optional", "none"):
        raise Misconfigured("ssl_cert_reqs is required (by default) or none")
    if given.get("ssl_check_hostname", "1").upper() not in (*FALSE, *TRUE):
        raise Misconfigured("ssl_check_hostname is true (by default) or false")
    if "ssl_keyfile" in given and "ssl_certfile" not in given:
        raise Misconfigured("ssl_keyfile has no effect without ssl_certfile; name the certificate too")
    options = {
        "ssl_ca_certs": given.get("ssl_ca_certs"),
        "ssl_certfile": given.get("ssl_certfile"),
        "ssl_keyfile": given.get("ssl_keyfile"),
        "ssl_password": given.get("ssl_password", ""),  # without it, OpenSSL would ask on the terminal
        "ssl_cert_reqs": "none" if given.get("ssl_cert_reqs") == "none" else "required",
        "ssl_check_hostname": given.get("ssl_check_hostname", "1").upper() not in FALSE,
    }
    check_files(options)
    return options


def database_of(url: str) -> int:
    """The number of its database."""
    parts = _Parts.of(url)
    return int(parts.option("db") or parts.database_in_path or 0)


def user_of(url: str) -> str:
    """The user in a url. If the only word before the @ is a password by mistake, returns that word."""
    parts = _Parts.of(url)
    return unquote(parts.userinfo.partition(":")[0]) or parts.option("username") or "default"


def sentinels_user_of(url: str) -> str:
    """The user for the sentinels in a url; "" if there is none."""
    return _Parts.of(url).option("sentinel_username")


def label_of(url: str) -> str:
    """The url with its database, without its secrets and its other options.

    If a password has unescaped separators, its end is unclear: then it leaves out the whole place.
    """
    if "://" not in url:  # its parts are unclear
        return f"{url.partition(':')[0]}:..."
    parts = _Parts.of(url)
    if "@" in parts.query or re.search("[/#]", parts.userinfo):
        return f"{parts.scheme}://..."
    place = re.split("[?#]", url.partition("://")[2].removeprefix(f"{parts.userinfo}@"))[0]
    db = parts.option("db")
    if re.fullmatch("[0-9]{1,9}", db):
        before = place.split("/")[: 2 if parts.kind == "sentinel" else 1]
        place = f"{place}?db={db}" if parts.kind == "unix" else "/".join([*before, db])
    return f"{parts.scheme}://{place}"
