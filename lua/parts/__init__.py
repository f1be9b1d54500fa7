"""What several scripts share. `quota.ledger.redis_scripts` puts it where a script includes it."""
