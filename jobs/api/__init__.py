"""`quota serve`: a read-only HTTP API over the store. It never spends quota; only /healthz asks the ledger.

app           the application, where the server may listen, and /healthz
parameters    the parameters and cursors of requests
resources     rows of the store as upstream's resources
"""
