"""Reads back what a run left, and holds wire, log, notes and stores against each other: figures, and what is wrong."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.course import Course
from chaos.scene import MACHINES, PAGE_ITEMS, PAGES, REGIONS, Scene

Event = dict[str, Any]
"""A line that the upstream or a worker wrote, or a charge of the log."""

CLOCK_MS = 2
"""Two processes of one machine read one clock, and each rounds down."""

HOUR_MS = 3_600_000
IDLE_SHARE = 0.01
"""The share of charges that may have bought nothing, beyond a call for each kill and each hang-up of upstream."""


# -- what a run left ---------------------------------------------------------------------------------------------------


@dataclass
class Evidence:
    """In the order of time: the requests that reached the upstream, what the workers noted, and the charges that the
    ledger has at the end. From the stores: the ranks and video ids of each pass, by its machine, region and time; and
    the machines and regions whose round is not over."""

    scene: Scene
    course: Course
    wire: list[Event]
    events: list[Event]
    log: list[Event]
    passes: dict[tuple[str, str, int], list[tuple[int, str]]]
    pending: list[tuple[str, str]]

    def noted(self, name: str) -> list[Event]:
        return [event for event in self.events if event["event"] == name]

    def charges(self) -> dict[str, Event]:
        """The calls that were admitted, by key. A decision with a key that was used before has no charge of its own."""
        charges: dict[str, Event] = {}
        for event in self.noted("decision"):
            ms, _, key = (event["id"] or "").partition("-")
            if event["admitted"] and key:
                # Whoever draws on an allowance dates that by a clock that may be wrong.
                charged_ms = int(ms) if event["source"] == "ledger" else event["ms"]
                charges.setdefault(key, {**event, "charged_ms": charged_ms})
        return charges

    def by_ledger(self) -> list[Event]:
        """What the ledger has admitted, in the order of time."""
        admitted = [charge for charge in self.charges().values() if charge["source"] == "ledger"]
        return sorted(admitted, key=lambda charge: charge["charged_ms"])


def gather(scene: Scene) -> Evidence:
    course = Course(**json.loads((scene.folder / "course.json").read_text()))
    wire = _lines(scene.folder / "wire.jsonl")
    events = [event for path in (scene.folder / "notes").iterdir() for event in _lines(path)]
    for lines in (wire, events):
        lines.sort(key=lambda line: line["ms"])
    evidence = Evidence(scene, course, wire, events, json.loads((scene.folder / "log.json").read_text()), {}, [])
    for machine in MACHINES:
        _add_store(evidence, machine)
    return evidence


def _lines(path: Path) -> list[Event]:
    whole, _, _ = path.read_text().rpartition("\n")  # the last line of a killed process may be on its way
    return [json.loads(line) for line in whole.splitlines()]


def _add_store(evidence: Evidence, machine: str) -> None:
    with closing(sqlite3.connect(evidence.scene.folder / machine / "videos.db")) as db:
        ended = {*db.execute("SELECT region FROM checkpoints WHERE NOT pending AND cursor IS NULL")}
        evidence.pending += [(machine, region) for region in REGIONS if (region,) not in ended]
        ranked = db.execute("SELECT region, taken_at_ms, rank, video_id FROM rankings ORDER BY rank")
        for region, taken_at_ms, rank, video in ranked:
            evidence.passes.setdefault((machine, region, taken_at_ms), []).append((rank, video))


# -- the verdict -------------------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """The figures of a run, by what they count, and what is wrong."""

    scene: Scene
    rows: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def hold(self, holds: object, what: str) -> None:
        if not holds:
            self.wrong.append(what)


def judge(evidence: Evidence) -> Verdict:
    verdict = Verdict(evidence.scene, wrong=[*evidence.course.failed])
    for check in (_course, _requests, _log, _budget, _clocks, _pages):
        check(evidence, verdict)
    return verdict


def _course(evidence: Evidence, verdict: Verdict) -> None:
    scene, faults, decisions = evidence.scene, evidence.course.faults, evidence.noted("decision")
    answers = Counter("admitted" if event["admitted"] else event["reason"] for event in decisions)
    verdict.rows["seed, seconds of faults"] = f"{scene.seed}, {scene.seconds:g}"
    verdict.rows["faults"] = f"{sum(faults.values())} of {len(faults)} kinds: {_listed(faults)}"
    verdict.rows["decisions"] = f"{len(decisions):,}: {_listed(answers)}"


def _listed(numbers: dict[str, int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in sorted(numbers.items()))


# -- log and upstream agree --------------------------------------------------------------------------------------------


def _requests(evidence: Evidence, verdict: Verdict) -> None:
    """Each request has a charge of its own, which came first. A call may be sent again within the client, under a
    charge of its own: its requests take its charges in turn."""
    waiting: defaultdict[str, deque[tuple[str, Event]]] = defaultdict(deque)
    for key, charge in evidence.charges().items():
        waiting[charge["call"]].append((key, charge))
    idle = {charge["key"]: charge["units"] for charge in evidence.log}
    free, late, dearer = [], [], []
    for request in evidence.wire:
        call = request["call"]
        if not waiting[call]:
            free.append(call)
            continue
        key, charge = waiting[call].popleft()
        if charge["charged_ms"] > request["ms"] + CLOCK_MS:
            late.append(call)
        if idle.pop(key, 0) < request["units"]:
            dearer.append(call)
    wire_units, log_units = (sum(each["units"] for each in some) for some in (evidence.wire, evidence.log))
    refused = sum(request["refused"] for request in evidence.wire)
    faults = evidence.course.faults.items()
    excused = sum(times for name, times in faults if "killed" in name or "drop-idle" in name)
    beyond = sum(sorted(idle.values(), reverse=True)[excused:])
    verdict.rows["units on the wire / charged"] = f"{wire_units:,} / {log_units:,}"
    verdict.rows["charges without a request"] = f"{len(idle)}, of {sum(idle.values())} units"
    verdict.rows["calls that upstream refused for its quota"] = str(refused)
    verdict.hold(not free, f"{len(free)} requests reached the wire without a charge: {free[:3]}")
    verdict.hold(not late, f"{len(late)} requests were charged after they arrived: {late[:3]}")
    verdict.hold(not dearer, f"{len(dearer)} requests cost more than the log counts for them: {dearer[:3]}")
    verdict.hold(not refused, f"upstream refused {refused} requests: its quota was exceeded")
    verdict.hold(beyond <= IDLE_SHARE * log_units, f"{beyond} of {log_units} units were charged and never sent")


def _log(evidence: Evidence, verdict: Verdict) -> None:
    """At the end all machines have asked: every charge that anybody was told of is in the log, once, with its own time
    if the ledger has made it."""
    log, missing, changed = {charge["key"]: charge for charge in evidence.log}, [], []
    for key, charge in evidence.charges().items():
        if key not in log:
            missing.append(key)
        elif charge["source"] == "ledger" and charge["charged_ms"] != log[key]["ms"]:
            changed.append(key)
    twice = len(evidence.log) - len(log)
    verdict.rows["losses of the ledger"] = str(len(evidence.course.losses_ms))
    verdict.rows["charges in the log / missing / twice"] = f"{len(log):,} / {len(missing)} / {twice}"
    verdict.hold(not missing, f"{len(missing)} charges are not in the log at the end: {missing[:3]}")
    verdict.hold(not changed, f"{len(changed)} charges have another time at the end: {changed[:3]}")
    verdict.hold(not twice, f"{twice} charges are in the log more than once")


# -- the budget --------------------------------------------------------------------------------------------------------


def _blind_ms(evidence: Evidence) -> list[tuple[int, int]]:
    """The span in which a loss may hide earlier charges. It ends when the machine of the last charge before the loss
    asks again, because that machine had read all of them."""
    blind = []
    for from_ms, to_ms in evidence.course.losses_ms:
        before = [charge for charge in evidence.by_ledger() if charge["charged_ms"] < from_ms]
        if before:
            compared = [event for event in evidence.noted("decision") if event["limits"] and event["at_ms"] > to_ms]
            asked_ms = [event["at_ms"] for event in compared if event["machine"] == before[-1]["machine"]]
            blind.append((from_ms, min(asked_ms, default=evidence.course.ended_ms)))
    return blind


def _most(charges: Iterable[Event], window_ms: int) -> int:
    """What the fullest window holds."""
    inside: deque[Event] = deque()
    used = most = 0
    for charge in sorted(charges, key=lambda charge: charge["charged_ms"]):
        inside.append(charge)
        used += charge["cost_units"]
        while inside[0]["charged_ms"] <= charge["charged_ms"] - window_ms:
            used -= inside.popleft()["cost_units"]
        most = max(most, used)
    return most


def _budget(evidence: Evidence, verdict: Verdict) -> None:
    """Every window, by the time of the charge: a late request of a slow worker does not count against the ledger."""
    blind_ms, outside_losses = _blind_ms(evidence), []
    hidden_units = over_units = 0
    for charge in evidence.by_ledger():
        if any(from_ms <= charge["charged_ms"] <= until_ms for from_ms, until_ms in blind_ms):
            hidden_units += charge["cost_units"]
        else:
            outside_losses.append(charge)
    full = {}
    for name, limit in evidence.scene.limits.items():
        most, of_all = (
            _most([charge for charge in some if limit.method in ("", charge["method"])], limit.window_ms)
            for some in (outside_losses, evidence.charges().values())
        )
        bound = limit.units + evidence.scene.headroom_units + hidden_units
        over_units += max(0, most - limit.units)
        full[f"{name} ({limit.units:,})"] = most
        verdict.hold(most <= limit.units, f"limit {name!r} of {limit.units}: {most} units were granted in one window")
        verdict.hold(of_all <= bound, f"limit {name!r}: {of_all} units in one window, at most {bound} are excused")
    verdict.rows["the most in a window of each limit"] = _listed(full)
    verdict.rows["units granted before a loss was known"] = str(hidden_units)
    verdict.rows["units overspent beyond that and the allowance"] = str(over_units)
    drawn: Counter[str] = Counter()
    for charge in evidence.charges().values():
        drawn[charge["machine"]] += charge["cost_units"] if charge["source"] == "allowance" else 0
    verdict.rows["units of the allowances"] = _listed(drawn)
    too_much = max(drawn.values(), default=0) > evidence.scene.allowance_units
    verdict.hold(not too_much, f"a machine drew more than {evidence.scene.allowance_units} units: {_listed(drawn)}")


def _clocks(evidence: Evidence, verdict: Verdict) -> None:
    """Only a machine whose clock is hours behind is refused for that. A clock that is ahead frees nothing."""
    decisions = evidence.noted("decision")
    behind = [event for event in decisions if event["ahead_ms"] < -HOUR_MS]
    refused = sum(event["reason"] == "clock" for event in behind)
    compared = sum(bool(event["limits"]) for event in behind)
    misled = sum(event["reason"] == "clock" for event in decisions) - refused
    verdict.rows["refused for a clock hours behind / compared in spite of it"] = f"{refused} / {compared}"
    verdict.hold(not compared, f"{compared} calls of machines whose clock is hours behind were not refused for that")
    verdict.hold(not misled, f"{misled} calls were refused for a wrong clock, and none was behind")


# -- pages -------------------------------------------------------------------------------------------------------------


def _pages(evidence: Evidence, verdict: Verdict) -> None:
    """Each page that is fetched is stored, at the place that its region has reached."""
    waiting: dict[str, Event] = {}
    places: dict[tuple[str, str, int], int] = {}
    lost, astray, again = 0, [], []
    for event in evidence.events:
        if event["event"] == "fetched":
            lost += event["life"] in waiting
            waiting[event["life"]] = event
        elif event["event"] == "stored":
            pages, place = event["pages"], (event["machine"], event["region"], event["taken_ms"])
            what = f"{place}, page {pages}"
            ranks = evidence.passes.get(place, [])
            there = [video for rank, video in ranks if (pages - 1) * PAGE_ITEMS < rank <= pages * PAGE_ITEMS]
            if there != waiting.pop(event["life"], {}).get("ids"):
                astray.append(what)
            if pages <= places.get(place, 0):
                again.append(what)
            places[place] = pages
    lost += len(waiting.keys() - {*evidence.course.killed})
    torn, whole = 0, [*range(1, PAGES * PAGE_ITEMS + 1)]
    for ranks in evidence.passes.values():
        torn += [rank for rank, _ in ranks] != whole or len({video for _, video in ranks}) < len(whole)
    fetched = len(evidence.noted("fetched"))
    verdict.rows["pages fetched / lost / stored twice"] = f"{fetched:,} / {lost} / {len(again)}"
    verdict.hold(not lost, f"{lost} pages were fetched by workers that lived on, and not stored")
    verdict.hold(not astray, f"{len(astray)} pages are not in the store as they were fetched: {astray[:3]}")
    verdict.hold(not again, f"{len(again)} times a region went back to a page that it had: {again[:3]}")
    verdict.hold(not torn, f"{torn} passes are not whole at the end, or have a page twice")
    verdict.hold(not evidence.pending, f"not all regions are complete at the end: {evidence.pending}")
