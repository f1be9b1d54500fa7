"""docs/examples/celery_tasks.py, with Celery itself: a worker in a thread, over a broker in memory."""

from __future__ import annotations

import json

import pytest

from e2e.examples.conftest import Taken

WORK = """
import json, quota, time
from celery.contrib.testing.worker import start_worker
from celery_tasks import app, popular

app.conf.update(broker_url="memory://", result_backend="cache+memory://")

def wait_for(wanted, results):
    while [result.state for result in results] != [wanted] * len(results):
        time.sleep(0.02)

with start_worker(app, pool="solo", perform_ping_check=False) as worker:
    first = popular.delay("DE")
    wait_for("SUCCESS", [first])
    refused = [popular.delay(region) for region in ("US", "GB")]  # the one worker takes both
    wait_for("RETRY", refused)
    while len(waiting := list(worker.consumer.timer.queue)) < 2:
        time.sleep(0.02)
    with quota.open() as q:
        fits = q.budget().peek("videos.list").retry_at.timestamp()
    now = time.time() - time.monotonic()
    print(json.dumps([len(first.get()), [entry[0] + now - fits for entry in waiting]]))
"""


@pytest.mark.parametrize(("window", "steps"), [("10m", 0), ("2h", 5_400)])
def test_a_refused_task_waits_for_its_time_and_holds_no_worker(window: str, steps: int, taken: Taken) -> None:
    taken.take("celery_tasks", units=1, window=window)
    titles, early = json.loads(taken.python(WORK))
    assert (titles, taken.sent()) == (5, 1)
    assert early == pytest.approx([-steps, -steps], abs=600 if steps else 61)
    assert early[0] != early[1], "both would come back at once"
