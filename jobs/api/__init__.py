"""The API over the store: what the jobs fetched, for everybody whom the configuration lets ask.

It reads the store, and asks the ledger only whether it is there. It never spends quota.
"""
