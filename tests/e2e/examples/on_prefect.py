"""docs/examples/prefect_flow.py, with Prefect itself."""

from __future__ import annotations

import json
from datetime import datetime

from e2e.examples.conftest import Taken

RUNS = """
import asyncio, json
from prefect.client.orchestration import get_client
from prefect.testing.utilities import prefect_test_harness
from prefect_flow import popular

async def waiting():
    async with get_client() as client:
        runs = await client.read_flow_runs()
    return [(run.parameters, run.next_scheduled_start_time.isoformat()) for run in runs if run.state.is_scheduled()]

with prefect_test_harness(server_startup_timeout=240):
    first = popular("DE", return_state=True)
    alone = popular("US", return_state=True)
    assert alone.name == "Refused" and alone.message.endswith("no deployment popular/every-hour is served"), alone
    popular.to_deployment("every-hour").apply()
    refused = popular("US", return_state=True)
    print(json.dumps([first.name, refused.name, refused.message, asyncio.run(waiting())]))
"""


def test_a_refused_flow_ends_and_leaves_a_run_for_its_time(taken: Taken) -> None:
    taken.take("prefect_flow", units=1)
    output = taken.python(
        RUNS, "prefect", PREFECT_HOME=str(taken.folder / "prefect"), PREFECT_SERVER_ANALYTICS_ENABLED="false"
    )
    first, refused, message, [[parameters, start]] = json.loads(output.splitlines()[-1])
    assert (first, refused, parameters, taken.sent()) == ("Completed", "Refused", {"region": "US"}, 1)
    assert message.startswith("refused videos.list (1 unit) on main: limit 'hour' has 1 of 1 unit used; next at ")
    fits = taken.json("peek", "videos.list", status=75)["retry_at"]
    later_s = (datetime.fromisoformat(start) - datetime.fromisoformat(fits)).total_seconds()
    assert 0 < later_s <= 361, "flows that are refused together come back one after another"
