"""`quota reconcile`: the provider's own count beside ours, and the notices that follow from a difference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

import quota
from quota.cli.options import Options, shared
from quota.cli.output import fail, print_as, unprinted
from quota.common.clock import moment, rfc3339, stamp
from quota.common.text import many, members, spell
from quota.errors import BadAnswer, ConfigError
from quota.reconcile.reconcile import TOLERANCE_MS, BucketCount, MethodCount, Reconciled, chosen_credentials, reconcile
from quota.wording import Line, Part, Table

if TYPE_CHECKING:
    from quota.reports.notify import Notice

MAX_METHODS = 5
"""The most methods that are named for a difference."""

DRIFT_PERCENT = 5
"""A smaller difference needs no attention: some calls never arrive, or are tried again."""


@click.command("reconcile")
@shared(Options.dry_run)
@click.option("--check", "checks", is_flag=True, help="Exit 1 if the two counts differ.")
@shared(Options.only_credential, Options.format, Options.config)
def reconcile_(dry_run: bool, checks: bool, credential: str | None, form: str, config: str | None) -> int:
    """Raise our count to the provider's, if the provider's is higher.

    It reads upstream's count and quota from Cloud Monitoring, for every project whose credential has a cloud_project.
    It adds to our count the units that only upstream counted. If upstream's quota is smaller than yours, it lowers the
    limits. It never lowers our count.

    The account in `auth` needs the permission monitoring.timeSeries.list. If Cloud Monitoring does not answer, the exit
    status is 1 and nothing is changed.

    \b
    Example:
      quota reconcile
      quota reconcile --check || echo "somebody else uses this project"
      quota reconcile > /dev/null     # from cron, every hour
    """
    from quota.reconcile.monitoring import read_figures

    results, failed = [], 0
    with quota.open(config) as session:
        for chosen in chosen_credentials(session, credential):
            try:
                results.append(reconcile(session, chosen, read_figures, commit=not dry_run))
            except (BadAnswer, ConfigError) as error:  # another project may do better
                failed = max(failed, error.exit_status)
                fail(f"{chosen.name}: {error}")
        if failed and not results:
            return failed
        parts = (part for result in results for part in reconciled_parts(result, dry_run=dry_run))
        print_as(form, {"dry_run": dry_run, "projects": [result.as_json() for result in results]}, parts=parts)
        if session.settings.notify is not None and not dry_run:
            from quota.reports.notify import notify

            notify(session, [notice for result in results for notice in notices_of(result)])
    if checks:
        unprinted()
    return failed or int(checks and any(result.differs for result in results))


def reconciled_parts(result: Reconciled, *, dry_run: bool) -> Iterator[Part]:
    """One project: a line for each difference, both counts as a table, and the consequences."""
    credential = result.credential
    yield Line(f"{credential.name}: project {credential.project}, in Google Cloud {credential.cloud_project}", "strong")
    yield from (Line(text, "note") for count in result.buckets for text in _differences(count, result))
    if result.newest_ms is None:
        yield Line("upstream has counted nothing; check cloud_project", "note")
    else:
        lag = spell(result.at_ms - result.newest_ms)
        yield Line(f"upstream's newest point: {stamp(result.newest_ms)}, {lag} ago")
    if result.log_after_ms:
        lacks = f"our log lacks charges of this period, up to {moment(result.log_after_ms)}"
        yield Line(f"not compared: {lacks}. The next period will be compared", "note")
    if result.buckets or result.apart:
        yield _table(result)
    yield from (Line(text, "note") for count in result.buckets for text in _prices(count, result))
    for count in result.apart:
        calls = f"upstream counts {many(count.upstream_units, 'call')} apart, and we made {count.our_units:,}"
        nothing = f"cost book {result.book.name} has no such bucket, so nothing follows from it"
        yield Line(f"{count.bucket}: {calls}; {nothing}", "note")
    near_units = sum(count.near_units for count in result.buckets if count.unknown_units or count.drift_units)
    if near_units:
        within = spell(TOLERANCE_MS).removesuffix(" 00s")
        yield Line(f"{many(near_units, 'unit')} charged within {within} of the newest point may differ")
    for counts in result.others:
        until = moment(counts.until_ms)
        yield Line(f"{counts.limit}: counts {many(counts.units, 'unit')} used by others until {until}")
    would_be = "would be" if dry_run else "is"
    for low in result.lowered:
        held = f"{would_be} held to {low.limit_units:,} instead of {low.configured_units:,}"
        believed = f"Believed until {moment(low.until_ms)}, or until upstream says otherwise"
        yield Line(f"{low.limit}: {held}: upstream grants {low.granted_units:,}. {believed}", "note")
    for name in result.lifted:
        yield Line(f"{name}: {would_be} lifted: upstream grants more than it did")
    if result.differs or result.lifted or result.log_after_ms:
        changes = {"tightened": result.tightened, "lifted": bool(result.lifted)}
        done = " and ".join([change for change, was_made in changes.items() if was_made]) or "nothing to change"
        yield Line("a dry run: nothing was changed" if dry_run else done)
    else:
        yield Line("both counts agree", "good")


def _table(result: Reconciled) -> Table:
    rows = []
    for count in (*result.buckets, *result.apart):
        granted = count.granted_units if count.period.until_ms > result.at_ms else None
        units = members(count, "upstream_units our_units unknown_units drift_units near_units").values()
        numbers = [*(f"{number:,}" for number in units), "" if granted is None else f"{granted:,}"]
        rows.append((count.bucket, moment(count.period.since_ms), *numbers))
    headings = ("bucket", "since", "upstream", "ours", "unknown", "drift", "may differ", "granted")
    return Table(headings, rows, numbers=range(2, len(headings)), without=(6, 7))


def _differences(count: BucketCount, result: Reconciled) -> Iterator[str]:
    since = f"since {moment(count.period.since_ms, result.book.zone)}"
    more, less = map(_named, _apart(count))
    if count.unknown_units:
        yield f"{count.bucket}: upstream alone counted {count.unknown_units:,} {since}{more}"
    if count.drift_units:
        yield f"{count.bucket}: drift: only we counted {count.drift_units:,} {since}{less}; nothing is freed"


def _apart(count: BucketCount) -> tuple[list[MethodCount], list[MethodCount]]:
    """The methods of which upstream counted more than we, and those of which it counted less."""
    more = [row for row in count.methods if row.upstream_units > row.our_units]
    return more, [row for row in count.methods if row.upstream_units < row.our_units]


def _named(rows: list[MethodCount]) -> str:
    """The methods, each with its difference."""
    differences = [(row.method or "no method", abs(row.upstream_units - row.our_units)) for row in rows[:MAX_METHODS]]
    named = ", ".join(f"{method} {units:,}" for method, units in differences)
    rest = len(rows) - MAX_METHODS
    others = f" and {many(rest, 'other method')}" if rest > 0 else ""
    return f": {named}{others}" if named else ""


def _prices(count: BucketCount, result: Reconciled) -> Iterator[str]:
    """The prices that would explain a difference, if nobody else uses the project."""
    more, less = _apart(count)
    more = [row for row in more[:MAX_METHODS] if count.unknown_units and row.our_calls > 1]
    for row in (*more, *(less[:MAX_METHODS] if count.drift_units else ())):
        if row.price_units is not None and (row.upstream_price_units is not None or not row.upstream_units):
            yield (
                f"{row.method}: if nobody else uses this project, its price looks wrong: upstream counts "
                f"{row.upstream_units:,} for {many(row.our_calls, 'call')}; cost book {result.book.name} says "
                f"{row.price_units:,} each"
            )


def notices_of(result: Reconciled) -> Iterator[Notice]:
    """The notices for `[notify]`: for each bucket and each period of upstream, where one side counted clearly more."""
    from quota.reports.notify import Notice

    for count in result.buckets:
        since_ms, until_ms = count.period
        day = moment(since_ms)
        drift = f"{many(count.drift_units, 'unit')} charged since {day} that upstream did not count"
        unknown = f"upstream counted {many(count.unknown_units, 'unit')} since {day} not charged here"
        units_of_each = members(count, "upstream_units our_units drift_units unknown_units")
        facts = {"bucket": count.bucket, "since": rfc3339(since_ms), **units_of_each}
        for kind, units, of_units, text in (
            ("drift", count.drift_units, count.upstream_units, drift),
            ("unknown", count.unknown_units, count.our_units, unknown),
        ):
            if units * 100 > of_units * DRIFT_PERCENT:
                message = f"bucket {count.bucket} of project {result.credential.project}: {text}"
                subject = f"{count.bucket} {since_ms} {kind}"
                yield Notice("drift", result.credential.project, subject, message, until_ms - since_ms, facts)
