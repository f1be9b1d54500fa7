"""Prefect: a refused flow ends, and schedules a new run for the time at which its call fits.

    python prefect_flow.py      # serves the deployment `popular/every-hour`

A flow without that deployment just ends. If the ledger does not answer, the flow fails. Flows that are refused together
get the same time, so each comes back up to a tenth of its wait later: otherwise they would only refuse each other.
"""

from __future__ import annotations

from datetime import timedelta
from random import SystemRandom
from typing import Any

from prefect import flow, get_run_logger
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Completed, State

import quota

DEPLOYMENT = "popular/every-hour"


@flow
def popular(region: str) -> Any:
    """The titles of a region's popular videos."""
    try:
        return titles(region)
    except quota.Refused as refused:
        when = refused.decision.when()
        if when is None or refused.decision.reason == "ledger-unavailable":
            raise  # the budget is not the reason: the run fails with the remedy
        message, again = str(refused), {"region": region}
        at = when.at + timedelta(seconds=SystemRandom().uniform(1, max(10, when.seconds / 10)))
        try:
            run_deployment(DEPLOYMENT, parameters=again, scheduled_time=at, timeout=0, as_subflow=False)
        except ObjectNotFound:
            message += f"; nothing starts it then, because no deployment {DEPLOYMENT} is served"
        get_run_logger().warning("%s", message)
        return refused_state(message)


def refused_state(message: str) -> State[None]:
    """A final state that Prefect shows as "Refused", not as a failure."""
    return Completed(name="Refused", message=message)


def titles(region: str) -> list[str]:
    with quota.open() as q, quota.labels(job="popular", region=region):
        videos = q.google().videos()
        answer: dict[str, Any] = videos.list(part="snippet", chart="mostPopular", regionCode=region).execute()
    return [video["snippet"]["title"] for video in answer["items"]]


if __name__ == "__main__":
    popular.serve(name="every-hour", interval=3600, parameters={"region": "DE"})
