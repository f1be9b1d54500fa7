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

FORMAT = 0x51_4C_53_32
"""Begins every slot ("QLS2")."""

_CHECKSUM = struct.Struct("<I")
_READ_AT_ONCE = 512
"""A head of up to 56 numbers: hardly any is longer, and one that is takes another read."""


@lru_cache(maxsize=64)
def _head_of(count: int) -> struct.Struct:
    """FORMAT, how many numbers there are, the text's checksum and its length in bytes; then the fields of Head. Behind
    it, its own checksum, and then the text.
    """
    return struct.Struct(f"<IIIIQQQQ{count}Q")


_LEAST_HEAD = _head_of(0).size + _CHECKSUM.size


class Head(NamedTuple):
    """What a process saw last: the newest entry, under which tag, when, and some numbers."""

    newest: tuple[int, int]
    tag: int
    at_ms: int
    numbers: tuple[int, ...]


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
            self._own = self._claim()
        except BaseException:
            os.close(self._fd)
            raise
        self.writable = self._own is not None
        self._at = (self._own or 0) * SLOT_BYTES

    def write(self, newest: tuple[int, int], tag: int, at_ms: int, numbers: tuple[int, ...], text: str) -> int:
        """Set this process's slot, numbers 0 or more; how many lines of the text there was room for, the first ones."""
        data = text.encode()
        self._head = _head_of(len(numbers))
        room = SLOT_BYTES - self._head.size - _CHECKSUM.size
        if len(data) > room:
            data = data[: data.rfind(b"\n", 0, room) + 1]
        self._first = (FORMAT, len(numbers), zlib.crc32(data), len(data))
        self._tag = tag
        head = self._head.pack(*self._first, *newest, tag, at_ms, *numbers)
        os.pwrite(self._fd, head + _CHECKSUM.pack(zlib.crc32(head)) + data, self._at)
        return data.count(b"\n")

    def write_head(self, newest: tuple[int, int], at_ms: int, numbers: tuple[int, ...]) -> None:
        """Set the head alone, under the tag and beside the text of the last `write`: as many numbers as then.

        The one thing that every decision does here.
        """
        head = self._head.pack(*self._first, *newest, self._tag, at_ms, *numbers)
        os.pwrite(self._fd, head + _CHECKSUM.pack(zlib.crc32(head)), self._at)

    def own(self) -> tuple[Head, str] | None:
        """What this process, or the one that had its slot before, wrote last."""
        return None if self._own is None else self._read(self._own)

    def all(self) -> list[tuple[Head, str]]:
        """What every process wrote last, also those that are gone."""
        return [found for found in map(self._read, range(self._used())) if found is not None]

    def newest(self, tag: int) -> tuple[tuple[int, int], int]:
        """The newest entry that another process has seen under this tag, (0, 0) for none.

        And when one last saw anything under another tag, 0 for never.
        """
        found = (self._head_in(slot) for slot in range(self._used()) if slot != self._own)
        heads = [one[0] for one in found if one is not None]
        newest = max((head.newest for head in heads if head.tag == tag), default=(0, 0))
        return newest, max((head.at_ms for head in heads if head.tag != tag), default=0)

    def clear_abandoned(self) -> None:
        """Empty the slots of processes that are gone."""
        for slot in range(self._used()):
            if slot != self._own and self._head_in(slot) is not None and self._lock(slot):
                os.pwrite(self._fd, bytes(_LEAST_HEAD), slot * SLOT_BYTES)
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

    def _used(self) -> int:
        """How many slots were ever written: the lowest free one is claimed first."""
        return min(SLOTS, -(-os.fstat(self._fd).st_size // SLOT_BYTES))

    def _head_in(self, slot: int) -> tuple[Head, int, int, int] | None:
        """A head, its text's checksum and length, and where in the slot that begins."""
        for _ in range(3):  # its process may be writing it
            data = os.pread(self._fd, _READ_AT_ONCE, slot * SLOT_BYTES)
            if len(data) < _LEAST_HEAD or not any(data[:_LEAST_HEAD]):
                return None
            form, count, checksum, length, ms, seq, tag, at_ms = _head_of(0).unpack_from(data)
            size = _head_of(0).size + 8 * count
            if form != FORMAT or size > SLOT_BYTES:
                continue
            text_at = size + _CHECKSUM.size
            if text_at > len(data):
                data = os.pread(self._fd, text_at, slot * SLOT_BYTES)
            if text_at <= len(data) and _CHECKSUM.unpack_from(data, size)[0] == zlib.crc32(data[:size]):
                numbers = struct.unpack_from(f"<{count}Q", data, _head_of(0).size)
                return Head((ms, seq), tag, at_ms, numbers), checksum, length, text_at
        return None

    def _read(self, slot: int) -> tuple[Head, str] | None:
        for _ in range(3):
            found = self._head_in(slot)
            if found is None:
                return None
            head, checksum, length, text_at = found
            text = os.pread(self._fd, min(length, SLOT_BYTES), slot * SLOT_BYTES + text_at)
            if zlib.crc32(text) == checksum:
                return head, text.decode(errors="replace")
        return None
