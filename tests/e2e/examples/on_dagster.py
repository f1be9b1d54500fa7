"""docs/examples/dagster_definitions.py, with Dagster itself."""

from __future__ import annotations

import json
from datetime import datetime

from e2e.examples.conftest import Taken

RUNS = """
import json
import dagster as dg
from dagster_definitions import REFUSED, RETRY_AT, again, defs

job = defs.resolve_job_def("popular")
config = {"ops": {"titles": {"config": {"region": "DE"}}}}
with dg.instance_for_test() as instance:
    def run():
        return job.execute_in_process(run_config=config, instance=instance, raise_on_error=False)

    def asked(cursor=None):
        context = dg.build_sensor_context(instance=instance, definitions=defs, cursor=cursor)
        tick = again.evaluate_tick(context)
        return [(request.run_key, request.run_config) for request in tick.run_requests], tick.cursor

    first, refused = run(), run()
    before, _ = asked()
    tags = instance.get_run_by_id(refused.run_id).tags
    instance.add_run_tags(refused.run_id, {RETRY_AT: "2026-01-01T00:00:00+00:00"})
    due, cursor = asked()
    assert due == [(refused.run_id, config)], due
    assert asked(cursor)[0] == [], "it was started again"
    for _ in range(120):
        instance.create_run_for_job(
            job,
            run_config=config,
            status=dg.DagsterRunStatus.FAILURE,
            tags={**REFUSED, RETRY_AT: "2026-01-01T00:00:00+00:00"},
        )
    due, cursor = asked(cursor)
    assert (len(due), asked(cursor)[0]) == (120, [])
    assert again.default_status is dg.DefaultSensorStatus.RUNNING
    print(json.dumps([first.success, refused.success, before, tags[RETRY_AT]]))
"""


def test_a_refused_run_ends_and_is_started_again_once_its_time_is_past(taken: Taken) -> None:
    taken.take("dagster_definitions", units=1)
    first, refused, before, retry_at = json.loads(taken.python(RUNS, "dagster"))
    assert (first, refused, before, taken.sent()) == (True, False, [], 1)
    fits = taken.json("peek", "videos.list", status=75)["retry_at"]
    later_s = (datetime.fromisoformat(retry_at) - datetime.fromisoformat(fits)).total_seconds()
    assert 0 < later_s <= 361, "runs that are refused together come back one after another"
