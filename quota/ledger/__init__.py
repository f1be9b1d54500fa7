"""Where the logs of projects lie: `quota.ledger.log` is the contract, and memory, SQLite and Redis keep it."""
