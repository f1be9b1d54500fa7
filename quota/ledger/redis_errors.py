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

import errno
import os
import re
import socket
import ssl
import stat
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from quota.common.files import at_once
from quota.common.text import one_line

if TYPE_CHECKING:
    import redis


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
    fault = f"{getattr(error, 'code', '')} {message} {type(error).__name__}"
    line = next(line for pattern, line in _FAULTS.items() if re.search(pattern, fault))
    return where + line.format(
        message=message,
        timeout_s=timeout_s,
        secure="s" if " rediss" in where else "",
        who="its sentinels' user" if "'sentinel" in message else f"user {user}",
        what=_what_is_denied(message),
        numbers=", which has no database numbers" if "SELECT" in message else "",
        owner=where.rpartition(" ")[0],
    )


def _what_is_denied(message: str) -> str:
    if _DENIED_KEYS.search(message):
        return "use the keys of this project"
    named = _DENIED_COMMANDS.search(message)
    return "run a command that it needs" if named is None else f"run {(named[1] or named[2]).upper().replace('|', ' ')}"


_FAULTS = {
    "Misconfigured$": ": {message}",
    "NoAnswer$": " did not answer within {timeout_s:g} s; see whether the server is busy or the network slow",
    "Authentication required|authenticated": ' wants a password; add password = "env:NAME" or "file:PATH"',
    "NotRedis$": " is not Redis; check the url",
    "number of clients.* Lost$": " has too many clients; raise its maxclients",
    "cluster support disabled": " is no cluster; write redis{secure}:// for a single server",
    "see no primary.* Lost$": " has no primary now, as its sentinels see it; run again in a moment",
    "(Lost|Failed)$": " cannot be reached; see whether the server is running there",
    f"^(NOAUTH|WRONGPASS) |{_PASSWORD.pattern}": (
        " refused the password; check username and password, or make that user: `quota doctor --acl` prints how"
    ),
    _DENIED.pattern: ": {who} may not {what}; give it the rights that `quota doctor --acl` prints",
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
        " is a sentinel, or runs no scripts; for sentinels write redis{secure}+sentinel://HOST:PORT/SERVICE"
    ),
    "(?i)unknown command": " is older than Redis 6.2; upgrade it",
    "": ": {message}",
}
"""Explanations of failures, by a pattern in their code, their text and their kind. The first match counts."""


# -- TLS ---------------------------------------------------------------------------------------------------------------
# redis-py reads the files for each connection, so the next connection uses a file that was renewed in place.

TLS_WAIT_S = 0.1
"""How long a server may take to show the cause of an error. The failed decision waits for it."""

_OF_CERTIFICATES = {
    **dict.fromkeys((62, 64), "is not for {host}; use a name from the certificate, or renew it"),
    **dict.fromkeys((2, 18, 19, 20, 21, 27), 'is not signed by a CA trusted here; name yours: ssl_ca_certs = "PATH"'),
    10: "has expired; renew it, or correct this machine's clock",
}
"""Explanations of OpenSSL's codes for the server's certificate (X509_V_ERR_...)."""

_NO_TLS = "it speaks no TLS; {remedy}"
_OF_HANDSHAKES = {
    **dict.fromkeys(
        ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"), _NO_TLS
    ),
    **dict.fromkeys(
        ("CERTIFICATE_REQUIRED", "ALERT_HANDSHAKE_FAILURE"),
        "it wants a client certificate; add ssl_certfile and ssl_keyfile",
    ),
    "ALERT_UNKNOWN_CA": "it refused our client certificate: it does not know the CA; correct ssl_certfile",
    "CERTIFICATE": "it refused our client certificate: {alert}; correct ssl_certfile",
    **dict.fromkeys(
        ("PROTOCOL_VERSION", "UNSUPPORTED_PROTOCOL"),
        "it speaks no version of TLS that this machine allows; let it speak TLS 1.2 or 1.3",
    ),
}
"""Explanations of OpenSSL's other reasons, by words that all its versions use. The first match counts."""


def check_files(options: Mapping[str, Any]) -> None:
    """Raises Misconfigured if a file of these options cannot be used."""
    for option in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        if options[option]:
            _check_readable(option, options[option])
    if options["ssl_ca_certs"] and not _holds_certificate(options["ssl_ca_certs"]):
        raise Misconfigured(f"ssl_ca_certs: {one_line(options['ssl_ca_certs'])} holds no PEM certificate")
    if options["ssl_certfile"]:
        _check_key(options["ssl_certfile"], options["ssl_keyfile"], options["ssl_password"])


def _check_readable(option: str, path: str) -> None:
    try:
        with open(path, "rb", opener=at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "it is no file")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise Misconfigured(f"{option}: {one_line(path)} cannot be read: {why}") from error


def _holds_certificate(path: str) -> bool:
    try:
        ssl.create_default_context(cafile=path)
    except OSError:
        return False
    return True


def _check_key(certfile: str, keyfile: str | None, password: str) -> None:
    """Raises Misconfigured if a certificate and a key cannot be used together."""
    is_encrypted = False

    def password_of_key() -> str:  # without it, OpenSSL would ask on the terminal
        nonlocal is_encrypted
        is_encrypted = True
        return password

    key = one_line(keyfile or certfile)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certfile, keyfile, password_of_key)
    except (OSError, ValueError) as error:
        if is_encrypted:
            line = f"the key in {key} is encrypted, and ssl_password is not its password"
        elif getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            line = f"the key in {key} does not belong to the certificate in {one_line(certfile)}; correct ssl_keyfile"
        elif _holds_certificate(certfile):
            line = f"ssl_keyfile: {key} holds no PEM private key"
        else:
            line = f"ssl_certfile: {one_line(certfile)} holds no PEM certificate"
        raise Misconfigured(line) from error


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
    fault = _fault_in(error, host, remedy)
    if fault is None and _answers_plainly(host, port):
        return Misconfigured(_NO_TLS.format(remedy=remedy))
    if fault is not None or isinstance(error.__context__, TimeoutError):
        return fault
    another = make()
    try:
        another.connect()
        another.can_read(TLS_WAIT_S)
    except Exception as again:  # the library's
        fault = _fault_in(again, host, remedy)
    finally:
        another.disconnect()
    return fault


def _fault_in(error: BaseException, host: str, remedy: str) -> Misconfigured | None:
    """The fault that OpenSSL reports; None if unclear."""
    cause = error.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        why = _OF_CERTIFICATES.get(cause.verify_code, f"cannot be trusted: {one_line(cause.verify_message)}")
        return Misconfigured(f"its certificate {why.format(host=host)}")
    reason = str(getattr(cause, "reason", None) or "") if isinstance(cause, ssl.SSLError) else ""
    line = next((line for words, line in _OF_HANDSHAKES.items() if words in reason), "")
    alert = reason.partition("ALERT_")[2].replace("_", " ").lower()
    return Misconfigured(line.format(remedy=remedy, alert=alert)) if line else None


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
