"""Reports on budgets for people and programs, as data. `quota.cli` and `quota.dashboard` show them.

status     how full each limit is, and which buckets upstream closed
spending   who spent the budget, and which calls were refused
runs       how runs of jobs ended, and what their pages brought
metrics    all of that for Prometheus
notify     sends events to a command or an address
"""
