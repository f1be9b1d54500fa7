"""How a budget comes to its decision: what to ask the ledger, what its answer means, what to correct afterwards."""
