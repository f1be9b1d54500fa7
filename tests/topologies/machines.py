"""Four machines of four workers over one Redis, each in a network namespace: `python -m topologies.machines`.

One is cut off for a minute, another's clock stands two hours behind at first. Every charge is then held against the
ledger's log: nothing overspent, nothing twice, each debt repaid once, each refusal for the reason that there was.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis

from chaos.evidence import drawn, token_of
from chaos.journal import Journal, NotedSession, NotedWarnings, now_ms
from chaos.server import Entry, entries
from chaos.verdict import ASKED_AGAIN_MS
from quota.ledger.redis_log import keys_of
from quota.settings.load import load_settings
from support.clocks import FAKETIME, wrong_clock
from support.servers import free_port, redis_executable
from topologies.network import HUB, Network, why_not

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chaos.evidence import Draw, Event

MACHINES = ("web1", "web2", "cut-off", "behind")
WORKERS = 4
PROJECT = "machines"
CHEAP, DEAR, DEAR_UNITS = "videos.list", "captions.list", 50
SHORT_UNITS, SHORT_MS = 400, 10_000
DAY_UNITS = 100_000
ALLOWANCE_UNITS = 60
BEHIND_S = 2 * 3_600
BEFORE_S, CUT_S, AFTER_S = 10.0, 60.0, 15.0
LONGEST_MS = 1_000
"""A decision takes no longer, whatever the network does."""

SLACK_MS = 400
"""What a busy machine may add: 17 processes share its processors."""


@dataclass
class Course:
    """What was done to the machines, in ms since 1970, and what they and the ledger said."""

    cut_ms: int = 0
    joined_ms: int = 0
    righted_ms: int = 0
    log: list[Entry] = field(default_factory=list)
    decisions: dict[str, list[Event]] = field(default_factory=dict)
    warnings: Counter[str] = field(default_factory=Counter)
    draws: list[Draw] = field(default_factory=list)


# -- a worker ----------------------------------------------------------------------------------------------------------


def work(folder: Path, machine: str, life: str, behind_ms: int) -> None:
    """Charges until the file `finish` is there and nothing is owed."""
    journal = Journal(folder / "journals" / f"{machine}.{life}.jsonl", f"{machine}.{life}", -behind_ms)
    logging.getLogger("quota").addHandler(NotedWarnings(journal))
    stop = folder / f"finish-{machine}" if behind_ms else folder / "finish"
    dice = random.Random(f"{machine} {life}")
    with NotedSession(load_settings(folder / machine / "quota.toml"), journal) as session:
        budget = session.budget()
        while not stop.exists() or (not behind_ms and budget.owed_units()):
            journal.next_call()
            budget.charge(DEAR if dice.random() < 0.04 else CHEAP)
            time.sleep(dice.uniform(0.02, 0.12))
    journal.note("end")


# -- the course of a run -----------------------------------------------------------------------------------------------


class Scene:
    def __init__(self, folder: Path, network: Network) -> None:
        self.folder, self.network = folder, network
        self.port = free_port()
        self._running: list[subprocess.Popen[bytes]] = []

    def run(self) -> Course:
        course = Course()
        try:
            self._serve()
            for machine in MACHINES:
                self._configure(machine)
                self._start(machine, "a", BEHIND_S if machine == "behind" else 0)
            self._until_all_decided()
            time.sleep(BEFORE_S)
            course.cut_ms = now_ms()
            self.network.cut("cut-off")
            time.sleep(CUT_S / 2)
            (self.folder / "finish-behind").touch()
            self._end(self._running[-WORKERS:])
            course.righted_ms = now_ms()
            self._start("behind", "b", 0)
            time.sleep(CUT_S / 2)
            self.network.join("cut-off")
            course.joined_ms = now_ms()
            time.sleep(AFTER_S)
            (self.folder / "finish").touch()
            self._end(self._running[1:])
            self._gather(course)
        finally:
            for process in self._running:
                process.kill()
                process.wait()
        return course

    def _serve(self) -> None:
        address = self.network.address(HUB)
        options = ["--port", str(self.port), "--bind", address, "--protected-mode", "no", "--save", ""]
        command = self.network.command(HUB, [redis_executable(), *options, "--dir", str(self.folder)])
        self._running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))

    def _configure(self, machine: str) -> None:
        there = self.folder / machine
        there.mkdir()
        (there / "key").write_text("a-key")
        headroom = ALLOWANCE_UNITS * len(MACHINES)
        (there / "quota.toml").write_text(
            f"""
[ledger]
url = "redis://{self.network.address(HUB)}:{self.port}/0"
name = "four-machines"
unavailable = {{ max_cost = 1, allowance = {ALLOWANCE_UNITS}, machines = {len(MACHINES)} }}
[credentials.main]
api = "youtube-v3"
project = "{PROJECT}"
key = "file:key"
[[credentials.main.limits]]
name = "short"
quota = {SHORT_UNITS + headroom}
headroom = {headroom}
window = "{SHORT_MS}ms"
[[credentials.main.limits]]
name = "day"
quota = {DAY_UNITS + headroom}
headroom = {headroom}
window = "24h"
"""
        )
        (self.folder / "journals").mkdir(exist_ok=True)

    def _start(self, machine: str, life: str, behind_s: int) -> None:
        environment = os.environ | {"QUOTA_STATE_DIR": str(self.folder / machine / "state")}
        environment |= wrong_clock(-behind_s) if behind_s else {}
        for number in range(WORKERS):
            arguments = [str(self.folder), machine, f"{life}{number}", str(behind_s * 1_000)]
            command = self.network.command(machine, [sys.executable, "-m", "topologies.machines", *arguments])
            with (self.folder / f"{machine}.{life}{number}.err").open("wb") as errors:
                self._running.append(
                    subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=errors)
                )

    def _journals(self) -> list[Path]:
        return sorted((self.folder / "journals").iterdir())

    def _until_all_decided(self) -> None:
        deadline = time.monotonic() + 60
        while sum('"decision"' in path.read_text() for path in self._journals()) < len(MACHINES) * WORKERS:
            if time.monotonic() > deadline or any(process.poll() is not None for process in self._running):
                raise RuntimeError(f"not every worker has come to a decision: see {self.folder}/*.err")
            time.sleep(0.1)

    def _end(self, workers: list[subprocess.Popen[bytes]]) -> None:
        for process in workers:
            if process.wait(60):
                raise RuntimeError(f"a worker has failed: see {self.folder}/*.err")

    def _gather(self, course: Course) -> None:
        read = ["-m", "topologies.machines", "--log", self.network.address(HUB), str(self.port)]
        command = self.network.command(HUB, [sys.executable, *read])
        log = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        course.log = [Entry(**entry) for entry in log]
        for path in self._journals():
            tokens: list[str] = []
            for line in path.read_text().splitlines():
                event = json.loads(line)
                if event["event"] == "token":
                    tokens.append(event["token"])
                elif event["event"] == "decision":
                    course.decisions.setdefault(path.name.split(".")[0], []).append(event | {"tokens": tokens})
                    tokens = []
                elif event["event"] == "warning":
                    course.warnings[event["text"].split(" ", 1)[0]] += 1
        course.draws = [draw for machine in MACHINES for draw in drawn(machine, self.folder / machine / "state")]


# -- what must hold ----------------------------------------------------------------------------------------------------


def wrong(course: Course) -> Iterator[str]:
    """Everything that is not as it was promised."""
    decisions = [event for some in course.decisions.values() for event in some]
    draws = {draw.token: draw for draw in course.draws}
    times = Counter(entry.token for entry in course.log)
    admitted = _admitted(course)

    if missing := admitted - times.keys():
        yield f"{len(missing)} confirmed charges are missing in the log"
    strangers = times.keys() - admitted - draws.keys()
    doubtful = strangers & {token for event in decisions if not event["admitted"] for token in event["tokens"]}
    if len(strangers) > len(doubtful):
        yield f"{len(strangers) - len(doubtful)} entries of the log were asked for by nobody"
    if len(doubtful) > 4 * WORKERS:
        yield f"{len(doubtful)} calls were charged and refused: more than were under way when the cable was cut"
    if twice := [token for token, count in times.items() if count > 1]:
        yield f"{len(twice)} calls were charged twice"
    if not course.draws:
        yield "nothing was drawn: the cable was not cut"
    if unpaid := [draw for draw in course.draws if not draw.repaid or draw.token not in times]:
        yield f"{len(unpaid)} draws were not repaid"
    if elsewhere := {draw.machine for draw in course.draws} - {"cut-off"}:
        yield f"{elsewhere} drew on their allowance, and were never cut off"
    if (units := sum(draw.units for draw in course.draws)) > ALLOWANCE_UNITS:
        yield f"{units} units were drawn of an allowance of {ALLOWANCE_UNITS}"

    ordinary = _ordinary(course)
    for name, units, window_ms in (("short", SHORT_UNITS, SHORT_MS), ("day", DAY_UNITS, 86_400_000)):
        if (fullest := _fullest(ordinary, window_ms)) > units:
            yield f"limit {name}: {fullest} units in a window of {units}"
    sent = sorted([*ordinary, *((draw.ms, draw.units) for draw in course.draws)])
    if (fullest := _fullest(sent, SHORT_MS)) > SHORT_UNITS + ALLOWANCE_UNITS:
        yield f"with the allowance {fullest} units left in one window"

    yield from _wrong_answers(course)
    yield from _wrong_totals(course, decisions)


def _admitted(course: Course) -> set[str]:
    """The tokens of the charges that the ledger confirmed."""
    return {token_of(event) for some in course.decisions.values() for event in some if event["source"] == "ledger"}


def _ordinary(course: Course) -> list[tuple[int, int]]:
    """Time and units of each; what was repaid and what nobody was told of left aside."""
    admitted = _admitted(course)
    return sorted((entry.ms, entry.units) for entry in course.log if entry.token in admitted)


def _fullest(charges: list[tuple[int, int]], window_ms: int) -> int:
    """The units of the fullest window."""
    sums = [0, *accumulate(units for _, units in charges)]
    times = [ms for ms, _ in charges]
    return max((sums[bisect_right(times, ms)] - sums[bisect_right(times, ms - window_ms)] for ms in times), default=0)


def _wrong_answers(course: Course) -> Iterator[str]:
    for machine, some in course.decisions.items():
        slow = [event["ms"] - event["asked_ms"] for event in some]
        if max(slow) > LONGEST_MS + SLACK_MS:
            yield f"{machine}: a decision took {max(slow)} ms"
        for event in some:
            away = machine == "cut-off" and course.cut_ms <= event["ms"] <= course.joined_ms + 2 * LONGEST_MS
            behind = machine == "behind" and event["ms"] < course.righted_ms
            allowed = ["clock"] if behind else ["ok", "limit", "ledger-unavailable"] if away else ["ok", "limit"]
            if event["reason"] not in allowed:
                yield f"{machine}: {event['reason']} {event['detail']!r}, where only {allowed} can be"
                return
            if behind and not event["detail"].startswith("this machine's clock reads"):
                yield f"a clock that is wrong was answered with {event['detail']!r}"
                return


def _wrong_totals(course: Course, decisions: list[Event]) -> Iterator[str]:
    """Every total is the sum of the log up to the charge itself; of a refusal, up to some moment while it was asked."""
    times = [entry.ms for entry in course.log]
    sums = [0, *accumulate(entry.units for entry in course.log)]
    place = {entry.token: number for number, entry in enumerate(course.log, 1)}
    off = 0
    counted = [event for event in decisions if event["used"] and event["source"] != "allowance"]
    for event in counted:
        gone = sums[bisect_right(times, event["at_ms"] - SHORT_MS)]
        least, most = bisect_left(times, event["asked_ms"]), bisect_right(times, event["ms"])
        if event["source"] == "ledger":
            least = place.get(token_of(event), 0)
            # A call whose answer was lost learns of its charge later, with what others have charged since.
            most = max(least, most) if event["ms"] - event["asked_ms"] > ASKED_AGAIN_MS else least
        off += not sums[least] <= event["used"]["short"] + gone <= sums[most]
    if not counted or off:
        yield f"{off} of {len(counted)} decisions gave a total that is not the log's"


def figures(course: Course) -> dict[str, Any]:
    """What the docs quote."""
    decisions = [event for some in course.decisions.values() for event in some]
    reasons = Counter("admitted" if event["admitted"] else event["reason"] for event in decisions)
    back = [event["ms"] for event in course.decisions["cut-off"] if event["source"] == "ledger"]
    return {
        "decisions": len(decisions),
        "by answer": dict(sorted(reasons.items())),
        "fullest window": f"{_fullest(_ordinary(course), SHORT_MS)} of {SHORT_UNITS}",
        "drawn, repaid": f"{len(course.draws)}, {sum(draw.repaid for draw in course.draws)}",
        "longest decision ms": max(event["ms"] - event["asked_ms"] for event in decisions),
        "back after ms": min(ms for ms in back if ms >= course.joined_ms) - course.joined_ms,
        "warnings": dict(sorted(course.warnings.items())),
    }


def run() -> tuple[dict[str, Any], list[str]]:
    """The figures of a run, and what is wrong."""
    folder = Path(tempfile.mkdtemp(prefix="quota-machines-"))
    with Network(MACHINES) as network:
        course = Scene(folder, network).run()
    failed = list(wrong(course))
    if failed:
        failed.append(f"everything lies in {folder}")
    else:
        shutil.rmtree(folder)
    return figures(course), failed


def main() -> int:
    if sys.argv[1:2] == ["--log"]:
        host, port = sys.argv[2:]
        with redis.Redis(host, int(port), decode_responses=True) as client:
            log = entries(client.xrange(keys_of(PROJECT).log))
        print(json.dumps([vars(entry) for entry in log]))
        return 0
    if len(sys.argv) > 1:
        folder, machine, life, behind_ms = sys.argv[1:]
        work(Path(folder), machine, life, int(behind_ms))
        return 0
    if why := why_not() or ("" if FAKETIME else "a wrong clock needs Debian's package faketime"):
        print(f"skipped: {why}")
        return 0
    told, failed = run()
    for name, figure in told.items():
        print(f"  {name:20} {figure}")
    print(*(f"  WRONG: {what}" for what in failed), sep="\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
