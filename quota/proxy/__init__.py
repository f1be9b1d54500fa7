"""A reverse proxy that charges each request and holds the key, for programs that nobody changes.

    app        the application, and one request on its way: charges it, sends it, and reads its answer while it passes
    asked      reads a request: its target, what of it leaves, and the caller's side

`docs/proxy.md` has the answers that callers get.
"""
