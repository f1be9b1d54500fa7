"""What a process keeps of a ledger, and the arithmetic on it. Pure.

    ViewObservation   how much one view counted when it was seen last, and which part of the log that is
    SlicedUsage       how much of a sliding view is in which slice of time (quota.recovery.slices)
    Watermark         everything that one process knows: the content of its slot (quota.recovery.watermark_file)

For example a view of 24 h that is seen at 15:15, when its newest entry was charged at 15:15:

    ViewObservation   7,100 units of the log, after 15:15 yesterday, up to the entry of 15:15. All have expired at 15:15
                      tomorrow
    SlicedUsage       known up to 15:00: 3,000 units expire at 09:00 tomorrow, 2,000 at 12:00, 1,500 at 15:00
    expiries          both together: 3,000 until 09:00, 2,000 until 12:00, 1,500 until 15:00. Of the other 600 only the
                      sum is known: until 15:15

A log loses its newest entries, or all. If 5,000 of the 7,100 units are still there, the missing 2,100 are those that
expire last: 1,500 at 15:00 and 600 at 15:15.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from quota.ledger.contract import LimitCheck, root_of
from quota.ledger.entry import Id
from quota.ledger.state_fields import checked_count, checked_id, read_id, read_ms
from quota.ledger.unlogged import (
    CARRIED,
    Expiries,
    UnloggedUsage,
    expiries_text,
    is_carry,
    newest_expiries,
    read_expiries,
)
from quota.terms.limits import Edges, longest_ms_of, selector_of

if TYPE_CHECKING:
    from quota.recovery.watermark_file import Head


class SeenAheadError(Exception):
    """This machine saw charges dated far ahead of now, at `seen_ms`, which the ledger lacks and no repair explains."""

    def __init__(self, seen_ms: int) -> None:
        super().__init__(seen_ms)
        self.seen_ms = seen_ms


class ViewObservation(NamedTuple):
    """What one view counted of the log in one epoch, without unlogged usage.

    `units` is the sum of the entries after `since_ms`, up to the entry `last`. All of them have expired at `until_ms`.
    `slices` says of a part of the units when they expire before that.
    """

    view: str
    epoch: str
    units: int
    since_ms: int
    last: Id
    until_ms: int
    slices: Expiries = ()

    @property
    def expiries(self) -> Expiries:
        """All units, each with the time until which it counts: the last entry's, if it is in no slice."""
        rest = self.units - sum(units for units, _ in self.slices)
        return (*self.slices, (rest, self.until_ms)) if rest > 0 else newest_expiries(self.slices, self.units)


class SlicedUsage(NamedTuple):
    """The slices of a view as far as the log was read, up to the entry `through`, without empty ones: the units of
    each, and when the whole slice has left the window. `(ms, NEVER)` ends a slice; any other entry lies in one of which
    only a part was read. The units of the other part count as long as the last entry, like all that was not read.
    """

    through: Id
    expiries: Expiries


Span = int | Edges
"""A window as a decision saw it: its length in ms, or a calendar's edges."""


class Watermark(NamedTuple):
    """What one process knew at `at_ms`, by the ledger's clock, of a ledger that was in `epoch`.

    `label` says where that ledger was, and `configuration` for whom, for people. Observations and losses of other roots
    stay here for the day on which their log comes back: a move back, or a copy. What counts of them in this ledger is
    among the usages too, as carries.
    """

    epoch: str
    at_ms: int
    observations: tuple[ViewObservation, ...]
    usages: tuple[UnloggedUsage, ...]
    sliced: Mapping[str, SlicedUsage]
    label: str = ""
    configuration: str = ""
    path: tuple[Id, ...] = ()
    """Of the log's newest entries as the process saw them one after the other in this epoch, those that it kept. Known
    to the process itself only."""

    @property
    def root(self) -> str:
        return root_of(self.epoch)

    def counted(self) -> list[UnloggedUsage]:
        """The usages that its ledger counts: what that lost itself, and carries of other logs."""
        return [usage for usage in self.usages if is_carry(usage.epoch) or root_of(usage.epoch) == self.root]

    def told_of(self, root: str, since_ms: int) -> set[tuple[str, Id]]:
        """Of the log with this root: its epochs, each with the newest entry that the process saw or was told of."""
        known = [(one.epoch, one.last) for one in self.observations if one.until_ms > since_ms]
        known += [
            (usage.epoch.removesuffix(CARRIED), usage.last)
            for usage in self.usages
            if is_carry(usage.epoch) and usage.until_ms > since_ms
        ]
        return {(epoch, last) for epoch, last in known if root_of(epoch) == root}

    def to_text(self, head_views: Sequence[tuple[str, Span]]) -> str:
        """The text of a slot: the views whose units stand in its head, then everything else.

        A line begins with the word that says what it is. Slices come last: without them, units only count longer.
        """
        lines = [f"epoch\t{self.epoch}\t{self.label}\t{self.configuration}"]
        lines += [f"head\t{view}\t{_span_text(span)}" for view, span in head_views]
        lines += [f"observed\t{_observation_text(observation)}" for observation in self.observations]
        lines += ["\t".join(("unlogged", usage.view, *usage.fields())) for usage in self.usages]
        lines += [
            f"slices\t{view}\t{sliced.through[0]}\t{sliced.through[1]}\t{expiries_text(sliced.expiries)}"
            for view, sliced in self.sliced.items()
        ]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_slot(cls, head: Head, text: str) -> Watermark | None:
        """The watermark that was written as this head and text; None for what was never written so."""
        first, *lines = text.removesuffix("\n").split("\n")
        observations, usages, sliced = [], [], {}
        numbers = map(checked_count, head.numbers)
        try:
            checked_id(head.newest)
            checked_id((head.at_ms, 0))
            _, epoch, label, configuration = first.split("\t")
            for line in lines:
                kind, view, *fields = line.split("\t")
                selector_of(view)
                if kind == "head":
                    (span,) = map(_span_from, fields)
                    observations.append(observation_of(view, span, epoch, next(numbers), head.newest, head.at_ms))
                elif kind == "observed":
                    observations.append(_observation_from(view, *fields))
                elif kind == "unlogged":
                    usages.append(UnloggedUsage.from_fields(view, *fields))
                else:
                    ms, seq, expiries = fields
                    through = read_id(f"{max(0, int(ms))}-{seq}")  # of an empty log, the slice before 1970
                    sliced[view] = SlicedUsage(through, _expiries_from(expiries))
        except (ValueError, TypeError, IndexError, StopIteration):
            return None
        return cls(epoch, head.at_ms, tuple(observations), tuple(usages), sliced, label, configuration)


def _observation_text(o: ViewObservation) -> str:
    numbers = f"{o.units}\t{o.since_ms}\t{o.last[0]}\t{o.last[1]}\t{o.until_ms}"
    return f"{o.view}\t{o.epoch}\t{numbers}\t{expiries_text(o.slices)}"


def _observation_from(
    view: str, epoch: str, units: str, since_ms: str, last_ms: str, last_seq: str, until_ms: str, slices: str
) -> ViewObservation:
    last = read_id(f"{last_ms}-{last_seq}")
    since, until = int(since_ms), read_ms(until_ms)
    counted = checked_count(int(units))
    if counted and since > until:  # of nothing, where the newest entry is two windows old or there is none
        raise ValueError("it begins after all of it has expired")
    return ViewObservation(view, epoch, counted, since, last, until, _expiries_from(slices))


def _span_text(span: Span) -> str:
    return str(span) if isinstance(span, int) else f"{span[0]} {span[1]} {span[2]}"


@lru_cache(maxsize=64)
def _span_from(text: str) -> Span:
    """Remembered: many projects have the same windows."""
    edges = tuple(map(read_ms, text.split(" ")))
    if len(edges) not in (1, 3) or list(edges) != sorted(edges):
        raise ValueError("no window, or edges that do not follow each other")
    return edges[0] if len(edges) == 1 else (edges[0], edges[1], edges[2])


def _expiries_from(text: str) -> Expiries:
    return read_expiries(text) if text else ()


def observation_of(view: str, span: Span, epoch: str, units: int, last: Id, now_ms: int) -> ViewObservation:
    """What a decision at `now_ms` shows of a view that counts `units` of the log, without unlogged usage."""
    if isinstance(span, int):
        return ViewObservation(view, epoch, units, now_ms - span, last, last[0] + span)
    _, next_ms, next_but_one_ms = span
    since_ms = span[1 if now_ms >= next_ms else 0] - 1
    until_ms = next_ms if last[0] < next_ms else next_but_one_ms
    if last[0] >= next_but_one_ms:  # a clock was far behind; the edge that follows is not known, but lies before this
        until_ms = last[0] + 2 * (next_but_one_ms - next_ms)
    return ViewObservation(view, epoch, units, since_ms, last, until_ms)


def span_of(check: LimitCheck) -> Span:
    """The window of a check."""
    return check.view.window.longest_ms if check.edges is None else check.edges


def still_in_window(observation: ViewObservation, now_ms: int) -> ViewObservation:
    """The observation without what has left its window by now."""
    return observation._replace(since_ms=max(observation.since_ms, now_ms - longest_ms_of(observation.view)))


def missing_usage(
    observation: ViewObservation, still_logged: ViewObservation, still_counting: ViewObservation
) -> UnloggedUsage:
    """What is missing of an observation: the newest of its units.

    `still_logged` is the part that the log still has; `still_counting` is the part of this that is in its window now.
    """
    expiries = newest_expiries(observation.expiries, observation.units - still_logged.units)
    return UnloggedUsage(
        observation.view,
        observation.epoch,
        expiries,
        observation.last,
        still_counting.units,
        still_counting.since_ms,
        still_counting.last[0],
        still_logged.units,
        observation.since_ms,
    )


def merge(into: dict[tuple[str, str], UnloggedUsage], usage: UnloggedUsage, now_ms: int) -> None:
    """Add a report. Several reports of one loss become one, as the ledger merges them."""
    if usage.expiries:
        key = (usage.view, usage.epoch)
        into[key] = into[key].with_report(usage, now_ms) if key in into else usage
