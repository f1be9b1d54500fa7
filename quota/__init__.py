"""The gate between cron jobs and a metered API. `quota.open()` is the door; read `quota.budget` first."""

from quota.budget import Budget
from quota.decision import Decision, LimitState
from quota.errors import (
    ConfigError,
    CostExceedsLimit,
    LedgerError,
    QuotaError,
    Refused,
    UnknownCharge,
    UnknownMethod,
    UsageError,
)
from quota.labels import labels
from quota.session import Session
from quota.session import open_session as open  # noqa: A004  # `quota.open()` reads as it should; here it is not used

__all__ = [
    "Budget",
    "ConfigError",
    "CostExceedsLimit",
    "Decision",
    "LedgerError",
    "LimitState",
    "QuotaError",
    "Refused",
    "Session",
    "UnknownCharge",
    "UnknownMethod",
    "UsageError",
    "labels",
    "open",
]
