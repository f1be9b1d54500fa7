"""The primary of a service, as its sentinels know it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quota.ledger.redis_connection import Connections
from quota.ledger.redis_errors import ErrorReply, Failed, Lost, Misconfigured
from quota.ledger.redis_several import Several
from quota.ledger.resp import pack

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from quota.ledger.redis_connection import Line, Server

SENTINEL_TIMEOUT_S = 0.1
"""How long a sentinel's answer may take: several may be dead before a living one is found."""


class Sentinels:
    """Several sentinels, of which one that answers is enough. `primary` is what else is known of the server."""

    def __init__(self, sentinels: Sequence[Server], service: str, primary: Server) -> None:
        self._sentinels = Several(sentinels)
        self._service = service
        self._primary = primary

    def connections(self) -> Connections:
        return Connections(self._connect, self._primary.timeout_s, why=self._why, may_move=True)

    def _connect(self, ends_s: float) -> Line:
        host, port = self._sentinels.first(self._ask, ends_s, self._primary.timeout_s)
        self._primary = self._primary._replace(host=host, port=port)
        return self._primary._replace(ends_s=ends_s).connect()

    def _why(self, error: Failed, ends_s: float) -> Failed:
        return self._primary._replace(ends_s=ends_s).why(error)

    def _ask(self, sentinel: Server) -> tuple[str, int]:
        """Where the primary is, as this one knows."""
        name = f"sentinel {sentinel.host}:{sentinel.port}"
        try:
            reply = sentinel.ask(pack(("SENTINEL", "MASTER", self._service)))
        except Misconfigured as error:
            raise Misconfigured(f"{name}: {error}") from error
        except ErrorReply as error:
            raise self._told(error, name) from error
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
