"""Random text, numbers and values, and damage to what was right."""

from __future__ import annotations

import datetime
import math
from random import Random
from typing import Any

ODD_TEXT = (
    "", " ", "\t", "\n", "\r\n", "\0", "\x1b[31m", "\x7f", "\x85", "\u2028", "\u202e", "\u200b", "\ufeff", "\ufffd",
    "é", "e\u0301", "日本語", "🎉", "\U0010ffff", "-", "--", "-1", "0", "1", "1e999", "0x10", "nan", "true", "null",
    "../../etc/passwd", "/", "~", "~nobody-at-all", "~/x", "%", "%s", "%00", "{", "}", "[", "]", "'", '"', "\\", "\\u",
    "=", "#", ",", ".", ":", "://", "*", "|", "@", "a" * 65, "b" * 300,
    "b" * 300 + "/x", "c/" * 200, "d." * 200, "9" * 30, "&#" + "9" * 5000 + ";", "&lt;", "<b>", "<script>", "24h", "0h",
    "999999999999d", "*/30 * * * *", "* * 30 2 *", "every 1ms", "every 999999999999d", "America/Los_Angeles", "Europe",
    "UTC", "posixrules", "tzdata.zi", "youtube-v3", "gmail-v1", "US", "main", "videos.list", "search.list", "units",
    "env:HOME", "env:", "file:", "file:/dev/null", "file:/", "sqlite://", "sqlite:///", "sqlite:////", "sqlite:///x.db",
    "redis://:pass@h:1/0", "redis://[", "http://h", "trending", "os:system", "x:y", "None", "day", "month", "calls",
)  # fmt: skip
URLS = (
    "sqlite:///~nobody-at-all/x.db", "sqlite:///var/lib/x.db", "sqlite:////proc/1/x/y.db", "sqlite:///" + "u" * 300,
    "sqlite:///" + "u/" * 3_000, "redis://:pw@[/0", "rediss://h:x/0", "redis+sentinel://", "unix://", "x://y",
)  # fmt: skip
SPANS = ("0s", "1ms", "3651d", "999999999999d", "1 h", "\uff11h", "24h", "31d")
ZONES = ("", "UTC", "Europe", "posix/UTC", "../UTC", "/etc/passwd", "zone.tab", "Etc/GMT+1", "\u0130stanbul", "z" * 300)
HINTS: dict[object, tuple[Any, ...]] = {
    "url": URLS,
    "key": ("file:~nobody-at-all/k", "file:" + "k" * 5_000, "file:.", "env:" + "V" * 200, "AIza" + "x" * 35, "env:A=B"),
    "endpoint": ("http://h:99999999/", "http://[::1", "https://u:p@h/", "http://h/?key=AIza" + "x" * 35, "http://h//"),
    "api": ("./quota.toml", "../" * 300 + "x.toml", "x" * 300 + ".toml", "youtube-v4", "/dev/null", "\n.toml"),
    "window": SPANS,
    "retention": SPANS,
    "stagger": SPANS,
    "jitter": SPANS,
    "misfire_grace": SPANS,
    "resets": SPANS,
    "zone": ZONES,
    "timezone": ZONES,
    "schedule": (
        "* * * * *", "0 0 31 2 *", "0 0 30 2 0-6", "*/60 * * * *", "5-1 * * * *", "0 0 * * 8", "0 0 * JAN-dec sun-SAT",
        "every 0s", "every 999999999999d", "every", "every 1 h", "\u0661 * * * *", "1,2,3,4,5/1 * * * *", "* " * 5_000,
    ),
    "quota": (1, 10**15 - 1, 10**15),
    "pages": (0, 10**15 - 1),
    "leave": (0, 10**15 - 1, {"day": 0}, {"no": 1}),
    "fetch": ("os:system", "a.b:c", "a:b:c", "\u0661:x", "é:é", "trendin"),
    "machines": (0, 10**15 - 1),
}  # fmt: skip
LONE_SURROGATE = "\udc80"

NUMBERS = (
    0, 1, -1, 2, 7, 50, 100, 255, 9_500, 10_000, 2**31, 2**32, 2**53 - 1, 2**53, 10**15, 10**15 + 1, 2**63 - 1, 2**63,
    -(2**63), 2**64, 10**18, 10**30, -(10**30),
)  # fmt: skip
FLOATS = (0.0, -0.0, 0.5, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf)


def text(r: Random, *, surrogates: bool = True) -> str:
    """Some text: mostly short, seldom plain."""
    kind = r.random()
    if kind < 0.5:
        return r.choice(ODD_TEXT)
    if kind < 0.8:
        return "".join(r.choice(ODD_TEXT)[:40] for _ in range(r.randrange(1, 5)))
    if kind < 0.85 and surrogates:
        return r.choice(ODD_TEXT) + LONE_SURROGATE + r.choice(ODD_TEXT)
    if kind < 0.97:
        return "".join(chr(r.choice((r.randrange(128), r.randrange(0xD800)))) for _ in range(r.randrange(1, 30)))
    return r.choice(ODD_TEXT) * r.choice((100, 1_000, 5_000))


def value(r: Random, depth: int = 3, *, surrogates: bool = True, deepest: int = 600) -> Any:
    """A value as JSON has them."""
    kind = r.randrange(10 if depth > 0 else 7)
    if kind < 3:
        return text(r, surrogates=surrogates)
    if kind < 5:
        return r.choice(NUMBERS)
    if kind == 5:
        return r.choice((True, False, None))
    if kind == 6:
        return r.choice(FLOATS)
    if kind == 7:
        return {
            text(r, surrogates=surrogates): value(r, depth - 1, surrogates=surrogates, deepest=deepest)
            for _ in range(r.randrange(4))
        }
    if kind == 8:
        return [value(r, depth - 1, surrogates=surrogates, deepest=deepest) for _ in range(r.randrange(4))]
    return nested(r.choice((10, 60, deepest)), r.choice(([], {}, "x", 1)), in_list=r.random() < 0.5)


def nested(depth: int, inner: Any, *, in_list: bool) -> Any:
    for _ in range(depth):
        inner = [inner] if in_list else {"a": inner}
    return inner


def toml_value(r: Random, depth: int = 3) -> Any:
    """A value as TOML has them."""
    if r.random() < 0.1:
        return r.choice(
            (
                16**5_000,  # more digits than Python prints
                datetime.date(1, 1, 1),
                datetime.date(9999, 12, 31),
                datetime.time(23, 59, 59, 999_999),
                datetime.datetime(2026, 2, 28, 1, 2, 3),  # noqa: DTZ001  # TOML has such times
                datetime.datetime(1, 1, 1, tzinfo=datetime.UTC),
            )
        )
    return value(r, depth, surrogates=False, deepest=120)


def mutated(r: Random, data: Any, make: Any = value) -> Any:
    """A copy of a nested value with one thing in it changed, removed, doubled, renamed or replaced."""
    if isinstance(data, str) and r.random() < 0.4:
        at = r.randrange(len(data) + 1)
        return data[:at] + text(r, surrogates=False) + r.choice((data[at:], ""))
    if not isinstance(data, (dict, list)) or not data or r.random() < 0.05:
        return make(r)
    copy = data.copy()
    key: Any = r.choice(list(copy)) if isinstance(copy, dict) else r.randrange(len(copy))
    kind = r.randrange(12)
    if key in HINTS and kind > 5:
        kind = 3
    if kind == 0:
        del copy[key]
    elif kind == 1 and isinstance(copy, dict):
        copy[text(r, surrogates=False)] = make(r)
    elif kind == 1:
        copy.append(copy[key])
    elif kind == 2 and isinstance(copy, dict):
        copy[text(r, surrogates=False)] = copy.pop(key)
    elif kind == 3:
        copy[key] = r.choice(HINTS[key]) if key in HINTS and r.random() < 0.7 else make(r)
    else:
        copy[key] = mutated(r, copy[key], make)
    return copy


def damaged(r: Random, data: bytes, most: int = 6) -> bytes:
    """Bytes with up to `most` bits flipped, pieces removed, doubled, moved, overwritten or put in; or cut off."""
    out = bytearray(data)
    for _ in range(r.randrange(1, most + 1)):
        if not out:
            return b""
        at, size = r.randrange(len(out)), r.choice((1, 1, 2, 4, 8, 30, 200))
        kind = r.randrange(8)
        if kind == 0:
            out[at] ^= 1 << r.randrange(8)
        elif kind == 1:
            out[at : at + size] = b""
        elif kind == 2:
            out[at:at] = out[at : at + size]
        elif kind == 3:
            out[at : at + size] = r.randbytes(size)
        elif kind == 4:
            out[at:at] = text(r).encode("utf-8", "surrogatepass")
        elif kind == 5:
            other = r.randrange(len(out))
            out[at : at + size] = out[other : other + size]
        elif kind == 6:
            out[at] = r.choice(b'\0\n"[]{}=.\xff')
        elif r.random() < 0.3:
            del out[at:]
    return bytes(out)


def to_toml(data: dict[str, Any]) -> str:
    """A TOML text of these tables. What TOML has no form for is written as it is, and is then no TOML."""
    return "".join(f"{_toml_text(key)} = {_toml(item)}\n" for key, item in data.items())


def _toml(item: Any) -> str:
    if isinstance(item, bool):
        return "true" if item else "false"
    if isinstance(item, int):
        return hex(item) if item > 10**30 else str(item) if item > -(10**4000) else "-1"
    if isinstance(item, str):
        return _toml_text(item)
    if isinstance(item, dict):
        return "{" + ", ".join(f"{_toml_text(key)} = {_toml(inner)}" for key, inner in item.items()) + "}"
    if isinstance(item, list):
        return "[" + ", ".join(map(_toml, item)) + "]"
    if isinstance(item, (datetime.date, datetime.time)):
        return item.isoformat()
    return repr(item)


def _toml_text(item: str) -> str:
    return '"' + "".join(c if c.isprintable() and c not in '\\"' else f"\\U{ord(c):08X}" for c in item) + '"'
