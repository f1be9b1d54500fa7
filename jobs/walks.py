"""Walks through many long lists: a channel's videos, a video's comments. The jobs `uploads` and `comments` use them.

    Walks        the walks of one job: which list comes next, and where it stands after a page
    with_next    a place with the token of its next page

A walk reads one list, the newest page first, and may take many runs. Its *place* is a row, stored with each page. So
`pages`, a refusal or a kill loses nothing. A pass reads the first page of every list once, and first the lists with the
most expected new items. Every other call continues the oldest open walk, so that neither new nor old items wait for all
of the others.

A walk ends with its list. If a walk read the whole list within half of the retention, the next ones end at the first
page whose items are all stored. So a walk misses nothing below the fetched pages, and reads each list in full before
its items expire.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Container, Sequence
from contextlib import suppress
from operator import index
from typing import Any

from quota.clients.failures import answer_in
from quota.jobs.job import Cursor, Page, leave_out
from quota.jobs.store.store import Store

PAGE_ITEMS = 50
"""Upstream returns at most this many videos or channels in one page."""

KEPT_TOKENS = 20
"""How many tokens of its last pages a walk keeps. A token that comes again ends the walk."""

Place = dict[str, Any]
"""Where one list stands: its `id`, and the number of its last `step`. An open walk also has the time when it was
`opened`, the `token` of its next page, and its last tokens (`seen_token`). `walked`: when the last complete full walk
was opened. `failed`: the step at which its last call failed; this pass does not try it again."""

_PLACES = """
    WITH lists (id, amount, since) AS ({lists}),
    places AS (
        SELECT l.id, ifnull(r.data, json_object('id', l.id)) AS data, ifnull(r.refreshed_ms, 0) AS seen_ms,
            ifnull(json_extract(r.data, '$.step'), 0) AS step, json_extract(r.data, '$.opened') AS opened,
            ifnull(json_extract(r.data, '$.failed'), 0) AS failed,
            max(ifnull(l.amount, 0), 1)
                / max(1.0, :now_ms / 86400000.0 + 2440587.5 - ifnull(julianday(l.since), 0)) AS a_day
        FROM lists l LEFT JOIN rows r ON r.name = :table AND r.key = l.id)
    SELECT data FROM places WHERE
"""
_OPEN = "opened IS NOT NULL AND failed < :began ORDER BY opened, id LIMIT 1"
_DUE = f"opened IS NULL AND step < :began ORDER BY a_day * (:now_ms - seen_ms) DESC, id LIMIT {PAGE_ITEMS}"
_LAST = "SELECT ifnull(max(json_extract(data, '$.step')), 0) FROM rows WHERE name = :table"


class Walks:
    """The walks of one job. Their places are rows of `table`. `lists` is SQL for the `id` of each list, and the
    `amount` of items that it got `since` a time. `values` are the SQL's parameters.

    Steps are numbered over all passes: `began` is the first step of the cursor's pass.
    """

    def __init__(self, store: Store, table: str, lists: str, cursor: Cursor | None, **values: object) -> None:
        self._store = store
        self._table = table
        self._named = values.get("ids") is not None
        if cursor is None:
            first = store.select(_LAST, table=table)[0][0] + 1
            cursor = {"began": first, "step": first}
        self._began, self._step = index(cursor["began"]), index(cursor["step"])
        values = {"table": table, "began": self._began, "now_ms": store.now_ms(), **values}
        due, begun = (
            [json.loads(data) for (data,) in store.select(_PLACES.format(lists=lists) + which, **values)]
            for which in (_DUE, _OPEN)
        )
        self.places: list[Place] = begun if begun and (self._step % 2 or not due) else due
        """The place of this step. If this pass has not read its list yet, also the places of the next lists."""

    def page(self, *places: Place, unknown: Collection[str] = (), **more: Any) -> Page:
        """The page of this step, with these places after it. It names the lists that upstream does not know, if they
        are in the configuration."""
        stand = {self._table: [{**place, "step": self._step} for place in places]}
        cursor = {"began": self._began, "step": self._step + 1}
        return Page(places=stand, cursor=cursor, unknown=sorted(unknown) if self._named else (), **more)

    def failed(self, error: Exception, what: str, passed: Place) -> Page:
        """The page of a step whose call failed, with the place `passed`, if upstream refused this list alone. Else
        raises the error; the pass may go on with other lists."""
        if reason := _passed_over(error):
            return self.page(passed, unknown={passed["id"]} if reason in _NOT_THERE else ())
        place = {**self.places[0], "failed": self._step}
        leave_out(error, f"{what} {place['id']}", self.page(place, complete=False))
        raise error

    def is_full(self, place: Place) -> bool:
        """Whether its walk reads the list to the end, even if all items of a page are stored."""
        now_ms = self._store.now_ms()
        return not now_ms - self._store.retention_ms // 2 <= place.get("walked", 0) <= now_ms

    def moved(self, place: Place, ids: Sequence[str], token: str | None, stored: Container[object]) -> Place:
        """The place after a page with the items `ids`; the store already has the items in `stored`."""
        full = self.is_full(place)
        if not full and ids and all(name in stored for name in ids):
            token = None
        opened = place.get("opened") or self._store.now_ms()
        if token is not None:
            following = with_next(place, "token", token)
            return {"id": place["id"]} if following is None else {**following, "opened": opened}
        return {"id": place["id"], "walked": opened if full else place["walked"]}


def with_next(place: Place, name: str, token: str) -> Place | None:
    """The place with the token of its next page under this name; None if upstream's pages form a circle."""
    seen = place.get(f"seen_{name}", [])
    return None if token in seen else {**place, name: token, f"seen_{name}": [*seen, token][-KEPT_TOKENS:]}


_PASSED_OVER = frozenset(
    (
        "channelNotFound", "commentNotFound", "commentThreadNotFound", "commentsDisabled", "invalidPageToken",
        "operationNotSupported", "playlistItemsNotAccessible", "playlistNotFound", "playlistOperationUnsupported",
        "processingFailure", "videoNotFound",
    )
)  # fmt: skip
"""Reasons that concern one list alone, from upstream's pages on playlistItems.list, commentThreads.list and
comments.list."""


_NOT_THERE = frozenset(("channelNotFound", "playlistNotFound", "videoNotFound"))


def _passed_over(error: Exception) -> str:
    """Why upstream refused a call, if the reason concerns this list or page alone: the others may go on. If such an
    error failed the region, the same list would come first in the next pass, and the others never."""
    answer = answer_in(error)
    with suppress(ValueError, LookupError, TypeError):
        reason = "" if answer is None else json.loads(answer.body)["error"]["errors"][0]["reason"]
        return str(reason) if reason in _PASSED_OVER else ""
    return ""
