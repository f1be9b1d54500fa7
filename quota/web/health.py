"""The answer of /healthz: what an application needs, and whether it has it.

Check     one thing that it needs
health    all of them as status and document
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

Status = Literal["pass", "warn", "fail"]


class Check(NamedTuple):
    """One thing that the application needs. It passes, works with a fault, or fails. `says` is a line for people.

    `members` are figures for programs. Strangers may read all of it: no path, no secret, no name of a host.
    """

    name: str
    status: Status = "pass"
    says: str = ""
    members: Mapping[str, Any] = MappingProxyType({})


def health(checks: Iterable[Check]) -> tuple[int, dict[str, object]]:
    """The HTTP status and the document. 503 if a check fails: then a balancer sends requests elsewhere."""
    listed = list(checks)
    found = {check.status for check in listed}
    worst: Status = "fail" if "fail" in found else "warn" if "warn" in found else "pass"
    document: dict[str, object] = {
        "status": worst,
        "checks": {
            check.name: {"status": check.status, **({"says": check.says} if check.says else {}), **check.members}
            for check in listed
        },
    }
    return (503 if worst == "fail" else 200), document
