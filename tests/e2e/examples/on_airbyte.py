"""docs/examples/airbyte_source.py, with Airbyte's CDK itself; and beside a task of Airflow, all on one token."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

from e2e.examples.conftest import Taken
from support.servers import RedisServer, free_port

SYNC = """
import json, logging, pathlib, sys
from airbyte_cdk.sources.streams.http import HttpClient
from airbyte_cdk.utils import AirbyteTracedException
from airbyte_source import ledger_budget

kept = pathlib.Path("NAME.json")  # as the platform keeps a stream's state
state = json.loads(kept.read_text()) if kept.exists() else {}
budget = ledger_budget("main", "videos.list", url_base="ADDRESS")
client = HttpClient(name="videos", logger=logging.getLogger("videos"), api_budget=budget)
pages = []
said = ["done", ""]
try:
    while not state.get("done"):
        place = {"pageToken": state["token"]} if state else {}
        params = {"part": "id", "chart": "mostPopular", "regionCode": "DE", "maxResults": 50, "key": "a-key", **place}
        _, answer = client.send_request("GET", "ADDRESS/youtube/v3/videos", {}, params=params)
        pages.append(len(answer.json()["items"]))
        state = {"token": answer.json().get("nextPageToken"), "done": "nextPageToken" not in answer.json()}
        kept.write_text(json.dumps(state))
except AirbyteTracedException as error:
    assert str(error) == error.message
    said = [error.failure_type.value, error.message]
print(json.dumps([pages, *said]))
"""

TASK = """
import json
from airflow.sdk.exceptions import AirflowRescheduleException
from airflow_dag import videos

try:
    print(json.dumps(len(videos().get_task("popular").python_callable("DE"))))
except AirflowRescheduleException as rescheduled:
    print(json.dumps(rescheduled.reschedule_date.isoformat()))
"""


def sync(taken: Taken, name: str) -> list[object]:
    """One run of a source: the pages that it read, how it ended, and what it said."""
    program = SYNC.replace("ADDRESS", taken.upstream.address).replace("NAME", name)
    said = taken.python(program, "airbyte-cdk", QUOTA_STATE_DIR=str(taken.folder / name))
    found: list[object] = json.loads(said.splitlines()[-1])
    return found


def spent(taken: Taken) -> int:
    return int(taken.json("spend", "--by", "method")["total_units"])


def test_a_refusal_ends_the_sync_as_transient_and_says_when_it_fits(taken: Taken) -> None:
    taken.take("airbyte_source", units=3)
    pages, kind, message = sync(taken, "one")
    assert (pages, kind, taken.sent()) == ([50, 50, 50], "transient_error", 3)
    assert str(message).startswith("refused videos.list (1 unit) on main: limit 'hour' has 3 of 3 units used; next at ")


def test_without_a_ledger_the_sync_ends_as_a_system_error(taken: Taken) -> None:
    taken.ledger = f"redis://127.0.0.1:{free_port()}/0"
    taken.take("airbyte_source", units=3)
    pages, kind, message = sync(taken, "one")
    assert (pages, kind, taken.sent()) == ([], "system_error", 0)
    assert "cannot be reached" in str(message)


def test_two_sources_and_a_dag_on_one_token_are_never_over_and_each_goes_on(taken: Taken, server: RedisServer) -> None:
    taken.ledger = server.url
    taken.take("airbyte_source", units=5)
    taken.take("airflow_dag", units=5)

    def at_once() -> list[str]:
        with ThreadPoolExecutor() as threads:
            dag = threads.submit(taken.python, TASK, "apache-airflow", AIRFLOW_HOME=str(taken.folder / "airflow"))
            sources = [threads.submit(sync, taken, name) for name in ("one", "two")]
            ended = [str(source.result()[1]) for source in sources]
            return [*ended, "waits" if "T" in dag.result().splitlines()[-1] else "done"]

    first = at_once()
    assert taken.sent() == spent(taken) == 5
    assert first.count("done") < 3
    taken.allow(9)
    if first[2] == "waits":
        assert at_once() == ["done", "done", "done"]
    else:
        assert [sync(taken, name)[1] for name in ("one", "two")] == ["done", "done"]
    assert taken.sent() == spent(taken) == 9
