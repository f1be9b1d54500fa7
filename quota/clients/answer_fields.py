"""How much of an answer a client reads, and what its parts say, in the places that the cost book names.

    AnswerLimits   the limits on an answer, for every client
    PoolState      what an answer says of a limit
    Answer         an answer; each method answers one question of the book
    Usage          finds the figures of a call's usage in a body while the caller reads it

A header with an absurd value counts as absent, and so does a header with several values. Two kinds may have several
values: of the units that remain, the smallest number counts; of times, the latest. `Answer.unread` has the headers that
could not be read.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import Any, NamedTuple

from quota.clients.upstream_errors import MAX_BODY_BYTES
from quota.common.clock import LATEST_MS
from quota.terms.api import DECIMAL, UNREADABLE, Field, LevelRule, Match, Pointer, Refill, Used, document_in, value_at
from quota.terms.arguments import seconds, whole
from quota.terms.costs import Quota
from quota.terms.limits import DAY_MS, MAX_UNITS, SECOND_MS, UNITS_MS, as_long

Headers = Mapping[str, str] | Iterable[tuple[str, str]]

MB = 1_000_000
MAX_BODY_MB = 1_000
MAX_ITEMS = 1_000_000

MAX_HEADER_LENGTH = 1_024
"""Longer headers are cut here before they are read."""

MAX_POLICIES = 10
"""The most items that are read of a `RateLimit` header."""

RETRY_AFTER = Field(header="retry-after")
RETRY_AFTER_MS = Field(header="retry-after-ms")
"""Azure and OpenAI send it, with or without Retry-After."""

OLDER_REMAINING, OLDER_RESET = LevelRule(Field(header="ratelimit-remaining")), Field(header="ratelimit-reset")
"""The fields for what remains, and until when, before the seventh draft of the RateLimit fields."""

FIRST_EPOCH_S, FIRST_EPOCH_MS = 1_000_000_000, 1_000_000_000_000
"""A bare number of this size or more is a time since 1970, in seconds or in ms: no wait lasts 31 years."""

YEAR_MS = 365 * DAY_MS

_ERROR = Match(pointer=("error",))

DONE = b"[DONE]"
"""Many upstreams end a stream with an event that has this data. Readers often stop there."""

NO_USAGE = "the answer has no readable usage where the cost book expects it, so the reservation stands"
TOO_LONG = f"an answer, or one of its events, is longer than {MAX_BODY_BYTES // 1024} kB, so the reservation stands"


class AnswerLimits(NamedTuple):
    """The largest body (also when unpacked), the longest time for an answer, and the longest list in it."""

    max_body_mb: int | None = None
    max_answer_s: float | None = None
    max_items: int | None = None

    def validated(self) -> AnswerLimits:
        """The limits, each a number above 0 or None. Raises UsageError."""
        mb, answer_s, items = self
        return AnswerLimits(
            None if mb is None else whole(mb, "MB: max_body_mb", 1, MAX_BODY_MB),
            None if answer_s is None else seconds(answer_s, "max_answer_s"),
            None if items is None else whole(items, "items: max_items", 1, MAX_ITEMS),
        )

    @property
    def max_bytes(self) -> int | None:
        return None if self.max_body_mb is None else self.max_body_mb * MB


class PoolState(NamedTuple):
    """What an answer says of a limit. `bucket` is the name of the bucket or pool: in a policy the answer's, else the
    book's. `named`: the answer names it. `window_ms` is the length of its window. `is_only`: no other limit is in the
    answer. `is_others`: it is of another window or unit than the bucket, so it may only close it."""

    bucket: str
    remaining_units: int | None
    limit_units: int | None
    reset_ms: int | None
    window_ms: int | None = None
    named: bool = True
    counts_calls: bool = True
    is_only: bool = False
    is_others: bool = False

    @property
    def is_empty(self) -> bool:
        return self.remaining_units == 0

    def names(self, quota: Quota) -> bool:
        """Whether this is the state of a quota: by the length of its window, else by its number."""
        if self.window_ms is not None:
            return as_long(self.window_ms, quota.window.longest_ms)
        return self.limit_units == quota.units

    def is_of(self, quota: Quota) -> bool:
        """Whether this names the number of a quota and the length of its window."""
        return self.window_ms is not None and self.limit_units == quota.units and self.names(quota)

    def is_over(self, at_ms: int) -> bool:
        """Whether the window of this state has ended."""
        return self.reset_ms is not None and self.reset_ms <= at_ms


class Answer:
    """One answer. Each method returns None where the answer lacks the value, or has an impossible value."""

    def __init__(self, status: int, headers: Headers, body: bytes, at_ms: int) -> None:
        self.status = status
        self.body = body[:MAX_BODY_BYTES]
        self.at_ms = at_ms
        self.unread: dict[str, str] = {}
        """The headers that should hold a number or a time, and hold something else."""
        self._headers: dict[str, str] = {}
        pairs = headers.items() if hasattr(headers, "items") else headers
        for name, value in pairs:
            key = name.lower()
            # A header that is sent twice becomes one text, as with most HTTP clients.
            self._headers[key] = f"{self._headers[key]}, {value}" if key in self._headers else value
        self.is_stored = bool(_whole(self._headers.get("age")))
        """Whether the answer comes from a cache: its Age is above 0."""

    def fits(self, match: Match) -> bool:
        """Whether a rule matches this answer."""
        if match.status not in (None, self.status) or (match.body and match.body not in self._text):
            return False
        if match.pointer is None:
            return True
        value = self._at(match.pointer)
        if match.value is None:
            return bool(value)
        return type(value) is type(match.value) and value == match.value

    def units(self, used: Used) -> list[int | None]:
        """The figures of the call's usage, in the order of `used.figures`: UNREADABLE where the answer has one, but
        no number."""
        all_units = []
        for figure in used.figures:
            given = [(place, value) for place in figure.places if (value := self._value(place, "units")) is not None]
            numbers = (self._number(place, value, math.ceil) for place, value in given)
            missing = UNREADABLE if given else None
            all_units.append(next((units for units in numbers if units is not None), missing))
        return all_units

    def remaining(self, rule: LevelRule) -> tuple[int | None, int | None]:
        """The units that remain, and the limit. Fractions are rounded so that less remains."""
        field = rule.remaining
        limit = self._number(field, self._value(field, "limit")) if field.pattern is not None else None
        if limit is None and rule.limit is not None:
            text = self._once(rule.limit, "limit")
            limit = self._number(rule.limit, text)
            if limit is None and text is not None:  # `-1` or `unlimited`: nothing says what remains
                return None, None
        value = self._once(field, "remaining")
        parts = value.split(", ") if isinstance(value, str) else []  # `1,000` is no list
        numbers = [number for part in parts if (number := _whole(part)) is not None]
        remaining = min(numbers) if len(numbers) == len(parts) > 1 else self._number(field, value)
        if remaining is None and field.pattern is not None and limit is not None:
            used = self._number(field, self._value(field, "used"), math.ceil)
            remaining = None if used is None else max(0, limit - used)
        return remaining, limit

    def text(self, field: Field, group: str) -> str | None:
        value = self._once(field, group)
        return value if isinstance(value, str) and value else None

    def moment_ms(self, field: Field, group: str) -> int | None:
        """The time in this place; of a header that was sent with several times, the latest."""
        value = self._once(field, group)
        at_ms = self._moment_ms(value)
        if at_ms is None and field.header and isinstance(value, str):
            parts = _BETWEEN_TIMES.split(value[:MAX_HEADER_LENGTH])
            times = [time for part in parts if (time := self._moment_ms(part)) is not None]
            at_ms = max(times) if len(times) == len(parts) else None
        if at_ms is None:
            self._note_unread(field.header, value)
        return at_ms

    @property
    def retry_at_ms(self) -> int | None:
        """The time in Retry-After-Ms, else in Retry-After. A number in Retry-After is a long wait if, read as a time,
        it would be more than a year ago."""
        wait_ms = self._number(RETRY_AFTER_MS, self._once(RETRY_AFTER_MS, ""), math.ceil)
        if wait_ms is not None:
            return self.at_ms + min(wait_ms, YEAR_MS)
        at_ms = self.moment_ms(RETRY_AFTER, "")
        is_number = _whole(self._once(RETRY_AFTER, "")) is not None
        is_wait = is_number and at_ms is not None and at_ms < self.at_ms - YEAR_MS
        return self.at_ms + YEAR_MS if is_wait else at_ms

    def lasts_until_ms(self, lasts: Field | Refill) -> int | None:
        """Until when the bucket stays closed, by the answer."""
        if isinstance(lasts, Field):
            return self.moment_ms(lasts, "lasts")
        asked, left, per_second = (_figure(self._at(pointer)) for pointer in lasts)
        if asked is None or left is None or not per_second:
            return None
        span_ms = (asked - left) / per_second * SECOND_MS
        return self.at_ms + math.ceil(span_ms) if span_ms < LATEST_MS else None  # no ledger can hold a later time

    def policies(self) -> list[PoolState]:
        """Each policy in `RateLimit`, with what `RateLimit-Policy` says of it (draft-ietf-httpapi-ratelimit-headers).
        In draft 7 policies have no name: the limit in `RateLimit` tells which one it is about. Older drafts have a
        header for each of its figures."""
        older, (remaining, _) = self._headers.get("ratelimit-limit", ""), self.remaining(OLDER_REMAINING)
        text = self._headers.get("ratelimit") or f"limit={older}, remaining={remaining}"
        older_reset_ms = None if "ratelimit" in self._headers else self.moment_ms(OLDER_RESET, "")
        more_text = self._headers.get("ratelimit-policy") or older
        items = _items(text) or _item_of_draft_7(text)
        described = _items(more_text) or _policies_of_draft_7(more_text)
        has_several = len({name for name, _ in (*items, *described)}) > 1
        policies = []
        for name, figures in items:
            own = [more for other, more in described if other == name]
            same = [more for more in own if more.get("q") == figures.get("q", more.get("q"))]
            figures = same[0] | figures if same and all(each == same[0] for each in same) else figures
            remaining = _whole(figures.get("r"))
            if remaining is not None:
                window_ms = _whole(figures.get("w"), lambda seconds: math.ceil(seconds * SECOND_MS))
                limit = _whole(figures.get("q"))
                reset_ms = self._moment_ms(figures["t"]) if "t" in figures else older_reset_ms
                is_only = not has_several and bool(same or not described)
                counts_calls = all(each.get("qu", "requests") == "requests" for each in (figures, *same))
                state = PoolState(name, remaining, limit, reset_ms, window_ms)
                policies.append(state._replace(counts_calls=counts_calls, is_only=is_only))
        if not policies:
            self.note_unmatched()
        return policies

    def note_outside(self, rule: LevelRule) -> None:
        """Note the name of a bucket outside the book, if the answer says what remains of it."""
        if isinstance(rule.bucket, Field) and self._value(rule.remaining, "remaining") is not None:
            self._note_unread(rule.bucket.header, self._headers.get(rule.bucket.header))

    def note_impossible(self, field: Field | None, value: int | None, kept: int | None) -> None:
        """Note a field whose value was not kept: more than the limit remains, or its reset is years away."""
        if field is not None and value is not None and kept is None:
            self._note_unread(field.header, self._headers.get(field.header))

    def note_unmatched(self) -> None:
        """Note that a figure in `RateLimit`, or in the older fields, is no number or of no window of the book."""
        header = next((name for name in ("ratelimit", "ratelimit-remaining") if name in self._headers), "")
        self._note_unread(header, self._headers.get(header))

    # -- values ------------------------------------------------------------------------------------------------------

    def _number(self, field: Field, value: object, rounded: Callable[[float], int] = math.floor) -> int | None:
        number = _whole(value, rounded)
        if number is None:
            self._note_unread(field.header, value)
        return number

    def _note_unread(self, header: str, value: object) -> None:
        if header and isinstance(value, str):
            self.unread[header] = value

    def _value(self, field: Field, group: str) -> object:
        """The text of a header, or the value in the JSON."""
        value: object = self._headers.get(field.header) if field.header else self._at(field.pointer or ())
        if field.pattern is None or value is None:
            return value
        if not isinstance(value, str):
            return None
        match = field.pattern.search(value[:MAX_HEADER_LENGTH])
        if match is None:
            self._note_unread(field.header, value)
            return None
        return match.groupdict().get(group)

    def _once(self, field: Field, group: str) -> object:
        """The value, for uses that free no units: if a header was sent several times with one value, it counts once."""
        value = self._value(field, group)
        if not field.header or field.pattern is not None or not isinstance(value, str):
            return value
        parts = [part.strip() for part in value[:MAX_HEADER_LENGTH].split(",")]
        lengths = (n for n in range(1, len(parts)) if parts == parts[:n] * (len(parts) // n))
        length = next(lengths, 0)  # a date has a comma
        return ", ".join(parts[:length]) if length else value

    def _at(self, pointer: Pointer) -> object:
        document = self._json
        value = value_at(document, pointer)
        if value is None and isinstance(document, list) and len(document) == 1:  # as Google streams an error
            return value_at(document[0], pointer)
        return value

    @cached_property
    def _json(self) -> object:
        try:
            return document_in(self.body, _object) if self.body else None
        except (ValueError, RecursionError):
            return None

    @cached_property
    def _text(self) -> str:
        return self.body.decode("utf-8", "replace").lower()

    def _moment_ms(self, value: object) -> int | None:
        """A time in ms by this machine's clock, from any notation. A calendar time is read relative to the answer's
        Date, so that a wrong clock here does not matter."""
        text = str(value).strip(' \t"') if isinstance(value, str | int | float) else ""
        if re.fullmatch(rf"[+-]?(?:[0-9]{{16}}|[0-9]{{19}}|(?![0-9]{{14}}){DECIMAL})", text, re.ASCII):
            number = float(text)
            while FIRST_EPOCH_MS * 1_000 <= number < FIRST_EPOCH_MS * 10_000_000:  # microseconds, or nanoseconds
                number /= 1_000
            ms = math.ceil(number if number >= FIRST_EPOCH_MS else number * SECOND_MS)
            if number < FIRST_EPOCH_S:
                return self.at_ms + ms
            moment_ms: int | None = ms if ms < LATEST_MS else None
        elif (span_ms := _duration_ms(text.removeprefix("-"))) is not None:
            return self.at_ms if text.startswith("-") else self.at_ms + span_ms
        else:
            moment_ms = _date_ms(text)
            moment_ms = _date_ms(text, iso=True) if moment_ms is None else moment_ms
        answered_ms = _date_ms(self._headers.get("date", ""))
        if moment_ms is None or answered_ms is None:
            return moment_ms
        return self.at_ms + moment_ms - answered_ms


def _object(members: Sequence[tuple[str, object]]) -> dict[str, object]:
    """An object of JSON. A name with two different values counts as unreadable, because readers differ."""
    read = dict(members)
    return read if len(read) == len(members) else read | {name: () for name, value in members if value != read[name]}


def _figure(value: object) -> float | None:
    """A number of units that a charge can have, with its fraction."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_UNITS:
        return value
    return None


def _whole(value: object, rounded: Callable[[float], int] = math.floor) -> int | None:
    """A number of units that a charge can have, given as a number or as digits, and `rounded`."""
    if isinstance(value, str):
        digits = re.fullmatch(rf'\s*("?)\+?({DECIMAL})\1\s*(?:{_POLICIES})?', value, re.ASCII)
        if digits is None:
            return None
        value = int(digits[2]) if digits[2].isdecimal() else float(digits[2])
    figure = _figure(value)
    return None if figure is None else rounded(figure)


_BETWEEN_TIMES = re.compile(r"(?<!Mon|Tue|Wed|Thu|Fri|Sat|Sun), ")
"""A date has a comma of its own."""

_POLICIES = r"(?:,\s*[0-9]+\s*)?;\s*w(?:indow)?=[^\r\n]{0,200}"
"""Matches what follows the number in the `RateLimit-Limit` of older drafts: `100, 100;w=60` or `100;w=60`."""


def _duration_ms(text: str) -> int | None:
    """`2h9m`, `40591s`, `1.5s`, `in 1 minute and 5 seconds`, perhaps with a full stop; `PT1H30M`; `01:30:00`, also with
    days as Python and .NET write them. A comma between digits is decimal, unless three follow."""
    text = text[:64].lower().rstrip(".").replace("milli", "m")
    text = re.sub(r"(?<=[0-9]),(?=[0-9])(?![0-9]{3}(?![0-9]))", ".", text)
    text = "".join(re.split(r"[\s,]+(?:and\b)?", text)).removeprefix("in")
    if (iso := re.fullmatch(r"p([0-9]+[wd])?(?:t(.+))?", text, re.ASCII)) is not None:
        text = (iso[1] or "") + (iso[2] or "")
    elif (clock := re.fullmatch(_CLOCK, text, re.ASCII)) is not None:
        text = f"{clock[1] or 0}d{clock[2] or 0}h{clock[3]}m{clock[4]}s"
    spans = re.findall(_SPAN, text, re.ASCII)
    # With one unit twice it is a list.
    if len(dict(map(reversed, spans))) < len(spans) or re.fullmatch(f"(?:{_SPAN})+", text, re.ASCII) is None:
        return None
    return math.ceil(sum(float(number) * _UNITS_MS[unit] for number, unit in spans))


_CLOCK = r"(?:(?:([0-9]{1,4})(?:\.|d(?:ays?)?))?([0-9]{1,3}):)?([0-5]?[0-9]):([0-5][0-9](?:\.[0-9]{1,9})?)"
_UNITS_MS = {**UNITS_MS, "w": 7 * DAY_MS, "ns": 1e-6, "us": 1e-3, "µs": 1e-3, "μs": 1e-3}
_SPAN = r"([0-9]{1,12}(?:\.[0-9]{1,9})?)(ms|ns|[uµμ]s|[smhdw])(?:(?:ec|econd|in|inute|r|our|ay|eek)s?)?"


_OFFSET = re.compile(r"(:[0-9]{2}(?:\.[0-9]+)?)\s*(?:GMT|UTC)?([+-][0-9]{2}):?([0-9]{2})(?: [A-Z]{3,4}$)?")
"""The offset of a zone behind a time, as mails, Java, JavaScript and Go write it."""


def _date_ms(text: str, *, iso: bool = False) -> int | None:
    """A date as mails write it, or as ISO 8601 does. A date without a zone is in UTC. None for `PM`, or a zone without
    an offset that is not in mails."""
    text = _OFFSET.sub(r"\1\2\3" if iso else r"\1 \2\3", re.sub(r"\s*[(\[].*", "", text[:64]))
    try:
        if iso:
            text = re.sub("^([0-9]{8})([0-9]{6})$", r"\1T\2", text).replace("/", "-")
            if text.isdecimal():
                return None
            moment = datetime.fromisoformat(re.sub(r"\s*(UTC|GMT|Z)$", "", text, flags=re.IGNORECASE))
        else:
            moment = parsedate_to_datetime(text)
            if moment.tzinfo is None and re.search("[:.][0-9]{2}( -?[0-9]{4})?$", text) is None:
                return None
        return math.ceil((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * SECOND_MS)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


_NUMBER = r"[0-9]{1,15}(?:\.[0-9]{1,9})?"
_ITEM = re.compile(r'"([^"\\]{1,64})"((?:\s*;\s*[a-z*][a-z0-9_.*-]*(?:="[^"]*"|=[^;,"\s]*)?)*)', re.ASCII)


def _items(text: str) -> list[tuple[str, dict[str, str]]]:
    """The items of a structured field (RFC 9651), each with its numeric parameters."""
    items = _ITEM.findall(text[:MAX_HEADER_LENGTH])[:MAX_POLICIES]
    number = rf";\s*([a-z]+)=({_NUMBER})(?=\s*(?:;|$))"
    unit = r';\s*(qu)="([^"]*)"'
    return [(name, dict(re.findall(number, figures) + re.findall(unit, figures))) for name, figures in items]


def _item_of_draft_7(text: str) -> list[tuple[str, dict[str, str]]]:
    """`limit=100, remaining=50, reset=5` as an item without a name."""
    figures = re.findall(rf"(?:^|,)\s*(limit|remaining|reset)=({_NUMBER})(?=\s*(?:,|$))", text[:MAX_HEADER_LENGTH])
    new_names = {"limit": "q", "remaining": "r", "reset": "t"}
    return [("", {new_names[name]: number for name, number in figures})] if figures else []


def _policies_of_draft_7(text: str) -> list[tuple[str, dict[str, str]]]:
    """`100;w=60, 1000;w=3600` as items without a name."""
    policies = re.findall(r"(?:^|,)\s*([0-9]{1,15})\s*;\s*w=([0-9]{1,15})", text[:MAX_HEADER_LENGTH])
    return [("", {"q": units, "w": window_s}) for units, window_s in policies[:MAX_POLICIES]]


def _is_at_end(unpacking: Any) -> bool:
    """Whether the body has ended, as far as its decompressor tells."""
    ended = getattr(unpacking, "is_finished", None)  # of brotli
    return bool(getattr(unpacking, "eof", True) if ended is None else ended())


# -- a call's usage, while its answer is read --------------------------------------------------------------------------


class Usage:
    """Finds a call's usage in the body of its answer while the caller reads the body.

        usage = attempt.usage(headers)       # None where nothing in the body settles the call
        attempt.settle(usage.feed(piece))    # each piece of the body, before the caller has it
        attempt.settle(usage.end())          # the caller has read all

    Both return the usage once, as soon as it is complete; else None.

    `used` are the book's figures; the headers may have some of them. In a stream of documents (text/event-stream) the
    last value of each figure counts. Nothing is held back. At most MAX_BODY_BYTES are kept of an event, or of
    an answer that is one JSON document. Pieces may still be packed with gzip or zlib.

    A body ends with the last byte of its Content-Length. A caller that stops before the end gets no usage, because the
    call may have cost more by then. The same holds for a body that is shorter, for a stream that ends with the
    connection and without DONE, and for a stream that ends within an event, or has an event `error` or an `error` in
    one. `framed`: the protocol itself marks the end, as HTTP/2 does. `missing` is called for a whole answer without its
    usage, with the reason.
    """

    def __init__(
        self,
        used: Used,
        headers: Mapping[str, str],
        *,
        framed: bool = False,
        missing: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._used, self._missing = used, missing
        self._of_headers = self._figures = Answer(200, headers, b"", 0).units(used)
        kind = headers.get("content-type", "").lower()
        self._events = kind.startswith("text/event-stream")
        length = headers.get("content-length", "")
        same = re.fullmatch(r"([0-9]{1,15})(\s*,\s*\1)*", length.strip(), re.ASCII)
        is_known = same is not None and not headers.get("content-encoding")
        is_unclear = headers.get("content-range", "").startswith("bytes") or (length and not same)
        self._to_come = math.inf if is_unclear else int(same[1]) if same and is_known else 0
        """The length in bytes that the headers announce. No body has all of a length that cannot be read, and a part of
        a document has not all of it."""
        in_chunks = "chunked" in headers.get("transfer-encoding", "").lower()
        self._is_announced = is_known and not in_chunks
        framed = framed or in_chunks or bool(headers.get("content-length"))
        self._end_is_clear = framed or re.match(r"(application/([^;]*\+)?json\s*(;|$)|$)", kind) is not None
        """A JSON document shows its own end. Lines of JSON and events do not."""
        self._may_be_packed = headers.get("content-encoding", "").strip().lower() in ("gzip", "x-gzip", "deflate")
        self._unpacking: Any = None
        """Unpacks the pieces, if the client does not."""
        self._is_long = False
        """Whether the newest usage may be in a document, or an event, that was too long to read."""
        self._kept = bytearray()
        self._data: list[bytes] = []
        self._size = 0
        self._over = self._failed = False

    def feed(self, piece: bytes) -> int | None:
        if self._over:
            return None
        self._to_come -= len(piece)
        for part in self._unpacked(piece):
            if self._events:
                self._feed_lines(part)
            elif not self._is_long:
                self._kept += part
                self._is_long = len(self._kept) > MAX_BODY_BYTES
        if self._over:
            return self._total()
        return self.end() if self._is_announced and self._to_come <= 0 else None

    def end(self, unpacking: Any = None) -> int | None:
        """`unpacking`: what the client has unpacked the body with, if it tells."""
        if self._over:
            return None
        if self._events:
            self._feed_lines(b"\n")  # ends the last line
            if self._size:  # the last event has no end: its data may be no whole document
                try:
                    json.loads(b"\n".join(self._data))
                except (ValueError, RecursionError):
                    self._end_is_clear = False
            self._feed_lines(b"\n")  # ends the last event
        elif not self._is_long:
            self._hear(bytes(self._kept))
        self._over = True
        self._kept.clear()
        is_whole = not self._to_come or (self._to_come < 0 and _is_at_end(self._unpacking or unpacking))
        return self._total() if is_whole and self._end_is_clear else None

    def _total(self) -> int | None:
        if self._failed:
            return None
        units = self._used.total(self._of_headers if self._is_long else self._figures)
        if units is None:
            self._missing(TOO_LONG if self._is_long else NO_USAGE)
        return units

    def _unpacked(self, piece: bytes) -> Iterator[bytes]:
        """A piece in unpacked parts of at most MAX_BODY_BYTES, until no more is needed."""
        if self._may_be_packed and piece:
            self._may_be_packed = False
            if piece[:1] in (b"\x1f", b"x"):  # as gzip and zlib begin, but no JSON and no event
                self._unpacking = zlib.decompressobj(zlib.MAX_WBITS | 32)
        if self._unpacking is None:
            yield piece
            return
        while piece and not (self._over or self._failed or (self._is_long and not self._events)):
            if self._unpacking.eof:  # gzip may come in several members
                self._unpacking = zlib.decompressobj(zlib.MAX_WBITS | 32)
            try:
                yield self._unpacking.decompress(piece, MAX_BODY_BYTES)
            except zlib.error:
                self._failed = True
            piece = self._unpacking.unconsumed_tail or self._unpacking.unused_data

    # -- events ------------------------------------------------------------------------------------------------------

    def _feed_lines(self, piece: bytes) -> None:
        """Lines end with LF, CR or CRLF; CR and LF may come in two pieces."""
        for part in piece.splitlines(keepends=True):
            if self._over:
                return
            if self._kept.endswith(b"\r") and part != b"\n":
                self._end_line()
            if len(self._kept) <= MAX_BODY_BYTES:
                self._kept += part
            if part.endswith(b"\n"):
                self._end_line()

    def _end_line(self) -> None:
        line = bytes(self._kept).removeprefix(BOM_UTF8).rstrip(b"\r\n")  # a stream may begin with it
        self._kept.clear()
        if line:
            self._size += len(line)
            self._failed |= re.fullmatch(rb"event:\s*error\s*", line) is not None
            if self._size <= MAX_BODY_BYTES and line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            self._over = self._data == [DONE]  # the reader may stop before the empty line behind it
            return
        data, is_long = b"\n".join(self._data), self._size > MAX_BODY_BYTES
        self._data, self._size, self._is_long = [], 0, self._is_long or is_long
        if data and not is_long:
            self._hear(data)

    def _hear(self, document: bytes) -> None:
        answer = Answer(200, (), document, 0)
        self._failed |= self._events and answer.fits(_ERROR)
        figures = answer.units(self._used)
        self._is_long = self._is_long and figures.count(None) == len(figures)
        self._figures = [old if new is None else new for old, new in zip(self._figures, figures, strict=True)]
