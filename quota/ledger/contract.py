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

from typing import TYPE_CHECKING, NamedTuple

from quota.arguments import whole
from quota.common.clock import NEVER
from quota.ledger.entry import Charge

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from quota.ledger.entry import Charge, Entry, Id
    from quota.ledger.unlogged import UnloggedUsage
    from quota.limits import Edges, View

from typing import TYPE_CHECKING, Literal, Protocol

from quota.common.clock import LATEST_MS
from quota.limits import HOUR_MS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from quota.limits import Edges, View, Window

CLOCK_SLACK_MS = 5_000
"""How far a caller's clock may run ahead of the ledger's before its question is answered "clock"."""

MIN_RETENTION_MS = 49 * HOUR_MS
RETENTION_SLACK_MS = 25 * HOUR_MS
"""The log is kept for the longest window that any writer named and 25 h more (a long day, should the clock go back), at
least 49 h. Every write names the longest window of all limits of its configuration, whichever of them count the charge:
see `retention_of`. Who joins with a longer window later starts with what is there: see `Ledger.whole_after_ms`."""


class LimitCheck(NamedTuple):
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


MAX_READ = 1_000
"""So many entries `Ledger.read` gives at once, and no more."""


ChargeOutcome = Literal["admitted", "refused", "exhausted", "clock", "behind"]


class ChargeResult(NamedTuple):
    """The ledger's answer to one question.

    `used_units` stands in the order of the asks and includes the charge if it was admitted, and what is carried.
    `now_ms` is the moment at which the windows end: the ledger's clock, or the caller's plus its slack where that is
    earlier. `last` is the id of the newest entry in the log, (0, 0) of an empty one. With "clock" nothing was compared,
    and `now_ms` is the ledger's clock. With "behind" nothing was compared either: the ledger lacks what the question
    says was seen of it. `epoch` names this ledger since it was begun, or since its last loss was made good; empty
    before the first charge. `unlogged` is in the order of the asks; empty where nothing is carried at all.
    """

    outcome: ChargeOutcome
    id: str | None
    now_ms: int
    last: Id
    used_units: tuple[int, ...]
    exhaustion: Exhaustion | None = None
    epoch: str = ""
    unlogged: tuple[tuple[UnloggedUsage, ...], ...] = ()


class Expected(NamedTuple):
    """An epoch, and ids that are in the log then. No epoch: nothing was seen, and nothing is checked."""

    epoch: str
    ids: tuple[Id, ...]


NOTHING_EXPECTED = Expected("", ())


def root_of(epoch: str) -> str:
    """The first epoch of the log: the same for a copy of it, another for one that was begun anew."""
    return epoch.partition("/")[0]


class ChargeRequest(NamedTuple):
    """Everything one decision needs. `caller_ms` is the caller's clock: the second witness beside the ledger's own.

    `expected` is what the caller's machine has seen of this ledger: in that epoch, charges with these ids.
    `retention_ms` is how long the log must be kept: `retention_of` of all limits that the caller knows of, not only of
    those asked about.
    """

    project: str
    charge: Charge
    checks: Sequence[LimitCheck]
    closed_by: tuple[str, ...]
    caller_ms: int
    jitter_ms: int = 0
    expected: Expected = NOTHING_EXPECTED
    retention_ms: int = MIN_RETENTION_MS


def retention_of(windows: Iterable[Window]) -> int:
    """How long the log must be kept for these windows."""
    return max(MIN_RETENTION_MS, RETENTION_SLACK_MS + max((window.longest_ms for window in windows), default=0))


class Ledger(Protocol):
    """Where charges live. Every method raises LedgerError, and nothing else, when the storage cannot answer; UsageError
    for a number that is none.

    Safe to use from several threads and after a fork.
    """

    label: str
    """Where it is, for people: a URL without its secrets."""

    shared: bool
    """Whether other machines can use it too."""

    def decide(self, request: ChargeRequest, *, commit: bool) -> ChargeResult:
        """Answer one question in one atomic step; with `commit` an admitted charge is in the log when this returns.

        A refusal and a peek change nothing that anybody can see. Never charges twice for one call, whatever happens
        to the connection: in doubt the charge counts as spent.
        """
        ...

    def repay(
        self, project: str, machine: str, charges: Sequence[tuple[int, Charge]], retention_ms: int = MIN_RETENTION_MS
    ) -> None:
        """Append what a machine spent while this ledger could not answer: at most 100 charges, numbers rising.

        Unconditional, and once: numbers up to the last one repaid by `machine` are ignored. Dated now. `retention_ms`
        as in a question.
        """
        ...

    def settle(self, project: str, charge_id: str, units: int, views: Sequence[View]) -> Entry | None:
        """Set what a charge counts, absolutely, keeping its time and id; the entry as it was before, None if unknown.

        Idempotent and never refused. `views` are kept up to date; others too, or they are rebuilt at their next use.
        """
        ...

    def read(self, project: str, after: Id, until_ms: int, count: int) -> Sequence[Entry]:
        """At most `count` (1 to MAX_READ) entries with (ms, seq) > `after` and ms <= `until_ms`, in time order."""
        ...

    def add_unlogged(
        self, project: str, epoch: str, usages: Sequence[UnloggedUsage], retention_ms: int = MIN_RETENTION_MS
    ) -> str:
        """Count what this ledger has lost; the epoch that holds from now on. `retention_ms` as in a question.

        Merged by view and lost epoch, as `UnloggedUsage.with_report` says: one that was reported already changes
        nothing, so that it may be repeated. If that changes anything, or the ledger has no epoch yet, `epoch` begins
        (after the root's name and a slash, where there is one: see `root_of`).
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
        whole(count, "entries: how many are read at once", 1, MAX_READ),
    )


def checked_exhaustion(exhaustion: Exhaustion) -> Exhaustion:
    """The argument of `Ledger.exhaust`, its times whole numbers that can be read again. Raises UsageError."""
    since_ms, until_ms = exhaustion.since_ms, exhaustion.until_ms
    return exhaustion._replace(
        since_ms=whole(since_ms, "ms: a time", 0, LATEST_MS - 1),
        until_ms=NEVER if until_ms == NEVER else whole(until_ms, "ms: a time", 0, LATEST_MS - 1),
    )


def read_entries(ledger: Ledger, project: str, since_ms: int, until_ms: int) -> Iterator[Entry]:
    """The log's entries with since_ms <= ms <= until_ms, in order, read in bounded chunks."""
    after, until_ms = (since_ms - 1, NEVER) if since_ms > 0 else (0, 0), max(until_ms, 0)
    size = 10  # most refusals are explained by the first few entries
    while True:
        chunk = ledger.read(project, after, until_ms, size)
        yield from chunk
        if len(chunk) < size:
            return
        after = (chunk[-1].ms, chunk[-1].seq)
        size = min(size * 10, MAX_READ)
