"""Rate limits for the visitors of any ASGI or WSGI application.

    app = asgi(app, load_rules())      # FastAPI, Starlette ...; quota.toml has the rules
    app = wsgi(app, load_rules())      # Flask, Django ...

    Rule, Limit, Rules                 rules in code: asgi(app, [Rule("search", Limit(100, 60_000), path="/search")])
    metrics_app                        an ASGI application that serves the metrics for Prometheus

Read in this order:

    rules.py, match.py, identity.py    which rule counts a request: its path, and who sends it
    contract.py                        the protocol of a storage
    algorithms.py                      counter, gcra and log, without I/O
    sqlite_storage.py, redis_storage.py    where the states are stored
    names.py, counting.py              the names of the states; the totals of a process
    deciding.py                        a decision within 0.25 s, whatever the storage does
    middleware.py, answers.py          the middleware, and the responses to clients
    configured.py, check.py            reads the rules in quota.toml; checks them for `quota check`
    storage.py, metrics.py             opens the storage; the metrics for operators

The gate never imports this package.
"""

from __future__ import annotations

from quota.inbound.configured import load_rules
from quota.inbound.contract import Limit
from quota.inbound.metrics import metrics_app
from quota.inbound.middleware import asgi, wsgi
from quota.inbound.rules import Rule, Rules

__all__ = ["Limit", "Rule", "Rules", "asgi", "load_rules", "metrics_app", "wsgi"]
