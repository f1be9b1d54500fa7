"""What this machine has seen of a project's ledger, so that a ledger that loses it gives no budget back.

A server may be flushed, restarted without its data, restored from an old copy, replaced by a replica that lagged; a
ledger file may be deleted. Each process notes, after each decision, what that showed: the ledger's epoch, its newest
entry, and how much each view counted. Before each decision it says which entries must be there. A ledger that has
another epoch, or lacks one of them, answers "behind":

    lost      what a view counted when last seen, less what the log still has of that
    carry     the ledger adds that to the view until all of it would have expired, and begins a new epoch

Every process has a slot of its own in one file (quota.slots), so that what a killed process saw is known to the next,
and each looks at what the others of its machine saw last. Writing a slot costs some microseconds and waits for nothing;
a crash of the whole machine may lose the last of it. Without a folder that can be written, a process still remembers
what it saw itself.

What cannot be known: charges that no machine which still asks has seen. They are at most what was spent between the
loss and the first decision of a machine that had seen more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
import zlib
from typing import TYPE_CHECKING, NamedTuple

from quota.budget import read_entries
from quota.clock import rfc3339
from quota.ledger import NEVER, NOTHING_SEEN, Carry, Seen
from quota.limits import selector_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from quota.ledger import Ask, Id, Ledger, Verdict
    from quota.slots import Slots

LOOK_EVERY_S = 0.05
"""How often at most a process looks at what the others of its machine have seen."""

TIDY_EVERY_MS = 60_000

FORGET_AFTER_DAYS = 400
"""A file that nobody has written for so long, longer than any window in use, is removed."""

_log = logging.getLogger("quota")


class Record(NamedTuple):
    """What one view counted of the log in one epoch, without carries: `units` of the entries after `since_ms`, up to
    `last`. All of them have expired at `until_ms`.
    """

    view: str
    epoch: str
    units: int
    since_ms: int
    last: Id
    until_ms: int

    def line(self) -> str:
        return _line(self.view, self.epoch, self.units, self.since_ms, self.last, self.until_ms)


class Slot(NamedTuple):
    """What one process has noted: at `at_ms`, by the ledger's clock, of a ledger that was in `epoch` then.

    Records of earlier epochs, of which nothing was left, stay beside the carries made of them: what an old copy brings
    back when it is put there after all is then not counted twice.
    """

    epoch: str
    at_ms: int
    records: tuple[Record, ...]
    carries: tuple[Carry, ...]

    @classmethod
    def read(cls, text: str) -> Slot | None:
        """The slot that `_text` wrote; None for what it never wrote."""
        try:
            head, *lines = text.removesuffix("\n").split("\n")
            epoch, at_ms = head.split("\t")
            records, carries = [], []
            for line in lines:
                view, of_epoch, *fields = line.split("\t")
                selector_of(view)
                if len(fields) == 2:
                    carries.append(Carry(view, of_epoch, int(fields[0]), int(fields[1])))
                else:
                    units, since_ms, last_ms, last_seq, until_ms = map(int, fields)
                    records.append(Record(view, of_epoch, units, since_ms, (last_ms, last_seq), until_ms))
            return cls(epoch, int(at_ms), tuple(records), tuple(carries))
        except ValueError:
            return None


class Memory:
    """What one process knows of one project's ledger. Safe to share between threads and after a fork.

    `open_memory` makes it: there is one for each file in a process. Without a path it lasts as long as the process.
    """

    def __init__(self, path: str | None, project: str) -> None:
        self.path = path
        self._project = project
        self._lock = threading.RLock()
        self._slots: Slots | None = None
        self._pid = 0
        self._begin("")

    def _begin(self, epoch: str) -> None:
        """Nothing is known yet of the ledger in this epoch."""
        self._epoch = epoch
        self._tag = zlib.crc32(epoch.encode())
        self._newest: Id = (0, 0)
        self._lines: dict[str, str] = {}  # a record's line by its view: read back where that is needed, which is rare
        self._earlier: set[Record] = set()  # of earlier epochs, all before _floor_ms
        self._floor_ms = 0
        self._carries: dict[tuple[str, str], Carry] = {}
        self._others: tuple[Id, ...] = ()  # what the machine's other processes saw, until the ledger has shown it
        self._look_at_s = self._tidy_at_ms = 0.0

    # -- around a decision -------------------------------------------------------------------------------------------

    def seen(self) -> Seen:
        """What the ledger must have."""
        with self._lock:
            if self._pid != os.getpid():
                self._start()
            if self._slots is not None and time.monotonic() >= self._look_at_s:
                self._look()
            ids = (*self._others, self._newest) if self._lines else self._others
            return Seen(self._epoch, ids) if self._epoch else NOTHING_SEEN

    def note(self, asks: Sequence[Ask], verdict: Verdict) -> None:
        """Remember what a decision showed."""
        epoch, last, now_ms = verdict.epoch, verdict.last, verdict.now_ms
        if not epoch:
            return
        with self._lock:
            if epoch != self._epoch:
                if self._lines:
                    return  # decided before another thread made a loss good
                self._begin(epoch)
            self._others = ()
            if last < self._newest:
                return  # another thread has seen more
            self._newest = last
            for n, (view, _, _, edges) in enumerate(asks):
                units = verdict.used_units[n]
                if verdict.carried:
                    units -= sum(carry.units for carry in verdict.carried[n] if carry.until_ms > now_ms)
                    _merge(self._carries, verdict.carried[n])
                if edges is None:
                    window_ms = view.window.longest_ms
                    since_ms, until_ms = now_ms - window_ms, last[0] + window_ms
                else:
                    since_ms = edges[1 if now_ms >= edges[1] else 0] - 1
                    until_ms = edges[1 if last[0] < edges[1] else 2]
                if since_ms < self._floor_ms:
                    since_ms = self._floor_ms
                self._lines[view.name] = _line(view.name, epoch, units, since_ms, last, until_ms)
            if now_ms >= self._tidy_at_ms:
                self._tidy(now_ms)
            self._write(now_ms)

    def make_good(self, ledger: Ledger, verdict: Verdict, new_epoch: str) -> None:
        """Tell a ledger that is behind what it has lost, as far as anybody on this machine has seen it.

        Raises LedgerError. May be repeated: the ledger merges reports of one loss.
        """
        now_ms = verdict.now_ms
        with self._lock:
            slots = [*self._read_slots(), self._own(now_ms)]
            live = [(slot, record) for slot in slots for record in slot.records if record.until_ms > now_ms]
            seen = {record for slot, record in live if record.epoch == slot.epoch}
            earlier = {record for slot, record in live if record.epoch != slot.epoch}
            lost = [carry for carry in (_lost(ledger, self._project, record) for record in seen) if carry is not None]
            back = {(r.view, r.epoch): _here_units(ledger, self._project, r) for r in sorted(earlier, key=_last)}
            carries: dict[tuple[str, str], Carry] = {}
            for carry in (carry for slot in slots for carry in slot.carries if carry.until_ms > now_ms):
                _merge(carries, [carry._replace(units=carry.units - back.get((carry.view, carry.epoch), 0))])
            _merge(carries, lost)
            carries = {key: carry for key, carry in carries.items() if carry.units > 0}
            epoch = ledger.carry(self._project, new_epoch, list(carries.values())) if carries else verdict.epoch
            newest = max((record.last for record in seen), default=(0, 0))
            nothing_left = not ledger.read(self._project, (0, NEVER), newest[0], 1)
            self._begin(epoch)
            self._carries = carries
            if nothing_left:  # what comes now is later than all that was seen, and can be told from it
                self._floor_ms = newest[0]
                self._earlier = {record for record in seen | earlier if (record.view, record.epoch) in carries}
            if self._write(now_ms) and self._slots is not None:
                self._slots.clear_abandoned()  # what processes that are gone have noted stands in our slot now
        for carry in lost:
            _log.warning(
                "ledger_behind project=%s ledger=%s view=%s lost_units=%d until=%s: charges that this machine saw are "
                "missing there (emptied? restored from an old copy?); they count on until they would have expired",
                self._project,
                ledger.label,
                carry.view,
                carry.units,
                rfc3339(carry.until_ms),
            )

    # -- the file ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """In a new process: get a slot of its own, and go on from what this machine's processes have noted.

        A forked child leaves its parent's slot alone.
        """
        self._pid = os.getpid()
        self._slots = None
        self._begin("")
        if self.path is not None:
            try:
                from quota.slots import Slots

                _make_room(self.path)
                self._slots = Slots(self.path)
                self._recall(Slot.read(self._slots.own()))
            except (OSError, ImportError) as error:
                self._give_up(error)

    def _recall(self, own: Slot | None) -> None:
        """Begin with the epoch that was noted last. What stands in our own slot is only there: it goes on with us."""
        slots = self._read_slots()
        latest = max(slots, key=lambda slot: slot.at_ms, default=None)
        if latest is None:
            return
        self._begin(latest.epoch)
        for slot in slots:
            _merge(self._carries, (carry for carry in slot.carries if carry.until_ms > latest.at_ms))
            if slot.epoch == latest.epoch:
                live = [record for record in slot.records if record.until_ms > latest.at_ms]
                here = [record for record in live if record.epoch == slot.epoch]
                self._others += tuple({record.last for record in here})
                self._earlier.update(set(live).difference(here))
                if slot == own:
                    self._lines = {record.view: record.line() for record in here}
                    self._newest = max((record.last for record in here), default=(0, 0))

    def _look(self) -> None:
        """See what the other processes of this machine have seen."""
        assert self._slots is not None  # noqa: S101  # narrows the type
        self._look_at_s = time.monotonic() + LOOK_EVERY_S
        try:
            if not self._epoch:
                self._recall(None)
            newest = self._slots.newest(self._tag)
        except OSError as error:
            self._give_up(error)
            return
        if newest > self._newest and newest not in self._others:
            self._others += (newest,)

    def _read_slots(self) -> list[Slot]:
        if self._slots is None:
            return []
        try:
            return [slot for slot in map(Slot.read, self._slots.texts()) if slot is not None]
        except OSError as error:
            self._give_up(error)
            return []

    def _own(self, now_ms: int) -> Slot:
        slot = Slot.read(self._text(now_ms))
        assert slot is not None, "what was written can be read"  # noqa: S101  # narrows the type
        return slot

    def _text(self, now_ms: int) -> str:
        carries = [f"{c.view}\t{c.epoch}\t{c.units}\t{c.until_ms}\n" for c in self._carries.values()]
        earlier = [record.line() for record in self._earlier]
        return "".join([f"{self._epoch}\t{now_ms}\n", *self._lines.values(), *earlier, *carries])

    def _tidy(self, now_ms: int) -> None:
        """Forget what has expired."""
        self._tidy_at_ms = now_ms + TIDY_EVERY_MS
        live = {record for record in self._own(now_ms).records if record.until_ms > now_ms and record.units > 0}
        self._earlier &= live
        self._lines = {record.view: record.line() for record in live if record.epoch == self._epoch}
        self._carries = {key: carry for key, carry in self._carries.items() if carry.until_ms > now_ms}

    def _write(self, now_ms: int) -> bool:
        if self._slots is None:
            return False
        try:
            self._slots.write(self._newest, self._tag, self._text(now_ms))
        except OSError as error:
            self._give_up(error)
            return False
        return True

    def _give_up(self, error: Exception) -> None:
        """The file cannot be used: from now on this process remembers for itself alone."""
        _log.warning("memory_unusable path=%s: %s; what this process sees of its ledger ends with it", self.path, error)
        slots, self._slots = self._slots, None
        if slots is not None:
            with contextlib.suppress(OSError):
                slots.close()

    def close(self) -> None:
        """Give the slot back; what it holds stays. A later decision takes one again."""
        with self._lock:
            slots, self._slots = self._slots, None
            if slots is not None and self._pid == os.getpid():
                slots.close()
            self._pid = 0


def _line(view: str, epoch: str, units: int, since_ms: int, last: Id, until_ms: int) -> str:
    return f"{view}\t{epoch}\t{units}\t{since_ms}\t{last[0]}\t{last[1]}\t{until_ms}\n"


def _last(record: Record) -> Id:
    return record.last


def _lost(ledger: Ledger, project: str, record: Record) -> Carry | None:
    """What the ledger lacks of a record: nothing, if it has the newest entry that the record knows of."""
    ms, seq = record.last
    there = ledger.read(project, (ms, seq - 1) if seq else (ms - 1, NEVER), ms, 1)
    if there and (there[0].ms, there[0].seq) == record.last:
        return None
    lost_units = record.units - _here_units(ledger, project, record)
    return Carry(record.view, record.epoch, lost_units, record.until_ms) if lost_units > 0 else None


def _here_units(ledger: Ledger, project: str, record: Record) -> int:
    """What the log has, within a record's bounds, of what its view counts."""
    selector = selector_of(record.view)
    return sum(
        selector.cost(entry.units)
        for entry in read_entries(ledger, project, record.since_ms + 1, record.last[0])
        if (entry.ms, entry.seq) <= record.last and selector.counts(entry.bucket, entry.method, entry.job)
    )


def _merge(into: dict[tuple[str, str], Carry], carries: Iterable[Carry]) -> None:
    """Of several reports of one loss, the largest."""
    for carry in carries:
        key = (carry.view, carry.epoch)
        known = into.get(key, carry)
        into[key] = Carry(*key, max(carry.units, known.units), max(carry.until_ms, known.until_ms))


def _make_room(path: str) -> None:
    """Make the folder, and remove from it what nobody has used for longer than any window lasts."""
    if os.path.exists(path):
        return
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    for entry in os.scandir(folder):
        if time.time() - entry.stat().st_mtime > FORGET_AFTER_DAYS * 86_400:
            os.unlink(entry.path)


# -- one memory for each file ------------------------------------------------------------------------------------------

_open: dict[str, tuple[Memory, int]] = {}
_open_lock = threading.Lock()


def open_memory(path: str, project: str) -> Memory:
    """The memory in this file, shared by all of this process that ask for it. Give it back with `close_memory`."""
    with _open_lock:
        memory, users = _open.get(path) or (Memory(path, project), 0)
        _open[path] = memory, users + 1
        return memory


def close_memory(memory: Memory) -> None:
    """Let go of a memory from `open_memory`; the last to do so gives its slot back."""
    with _open_lock:
        if memory.path not in _open:
            return
        _, users = _open[memory.path]
        if users > 1:
            _open[memory.path] = memory, users - 1
            return
        del _open[memory.path]
    memory.close()


def memory_path(folder: Path, ledger: str, project: str) -> str:
    """The file for one project of the ledger that calls itself `ledger`, in a state folder."""
    spelled = re.sub(r"[^A-Za-z0-9._-]", "_", project)
    return str(folder / "seen" / f"{spelled}-{zlib.crc32(f'{ledger} {project}'.encode()):08x}")
