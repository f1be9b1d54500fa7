"""The gate for programs that nobody changes: a reverse proxy that charges each request and holds the key.

    app        the application: whose request it is, health, metrics
    asked      what a request asks for, what of it leaves, and its caller's side
    passage    one request on its way: charged, sent, and its answer read while it passes
    mask       blots out a secret that an answer says back

`docs/proxy.md` says what its callers see.
"""
