"""Airflow: a refused call becomes a task that waits for its time, or a skip. No worker slot is held meanwhile.

Airflow reschedules `popular` to the time at which its call fits, and skips `nightly`, whose next run asks again.
`budget` is a deferrable sensor for tasks that should not begin without budget; the triggerer waits for it. Each task
logs the reason. If the ledger does not answer, the tasks fail, and Airflow retries them as `retries` says.

Tasks that are refused together get the same time, so each comes back up to a tenth of its wait later: otherwise they
would only refuse each other.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from random import SystemRandom
from typing import Any

from airflow.providers.standard.triggers.temporal import DateTimeTrigger
from airflow.sdk import BaseSensorOperator, dag, task
from airflow.sdk.exceptions import AirflowFailException, AirflowRescheduleException, AirflowSkipException

import quota

logger = logging.getLogger(__name__)


class BudgetSensor(BaseSensorOperator):
    """Succeeds when a call of this method would be admitted."""

    def __init__(self, *, method: str, credential: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.method, self.credential = method, credential

    def execute(self, context: Any, event: Any = None) -> None:
        with quota.open() as q:
            decision = q.budget(self.credential).peek(self.method)
        if decision.admitted:
            return
        self.defer(trigger=DateTimeTrigger(come_back(decision)), method_name="execute")


def come_back(decision: quota.Decision) -> Any:
    """The time for another try. If waiting does not help, the task fails, and Airflow does not retry it."""
    when = decision.when()
    if when is None:
        raise AirflowFailException(decision.sentence())
    if decision.reason == "ledger-unavailable":
        raise quota.Refused(decision)
    logger.info("%s", decision)
    return when.at + timedelta(seconds=SystemRandom().uniform(1, max(10, when.seconds / 10)))


def titles(region: str) -> list[str]:
    with quota.open() as q, quota.labels(job="popular", region=region):
        videos = q.google().videos()
        answer: dict[str, Any] = videos.list(part="snippet", chart="mostPopular", regionCode=region).execute()
    return [video["snippet"]["title"] for video in answer["items"]]


@dag(schedule="@daily", catchup=False, max_active_runs=1)
def videos() -> None:
    @task
    def popular(region: str) -> list[str]:
        try:
            return titles(region)
        except quota.Refused as refused:
            raise AirflowRescheduleException(come_back(refused.decision)) from None

    @task
    def nightly(region: str) -> list[str]:
        try:
            return titles(region)
        except quota.Refused as refused:
            come_back(refused.decision)  # fails if the budget is not the reason
            raise AirflowSkipException(str(refused)) from None

    BudgetSensor(task_id="budget", method="videos.list") >> [popular("DE"), nightly("US")]


videos()
