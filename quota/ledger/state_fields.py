"""Values of a project's state as texts, as the Redis ledger stores them and as they move between ledgers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quota.common.clock import LATEST_MS, NEVER
from quota.ledger.contract import Exhaustion
from quota.ledger.unlogged import UnloggedUsage

if TYPE_CHECKING:
    from quota.ledger.entry import Id


def id_text(at: Id) -> str:
    """`MS-SEQ`, as a Redis stream names an entry."""
    return f"{at[0]}-{at[1]}"


def read_id(text: str) -> Id:
    """Raises ValueError for what `id_text` never makes of an id that an entry can have."""
    ms, seq = map(int, text.split("-"))
    if text != f"{ms}-{seq}":
        raise ValueError("no id")
    return checked_id((ms, seq))


def checked_id(at: Id) -> Id:
    """Raises ValueError for an id that no entry can have."""
    if not (0 <= at[0] < LATEST_MS and 0 <= at[1] <= NEVER):
        raise ValueError("no id, or one in the far future")
    return at


def read_ms(text: str) -> int:
    """A time. Raises ValueError for what is none."""
    ms = int(text)
    if not 0 <= ms < LATEST_MS:
        raise ValueError("a time in the far future, or before 1970")
    return ms


def checked_count(units: int) -> int:
    """A number of units or calls. Raises ValueError for what none of our programs counts to."""
    if not 0 <= units <= NEVER:
        raise ValueError("less than nothing, or more than can be counted")
    return units


def read_epoch(name: str) -> str:
    """The name of an epoch, checked. Raises ValueError."""
    if len(name) > 200 or not name.isprintable() or " " in name:
        raise ValueError("an epoch is one word")
    return name


def exhaustion_text(exhaustion: Exhaustion) -> str:
    """`UNTIL_MS SINCE_MS JSON`, of one that was lifted with a line `REOPENED_MS JSON` before it."""
    import json  # a charge begins without it: few buckets are closed

    told = {"bucket": exhaustion.bucket, "evidence": exhaustion.evidence, "reported_by": exhaustion.reported_by}
    record = f"{exhaustion.until_ms} {exhaustion.since_ms} {json.dumps(told)}"
    if not exhaustion.reopened_ms:
        return record
    return f"{exhaustion.reopened_ms} {json.dumps(exhaustion.reopened_because)}\n{record}"


def read_exhaustion(record: str) -> Exhaustion:
    """Raises ValueError for what `exhaustion_text` never makes."""
    import json

    lifted, _, record = record.rpartition("\n")
    reopened_ms, _, because = lifted.partition(" ")
    reopened = (int(reopened_ms), json.loads(because)) if lifted else (0, "")
    until_ms, since_ms, rest = record.split(" ", 2)
    data = json.loads(rest)
    texts = [data[name] for name in ("bucket", "evidence", "reported_by")]
    times = int(since_ms), int(until_ms)
    if not 0 <= reopened[0] < LATEST_MS or not isinstance(reopened[1], str):
        raise ValueError("reopened in the far future, or for a reason that is no text")
    if not all(isinstance(text, str) for text in texts) or not all(0 <= ms < LATEST_MS or ms == NEVER for ms in times):
        raise ValueError("an exhaustion of other types, or in the far future")
    return Exhaustion(texts[0], *times, *texts[1:], *reopened)


def usages_text(usages: list[UnloggedUsage]) -> str:
    """All unlogged usage of one view: `EPOCH EXPIRIES KEPT LAST EPOCH EXPIRIES ...`."""
    return " ".join([" ".join(usage.fields()) for usage in usages])


def read_usages(view: str, text: str) -> tuple[UnloggedUsage, ...]:
    """Raises ValueError for what `usages_text` never makes."""
    words = text.split(" ") if text else []
    fours = zip(words[::4], words[1::4], words[2::4], words[3::4], strict=True)
    return tuple(UnloggedUsage.from_fields(view, read_epoch(lost), *rest) for lost, *rest in fours)
