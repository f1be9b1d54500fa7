"""docs/examples/airbyte_source.py, with Airbyte's CDK itself: two sources on one token."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from e2e.examples.conftest import Taken

SYNC = """
import json, logging
from airbyte_cdk.sources.streams.http import HttpClient
from airbyte_cdk.utils import AirbyteTracedException
from airbyte_source import ledger_budget

budget = ledger_budget("main", "videos.list", url_base="ADDRESS")
client = HttpClient(name="videos", logger=logging.getLogger("videos"), api_budget=budget)
token = None
pages = []
try:
    while True:
        place = {"pageToken": token} if token else {}
        params = {"part": "id", "chart": "mostPopular", "regionCode": "DE", "maxResults": 50, "key": "a-key", **place}
        _, answer = client.send_request("GET", "ADDRESS/youtube/v3/videos", {}, params=params)
        pages.append(len(answer.json()["items"]))
        token = answer.json().get("nextPageToken")
        if token is None:
            print(json.dumps([pages, "done", ""]))
            break
except AirbyteTracedException as error:
    print(json.dumps([pages, error.failure_type.value, error.message]))
"""


def test_two_sources_share_the_ledgers_budget_and_a_refusal_ends_the_sync_as_transient(taken: Taken) -> None:
    taken.use("airbyte-cdk")
    taken.take("airbyte_source", units=5)
    sync = SYNC.replace("ADDRESS", taken.upstream.address)
    assert json.loads(taken.python(sync).splitlines()[-1]) == [[50, 50, 50, 50], "done", ""]
    pages, kind, message = json.loads(taken.python(sync).splitlines()[-1])
    assert (pages, kind, taken.sent()) == ([50], "transient_error", 5)
    assert message.startswith("refused videos.list (1 unit) on main: limit 'hour' has 5 of 5 units used; next at ")
