"""The facts of a project: they seldom change, and every decision reads them. Pure.

    Exhaustion   upstream said "no more": a bucket is closed, or was reopened
    Grant        upstream's grant of a bucket, if the configuration has more
    Compared     upstream's count in the last `quota reconcile`
    Loss         charges that the ledger had lost and a machine put back
    Facts        all facts, as one field of the project's state

    exhaust, reopen, grant, lose    change the facts
    union                           unites two histories of the facts
    closing                         finds the exhaustion that stops a call
    merged                          joins the parts of a loss that several machines put back

An exhaustion closes its bucket until its end. A repeat does not extend it. If a bucket was reopened at T, only the
answer to a call charged at or after T closes it again. So late answers to earlier calls do not undo a reopening.

A change of the facts also appends a marker to the log, so no decision overlooks it: see `quota.ledger.state`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from quota.common.clock import LATEST_MS, NEVER
from quota.common.text import listed
from quota.errors import UsageError
from quota.terms.arguments import checked, machine_name
from quota.terms.limits import DAY_MS, HOUR_MS

FACTS = "facts"
"""The field of the state that holds the facts."""

VERSION = 1
"""The version of the text. A text of another version is not read."""

MAX_EXHAUSTIONS = 100
"""The most exhaustions that are kept, one for each bucket: those that close their buckets longest."""

MAX_GRANTS = 100
MAX_COMPARED = 100
"""The most buckets that have a grant, and whose comparison is kept: those that were compared last."""

MAX_LOSSES = 10
"""The most losses that are kept: the last ones."""

MAX_WAIT_MS = 2 * HOUR_MS
"""A client waits no longer for the end of an exhaustion."""

MAX_TEXT_CHARS = 500
"""Longer evidence and reasons are cut, because every new process reads the facts."""


class Exhaustion(NamedTuple):
    """Upstream said "no more": a dated fact that closes one bucket for everybody until `until_ms`.

    `since_ms` is the time of the charge whose call got that answer, or of the change before if that is later.
    `until_ms` is NEVER if upstream grants the project nothing at all: no reset will reopen that bucket. `reopened_ms`
    is when somebody lifted it (0: it stands) and `reopened_because` the reason; a lifted exhaustion closes nothing.
    `is_pause`: the only evidence is a single answer that does not mention a used-up quota.
    """

    bucket: str
    since_ms: int
    until_ms: int
    evidence: str
    reported_by: str
    reopened_ms: int = 0
    reopened_because: str = ""
    is_pause: bool = False

    def opens_ms(self, jitter_ms: int) -> int:
        """When this machine goes on: up to `jitter_ms` after the end, so that machines do not come back all at once,
        but at most a tenth of the time for which the bucket was closed. On the machine that got the answer a client
        may try again at that end, unless it is hours ahead: no client waits so long, and upstream's clock may be
        behind at its reset. NEVER if it has no end."""
        lasts_ms = max(0, self.until_ms - self.since_ms)
        if self.until_ms == NEVER or (lasts_ms < MAX_WAIT_MS and self.reported_by.startswith(f"{machine_name()}:")):
            return self.until_ms
        return self.until_ms + min(jitter_ms, lasts_ms // 10)


class Grant(NamedTuple):
    """Upstream grants `quota_units` of a bucket in each of its periods. Its answer came at `since_ms`, and counts until
    `until_ms`."""

    bucket: str
    quota_units: int
    since_ms: int
    until_ms: int

    def believed_at(self, now_ms: int) -> bool:
        """Whether it lowers limits now. A grant of the future does not: a wrong clock dated it."""
        return self.since_ms - DAY_MS <= now_ms < self.until_ms


class Compared(NamedTuple):
    """Upstream's count of a bucket beside ours, at `at_ms`: from upstream's reset at `since_ms` to its newest point at
    `through_ms`. Only upstream counted the `unknown_units`, only we counted the `drift_units`. It is for people: no
    decision uses it."""

    bucket: str
    upstream_units: int
    our_units: int
    unknown_units: int
    drift_units: int
    since_ms: int
    through_ms: int
    at_ms: int


class Loss(NamedTuple):
    """Charges that the ledger lost and a machine put back, and their units. Each machine puts back what only it has
    read: `since_ms` is when the first machine did. It is for people: no decision uses it."""

    at_ms: int
    machine: str
    charges: int
    units: int
    since_ms: int


@dataclass(frozen=True)
class Facts:
    """All facts of a project: at most one exhaustion and one comparison for each bucket, ordered by bucket.
    `granted_ms` is when the grants were last replaced. `losses` are the last ones, the oldest first."""

    exhaustions: tuple[Exhaustion, ...] = ()
    grants: tuple[Grant, ...] = ()
    granted_ms: int = 0
    compared: tuple[Compared, ...] = ()
    losses: tuple[Loss, ...] = ()

    @classmethod
    def read(cls, stored: str) -> Facts:
        """The facts in a text. Never raises: it leaves out values that it cannot read."""
        try:
            data = json.loads(stored) if stored else {}
        except (ValueError, RecursionError):
            return cls()
        if not isinstance(data, dict) or data.get("version") != VERSION:
            return cls()
        granted_ms = data.get("granted_ms")
        return cls(
            _exhaustions(_read(data.get("exhaustions"), Exhaustion, checked_exhaustion)),
            tuple(sorted(_read(data.get("grants"), Grant, checked_grant))[:MAX_GRANTS]),
            granted_ms if type(granted_ms) is int and 0 <= granted_ms < LATEST_MS else 0,
            _compared(_read(data.get("compared"), Compared, _of_bucket)),
            _losses(_read(data.get("losses"), Loss, checked)),
        )

    def text(self) -> str:
        """The text that the ledger stores: JSON in ASCII. Equal facts have equal texts."""
        return json.dumps({"version": VERSION, **vars(self)}, separators=(",", ":"))

    def exhaustion(self, bucket: str) -> Exhaustion | None:
        """The last exhaustion of a bucket, even if it is over or lifted."""
        return next((exhaustion for exhaustion in self.exhaustions if exhaustion.bucket == bucket), None)

    def granted(self, now_ms: int) -> dict[str, int]:
        """The units of upstream's grants that count now, by bucket."""
        return {grant.bucket: grant.quota_units for grant in self.grants if grant.believed_at(now_ms)}

    def happened(self, now_ms: int) -> Facts:
        """The facts without facts of the future: a wrong clock dated them, and they would outlast later answers. Grants
        stay, but any others outlast them."""
        return replace(
            self,
            exhaustions=tuple(x for x in self.exhaustions if max(x.since_ms, x.reopened_ms) <= now_ms),
            granted_ms=self.granted_ms if self.granted_ms <= now_ms else 0,
            compared=tuple(comparison for comparison in self.compared if comparison.at_ms <= now_ms),
            losses=tuple(loss for loss in self.losses if loss.at_ms <= now_ms),
        )


# -- changes -----------------------------------------------------------------------------------------------------------


def exhaust(facts: Facts, exhaustion: Exhaustion, now_ms: int) -> Facts:
    """Close a bucket, unless it is closed or somebody reopened it after the call's charge. `Facts.exhaustion` has the
    exhaustion that stands then. If the lifted exhaustion is over, or its reopening is dated ahead of `now_ms`, it does
    not keep the bucket open. Raises UsageError for an invalid value."""
    exhaustion = checked_exhaustion(exhaustion)
    before = facts.exhaustion(exhaustion.bucket)
    if before is not None and before.until_ms > now_ms:
        reopened_ms = before.reopened_ms
        if not reopened_ms or exhaustion.since_ms < reopened_ms <= now_ms:
            return facts
    if before is not None:  # of two histories, the union keeps the later
        after_ms = min(before.reopened_ms or before.since_ms, now_ms)
        exhaustion = exhaustion._replace(since_ms=max(exhaustion.since_ms, after_ms))
    return replace(facts, exhaustions=_exhaustions([*_others(facts, exhaustion.bucket), exhaustion]))


def reopen(facts: Facts, bucket: str, because: str, now_ms: int) -> Facts:
    """Lift the exhaustion of a bucket, with the reason. Returns the same facts if no exhaustion stands."""
    before = facts.exhaustion(bucket)
    if before is None or before.reopened_ms:
        return facts
    lifted = checked_exhaustion(before._replace(reopened_ms=now_ms, reopened_because=because))
    return replace(facts, exhaustions=_exhaustions([*_others(facts, bucket), lifted]))


def grant(facts: Facts, grants: Iterable[Grant], compared: Iterable[Compared] | None, now_ms: int) -> Facts:
    """Replace the grants, and the comparisons (None: they stay). Raises UsageError for an invalid value."""
    several = [checked_grant(granted) for granted in grants]
    if len(several) > MAX_GRANTS:
        raise UsageError(f"{len(several):,} grants: a project has at most {MAX_GRANTS}")
    changed = replace(facts, grants=tuple(sorted(several)), granted_ms=now_ms)
    if compared is None:
        return changed
    return replace(changed, compared=_compared(map(_of_bucket, compared)))


def lose(facts: Facts, loss: Loss, newest_ms: int) -> Facts:
    """Note a loss, whose newest charge is of `newest_ms`. If the last noted loss is later, this is a part of it: a
    second emptying would have removed the note."""
    last_ms = facts.losses[-1].since_ms if facts.losses else 0
    loss = loss._replace(since_ms=last_ms) if newest_ms <= last_ms else loss
    return replace(facts, losses=_losses([*facts.losses, loss]))


def union(first: Facts, second: Facts) -> Facts:
    """The union of two histories of the facts: of each bucket the last change, closed or reopened, and the grants that
    were set last. The order of the two does not matter."""
    newest = max(first, second, key=lambda facts: (facts.granted_ms, facts.grants))
    return Facts(
        _exhaustions([*first.exhaustions, *second.exhaustions]),
        newest.grants,
        newest.granted_ms,
        _compared([*first.compared, *second.compared]),
        _losses([*first.losses, *second.losses]),
    )


def closing(facts: Facts, buckets: Collection[str], now_ms: int, jitter_ms: int) -> Exhaustion | None:
    """The exhaustion that closes one of these buckets longest; if several end together, the first bucket's."""
    if not facts.exhaustions:
        return None
    standing = {
        fact.bucket: fact for fact in facts.exhaustions if not fact.reopened_ms and fact.opens_ms(jitter_ms) > now_ms
    }
    closed = [standing[bucket] for bucket in buckets if bucket in standing]
    return max(closed, key=lambda fact: fact.opens_ms(jitter_ms), default=None)


def merged(losses: Iterable[Loss]) -> list[Loss]:
    """Each loss once, with all charges that machines put back, dated by the first machine."""
    parts: dict[int, list[Loss]] = {}
    for loss in losses:
        parts.setdefault(loss.since_ms, []).append(loss)
    return [
        Loss(
            at_ms=since_ms,
            machine=listed(dict.fromkeys(loss.machine for loss in of_it)),
            charges=sum(loss.charges for loss in of_it),
            units=sum(loss.units for loss in of_it),
            since_ms=since_ms,
        )
        for since_ms, of_it in parts.items()
    ]


def _others(facts: Facts, bucket: str) -> list[Exhaustion]:
    return [exhaustion for exhaustion in facts.exhaustions if exhaustion.bucket != bucket]


# -- in order, and bounded ---------------------------------------------------------------------------------------------

B = TypeVar("B", Exhaustion, Compared)
F = TypeVar("F", Exhaustion, Grant, Compared)
T = TypeVar("T", bound=tuple[Any, ...])


def _exhaustions(several: Iterable[Exhaustion]) -> tuple[Exhaustion, ...]:
    # Closed at T comes after reopened at T, unless it is the closing that was reopened.
    newest = _newest(several, lambda x: (max(x.since_ms, x.reopened_ms), x))
    longest = sorted(newest, key=lambda exhaustion: (not exhaustion.reopened_ms, exhaustion.until_ms, exhaustion))
    return tuple(sorted(longest[-MAX_EXHAUSTIONS:]))


def _compared(several: Iterable[Compared]) -> tuple[Compared, ...]:
    newest = _newest(several, lambda comparison: (comparison.at_ms, comparison))
    return tuple(sorted(sorted(newest, key=lambda comparison: (comparison.at_ms, comparison))[-MAX_COMPARED:]))


def _losses(several: Iterable[Loss]) -> tuple[Loss, ...]:
    return tuple(sorted({*several}, key=lambda loss: (loss.since_ms, loss))[-MAX_LOSSES:])


def _newest(several: Iterable[B], order: Callable[[B], tuple[object, ...]]) -> Iterable[B]:
    """The last value of each bucket in this order."""
    return {value.bucket: value for value in sorted(several, key=order)}.values()


# -- checked -----------------------------------------------------------------------------------------------------------


def checked_exhaustion(exhaustion: Exhaustion) -> Exhaustion:
    """The exhaustion with each value of its type and in its bounds. Raises UsageError."""
    exhaustion = _of_bucket(exhaustion)
    return exhaustion._replace(
        evidence=exhaustion.evidence[:MAX_TEXT_CHARS],
        reported_by=exhaustion.reported_by[:MAX_TEXT_CHARS],
        reopened_because=exhaustion.reopened_because[:MAX_TEXT_CHARS],
    )


def checked_grant(granted: Grant) -> Grant:
    """The grant with each value of its type and in its bounds. Raises UsageError."""
    granted = _of_bucket(granted)
    if granted.since_ms >= granted.until_ms:
        raise UsageError(f"the grant of {granted.bucket} ends before it begins")
    return granted


def _of_bucket(fact: F) -> F:
    """The fact of a bucket, with each value of its type and in its bounds. Raises UsageError."""
    fact = checked(fact)
    if re.fullmatch(r"[A-Za-z0-9._:-]{1,64}", fact.bucket) is None:
        raise UsageError(f"bucket {fact.bucket!r:.100}: a name has 1 to 64 letters, digits and . _ : -")
    return fact


def _read(rows: object, make: Callable[..., T], check: Callable[[T], T]) -> list[T]:
    """The values of the rows. Leaves out rows that cannot be read."""
    values = []
    for row in rows if isinstance(rows, list) else ():
        with suppress(TypeError, UsageError):
            values.append(check(make(*row)))
    return values
