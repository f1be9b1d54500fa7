"""A simulated schedule spends, wants and is refused what the real budget over the real ledger says, call by call."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from quota.common.clock import NEVER
from quota.common.files import read_text
from quota.deciding.corrections import add
from quota.errors import UsageError
from quota.jobs.job import load_fetch
from quota.jobs.plan.simulation import (
    SLOT_MS,
    JobPlan,
    RefusedTick,
    Simulated,
    SlotSums,
    State,
    pass_steps,
    simulate,
    step_at,
)
from quota.jobs.store.checkpoints import Checkpoint, by_rotation
from quota.jobs.ticks import Tick, ticks
from quota.rules.entry import Entry
from quota.rules.facts import Exhaustion, Facts, Grant
from quota.session import Session
from quota.settings.load import load_settings
from quota.settings.model import JobSettings, LedgerSettings, Settings
from quota.terms.costs import Part
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS


class Region:
    def __init__(self, name: str, checkpoint: Checkpoint | None, job: JobSettings) -> None:
        self.name = name
        self.pending = checkpoint is not None and checkpoint.pending
        self.cursor = (step_at(job, checkpoint) or None) if checkpoint is not None else None
        self.completed_at_ms = None if checkpoint is None else checkpoint.completed_at_ms
        self.failed_at_ms = None if checkpoint is None else checkpoint.failed_at_ms


class PlainSimulation:
    """`quota.jobs.plan.simulation.simulate`, call by call."""

    def __init__(self, settings: Settings, start_ms: int, until_ms: int, state: State) -> None:
        self.settings = settings
        self.now_ms = self.start_ms = start_ms
        self.until_ms = until_ms
        self.session = Session(settings._replace(ledger=LedgerSettings("sqlite://", None)), clock=lambda: self.now_ms)
        self.replay(state)
        self.steps: dict[str, tuple[str, ...]] = {}
        self.machines: dict[str, list[dict[str, Region]]] = {}
        folder = None if settings.path is None else settings.path.absolute().parent
        for job in settings.jobs.values():
            self.steps[job.name] = pass_steps(job, load_fetch(job.fetch, job.options, folder))
            checkpoints = {checkpoint.region: checkpoint for checkpoint in state.checkpoints.get(job.name, ())}
            self.machines[job.name] = [
                {name: Region(name, checkpoints.get(name), job) for name in job.regions or ("",)}
                for _ in range(settings.machines_of(job))
            ]
        self.totals = {
            job.name: JobPlan(job.name, dict.fromkeys(job.regions or ("",), 0)) for job in settings.jobs.values()
        }
        self.spent: dict[tuple[str, str, str], SlotSums] = {}
        self.wanted: dict[tuple[str, str, str], SlotSums] = {}
        self.refused_until: dict[Any, tuple[int, str | None]] = {}

    def replay(self, state: State) -> None:
        start_ms, replayed = self.now_ms, set[str]()
        for name, credential in self.settings.credentials.items():
            project = self.session.project(name)
            if project.name in replayed:
                continue
            replayed.add(project.name)
            for entry in state.entries.get(credential.project, ()):
                self.now_ms = entry.id[0]
                add(project, [entry].copy)
            self.now_ms = start_ms
            project.state.unite(state.facts_of(project.name))

    def run(self, ticks: Iterable[Tick]) -> Simulated:
        refusals = []
        for tick in ticks:
            self.now_ms = tick.at_ms
            for regions in self.machines[tick.job]:
                refusal = self.tick(self.settings.jobs[tick.job], regions, tick)
                if refusal is not None:
                    refusals.append(refusal)
                    self.totals[tick.job].add(refusal)
        self.session.close()
        return Simulated(
            self.start_ms, self.until_ms, [*self.spent.values()], [*self.wanted.values()], refusals, self.totals
        )

    def tick(self, job: JobSettings, machine: dict[str, Region], tick: Tick) -> RefusedTick | None:
        regions, steps = list(machine.values()), self.steps[job.name]
        most = len(tick.regions) or len(regions)
        self.totals[job.name].ticks += 1
        prices = [self.price(job, method) for method in steps]
        for method, parts, _ in prices:
            for part in parts:
                row = self.row(self.wanted, job, method, part.bucket)
                row.add(tick.at_ms // SLOT_MS, part.units * most, most)
        covered = by_rotation(regions)
        for region in covered:
            region.pending = True
        todo = covered[:most]
        budget = self.session.budget(job.credential)
        selected = any(limit.view.selector.jobs for limit in budget.limits)
        of_run = 0
        for done, region in enumerate(todo):
            for index in range(region.cursor or 0, len(steps)):
                method, parts, default_units = prices[index]
                first_units = parts[0].units if parts else 0
                key = (method, parts, job.credential, tuple(sorted(job.leave.items())), job.name if selected else "")
                until_ms, by = self.refused_until.get(key, (0, None))
                if tick.at_ms < until_ms:
                    return RefusedTick(tick.at_ms, job.name, by, len(todo) - done)
                if job.max_units is not None and of_run + first_units > job.max_units:
                    return RefusedTick(tick.at_ms, job.name, "max_units", len(todo) - done)
                decision = budget.charge(method, units=default_units, job=job.name, region=region.name)
                if not decision.admitted:
                    again_ms = NEVER if decision.retry_at_ms is None else decision.retry_at_ms
                    self.refused_until[key] = (again_ms, decision.refused_by)
                    return RefusedTick(tick.at_ms, job.name, decision.refused_by, len(todo) - done)
                of_run += first_units
                for part in parts:
                    self.row(self.spent, job, method, part.bucket).add(tick.at_ms // SLOT_MS, part.units)
                region.cursor = index + 1
            region.pending, region.cursor, region.completed_at_ms = False, None, tick.at_ms
            self.totals[job.name].passes[region.name] += 1
        return None

    def price(self, job: JobSettings, called: str) -> tuple[str, tuple[Part, ...], int | None]:
        """Method, what it costs, and its units where the book does not know it."""
        book = self.settings.credentials[job.credential].book
        method = book.canonical(called)
        if method in book.methods:
            price, _ = book.price_at(method, self.now_ms)
            return method, price.parts, None
        return method, book.default_get.parts, book.default_get.units

    def row(self, rows: dict[tuple[str, str, str], SlotSums], job: JobSettings, method: str, bucket: str) -> SlotSums:
        project = self.settings.credentials[job.credential].project
        return rows.setdefault((job.name, method, bucket), SlotSums(project, bucket, method, job.name))


SEEDS = int(os.environ.get("QUOTA_TEST_EXAMPLES", "6"))

OWN_PY = """
from quota.jobs.job import Page, first_attempt

@first_attempt("videos.insert")
def upload(client, region, cursor):
    return Page()

@first_attempt("search.list")
def search(client, region, cursor):
    return Page()

def silent(client, region, cursor):
    return Page()
"""

DAYS = [(2026, 11, 1), (2026, 3, 8), (2026, 3, 29), (2025, 12, 2), (2026, 4, 4), (2026, 6, 1), (2026, 7, 30)]
"""Around changes of clocks and of prices, and the end of a month."""

WINDOWS = [
    '"20m"', '"1h"', '"90m"', '"24h"', '"48h"',
    '{ calendar = "hour", zone = "Australia/Lord_Howe" }',
    '{ calendar = "day", zone = "America/Los_Angeles" }',
    '{ calendar = "day", zone = "Europe/Berlin" }',
    '{ calendar = "month", zone = "UTC" }', '{ calendar = "month", zone = "America/Los_Angeles", day = 31 }',
    '{ calendar = "week", zone = "Europe/Berlin" }', '{ calendar = "quarter-hour", zone = "UTC" }',
]  # fmt: skip
FETCHES = ["trending", "search", "channels", "own:upload", "own:search", "own:silent"]
NARROW = [
    'jobs = ["j0"]', 'jobs = ["j1", "j2"]', 'methods = ["search.list"]', 'methods = ["videos.list"]\ncount = "calls"',
    'count = "calls"', 'methods = ["videos.insert", "search.list"]', 'per = "job"',
]  # fmt: skip
OTHER = '[[credentials.other.limits]]\nname = "o"\nunits = 900\nwindow = "24h"\n'


def several_buckets() -> str:
    """A book in which some calls are charged to several buckets, from a day on, and one is free."""
    text = read_text("quota.config", "costs/youtube-v3-buckets.toml")
    for method, price in (
        ("videos.list", '[{ units = 1 }, { units = 3, bucket = "batch-stats" }]'),
        (
            "search.list",
            '{ prices = [{ units = 1, bucket = "search" }, { parts = [{ units = 2 }, { units = 1, bucket = '
            '"search" }], since = 2026-11-02 }] }',
        ),
        ("channels.list", "0"),
    ):
        text = re.sub(f'"{method}" = .*', f'"{method}" = {price}', text)
    return text


def configuration(rng: random.Random) -> str:
    text = '[ledger]\nurl = "redis://127.0.0.1:1/0"\nunavailable = { max_cost = 1, allowance = 1, machines = 2 }\n'
    names: list[str] = []
    for number in range(rng.choice((1, 2, 3))):
        names.append(f"l{number}")
        window = rng.choice(WINDOWS)
        text += (
            f'[[credentials.main.limits]]\nname = "l{number}"\nunits = {rng.choice((150, 400, 2_000, 9_500, 50_000))}\n'
        )
        text += f"window = {window}\n" + ("" if number == 0 else rng.choice(["", "", *NARROW]) + "\n")
        text += "pacing = true\n" if "calendar" in window and rng.random() < 0.4 else ""
    api = rng.choice(("youtube-v3", "youtube-v3-buckets", "./several.toml"))
    text = text.replace("[[", f'[credentials.main]\napi = "{api}"\n[[', 1)
    if rng.random() < 0.3:
        text += f'[credentials.other]\napi = "{api}"\n' + rng.choice(('project = "main"\n', OTHER))
    for number in range(rng.choice((1, 3, 6))):
        regions = ["US", "GB", "DE", "FR"][: rng.randint(1, 4)]
        fetch = rng.choice(FETCHES)
        every = rng.choice(
            ['"*/30 * * * *"', '"5-59/20 * * * *"', '"every 45m"', '"0 */3 * * *"', '"every 1h"', '"30 8 * * 1-5"']
        )
        text += f'[jobs.j{number}]\nfetch = "{fetch}"\nregions = {regions}\nschedule = {every}\n'.replace("'", '"')
        text += 'options = { ids = ["a"] }\n' if fetch == "channels" else ""
        text += 'options = { words = "a" }\n' if fetch == "search" else ""
        text += f"pages = {rng.randint(1, 3)}\n" if fetch != "own:upload" else ""
        text += f"leave = {rng.choice((0, 0, 30, 40))}\n"
        text += rng.choice(("", "", f"max_units = {rng.choice((1_600, 2_000))}\n"))
        text += rng.choice(("", "", 'stagger = "1m"\n', 'jitter = "2m"\n', 'machines = "each"\n'))
        if "[credentials.other]" in text:
            text += f'credential = "{rng.choice(("main", "other"))}"\n'
    return text


def live_state(rng: random.Random, settings: Settings, start_ms: int) -> State:
    """What a ledger and a store may have when a plan is made."""
    state = State({}, {}, {})
    for credential in settings.credentials.values():
        latest_ms = start_ms + rng.choice((-1, 0, 0, HOUR_MS, DAY_MS))
        times = sorted(rng.randrange(start_ms - 3 * DAY_MS, latest_ms) for _ in range(rng.choice((0, 5, 200))))
        entries = [
            Entry(
                (ms, seq), rng.choice((0, 1, 1, 50, 100)), rng.choice(("units", "search")),
                rng.choice(("videos.list", "search.list")), rng.choice(("j0", "j1", "other")), "US", f"k{seq}",
            )
            for seq, ms in enumerate(times)
        ]  # fmt: skip
        last_ms = max([start_ms, *times])
        entries += [
            Entry(
                (last_ms, 1_000 + number), rng.randint(1, 150), rng.choice(("units", "search")), "", "", "",
                f"o{number}", "others", rng.choice(("one", "another")), (start_ms - 1, start_ms + ends_ms),
            )
            for number, ends_ms in enumerate((HOUR_MS, 5 * HOUR_MS, 30 * HOUR_MS))
            if rng.random() < 0.3
        ]  # fmt: skip
        state.entries[credential.project] = entries  # type: ignore[index]
        exhaustions = [
            Exhaustion(
                bucket, start_ms - HOUR_MS, rng.choice((NEVER, start_ms + 5 * HOUR_MS, start_ms - 1)), "no", "us"
            )
            for bucket in ("units", "search", "uploads")
            if rng.random() < 0.15
        ]
        grants = [
            Grant(
                bucket, rng.choice((100, 120, 5_000)), start_ms + ahead, start_ms + ahead + rng.choice((1, 7)) * DAY_MS
            )
            for bucket in ("units", "search")
            for ahead in (rng.choice((-DAY_MS // 2, -3 * DAY_MS, DAY_MS // 2, 2 * DAY_MS)),)
            if rng.random() < 0.2
        ]
        facts = Facts(tuple(exhaustions), tuple(grants), start_ms)
        state.facts[credential.project] = facts  # type: ignore[index]
    for job in settings.jobs.values():
        state.checkpoints[job.name] = [  # type: ignore[index]
            Checkpoint(
                job.name, region, rng.random() < 0.5, rng.choice((None, {"token": "a"}, {"ids": ["a"]})),
                pages=rng.randint(0, 2), started_at_ms=start_ms - 5, completed_at_ms=start_ms - rng.randint(1, 99),
            )
            for region in job.regions
            if rng.random() < 0.7
        ]  # fmt: skip
    return state


def seen(outcome: Simulated) -> object:
    spent, wanted = (
        {(row.project, row.bucket, row.method, row.job): (row.units, row.calls) for row in rows if row.units}
        for rows in (outcome.spent, outcome.wanted)
    )
    return spent, wanted, outcome.refusals, outcome.jobs


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_simulation_finds_what_the_budget_says_call_by_call(seed: int, tmp_path: Path, state_dir: Path) -> None:
    rng = random.Random(seed)
    (tmp_path / "own.py").write_text(OWN_PY)
    path = tmp_path / "quota.toml"
    path.write_text(configuration(rng))
    (tmp_path / "several.toml").write_text(several_buckets())
    settings = load_settings(path)
    start_ms = int(datetime(*rng.choice(DAYS), tzinfo=UTC).timestamp()) * 1000 + rng.choice(
        (0, 0, 7 * HOUR_MS + 12_345)
    )
    until_ms = start_ms + rng.choice((1, 3)) * DAY_MS + MINUTE_MS
    state = live_state(rng, settings, start_ms) if rng.random() < 0.6 else State()

    coming = ticks(settings.jobs.values(), start_ms, until_ms)
    try:
        expected = seen(PlainSimulation(settings, start_ms, until_ms, state).run(coming))
    except UsageError as error:
        expected = str(error)
    try:
        outcome = seen(simulate(settings, start_ms, until_ms, state=state))
    except UsageError as error:
        outcome = str(error).removeprefix(f"{str(error).partition(':')[0]}: ")  # the job
    assert outcome == expected
