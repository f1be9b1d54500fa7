"""What happened, for whoever runs it: warnings that begin with a stable name.

For modules that every cold start imports. What logs is imported only when there is something to say.
"""

from __future__ import annotations


def warn(message: str, *values: object) -> None:
    """A warning of the logger `quota`; `message` is a format for `values`, as in `logging`."""
    import logging

    logging.getLogger("quota").warning(message, *values)
