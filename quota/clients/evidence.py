"""Counts what others used, from answers that say less remains than the ledger shows.

    news      the levels in an answer that are worth a question to the ledger. It needs only the decision about the
              call, so no caller waits
    observe   counts what others used, and records a limit that is smaller than the configuration's

A level is compared with the charges at the time of the question, not at the time of the call: upstream may have counted
every call that left by then, and our own charges must not look like others'. So calls under way hide as many units of
others until the next answer. One entry of the kind `others` holds what others used in one period of upstream. It has
one name per period, and the largest entry counts: two processes that read the same answer count it once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from quota.common.clock import rfc3339
from quota.common.log import line
from quota.deciding.outlook import counted
from quota.decision import Decision
from quota.rules.calls import granted_units, lowers, wanted_grants
from quota.rules.entry import CALLS
from quota.terms.evidence import Heard, Level, heard, no_longer
from quota.terms.limits import DAY_MS, SECOND_MS

if TYPE_CHECKING:
    from quota.budget import Budget
    from quota.deciding.project import Project

_log = logging.getLogger("quota")

WORTH_PERCENT = 1
"""A level goes to the ledger only if it changes a limit by more than this share."""

AGAIN_MS = SECOND_MS
"""A process reports one window of a bucket to the ledger at most this often, and its emptiness at most this often."""

BELIEVED_MS = DAY_MS
"""How long a smaller limit from an answer holds. Later answers renew it."""


def news(budget: Budget, decision: Decision, levels: Sequence[Level], now_ms: int) -> tuple[Heard, ...]:
    """The levels of an answer that are worth a question to the ledger: those that change a limit by more than
    WORTH_PERCENT, or empty a bucket. At most one level per second and window of a bucket. Charges to buckets that the
    call does not spend are unknown here. `now_ms` is the time of the answer by the ledger's clock, as far as it is
    known."""
    used = {state.name: state.used_units for state in decision.limits}
    worth: list[Heard] = []
    of_now: set[tuple[str, bool, tuple[str, ...]]] = set()
    for level in levels:
        news = heard(level, budget.book, budget.limits, charged_ms(decision), now_ms)
        if news is None or not (level.remaining_units == 0 or _changes(news, used) or _granted_anew(budget, (level,))):
            continue
        topic = level.bucket, level.remaining_units == 0, tuple([limit.name for limit in news.limits])
        if topic in of_now or not 0 <= now_ms - budget.heard_ms.get(topic, 0) < AGAIN_MS:
            budget.heard_ms[topic] = now_ms
            of_now.add(topic)
            worth.append(news)
    return tuple(worth)


def observe(budget: Budget, project: Project, decision: Decision, levels: Sequence[Level]) -> None:
    """Count what others used, by these levels. Raises LedgerError."""
    limits = tuple([limit for limit in budget.limits if not limit.narrow])
    outcome = counted(project, budget.answers.question(budget.checklists.of("", (), limits, (0,) * len(limits), "")))
    now_ms = outcome.now_ms
    used = dict(zip([limit.name for limit in limits], outcome.used_units, strict=True))
    for level in levels:
        news = heard(level, budget.book, limits, charged_ms(decision), now_ms)
        if news is None or not _changes(news, used):
            continue
        name = others_name(level.bucket, news.since_ms)
        counts = {limit.name: project.others_units(limit.view, name) for limit in news.alone}
        units = max(news.used_units(limit) - used[limit.name] + counts[limit.name] for limit in news.alone)
        if units > max(counts.values()):
            _count(budget, news, name, units)
            used |= {limit: used[limit] + units - before for limit, before in counts.items()}
    if granted := _granted_anew(budget, levels):
        standing = project.state.facts().grants
        project.state.grant(wanted_grants(budget.limits, granted, standing, now_ms, BELIEVED_MS))


def _count(budget: Budget, news: Heard, name: str, units: int) -> None:
    """Append what others used. It counts in the limits that have this window."""
    bucket = news.level.bucket
    longest_ms = max(limit.view.window.longest_ms for limit in news.limits)
    calls = CALLS if any(limit.view.selector.count == "calls" for limit in news.limits) else ""
    budget.add_others(bucket, units, news.since_ms, news.until_ms, name, window_ms=longest_ms, noun=calls)
    _log.info("%s", line("used_by_others", bucket=bucket, units=units, until=rfc3339(news.until_ms)))


def others_name(bucket: str, since_ms: int) -> str:
    """The name of the entry for what others used of a bucket in the period since then. Every process uses this name."""
    return f"{bucket}@{since_ms}"


def _granted(budget: Budget, level: Level) -> int | None:
    """What upstream grants of a bucket, by the limit in an answer. None if the bucket has several windows, if a limit
    counts it for longer, or if the headroom would leave nothing: then no call could leave, and no answer could correct
    the mistake."""
    bucket, units = budget.book.buckets.get(level.bucket), level.limit_units
    if bucket is None or units is None or len(bucket.quotas) > 1:
        return None
    for limit in budget.limits:
        most = granted_units(limit, {bucket.name: units})
        if most == 0 or (most is not None and not no_longer(limit.view.window, bucket.window)):
            return None
    return units


def _granted_anew(budget: Budget, levels: Sequence[Level]) -> dict[str, int]:
    """What upstream grants by these levels, per bucket; empty if all of it holds already."""
    granted = {level.bucket: units for level in levels if (units := _granted(budget, level)) is not None}
    wanted = {bucket: units if lowers(budget.limits, bucket, units) else None for bucket, units in granted.items()}
    believed = budget.answers.believed_now().units
    return granted if any(believed.get(bucket) != units for bucket, units in wanted.items()) else {}


def charged_ms(decision: Decision) -> int:
    """The time of the charge, read from its id `MS-KEY`; for any other id, the time of the decision."""
    ms = (decision.id or "").partition("-")[0]
    return int(ms) if ms.isascii() and ms.isdigit() else decision.decided_at_ms


def _changes(news: Heard, used: Mapping[str, int]) -> bool:
    """Whether upstream has counted enough more than the ledger to report it."""
    return any(
        100 * (news.used_units(limit) - used.get(limit.name, 0)) > WORTH_PERCENT * limit.limit_units
        for limit in news.alone
    )
