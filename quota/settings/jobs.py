"""The tables `[jobs.NAME]` of the configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from quota.common.text import listed, nearest, show
from quota.settings.address import reference
from quota.settings.model import (
    BUILT_IN_FETCHES,
    MAX_MISFIRE_GRACE_MS,
    CredentialSettings,
    JobSettings,
    TableSettings,
    check_table,
)
from quota.settings.schedules import Every, parse_schedule
from quota.settings.tables import JOB
from quota.settings.toml import TomlTable
from quota.terms.limits import format_duration, load_zone


def parse_jobs(
    rows: Mapping[str, TomlTable], credentials: Mapping[str, CredentialSettings], folder: Path
) -> dict[str, JobSettings]:
    left: dict[tuple[str, int | str], dict[str, int]] = {}
    jobs = {name: _job(name, row, credentials, left, folder) for name, row in rows.items()}
    first: dict[str, JobSettings] = {}
    for job in jobs.values():
        for name, its in job.tables.items():
            other = first.setdefault(name, job)
            if other.tables[name] != its:
                raise (
                    rows[job.name].table("tables").error(f"job {other.name!r} has another key or history for it", name)
                )
    return jobs


def _job(
    name: str,
    row: TomlTable,
    credentials: Mapping[str, CredentialSettings],
    left: dict[tuple[str, int | str], dict[str, int]],
    folder: Path,
) -> JobSettings:
    if "credential" not in row and len(credentials) > 1:
        raise row.error(f"missing; name one of these: {listed(credentials)}", "credential")
    credential = row.read("credential") or next(iter(credentials))
    if credential not in credentials:
        raise row.error(f"there is no credential {show(credential)}; {nearest(credential, credentials)}", "credential")
    fetch = row.read("fetch")
    if not re.fullmatch(JOB["fetch"].pattern, fetch):
        own = 'not a built-in job; write your own as "package.module:function"'
        raise row.error(f"{own}; {nearest(fetch, BUILT_IN_FETCHES)}", "fetch")
    job = JobSettings(
        name=name,
        credential=credential,
        fetch=fetch,
        regions=row.read("regions"),
        pages=row.read("pages"),
        schedule=None,
        stagger_ms=0,
        leave=_leave(row, credentials[credential], left) if "leave" in row else {},
        options=_options(row.read("options")),
        max_body_mb=row.read("max_body_mb"),
        max_answer_s=row.read("max_answer_s"),
        max_items=row.read("max_items"),
        on_each_machine=row.read("machines") == "each",
        ping_ref=reference(row, folder, "ping") if "ping" in row else None,
        insecure_endpoint=row.read("insecure_endpoint"),
        max_units=row.read("max_units"),
        tables=_tables(row),
        sink=row.read("sink") or "",
    )
    return _scheduled(job, row)


def _tables(job: TomlTable) -> dict[str, TableSettings]:
    tables = {}
    for name, row in job.read("tables").items():
        with job.blamed("tables"):
            check_table(name)
        tables[name] = TableSettings(row.read("key") or ("id",), row.read("history"))
    return tables


def _scheduled(job: JobSettings, row: TomlTable) -> JobSettings:
    """`job` with its schedule from the configuration."""
    if "schedule" not in row:
        return job
    text, zone = " ".join(row.read("schedule").split()), row.read("timezone")
    with row.blamed("schedule"):
        schedule = parse_schedule(text, zone)
    if "timezone" in row:
        if isinstance(schedule, Every):
            raise row.error("an interval does not depend on the time zone; remove this key", "timezone")
        with row.blamed("timezone"):
            load_zone(zone)
    stagger_ms, jitter_ms = row.read("stagger") or 0, row.read("jitter") or 0
    # All regions of one tick must start before the next tick does.
    shortest_ms, others = schedule.shortest_ms, max(0, len(job.regions) - 1)
    spread_ms = others * stagger_ms + jitter_ms
    then = f"and {show(text)} starts the next after {format_duration(shortest_ms)}; lower it or run less often"
    if jitter_ms >= shortest_ms:
        raise row.error(f"a start may be {format_duration(jitter_ms)} late, {then}", "jitter")
    if spread_ms >= shortest_ms:
        with_jitter = f" and {format_duration(jitter_ms)} of jitter" if jitter_ms else ""
        raise row.error(
            f"{others} x {format_duration(stagger_ms)}{with_jitter} spread the regions of one tick over "
            f"{format_duration(spread_ms)}, {then}",
            "stagger",
        )
    grace_ms = row.read("misfire_grace")
    if grace_ms > MAX_MISFIRE_GRACE_MS:
        raise row.error(
            f"{format_duration(grace_ms)} is longer than {format_duration(MAX_MISFIRE_GRACE_MS)}", "misfire_grace"
        )
    return replace(
        job, schedule=text, timezone=zone, stagger_ms=stagger_ms, jitter_ms=jitter_ms, misfire_grace_ms=grace_ms
    )


def _leave(
    row: TomlTable, credential: CredentialSettings, left: dict[tuple[str, int | str], dict[str, int]]
) -> dict[str, int]:
    """Units by limit name; a bare number, or a share of the quota, applies to every limit that counts all calls of the
    main bucket. A share is rounded down, so that a small limit still has room.

    `left` caches the result: many jobs leave the same number of many limits.
    """
    value: int | str | TomlTable = row.read("leave")
    if isinstance(value, int | str):
        key = (credential.name, value)
        if key not in left:
            main = credential.book.main_bucket.name
            whole = [x for x in credential.limits if not x.narrow and main in x.view.selector.buckets]
            left[key] = {x.name: _units(value, x.quota_units) for x in whole}
        return left[key]
    names = dict.fromkeys(limit.name for limit in credential.limits if not limit.per_job)
    for name, _ in value.items():
        if name not in names:
            raise value.error(f"credential {credential.name!r} has no such limit; {nearest(name, names)}", name)
    return {name: value.whole(name, minimum=0) for name, _ in value.items()}


def _units(value: int | str, quota_units: int) -> int:
    return value if isinstance(value, int) else quota_units * int(value[:-1]) // 100


def _options(table: TomlTable) -> dict[str, object]:
    for name, _ in table.items():
        if not name.isidentifier():
            raise table.error("not a valid argument name; use letters, digits and _", name)
    return dict(table.items())
