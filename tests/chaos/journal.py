"""What a worker says it did: one JSON line an event, in a file for each of its lives.

A line is one write to a file opened for appending, so a killed worker leaves whole lines, up to the last thing it did.

    token       a charge is about to be asked for under this token, for this call
    decision    the budget's answer, with the moment at which it was asked for
    answered    upstream's answer to a call is there
    failed      a call ended without an answer
    taking      the regions of a job are about to be taken over
    claim       the ledger's answer to a claim on the regions of a job, if there was one
    failed-run  a run gives its regions up
    fetched     the page of a region is there; stored: page and checkpoint are in the store
    tick        how a tick ended
    warning     what the library logged
    end         nothing more comes: this life was not cut short
"""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import quota
from quota.ledger.state import State
from quota.rules.entry import Keys
from quota.session import Session
from quota.settings.model import state_folder

if TYPE_CHECKING:
    from pathlib import Path

    from quota.budget import Budget
    from quota.deciding.project import Project
    from quota.rules.claims import Claim, Claimed, Ending
    from quota.settings.model import CredentialSettings, Settings


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Journal:
    def __init__(self, path: Path, life: str, ahead_ms: int = 0) -> None:
        """`ahead_ms`: so far is this process's clock ahead. Its journal is right all the same."""
        self._ahead_ms = ahead_ms
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._life = life
        self._calls = 0
        self.call = ""
        """The name of the call in hand. It travels as `quotaUser`, so that the wire shows it."""

    def note(self, event: str, **fields: Any) -> None:
        line = json.dumps({"ms": self.now_ms(), "event": event, **fields}, separators=(",", ":"))
        os.write(self._file, line.encode() + b"\n")

    def now_ms(self) -> int:
        return now_ms() - self._ahead_ms

    def next_call(self) -> str:
        self._calls += 1
        self.call = f"{self._life}.{self._calls}"
        return self.call


class NotedKeys(Keys):
    """Keys that are in the journal before anybody else sees them."""

    def __init__(self, journal: Journal, folder: Path) -> None:
        super().__init__(folder=folder)
        self._journal = journal

    def next(self) -> str:
        key = super().next()
        self._journal.note("token", token=key, call=self._journal.call)
        return key


class NotedSession(Session):
    """A session whose every decision is in the journal."""

    def __init__(self, settings: Settings, journal: Journal) -> None:
        super().__init__(settings)
        self._journal = journal
        self.keys = NotedKeys(journal, state_folder())

    def _project(self, chosen: CredentialSettings) -> Project:
        project = super()._project(chosen)
        if not isinstance(project.state, NotedState):
            state = project.state
            made = state.log, state.project, state.new_key, state.clock, state.note
            project.state = NotedState(*made, self._journal)
        return project

    def budget(self, credential: str | None = None) -> Budget:
        budget = super().budget(credential)
        if not isinstance(budget._decide, NotedDecide):
            budget._decide = NotedDecide(budget._decide, self._journal)  # type: ignore[method-assign]
        return budget


class NotedDecide:
    """`Budget._decide`, the one place that decides, with its answers noted."""

    def __init__(self, decide: Any, journal: Journal) -> None:
        self._decide, self._journal = decide, journal

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        asked_ms = self._journal.now_ms()
        decisions = self._decide(*args, **kwargs)
        decision = decisions[0]
        self._journal.note(
            "decision",
            asked_ms=asked_ms,
            call=self._journal.call,
            commit=kwargs.get("commit"),
            admitted=decision.admitted,
            id=decision.id,
            source=decision.source,
            reason=decision.reason,
            refused_by=decision.refused_by,
            units=decision.cost_units,
            at_ms=decision.decided_at_ms,
            used={state.name: state.used_units for state in decision.limits},
            by_ledger=bool(decision.limits) or decision.reason in ("exhausted", "closed", "clock", "counting"),
            detail=decision.detail[:80],
        )
        return decisions


@dataclass(frozen=True)
class NotedState(State):
    """The state of a project. What is asked of claims is noted with the answers, and which runs give their regions
    up."""

    journal: Journal | None = None

    def claim(self, claim: Claim, *, take_over: bool = False) -> Claimed:
        assert self.journal is not None
        asked = {"job": claim.name, "run": claim.run, "regions": claim.regions, "took_over": take_over}
        if take_over:
            self.journal.note("taking", **asked)
        try:
            claimed = super().claim(claim, take_over=take_over)
        except quota.LedgerError:
            self.journal.note("claim", **asked, answered=False)
            raise
        self.journal.note("claim", **asked, answered=True, at_ms=claimed.now_ms, away=sorted(claimed.elsewhere))
        return claimed

    def end_claim(self, claim: Claim, ending: Ending) -> None:
        assert self.journal is not None
        if ending == "failed":
            self.journal.note("failed-run", job=claim.name)
        super().end_claim(claim, ending)


class NotedWarnings(logging.Handler):
    def __init__(self, journal: Journal) -> None:
        super().__init__(logging.WARNING)
        self._journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        self._journal.note("warning", text=record.getMessage()[:300])
