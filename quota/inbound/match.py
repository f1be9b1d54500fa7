"""Which paths a pattern means. Nobody gets around a rule by spelling a path otherwise.

    /login              this path
    /users/{id}         one segment in this place, whatever it is
    /api/*              this path and everything below it; `*` stands at the end only

A pattern is matched segment by segment, so the time it takes grows with the length of the pattern, and nothing that a
client sends makes it slower.

Paths come decoded, as the server hands them to the application. What they mean depends on the application behind, and
this module does not know it. So it takes the reading that hides least:

- Capital letters, empty segments, a slash and a line feed at the end make no difference: `//Login/` is `/login`. (Many
  routers match a path with `$` at the end of a regular expression, which a last line feed passes.)
- A path with `.` or `..` in it, with letters that Unicode writes in several ways, or with bytes that are no UTF-8, has
  several readings. All of them count: see `readings`.
- What is mounted at `/api` is called `/api/login` outside and `/login` inside. A rule may call it either: see `names`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple
from unicodedata import combining, normalize

from quota.common.text import show

ONE = "{}"
"""A segment of a pattern that any segment matches. No literal segment is spelled like this."""

MAX_PATTERN = 256
MAX_MARKS = 30
"""The most marks (accents and the like) of one letter that are compared, as in Unicode's stream-safe text (UAX #15). To
sort them takes the square of their number, which a client chooses."""

_MANY = re.compile(rf"[^\x00-\x7f]{{{MAX_MARKS + 1}}}")
_NO_UTF_8, _NO_TEXT = re.compile("[\udc80-\udcff]"), re.compile("[\ud800-\udc7f\udd00-\udfff]")
_NO_PATTERN = re.compile(r"<.*>|:\w+|.*\\.*|.*\$")
"""What such a segment means elsewhere: in Flask and Django, in Rails and Express, in a regular expression."""

_NAMED = re.compile(r"\{[A-Za-z_][A-Za-z0-9_]{0,63}\}")

Segments = tuple[str, ...]


class Pattern(NamedTuple):
    """A pattern that was read. `below`: everything below these segments matches, too."""

    segments: Segments
    below: bool

    def matches(self, path: Segments) -> bool:
        """Whether one reading of a path is meant."""
        own = self.segments
        if len(path) < len(own) or (len(path) > len(own) and not self.below):
            return False
        return all(mine is ONE or mine == theirs for mine, theirs in zip(own, path, strict=False))

    def covers(self, other: Pattern) -> bool:
        """Whether every path that `other` means is meant by this one, too."""
        return self.matches(other.segments) and (self.below or not other.below)


EVERYTHING = Pattern((), below=True)


def parse_pattern(text: str) -> Pattern:
    """The pattern that `text` spells. Raises ValueError, which says what is wrong and what to write."""
    if not text.startswith("/"):
        raise ValueError(f"{show(text)} is no path: it begins with /")
    if len(text) > MAX_PATTERN or not text.isprintable():
        raise ValueError(f"{show(text)}: a pattern has at most {MAX_PATTERN} printable characters")
    if "?" in text or "#" in text:
        raise ValueError(f"{show(text)}: a pattern is about the path; leave out what follows ? or #")
    if re.search(r"%[0-9A-Fa-f]{2}", text):
        raise ValueError(f"{show(text)}: paths are compared decoded; write the character itself")
    *firsts, last = [segment for segment in text.split("/") if segment] or [""]
    below = last == "*"
    if last and not below:
        firsts.append(last)
    return Pattern(tuple(_segment(segment, text) for segment in firsts), below)


def _segment(segment: str, text: str) -> str:
    if segment in (".", ".."):
        raise ValueError(f"{show(text)}: a pattern has no segment . or ..")
    if _NAMED.fullmatch(segment):
        return ONE
    if _NO_PATTERN.fullmatch(segment):
        raise ValueError(
            f"{show(text)}: neither a framework's route nor a regular expression; write {{name}} for one whole segment"
        )
    if set(segment) & set("*{}"):
        raise ValueError(f"{show(text)}: write {{name}} for one whole segment, and * only as the last one")
    return _folded(segment)


def readings(path: str) -> Iterable[Segments]:
    """Every way in which an application may read a path; almost always one.

    An application may resolve `..`, or take it for a name; before it joins slashes, or after that; it may compare
    letters as they are, or as Unicode says that they are the same. Of bytes that are no UTF-8 it may make something
    else, or leave them out, or take the whole path for Latin-1. A request is held to the rules of all its readings.

    Such bytes are surrogates here, as `surrogateescape` makes them. WSGI has them; ASGI does not hand them over.
    """
    path = path.removesuffix("\n")
    if path.isascii() and "/." not in path:
        return (_split(path.lower()),)
    ways: dict[Segments, None] = {}
    for decoded in (path, _NO_UTF_8.sub("", path), _latin(path)) if _NO_UTF_8.search(path) else (path,):
        for text in dict.fromkeys((decoded.casefold(), _folded(decoded))):
            spelled = _split(text)
            for reading in (spelled, _resolved(spelled), _resolved(text.split("/"))):
                ways[reading] = None
    return ways


def names(path: str, mount: str) -> Iterable[tuple[Segments, ...]]:
    """The same, each with all names that a rule may call it by.

    `mount` is what the application is mounted under ("" for nothing): root_path of ASGI, SCRIPT_NAME of WSGI. Some
    servers hand the path over with it and some without, and frameworks take either for the same page.
    """
    mount = mount.rstrip("/")
    if not mount:
        return [(reading,) for reading in readings(path)]
    rest = path.removeprefix(mount)
    if rest and not rest.startswith("/"):
        rest = path
    above = _split(_folded(mount))
    named: dict[Segments, tuple[Segments, ...]] = {}
    for inside in readings(rest):
        named[(*above, *inside)] = ((*above, *inside), inside)
    for whole in readings(mount + rest):
        below = whole[: len(above)] == above
        named.setdefault(whole, (whole, whole[len(above) :]) if below else (whole,))
    _, _, behind = path.partition(mount)
    if behind:  # Litestar cuts off all up to where the mount first stands
        for inside in readings(behind):
            named.setdefault((*above, *inside), ((*above, *inside), inside))
    return named.values()


def _latin(path: str) -> str:
    return _NO_TEXT.sub("", path).encode("utf-8", "surrogateescape").decode("latin-1")


def _split(path: str) -> Segments:
    return tuple([segment for segment in path.split("/") if segment])


def _folded(text: str) -> str:
    """The text, with one letter for all that a comparison without case, or a normal form, takes for the same."""
    if text.isascii():
        return text.lower()
    if _MANY.search(text):
        text = _with_few_marks(text)
    # upper() makes i of a dotless i, and casefold() leaves the dot of a dotted I as a mark that no small i has.
    return normalize("NFKC", normalize("NFKD", text).upper().casefold()).replace("\u0307", "")


def _with_few_marks(text: str) -> str:
    """Without the marks beyond MAX_MARKS of one letter."""
    kept, marks = [], 0
    for char in text:
        marks = marks + 1 if _is_mark(char) else 0
        if marks <= MAX_MARKS:
            kept.append(char)
    return "".join(kept)


@lru_cache(maxsize=1024)
def _is_mark(char: str) -> bool:
    return combining(normalize("NFKD", char)[0]) > 0


def _resolved(segments: Sequence[str]) -> Segments:
    kept: list[str] = []
    for segment in segments:
        if segment == "..":
            del kept[-1:]
        elif segment != ".":
            kept.append(segment)
    return tuple([segment for segment in kept if segment])
