"""The contract of every log, and the values that cross it.

A project's charges are one append-only log. A process reads the log, adds up in memory what the limits count, and
decides. The log does one thing atomically: **append these entries, unless an entry that their author has not read
might change the decision.** The field calls this an append condition.

    Log        what memory, SQLite and Redis do alike
    Append     entries, how far their author has read, and how much others may have taken meanwhile
    Reply      whether they were appended, and the entries that the author has not read

Each log has its corrections by charge, and a state of named texts: the `epoch`, how far the log was `trimmed`, kept
totals (`view:NAME`, a cache), and what seldom changes (facts, claims, places). The epoch names this log. An emptied log
has no epoch; a log that replaced another has a new epoch.

An epoch that begins with `~` is a fence: `~TOKEN:END_MS`. Nobody appends until its owner has replaced the epoch; when
the ledger's clock passes END_MS, anybody may take the fence over. An epoch that begins with `!` is a seal: `!URL`. The
log has moved there, and nobody appends.

Every method raises LedgerError if the storage cannot answer (UnusableLedger if it never will), and nothing else. All
are safe to use from several threads, from a signal handler that interrupts a thread, and after a fork.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, NamedTuple

from quota.common.text import number_in
from quota.rules.entry import END, START, Entry, Id, just_before, read_id
from quota.terms.limits import DAY_MS, Selector

if TYPE_CHECKING:
    from quota.common.findings import Finding

MAX_UNSEEN = 500
"""The most entries in one answer."""

MAX_READ = 5_000
"""The most entries that are read at once."""

FENCE = "~"
SEAL = "!"

EPOCH = "epoch"
"""The field of the state that names the log."""

VIEW = "view:"
"""Begins the names of the fields of the state that keep totals."""

BROKEN = f"{FENCE}:0"
"""The epoch of a log that lost either its entries or its state. It reads as a fence that is over: nobody appends until
somebody has rebuilt the log."""

LEASE_MS = 2_000
"""How long a fence holds, unless its owner renews it. A fence that ends later than now plus this is over: a wrong clock
set it."""

BUILDING_MS = 60_000
"""How long the ledger keeps a log that was built to replace another, but never did."""

ANY = 2**53
"""The room of an Append that no charge of others and no changed fact stops. These still do: an unread correction of the
same charge, more than MAX_UNSEEN unread entries, and a log that another author began."""

PAST_MS = 35 * DAY_MS
MAX_PAST = 500_000
"""Trimmed entries go to the past, which keeps so many, for so long. The newest of the older entries stays, as a sign
that there were more. If all are older, all stay: the clock may be wrong, and a repair needs them."""


class Room(NamedTuple):
    """How much of one limit others may take meanwhile: units, or calls if its selector counts calls."""

    selector: Selector
    units: int


class Append(NamedTuple):
    """A request to a log. Without entries it only reads.

    The author has read the log `epoch` up to the entry `seen` ("" and START: an empty log). `must` are other
    entries of this epoch that its machine has read, and that the log must have, or have trimmed. The author decided by
    the time `now_ms`, and accepts no clock later than `latest_ms`. `seq` are 40 random bits for the id: see `seq_of`.
    An empty log gets the epoch `new_epoch`.

    `room` is how many units others may have taken without changing the decision: each charge takes at least 1, a
    correction takes what it adds, and `others` take all their units (`weight`). Behind an unread marker or an
    unreadable entry, only ANY is room enough. With `rooms` each limit has its own room, and only entries that the limit
    counts take from it. So the charges of others to other limits delay nobody.
    """

    epoch: str
    seen: Id
    entries: Sequence[Entry] = ()
    room: int = 0
    now_ms: int = 0
    latest_ms: int = 2**53
    must: Sequence[Id] = ()
    rooms: Sequence[Room] = ()
    seq: int = 0
    new_epoch: str = ""


Word = Literal["APPENDED", "READ", "AGAIN", "CLOCK", "BEHIND"]


class Reply(NamedTuple):
    """The answer to an Append.

    APPENDED   the entries are in the log, the first with the `id`. An earlier try may have appended them: then they
               are among `unseen`
    READ       the request had no entries to append
    AGAIN      unread entries might change the decision; nothing was appended
    CLOCK      the ledger's clock is before `now_ms`, or later than `latest_ms`; nothing was appended
    BEHIND     the author has read another log; or this log lacks `seen` or any of `must`, or has trimmed entries after
               `seen`; or a fence, also one that is over, or a seal stands (in `epoch`). Nothing was appended or read

    `clock_ms` is the ledger's clock. `unseen` has the entries after `seen`, in order, without those appended now: at
    most MAX_UNSEEN entries. `whole`: these are all.
    """

    word: Word
    clock_ms: int
    epoch: str
    unseen: Sequence[Entry] = ()
    whole: bool = True
    id: Id | None = None


Fields = Mapping[str, str | None]
"""Fields of a state, by their names; None: no such field."""


class Moment(NamedTuple):
    """One moment of a log, after a change of its state, or as it was read.

    `done`: the fields were changed. They are not if any was not as its author expected. `state` has the asked fields
    that exist now. `tip` is the newest entry's id. Entries at or before `trimmed` have left the log.
    """

    done: bool
    clock_ms: int
    epoch: str
    state: Mapping[str, str]
    tip: Id
    trimmed: Id


class Correction(NamedTuple):
    """The newest correction of a charge: the units that the charge counts now, and the correction's id."""

    units: int
    id: Id


class Log(ABC):
    """The logs of all projects of one ledger. A ledger must have each abstract method, and inherits the others."""

    label: str
    """Its place, for people: a url without secrets."""

    shared: bool
    """Whether other machines can use it too."""

    def unwritable(self, project: str) -> str:
        """Why a log that can be read takes no append now, in one line; "" if no reason is known. Changes and raises
        nothing."""
        return ""

    def begin(self, project: str, fields: Sequence[str] = ()) -> Moment:
        """Read fields of the state, without kept views (`view:NAME`) of this epoch whose last entry the log lacks:
        their process had read another copy."""
        moment = self.change(project, dict.fromkeys(fields), {})
        seen, heads = max(moment.tip, moment.trimmed), {}
        for name in filter(lambda name: name.startswith(VIEW), moment.state):  # see `RunningTotal.kept`
            with suppress(ValueError):
                of_epoch, _, _, head_text, _ = moment.state[name].split(" ", 4)
                heads[name] = read_id(head_text) if of_epoch == moment.epoch else START
        to_see = {*heads.values()} - {START, moment.tip}
        lacking = {head for head in to_see if self.lacks(project, moment.epoch, seen, [head])}
        state = {name: text for name, text in moment.state.items() if heads.get(name) not in lacking}
        return moment._replace(state=state)

    @abstractmethod
    def append(self, project: str, request: Append) -> Reply:
        """Append entries under their author's condition, in one atomic step and one round trip.

        The ids of the entries follow each other. The time of the first is the ledger's clock, or that of the newest
        entry if that is later. A correction is noted by the key of its charge. The log sends nothing twice: if an
        answer is lost it raises LedgerError, and the author asks again.
        """

    def lacks(self, project: str, epoch: str, seen: Id, entries: Iterable[Id]) -> bool:
        """Whether the log lacks any of these entries, or is not the log that was read up to `seen` any more."""
        return self.append(project, Append(epoch, seen, must=[*entries])).word == "BEHIND"

    @abstractmethod
    def read(self, project: str, after: Id, through: Id, count: int) -> Sequence[Entry]:
        """At most `count` entries with after < id <= through, in order. A fence or a seal does not prevent reading."""

    @abstractmethod
    def corrections(self, project: str, keys: Sequence[str]) -> Mapping[str, Correction]:
        """The newest corrections of these charges, by key. Uncorrected charges are missing."""

    def keep_views(self, project: str, epoch: str, views: Mapping[str, str]) -> bool:
        """Keep these totals of the log, if it still has this epoch. Also extends the lifetime of the log."""
        if is_closed(epoch):
            return False
        return self.change(project, {EPOCH: epoch}, {VIEW + name: text for name, text in views.items()}).done

    @abstractmethod
    def change(self, project: str, expected: Fields, becomes: Fields, marker: Entry | None = None) -> Moment:
        """Change fields of the state to `becomes` (None: remove the field), if all fields are as `expected` (None: no
        such field). The same atomic step appends the `marker` to the log, so that no decision can overlook the change.
        With an empty `becomes` it only reads the expected fields.

        A fence or a seal prevents the change, and the answer has its epoch, unless the author expects exactly this
        epoch as the field EPOCH. So the owner of a fence can change what it protects, renew it, or end it; and only an
        author who names a seal lifts it."""

    @abstractmethod
    def names(self, project: str) -> Sequence[str]:
        """The names of all fields that callers keep in the state, in order: without views and the log's own fields."""

    def fence(self, project: str, epoch: str, token: str, lease_ms: int = LEASE_MS) -> tuple[bool, str]:
        """Keep everybody from appending: the epoch becomes `~TOKEN:END_MS`, if it is `epoch`, this token's own fence,
        or a fence that is over. A seal stays. Returns whether it was done, and the current epoch."""
        moment = self.change(project, {}, {})
        clock_ms, stands = moment.clock_ms, moment.epoch
        if is_fence(stands):
            may_fence = stands.startswith(f"{FENCE}{token}:") or fence_is_over(stands, clock_ms)
        else:
            may_fence = stands == epoch and not is_seal(stands)
        if not may_fence:
            return False, stands
        changed = self.change(project, {EPOCH: stands or None}, {EPOCH: f"{FENCE}{token}:{clock_ms + lease_ms}"})
        return changed.done, changed.epoch

    @abstractmethod
    def replace(
        self, project: str, fence: str, tip: Id, entries: Sequence[Entry], epoch: str, trimmed: Id | None = None
    ) -> bool:
        """Replace the log behind this fence, or seal, in one step, if it still stands and the newest entry is still
        `tip`. The new log has these `entries` and their corrections, the epoch `epoch` ("": it stays), and no views.
        Facts, claims and places stay. With `trimmed`, all entries after it are among `entries`, and leave the past. The
        ledger builds the new log beside the old one, and checks its length before it replaces."""

    def seal(self, project: str, fence: str, url: str) -> bool:
        """Close the log behind this fence: it has moved to `url`. The ledger keeps the seal for at least 400 days."""
        stands = self.change(project, {}, {}).epoch
        return is_of(fence, stands) and self.change(project, {EPOCH: stands}, {EPOCH: SEAL + url}).done

    @abstractmethod
    def trim(self, project: str, before_ms: int, count: int = MAX_READ) -> int:
        """Move up to `count` entries dated before `before_ms` from the log to the past, oldest first; returns how many.
        Unreadable entries are deleted. The newest correction of a charge is noted until it leaves itself. A fence or a
        seal prevents it."""

    @abstractmethod
    def past(self, project: str, after: Id, through: Id, count: int) -> Sequence[Entry]:
        """As `read`, for entries that have left the log. No decision reads them."""

    @abstractmethod
    def past_length(self, project: str) -> int:
        """How many entries the past has. It was shortened if it has MAX_PAST or more."""

    @abstractmethod
    def add_past(self, project: str, entries: Sequence[Entry]) -> None:
        """Add entries to the past that are older than the log. It ignores entries that it already has."""

    @abstractmethod
    def projects(self) -> Sequence[str]:
        """The projects that have entries here, in the log or in the past, in order."""

    @abstractmethod
    def examine(self, project: str) -> Sequence[Finding]:
        """Findings for operators about the place of a project's log. Changes nothing."""

    @abstractmethod
    def now_ms(self) -> int:
        """The ledger's clock."""

    @abstractmethod
    def close(self) -> None:
        """Release files and connections. May be called twice."""


Read = Callable[[str, Id, Id, int], Sequence[Entry]]
"""`Log.read` or `Log.past`."""


def in_pieces(read: Read, project: str, after: Id, through: Id = END) -> Iterator[Sequence[Entry]]:
    """All entries between two, in the largest pieces that can be read."""
    while piece := read(project, after, through, MAX_READ):
        yield piece
        if len(piece) < MAX_READ:
            return
        after = piece[-1].id


def all_between(read: Read, project: str, after: Id, through: Id = END) -> list[Entry]:
    """The same in one list."""
    return [entry for piece in in_pieces(read, project, after, through) for entry in piece]


Progress = Callable[[str, int], None]
"""Gets the project, and the number of its entries that were read."""


def entries_held(log: Log, project: str, after: Id, progress: Progress = lambda *_: None) -> list[Entry]:
    """The entries of the past and the log after an id, each once, while nobody trims. If the state was lost, or a move
    was stopped, the past goes on after `trimmed`."""
    entries: dict[str, Entry] = {}
    for read in (log.past, log.read):
        for piece in in_pieces(read, project, after):
            progress(project, len(piece))
            entries |= {entry.key: entry for entry in piece}
    return [*entries.values()]


def edge_of(log: Log, project: str) -> Id:
    """The id after which a log is complete, also if its state was lost; END if it never had entries."""
    beginning = log.begin(project)
    if beginning.trimmed != START:
        return beginning.trimmed
    first = log.read(project, START, END, 1)
    return just_before(first[0].id[0]) if first else END


def all_entries(log: Log, project: str, after: Id = START) -> Iterator[Entry]:
    """All entries after an id, in order: first the past, then the log. An entry that is trimmed meanwhile comes
    once."""
    while True:
        piece = log.read(project, after, END, MAX_READ)
        trimmed = edge_of(log, project)  # what the log lacked before has left by now
        for older in in_pieces(log.past, project, after, trimmed):
            yield from older
        yield from [entry for entry in piece if entry.id > trimmed]
        if len(piece) < MAX_READ:
            return
        after = max(piece[-1].id, trimmed)


def is_fence(epoch: str) -> bool:
    return epoch.startswith(FENCE)


def is_seal(epoch: str) -> bool:
    return epoch.startswith(SEAL)


def is_closed(epoch: str) -> bool:
    """Whether nobody may append: a fence, which may be over, or a seal."""
    return epoch.startswith((FENCE, SEAL))


def fence_is_over(epoch: str, clock_ms: int) -> bool:
    """Whether the lease of a fence has ended, or ends later than any lease can."""
    _, _, end = epoch.rpartition(":")
    return number_in(end, clock_ms + 1, clock_ms + LEASE_MS) is None


def is_of(fence: str, stands: str) -> bool:
    """Whether the standing epoch is this fence. Its owner may have renewed it."""
    return is_fence(fence) and stands.rpartition(":")[0] == fence.rpartition(":")[0]


def may_replace(fence: str, stands: str) -> bool:
    """Whether an owner of this fence may replace the log. A move back works behind the standing seal instead."""
    return is_of(fence, stands) or (is_seal(fence) and fence == stands)


def word_of(
    request: Append, epoch: str, clock_ms: int, unseen: Sequence[Entry], *, whole: bool
) -> tuple[Word, Id | None]:
    """The answer to a request whose author has read this log, and the id if an earlier try of it is among `unseen`. If
    APPENDED has no id, the caller is to append now. `lua/append.lua` decides the same."""
    entries = request.entries
    if not entries:
        return "READ", None
    earlier = next((entry.id for entry in unseen if entry.key == entries[0].key), None)
    if earlier is not None:
        return "APPENDED", earlier
    if not request.now_ms <= clock_ms <= request.latest_ms:
        return "CLOCK", None
    begun = request.epoch != epoch and bool(unseen)  # another process began the log
    corrected = {entry.of for entry in entries if entry.kind == "correction"}
    if begun or not whole or any(entry.kind == "correction" and entry.of in corrected for entry in unseen):
        return "AGAIN", None
    if request.room < ANY:
        rooms: Sequence[tuple[Selector | None, int]] = request.rooms or [(None, request.room)]
        for selector, units in rooms:
            if sum([weight(entry, selector) for entry in unseen]) > units:
                return "AGAIN", None
        if any(entry.kind in ("marker", "unreadable") for entry in unseen):
            return "AGAIN", None
    return "APPENDED", None


def seq_of(key: str) -> int:
    """40 bits of a random key: the number with which its entry begins a new millisecond, see `next_id`."""
    return hash(key) & (2**40 - 1)


MAX_SKIP = 2**20
"""The most numbers that an id skips within a millisecond."""


def next_id(tip: Id, clock_ms: int, seq: int) -> Id:
    """The id of the next entry. Ids never go back, even if the clock does. A new millisecond begins at the number
    `seq`. Within a millisecond, numbers skip up to MAX_SKIP, so that two histories of a log seldom get one id:
    otherwise a restored log could seem to have an entry that it lacks. `lua/parts/next_id.lua` is the same rule."""
    return (clock_ms, seq) if clock_ms > tip[0] else (tip[0], tip[1] + 1 + seq % MAX_SKIP)


def weight(entry: Entry, selector: Selector | None = None) -> int:
    """How much an unread entry takes of an author's room; with a selector, of one limit's room. See Append."""
    units, before_units = entry.units, entry.before_units
    if selector is not None and entry.kind == "others":
        return max(1, units) if selector.counts_bucket(entry.bucket) else 0
    if selector is not None:
        if not selector.counts(entry.bucket, entry.method, entry.job):
            return 0
        units, before_units = selector.cost(units), selector.cost(before_units)
    return max(0, units - before_units) if entry.kind == "correction" else max(1, units)
