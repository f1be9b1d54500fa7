"""Lua scripts, one atomic operation a file. Read them through `quota.ledger.redis_log`."""
