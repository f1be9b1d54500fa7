"""docs/examples/airbyte_source.py, with Airbyte's CDK itself."""

from __future__ import annotations

import json

from e2e.examples.conftest import Taken
from support.servers import free_port

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


def sync(taken: Taken, name: str) -> list[object]:
    """One run of a source: the pages that it read, how it ended, and what it said."""
    program = SYNC.replace("ADDRESS", taken.upstream.address).replace("NAME", name)
    output = taken.python(program, "airbyte-cdk", QUOTA_STATE_DIR=str(taken.folder / name))
    messages: list[object] = json.loads(output.splitlines()[-1])
    return messages


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
