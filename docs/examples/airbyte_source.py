"""Airbyte's CDK: an `api_budget` whose budget is the ledger, so all syncs and other programs share one budget.

    budget = ledger_budget("main", "videos.list", url_base="https://www.googleapis.com")
    HttpClient(name="videos", logger=logger, api_budget=budget)          # a Python stream has this client
    Videos(authenticator=..., api_budget=budget)                         # or an `HttpStream`

The CDK's own policies count in one process, and sleep. This policy charges each attempt to the ledger before it leaves.
A refusal ends the sync as transient: the state keeps what was read, and the platform's next attempt resumes there. If
the ledger does not answer, the sync ends as a system error.
"""

from __future__ import annotations

from typing import Any

from airbyte_cdk.models import FailureType
from airbyte_cdk.sources.streams.call_rate import APIBudget, BaseCallRatePolicy, HttpRequestRegexMatcher
from airbyte_cdk.utils import AirbyteTracedException

import quota


class LedgerPolicy(BaseCallRatePolicy):
    """Requests that cost as much as one API method."""

    def __init__(self, budget: quota.Budget, method: str, url_base: str, path: str | None = None) -> None:
        super().__init__([HttpRequestRegexMatcher(url_base=url_base, url_path_pattern=path)])
        self.budget, self.method = budget, method

    def try_acquire(self, request: Any, weight: int) -> None:
        """Charge the request, or end the sync. `weight` comes from the CDK; the price comes from the cost book."""
        decision = self.budget.charge(self.method, job="airbyte")
        if not decision.admitted:
            kind = FailureType.config_error if decision.when() is None else FailureType.transient_error
            if decision.reason == "ledger-unavailable":
                kind = FailureType.system_error
            sentence = decision.sentence()
            raise AirbyteTracedException(sentence, message=sentence, failure_type=kind)

    def update(self, available_calls: int | None, call_reset_ts: Any) -> None:
        """Do nothing: the ledger already counts what others spend."""


def ledger_budget(credential: str, method: str, url_base: str) -> APIBudget:
    """A budget for all requests to a host. The session and its ledger stay open as long as the process."""
    return APIBudget([LedgerPolicy(quota.open().budget(credential), method, url_base)])
