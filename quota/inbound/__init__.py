"""Limits for an application's own visitors, on any ASGI or WSGI application.

    app = asgi(app, load_rules())      # FastAPI, Starlette ...; the rules stand in quota.toml
    app = wsgi(app, load_rules())      # Flask, Django ...

    Rule, Limit, Rules                 rules in code: asgi(app, [Rule("search", Limit(100, 60_000), path="/search")])
    metrics_app                        an ASGI application that answers with the numbers for Prometheus

Read in this order:

    rules.py, match.py, identity.py    which rule a request falls under: its path, and who asks
    contract.py                        what a storage is asked and answers
    algorithms.py                      counter, gcra and log: pure
    sqlite_storage.py, redis_storage.py    where their states lie
    names.py, counting.py              under which names; what a process counts beside them
    deciding.py                        one decision in time, whatever the storage does
    middleware.py, answers.py          in front of an application, and what a client is told
    configured.py, check.py            the rules in quota.toml, and what `quota check` says of them
    storage.py, metrics.py             opens the storage; the numbers for operators

The gate never imports this package.
"""

from __future__ import annotations

from quota.inbound.configured import load_rules
from quota.inbound.contract import Limit
from quota.inbound.metrics import metrics_app
from quota.inbound.middleware import asgi, wsgi
from quota.inbound.rules import Rule, Rules

__all__ = ["Limit", "Rule", "Rules", "asgi", "load_rules", "metrics_app", "wsgi"]
