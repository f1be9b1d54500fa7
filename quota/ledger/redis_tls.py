"""TLS: encrypted connections, and one line for each way in which they can fail.

A certificate that is renewed in place is used by the next connection. This module imports `ssl`, which no url without
TLS needs.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import stat
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from quota.common.named import at_once
from quota.common.text import one_line
from quota.ledger.redis_connection import Line, raise_if_not_the_systems
from quota.ledger.redis_errors import Failed, Lost, Misconfigured, NoAnswer
from quota.ledger.resp import pack

if TYPE_CHECKING:
    from quota.ledger.redis_connection import Server, Socket

WAIT_S = 0.1
"""So long a server may take to show what is behind an error: the decision that failed waits for it."""

_NOT_TRUSTED = (2, 18, 19, 20, 21, 27)
"""OpenSSL's codes for a chain that ends in no certificate known here (X509_V_ERR_...)."""
_NOT_YET_VALID, _EXPIRED, _OTHER_HOST = (9,), (10,), (62, 64)

_WITHOUT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE")
"""How OpenSSL calls an answer that is no TLS, over its versions."""


class SecuredSocket(ssl.SSLSocket):
    """One that is closed without a word where nobody closed it, as `redis_connection.Socket`."""

    def __del__(self) -> None:
        self.close()


FILE_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


class Tls(NamedTuple):
    """What a connection is secured with. The files are PEM; without `ca_certs` the system's certificates count."""

    ca_certs: str = ""
    certfile: str = ""
    keyfile: str = ""
    key_password: str = ""
    verify: bool = True
    check_hostname: bool = True
    remedy: str = ""
    """What to do about a server that speaks no TLS."""

    def __repr__(self) -> str:
        """Without the password."""
        return "<Tls>"

    def context(self) -> ssl.SSLContext:
        """Raises Misconfigured for a file that cannot be used."""
        return _context(
            self._replace(remedy=""), tuple(_state_of(option, getattr(self, option[4:])) for option in FILE_OPTIONS)
        )

    def new_context(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.ca_certs or None)
        except ssl.SSLError as error:
            raise Misconfigured(f"ssl_ca_certs: {one_line(self.ca_certs)} holds no PEM certificate") from error
        except OSError as error:
            raise _unreadable("ssl_ca_certs", self.ca_certs, error) from error
        context.sslsocket_class = SecuredSocket
        context.check_hostname = self.verify and self.check_hostname
        context.verify_mode = ssl.CERT_REQUIRED if self.verify else ssl.CERT_NONE
        if self.certfile:
            self._load_certificate(context)
        return context

    def _load_certificate(self, context: ssl.SSLContext) -> None:
        asked = []

        def password() -> str:  # without it, OpenSSL would ask whoever sits at the terminal
            asked.append(True)
            return self.key_password

        key = one_line(self.keyfile or self.certfile)
        try:
            context.load_cert_chain(self.certfile, self.keyfile or None, password)
        except (OSError, ValueError) as error:
            if asked:
                raise Misconfigured(f"the key in {key} is encrypted, and ssl_password is not its password") from error
            if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
                raise Misconfigured(
                    f"the key in {key} is not that of the certificate in {one_line(self.certfile)}; correct ssl_keyfile"
                ) from error
            if _holds_certificate(self.certfile):
                raise Misconfigured(f"ssl_keyfile: {key} holds no PEM private key") from error
            raise Misconfigured(f"ssl_certfile: {one_line(self.certfile)} holds no PEM certificate") from error

    def line(self, connected: Socket, server: Server) -> TlsLine:
        """An encrypted connection over this one. Raises Failed."""
        made = self._wrapped(connected, server, self.context())
        try:
            left_s = server.left_s(server.connect_timeout_s + WAIT_S)
            _wait(made, max(left_s - WAIT_S, left_s / 2))  # the rest is for `_answers_plainly`
            self._shake_hands(made, server)
            return TlsLine(made)
        except BaseException:
            made.close()
            raise

    def _wrapped(self, connected: Socket, server: Server, context: ssl.SSLContext) -> ssl.SSLSocket:
        bare = socket.socket(fileno=connected.detach())
        return context.wrap_socket(bare, server_hostname=server.host, do_handshake_on_connect=False)

    def _shake_hands(self, made: ssl.SSLSocket, server: Server) -> None:
        try:
            made.do_handshake()
        except TimeoutError as error:
            if not str(error).endswith("timed out"):  # a signal handler's
                raise
            if _answers_plainly(server):
                raise self._without_tls() from error
            raise NoAnswer("no handshake") from error
        except ssl.SSLCertVerificationError as error:
            if error.verify_code in _OTHER_HOST:
                raise Misconfigured(
                    f"its certificate is for {self._names(server)}, not {server.host}; use that name, or renew it"
                ) from error
            raise fault_of(error) or Lost(str(error)) from error
        except OSError as error:
            raise_if_not_the_systems(error)
            if getattr(error, "reason", None) in _WITHOUT_TLS:
                raise self._without_tls() from error
            raise fault_of(error) or Lost(str(error)) from error

    def _without_tls(self) -> Misconfigured:
        return Misconfigured(f"it speaks no TLS; {self.remedy}")

    def _names(self, server: Server) -> str:
        """The names in the server's certificate, on a connection of its own."""
        try:
            connected = server.connected()
            with self._wrapped(connected, server, self._replace(check_hostname=False).context()) as made:
                _wait(made, server.left_s(server.connect_timeout_s))
                made.do_handshake()
                certificate: Any = made.getpeercert() or {}
        except (OSError, Failed):
            return "another host"
        names = [str(name) for kind, name in certificate.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
        return one_line(", ".join(names[:3]) + (", ..." if len(names) > 3 else "")) or "no host at all"


def _wait(made: ssl.SSLSocket, within_s: float) -> None:
    """What is done next may take so long. Raises NoAnswer where there is no time for it."""
    if within_s <= 0:
        raise NoAnswer("no time for a handshake")
    made.settimeout(within_s)


@lru_cache(maxsize=16)
def _context(tls: Tls, _files: tuple[object, ...]) -> ssl.SSLContext:
    """A context is made anew when one of its files changes: the system's certificates take 50 ms to read."""
    return tls.new_context()


def _state_of(option: str, path: str) -> object:
    """What changes with a file's content. Raises Misconfigured if it cannot be read."""
    if not path:
        return None
    try:
        with open(path, "rb", opener=at_once) as file:
            found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no file")
    except (OSError, ValueError) as error:
        raise _unreadable(option, path, error) from error
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _unreadable(option: str, path: str, error: OSError | ValueError) -> Misconfigured:
    return Misconfigured(f"{option}: {one_line(path)} cannot be read: {getattr(error, 'strerror', None) or error}")


def _holds_certificate(path: str) -> bool:
    try:
        ssl.create_default_context(cafile=path)
    except OSError:
        return False
    return True


def fault_of(error: BaseException | None) -> Misconfigured | None:
    """What OpenSSL found wrong; None for what may be anything."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _NOT_TRUSTED:
            return Misconfigured(
                'its certificate is not signed by a CA trusted here; name yours: ssl_ca_certs = "PATH"'
            )
        if error.verify_code in _EXPIRED:
            return Misconfigured("its certificate has expired; renew it, or correct this machine's clock")
        if error.verify_code in _NOT_YET_VALID:
            return Misconfigured("its certificate is not valid yet; correct the clock here, or where it was made")
        return Misconfigured(f"its certificate cannot be trusted: {one_line(error.verify_message)}")
    reason = str(getattr(error, "reason", None) or "") if isinstance(error, ssl.SSLError) else ""
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


def _answers_plainly(server: Server) -> bool:
    """Whether a server that is silent about our handshake, as Redis is, answers without one."""
    try:
        line = Line(server.connected())
    except Failed:
        return False
    try:
        line.ask(pack(("PING",)), server.left_s(WAIT_S))
    except Failed:
        return False
    finally:
        line.close()
    return True


class TlsLine(Line):
    """A connection with TLS, where what comes may be no part of a reply: a server sends tickets at any time."""

    __slots__ = ("_came", "_comes")

    def __init__(self, connected: ssl.SSLSocket) -> None:
        super().__init__(connected)
        self._comes = self.readable
        self.readable = self._is_readable
        self._came: bytes | Failed = b""
        """What was read to see whether it is part of a reply, or how that failed."""

    def _is_readable(self, within_ms: float) -> bool:
        ends_s = time.monotonic() + within_ms / 1000
        while not self._came and self._comes(max(ends_s - time.monotonic(), 0) * 1000):
            try:
                self._came = self._receive()
            except Failed as error:
                self._came = error
        return bool(self._came)

    def send(self, words: bytes, within_s: float) -> None:
        connected: Any = self._socket
        try:
            connected.settimeout(within_s)
            connected.sendall(words)
            connected.settimeout(0)
        except TimeoutError as error:
            if str(error) != "The write operation timed out":  # a signal handler's
                raise
            raise NoAnswer("not all could be sent") from error
        except OSError as error:
            self._send_failed(error)

    def send_some(self, words: bytes | memoryview) -> int:
        try:
            return super().send_some(words)
        except Lost as error:
            if isinstance(error.__cause__, (ssl.SSLWantWriteError, ssl.SSLWantReadError)):
                return 0
            raise

    def _receive(self) -> bytes:
        came, self._came = self._came, b""
        if isinstance(came, Failed):
            raise came
        if came:
            return came
        try:
            return super()._receive()
        except Lost as error:
            if isinstance(error.__cause__, ssl.SSLWantReadError):
                return b""
            raise fault_of(error.__cause__) or error from error.__cause__


# -- what is behind a connection that ended without a word -------------------------------------------------------------


def why_secured(server: Server, error: Failed) -> Failed:
    """A server may end the connection while we ask, because of our certificate: asked nothing, it says so."""
    try:
        assert server.secured is not None  # noqa: S101  # see `client_maker`
        line = server.secured(server.connected(), server)
    except Failed as found:
        return found
    try:
        while line.readable(server.left_s(WAIT_S) * 1000):
            line.receive_some()
    except Misconfigured as found:
        return found
    except Failed:
        pass
    finally:
        line.close()
    return error


def why_plain(server: Server, error: Failed, remedy: str) -> Failed:
    """A server that speaks TLS ends a connection that does not."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        made = Tls()._wrapped(server.connected(), server, context)
    except Failed:
        return error
    try:
        _wait(made, server.left_s(WAIT_S))
        made.do_handshake()
    except NoAnswer:
        return error
    except TimeoutError as found:
        if not str(found).endswith("timed out"):  # a signal handler's
            raise
        return error
    except OSError as found:
        raise_if_not_the_systems(found)
        if "ALERT" not in str(getattr(found, "reason", None)):
            return error
    finally:
        made.close()
    return Misconfigured(f"it speaks TLS; {remedy}")
