"""Values of a project's state as texts, as the Redis ledger stores them and as they move between ledgers."""

from __future__ import annotations

import json
from collections.abc import Sequence

from quota.common.clock import LATEST_MS, NEVER
from quota.ledger.contract import Exhaustion, Repair
from quota.ledger.entry import Id
from quota.ledger.history import History, HourOfSpending, RefusalCount, RefusedSum, RunningSum, read_cells
from quota.ledger.unlogged import UnloggedUsage
from quota.terms.limits import HOUR_MS

HISTORY_FIELDS = ("rolled_up", "whole_after_ms", "gap", "sums_after", "sums", "refused_sums")
"""The fields of the history that are read beside its hours; `lua/roll_up.lua` and `lua/add_refusals.lua` describe
them."""


def id_text(at: Id) -> str:
    """`MS-SEQ`, as a Redis stream names an entry."""
    return f"{at[0]}-{at[1]}"


def read_id(text: str) -> Id:
    """Raises ValueError for what `id_text` never makes of an id that an entry can have."""
    ms, seq = map(int, text.split("-"))
    if text != f"{ms}-{seq}":
        raise ValueError("no id")
    return checked_id((ms, seq))


def is_id(text: str) -> bool:
    """Whether it may be the id of a charge."""
    try:
        read_id(text)
    except ValueError:
        return False
    return True


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


def leading_ms(text: str) -> int:
    """The time with which a text begins, as that of a claim does. Raises ValueError."""
    return int(text.partition(" ")[0])


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
    told = {"bucket": exhaustion.bucket, "evidence": exhaustion.evidence, "reported_by": exhaustion.reported_by}
    record = f"{exhaustion.until_ms} {exhaustion.since_ms} {json.dumps(told)}"
    if not exhaustion.reopened_ms:
        return record
    return f"{exhaustion.reopened_ms} {json.dumps(exhaustion.reopened_because)}\n{record}"


def read_exhaustion(record: str) -> Exhaustion:
    """Raises ValueError for what `exhaustion_text` never makes."""
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
    if not text:
        return ()
    words = text.split(" ")
    fours = zip(words[::4], words[1::4], words[2::4], words[3::4], strict=True)
    return tuple(UnloggedUsage.from_fields(view, read_epoch(lost), *rest) for lost, *rest in fours)


def repair_text(repair: Repair) -> str:
    """`NEWEST BEGUN_MS AT_MS THROUGH`."""
    return f"{id_text(repair.newest)} {repair.begun_ms} {repair.at_ms} {id_text(repair.through)}"


def read_repair(line: str) -> Repair:
    newest, begun_ms, at_ms, through = line.split(" ")
    return Repair(read_id(newest), read_ms(begun_ms), read_ms(at_ms), read_id(through))


def history_of(hours: Sequence[str], reply: Sequence[str | None], formerly: str | None) -> History:
    """`formerly` is the state's copy of `rolled_up`: it says what was in the sums of a history that is lost."""
    rolled_up, whole_after_ms, gap, summed_after, sums, refused_sums = reply[: len(HISTORY_FIELDS)]
    texts = reply[len(HISTORY_FIELDS) :]
    spent, refused = texts[: len(hours)], texts[len(hours) :]
    gap_from, gap_to = gap.split(" ") if gap else ("", "")
    return History(
        rolled_up=read_id(rolled_up or "0-0"),
        whole_after_ms=read_ms(whole_after_ms or "0"),
        gap=(read_ms(gap_from), read_ms(gap_to)) if gap else None,
        summed_after=read_id((summed_after if rolled_up else formerly) or "0-0"),
        hours=tuple(
            HourOfSpending(int(hour) * HOUR_MS, names[0], names[1], names[2], names[3], *numbers)
            for hour, text in zip(hours, spent, strict=True)
            for names, numbers in read_cells(text or "", 4, 2)
        ),
        sums=tuple(RunningSum(names[0], names[1], *numbers) for names, numbers in read_cells(sums or "", 2, 3)),
        refused=tuple(
            RefusalCount(int(hour) * HOUR_MS, names[0], names[1], names[2], *numbers)
            for hour, text in zip(hours, refused, strict=True)
            for names, numbers in read_cells(text or "", 3, 1)
        ),
        refused_sums=tuple(
            RefusedSum(names[0], names[1], names[2], *numbers)
            for names, numbers in read_cells(refused_sums or "", 3, 1)
        ),
    )
