"""Files beside the ledger's, deleted while processes have them open: whoever restores a copy by hand does that.

SQLite itself says that this damages a database. Each process must find it out before it decides anything.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from support.commands import Quota

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 60
CONFIG = f"""
[ledger]
url = "sqlite:///ledger.db"
[credentials.main]
api = "youtube-v3"
[[credentials.main.limits]]
name = "day"
units = {LIMIT}
window = "24h"
"""
CHARGER = """
import sys, time, quota
with quota.open() as session:
    for line in sys.stdin:
        time.sleep(0.002)  # the answer is as old as that of a process that has its requests to make
        print(session.budget().charge("videos.list").reason, flush=True)
"""


@pytest.mark.parametrize("deleted", [("-shm",), ("-wal",), ("-wal", "-shm")], ids="+".join)
@pytest.mark.parametrize("restored", [False, True], ids=["", "restored"])
def test_files_deleted_beside_an_open_ledger_split_it_for_nobody(
    tmp_path: Path, deleted: tuple[str, ...], restored: bool
) -> None:
    command = Quota(tmp_path)
    command.configure(CONFIG)
    with ExitStack() as stack:

        def charger() -> subprocess.Popen[str]:
            return stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", CHARGER],
                    cwd=tmp_path,
                    env=command.env,
                    text=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )

        def charge(process: subprocess.Popen[str]) -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        chargers = [charger(), charger()]
        reasons = [charge(process) for process in chargers]
        if restored:
            command.shell("cp ledger.db copy")
            reasons += [charge(process) for process in chargers]
            command.shell("cp copy ledger.db")  # into the same file, so its inode stays
        for suffix in deleted:
            (tmp_path / f"ledger.db{suffix}").unlink()
        chargers.append(charger())
        for _ in range(LIMIT):
            reasons += [charge(process) for process in reversed(chargers)]
        assert reasons.count("ok") == LIMIT
        assert set(reasons) <= {"ok", "limit", "ledger-unavailable"}
        assert reasons[-3:] == ["limit"] * 3
        (limit,) = command.json("status")["credentials"][0]["limits"]
        assert limit["used_units"] == LIMIT
