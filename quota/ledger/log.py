"""The contract of every log, and the values that cross it.

A project's charges are one append-only log. Whoever asks reads the log, counts in memory what the limits count, and
decides. The log does one thing atomically: **append these entries, unless something that their author has not read
might change what it decided.** The field calls this an append condition.

    Log        what memory, SQLite and Redis do alike
    Append     entries, with how far their author has read and what others may have taken meanwhile
    Reply      what became of them, and what the author has not read

Beside the log lie its corrections by charge, and a state of named texts: the `epoch`, how far the log was `trimmed`,
what was computed of the log (`view:NAME`, a cache), and what changes seldom (facts, claims, places). The epoch names
this log. A log that was emptied has none; one that was put in the place of another has a new one.

An epoch that begins with `~` is a fence: `~TOKEN:END_MS`. Nobody appends until the fence is replaced, or END_MS is over
by the ledger's clock. An epoch that begins with `!` is a seal: `!URL`. The log has moved there, and nobody appends.

Every method raises LedgerError if the storage cannot answer (UnusableLedger if it never will), and nothing else. Safe
to use from several threads, from a signal handler that interrupts one of them, and after a fork.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

from quota.rules.entry import END, START, Entry, Id, read_id
from quota.terms.limits import DAY_MS, HOUR_MS, Selector

if TYPE_CHECKING:
    from quota.common.findings import Finding

MAX_UNSEEN = 500
"""The most entries that an answer carries."""

MAX_READ = 5_000
"""The most entries that are read at once."""

MAX_ENTRIES = 1_000
"""The most entries that are appended at once."""

FENCE = "~"
SEAL = "!"

EPOCH = "epoch"
"""The field of the state that names the log."""

VIEW = "view:"
"""Before the name of a view: the field of the state that keeps what was computed of the log."""

BROKEN = f"{FENCE}:0"
"""The epoch of a log that has lost its entries, or its state, alone. It reads as a fence that is over: nobody appends
until somebody has put the log together anew."""

LEASE_MS = 2_000
"""How long a fence holds before its owner renews it. One that ends later than this after now is over: its clock was
wrong."""

BUILDING_MS = 60_000
"""How long a log that is built beside, and never put in place, is kept."""

ANY = 2**53
"""As the room of an Append: whatever others took, and whatever facts changed, the author has decided. Only an unread
correction of the same charge stops a correction."""

SLACK_MS = 25 * HOUR_MS
"""The log keeps the longest window ever named and this: a long day, should a clock go back."""

PAST_MS = 35 * DAY_MS
MAX_PAST = 500_000
"""What is trimmed goes to the past, which keeps so much. Of what is older the last entry stays: there was more."""

KEPT_MS = 400 * DAY_MS
"""How long a seal is kept."""


class Room(NamedTuple):
    """What others may take of one limit meanwhile: units, or calls where its selector counts calls."""

    selector: Selector
    units: int


class Append(NamedTuple):
    """What an author asks of a log. Without entries it only reads.

    `epoch` and `seen` say what it has read: that log, up to that entry ("" and START: an empty one). `must` is the
    newest entry of this epoch that its machine knows of, if that is behind `seen`. `now_ms` is the time by which it
    decided, and `latest_ms` the latest clock that it accepts. `seq` (40 random bits) is where the numbers of a new
    millisecond begin. An empty log gets the epoch `new_epoch`.

    `room` are the units that others may have taken without changing the decision: each charge takes at least 1, a
    correction what it adds, and units of others all (`weight`). An unread marker, or an entry that is unreadable,
    leaves no room but ANY. With `rooms` each limit has a room of its own, and only what it counts takes that: so what
    others charge elsewhere keeps nobody waiting.

    `clock_ms` stands for the ledger's clock, in simulations. `keep_ms` is how long the longest window of the author is.
    """

    epoch: str
    seen: Id
    entries: Sequence[Entry] = ()
    room: int = 0
    now_ms: int = 0
    latest_ms: int = 2**53
    must: Id = START
    rooms: Sequence[Room] = ()
    seq: int = 0
    new_epoch: str = ""
    clock_ms: int | None = None
    keep_ms: int = 0


Word = Literal["APPENDED", "READ", "AGAIN", "CLOCK", "BEHIND"]


class Reply(NamedTuple):
    """What became of an Append.

    APPENDED   the entries are in the log, the first with the `id`; or, from an earlier try, they were among `unseen`
    READ       there were none to append
    AGAIN      others have changed what the author decided by; nothing was appended
    CLOCK      the ledger's clock is before `now_ms`, or later than `latest_ms`; nothing was appended
    BEHIND     this is another log than the author has read, or one that lacks `seen` or `must`, or has trimmed what
               stood behind `seen`; or a fence or a seal stands (`epoch` says which). Nothing was appended or read

    `clock_ms` is the ledger's clock. `unseen` is what lies behind `seen`, in order, without what was appended now: at
    most MAX_UNSEEN entries, and `whole` says whether that is all.
    """

    word: Word
    clock_ms: int
    epoch: str
    unseen: Sequence[Entry] = ()
    whole: bool = True
    id: Id | None = None


class Beginning(NamedTuple):
    """What a process begins with: one moment of a log.

    `tip` is the newest entry's id. What lies at or before `trimmed` has left the log. `state` has those of the named
    fields that there are. Where all named views are kept in this epoch, `entries` are those behind the earliest `head`
    of them, at most MAX_UNSEEN, and `whole` says whether that is all up to the tip.
    """

    clock_ms: int
    epoch: str
    tip: Id
    trimmed: Id
    state: Mapping[str, str]
    entries: Sequence[Entry] = ()
    whole: bool = False


class Correction(NamedTuple):
    """What a charge counts since its newest correction, whose id this is."""

    units: int
    id: Id


class Changed(NamedTuple):
    """What became of a change of the state: whether it was `done`, the ledger's clock, the epoch, and those of the
    fields that there are now. A change is not done where one of the fields was not as its author expected."""

    done: bool
    clock_ms: int
    epoch: str
    state: Mapping[str, str]


@runtime_checkable
class Log(Protocol):
    """The logs of all projects of one ledger."""

    label: str
    """Where it is, for people: a url without its secrets."""

    shared: bool
    """Whether other machines can use it too."""

    def begin(self, project: str, views: Sequence[str] = (), fields: Sequence[str] = ()) -> Beginning:
        """One moment of the log: its tip, the fields of the state, the kept views (as fields `view:NAME`), and what
        lies behind these. One round trip."""

    def append(self, project: str, request: Append) -> Reply:
        """Append entries under their author's condition, in one atomic step and one round trip.

        The ids of the entries follow each other. The time of the first is the ledger's clock, or that of the newest
        entry if that is later. A correction is noted by the key of its charge. Nothing is sent twice: where an answer
        is lost, LedgerError says so, and the author asks again.
        """

    def exclusive(self, project: str) -> AbstractContextManager[bool]:
        """Keep others from appending, inside this block, for authors that others were too quick for. False where a
        ledger cannot do that."""

    def read(self, project: str, after: Id, through: Id, count: int) -> Sequence[Entry]:
        """At most `count` entries with after < id <= through, in order. A fence or a seal keeps nobody from reading."""

    def corrections(self, project: str, keys: Sequence[str]) -> Mapping[str, Correction]:
        """The newest correction of each of these charges that has one."""

    def keep_views(self, project: str, epoch: str, views: Mapping[str, str]) -> bool:
        """Keep what was computed of the log, if its epoch is still this. The keys live on."""

    def change(
        self,
        project: str,
        expected: Mapping[str, str | None],
        becomes: Mapping[str, str | None],
        marker: Entry | None = None,
        clock_ms: int | None = None,
    ) -> Changed:
        """Change fields of the state where those that are expected are so (None: there is none; None: it goes), in one
        atomic step with a `marker` in the log, so that no decision can overlook it. With nothing that becomes, it only
        reads the expected ones.

        Not done under a fence or a seal, whose epoch the answer has, unless that very epoch is expected as the field
        EPOCH. So who has fenced a log changes what lies behind the fence, renews it, or ends it; and only who names a
        seal lifts it."""

    def names(self, project: str) -> Sequence[str]:
        """The names of all fields that callers keep in the state, in order: without views, and without what the log
        keeps there of itself."""

    def fence(self, project: str, epoch: str, token: str, lease_ms: int = LEASE_MS) -> tuple[bool, str]:
        """Keep everybody from appending: the epoch becomes `~TOKEN:END_MS`, if it is `epoch`, this token's own fence,
        or a fence that is over. Whether it was done, and the epoch that holds now. A seal stays."""

    def replace(
        self,
        project: str,
        fence: str,
        tip: Id,
        entries: Sequence[Entry],
        epoch: str,
        views: Mapping[str, str] | None = None,
        trimmed: Id | None = None,
    ) -> bool:
        """Put another log in the place of the one behind this fence, in one step, if its owner still has it and the
        newest entry is still `tip`. Its epoch is `epoch` (""; the fence stays), its corrections are those in it, and
        `views` are all that is kept; facts, claims and places
        stay. It is built beside first; what was built is checked by its length."""

    def seal(self, project: str, fence: str, url: str) -> bool:
        """Close the log behind this fence for good: it has moved to `url`. Lives for KEPT_MS."""

    def trim(self, project: str, before_ms: int, count: int = MAX_READ) -> int:
        """Move up to `count` entries dated before `before_ms` from the log to the past, oldest first; how many. The
        corrections of charges that leave go with them: an entry of the past has the units that it counted last."""

    def past(self, project: str, after: Id, through: Id, count: int) -> Sequence[Entry]:
        """As `read`, of what has left the log. No decision reads it."""

    def past_length(self, project: str) -> int:
        """How many entries the past has: at least MAX_PAST where it was shortened to that."""

    def add_past(self, project: str, entries: Sequence[Entry]) -> None:
        """Add entries to the past, which are older than those of the log. Those that are there stay once."""

    def projects(self) -> Sequence[str]:
        """The projects that have a log here, in order."""

    def examine(self, project: str) -> Sequence[Finding]:
        """What an operator should know of where a project's log lies. Changes nothing."""

    def now_ms(self) -> int:
        """The ledger's clock."""

    def close(self) -> None:
        """Release files and connections. May be called twice."""


def in_pieces(
    read: Callable[[str, Id, Id, int], Sequence[Entry]], project: str, after: Id, through: Id = END
) -> Iterator[Sequence[Entry]]:
    """What `Log.read` or `Log.past` has between two entries, as much at once as can be read."""
    while piece := read(project, after, through, MAX_READ):
        yield piece
        if len(piece) < MAX_READ:
            return
        after = piece[-1].id


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
    return not end.isdigit() or not clock_ms < int(end) <= clock_ms + LEASE_MS


def is_of(fence: str, stands: str) -> bool:
    """Whether what stands is this fence, which its owner may have renewed."""
    return is_fence(fence) and stands.rpartition(":")[0] == fence.rpartition(":")[0]


def fenced(stands: str, epoch: str, token: str, clock_ms: int, lease_ms: int) -> str | None:
    """The epoch of a log that is fenced, where `stands` may be replaced by a fence of this token; else None. See
    `Log.fence`; `lua/fence.lua` says the same."""
    if is_fence(stands):
        may_fence = stands.startswith(f"{FENCE}{token}:") or fence_is_over(stands, clock_ms)
    else:
        may_fence = stands == epoch and not is_seal(stands)
    return f"{FENCE}{token}:{clock_ms + lease_ms}" if may_fence else None


def word_of(
    request: Append, epoch: str, clock_ms: int, unseen: Sequence[Entry], *, whole: bool
) -> tuple[Word, Id | None]:
    """What becomes of a request to a log that has what its author has read, and the id where an earlier try of it is
    `unseen`. `lua/append.lua` says the same."""
    entries = request.entries
    if not entries:
        return "READ", None
    earlier = next((entry.id for entry in unseen if entry.key == entries[0].key), None)
    if earlier is not None:
        return "APPENDED", earlier
    if not request.now_ms <= clock_ms <= request.latest_ms:
        return "CLOCK", None
    begun = request.epoch != epoch and bool(unseen)  # somebody else has begun the log
    corrected = {entry.of for entry in entries if entry.kind == "correction"}
    if begun or not whole or any(entry.kind == "correction" and entry.of in corrected for entry in unseen):
        return "AGAIN", None
    if request.room < ANY:
        if any(entry.kind in ("marker", "unreadable") for entry in unseen):
            return "AGAIN", None
        if request.rooms:
            full = any(sum(weight(x, room.selector) for x in unseen) > room.units for room in request.rooms)
        else:
            full = sum(map(weight, unseen)) > request.room
        if full:
            return "AGAIN", None
    return "APPENDED", None


def next_id(tip: Id, clock_ms: int, seq: int) -> Id:
    """The id of the next entry: ids never go back, whatever the clock does."""
    return (clock_ms, seq) if clock_ms > tip[0] else (tip[0], tip[1] + 1)


def head_of(kept: str, epoch: str) -> Id | None:
    """Up to where a kept view has read the log of this epoch; None where it is of another. See
    `quota.rules.total.RunningTotal.kept`."""
    try:
        of_epoch, _, _, head, _ = kept.split(" ", 4)
        return read_id(head) if of_epoch == epoch else None
    except ValueError:
        return None


def earliest_head(views: Iterable[str | None], epoch: str) -> Id | None:
    """Up to where all of these kept views have read the log of this epoch; None where one of them has not, or there
    is none."""
    heads = [head_of(kept or "", epoch) for kept in views]
    return None if None in heads else min((head for head in heads if head is not None), default=None)


def weight(entry: Entry, selector: Selector | None = None) -> int:
    """What an unread entry takes of an author's room: of one limit's, by what its selector counts. See Append."""
    kind, units, before_units = entry.kind, entry.units, entry.before_units
    if selector is not None:
        counts = selector.counts_bucket(entry.bucket)
        if kind != "others":
            counts = counts and selector.counts(entry.bucket, entry.method, entry.job)
        if not counts:
            return 0
        if selector.count == "calls" and kind != "others":
            units, before_units = min(units, 1), min(before_units, 1)
    return max(0, units - before_units) if kind == "correction" else max(1, units)
