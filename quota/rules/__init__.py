"""The rules of a budget, pure: they read entries and numbers, and return numbers. Nothing here waits, or has a clock.

    entry      what the log holds: entries, each known by its key
    total      what one limit counts: a running total over the log
    reading    what a process has read of one project's log, and the totals over it
    calls      what a call costs, which limits count it, and what each may hold
    retry      when a refused call fits
    union      which entries two histories of one log have together
    spent      what was charged: each charge with what it counts now, and sums that never fall
    facts      what changes seldom, and decisions go by: closed buckets, grants
    claims     whose the regions of a job are
    refusals   what was refused, for people

Whoever asks decides (`quota.budget`); a ledger only appends (`quota.ledger.log`).
"""
