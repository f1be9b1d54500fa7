"""`quota serve`: a read-only HTTP API over the store. It never spends quota; only /healthz asks the ledger.

app     the application, where the server may listen, and /healthz
wire    what stands in a request and in its answer
"""
