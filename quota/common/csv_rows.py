"""The CSV of every command: a header, and a line for each row."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any


class _Lines:
    """A file in which rows end with a line feed. With that as its own ending, csv would leave a carriage return
    unquoted."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, row: str) -> int:
        return self._file.write(row.removesuffix("\r\n") + "\n")


def csv_writer(file: IO[str], columns: Sequence[str]) -> Callable[[Mapping[str, Any]], object]:
    """Writes the header. Returns what writes one row; a list or an object becomes JSON."""
    writer = csv.DictWriter(_Lines(file), columns, restval="", extrasaction="ignore", lineterminator="\r\n")
    writer.writeheader()
    return lambda row: writer.writerow({name: _cell(value) for name, value in row.items()})


def _cell(value: Any) -> Any:
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else value
