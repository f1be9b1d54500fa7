"""Resumable uploads: one charged call opens a session, then uncharged chunks fill it.

The emulator keeps only the number of bytes that arrived, not the bytes.
"""

import re
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass

from quota.jobs.emulator import replies
from quota.jobs.emulator.api import Call
from quota.jobs.emulator.replies import Json, Rejected, Reply

_MAX_SESSIONS = 1_000
_RANGE = re.compile(r"bytes (?:([0-9]{1,15})-([0-9]{1,15})|\*)/([0-9]{1,15}|\*)")


@dataclass
class _Session:
    call: Call
    received_bytes: int = 0
    made: Json | None = None


class Uploads:
    """The open sessions by id. When there are too many, the oldest is dropped."""

    def __init__(self, store: Callable[[Call], Json]) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}

    def open(self, call: Call) -> str:
        """Open a session for `call` and return its id."""
        session_id = secrets.token_urlsafe(24)
        with self._lock:
            self._sessions[session_id] = _Session(call)
            if len(self._sessions) > _MAX_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
        return session_id

    def feed(self, session_id: str, content_range: str | None, length_bytes: int) -> Reply:
        """Take one chunk. The reply is 308 with the range received so far, or the new resource once all has arrived."""
        with self._lock:
            session = self._sessions.get(session_id)
            if session is None:
                raise Rejected(replies.error("method_not_found"))
            if session.made is None and self._complete(session, content_range, length_bytes):
                session.made = self._store(session.call)
            if session.made is not None:
                return Reply(200, session.made)
            if not session.received_bytes:
                return Reply(308)
            return Reply(308, headers=(("Range", f"bytes=0-{session.received_bytes - 1}"),))

    def _complete(self, session: _Session, content_range: str | None, length_bytes: int) -> bool:
        if content_range is None:  # the whole upload at once, or an empty request
            return True
        found = _RANGE.fullmatch(content_range)
        if found is None:
            raise Rejected(replies.bad_request("Failed to parse Content-Range header."))
        first, last, total = found.groups()
        if first is not None:
            if int(last) - int(first) + 1 != length_bytes:
                raise Rejected(replies.bad_request("Content-Range and Content-Length disagree."))
            # A chunk that does not continue the upload changes nothing. The reply's Range tells the
            # client where to continue.
            if int(first) == session.received_bytes:
                session.received_bytes += length_bytes
        return total != "*" and session.received_bytes >= int(total)
