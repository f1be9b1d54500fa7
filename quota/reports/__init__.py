"""Reports on budgets for people and programs, as data. `quota.wording` turns them into text, `quota.cli` and
`quota.dashboard` show them.

status     how full each limit is, and which buckets upstream closed
spending   who spent the budget, and which calls were refused; a charge, and each limit before and after it
refusal    why a call was refused, who filled its limit, and the changes that would have admitted it
runs       what jobs add: how their runs ended, what their pages brought, parts of the dashboard
metrics    all of that for Prometheus
notify     sends events to a command or an address
"""
