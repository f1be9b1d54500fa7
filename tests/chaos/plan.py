"""Which faults strike when: a pure function of the seed, and of how long they are to strike."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from chaos.scene import WORKERS

LOSSES = True
"""Whether the ledger also loses data: started empty, restored from an old copy, flushed."""

FIRST_S = 0.5
SHORTEST_S = 0.05
LONG_S = 100
"""So long a run has the ledger moved once more."""

STEADY = (
    "server-killed",
    "server-killed",
    "server-killed",
    "server-stopped",
    "server-stopped",
    "network-paused",
    "connections-cut",
    "reply-cut",
    "reply-cut",
    "reply-dropped",
    "reply-swallowed",
    "request-dropped",
    "request-swallowed",
    "request-held",
    "request-delayed",
    "scripts-flushed",
)
LOSSY = ("server-emptied", "old-aof-restored", "old-rdb-restored", "flushed")

MOVES = ("url-edited", "ledger-moved")
"""The ledger's address changes: another empty one in the configuration, or `quota ledger move`, killed on its way."""

OWNER_LOST = "owner-lost"
"""The machine that a job belongs to is gone for a while; another is told to take over."""

CLOCK_WRONG = "clock-wrong"
"""A machine's clock is set wrong by hours, and right again."""

LOST_S = 5.0

NETWORK = {
    "reply-cut": "cut-reply",
    "reply-dropped": "drop-reply",
    "reply-swallowed": "swallow-reply",
    "request-dropped": "drop-request",
    "request-swallowed": "swallow-request",
    "request-held": "hold-request",
    "request-delayed": "delay-request",
}
"""Faults of single requests, by the proxy's names for them."""

UPSTREAM = {
    "upstream-drops-idle": "drop-idle",
    "upstream-hangs-up": "close-after",
    "upstream-answers-503": "status",
    "upstream-truncates": "truncate",
    "upstream-slow": "latency",
}
"""Faults of the upstream, by the emulator's names for them."""


@dataclass(frozen=True, order=True)
class Step:
    """Something the supervisor does `at_s` after the beginning. `fault` is what it is counted as; "" ends one."""

    at_s: float
    do: str
    fault: str = field(default="", compare=False)
    how: dict[str, Any] = field(default_factory=dict, compare=False)


def make_plan(seed: int, seconds: float, *, losses: bool) -> list[Step]:
    """Three tracks at once: the ledger's faults one after the other, killed and stopped workers, upstream's trouble."""
    steps = _ledger_track(random.Random(f"{seed} ledger"), seconds, losses)
    steps += _worker_track(random.Random(f"{seed} workers"), seconds)
    steps += _upstream_track(random.Random(f"{seed} upstream"), seconds)
    return sorted(steps)


def _ledger_track(dice: random.Random, seconds: float, losses: bool) -> list[Step]:
    """Every kind comes once before any comes more often than it stands in the deck."""
    steps: list[Step] = [Step(FIRST_S, "copy")] if losses else []
    deck: list[str] = []
    acts = _acts(seconds, losses)
    at_s = FIRST_S + 0.5
    while at_s <= seconds:
        if acts and at_s >= acts[0][0]:
            _, act = acts.pop(0)
            steps.append(Step(at_s, act, act, {"dice": dice.randrange(1 << 30)}))
            if act == OWNER_LOST:
                steps.append(Step(min(at_s + LOST_S, seconds), "owner-back"))
            at_s += dice.uniform(0.3, 0.9)
        if not deck:
            deck = [*STEADY, *(LOSSY if losses else ())]
            dice.shuffle(deck)
        fault = deck.pop()
        fault_steps, lasts_s = _strike(dice, fault, at_s)
        if at_s + lasts_s > seconds:
            return steps
        steps += fault_steps
        at_s += lasts_s + dice.uniform(0.3, 0.9)
        if losses and dice.random() < 0.25 and at_s < seconds:
            steps.append(Step(at_s - 0.1, "copy"))
    return steps


def _acts(seconds: float, losses: bool) -> list[tuple[float, str]]:
    """From when on, and what. A ledger that is left with its url edited takes with it what no machine has seen."""
    acts = [(0.07, CLOCK_WRONG), (0.15, OWNER_LOST), (0.45, OWNER_LOST), (0.6, "ledger-moved")]
    if losses:
        acts.append((0.3, "url-edited"))
    if seconds >= LONG_S:
        acts += [(0.52, CLOCK_WRONG), (0.7, OWNER_LOST)]
        if losses:
            acts.append((0.8, "url-edited"))
    return [(share * seconds, act) for share, act in sorted(acts)]


def _strike(dice: random.Random, fault: str, at_s: float) -> tuple[list[Step], float]:
    fsync = dice.choice(("always", "everysec"))
    if fault in NETWORK:
        kind = NETWORK[fault]
        lasts_s = dice.uniform(0.2, 0.6)
        how: dict[str, Any] = {"kind": kind, "times": dice.randint(1, 6)}
        if kind == "cut-reply":
            how["keep_bytes"] = dice.randint(1, 24)
        if kind == "delay-request":
            how["delay_s"] = dice.uniform(0.05, 0.6)
        steps = [Step(at_s, "fail", fault, how), Step(at_s + lasts_s, "heal")]
        return steps, lasts_s
    match fault:
        case "server-killed" | "server-emptied" | "old-aof-restored" | "old-rdb-restored":
            data = {"server-emptied": "none", "old-aof-restored": "old-aof", "old-rdb-restored": "old-rdb"}
            lasts_s = dice.uniform(SHORTEST_S, 1.2)
            how = {"fsync": fsync, "data": data.get(fault, "own")}
            return [Step(at_s, "kill-server", fault, how), Step(at_s + lasts_s, "start-server", "", how)], lasts_s
        case "server-stopped":
            lasts_s = dice.choice((dice.uniform(0.2, 0.8), dice.uniform(0.8, 3.0)))
            return [Step(at_s, "stop-server", fault), Step(at_s + lasts_s, "continue-server")], lasts_s
        case "network-paused":
            lasts_s = dice.uniform(0.2, 1.5)
            return [Step(at_s, "pause-network", fault), Step(at_s + lasts_s, "resume-network")], lasts_s
        case "connections-cut":
            return [Step(at_s, "cut-connections", fault)], SHORTEST_S
        case "scripts-flushed":
            return [Step(at_s, "flush-scripts", fault)], SHORTEST_S
        case _:
            return [Step(at_s, "flush", "flushed")], SHORTEST_S


def _worker_track(dice: random.Random, seconds: float) -> list[Step]:
    steps: list[Step] = []
    at_s = FIRST_S
    while (at_s := at_s + dice.uniform(0.6, 2.2)) < seconds - 1:
        worker = {"worker": dice.randrange(len(WORKERS))}
        if dice.random() < 0.25:
            lasts_s = dice.uniform(0.2, 2.0)
            steps.append(Step(at_s, "stop-worker", "worker-stopped", worker))
            steps.append(Step(min(at_s + lasts_s, seconds), "continue-worker", "", worker))
        else:
            down_s = dice.choice((0.0, dice.uniform(0.1, 1.0)))
            steps.append(Step(at_s, "kill-worker", "worker-killed", worker))
            steps.append(Step(at_s + down_s, "start-worker", "", {**worker, "seed": dice.randrange(1 << 30)}))
    return steps


def _upstream_track(dice: random.Random, seconds: float) -> list[Step]:
    steps: list[Step] = []
    at_s = FIRST_S
    while (at_s := at_s + dice.uniform(1.0, 3.0)) < seconds:
        fault = dice.choice(sorted(UPSTREAM))
        how = {"kind": UPSTREAM[fault], "times": dice.randint(1, 3), "ms": dice.randint(50, 500)}
        steps.append(Step(at_s, "trouble-upstream", fault, how))
    return steps
