"""Where charges live: the names of the contract. `quota.ledger.factory` opens a ledger; no driver is imported here."""

from quota.ledger.contract import ChargeRequest, ChargeResult, Exhaustion, Ledger, LimitCheck
from quota.ledger.entry import Charge, Entry
from quota.ledger.unlogged import UnloggedUsage

__all__ = ["Charge", "ChargeRequest", "ChargeResult", "Entry", "Exhaustion", "Ledger", "LimitCheck", "UnloggedUsage"]
