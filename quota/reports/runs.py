"""One run of a job: as `quota run` reports it, as the store keeps it, and as the page shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RegionOfRun:
    """How one region ended in one run. `items`, `pages` and `units` are what this run added.

    done      the pass is complete
    partial   a part of this pass is stored; the next run continues from `cursor`
    skipped   nothing of this pass is stored; the next run starts it
    failed    `error` names the error that ended the pass; the other regions continued
    """

    region: str
    outcome: str
    items: int = 0
    pages: int = 0
    units: int = 0
    cursor: Mapping[str, Any] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Run:
    """How one run ended. `regions` are those that the run covered: after an earlier stop, only the ones left over.

    `attempts` counts the HTTP attempts that were charged, and `units` is their cost. `why` is one line for people.
    `refusal` is the decision that ended it, as `quota charge --json` prints it. The store adds the rest: `ended_ms` is
    None for a run that has not ended, and so is its `exit_status`; `key` names it in an address.
    """

    run: str
    job: str
    outcome: str
    regions: tuple[RegionOfRun, ...] = ()
    units: int = 0
    attempts: int = 0
    refused_by: str | None = None
    retry_at_ms: int | None = None
    why: str = ""
    exit_status: int | None = 0
    refusal: Mapping[str, Any] | None = field(default=None, compare=False)
    project: str = ""
    began_ms: int = 0
    ended_ms: int | None = None
    key: str = ""
