"""Reads the files shipped inside the packages: Lua scripts, cost books, schemas.

They lie in folders. `importlib.resources` reads them from zip files too, and takes 3% of a cold `quota charge`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path


def read_text(package: str, name: str) -> str:
    """The text of a shipped file, for example `read_text("quota.lua", "charge.lua")`."""
    return _folder(package).joinpath(name).read_text(encoding="utf-8")


def list_names(package: str, folder: str) -> list[str]:
    """The names of the files in a shipped folder."""
    return [path.name for path in _folder(package).joinpath(folder).iterdir()]


def path_of(package: str, name: str) -> Path:
    """Where a shipped file lies, for programs that read it themselves."""
    return _folder(package).joinpath(name)


def _folder(package: str) -> Path:
    return Path(import_module(package).__path__[0])
