"""An installation as its owner has it: a folder with a configuration, a key, a ledger and a store."""

from __future__ import annotations

import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import quota
from quota.deciding.history import charges
from quota.jobs.emulator import Emulator
from quota.jobs.job import RunReport
from quota.jobs.runner import RunOptions, run_job
from quota.rules.spent import Spent
from support.commands import Quota
from support.forked import Forked
from support.patience import without_waits

_numbers = count()


class Installation:
    """One folder. Its kinds write the configuration that their tests need.

    `clock` (ms since the epoch) is the time of ledger, budget and store; None is the host's.
    """

    def __init__(self, folder: Path, upstream: Emulator | None = None, *, key: str = "a-key-for-tests") -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.upstream = upstream
        self.quota = Quota(folder)
        self.clock: Callable[[], int] | None = None
        (folder / "key").write_text(key)

    @property
    def config(self) -> Path:
        return self.folder / "quota.toml"

    @property
    def requests(self) -> int:
        """The requests that reached the emulated upstream."""
        assert self.upstream is not None
        number: int = self.upstream.usage()["requests"]
        return number

    def own_fetch(self, source: str) -> str:
        """The name of a function `fetch` beside the configuration, in a module that no process has imported yet."""
        module = f"own_fetch_{next(_numbers)}"
        (self.folder / f"{module}.py").write_text("from quota.jobs.job import Page, first_attempt\n" + source)
        return f"{module}:fetch"

    def run(self, job: str, **options: Any) -> RunReport:
        """One run, in this process."""
        with quota.open(self.config, clock=self.clock) as session, without_waits():
            return run_job(session, job, RunOptions(**options))

    def start(self, *args: str, **options: Any) -> subprocess.Popen[str] | Forked:
        """A `quota` command in a process of its own, or a Python program."""
        return self.quota.start(*args, **options)

    def entries(self) -> list[Spent]:
        """All charges in the ledger."""
        with quota.open(self.config, clock=self.clock) as session:
            return charges(session.project("main"))

    def units(self) -> int:
        return sum(entry.units for entry in self.entries())

    def rows(self, sql: str, *values: object) -> list[Any]:
        """Rows of the store."""
        with closing(sqlite3.connect(self.folder / "videos.db")) as db:
            return db.execute(sql, values).fetchall()

    def count(self, table: str) -> int:
        number: int = self.rows(f"SELECT count(*) FROM {table}")[0][0]  # noqa: S608  # the tests' own names
        return number

    def change(self, sql: str, *values: object) -> None:
        """Change the store behind its back."""
        with closing(sqlite3.connect(self.folder / "videos.db")) as db, db:
            db.execute(sql, values)


def outcomes(report: RunReport) -> dict[str, str]:
    return {region.region: region.outcome for region in report.regions}
