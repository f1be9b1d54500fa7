"""Where charges live: the contract, the embedded ledger (SQLite), the shared one (Redis). No driver is imported
here."""

from quota.ledger.contract import Ask, Exhaustion, Ledger, Question, Verdict
from quota.ledger.entry import Charge, Entry
from quota.ledger.unlogged import Carry

__all__ = ["Ask", "Carry", "Charge", "Entry", "Exhaustion", "Ledger", "Question", "Verdict"]
