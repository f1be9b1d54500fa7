"""Walks down many long lists: a channel's videos, a video's comments. The jobs `uploads` and `comments` take them.

    Walks        the walks of one job: which list comes next, and where it stands after a page
    with_next    a place with the token of its next page

A walk goes down one list, the newest page first, and may take many runs. Where it stands is a row, stored with the page
that it was about: its *place*. So what `pages`, a refusal or a kill cuts off is not lost. A pass looks once at the
first page of every list, first where most is expected to be new. Every other call goes on with the walk that was begun
first, so that neither new items nor old ones wait for all of the others.

A walk ends with its list; or at a page of which everything is stored, if its list was walked to the end within half of
the retention. So nothing below the pages that were fetched is missed, and each list is walked in full, as the first
time, before its items expire.
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
"""How many tokens of a walk's last pages are remembered. One that comes again ends the walk."""

Place = dict[str, Any]
"""Where one list stands: its `id`, and the number of the `step` that was about it last. Of an open walk: when it was
`opened`, the `token` of its next page, and the last ones (`seen_token`). `walked`: when the last walk in full was
opened that came to its end. `failed`: the step at which its call failed last: this pass tries it no more."""

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
    """The walks of one job. Their places are rows of `table`; `lists` is SQL for `id`, `amount` and `since` of each
    list: so much has come to it since that time. `values` are those of its parameters.

    Steps are counted over all passes: `began` is the first one of the pass that the cursor belongs to.
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
        """The place that this step is about; where nobody has looked at its list in this pass, also the next ones."""

    def page(self, *places: Place, unknown: Collection[str] = (), **more: Any) -> Page:
        """The page of this step, with these places as they stand after it. Of the lists that upstream does not know, it
        has those that the configuration names."""
        stand = {self._table: [{**place, "step": self._step} for place in places]}
        cursor = {"began": self._began, "step": self._step + 1}
        return Page(places=stand, cursor=cursor, unknown=sorted(unknown) if self._named else (), **more)

    def failed(self, error: Exception, what: str, passed: Place) -> Page:
        """The page of a step whose call failed: with this place where upstream refused it for its list. Else raises
        the error, with which the pass may go on to other lists."""
        if reason := _passed_over(error):
            return self.page(passed, unknown={passed["id"]} if reason in _NOT_THERE else ())
        place = {**self.places[0], "failed": self._step}
        leave_out(error, f"{what} {place['id']}", self.page(place, complete=False))
        raise error

    def is_full(self, place: Place) -> bool:
        """Whether its walk goes on to the end, whatever is stored."""
        now_ms = self._store.now_ms()
        return not now_ms - self._store.retention_ms // 2 <= place.get("walked", 0) <= now_ms

    def moved(self, place: Place, ids: Sequence[str], token: str | None, stored: Container[object]) -> Place:
        """The place after a page with these items, of which the store has those in `stored`."""
        full = self.is_full(place)
        if not full and ids and all(name in stored for name in ids):
            token = None
        opened = place.get("opened") or self._store.now_ms()
        if token is not None:
            following = with_next(place, "token", token)
            return {"id": place["id"]} if following is None else {**following, "opened": opened}
        return {"id": place["id"], "walked": opened if full else place["walked"]}


def with_next(place: Place, name: str, token: str) -> Place | None:
    """The place with the token of its next page under this name; None where upstream names its pages in a circle."""
    seen = place.get(f"seen_{name}", [])
    return None if token in seen else {**place, name: token, f"seen_{name}": [*seen, token][-KEPT_TOKENS:]}


_PASSED_OVER = frozenset(
    (
        "channelNotFound", "commentNotFound", "commentThreadNotFound", "commentsDisabled", "invalidPageToken",
        "operationNotSupported", "playlistItemsNotAccessible", "playlistNotFound", "playlistOperationUnsupported",
        "processingFailure", "videoNotFound",
    )
)  # fmt: skip
"""What upstream's pages on playlistItems.list, commentThreads.list and comments.list say of one list alone."""


_NOT_THERE = frozenset(("channelNotFound", "playlistNotFound", "videoNotFound"))


def _passed_over(error: Exception) -> str:
    """Why upstream refused a call, if that is for the list that it was about, or for its page: the others may go on. If
    that failed the region, the same list would come first in the next pass, and the others never."""
    answer = answer_in(error)
    with suppress(ValueError, LookupError, TypeError):
        reason = "" if answer is None else json.loads(answer.body)["error"]["errors"][0]["reason"]
        return str(reason) if reason in _PASSED_OVER else ""
    return ""
