"""One small file into which many processes write, each its own slot: no lock is held while writing, and none waits.

A slot is a head (what its process saw last: a place in the log, a time, some numbers) and a text that says what the
numbers mean. Most writes change the head alone. Both carry checksums: what was cut off in the middle is not there.
Nothing waits for the disk: what a process wrote survives its death, though not always its machine's.
"""

from __future__ import annotations

import os
import struct
import sys
import zlib
from typing import NamedTuple

if sys.platform != "win32":
    import fcntl

SLOTS = 64
"""More processes of one machine at a time find no slot of their own."""

SLOT_BYTES = 65_536

NUMBERS = 8

_HEAD = struct.Struct(f"<QQQQ{NUMBERS}QII")
"""The fields of Head, then the text's checksum and length in bytes; behind it, its own checksum."""
_CHECKSUM = struct.Struct("<I")
_TEXT_AT = _HEAD.size + _CHECKSUM.size
_ZEROS = (0,) * NUMBERS


class Head(NamedTuple):
    """What a process saw last: the newest entry, under which tag, when, and NUMBERS numbers."""

    newest: tuple[int, int]
    tag: int
    at_ms: int
    numbers: tuple[int, ...]


class Slots:
    """An opened file with a slot of this process's own. Raises OSError where the file cannot be used.

    To be used by the process that opened it; a lock on the slot, which ends with the process, keeps others off. That
    lock is the whole process's: the same file must not be opened twice in it.
    """

    def __init__(self, path: str) -> None:
        if sys.platform == "win32":
            raise OSError(0, "this platform has no locks on parts of a file")
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._own = self._claim()
        except OSError:
            os.close(self._fd)
            raise
        self._at = self._own * SLOT_BYTES

    def write(self, newest: tuple[int, int], tag: int, at_ms: int, numbers: tuple[int, ...], text: str) -> None:
        """Set this process's slot. Of a longer text than fits, the first whole lines.

        At most NUMBERS numbers, 0 or more.
        """
        data = text.encode()
        if len(data) > SLOT_BYTES - _TEXT_AT:
            data = data[: data.rfind(b"\n", 0, SLOT_BYTES - _TEXT_AT) + 1]
        self._tag = tag
        self._rest = (*_ZEROS[len(numbers) :], zlib.crc32(data), len(data))
        head = _HEAD.pack(*newest, tag, at_ms, *numbers, *self._rest)
        os.pwrite(self._fd, head + _CHECKSUM.pack(zlib.crc32(head)) + data, self._at)

    def write_head(self, newest: tuple[int, int], at_ms: int, numbers: tuple[int, ...]) -> None:
        """Set the head alone, under the tag and beside the text of the last `write`: as many numbers as then.

        The one thing that every decision does here.
        """
        head = _HEAD.pack(*newest, self._tag, at_ms, *numbers, *self._rest)
        os.pwrite(self._fd, head + _CHECKSUM.pack(zlib.crc32(head)), self._at)

    def own(self) -> tuple[Head, str] | None:
        """What this process, or the one that had its slot before, wrote last."""
        return self._read(self._own)

    def all(self) -> list[tuple[Head, str]]:
        """What every process wrote last, also those that are gone."""
        return [found for found in map(self._read, range(self._used())) if found is not None]

    def newest(self, tag: int) -> tuple[tuple[int, int], int]:
        """The newest entry that another process has seen under this tag, (0, 0) for none.

        And when one last saw anything under another tag, 0 for never.
        """
        found = (self._head(slot) for slot in range(self._used()) if slot != self._own)
        heads = [head for head, _, _ in (one for one in found if one is not None)]
        newest = max((head.newest for head in heads if head.tag == tag), default=(0, 0))
        return newest, max((head.at_ms for head in heads if head.tag != tag), default=0)

    def clear_abandoned(self) -> None:
        """Empty the slots of processes that are gone."""
        for slot in range(self._used()):
            if slot != self._own and self._head(slot) is not None and self._lock(slot):
                os.pwrite(self._fd, bytes(_TEXT_AT), slot * SLOT_BYTES)
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, slot * SLOT_BYTES)

    def close(self) -> None:
        os.close(self._fd)

    def _claim(self) -> int:
        for slot in range(SLOTS):
            if self._lock(slot):
                return slot
        raise OSError(0, f"more than {SLOTS} processes use it at once")

    def _lock(self, slot: int) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot * SLOT_BYTES)
        except (BlockingIOError, PermissionError):  # POSIX allows both for a lock that another holds
            return False
        return True

    def _used(self) -> int:
        """How many slots were ever written: the lowest free one is claimed first."""
        return min(SLOTS, -(-os.fstat(self._fd).st_size // SLOT_BYTES))

    def _head(self, slot: int) -> tuple[Head, int, int] | None:
        """A head, its text's checksum and length."""
        for _ in range(3):  # its process may be writing it
            data = os.pread(self._fd, _TEXT_AT, slot * SLOT_BYTES)
            if len(data) < _TEXT_AT or not any(data):
                return None
            if _CHECKSUM.unpack_from(data, _HEAD.size)[0] == zlib.crc32(data[: _HEAD.size]):
                ms, seq, tag, at_ms, *numbers, checksum, length = _HEAD.unpack_from(data)
                return Head((ms, seq), tag, at_ms, tuple(numbers)), checksum, length
        return None

    def _read(self, slot: int) -> tuple[Head, str] | None:
        for _ in range(3):
            found = self._head(slot)
            if found is None:
                return None
            head, checksum, length = found
            text = os.pread(self._fd, min(length, SLOT_BYTES), slot * SLOT_BYTES + _TEXT_AT)
            if zlib.crc32(text) == checksum:
                return head, text.decode(errors="replace")
        return None
