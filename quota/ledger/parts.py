"""What a ledger can do beside deciding, each part a protocol of its own.

A part is asked for by its type: `notes_in(ledger).exhaust(...)`. A ledger that lacks it works without; a caller that
needs it is told so, in one line.

    Correctable     charges that are corrected, repaid, or lost and counted all the same
    KeepsNotes      what upstream said: closed buckets, grants, counts
    KeepsClaims     which run has which regions
    KeepsPlaces     where jobs stand in their regions
    KeepsHistory    what was spent and refused, hour by hour
    Repairable      what an operator asks
    Movable         see `quota.ledger.fence`

SQLite and Redis have all of them, the ledger in memory of `quota plan` none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from quota.errors import UnusableLedger
from quota.ledger.contract import MIN_RETENTION_MS, Ahead, Exhaustion, Ledger, Notes, Repair
from quota.ledger.entry import Charge, Entry
from quota.ledger.unlogged import UnloggedUsage
from quota.terms.limits import View

if TYPE_CHECKING:
    from quota.common.findings import Finding
    from quota.ledger.claims import Claim, Claimed, Ending
    from quota.ledger.compared import Compared
    from quota.ledger.grants import Grant
    from quota.ledger.history import History, RefusalCount


@runtime_checkable
class Correctable(Protocol):
    """Charges that are corrected, repaid, or lost and counted all the same."""

    def settle(
        self, project: str, charge_id: str, units: int, views: Sequence[View], also: Sequence[str] = ()
    ) -> Entry | None:
        """Set what a charge counts, absolutely, keeping its time and id (L15). Those in `also`, the further charges of
        one call, count the same from the same moment on.

        Returns the entry as it was before, or None, and nothing is done, if an id is unknown. Idempotent and never
        refused. The ledger updates `views`; other views it updates too, or rebuilds at their next use.
        """

    def repay(
        self,
        project: str,
        machine: str,
        charges: Sequence[tuple[int, Charge]],
        retention_ms: int = MIN_RETENTION_MS,
        caller_ms: int | None = None,
    ) -> bool:
        """Append what a machine spent while this ledger could not answer: at most 100 charges, numbers rising (L19).

        Nothing is compared, and each charge is appended once: numbers up to the last one repaid by `machine` are
        ignored. The charges are dated now. `retention_ms` as in a ChargeRequest. False, and nothing is appended, where
        `caller_ms` is given and the clocks disagree (L11).
        """

    def add_unlogged(
        self,
        project: str,
        epoch: str,
        usages: Sequence[UnloggedUsage],
        retention_ms: int = MIN_RETENTION_MS,
        root: str | None = None,
    ) -> str:
        """Count what this ledger has lost (L17); returns the epoch that holds from now on (L18).

        Reports are merged by view and lost epoch, as `UnloggedUsage.with_report` does it: the same report again changes
        nothing. If a report of a loss changes anything, or the ledger has no epoch yet, `epoch` begins (after the
        root's name and a slash, if there is one: see `root_of`). A carry begins none, and one of this log's own root is
        ignored. `retention_ms` as in a ChargeRequest. With `root`, nothing is done to a log of another root: it is not
        the one that was compared.
        """


@runtime_checkable
class KeepsNotes(Protocol):
    """What upstream said of a project."""

    def exhaust(self, project: str, exhaustion: Exhaustion) -> Exhaustion:
        """Close a bucket; returns what stands afterwards (L20).

        A bucket that is closed already stays as it is: a repeat extends nothing. If it was reopened after what upstream
        said, it stays open.
        """

    def reopen(self, project: str, bucket: str, because: str = "") -> bool:
        """Lift an exhaustion, and keep it with the reason until the bucket is closed again. False if there was none."""

    def grant(self, project: str, grants: Sequence[Grant], compared: Sequence[Compared] | None = None) -> None:
        """Remember what upstream says it grants, in place of all that was remembered before (L28). An empty sequence
        forgets it. So it is with what upstream counted, if `compared` is given. Raises UsageError for what cannot be
        stored."""

    def notes(self, project: str) -> Notes:
        """The exhaustions, the grants, what upstream counted last, and from when on the log is whole: one reading."""


@runtime_checkable
class KeepsClaims(Protocol):
    """Which run has which regions, and which ticks were run."""

    def claim(self, project: str, claim: Claim, *, take_over: bool = False) -> Claimed:
        """Give a run those of its regions that are free, lapsed or its own store's (L25); `take_over`: all of them.

        One atomic step. A run claims again to renew its hold, and learns from the answer what it has lost meanwhile. If
        an answer is lost, claiming again is the same claim. Raises UsageError for a claim out of its bounds.
        """

    def end_claim(self, project: str, claim: Claim, ending: Ending) -> None:
        """Say that the run has ended. Its regions stay with its store, unless it `failed`; its tick was run, unless it
        was `stopped` on the way.
        """


@runtime_checkable
class KeepsPlaces(KeepsClaims, Protocol):
    """Where jobs stand in their regions, as texts of whoever runs them."""

    def places(self, project: str, name: str, regions: Sequence[str]) -> Mapping[str, str]:
        """The places of at most 1,000 of these regions of the job called `name`; without those that have none (L31)."""

    def keep_places(self, project: str, claim: Claim, name: str, places: Mapping[str, str]) -> Claimed:
        """Renew a claim, and keep the places of regions that it names, each at most MAX_PLACE_BYTES long (L31).

        One atomic step. A region that another run has had since this one claimed it is in `elsewhere` of the answer:
        nothing was kept of it, and the run does not get it back. Raises UsageError for a place out of its bounds.
        """


@runtime_checkable
class KeepsHistory(Protocol):
    """What was spent and refused, hour by hour."""

    def roll_up(
        self, project: str, caller_ms: int, within_s: float | None = None, *, present_hour: bool = False
    ) -> bool:
        """Add charges of an hour that is over to the history; whether there is more to do (L29). With `present_hour`,
        also those of the hour that is not over yet.

        A bounded piece of work, outside of every decision: call again while it returns True. Each charge is added once,
        whoever calls. `caller_ms` is the caller's clock, as in a ChargeRequest. With `within_s` the ledger gives up
        after that time.
        """

    def history(self, project: str, since_ms: int, now_ms: int) -> History:
        """What was rolled up of the hours since the one of `since_ms`, and the refusals in them, for 35 days.

        One reading, so nothing is in it twice: entries after `History.rolled_up` are in the log alone.
        """

    def add_refusals(
        self, project: str, counts: Sequence[RefusalCount], refusals: Sequence[str], within_s: float | None = None
    ) -> None:
        """Count refused calls, and keep some of them as a whole: at most 200 counts, and 100 texts of at most 4,000
        bytes, oldest first (L30).

        What is sent twice counts twice, so nothing is sent again when an answer is lost. With `within_s` the ledger
        gives up after that time; a cluster's client goes by its own.
        """

    def refusals(self, project: str) -> Sequence[str]:
        """The last 100 refusals that were kept as a whole, oldest first."""


@runtime_checkable
class Repairable(Protocol):
    """What an operator asks."""

    def examine(self, project: str) -> Sequence[Finding]:
        """What an operator should know of where the charges of a project lie. Changes nothing that counts."""

    def ahead(self, project: str) -> Ahead:
        """What is dated ahead of the ledger's clock. Changes nothing."""

    def repair(self, project: str, epoch: str, caller_ms: int) -> str | None:
        """Date from now on what is dated ahead of now, after a clock that was wrong (L26); returns the new epoch.

        Entries ahead keep their order and their corrections; all views are taken from the log again; unlogged usage
        counts for a window from now at most; exhaustions and claims made later than now are removed. `epoch` begins, as
        in `add_unlogged`, and `repairs` has one more. Others charge on meanwhile. None, and nothing is done, if the
        caller's clock and the ledger's are more than CLOCK_SLACK_MS apart.
        """

    def repairs(self, project: str) -> Sequence[Repair]:
        """The marks of the last MAX_REPAIRS repairs, oldest first."""


def correctable(ledger: Ledger) -> Correctable:
    if isinstance(ledger, Correctable):
        return ledger
    raise _lacking(ledger, "takes no corrections")


def notes_in(ledger: Ledger) -> KeepsNotes:
    if isinstance(ledger, KeepsNotes):
        return ledger
    raise _lacking(ledger, "keeps no notes of what upstream said")


def claims_in(ledger: Ledger) -> KeepsClaims:
    if isinstance(ledger, KeepsClaims):
        return ledger
    raise _lacking(ledger, "keeps no claims of runs")


def places_in(ledger: Ledger) -> KeepsPlaces:
    if isinstance(ledger, KeepsPlaces):
        return ledger
    raise _lacking(ledger, "keeps no places of jobs")


def history_in(ledger: Ledger) -> KeepsHistory:
    if isinstance(ledger, KeepsHistory):
        return ledger
    raise _lacking(ledger, "keeps no history")


def repairable(ledger: Ledger) -> Repairable:
    if isinstance(ledger, Repairable):
        return ledger
    raise _lacking(ledger, "cannot be examined or repaired")


def _lacking(ledger: Ledger, what: str) -> UnusableLedger:
    return UnusableLedger(f"ledger {ledger.label} {what}; take one in SQLite or Redis for that")
