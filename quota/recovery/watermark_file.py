"""One small file with a slot for each process of a machine. No lock is held while writing, and nobody waits.

    slot 0   head      format, sizes; newest entry, epoch tag, time, numbers; checksum      (about 100 bytes)
             text      lines that say what the numbers mean, and everything else; its checksum is in the head
    slot 1   1 MB later, and so on up to slot 63. What is not written takes no space on the disk

A process claims the first free slot by a lock that ends with the process. Most writes change the head alone, with one
`pwrite`. A reader who meets a half-written slot sees it by the checksums, and reads again or ignores it.

For example 64 cron jobs may run at once on one machine. A 65th has no slot: it reads what the others saw, and what it
sees itself is lost when it ends.

Nothing waits for the disk. What a process wrote survives its death, though not always its machine's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import zlib
from collections.abc import Collection
from typing import NamedTuple

from quota.common.folders import is_ours, mark_ours, open_alone

SLOTS = 64
"""If more processes of one machine run at once, the others have no slot: they only read."""

SLOT_BYTES = 2**20
"""Room for the text about a thousand numbers. A slot takes the space of its content; the rest is a hole."""

FORMAT = 0x51_4C_57_34
"""Begins every slot ("QLW4")."""

_CHECKSUM = struct.Struct("<I")
_FIRST_READ_BYTES = 512
"""Enough for a head of 56 numbers. A longer one takes another read."""

_WHOLE_READ_BYTES = 4096
"""Enough for most slots with their text."""


_NO_NUMBERS = struct.Struct("<IIIIQQQQ")
"""The layout of a head: FORMAT, how many numbers there are, the text's checksum and its length in bytes; then the
fields of Head, with 8 bytes for each number. The head's own checksum follows, and then the text."""

_BEGINNING = struct.Struct("<IIII")
_MIN_HEAD = _NO_NUMBERS.size + _CHECKSUM.size


def epoch_tag(epoch: str) -> int:
    """A number for an epoch: the upper half is for its root, so that another epoch of one log can be told from another
    log."""
    return zlib.crc32(epoch.partition("/")[0].encode()) << 32 | zlib.crc32(epoch.encode())


class Head(NamedTuple):
    """What a process saw last: the newest entry, the tag of its epoch, when, and a number for each view."""

    newest: tuple[int, int]
    epoch_tag: int
    at_ms: int
    numbers: tuple[int, ...]


class SlotContent(NamedTuple):
    """A slot as it was written last."""

    head: Head
    text: str


class Written(NamedTuple):
    """A text that a slot holds: how many of its lines there was room for, and the layout of a head that belongs to it:
    how it begins, and its further fields."""

    lines: int
    beginning: bytes
    fields: struct.Struct
    epoch_tag: int


class SeenByOthers(NamedTuple):
    """What other processes saw: the newest entry of one epoch, (0, 0) for none; when one of them last saw another epoch
    of the same log, 0 for never; and a number that changes when they see more of other logs, 0 for none."""

    newest: tuple[int, int]
    other_epoch_ms: int
    other_logs_tag: int


class _FoundHead(NamedTuple):
    """A head, its text's checksum and length, and where in the slot the text begins."""

    head: Head
    text_checksum: int
    text_bytes: int
    text_offset: int
    data: bytes


class SlotReader:
    """Reads the slots of an open file."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read_all(self) -> dict[int, SlotContent]:
        """All slots by their numbers, also those of processes that have ended."""
        return {slot: found for slot in range(self._slots_written()) if (found := self._read(slot)) is not None}

    def _slots_written(self) -> int:
        """How many slots may hold something: the lowest free one is claimed first."""
        return min(SLOTS, -(-os.fstat(self._fd).st_size // SLOT_BYTES))

    def _read_head(self, slot: int, read_bytes: int = _FIRST_READ_BYTES) -> _FoundHead | None:
        """The head of a slot, with as much of the slot as was read with it."""
        for _ in range(3):  # its process may be writing it
            data = os.pread(self._fd, read_bytes, slot * SLOT_BYTES)
            if len(data) < _MIN_HEAD or not any(data[:_MIN_HEAD]):
                return None
            found_format, count, text_checksum, text_bytes, ms, seq, epoch_tag, at_ms = _NO_NUMBERS.unpack_from(data)
            head_bytes = _NO_NUMBERS.size + 8 * count
            if found_format != FORMAT or head_bytes > SLOT_BYTES:
                continue
            text_offset = head_bytes + _CHECKSUM.size
            if text_offset > len(data):
                data = os.pread(self._fd, text_offset, slot * SLOT_BYTES)
            if text_offset <= len(data) and _CHECKSUM.unpack_from(data, head_bytes)[0] == zlib.crc32(data[:head_bytes]):
                numbers = struct.unpack_from(f"<{count}Q", data, _NO_NUMBERS.size)
                head = Head((ms, seq), epoch_tag, at_ms, numbers)
                return _FoundHead(head, text_checksum, text_bytes, text_offset, data)
        return None

    def _read(self, slot: int) -> SlotContent | None:
        for _ in range(3):
            found = self._read_head(slot, _WHOLE_READ_BYTES)
            if found is None:
                return None
            text = found.data[found.text_offset : found.text_offset + found.text_bytes]
            if len(text) < found.text_bytes:
                text = os.pread(self._fd, min(found.text_bytes, SLOT_BYTES), slot * SLOT_BYTES + found.text_offset)
            if zlib.crc32(text) == found.text_checksum:
                return SlotContent(found.head, text.decode(errors="replace"))
        return None


class WatermarkFile(SlotReader):
    """An open file in which this process has a slot. Raises OSError if the file cannot be used.

    Only the process that opened it may use it. The lock on its slot belongs to the whole process, so a process must not
    open the same file twice. `own_slot` is None if all slots are taken: then the file may only be read.

    A file that is not there raises FileNotFoundError, or is made with `make`. The slot will be written over, so it is
    one that holds nothing, or only what is in `known`: another process may have written it since, and ended.
    """

    def __init__(self, path: str, *, make: bool = False, known: Collection[SlotContent] = ()) -> None:
        super().__init__(open_alone(path, os.O_RDWR | os.O_CREAT if make else os.O_RDWR))
        try:
            mark_ours(self._fd)
            data = os.pread(self._fd, _CHECKSUM.size, 0)
            if any(data) and _CHECKSUM.unpack(data) != (FORMAT,):
                raise OSError(0, "another version of quota-ledger wrote it; delete it")
            with _opening:
                self.own_slot = self._claim(known)
                _in_use[path] = self
        except BaseException:
            os.close(self._fd)
            raise
        self._path = path
        self._own_offset = (self.own_slot or 0) * SLOT_BYTES

    def write(
        self, newest: tuple[int, int], epoch_tag: int, at_ms: int, numbers: tuple[int, ...], text: str
    ) -> Written:
        """Write this process's slot; numbers are 0 or more."""
        data = text.encode()
        room = SLOT_BYTES - _NO_NUMBERS.size - 8 * len(numbers) - _CHECKSUM.size
        if len(data) > room:
            data = data[: data.rfind(b"\n", 0, room) + 1]
        beginning = _BEGINNING.pack(FORMAT, len(numbers), zlib.crc32(data), len(data))
        written = Written(data.count(b"\n"), beginning, struct.Struct(f"<QQQQ{len(numbers)}Q"), epoch_tag)
        self.write_head(written, newest, at_ms, numbers, data)
        return written

    def write_head(
        self, written: Written, newest: tuple[int, int], at_ms: int, numbers: tuple[int, ...], text: bytes = b""
    ) -> None:
        """Write the head, with as many numbers as in the `write` of its text. Most decisions leave the text as it
        is."""
        head = written.beginning + written.fields.pack(*newest, written.epoch_tag, at_ms, *numbers)
        data = head + _CHECKSUM.pack(zlib.crc32(head)) + text
        self._check_own()
        os.pwrite(self._fd, data, self._own_offset)  # no call between: a signal handler may have closed the file

    def newest_of_others(self, tag: int) -> SeenByOthers:
        """What others saw of the epoch of this tag, and of others."""
        newest, other_epoch_ms, other_logs = (0, 0), 0, []
        for slot in range(self._slots_written()):
            found = None if slot == self.own_slot else self._read_head(slot)
            if found is None:
                continue
            head = found.head
            if head.epoch_tag == tag:
                newest = max(newest, head.newest)
            elif head.epoch_tag >> 32 == tag >> 32:
                other_epoch_ms = max(other_epoch_ms, head.at_ms)
            else:
                other_logs.append((slot, head.epoch_tag, head.newest, found.text_checksum))
        return SeenByOthers(newest, other_epoch_ms, hash(tuple(other_logs)) if other_logs else 0)

    def clear_abandoned(self, known: Collection[SlotContent]) -> None:
        """Empty the slots of processes that have ended, if they hold only what is in `known`."""
        self._check_own()
        for slot in range(self._slots_written()):
            if slot != self.own_slot and self._read_head(slot) is not None and self._lock(slot):
                if self._read(slot) in known:
                    os.pwrite(self._fd, bytes(_MIN_HEAD), slot * SLOT_BYTES)
                self._unlock(slot)

    def close(self) -> None:
        """A thread in the middle of using it gets an OSError."""
        if _in_use.get(self._path) is self:
            del _in_use[self._path]
        ours = is_ours(self._fd)
        fd, self._fd = self._fd, -1
        if ours and fd >= 0:
            os.close(fd)

    def _check_own(self) -> None:
        """Raises OSError where the program has closed our descriptor, and may have a file of its own in its place."""
        if not is_ours(self._fd):
            raise OSError(errno.EBADF, "the program has closed it")

    def _claim(self, known: Collection[SlotContent]) -> int | None:
        for slot in filter(self._lock, range(SLOTS)):
            if self._read_head(slot) is None or self._read(slot) in known:
                return slot
            self._unlock(slot)
        return None

    def _lock(self, slot: int) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot * SLOT_BYTES)
        except (BlockingIOError, PermissionError):  # POSIX allows both for a lock that another holds
            return False
        return True

    def _unlock(self, slot: int) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, slot * SLOT_BYTES)


_in_use: dict[str, WatermarkFile] = {}
"""The files in which this process has a slot, by path."""

_opening = threading.RLock()


def slots_of(path: str) -> list[SlotContent]:
    """All slots of a file. Raises OSError."""
    with _opening:
        if path in _in_use:  # to close another descriptor of this file would end our lock
            return [*_in_use[path].read_all().values()]
        fd = open_alone(path, os.O_RDONLY)
        try:
            return [*SlotReader(fd).read_all().values()]
        finally:
            if path not in _in_use:  # a signal handler may have claimed a slot meanwhile
                os.close(fd)


def read_slots(path: str) -> list[SlotContent]:
    """The same of another configuration: a file that cannot be read has none."""
    with contextlib.suppress(OSError):
        return slots_of(path)
    return []
