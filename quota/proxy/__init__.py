"""The gate for programs that nobody changes: a reverse proxy that charges each request and holds the key.

`docs/proxy.md` says what its callers see.
"""
