"""What an answer of an API says, where its cost book says to look: headers, JSON, times.

    Answer      an answer; each of its methods is a question that the book asks of it
    units_in    what a JSON document says of each figure of what a call used
    Usage       finds that in the body of an answer while the caller reads it

A header that is missing, absurd or sent twice says nothing. What cannot be read is in `Answer.unread`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cached_property

from quota.clients.upstream_errors import MAX_BODY_BYTES
from quota.common.clock import LATEST_MS
from quota.terms.api import Field, LevelRule, Match, Pointer, Refill, Used, value_at
from quota.terms.limits import MAX_UNITS, SECOND_MS, UNITS_MS

Headers = Mapping[str, str] | Iterable[tuple[str, str]]

Figures = Sequence[int | None]
"""Of what a call used, where an answer says it."""

MAX_HEADER_LENGTH = 1_024
"""How much of a header is looked at."""

MAX_POLICIES = 10
"""How many items of a `RateLimit` header are looked at."""


RETRY_AFTER = Field(header="retry-after", form="seconds")

FIRST_EPOCH_S, FIRST_EPOCH_MS = 1_000_000_000, 1_000_000_000_000
"""A bare number from here on is a time since 1970, in seconds or in ms: 31 years are no span."""

MAX_EVENT_BYTES = 64 * 1024
"""A longer event says nothing."""

DONE = b"[DONE]"
"""The data of the event by which many upstreams end a stream. Its readers often stop there."""


class Answer:
    """One answer. Each question about it returns None where the answer does not say, or says what cannot be so."""

    def __init__(self, status: int, headers: Headers, body: bytes, at_ms: int) -> None:
        self.status = status
        self.body = body if len(body) <= MAX_BODY_BYTES else b""
        self.at_ms = at_ms
        self.unread: dict[str, str] = {}
        """The headers that should have a number or a time, and have something else."""
        self._headers: dict[str, str] = {}
        pairs = headers.items() if hasattr(headers, "items") else headers
        for name, value in pairs:
            key = name.lower()
            # Sent twice, it is one text that is no figure.
            self._headers[key] = f"{self._headers[key]}, {value}" if key in self._headers else value

    def fits(self, match: Match) -> bool:
        """Whether a rule is about this answer."""
        if match.status not in (None, self.status) or (match.body and match.body not in self._text):
            return False
        if match.pointer is None:
            return True
        value = self._at(match.pointer)
        if match.value is None:
            return bool(value)
        return type(value) is type(match.value) and value == match.value

    def units(self, used: Used) -> list[int | None]:
        """What it says of each figure of what the call used."""
        return [
            next((units for place in figure.places if (units := self._units(place)) is not None), None)
            for figure in used.figures
        ]

    def _units(self, field: Field) -> int | None:
        """In JSON it is a whole number: an answer that writes it otherwise says nothing."""
        value = self._value(field, "units")
        is_text = bool(field.header) or field.pattern is not None
        return self._number(field, value, math.ceil) if isinstance(value, str if is_text else int) else None

    def remaining(self, rule: LevelRule) -> tuple[int | None, int | None]:
        """The units that remain, and of how many. A fraction is rounded so that less remains."""
        field = rule.remaining
        limit = self._number(field, self._value(field, "limit")) if field.pattern is not None else None
        if limit is None and rule.limit is not None:
            limit = self._number(rule.limit, self._value(rule.limit, "limit"))
        remaining = self._number(field, self._value(field, "remaining"))
        if remaining is None and field.pattern is not None and limit is not None:
            used = self._number(field, self._value(field, "used"), math.ceil)
            remaining = None if used is None else max(0, limit - used)
        return remaining, limit

    def text(self, field: Field, group: str) -> str | None:
        value = self._value(field, group)
        return value if isinstance(value, str) and value else None

    def moment_ms(self, field: Field, group: str) -> int | None:
        value = self._value(field, group)
        at_ms = self._moment_ms(value)
        if at_ms is None:
            self._note_unread(field.header, value)
        return at_ms

    @property
    def retry_at_ms(self) -> int | None:
        """The time that Retry-After names."""
        return self.moment_ms(RETRY_AFTER, "")

    def lasts_until_ms(self, lasts: Field | Refill) -> int | None:
        """Until when a closing lasts, as the answer says it."""
        if isinstance(lasts, Field):
            until_ms = self.moment_ms(lasts, "lasts")
        else:
            asked, left, per_second = (_figure(self._at(pointer)) for pointer in lasts)
            if asked is None or left is None or not per_second:
                return None
            span_ms = (asked - left) / per_second * SECOND_MS
            if not span_ms < LATEST_MS:  # it never comes back, or at no time that a ledger can hold
                return None
            until_ms = self.at_ms + math.ceil(span_ms)
        return until_ms

    def policies(self) -> list[tuple[str, int, int | None, int | None]]:
        """What `RateLimit` says of each policy: its name, what remains, of how many, until when. The draft of the IETF
        (draft-ietf-httpapi-ratelimit-headers) has the numbers of the policies in `RateLimit-Policy`."""
        quotas = {name: figures.get("q") for name, figures in _items(self._headers.get("ratelimit-policy", ""))}
        said = []
        for name, figures in _items(self._headers.get("ratelimit", "")):
            remaining, limit = _whole(figures.get("r")), _whole(quotas.get(name))
            reset_ms = self._moment_ms(figures.get("t"))
            if remaining is not None:
                said.append((name, remaining, limit, reset_ms))
        return said

    # -- values ------------------------------------------------------------------------------------------------------

    def _number(self, field: Field, value: object, rounded: Callable[[float], int] = math.floor) -> int | None:
        number = _whole(value, rounded)
        if number is None:
            self._note_unread(field.header, value)
        return number

    def _note_unread(self, header: str, value: object) -> None:
        if header and isinstance(value, str) and value.strip():
            self.unread[header] = value

    def _value(self, field: Field, group: str) -> object:
        """What stands at a field: a text of a header, or a value of the JSON."""
        value: object = self._headers.get(field.header) if field.header else self._at(field.pointer or ())
        if field.pattern is None or value is None:
            return value
        if not isinstance(value, str):
            return None
        match = field.pattern.search(value[:MAX_HEADER_LENGTH])
        return None if match is None else match.groupdict().get(group)

    def _at(self, pointer: Pointer) -> object:
        return value_at(self._json, pointer)

    @cached_property
    def _json(self) -> object:
        try:
            return json.loads(self.body) if self.body else None
        except (ValueError, RecursionError):
            return None

    @cached_property
    def _text(self) -> str:
        return self.body.decode("utf-8", "replace").lower()

    def _moment_ms(self, value: object) -> int | None:
        """A time in ms by this machine's clock, however it is written. One of the calendar is reckoned from the
        answer's own Date, so that it is right whatever this machine's clock says."""
        text = str(value).strip() if isinstance(value, str | int | float) else ""
        if re.fullmatch(r"[+-]?[0-9]{1,13}(?:\.[0-9]{1,9})?", text, re.ASCII):
            number = float(text)
            ms = math.ceil(number if number >= FIRST_EPOCH_MS else number * SECOND_MS)
            return self._from_date(ms) if number >= FIRST_EPOCH_S else self.at_ms + ms
        if (span_ms := _duration_ms(text)) is not None:
            return self.at_ms + span_ms
        reads = (parsedate_to_datetime, datetime.fromisoformat)
        dates = (date_ms for read in reads if (date_ms := _date_ms(read, text)) is not None)
        date_ms = next(dates, None)
        return None if date_ms is None else self._from_date(date_ms)

    def _from_date(self, ms: int) -> int:
        date_ms = _date_ms(parsedate_to_datetime, self._headers.get("date", ""))
        return ms if date_ms is None else self.at_ms + ms - date_ms


def units_in(used: Used, document: bytes) -> list[int | None]:
    """What a JSON document of an answer says of each figure of what a call used: the whole of it, or one event."""
    return Answer(200, (), document, 0).units(used)


def _figure(value: object) -> float | None:
    """A number from 0 to the largest that is stored, fractions included."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_UNITS:
        return value
    return None


def _whole(value: object, rounded: Callable[[float], int] = math.floor) -> int | None:
    """A number from 0 to the largest that is stored, as a number or as its digits. A fraction is `rounded`."""
    if isinstance(value, str):
        digits = re.fullmatch(r"\s*\+?([0-9]{1,16})(\.[0-9]{0,16})?\s*", value, re.ASCII)
        value = None if digits is None else int(digits[1]) if not (digits[2] or "").strip(".0") else float(value)
    figure = _figure(value)
    return None if figure is None else rounded(figure)


def _duration_ms(text: str) -> int | None:
    """`2h9m`, `6m0s`, `40591s`, `1.5s`, `20ms`; the full stop of a sentence may follow."""
    text = text.rstrip(".")[:64]
    parts = re.findall(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)(ms|[smhd])", text, re.ASCII)
    if not parts or "".join(map("".join, parts)) != text:
        return None
    return math.ceil(sum(float(number) * UNITS_MS[unit] for number, unit in parts))


def _date_ms(read: Callable[[str], datetime], text: str) -> int | None:
    """A date, as it is read. Without a zone it is in UTC."""
    try:
        moment = read(text[:64])
        return math.ceil((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * SECOND_MS)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


_ITEM = re.compile(r'"([^"\\]{1,64})"((?:\s*;\s*[a-z*][a-z0-9_.*-]*(?:="[^"]*"|=[^;,"\s]*)?)*)', re.ASCII)


def _items(text: str) -> list[tuple[str, dict[str, str]]]:
    """The items of a structured field (RFC 9651), each with those of its parameters that are numbers."""
    items = _ITEM.findall(text[:MAX_HEADER_LENGTH])[:MAX_POLICIES]
    number = r";\s*([a-z]+)=([0-9]{1,15}(?:\.[0-9]{1,9})?)(?=\s*(?:;|$))"
    return [(name, dict(re.findall(number, figures))) for name, figures in items]


# -- what the call used, as its answer is read -------------------------------------------------------------------------


class Usage:
    """Finds in the body of an answer what its call used, while the caller reads it.

        usage = attempt.usage(status, headers)    # None where nothing in the body settles the call
        attempt.settle(usage.feed(piece))         # each piece of the unpacked body, before the caller has it
        attempt.settle(usage.end())               # the caller has read all

    Both return what the call used once, as soon as that is known; else None.

    `read` finds the figures in a JSON document, of which `total` makes the units; `said` is what the headers say of
    them. A body may be a stream of documents (text/event-stream). Of those the last one that says it counts: of a sum,
    for each of its figures. Nothing is held back, and at most MAX_EVENT_BYTES of one event are kept, or MAX_BODY_BYTES
    of an answer that is one JSON document. Who stops before the end is told nothing: the call may have cost more than
    was said until then. Nor is anybody at the end of a body that is shorter than its Content-Length.
    """

    def __init__(
        self,
        read: Callable[[bytes], Figures],
        total: Callable[[Figures], int | None],
        headers: Mapping[str, str],
        said: Figures = (),
    ) -> None:
        self._read = read
        self._total = total
        self._events = headers.get("content-type", "").lower().startswith("text/event-stream")
        length = "" if headers.get("content-encoding") else headers.get("content-length", "")
        self._to_come = int(length) if re.fullmatch("[0-9]{1,15}", length, re.ASCII) else 0
        """Bytes that the headers announce."""
        self._kept = bytearray()
        self._data: list[bytes] = []
        self._size = 0
        self._figures = said
        self._over = False

    def feed(self, piece: bytes) -> int | None:
        if self._over:
            return None
        self._to_come -= len(piece)
        if self._events:
            self._feed_lines(piece)
        elif len(self._kept) <= MAX_BODY_BYTES:
            self._kept += piece
        return self._units() if self._over else None

    def end(self) -> int | None:
        if self._over:
            return None
        if self._events:
            self._feed_lines(b"\n\n")
        elif len(self._kept) <= MAX_BODY_BYTES:
            self._hear(bytes(self._kept))
        self._over = True
        self._kept.clear()
        return None if self._to_come > 0 else self._units()

    def _units(self) -> int | None:
        return self._total(self._figures) if self._figures else None

    # -- events ------------------------------------------------------------------------------------------------------

    def _feed_lines(self, piece: bytes) -> None:
        """Lines end with LF, CR, or both, which may come in two pieces."""
        for part in piece.splitlines(keepends=True):
            if self._over:
                return
            if self._kept.endswith(b"\r") and part != b"\n":
                self._end_line()
            if len(self._kept) <= MAX_EVENT_BYTES:
                self._kept += part
            if part.endswith(b"\n"):
                self._end_line()

    def _end_line(self) -> None:
        line = bytes(self._kept).rstrip(b"\r\n")
        self._kept.clear()
        if line:
            self._size += len(line)
            if self._size <= MAX_EVENT_BYTES and line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            self._over = self._data == [DONE]  # its reader may not read the empty line behind it
            return
        data, whole = b"\n".join(self._data), self._size <= MAX_EVENT_BYTES
        self._data, self._size = [], 0
        if data and whole:
            self._hear(data)

    def _hear(self, document: bytes) -> None:
        figures = self._read(document)
        before = self._figures or [None] * len(figures)
        self._figures = [old if new is None else new for old, new in zip(before, figures, strict=True)]
