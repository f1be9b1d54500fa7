"""Four machines of four workers over one Redis, each in a network namespace: `python -m topologies.machines`.

One is cut off for a minute, another's clock stands two hours behind at first. Every charge is then held against the
ledger's log, as after a chaos run: nothing overspent, nothing twice, each debt repaid once, each total that of the log;
and each machine was refused only for the reason that there was.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import redis

from chaos.__main__ import told
from chaos.evidence import Arrival, gather
from chaos.journal import now_ms
from chaos.scene import Limit, Scene
from chaos.server import KEYS, entries
from chaos.supervisor import FAKETIME, Course, Worker, until_decided, until_ended
from chaos.verdict import judge
from quota.terms.limits import DAY_MS, HOUR_MS
from support.servers import free_port, redis_executable
from topologies.network import HUB, Network, why_not

if TYPE_CHECKING:
    from chaos.evidence import Event, Evidence
    from chaos.verdict import Verdict

CUT_OFF, BEHIND = "cut-off", "behind"
WORKERS = 4
BEHIND_MS = 2 * HOUR_MS
BEFORE_S, CUT_S, AFTER_S = 10.0, 60.0, 15.0
LONGEST_MS = 1_000
"""A decision takes no longer, whatever the network does."""

SLACK_MS = 400
"""What a busy machine may add: 17 processes share its processors."""


class FourMachines(Scene):
    machines = ("web1", "web2", CUT_OFF, BEHIND)
    workers = tuple((machine, "spends") for machine in machines for _ in range(WORKERS))
    allowance_units = 60
    limits = {"short": Limit(400, 10_000), "day": Limit(100_000, DAY_MS)}  # noqa: RUF012


@dataclass
class PartedCourse(Course):
    """And when what was done to two machines, in ms since 1970."""

    cut_ms: int = 0
    joined_ms: int = 0
    righted_ms: int = 0


def course_of(scene: Scene, network: Network) -> PartedCourse:
    course = PartedCourse()
    address, port, socket = network.address(HUB), free_port(), scene.folder / "redis.sock"
    options = ["--port", str(port), "--bind", address, "--protected-mode", "no", "--save", ""]
    options += ["--unixsocket", str(socket), "--dir", str(scene.folder)]
    scene.configure(f"redis://{address}:{port}/0")
    workers = [Worker(scene, n, network.command(machine, [])) for n, (machine, _) in enumerate(scene.workers)]
    behind = [worker for worker in workers if worker.machine == BEHIND]
    server = subprocess.Popen(network.command(HUB, [redis_executable(), *options]), stdout=subprocess.DEVNULL)
    try:
        for worker in workers:
            worker.start(worker.number, -BEHIND_MS if worker in behind else 0)
        until_decided(workers)
        time.sleep(BEFORE_S)
        course.cut_ms = now_ms()
        network.cut(CUT_OFF)
        time.sleep(CUT_S / 2)
        for worker in behind:
            worker.kill()
            course.killed.add(worker.life)
        course.righted_ms = now_ms()
        for worker in behind:
            worker.start(worker.number)
        time.sleep(CUT_S / 2)
        network.join(CUT_OFF)
        course.joined_ms = now_ms()
        time.sleep(AFTER_S)
        scene.stop.touch()
        until_ended(course, workers)
        course.ended_ms = now_ms()
        with redis.Redis(unix_socket_path=str(socket), decode_responses=True) as client:
            course.log = entries(client.xrange(KEYS.log))
    finally:
        for process in (server, *(worker.process for worker in workers)):
            if process is not None:
                process.kill()
                process.wait()
    return course


def judged(evidence: Evidence, course: PartedCourse) -> Verdict:
    """What is admitted counts as sent at once."""
    for attempt in evidence.attempts.values():
        if attempt.admitted and attempt.decision is not None:
            ms, units = attempt.decision["ms"], attempt.decision["units"]
            evidence.wire.append(Arrival(ms, attempt.call, "", units, refused=False))
    evidence = evidence.again()
    verdict = judge(evidence, sends=False)
    decisions = [(life.machine, event) for life, event in evidence.events("decision")]
    doubtful = sum(not evidence.attempts[entry.token].admitted for entry in course.log)
    drew = {draw.machine for draw in evidence.draws}
    verdict.hold(bool(drew), "nothing was drawn: the cable was not cut")
    verdict.hold(drew <= {CUT_OFF}, f"{drew} drew on their allowance: not only the machine that was cut off")
    most = WORKERS * len(evidence.scene.machines)
    verdict.hold(doubtful <= most, f"{doubtful} calls were charged and refused: more than were under way at the cut")
    longest_ms = max(event["ms"] - event["asked_ms"] for _, event in decisions)
    verdict.hold(longest_ms <= LONGEST_MS + SLACK_MS, f"a decision took {longest_ms} ms")
    wrong = [trouble for machine, event in decisions if (trouble := _wrong_answer(course, machine, event))]
    verdict.hold(not wrong, f"{len(wrong)} answers are wrong: {wrong[:3]}")
    back = [e["ms"] for machine, e in decisions if machine == CUT_OFF and e["source"] == "ledger"]
    verdict.figures["longest decision ms"] = longest_ms
    verdict.figures["back after ms"] = min(ms for ms in back if ms >= course.joined_ms) - course.joined_ms
    return verdict


def _wrong_answer(course: PartedCourse, machine: str, event: Event) -> str:
    away = machine == CUT_OFF and course.cut_ms <= event["ms"] <= course.joined_ms + 2 * LONGEST_MS
    behind = machine == BEHIND and event["ms"] < course.righted_ms
    allowed = ["clock"] if behind else ["ok", "limit", "ledger-unavailable"] if away else ["ok", "limit"]
    as_it_should = event["reason"] in allowed
    if behind and as_it_should:
        as_it_should = event["detail"].startswith("this machine's clock reads")
    return "" if as_it_should else f"{machine}: {event['reason']} {event['detail']!r}, where only {allowed} can be"


def run() -> Verdict:
    scene = FourMachines(1, BEFORE_S + CUT_S + AFTER_S, Path(tempfile.mkdtemp(prefix="quota-machines-")), losses=False)
    with Network(scene.machines) as network:
        course = course_of(scene, network)
    verdict = judged(gather(scene, course), course)
    if verdict.wrong:
        verdict.wrong.append(f"everything lies in {scene.folder}")
    else:
        shutil.rmtree(scene.folder)
    return verdict


def main() -> int:
    if why := why_not() or ("" if FAKETIME else "a wrong clock needs Debian's package faketime"):
        print(f"skipped: {why}")
        return 0
    verdict = run()
    print(*told(verdict), sep="\n")
    return bool(verdict.wrong)


if __name__ == "__main__":
    sys.exit(main())
