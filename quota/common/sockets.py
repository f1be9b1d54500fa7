"""What a socket says before anything is sent on it."""

from __future__ import annotations

import select
from typing import Any


def has_hung_up(sock: Any) -> bool:
    """Whether the other side of an idle connection has closed it: it is readable, although nothing was asked. What is
    sent on it would not arrive."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(0))
