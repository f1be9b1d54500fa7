"""The gate between cron jobs and a metered API. Read `quota.budget` first.

    with quota.open() as session:                 # a Session: finds the configuration as the command does
        budget = session.budget()                 # a Budget
        decision = budget.charge("search.list")   # a Decision; it has a LimitState for each limit

    async with quota.open_async() as session:     # an AsyncSession, for event loops
        budget = session.budget()                 # an AsyncBudget, whose methods are awaited

    Limit, CostBook, Log       the parts of a budget: `budget.limits`, `budget.book`, `budget.ledger`
    Entry                      a charge of the log: `budget.refund` and `budget.settle` return it
    When                       when to try a refused call again: `decision.when()` returns it
    instrument, uninstrument   charge the requests of unchanged code, and stop that: see `quota.auto`
    labels                     names the job and region that spend
    QuotaError and the others  see `quota.errors`

Other modules are private and may change. A name is imported on its first use, because the command must answer Ctrl-C
before everything is loaded.
"""

TYPE_CHECKING = False  # `typing` takes longer to import than all of this
if TYPE_CHECKING:
    from quota.async_budget import AsyncBudget
    from quota.async_session import AsyncSession, open_async
    from quota.auto import instrument, uninstrument
    from quota.budget import Budget
    from quota.decision import Decision, LimitState, When
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
    from quota.ledger.log import Log
    from quota.rules.entry import Entry
    from quota.session import Session
    from quota.session import open_session as open  # noqa: A004  # `quota.open()` reads as it should
    from quota.terms.arguments import labels
    from quota.terms.costs import CostBook
    from quota.terms.limits import Limit
else:
    _FROM = {
        "AsyncBudget": "quota.async_budget",
        "AsyncSession": "quota.async_session",
        "Budget": "quota.budget",
        "CostBook": "quota.terms.costs",
        "Decision": "quota.decision",
        "Entry": "quota.rules.entry",
        "Limit": "quota.terms.limits",
        "LimitState": "quota.decision",
        "Log": "quota.ledger.log",
        "Session": "quota.session",
        "When": "quota.decision",
        "instrument": "quota.auto",
        "labels": "quota.terms.arguments",
        "open": "quota.session",
        "open_async": "quota.async_session",
        "uninstrument": "quota.auto",
    }

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module 'quota' has no attribute {name!r}")
        from importlib import import_module

        module = import_module(_FROM.get(name, "quota.errors"))
        globals()[name] = value = getattr(module, "open_session" if name == "open" else name)
        return value

    def __dir__():
        return __all__


__all__ = [
    "AsyncBudget",
    "AsyncSession",
    "BadAnswer",
    "Budget",
    "ConfigError",
    "CostBook",
    "CostExceedsLimit",
    "Decision",
    "Entry",
    "LedgerError",
    "Limit",
    "LimitState",
    "Log",
    "QuotaError",
    "Refused",
    "Session",
    "UnknownCharge",
    "UnknownMethod",
    "UsageError",
    "When",
    "instrument",
    "labels",
    "open",
    "open_async",
    "uninstrument",
]
