"""What upstream's answers say remains, where that is less than we believe: others have used the difference.

    news      what of an answer is worth a question to the ledger. Known from the decision about the call, so nobody
              waits for it
    observe   counts what others used (L17), and remembers a limit that is smaller than the configuration says (L28)

A level is compared with all that is charged when the ledger is asked, and not with what was charged when the call
left: upstream may have counted any call that left until then, and what we charged is never taken for others'. So calls
under way hide as many units of others, until the next answer. What others used in one period of upstream is one report,
merged by the larger: two processes that hear the same count it once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

from quota.common.clock import rfc3339
from quota.common.log import line
from quota.deciding.account import Account
from quota.deciding.checklist import granted_units, lowers, wanted_grants
from quota.deciding.corrections import repay
from quota.decision import Decision
from quota.ledger.entry import Charge
from quota.ledger.grants import read_grants
from quota.ledger.parts import correctable, notes_in
from quota.ledger.unlogged import UnloggedUsage, upstream_epoch
from quota.terms.evidence import Heard, Level, heard, no_longer
from quota.terms.limits import DAY_MS, SECOND_MS, Calendar

_log = logging.getLogger("quota")

WORTH_PERCENT = 1
"""The share of a limit that a level must change to be told to the ledger."""

AGAIN_MS = SECOND_MS
"""A process tells a ledger of one bucket at most so often, and that it is empty at most so often."""

BELIEVED_MS = DAY_MS
"""How long a smaller limit of an answer is believed. The answers after that say it anew."""


def news(account: Account, decision: Decision, levels: Sequence[Level], now_ms: int) -> tuple[Heard, ...]:
    """Of what the answer to an admitted call says, that which is worth a question to the ledger: it changes a limit by
    more than WORTH_PERCENT, or empties a bucket. At most one in a second for each bucket. `now_ms` is when the answer
    came, by the ledger's clock as far as it is known."""
    used = {state.name: state.used_units for state in decision.limits}
    found = []
    for level in levels:
        said = heard(level, account.book, account.limits, charged_ms(decision), now_ms)
        if said is None or not (level.remaining_units == 0 or _changes(said, used) or _granted_anew(account, (level,))):
            continue
        told = level.bucket, level.remaining_units == 0
        if not 0 <= now_ms - account.told_ms.get(told, 0) < AGAIN_MS:
            account.told_ms[told] = now_ms
            found.append(said)
    return tuple(found)


def observe(account: Account, decision: Decision, levels: Sequence[Level]) -> None:
    """Let the ledger count what others used by these levels. Raises LedgerError."""
    repay(account)
    limits = tuple([limit for limit in account.limits if not limit.narrow])
    checklist = account.checklists.of("", (), limits, (0,) * len(limits), "")
    _, _, result = account.ask(checklist, (Charge(0, "", "", "", "", ""),), commit=False, looks=True)
    if not result.used_units:
        return  # the clocks disagree, or the ledger still counts
    now_ms = result.now_ms
    reports: list[UnloggedUsage] = []
    used = dict(zip([limit.name for limit in limits], result.used_units, strict=True))
    for level in levels:
        said = heard(level, account.book, limits, charged_ms(decision), now_ms)
        if said is None or not _changes(said, used):
            continue
        epoch = upstream_epoch(level.bucket, said.since_ms)
        known = {
            limit.name: sum(usage.units_at(now_ms) for usage in usages if usage.epoch == epoch)
            for limit, usages in zip(limits, result.unlogged or ((),) * len(limits), strict=True)
        }
        reports += _reports(said, epoch, used, known, now_ms)
    if reports:
        epoch = account.attempt_keys.next()
        correctable(account.ledger).add_unlogged(account.project, epoch, reports, account.retention_ms)
    if granted := _granted_anew(account, levels):
        standing = read_grants(account.grants.text)
        wanted = wanted_grants(account.limits, granted, standing, now_ms, BELIEVED_MS)
        notes_in(account.ledger).grant(account.project, wanted)


def _granted(account: Account, level: Level) -> int | None:
    """What upstream grants of a bucket, by the limit that an answer names. None where nothing follows: the bucket has
    several windows, a limit counts it for longer, or nothing would be left but what the limit leaves unspent, which is
    no plan but a mistake: nothing would be admitted that could hear otherwise."""
    bucket, units = account.book.buckets.get(level.bucket), level.limit_units
    if bucket is None or units is None or len(bucket.quotas) > 1:
        return None
    for limit in account.limits:
        most = granted_units(limit, {bucket.name: units})
        if most == 0 or (most is not None and not no_longer(limit.view.window, bucket.window)):
            return None
    return units


def _granted_anew(account: Account, levels: Sequence[Level]) -> dict[str, int]:
    """What upstream grants by these levels, by bucket; empty where all of it is believed already."""
    granted = {level.bucket: units for level in levels if (units := _granted(account, level)) is not None}
    wanted = {bucket: units if lowers(account.limits, bucket, units) else None for bucket, units in granted.items()}
    return granted if any(account.grants.units.get(bucket) != units for bucket, units in wanted.items()) else {}


def charged_ms(decision: Decision) -> int:
    """The time of the charge, read from its id `ms-seq`; for any other id, the time of the decision."""
    ms = (decision.id or "").partition("-")[0]
    return int(ms) if ms.isascii() and ms.isdigit() else decision.decided_at_ms


def _changes(said: Heard, used: Mapping[str, int]) -> bool:
    """Whether upstream has counted so much more than we that it is worth telling."""
    return any(
        100 * (said.used_units(limit) - used[limit.name]) > WORTH_PERCENT * limit.limit_units
        for limit in said.alone
        if limit.name in used
    )


def _reports(
    said: Heard, epoch: str, used: Mapping[str, int], known: Mapping[str, int], now_ms: int
) -> Iterator[UnloggedUsage]:
    """What each limit has to count for others. `known` of what is used are theirs already, by what was heard before."""
    units = max(said.used_units(limit) - used[limit.name] + known[limit.name] for limit in said.alone)
    for limit in said.limits:
        window, until_ms = limit.view.window, said.until_ms
        if isinstance(window, Calendar):
            until_ms = min(until_ms, window.edges(now_ms)[1])
        if units > known[limit.name]:
            yield UnloggedUsage(limit.view.name, epoch, ((units, until_ms),), (0, 0))
    heard_of = line("used_by_others", bucket=said.level.bucket, units=units, until=rfc3339(said.until_ms))
    _log.info("%s", heard_of)
