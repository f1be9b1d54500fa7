"""The rules of a budget, pure: they read entries and numbers, and return numbers. Nothing here waits, or has a clock.

    entry     what the log holds
    total     what one limit counts: a running total over the log
    reading   what a process has read of one project's log, and the totals over it
    union     which entries two histories of one log have together
    facts     what changes seldom: closed buckets, grants

Whoever asks decides (`quota.budget`); a ledger only appends (`quota.ledger.log`).
"""
