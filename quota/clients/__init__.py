"""Upstream clients whose every HTTP attempt is charged before it leaves, and what upstream's errors mean."""
