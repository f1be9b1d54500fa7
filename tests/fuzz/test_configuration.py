"""Damaged and random configurations and cost books: settings and findings, or one line that names the file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from fuzz.generate import damaged, mutated, text, to_toml, toml_value
from fuzz.inputs import PARTS, Input, check_line, every
from fuzz.readings import NOW_MS
from quota.clients.upstream import upstream_of
from quota.errors import ConfigError
from quota.settings.books import default_limits, load_book
from quota.settings.lint import lint
from quota.settings.load import load_settings
from support.book_evidence import evidence_of
from support.configurations import EVERY_KEY

T = TypeVar("T")

CONFIG = Path(__file__).resolve().parents[2] / "config"
CONFIGURATIONS = [*(path.read_bytes() for path in sorted(CONFIG.glob("*.toml"))), EVERY_KEY.encode()]
BOOKS = sorted(path.stem for path in (CONFIG / "costs").glob("*.toml"))


@pytest.mark.parametrize("part", range(PARTS))
def test_a_configuration_is_read_or_refused_in_one_line(part: int, tmp_path: Path, state_dir: Path) -> None:
    def attempt(r: Input) -> None:
        path = _write(r, tmp_path / "quota.toml", CONFIGURATIONS)
        settings = _read(lambda: load_settings(path), "quota.toml")
        if settings is None:
            return
        for finding in lint(settings):
            check_line(str(finding))

    every("configuration", part, attempt)


@pytest.mark.parametrize("part", range(PARTS))
def test_a_cost_book_is_read_or_refused_in_one_line(part: int, tmp_path: Path, state_dir: Path) -> None:
    """Also through a configuration that names it. What the book then makes of its own answers names buckets."""
    config = tmp_path / "quota.toml"
    config.write_text('[credentials.main]\napi = "./book.toml"\n', encoding="utf-8")

    def attempt(r: Input) -> None:
        name = r.choice(BOOKS)
        path = _write(r, tmp_path / "book.toml", [(CONFIG / "costs" / f"{name}.toml").read_bytes()])
        book = _read(lambda: load_book(str(path)), "book.toml")
        if book is None:
            return
        for method in book.methods:
            book.price(method)
        assert default_limits(book)
        upstream = upstream_of(book)
        assert upstream.method("GET", "https://api.github.com/search/code?q=x") in (None, *book.methods)
        for row in evidence_of(name)[1]:
            body = row["body"] if isinstance(row["body"], str) else json.dumps(row["body"])
            reading = upstream.read(row["status"], row["headers"], body.encode(), method="read", at_ms=NOW_MS)
            assert all(closing.bucket for closing in reading.closes)
        settings = _read(lambda: load_settings(config), "quota.toml")
        for finding in lint(settings) if settings is not None else ():
            check_line(str(finding))

    every("cost-book", part, attempt)


def _read(read: Callable[[], T], named: str) -> T | None:
    try:
        return read()
    except ConfigError as error:
        message = str(error)
    check_line(message, 4_000)  # up to ten mistakes
    assert named in message
    return None


def _write(r: Input, path: Path, good: list[bytes]) -> Path:
    """A file made from one of the good ones, or from nothing."""
    kind, data = r.random(), r.choice(good)
    if kind < 0.3:
        data = damaged(r, data)
    elif kind < 0.95:
        tables = tomllib.loads(data.decode())
        for _ in range(r.choice((1, 1, 1, 2, 4))):
            changed = mutated(r, tables, toml_value)
            tables = changed if isinstance(changed, dict) else tables
        data = to_toml(tables).encode()
    elif kind < 0.97:
        depth = r.choice((10, 300, 2_000))
        data = r.choice(
            (
                f"[{'.'.join('a' * depth)}]\nb = 1".encode(),
                f"[credentials.main]\napi = 'youtube-v3'\n[jobs.x]\nfetch='trending'\n[jobs.x.options]\n"
                f"{'.'.join('a' * depth)} = 1".encode(),
                b"a = " + b"[" * depth + b"]" * depth,
                b"a = " + b"{a=" * depth + b"1" + b"}" * depth,
            )
        )
    else:
        data = r.choice((r.randbytes(r.randrange(200)), text(r).encode("utf-8", "surrogatepass")))
    r.data = data
    path.write_bytes(data)
    return path
