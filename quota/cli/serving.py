"""The commands that serve: dashboard shows a page, proxy passes requests on, charged and with the key."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

import quota
from quota.cli.options import config_option, host_option, port_option
from quota.cli.output import log_to_stderr, say
from quota.common.hosts import is_loopback
from quota.common.redact import register
from quota.common.text import show

if TYPE_CHECKING:
    from quota.web.documents import App

BIND = "127.0.0.1:8790"


@click.command("dashboard", short_help="Serve a page: verdict, limits, spending, freshness, runs.")
@host_option
@port_option(default=8770)
@config_option
def dashboard(host: str, port: int, config: str | None) -> None:
    """Serve a page that shows whether calls are admitted, what filled each limit, who spent it, and how fresh
    everything is.

    The page is for this machine only: it names jobs and spending. It charges nothing and changes nothing.
    `/metrics` has the metrics for Prometheus, `/healthz` whether the ledger answers. Ends on SIGTERM and Ctrl-C.

    \b
    Example:
      pip install 'quota-ledger[web]'           # once: it needs the extra `web`
      quota dashboard                           # then open http://127.0.0.1:8770
      quota dashboard --port 9000 --config /etc/quota.toml
      ssh -L 8770:127.0.0.1:8770 the-server     # to read it from elsewhere
    """
    from quota.web.lifecycle import address_of, listen, require_web, serve
    from quota.web.protection import names_of

    if not is_loopback(host):
        raise click.UsageError(
            f"--host {host}: the page names jobs and spending, so it is served to this machine only; "
            f"use ssh -L {port}:127.0.0.1:{port}"
        )
    require_web("jinja2")
    log_to_stderr()
    with quota.open(config) as session:
        listener = listen(host, port)
        address = address_of(listener)

        def app() -> App:
            from quota.dashboard.app import make_app

            return make_app(session, names_of(host))

        serve(app, listener, ready=lambda: say(f"quota dashboard: {address} ({session.settings.source})"))


@click.command("proxy", short_help="Pass requests of any program on, charged, with the key.")
@click.option("--bind", metavar="HOST:PORT", help=f"Where to listen; port 0 takes a free one.  [default: {BIND}]")
@click.option("--unix", metavar="PATH", help="Listen there instead, for this user alone.")
@click.option("--token", metavar="file:PATH", help="Callers send what is in this file as Quota-Token.")
@config_option
def proxy(bind: str | None, unix: str | None, token: str | None, config: str | None) -> None:
    """Pass requests of any program on to the APIs of the credentials: each is charged before it leaves.

    http://127.0.0.1:8790/CREDENTIAL/PATH becomes PATH of the credential's API, with its key: callers hold none. A
    refused request gets 429 with Retry-After, and nothing is sent. Quota-Job and Quota-Region say who spends.
    Links in an answer lead past it: a Python program that follows them runs with `quota exec --auto` instead.
    Other machines reach it only with --token. Ends on SIGTERM and Ctrl-C.

    \b
    Example:
      pip install 'quota-ledger[web]'           # once: it needs the extra `web`
      quota proxy
      curl http://127.0.0.1:8790/github/rate_limit
      quota proxy --unix /run/quota/proxy.sock
    """
    from quota.settings.references import read_key
    from quota.web.lifecycle import address_of, listen, listening_at, require_web, serve
    from quota.web.protection import names_of

    if bind is not None and unix is not None:
        raise click.UsageError("--bind and --unix: choose one")
    host, colon, port = (BIND if bind is None else bind).rpartition(":")
    if not (colon and port.isascii() and port.isdigit() and len(port) < 6):
        raise click.UsageError(f"--bind {show(bind)}: write an address and a port, as {BIND}")
    if token is not None and not token.startswith("file:"):
        raise click.UsageError("--token: write file:PATH; the token itself would be seen by every user")
    if token is None and unix is None and not is_loopback(host):
        raise click.UsageError(
            f"--bind {show(bind)}: others can reach it and would spend your units; give --token file:PATH"
        )
    secret = None if token is None else read_key(token, "token")
    register(secret)
    require_web("aiohttp")
    log_to_stderr()
    with quota.open(config) as session:  # what is wrong with it is said before anything is served
        source = session.settings.source
    with ExitStack() as stack:
        listener = stack.enter_context(listen(host, int(port)) if unix is None else listening_at(unix))
        address = address_of(listener)

        def app() -> App:
            from quota.proxy.app import make_app

            local = unix is None and is_loopback(host)
            return make_app(quota.open_async(config), names_of(host) if local else None, secret)

        serve(app, listener, ready=lambda: say(f"quota proxy: {address} ({source})"), passes_on=True)
