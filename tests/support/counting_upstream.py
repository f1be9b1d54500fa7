"""An upstream that counts by the token and says in each answer what remains, for whoever spends there."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from support.plain_http import Answer, Arrived


@dataclass
class Counting:
    """Grants `limit` units until `reset_s`, as GitHub does: an answer for `PlainServer`. `said` are bodies by path."""

    limit: int = 5_000
    used: int = 0
    reset_s: int = field(default_factory=lambda: int(time.time()) + 1_800)
    said: dict[str, bytes] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, request: Arrived) -> Answer:
        if request.verb == "CONNECT":
            return Answer()
        with self._lock:
            left = max(0, self.limit - self.used)
            self.used = min(self.limit, self.used + 1)
            headers = {
                "X-RateLimit-Limit": str(self.limit),
                "X-RateLimit-Remaining": str(max(0, left - 1)),
                "X-RateLimit-Reset": str(self.reset_s),
                "X-RateLimit-Resource": "core",
            }
        if not left:
            return Answer(403, b'{"message": "API rate limit exceeded for user ID 1."}', headers)
        return Answer(200, self.said.get(request.target.partition("?")[0], b"{}"), headers)
