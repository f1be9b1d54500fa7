"""An upstream in the same process: every call is charged to the budget and answered at once, always with a next page.

For simulated months: the real runner, store, ledger and fetch functions, under a clock that the test moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quota.budget import Budget
from quota.errors import Refused
from quota.session import Session


class LocalSession(Session):
    """A session whose Google client needs no network: a client without a seam of its own, charged call by call.
    `before_page` is told of each call's region and page."""

    before_page: Callable[[str, int], None] = staticmethod(lambda region, page: None)

    def google(self, credential: str | None = None, api: str = "youtube", version: str = "v3", **options: Any) -> Any:
        return LocalClient(self.budget(credential), self.before_page)


class LocalClient:
    """`client.videos().list(...).execute()`, for any resource."""

    def __init__(self, budget: Budget, before_page: Callable[[str, int], None]) -> None:
        self._budget, self._before_page = budget, before_page

    def __getattr__(self, resource: str) -> Any:
        return lambda: LocalResource(self._budget, resource, self._before_page)

    def close(self) -> None: ...


class LocalResource:
    def __init__(self, budget: Budget, resource: str, before_page: Callable[[str, int], None]) -> None:
        self._budget, self._resource, self._before_page = budget, resource, before_page

    def list(self, **parameters: Any) -> LocalRequest:
        page = int(parameters.get("pageToken") or 0)
        self._before_page(parameters.get("regionCode", ""), page)
        return LocalRequest(self._budget, self._resource, page)


class LocalRequest:
    def __init__(self, budget: Budget, resource: str, page: int) -> None:
        self._budget, self._resource, self._page = budget, resource, page

    def execute(self) -> dict[str, Any]:
        decision = self._budget.charge(f"{self._resource}.list")
        if not decision.admitted:
            raise Refused(decision)
        item: dict[str, Any] = {"id": {"videoId": "v1"}} if self._resource == "search" else {"id": "v1"}
        return {"items": [item], "nextPageToken": str(self._page + 1)}
