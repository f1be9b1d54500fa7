"""One small file into which many processes write, each its own slot: no lock is held while writing, and none waits.

A slot is a head (the newest entry that its process has seen, and a tag) and a text, written together. A text carries a
checksum: one that was cut off in the middle is no text. Nothing waits for the disk: what a process wrote survives its
death, though not always its machine's.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib

SLOTS = 64
"""More processes of one machine at a time find no slot of their own."""

SLOT_BYTES = 16_384

_HEAD = struct.Struct("<QQQII")
"""ms, seq, tag; then the text's checksum and length in bytes."""

Head = tuple[int, int, int]


class Slots:
    """An opened file with a slot of this process's own. Raises OSError where the file cannot be used.

    To be used by the process that opened it; a lock on the slot, which ends with the process, keeps others off. That
    lock is the whole process's: the same file must not be opened twice in it.
    """

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._own = self._claim()
        except OSError:
            os.close(self._fd)
            raise

    def write(self, newest: tuple[int, int], tag: int, text: str) -> None:
        """Set this process's slot. Of a longer text than fits, the first whole lines."""
        data = text.encode()
        if len(data) > SLOT_BYTES - _HEAD.size:
            data = data[: data.rfind(b"\n", 0, SLOT_BYTES - _HEAD.size) + 1]
        head = _HEAD.pack(newest[0], newest[1], tag, zlib.crc32(data), len(data))
        os.pwrite(self._fd, head + data, self._own * SLOT_BYTES)

    def own(self) -> str:
        """What this process, or the one that had its slot before, wrote last."""
        return self._text(self._own)

    def texts(self) -> list[str]:
        """Every text in the file, also those of processes that are gone."""
        return [text for text in map(self._text, range(self._used())) if text]

    def newest(self, tag: int) -> tuple[int, int]:
        """The newest entry that another process has seen under this tag, (0, 0) for none. May be torn: a hint."""
        heads = (self._head(slot) for slot in range(self._used()) if slot != self._own)
        return max(((ms, seq) for ms, seq, its in heads if its == tag), default=(0, 0))

    def clear_abandoned(self) -> None:
        """Empty the slots of processes that are gone."""
        for slot in range(self._used()):
            if slot != self._own and self._head(slot)[0] and self._lock(slot):
                os.pwrite(self._fd, bytes(_HEAD.size), slot * SLOT_BYTES)
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

    def _head(self, slot: int) -> Head:
        data = os.pread(self._fd, _HEAD.size, slot * SLOT_BYTES)
        return _HEAD.unpack(data)[:3] if len(data) == _HEAD.size else (0, 0, 0)

    def _text(self, slot: int) -> str:
        for _ in range(3):  # another process may be writing it
            data = os.pread(self._fd, SLOT_BYTES, slot * SLOT_BYTES)
            if len(data) < _HEAD.size:
                return ""
            *_, checksum, length = _HEAD.unpack_from(data)
            text = data[_HEAD.size : _HEAD.size + length]
            if zlib.crc32(text) == checksum:
                return text.decode(errors="replace")
        return ""
