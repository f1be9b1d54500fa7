"""The contract every ledger keeps, and the plain values that cross it.

A project's charges are one append-only log in time order. A limit's state is a *view* on that log: a running total and
how far it has read. One decision, atomic over all limits asked about:

1. bring each view up to the log's end: entries that other callers appended are added where its selector matches;
2. drop what has left its window;
3. compare: the charge is admitted when every limit has room for its cost;
4. append the charge and add it to the views; or, refused, change nothing.

The values are named tuples: a decision makes several of them, and they cost a third of a frozen dataclass.

The ledger's clock dates the charge. A view is rebuilt from the log when it is missing, or when the clock went back
behind what it has dropped.

A ledger can lose what it has decided: emptied, restored from an old copy, replaced by a replica that lagged. A *carry*
stands for what was lost: so many units of a view, in parts, each until the time at which all of it would have expired.
It is added to the view's total. `quota.recovery.high_water_mark` finds out what was lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from quota.arguments import whole
from quota.errors import ConfigError
from quota.limits import HOUR_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from quota.limits import Edges, View, Window

CLOCK_SLACK_MS = 5_000
"""How far a caller's clock may run ahead of the ledger's before its question is answered "clock"."""

KEEP_MS = 49 * HOUR_MS
KEEP_SLACK_MS = 25 * HOUR_MS
"""The log is kept for the longest window that any writer named and 25 h more (a long day, should the clock go back), at
least 49 h. Every write names the longest window of all limits of its configuration, whichever of them count the charge:
see `kept_ms`. Who joins with a longer window later starts with what is there: see `Ledger.whole_after_ms`."""

LEDGER_SCHEMES = ("sqlite", "redis", "rediss", "unix", "redis+sentinel", "redis+cluster")
"""The kinds of URL that a ledger can have: the embedded one's, then Redis'."""

DEFAULT_BUCKET = "units"
"""The bucket that a stored charge means when it names none."""


class Charge(NamedTuple):
    """What is to be charged. `token` is unique to this attempt: a repeated question finds its first answer by it."""

    units: int
    bucket: str
    method: str
    job: str
    region: str
    token: str


class Ask(NamedTuple):
    """One limit as the ledger sees it: a view, the number it may not exceed, and what this charge adds to it.

    `edges` are a calendar window's edges by the caller's clock; None for a sliding window.
    """

    view: View
    cap_units: int
    cost_units: int
    edges: Edges | None


class Exhaustion(NamedTuple):
    """Upstream said "no more": a dated fact that closes one bucket for everybody until `until_ms`.

    `until_ms` is NEVER for a project to which upstream grants nothing at all: no reset will reopen that. One that was
    lifted closes nothing any more: `reopened_ms` is when (0: it stands), `reopened_because` what was said to be why.
    """

    bucket: str
    since_ms: int
    until_ms: int
    evidence: str
    reported_by: str
    reopened_ms: int = 0
    reopened_because: str = ""


NEVER = 2**53 - 1
"""A moment that does not come."""

LATEST_MS = 10**14
"""No time that is stored is later: beyond it a sum with a window has no date."""


MOST_READ = 1_000
"""So many entries `Ledger.read` gives at once, and no more."""

Id = tuple[int, int]
"""An entry's place in the log: its time in ms, then its number within that millisecond."""

Parts = tuple[tuple[int, int], ...]
"""Units, each with the time in ms until which they count, soonest first."""


class Carry(NamedTuple):
    """What a view counted of charges that the ledger has lost: that much more, part by part, and at least one.

    `epoch` names the ledger as it was before that loss. Several machines report the same loss, each what it had seen
    after `since_ms`, up to the entry `last`: of two reports, the one that goes further holds all of the other. Of what
    came after `kept_since_ms` the ledger still had `kept_units` when it was asked.
    """

    view: str
    epoch: str
    parts: Parts
    last: Id
    kept_units: int = 0
    kept_since_ms: int = 0
    since_ms: int = NEVER

    @property
    def until_ms(self) -> int:
        """When nothing of it counts any more."""
        return self.parts[-1][1]

    def units_at(self, now_ms: int) -> int:
        return units_at(self.parts, now_ms)

    def words(self) -> tuple[str, str, str, str]:
        """How Redis and the slots of a machine's file have it, beside its view; `from_words` reads that."""
        kept = f"{self.kept_units}:{self.kept_since_ms}:{self.since_ms}"
        return self.epoch, parts_text(self.parts), kept, f"{self.last[0]}-{self.last[1]}"

    @classmethod
    def from_words(cls, view: str, epoch: str, parts: str, kept: str, last: str) -> Carry:
        """Raises ValueError for what `words` never made."""
        ms, seq = last.split("-")
        kept_units, kept_since_ms, since_ms = map(int, kept.split(":"))
        return cls(view, epoch, read_parts(parts), (int(ms), int(seq)), kept_units, kept_since_ms, since_ms)

    def with_report(self, other: Carry, now_ms: int) -> Carry:
        """With another report of the same loss: if that goes further or holds more, at every moment the larger of both.

        What the ledger still had, or had again, by one of them and not by the other, fell to a later loss, and is
        carried for that one.
        """
        kept = max((self.kept_units, self.kept_since_ms), (other.kept_units, other.kept_since_ms))
        ours, theirs = self._less_kept(*kept), other._less_kept(*kept)
        if ours == self.parts and other.last <= self.last and units_at(theirs, now_ms) <= units_at(ours, now_ms):
            return self
        parts: list[tuple[int, int]] = []
        counted = 0
        for until_ms in sorted({until_ms for _, until_ms in ours + theirs}, reverse=True):
            units = max(units_at(ours, until_ms - 1), units_at(theirs, until_ms - 1))
            if units > counted:
                parts.append((units - counted, until_ms))
                counted = units
        last, since_ms = max(self.last, other.last), max(self.since_ms, other.since_ms)
        return Carry(self.view, self.epoch, tuple(reversed(parts)) or ((0, self.until_ms),), last, *kept, since_ms)

    def _less_kept(self, units: int, since_ms: int) -> Parts:
        """Without what the ledger had kept of it by another's report, if it surely holds that."""
        more = units - self.kept_units
        if more <= 0 or self.since_ms > since_ms:
            return self.parts
        return newest_parts(self.parts, sum(units for units, _ in self.parts) - more)


def units_at(parts: Parts, now_ms: int) -> int:
    return sum(units for units, until_ms in parts if until_ms > now_ms)


def newest_parts(parts: Parts, units: int) -> Parts:
    """So many of the units: those that count longest."""
    found: list[tuple[int, int]] = []
    for there, until_ms in reversed(parts):
        if units <= 0:
            break
        found.append((min(there, units), until_ms))
        units -= there
    return tuple(reversed(found))


def parts_text(parts: Parts) -> str:
    """As both ledgers store them: `UNITS:UNTIL_MS,UNITS:UNTIL_MS`."""
    return ",".join([f"{units}:{until_ms}" for units, until_ms in parts])


def read_parts(text: str) -> Parts:
    """Parts from their text. Raises ValueError for what `parts_text` never made."""
    pairs = [part.split(":") for part in text.split(",")]
    parts = tuple((int(units), int(until_ms)) for units, until_ms in pairs)
    untils_ms = [until_ms for _, until_ms in parts]
    if min(units for units, _ in parts) < 0 or untils_ms != sorted(untils_ms) or not 0 <= untils_ms[-1] < LATEST_MS:
        raise ValueError(f"{text!r:.100} is not what is carried")
    return parts


Outcome = Literal["admitted", "refused", "exhausted", "clock", "behind"]


class Verdict(NamedTuple):
    """The ledger's answer to one question.

    `used_units` stands in the order of the asks and includes the charge if it was admitted, and what is carried.
    `now_ms` is the moment at which the windows end: the ledger's clock, or the caller's plus its slack where that is
    earlier. `last` is the id of the newest entry in the log, (0, 0) of an empty one. With "clock" nothing was compared,
    and `now_ms` is the ledger's clock. With "behind" nothing was compared either: the ledger lacks what the question
    says was seen of it. `epoch` names this ledger since it was begun, or since its last loss was made good; empty
    before the first charge. `carried` is in the order of the asks; empty where nothing is carried at all.
    """

    outcome: Outcome
    id: str | None
    now_ms: int
    last: Id
    used_units: tuple[int, ...]
    exhaustion: Exhaustion | None = None
    epoch: str = ""
    carried: tuple[tuple[Carry, ...], ...] = ()


class Entry(NamedTuple):
    """One charge in the log. `units` is what it counts now, `charged_units` what it counted when it was made."""

    ms: int
    seq: int
    units: int
    charged_units: int
    bucket: str
    method: str
    job: str
    region: str
    token: str

    @property
    def id(self) -> str:
        return f"{self.ms}-{self.seq}"


class Seen(NamedTuple):
    """An epoch, and ids that are in the log then. No epoch: nothing was seen, and nothing is checked."""

    epoch: str
    ids: tuple[Id, ...]


NOTHING_SEEN = Seen("", ())


def root_of(epoch: str) -> str:
    """The first epoch of the log: the same for a copy of it, another for one that was begun anew."""
    return epoch.partition("/")[0]


class Question(NamedTuple):
    """Everything one decision needs. `caller_ms` is the caller's clock: the second witness beside the ledger's own.

    `seen` is what the caller's machine has seen of this ledger: in that epoch, charges with these ids. `keep_ms` is how
    long the log must be kept: `kept_ms` of all limits that the caller knows of, not only of those asked about.
    """

    project: str
    charge: Charge
    asks: Sequence[Ask]
    closed_by: tuple[str, ...]
    caller_ms: int
    jitter_ms: int = 0
    seen: Seen = NOTHING_SEEN
    keep_ms: int = KEEP_MS


def kept_ms(windows: Iterable[Window]) -> int:
    """How long the log must be kept for these windows."""
    return max(KEEP_MS, KEEP_SLACK_MS + max((window.longest_ms for window in windows), default=0))


class Ledger(Protocol):
    """Where charges live. Every method raises LedgerError, and nothing else, when the storage cannot answer; UsageError
    for a number that is none.

    Safe to use from several threads and after a fork.
    """

    label: str
    """Where it is, for people: a URL without its secrets."""

    shared: bool
    """Whether other machines can use it too."""

    def decide(self, question: Question, *, commit: bool) -> Verdict:
        """Answer one question in one atomic step; with `commit` an admitted charge is in the log when this returns.

        A refusal and a peek change nothing that anybody can see. Never charges twice for one call, whatever happens
        to the connection: in doubt the charge counts as spent.
        """
        ...

    def repay(self, project: str, machine: str, charges: Sequence[tuple[int, Charge]], keep_ms: int = KEEP_MS) -> None:
        """Append what a machine spent while this ledger could not answer: at most 100 charges, numbers rising.

        Unconditional, and once: numbers up to the last one repaid by `machine` are ignored. Dated now. `keep_ms` as in
        a question.
        """
        ...

    def settle(self, project: str, charge_id: str, units: int, views: Sequence[View]) -> Entry | None:
        """Set what a charge counts, absolutely, keeping its time and id; the entry as it was before, None if unknown.

        Idempotent and never refused. `views` are kept up to date; others too, or they are rebuilt at their next use.
        """
        ...

    def read(self, project: str, after: Id, until_ms: int, count: int) -> Sequence[Entry]:
        """At most `count` (1 to MOST_READ) entries with (ms, seq) > `after` and ms <= `until_ms`, in time order."""
        ...

    def carry(self, project: str, epoch: str, carries: Sequence[Carry], keep_ms: int = KEEP_MS) -> str:
        """Count what this ledger has lost; the epoch that holds from now on. `keep_ms` as in a question.

        Merged by view and lost epoch, as `Carry.with_report` says: one that was reported already changes nothing, so
        that it may be repeated. If that changes anything, or the ledger has no epoch yet, `epoch` begins (after the
        root's name and a slash, where there is one: see `root_of`).
        """
        ...

    def whole_after_ms(self, project: str) -> int:
        """The log has every charge that is newer than this; of older ones some were let go of. 0: of none."""
        ...

    def exhaust(self, project: str, exhaustion: Exhaustion) -> Exhaustion:
        """Close a bucket; what stands afterwards. A bucket already closed stays as it is: a repeat extends nothing.

        What upstream said before the bucket was reopened does not close it again: that was known then.
        """
        ...

    def exhaustions(self, project: str) -> Sequence[Exhaustion]:
        """The recorded exhaustions, one a bucket, by its name: also those whose time has passed, and those lifted."""
        ...

    def reopen(self, project: str, bucket: str, because: str = "") -> bool:
        """Lift an exhaustion, keeping it with the reason until the bucket is closed again; False when none stood."""
        ...

    def claim(self, project: str, name: str, ttl_ms: int) -> bool:
        """Whether the caller is the first to claim `name` in the last `ttl_ms`: True for exactly one of any number.

        For work that several machines would do and one should: name the work and its time. A claim is never given
        back; a lost answer asked for again is the same claim.
        """
        ...

    def now_ms(self) -> int:
        """The ledger's clock."""
        ...

    def close(self) -> None:
        """Let go of files and connections. May be called twice."""
        ...


def checked_range(after: Id, until_ms: int, count: int) -> tuple[Id, int, int]:
    """The arguments of `Ledger.read`, each a whole number. Raises UsageError."""
    ms, seq = (whole(part, "in an id: that", 0, NEVER) for part in after)
    return (
        (ms, seq),
        whole(until_ms, "ms: a time", 0, NEVER),
        whole(count, "entries: how many are read at once", 1, MOST_READ),
    )


def checked_exhaustion(exhaustion: Exhaustion) -> Exhaustion:
    """The argument of `Ledger.exhaust`, its times whole numbers that can be read again. Raises UsageError."""
    since_ms, until_ms = exhaustion.since_ms, exhaustion.until_ms
    return exhaustion._replace(
        since_ms=whole(since_ms, "ms: a time", 0, LATEST_MS - 1),
        until_ms=NEVER if until_ms == NEVER else whole(until_ms, "ms: a time", 0, LATEST_MS - 1),
    )


def open_ledger(url: str, *, clock: Callable[[], int] | None = None) -> Ledger:
    """The ledger at a URL: `sqlite:///path`, or `redis://`, `rediss://`, `unix://`, `redis+sentinel://`, `redis+cluster://`.

    Only the driver that is used gets imported; nothing is contacted before the first question. `clock` (ms since the
    epoch) replaces the ledger's own clock, for tests and simulation only.
    Raises ConfigError for a URL of any other kind.
    """
    scheme = url.partition(":")[0]
    if scheme == "sqlite":
        from quota.ledger.sqlite_ledger import SqliteLedger

        return SqliteLedger(url, clock=clock)
    if scheme in LEDGER_SCHEMES:
        from quota.ledger.redis_ledger import RedisLedger

        return RedisLedger(url, clock=clock)
    raise ConfigError(f"ledger url of kind {scheme!r} is not known; write sqlite:///PATH or redis://HOST:PORT/DB")
