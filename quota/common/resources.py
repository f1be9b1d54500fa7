"""Reads the files shipped inside the packages: Lua scripts, cost books, schemas."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path


def _folder(package: str) -> Path:
    # pip always installs the packages as plain folders. importlib.resources would add 6 ms to every cold start.
    return Path(import_module(package).__path__[0])


def read_text(package: str, name: str) -> str:
    """The text of a shipped file, for example `read_text("quota.lua", "charge.lua")`."""
    return (_folder(package) / name).read_text(encoding="utf-8")


def list_names(package: str, folder: str) -> list[str]:
    """The names of the files in a shipped folder."""
    return [path.name for path in (_folder(package) / folder).iterdir()]
