"""Everything that a run left behind, read back: wire, journals, ledger, allowances and stores."""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quota.journal.draws import Draws
from quota.ledger.factory import Identity
from quota.terms.limits import DAY_MS

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from chaos.scene import Scene
    from chaos.server import Entry
    from chaos.supervisor import Course

Event = dict[str, Any]


@dataclass(frozen=True)
class Arrival:
    """One request that reached the upstream."""

    ms: int
    call: str
    method: str
    units: int
    refused: bool


@dataclass
class Life:
    """One worker process, from its start to its end or its kill."""

    name: str
    machine: str
    kind: str
    killed: bool
    events: list[Event]
    ahead_ms: int = 0
    """So far ahead its clock stood."""

    last_attempt: Attempt | None = None


@dataclass
class Attempt:
    """One charge asked for: where its token shows up."""

    token: str
    call: str
    life: Life
    decision: Event | None = None
    entry: Entry | None = None
    """The charge in the ledger's log."""

    draw: Draw | None = None
    arrival: Arrival | None = None

    @property
    def admitted(self) -> bool:
        return self.decision is not None and bool(self.decision["admitted"])


@dataclass(frozen=True)
class Draw:
    """One call that a machine's allowance let through."""

    machine: str
    number: int
    ms: int
    units: int
    token: str
    repaid: bool


@dataclass(frozen=True)
class Stored:
    """A machine's store at the end."""

    checkpoints: list[tuple[str, int, str | None]]
    """Region, pending, cursor."""

    passes: dict[tuple[str, int], list[tuple[int, str]]]
    """Region and time of a pass -> its ranks and video ids."""

    def complete(self) -> set[str]:
        """The regions whose round is over."""
        return {region for region, pending, cursor in self.checkpoints if not pending and cursor is None}


@dataclass
class Evidence:
    scene: Scene
    course: Course
    wire: list[Arrival]
    lives: list[Life]
    attempts: dict[str, Attempt]
    entries: dict[str, Entry]
    """Every charge that was ever in the ledger, by token; what it lost included."""

    draws: list[Draw]
    stores: dict[str, Stored]

    @cached_property
    def _by_name(self) -> dict[str, list[tuple[Life, Event]]]:
        pairs: defaultdict[str, list[tuple[Life, Event]]] = defaultdict(list)
        for life in self.lives:
            for event in life.events:
                pairs[event["event"]].append((life, event))
        return {name: sorted(some, key=lambda pair: pair[1]["ms"]) for name, some in pairs.items()}

    def again(self) -> Evidence:
        """The same, with what follows from wire, log and draws worked out anew."""
        return _put_together(self.scene, self.course, self.wire, self.lives, self.draws, self.stores)

    def events(self, name: str) -> list[tuple[Life, Event]]:
        """In the order of time."""
        return self._by_name.get(name, [])


def gather(scene: Scene, course: Course) -> Evidence:
    wire = [Arrival(**json.loads(line)) for line in scene.wire.read_text().splitlines()] if scene.wire.exists() else []
    lives = lives_of(scene, course.killed)
    draws = [draw for machine in scene.machines for draw in _drawn(machine, scene.machine(machine) / "state")]
    stores = {machine: _stored(scene.machine(machine) / "videos.db") for machine in scene.machines}
    return _put_together(scene, course, wire, lives, draws, stores)


def _put_together(
    scene: Scene,
    course: Course,
    wire: list[Arrival],
    lives: list[Life],
    draws: list[Draw],
    stores: dict[str, Stored],
) -> Evidence:
    entries = {e.token: e for log in (*(loss.log for loss in course.losses), course.log) for e in log}
    return Evidence(scene, course, wire, lives, _attempts(lives, entries, draws, wire), entries, draws, stores)


def lives_of(scene: Scene, killed: Collection[str] = ()) -> list[Life]:
    return [_life(path, path.stem in killed) for path in sorted(scene.journals.iterdir())]


def _life(path: Path, killed: bool) -> Life:
    whole, _, _ = path.read_text().rpartition("\n")  # its last line may be on its way
    events = [json.loads(line) for line in whole.splitlines()]
    start: Event = events[0] if events else {"machine": "", "kind": "", "ahead_ms": 0}
    return Life(path.stem, start["machine"], start["kind"], killed, events, start["ahead_ms"])


def _attempts(lives: list[Life], entries: dict[str, Entry], draws: list[Draw], wire: list[Arrival]) -> Any:
    attempts: dict[str, Attempt] = {}
    by_call: defaultdict[str, list[Attempt]] = defaultdict(list)
    decided: list[tuple[list[Attempt], Event]] = []
    for life in lives:
        asked: list[Attempt] = []
        for event in life.events:
            if event["event"] == "token":
                attempt = attempts[event["token"]] = Attempt(event["token"], event["call"], life)
                asked.append(attempt)
                by_call[attempt.call].append(attempt)
                life.last_attempt = attempt
            elif event["event"] == "decision" and event["commit"] and asked:
                decided.append((asked, event))
                asked = []
    for token, attempt in attempts.items():
        attempt.entry = entries.get(token)
    for draw in draws:
        attempts[draw.token].draw = draw
    for asked, event in decided:
        _named_by(event, asked).decision = event
    # A call may be sent again within the client, under a charge of its own: the arrivals take its charges in turn. What
    # was charged before a loss was known, and not admitted, has not left.
    for arrival in wire:
        for attempt in by_call[arrival.call]:
            if attempt.arrival is None and attempt.admitted and (attempt.entry or attempt.draw):
                attempt.arrival = arrival
                break
    return attempts


def _named_by(decision: Event, asked: list[Attempt]) -> Attempt:
    """Of the tokens that were taken for a decision, the one that it names: others are of epochs and corrections."""
    return next((attempt for attempt in asked if attempt.token == token_of(decision)), asked[0])


def token_of(decision: Event) -> str:
    """The token of the charge or draw that a decision names; "" where it names none."""
    return str(decision["id"] or "").partition("-")[2]


def _drawn(machine: str, state: Path) -> list[Draw]:
    """What a machine drew on its allowance, by its state folder."""
    draws = []
    for path in state.rglob("draws"):
        kept = Draws(str(path.parent), Identity("", ""), keep_ms=DAY_MS)
        draws += kept.drawn(DAY_MS, DAY_MS)
    return [
        Draw(machine, number, draw.entry.id[0], draw.entry.units, draw.entry.key, draw.handed_id is not None)
        for number, draw in enumerate(draws, 1)
    ]


def store_id(scene: Scene, machine: str) -> str:
    """As the ledger knows a machine's store; "" before it has one."""
    path = scene.machine(machine) / "videos.db"
    if not path.exists():
        return ""
    with closing(sqlite3.connect(path)) as db:
        return str(db.execute("SELECT id FROM store").fetchone()[0])


def _stored(path: Path) -> Stored:
    if not path.exists():
        return Stored([], {})
    passes: defaultdict[tuple[str, int], list[tuple[int, str]]] = defaultdict(list)
    with closing(sqlite3.connect(path)) as db:
        checkpoints = db.execute("SELECT region, pending, cursor FROM checkpoints ORDER BY region").fetchall()
        ranked = db.execute("SELECT region, taken_at_ms, rank, video_id FROM rankings ORDER BY rank")
        for region, taken_at_ms, rank, video in ranked:
            passes[region, taken_at_ms].append((rank, video))
    return Stored(checkpoints, dict(passes))
