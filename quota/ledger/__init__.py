"""Where charges live: the contract, the embedded ledger (SQLite), the shared one (Redis). No driver is imported
here."""

from quota.ledger.contract import ChargeRequest, ChargeResult, Exhaustion, Ledger, LimitCheck
from quota.ledger.entry import Charge, Entry
from quota.ledger.unlogged import UnloggedUsage

__all__ = ["Charge", "ChargeRequest", "ChargeResult", "Entry", "Exhaustion", "Ledger", "LimitCheck", "UnloggedUsage"]
