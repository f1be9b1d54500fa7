"""Where the logs of projects lie: memory, SQLite and Redis keep one contract.

log                the contract of every log, and the values that cross it. Read it first
state              what changes seldom in a project's state: each change by a pure rule, on every log
factory            which ledger a configuration means, and how it is opened
memory_log         the shortest log; sqlite_log and redis_log are the others
files              SQLite files: their URLs, their errors, who else could change them
redis_url          what a url of Redis names
redis_connection   connections to a server, its sentinels or a cluster
redis_tls          what may be wrong with TLS
redis_errors       what goes wrong with a server, in one line each
redis_needs        what a server must be, and its user allowed to do
"""
