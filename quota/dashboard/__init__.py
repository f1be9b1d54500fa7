"""The page for whoever operates this: `quota dashboard`. Reads the ledger, and serves what it read as HTML."""
