"""What a process notes of a ledger: how much each view counted, where in the log that is, and what was lost already.

    Record   what a view counted when it was last seen
    Cells    how much of that is in which hour, for a window of a day
    Slot     all that one process has noted, as text in its slot of the file (quota.recovery.watermark_file)

`quota.recovery.high_water_mark` makes them and compares them with the ledger.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from quota.common.clock import NEVER
from quota.ledger.unlogged import Carry, newest_parts, parts_text, read_parts
from quota.limits import Edges, Sliding, selector_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quota.ledger.contract import Ask
    from quota.ledger.entry import Id
    from quota.ledger.unlogged import Parts
    from quota.recovery.watermark_file import Head

CELLS = 24
LEAST_CELL_MS = 1_000
"""Into so many cells a sliding window is divided, but into none that are shorter: each is one more question."""


class Record(NamedTuple):
    """What one view counted of the log in one epoch, without carries: `units` of the entries after `since_ms`, up to
    `last`. All of them have expired at `until_ms`, and those of the `older` cells before.
    """

    view: str
    epoch: str
    units: int
    since_ms: int
    last: Id
    until_ms: int
    older: Parts = ()

    @property
    def parts(self) -> Parts:
        """All of it. What is in no cell counts as its newest entry does."""
        rest = self.units - sum(units for units, _ in self.older)
        return (*self.older, (rest, self.until_ms)) if rest > 0 else newest_parts(self.older, self.units)


class Cells(NamedTuple):
    """How much of a view is where in the log: `parts`, by the time at which each cell has left the window, of all cells
    up to `until_ms` that had anything in them.
    """

    until_ms: int
    parts: Parts


Span = int | Edges
"""A window as a decision saw it: its length in ms, or a calendar's edges."""


class Slot(NamedTuple):
    """What one process has noted: at `at_ms`, by the ledger's clock, of a ledger that was in `epoch` then.

    Records of another log, which was lost as a whole, stay beside the carries made of them: what a copy of it brings
    back, when one is put there after all, is then not counted twice.
    """

    epoch: str
    at_ms: int
    records: tuple[Record, ...]
    carries: tuple[Carry, ...]
    cells: dict[str, Cells]

    def text(self, asked: Sequence[tuple[str, Span]]) -> str:
        """What a slot's text says: the views whose units stand in its head, then these records and carries."""
        lines = [self.epoch]
        lines += [
            f"{view}\t{span}" if isinstance(span, int) else f"{view}\t{span[0]} {span[1]} {span[2]}"
            for view, span in asked
        ]
        lines += [
            f"{r.view}\t{r.epoch}\t{r.units}\t{r.since_ms}\t{r.last[0]}\t{r.last[1]}\t{r.until_ms}\t"
            f"{parts_text(r.older)}"
            for r in self.records
        ]
        lines += ["\t".join((carry.view, *carry.words())) for carry in self.carries]
        lines += [f"{view}\t{cells.until_ms}\t{parts_text(cells.parts)}" for view, cells in self.cells.items()]
        return "\n".join(lines) + "\n"

    @classmethod
    def read(cls, head: Head, text: str) -> Slot | None:
        """The slot that was written with `text`; None for what never was."""
        epoch, *lines = text.removesuffix("\n").split("\n")
        records, carries, cells = [], [], {}
        numbers = iter(head.numbers)
        try:
            for line in lines:
                view, *fields = line.split("\t")
                selector_of(view)
                if len(fields) == 1:
                    edges = tuple(map(int, fields[0].split(" ")))
                    span = edges[0] if len(edges) == 1 else (edges[0], edges[1], edges[2])
                    records.append(record_of(view, span, epoch, next(numbers), head.newest, head.at_ms))
                elif len(fields) == 2:
                    cells[view] = Cells(int(fields[0]), _parts(fields[1]))
                elif len(fields) == 4:
                    carries.append(Carry.from_words(view, *fields))
                else:
                    units, since_ms, last_ms, last_seq, until_ms = map(int, fields[1:6])
                    older = _parts(fields[6])
                    records.append(Record(view, fields[0], units, since_ms, (last_ms, last_seq), until_ms, older))
        except (ValueError, IndexError, StopIteration):
            return None
        return cls(epoch, head.at_ms, tuple(records), tuple(carries), cells)


def record_of(view: str, span: Span, epoch: str, units: int, last: Id, now_ms: int) -> Record:
    """What a decision at `now_ms` says of a view: `units`, without carries."""
    if isinstance(span, int):
        return Record(view, epoch, units, now_ms - span, last, last[0] + span)
    _, next_ms, next_but_one_ms = span
    since_ms = span[1 if now_ms >= next_ms else 0] - 1
    until_ms = next_ms if last[0] < next_ms else next_but_one_ms
    if last[0] >= next_but_one_ms:  # a clock was far behind; the edges beyond are not known, but lie before this
        until_ms = last[0] + 2 * (next_but_one_ms - next_ms)
    return Record(view, epoch, units, since_ms, last, until_ms)


def span_of(ask: Ask) -> Span:
    return ask.view.window.longest_ms if ask.edges is None else ask.edges


def as_of(record: Record, now_ms: int) -> Record:
    """The record without what has left its window since: a carry made of a later look at the log has none of that."""
    window_ms = record.until_ms - record.last[0]
    return record._replace(since_ms=max(record.since_ms, now_ms - window_ms))


def carry_of(record: Record, here: Record, live: Record) -> Carry:
    """What is missing of a record, where `here` is still there, and `live` of that is in its window now.

    A log loses its newest entries, or all.
    """
    parts = newest_parts(record.parts, record.units - here.units)
    return Carry(record.view, record.epoch, parts, record.last, live.units, live.since_ms, record.since_ms)


def merge(into: dict[tuple[str, str], Carry], carry: Carry, now_ms: int) -> None:
    """Several reports of one loss are one: as the ledger does it."""
    if carry.parts:
        key = (carry.view, carry.epoch)
        into[key] = into[key].with_report(carry, now_ms) if key in into else carry


def without(carry: Carry, back: Record, now_ms: int) -> Carry:
    """The carry, less what came back of it: the oldest of what still counts at `now_ms`. If that is all, it says so."""
    expired = tuple(part for part in carry.parts if part[1] <= now_ms)
    live = newest_parts(carry.parts[len(expired) :], carry.units_at(now_ms) - back.units)
    parts = (*expired, *live) or ((0, carry.until_ms),)
    return carry._replace(parts=parts, kept_units=carry.kept_units + back.units, kept_since_ms=back.since_ms)


def _parts(text: str) -> Parts:
    return read_parts(text) if text else ()


def cell_ms_of(window_ms: int) -> int:
    return max(LEAST_CELL_MS, window_ms // CELLS)


def cell_end(ask: Ask, cells: dict[str, Cells]) -> int:
    """How new an entry must be to end the next cell of what was asked: any, where no cell is known.

    A calendar period is not divided: all of it expires at once. Nor is what is shorter than two cells.
    """
    window = ask.view.window
    if not isinstance(window, Sliding) or window.window_ms < 2 * LEAST_CELL_MS:
        return NEVER
    known = cells.get(ask.view.name)
    return 0 if known is None else known.until_ms + cell_ms_of(window.window_ms) + 1


def best_cells(slots: Sequence[Slot], epoch: str) -> dict[str, Cells]:
    """What the processes of this machine have read of the log in this epoch."""
    best: dict[str, Cells] = {}
    for slot in slots:
        if slot.epoch == epoch:
            for view, cells in slot.cells.items():
                best[view] = max(cells, best.get(view, cells))
    return best


def placed(record: Record, cells: dict[str, Cells]) -> Record:
    """The record with the cells that are wholly in it. Of one that has partly left its window nothing is known but the
    sum, like of what is newest.
    """
    window_ms = record.until_ms - record.last[0]
    known = cells.get(record.view)
    if known is None:
        return record
    # A cell lies within the record if it begins where that does or later, and ends before its last entry.
    first_ms = record.since_ms + cell_ms_of(window_ms) + window_ms
    return record._replace(older=tuple(part for part in known.parts if first_ms <= part[1] < record.until_ms))
