"""The allowance: bounded and durable draws while the ledger does not answer, which the ledger gets later.

    draw         admits calls while the draws of the longest window stay within the allowance
    owed         the draws that the ledger lacks, or counts with other units; owed_by_others: of other configurations
    handed_over  notes that the ledger has the draws. That does not renew the allowance
    settle       sets the true cost of a call, before or after its hand-over
    keep         notes the true cost of a charge in the ledger, which the ledger did not take
    corrected    notes that the ledger has taken the true cost of a charge

For example with an allowance of 50 and a longest window of 24 h:

    10:00   the ledger stops. 30 calls of 1 unit are drawn; 20 units remain
    10:30   the ledger answers, and gets the 30 draws, which it dates 10:30
    16:00   the ledger stops again. 20 calls are drawn, and the next call is refused
    10:00   on the next day, the first draws have left the window

All processes of the machine and all identities of one upstream project share one file, so that two configurations do
not draw the allowance twice. A draw is on the disk before its call leaves; if the disk fails, nothing is drawn. After
somebody restores an old copy of the file, draws may be handed over again: the ledger recognizes them by their keys.

Each line of the file is a draw as it stands then, with a length and a checksum. The last line of a key counts:

    IDENTITY  EPOCH  SEEN  CHARGED-UNITS  BOOT:MS  HANDED-ID  HANDED-UNITS  MS-SEQ  ENTRY...    see `Draw`
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from quota.common.clock import UNKNOWN_UPTIME, SinceBoot
from quota.common.files import lack_of_room, open_alone, remedy_for
from quota.common.findings import existing, obstacle
from quota.common.log import warn
from quota.common.text import one_line
from quota.errors import LedgerError
from quota.journal.files import LEAST_BYTES, FileLock, framed, read_text, replace_text, unframed
from quota.ledger.factory import Identity
from quota.rules.entry import START, Entry, Id, id_text, packed, read_id, unpacked
from quota.terms.limits import SLACK_MS

WAIT_S = 2.0
"""How long a draw waits for other draws, each of which waits for the disk."""

MAX_BYTES = 2**26
"""More than any allowance needs."""

SPARE_LINES = 200
"""A file may have so many needless lines before it is rewritten."""

_UNKNOWN = -1


class Draw(NamedTuple):
    """A draw. The id of its `entry` has the time of the draw, and its `units` are the current units; it was charged
    with `charged_units`.

    With 0 `charged_units` it is no draw: the ledger has the charge, and this machine owes only its correction.

    The first try of its call had read the log of `epoch` up to `seen`: from there on, a hand-over looks for its key.
    After the hand-over, the log has it as `handed_id`, with `handed_units`. A `settle` makes these _UNKNOWN, because
    another machine may have settled it in the ledger. `settled_ms` is the time of the last `settle`; 0: there was none.
    """

    identity: str
    entry: Entry
    charged_units: int
    epoch: str
    seen: Id
    drawn_at: SinceBoot = UNKNOWN_UPTIME
    handed_id: Id | None = None
    handed_units: int = 0
    settled_ms: int = 0

    @property
    def is_owed(self) -> bool:
        """Whether the ledger lacks the draw, or its last correction."""
        return self.handed_id is None or self.handed_units != self.entry.units

    def as_of(self, now_ms: int, uptime: SinceBoot) -> Draw:
        """The draw, with its time by the present clock. The clock may have been set since. If the machine was started
        anew since, a draw of the future is dated by its hand-over: the clock may be wrong now, or was then."""
        at, passed_ms = self.entry.id, uptime.passed_ms(self.drawn_at)
        if passed_ms is not None:
            at = (now_ms - passed_ms, 0)
        elif self.handed_id is not None and at[0] > now_ms:
            at = min(at, self.handed_id)
        return self._replace(entry=self.entry._replace(id=at))


class Draws:
    """The draws of one upstream project, for one identity.

    The first draw makes the file. Safe for threads, forks and signal handlers, because no file stays open.
    """

    def __init__(self, folder: str, identity: Identity, *, keep_ms: int) -> None:
        self._identity, self._keep_ms, self._folder = identity, keep_ms, folder
        self._path = f"{folder}{os.sep}draws"
        self._what = f"allowance {one_line(self._path)}"
        self._lock = FileLock(f"{self._path}.lock", self._what)
        self._warned = False
        self.unwritten: dict[str, Draw] = {}
        """The corrections that `keep` could not write."""

    def draw(
        self,
        entries: Sequence[Entry],
        epoch: str,
        seen: Id,
        uptime: SinceBoot = UNKNOWN_UPTIME,
        *,
        now_ms: int,
        window_ms: int,
        allowance_units: int,
    ) -> bool:
        """Draw all of these entries, or none if they do not fit. Ignores entries that are drawn already.

        Raises LedgerError if the disk fails: then nothing was drawn.
        """
        with self._errors(), self._lock.taken(WAIT_S):
            draws, lines = self._draws()
            news = [entry._replace(id=(now_ms, 0)) for entry in entries if entry.key not in draws]
            if self.drawn_units(now_ms, window_ms, uptime) + sum(entry.units for entry in news) > allowance_units:
                return False
            self._forget_old(draws, lines, now_ms, uptime, max(window_ms, self._keep_ms))
            if read_text(self._owner(self._identity.hash)) != self._identity.ledger:
                replace_text(self._owner(self._identity.hash), self._identity.ledger)
            self._append([Draw(self._identity.hash, entry, entry.units, epoch, seen, uptime) for entry in news])
            return True

    def drawn(self, now_ms: int, window_ms: int, uptime: SinceBoot = UNKNOWN_UPTIME) -> list[Draw]:
        """The draws of all processes and identities in this window, handed over or not. Draws of the future count too:
        a clock may have gone back. Raises LedgerError."""
        with self._errors():
            draws = [draw.as_of(now_ms, uptime) for draw in self._draws()[0].values() if draw.charged_units]
            return [draw for draw in draws if draw.entry.id[0] > now_ms - window_ms]

    def drawn_units(self, now_ms: int, window_ms: int, uptime: SinceBoot = UNKNOWN_UPTIME) -> int:
        """The units of `drawn`."""
        return sum(draw.entry.units for draw in self.drawn(now_ms, window_ms, uptime))

    def check_writable(self) -> None:
        """Raise LedgerError if nothing can be drawn now. Writes nothing."""
        prevented = self._prevented()
        if prevented is not None:
            raise self._undrawn(*prevented)

    def _prevented(self) -> tuple[str, str] | None:
        """Why nothing can be drawn now, and the remedy; None if something can."""
        path = self._path if os.path.exists(self._path) else os.path.join(existing(self._folder), "draws")
        if code := lack_of_room(path, LEAST_BYTES):
            return os.strerror(code), remedy_for(code, "")
        return obstacle(self._path, ".lock")

    def _undrawn(self, why: str, remedy: str) -> LedgerError:
        other = "or set QUOTA_STATE_DIR to another folder"
        return LedgerError(f"{self._what}: {why}, so nothing is drawn; {remedy}, {other}")

    def owed(self, of_one_log: Callable[[], Collection[str]] = tuple) -> list[Draw]:
        """The draws that this identity owes its ledger, or whose corrections it owes, and those of the identities
        `of_one_log`, oldest first. If the file cannot be read, logs that once; the debt stays."""
        draws: list[Draw] = []
        try:
            with self._errors():
                draws += self._draws()[0].values()
        except LedgerError as error:
            self._complain(error)
        draws += self.unwritten.values()
        owed, own = [draw for draw in draws if draw.is_owed], self._identity.hash
        ours = {own, *(of_one_log() if any(draw.identity != own for draw in owed) else ())}
        return [draw for draw in owed if draw.identity in ours]

    def owed_by_others(self) -> Mapping[str, int]:
        """The units that other configurations of this machine drew and owe their ledgers, by the name or the path of
        each. Raises LedgerError."""
        owed: Counter[str] = Counter()
        with self._errors():
            for draw in self._draws()[0].values():
                if draw.handed_id is None and draw.identity != self._identity.hash:
                    owed[read_text(self._owner(draw.identity)) or draw.identity] += draw.entry.units
        return +owed

    def _owner(self, identity: str) -> str:
        """The file that names a configuration by its identity, beside the entries of its journal."""
        return os.sep.join((self._folder, identity, "owner"))

    def handed_over(self, handed: Sequence[tuple[Draw, Id]]) -> bool:
        """Note that the log has these draws, with these ids and units. A draw that was corrected meanwhile is still
        `owed`. If the disk fails, logs that once and returns False: then the draws are handed over again, and the log
        recognizes them."""
        handed = [(draw, at) for draw, at in handed if self.unwritten.pop(draw.entry.key, None) is None]
        try:
            with self._errors(), self._lock.taken(WAIT_S):
                draws, now = self._draws()[0], []
                for draw, at in handed:
                    stands = draws.get(draw.entry.key, draw)
                    now.append(stands._replace(handed_id=at, handed_units=draw.entry.units))
                self._append(now)
        except LedgerError as error:
            self._complain(error)
            return False
        return True

    def _complain(self, error: LedgerError) -> None:
        if not self._warned:
            self._warned = True
            warn("allowance_unreadable", error, project=self._identity.project)

    def settle(self, units: Mapping[str, int], now_ms: int) -> list[Draw] | None:
        """Set the units of draws, by their keys; returns the draws as they were. Returns None, and sets no draw, if any
        of them is only in the ledger.

        Draws that were handed over are owed again, as corrections. Raises LedgerError.
        """
        for key in units:
            self.unwritten.pop(key, None)
        with self._errors():
            if not units.keys() & self._draws()[0].keys():
                return None
        with self._errors(), self._lock.taken(WAIT_S):
            draws = self._draws()[0]
            before = [draws[key] for key in units if key in draws]
            kept = [draw for draw in before if not draw.charged_units]
            is_drawn = len(before) == len(units) and not kept
            settled = []
            for draw in before if is_drawn else kept:
                entry = draw.entry._replace(units=units[draw.entry.key])
                settled.append(draw._replace(entry=entry, handed_units=_UNKNOWN, settled_ms=now_ms))
            self._append(settled)
            return before if is_drawn else None

    def corrected(self, units: Mapping[str, int]) -> None:
        """Note that the ledger has taken these units: what `keep` noted of the charges is owed no more, because another
        machine may settle them next."""
        kept = [
            draw for draw in self.owed() if not draw.charged_units and units.get(draw.entry.key) == draw.entry.units
        ]
        if kept:
            self.handed_over([(draw, draw.entry.id) for draw in kept])

    def keep(self, charged_ms: int, key: str, units: int, now_ms: int, uptime: SinceBoot) -> None:
        """Note that the charge of `charged_ms` with this key has so many units: the ledger is owed that. If that cannot
        be written, this process remembers it."""
        entry = Entry((charged_ms, 0), units, "", "", "", "", key)
        owed = Draw(self._identity.hash, entry, 0, "", START, UNKNOWN_UPTIME, entry.id, _UNKNOWN, now_ms)
        try:
            with self._errors(), self._lock.taken(WAIT_S):
                self._forget_old(*self._draws(), now_ms, uptime, self._keep_ms)
                self._append([owed])
        except LedgerError:
            self.unwritten[key] = owed

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn the system's errors into LedgerError."""
        try:
            yield
        except OSError as error:
            if error.errno is None:  # not the system's: the TimeoutError of a signal handler
                raise
            _, remedy = self._prevented() or ("", remedy_for(error.errno, "mend the state folder or its disk"))
            raise self._undrawn(f"{error.strerror}", remedy) from error

    def _draws(self) -> tuple[dict[str, Draw], int]:
        """All draws by their keys, oldest first, and the number of lines of the file."""
        if not os.access(self._path, os.F_OK):  # most machines have no such file
            return {}, 0
        try:
            with os.fdopen(open_alone(self._path, os.O_RDONLY), "rb") as file:
                lines = file.read(MAX_BYTES).split(b"\n")
        except FileNotFoundError:
            return {}, 0
        return _read_lines(lines), len(lines)

    def _append(self, draws: Sequence[Draw]) -> None:
        """Write all of these draws to the disk, or none."""
        if not draws:
            return
        try:
            fd = open_alone(self._path, os.O_RDWR | os.O_APPEND)
        except FileNotFoundError:
            fd = open_alone(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            self._sync_folders()
        try:
            before_bytes = os.fstat(fd).st_size
            try:
                _write_all(fd, draws)
            except BaseException:
                os.ftruncate(fd, before_bytes)
                raise
        finally:
            os.close(fd)

    def _forget_old(self, draws: dict[str, Draw], lines: int, now_ms: int, uptime: SinceBoot, keep_ms: int) -> None:
        """Rewrite the file without old draws. Owed draws stay, however old they look."""
        since_ms = now_ms - keep_ms - SLACK_MS
        kept = [draw for draw in draws.values() if draw.is_owed or draw.as_of(now_ms, uptime).entry.id[0] > since_ms]
        if lines <= 4 * len(kept) + SPARE_LINES:
            return
        with os.fdopen(open_alone(f"{self._path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            _write_all(file.fileno(), kept)
        os.replace(f"{self._path}.new", self._path)
        self._sync_folders()

    def _sync_folders(self) -> None:
        """Sync the folder of the file and the two folders above it, so that its name is on the disk."""
        folder = self._folder
        for _ in range(3):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            folder = os.path.dirname(folder)


def _write_all(fd: int, draws: Iterable[Draw]) -> None:
    """Write draws. Each line begins with a newline, so that a torn line spoils no other."""
    data = b"".join(b"\n" + framed(_line(draw).replace("\n", " ").encode()) for draw in draws) + b"\n"
    while data:
        data = data[os.write(fd, data) :]
    os.fsync(fd)


def _line(draw: Draw) -> str:
    handed = "" if draw.handed_id is None else id_text(draw.handed_id)
    first_try = draw.identity, draw.epoch, id_text(draw.seen), str(draw.charged_units)
    drawn_at = f"{draw.drawn_at.boot}:{draw.drawn_at.ms}"
    after = drawn_at, handed, str(draw.handed_units), str(draw.settled_ms), id_text(draw.entry.id), packed(draw.entry)
    return "\t".join((*first_try, *after))


def _read_lines(lines: Iterable[bytes]) -> dict[str, Draw]:
    """The draws after these lines. Ignores torn and damaged lines."""
    draws: dict[str, Draw] = {}
    for body in filter(None, map(unframed, lines)):
        with suppress(ValueError):
            fields = body.decode().split("\t", 9)
            identity, epoch, seen, charged, drawn_at, handed_id, handed_units, settled_ms, at, text = fields
            boot, _, ms = drawn_at.partition(":")
            entry = unpacked(read_id(at), text)
            if entry.kind == "charge":
                after = read_id(handed_id) if handed_id else None, int(handed_units), int(settled_ms)
                first_try = epoch, read_id(seen), SinceBoot(boot, int(ms or 0))
                draws[entry.key] = Draw(identity, entry, int(charged), *first_try, *after)
    return draws
