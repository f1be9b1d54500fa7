"""TLS: one line for each way in which an encrypted connection can fail.

    check_files       the certificates and the key that a url names, before anybody connects
    behind_secured    what is behind a failure on a connection with TLS
    behind_plain      what is behind one without: the server may speak TLS

redis-py reads the files for each connection, so one that is renewed in place is used by the next.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import stat
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from quota.common.named import at_once
from quota.common.text import one_line
from quota.ledger.redis_errors import Misconfigured

if TYPE_CHECKING:
    import redis

WAIT_S = 0.1
"""How long a server may take to show what is behind an error: the decision that failed waits for it."""

_OTHER_HOST, _UNKNOWN_CA = (62, 64), 'is not signed by a CA trusted here; name yours: ssl_ca_certs = "PATH"'
_UNTRUSTED = {
    **dict.fromkeys((2, 18, 19, 20, 21, 27), _UNKNOWN_CA),
    9: "is not valid yet; correct the clock here, or where it was made",
    10: "has expired; renew it, or correct this machine's clock",
}
"""What OpenSSL's codes say of a certificate (X509_V_ERR_...)."""

_WITHOUT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE")
"""How OpenSSL calls an answer that is no TLS, over its versions."""

_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


def check_files(options: Mapping[str, Any]) -> None:
    """Raises Misconfigured for a file of these options that cannot be used."""
    for option in _FILES:
        if options[option]:
            _check_readable(option, options[option])
    try:
        context = ssl.create_default_context(cafile=options["ssl_ca_certs"])
    except OSError as error:
        raise Misconfigured(f"ssl_ca_certs: {one_line(options['ssl_ca_certs'])} holds no PEM certificate") from error
    if options["ssl_certfile"]:
        _check_certificate(context, options)


def _check_readable(option: str, path: str) -> None:
    try:
        with open(path, "rb", opener=at_once) as file:
            found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no file")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise Misconfigured(f"{option}: {one_line(path)} cannot be read: {why}") from error


def _check_certificate(context: ssl.SSLContext, options: Mapping[str, Any]) -> None:
    certfile, keyfile = options["ssl_certfile"], options["ssl_keyfile"]
    asked = []

    def password() -> str:  # without it, OpenSSL would ask whoever sits at the terminal
        asked.append(True)
        return str(options["ssl_password"])

    key = one_line(keyfile or certfile)
    try:
        context.load_cert_chain(certfile, keyfile, password)
    except (OSError, ValueError) as error:
        if asked:
            raise Misconfigured(f"the key in {key} is encrypted, and ssl_password is not its password") from error
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            raise Misconfigured(
                f"the key in {key} is not that of the certificate in {one_line(certfile)}; correct ssl_keyfile"
            ) from error
        if _holds_certificate(certfile):
            raise Misconfigured(f"ssl_keyfile: {key} holds no PEM private key") from error
        raise Misconfigured(f"ssl_certfile: {one_line(certfile)} holds no PEM certificate") from error


def _holds_certificate(path: str) -> bool:
    try:
        ssl.create_default_context(cafile=path)
    except OSError:
        return False
    return True


# -- what is behind a failure ------------------------------------------------------------------------------------------


def behind_secured(
    error: BaseException,
    make: Callable[[], redis.Connection],
    host: str,
    port: int,
    options: Mapping[str, Any],
    remedy: str,
) -> Misconfigured | None:
    """What is behind a failure on a connection with TLS; None for what may be anything. A server may end the connection
    while we ask, because of our certificate: on another one, of `make`, where it is asked nothing, it says so."""
    try:
        check_files(options)
    except Misconfigured as gone:  # it was there when the url was read
        return gone
    found = _found_in(error, host, remedy)
    if found is not None:
        return found
    if _answers_plainly(host, port):  # Redis is silent about a handshake, or ends the connection
        return Misconfigured(f"it speaks no TLS; {remedy}")
    if isinstance(error.__context__, TimeoutError):
        return None
    another = make()
    try:
        another.connect()
        another.can_read(WAIT_S)
    except Exception as again:  # the library's
        found = _found_in(again, host, remedy)
    finally:
        another.disconnect()
    return found


def _found_in(error: BaseException, host: str, remedy: str) -> Misconfigured | None:
    cause = error.__context__
    if not isinstance(cause, ssl.SSLError):
        return None
    if getattr(cause, "reason", None) in _WITHOUT_TLS:
        return Misconfigured(f"it speaks no TLS; {remedy}")
    return fault_of(cause, host)


def behind_plain(host: str, port: int, remedy: str) -> Misconfigured | None:
    """The same for a connection without TLS."""
    try:
        speaks_tls = bool(ssl.get_server_certificate((host, port), timeout=WAIT_S))
    except ssl.SSLError as error:
        speaks_tls = "ALERT" in str(error.reason)
    except (OSError, ValueError):
        return None
    return Misconfigured(f"it speaks TLS; {remedy}") if speaks_tls else None


def _answers_plainly(host: str, port: int) -> bool:
    """Whether a server that is silent about our handshake, as Redis is, answers without one."""
    try:
        with socket.create_connection((host, port), WAIT_S) as bare:
            bare.sendall(b"*1\r\n$4\r\nPING\r\n")
            return bare.recv(1) in (b"+", b"-")
    except (OSError, ValueError):
        return False


def fault_of(error: ssl.SSLError, host: str) -> Misconfigured | None:
    """What OpenSSL found wrong; None for what may be anything."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _OTHER_HOST:
            return Misconfigured(f"its certificate is not for {host}; use a name that it is for, or renew it")
        why = _UNTRUSTED.get(error.verify_code, f"cannot be trusted: {one_line(error.verify_message)}")
        return Misconfigured(f"its certificate {why}")
    reason = str(error.reason or "")
    if "CERTIFICATE_REQUIRED" in reason or "ALERT_HANDSHAKE_FAILURE" in reason:
        return Misconfigured("it wants a client certificate; add ssl_certfile and ssl_keyfile")
    refused = next((why for alert, why in _REFUSED.items() if f"ALERT_{alert}" in reason), "")
    if refused:
        return Misconfigured(f"it refused our client certificate: {refused}; correct ssl_certfile")
    if "PROTOCOL" in reason and ("VERSION" in reason or "UNSUPPORTED" in reason):
        return Misconfigured("it speaks no version of TLS that this machine allows; let it speak TLS 1.2 or 1.3")
    return None


_REFUSED = {
    "UNKNOWN_CA": "it does not know the CA",
    "CERTIFICATE_EXPIRED": "it has expired",
    "CERTIFICATE_REVOKED": "it is revoked",
    "BAD_CERTIFICATE": "it cannot be used",
    "CERTIFICATE_UNKNOWN": "it cannot be used",
    "UNSUPPORTED_CERTIFICATE": "it is not for clients",
    "DECRYPT_ERROR": "it cannot be used",
    "ACCESS_DENIED": "access denied",
}
