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

_TIMEOUTS = ("socket_timeout", "socket_connect_timeout")
_OPTIONS = ("db", "username", "password", "client_name", *_TIMEOUTS)
_OF_TLS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_password", "ssl_cert_reqs", "ssl_check_hostname")
_OF_SENTINELS = ("sentinel_username", "sentinel_password", "sentinel_ssl")

FALSE = ("0", "F", "FALSE", "N", "NO")
_LONGEST_S = 1e6


def checked_target(url: str, label: str, timeout_s: float, what: str = "ledger url") -> Target:
    """The target of a url. Raises ConfigError, which calls the url `what` and `label`, if it cannot be used."""
    try:
        return target_of(url, timeout_s)
    except Misconfigured as error:
        raise ConfigError(f"{what} {label}: {error}") from None
    except (ValueError, TypeError):
        # The parser's message quotes a port or an option, which may be a piece of a password.
        raise ConfigError(
            f"{what} {label}: one of its parts cannot be read; write redis://HOST:PORT/DB, a password as "
            "USER:PASSWORD@ before HOST and with %XX for its special characters"
        ) from None


class Target(NamedTuple):
    """The parts of a url. `kind` comes from the scheme: "", "unix", "sentinel" or "cluster". `options` are redis-py's
    for a connection to the server, `sentinel_options` for a connection to a sentinel. The remedies tell what to write
    if the server, or a sentinel, speaks TLS and the url has it without TLS, or the reverse."""

    kind: str
    is_secure: bool
    sentinels_are_secure: bool
    nodes: Sequence[tuple[str, int]]
    path: str
    timeout_s: float
    connect_timeout_s: float
    options: Mapping[str, Any]
    sentinel_options: Mapping[str, Any]
    remedy: str
    sentinel_remedy: str

    def __repr__(self) -> str:
        """Without the password, because debuggers and tracebacks show the values of variables."""
        return f"<Target {self.path or self.nodes}>"

    @property
    def service(self) -> str:
        """The sentinels' name for the server."""
        return self.path.partition("/")[0]

    def at(self, host: str, port: int, *, is_sentinel: bool = False) -> Target:
        """The target of a single node of a cluster, or of a single sentinel."""
        node = self._replace(kind="", nodes=((host, port),))
        if not is_sentinel:
            return node
        times = {name: self.options[name] for name in _TIMEOUTS}
        options = {**self.sentinel_options, **times}
        return node._replace(is_secure=self.sentinels_are_secure, options=options, remedy=self.sentinel_remedy)


def _remedies(kind: str, *, is_secure: bool, sentinels_are_secure: bool) -> tuple[str, str]:
    """What to write if the server, or a sentinel, speaks TLS and the url has it without TLS, or the reverse."""
    remedy = f"write redis{'' if is_secure else 's'}{'+' if kind else ''}{kind}://"
    if kind != "sentinel":
        return remedy, ""
    if sentinels_are_secure != is_secure:
        return remedy, "remove sentinel_ssl"
    only_they = f"{remedy}, or sentinel_ssl = {_flag(not is_secure)} where only the sentinels differ"
    return f"{remedy} and sentinel_ssl = {_flag(is_secure)}", only_they


def target_of(url: str, timeout_s: float) -> Target:
    """The target of a url. Raises ValueError, TypeError or Misconfigured if it cannot be used."""
    scheme, slashes, rest = url.partition("://")
    if not slashes or is_ambiguous(url):
        raise ValueError("it is unclear which part is the host")
    if not all(map(_is_database, _databases(url))):
        raise Misconfigured("its database is not a number; end it in /0, or in ?db=0 after a unix socket")
    base, _, kind = scheme.partition("+")
    kind, is_secure = "unix" if base == "unix" else kind, base == "rediss"
    if kind in ("sentinel", "cluster"):
        place, _, query = rest.partition("?")
        authority, _, path = place.partition("/")
        userinfo, _, hosts = authority.rpartition("@")
        parts = [urlsplit(f"//{node}") for node in hosts.split(",")]
        if not all(part.hostname for part in parts):
            raise ValueError("a host has no name")
        path = path.strip("/")
    else:
        whole = urlsplit(url)
        parts, path, query = [whole], unquote(whole.path), whole.query
        userinfo = whole.netloc.rpartition("@")[0]
        if kind == "unix" and whole.netloc.rpartition("@")[2]:
            raise Misconfigured("a socket is on this machine and has no host; write unix:///PATH")
    if any("$" in (part.hostname or "") for part in parts):
        raise Misconfigured('no variable is replaced in it; write url = "env:NAME", with the whole url in NAME')
    if not kind and "," in (parts[0].hostname or ""):
        raise Misconfigured("it names several hosts; write redis+sentinel:// or redis+cluster://, or one host")
    if any(re.search(r"[^\w.:%-]", part.hostname or "") for part in parts):
        raise ValueError("no host has such a character")
    given = _given(query, kind, is_secure=is_secure)
    if not kind and not parts[0].hostname:
        raise Misconfigured(f"it names no host; write {base}://HOST:PORT/DB, for this machine with localhost")
    sentinel_ssl = given.get("sentinel_ssl", _flag(is_secure))
    if sentinel_ssl not in ("true", "false"):
        raise Misconfigured("sentinel_ssl is true or false (by default as the scheme says)")
    username, _, password = userinfo.partition(":")
    for name, text in (("username", username), ("password", password)):
        if text:
            _only_once(name, name in given)
            given[name] = unquote(text)
    _only_once("db", len({int(number) for number in _databases(url) if number}) > 1)
    if kind == "cluster" and (database_of(url) or path.strip("0")):
        raise Misconfigured("a cluster has no database numbers")
    if kind == "sentinel" and not path.partition("/")[0]:
        secure = "s" if is_secure else ""
        raise Misconfigured(f"name the service too: redis{secure}+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB")
    sentinels_are_secure = kind == "sentinel" and sentinel_ssl == "true"
    tls = _of_tls(given) if is_secure or sentinels_are_secure else {}
    answer_s, connect_s = _times(given, timeout_s)
    shared = {"decode_responses": True, "encoding_errors": "replace", "protocol": 2, "driver_info": None}
    usual_port = 26379 if kind == "sentinel" else 6379
    nodes = [(unquote(part.hostname or ""), usual_port if part.port is None else part.port) for part in parts]
    if not all(port for _, port in nodes):
        raise ValueError("not a port")
    remedy, sentinel_remedy = _remedies(kind, is_secure=is_secure, sentinels_are_secure=sentinels_are_secure)
    return Target(
        kind=kind,
        is_secure=is_secure,
        sentinels_are_secure=sentinels_are_secure,
        nodes=nodes,
        path=path,
        timeout_s=answer_s,
        connect_timeout_s=connect_s,
        options={
            **shared,
            **(tls if is_secure else {}),
            "db": database_of(url),
            "username": given.get("username") or None,
            "password": given.get("password", ""),
            "client_name": given.get("client_name") or None,
            "socket_timeout": answer_s,
            "socket_connect_timeout": connect_s,
        },
        sentinel_options={
            **shared,
            **(tls if sentinels_are_secure else {}),
            "username": given.get("sentinel_username") or None,
            "password": given.get("sentinel_password", ""),
        },
        remedy=remedy,
        sentinel_remedy=sentinel_remedy,
    )


def _given(query: str, kind: str, *, is_secure: bool) -> dict[str, str]:
    """The options of a url. Raises Misconfigured for an unknown option."""
    several = parse_qs(query, keep_blank_values=True)
    given = {name: values[0] for name, values in several.items()}
    of_sentinels = _OF_SENTINELS if kind == "sentinel" else ()
    secure = _OF_TLS if is_secure or (of_sentinels and given.get("sentinel_ssl") == "true") else ()
    options = (*_OPTIONS, *secure, *of_sentinels)
    not_clear = "what looks like an option may be a piece of a password"
    if any("@" in field and field.partition("=")[0] not in _OF_TLS for field in query.split("&")):
        raise ValueError(not_clear)
    for name in given:
        if name in options:
            _only_once(name, len(several[name]) > 1)
            continue
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_-]{0,39}", name):
            raise ValueError(not_clear)
        if name in _OF_TLS:
            remedy = "remove it" if kind == "unix" else f"write rediss{'+' if kind else ''}{kind}://"
            raise Misconfigured(f"{name} is an option of TLS, which this url does not speak; {remedy}")
        if name in _OF_SENTINELS:
            raise Misconfigured(f"{name} is an option of redis+sentinel:// only; remove it")
        raise Misconfigured(f"it has no option {name!r}; {nearest(name, options)}")
    return {name: text for name, text in given.items() if text}


def _only_once(name: str, again: bool) -> None:
    """Raises Misconfigured if a part of a url is there twice: redis-py would read only one of them."""
    if again:
        raise Misconfigured(f"it has two of {name}; keep one of them")


def _times(given: Mapping[str, str], timeout_s: float) -> tuple[float, float]:
    """How long an answer may take, and how long connecting may take."""
    answer_s, connect_s = (float(given.get(name, timeout_s)) for name in _TIMEOUTS)
    if not (0 < answer_s <= _LONGEST_S and 0 < connect_s <= _LONGEST_S):
        raise ValueError("no time to wait")
    return answer_s, connect_s


def _of_tls(given: Mapping[str, str]) -> dict[str, Any]:
    """redis-py's options for TLS. Raises Misconfigured if a file cannot be used."""
    if given.get("ssl_cert_reqs", "required") not in ("required", "optional", "none"):
        raise Misconfigured("ssl_cert_reqs is required (by default) or none")
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


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _databases(url: str) -> tuple[str, str]:
    """The database in a url's path, and the one in its option `db`; "" for none."""
    scheme, _, rest = url.partition("://")
    place, _, query = rest.partition("?")
    path = place.partition("/")[2].strip("/")
    if scheme.endswith("+sentinel"):
        path = path.partition("/")[2]
    elif scheme == "unix" or scheme.endswith("+cluster"):  # a socket's path; a cluster's url has none
        path = ""
    return path, parse_qs(query).get("db", [""])[0]


def database_of(url: str) -> int:
    """The number of its database."""
    in_path, option = _databases(url)
    return int(option or in_path or 0)


def _is_database(text: str) -> bool:
    return not text or (text.isascii() and text.isdigit() and len(text) <= 9)


def label_of(url: str) -> str:
    """The url with its database, without its secrets and its other options."""
    shown, db = _without_secrets(url), _databases(url)[1]
    scheme, _, place = shown.partition("://")
    if not db or place == "..." or not _is_database(db):
        return shown
    if scheme == "unix":
        return f"{shown}?db={db}"
    named = place.split("/")[: 2 if scheme.endswith("+sentinel") else 1]
    return f"{scheme}://{'/'.join([*named, db])}"


def user_of(url: str) -> str:
    """The user in a url. If the only word before the @ is a password by mistake, returns that word."""
    place, _, query = url.partition("://")[2].partition("?")
    named = unquote(place.rpartition("@")[0].partition(":")[0])
    return named or parse_qs(query).get("username", ["default"])[0]


def sentinels_user_of(url: str) -> str:
    """The user for the sentinels in a url; "" if there is none."""
    return parse_qs(url.partition("?")[2]).get("sentinel_username", [""])[0]


def _without_secrets(url: str) -> str:
    """The url up to its host and path: no user, no password, no options.

    If a password has unescaped separators, its end is unclear: then it leaves out the whole place.
    """
    scheme, slashes, rest = url.partition("://")
    if not slashes:  # its parts are unclear
        return f"{url.partition(':')[0]}:..."
    userinfo, at, place = rest.rpartition("@")
    if at and re.search(r"[/?#]", userinfo):
        return f"{scheme}://..."
    return f"{scheme}://{re.split('[?#]', place)[0]}"
