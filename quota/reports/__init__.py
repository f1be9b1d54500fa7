"""What people and programs are told of budgets, as data; `quota.cli` and `quota.dashboard` show it.

status     how full each limit is, and what upstream closed
spending   who spent the budget, and which calls were refused
runs       how runs of jobs ended, and what their pages brought
metrics    all of that for Prometheus
notify     tells a command or an address what happened
"""
