"""Every error this library raises on purpose.

    QuotaError                      one line: what is wrong, what to do
    ├── ConfigError                 78  the configuration cannot be used
    ├── UsageError                   2  the caller made a mistake
    │   ├── UnknownMethod               the cost book has no price for it
    │   ├── CostExceedsLimit            no waiting will ever make it fit
    │   └── SessionClosedError          the session was closed before
    ├── Refused                     75  the budget said no; carries the decision
    ├── LedgerError                 69  the ledger could not answer
    │   └── UnusableLedger              it never will: another format, another program's, damaged, a wrong password
    │       └── OtherApi            78  it has charges of another API under the project's name
    ├── StorageAway                 69  the storage of inbound limits could not answer
    ├── BadAnswer                    1  upstream's answer is too large, too slow, or not what the API promises
    └── UnknownCharge                1  no such charge, or it is too old to correct

The command line exits with `exit_status`. No error derives from OSError: the Google client retries OSErrors, with
sleeps, and a refusal must end the work at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from quota.decision import Decision


class QuotaError(Exception):
    """The base of all errors. `str(error)` is one line for an operator."""

    exit_status: ClassVar[int] = 1


class ConfigError(QuotaError):
    """The configuration cannot be used. The message names file, key and remedy. If it names several `mistakes`, each of
    them is also a line of its own."""

    exit_status = 78
    mistakes: tuple[str, ...] = ()


class UsageError(QuotaError):
    """The caller made a mistake, whatever the budget: fix the caller."""

    exit_status = 2


class UnknownMethod(UsageError):
    """The cost book has no price for this method. Name a method of the book, or give the units."""


class CostExceedsLimit(UsageError):
    """One call costs more than a limit can ever hold: waiting does not help."""


_CLOSED = (
    "this session is closed; open another one with quota.open() or quota.open_async(); "
    "a call that was under way may be charged"
)


class SessionClosedError(UsageError):
    """The session is closed."""

    def __init__(self, message: str = _CLOSED) -> None:
        super().__init__(message)


class ClosedLedger:
    """Stands in for the ledger of a closed session."""

    def __getattr__(self, name: str) -> Any:
        raise SessionClosedError


class LedgerError(QuotaError):
    """The ledger could not answer, so nothing was admitted. `str(error)` names it and the remedy."""

    exit_status = 69


class UnusableLedger(LedgerError):
    """The ledger answers, but no command of this configuration can use it. Another try does not help."""


class OtherApi(UnusableLedger):
    """The ledger has charges of another API under this project's name: the configuration is wrong."""

    exit_status = ConfigError.exit_status


class StorageAway(QuotaError):
    """The storage of inbound limits did not answer, or not in time: nobody knows whether the request was counted.

    `str(error)` names the storage and the remedy.
    """

    exit_status = 69


class BadAnswer(QuotaError):
    """Upstream's answer is too large, too slow, or not what the API promises. The attempt stays charged.

    A client without bounds raises it only for redirects that lead nowhere: see `quota.clients.google.service`.
    """


class NoAnswer(BadAnswer):
    """The answer was not complete in time, or did not come from the API."""


class UnknownCharge(QuotaError):
    """No charge has this id, or it left the log: corrections reach back as far as the log does."""


class Refused(QuotaError):
    """The call was not admitted, and nothing left the machine. Nothing was charged, unless `decision.reason` is
    "ledger-unavailable": a ledger whose answer was lost may count the call as spent.

    Stop, keep what you have, and come back at `decision.retry_at` (None: nobody knows when). Give a scheduler
    `decision.when()`.
    """

    exit_status = 75

    def __init__(self, decision: Decision) -> None:
        tell = getattr(decision, "sentence", None)  # a program's own tests may raise it with anything
        super().__init__(decision if tell is None else tell())  # so that `args` and `repr` have the sentence, too
        self.decision = decision

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.decision,), self.__dict__


def decision_status(decision: Decision) -> int:
    """The exit status for a decision."""
    if decision.admitted:
        return 0
    if decision.misconfigured:
        return ConfigError.exit_status
    return LedgerError.exit_status if decision.reason == "ledger-unavailable" else Refused.exit_status


def behind(error: BaseException) -> Iterator[BaseException]:
    """An error, and all errors behind it, also those in its attributes."""
    seen: dict[int, BaseException] = {}
    left: list[object] = [error]
    while left:
        cause = left.pop()
        if isinstance(cause, BaseException) and id(cause) not in seen:
            seen[id(cause)] = cause
            yield cause
            left += [cause.__cause__, cause.__context__, *vars(cause).values()]
            if isinstance(cause, BaseExceptionGroup):
                left += cause.exceptions
