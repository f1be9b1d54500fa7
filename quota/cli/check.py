"""What `quota check` finds: what the configuration says, and what its ledger answers. Changes nothing.

ask_ledger       whether the ledger answers
young_windows    which limits that ledger does not yet count in full
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from quota.common.clock import rfc3339
from quota.common.text import one_line
from quota.errors import ConfigError, LedgerError
from quota.settings.lint import Finding, lint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quota.session import Session
    from quota.settings.model import Settings


def check(session: Session) -> list[Finding]:
    """Everything there is to say about a session's configuration."""
    return [*lint(session.settings), *ask_ledger(session.settings), *young_windows(session)]


def ask_ledger(settings: Settings) -> list[Finding]:
    """A warning if the ledger does not answer what every decision asks first. A file that is not there is not made."""
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
    except ConfigError:  # `lint` says so
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
        if ledger.shared:
            from quota.ledger.redis_ledger import RedisLedger, evicts

            assert isinstance(ledger, RedisLedger)  # noqa: S101  # the only kind that is shared
            policy = ledger.eviction_policy(credential.project)
            if policy != "noeviction":
                return [Finding("warning", "ledger.url", *evicts(policy))]
    except LedgerError as error:
        message, _, remedy = str(error).partition("; ")
        return [Finding("warning", "ledger.url", message, remedy or "no call is admitted until it does")]
    finally:
        ledger.close()
    return []


_EFFECTIVE = os.access in os.supports_effective_ids


def _unasked(url: str, why: str, remedy: str) -> Finding:
    return Finding("warning", "ledger.url", f"ledger {one_line(url)} cannot be opened: {why}", remedy)


def young_windows(session: Session) -> Iterator[Finding]:
    """The limits over whose windows the ledger's log does not reach back; of a ledger that does not answer, none."""
    from quota.status import exact_from

    url = session.settings.ledger.url
    if url.startswith("sqlite:") and not os.path.exists(url.removeprefix("sqlite:///")):  # asking would make it
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
