"""Recorded answers, and drafts of cost books from them: `quota book try` and `quota book new`.

A draft has no number that no answer has: it has 0 or "" there, and `quota book check` names the line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from string import Template
from typing import NamedTuple
from urllib.parse import urlsplit

from quota.common.clock import host_clock, utc
from quota.common.files import read_named, read_text
from quota.common.text import one_line
from quota.errors import ConfigError
from quota.settings.toml import in_toml
from quota.terms.arguments import check_name
from quota.terms.limits import SECOND_MS, format_duration


class Recorded(NamedTuple):
    """An answer in a file, with its `request` if the file has that."""

    status: int
    headers: dict[str, str]
    body: bytes
    request: str


def read_answer(path: str) -> Recorded:
    """The answer in a file, `{"status": 403, "headers": {...}, "body": ...}`. The body is text or JSON; a header that
    was sent twice is a list. Raises ConfigError for any other file."""
    source = one_line(path)
    try:
        answer = json.loads(read_named(path, 1 << 20))
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):  # not JSON
        answer = None
    answer = answer if isinstance(answer, dict) else {}
    status, headers, body = answer.get("status"), answer.get("headers", {}), answer.get("body", "")
    if type(status) is not int or not 100 <= status <= 599 or not isinstance(headers, dict):
        raise ConfigError(f'{source}: not an answer; write {{"status": 403, "headers": {{...}}, "body": ...}}')
    request = answer.get("request")
    return Recorded(
        status,
        {name: ", ".join(map(_text, value if isinstance(value, list) else [value])) for name, value in headers.items()},
        _text(body).encode(errors="replace"),
        request if isinstance(request, str) else "",
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# -- a draft -----------------------------------------------------------------------------------------------------------

_FIGURES = {"remaining": "remaining|left", "reset": "reset", "bucket": "resource|bucket", "limit": "-limit$|max"}
_RESETS = 'resets = ""  # "1h", or { calendar = "day", zone = "UTC" }'
_FORMS = {
    "epoch": r"[0-9]{9,12}(\.[0-9]+)?",
    "seconds": r"[0-9]{1,8}(\.[0-9]+)?",
    "duration": r"([0-9.]+(ms|[smhd]))+",
    "rfc3339": r"[0-9]{4}-[0-9]{2}-[0-9]{2}T.*",
    "http-date": r"[A-Z][a-z]{2}, .*GMT",
}


def draft(name: str, paths: Iterable[str]) -> str:
    """The text of a cost book. Raises UsageError for a name that no API has, and ConfigError for a file that has no
    answer, or a request without a host."""
    check_name("api", name, least=1)
    recorded = {path: read_answer(path) for path in paths}
    for path, answer in recorded.items():
        if answer.request and not _host(answer.request):
            raise ConfigError(f'{one_line(path)}: its request names no host; write "request": "GET https://HOST/PATH"')
    answers = [*recorded.values()]
    figures = _figures(answers)
    limit = _recorded(figures.get("limit", ""), answers)
    units = f"{int(limit):_}" if re.fullmatch("[0-9]{1,15}", limit) else "0"
    policies = ", ".join(_recorded(name, answers) for name in _named("ratelimit-policy$", answers))
    windows = re.findall(r"(?:;\s*q=|(?:^|,)\s*)([0-9]{1,15})\s*;\s*w=([0-9]{1,8})(?![0-9])", policies)
    rows = [f'{{ quota = {int(most):_}, resets = "{format_duration(int(s) * SECOND_MS)}" }}' for most, s in windows]
    source = "  # from an answer; compare it with the vendor's page"
    quotas = (
        f"windows = [{', '.join(rows)}]{source}" if rows else f"quota = {units}{source if limit else ''}\n{_RESETS}"
    )
    levels = [f"{what} = {_field(what, header, answers)}" for what, header in figures.items()]
    fields = [*(levels if "remaining" in figures else ()), *_closed(answers, timed="reset" in figures)]
    text = Template(read_text("quota.config", "new-book.toml.in")).substitute(
        api=in_toml(name),
        hosts=", ".join(map(in_toml, sorted({_host(answer.request) for answer in answers} - {""}))),
        read_on=utc(host_clock()).date(),
        quotas=quotas,
        answers="\n".join(fields),
    )
    return text.rstrip("\n") + "\n"


def _host(request: str) -> str:
    """The host of a recorded request, without a user and password; empty without a request."""
    with suppress(ValueError):
        return urlsplit(next((word for word in request.split() if "://" in word), "")).netloc.rpartition("@")[2]
    return ""


def _figures(answers: list[Recorded]) -> dict[str, str]:
    """The header of each figure."""
    figures: dict[str, str] = {}
    for header in _named("rate-?limit|quota|-remaining$", answers):
        what = next((what for what, words in _FIGURES.items() if re.search(words, header, re.IGNORECASE)), None)
        if what is not None:
            figures.setdefault(what, header)
    return {what: figures[what] for what in ("remaining", "limit", "reset", "bucket") if what in figures}


def _named(words: str, answers: list[Recorded]) -> Iterable[str]:
    """The headers whose names have such words, each once."""
    headers = [header for answer in answers for header in answer.headers]
    return dict.fromkeys(header for header in headers if re.search(words, header, re.IGNORECASE))


def _recorded(header: str, answers: list[Recorded]) -> str:
    """The first value of a header."""
    return next((answer.headers[header] for answer in answers if header in answer.headers), "")


def _field(what: str, header: str, answers: list[Recorded]) -> str:
    if what != "reset":
        return in_toml(header)
    value = _recorded(header, answers).strip()
    form = next((form for form, pattern in _FORMS.items() if re.fullmatch(pattern, value)), "")
    return f"{{ header = {in_toml(header)}, as = {in_toml(form)} }}"


def _closed(answers: list[Recorded], *, timed: bool) -> list[str]:
    """A rule for each status that refuses. It lasts a minute if no answer has a time."""
    statuses = dict.fromkeys(answer.status for answer in answers if answer.status in (403, 429))
    lasts = "" if timed else ', lasts = "60s"'
    rules = [f"    {{ status = {status}{lasts} }},  # narrow it by `body` or `json`" for status in statuses]
    return ["closed = [", *rules, "]"] if rules else []
