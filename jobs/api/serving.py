"""`quota serve`: where it may listen, and the rules and host check before the application."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from ipaddress import ip_address

import quota
from quota.cli.options import Listen
from quota.common.hosts import is_loopback
from quota.common.text import show
from quota.errors import UsageError
from quota.inbound.configured import rules_of
from quota.inbound.middleware import asgi
from quota.inbound.rules import Rules
from quota.jobs.api.app import make_app
from quota.settings.model import Settings
from quota.web.documents import App
from quota.web.lifecycle import address_of, listen, serve
from quota.web.protection import names_of, protected

ASKED = ("/api/v1/videos/trending", "/api/v1/videos/ID", "/api/v1/search", "/api/v1/channels/ID")
"""The paths that rules must limit before the server listens for other machines."""

_HOST_NAME = re.compile(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")

NOT_LIMITED = ("/healthz",)
"""The paths that no rule counts: supervisors call /healthz often."""

POLICY = "default-src 'none'; frame-ancestors 'none'"
"""The answers are for programs. A browser that shows one loads nothing for it."""


def run_api(
    config: str | None,
    listen_at: Listen,
    *,
    names: Sequence[str],
    unlimited: bool,
    say: Callable[[str], object],
) -> None:
    """Serve until a signal ends it. `say` prints the line with the address. Raises QuotaError."""
    host, port = listen_at
    with quota.open(config) as session:  # a mistake in the configuration ends the command before it listens
        settings = session.settings
    rules = rules_of(settings, exempt=NOT_LIMITED)
    if not is_loopback(host) and not unlimited and (path := _not_limited(rules)) is not None:
        raise UsageError(
            f"--listen {listen_at}: other machines can reach it, and no rule limits {path}: write [inbound.NAME] in "
            f"{settings.source}, or set --unlimited"
        )
    hosts = {*map(_host_name, names), *(names_of(host) if is_loopback(host) else ())}

    def make() -> App:
        session = quota.open(config)
        return protected(_limited(make_app(session), session.settings), hosts=hosts or None, policy=POLICY)

    with listen(host, port) as listener:
        address = address_of(listener)
        serve(make, listener, ready=lambda: say(f"quota serve: {address} ({settings.source})"))


def _host_name(text: str) -> str:
    """A name as the Host field has it, without the port. Raises UsageError for other text."""
    name = text.lower().removesuffix(".")
    if _HOST_NAME.fullmatch(name):
        return name
    try:
        return str(ip_address(name.strip("[]")))
    except ValueError:
        raise UsageError(
            f"--hostname {show(text)}: write only the name that clients send in Host, for example api.example.org"
        ) from None


def _not_limited(rules: Rules | None) -> str | None:
    """The first path that no rule limits; None if all have a rule. A shadow rule limits nothing."""
    for path in ASKED:
        if all(rule.shadow for rule in (() if rules is None else rules.find("GET", path))):
            return path
    return None


def _limited(app: App, settings: Settings) -> App:
    """The application behind the rules of the configuration, if there are any."""
    rules = rules_of(settings, exempt=NOT_LIMITED)
    return app if rules is None else asgi(app, rules)
