"""Limits for an application's own visitors, on any ASGI or WSGI application. Read `quota.inbound.rules` first.

    app = asgi(app, load_rules())      # FastAPI, Starlette ...; the rules stand in quota.toml
    app = wsgi(app, load_rules())      # Flask, Django ...

    Rule, Limit, Rules                 rules in code: asgi(app, [Rule("search", Limit(100, 60_000), path="/search")])
    metrics_app                        an ASGI application that answers with the numbers for Prometheus

The gate never imports this package.
"""

from __future__ import annotations

from quota.inbound.configured import load_rules
from quota.inbound.contract import Limit
from quota.inbound.metrics import metrics_app
from quota.inbound.on_asgi import asgi
from quota.inbound.on_wsgi import wsgi
from quota.inbound.rules import Rule, Rules

__all__ = ["Limit", "Rule", "Rules", "asgi", "load_rules", "metrics_app", "wsgi"]
