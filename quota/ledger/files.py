"""SQLite files: the path in a URL, and who else could change the file. A ledger, a store and an inbound storage are
such files.

The URL is `sqlite:///relative/path` or `sqlite:////absolute/path`; `sqlite://` is a database in memory.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from quota.common.files import FOLDER, NO_FILE, doubt_of_database
from quota.common.text import one_line
from quota.errors import ConfigError

IN_MEMORY = "memory:"
"""The url of a ledger that ends with its process."""


def path_of(url: str) -> str:
    """The path of a URL; empty for a database in memory."""
    return "" if url.startswith(IN_MEMORY) else url.removeprefix("sqlite://").removeprefix("/")


def label_of(path: str) -> str:
    return f"sqlite:///{path}" if path else "sqlite:// (in memory)"


def absolute(url: str, folder: Path) -> str:
    """The URL with an absolute path. Raises ConfigError if it names no file."""
    rest = url.removeprefix("sqlite://")
    a_file = "a file is sqlite:///relative/path or sqlite:////absolute/path"
    if rest in ("", "/", "/:memory:", "memory:"):
        raise ConfigError(f"a database in memory is lost when the command ends; {a_file}")
    if not rest.startswith("/"):
        raise ConfigError(a_file)
    check_options(url, "SQLite url")
    path = absolute_path(rest[1:], folder)
    if os.path.isdir(path):
        raise ConfigError("this is a folder; name a file in it")
    return f"sqlite:///{path}"


def absolute_path(text: str, folder: Path) -> str:
    """The absolute path of a text that is relative to a folder. Raises ConfigError."""
    if not text.isprintable():
        raise ConfigError("a path has no control characters")
    if text != text.strip():
        raise ConfigError("a path does not begin or end with a space")
    if re.search(r"\$\{\w+\}|(^|/)\$\w+(/|$)", text):
        raise ConfigError(f"{one_line(text)}: no variable is replaced in a path; write it out, with ~ for your home")
    try:
        return str(folder / Path(text).expanduser())
    except RuntimeError:  # ~nobody
        raise ConfigError(f"{one_line(text)}: this home folder is unknown; write the path out") from None


def check_options(url: str, what: str) -> None:
    """Raises ConfigError for a URL with an option or a fragment: SQLite would take it for a part of the file's name."""
    place, mark, option = url.partition("?")
    name, equals, _ = option.partition("=")
    if mark and equals and name.isidentifier():
        raise ConfigError(f"{what} {place}: it has no option {name!r}; an SQLite url has none, so remove it")
    if (end := re.search(r"\.\w+([#?])[^/]*$", url)) is not None:
        place = url[: end.start(1)]
        raise ConfigError(f"{what} {place}: an SQLite url ends with its path; remove {end[1]} and what follows")


def refuse_others(path: str, what: str) -> None:
    """Raises ConfigError for a file that others could change: then nothing opens it, and no allowance replaces it."""
    try:
        why = doubt_of_database(path) if path else ""
        if path and not why:
            os.stat(path)
    except PermissionError as error:
        raise ConfigError(
            f"{what} {one_line(path)}: {error.strerror}; run this as the user that may open it, or name another file"
        ) from None
    except OSError:  # there is none yet, or whoever opens it says what is wrong
        pass
    if why:
        remedy = "let only this user own and write the file and its folder (chown, chmod)"
        if why.endswith((NO_FILE, FOLDER)):
            remedy = "name another file, or move this one away"
        raise ConfigError(f"{what} {one_line(path)}: {one_line(why)}; {remedy}")
