"""Where charges live: the contract, the embedded ledger (SQLite), the shared one (Redis). No driver is imported
here."""

from quota.ledger.contract import (
    Ask,
    Carry,
    Charge,
    Entry,
    Exhaustion,
    Ledger,
    Question,
    Verdict,
)

__all__ = ["Ask", "Carry", "Charge", "Entry", "Exhaustion", "Ledger", "Question", "Verdict"]
