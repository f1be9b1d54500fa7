"""Airbyte's CDK: an `api_budget` whose budget is the ledger, so that all syncs and all else share one.

    budget = ledger_budget("main", "videos.list", url_base="https://www.googleapis.com")
    HttpClient(name="videos", logger=logger, api_budget=budget)          # what a stream of Python has
    Videos(authenticator=..., api_budget=budget)                         # or an `HttpStream`

The CDK's own policies count in one process, and sleep. This one charges each attempt to the ledger before it leaves. A
refusal ends the sync as transient: what was read is kept by its state, and the platform's next attempt goes on there. A
ledger that does not answer ends it as a system error.
"""

from __future__ import annotations

from typing import Any

from airbyte_cdk.models import FailureType
from airbyte_cdk.sources.streams.call_rate import APIBudget, BaseCallRatePolicy, HttpRequestRegexMatcher
from airbyte_cdk.utils import AirbyteTracedException

import quota


class LedgerPolicy(BaseCallRatePolicy):
    """Requests that one API method prices."""

    def __init__(self, budget: quota.Budget, method: str, url_base: str, path: str | None = None) -> None:
        super().__init__([HttpRequestRegexMatcher(url_base=url_base, url_path_pattern=path)])
        self.budget, self.method = budget, method

    def try_acquire(self, request: Any, weight: int) -> None:
        """Charge the request, or end the sync. `weight` is the CDK's; the price is the cost book's."""
        decision = self.budget.charge(self.method, job="airbyte")
        if not decision.admitted:
            kind = FailureType.config_error if decision.when() is None else FailureType.transient_error
            if decision.reason == "ledger-unavailable":
                kind = FailureType.system_error
            sentence = decision.sentence()
            raise AirbyteTracedException(sentence, message=sentence, failure_type=kind)

    def update(self, available_calls: int | None, call_reset_ts: Any) -> None:
        """Nothing: the ledger already counts what others spend."""


def ledger_budget(credential: str, method: str, url_base: str) -> APIBudget:
    """A budget for all requests to a host. The session stays open as long as the process, as its ledger does."""
    return APIBudget([LedgerPolicy(quota.open().budget(credential), method, url_base)])
