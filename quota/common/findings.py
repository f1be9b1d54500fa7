"""What `quota check` and `quota doctor` find: a verdict on one thing, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from quota.common.redact import redact

Level = Literal["error", "warning", "ok"]

LEVELS: tuple[Level, ...] = ("error", "warning", "ok")
"""From what needs attention first."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One verdict: what it is about, what was seen, and, unless it is `ok`, the remedy.

    An `error` makes work fail or spends too much; a `warning` may be intended.
    """

    level: Level
    location: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level}: {self.location}: {self.message}" + (f"; {self.remedy}" if self.remedy else "")

    def as_json(self) -> dict[str, str]:
        return {"level": self.level, "location": self.location, "message": self.message, "remedy": self.remedy}


def warning(location: str, message: str, remedy: str = "") -> Finding:
    """A finding of something that may be intended."""
    return Finding("warning", location, message, remedy)


def finding_of(level: Level, location: str, said: object, remedy: str = "") -> Finding:
    """The finding for an error that says "what is wrong; what to do". `remedy` is for one that names none."""
    message, _, named = redact(str(said)).partition("; ")
    return Finding(level, location, message, named or remedy)


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first, then warnings, then what is fine; otherwise in the order given."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))
