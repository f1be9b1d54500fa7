"""The URL of an SQLite file: `sqlite:///relative/path`, `sqlite:////absolute/path`; `sqlite://` is one in memory."""

from __future__ import annotations

import os
from pathlib import Path

from quota.common.text import one_line
from quota.errors import ConfigError


def path_of(url: str) -> str:
    """The path; empty in memory."""
    return url.removeprefix("sqlite://").removeprefix("/")


def label_of(path: str) -> str:
    return f"sqlite:///{path}" if path else "sqlite:// (in memory)"


def absolute(url: str, folder: Path) -> str:
    """The URL with its path made absolute. Raises ConfigError for what names no file."""
    rest = url.removeprefix("sqlite://")
    a_file = "a file is sqlite:///relative/path or sqlite:////absolute/path"
    if rest in ("", "/", "/:memory:"):
        raise ConfigError(f"a database in memory is lost when the command ends; {a_file}")
    if not rest.startswith("/"):
        raise ConfigError(a_file)
    check_options(url, "SQLite url")
    path = absolute_path(rest[1:], folder)
    if os.path.isdir(path):
        raise ConfigError("this is a folder; name a file in it")
    return f"sqlite:///{path}"


def absolute_path(text: str, folder: Path) -> str:
    """A path as it is written, from that folder on. Raises ConfigError."""
    if not text.isprintable():
        raise ConfigError("a path has no control characters")
    try:
        return str(folder / Path(text).expanduser())
    except RuntimeError as error:  # ~nobody
        raise ConfigError(one_line(error)) from None


def check_options(url: str, what: str) -> None:
    """Raises ConfigError for a URL with an option: it would be part of the file's name."""
    place, mark, option = url.partition("?")
    name, equals, _ = option.partition("=")
    if mark and equals and name.isidentifier():
        raise ConfigError(f"{what} {place}: it has no option {name!r}; an SQLite url has none, so remove it")
