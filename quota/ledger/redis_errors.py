"""Faults of a Redis server, each explained to an operator in one line.

Failed          every failure below
Lost            no answer: the connection could not be made, ended, or was silent for too long
NotRedis        the peer does not speak Redis' protocol
Misconfigured   the configuration does not fit the server
ErrorReply      the server answered with an error
"""

from __future__ import annotations

import re


class Failed(Exception):  # noqa: N818  # says what happened
    """There is no usable reply."""


class Lost(Failed):
    """The server may or may not have run the command. If nothing `left` this process, it has not."""

    def __init__(self, message: str, *, left: bool = True) -> None:
        super().__init__(message)
        self.left = left


class NoAnswer(Lost):
    """The server was silent for too long."""


class NotRedis(Failed):
    """The server does not speak the protocol."""


class Misconfigured(Failed):
    """An operator must change something. The message has the fault and the remedy."""


class ErrorReply(Failed):
    """The server's own error. `code` is its first word, if that is in capitals."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code

    @property
    def asks_for_password(self) -> bool:
        """Whether the server refused the user or the password, or wants a password."""
        return self.code in ("NOAUTH", "WRONGPASS") or _PASSWORD.search(str(self)) is not None


_PASSWORD = re.compile("[Ii]nvalid password|Client sent AUTH|AUTH <password> called without any password")
_TOO_MANY_CLIENTS = "max number of clients reached"
_CODE = re.compile("([A-Z]{2,20}) ")


def error_of(message: str) -> Failed:
    """The failure that a server's error text means."""
    match = _CODE.match(message)
    code = "" if match is None else match[1]
    if code == "ERR":
        code, message = "", message[4:]
    return Lost(message) if message == _TOO_MANY_CLIENTS else ErrorReply(message, code)


def is_denied(message: str) -> bool:
    """Whether an error says that the user lacks a right. Versions of the server word it differently."""
    return _DENIED.search(message) is not None


MAY_NOT_RUN = "this user may not run"
"""The words with which our scripts name all missing rights."""

_DENIED = re.compile(f"^NOPERM|user executing the script can't|[Nn]o permission|{MAY_NOT_RUN}")
_DENIED_KEYS = re.compile("at least one of the keys|access (?:one of the keys|a key)")
_DENIED_COMMANDS = re.compile(rf"{MAY_NOT_RUN} ([A-Z, ]+)|permissions? to run the '([a-z|]+)'")


def explained(error: Failed, where: str, timeout_s: float, user: str) -> str:
    """The fault and the remedy, in one line that does not quote the url. `where` is a name and a url's label; `user` is
    the user who asked."""
    message = (str(error).splitlines() or [""])[0][:200]
    secure = "s" if " rediss" in where else ""
    if isinstance(error, Misconfigured):
        return f"{where}: {message}"
    if isinstance(error, NoAnswer):
        waited = f"{timeout_s:g} s"
        return f"{where} did not answer within {waited}; see whether the server is busy or the network slow"
    if "Authentication required" in message or "authenticated" in message:
        return f'{where} wants a password; add password = "env:NAME" or "file:PATH"'
    if isinstance(error, NotRedis):
        return f"{where} is not Redis; check the url"
    if isinstance(error, Lost) and "number of clients" in message:
        return f"{where} has too many clients; raise its maxclients"
    if "cluster support disabled" in message:
        return f"{where} is no cluster; write redis{secure}:// for a single server"
    if isinstance(error, Lost) and "see no primary" in message:
        return f"{where} has no primary now, as its sentinels see it; run again in a moment"
    if not isinstance(error, ErrorReply):
        return f"{where} cannot be reached; see whether the server is running there"
    return _reply_explained(error, message, where, user, secure)


def _what_is_denied(message: str) -> str:
    if _DENIED_KEYS.search(message):
        return "use the keys of this project"
    named = _DENIED_COMMANDS.search(message)
    return "run a command that it needs" if named is None else f"run {(named[1] or named[2]).upper().replace('|', ' ')}"


def _reply_explained(error: ErrorReply, message: str, where: str, user: str, secure: str) -> str:
    if error.asks_for_password:
        remedy = "check username and password, or make that user: `quota doctor --acl` prints how"
        return f"{where} refused the password; {remedy}"
    if error.code == "NOPERM" or is_denied(message):
        who = "its sentinels' user" if "'sentinel" in message else f"user {user}"
        return f"{where}: {who} may not {_what_is_denied(message)}; give it the rights that `quota doctor --acl` prints"
    reply = f"{error.code} {message}"
    line = next((line for pattern, line in _REPLIES.items() if re.search(pattern, reply)), ": {message}")
    numbers = ", which has no database numbers" if "SELECT" in message else ""
    owner = where.rpartition(" ")[0]
    return where + line.format(message=message, secure=secure, numbers=numbers, owner=owner)


_REPLIES = {
    "^(MOVED|ASK) |not allowed in cluster mode": (
        " is a node of a cluster{numbers}; write redis{secure}+cluster://HOST:PORT"
    ),
    "^LOADING ": " is loading its data; run again in a moment",
    # Redis 6 wraps what stopped a script into a text of its own.
    "(^|-)READONLY ": " is a replica, which cannot be written to; name the primary",
    "(^|-)NOREPLICAS ": (
        " has fewer replicas in reach than its min-replicas-to-write, and takes no charge until they are back; see its "
        "replicas"
    ),
    "(^|-)OOM ": " is out of memory; raise its maxmemory",
    "DB index is out of range|invalid DB index": (
        " has no database of that number; take a lower one, or raise the server's `databases`"
    ),
    "MISCONF ": " cannot save its data and takes no charge until it can; see the server's log",
    "(^|-)BUSY ": " is busy with another program's script; wait for its end, or run SCRIPT KILL",
    "^(TRYAGAIN|CLUSTERDOWN|MASTERDOWN) ": " is moving its data or choosing a primary; run again in a moment",
    "WRONGTYPE ": (
        " has a key quota:{{...}} of a type that is not ours; delete it, or give the {owner} its own database"
    ),
    "unknown command.*SENTINEL|SENTINEL.*unknown command": (
        " is no sentinel; name the sentinels' own addresses, or write redis{secure}:// for a single server"
    ),
    "unknown command [`'][^Xx]": (  # all others that we send are as old as Redis 2
        " is a sentinel, or runs no scripts; for sentinels write redis{secure}+sentinel://HOST:PORT/SERVICE"
    ),
    "(?i)unknown command": " is older than Redis 6.2; upgrade it",
}
"""Explanations of replies, by a pattern in their first word and text. The first match counts."""
