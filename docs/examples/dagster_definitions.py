"""Dagster: the budget is a resource, and a refused run is started again when its call fits. No process waits meanwhile.

    dagster dev -f dagster_definitions.py

`RetryRequested(seconds_to_wait=...)` would keep the run's process until then. Here the run fails at once with its time
in a tag, and the sensor starts it again when that is past: once, because the run's id is the key of the new one.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import dagster as dg

import quota

RETRY_AT = "quota/retry-at"
REFUSED = {"quota/refused": "true"}


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
        if when is not None:  # else waiting does not help: the run fails, and says what to do
            context.instance.add_run_tags(context.run_id, {RETRY_AT: when.at.isoformat(), **REFUSED})
        raise dg.Failure(str(refused), allow_retries=False) from None
    return [video["snippet"]["title"] for video in answer["items"]]


@dg.job
def popular() -> None:
    titles()


@dg.sensor(job=popular, minimum_interval_seconds=60)
def again(context: dg.SensorEvaluationContext) -> Iterator[dg.RunRequest]:
    """Starts refused runs again, each at its time."""
    refused = dg.RunsFilter(tags=REFUSED, statuses=[dg.DagsterRunStatus.FAILURE])
    for run in context.instance.get_runs(filters=refused, limit=100):
        if datetime.fromisoformat(run.tags[RETRY_AT]) <= datetime.now(UTC):
            yield dg.RunRequest(run_key=run.run_id, run_config=run.run_config)


defs = dg.Definitions(jobs=[popular], sensors=[again], resources={"ledger": Ledger()})
