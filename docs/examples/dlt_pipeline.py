"""dlt: its REST client is metered. A refused pipeline loads what it has and ends well; the next run resumes there.

    python dlt_pipeline.py

dlt stores the place with the data, in one load, so no page is lost, and no page is fetched twice. If the ledger does
not answer, the pipeline loads what it has, and then fails.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import dlt
import requests
from dlt.sources.helpers.rest_client import RESTClient
from dlt.sources.helpers.rest_client.client import PageData
from dlt.sources.helpers.rest_client.paginators import JSONResponseCursorPaginator

import quota
from quota.clients.requests import requests_adapter

API = "https://www.googleapis.com/youtube/v3/"
HOST = "www.googleapis.com"

logger = logging.getLogger(__name__)


def labelled(pages: Iterator[PageData[Any]], region: str) -> PageData[Any] | None:
    """The next page. Its charge is labelled here: between two pages of a resource, dlt asks others for theirs."""
    with quota.labels(job="dlt", region=region):
        return next(pages, None)


@dlt.resource(primary_key="id", write_disposition="merge")
def videos(region: str, refusals: list[quota.Refused]) -> Iterator[list[dict[str, Any]]]:
    """A region's popular videos, page by page. When the budget is spent, the resource ends and notes the refusal."""
    place = dlt.current.resource_state().setdefault(region, {})
    with quota.open() as q, requests.Session() as session:
        session.mount(API, requests_adapter(q.budget(), "videos.list", hosts=HOST))
        client = RESTClient(API, session=session)
        asked = {"part": "snippet", "chart": "mostPopular", "regionCode": region, "maxResults": "50"}
        token = place.get("token")
        pages = client.paginate(
            "videos",
            params={**asked, "key": os.environ["YOUTUBE_API_KEY"], **({"pageToken": token} if token else {})},
            paginator=JSONResponseCursorPaginator(cursor_path="nextPageToken", cursor_param="pageToken"),
            data_selector="items",
        )
        try:
            while (page := labelled(pages, region)) is not None:
                place["token"] = page.response.json().get("nextPageToken")
                yield list(page)
        except quota.Refused as refused:
            refusals.append(refused)  # dlt loads the fetched pages together with the place
        except requests.HTTPError as error:
            if error.response is None or "invalidPageToken" not in error.response.text:
                raise
            place["token"] = None  # upstream no longer takes the stored page token: the next run begins anew
            logger.warning("%s: no page for the stored token", region)


def run() -> Any:
    refusals: list[quota.Refused] = []
    pipeline = dlt.pipeline("videos", destination="filesystem", dataset_name="videos")
    loaded = pipeline.run(videos("DE", refusals))
    for refused in refusals:
        if refused.decision.when() is None or refused.decision.reason == "ledger-unavailable":
            raise refused  # the budget is not the reason: somebody must look
        logger.warning("%s", refused)
    return loaded


if __name__ == "__main__":
    run()
