"""Times and verdicts in words."""

from __future__ import annotations

from typing import NamedTuple

from quota.common.clock import NEVER, local, moment, rfc3339
from quota.common.text import many, spaced
from quota.reports.status import CredentialRow
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS

NAME_CHARACTERS = 64


class When(NamedTuple):
    """A time: by the local clock, as a distance from now, and exact, for programs and a tooltip."""

    clock: str
    away: str
    exact: str


def when(at_ms: int, now_ms: int) -> When:
    return When(moment(at_ms), away(at_ms, now_ms), rfc3339(at_ms))


def away(at_ms: int, now_ms: int) -> str:
    """`in 2 h 10 min`, `4 min ago`, `just now`. A time ahead is rounded up, one behind down."""
    if at_ms > now_ms:
        return f"in {duration(at_ms - now_ms, up=True)}"
    return f"{duration(now_ms - at_ms)} ago" if now_ms - at_ms >= 1_000 else "just now"


def duration(span_ms: int, *, up: bool = False) -> str:
    """A duration in its two largest units: `3 d 4 h`, `2 h 10 min`, `12 min`, `45 s`."""
    seconds = max(0, -(-span_ms // 1000) if up else span_ms // 1000)
    if seconds < 60:
        return f"{seconds} s"
    minutes = -(-seconds // 60) if up else seconds // 60
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min"
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours + (1 if up and minutes else 0), 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def spelled_out(span_ms: int) -> str:
    """The length of a window: `24 hours`, `7 days`, `hour`, `100 seconds`."""
    for unit_ms, unit in ((DAY_MS, "day"), (HOUR_MS, "hour"), (MINUTE_MS, "minute"), (SECOND_MS, "second")):
        if span_ms % unit_ms == 0 and (span_ms > unit_ms or unit_ms < DAY_MS):
            return unit if span_ms == unit_ms else many(span_ms // unit_ms, unit)
    return many(span_ms, "millisecond")


def hour(at_ms: int) -> str:
    """`06:00`, in the local zone."""
    return local(at_ms).strftime("%H:%M")


def date(at_ms: int) -> str:
    """`22 Nov`, in the local zone."""
    at = local(at_ms)
    return f"{at.day} {at:%b}"


def name(text: str) -> str:
    """A name from outside, without control and direction characters, and shortened."""
    plain = spaced(text)
    return plain if len(plain) <= NAME_CHARACTERS else f"{plain[: NAME_CHARACTERS - 1]}\N{HORIZONTAL ELLIPSIS}"


# -- the verdict -------------------------------------------------------------------------------------------------------


class Searches(NamedTuple):
    """How many searches would be admitted now, one after another. If none: why, and until when."""

    left: int
    why: str = ""
    retry_at_ms: int | None = None


class Verdict(NamedTuple):
    """Whether calls may leave. `state` is one of open, near, full, closed, unknown; `headline` is the
    large text, with its end `until`; `lead` explains it, and `words` are upstream's."""

    state: str
    headline: str
    until: When | None
    lead: str
    words: str = ""


def verdict(row: CredentialRow, searches: Searches | None, now_ms: int) -> Verdict:
    """The verdict of a credential, as in `quota status`. `searches`: how many are left, if its API has searches."""
    outlook = row.outlook
    if outlook.closed is not None:
        x = outlook.closed
        if x.until_ms == NEVER:
            lead = "Upstream grants this project nothing. Waiting does not help: ask upstream for quota."
            return Verdict("closed", "Closed by upstream", None, lead, x.evidence)
        until = None if outlook.next_ms is None else when(outlook.next_ms, now_ms)
        lead = f"Upstream counts {name(x.bucket)!r} as used up. No call that needs it leaves before the reset."
        headline = "Closed by upstream"
        if outlook.then_full and outlook.full is not None:
            headline += ", then full"
            lead = f"{lead[:-1]} at {moment(x.until_ms)}, nor then: {outlook.full.why()}."
        return Verdict("closed", f"{headline} until" if until else headline, until, lead, x.evidence)
    if outlook.full is not None:
        until = None if outlook.next_ms is None else when(outlook.next_ms, now_ms)
        lead = f"No call is admitted: {outlook.full.why()}."
        return Verdict("full", "Full until" if until else "Full", until, lead)
    units, stopped = row.remaining_units, row.stopped
    if stopped is not None:
        until = None if stopped.retry_ms is None else when(stopped.retry_ms, now_ms)
        lead = f"No job can go on. Job {name(stopped.job)}: {stopped.why}."
        if units:
            lead += f" Calls of no job have {many(units, 'unit')}."
        return Verdict("full", "Full for its jobs until" if until else "Full for its jobs", until, lead)
    if units is None:
        return Verdict("open", "Open", None, "Calls are admitted. No limit counts their units.")
    near = any(limit.level != "open" for limit in row.limits if row.counts_all(limit))
    lead = "Calls are admitted."
    if searches is not None and searches.left:
        lead += f" They have {many(units, 'unit')} left."
    elif searches is not None:
        back = "" if searches.retry_at_ms is None else f" until {moment(searches.retry_at_ms)}"
        lead = f"Calls are admitted, but no search{back}: {searches.why}."
    return Verdict("near" if near else "open", "Open, nearly used up" if near else "Open", None, lead)


def last_known(was: Verdict) -> Verdict:
    """The verdict while the ledger does not answer."""
    lead = "While the ledger does not answer, calls are refused, or drawn on the local allowance if there is one."
    headline = f"Last known: {was.headline[0].lower()}{was.headline[1:]}"
    return Verdict("unknown", headline, was.until, lead, was.words)


def percent(part: int, whole: int) -> int:
    """A share in whole percent: 100 only if all is used, and 0 only if nothing is."""
    if not whole or part >= whole:
        return 100
    return min(99, max(1, round(part * 100 / whole))) if part > 0 else 0
