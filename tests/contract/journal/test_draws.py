"""Draws: bounded for the whole machine, on the disk before the call leaves, handed over once, never renewed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from contract.journal.journals import NOW_MS, entry, forked, journal
from quota.common.clock import SinceBoot
from quota.errors import LedgerError
from quota.journal.draws import SPARE_LINES, Draws
from quota.journal.files import FileLock, framed, unframed
from quota.ledger.factory import Identity
from quota.rules.entry import Entry
from quota.terms.limits import DAY_MS, SLACK_MS

SEEN = (NOW_MS - 5, 3)


def draw(draws: Draws, *entries: Entry, now_ms: int = NOW_MS, allowance_units: int = 50, **up: SinceBoot) -> bool:
    return draws.draw(entries, "e", SEEN, now_ms=now_ms, window_ms=DAY_MS, allowance_units=allowance_units, **up)


def draws_file(state: Path) -> Path:
    (path,) = (state / "journals").glob("*/draws")
    return path


def test_a_draw_is_owed_with_what_its_first_try_had_read_until_it_is_handed_over(tmp_path: Path) -> None:
    drawn = entry(units=2, key="k")
    assert journal(tmp_path).draws.owed() == []
    assert draw(journal(tmp_path).draws, drawn)
    with draws_file(tmp_path).open("rb+") as file:
        body = unframed(file.read().strip()) or b""
        file.write(framed(body.replace(b"\tk\t", b"\t\xed\xb2\x80\t")) + b"\n")  # no text: no ledger takes it
    draws = journal(tmp_path).draws
    (owed,) = draws.owed()
    assert owed.entry == drawn._replace(id=(NOW_MS, 0))
    assert (owed.epoch, owed.seen, owed.handed_id) == ("e", SEEN, None)
    assert list(journal(tmp_path).records()) == [], "no union takes it"
    draws.handed_over([(owed, (NOW_MS + 9, 4))])
    assert draws.owed() == journal(tmp_path).draws.owed() == []


def test_handing_over_does_not_renew_the_allowance_and_the_window_does(tmp_path: Path) -> None:
    draws = journal(tmp_path).draws
    assert draw(draws, *(entry() for _ in range(30)))
    draws.handed_over([(owed, owed.entry.id) for owed in draws.owed()])
    assert not draw(draws, *(entry() for _ in range(21)), now_ms=NOW_MS + 1)
    assert draw(draws, *(entry() for _ in range(20)), now_ms=NOW_MS + 1)
    assert draws.drawn_units(NOW_MS + 1, DAY_MS) == 50
    assert not draw(draws, entry(), now_ms=NOW_MS + DAY_MS - 1)
    assert draw(draws, *(entry() for _ in range(30)), now_ms=NOW_MS + DAY_MS)
    assert not draw(draws, entry(), now_ms=NOW_MS + DAY_MS)


def test_all_calls_are_drawn_or_none_and_one_key_once(tmp_path: Path) -> None:
    draws, first = journal(tmp_path).draws, entry(units=40)
    assert draw(draws, first)
    assert not draw(draws, entry(), entry(units=10))
    assert draws.drawn_units(NOW_MS, DAY_MS) == 40
    assert draw(draws, first)
    assert len(draws.owed()) == 1


def test_identities_of_one_upstream_project_share_the_allowance_and_hand_over_to_their_own_logs(tmp_path: Path) -> None:
    mine, moved, others = (journal(tmp_path, identity=Identity(name, "p")) for name in "abc")
    elsewhere = journal(tmp_path, identity=Identity("a", "p", "http://127.0.0.1")).draws
    assert draw(mine.draws, entry(units=50))
    assert not draw(others.draws, entry())
    for each, epoch in ((mine, "e"), (moved, "e"), (others, "f")):
        assert len(each.draws.owed(each.of_one_log)) == (each is mine)
        each.write(epoch, [entry()])
    assert [len(each.draws.owed(each.of_one_log)) for each in (mine, moved, others)] == [1, 1, 0]
    assert draw(elsewhere, entry())


@pytest.mark.on_disk
def test_eight_processes_at_once_draw_the_allowance_exactly(tmp_path: Path) -> None:
    def work(process: int) -> None:
        draws = journal(tmp_path).draws
        for number in range(20):
            draw(draws, entry(key=f"{process}-{number}"))

    with forked(*(lambda process=process: work(process) for process in range(8))):
        pass
    draws = journal(tmp_path).draws
    assert draws.drawn_units(NOW_MS, DAY_MS) == len(draws.owed()) == 50


def test_a_draw_is_corrected_before_and_after_it_is_handed_over(tmp_path: Path) -> None:
    draws = journal(tmp_path).draws
    draw(draws, entry(units=5, key="k"))
    assert draws.settle({"k": 7}, NOW_MS)[0].entry.units == 5  # type: ignore[index]
    (owed,) = draws.owed()
    assert (owed.entry.units, owed.handed_id) == (7, None)
    journal(tmp_path).draws.settle({"k": 9}, NOW_MS)
    draws.handed_over([(owed, (1, 1))])
    (owed,) = draws.owed()
    assert (owed.entry.units, owed.handed_id, owed.handed_units) == (9, (1, 1), 7)
    draws.handed_over([(owed, (1, 1))])
    assert draws.owed() == []
    draws.settle({"k": 0}, NOW_MS)
    assert [each.entry.units for each in draws.owed()] == [0]
    assert draws.drawn_units(NOW_MS, DAY_MS) == 0
    assert draws.settle({"unheard of": 1}, NOW_MS) is None


def test_a_draw_and_its_folders_are_on_the_disk_before_it_is_admitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        fsync(fd)
        synced.append(Path(f"/proc/self/fd/{fd}").readlink().name)

    monkeypatch.setattr(os, "fsync", noted)
    draws = journal(tmp_path).draws
    draw(draws, entry())
    folder = draws_file(tmp_path).parent
    assert synced == [folder.name, "journals", tmp_path.name, "draws"]
    draw(draws, entry())
    assert synced[4:] == ["draws"]


def test_a_draw_fails_if_the_disk_takes_no_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = journal(tmp_path).draws
    draw(draws, entry())
    before = draws_file(tmp_path).read_bytes()

    def broken(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(LedgerError, match=r"^allowance .*/draws: Input/output error, so nothing is drawn; [^\n]*$"):
        draw(draws, entry())
    assert draws_file(tmp_path).read_bytes() == before
    assert len(journal(tmp_path).draws.owed()) == 1


def test_a_long_file_is_written_anew_and_what_is_owed_stays_however_old(tmp_path: Path) -> None:
    draws = journal(tmp_path).draws
    draw(draws, entry(key="owed"))
    draws.settle({"owed": 3}, NOW_MS)
    draw(draws, *(entry(key=f"k{number}") for number in range(SPARE_LINES)), allowance_units=10**9)
    draws.handed_over([(each, (1, 1)) for each in draws.owed() if each.entry.key != "owed"])
    last_ms = NOW_MS + DAY_MS + SLACK_MS
    draw(draws, entry(key="new"), now_ms=last_ms)
    assert draws_file(tmp_path).read_bytes().count(b"\n") < 10
    assert [(each.entry.key, each.entry.units) for each in journal(tmp_path).draws.owed()] == [("owed", 3), ("new", 1)]


def test_a_draw_dated_ahead_counts_until_a_window_after_its_hand_over(tmp_path: Path) -> None:
    draws = journal(tmp_path).draws
    draw(draws, entry(units=50), now_ms=NOW_MS + 300 * DAY_MS)
    assert not draw(draws, entry())
    draws.handed_over([(owed, (NOW_MS, 1)) for owed in draws.owed()])
    assert draw(draws, entry(), now_ms=NOW_MS - 300 * DAY_MS, allowance_units=51)  # this clock is behind
    assert not draw(draws, entry(), now_ms=NOW_MS + DAY_MS - 1)
    assert draw(draws, entry(), now_ms=NOW_MS + DAY_MS)


@pytest.mark.parametrize("set_ms", [-9_000 * DAY_MS, 9_000 * DAY_MS])
def test_setting_the_clock_renews_no_allowance_and_delays_none(tmp_path: Path, set_ms: int) -> None:
    draws, up = journal(tmp_path).draws, partial(SinceBoot, "boot")
    assert draw(draws, entry(units=49), uptime=up(5))
    assert not draw(draws, entry(units=2), now_ms=NOW_MS + set_ms, uptime=up(DAY_MS + 4))
    assert draw(draws, entry(), now_ms=NOW_MS + set_ms, uptime=up(6))
    assert not draw(draws, entry(), uptime=up(DAY_MS + 4))
    assert draw(draws, entry(units=49), now_ms=NOW_MS + set_ms, uptime=up(DAY_MS + 5))


def test_threads_that_begin_meanwhile_lock_each_other_out(tmp_path: Path, often_switching: None) -> None:
    lock, inside, most_inside = FileLock(str(tmp_path / "lock"), "the lock"), [], []

    def lock_twice(number: int) -> None:
        with lock.taken(30), lock.taken(30):
            inside.append(number)
            most_inside.append(len(inside))
            inside.remove(number)

    with ThreadPoolExecutor(150) as threads:  # each thread locks for the first time while others wait
        with lock.taken(30):
            waiting = [threads.submit(lock_twice, number) for number in range(150)]
        for each in waiting:
            each.result()
    assert most_inside == [1] * 150


@pytest.fixture
def often_switching() -> Iterator[None]:
    """Threads take turns as often as Python lets them."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)
