"""TLS: one line for each fault of an encrypted connection that an operator can fix.

    check_files       checks the certificates and the key of a url, before anything connects
    behind_secured    finds the cause of a failure on a connection with TLS
    behind_plain      finds the cause of a failure without TLS: the server may speak TLS

redis-py reads the files for each connection, so the next connection uses a file that was renewed in place.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import stat
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from quota.common.files import at_once
from quota.common.text import one_line
from quota.ledger.redis_errors import Misconfigured

if TYPE_CHECKING:
    import redis

WAIT_S = 0.1
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


# -- the causes of failures ------------------------------------------------------------------------------------------


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
        another.can_read(WAIT_S)
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
        speaks_tls = bool(ssl.get_server_certificate((host, port), timeout=WAIT_S))
    except ssl.SSLError as error:
        speaks_tls = "ALERT" in str(error.reason)
    except (OSError, ValueError):
        return None
    return Misconfigured(f"it speaks TLS; {remedy}") if speaks_tls else None


def _answers_plainly(host: str, port: int) -> bool:
    """Whether the server answers without TLS. Redis itself is silent after a handshake, or closes the connection."""
    try:
        with socket.create_connection((host, port), WAIT_S) as bare:
            bare.sendall(b"*1\r\n$4\r\nPING\r\n")
            return bare.recv(1) in (b"+", b"-")
    except (OSError, ValueError):
        return False
