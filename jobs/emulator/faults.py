"""Faults that a test or a developer queues for the emulator, and the requests that each one hits."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

# A fault is either a reply or an event on the connection.
REPLY_KINDS = frozenset({"status", "exhaust", "limit-zero"})
CONNECTION_KINDS = frozenset(
    {
        "close-before",  # the call is charged, then the connection closes before any work is done
        "close-after",  # the call is charged and done, then the connection closes without an answer
        "drop-idle",  # the call is answered, then the kept-alive connection closes without notice
        "hang",  # the call is charged and done, then silence for `ms`, then the connection closes without an answer
        "latency",  # the answer comes after `ms`
        "redirect",  # the answer redirects to the same address
        "trickle",  # the body arrives in small pieces, spread over `ms`
        "truncate",  # the connection closes in the middle of the body
    }
)
KINDS = REPLY_KINDS | CONNECTION_KINDS

# Requests that are not API calls themselves. A fault hits them only when it names them.
ENVELOPE = "batch"
CHUNK = "upload-chunk"
MONITORING = "timeSeries.list"  # a call of Cloud Monitoring, another API

_MAX_QUEUED = 1_000
_MAX_COUNT = 1_000_000
_MAX_MS = 600_000


@dataclass(frozen=True)
class Fault:
    """One fault: it lets `after` matching requests pass, then hits the next `times`.

    `method` (as in "videos.list"), `region` (the request's regionCode) and `bucket` select requests;
    None matches any. `status` is for "status" (default 503) and "redirect" (default 302), `reason`
    for "status", `ms` for "latency", "hang" and "trickle".
    """

    kind: str
    times: int = 1
    method: str | None = None
    region: str | None = None
    bucket: str | None = None
    after: int = 0
    status: int | None = None
    reason: str | None = None
    ms: int = 100

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown fault {self.kind!r}: use one of {', '.join(sorted(KINDS))}")
        _check_int("times", self.times, 1, _MAX_COUNT)
        _check_int("after", self.after, 0, _MAX_COUNT)
        _check_int("ms", self.ms, 0, _MAX_MS)
        if self.status is not None:
            least, most = (301, 308) if self.kind == "redirect" else (400, 599)
            _check_int("status", self.status, least, most)
        for name in ("method", "region", "bucket", "reason"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{name} must be text, not {value!r}")

    @classmethod
    def from_json(cls, document: object) -> "Fault":
        if not isinstance(document, Mapping) or not isinstance(document.get("kind"), str):
            raise ValueError('a fault is a JSON object with a "kind"')
        known = {field.name for field in fields(cls)}
        unknown = sorted(str(name) for name in document if name not in known)
        if unknown:
            raise ValueError(f"unknown field {unknown[0]!r}: use {', '.join(sorted(known))}")
        return cls(**document)

    def matches(self, method: str, region: str | None, bucket: str | None) -> bool:
        if method in (ENVELOPE, CHUNK, MONITORING):
            return self.method == method
        return self.method in (None, method) and self.region in (None, region) and self.bucket in (None, bucket)


def _check_int(name: str, value: Any, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name} must be a whole number from {least} to {most}, not {value!r}")


@dataclass
class _Queued:
    fault: Fault
    passes_left: int
    strikes_left: int


class FaultQueue:
    """The queued faults, oldest first. The caller holds the lock."""

    def __init__(self) -> None:
        self._queue: list[_Queued] = []

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, fault: Fault) -> None:
        if len(self._queue) >= _MAX_QUEUED:
            raise ValueError(f"{_MAX_QUEUED} faults are queued already; reset the emulator first")
        self._queue.append(_Queued(fault, fault.after, fault.times))

    def clear(self) -> None:
        self._queue.clear()

    def strike(
        self, method: str, region: str | None, bucket: str | None, *, kinds: frozenset[str] = KINDS
    ) -> Fault | None:
        """The fault that hits this request: the first one due. Matching faults that wait count it as passed."""
        struck: Fault | None = None
        for queued in list(self._queue):
            fault = queued.fault
            if fault.kind not in kinds or not fault.matches(method, region, bucket):
                continue
            if queued.passes_left:
                queued.passes_left -= 1
            elif struck is None:
                struck = fault
                queued.strikes_left -= 1
                if not queued.strikes_left:
                    self._queue.remove(queued)
        return struck
