"""The output of `quota reconcile` for a terminal, and what it gives reason to tell somebody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from quota.cli.tables import Column, FirstThatFits, line, stacked, tables
from quota.common.clock import rfc3339, utc, weekday
from quota.common.members import members
from quota.common.text import many, spell
from quota.reconcile.comparison import TOLERANCE_MS, BucketCount, MethodCount

if TYPE_CHECKING:
    from rich.console import RenderableType

    from quota.reconcile.reconcile import Reconciled
    from quota.reports.notify import Notice

MAX_METHODS = 5
"""The most methods that are named for a difference."""


def render_reconciled(result: Reconciled, *, dry_run: bool) -> RenderableType:
    """One project: a line for each difference, both counts as a table, and what follows."""
    parts: list[RenderableType] = [
        line(f"{result.credential}: project {result.project}, in Google Cloud {result.cloud_project}", "bold")
    ]
    parts += [line(text, "yellow") for count in result.buckets for text in _differences(count, result)]
    if result.newest_ms is None:
        parts.append(line("upstream has counted nothing; is cloud_project right?", "yellow"))
    else:
        lag = spell(result.at_ms - result.newest_ms)
        parts.append(line(f"upstream's newest point: {weekday(result.newest_ms)}, {lag} ago"))
    if result.log_after_ms:
        parts.append(
            line(
                f"not compared: our log lacks charges of this period, up to {weekday(result.log_after_ms)}. The next "
                "period will be compared",
                "yellow",
            )
        )
    if result.buckets or result.apart:
        parts.append(_table(result))
    parts += [line(text, "yellow") for count in result.buckets for text in _prices(count, result)]
    parts += [line(text, "yellow") for count in result.apart for text in _apart(count, result)]
    near_units = sum(count.near_units for count in result.buckets if count.unknown or count.drift_units)
    if near_units:
        within = spell(TOLERANCE_MS).removesuffix(" 00s")
        parts.append(line(f"{many(near_units, 'unit')} charged within {within} of the newest point may differ"))
    for counts in result.counted:
        until = weekday(counts.until_ms)
        parts.append(line(f"{counts.limit}: counts {many(counts.units, 'unit')} known to upstream alone until {until}"))
    for low in result.lowered:
        would = "would be" if dry_run else "is"
        parts.append(
            line(
                f"{low.limit}: {would} held to {low.enforced_units:,} instead of {low.configured_units:,}: upstream "
                f"grants {low.granted_units:,}. Believed until {weekday(low.until_ms)}, or until upstream "
                "says otherwise",
                "yellow",
            )
        )
    for name in result.lifted:
        parts.append(line(f"{name}: {'would be' if dry_run else 'is'} lifted: upstream grants more than it did"))
    done = ["tightened"] * result.tightened + ["lifted"] * bool(result.lifted)
    said = "a dry run: nothing was changed" if dry_run else " and ".join(done) or "nothing to change"
    if result.differs or result.lifted or result.log_after_ms:
        parts.append(line(said))
    else:
        parts.append(line("both counts agree", "green"))
    return stacked(parts)


def _table(result: Reconciled) -> RenderableType:
    columns = [Column("bucket"), Column("since")]
    columns += [Column(name, number=True) for name in ("upstream", "ours", "unknown", "drift", "may differ", "granted")]
    rows = []
    for count in (*result.buckets, *result.apart):
        present = count.period.until_ms > result.at_ms
        granted = result.grants.get(count.bucket) if present else None
        rows.append(
            (
                count.bucket,
                _since(count, result),
                f"{count.upstream_units:,}",
                f"{count.our_units:,}",
                f"{count.unknown_units:,}",
                f"{count.drift_units:,}",
                f"{count.near_units:,}",
                "" if granted is None else f"{granted:,}",
            )
        )
    return FirstThatFits(tables(columns, rows, without=(6, 7)))


def _since(count: BucketCount, result: Reconciled) -> str:
    return utc(count.period.since_ms).astimezone(ZoneInfo(result.zone)).strftime("%a %d %b %H:%M")


def _differences(count: BucketCount, result: Reconciled) -> Iterator[str]:
    since = f"since {_since(count, result)}"
    if count.unknown:
        more = _named(_more(count))
        yield f"{count.bucket}: only upstream counted {count.unknown_units:,} {since}{more}"
    if count.drift_units:
        less = _named(_less(count))
        yield f"{count.bucket}: drift: only we counted {count.drift_units:,} {since}{less}; nothing is freed"


def _more(count: BucketCount) -> list[MethodCount]:
    return [row for row in count.methods if row.upstream_units > row.our_units]


def _less(count: BucketCount) -> list[MethodCount]:
    return [row for row in count.methods if row.our_units > row.upstream_units]


def _named(rows: list[MethodCount]) -> str:
    """The methods, each with its difference."""
    differences = [(row.method or "no method", abs(row.upstream_units - row.our_units)) for row in rows[:MAX_METHODS]]
    named = ", ".join(f"{method} {units:,}" for method, units in differences)
    rest = len(rows) - MAX_METHODS
    others = f" and {many(rest, 'other method')}" if rest > 0 else ""
    return f": {named}{others}" if named else ""


def _prices(count: BucketCount, result: Reconciled) -> Iterator[str]:
    """The prices that would explain a difference."""
    for row in _more(count)[:MAX_METHODS] if count.unknown else ():
        if row.upstream_price is not None and row.our_calls > 1 and row.price is not None:
            yield (
                f"{row.method}: if nobody else spends this project, its price is wrong: a call costs "
                f"{many(row.upstream_price, 'unit')} there, {row.price:,} in cost book {result.book}"
            )
    for row in _less(count)[:MAX_METHODS] if count.drift_units else ():
        if row.upstream_price is not None and row.price is not None:
            yield (
                f"{row.method}: its price looks wrong: {many(row.our_calls, 'call')} cost {row.upstream_units:,} "
                f"there, {row.upstream_price:,} each; cost book {result.book} says {row.price:,}"
            )
        elif row.our_units and not row.upstream_units:
            yield (
                f"{row.method}: its price looks wrong: upstream counts no call of it in this bucket; cost book "
                f"{result.book} says {row.price or 0:,}"
            )


def _apart(count: BucketCount, result: Reconciled) -> Iterator[str]:
    yield (
        f"{count.bucket}: upstream counts {many(count.upstream_units, 'call')} apart, and we made {count.our_units:,}; "
        f"cost book {result.book} has no such bucket, so nothing follows from it"
    )


DRIFT_PERCENT = 5
"""Two counts that differ by no more need nobody's attention: calls that never arrived, or that were tried again."""


def notices_of(result: Reconciled) -> Iterator[Notice]:
    """What to tell whom `[notify]` names: once for each bucket and period of upstream, and each side's surplus."""
    from quota.reports.notify import Notice

    for count in result.buckets:
        since_ms, until_ms = count.period
        day = rfc3339(since_ms)
        drift = f"{many(count.drift_units, 'unit')} charged since {day} that upstream did not count"
        unknown = f"upstream counted {many(count.unknown_units, 'unit')} since {day} not charged here"
        units_of_each = members(count, "upstream_units our_units drift_units unknown_units")
        facts = {"bucket": count.bucket, "since": day, **units_of_each}
        for kind, units, of_units, said in (
            ("drift", count.drift_units, count.upstream_units, drift),
            ("unknown", count.unknown_units, count.our_units, unknown),
        ):
            if units * 100 > of_units * DRIFT_PERCENT:
                message = f"bucket {count.bucket} of project {result.project}: {said}"
                subject = f"{count.bucket} {since_ms} {kind}"
                yield Notice("drift", result.project, subject, message, until_ms - since_ms, facts)
