"""A journal: the entries that the processes of one machine have made and read in one ledger's log.

    write, newest, late   notes each entry before `charge` returns; and entries that the log must have
    records, uncompared,  the entries for a union, and whether they must be compared with the log
    compared
    whole, note_whole     how far the log is complete here
    notes, note           what else is noted: the name of the ledger
    note_facts            the facts that this machine has read
    draws                 draws on the allowance: no log has them yet, and no union takes them
    apart, of_one_log     which other configurations count the project in another ledger, or in the same
    left_behind           projects that a configuration charged but no longer names

If a ledger is emptied, restored, or replaced by a lagging replica, it lacks entries of the journal. An entry is written
before anybody relies on it. It survives the end of the process, but not always a power failure; only draws do.

If the disk is full or the folder cannot be written, the process keeps the newest entries in memory and logs that once.
It writes them when the disk works again.
"""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

from quota.common.clock import elapsed_s, host_clock
from quota.common.files import Opened
from quota.common.fork import OfOneProcess, start_over_in_child
from quota.common.log import warn
from quota.common.text import one_line
from quota.errors import LedgerError
from quota.journal.draws import Draws
from quota.journal.files import DayFiles, FileLock, Notes, Position, read_record, read_text, record_line, replace_text
from quota.ledger.factory import Identity, hash_of
from quota.rules.entry import START, Entry, Id, packed, unpacked
from quota.rules.facts import Facts, union
from quota.terms.limits import SLACK_MS

T = TypeVar("T")

FOLDER = "journals"
"""The folder in the state folder. It has a folder for each project and endpoint, with a folder for each identity."""

WAIT_S = 0.3
"""How long a process waits for another process that compares or hands over."""

MAX_IN_MEMORY = 100_000
"""The most entries in memory while no file can be written: the newest."""

MAX_RECENT = 20_000
"""A process remembers its last keys, up to so many, and does not write them again."""

MAX_LATE = 100
"""The most late entries that a process looks for."""

TAIL_BYTES = 2**14
"""How much of a new file a process reads at its end. The note after a long batch has the newest entry."""

FEW_LINES = 20
"""The longest batch that leaves room in the tail for the lines of other processes."""

SEARCH_BYTES = 2**20
"""How far back a process looks for the newest entry of an epoch that is not the last."""

NOTE_BYTES = 2**16
"""After reading so much of one epoch, a process notes how far, so that no process reads it again."""

RETRY_S = 1.0
"""How long a process writes nothing after a failure."""

_MAX_EPOCHS = 100


class Journal(OfOneProcess):
    """The journal of one identity. Threads may share it, and a signal handler may use it; a forked child opens it
    again.

    `folder` is the machine's state folder, and `keep_ms` the longest window: entries older than that plus SLACK_MS are
    deleted. The first entry makes the files.
    """

    def __init__(
        self, folder: Path, identity: Identity, *, keep_ms: int, clock: Callable[[], int] = host_clock
    ) -> None:
        self._identity, self._keep_ms, self._clock = identity, keep_ms, clock
        self._upstream = upstream_folder(folder, identity)
        own = f"{self._upstream}{os.sep}{identity.hash}"
        self.draws = Draws(self._upstream, identity, keep_ms=keep_ms)
        self._files = DayFiles(own, clock)
        self._what = f"journal {one_line(own)}"
        self._file_lock = FileLock(f"{own}{os.sep}lock", self._what)
        self._lock = threading.RLock()
        self._memory: deque[tuple[str, Entry]] = deque(maxlen=MAX_IN_MEMORY)
        self._remembered = 0  # how many entries have ever gone to memory
        self._recent: dict[str, None] = {}  # the keys that were noted last, in order
        self._recent_epoch = ""
        self._newest: dict[str, Id] = {}
        self._late: tuple[str, tuple[Id, ...]] = ("", ())  # of one epoch, see `late`
        self._confirmed: set[str] = set()  # the epochs whose newest entry was looked for
        self._noted: set[str] = set()
        """The epochs of the entries noted since the last full comparison; "" stands for any epoch."""
        self._followed: tuple[Opened | None, int, int] = (None, 0, 0)
        """The newest file, the end of its last whole line that was read, and its size then."""
        self._notes = Notes()
        self.trouble = ""
        """Why entries stay in memory, in one line; "" if they are written."""
        self._warned = False
        self._retry_s = 0.0
        start_over_in_child(self)

    @property
    def exists(self) -> bool:
        """Whether this machine has ever noted anything of the project."""
        return os.path.isdir(self._upstream)

    def apart(self, epoch: str) -> dict[Id, int]:
        """The last entries that other configurations of this machine noted of the same upstream project under other
        epochs, each with the time when. Raises OSError."""
        others = self._last_noted()
        others.pop(self._identity.hash, None)
        apart = {name: last for name, (noted, last) in others.items() if noted != epoch}
        return {last: _noted_ms(f"{self._upstream}{os.sep}{name}") for name, last in apart.items()}

    def of_one_log(self) -> Mapping[str, Id]:
        """The hashes of the configurations whose journals last noted an entry of the same epoch as this one, with that
        entry: for example this configuration at another path. A copy of the log has the same epoch."""
        try:
            noted = self._last_noted()
        except OSError:
            return {}
        own_epoch, _ = noted.get(self._identity.hash, ("", START))
        return {name: entry_id for name, (epoch, entry_id) in noted.items() if epoch == own_epoch}

    def _last_noted(self) -> dict[str, tuple[str, Id]]:
        """The epoch and the id of the last entry in each configuration's journal of the same upstream project. Raises
        OSError."""
        last = {}
        for own in os.scandir(self._upstream):
            files = DayFiles(own.path, self._clock)
            name, end = max(files.ends().items(), default=("", 0)) if own.is_dir() else ("", 0)
            noted = [*files.records(name, max(0, end - TAIL_BYTES), end)] if name else []
            if noted:
                last[own.name] = (noted[-1].epoch, noted[-1].id)
        return last

    # -- entries -------------------------------------------------------------------------------------------------------

    def write(self, epoch: str, entries: Sequence[Entry]) -> None:
        """Note entries of the log of this epoch, without entries that this process has noted lately. The caller must
        have asked for the `newest` before."""
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
            self._note_newest(epoch, newest)
            if len(recent) > MAX_RECENT:
                recent.clear()
            for entry in news:
                recent[entry.key] = None

    def newest(self, epoch: str) -> Id:
        """The newest entry of this epoch that any process of this machine has noted; START if there is none."""

        def look() -> None:
            self._follow()
            if epoch not in self._confirmed:
                self._search_back(epoch)

        with self._lock:
            self._tried(look)
            return self._newest.get(epoch, START)

    def late(self, epoch: str) -> Sequence[Id]:
        """The last entries of this epoch that were noted after a newer one, until they are `proved`. An old copy of the
        log may have come back between, and then the newest entry does not show the loss."""
        of_epoch, late = self._late
        return late if of_epoch == epoch else ()

    def proved(self, epoch: str, entries: Sequence[Id]) -> None:
        """Note that the log has these entries."""
        with self._lock:
            if late := self.late(epoch):
                self._late = (epoch, tuple(entry_id for entry_id in late if entry_id not in entries))

    def doubt(self, epoch: str, entry_id: Id) -> None:
        """Note an entry once more, now late, because the log may lack it: all processes of this machine look for it."""
        with self._lock:
            self._tried(lambda: self._append([record_line(epoch, entry_id)], entry_id))
            self._note_newest(epoch, entry_id)

    def check_writable(self) -> None:
        """Try to open the file for the next entry. `trouble` says why it cannot be written."""
        with self._lock:
            self._tried(self._files.check_writable)

    def position(self) -> dict[str, int]:
        """The end of the journal. Ask for it before `records`, and pass it to `compared`."""
        with self._lock:
            return {**(self._tried(self._files.ends) or {}), "": self._remembered}

    def records(self, since: Position | None = None) -> Iterator[tuple[str, Entry]]:
        """The entries after a position, with their epochs, file by file. An entry may come several times, also with
        other ids: a repair dates it anew. Damaged lines are left out.

        Draws that are not handed over are not among them.
        """
        since = since or {}
        for name, end in self.position().items():
            if name:
                try:
                    for record in self._files.records(name, _start(since, name, end), end):
                        if record.text:
                            yield record.epoch, unpacked(record.id, record.text)
                except OSError as error:
                    self._fail(error)
        with self._lock:
            memory = self._remembered_since(since)
        yield from memory

    # -- comparing -----------------------------------------------------------------------------------------------------

    def uncompared(self, epoch: str) -> bool:
        """Whether the journal has entries of other epochs that were not compared with the log of this epoch."""
        with self._lock:
            notes, ends = self.notes(), self.position()
            compared = notes.compared if notes.epoch == epoch else {}
            starts = {name: _start(compared, name, end) for name, end in ends.items() if name}
            has_others = any(noted != epoch for noted, _ in self._remembered_since(compared))
            others = (self._files.records(name, at, ends[name], other_than=epoch) for name, at in starts.items())
            try:
                has_others |= any(record.text and record.epoch != epoch for records in others for record in records)
            except OSError as error:
                self._fail(error)
                return has_others
        if not has_others and sum(ends[name] - at for name, at in starts.items()) > NOTE_BYTES:
            self._change(lambda notes: notes._replace(epoch=epoch, compared=ends), wait_s=0)
        return has_others

    def is_late(self, epoch: str) -> bool:
        """Whether, at the last `newest`, the journal had entries that were not compared with the log of this epoch: a
        slow process or thread may have noted an answer of the log before."""
        with self._lock:
            if self._noted <= {epoch}:
                return False
            if self.uncompared(epoch):
                return True
            self._noted.clear()
            return False

    def compared(self, epoch: str, through: Position) -> None:
        """Note that the log of this epoch has all entries of the journal up to `through`."""
        self.note(epoch=epoch, compared=dict(through))
        with self._lock:
            if self.position() == through:  # even if the notes cannot be written
                self._noted.clear()

    def whole(self, epoch: str) -> Id | None:
        """The entry up to which the log of this epoch is complete here; None if unknown."""
        notes = self.notes()
        return notes.whole_to if epoch and notes.whole_epoch == epoch else None

    def note_whole(self, epoch: str, through: Id) -> None:
        """Note that all entries up to this one are here, unless a later one is noted."""

        def changed(notes: Notes) -> Notes:
            before = notes.whole_to if notes.whole_epoch == epoch else START
            return notes._replace(whole_epoch=epoch, whole_to=max(through, before))

        self._change(changed)

    def locked(self, wait_s: float = WAIT_S) -> AbstractContextManager[object]:
        """Exclude other processes of this machine inside the block, to compare or to hand over. Its thread may lock
        again.

        Raises LedgerError if another process holds the lock for longer. If nobody can lock, as in a folder that cannot
        be written, each goes on alone: the log's own fence protects a union.
        """
        try:
            return self._file_lock.taken(wait_s)
        except OSError as error:
            self._fail(error)
            return nullcontext()

    # -- notes ---------------------------------------------------------------------------------------------------------

    def notes(self) -> Notes:
        """What this machine has noted. If the file cannot be read, what this process knows of it."""
        with self._lock:
            if text := self._tried(lambda: read_text(self._files.path("notes"))):
                before, notes = self._notes, Notes.read(text)
                in_memory = before.compared.get("", 0) if before.epoch == notes.epoch else 0
                self._notes = notes._replace(compared={**notes.compared, "": in_memory})
            return self._notes

    def note(self, **fields: Any) -> None:
        """Note these fields."""
        self._change(lambda notes: notes._replace(**fields))

    def note_facts(self, text: str, now_ms: int) -> None:
        """Note the facts of the log, beside those that were noted before: the ledger may have lost them. Of these, the
        facts of the future go, because a wrong clock dated them."""

        def changed(notes: Notes) -> Notes:
            before = Facts.read(notes.facts).happened(now_ms)
            return notes._replace(facts=union(before, Facts.read(text)).text())

        self._change(changed)

    def close(self, ledger: str = "") -> None:
        """Note the name of the ledger if entries of it were noted, and release the files. May be called twice; the next
        use opens them again."""
        if ledger and self._recent_epoch:
            self.note(ledger=ledger)
        with self._lock:
            self._followed = (None, 0, 0)
            self._files.close()

    def start_over_in_child(self) -> None:
        """The child's descriptors share their positions with the parent's, and the parent may hold the locks."""
        self._lock = threading.RLock()
        self._followed = (None, 0, 0)
        self._files.close()

    # -- files ---------------------------------------------------------------------------------------------------------

    def _store(self, epoch: str, news: Sequence[Entry], newest: Id) -> None:
        """Write to the file, or, if that fails, to memory."""
        if self.trouble and elapsed_s() < self._retry_s:
            self._remember(epoch, news)
            return
        try:
            if self._memory:
                waiting = list(self._memory)
                remembered = [record_line(noted, entry.id, packed(entry)) for noted, entry in waiting]
                self._append(remembered, max(entry.id for _, entry in waiting))
                self._memory.clear()
            named = self._files.name
            lines = [record_line(epoch, entry.id, packed(entry)) for entry in news]
            # A new process reads no further back than a long batch, so it ends with the newest.
            is_long = len(lines) > FEW_LINES
            if is_long:
                self._follow()
            self._append(lines, newest)
            if is_long:
                self._follow()
            if self._newest.get(epoch, START) > newest:
                self._append([record_line(epoch, self._newest[epoch])], newest)
            if self._files.name != named:
                self._delete_old(newest[0])
        except OSError as error:
            self._fail(error)
            self._remember(epoch, news)

    def _append(self, lines: Sequence[bytes], newest: Id) -> None:
        data = b"\n%b\n" % b"\n".join(lines)
        file, end = self._files.append(data, newest[0])
        start = end - len(data)
        if self._followed == (file, start, start):  # otherwise another process has written too
            self._followed = (file, end, end)
        self.trouble = ""

    def _remember(self, epoch: str, news: Sequence[Entry]) -> None:
        self._memory.extend((epoch, entry) for entry in news)
        self._remembered += len(news)

    def _delete_old(self, newest_ms: int) -> None:
        """Delete old files, by the earlier of two clocks, so that no single clock makes a journal forget."""
        try:
            self._files.delete_before(min(newest_ms, self._clock()) - self._keep_ms - SLACK_MS)
        except OSError as error:
            if error.errno is None:  # not the system's: the TimeoutError of a signal handler
                raise

    def _note_newest(self, epoch: str, entry_id: Id) -> None:
        newest = self._newest.get(epoch, START)
        if entry_id < newest:
            self._late = (epoch, (*self.late(epoch), entry_id)[-MAX_LATE:])
        elif entry_id > newest:
            self._newest[epoch] = entry_id
            if len(self._newest) > _MAX_EPOCHS:
                del self._newest[next(iter(self._newest))]

    def _follow(self) -> None:
        """Read the new lines of other processes. If the file is new to this process, reads only its end."""
        file, size = self._files.growing()
        before, at, looked = self._followed
        if file is None or (file is before and size == looked):
            return
        goes_on = file is before and at <= size <= at + SEARCH_BYTES
        if not goes_on:
            at = max(0, size - TAIL_BYTES)
            self._confirmed.clear()
            self._noted.add("")
        whole, newline, _ = os.pread(file.fd, size - at, at).rpartition(b"\n")
        for record in filter(None, map(read_record, whole.split(b"\n"))):
            self._note_newest(record.epoch, record.id)
            self._confirmed.add(record.epoch)
            self._noted.add(record.epoch)
        self._followed = (file, at + len(whole) + len(newline), size)

    def _search_back(self, epoch: str) -> None:
        """Look for an epoch further back, but not for ever: entries of other epochs are compared anyway."""
        left = SEARCH_BYTES
        for name, end in reversed(self._files.ends().items()):
            start = max(0, end - left)
            left -= end - start
            for record in self._files.records(name, start, end):
                self._note_newest(record.epoch, record.id)
                self._confirmed.add(record.epoch)
            if epoch in self._confirmed or left <= 0:
                break
        self._confirmed.add(epoch)

    def _remembered_since(self, since: Position) -> list[tuple[str, Entry]]:
        passed = since.get("", 0) - (self._remembered - len(self._memory))
        return list(self._memory)[max(0, passed) :]

    def _change(self, changed: Callable[[Notes], Notes], wait_s: float = WAIT_S) -> None:
        """Change the notes. If another process holds the lock for long, changes nothing: the work is then done
        again."""
        if changed(before := self.notes()) == before:
            return
        with suppress(LedgerError), self.locked(wait_s), self._lock:
            self._notes = notes = changed(self.notes())
            self._tried(lambda: replace_text(self._files.path("notes"), notes.text()))

    def _tried(self, work: Callable[[], T]) -> T | None:
        """What `work` returns; None if the files cannot be used."""
        try:
            return work()
        except OSError as error:
            self._fail(error)
            return None

    def _fail(self, error: OSError) -> None:
        """Log once why the files cannot be used."""
        if error.errno is None:  # not the system's: the TimeoutError of a signal handler
            raise error
        self._retry_s = elapsed_s() + RETRY_S
        what = self._what if error.filename is None else f"journal {one_line(error.filename)}"
        self.trouble = f"{what}: {error.strerror}"
        if not self._warned:
            self._warned = True
            warn("journal_unusable", f"{self.trouble}; entries are kept in memory", project=self._identity.project)


def upstream_folder(folder: Path, identity: Identity) -> str:
    """The folder with the journals of one upstream project."""
    spelled = re.sub(r"[^A-Za-z0-9._-]", "_", identity.project)
    upstream = hash_of((identity.project, identity.endpoint, identity.api))
    return os.sep.join((str(folder), FOLDER, f"{spelled}-{upstream[:16]}"))


def left_behind(folder: Path, identities: Sequence[Identity], now_ms: int, longest_ms: int) -> list[tuple[str, int]]:
    """The projects in a state folder that the configurations of these identities charged at one of their endpoints but
    no longer name, as the folders spell them; for each the time until which its charges may count, `longest_ms` after
    the last note.

    A project that only changed its endpoint has the same name, and is not among them.
    """
    spelled = {os.path.basename(upstream_folder(folder, identity)).rpartition("-")[0] for identity in identities}
    configurations = {(identity.ledger, identity.endpoint) for identity in identities}
    left: dict[str, int] = {}
    with suppress(OSError):
        for name in sorted(os.listdir(folder / FOLDER)):
            project, _, upstream = name.rpartition("-")
            if project in spelled or not re.fullmatch(r"[0-9a-f]{16}", upstream):
                continue
            hashes = {Identity(ledger, project, endpoint).hash for ledger, endpoint in configurations}
            for own in os.scandir(folder / FOLDER / name):
                if own.name in hashes and own.is_dir(follow_symlinks=False):
                    until_ms = _noted_ms(own.path) + longest_ms
                    if until_ms > now_ms:
                        left[project] = max(until_ms, left.get(project, 0))
    return sorted(left.items())


def _noted_ms(path: str) -> int:
    """The time of the last note in a journal; 0 if it is empty."""
    return max((entry.stat().st_mtime_ns // 1_000_000 for entry in os.scandir(path)), default=0)


def _start(since: Position, name: str, end: int) -> int:
    """Where to go on in a file. If it is shorter than before, it is another file: then at its beginning."""
    at = since.get(name, 0)
    return at if at <= end else 0
