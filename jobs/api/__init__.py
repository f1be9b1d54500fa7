"""`quota serve`: a read-only HTTP API over the store. It never spends quota; only /healthz asks the ledger.

serving       where the server may listen, its rules and host names
app           the application
parameters    the parameters and cursors of requests
resources     rows of the store as upstream's resources
health        /healthz
"""
