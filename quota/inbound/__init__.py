"""Rate limits for the visitors of any ASGI or WSGI application.

    app = asgi(app, load_rules())      # FastAPI, Starlette ...; quota.toml has the rules
    app = wsgi(app, load_rules())      # Flask, Django ...

    Rule, Limit, Rules                 rules in code: asgi(app, [Rule("search", Limit(100, 60_000), path="/search")])
    metrics_app                        an ASGI application that serves the metrics for Prometheus

Read in this order:

    rules.py, identity.py              which rule counts a request: its path, and who sends it; opens the storage
    contract.py                        the protocol of a storage; the algorithms counter, gcra and log, without I/O
    sqlite_storage.py, redis_storage.py    where the states are stored
    names.py                           the names of the states, and how many identities are alive
    deciding.py                        a decision within 0.25 s, whatever the storage does; the counts of a process
    middleware.py                      the middleware, and the responses to clients
    configured.py                      reads the rules in quota.toml, and checks them for `quota check`
    metrics.py                         the metrics for operators

The gate never imports this package. Programs of users import these names alone. The keys, names and scripts in Redis
are shared with programs in other languages (lua/README.md): another format needs another prefix.
"""

from __future__ import annotations

from quota.inbound.configured import load_rules
from quota.inbound.contract import Limit
from quota.inbound.metrics import metrics_app
from quota.inbound.middleware import asgi, wsgi
from quota.inbound.rules import Rule, Rules

__all__ = ["Limit", "Rule", "Rules", "asgi", "load_rules", "metrics_app", "wsgi"]
