"""An upstream in the same process: every call is charged to the budget and answered at once, always with a next page.

For simulated months: the real runner, store, ledger and fetch functions, under a clock that the test moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quota.errors import Refused
from quota.session import Session

if TYPE_CHECKING:
    from quota.budget import Budget


class LocalSession(Session):
    """A session whose Google client needs no network: a client without a seam of its own, charged call by call."""

    def google(self, credential: str | None = None, api: str = "youtube", version: str = "v3", **options: Any) -> Any:
        return LocalClient(self.budget(credential))


class LocalClient:
    """`client.videos().list(...).execute()`, for any resource."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def __getattr__(self, resource: str) -> Any:
        return lambda: LocalResource(self._budget, resource)

    def close(self) -> None: ...


class LocalResource:
    def __init__(self, budget: Budget, resource: str) -> None:
        self._budget, self._resource = budget, resource

    def list(self, **parameters: Any) -> LocalRequest:
        return LocalRequest(self._budget, self._resource, int(parameters.get("pageToken") or 0))


class LocalRequest:
    def __init__(self, budget: Budget, resource: str, page: int) -> None:
        self._budget, self._resource, self._page = budget, resource, page

    def execute(self) -> dict[str, Any]:
        decision = self._budget.charge(f"{self._resource}.list")
        if not decision.admitted:
            raise Refused(decision)
        found: dict[str, Any] = {"id": {"videoId": "v1"}} if self._resource == "search" else {"id": "v1"}
        return {"items": [found], "nextPageToken": str(self._page + 1)}
