"""What the processes of one machine know of a ledger, together and one after the other, interrupted too."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quota.ledger.contract import MIN_RETENTION_MS, ChargeRequest, ChargeResult, Expected
from quota.ledger.entry import Charge
from quota.ledger.identity import Identity
from quota.ledger.unlogged import UnloggedUsage
from quota.recovery import high_water_mark as high_water_mark
from quota.recovery import knowledge, loss, slices
from quota.recovery.registry import close_high_water_mark, open_high_water_mark
from quota.recovery.watermark_file import SLOT_BYTES, WatermarkFile
from quota.recovery.watermark_folder import make_room, watermark_path
from quota.terms.limits import DAY_MS, HOUR_MS
from support.interrupts import Interrupted, at_place
from support.processes import Children
from support.setup import limit
from support.site import NOW, Site, charge, close, guarded, watermark_at
from support.users import not_root

if TYPE_CHECKING:
    from collections.abc import Iterator


# -- machines and their processes --------------------------------------------------------------------------------------


def test_the_next_process_knows_what_the_last_one_saw(site: Site) -> None:
    machine = site.machine()
    charge(machine.budget(limit(10)), 8)
    machine.stop()
    site.empty()
    machine.start()
    assert charge(machine.budget(limit(10))) == 9


def test_what_shows_nothing_new_is_not_written(site: Site) -> None:
    machine = site.machine()
    budget = machine.budget(limit(8))
    charge(budget, 8)
    assert machine.watermark_path is not None
    written = Path(machine.watermark_path).read_bytes()
    site.now_ms += 60_000
    assert not budget.charge("videos.list").admitted
    assert Path(machine.watermark_path).read_bytes() == written
    machine.stop()
    site.empty()
    machine.start()
    assert not machine.budget(limit(8)).charge("videos.list").admitted


def test_the_next_process_keeps_what_it_does_not_ask_about(site: Site) -> None:
    """The search job ran in the morning; what it saw outlives ten runs of another job."""
    machine, search = site.machine(), limit(300, name="search", methods=("search.list",))
    assert machine.budget(search).charge("search.list").admitted
    for _ in range(10):
        machine.stop()
        machine.start()
        charge(machine.budget(limit(1_000)))
    machine.stop()
    site.empty()
    machine.start()
    assert machine.budget(search).charge("search.list").limits[0].used_units == 200


@pytest.mark.parametrize("charged", [0, 1])
def test_a_process_that_saw_an_idle_limit_hands_on_all_that_it_saw(site: Site, charged: int) -> None:
    """Nothing was charged for two of the limit's windows, or ever."""
    machine, hour = site.machine(), limit(10, HOUR_MS, name="hour", jobs=("idle",))
    if charged:
        charge(machine.budget(limit(10)))
    site.now_ms += 3 * HOUR_MS
    assert machine.budget(hour).peek("videos.list", job="idle").admitted
    charge(machine.budget(limit(10)), 8)
    machine.stop()
    site.empty()
    machine.start()
    assert charge(machine.budget(limit(10))) == 9 + charged


def test_without_a_folder_a_process_remembers_for_itself(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    (site.folder / "closed").mkdir(mode=0o500)
    machine = site.machine("closed/a")
    site.folder.chmod(0o755)
    budget = machine.budget(limit(10))
    with not_root():
        charge(budget, 8)
    assert [r.getMessage().partition(" ")[0] for r in caplog.records] == ["memory_unusable"]
    site.empty()
    assert charge(budget) == 9


@pytest.mark.parametrize("garbage", [b"", b"\0" * 40_000, b"x" * 40_000, os.urandom(200_000)])
def test_a_damaged_watermark_file_is_as_good_as_none(site: Site, garbage: bytes) -> None:
    machine = site.machine()
    charge(machine.budget(limit(10)), 8)
    machine.stop()
    assert machine.watermark_path is not None
    with open(machine.watermark_path, "wb") as file:
        file.write(garbage)
    machine.start()
    assert charge(machine.budget(limit(10))) == 9
    site.empty()
    assert charge(machine.budget(limit(10))) == 10


def test_a_ledger_that_keeps_losing_what_it_is_told_is_unavailable(site: Site) -> None:
    budget = site.machine().budget(limit(10))
    charge(budget, 8)
    usage = budget.ledger.add_unlogged

    def losing(project: str, epoch: str, usages: list[UnloggedUsage], retention_ms: int, root: str) -> str:
        told = usage(project, epoch, usages, retention_ms, root)
        site.empty()
        return told

    budget.ledger.add_unlogged = losing  # type: ignore[method-assign,assignment]  # a server emptied again each time
    site.empty()
    refused = budget.charge("videos.list")
    assert (refused.admitted, refused.reason) == (False, "ledger-unavailable")
    assert "loses what it is told" in refused.detail


def test_identities_are_remembered_apart(tmp_path: Path) -> None:
    paths = {
        watermark_path(tmp_path, Identity(ledger, project, endpoint))
        for ledger in ("/etc/quota.toml", "name quota")
        for project in ("p", "p/q", "p_q", "é")
        for endpoint in ("", "http://127.0.0.1:8765")
    }
    assert len(paths) == 16
    assert all(path.startswith(f"{tmp_path}/high-water-marks/p") or "_" in path for path in paths)


def test_a_mark_that_is_being_closed_is_found_by_a_session_that_begins(tmp_path: Path) -> None:
    """Two descriptors of one file would have one lock between them, and the first to be closed would end it."""
    identity = Identity("/etc/quota.toml", "p")
    ended = open_high_water_mark(tmp_path, identity, "redis://a")
    with ended._lock:  # another thread is in the middle of using it
        closing = threading.Thread(target=close_high_water_mark, args=(ended,))
        closing.start()
        closing.join(0.1)
        begun = open_high_water_mark(tmp_path, identity, "redis://a")
    closing.join()
    assert begun is ended
    close_high_water_mark(begun)
    assert open_high_water_mark(tmp_path, identity, "redis://a") is not ended


def test_a_process_has_one_high_water_mark_for_each_file(tmp_path: Path) -> None:
    identity = Identity("/etc/quota.toml", "p")
    path = watermark_path(tmp_path, identity)
    first, second = (open_high_water_mark(tmp_path, identity, "redis://a") for _ in "12")
    assert first is second
    first.record((), ChargeResult("admitted", "1-0", NOW, (NOW, 0), (), epoch="e1"))
    close_high_water_mark(first)
    assert second.expected() == Expected("e1", ((NOW, 0),))
    held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd.isdigit() and _is_open(fd)]
    assert held.count(path) == 1
    close_high_water_mark(second)
    held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd.isdigit() and _is_open(fd)]
    assert path not in held


def test_a_watermark_is_bounded(site: Site) -> None:
    """Hundreds of jobs, each with a limit of its own, and a loss now and then: one slot holds it."""
    machine = site.machine()
    for n in range(400):
        job = f"job-{n}-" + "x" * 50
        own = limit(10, HOUR_MS, name="own", jobs=(job,))
        machine.budget(limit(10_000), own).charge("videos.list", job=job)
        site.now_ms += 1_000
        if n % 100 == 50:
            site.empty()
    assert machine.watermark_path is not None
    assert os.path.getsize(machine.watermark_path) <= SLOT_BYTES
    machine.stop()
    site.now_ms += 3 * DAY_MS
    machine.start()
    charge(machine.budget(limit(10_000)))
    watermark = machine.high_water_mark._known.watermark("")
    assert len(watermark.observations) + len(watermark.usages) == 1, "what has expired is forgotten"


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def _charge_some(url: str, path: str, times: int) -> Iterator[int]:
    budget, _ = guarded(url, path, 10_000)
    yield charge(budget, times)
    os._exit(0)  # as if killed: nothing is closed


def test_eight_processes_of_one_machine_write_side_by_side(site: Site) -> None:
    path = watermark_at(site.folder / "state")
    workers = Children(_charge_some, *[(site.storage.url, path, 50)] * 8)
    assert max(workers.answers()) == 400
    site.storage.empty()
    budget, mark = guarded(site.storage.url, path, 10_000)
    assert charge(budget) == 401
    close(budget, mark)


def test_a_process_notices_what_only_another_of_its_machine_has_seen(site: Site) -> None:
    """An old copy that has all that this process saw, but not what its neighbour saw later."""
    path = watermark_at(site.folder / "state")
    budget, high_water_mark = guarded(site.storage.url, path)
    charge(budget, 2)
    copy = site.storage.copy()
    assert Children(_charge_some, (site.storage.url, path, 5)).answers() == [7]
    site.storage.restore(copy)
    high_water_mark._next_look_s = 0.0  # it looks every 50 ms
    assert charge(budget) == 8
    close(budget, high_water_mark)


def test_a_process_that_saw_nothing_yet_notices_what_others_saw(site: Site) -> None:
    path = watermark_at(site.folder / "state")
    budget, high_water_mark = guarded(site.storage.url, path)
    assert not high_water_mark.expected().ids
    assert Children(_charge_some, (site.storage.url, path, 3)).answers() == [3]
    site.storage.empty()
    high_water_mark._next_look_s = 0.0
    assert charge(budget) == 3 + 1
    close(budget, high_water_mark)


def test_what_two_saw_that_began_at_once_is_kept(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second has made the file, and ended, when the first is about to make it."""
    path = watermark_at(site.folder / "state")
    budget, high_water_mark = guarded(site.storage.url, path)

    def make_room_late(at: str) -> None:
        monkeypatch.undo()
        site.storage.empty()
        assert Children(_charge_some, (site.storage.url, path, 3)).answers() == [3]
        site.storage.empty()
        make_room(at)

    monkeypatch.setattr("quota.recovery.high_water_mark.make_room", make_room_late)
    assert charge(budget) == 1
    high_water_mark._next_look_s = 0.0
    assert charge(budget) == 1 + 3 + 1
    close(budget, high_water_mark)


def test_a_process_that_rested_notices_what_others_saw_after_a_loss(site: Site) -> None:
    """It saw only what an old copy has; meanwhile the ledger was emptied, spent from, and restored from that copy."""
    path = watermark_at(site.folder / "state")
    budget, high_water_mark = guarded(site.storage.url, path)
    charge(budget, 5)
    copy = site.storage.copy()
    for times, used in ((3, 8), (2, 10)):
        assert Children(_charge_some, (site.storage.url, path, times)).answers() == [used]
        site.storage.empty()
    site.storage.restore(copy)
    high_water_mark._next_look_s = 0.0
    assert charge(budget) == 5 + 3 + 2 + 1
    close(budget, high_water_mark)


@pytest.mark.parametrize("emptied", [False, True])
def test_a_process_that_rested_notices_what_others_saw_in_a_later_epoch(site: Site, emptied: bool) -> None:
    """All that it saw is in the log again, with its old name; what others charged after a loss in between is not."""
    path = watermark_at(site.folder / "state")
    budget, high_water_mark = guarded(site.storage.url, path)
    charge(budget, 3)
    older = site.storage.copy()
    charge(budget, 2)
    newer = site.storage.copy()
    site.storage.restore(older)
    assert Children(_charge_some, (site.storage.url, path, 3)).answers() == [8]
    if emptied:  # and they went on in another log, which was told of this one
        site.storage.empty()
        assert Children(_charge_some, (site.storage.url, path, 2)).answers() == [10]
    site.storage.restore(newer)
    high_water_mark._next_look_s = 0.0
    assert charge(budget) == 5 + 3 + 2 * emptied + 1
    close(budget, high_water_mark)


@pytest.mark.parametrize("loses", [False, True], ids=["the same epoch", "a later epoch"])
def test_a_process_that_rested_notices_what_another_configuration_saw(site: Site, loses: bool) -> None:
    path, of_other = (str(site.folder / "state" / "high-water-marks" / "p" / (digit * 32)) for digit in "12")
    budget, high_water_mark = guarded(site.storage.url, path)
    charge(budget, 3)
    older = site.storage.copy()
    charge(budget, 2)
    newer = site.storage.copy()
    if loses:
        site.storage.restore(older)
    assert Children(_charge_some, (site.storage.url, of_other, 3)).answers() == [8]
    site.storage.restore(newer)
    high_water_mark._next_look_s = high_water_mark._next_siblings_s = 0.0  # it looks there once a minute
    assert charge(budget) == 5 + 3 + 1
    close(budget, high_water_mark)


def _note_and_rest(path: str, at_ms: int) -> Iterator[None]:
    slots = WatermarkFile(path, make=True)
    slots.write((at_ms, 0), 7, at_ms, (5,), f"epoch\tanother\t\t\nhead\t{limit(100).view.name}\t{DAY_MS}\n")
    yield
    signal.pause()


def test_a_clock_set_back_makes_nobody_compare_for_ever(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process noted in an earlier epoch, before it rested, is dated later than all that comes now."""
    monkeypatch.setattr("quota.recovery.high_water_mark.LOOK_EVERY_S", 0.0)
    machine = site.machine()
    charge(machine.budget(limit(100)), 5)
    with Children(_note_and_rest, (machine.watermark_path, NOW + HOUR_MS)) as resting:
        resting.first_answers()
        for n in range(6, 12):
            assert charge(machine.budget(limit(100))) == n + 5


# -- interrupted -------------------------------------------------------------------------------------------------------


_MODULES = tuple(module.__file__ for module in (high_water_mark, knowledge, loss, slices))
STEP = 1 if os.environ.get("QUOTA_TEST_INTERRUPTED") else 30
"""Every so manyth place is tried, by each handler from another one on; `make soak` tries them all."""

FIRST = {"raises": 0, "times out": 10 % STEP, "charges": 20 % STEP}


@pytest.mark.parametrize("handler", FIRST)
@pytest.mark.parametrize("lost", [False, True])
def test_a_high_water_mark_interrupted_anywhere_forgets_nothing(site: Site, lost: bool, handler: str) -> None:
    """By a signal handler, in the first decision of a process, or while it restores what is missing."""
    admitted = 0

    def handle() -> None:
        nonlocal admitted
        if handler == "raises":
            raise Interrupted
        if handler == "times out":
            raise TimeoutError
        admitted += budget.charge("videos.list").admitted

    number, more = FIRST[handler], True
    while more:
        site.empty()
        name = f"m{number}"
        before = site.machine(name)
        charge(before.budget(limit(1_000)), 3)
        if not lost:
            before.stop()
        else:
            site.empty()
        machine = before if lost else site.machine(name)
        budget, admitted, interrupted = machine.budget(limit(1_000)), 3, 0
        try:
            more = at_place(number, handle, lambda: charge(budget), within=_MODULES)  # noqa: B023
            admitted += 1
        except (Interrupted, TimeoutError):
            interrupted = 1
        used = charge(budget)
        admitted += 1
        assert used - admitted in range(interrupted + 1)
        machine.stop()
        site.empty()
        again = site.machine(name)
        assert charge(again.budget(limit(1_000))) == used + 1
        again.stop()
        number += STEP
    assert number > 60


@pytest.mark.parametrize("looks", [True, False], ids=["before it looks", "before it is closed"])
def test_what_a_handler_charges_while_a_process_begins_is_not_forgotten(site: Site, *, looks: bool) -> None:
    """Wherever it interrupts: the process goes on with what it has read before, and that has no such charge."""
    number, more = 0, True
    while more:
        site.empty()
        name, admitted = f"m{number}", [True] * 3
        before = site.machine(name)
        charge(before.budget(limit(1_000)), 3)
        before.stop()
        machine = site.machine(name)
        budget, mark = machine.budget(limit(1_000)), machine.high_water_mark
        if not looks:
            charge(budget)
            admitted.append(True)

        def handle() -> None:
            admitted.append(budget.charge("videos.list").admitted)  # noqa: B023

        more = at_place(number, handle, mark.expected if looks else mark.close, within=_MODULES)
        machine.stop()
        site.empty()
        again = site.machine(name)
        assert charge(again.budget(limit(1_000))) == len(admitted) + 1, number
        again.stop()
        number += 1
    assert number > 5


def test_a_slot_that_was_written_since_it_was_read_is_left_alone(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process began, charged and ended between this one's first look and its first charge."""
    monkeypatch.setattr(high_water_mark, "LOOK_EVERY_S", 1_000.0)
    path = watermark_at(site.folder / "state")
    assert Children(_charge_some, (site.storage.url, path, 2)).answers() == [2]
    budget, mark = guarded(site.storage.url, path)
    assert mark.expected().ids
    copy = site.storage.copy()
    assert Children(_charge_some, (site.storage.url, path, 3)).answers() == [5]
    site.storage.restore(copy)
    assert charge(budget) == 3, "it has not looked since"
    close(budget, mark)
    budget, mark = guarded(site.storage.url, path)
    assert charge(budget) == 3 + 3 + 1
    close(budget, mark)


def test_what_a_handler_charges_while_a_process_restores_is_not_forgotten(site: Site) -> None:
    """The process is killed right after that, before another decision of its own."""
    number, more, step = 0, True, min(STEP, 7)
    while more:
        site.empty()
        name, admitted = f"m{number}", [True] * 3
        machine = site.machine(name)
        budget, mark = machine.budget(limit(1_000)), machine.high_water_mark
        charge(budget, 3)
        expected = mark.expected()
        site.empty()
        asked = ChargeRequest("p", Charge(1, "units", "m", "", "", "t"), (), (), site.now_ms, 0, expected)
        behind = machine.ledger.decide(asked, commit=False)

        def handle() -> None:
            admitted.append(budget.charge("videos.list").admitted)  # noqa: B023

        def restore() -> None:
            mark.restore_missing(machine.ledger, behind, expected, "e2", MIN_RETENTION_MS)  # noqa: B023

        more = at_place(number, handle, restore, within=_MODULES)
        machine.stop()
        site.empty()
        again = site.machine(name)
        assert charge(again.budget(limit(1_000))) == len(admitted) + 1, number
        again.stop()
        number += step
    assert number > 60
