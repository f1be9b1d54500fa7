"""The files of a journal: lines, notes, a file for each day, of which only the newest grows, and a lock.

    record_line, read_record    one line
    Notes                       how far a journal was compared with its log, the facts, and what else a machine notes
    DayFiles                    the files with the entries
    FileLock                    a lock for one process of a machine, and one thread of it, at a time

Each line has a length and a checksum, so a torn or damaged line is noticed.

    EPOCH  MS-SEQ  ENTRY...  LENGTH-CHECKSUM       an entry, as `quota.rules.entry.packed` writes it
    EPOCH  MS-SEQ  LENGTH-CHECKSUM                 a note: the id of this epoch's newest entry, which is further back

A file is named after the day (in UTC, by the ledger's clock) of the newest entry in it, so it can be deleted once that
day is old. A process appends lines with one `write` that begins with a newline, so a torn line of a killed process
spoils no later line. It holds no lock, and does not wait for the disk.

If a file's day is more than a day ahead, a wrong clock began it: it is read, but grows no more. It is as old as its
last line.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import UTC, datetime
from types import MappingProxyType
from typing import NamedTuple
from weakref import WeakSet, WeakValueDictionary
from zlib import crc32

from quota.common.clock import elapsed_s, utc
from quota.common.files import Opened, lack_of_room, make_folder, open_alone
from quota.common.findings import obstacle
from quota.common.fork import start_over_in_child
from quota.errors import LedgerError
from quota.rules.entry import START, Id, read_id
from quota.terms.limits import DAY_MS

# -- lines -------------------------------------------------------------------------------------------------------------


class Record(NamedTuple):
    """The content of a line. `text` is the packed entry, "" for a note."""

    epoch: str
    id: Id
    text: str


def framed(body: bytes) -> bytes:
    """The body with its length and checksum."""
    return b"%b\t%d-%d" % (body, len(body), crc32(body))


def unframed(stored: bytes) -> bytes | None:
    """The body of a stored line; None if the line is torn or damaged."""
    body, _, frame = stored.rpartition(b"\t")
    return body if frame == b"%d-%d" % (len(body), crc32(body)) else None


def record_line(epoch: str, entry_id: Id, text: str = "") -> bytes:
    """The line of a record. A newline, which another program may have put into a name, becomes a space."""
    fields = f"{epoch}\t{entry_id[0]}-{entry_id[1]}\t{text}" if text else f"{epoch}\t{entry_id[0]}-{entry_id[1]}"
    if "\n" in fields:
        fields = fields.replace("\n", " ")
    return framed(fields.encode())


def read_record(line: bytes) -> Record | None:
    """The record of a line; None if the line is empty, torn or damaged."""
    body = unframed(line)
    if not body:
        return None
    try:
        epoch, entry_id, *text = body.decode().split("\t", 2)
        return Record(epoch, read_id(entry_id), text[0] if text else "")
    except ValueError:
        return None


# -- notes -------------------------------------------------------------------------------------------------------------

MAX_NOTES_BYTES = 2**22

Position = Mapping[str, int]
"""A position in a journal: a byte of each file, and under "" the number of entries that were ever in memory."""


class Notes(NamedTuple):
    """What a machine notes of a log, beside its entries.

    All records up to `compared` are in the log of `epoch`. The log of `whole_epoch` was read up to `whole_to`, as far
    back as its entries count: the journal has all of these. `facts` is the text of the facts that were read. `ledger`
    is the ledger's name.
    """

    epoch: str = ""
    compared: Position = MappingProxyType({})
    whole_epoch: str = ""
    whole_to: Id = START
    facts: str = ""
    ledger: str = ""

    @classmethod
    def read(cls, stored: str) -> Notes:
        """The notes in a text. If it cannot be read, returns empty notes: then everything is compared again."""
        try:
            epoch, compared, whole_epoch, (ms, seq), facts, ledger = json.loads(stored)
            position = {name: int(at) for name, at in compared.items()}
            return cls(str(epoch), position, str(whole_epoch), (int(ms), int(seq)), str(facts), str(ledger))
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            return cls()

    def text(self) -> str:
        """The text for a file. It does not know what was in memory."""
        return json.dumps(self._replace(compared={name: at for name, at in self.compared.items() if name}))


def replace_text(path: str, text: str) -> None:
    """Replace a file by a text in one step. The caller must hold the lock beside it. Raises OSError."""
    make_folder(os.path.dirname(path))
    with os.fdopen(open_alone(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(framed(text.encode()))
    os.replace(f"{path}.new", path)


def read_text(path: str) -> str:
    """The text of a file; "" if there is no file, or a damaged one. Raises OSError."""
    with suppress(FileNotFoundError, ValueError), os.fdopen(open_alone(path, os.O_RDONLY), "rb") as file:
        return (unframed(file.read(MAX_NOTES_BYTES)) or b"").decode()
    return ""


# -- days --------------------------------------------------------------------------------------------------------------

CHUNK_BYTES = 2**18
"""The most of a file that is in memory at once, and the longest line."""

LEAST_BYTES = 4_096
"""More than the next lines or a draw need."""

LOOK_AGAIN_S = 1.0
"""How often a process reads a folder that seems unchanged: two files may be made in one tick of the system's clock."""

_NAME = re.compile(r"\d{4}-\d\d-\d\d")


class DayFiles:
    """The files of one journal that this process has open. Not safe for threads. Every failure raises OSError."""

    def __init__(self, folder: str, clock: Callable[[], int]) -> None:
        self.folder = folder
        self.names: list[str] = []
        """All files, oldest first."""
        self.name = ""
        """The file that grows; "" if there is none."""
        self._clock = clock
        self._ends_ms = 0
        self._seen = (0, 0, 0)
        """The identity of the folder, and when it changed."""
        self._look_again_s = 0.0
        self._open_file: Opened | None = None
        self._writes = False

    def growing(self) -> tuple[Opened | None, int]:
        """The file that grows, and its length in bytes. Notices files that other processes began."""
        self._look()
        file = self._open_file
        status = None if file is None else file.stat()
        if status is None and self.name:
            with suppress(FileNotFoundError):
                file = self._open(makes=False)
                status = file.stat()
        return (None, 0) if status is None else (file, status.st_size)

    def append(self, lines: bytes, newest_ms: int) -> tuple[Opened, int]:
        """Append lines between two newlines. `newest_ms` is the time of the newest line. Returns the file, and the end
        of the lines in it."""
        if newest_ms >= self._ends_ms:
            # Begin the file of this day, if the day is later than that of the newest file, and not too far ahead.
            self._look(at_once=True)
            name = _day(min(newest_ms, self._clock() + DAY_MS))
            if name > self.name:
                self.name, self._ends_ms, self._open_file = name, _end_ms(name), None
        file = self._open_file
        if file is None or not self._writes or file.stat() is None:
            make_folder(self.folder)
            file = self._open(makes=True)
        if os.write(file.fd, lines) < len(lines):
            os.write(file.fd, b"\n")  # raises what the system lacks
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path(self.name))
        return file, os.lseek(file.fd, 0, os.SEEK_CUR)

    def check_writable(self) -> None:
        """Try to open the file that grows, and write nothing. Without one, see whether it could be made."""
        self._look()
        if self.name:
            os.close(open_alone(self.path(self.name), os.O_WRONLY | os.O_APPEND))
            if code := lack_of_room(self.path(self.name), LEAST_BYTES):
                raise OSError(code, os.strerror(code), self.path(self.name))
        elif (prevented := obstacle(self.path("lock"))) is not None:
            raise OSError(errno.ENOTDIR, prevented[0], self.folder)

    def records(self, name: str, start: int, end: int, other_than: str | None = None) -> Iterator[Record]:
        """The records of a file between two bytes, or only those of epochs `other_than` this one; none if the file is
        gone."""
        epoch = None if other_than is None else f"{other_than}\t".encode()
        with suppress(FileNotFoundError), os.fdopen(open_alone(self.path(name), os.O_RDONLY), "rb") as file:
            file.seek(start)
            torn = b""
            while start < end and (data := file.read(min(CHUNK_BYTES, end - start))):
                start += len(data)
                *lines, torn = (torn + data).split(b"\n")
                if len(torn) > CHUNK_BYTES:
                    torn = b""
                others = [line for line in lines if epoch is None or not line.startswith(epoch)]
                yield from filter(None, map(read_record, others))
            yield from filter(None, [read_record(torn)])

    def ends(self) -> dict[str, int]:
        """The end of the last whole line of each file."""
        self._look()
        ends = {}
        for name in self.names:
            with suppress(FileNotFoundError), os.fdopen(open_alone(self.path(name), os.O_RDONLY), "rb") as file:
                size = file.seek(0, os.SEEK_END)
                start = max(0, size - 1)
                if os.pread(file.fileno(), 1, start) != b"\n":  # torn, or being written
                    start = max(0, size - CHUNK_BYTES)
                    start += os.pread(file.fileno(), size - start, start).rfind(b"\n")
                ends[name] = start + 1
        return ends

    def delete_before(self, before_ms: int) -> None:
        """Delete the files whose days had ended by this time, and those of days ahead that have not grown since. A
        clock that was behind may have begun a file of a day before its entries."""
        for name in self.names:
            with suppress(FileNotFoundError):  # another process was quicker
                path = self.path(name)
                status = os.stat(path)
                ends_ms = _end_ms(name) if name < self.name else status.st_mtime_ns // 1_000_000
                if name == self.name or ends_ms > before_ms:
                    continue
                records = [*self.records(name, max(0, status.st_size - CHUNK_BYTES), status.st_size)]
                if not records or not before_ms < records[-1].id[0] <= self._clock() + DAY_MS:
                    os.unlink(path)

    def path(self, name: str) -> str:
        return f"{self.folder}{os.sep}{name}"

    def close(self) -> None:
        """Close all files. The next use opens them again."""
        self._open_file = None
        self._seen = (0, 0, 0)

    def _open(self, *, makes: bool) -> Opened:
        """Open the file that grows; only for reading if it cannot be written."""
        path, writes = self.path(self.name), True
        try:
            fd = open_alone(path, os.O_RDWR | os.O_APPEND | (os.O_CREAT if makes else 0))
        except OSError as error:
            if makes or error.errno not in (errno.EACCES, errno.EROFS):
                raise
            fd, writes = open_alone(path, os.O_RDONLY), False
        self._open_file = file = Opened(fd)
        self._writes = writes
        return file

    def _look(self, *, at_once: bool = False) -> None:
        """Read the folder, if it has changed."""
        try:
            status, now_s = os.stat(self.folder), elapsed_s()
        except FileNotFoundError:
            self.close()
            self.names = []
        else:
            seen = (status.st_dev, status.st_ino, status.st_mtime_ns)
            if not at_once and seen == self._seen and now_s < self._look_again_s:
                return
            if seen[:2] != self._seen[:2]:  # somebody has moved our folder away
                self.close()
            self._look_again_s = now_s + LOOK_AGAIN_S
            self.names = sorted(name for name in os.listdir(self.folder) if _NAME.fullmatch(name))
            self._seen = seen
        latest = _day(self._clock() + DAY_MS)
        name = max((name for name in self.names if name <= latest), default="")
        if name != self.name:
            self.name, self._ends_ms = name, _end_ms(name) if name else 0
            self._open_file = None


def _day(at_ms: int) -> str:
    """The name of a file, such as `2026-11-28`. Names sort by day."""
    return f"{utc(at_ms):%Y-%m-%d}"


def _end_ms(name: str) -> int:
    """The end of a file's day; never, if the name is no day."""
    try:
        return int(datetime.fromisoformat(name).replace(tzinfo=UTC).timestamp()) * 1000 + DAY_MS
    except ValueError:
        return 2**53


# -- the lock ----------------------------------------------------------------------------------------------------------

_LOCK_AGAIN_S = 0.002


class _LockFile(io.FileIO):
    """A file that is locked until it is closed. C code closes it, where no signal handler runs: at the end of its
    block, or, if an exception comes before the block begins, as soon as nobody refers to it."""

    def __del__(self) -> None:
        self.close()


class FileLock:
    """A lock on a file, which the first lock makes. The thread that holds it may lock again.

    It ends with its block or its process. A forked child does not have its parent's lock.
    """

    def __init__(self, path: str, what: str) -> None:
        self._path, self._what = path, what
        self._opened: WeakSet[_LockFile] = WeakSet()  # nobody goes through it while other threads add to it
        self._held: WeakValueDictionary[int, _LockFile] = WeakValueDictionary()  # by the thread that locked it
        start_over_in_child(self)

    def taken(self, wait_s: float) -> AbstractContextManager[object]:
        """Take the lock, until the `with` block of the returned value ends.

        Raises LedgerError if another process holds it for `wait_s`, and OSError if nobody can lock it.
        """
        me = threading.get_ident()
        held = self._held.get(me)
        if held is not None and not held.closed:
            return nullcontext()
        make_folder(os.path.dirname(self._path))
        file = _LockFile(self._path, "r+", opener=lambda path, _: open_alone(path, os.O_RDWR | os.O_CREAT))
        try:
            self._opened.add(file)
            self._wait_for(file, wait_s)
            self._held[me] = file
        except BaseException:
            file.close()
            raise
        return file

    def start_over_in_child(self) -> None:
        """Close the copies, which would hold the parent's lock as long as the child lives."""
        for file in list(self._opened):
            file.close()

    def _wait_for(self, file: _LockFile, wait_s: float) -> None:
        end_s = elapsed_s() + wait_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if elapsed_s() >= end_s:
                    raise LedgerError(
                        f"{self._what}: another process of this machine has held it for more than {wait_s:g} s; "
                        f"try again, or see which: fuser {self._path}"
                    ) from None
            time.sleep(_LOCK_AGAIN_S)
