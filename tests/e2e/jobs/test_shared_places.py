"""Workers without disks: where each region stands lies in the ledger, and what was fetched goes out through a sink.

Each tick is a process with a new folder: no store, no lock and no memory of the tick before it. Half of them kill
themselves with SIGKILL, wherever they happen to be. QUOTA_TEST_WORKERS=300 takes that many steps.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from quota.common.clock import host_clock
from quota.jobs.emulator import Emulator
from quota.jobs.lock import only_one
from quota.jobs.places import MAX_CURSOR_BYTES, checkpoints_of
from quota.jobs.progress import Watcher
from quota.jobs.runner import RunOptions, run_job
from quota.jobs.store.checkpoints import Checkpoint
from quota.jobs.store.store import Store
from quota.settings.load import load_settings
from quota.terms.limits import DAY_MS, HOUR_MS
from support.commands import Quota, one_line
from support.local import LocalSession

STEPS = int(os.environ.get("QUOTA_TEST_WORKERS", "12"))
REGIONS, PAGES = ("US", "DE", "FR"), 3

CONFIG = """
[ledger]
url = "{url}"
[credentials.main]
api = "youtube-v3"
project = "p"
key = "file:key"
[store]
url = "sqlite:///videos.db"
places = "ledger"
[jobs.t]
fetch = "diskless:fetch"
sink = "diskless:put"
regions = ["US", "DE", "FR"]
pages = {pages}
{more}
"""

MODULE = '''
import os, uuid
from quota.jobs.job import Page, first_attempt

EVENTS = {events!r}

def tell(*words):
    """One line in the file of what all machines did, which keeps their order."""
    descriptor = os.open(EVENTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, (" ".join(map(str, (os.getpid(), *words))) + "\\n").encode())
    os.close(descriptor)

at_point = lambda: None

@first_attempt("videos.list")
def fetch(client, region, cursor):
    passed, page = (cursor["pass"], cursor["page"]) if cursor else (uuid.uuid4().hex, 0)
    tell("fetch", region, passed, page)
    at_point()
    client.videos().list(part="id", id="x").execute()
    at_point()
    tell("fetched", region, passed, page)
    return Page(rows={{"pages": [{{"id": f"{{passed}} {{page}}"}}]}}, cursor={{"pass": passed, "page": page + 1}})

def put(page, job, region):
    at_point()
    tell("sink", region, page.rows["pages"][0]["id"])
    at_point()
'''


class AtPage(Watcher):
    """At a point between the store, which has the page, and the ledger, which still has the place before it."""

    def __init__(self, at_point: Any) -> None:
        self._at_point = at_point

    def page(self, checkpoint: Checkpoint) -> None:
        self._at_point()


@dataclass
class Fleet:
    """Machines over one ledger, whose clock the test moves."""

    url: str
    folder: Path
    pages: int = PAGES
    ahead_ms: int = 0
    killed: int = 0
    module: str = MODULE

    @property
    def events(self) -> Path:
        return self.folder / "events"

    def machine(self) -> Path:
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        (folder / "quota.toml").write_text(CONFIG.format(url=self.url, pages=self.pages, more=""))
        (folder / "diskless.py").write_text(self.module.format(events=str(self.events)))
        (folder / "key").write_text("a-key-for-tests")
        return folder

    def clock(self) -> int:
        return host_clock() + self.ahead_ms

    def session(self, folder: Path) -> LocalSession:
        return LocalSession(load_settings(folder / "quota.toml"), clock=self.clock)

    def places(self) -> dict[str, Checkpoint]:
        folder = self.machine()
        with self.session(folder) as session, Store.if_made(session.settings.store, self.clock) as store:
            places = checkpoints_of(session, session.settings.jobs["t"], store)
        shutil.rmtree(folder)
        return {place.region: place for place in places}

    def start(self, regions: tuple[str, ...] = (), *, at: int = 0, act: str = "die") -> Any:
        """A tick in a process of its own. At its point of this number it dies, is asked to stop, or is replaced."""
        folder = self.machine()
        process: Any = multiprocessing.get_context("fork").Process(target=self._tick, args=(folder, regions, at, act))
        process.start()
        return process

    def _tick(self, folder: Path, regions: tuple[str, ...], at: int, act: str) -> None:
        os.environ["QUOTA_STATE_DIR"] = str(folder / "state")
        os.chdir(folder)
        sys.path.append(str(folder))
        import diskless  # type: ignore[import-not-found]

        left, stops = at, 0

        def at_point() -> None:
            nonlocal left, stops
            left -= 1
            if left != 0:
                return
            if act == "die":
                diskless.tell("dies")
                os.kill(os.getpid(), signal.SIGKILL)
            if act == "stop":
                stops = signal.SIGTERM
            if act == "be replaced":
                with self.session(self.machine()) as other:
                    assert run_job(other, "t", RunOptions(here=True)).outcome == "done"

        diskless.at_point = at_point
        with self.session(folder) as session:
            watcher = AtPage(at_point)
            report = run_job(session, "t", RunOptions(regions, watcher=watcher, stop=lambda: stops))
        diskless.tell("ended", report.outcome)
        assert report.outcome in ("done", "elsewhere", "stopped"), report

    def join(self, *processes: Any) -> None:
        """Wait for the ticks. The regions of a dead tick are free when its lease is over."""
        for process in processes:
            process.join()
            assert process.exitcode in (0, -signal.SIGKILL)
        dead = sum(process.exitcode != 0 for process in processes)
        self.killed += dead
        self.ahead_ms += HOUR_MS if dead else 0


@dataclass
class Seen:
    """The actions of all machines, in order."""

    fetched: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    sunk: Counter[tuple[str, str, int]] = field(default_factory=Counter)

    @classmethod
    def of(cls, events: Path) -> Seen:
        """Asserts that no region was fetched by two at once, and no page before the sink had the one before it."""
        seen, at_work = cls(), {}
        for line in events.read_text().splitlines():
            pid, what, *words = line.split(" ")
            if what in ("dies", "ended"):
                at_work = {region: other for region, other in at_work.items() if other != pid}
                continue
            region, page = words[0], (words[0], words[1], int(words[2]))
            match what:
                case "fetch":
                    assert region not in at_work, f"{region} is fetched by two at once"
                    at_work[region] = pid
                    seen.fetched[page] += 1
                    before = (*page[:2], page[2] - 1)
                    assert page[2] == 0 or seen.sunk[before], f"{before} never reached the sink"
                case "fetched":
                    assert at_work.pop(region) == pid
                case _:
                    seen.sunk[page] += 1
        return seen

    def whole(self, region: str) -> list[str]:
        passes = {passed for owner, passed, _ in self.sunk if owner == region}
        return [number for number in passes if all(self.sunk[region, number, page] for page in range(PAGES))]


@pytest.fixture
def fleet(ledger_url: str, tmp_path: Path) -> Fleet:
    return Fleet(ledger_url, tmp_path)


def test_workers_that_are_killed_at_random_bring_each_page_to_the_sink(fleet: Fleet) -> None:
    dice = random.Random(STEPS)
    steps = 0
    while (steps := steps + 1) <= STEPS or fleet.killed < STEPS // 4:
        regions = [tuple(r for r in REGIONS if dice.random() < 0.7) for _ in range(2)]
        fleet.join(*[fleet.start(some, at=dice.choice((0, dice.randrange(1, 30)))) for some in regions])
    fleet.ahead_ms += HOUR_MS
    while any(place.pending for place in fleet.places().values()):
        fleet.join(fleet.start())
    seen = Seen.of(fleet.events)
    assert all(seen.whole(region) for region in REGIONS), "each round ends"
    again = sum(times - 1 for times in seen.fetched.values())
    begun_anew = len([page for page in seen.fetched if page[2] == 0 and (*page[:2], 1) not in seen.fetched])
    assert again + begun_anew <= fleet.killed, "a page is fetched again only after a kill"
    assert all(place.completed_at_ms for place in fleet.places().values())


def test_a_run_that_was_replaced_leaves_the_place_where_the_other_has_put_it(fleet: Fleet) -> None:
    fleet.join(fleet.start(at=5, act="be replaced"))
    lines = [line.split(" ")[1:] for line in fleet.events.read_text().splitlines()]
    assert ["ended", "elsewhere"] in lines
    places = fleet.places().values()
    assert [(place.pending, place.pages, place.cursor) for place in places] == [(False, PAGES, None)] * len(REGIONS)
    assert len(Seen.of(fleet.events).fetched) == 1 + len(REGIONS) * PAGES


def test_a_run_that_waited_fetches_nothing_that_another_machine_fetched_meanwhile(fleet: Fleet) -> None:
    shell = Quota(fleet.machine())
    with only_one(f"sqlite:///{shell.folder}/videos.db", "t"):
        waiting = shell.start("run", "t", "--region", "US")
        assert waiting.stderr is not None
        assert waiting.stderr.readline() == "t: waits for another run of the job to end\n"
        fleet.join(fleet.start(("US",)))
    assert waiting.communicate()[0] == "t: another run has covered it meanwhile\n"


def test_a_circle_is_noticed_by_a_machine_that_did_not_see_its_begin(fleet: Fleet) -> None:
    fleet.module = MODULE.replace('"pass": passed, "page": page + 1', '"pass": "x", "page": (page + 1) % 2')
    fleet.pages = 9
    fleet.join(fleet.start(("US",), at=5, act="stop"))
    assert fleet.places()["US"].cursor == {"pass": "x", "page": 1}
    fleet.join(fleet.start(("US",), at=5, act="stop"))
    assert fleet.places()["US"].cursor == {"pass": "x", "page": 0}
    process = fleet.start(("US",))
    process.join()
    assert process.exitcode == 1, "page 1 comes next once more, and a third machine knows it"
    place = fleet.places()["US"]
    assert (place.cursor, place.failed_at_ms is not None) == (None, True)


def test_a_cursor_that_the_ledger_cannot_keep_fails_its_region(fleet: Fleet) -> None:
    fleet.module = MODULE.replace('"page": page + 1', f'"page": page + 1, "x": "x" * {MAX_CURSOR_BYTES}')
    process = fleet.start(("US",))
    process.join()
    assert process.exitcode == 1
    assert fleet.places()["US"].pages == 0
    assert "sink" not in fleet.events.read_text(), "nor is the page handed over"
    fleet.module = MODULE.replace('"page": page + 1', f'"page": page + 1, "x": "x" * {MAX_CURSOR_BYTES - 100}')
    fleet.join(fleet.start(("US",), at=5, act="stop"))
    assert len(fleet.places()["US"].cursor["x"]) == MAX_CURSOR_BYTES - 100  # type: ignore[index]


def test_places_are_shown_and_reset_where_they_lie(fleet: Fleet) -> None:
    fleet.join(fleet.start(("US", "DE"), at=5 * 4, act="stop"))
    shell = Quota(fleet.machine())
    listed = shell("place", "list").stdout.splitlines()
    assert listed[0].startswith("t US: this round is done; complete ")
    assert listed[1:] == [
        "t DE: page 2 comes next, 1 page and 1 item of this round stored; never complete",
        "t FR: page 1 comes next; never complete",
    ]
    assert shell.json("place", "show", "t", "DE", "--json")["places"][0]["cursor"]["page"] == 1
    fleet.ahead_ms = 31 * DAY_MS
    assert fleet.places()["DE"].pages == 0, "the first page has expired, and a run would begin with it"
    fleet.ahead_ms = 0
    assert shell("place", "reset", "t").stdout == "t begins anew with the next run, in US, DE, FR\n"
    assert [(place["pages"], place["pending"]) for place in shell.json("place", "list", "--json")["places"]] == [
        (0, True)
    ] * 3
    before = len(Seen.of(fleet.events).fetched)
    fleet.join(fleet.start())
    assert len(Seen.of(fleet.events).fetched) == before + len(REGIONS) * PAGES
    assert not (shell.folder / "videos.db").exists(), "nobody needs a store for that"


def test_a_place_that_the_store_has_left_behind_takes_nothing_back(quota: Quota, upstream: Emulator) -> None:
    """As after a restored ledger: here the store completes a pass while the ledger does not keep its place."""
    more = f'max_units = 2\n[credentials.main]\napi = "youtube-v3"\nkey = "file:key"\nendpoint = "{upstream.address}"'
    (quota.folder / "key").write_text("a-key")
    shown = []
    for places in ("store", "ledger", "ledger", "store", "ledger"):
        job = f'[jobs.t]\nfetch = "trending"\nregions = ["DE"]\npages = 4\n{more}'
        quota.configure(f'[store]\nurl = "sqlite:///videos.db"\nplaces = "{places}"\n{job}')
        shown += [] if places == "store" else [quota("place", "list").stdout.partition(", ")[0].partition(";")[0]]
        assert quota("run", "t").returncode == 0
    assert shown == ["t DE: page 3 comes next", "t DE: this round is done", "t DE: this round is done"]
    with closing(sqlite3.connect(quota.folder / "videos.db")) as db:
        ranks = db.execute("SELECT max(rank), count(*) FROM rankings GROUP BY taken_at_ms ORDER BY taken_at_ms")
        assert ranks.fetchall() == [(200, 200), (200, 200), (100, 100)]
    quota.configure((quota.folder / "quota.toml").read_text().replace('"DE"', '"DE", "FR"'))
    assert quota("place", "show", "t", "FR").stdout == "t FR: page 1 comes next; never complete\n"


def test_a_region_of_a_running_job_is_not_reset(fleet: Fleet) -> None:
    """Nor is a region of a dead run, until its lease is over: nobody knows yet that it is dead."""
    fleet.join(fleet.start(("US", "DE"), at=3))
    fleet.ahead_ms = 0
    shell = Quota(fleet.machine())
    line = one_line(shell("place", "reset", "t", "DE"), 1)
    assert line.startswith("job 't' is running on ")
    assert line.endswith("; reset it when the run has ended")
    assert shell("place", "reset", "t", "FR").returncode == 0
    fleet.join(fleet.start(("FR",), at=3))
    run, dry = shell.json("run", "t"), shell.json("run", "t", "--dry-run")
    (job,) = shell.json("status")["credentials"][0]["jobs"]
    assert (run["outcome"], dry["runs_on"], dry["until"]) == ("elsewhere", run["runs_on"], run["until"])
    assert (job["until"] <= run["until"], job["could_go_on"], dry["regions"]) == (True, False, [])
    assert "; goes on here if silent until " in shell("run", "t", "--dry-run").stdout


@pytest.mark.parametrize("store", ['name = "a"\nplaces = "ledger"', 'places = "redis"', "each"])
def test_a_configuration_that_contradicts_itself_is_one_line(tmp_path: Path, store: str) -> None:
    each = store == "each"
    text = CONFIG.format(url="sqlite:///ledger.db", pages=1, more='machines = "each"' if each else "")
    shell = Quota(tmp_path)
    shell.configure(text if each else text.replace('places = "ledger"', store))
    line = one_line(shell("place", "list"), 78)
    assert ("remove machines" if each else "store.") in line or "[store]" in line, line
