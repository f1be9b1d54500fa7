"""Celery: the broker delivers a refused task again when its call fits. No worker is held meanwhile.

    celery -A celery_tasks worker
    celery -A celery_tasks call celery_tasks.popular --args '["DE"]'

A broker delivers a task again if nobody acknowledges it within its `visibility_timeout`, which is an hour with Redis.
So the task takes a longer wait in steps; a call that is refused again costs nothing. Tasks that are refused together
get the same time, so each comes back up to a tenth of its wait later: otherwise they would only refuse each other.
"""

from __future__ import annotations

from random import SystemRandom
from typing import Any

from celery import Celery, Task
from celery.utils.log import get_task_logger

import quota

logger = get_task_logger(__name__)

STEP_S = 1_800.0

app = Celery("celery_tasks", broker="redis://localhost:6379/1")


@app.task(bind=True, max_retries=None)
def popular(task: Task, region: str) -> list[str]:
    """The titles of a region's popular videos."""
    try:
        return titles(region)
    except quota.Refused as refused:
        when = refused.decision.when()
        if when is None:  # waiting does not help: the task fails with the remedy
            raise
        if refused.decision.reason == "ledger-unavailable":
            logger.error("%s", refused)
        wait_s = min(when.seconds, STEP_S)
        spread_s = SystemRandom().uniform(1, max(10, wait_s / 10))
        raise task.retry(exc=refused, countdown=wait_s + spread_s) from None


def titles(region: str) -> list[str]:
    with quota.open() as q, quota.labels(job="popular", region=region):
        videos = q.google().videos()
        answer: dict[str, Any] = videos.list(part="snippet", chart="mostPopular", regionCode=region).execute()
    return [video["snippet"]["title"] for video in answer["items"]]
