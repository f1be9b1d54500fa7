"""Files shipped inside the packages: Lua scripts, cost books, schemas."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path


def _folder(package: str) -> Path:
    # The packages are plain folders wherever pip puts them; importlib.resources would cost 6 ms of every cold start.
    return Path(import_module(package).__path__[0])


def read_text(package: str, name: str) -> str:
    """The text of a shipped file, for example `read_text("quota.lua", "charge.lua")`."""
    return (_folder(package) / name).read_text(encoding="utf-8")


def list_names(package: str, folder: str) -> list[str]:
    """The names of the files in a shipped folder."""
    return [path.name for path in (_folder(package) / folder).iterdir()]
