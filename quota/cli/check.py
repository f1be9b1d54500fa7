"""The findings of `quota check`, about the configuration and its ledger. The check changes nothing.

ask_ledger       checks whether the ledger answers
young_windows    finds the limits that the ledger cannot yet count over their whole window
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from quota.common.clock import rfc3339
from quota.common.text import one_line
from quota.errors import ConfigError, LedgerError, UnusableLedger
from quota.settings.lint import Finding, lint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quota.session import Session
    from quota.settings.lint import Level
    from quota.settings.model import Settings


def check(session: Session) -> list[Finding]:
    """All findings about a session's configuration and its ledger, errors first."""
    findings = [*lint(session.settings), *ask_ledger(session.settings), *young_windows(session)]
    return sorted(findings, key=lambda finding: finding.level)  # "error" < "warning"; the sort is stable


def ask_ledger(settings: Settings) -> list[Finding]:
    """Read the usage of every project, as each decision does first; return what is wrong with the ledger.

    A ledger that every command will refuse, as one of another format, is an error; one that does not answer now is a
    warning, and so is what may make it lose charges. Does not create a missing ledger file.
    """
    from quota.budget import Budget
    from quota.ledger.factory import open_ledger

    url = settings.ledger.url
    if url.startswith("sqlite:"):
        file = Path(url.removeprefix("sqlite:///"))
        there = next(path for path in (file, *file.parents) if os.path.lexists(path) or path == path.parent)
        if there != file and not there.is_dir():
            return [_unasked(url, f"{one_line(there)} is no folder", "correct the path")]
        if not os.access(there, os.W_OK | os.X_OK * (there != file), effective_ids=_EFFECTIVE):
            return [_unasked(url, f"this user may not write to {one_line(there)}", "correct the path, or its owner")]
        if there != file:
            return []
    try:
        ledger = open_ledger(url)
    except ConfigError:  # `lint` reports it
        return []
    try:
        for credential in {c.project: c for c in settings.credentials.values()}.values():
            Budget(
                credential=credential.name,
                project=credential.project,
                book=credential.book,
                limits=credential.limits,
                ledger=ledger,
            ).usage()
        return [Finding("warning", "ledger.url", *risk) for risk in ledger.risks(credential.project)]
    except LedgerError as error:
        message, _, remedy = str(error).partition("; ")
        level: Level = "error" if isinstance(error, UnusableLedger) else "warning"
        return [Finding(level, "ledger.url", message, remedy or "no call is admitted until it does")]
    finally:
        ledger.close()


_EFFECTIVE = os.access in os.supports_effective_ids


def _unasked(url: str, why: str, remedy: str) -> Finding:
    return Finding("warning", "ledger.url", f"ledger {one_line(url)} cannot be opened: {why}", remedy)


def young_windows(session: Session) -> Iterator[Finding]:
    """Find the limits whose window begins before the ledger's log does. Stops if the ledger does not answer."""
    from quota.status import exact_from

    url = session.settings.ledger.url
    if url.startswith("sqlite:") and not os.path.exists(url.removeprefix("sqlite:///")):  # a query would create it
        return
    for credential in session.settings.credentials.values():
        try:
            since_ms, now_ms = session.ledger.whole_after_ms(credential.project), session.ledger.now_ms()
        except LedgerError:
            return
        for index, limit in enumerate(credential.limits):
            exact_ms = exact_from(limit.view.window, since_ms, now_ms)
            if exact_ms is not None:
                yield Finding(
                    "warning",
                    f"credentials.{credential.name}.limits[{index}]",
                    f"limit {limit.name!r} counts since {rfc3339(since_ms)}, exact from {rfc3339(exact_ms)}: no window "
                    "was so long before, and the ledger has let go of what is older",
                    "until then leave as much more headroom as was spent before",
                )
