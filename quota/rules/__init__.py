"""The rules of a budget, pure: they take entries and numbers, and return numbers. Nothing here waits, or has a
clock of its own.

    entry      the entries of a log, which their keys identify
    total      the running total of one limit over the log
    reading    the part of a log that a process has read, and the totals over it
    calls      the price of a call, the limits that count it, and their caps
    retry      the time when a refused call fits
    union      the union of two histories of one log
    spent      charges with their current units, and sums that never fall
    facts      closed buckets and grants: they seldom change, and every decision reads them
    claims     the stores that hold the regions of a job
    refusals   refused calls, for people

The process that asks also decides (`quota.budget`); a ledger only appends (`quota.ledger.log`).
"""
