"""What a machine saw before its ledger was repaired after a wrong clock, as it would have seen it since (L26). Pure.

A repair gives entries of the future other ids. What was seen under an old id is not lost, although the log lacks that
id; nor may it count until a time that a wrong clock has made. The repair's mark tells it apart:

    seen up to an id that the log then had       the charges are all there, up to the repair's last id
    seen beyond it                               the log did not have them all: they count for a window after the
                                                 repair, or after they were seen in a copy of before it
    seen after it, and a copy of before it was   no date there can be compared: all of it counts, beside the copy. Nor
    put back then                                once that is repaired, too: it lacks the mark of the first repair
    dated far ahead of now, and no mark          a clock is wrong, or was, and nobody has said that it is right again

An epoch tells whether what was seen in it was seen before a repair: it ends in the time of the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quota.common.clock import NEVER
from quota.ledger.contract import MAX_REPAIR_MS, MAX_REPAIRS, RETENTION_SLACK_MS, Repair, repaired_ms_of, root_of
from quota.ledger.entry import Id
from quota.ledger.unlogged import UnloggedUsage
from quota.recovery.observations import SeenAheadError, ViewObservation, Watermark
from quota.terms.limits import longest_ms_of


def concerns(watermarks: Sequence[Watermark], epoch: str, now_ms: int) -> bool:
    """Whether a repair lies between anything that was seen and a ledger that is in `epoch` now, or one is needed."""
    repaired_ms = repaired_ms_of(epoch)
    for watermark in watermarks:
        epochs = {watermark.epoch, *(one.epoch for one in watermark.observations)}
        if any(repaired_ms_of(one) != repaired_ms for one in epochs):
            return True
        if any(one.last[0] > now_ms + RETENTION_SLACK_MS for one in watermark.observations):
            return True
        if any(_counts_too_long(usage, now_ms) for usage in watermark.usages):
            return True
    return False


def as_repaired(
    watermarks: Sequence[Watermark], repairs: Sequence[Repair], epoch: str, last: Id, now_ms: int
) -> list[Watermark]:
    """The watermarks as they would be if they had been made after the `repairs` of a ledger that is in `epoch` now, its
    newest entry `last`. Raises SeenAheadError.
    """
    root = root_of(epoch)
    return [
        watermark._replace(
            path=(),
            observations=tuple(
                _observation(one, watermark.at_ms, repairs, epoch, last, now_ms) for one in watermark.observations
            ),
            usages=tuple(_usage(one, watermark, repairs, root, now_ms) for one in watermark.usages),
        )
        for watermark in watermarks
    ]


def _observation(
    one: ViewObservation, seen_ms: int, repairs: Sequence[Repair], epoch: str, last: Id, now_ms: int
) -> ViewObservation:
    here = root_of(one.epoch) == root_of(epoch)
    later = [*_repairs_after(one.epoch, repairs)] if here else []
    is_marked = not here or _is_marked(repaired_ms_of(one.epoch), repairs)
    if later and not is_marked:
        return _counting_since(one, now_ms)
    for repair in later:
        if one.last[0] > repair.begun_ms:
            if one.last > repair.newest:
                return _counting_since(one, _known_by_ms(seen_ms, repair, now_ms))
            until_ms = _end_ms(repair) + longest_ms_of(one.view)
            since_ms = min(one.since_ms, repair.begun_ms - 1)
            one = one._replace(since_ms=since_ms, last=repair.through, until_ms=until_ms, slices=())
    if not here and repairs and one.last[0] > now_ms:
        return _counting_since(one, max(_end_ms(repairs[-1]), now_ms))
    if one.last[0] <= now_ms + RETENTION_SLACK_MS or (here and one.last <= last):
        return one if is_marked else _counting_since(one, now_ms)
    raise SeenAheadError(one.last[0])


def _is_marked(repaired_ms: int, repairs: Sequence[Repair]) -> bool:
    """Whether the ledger went through the repair of that time, as far as its marks go back. Else a copy of before it
    was put back, and what that has under other dates would pass for what was seen since."""
    marked = [repair.at_ms for repair in repairs]
    return not repaired_ms or repaired_ms in marked or (len(marked) == MAX_REPAIRS and repaired_ms < marked[0])


def _known_by_ms(seen_ms: int, repair: Repair, now_ms: int) -> int:
    """By when all was charged that a repair did not find: when it ended, or, in a copy of before it, when that was
    seen."""
    end_ms = _end_ms(repair)
    return seen_ms if end_ms < seen_ms <= now_ms else end_ms


def _counting_since(one: ViewObservation, at_ms: int) -> ViewObservation:
    """The observation as of charges made by that time, none of them in any log."""
    if one.last[0] <= at_ms:
        return one._replace(since_ms=one.last[0])
    until_ms = min(one.until_ms, at_ms + longest_ms_of(one.view))
    return one._replace(since_ms=at_ms, last=(at_ms, NEVER), until_ms=until_ms, slices=())


def _usage(
    one: UnloggedUsage, watermark: Watermark, repairs: Sequence[Repair], root: str, now_ms: int
) -> UnloggedUsage:
    """What counted in the ledger that the process saw: the repair shortened it there, and shortens it here alike."""
    here = watermark.root == root
    if here:
        # An old copy was put back since, if a repair ended before this was seen: it says nothing of what came later.
        ends_ms = map(_end_ms, _repairs_after(watermark.epoch, repairs))
        at_ms = next((ms for ms in ends_ms if not ms < watermark.at_ms <= now_ms), None)
    else:
        at_ms = max(_end_ms(repairs[-1]), now_ms) if repairs else None
    if at_ms is None and _counts_too_long(one, now_ms):
        raise SeenAheadError(one.until_ms)
    return one if at_ms is None else one.until(at_ms + longest_ms_of(one.view))


def _counts_too_long(usage: UnloggedUsage, now_ms: int) -> bool:
    """Whether it counts for longer than a charge could that a clock has dated a long day ahead."""
    return usage.units_at(now_ms + longest_ms_of(usage.view) + RETENTION_SLACK_MS) > 0


def _end_ms(repair: Repair) -> int:
    """When a repair had ended, by the clock that it went by."""
    return min(repair.at_ms, repair.begun_ms + MAX_REPAIR_MS)


def _repairs_after(epoch: str, repairs: Sequence[Repair]) -> Iterator[Repair]:
    """The repairs after an epoch of the same log, oldest first."""
    repaired_ms = repaired_ms_of(epoch)
    return (repair for repair in repairs if repair.at_ms > repaired_ms)
