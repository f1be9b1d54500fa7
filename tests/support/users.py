"""Root may read and write everything, so what is forbidden is tried as somebody else."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

NOBODY = 65534


@contextmanager
def not_root() -> Iterator[None]:
    """Inside the block this process is not root. What it imports must be loaded before."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
