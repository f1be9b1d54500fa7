"""What a cost book says of its API beside the prices: which request is which method, and what an answer tells. Pure.

Route          the requests that are one method
Field          where an answer has a figure: in a header, or in its JSON
Figure         a part of what a call used; Used: the sum of several
Match          the answers that a rule is about
ClosedRule     answers by which upstream closes a bucket
KeyPlace       where the API wants its key
LevelRule      where an answer says what remains of a bucket
AnswerRules    all of them; `quota.clients.upstream` reads answers by them
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from quota.common.hosts import plain_path

VERBS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

Form = Literal["epoch", "seconds", "duration", "http-date", "rfc3339"]
"""How a time is written: seconds since 1970, seconds from now, `6m0s` or `40591s` from now, or a date."""

Pointer = tuple[str, ...]
"""A place in a JSON document: `/errors/0/code` (RFC 6901) as its parts."""


def value_at(document: object, pointer: Pointer) -> object:
    """What stands at a place in a JSON document; None where nothing does."""
    value = document
    for part in pointer:
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and re.fullmatch("0|[1-9][0-9]{0,6}", part, re.ASCII):
            value = value[int(part)] if int(part) < len(value) else None
        else:
            return None
    return value


@dataclass(frozen=True)
class Route:
    """The requests that are calls of `method`: those of a verb ("": of any) to a path.

    In a path `{x}` stands for one segment, or for a part of one, and `**` at its end for any rest, also for none. Upper
    and lower case are the same. What is asked by GET may be asked by HEAD.
    """

    verb: str
    path: str
    method: str
    _pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)
    _examples: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        path = plain_path(self.path.removesuffix("**"))
        pattern = re.sub(r"\\\{[^{}]*\\\}", "[^/]+", re.escape(path))
        if self.path.endswith("**"):
            pattern = f"{pattern.removesuffix('/')}(/.*)?"
        object.__setattr__(self, "_pattern", re.compile(pattern, re.IGNORECASE | re.DOTALL))
        # No route names this character, so only `{x}` and `**` take it.
        start = re.sub(r"\{[^{}]*\}", "\0", path).removesuffix("/")
        rests = ("", "/\0", "/\0/\0") if self.path.endswith("**") else ("",)
        object.__setattr__(self, "_examples", tuple([f"{start}{rest}" or "/" for rest in rests]))

    @property
    def said(self) -> int:
        """How many characters of a path it names."""
        return len(re.sub(r"\{[^{}]*\}|\*\*", "", self.path))

    def matches(self, verb: str, path: str) -> bool:
        """Whether a request is one of these; `path` as `plain_path` returns it."""
        return self._takes(verb.upper()) and self._pattern.fullmatch(path) is not None

    def covers(self, other: Route) -> bool:
        """Whether every request of another route is one of these."""
        return self._takes(other.verb) and all(map(self._pattern.fullmatch, other._examples))

    def _takes(self, verb: str) -> bool:
        return self.verb in ("", verb) or (self.verb, verb) == ("GET", "HEAD")


class Field(NamedTuple):
    """Where an answer has a figure: in a `header`, or in its JSON at a `pointer`.

    A `pattern` finds it within the text there, by the names of its groups. `form` is how a time is written.
    """

    header: str = ""
    pointer: Pointer | None = None
    pattern: re.Pattern[str] | None = None
    form: Form | None = None


class Figure(NamedTuple):
    """A part of what a call used: a number in the first of its `places` that has one, else `default`; None: its answer
    has to say it."""

    places: tuple[Field, ...]
    default: int | None = None


class Used(NamedTuple):
    """What a call used: the sum of these figures."""

    figures: tuple[Figure, ...]

    @property
    def in_body(self) -> bool:
        return any(place.pointer is not None for figure in self.figures for place in figure.places)

    def total(self, found: Sequence[int | None]) -> int | None:
        """Of what was found of each figure; None where nothing was, or where one is missing."""
        if not any(units is not None for units in found):
            return None
        counted = [
            figure.default if units is None else units for figure, units in zip(self.figures, found, strict=True)
        ]
        known = [units for units in counted if units is not None]
        return sum(known) if len(known) == len(counted) else None


class Match(NamedTuple):
    """The answers that a rule is about: all that is given must hold.

    `body` is text in it, in lower case. With a `pointer` the answer's JSON has `value` there, or without one anything
    that is not null, false, 0 or empty.
    """

    status: int | None = None
    body: str = ""
    pointer: Pointer | None = None
    value: str | int | None = None

    @property
    def reads_body(self) -> bool:
        return bool(self.body) or self.pointer is not None

    def covers(self, other: Match) -> bool:
        """Whether every answer that another rule is about is one of these."""
        if self.status not in (None, other.status) or self.body not in other.body:
            return False
        at_all = self.value is None and bool(other.value)
        return self.pointer is None or (self.pointer == other.pointer and (at_all or self.value == other.value))


class Refill(NamedTuple):
    """Where an answer says what a bucket that fills steadily lacks: the units asked for, those left, and how many come
    back each second."""

    asked: Pointer
    left: Pointer
    per_second: Pointer


class ClosedRule(NamedTuple):
    """Answers by which upstream closes `bucket` ("": the one that the answer names, else the call's).

    It stays closed until the time that the answer names; where it names none, for as long as it `lasts`, in ms or as
    the answer says it; else until the bucket's own reset.
    """

    when: Match
    bucket: str = ""
    lasts: int | Field | Refill | None = None


class KeyPlace(NamedTuple):
    """Where the API wants its key: in a `header`, after a `scheme` where there is one, or in a field of the `query`."""

    header: str = "Authorization"
    scheme: str = "Bearer"
    query: str = ""


class LevelRule(NamedTuple):
    """Where an answer says what remains of a bucket. `bucket` is its name, or where the answer names it; None: it is
    the call's."""

    remaining: Field
    limit: Field | None = None
    reset: Field | None = None
    bucket: str | Field | None = None


class AnswerRules(NamedTuple):
    """What an answer tells: which units remain, what the call cost (`units`), whether it was `free`, what it closed."""

    levels: tuple[LevelRule, ...] = ()
    units: Used | None = None
    free: tuple[Match, ...] = ()
    closed: tuple[ClosedRule, ...] = ()

    def reads_body(self, status: int) -> bool:
        """Whether the body of an answer with this status must be read before its caller has it. For `units` it is read
        as the caller reads it."""
        fields = [*(one for level in self.levels for one in level if isinstance(one, Field))]
        matches = [*self.free, *(rule.when for rule in self.closed)]
        return any(one.pointer is not None for one in fields) or any(
            match.reads_body and match.status in (None, status) for match in matches
        )
