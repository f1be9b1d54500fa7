"""The findings of `quota check`: about the configuration, whether its ledger answers, and whether the allowance's
journal can be used. The check changes nothing.

What else may be wrong with the ledger and with this machine is the business of `quota doctor`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from quota.common.clock import host_clock, weekday
from quota.common.findings import Finding, Level, finding_of, ranked, warning
from quota.common.storage import obstacle
from quota.common.text import one_line
from quota.errors import ConfigError, LedgerError, UnusableLedger
from quota.session import Session, projects_left
from quota.settings.ageing import ageing
from quota.settings.lint import lint
from quota.settings.model import Settings
from quota.terms.costs import CostBook


def check(session: Session) -> list[Finding]:
    """All findings about a session's configuration, its ledger and its allowance, errors first."""
    return ranked(
        [
            *lint(session.settings),
            *ask_ledger(session.settings),
            *journal(session),
            *_renamed(session),
            *(finding for book in books_of(session) for finding in ageing(book, host_clock())),
        ]
    )


def books_of(session: Session) -> list[CostBook]:
    """The cost books of a session's credentials, each once."""
    return list({c.book.name: c.book for c in session.settings.credentials.values()}.values())


def journal(session: Session) -> list[Finding]:
    """Draws that cannot be noted stop no call that the ledger decides, so nothing else tells of it before an outage."""
    allowed, credentials = session.settings.ledger.unavailable, session.settings.credentials
    if allowed is None or not credentials:
        return []
    project = session.project(next(iter(credentials)))
    if project.journal is None:
        return []
    try:
        project.journal.draws.drawn(host_clock(), project.longest_ms)
    except LedgerError as error:
        return [finding_of("warning", "ledger.unavailable", error, "without it no call is admitted in an outage")]
    return []


def _renamed(session: Session) -> Iterator[Finding]:
    """A credential that got another name, and names no `project`, charges a budget of its own from then on."""
    for name, until_ms in projects_left(session):
        yield warning(
            "credentials",
            f"what was charged here for project {name!r} counts until {weekday(until_ms)}, and no credential has that "
            "project any more: one that was renamed has a new budget, and upstream sees the sum of both",
            f'if it is the same project upstream, add project = "{name}" to it',
        )


def ask_ledger(settings: Settings) -> list[Finding]:
    """Begin to read the log of every project, as each program does first; return what is wrong with the ledger.

    A ledger that every command will refuse, as one of another format, is an error; one that does not answer now is a
    warning. Does not create a missing ledger file.
    """
    from quota.ledger.factory import open_ledger

    url, path = settings.ledger.url, settings.ledger.file
    if path is not None:
        prevented = obstacle(path)
        if prevented is not None:
            why, remedy = prevented
            return [warning("ledger.url", f"ledger {one_line(url)} cannot be opened: {why}", remedy)]
        if not os.path.lexists(path):
            return []
    try:
        ledger = open_ledger(url)
    except ConfigError:  # `lint` reports it
        return []
    try:
        for project in {credential.project for credential in settings.credentials.values()}:
            ledger.begin(project)
    except LedgerError as error:
        level: Level = "error" if isinstance(error, UnusableLedger) else "warning"
        return [finding_of(level, "ledger.url", error, "see `quota doctor`")]
    finally:
        ledger.close()
    return []
