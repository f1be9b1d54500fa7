"""One small file into which many processes write, each its own slot: no lock is held while writing, and none waits.

A slot is a head (what its process saw last: a place in the log, a time, as many numbers as there are) and a text that
says what the numbers mean. Most writes change the head alone. Both carry checksums: what was cut off in the middle is
not there.
Nothing waits for the disk: what a process wrote survives its death, though not always its machine's.
"""

from __future__ import annotations

import os
import struct
import sys
import zlib
from functools import lru_cache
from typing import NamedTuple

if sys.platform != "win32":
    import fcntl

SLOTS = 64
"""More processes of one machine at a time find no slot of their own: they can read what the others wrote."""

SLOT_BYTES = 2**20
"""Room for the text about some thousand numbers. A slot takes the space of what is in it; the rest is a hole."""

FORMAT = 0x51_4C_57_31
"""Begins every slot ("QLW1")."""

_CHECKSUM = struct.Struct("<I")
_FIRST_READ_BYTES = 512
"""A head of up to 56 numbers: hardly any is longer, and one that is takes another read."""


@lru_cache(maxsize=64)
def _head_struct(count: int) -> struct.Struct:
    """FORMAT, how many numbers there are, the text's checksum and its length in bytes; then the fields of Head. Behind
    it, its own checksum, and then the text.
    """
    return struct.Struct(f"<IIIIQQQQ{count}Q")


_MIN_HEAD = _head_struct(0).size + _CHECKSUM.size


class Head(NamedTuple):
    """What a process saw last: the newest entry, under which epoch_tag, when, and some numbers."""

    newest: tuple[int, int]
    epoch_tag: int
    at_ms: int
    numbers: tuple[int, ...]


class SlotContent(NamedTuple):
    """A slot as it was written last."""

    head: Head
    text: str


class SeenByOthers(NamedTuple):
    """The newest entry under a tag, (0, 0) for none; and when anything was seen under another tag, 0 for never."""

    newest: tuple[int, int]
    other_epoch_ms: int


class _FoundHead(NamedTuple):
    """A head, its text's checksum and length, and where in the slot the text begins."""

    head: Head
    text_checksum: int
    text_bytes: int
    text_offset: int


class WatermarkFile:
    """An opened file with a slot of this process's own. Raises OSError where the file cannot be used.

    To be used by the process that opened it; a lock on the slot, which ends with the process, keeps others off. That
    lock is the whole process's: the same file must not be opened twice in it. `writable` is False where all slots are
    taken: then it may only be read.
    """

    def __init__(self, path: str) -> None:
        if sys.platform == "win32":
            raise OSError(0, "this platform has no locks on parts of a file")
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            data = os.pread(self._fd, _CHECKSUM.size, 0)
            if any(data) and _CHECKSUM.unpack(data) != (FORMAT,):
                raise OSError(0, "another version of quota-ledger wrote it; delete it")
            self._own_slot = self._claim()
        except BaseException:
            os.close(self._fd)
            raise
        self.writable = self._own_slot is not None
        self._own_offset = (self._own_slot or 0) * SLOT_BYTES

    def write(self, newest: tuple[int, int], epoch_tag: int, at_ms: int, numbers: tuple[int, ...], text: str) -> int:
        """Set this process's slot, numbers 0 or more; how many lines of the text there was room for, the first ones."""
        data = text.encode()
        self._head = _head_struct(len(numbers))
        room = SLOT_BYTES - self._head.size - _CHECKSUM.size
        if len(data) > room:
            data = data[: data.rfind(b"\n", 0, room) + 1]
        self._format_and_text = (FORMAT, len(numbers), zlib.crc32(data), len(data))
        self._epoch_tag = epoch_tag
        head = self._head.pack(*self._format_and_text, *newest, epoch_tag, at_ms, *numbers)
        os.pwrite(self._fd, head + _CHECKSUM.pack(zlib.crc32(head)) + data, self._own_offset)
        return data.count(b"\n")

    def write_head(self, newest: tuple[int, int], at_ms: int, numbers: tuple[int, ...]) -> None:
        """Set the head alone, under the epoch_tag and beside the text of the last `write`: as many numbers as then.

        The one thing that every decision does here.
        """
        head = self._head.pack(*self._format_and_text, *newest, self._epoch_tag, at_ms, *numbers)
        os.pwrite(self._fd, head + _CHECKSUM.pack(zlib.crc32(head)), self._own_offset)

    def read_own(self) -> SlotContent | None:
        """What this process, or the one that had its slot before, wrote last."""
        return None if self._own_slot is None else self._read(self._own_slot)

    def read_all(self) -> list[SlotContent]:
        """What every process wrote last, also those that are gone."""
        return [found for found in map(self._read, range(self._slots_written())) if found is not None]

    def newest_of_others(self, epoch_tag: int) -> SeenByOthers:
        """What other processes have seen under this tag, and when one saw anything under another."""
        found = (self._read_head(slot) for slot in range(self._slots_written()) if slot != self._own_slot)
        heads = [one.head for one in found if one is not None]
        newest = max((head.newest for head in heads if head.epoch_tag == epoch_tag), default=(0, 0))
        return SeenByOthers(newest, max((head.at_ms for head in heads if head.epoch_tag != epoch_tag), default=0))

    def clear_abandoned(self) -> None:
        """Empty the slots of processes that are gone."""
        for slot in range(self._slots_written()):
            if slot != self._own_slot and self._read_head(slot) is not None and self._lock(slot):
                os.pwrite(self._fd, bytes(_MIN_HEAD), slot * SLOT_BYTES)
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, slot * SLOT_BYTES)

    def close(self) -> None:
        os.close(self._fd)

    def _claim(self) -> int | None:
        return next(filter(self._lock, range(SLOTS)), None)

    def _lock(self, slot: int) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot * SLOT_BYTES)
        except (BlockingIOError, PermissionError):  # POSIX allows both for a lock that another holds
            return False
        return True

    def _slots_written(self) -> int:
        """How many slots were ever written: the lowest free one is claimed first."""
        return min(SLOTS, -(-os.fstat(self._fd).st_size // SLOT_BYTES))

    def _read_head(self, slot: int) -> _FoundHead | None:
        for _ in range(3):  # its process may be writing it
            data = os.pread(self._fd, _FIRST_READ_BYTES, slot * SLOT_BYTES)
            if len(data) < _MIN_HEAD or not any(data[:_MIN_HEAD]):
                return None
            found_format, count, text_checksum, text_bytes, ms, seq, epoch_tag, at_ms = _head_struct(0).unpack_from(
                data
            )
            head_bytes = _head_struct(0).size + 8 * count
            if found_format != FORMAT or head_bytes > SLOT_BYTES:
                continue
            text_offset = head_bytes + _CHECKSUM.size
            if text_offset > len(data):
                data = os.pread(self._fd, text_offset, slot * SLOT_BYTES)
            if text_offset <= len(data) and _CHECKSUM.unpack_from(data, head_bytes)[0] == zlib.crc32(data[:head_bytes]):
                numbers = struct.unpack_from(f"<{count}Q", data, _head_struct(0).size)
                return _FoundHead(Head((ms, seq), epoch_tag, at_ms, numbers), text_checksum, text_bytes, text_offset)
        return None

    def _read(self, slot: int) -> SlotContent | None:
        for _ in range(3):
            found = self._read_head(slot)
            if found is None:
                return None
            text = os.pread(self._fd, min(found.text_bytes, SLOT_BYTES), slot * SLOT_BYTES + found.text_offset)
            if zlib.crc32(text) == found.text_checksum:
                return SlotContent(found.head, text.decode(errors="replace"))
        return None
