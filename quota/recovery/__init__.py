"""Losing the ledger does not restore budget: what a machine saw of it, and what it may spend while none answers."""
