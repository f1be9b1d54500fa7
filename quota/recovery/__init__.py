"""No budget is regained: what a machine saw of a ledger that lost it, and what may be spent while none answers."""
