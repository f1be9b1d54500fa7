"""What machines saw before a repair, after it: they bring back no future, and no budget (L26)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from quota.ledger.contract import repaired_ms_of
from quota.terms.limits import DAY_MS, HOUR_MS, Calendar, Limit, Selector, View
from support.losses import Machine
from support.setup import NOW_MS, limit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.losses import LedgerStorage

YEAR_MS = 365 * DAY_MS
DAY = limit(9_500)
PACIFIC = Limit("pacific", 9_500, View(Selector(buckets=("units",)), Calendar("day", "America/Los_Angeles")), 9_500, 0)


class Scene:
    """A ledger, two machines with a memory, and one true time; the clocks of all stand `wrong_ms` beside it."""

    def __init__(self, storage: Any, folder: Path) -> None:
        self.storage = storage
        self.true_ms, self.wrong_ms = NOW_MS, 0
        self.a, self.b = (Machine(name, folder, storage.url, self.clock) for name in "ab")

    def clock(self) -> int:
        return self.true_ms + self.wrong_ms

    def charge(self, machine: Machine, method: str = "search.list") -> Any:
        return machine.budget(DAY, PACIFIC).charge(method)

    def used(self, machine: Machine) -> list[int]:
        return [state.used_units for state in machine.budget(DAY, PACIFIC).usage()]

    def repair(self) -> str:
        epoch = self.a.ledger.repair("p", f"r{self.clock()}", self.clock())
        assert epoch is not None
        return epoch

    def restart(self, *machines: Machine) -> None:
        for machine in machines:
            machine.stop()
            machine.start()


@pytest.fixture
def scene(ledger_place: LedgerStorage, tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(ledger_place, tmp_path)
    yield scene
    scene.a.stop()
    scene.b.stop()


def ahead(scene: Scene, by_ms: int = YEAR_MS, *machines: Machine) -> None:
    """10 searches, then one of each machine while the clocks stand ahead, then one more when they are right."""
    for _ in range(10):
        assert scene.charge(scene.a).admitted
    scene.true_ms += HOUR_MS
    scene.wrong_ms = by_ms
    for machine in machines or (scene.a,):
        assert scene.charge(machine).admitted
    scene.wrong_ms = 0
    scene.true_ms += HOUR_MS


def test_a_year_ahead_for_one_charge_then_repaired(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """What was charged before it, while it lasted and since counts, and no more; all is open again in a day."""
    ahead(scene)
    assert scene.charge(scene.b).admitted
    assert [r.getMessage().split()[0] for r in caplog.records].count("ledger_ahead") == 1
    assert "quota ledger repair" in caplog.text
    assert repaired_ms_of(scene.repair()) == scene.true_ms
    caplog.clear()
    assert scene.used(scene.a) == scene.used(scene.b) == [1_200, 1_200]
    assert len([n for n in range(100) if scene.charge(scene.a).admitted]) == 83
    refused = scene.charge(scene.b)
    assert refused.retry_at_ms is not None
    assert refused.retry_at_ms <= scene.true_ms + DAY_MS
    assert caplog.records == [], "nothing is missing, and nothing is ahead"
    scene.true_ms += DAY_MS
    assert scene.used(scene.a) == scene.used(scene.b) == [0, 0]


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("by_ms", [2 * HOUR_MS, 20 * HOUR_MS, 26 * HOUR_MS, 3 * DAY_MS, YEAR_MS])
def test_emptied_after_the_repair_the_ledger_counts_what_machines_saw_for_a_day(
    scene: Scene, by_ms: int, restarted: bool
) -> None:
    ahead(scene, by_ms, scene.a, scene.b)
    kept = scene.used(scene.a)
    scene.repair()
    assert scene.used(scene.a) == scene.used(scene.b) == kept
    scene.storage.empty()
    if restarted:
        scene.restart(scene.a, scene.b)
    assert scene.used(scene.a) == kept
    assert scene.used(scene.b) == kept
    scene.true_ms += DAY_MS + HOUR_MS
    assert scene.used(scene.a) == scene.used(scene.b) == [0, 0]
    assert scene.charge(scene.a).admitted


def test_emptied_before_the_repair_nothing_is_decided_until_somebody_says_which_clock_is_right(scene: Scene) -> None:
    """What a machine saw of next year would close the new ledger for a year; a clock may still be wrong."""
    ahead(scene, YEAR_MS, scene.a, scene.b)
    scene.storage.empty()
    refused = scene.charge(scene.a)
    assert (refused.admitted, refused.reason, refused.id) == (False, "clock", None)
    assert "2027-" in refused.sentence()
    assert "quota ledger repair" in refused.sentence()
    scene.restart(scene.b)
    assert scene.charge(scene.b).reason == "clock"
    scene.repair()
    assert scene.charge(scene.b).admitted
    used = scene.used(scene.a)
    assert used[0] >= 300, "what was charged ahead counts for a day from the repair"
    assert scene.used(scene.b) == used
    scene.true_ms += DAY_MS + HOUR_MS
    assert scene.used(scene.a) == scene.used(scene.b) == [0, 0]


def test_a_copy_put_back_after_the_repair_is_repaired_again(scene: Scene) -> None:
    ahead(scene, YEAR_MS, scene.a, scene.b)
    copy = scene.storage.copy()
    scene.repair()
    used = scene.used(scene.a)
    assert scene.charge(scene.b).admitted
    scene.storage.restore(copy)
    scene.true_ms += 1
    assert scene.used(scene.a)[0] >= used[0] + 100
    scene.repair()
    assert used[0] + 100 <= scene.used(scene.b)[0] <= 2 * used[0] + 100
    scene.true_ms += DAY_MS + HOUR_MS
    assert scene.used(scene.a) == scene.used(scene.b) == [0, 0]


def test_a_machine_that_slept_through_repair_and_loss_brings_back_no_future(scene: Scene) -> None:
    ahead(scene, YEAR_MS, scene.a, scene.b)
    scene.repair()
    assert scene.charge(scene.a).admitted
    scene.true_ms += 3 * DAY_MS
    assert scene.used(scene.b) == [0, 0]
    scene.storage.empty()
    assert scene.charge(scene.b).admitted
    assert scene.used(scene.b) == [100, 100]


def test_what_was_seen_of_a_second_accident_is_not_taken_for_the_first(scene: Scene) -> None:
    """It was charged after the repair: an epoch tells after which repair it was seen."""
    ahead(scene, YEAR_MS)
    scene.repair()
    copy = scene.storage.copy()
    assert scene.used(scene.b)[0] == 1_100
    scene.wrong_ms = 3 * DAY_MS
    assert scene.charge(scene.b).admitted
    scene.wrong_ms = 0
    scene.storage.restore(copy)
    assert scene.charge(scene.b).reason == "clock"
    scene.true_ms += HOUR_MS
    scene.repair()
    assert scene.used(scene.b)[0] == 1_200


@pytest.mark.parametrize("wrong_ms", [26 * HOUR_MS, YEAR_MS, -3 * HOUR_MS])
def test_a_repair_by_a_wrong_clock_is_mended_by_one_by_the_right_clock(scene: Scene, wrong_ms: int) -> None:
    """Marks are in the order of the repairs, whatever the clocks said."""
    for _ in range(10):
        assert scene.charge(scene.a).admitted
    assert scene.used(scene.b) == [1_000, 1_000]
    scene.repair()
    scene.true_ms += HOUR_MS
    scene.wrong_ms = wrong_ms
    scene.charge(scene.b)
    scene.repair()
    scene.wrong_ms = 0
    assert scene.charge(scene.b).reason != "clock"
    epoch = scene.repair()
    marks = [mark.at_ms for mark in scene.a.ledger.repairs("p")]
    assert marks == sorted(set(marks))
    assert marks[-1] == repaired_ms_of(epoch)
    used = scene.used(scene.b)
    assert scene.used(scene.a) == used
    assert used[0] <= 1_200
    scene.true_ms += DAY_MS + HOUR_MS
    assert scene.used(scene.a) == scene.used(scene.b) == [0, 0]


@pytest.mark.parametrize("wrong_ms", [23 * HOUR_MS, 3 * DAY_MS, 0])
def test_what_was_seen_after_a_repair_counts_beside_a_copy_of_before_it_that_is_repaired_too(
    scene: Scene, wrong_ms: int
) -> None:
    """The copy's dates are further ahead, and it has no mark of that repair: it never had what was charged since."""
    ahead(scene, YEAR_MS)
    copy = scene.storage.copy()
    scene.repair()
    scene.wrong_ms = wrong_ms
    assert scene.charge(scene.a).admitted
    scene.wrong_ms = 0
    assert scene.used(scene.b)[0] >= 1_200
    scene.storage.restore(copy)
    scene.true_ms += HOUR_MS
    scene.repair()
    assert scene.used(scene.b)[0] >= 1_200
    assert scene.used(scene.a)[0] >= 1_200
    scene.true_ms += DAY_MS + HOUR_MS
    assert scene.used(scene.a) == scene.used(scene.b) == [0, 0]


def test_what_a_copy_has_under_the_date_of_today_does_not_hide_what_was_seen_today(scene: Scene) -> None:
    """What was charged a day ahead was charged yesterday, and the copy's repair finds nothing ahead of today."""
    scene.wrong_ms = 26 * HOUR_MS
    assert scene.charge(scene.a).admitted
    scene.wrong_ms = 0
    copy = scene.storage.copy()
    scene.repair()
    scene.true_ms += 39 * HOUR_MS
    assert scene.charge(scene.b).admitted
    scene.storage.restore(copy)
    scene.repair()
    scene.true_ms += 12 * HOUR_MS
    assert scene.used(scene.b)[0] >= 100


@pytest.mark.parametrize("wrong_ms", [0, 730 * DAY_MS])
def test_what_was_seen_in_an_old_copy_counts_for_its_own_window_when_one_of_after_the_repair_is_put_back(
    scene: Scene, wrong_ms: int
) -> None:
    assert scene.charge(scene.a).admitted
    old = scene.storage.copy()
    scene.repair()
    repaired = scene.storage.copy()
    scene.true_ms += 4 * HOUR_MS
    scene.storage.restore(old)
    scene.true_ms += 14 * HOUR_MS
    scene.wrong_ms = wrong_ms
    assert scene.charge(scene.b).admitted
    scene.wrong_ms = 0
    assert scene.used(scene.b)[0] >= 100
    scene.storage.restore(repaired)
    scene.true_ms += 10 * HOUR_MS
    assert scene.used(scene.b)[0] >= 100
    scene.true_ms += DAY_MS + HOUR_MS
    assert scene.used(scene.a) == scene.used(scene.b) == [0, 0]
