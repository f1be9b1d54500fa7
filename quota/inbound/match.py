"""Patterns and the paths that they match. A visitor cannot avoid a rule by spelling a path differently.

    /login              this path
    /users/{id}         any one segment in this place
    /api/*              this path and everything below it; `*` is only allowed at the end

A pattern is matched segment by segment. The time depends on the length of the pattern, not on what a client sends.

Paths are decoded, as the server passes them to the application. Their meaning depends on the application, which this
module does not know. So it assumes every meaning:

- Upper case, empty segments, and a slash or line feed at the end make no difference: `//Login/` is `/login`. (Many
  routers match with a regular expression that ends with `$`, which accepts a last line feed.)
- A path with `.` or `..`, with letters that Unicode writes in several ways, or with bytes that are not UTF-8, has
  several readings. All of them count: see `readings`.
- An application mounted at `/api` is reached as `/api/login` and sees `/login`. A rule may use either: see `names`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple
from unicodedata import combining, normalize

from quota.common.hosts import without_dots
from quota.common.text import show

ANY_SEGMENT = "{}"
"""A segment of a pattern that matches any segment. No literal segment is spelled like this."""

MAX_PATTERN = 256
MAX_MARKS = 30
"""The most marks, such as accents, of one letter that are compared, as in Unicode's stream-safe text (UAX #15). Sorting
takes the square of their number, which a client chooses."""

_MANY = re.compile(rf"[^\x00-\x7f]{{{MAX_MARKS + 1}}}")
_NO_UTF_8, _NO_TEXT = re.compile("[\udc80-\udcff]"), re.compile("[\ud800-\udc7f\udd00-\udfff]")
_NO_PATTERN = re.compile(r"<.*>|:\w+|.*\\.*|.*\$")
"""Segments of other notations: Flask and Django, Rails and Express, regular expressions."""

_NAMED = re.compile(r"\{[A-Za-z_][A-Za-z0-9_]{0,63}\}")

Segments = tuple[str, ...]


class Pattern(NamedTuple):
    """A parsed pattern. `below`: everything below these segments matches too."""

    segments: Segments
    below: bool

    def matches(self, path: Segments) -> bool:
        """Whether the pattern matches one reading of a path."""
        own = self.segments
        if len(path) < len(own) or (len(path) > len(own) and not self.below):
            return False
        return all(mine is ANY_SEGMENT or mine == theirs for mine, theirs in zip(own, path, strict=False))

    def covers(self, other: Pattern) -> bool:
        """Whether this pattern matches every path that `other` matches."""
        return self.matches(other.segments) and (self.below or not other.below)


EVERYTHING = Pattern((), below=True)


def parse_pattern(text: str) -> Pattern:
    """Parse a pattern. Raises ValueError with the mistake and the remedy."""
    if not text.startswith("/"):
        raise ValueError(f"{show(text)} is not a path; a path begins with /")
    if len(text) > MAX_PATTERN or not text.isprintable():
        raise ValueError(f"{show(text)}: a pattern has at most {MAX_PATTERN} printable characters")
    if "?" in text or "#" in text:
        raise ValueError(f"{show(text)}: a pattern matches the path only; remove everything from ? or #")
    if re.search(r"%[0-9A-Fa-f]{2}", text):
        raise ValueError(f"{show(text)}: rules compare decoded paths; write the character itself")
    *firsts, last = [segment for segment in text.split("/") if segment] or [""]
    below = last == "*"
    if last and not below:
        firsts.append(last)
    return Pattern(tuple(_segment(segment, text) for segment in firsts), below)


def _segment(segment: str, text: str) -> str:
    if segment in (".", ".."):
        raise ValueError(f"{show(text)}: a pattern cannot have a segment . or ..")
    if _NAMED.fullmatch(segment):
        return ANY_SEGMENT
    if _NO_PATTERN.fullmatch(segment):
        raise ValueError(
            f"{show(text)}: this is a framework's route or a regular expression; write {{name}} for one whole segment"
        )
    if set(segment) & set("*{}"):
        raise ValueError(f"{show(text)}: write {{name}} for one whole segment, and * only as the last one")
    return _folded(segment)


def readings(path: str) -> Iterable[Segments]:
    """Every way in which an application may read a path; almost always only one.

    An application may resolve `..` before or after it joins slashes, or treat it as a name. It may compare letters as
    they are, or as Unicode normalizes them. It may replace bytes that are not UTF-8, drop them, or read the whole path
    as Latin-1. The rules of all readings count the request.

    Such bytes are surrogates here, from `surrogateescape`. WSGI passes them on; ASGI does not.
    """
    path = path.removesuffix("\n")
    if path.isascii() and "/." not in path:
        return (_split(path.lower()),)
    ways: dict[Segments, None] = {}
    decodings = [path]
    if _NO_UTF_8.search(path):
        as_latin = _NO_TEXT.sub("", path).encode("utf-8", "surrogateescape").decode("latin-1")
        decodings += [_NO_UTF_8.sub("", path), as_latin]
    for decoded in decodings:
        for text in dict.fromkeys((decoded.casefold(), _folded(decoded))):
            spelled = _split(text)
            for segments in (spelled, without_dots(spelled), without_dots(text.split("/"))):
                ways[tuple(filter(None, segments))] = None
    return ways


def names(path: str, mount: str) -> Iterable[tuple[Segments, ...]]:
    """The readings of a path, each with every name that a rule may use for it.

    `mount` is the path under which the application is mounted, or "": root_path of ASGI, SCRIPT_NAME of WSGI. Some
    servers include it in the path and some do not, and frameworks serve the same page for both.
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
    if behind:  # Litestar removes everything up to the first occurrence of the mount
        for inside in readings(behind):
            named.setdefault((*above, *inside), ((*above, *inside), inside))
    return named.values()


def _split(path: str) -> Segments:
    return tuple([segment for segment in path.split("/") if segment])


def _folded(text: str) -> str:
    """The text in one spelling for all letters that are equal without case or in a Unicode normal form."""
    if text.isascii():
        return text.lower()
    if _MANY.search(text):
        text = _with_few_marks(text)
    # upper() turns a dotless i into I. casefold() leaves the dot of a dotted I as a mark, which a plain i lacks.
    return normalize("NFKC", normalize("NFKD", text).upper().casefold()).replace("\u0307", "")


def _with_few_marks(text: str) -> str:
    """The text without the marks beyond MAX_MARKS of each letter."""
    kept, marks = [], 0
    for char in text:
        marks = marks + 1 if _is_mark(char) else 0
        if marks <= MAX_MARKS:
            kept.append(char)
    return "".join(kept)


@lru_cache(maxsize=1024)
def _is_mark(char: str) -> bool:
    return combining(normalize("NFKD", char)[0]) > 0
