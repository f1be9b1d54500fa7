"""A journal: what the processes of one machine have made and read of one ledger's log, entry by entry.

    write, newest         each entry, before `charge` returns; and the newest one, which a log must have
    records, uncompared,  what a union takes, and whether somebody has to look for what a log lacks
    compared
    whole, note_whole     from where to where nothing of a log is missing here
    facts, write_facts    the newest facts
    draws                 what was drawn while the ledger did not answer: no log has it yet, and no union takes it
    left_behind           projects that a configuration charged, and names no more

A ledger that was emptied, restored, or replaced by a replica that lagged lacks what stands here. An entry is written
before anybody relies on it. It survives the process, though not always a loss of power: that is for the draws alone.

Where the disk is full or the folder cannot be written, the newest entries are kept in memory, and the process says so
once. They are written when that works again.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from quota.common.clock import host_clock
from quota.common.fork import OfOneProcess, start_over_in_child
from quota.common.log import warn
from quota.common.text import one_line
from quota.errors import LedgerError
from quota.journal.draws import Draws
from quota.journal.files import (
    SPELLING,
    DayFiles,
    Marks,
    Opened,
    Position,
    marks_text,
    read_marks,
    read_record,
    read_text,
    record_line,
    replace_text,
)
from quota.journal.lock import FileLock
from quota.ledger.factory import Identity
from quota.ledger.log import SLACK_MS
from quota.rules.entry import START, Entry, Id, id_text, packed, read_id, unpacked

FOLDER = "journals"
"""Part of the state folder. It has one folder for each project and endpoint, with one for each identity."""

WAIT_S = 0.3
"""How long somebody waits for another process that compares or hands over."""

MAX_IN_MEMORY = 100_000
"""So many entries are kept while no file takes them: the newest."""

MAX_RECENT = 20_000
"""A process writes no key again that is among so many that it wrote last."""

TAIL_BYTES = 2**14
"""So much is read of what others have written since. The line behind a long batch says what the newest entry is."""

FEW_LINES = 20
"""A longer batch takes more of the tail than what several processes write at a time."""

SEARCH_BYTES = 2**20
"""So far back a process looks for the newest entry of an epoch that is not the last one."""

NOTE_BYTES = 2**16
"""After so much of one epoch the marks follow, so that nobody reads it again to see that it is of one epoch."""

RETRY_S = 1.0
"""How long nothing is written after it failed."""

_MAX_EPOCHS = 100


class Journal(OfOneProcess):
    """The journal of one identity. Threads may share one; a signal handler may use it; a forked child opens it anew.

    `folder` is the machine's state folder, and `keep_ms` the longest window: what is older than that and SLACK_MS is
    deleted. The first entry makes the files.
    """

    def __init__(
        self, folder: Path | None, identity: Identity, *, keep_ms: int, clock: Callable[[], int] = host_clock
    ) -> None:
        self._identity, self._keep_ms, self._clock = identity, keep_ms, clock
        upstream = None if folder is None else upstream_folder(folder, identity)
        self._upstream = upstream or ""
        own = "" if upstream is None else f"{upstream}{os.sep}{identity.hash}"
        self.draws = Draws(upstream, identity, keep_ms=keep_ms)
        self._files = DayFiles(own, clock) if own else None
        self._what = f"journal {one_line(own)}" if own else "journal in memory"
        self._file_lock = FileLock(f"{own}{os.sep}lock", self._what) if own else None
        self._lock = threading.RLock()
        self._memory: deque[tuple[str, Entry]] = deque(maxlen=MAX_IN_MEMORY)
        self._remembered = 0
        self._recent: dict[str, None] = {}
        self._recent_epoch = ""
        self._newest: dict[str, Id] = {}
        self._confirmed: set[str] = set()
        self._noted: set[str] = set()
        """The epochs of what was noted since it was last known that all of it is compared; "": it may be any."""
        self._followed: tuple[Opened | None, int, int] = (None, 0, 0)
        self._clean: tuple[object, ...] = ()
        self._clean_ends: Position = {}
        self._marks, self._marks_look = Marks(), -1
        self._facts, self._facts_look = ("", START, ""), -1
        self._trouble = ""
        self._warned = False
        self._retry_s = 0.0
        start_over_in_child(self)

    @classmethod
    def in_memory(cls, identity: Identity, *, keep_ms: int = 0) -> Journal:
        """A journal without files, for a ledger that ends with its process. Nothing is drawn there."""
        return cls(None, identity, keep_ms=keep_ms)

    @property
    def exists(self) -> bool:
        """Whether anything of the project was ever noted on this machine."""
        return bool(self._upstream) and os.path.isdir(self._upstream)

    @property
    def trouble(self) -> str:
        """Why entries are kept in memory, in one line; "" if they are written."""
        return self._trouble

    # Entries

    def write(self, epoch: str, entries: Sequence[Entry]) -> None:
        """Note entries of the log of this epoch. Those that this process has lately noted are left out. Whoever writes
        has asked for the `newest` before."""
        with self._lock:
            if epoch != self._recent_epoch:
                self._recent_epoch, self._recent = epoch, {}
            recent = self._recent
            news = [entry for entry in entries if entry.key not in recent and entry.kind != "unreadable"]
            if not news:
                return
            newest = news[0].id if len(news) == 1 else max(entry.id for entry in news)
            self._noted.add(epoch)
            self._store(epoch, news, newest)
            if newest > self._newest.get(epoch, START):
                self._note_newest(epoch, newest)
            if len(recent) > MAX_RECENT:
                recent.clear()
            for entry in news:
                recent[entry.key] = None

    def newest(self, epoch: str) -> Id:
        """The newest entry of this epoch that any process of this machine has noted; START for none."""
        with self._lock:
            if self._files is not None:
                try:
                    self._follow(self._files)
                    if epoch not in self._confirmed:
                        self._search_back(self._files, epoch)
                except OSError as error:
                    self._fail(error)
            return self._newest.get(epoch, START)

    def position(self) -> dict[str, int]:
        """How far the journal goes: to be asked for before `records`, and noted by `compared`."""
        with self._lock:
            ends = {}
            if self._files is not None:
                try:
                    ends = self._files.ends()
                except OSError as error:
                    self._fail(error)
            return {**ends, "": self._remembered}

    def records(self, since: Position | None = None) -> Iterator[tuple[str, Entry]]:
        """What was noted behind a position, each with its epoch, in the order in which it was noted. An entry may come
        several times. What is damaged, or older than the journal keeps, is left out.

        What was drawn and not handed over is not among it.
        """
        since = since or {}
        self.newest("")  # for the age
        before_ms = self._oldest_ms()
        for name, end in self.position().items():
            if name and self._files is not None:
                try:
                    for lines in self._files.lines(name, _start(since, name, end), end):
                        for record in map(read_record, lines):
                            if record is not None and record.text and record.id[0] > before_ms:
                                yield record.epoch, unpacked(record.id, record.text)
                except OSError as error:
                    self._fail(error)
        with self._lock:
            memory = self._remembered_since(since)
        yield from memory

    # Comparing

    def uncompared(self, epoch: str) -> bool:
        """Whether something was noted of another epoch that was not compared with the log of this epoch yet."""
        with self._lock:
            try:
                is_clean, ends, read_bytes = self._look_for_others(epoch)
            except OSError as error:
                self._fail(error)
                return any(noted != epoch for noted, _ in self._memory)
        if is_clean and read_bytes > NOTE_BYTES:
            self._change_marks(lambda marks: marks._replace(epoch=epoch, compared=ends), wait_s=0)
        return not is_clean

    def is_late(self, epoch: str) -> bool:
        """Whether, when the `newest` was asked for, something had come that was not compared with the log of this
        epoch: of a process or a thread that was slow, and still had an answer of the log before it."""
        with self._lock:
            if self._noted <= {epoch}:
                return False
            if self.uncompared(epoch):
                return True
            self._noted.clear()
            return False

    def compared(self, epoch: str, through: Position) -> None:
        """Note that the log of this epoch has all that was noted up to `through`."""
        self._change_marks(lambda marks: marks._replace(epoch=epoch, compared=dict(through)))
        with self._lock:
            if self.position() == through:  # also where the marks cannot be written
                self._noted.clear()

    def whole(self, epoch: str) -> tuple[Id, Id] | None:
        """Behind which entry, and up to which, all of the log of this epoch is noted here."""
        marks = self._read_marks()
        return (marks.whole_from, marks.whole_to) if marks.whole_epoch == epoch and marks.whole_epoch else None

    def note_whole(self, epoch: str, after: Id, through: Id) -> None:
        """Note that all with after < id <= through was noted here. Of two parts with a gap between, the later holds."""

        def changed(marks: Marks) -> Marks:
            first, last = after, through
            if marks.whole_epoch == epoch:
                if first <= marks.whole_to and marks.whole_from <= last:
                    first, last = min(first, marks.whole_from), max(last, marks.whole_to)
                elif last < marks.whole_to:
                    return marks
            return marks._replace(whole_epoch=epoch, whole_from=first, whole_to=last)

        self._change_marks(changed)

    def locked(self, wait_s: float = WAIT_S) -> AbstractContextManager[object]:
        """Alone on this machine inside the block: for comparing, and for handing over. Its thread may lock again.

        Raises LedgerError if another is not done by then. Where nobody can lock, as in a folder that cannot be written,
        each goes on by itself: what a union must not lose is guarded by the log's own fence.
        """
        if self._file_lock is None:
            return nullcontext()
        try:
            return self._file_lock.taken(wait_s)
        except OSError as error:
            self._fail(error)
            return nullcontext()

    # Facts

    def facts(self) -> str:
        """The newest facts; "" for none."""
        return self._read_facts()[2]

    def write_facts(self, epoch: str, text: str, seen: Id = START) -> None:
        """Note the facts that were read when the log of this epoch was read up to `seen`: older ones of the same epoch
        do not replace newer ones."""
        if self._read_facts() == (epoch, seen, text):
            return
        with suppress(LedgerError), self.locked(), self._lock:
            self._facts_look = -1
            before = self._read_facts()
            if before[0] == epoch and before[1] > seen:
                return
            self._facts = (epoch, seen, text)
            if self._files is not None:
                try:
                    replace_text(self._files.path("facts"), f"{epoch}\t{id_text(seen)}\t{text}")
                except OSError as error:
                    self._fail(error)

    def close(self) -> None:
        """Release the files. May be called twice; they are opened again where the journal is used again."""
        with self._lock:
            self._let_go()

    def start_over_in_child(self) -> None:
        """The parent's descriptors have one place in their file with the child's, and its locks may be held."""
        self._lock = threading.RLock()
        self.draws.start_over()
        if self._file_lock is not None:
            self._file_lock.start_over()
        self._let_go()

    # Private

    def _let_go(self) -> None:
        self._followed, self._clean = (None, 0, 0), ()
        if self._files is not None:
            self._files.close()

    def _store(self, epoch: str, news: Sequence[Entry], newest: Id) -> None:
        """Write to the file, or else to memory."""
        files = self._files
        if files is None or (self._trouble and time.monotonic() < self._retry_s):
            self._remember(epoch, news)
            return
        try:
            if self._memory:
                self._write_remembered(files)
            named = files.name
            lines = [record_line(epoch, entry.id, packed(entry)) for entry in news]
            if len(lines) > FEW_LINES:  # a new process will read no further back than these: they end with the newest
                self._follow(files)
            self._append(files, lines, newest)
            if len(lines) > FEW_LINES:
                self._follow(files)
            if self._newest.get(epoch, START) > newest:
                self._append(files, [record_line(epoch, self._newest[epoch])], newest)
            if files.name != named:
                self._delete_old(files, newest[0])
        except OSError as error:
            self._fail(error)
            self._remember(epoch, news)

    def _append(self, files: DayFiles, lines: Sequence[bytes], newest: Id) -> None:
        data = b"\n%b\n" % b"\n".join(lines)
        file, end = files.append(data, newest[0])
        start = end - len(data)
        if self._followed == (file, start, start):  # else somebody else has written, too
            self._followed = (file, end, end)
        if self._trouble:
            self._trouble = ""

    def _write_remembered(self, files: DayFiles) -> None:
        """Write what no file took, now that one may."""
        waiting = list(self._memory)
        lines = [record_line(epoch, entry.id, packed(entry)) for epoch, entry in waiting]
        self._append(files, lines, max(entry.id for _, entry in waiting))
        self._memory.clear()

    def _remember(self, epoch: str, news: Sequence[Entry]) -> None:
        self._memory.extend((epoch, entry) for entry in news)
        self._remembered += len(news)

    def _delete_old(self, files: DayFiles, newest_ms: int) -> None:
        """By the earlier of two clocks, so that none of them alone makes a journal forget."""
        with suppress(OSError):
            files.delete_before(min(newest_ms, self._clock()) - self._keep_ms - SLACK_MS)

    def _oldest_ms(self) -> int:
        newest_ms = max((entry_id[0] for entry_id in self._newest.values()), default=0)
        return min(newest_ms, self._clock()) - self._keep_ms - SLACK_MS

    def _note_newest(self, epoch: str, entry_id: Id) -> None:
        if entry_id > self._newest.get(epoch, START):
            self._newest[epoch] = entry_id
            if len(self._newest) > _MAX_EPOCHS:
                del self._newest[next(iter(self._newest))]

    def _follow(self, files: DayFiles) -> None:
        """Read what others have written since. Of a file that is new to this process, only its end."""
        file, size = files.growing()
        before, at, looked = self._followed
        if file is None or (file is before and size == looked):
            return
        goes_on = file is before and at <= size <= at + SEARCH_BYTES
        if not goes_on:
            at = max(0, size - TAIL_BYTES)
            self._confirmed.clear()
            self._noted.add("")
        whole, newline, _ = os.pread(file.fd, size - at, at).rpartition(b"\n")
        for line in filter(None, whole.split(b"\n")):
            record = read_record(line)
            if record is not None:
                self._note_newest(record.epoch, record.id)
                self._confirmed.add(record.epoch)
                self._noted.add(record.epoch)
        self._followed = (file, at + len(whole) + len(newline), size)

    def _search_back(self, files: DayFiles, epoch: str) -> None:
        """Look for an epoch further back, but not for ever: what was noted under another one is compared anyway."""
        left = SEARCH_BYTES
        for name, end in reversed(files.ends().items()):
            start = max(0, end - left)
            left -= end - start
            for lines in files.lines(name, start, end):
                for record in map(read_record, lines):
                    if record is not None:
                        self._note_newest(record.epoch, record.id)
                        self._confirmed.add(record.epoch)
            if epoch in self._confirmed or left <= 0:
                break
        self._confirmed.add(epoch)

    def _look_for_others(self, epoch: str) -> tuple[bool, Position, int]:
        """Whether all that is not compared is of this epoch, up to where, and how many bytes had to be read for it."""
        files = self._files
        state = (epoch, self._remembered, *((*files.growing(), files.looks) if files is not None else ()))
        if state == self._clean:
            return True, {}, 0
        marks, ends = self._read_marks(), self.position()
        since = marks.compared if marks.epoch == epoch else {}
        if self._clean and self._clean[0] == epoch:
            since = {name: max(since.get(name, 0), self._clean_ends.get(name, 0)) for name in ends}
        if files is not None:
            for name, end in ends.items():
                if name and _has_another(files, name, _start(since, name, end), end, epoch):
                    return False, {}, 0
        if any(noted != epoch for noted, _ in self._remembered_since(since)):
            return False, {}, 0
        self._clean, self._clean_ends = state, ends
        noted = marks.compared if marks.epoch == epoch else {}
        return True, ends, sum(end - _start(noted, name, end) for name, end in ends.items() if name)

    def _remembered_since(self, since: Position) -> list[tuple[str, Entry]]:
        passed = since.get("", 0) - (self._remembered - len(self._memory))
        return list(self._memory)[max(0, passed) :]

    def _read_marks(self) -> Marks:
        with self._lock:
            files = self._files
            if files is None:
                return self._marks
            try:
                files.growing()
                if files.looks != self._marks_look:
                    marks = read_marks(read_text(files.path("marks")))
                    in_memory = self._marks.compared.get("", 0) if self._marks.epoch == marks.epoch else 0
                    self._marks = marks._replace(compared={**marks.compared, "": in_memory})
                    self._marks_look = files.looks
            except OSError as error:
                self._fail(error)
            return self._marks

    def _change_marks(self, changed: Callable[[Marks], Marks], wait_s: float = WAIT_S) -> None:
        """Where somebody else is at it for long, nothing is noted: it is compared again, or read again."""
        with suppress(LedgerError), self.locked(wait_s), self._lock:
            self._marks_look = -1
            before = self._read_marks()
            self._marks = changed(before)
            if self._files is not None and self._marks != before:
                try:
                    replace_text(self._files.path("marks"), marks_text(self._marks))
                except OSError as error:
                    self._fail(error)

    def _read_facts(self) -> tuple[str, Id, str]:
        with self._lock:
            files = self._files
            if files is not None:
                try:
                    files.growing()
                    if files.looks != self._facts_look:
                        self._facts, self._facts_look = _facts_in(read_text(files.path("facts"))), files.looks
                except OSError as error:
                    self._fail(error)
            return self._facts

    def _fail(self, error: OSError) -> None:
        """Say once why the files cannot be used."""
        if error.errno is None:  # not the system's: the TimeoutError of a signal handler
            raise error
        self._retry_s = time.monotonic() + RETRY_S
        self._trouble = f"{self._what}: {error.strerror}"
        if not self._warned:
            self._warned = True
            warn("journal_unusable", f"{self._trouble}; entries are kept in memory", project=self._identity.project)


def upstream_folder(folder: Path, identity: Identity) -> str:
    """Where in a state folder the journals of one upstream project are."""
    spelled = re.sub(r"[^A-Za-z0-9._-]", "_", identity.project)
    return os.sep.join((str(folder), FOLDER, f"{spelled}-{identity.upstream_hash[:16]}"))


def left_behind(folder: Path, identities: Sequence[Identity], now_ms: int, longest_ms: int) -> list[tuple[str, int]]:
    """The projects of a state folder that the configurations of these identities charged and that none of them is of,
    as the names of folders spell them; and until when what this machine noted of each may count: `longest_ms` after it
    was noted last.

    A project at another endpoint has the same name, and is none of these.
    """
    spelled = {os.path.basename(upstream_folder(folder, identity)).rpartition("-")[0] for identity in identities}
    configurations = {identity.ledger for identity in identities}
    left: dict[str, int] = {}
    with suppress(OSError):
        for name in sorted(os.listdir(folder / FOLDER)):
            project, _, upstream = name.rpartition("-")
            if project in spelled or not re.fullmatch(r"[0-9a-f]{16}", upstream):
                continue
            hashes = {Identity(ledger, project).hash for ledger in configurations}
            for own in os.scandir(folder / FOLDER / name):
                if own.name in hashes and own.is_dir(follow_symlinks=False):
                    until_ms = _noted_ms(own.path) + longest_ms
                    if until_ms > now_ms:
                        left[project] = max(until_ms, left.get(project, 0))
    return sorted(left.items())


def _noted_ms(path: str) -> int:
    """When something was noted in a journal last; 0 for an empty one."""
    return max((entry.stat().st_mtime_ns // 1_000_000 for entry in os.scandir(path)), default=0)


def _facts_in(stored: str) -> tuple[str, Id, str]:
    """The epoch, the newest entry that was read, and the facts; of a text that is none of ours, nothing."""
    try:
        epoch, seen, text = stored.split("\t", 2)
        return epoch, read_id(seen), text
    except ValueError:
        return "", START, ""


def _start(since: Position, name: str, end: int) -> int:
    """Where to go on in a file. One that is shorter than it was is another one."""
    at = since.get(name, 0)
    return at if at <= end else 0


def _has_another(files: DayFiles, name: str, start: int, end: int, epoch: str) -> bool:
    """Whether an entry of another epoch stands between these bytes."""
    beginning = f"{epoch}\t".encode(errors=SPELLING)
    for lines in files.lines(name, start, end):
        for line in lines:
            if line and not line.startswith(beginning):
                record = read_record(line)
                if record is not None and record.text and record.epoch != epoch:
                    return True
    return False
