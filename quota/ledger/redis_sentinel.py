"""The primary of a service, as its sentinels know it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quota.ledger.redis_connection import Connections
from quota.ledger.redis_errors import ErrorReply, Failed, Lost, Misconfigured

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from quota.ledger.redis_connection import Line, Server

SENTINEL_TIMEOUT_S = 0.1
"""How long a sentinel's answer may take: several may be dead before a living one is found."""


class Sentinels:
    """Several sentinels, of which one that answers is enough. `primary` is what else is known of the server."""

    def __init__(self, sentinels: Sequence[Server], service: str, primary: Server) -> None:
        self._sentinels = list(sentinels)
        self._service = service
        self._primary = primary

    def connections(self) -> Connections:
        return Connections(self._connect, self._primary.timeout_s, why=self._why, may_move=True)

    def _connect(self) -> Line:
        host, port = self._address()
        primary = self._primary = self._primary._replace(host=host, port=port)
        return primary.connect()

    def _why(self, error: Failed) -> Failed:
        return self._primary.why(error)

    def _address(self) -> tuple[str, int]:
        """Where the primary is. Raises the error that says most."""
        failed: Failed = Lost("no sentinel")
        for sentinel in list(self._sentinels):
            try:
                address = self._ask(sentinel)
            except Failed as error:
                if isinstance(failed, Lost):
                    failed = error
                continue
            if sentinel is not self._sentinels[0]:  # the others are asked after it from now on
                self._sentinels = [sentinel, *(one for one in self._sentinels if one is not sentinel)]
            return address
        raise failed

    def _ask(self, sentinel: Server) -> tuple[str, int]:
        connections, name = sentinel.connections(), f"sentinel {sentinel.host}:{sentinel.port}"
        try:
            reply = connections.execute_command("SENTINEL", "MASTER", self._service)
        except Misconfigured as error:
            raise Misconfigured(f"{name}: {error}") from error
        except ErrorReply as error:
            raise self._told(error, name) from error
        finally:
            connections.close()
        return _place_in(reply)

    def _told(self, error: ErrorReply, name: str) -> Failed:
        if error.code == "NOAUTH":
            return Misconfigured(f"{name} wants a password; add sentinel_password")
        if error.asks_for_password:
            return Misconfigured(f"{name} refused the password; correct sentinel_username and sentinel_password")
        if "No such master" in str(error):
            return Misconfigured(f"{name} knows no service {self._service!r}; write the name after `sentinel monitor`")
        return error


def _place_in(reply: Any) -> tuple[str, int]:
    known = dict(zip(reply[::2], reply[1::2], strict=False)) if isinstance(reply, list) else {}
    flags = str(known.get("flags", "")).split(",")
    if "master" not in flags or "s_down" in flags or "o_down" in flags:
        raise Lost("its sentinels see no primary")
    try:
        return str(known["ip"]), int(known["port"])
    except (KeyError, ValueError):
        raise Lost("its sentinels see no primary") from None
