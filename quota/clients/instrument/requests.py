"""requests leaves through urllib3. Here a refusal only becomes the cause of the error that requests makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from quota.clients.instrument.patches import Seam
from quota.errors import Refused


def seams() -> Iterator[Seam]:
    def telling(send: Callable[..., Any]) -> Callable[..., Any]:
        def told(adapter: Any, *args: Any, **options: Any) -> Any:
            try:
                return send(adapter, *args, **options)
            except OSError as error:  # what requests raises is one
                refusal = getattr(error.args[0] if error.args else None, "reason", None)
                if isinstance(refusal, Refused):
                    raise error from refusal
                raise

        return told

    yield Seam("requests.adapters", "HTTPAdapter", "send", ("request",), telling)
