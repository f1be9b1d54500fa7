"""The logs of projects, in memory, SQLite or Redis, under one contract.

log                the contract of every log, and the values that cross it. Read it first
state              facts, claims and places in a project's state: each change by a pure rule, on every log
factory            finds the ledger of a configuration, and opens it
sqlite_log         the log in a file or in memory; redis_log is the other
files              SQLite files: URLs, errors, and who else could change them
redis_url          the parts of a Redis url
redis_connection   connections to a server, its sentinels or a cluster
redis_errors       faults of a server and of TLS, in one line each
redis_needs        which server, settings and rights the ledger needs
"""
