"""The page for operators: `quota dashboard`. Reads the ledger, and serves what it read as HTML."""
