"""The contract that every ledger keeps, and the plain values that cross it.

A project's charges are one append-only log in time order. A limit's state is a *view* on that log: a running total and
how far it has read. One decision is atomic over all limits that it checks:

1. each view reads on to the log's end and adds the new entries that it selects;
2. it drops what has left its window;
3. the costs are compared: the charge is admitted if every limit has room for its cost;
4. an admitted charge is appended and added to the views; a refused one changes nothing.

docs/ledger-rules.md, states the rules by number (L1, L2, ...); every implementation cites them.

The values are named tuples: a decision makes several of them, and they cost a third of a frozen dataclass.

A ledger can lose what it has decided: somebody empties it, restores an old copy, or promotes a replica that lagged.
`quota.recovery.high_water_mark` notices that and reports what was lost as `UnloggedUsage`, which the ledger adds to the
view's total until it would have expired.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

from quota.common.clock import LATEST_MS, NEVER
from quota.ledger.entry import Charge, Entry, Id
from quota.ledger.unlogged import UnloggedUsage
from quota.terms.arguments import whole
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS, Edges, View, Window, longest_ms_of

if TYPE_CHECKING:
    from quota.ledger.compared import Compared
    from quota.ledger.grants import Grant

CLOCK_SLACK_MS = 5_000
CLOCK_BEHIND_MS = HOUR_MS
"""How far a caller's clock may be ahead of the ledger's, and behind it, before the answer is "clock" (L11)."""

MIN_RETENTION_MS = 49 * HOUR_MS
RETENTION_SLACK_MS = 25 * HOUR_MS
"""The log is kept for the longest window that any writer named and 25 h more (a long day, should the clock go back), at
least 49 h (L12). A longer window that is introduced later counts only what is still kept: see
`Ledger.whole_after_ms`."""


class LimitCheck(NamedTuple):
    """One limit as the ledger sees it: a view, the number it may not exceed, and what this charge adds to it.

    `edges` are a calendar window's edges by the caller's clock; None for a sliding window.
    """

    view: View
    cap_units: int
    cost_units: int
    edges: Edges | None


class Exhaustion(NamedTuple):
    """Upstream said "no more": a dated fact that closes one bucket for everybody until `until_ms` (L20).

    `until_ms` is NEVER if upstream grants the project nothing at all: no reset will reopen that bucket. `reopened_ms`
    is when somebody lifted it (0: it stands) and `reopened_because` the reason; a lifted exhaustion closes nothing.
    """

    bucket: str
    since_ms: int
    until_ms: int
    evidence: str
    reported_by: str
    reopened_ms: int = 0
    reopened_because: str = ""


MAX_REPAIR_MS = MINUTE_MS
"""A repair that was begun longer ago is begun again (L26)."""

MAX_REPAIRS = 10
"""The most marks of repairs that are kept (L26). A machine that has not asked since the one before them is told
`clock`."""

LONGEST_CLAIM_MS = 9 * DAY_MS
"""Nothing that is claimed is remembered for longer: see `quota.ledger.claims`."""

MAX_READ = 1_000
"""The most entries that `Ledger.read` gives at once."""


COUNT_WITHIN_S = 0.7
"""How long a decision reads for views that have far to go. Then it answers "counting" (L21)."""

COUNT_AGAIN_MS = 1_000
"""After which time one who was answered "counting" may ask again."""

MAX_CHARGES = 100
"""The most charges that are made in one step."""

ChargeOutcome = Literal["admitted", "refused", "exhausted", "clock", "behind", "granted", "counting"]


class ChargeResult(NamedTuple):
    """The ledger's answer to one ChargeRequest.

    `used_units` has one number for each check, in the request's order, with the charge if it was admitted, and with
    unlogged usage. `now_ms` is the moment at which the windows end: the ledger's clock, or the caller's plus its slack
    if that is earlier. `last` is the id of the newest entry in the log, (0, 0) for an empty one. `epoch` names this
    ledger since its first charge, or since its last reported loss; empty before the first charge. `unlogged` is in the
    order of the checks; empty if there is none at all.

    With "clock" nothing was compared or written, and `now_ms` is the ledger's clock. With "behind" nothing was compared
    either: the ledger lacks what the request expects. With "granted" neither: the request goes by other grants of
    upstream than `granted`, which this ledger has (L28). With "counting" neither: a view has more of the log to read
    than one decision may. How far it came is kept, and the next decision goes on from there (L21).
    """

    outcome: ChargeOutcome
    id: str | None
    now_ms: int
    last: Id
    used_units: tuple[int, ...]
    exhaustion: Exhaustion | None = None
    epoch: str = ""
    unlogged: tuple[tuple[UnloggedUsage, ...], ...] = ()
    seen_ahead_ms: int = 0
    """With "clock", set by the budget: this machine saw charges dated so far ahead, and the ledger lacks them."""
    granted: str = ""
    leaving_ms: tuple[int | None, ...] = ()
    """With "refused", for each check the time of the charge that must leave a sliding window before the call fits, or
    of one that would leave when enough unlogged usage expires. None where the check did not refuse, or where the log
    must be read for it; empty where the ledger says none."""
    also: tuple[str, ...] = ()
    """The ids of the further charges, in the request's order."""

    @property
    def ids(self) -> tuple[str, ...]:
        """Of all that was charged."""
        return () if self.id is None else (self.id, *self.also)


class Expected(NamedTuple):
    """What the ledger must have: this epoch, and entries with these ids (L18). Without an epoch nothing is checked."""

    epoch: str
    ids: tuple[Id, ...]


NOTHING_EXPECTED = Expected("", ())


def root_of(epoch: str) -> str:
    """The first epoch of the log. A copy of the log has the same one; a log that was begun anew has another."""
    return epoch.partition("/")[0]


def repaired_ms_of(epoch: str) -> int:
    """`at_ms` of the last repair of the ledger of this epoch after a wrong clock; 0: none. `ROOT/NEW@1795233255077`."""
    ms = epoch.rpartition("@")[2]
    return int(ms) if ms != epoch and ms.isascii() and ms.isdigit() else 0


def following_epoch(epoch: str, name: str) -> str:
    """The epoch `name` of a ledger that was in `epoch`: of the same root, and repaired at the same time."""
    repaired_ms = repaired_ms_of(epoch)
    return f"{root_of(epoch)}/{name}" + (f"@{repaired_ms}" if repaired_ms else "") if epoch else name


class Repair(NamedTuple):
    """The mark that a repair leaves (L26).

    Until then `newest` was the id of the newest entry. Every entry dated ahead of `begun_ms` was given an id from then
    on, within MAX_REPAIR_MS, so that `through` was the newest at last. `at_ms` is when it ended, or, where that was not
    later than the repair before by another clock, a millisecond after that one's.
    """

    newest: Id
    begun_ms: int
    at_ms: int
    through: Id


class Ahead(NamedTuple):
    """What a ledger has that is dated ahead of its clock, `now_ms`, and would be changed by a repair.

    `charges` of `units` in all, the newest of the whole log at `newest_ms` (0: the log is empty); units of unlogged
    usage that count for longer than a window from now; exhaustions and claims made later than now.
    """

    now_ms: int
    newest_ms: int
    charges: int
    units: int
    unlogged_units: int
    exhaustions: int
    claims: int

    @property
    def found(self) -> bool:
        return any(self[2:])


class ChargeRequest(NamedTuple):
    """Everything that one decision needs.

    `caller_ms` is the caller's clock, the second witness beside the ledger's own. `expected` is what the caller's
    machine has seen of this ledger. `retention_ms` is how long the log must be kept: `retention_of` all limits that the
    caller knows of, not only of those checked. `granted` is the text of the grants (`quota.ledger.grants`) by which the
    caps were lowered; None: the caller does not care.

    `also` are further charges, up to MAX_CHARGES with the first: all are admitted, or none. They stand behind the first
    in the log, with ids that follow its. The checks are those that count any of them, each with the sum of what it
    counts, and `closed_by` closes all if it closes one.
    """

    project: str
    charge: Charge
    checks: Sequence[LimitCheck]
    closed_by: tuple[str, ...]
    caller_ms: int
    jitter_ms: int = 0
    expected: Expected = NOTHING_EXPECTED
    retention_ms: int = MIN_RETENTION_MS
    granted: str | None = None
    also: tuple[Charge, ...] = ()


class Notes(NamedTuple):
    """What a ledger keeps of a project beside its charges.

    `exhaustions` are those recorded, one a bucket, by its name; also those that are over, and those lifted. `grants`
    and `compared` are what `KeepsNotes.grant` stored last, also what is believed no more; what cannot be read of
    `compared` is left out. `whole_after_ms` is as in `Ledger`.
    """

    exhaustions: Sequence[Exhaustion]
    grants: Sequence[Grant]
    compared: Sequence[Compared]
    whole_after_ms: int


def retention_of(windows: Iterable[Window]) -> int:
    """How long the log must be kept for these windows (L12)."""
    return max(MIN_RETENTION_MS, RETENTION_SLACK_MS + max((window.longest_ms for window in windows), default=0))


@runtime_checkable
class Ledger(Protocol):
    """Where charges live: what a budget needs to decide. What else a ledger may be able to do is in
    `quota.ledger.parts`.

    Every method, of the parts too, raises LedgerError if the storage cannot answer (UnusableLedger if it never will),
    UsageError for a number that is none, and nothing else. Safe to use from several threads and after a fork.
    """

    label: str
    """Where it is, for people: a URL without its secrets."""

    shared: bool
    """Whether other machines can use it too."""

    def decide(self, request: ChargeRequest, *, commit: bool) -> ChargeResult:
        """Decide in one atomic step; with `commit` an admitted charge is in the log when this returns.

        A refusal and a peek change nothing that anybody can see. One call never charges twice, whatever happens to the
        connection: in doubt the charge counts as spent.
        """

    def read(
        self, project: str, after: Id, until_ms: int, count: int, within_s: float | None = None
    ) -> Sequence[Entry]:
        """At most `count` (1 to MAX_READ) entries with (ms, seq) > `after` and ms <= `until_ms`, in time order. With
        `within_s` the ledger gives up after that time."""

    def whole_after_ms(self, project: str) -> int:
        """The log has every charge that is newer than this; older ones may be gone. 0: the log has all (L13, L14)."""

    def now_ms(self) -> int:
        """The ledger's clock."""

    def close(self) -> None:
        """Release files and connections. May be called twice."""


def clocks_agree(ledger_ms: int, caller_ms: int) -> bool:
    """Whether a caller's clock is near enough to the ledger's for either to be trusted (L11)."""
    return ledger_ms - CLOCK_BEHIND_MS <= caller_ms <= ledger_ms + CLOCK_SLACK_MS


def clocks_are_one(ledger_ms: int, caller_ms: int) -> bool:
    """Whether two clocks are near enough for a repair, which changes dates for good (L26)."""
    return abs(ledger_ms - caller_ms) <= CLOCK_SLACK_MS


def units_beyond(usage: UnloggedUsage, now_ms: int) -> int:
    """The units that count for longer than they would if they had been charged at `now_ms`."""
    return usage.units_at(now_ms + longest_ms_of(usage.view))


def checked_range(after: Id, until_ms: int, count: int) -> tuple[Id, int, int]:
    """The arguments of `Ledger.read`, each a whole number. Raises UsageError."""
    ms, seq = (whole(part, "in an id: that", 0, NEVER) for part in after)
    return (
        (ms, seq),
        whole(until_ms, "ms: a time", 0, NEVER),
        whole(count, "entries: how many are read at once", 1, MAX_READ),
    )


def checked_exhaustion(exhaustion: Exhaustion) -> Exhaustion:
    """The argument of `KeepsNotes.exhaust`, with times that can be read again. Raises UsageError."""
    since_ms, until_ms = exhaustion.since_ms, exhaustion.until_ms
    return exhaustion._replace(
        since_ms=whole(since_ms, "ms: a time", 0, LATEST_MS - 1),
        until_ms=NEVER if until_ms == NEVER else whole(until_ms, "ms: a time", 0, LATEST_MS - 1),
    )


def read_entries(ledger: Ledger, project: str, since_ms: int, until_ms: int) -> Iterator[Entry]:
    """The log's entries with since_ms <= ms <= until_ms, in order, read in bounded chunks."""
    return entries_between(ledger, project, just_before(since_ms), (max(until_ms, 0), NEVER))


def just_before(ms: int) -> Id:
    """An id before all that an entry of this time can have."""
    return (ms - 1, NEVER) if ms > 0 else (0, 0)


def entries_between(ledger: Ledger, project: str, after: Id, through: Id) -> Iterator[Entry]:
    """The log's entries with `after` < (ms, seq) <= `through`, in order, read in bounded chunks."""
    size = 10  # most refusals are explained by the first few entries
    while True:
        chunk = ledger.read(project, after, through[0], size)
        for entry in chunk:
            if (entry.ms, entry.seq) > through:
                return
            yield entry
        if len(chunk) < size:
            return
        after = (chunk[-1].ms, chunk[-1].seq)
        size = min(size * 10, MAX_READ)
