"""Faults of a Redis server, each explained to an operator in one line.

Failed          every failure below
Lost            no answer: the connection could not be made, ended, or was silent for too long
NotRedis        the peer does not speak Redis' protocol
Misconfigured   the configuration does not fit the server
ErrorReply      the server answered with an error

explained                       the line of a failure
check_files                     checks the certificates and the key of a url, before anything connects
behind_secured, behind_plain    the cause of a failure with TLS, and without: the server may speak TLS
"""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from quota.common.text import one_line

if TYPE_CHECKING:
    import redis


class Failed(Exception):  # noqa: N818  # says what happened
    """There is no usable reply."""


class Lost(Failed):
    """The server may or may not have run the command."""


class NoAnswer(Lost):
    """The server was silent for too long."""


class NotRedis(Failed):
    """The server does not speak the protocol."""


class Misconfigured(Failed):
    """An operator must change something. The message has the fault and the remedy."""


class ErrorReply(Failed):
    """The server's own error. `code` is its first word, if that is in capitals."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code

    @property
    def asks_for_password(self) -> bool:
        """Whether the server refused the user or the password, or wants a password."""
        return self.code in ("NOAUTH", "WRONGPASS") or _PASSWORD.search(str(self)) is not None


_PASSWORD = re.compile("[Ii]nvalid password|Client sent AUTH|AUTH <password> called without any password")
_TOO_MANY_CLIENTS = "max number of clients"  # a node of a cluster counts its connections to other nodes, too
_CODE = re.compile("([A-Z]{2,20}) ")


def error_of(message: str) -> Failed:
    """The failure that a server's error text means."""
    match = _CODE.match(message)
    code = "" if match is None else match[1]
    if code == "ERR":
        code, message = "", message[4:]
    return Lost(message) if message.startswith(_TOO_MANY_CLIENTS) else ErrorReply(message, code)


def is_denied(message: str) -> bool:
    """Whether an error says that the user lacks a right. Versions of the server word it differently."""
    return _DENIED.search(message) is not None


_DENIED = re.compile("^NOPERM|user executing the script can't|[Nn]o permission")


def explained(error: Failed, where: str, timeout_s: float, user: str) -> str:
    """The fault and the remedy, in one line that does not quote the url. `where` is a name and a url's label; `user` is
    the user who asked."""
    message = (str(error).splitlines() or [""])[0][:200]
    fault = f"{getattr(error, 'code', '')} {message} {type(error).__name__}"
    line = next(line for pattern, line in _FAULTS.items() if re.search(pattern, fault))
    return where + line.format(
        message=message,
        timeout_s=timeout_s,
        secure="s" if " rediss" in where else "",
        who="its sentinels' user" if "'sentinel" in message else f"user {user}",
        numbers=", which has no database numbers" if "SELECT" in message else "",
        owner=where.rpartition(" ")[0],
    )


_FAULTS = {
    "Misconfigured$": ": {message}",
    "NoAnswer$": " did not answer within {timeout_s:g} s; see whether the server is busy or the network slow",
    "Authentication required|authenticated": ' wants a password; add password = "env:NAME" or "file:PATH"',
    "NotRedis$": " is not Redis; check the url",
    "^DENIED ": " has no password, so it answers only its own machine (protected-mode); set requirepass there",
    "number of clients.* Lost$": " has too many clients; raise its maxclients",
    "cluster support disabled": " is no cluster; write redis{secure}:// for a single server",
    "see no primary.* Lost$": " has no primary now, as its sentinels see it; run again in a moment",
    # A negative number is one of the name service, not of the connection.
    "^ ?Error -.* Lost$": " cannot be reached: a host name does not resolve; correct it, or see the name server",
    "connecting to /.*Permission denied.* Lost$": (
        " cannot be reached: this user may not open its socket; add it to the socket's group, or see unixsocketperm"
    ),
    "(Lost|Failed)$": " cannot be reached; see whether the server is running there",
    f"^(NOAUTH|WRONGPASS) |{_PASSWORD.pattern}": (
        " refused the password; check username and password, or make that user: `quota doctor --acl` prints how"
    ),
    _DENIED.pattern: ": {who} lacks a right; give it those that `quota doctor --acl` prints",
    "^(MOVED|ASK) |not allowed in cluster mode": (
        " is a node of a cluster{numbers}; write redis{secure}+cluster://HOST:PORT"
    ),
    "^LOADING ": " is loading its data; run again in a moment",
    # Redis 6 wraps what stopped a script into a text of its own.
    "(^|-)READONLY ": " is a replica, which cannot be written to; name the primary",
    "(^|-)NOREPLICAS ": (
        " has fewer replicas in reach than its min-replicas-to-write, and accepts no charges until they are back; "
        "see its replicas"
    ),
    "(^|-)OOM ": " is out of memory; raise its maxmemory",
    "DB index is out of range|invalid DB index": (
        " has no database of that number; take a lower one, or raise the server's `databases`"
    ),
    "MISCONF ": " cannot save its data and accepts no charges until it can; see the server's log",
    "(^|-)BUSY ": " is busy with another program's script; wait for its end, or run SCRIPT KILL",
    "^(TRYAGAIN|CLUSTERDOWN|MASTERDOWN) ": " is moving its data or choosing a primary; run again in a moment",
    "WRONGTYPE ": (
        " has a key quota:{{...}} of a type that is not ours; delete it, or give the {owner} its own database"
    ),
    "Invalid stream ID": " has an entry of another program that is dated too far ahead; run `quota ledger repair`",
    "unknown command.*SENTINEL|SENTINEL.*unknown command": (
        " is no sentinel; name the sentinels' own addresses, or write redis{secure}:// for a single server"
    ),
    "unknown command [`'][^Xx]": (  # all others that we send are as old as Redis 2
        " is a sentinel, or lacks a command; for sentinels write redis{secure}+sentinel://HOST:PORT/SERVICE"
    ),
    "(?i)unknown (redis )?command": " lacks a command; upgrade it to Redis 6.2, or undo its rename-command",
    "": ": {message}",
}
"""Explanations of failures, by a pattern in their code, their text and their kind. The first match counts."""


# -- TLS ---------------------------------------------------------------------------------------------------------------
# redis-py reads the files for each connection, so the next connection uses a file that was renewed in place.

TLS_WAIT_S = 0.1
"""How long a server may take to show the cause of an error. The failed decision waits for it."""


def check_files(options: Mapping[str, Any]) -> None:
    """Raises Misconfigured if OpenSSL cannot use the files of these options."""
    effective = os.access in os.supports_effective_ids
    for option in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        path = options[option]
        if path and not (os.path.isfile(path) and os.access(path, os.R_OK, effective_ids=effective)):
            raise Misconfigured(f"{option}: {one_line(path)} is no file that this user can read")
    context, fault = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), "ssl_ca_certs is no file of certificates in PEM; name one"
    try:
        if options["ssl_ca_certs"]:
            context.load_verify_locations(options["ssl_ca_certs"])
        fault = (
            "ssl_certfile and ssl_keyfile are no PEM certificate with its key, or ssl_password is wrong; correct them"
        )
        if options["ssl_certfile"]:  # without a password, OpenSSL would ask on the terminal
            context.load_cert_chain(options["ssl_certfile"], options["ssl_keyfile"], lambda: options["ssl_password"])
    except (OSError, ValueError) as error:
        raise Misconfigured(fault) from error


def behind_secured(
    error: BaseException,
    make: Callable[[], redis.Connection],
    host: str,
    port: int,
    options: Mapping[str, Any],
    remedy: str,
) -> Misconfigured | None:
    """The cause of a failure on a connection with TLS; None if unclear. A server that refuses our certificate may close
    the connection while we send a command. On a second connection (`make`), on which we send nothing, it reports
    why."""
    try:
        check_files(options)
    except Misconfigured as gone:  # the file was there when the url was read
        return gone
    if _answers_plainly(host, port):
        return Misconfigured(f"it speaks no TLS; {remedy}")
    fault = _fault_in(error)
    if fault is not None or isinstance(error.__context__, TimeoutError):
        return fault
    another = make()
    try:
        another.connect()
        another.can_read(TLS_WAIT_S)
    except Exception as again:  # the library's
        fault = _fault_in(again)
    finally:
        another.disconnect()
    return fault


def _fault_in(error: BaseException) -> Misconfigured | None:
    """The fault that OpenSSL reports; None if unclear, as when the server only ended the connection."""
    cause = error.__context__
    if not isinstance(cause, ssl.SSLError) or isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return None
    words = getattr(cause, "verify_message", "") or cause.reason or cause  # of OpenSSL
    reason = one_line(words).replace("_", " ").lower()
    if isinstance(cause, ssl.SSLCertVerificationError):
        remedy = "correct ssl_ca_certs or the host, or renew it"
        return Misconfigured(f"its certificate is not accepted: {reason}; {remedy}")
    return Misconfigured(f"TLS failed: {reason}; correct ssl_certfile and ssl_keyfile, or see the server's log")


def behind_plain(host: str, port: int, remedy: str) -> Misconfigured | None:
    """The cause of a failure on a connection without TLS; None if unclear."""
    try:
        speaks_tls = bool(ssl.get_server_certificate((host, port), timeout=TLS_WAIT_S))
    except ssl.SSLError as error:
        speaks_tls = "ALERT" in str(error.reason)
    except (OSError, ValueError):
        return None
    return Misconfigured(f"it speaks TLS; {remedy}") if speaks_tls else None


def _answers_plainly(host: str, port: int) -> bool:
    """Whether the server answers without TLS. Redis itself is silent after a handshake, or closes the connection."""
    try:
        with socket.create_connection((host, port), TLS_WAIT_S) as bare:
            bare.sendall(b"*1\r\n$4\r\nPING\r\n")
            return bare.recv(1) in (b"+", b"-")
    except (OSError, ValueError):
        return False
