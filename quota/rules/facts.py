"""The facts of a project: what changes seldom, and what every decision goes by. Pure.

    Exhaustion   upstream said "no more": a bucket is closed, or was reopened
    Grant        what upstream grants of a bucket, where the configuration says more
    Compared     what upstream counted when `quota reconcile` last asked
    Facts        all of them, as one field of the project's state

    exhaust, reopen, grant      what becomes of the facts
    union                       what two histories of them have together
    closing                     the exhaustion that stops a call

An exhaustion closes its bucket until its end. A bucket that is closed stays as it is: a repeat extends nothing. A
bucket that was reopened at T is closed again only by what upstream said at or after T. So late answers of calls that
were under way undo nothing that somebody has decided.

Facts are changed together with a marker in the log, so no decision overlooks a change: see `quota.ledger.state`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from quota.common.clock import LATEST_MS, NEVER
from quota.errors import UsageError
from quota.terms.arguments import text, whole
from quota.terms.limits import DAY_MS

FACTS = "facts"
"""The field of the state that holds them."""

VERSION = 1
"""Of the text. Another one is not read."""

MAX_EXHAUSTIONS = 100
"""The most exhaustions that are kept, one for each bucket. Of more, those that close their bucket longest."""

MAX_GRANTS = 100
MAX_COMPARED = 100
"""The most buckets whose comparison is kept: of more, those compared last."""

MAX_CHANGES = 20
"""Of so many changes the facts know that they were made. An author whose answer was lost asks again much sooner."""

MAX_TEXT_CHARS = 500
"""Longer evidence, and longer reasons, are cut. The facts are read by every process that begins."""

_LARGEST = 10**15 - 1


class Exhaustion(NamedTuple):
    """Upstream said "no more": a dated fact that closes one bucket for everybody until `until_ms`.

    `since_ms` is when the call was charged that upstream answered so. `until_ms` is NEVER if upstream grants the
    project nothing at all: no reset will reopen that bucket. `reopened_ms` is when somebody lifted it (0: it stands)
    and `reopened_because` the reason; a lifted exhaustion closes nothing. `is_pause`: one answer is all that speaks of
    it, without a word of a quota that is used up.
    """

    bucket: str
    since_ms: int
    until_ms: int
    evidence: str
    reported_by: str
    reopened_ms: int = 0
    reopened_because: str = ""
    is_pause: bool = False


class Grant(NamedTuple):
    """Upstream grants `quota_units` of a bucket in each of its periods: heard at `since_ms`, believed until
    `until_ms`."""

    bucket: str
    quota_units: int
    since_ms: int
    until_ms: int

    def believed_at(self, now_ms: int) -> bool:
        """Whether it still lowers a limit. Not if it was heard in what is now the future: that clock was wrong."""
        since_ms, until_ms = self.believed_ms
        return since_ms <= now_ms < until_ms

    @property
    def believed_ms(self) -> tuple[int, int]:
        """From and until when it is believed."""
        return self.since_ms - DAY_MS, self.until_ms


class Compared(NamedTuple):
    """Upstream's count of a bucket beside ours, as they stood at `at_ms`: since upstream's reset at `since_ms`, and up
    to its newest point at `through_ms`. `unknown_units` only upstream counted, `drift_units` only we did. It is for
    people: nothing is decided by it."""

    bucket: str
    upstream_units: int
    our_units: int
    unknown_units: int
    drift_units: int
    since_ms: int
    through_ms: int
    at_ms: int


class DatedKey(NamedTuple):
    """The key of a change that was made, which its marker in the log has, too, and when."""

    at_ms: int
    key: str


@dataclass(frozen=True)
class Facts:
    """All facts of a project: at most one exhaustion and one comparison for each bucket, in the order of their names.
    `granted_ms` is when the grants were last replaced. `changed_by` has the newest changes, the oldest first."""

    exhaustions: tuple[Exhaustion, ...] = ()
    grants: tuple[Grant, ...] = ()
    granted_ms: int = 0
    compared: tuple[Compared, ...] = ()
    changed_by: tuple[DatedKey, ...] = ()

    @classmethod
    def read(cls, stored: str) -> Facts:
        """The facts in a text. Never raises: what cannot be read is left out."""
        try:
            data = json.loads(stored) if stored else {}
        except (ValueError, RecursionError):
            return cls()
        if not isinstance(data, dict) or data.get("version") != VERSION:
            return cls()
        granted_ms = data.get("granted_ms")
        return cls(
            _exhaustions(_read(data.get("exhaustions"), Exhaustion, checked_exhaustion)),
            _grants(_read(data.get("grants"), Grant, checked_grant)),
            granted_ms if type(granted_ms) is int and 0 <= granted_ms < LATEST_MS else 0,
            _compared(_read(data.get("compared"), Compared, checked_compared)),
            _changed_by(_read(data.get("changed_by"), DatedKey, checked_key)),
        )

    def text(self) -> str:
        """As the ledger stores them: a JSON text in ASCII. Equal facts have equal texts."""
        values = {
            "version": VERSION,
            "exhaustions": self.exhaustions,
            "grants": self.grants,
            "granted_ms": self.granted_ms,
            "compared": self.compared,
            "changed_by": self.changed_by,
        }
        return json.dumps(values, separators=(",", ":"))

    def exhaustion(self, bucket: str) -> Exhaustion | None:
        """What was recorded last of a bucket, also if it is over, or was lifted."""
        return next((exhaustion for exhaustion in self.exhaustions if exhaustion.bucket == bucket), None)

    def happened(self, now_ms: int) -> Facts:
        """The facts without what is of the future: a wrong clock dated that, and what was said later would not count,
        or not for ever."""
        return replace(
            self,
            exhaustions=tuple(x for x in self.exhaustions if max(x.since_ms, x.reopened_ms) <= now_ms),
            granted_ms=min(self.granted_ms, now_ms),
            compared=tuple(comparison for comparison in self.compared if comparison.at_ms <= now_ms),
        )

    def has_change(self, key: str) -> bool:
        """Whether the change of this key was made, as far as that is remembered."""
        return any(change.key == key for change in self.changed_by)

    def with_change(self, key: str, at_ms: int) -> Facts:
        """The facts that remember this change, too."""
        return replace(self, changed_by=_changed_by([*self.changed_by, checked_key(DatedKey(at_ms, key))]))


# -- what becomes of them ----------------------------------------------------------------------------------------------


def exhaust(facts: Facts, exhaustion: Exhaustion, now_ms: int) -> Facts:
    """Close a bucket, if it is neither closed nor was reopened since what upstream said. Which exhaustion holds now is
    in `Facts.exhaustion`. A reopening dated ahead of `now_ms`, or of a time that is over, keeps nothing open. Raises
    UsageError for a value that no fact can have."""
    exhaustion = checked_exhaustion(exhaustion)
    before = facts.exhaustion(exhaustion.bucket)
    if before is not None and before.until_ms > now_ms:
        reopened_ms = before.reopened_ms
        if not reopened_ms or exhaustion.since_ms < reopened_ms <= now_ms:
            return facts
    return replace(facts, exhaustions=_exhaustions([*_others(facts, exhaustion.bucket), exhaustion]))


def reopen(facts: Facts, bucket: str, because: str, now_ms: int) -> Facts:
    """Lift what closes a bucket, with the reason. The same facts if nothing was recorded that stands."""
    before = facts.exhaustion(bucket)
    if before is None or before.reopened_ms:
        return facts
    lifted = checked_exhaustion(before._replace(reopened_ms=now_ms, reopened_because=because))
    return replace(facts, exhaustions=_exhaustions([*_others(facts, bucket), lifted]))


def grant(facts: Facts, grants: Iterable[Grant], compared: Iterable[Compared] | None, now_ms: int) -> Facts:
    """Replace the grants, and what upstream counted (None: that stays). Raises UsageError for a value that no fact can
    have."""
    checked = [checked_grant(granted) for granted in grants]
    if len(checked) > MAX_GRANTS:
        raise UsageError(f"{len(checked):,} grants: a project has at most {MAX_GRANTS}")
    changed = replace(facts, grants=_grants(checked), granted_ms=now_ms)
    if compared is None:
        return changed
    return replace(changed, compared=_compared([checked_compared(comparison) for comparison in compared]))


def union(first: Facts, second: Facts) -> Facts:
    """What two histories of the facts have together: of each bucket what was said of it last, be it closed or reopened,
    and of the grants those that were set last. The order of the two does not matter."""
    newest = max(first, second, key=lambda facts: (facts.granted_ms, facts.grants))
    return Facts(
        _exhaustions([*first.exhaustions, *second.exhaustions]),
        newest.grants,
        newest.granted_ms,
        _compared([*first.compared, *second.compared]),
        _changed_by([*first.changed_by, *second.changed_by]),
    )


def closing(facts: Facts, buckets: Collection[str], now_ms: int, jitter_ms: int) -> Exhaustion | None:
    """Of the exhaustions that close one of these buckets at a time, the one that lasts longest; of several, that of the
    first of the buckets. Each lasts `jitter_ms` longer, so that machines do not come back all at once."""
    longest: Exhaustion | None = None
    for bucket in buckets if facts.exhaustions else ():
        exhaustion = facts.exhaustion(bucket)
        if exhaustion is None or exhaustion.reopened_ms:
            continue
        if exhaustion.until_ms > (now_ms - jitter_ms if longest is None else longest.until_ms):
            longest = exhaustion
    return longest


def _others(facts: Facts, bucket: str) -> list[Exhaustion]:
    return [exhaustion for exhaustion in facts.exhaustions if exhaustion.bucket != bucket]


# -- in order, and bounded ---------------------------------------------------------------------------------------------


class _OfBucket(Protocol):
    @property
    def bucket(self) -> str: ...


B = TypeVar("B", bound=_OfBucket)
T = TypeVar("T", bound=tuple[Any, ...])


def _exhaustions(several: Iterable[Exhaustion]) -> tuple[Exhaustion, ...]:
    newest = _newest(several, _latest)
    longest = sorted(newest, key=lambda exhaustion: (not exhaustion.reopened_ms, exhaustion.until_ms, exhaustion))
    return tuple(sorted(longest[-MAX_EXHAUSTIONS:]))


def _latest(exhaustion: Exhaustion) -> tuple[object, ...]:
    """Orders what was said of a bucket: closed at T is after reopened at T."""
    return max(exhaustion.since_ms, exhaustion.reopened_ms), not exhaustion.reopened_ms, exhaustion


def _grants(several: Iterable[Grant]) -> tuple[Grant, ...]:
    return tuple(sorted(several)[:MAX_GRANTS])


def _compared(several: Iterable[Compared]) -> tuple[Compared, ...]:
    newest = _newest(several, lambda comparison: (comparison.at_ms, comparison))
    return tuple(sorted(sorted(newest, key=lambda comparison: (comparison.at_ms, comparison))[-MAX_COMPARED:]))


def _changed_by(several: Iterable[DatedKey]) -> tuple[DatedKey, ...]:
    return tuple(sorted(set(several))[-MAX_CHANGES:])


def _newest(several: Iterable[B], order: Callable[[B], tuple[object, ...]]) -> Iterable[B]:
    """Of each bucket the last in this order."""
    return {value.bucket: value for value in sorted(several, key=order)}.values()


# -- checked -----------------------------------------------------------------------------------------------------------


def checked_exhaustion(exhaustion: Exhaustion) -> Exhaustion:
    """The exhaustion with each value of its type and in its bounds. Raises UsageError."""
    return Exhaustion(
        bucket=_bucket(exhaustion.bucket),
        since_ms=_ms(exhaustion.since_ms),
        until_ms=NEVER if exhaustion.until_ms == NEVER else _ms(exhaustion.until_ms),
        evidence=text(exhaustion.evidence, "evidence")[:MAX_TEXT_CHARS],
        reported_by=text(exhaustion.reported_by, "reporter")[:MAX_TEXT_CHARS],
        reopened_ms=_ms(exhaustion.reopened_ms),
        reopened_because=text(exhaustion.reopened_because, "reason")[:MAX_TEXT_CHARS],
        is_pause=exhaustion.is_pause is True,
    )


def checked_grant(granted: Grant) -> Grant:
    """The same of a grant."""
    checked = Grant(
        bucket=_bucket(granted.bucket),
        quota_units=_units(granted.quota_units),
        since_ms=_ms(granted.since_ms),
        until_ms=_ms(granted.until_ms),
    )
    if checked.since_ms >= checked.until_ms:
        raise UsageError(f"a grant of {checked.bucket} that is believed until before it was heard")
    return checked


def checked_compared(comparison: Compared) -> Compared:
    """The same of a comparison."""
    return Compared(
        bucket=_bucket(comparison.bucket),
        upstream_units=_units(comparison.upstream_units),
        our_units=_units(comparison.our_units),
        unknown_units=_units(comparison.unknown_units),
        drift_units=_units(comparison.drift_units),
        since_ms=_ms(comparison.since_ms),
        through_ms=_ms(comparison.through_ms),
        at_ms=_ms(comparison.at_ms),
    )


def checked_key(change: DatedKey) -> DatedKey:
    """The same of a change."""
    key = text(change.key, "key")
    if not 0 < len(key) <= MAX_TEXT_CHARS:
        raise UsageError("a change needs the key of its marker")
    return DatedKey(_ms(change.at_ms), key)


def _bucket(name: object) -> str:
    bucket = text(name, "bucket")
    if re.fullmatch(r"[A-Za-z0-9._:-]{1,64}", bucket) is None:
        raise UsageError(f"bucket {bucket!r:.100}: a name has 1 to 64 letters, digits and . _ : -")
    return bucket


def _ms(value: object) -> int:
    return whole(value, "ms: a time", 0, LATEST_MS - 1)


def _units(value: object) -> int:
    return whole(value, "units: what upstream says", 0, _LARGEST)


def _read(rows: object, make: Callable[..., T], checked: Callable[[T], T]) -> list[T]:
    """The values in the rows of a text that can be read."""
    values = []
    for row in rows if isinstance(rows, list) else ():
        try:
            values.append(checked(make(*row)))
        except (TypeError, UsageError):
            continue
    return values
