"""Dagster: the budget is a resource, and a sensor starts a refused run again when its call fits. No process waits.

    dagster dev -f dagster_definitions.py

`RetryRequested(seconds_to_wait=...)` would keep the run's process until then. Here the run fails at once, with its time
in a tag, and the sensor starts it again after that time. It does so once, because the run's id is the key of the new
run. If the ledger does not answer, the run fails without that tag, as in any outage. Runs that are refused together get
the same time, so each comes back up to a tenth of its wait later: otherwise they would only refuse each other.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from random import SystemRandom
from typing import Any

import dagster as dg

import quota

RETRY_AT = "quota/retry-at"
REFUSED, STARTED_AGAIN = {"quota/refused": "true"}, {"quota/refused": "started again"}


class Ledger(dg.ConfigurableResource):
    """The configuration as the command finds it, or the file `config`."""

    config: str | None = None

    def open(self) -> quota.Session:
        return quota.open(self.config)


class Region(dg.Config):
    region: str


@dg.op
def titles(context: dg.OpExecutionContext, config: Region, ledger: Ledger) -> list[str]:
    """The titles of a region's popular videos."""
    try:
        with ledger.open() as q, quota.labels(job="popular", region=config.region):
            videos = q.google().videos()
            answer: dict[str, Any] = videos.list(
                part="snippet", chart="mostPopular", regionCode=config.region
            ).execute()
    except quota.Refused as refused:
        when = refused.decision.when()
        outage = refused.decision.reason == "ledger-unavailable"
        if when is not None and not outage:  # without a time, waiting does not help: the failure has the remedy
            at = when.at + timedelta(seconds=SystemRandom().uniform(1, max(10, when.seconds / 10)))
            context.instance.add_run_tags(context.run_id, {RETRY_AT: at.isoformat(), **REFUSED})
        raise dg.Failure(str(refused), allow_retries=False) from None
    return [video["snippet"]["title"] for video in answer["items"]]


@dg.job
def popular() -> None:
    titles()


@dg.sensor(job=popular, minimum_interval_seconds=60, default_status=dg.DefaultSensorStatus.RUNNING)
def again(context: dg.SensorEvaluationContext) -> Iterator[dg.RunRequest]:
    """Start refused runs again, each at its time. A tick marks the runs that it read, so the next tick skips them."""
    for run_id in (context.cursor or "").split():
        context.instance.add_run_tags(run_id, STARTED_AGAIN)
    waiting = dg.RunsFilter(tags=REFUSED, statuses=[dg.DagsterRunStatus.FAILURE])
    due = [
        run
        for run in context.instance.get_runs(filters=waiting)
        if datetime.fromisoformat(run.tags[RETRY_AT]) <= datetime.now(UTC)
    ]
    yield from (dg.RunRequest(run_key=run.run_id, run_config=run.run_config) for run in due)
    context.update_cursor(" ".join(run.run_id for run in due))


defs = dg.Definitions(jobs=[popular], sensors=[again], resources={"ledger": Ledger()})
