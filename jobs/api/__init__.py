"""The API over the store: what the jobs fetched, for everybody whom the configuration lets ask.

It reads the store, and asks the ledger only whether it is there. It never spends quota.

    serving       `quota serve`: where it may listen, and what stands before the application
    app           the application
    parameters    what a request asks for, and where a list goes on
    resources     rows of the store as upstream's own resources
    health        /healthz
"""
