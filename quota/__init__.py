"""The gate between cron jobs and a metered API. `quota.open()` is the door; read `quota.budget` first.

What is named here is imported when it is first used: the command must answer Ctrl-C before all that is loaded.
"""

from quota.attribution import labels  # at once: later, the module of that name would stand here

TYPE_CHECKING = False  # `typing` takes longer to import than all of this
if TYPE_CHECKING:
    from quota.budget import Budget
    from quota.decision import Decision, LimitState
    from quota.errors import (
        BadAnswer,
        ConfigError,
        CostExceedsLimit,
        LedgerError,
        QuotaError,
        Refused,
        UnknownCharge,
        UnknownMethod,
        UsageError,
    )
    from quota.session import Session
    from quota.session import open_session as open  # noqa: A004  # `quota.open()` reads as it should
else:
    _FROM = {
        "Budget": "quota.budget",
        "Decision": "quota.decision",
        "LimitState": "quota.decision",
        "Session": "quota.session",
        "open": "quota.session",
    }

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module 'quota' has no attribute {name!r}")
        from importlib import import_module

        module = import_module(_FROM.get(name, "quota.errors"))
        globals()[name] = found = getattr(module, "open_session" if name == "open" else name)
        return found


__all__ = [
    "BadAnswer",
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
