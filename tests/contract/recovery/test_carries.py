"""A ledger that moves: to another address, there and back, while others move too. Nothing seen is granted twice."""

from __future__ import annotations

import logging
import os
import random
import re
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import quota
from quota.budget import Budget
from quota.common.clock import NEVER
from quota.ledger.contract import ChargeRequest, Expected, read_entries, root_of
from quota.ledger.entry import Charge
from quota.ledger.factory import open_ledger
from quota.ledger.identity import Identity
from quota.ledger.unlogged import UnloggedUsage, is_carry
from quota.recovery.allowance import LOOK_AGAIN_MS
from quota.recovery.high_water_mark import HighWaterMark
from quota.recovery.watermark_folder import watermark_path
from quota.terms.limits import DAY_MS, HOUR_MS
from support.books import BOOK
from support.losses import LedgerStorage, Machine, RedisStorage, SqliteStorage
from support.processes import in_child
from support.setup import limit
from support.site import watermark_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.servers import RedisServer

NOW = 1_793_000_000_000
DAY = limit(10**6)


# -- as the owner does it ----------------------------------------------------------------------------------------------


class Owner:
    """One machine, with configurations that its owner edits. The time is the host's, unless a test sets it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_ms: int | None = None

    def write(self, url: str, *, name: str = "quota.toml", ledger: str = "", endpoint: str = "") -> Path:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f'[ledger]\nurl = "{url}"\n{ledger}\n[credentials.main]\napi = "youtube-v3"\nproject = "p"\n'
            + (f'endpoint = "{endpoint}"\n' if endpoint else "")
            + '[[credentials.main.limits]]\nname = "day"\nunits = 10_000\nwindow = "24h"\n'
        )
        return path

    def session(self, config: Path | str = "quota.toml") -> quota.Session:
        now_ms = self.now_ms
        return quota.open(self.folder / config, clock=None if now_ms is None else lambda: now_ms)

    def charge(self, config: Path | str = "quota.toml", *, times: int = 1, units: int = 1) -> int:
        """As a new process. Returns how many were admitted."""
        with self.session(config) as opened:
            return sum(opened.budget().charge("videos.list", units=units).admitted for _ in range(times))

    def used(self, config: Path | str = "quota.toml") -> int:
        with self.session(config) as opened:
            return opened.budget().usage()[0].used_units


@pytest.fixture
def owner(state_dir: Path, tmp_path: Path) -> Owner:
    return Owner(tmp_path)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_nine_thousand_units_stay_spent_when_the_url_is_changed(
    owner: Owner, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The README: edit the url. The next decision counts what this machine saw at the old one, and says so once."""
    with closing(RedisStorage(redis_server.url).client) as client:
        client.flushall()
    owner.write("sqlite:///a.db")
    assert owner.charge(times=9, units=1_000) == 9
    owner.write(redis_server.url)
    assert owner.charge(times=11, units=100) == 10
    assert owner.used() == 10_000
    (said,) = lines(caplog)
    assert re.match(
        rf"ledger_moved project=p from=sqlite:///{owner.folder}/a\.db to={redis_server.url} carried=9000 until=\S+Z: ",
        said,
    )
    assert said.endswith("if these are two upstream projects, give each its own `project` name")
    owner.write("sqlite:///a.db")
    assert owner.used() == 10_000
    assert owner.charge() == 0
    owner.write(redis_server.url)
    assert owner.used() == 10_000
    assert [line.partition(" ")[0] for line in lines(caplog)] == ["ledger_moved"] * 3


def test_another_spelling_of_the_url_is_the_same_ledger(owner: Owner, caplog: pytest.LogCaptureFixture) -> None:
    owner.write("sqlite:///a.db")
    assert owner.charge(units=900) == 1
    owner.write(f"sqlite:///{owner.folder}/./a.db")
    assert owner.charge(units=50) == 1
    (owner.folder / "a.db").unlink()
    for suffix in ("-wal", "-shm"):
        (owner.folder / f"a.db{suffix}").unlink(missing_ok=True)
    assert owner.used() == 950
    assert [line.partition(" ")[0] for line in lines(caplog)] == ["ledger_behind"]


def test_a_configuration_is_known_by_its_path_as_named(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative or absolute, through a link or with `..`: what a link points to may be another file tomorrow."""
    for release, place in (("one", "a.db"), ("two", "b.db")):
        owner.write(f"sqlite:///{owner.folder}/{place}", name=f"{release}/quota.toml")
    current = owner.folder / "current"
    current.symlink_to("one")
    monkeypatch.chdir(owner.folder)
    with quota.open("current/quota.toml") as opened:
        os.chdir("/")
        assert opened.budget().charge("videos.list", units=900).admitted
    current.unlink()
    current.symlink_to("two")
    monkeypatch.chdir(owner.folder / "one")
    assert owner.used(Path("../current/quota.toml").absolute()) == 900
    assert owner.used("two/quota.toml") == 900, "joined, because its ledger has the carry"


def test_a_named_ledger_is_known_by_its_name_wherever_the_configuration_lies(owner: Owner) -> None:
    owner.write("sqlite:///a.db", name="1/quota.toml", ledger='name = "production"')
    owner.write("sqlite:///b.db", name="2/quota.toml", ledger='name = "production"')
    owner.write("sqlite:///c.db", name="3/quota.toml", ledger='name = "development"')
    assert owner.charge("1/quota.toml", units=900) == 1
    assert owner.used("2/quota.toml") == 900
    assert owner.used("3/quota.toml") == 0


def test_what_is_no_file_is_known_by_its_ledger(owner: Owner) -> None:
    """A pipe has another path each time, or the same path for every configuration."""
    config = owner.write(f"sqlite:///{owner.folder}/a.db").read_text()

    def used(text: str, units: int = 0) -> int:
        read, write = os.pipe()
        os.write(write, text.encode())
        os.close(write)
        try:
            with quota.open(f"/dev/fd/{read}") as opened:
                assert not units or opened.budget().charge("videos.list", units=units).admitted
                return opened.budget().usage()[0].used_units
        finally:
            os.close(read)

    assert used(config, 900) == 900
    for suffix in ("", "-wal", "-shm"):
        (owner.folder / f"a.db{suffix}").unlink(missing_ok=True)
    assert used(config) == 900
    assert used(config.replace("a.db", "b.db")) == 0


# -- two configurations ------------------------------------------------------------------------------------------------


def test_two_configurations_of_one_ledger_know_what_the_other_saw(owner: Owner) -> None:
    for name in ("one.toml", "two.toml"):
        owner.write("sqlite:///a.db", name=name)
    assert owner.charge("one.toml", units=900) == 1
    assert owner.charge("two.toml", units=50) == 1
    copy = SqliteStorage(owner.folder)
    copy.path = owner.folder / "a.db"
    kept = copy.copy()
    assert owner.charge("one.toml", units=7) == 1
    copy.restore(kept)
    assert owner.used("two.toml") == 957, "it saw 950 itself"


def test_what_another_configuration_reported_takes_nothing_off_what_this_one_saw(owner: Owner) -> None:
    """It found a loss, and said what had survived that: only its own observations hold the survivors."""
    for name in ("one.toml", "two.toml"):
        owner.write("sqlite:///a.db", name=name)
    storage = SqliteStorage(owner.folder)
    storage.path = owner.folder / "a.db"
    assert owner.charge("one.toml", units=300) == 1
    copy = storage.copy()
    assert owner.charge("two.toml", units=1) == 1
    storage.restore(copy)
    assert owner.used("one.toml") == 301
    owner.write("sqlite:///b.db", name="two.toml")
    assert owner.used("two.toml") == 301
    owner.write("sqlite:///b.db", name="one.toml")
    assert owner.used("one.toml") == 301


def test_two_ledgers_of_one_project_are_said_once_a_day_and_not_joined(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    owner.write("sqlite:///a.db", name="one.toml")
    owner.write("sqlite:///b.db", name="two.toml")
    assert owner.charge("one.toml", units=900) == 1
    for _ in range(3):
        assert owner.charge("two.toml", units=10) == 1
        assert owner.charge("one.toml") == 1
    assert (owner.used("one.toml"), owner.used("two.toml")) == (903, 30)
    (said,) = lines(caplog)
    assert said.startswith("two_ledgers project=p ledger=sqlite:///")
    assert f"{owner.folder}/one.toml" in said
    assert f"{owner.folder}/two.toml" in said
    (told,) = (owner.folder / "state").glob("high-water-marks/*/told")
    os.utime(told, (time.time() - 86_401,) * 2)
    assert owner.charge("two.toml") == 1
    assert len(lines(caplog)) == 2
    owner.write("sqlite:///c.db", name="three.toml", endpoint="http://127.0.0.1:8765")
    os.utime(told, (time.time() - 86_401,) * 2)
    assert owner.charge("three.toml") == 1
    assert len(lines(caplog)) == 2, "another endpoint is another upstream"
    for suffix in ("", "-wal", "-shm"):
        (owner.folder / f"a.db{suffix}").unlink(missing_ok=True)
    assert owner.used("one.toml") == 903, "what the other configuration saw at its own ledger is not counted here"


# -- debts -------------------------------------------------------------------------------------------------------------

ALLOWS = "unavailable = { max_cost = 5, allowance = 20, machines = 1 }"


def test_a_debt_goes_to_the_ledger_that_the_configuration_names_next(owner: Owner) -> None:
    """Drawn while the old one did not answer; and by nobody else."""
    owner.now_ms = NOW
    (owner.folder / "broken.db").write_bytes(b"no ledger" * 100)
    owner.write("sqlite:///broken.db", name="one.toml", ledger=ALLOWS)
    owner.write("sqlite:///other.db", name="two.toml", ledger=ALLOWS)
    assert owner.charge("one.toml", times=3, units=5) == 3
    assert owner.used("two.toml") == 0
    owner.charge("two.toml")
    owner.write("sqlite:///new.db", name="one.toml", ledger=ALLOWS)
    owner.charge("one.toml")
    assert (owner.used("one.toml"), owner.used("two.toml")) == (16, 1)
    owner.write("sqlite:///newer.db", name="one.toml", ledger=ALLOWS)
    owner.charge("one.toml")
    assert owner.used("one.toml") == 17, "once"


def test_identities_that_repay_one_ledger_are_counted_apart(owner: Owner) -> None:
    """The ledger remembers the last number of each: the earlier debt of one may come after the later one of another."""
    owner.now_ms = NOW
    (owner.folder / "broken.db").write_bytes(b"no ledger" * 100)
    for name in ("one.toml", "two.toml"):
        owner.write("sqlite:///broken.db", name=name, ledger=ALLOWS)
        assert owner.charge(name, units=5) == 1
    for name in ("two.toml", "one.toml"):
        owner.write("sqlite:///new.db", name=name, ledger=ALLOWS)
        assert owner.charge(name) == 1
    assert owner.used("one.toml") == 12


def test_the_allowance_is_counted_over_all_configurations_of_an_upstream_project(owner: Owner) -> None:
    owner.now_ms = NOW
    (owner.folder / "broken.db").write_bytes(b"no ledger" * 100)
    drawn = 0
    for name in ("one.toml", "two.toml", "three.toml"):
        owner.write("sqlite:///broken.db", name=name, ledger=ALLOWS)
        drawn += owner.charge(name, times=3, units=5)
    assert drawn == 4
    owner.now_ms += LOOK_AGAIN_MS
    owner.write("sqlite:///broken.db", name="four.toml", ledger=ALLOWS, endpoint="http://127.0.0.1:8765")
    assert owner.charge("four.toml", times=5, units=5) == 4, "another endpoint is another upstream"


# -- L17: carries in a ledger ------------------------------------------------------------------------------------------


@pytest.mark.topology
def test_a_carry_begins_no_epoch_and_the_larger_counts_at_every_moment(ledger_place: LedgerStorage) -> None:
    """L17, L18."""
    now_ms = NOW
    ledger, view = open_ledger(ledger_place.url, clock=lambda: now_ms), DAY.view.name
    at = (NOW, 0)

    def tell(epoch: str, expiries: tuple[tuple[int, int], ...], new: str, **more: int) -> str:
        return ledger.add_unlogged("p", new, [UnloggedUsage(view, epoch, expiries, at, **more)])

    def used(at_ms: int) -> int:
        nonlocal now_ms
        now_ms = at_ms
        budget = Budget(credential="main", project="p", book=BOOK, limits=(DAY,), ledger=ledger, clock=lambda: now_ms)
        return budget.usage()[0].used_units

    early, late = NOW + HOUR_MS, NOW + 2 * HOUR_MS
    assert tell("a/*", ((5, early), (3, late)), "e1") == "e1", "an empty ledger begins with it"
    assert tell("a/*", ((8, early),), "e2") == "e1"
    assert tell("a/*", ((1, early), (4, late)), "e2") == "e1"
    assert tell("b/x/*", ((10, late),), "e2") == "e1"
    assert tell("e1/*", ((100, late),), "e2") == "e1", "its own log, which it has"
    assert tell("e1/z/*", ((100, late),), "e2") == "e1"
    assert tell("e10/*", ((1_000, early),), "e2") == "e1", "another root that begins with the same letters"
    assert used(NOW) == 8 + 10 + 1_000
    assert used(early) == 4 + 10, "the third report, although it held less when it came"
    assert tell("lost", ((7, late),), "e2") == "e1/e2"
    assert tell("e1/*", ((100, late),), "e3") == "e1/e2"
    assert used(early) == 4 + 10 + 7
    expected = Expected("e1/e2", ())
    request = ChargeRequest("p", Charge(1, "units", "m", "", "", "t"), (), (), early, 0, expected)
    assert ledger.decide(request, commit=False).outcome == "admitted"
    assert used(late) == 0
    ledger.close()


# -- at random ---------------------------------------------------------------------------------------------------------


class Moves:
    """Machines that each move between ledgers, which are emptied now and then; and what is known of every charge.

    `known` is what a ledger accounts for: its log, and what machines told it. `seen` is what a machine knows. A
    decision must count what both hold, no more and no less.
    """

    def __init__(self, dice: random.Random, folder: Path, server: RedisServer | None, *, ticks: bool) -> None:
        self.dice, self.folder, self.ticks = dice, folder, ticks
        self.now_ms = NOW
        self.places: list[LedgerStorage] = []
        for n in range(dice.randint(1, 3)):
            if server is not None and n == 1:
                self.places.append(RedisStorage(server.url))
                self.places[-1].empty()
            else:
                (folder / f"ledger-{n}").mkdir()
                self.places.append(SqliteStorage(folder / f"ledger-{n}"))
        self.known: list[set[int]] = [set() for _ in self.places]
        self.machines = [f"machine-{n}" for n in range(dice.randint(1, 3))]
        self.seen: dict[str, set[int]] = {name: set() for name in self.machines}
        self.at = dict.fromkeys(self.machines, 0)
        self.processes: dict[str, tuple[HighWaterMark, Callable[[], None], Budget]] = {}
        self.charged: list[int] = []

    def stop(self, name: str) -> None:
        if name in self.processes:
            high_water_mark, close, _ = self.processes.pop(name)
            high_water_mark.close()
            close()

    def budget(self, name: str) -> Budget:
        if self.ticks or self.dice.random() < 0.3:
            self.stop(name)
        if name not in self.processes:
            url = self.places[self.at[name]].url
            if self.dice.random() < 0.3:
                url = url.replace("sqlite:////", "sqlite:////./").replace("127.0.0.1", "localhost")
            ledger = open_ledger(url, clock=lambda: self.now_ms)
            path = watermark_path(self.folder / name, Identity("/etc/quota.toml", "p"))
            high_water_mark = HighWaterMark(path, "p", label=ledger.label)
            budget = Budget(
                credential="main",
                project="p",
                book=BOOK,
                limits=(DAY,),
                ledger=ledger,
                clock=lambda: self.now_ms,
                high_water_mark=high_water_mark,
            )
            self.processes[name] = high_water_mark, ledger.close, budget
        return self.processes[name][2]

    def step(self) -> None:
        dice, name = self.dice, self.dice.choice(self.machines)
        self.now_ms += dice.choice((1, 7, 50))
        what = dice.random()
        if what < 0.65:
            self.ask(name, self.budget(name), dice.randint(1, 9), commit=dice.random() < 0.7)
        elif what < 0.9:
            self.stop(name)
            self.at[name] = dice.randrange(len(self.places))
        else:
            place = dice.randrange(len(self.places))
            self.places[place].empty()
            self.known[place] = set()

    def ask(self, name: str, budget: Budget, units: int, *, commit: bool) -> None:
        place = self.at[name]
        decision = (budget.charge if commit else budget.peek)("videos.list", units=units)
        known = self.known[place] | self.seen[name]
        used = decision.limits[0].used_units - (units if commit else 0)
        assert used == sum(self.charged[number] for number in known)
        if commit:
            known.add(len(self.charged))
            self.charged.append(units)
        self.known[place], self.seen[name] = known, set(known)

    def close(self) -> None:
        for name in self.machines:
            self.stop(name)
        for place in self.places:
            if isinstance(place, RedisStorage):
                place.client.close()


@pytest.mark.parametrize("ticks", [True, False], ids=["a process a tick", "long processes"])
@pytest.mark.parametrize("ledgers", ["sqlite", "both"])
def test_what_was_seen_counts_once_wherever_ledgers_move(
    tmp_path: Path, redis_server: RedisServer, ledgers: str, ticks: bool
) -> None:
    for seed in range(int(os.environ.get("QUOTA_TEST_EXAMPLES", "8"))):
        folder = tmp_path / str(seed)
        folder.mkdir()
        moves = Moves(random.Random(seed), folder, redis_server if ledgers == "both" else None, ticks=ticks)
        try:
            for _ in range(50):
                moves.step()
        finally:
            moves.close()


def _charge_elsewhere(url: str, path: str, units: int) -> None:
    """As another process of the machine, whose configuration names another url; it is killed then."""

    def charge() -> Iterator[bool]:
        ledger, high_water_mark = open_ledger(url), HighWaterMark(path, "p", label=url)
        budget = Budget(
            credential="main",
            project="p",
            book=BOOK,
            limits=(DAY,),
            ledger=ledger,
            high_water_mark=high_water_mark,
        )
        yield budget.charge("videos.list", units=units).admitted
        os._exit(0)

    assert in_child(charge)


def test_what_other_processes_spend_at_another_ledger_counts_here_too(tmp_path: Path) -> None:
    """At once where nobody did for a minute, and when a process starts; else within a minute."""
    path, elsewhere = watermark_at(tmp_path), f"sqlite:///{tmp_path}/b.db"
    ledger = open_ledger(f"sqlite:///{tmp_path}/a.db")

    def used(high_water_mark: HighWaterMark, units: int) -> int:
        high_water_mark._next_look_s = 0.0  # it looks every 50 ms
        budget = Budget(
            credential="main", project="p", book=BOOK, limits=(DAY,), ledger=ledger, high_water_mark=high_water_mark
        )
        return budget.charge("videos.list", units=units).limits[0].used_units

    long = HighWaterMark(path, "p", label=ledger.label)
    assert used(long, 100) == 100
    _charge_elsewhere(elsewhere, path, 10)
    assert used(long, 1) == 111
    _charge_elsewhere(elsewhere, path, 20)
    assert used(long, 1) == 112, "not yet"
    long._next_carry_s = 0.0  # a minute goes by
    assert used(long, 1) == 133
    _charge_elsewhere(elsewhere, path, 40)
    long.close()
    long = HighWaterMark(path, "p", label=ledger.label)
    assert used(long, 1) == 174
    long.close()
    ledger.close()


def test_what_the_slot_of_a_process_held_of_another_ledger_is_not_forgotten(tmp_path: Path) -> None:
    """It was claimed from a process that had spent at another ledger, while a third one used ours."""
    path, here = watermark_at(tmp_path), f"sqlite:///{tmp_path}/a.db"

    def process(url: str) -> tuple[Budget, HighWaterMark]:
        high_water_mark, ledger = HighWaterMark(path, "p", label=url), open_ledger(url)
        budget = Budget(
            credential="main", project="p", book=BOOK, limits=(DAY,), ledger=ledger, high_water_mark=high_water_mark
        )
        return budget, high_water_mark

    def stop(budget: Budget, high_water_mark: HighWaterMark) -> None:
        high_water_mark.close()
        budget.ledger.close()

    elsewhere, its_mark = process(f"sqlite:///{tmp_path}/b.db")
    assert elsewhere.charge("videos.list", units=100).admitted
    _charge_elsewhere(here, path, 10)
    assert elsewhere.charge("videos.list", units=40).admitted
    stop(elsewhere, its_mark)
    after, its_mark = process(here)
    assert after.charge("videos.list", units=1).limits[0].used_units == 151
    stop(after, its_mark)


def test_what_a_ledger_was_told_of_a_log_is_missed_when_a_copy_of_it_is_put_back(
    ledger_place: LedgerStorage, tmp_path: Path
) -> None:
    """One machine saw more of the lost log than the other, which learned of it from the ledger that came after."""
    now_ms = NOW
    first, second = (Machine(name, tmp_path, ledger_place.url, lambda: now_ms) for name in "ab")

    def charged(machine: Machine, units: int) -> int:
        return machine.budget(DAY).charge("videos.list", units=units).limits[0].used_units

    charged(first, 3)
    copy = ledger_place.copy()
    now_ms += 1
    assert charged(second, 9) == 12
    ledger_place.empty()
    now_ms += 1
    assert charged(second, 1) == 13
    assert charged(first, 1) == 14
    ledger_place.restore(copy)
    now_ms += 1
    assert charged(first, 1) == 15
    for machine in (first, second):
        machine.stop()


def test_two_ledgers_whose_newest_entries_have_one_id_are_two(tmp_path: Path) -> None:
    """Two machines charge in one ms, each at a ledger of its own; then one moves to the other's."""
    moves = Moves(random.Random(0), tmp_path, None, ticks=True)
    moves.places = [SqliteStorage(tmp_path / "a"), SqliteStorage(tmp_path / "b")]
    for name in "ab":
        (tmp_path / name).mkdir()
    moves.known, moves.machines, moves.seen = [set(), set()], ["m", "n"], {"m": set(), "n": set()}
    moves.at = {"m": 0, "n": 1}
    for name in moves.machines:
        moves.ask(name, moves.budget(name), 100, commit=True)
    moves.stop("m")
    moves.at["m"] = 1
    moves.ask("m", moves.budget("m"), 1, commit=False)
    moves.close()


def with_a_copy_that_lacks_a_carry(folder: Path) -> tuple[Moves, str]:
    """A machine on a ledger whose copy was put back. The copy was made before the ledger was told of a carry."""
    moves = Moves(random.Random(0), folder, None, ticks=True)
    moves.places = [SqliteStorage(folder / "a"), SqliteStorage(folder / "b")]
    for name in "ab":
        (folder / name).mkdir()
    moves.known, (name, *_) = [set(), set()], moves.machines
    moves.at[name] = 1
    moves.ask(name, moves.budget(name), 2, commit=True)
    copy = moves.places[1].copy()
    moves.at[name] = 0
    moves.ask(name, moves.budget(name), 5, commit=True)
    moves.at[name] = 1
    moves.ask(name, moves.budget(name), 1, commit=False)
    moves.places[1].restore(copy)
    return moves, name


@pytest.mark.parametrize("commit", [True, False])
def test_a_carry_that_a_copy_lacks_is_told_again(tmp_path: Path, commit: bool) -> None:
    """The copy was made before the ledger was told, and has every charge: only its answer shows what it lacks."""
    moves, name = with_a_copy_that_lacks_a_carry(tmp_path)
    for units in (3, 4):
        moves.ask(name, moves.budget(name), units, commit=commit)
    moves.close()


def test_several_charged_together_without_a_carry_are_given_back_and_charged_again(tmp_path: Path) -> None:
    """As one is: only the answer shows what the copy lacks."""
    moves, name = with_a_copy_that_lacks_a_carry(tmp_path)
    budget = moves.budget(name)
    decisions = budget.charge_many([("videos.list", 3)] * 3)
    assert decisions[0].limits[0].used_units == 2 + 5 + 9
    first, *entries = read_entries(budget.ledger, "p", 0, NEVER)
    assert [entry.units for entry in entries] == [0, 0, 0, 3, 3, 3]
    assert [entry.id for entry in entries[3:]] == [decision.id for decision in decisions]
    assert len({entry.idempotency_key for entry in (first, *entries)}) == 7
    moves.close()


def test_the_root_tells_a_log_from_another_whatever_it_has_lost() -> None:
    assert [root_of(epoch) for epoch in ("a", "a/b", "a/*", "a/b/*", "")] == ["a", "a", "a", "a", ""]
    assert [is_carry(epoch) for epoch in ("a", "a/b", "a/*", "a/b/*", "")] == [False, False, True, True, False]
    assert DAY.view.window.longest_ms == DAY_MS
