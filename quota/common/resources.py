"""Reads the files shipped inside the packages: Lua scripts, cost books, schemas."""

from __future__ import annotations

from importlib.resources import files


def read_text(package: str, name: str) -> str:
    """The text of a shipped file, for example `read_text("quota.lua", "charge.lua")`."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def list_names(package: str, folder: str) -> list[str]:
    """The names of the files in a shipped folder."""
    return [path.name for path in files(package).joinpath(folder).iterdir()]
