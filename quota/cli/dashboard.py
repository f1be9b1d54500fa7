"""`quota dashboard`: serves the page to this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from quota.cli.options import config_option, host_option, port_option
from quota.cli.output import log_to_stderr, say

if TYPE_CHECKING:
    from quota.web.problem import App


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
    import quota
    from quota.common.hosts import is_loopback
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
