"""Plain TOML, read line by line: to import `tomllib` and what it needs takes longer than a decision.

    [table] and [[array.of.tables]]     each header once, an outer table not after an inner one
    key = value                         keys bare or in double quotes
    "text"  9_500  true  2026-06-01     no escapes, signs and fractions
    ["a", "b"]  { key = value }         in one line

`read_plain` returns exactly what `tomllib` would, or None for a text that has, or may have, anything else: also for one
that is wrong, so that all errors are those of `tomllib`. A fuzz test compares the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_DEPTH = 4
MAX_DIGITS = 18


class _NotPlain(Exception):  # noqa: N818  # not an error: somebody else reads it
    pass


def read_plain(text: str) -> dict[str, Any] | None:
    """The tables of a plain text; None if it is not plain."""
    if not text.replace("\n", "").replace("\t", "").isprintable():
        return None
    try:
        return _tables(text.split("\n"))
    except _NotPlain:
        return None


def _tables(lines: list[str]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    table = root
    tables, arrays = {id(root)}, set[int]()  # what headers made: the rest is values, which have no headers inside
    for whole in lines:
        line = whole.strip(" \t")
        if not line or line[0] == "#":
            continue
        if line[0] != "[":
            name, equals, value = line.partition("=")
            if not equals:
                raise _NotPlain
            _add(table, name, _value(value.strip(" \t"), MAX_DEPTH))
            continue
        brackets = 2 if line.startswith("[[") else 1
        if not line.endswith("]" * brackets):
            raise _NotPlain
        *outer, name = map(_key, line[brackets:-brackets].split("."))
        parent = root
        for one in outer:
            if one not in parent:
                parent[one] = {}
                tables.add(id(parent[one]))
            parent = parent[one]
            if id(parent) not in tables:
                raise _NotPlain
        table = {}
        tables.add(id(table))
        if brackets == 1:
            _add(parent, name, table)
            continue
        if name not in parent:
            parent[name] = []
            arrays.add(id(parent[name]))
        if id(parent[name]) not in arrays:
            raise _NotPlain
        parent[name].append(table)
    return root


def _add(table: dict[str, Any], name: str, value: object) -> None:
    key = _key(name)
    if key in table:
        raise _NotPlain
    table[key] = value


def _key(text: str) -> str:
    key = text.strip(" \t")
    if len(key) > 2 and key[0] == key[-1] == '"':
        key = key[1:-1]
        if '"' in key or "\\" in key:
            raise _NotPlain
    elif not (key.isascii() and key.replace("-", "0").replace("_", "0").isalnum()):
        raise _NotPlain
    return key


def _value(text: str, depth: int) -> Any:
    kind = text[:1]
    if kind == '"':
        value, _, rest = text[1:].partition('"')
        if "\\" in value or len(value) + 2 > len(text) or rest.lstrip(" \t")[:1] not in ("", "#"):
            raise _NotPlain
        return value
    if '"' not in text:
        text = text.partition("#")[0].rstrip(" \t")
    if kind in ("[", "{"):
        if not depth or "#" in text or text[-1] != {"[": "]", "{": "}"}[kind]:
            raise _NotPlain
        items = list(_split(text[1:-1].strip(" \t")))
        if kind == "[":
            return [_value(item, depth - 1) for item in items]
        inline: dict[str, Any] = {}
        for item in items:
            name, _, value = item.partition("=")
            _add(inline, name, _value(value.strip(" \t"), depth - 1))
        return inline
    if text in ("true", "false"):
        return text == "true"
    if len(text) == 10 and text[4] == text[7] == "-":
        return _day(text)
    digits = text.replace("_", "")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS):
        raise _NotPlain
    if (digits[0] == "0" and digits != text[:1]) or text[0] == "_" or text[-1] == "_" or "__" in text:
        raise _NotPlain
    return int(digits)


def _split(text: str) -> Iterator[str]:
    """The items between the commas that stand in no string and in no inner brackets."""
    depth, quoted, start = 0, False, 0
    for at, character in enumerate(text):
        if character == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and not depth:
            yield text[start:at].strip(" \t")
            start = at + 1
    if text:
        yield text[start:].strip(" \t")


def _day(text: str) -> object:
    from datetime import date

    if not (text[:4] + text[5:7] + text[8:]).isdigit():
        raise _NotPlain
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise _NotPlain from None
