"""Reads the files shipped inside the packages: Lua scripts, cost books, schemas."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def read_text(package: str, name: str) -> str:
    """The text of a shipped file, for example `read_text("quota.lua", "charge.lua")`."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def list_names(package: str, folder: str) -> list[str]:
    """The names of the files in a shipped folder."""
    return [path.name for path in files(package).joinpath(folder).iterdir()]


def path_of(package: str, name: str) -> Path:
    """Where a shipped file lies, for programs that read it themselves."""
    return Path(str(files(package).joinpath(name)))
