"""Disks that are full, folders that cannot be written, files that another process holds: for ledger, state and store.

In every case the command ends in one line that names the file, no unit is spent that cannot be recorded, nothing is
lost, and what works without the file works.
"""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import quota
from quota.jobs.emulator import Emulator
from quota.jobs.runner import RunOptions, run_job
from support.commands import Quota, one_line
from support.configurations import limited
from support.disks import fill, small_disk, without_temporary_folder
from support.forked import Forked
from support.installation import Installation
from support.processes import in_child
from support.servers import free_port
from support.users import not_root

CONFIG = """
[ledger]
url = "sqlite:///{ledger}/ledger.db"
unavailable = {{ max_cost = 1, allowance = 50 }}
[credentials.main]
api = "youtube-v3"
key = "file:key"
endpoint = "{endpoint}"
limits = [{{ name = "day", units = 9_500, window = "24h" }}]
[store]
url = "sqlite:///{store}/videos.db"
[jobs.t]
fetch = "trending"
pages = 4
regions = ["US", "DE"]
"""


class Machine(Installation):
    """Ledger, state and store in folders of their own, so that one of them can fail alone."""

    def __init__(self, folder: Path, upstream: Emulator | None = None) -> None:
        super().__init__(folder, upstream)
        for name in ("ledger", "state", "store"):
            (folder / name).mkdir()
        self.endpoint = upstream.address if upstream else "http://127.0.0.1:9"
        self.quota.configure(CONFIG.format(ledger=folder / "ledger", store=folder / "store", endpoint=self.endpoint))

    def charge(self, method: str = "videos.list") -> Any:
        """The decision as the command prints it, its exit status, and the events of the lines on stderr."""
        done = self.quota("charge", method, "--json")
        assert "Traceback" not in done.stderr
        decision = json.loads(done.stdout)
        decision["status"], decision["lines"] = done.returncode, done.stderr.splitlines()
        return decision

    @contextmanager
    def ledger_held(self) -> Iterator[None]:
        with closing(sqlite3.connect(self.folder / "ledger" / "ledger.db", isolation_level=None)) as holder:
            holder.execute("BEGIN EXCLUSIVE")
            yield

    def allow(self, name: str, folder_mode: int, file_mode: int) -> None:
        """What others may do with a folder and what is in it. Only for a machine that others can reach."""
        for path in (self.folder / name).rglob("*"):
            path.chmod(folder_mode if path.is_dir() else file_mode)
        (self.folder / name).chmod(folder_mode)
        self.folder.chmod(0o755)
        (self.folder / "quota.toml").chmod(0o644)

    def as_nobody(self, work: Callable[[], Any]) -> Any:
        """The result of `work` in a process of a user other than root."""

        def without_rights() -> Any:
            with not_root():
                return work()

        return in_child(without_rights)


@pytest.fixture
def machine(tmp_path: Path, state_dir: Path) -> Iterator[Machine]:
    with Emulator() as upstream:
        yield Machine(tmp_path, upstream)


@pytest.fixture
def reachable(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """In a folder that users other than the test's own can reach, and without upstream."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("QUOTA_STATE_DIR", str(Path(folder) / "state"))
        yield Machine(Path(folder))


def lines_of(decision: Any, event: str) -> int:
    return sum(event in line for line in decision["lines"])


def test_a_full_disk_under_the_ledger_leaves_the_allowance(machine: Machine) -> None:
    config = machine.folder / "quota.toml"
    config.write_text(config.read_text() + '[notify]\ncommand = ["sh", "-c", "cat >> told"]\n')
    with small_disk(machine.folder / "ledger", 400):
        assert machine.charge()["source"] == "ledger"
        ballast = fill(machine.folder / "ledger")
        status = machine.quota.json("status")
        assert status["unwritable"].endswith("disk is full, and nothing was charged; free space there (df, df -i)")
        assert status["credentials"][0]["limits"][0]["used_units"] == 1
        assert machine.charge()["source"] == "allowance"
        assert machine.quota.json("peek", "search.list", status=69)["reason"] == "ledger-unavailable"
        line = one_line(machine.quota("charge", "search.list"), 69)
        assert "ledger.db: the disk is full, and nothing was charged" in line
        assert "t: done" in machine.quota("run", "t").stdout
        assert '"ledger_away"' in (machine.folder / "told").read_text()
        ballast.unlink()
        assert machine.charge()["limits"][0]["used_units"] == 2 + 1 + machine.requests
        assert (machine.requests, machine.units()) == (8, 11)
    with small_disk(machine.folder / "ledger", 400, files=2):  # its folder and the ledger, but no -wal
        assert "ledger.db: the disk is full" in one_line(machine.quota("charge", "search.list"), 69)


def test_a_limit_of_the_process_is_named_wherever_it_is_met(machine: Machine) -> None:
    assert machine.charge()["source"] == "ledger"
    for command in ("charge search.list", "peek search.list", "status --check", "check", "doctor"):
        output = machine.quota.shell(f"ulimit -f 4; quota {command} 2>&1").stdout
        assert ["File too large" in output, "ulimit -f" in output, "No space" in output] == [True, True, False], command
    for number in range(7, 12):
        done = machine.quota.shell(f"ulimit -n {number}; quota run t")
        assert re.search(r"Too many open files[^;\n]*; raise the limit on open files \(ulimit -n\)", done.stderr)


def test_a_full_disk_under_the_state_stops_no_call_and_draws_none(machine: Machine) -> None:
    with small_disk(machine.folder / "state", 400):
        assert machine.charge()["source"] == "ledger"
        ballast = fill(machine.folder / "state")
        with machine.ledger_held():
            refused = machine.quota("charge", "videos.list")
            assert refused.returncode == 69
            assert refused.stderr.count("No space left on device, so nothing is drawn") == 1
        for command in ("check", "doctor", "status"):
            assert "No space left on device, so nothing is drawn" in " ".join(machine.quota(command).stdout.split())
        assert ": 0.0 MB are free on its disk -> free 100 MB there" in " ".join(machine.quota("doctor").stdout.split())
        silent = machine.quota("status", "--json", QUOTA__LEDGER__URL=f"redis://127.0.0.1:{free_port()}/0").stdout
        assert [job["could_go_on"] for job in json.loads(silent)["jobs"]] == [False]
        decision = machine.charge()
        assert (decision["source"], decision["limits"][0]["used_units"]) == ("ledger", 2)
        assert "t: done" in machine.quota("run", "t").stdout
        assert machine.units() == 2 + machine.requests == 10
        ballast.unlink()
        with machine.ledger_held():
            assert machine.charge()["source"] == "allowance"
        repaid = machine.charge()
        assert (repaid["limits"][0]["used_units"], lines_of(repaid, "debt_repaid")) == (12, 1)
        subprocess.run(["mount", "-o", "remount,ro", str(machine.folder / "state")], check=True)
        assert machine.quota("doctor").stdout.count("-> remount it so that it can be written") == 2


def test_a_full_disk_under_the_store_costs_no_unit(machine: Machine) -> None:
    with small_disk(machine.folder / "store", 12_000):
        assert machine.quota("run", "t", "--region", "US").returncode == 0
        ballast = fill(machine.folder / "store")
        for words in (("runs",), ("place", "show", "t"), ("export", "videos")):
            assert machine.quota(*words).returncode == 0, "what is there can be read"
        check, says = machine.quota("check"), "free 4 MB more (df, df -i), then run again\n"
        assert (check.returncode, "warning: store.url: store " in check.stdout, says in check.stdout) == (0, True, True)
        ballast.write_bytes(ballast.read_bytes()[: -2 * 1024 * 1024])  # room for the side files, not for pages
        (job,) = machine.quota.json("status")["credentials"][0]["jobs"]
        assert machine.quota("status").stdout.count(" no\n") == 1, "but not never"
        assert (job["could_go_on"], job["why"]) == (False, one_line(machine.quota("run", "t", "--quiet"), 1)[3:])
        for _ in range(2):
            line = one_line(machine.quota("run", "t"), 1)
            assert line.endswith("free 4 MB more (df, df -i), then run again")
        assert machine.requests == machine.units() == 4
        ballast.unlink()
        assert machine.quota("run", "t").returncode == 0
        with closing(sqlite3.connect(machine.folder / "store" / "videos.db")) as db:
            rows = db.execute("SELECT region, count(*) FROM rankings GROUP BY 1").fetchall()
        assert rows == [("DE", 200), ("US", 400)]
        assert machine.requests == machine.units() == 12
        subprocess.run(["mount", "-o", "remount,ro", str(machine.folder / "store")], check=True)
        says = "/videos.db: it is on a read-only file system; remount it so that it can be written"
        assert one_line(machine.quota("run", "t"), 1).endswith(says)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_without_a_state_folder_that_may_be_written_runs_of_a_job_are_still_kept_apart(reachable: Machine) -> None:
    machine = reachable
    config = machine.folder / "quota.toml"

    def work() -> list[str]:
        inner: list[str] = []

        def stop() -> int:
            with quota.open(config) as session:
                inner.append(run_job(session, "t").outcome)
            return 15

        with quota.open(config) as session:
            return [run_job(session, "t", RunOptions(stop=stop)).outcome, *set(inner)]

    machine.allow("state", 0o555, 0o000)
    assert machine.as_nobody(work) == ["stopped", "overlap"]


def test_without_a_temporary_folder_every_page_is_stored(machine: Machine) -> None:
    command = Quota(machine.folder, without_temporary_folder(machine.folder))
    command.env |= {"QUOTA_CONFIG": str(machine.config), "TMPDIR": ""}
    machine.quota.configure(machine.config.read_text().replace('["US", "DE"]', '["US", "DE", "FR", "GB", "IN"]'))
    done = [command("run", "t").stdout.partition(",")[0] for _ in range(2)]
    assert (done, machine.requests) == (["t: done: 5 regions"] * 2, 40)
    for words in (["run", "t", "--dry-run"], ["exec", "--auto", "--summary", "--", sys.executable], ["demo"]):
        assert one_line(command(*words), 78).startswith("no temporary folder can be made (")


def test_a_run_without_a_place_for_its_lock_does_not_start(machine: Machine) -> None:
    machine.quota.env["QUOTA_STATE_DIR"] = "/proc/nowhere"
    assert (machine.quota("run", "t").returncode, machine.requests) == (0, 8)
    machine.quota.configure(
        (machine.folder / "quota.toml").read_text().replace(str(machine.folder / "store"), "/proc/no")
    )
    assert "videos.db: its lock run-t-" in one_line(machine.quota("run", "t"), 1)
    assert machine.requests == 8


LIMIT = 60
CHARGER = """
import sys, time, quota
with quota.open() as session:
    for line in sys.stdin:
        time.sleep(0.002)  # the answer is as old as that of a process that has its requests to make
        print(session.budget().charge("videos.list").reason, flush=True)
"""


@pytest.mark.parametrize(
    ("deleted", "restored"), [(("-shm",), False), (("-wal",), True), (("-wal", "-shm"), False)], ids=str
)
def test_files_deleted_beside_an_open_ledger_split_it_for_nobody(
    tmp_path: Path, deleted: tuple[str, ...], restored: bool
) -> None:
    command = Quota(tmp_path)
    command.configure(limited(LIMIT))
    with ExitStack() as stack:

        def charger() -> subprocess.Popen[str] | Forked:
            return stack.enter_context(command.start(script=CHARGER, stdin=subprocess.PIPE))

        def charge(process: subprocess.Popen[str] | Forked) -> str:
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
