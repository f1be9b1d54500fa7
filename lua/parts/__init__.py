"""What several scripts share. `script` in `quota.ledger.redis_log` puts it where a script includes it."""
