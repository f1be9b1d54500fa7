"""Celery: a task that is refused is delivered again when its call fits. No worker is held meanwhile.

    celery -A celery_tasks worker
    celery -A celery_tasks call celery_tasks.popular --args '["DE"]'

A broker delivers a task again that was not acknowledged within its `visibility_timeout`, an hour with Redis. A longer
wait is therefore taken in steps: a call that is refused once more costs nothing.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from celery import Celery, Task

import quota

STEP = timedelta(minutes=30)

app = Celery("celery_tasks", broker="redis://localhost:6379/1")


@app.task(bind=True, max_retries=None)
def popular(task: Task, region: str) -> list[str]:
    """The titles of a region's popular videos."""
    try:
        return titles(region)
    except quota.Refused as refused:
        when = refused.decision.when()
        if when is None:  # waiting does not help: the task fails, and says what to do
            raise
        raise task.retry(exc=refused, eta=min(when.at, datetime.now(UTC) + STEP)) from None


def titles(region: str) -> list[str]:
    with quota.open() as q, quota.labels(job="popular", region=region):
        videos = q.google().videos()
        answer: dict[str, Any] = videos.list(part="snippet", chart="mostPopular", regionCode=region).execute()
    return [video["snippet"]["title"] for video in answer["items"]]
