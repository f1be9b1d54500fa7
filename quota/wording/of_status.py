"""What a status has to say beside its numbers: a line for each thing that is not as usual."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from quota.common.clock import NEVER, local, moment, rfc3339, utc, weekday
from quota.common.text import listed, many
from quota.decision import REPAIR
from quota.terms.limits import SECOND_MS
from quota.wording.parts import Line

if TYPE_CHECKING:
    from quota.deciding.losses import Loss
    from quota.reports.status import CredentialRow, EarlyExhaustion, LimitRow
    from quota.rules.facts import Exhaustion


def early_of(credential: CredentialRow) -> Iterator[Line]:
    """Which buckets upstream closed before we had spent them. It belongs right below the verdict."""
    yield from (Line(_early(early), "note") for early in credential.early)


def notes_of(credential: CredentialRow, at_ms: int) -> Iterator[Line]:
    """What else does not show in a credential's verdict and limits."""
    for row in credential.limits:
        if row.reserved_units:
            reserved = many(row.reserved_units, "unit")
            yield Line(
                f"{row.limit.name}: includes {reserved} reserved; what these calls cost is not known yet", "note"
            )
        if row.limit.shadow:
            now = ", and would refuse calls now" if row.state.would_refuse else ""
            yield Line(f"{row.limit.name}: a shadow: it counts and refuses nobody{now}", "note")
        if row.upstream_units:
            used, until = many(row.upstream_units, row.state.noun), clock(row.upstream_until_ms)
            yield Line(f"{row.limit.name}: {used} used by others, as upstream said, until {until}", "note")
        if row.grant is not None:
            yield Line(_lowered(row, at_ms), "note")
    for row in credential.limits:
        if row.exact_from_ms is not None:
            since, exact = weekday(row.counts_since_ms), weekday(row.exact_from_ms)
            yield Line(f"{row.limit.name}: counts since {since}, exact from {exact}", "note")
    if credential.ahead_ms:
        dated = rfc3339(credential.ahead_ms // SECOND_MS * SECOND_MS).replace(".000", "")
        yield Line(f"a clock was wrong, a charge is of {dated}: `{REPAIR}`", "bad")
    if credential.owed_units:
        owed = f"owed: {many(credential.owed_units, 'unit')} drawn without the ledger; the next charge repays them"
        yield Line(owed, "note")
    if credential.put_back:
        yield Line(_put_back(credential.put_back, at_ms), "note")
    for x in credential.exhausted:
        if x.reopened_ms:
            at = moment(x.reopened_ms, at_ms)
            yield Line(f'bucket {x.bucket} was reopened at {at}: {x.reopened_because} ("{x.evidence}")')
        elif x != credential.outlook.closed:
            yield Line(f"bucket {x.bucket} is {closed(x, at_ms)}", "bad")


def closed(x: Exhaustion, at_ms: int) -> str:
    until = "it grants quota" if x.until_ms == NEVER else moment(x.until_ms, at_ms)
    return f'closed by upstream until {until}: "{x.evidence}"'


def _put_back(losses: Sequence[Loss], at_ms: int) -> str:
    """What the ledger had lost and machines put back: all of it in one line."""
    charges = many(sum(loss.charges for loss in losses), "charge")
    units = many(sum(loss.units for loss in losses), "unit")
    machines = listed(dict.fromkeys(loss.machine for loss in losses))
    return f"the ledger had lost {charges} of {units}, put back at {moment(losses[-1].at_ms, at_ms)} by {machines}"


def _lowered(row: LimitRow, at_ms: int) -> str:
    assert row.grant is not None  # noqa: S101  # the caller has looked
    said = moment(row.grant.since_ms, at_ms)
    return (
        f"{row.limit.name}: held to {row.enforced_units:,} instead of {row.limit.limit_units:,}: upstream grants "
        f"{row.grant.quota_units:,} (said {said}), until it says otherwise"
    )


def _early(early: EarlyExhaustion) -> str:
    used = many(early.used_units, "unit")
    return (
        f"{early.bucket}: upstream says exhausted at {used} of ours, of {early.quota_units:,}: "
        f"{spent_elsewhere(early.comparable)}"
    )


def spent_elsewhere(comparable: bool) -> str:
    """Why upstream closed a bucket that we had not spent, and who knows more. `comparable`: we can read its count."""
    tells = "`quota reconcile` tells which" if comparable else "the provider's own console may tell which"
    return f"somebody else spends this project, or its quota is smaller; {tells}"


def clock(at_ms: int, zone: str | None = None) -> str:
    """`Sun 09:00`, in the named zone or the local one."""
    at = utc(at_ms).astimezone(ZoneInfo(zone)) if zone else local(at_ms)
    return at.strftime("%a %H:%M")
