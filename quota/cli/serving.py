"""The commands that serve: `dashboard` shows a page, `proxy` charges requests and passes them on with the key."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import click

import quota
from quota.cli.options import PATH, Listen, Options, apart, listen_option, shared
from quota.cli.output import announce, log_to_stderr
from quota.common.hosts import is_loopback
from quota.common.redact import register

PROXY_LISTENS = Listen("127.0.0.1", 8790)
DASHBOARD_LISTENS = Listen("127.0.0.1", 8770)


@click.command("dashboard", short_help="Serve a page with limits, spending, freshness and runs.")
@listen_option(DASHBOARD_LISTENS)
@shared(Options.config)
def dashboard(listen_at: Listen, config: str | None) -> None:
    """Serve a page: whether calls are admitted, what filled each limit, who spent how much, how fresh the store is.

    Only this machine can open the page, because it names jobs and spending. The server charges and changes nothing.
    `/metrics` is for Prometheus; `/healthz` warns while part of the page is unreadable. SIGTERM and Ctrl-C end it.

    \b
    Example:
      pip install 'quota-ledger[web]'           # once: it needs the extra `web`
      quota dashboard                           # then open http://127.0.0.1:8770
      quota dashboard --listen 127.0.0.1:9000 --config /etc/quota.toml
      ssh -L 8770:127.0.0.1:8770 the-server     # to read it from elsewhere
    """
    from quota.web.serving import address_of, listen, names_of, require_web, serve

    host, port = listen_at
    if not is_loopback(host):
        raise click.UsageError(
            f"--listen {listen_at}: the page names jobs and spending, so it is for this machine only; "
            f"use ssh -L {port}:127.0.0.1:{port}"
        )
    require_web("jinja2")
    from quota.dashboard.app import make_app

    log_to_stderr()
    with quota.open(config) as session:
        listener = listen(host, port)
        address = address_of(listener)
        app = partial(make_app, session, names_of(host))
        serve(app, listener, ready=lambda: announce(f"quota dashboard: {address} ({session.settings.source})"))


@click.command("proxy", short_help="Charge requests of any program, and pass them on.")
@listen_option(PROXY_LISTENS, required=False)
@click.option("--unix", metavar="PATH", type=PATH, help="Listen on this socket instead, for this user alone.")
@click.option("--token", metavar="file:PATH", help="Callers must send the text of this file as Quota-Token.")
@shared(Options.config)
def proxy(listen_at: Listen | None, unix: str | None, token: str | None, config: str | None) -> None:
    """Charge requests from any program, and pass them on to the APIs of the credentials.

    A request to http://127.0.0.1:8790/CREDENTIAL/PATH goes to PATH of the credential's API, and the proxy adds the key.
    A refused request is not sent and gets 429 with Retry-After. The headers Quota-Job and Quota-Region say who spends.

    Links in an answer bypass the proxy. If a Python program follows them, run it with `quota exec --auto`. To let
    other machines in, set --token. Restart the proxy after a change of the configuration. SIGTERM and Ctrl-C end it.

    \b
    Example:
      pip install 'quota-ledger[web]'           # once: it needs the extra `web`
      quota proxy
      curl http://127.0.0.1:8790/github/rate_limit
      quota proxy --unix /run/quota/proxy.sock
    """
    from quota.settings.references import read_key
    from quota.web.serving import address_of, listen, listening_at, names_of, require_web, serve

    apart(listen=listen_at, unix=unix)
    host, port = listen_at or PROXY_LISTENS
    if token is not None and not token.startswith("file:"):
        raise click.UsageError("--token: write file:PATH; every user of this machine could see the token itself")
    if token is None and unix is None and not is_loopback(host):
        raise click.UsageError(
            f"--listen {listen_at}: others can reach it and would spend your units; give --token file:PATH"
        )
    secret = None if token is None else read_key(token, "token")
    register(secret)
    require_web("aiohttp")
    from quota.proxy.app import make_app

    log_to_stderr()
    session = quota.open_async(config)  # a wrong configuration fails before the server listens
    with ExitStack() as stack:
        listener = stack.enter_context(listen(host, port) if unix is None else listening_at(unix))
        address = address_of(listener)
        hosts = names_of(host) if unix is None and is_loopback(host) else None
        app, source = partial(make_app, session, hosts, secret), session.settings.source
        serve(app, listener, ready=lambda: announce(f"quota proxy: {address} ({source})"), passes_on=True)
