"""What `quota costs --new NAME --from ANSWER` writes: a cost book to begin with, from the headers of recorded answers.

It has no number that no answer has. What is missing is 0 or "", which `quota costs --check` refuses with its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import urlsplit

from quota.cli.tried import Recorded, read_answer
from quota.common.clock import host_clock, utc
from quota.settings.toml import in_toml

_ABOUT = re.compile(r"(?i)rate-?limit|quota")
_FIGURES = {"remaining": "remaining|left", "reset": "reset", "bucket": "resource|bucket", "limit": "-limit$|max"}
_FORMS = {
    "epoch": r"[0-9]{9,12}(\.[0-9]+)?",
    "seconds": r"[0-9]{1,8}(\.[0-9]+)?",
    "duration": r"([0-9.]+(ms|[smhd]))+",
    "rfc3339": r"[0-9]{4}-[0-9]{2}-[0-9]{2}T.*",
    "http-date": r"[A-Z][a-z]{2}, .*GMT",
}
_REFUSED = (403, 429)


def draft(name: str, paths: Iterable[str]) -> str:
    """The text of a cost book. Raises ConfigError for a file that has no answer."""
    answers = [read_answer(path) for path in paths]
    figures = _figures(answers)
    hosts = sorted({_host(one.request) for one in answers} - {""})
    limit = next((one.headers[figures["limit"]] for one in answers if figures.get("limit", "") in one.headers), "")
    units = f"{int(limit):_}" if re.fullmatch("[0-9]{1,15}", limit) else "0"
    lines = [
        "# What is counted, and for whom; the page of each number; what differs by plan; what is not expressed.",
        "",
        f"api = {in_toml(name)}",
        f"hosts = [{', '.join(map(in_toml, hosts))}]",
        'source = ""  # the vendor\'s page',
        f"read_on = {utc(host_clock()).date()}",
        "",
        "[buckets.requests]",
        f"quota = {units}" + ("  # as an answer says; is it so on the page?" if limit else ""),
        'resets = ""  # "1h", or { calendar = "day", zone = "UTC" }',
        "",
        "[default]",
        "get = 1",
        "other = 1",
        "",
        "[methods]",
        "read = 1",
        "write = 1",
        "",
        "[routes]",
        '"GET /**" = "read"',
        '"**" = "write"',
        "",
        "[answers]",
        *(f"{what} = {_field(what, header, answers)}" for what, header in figures.items() if "remaining" in figures),
        *_closed(answers, timed="reset" in figures),
    ]
    return "\n".join(lines) + "\n"


def _host(request: str) -> str:
    """Where a recorded request went, without the password that its address may hold; empty where it has none."""
    with suppress(ValueError):
        return urlsplit(request.rpartition(" ")[2]).netloc.rpartition("@")[2]
    return ""


def _figures(answers: list[Recorded]) -> dict[str, str]:
    """Which header says what."""
    found: dict[str, str] = {}
    names = dict.fromkeys(header for one in answers for header in one.headers if _ABOUT.search(header))
    for header in names:
        what = next((what for what, words in _FIGURES.items() if re.search(words, header, re.IGNORECASE)), None)
        if what is not None:
            found.setdefault(what, header)
    return {what: found[what] for what in ("remaining", "limit", "reset", "bucket") if what in found}


def _field(what: str, header: str, answers: list[Recorded]) -> str:
    if what != "reset":
        return in_toml(header)
    value = next(one.headers[header] for one in answers if header in one.headers)
    form = next((form for form, pattern in _FORMS.items() if re.fullmatch(pattern, value.strip())), "")
    return f"{{ header = {in_toml(header)}, as = {in_toml(form)} }}"


def _closed(answers: list[Recorded], *, timed: bool) -> list[str]:
    """A rule for each status that refuses. It lasts a minute where no answer says how long."""
    statuses = dict.fromkeys(one.status for one in answers if one.status in _REFUSED)
    lasts = "" if timed else ', lasts = "60s"'
    rules = [
        f"    {{ status = {status}{lasts} }},  # not every {status}? Name its `body` or `json`." for status in statuses
    ]
    return ["closed = [", *rules, "]"] if rules else []
