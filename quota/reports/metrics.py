"""Metrics for Prometheus, in the text format that node_exporter's textfile collector reads.

    Sample        one number of one family, with its labels
    FAMILIES      every family that this product exports: its type and help
    exposition    samples as text
    write_file    that text as a file, replaced whole
    of_status     the samples of a status
    of_sums       the samples of all charges and refusals

A collector silently drops a series that two files have. So a project's file holds the series without the label
`quota_job`, and each job's file the series with it: see `file_name`. (`job` is Prometheus' own label.)
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from quota.common.clock import NEVER
from quota.common.files import open_alone
from quota.common.text import printable
from quota.decision import SHADOW
from quota.terms.limits import Calendar

if TYPE_CHECKING:
    from quota.reports.status import Status
    from quota.rules.refusals import RefusedSum
    from quota.rules.spent import ChargedSum

GAUGE, COUNTER = "gauge", "counter"

FAMILIES: Mapping[str, tuple[str, str]] = {
    "quota_limit_units": (GAUGE, "The number of the limit that is in force."),
    "quota_limit_used_units": (GAUGE, "Units that the limit counts now."),
    "quota_limit_remaining_units": (GAUGE, "Units that still fit; 0 while upstream has closed all its buckets."),
    "quota_limit_reserved_units": (GAUGE, "Used units that were reserved in the last hour and are not settled."),
    "quota_limit_next_capacity_timestamp_seconds": (GAUGE, "When the limit has more capacity; absent if unused."),
    "quota_limit_reset_timestamp_seconds": (GAUGE, "When the window of a calendar limit ends."),
    "quota_bucket_exhausted": (GAUGE, "1 while upstream has closed the bucket, else 0."),
    "quota_bucket_exhausted_until_timestamp_seconds": (GAUGE, "When a closed bucket opens; absent if no reset helps."),
    "quota_upstream_used_units": (GAUGE, "Units that upstream counted since its reset, when it was last asked."),
    "quota_upstream_drift_units": (GAUGE, "Units that were charged here and upstream did not count then."),
    "quota_upstream_compared_timestamp_seconds": (GAUGE, "When upstream was last asked."),
    "quota_allowance_owed_units": (GAUGE, "Units that this machine drew without the ledger and has not repaid."),
    "quota_ledger_up": (GAUGE, "1 if the ledger accepted charges when this was written, else 0."),
    "quota_ledger_put_back_charges": (GAUGE, "Charges that the ledger lost and got back in the last day."),
    "quota_charges_total": (COUNTER, "Charges of a method, since the ledger began."),
    "quota_charged_units_total": (COUNTER, "Their units as they were charged."),
    "quota_corrected_units_total": (COUNTER, "Units by which corrections changed them, up or down."),
    "quota_refusals_total": (COUNTER, "Refused calls, since the ledger began."),
    "quota_would_refuse_total": (COUNTER, "Admitted calls that a shadow limit would have refused."),
    "quota_run_last_end_timestamp_seconds": (GAUGE, "When the last run of the job ended on this machine."),
    "quota_run_last_exit_status": (GAUGE, "The exit status of that run."),
    "quota_region_completed_timestamp_seconds": (GAUGE, "When the last complete pass of the region ended."),
    "quota_textfile_written_timestamp_seconds": (GAUGE, "When this file was written."),
}

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The media type of `exposition` in an HTTP answer."""

MAX_FILE_NAME = 200
MAX_WHOLE = 2**53


class Sample(NamedTuple):
    """One number. An empty label means the same as an absent label, so the text leaves it out."""

    family: str
    labels: Mapping[str, str]
    value: float


def exposition(samples: Iterable[Sample], described: Mapping[str, tuple[str, str]] = FAMILIES) -> str:
    """Samples in the text format, without timestamps, sorted by family and labels. A collector drops a file in
    which two samples have the same labels, so only the largest of them stays.

    Raises KeyError for a family that is not `described`.
    """
    families: dict[str, dict[str, float]] = {}
    for sample in samples:
        labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(sample.labels.items()) if value)
        name = f"{sample.family}{{{labels}}}" if labels else sample.family
        values = families.setdefault(sample.family, {})
        values[name] = max(sample.value, values.get(name, sample.value))
    lines = []
    for family in sorted(families):
        kind, about = described[family]
        rows = []
        for name, value in families[family].items():
            is_whole = abs(value) < MAX_WHOLE and value == int(value)
            rows.append(f"{name} {int(value) if is_whole else float(value)!r}")
        lines += [f"# HELP {family} {about}", f"# TYPE {family} {kind}", *sorted(rows)]
    return "".join(f"{line}\n" for line in lines)


def _escaped(value: str) -> str:
    """A name as a label, without control characters: a program may have charged under any name."""
    value = printable(value.encode("utf-8", "backslashreplace").decode())
    return value.replace("\\", "\\\\").replace('"', '\\"')


# -- files -------------------------------------------------------------------------------------------------------------


def file_name(project: str, job: str | None = None) -> str:
    """The file of a project, for series without a job, or of one of its jobs: `quota-PROJECT.prom` or
    `quota-PROJECT-JOB.prom`.

    The names are percent-encoded, a hyphen too: it separates them. A very long name is cut and gets a checksum.
    """
    names = [project] if job is None else [project, job]
    name = "-".join(quote(part, safe="").replace("-", "%2D").replace("~", "%7E") for part in names)
    if len(name) > MAX_FILE_NAME:
        name = f"{name[: MAX_FILE_NAME - 17].rstrip('%')}~{blake2b(name.encode(), digest_size=8).hexdigest()}"
    return f"quota-{name}.prom"


def write_file(folder: str, name: str, text: str, mode: int | None = 0o644) -> None:
    """Write a file beside the old one, and then in its place. Everybody may read it, whatever the umask: the collector
    is another user. With `mode` None, the umask holds. Raises OSError."""
    writer = f"{os.getpid()}.{threading.get_native_id()}"  # two jobs of one scheduler may end at once
    beside = os.path.join(folder, f".{name}.{writer}")  # the collector reads only *.prom
    fd = open_alone(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        with open(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            if mode is not None:
                os.fchmod(fd, mode)
            file.write(text)
        os.replace(beside, os.path.join(folder, name))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


# -- the samples -------------------------------------------------------------------------------------------------------


def of_status(status: Status, project: str) -> Iterator[Sample]:
    """The samples of a project's limits and buckets."""
    credential = next(row for row in status.credentials if row.settings.project == project)
    of_project = {"project": project}
    yield Sample("quota_ledger_up", of_project, not credential.outlook.unwritable)
    yield Sample("quota_allowance_owed_units", of_project, credential.owed_units)
    yield Sample("quota_ledger_put_back_charges", of_project, sum(loss.charges for loss in credential.put_back))
    for row in credential.limits:
        labels = {"project": project, "limit": row.limit.name}
        window = row.limit.view.window
        yield Sample("quota_limit_units", labels, row.enforced_units)
        yield Sample("quota_limit_used_units", labels, row.state.used_units)
        yield Sample("quota_limit_remaining_units", labels, row.state.remaining_units)
        yield Sample("quota_limit_reserved_units", labels, row.reserved_units)
        if row.next_capacity_ms is not None:
            yield Sample("quota_limit_next_capacity_timestamp_seconds", labels, row.next_capacity_ms / 1000)
        if isinstance(window, Calendar):
            yield Sample("quota_limit_reset_timestamp_seconds", labels, window.edges(status.at_ms)[1] / 1000)
    closed = {fact.bucket: fact.until_ms for fact in credential.exhausted if not fact.reopened_ms}
    for bucket in sorted({*credential.settings.book.buckets, *closed}):
        labels = {"project": project, "bucket": bucket}
        yield Sample("quota_bucket_exhausted", labels, bucket in closed)
        if closed.get(bucket, NEVER) != NEVER:
            yield Sample("quota_bucket_exhausted_until_timestamp_seconds", labels, closed[bucket] / 1000)
    for compared in credential.compared:
        labels = {"project": project, "bucket": compared.bucket}
        yield Sample("quota_upstream_used_units", labels, compared.upstream_units)
        yield Sample("quota_upstream_drift_units", labels, compared.drift_units)
        yield Sample("quota_upstream_compared_timestamp_seconds", labels, compared.at_ms / 1000)


def of_sums(project: str, sums: Iterable[ChargedSum], refused: Iterable[RefusedSum]) -> Iterator[Sample]:
    """The samples of all charges and all refusals. No sum ever falls."""
    for charged in sums:
        labels = {"project": project, "method": charged.method, "quota_job": charged.job}
        yield Sample("quota_charges_total", labels, charged.charges)
        yield Sample("quota_charged_units_total", labels, charged.units)
        yield Sample("quota_corrected_units_total", labels, charged.corrected_units)
    for refusals in refused:
        labels = {"project": project, "limit": refusals.limit, "quota_job": refusals.job}
        if refusals.reason == SHADOW:
            yield Sample("quota_would_refuse_total", labels, refusals.calls)
        else:
            yield Sample("quota_refusals_total", {**labels, "reason": refusals.reason}, refusals.calls)


def of_silence(project: str, owed_units: int) -> Iterator[Sample]:
    """The samples while the ledger does not answer."""
    yield Sample("quota_ledger_up", {"project": project}, 0)
    yield Sample("quota_allowance_owed_units", {"project": project}, owed_units)
