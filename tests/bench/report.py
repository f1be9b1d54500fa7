"""Tables of at most 80 columns on stdout, and progress on stderr."""

from __future__ import annotations

import platform
import sqlite3
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import redis

from bench.race import Row, pinned
from support.servers import RedisServer

NAME_WIDTH = 43
BAR_WIDTH = 48


@dataclass(frozen=True)
class Bar:
    """A ratio, a time or a size that the product is held to: at most `most`."""

    name: str
    measured: float
    most: float
    unit: str = "x"

    @property
    def met(self) -> bool:
        return self.measured <= self.most


@dataclass
class Report:
    """What was measured so far. Each table is printed when it is complete."""

    bars: list[Bar] = field(default_factory=list)

    def begin(self, title: str) -> None:
        print(f"{title} ...", file=sys.stderr, flush=True)

    def race(self, title: str, rows: Sequence[Row], note: str = "") -> None:
        """A table of a race; the first row is its floor."""
        self._title(title, note)
        print(f"{'':<{NAME_WIDTH}}{'us':>8}{'ratio':>7}{'8 of 10':>14}{'mean':>7}")
        for row in rows:
            spread = f"{row.low:.2f}-{row.high:.2f}"
            print(f"{row.name:<{NAME_WIDTH}}{row.us:>8.0f}{row.ratio:>7.2f}{spread:>14}{row.mean:>7.2f}")

    def ratios(self, title: str, columns: Sequence[str], rows: Mapping[str, Sequence[float]]) -> None:
        """A table of ratios, a row for each name."""
        self._title(title, "")
        print(f"{'':<{NAME_WIDTH}}" + "".join(f"{column:>10}" for column in columns))
        for name, ratios in rows.items():
            print(f"{name:<{NAME_WIDTH}}" + "".join(f"{ratio:>10.2f}" for ratio in ratios))

    def sizes(self, title: str, rows: Sequence[tuple[str, int, int]], note: str = "") -> None:
        """A table of sizes: name, bytes, and how many charges they hold."""
        self._title(title, note)
        print(f"{'':<{NAME_WIDTH}}{'bytes':>12}{'a charge':>12}")
        for name, size, charges in rows:
            print(f"{name:<{NAME_WIDTH}}{size:>12,}{size / charges:>12.1f}")

    def show_bars(self) -> None:
        """Everything that there is a bar for."""
        if not self.bars:
            return
        self._title("The bars", "")
        print(f"{'':<{BAR_WIDTH}}{'measured':>13}{'bar':>11}")
        for bar in self.bars:
            measured, most = f"{bar.measured:,.2f} {bar.unit}", f"{bar.most:g} {bar.unit}"
            print(f"{bar.name:<{BAR_WIDTH}}{measured:>13}{most:>11}{'ok' if bar.met else 'above':>7}")

    def _title(self, title: str, note: str) -> None:
        print(f"\n{title}" + (f"\n{note}" if note else ""))


@contextmanager
def measuring() -> Iterator[tuple[Report, RedisServer, Path]]:
    """A report, a server on the CPU of this process, and a folder; then the bars."""
    report = Report()
    with (
        pinned() as is_pinned,  # before the server starts: a child inherits it
        tempfile.TemporaryDirectory(prefix="quota-bench-") as folder,
        RedisServer() as server,
    ):
        with redis.Redis(port=server.port) as client:
            version = client.info("server")["redis_version"]
        about = {
            "Python": platform.python_version(),
            "SQLite": sqlite3.sqlite_version,
            "Redis": version,
            "redis-py": redis.__version__,
            "CPUs": "1" if is_pinned else "not pinned",
        }
        print(", ".join(f"{name} {value}" for name, value in about.items()))
        yield report, server, Path(folder)
    report.show_bars()
