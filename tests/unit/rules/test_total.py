"""The running total of a limit: it agrees with a recount of the whole log, whatever came, left or was corrected."""

from __future__ import annotations

import random
from bisect import bisect_right
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from quota.rules.entry import CALLS, START, Entry, Id, others_units
from quota.rules.total import READ_LEAVING, RunningTotal, Wanted, total_of
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS, Calendar, Selector, Sliding, View, leaves_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quota.terms.limits import Window

MIDNIGHT = int(datetime(2026, 7, 1, tzinfo=UTC).timestamp()) * 1000
NOON = MIDNIGHT + 12 * HOUR_MS
UNITS = Selector(buckets=("units",))
DAY = View(UNITS, Sliding(DAY_MS))


def charge(ms: int, units: int = 1, *, key: str = "", bucket: str = "units", method: str = "list") -> Entry:
    return Entry((ms, 0), units, bucket, method, "job", "", key or f"key{ms}")


def correction(of: Entry, units: int, ms: int) -> Entry:
    return of._replace(
        id=(ms, 0), units=units, key=f"key{ms}", kind="correction", of=of.key, at=of.id, before_units=of.units
    )


def others(ms: int, units: int, until_ms: int, *, name: str = "usage", since_ms: int = 0, window: str = "") -> Entry:
    return Entry((ms, 0), units, "units", window, "", "", f"key{ms}", "others", name, (since_ms, until_ms))


# -- any history -------------------------------------------------------------------------------------------------------


class Log:
    """A log to which a random author appends."""

    def __init__(self, rng: random.Random) -> None:
        self.entries: list[Entry] = []
        self.units: dict[str, int] = {}
        self._rng = rng

    @property
    def tip(self) -> Id:
        return self.entries[-1].id if self.entries else START

    def grow(self, now_ms: int) -> None:
        """Add a charge, a correction, or what others used. Ids never go back."""
        ms, seq = max((now_ms, 0), self.tip)
        rng, n = self._rng, len(self.entries)
        charges = [entry for entry in self.entries if entry.kind == "charge"]
        bucket, method = rng.choice(("units", "units", "search")), rng.choice(("list", "insert"))
        entry = Entry((ms, seq + 1), rng.randint(1, 9), bucket, method, "", "", f"key{n}")
        kind = rng.random()
        if kind < 0.25 and charges:
            of = rng.choice(charges[-12:])
            units = rng.randint(0, 9)
            entry = of._replace(
                id=entry.id,
                units=units,
                key=entry.key,
                kind="correction",
                of=of.key,
                at=of.id,
                before_units=self.units[of.key],
            )
            self.units[of.key] = units
        elif kind < 0.35:
            until_ms = now_ms + rng.randint(1, 90 * MINUTE_MS)
            entry = entry._replace(kind="others", method="", of=rng.choice("ab"), at=(0, until_ms))
        else:
            self.units[entry.key] = entry.units
        self.entries.append(entry)

    def read(self, after: Id, through: Id, most: int) -> Sequence[Entry]:
        first, last = (
            bisect_right(self.entries, entry_id, key=lambda entry: entry.id) for entry_id in (after, through)
        )
        return self.entries[first:last][:most]

    def used_units(self, view: View, now_ms: int) -> int:
        """A recount of all entries, without anything kept."""
        selector = view.selector
        charged = sum(
            selector.cost(self.units[entry.key])
            for entry in self.entries
            if entry.kind == "charge"
            and selector.counts(entry.bucket, entry.method, "")
            and self._counts(entry, view, now_ms)
        )
        largest: dict[str, int] = {}
        for entry in self.entries:
            is_heard = entry.kind == "others" and entry.at[1] > now_ms and not selector.methods
            if is_heard and selector.counts_bucket(entry.bucket) and self._counts(entry, view, now_ms):
                largest[entry.of] = max(entry.units, largest.get(entry.of, 0))
        return charged + sum(largest.values())

    @staticmethod
    def _counts(entry: Entry, view: View, now_ms: int) -> bool:
        """By the newest period or window: what is dated ahead counts, too."""
        window = view.window
        since_ms = window.edges(now_ms)[0] if isinstance(window, Calendar) else now_ms - window.window_ms + 1
        return entry.id[0] >= since_ms

    def frees_at_ms(self, view: View, now_ms: int, units: int) -> int | None:
        used_units = self.used_units(view, now_ms)
        turns_ms = {leaves_at(view.window, entry.id[0]) for entry in self.entries}
        turns_ms |= {entry.at[1] for entry in self.entries if entry.kind == "others"}
        for turn_ms in sorted(turn_ms for turn_ms in turns_ms if turn_ms > now_ms):
            if used_units - self.used_units(view, turn_ms) >= units:
                return turn_ms
        return None


class Reader:
    """A process that reads the log for one total, as `quota.deciding.project` does."""

    def __init__(self, log: Log, view: View, now_ms: int) -> None:
        self.log = log
        self.total = RunningTotal(view)
        self.total.start_at(now_ms)

    def count(self, now_ms: int) -> int:
        total, log = self.total, self.log
        while True:
            for entry in log.read(total.head, log.tip, 10_000):
                total.take(entry)
            total.skip_to(log.tip)
            wanted = total.drop(now_ms)
            if wanted is not None:
                self._read(wanted)
            elif total.head >= log.tip:
                return total.used_units

    def _read(self, wanted: Wanted) -> None:
        self.total.take_leaving(wanted, self.log.read(wanted.after, wanted.through, wanted.most), self.log.units)

    def frees_at_ms(self, units: int) -> int | None:
        while (at_ms := self.total.frees_at_ms(units)) is None and (wanted := self.total.wants_leaving()) is not None:
            self._read(wanted)
        return at_ms

    def used_after(self, at_ms: int) -> int:
        while (units := self.total.used_after(at_ms)) is None:
            wanted = self.total.wants_leaving()
            assert wanted is not None
            self._read(wanted)
        return units

    def restart(self, now_ms: int) -> bool:
        """Another process begins, with what this one has kept. Whether that could be taken."""
        kept = self.total.kept("epoch")
        self.total = RunningTotal(self.total.view)
        resumed = self.total.resume(kept, "epoch", self.log.tip, START, now_ms)
        if not resumed:
            self.total.start_at(now_ms)
        return resumed


WINDOWS: list[Window] = [Sliding(HOUR_MS), Calendar("hour", "UTC")]
SELECTORS = [UNITS, Selector(), Selector(methods=("list",)), Selector(buckets=("units",), count="calls")]


@pytest.mark.parametrize("window", WINDOWS, ids=["sliding", "calendar"])
@pytest.mark.parametrize("selector", SELECTORS, ids=["a bucket", "all", "a method", "calls"])
@pytest.mark.parametrize("seed", range(2))
def test_a_total_is_the_recount_of_its_log(
    monkeypatch: pytest.MonkeyPatch, window: Window, selector: Selector, seed: int
) -> None:
    """Also where it holds few charges ready to leave, begins with what another process kept, and the clock goes back.
    When units leave, and how many are left at a time, is that of the recount, too."""
    monkeypatch.setattr("quota.rules.total.MAX_LEAVING", 4)
    monkeypatch.setattr("quota.rules.total.READ_LEAVING", 3)
    rng = random.Random(seed)
    view, log, now_ms = View(selector, window), Log(rng), NOON
    reader, resumed = Reader(log, view, now_ms), 0
    for _ in range(150):
        now_ms += rng.choice((0, 1, rng.randint(0, 9 * MINUTE_MS), rng.randint(0, 9 * MINUTE_MS)))
        if rng.random() < 0.03:
            now_ms += rng.choice((-1, 1)) * rng.randint(0, 80 * MINUTE_MS)
        for _ in range(rng.randint(0, 3)):
            log.grow(now_ms)
        if rng.random() < 0.1:
            resumed += reader.restart(now_ms)
        used_units = log.used_units(view, now_ms)
        assert reader.count(now_ms) == used_units
        later_ms = now_ms + rng.randint(0, 2 * HOUR_MS)
        assert reader.used_after(later_ms) == log.used_units(view, later_ms)
        if used_units and isinstance(window, Sliding):
            units = rng.randint(1, used_units)
            assert reader.frees_at_ms(units) == log.frees_at_ms(view, now_ms, units)
    assert resumed


# -- what leaves -------------------------------------------------------------------------------------------------------


def test_a_total_holds_a_bounded_number_of_charges_ready_to_leave_and_reads_the_next_when_these_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quota.rules.total.MAX_LEAVING", 2)
    monkeypatch.setattr("quota.rules.total.READ_LEAVING", 2)
    entries = [charge(NOON + n) for n in range(5)]
    total = total_of(DAY, entries, NOON + 5)
    assert [leaving.id for leaving in total.leaving] == [entries[0].id, entries[1].id]
    assert total.drop(NOON + DAY_MS) is None, "the next that leaves is there"
    wanted = total.drop(NOON + 1 + DAY_MS)
    assert wanted == Wanted(entries[1].id, entries[4].id, 2, corrected=True)
    assert total.used_units == 3
    total.take_leaving(wanted, entries[2:4], {entries[3].key: 0})
    assert [(leaving.id, leaving.cost) for leaving in total.leaving] == [(entries[2].id, 1), (entries[3].id, 0)]


def test_leaving_charges_are_read_when_the_first_leaves() -> None:
    """Of what was kept it is known when that is."""
    entries = [charge(NOON), charge(NOON + HOUR_MS)]
    total = RunningTotal(DAY)
    kept = total_of(DAY, entries, NOON + HOUR_MS).kept("epoch")
    assert total.resume(kept, "epoch", entries[-1].id, START, NOON + HOUR_MS)
    assert total.drop(NOON + DAY_MS - 1) is None
    assert total.drop(NOON + DAY_MS) == Wanted(total.gone, entries[-1].id, READ_LEAVING, corrected=True)


def test_entries_read_for_another_state_of_the_total_change_nothing() -> None:
    """Another thread was quicker."""
    entries = [charge(NOON), charge(NOON + 1)]
    total = total_of(DAY, entries, NOON + 1)
    total.take_leaving(Wanted(START, entries[1].id, 200, corrected=True), entries, {})
    assert len(total.leaving) == 2


def test_a_correction_counts_while_its_charge_does() -> None:
    first, second = charge(NOON, 100), charge(NOON + 9, 10)
    total = total_of(DAY, [first, second], NOON + 9)
    total.take(correction(first, 40, NOON + 10))
    assert total.used_units == 50
    assert total.drop(NOON + DAY_MS) is None
    total.take(correction(first._replace(units=40), 70, NOON + 11))
    assert total.used_units == 10


def test_a_correction_of_a_charge_that_was_trimmed_changes_nothing() -> None:
    trimmed, kept = charge(NOON, 100), charge(NOON + 1, 10)
    total = total_of(DAY, [kept, correction(trimmed, 0, NOON + 2)], NOON + 2, trimmed.id)
    assert total.used_units == 10


def test_a_correction_goes_by_what_its_charge_counts_here_whatever_its_author_thought() -> None:
    first = charge(NOON, 100)
    total = total_of(DAY, [first, correction(first._replace(units=500), 40, NOON + 1)], NOON + 1)
    assert total.used_units == 40


def test_a_clock_that_goes_back_counts_again_what_had_left() -> None:
    entries = [charge(NOON, 5), charge(NOON + HOUR_MS)]
    total = total_of(DAY, entries, NOON + HOUR_MS)
    assert (total.drop(NOON + DAY_MS), total.used_units) == (None, 1)
    assert (total.drop(NOON + DAY_MS - 1), total.used_units, total.head) == (None, 0, (NOON - 1, 2**53))
    for entry in entries:
        total.take(entry)
    assert total.used_units == 6


# -- what only upstream has counted ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "since_ms", "until_ms", "leaves_ms"),
    [
        # They leave with upstream's period,
        (Sliding(DAY_MS), 0, NOON + 5, NOON + 5),
        (Calendar("day", "UTC"), 0, NOON + 5, NOON + 5),
        (Calendar("day", "UTC"), MIDNIGHT, MIDNIGHT + DAY_MS, MIDNIGHT + DAY_MS),
        # or with the calendar's own that upstream's began in,
        (Calendar("day", "UTC"), MIDNIGHT - 1, MIDNIGHT + DAY_MS, MIDNIGHT),
        (Sliding(DAY_MS), MIDNIGHT - 1, MIDNIGHT + DAY_MS, MIDNIGHT + DAY_MS),
        # and no later than a charge of now.
        (Sliding(DAY_MS), 0, NOON + 2 * DAY_MS, NOON + DAY_MS),
        (Calendar("day", "UTC"), 0, NOON + 2 * DAY_MS, MIDNIGHT + DAY_MS),
    ],
)
def test_units_of_others_leave_with_upstreams_period_and_no_later_than_a_charge(
    window: Window, since_ms: int, until_ms: int, leaves_ms: int
) -> None:
    heard = others(NOON, 900, until_ms, since_ms=since_ms)
    total = total_of(View(UNITS, window), [heard], NOON)
    assert [others_units(total.others_after(at_ms)) for at_ms in (leaves_ms - 1, leaves_ms)] == [900, 0]


def test_the_largest_count_of_a_name_counts_and_names_add_up() -> None:
    total = total_of(
        DAY,
        [
            others(NOON, 900, NOON + 50),
            others(NOON + 1, 700, NOON + 60),
            others(NOON + 2, 800, NOON + 50),
            others(NOON + 3, 10, NOON + 55, name="proxy"),
            charge(NOON + 4, 5),
        ],
        NOON + 4,
    )
    assert total.used_units == 915
    assert [total.used_after(NOON + after_ms) for after_ms in (49, 50, 55, 60)] == [915, 715, 705, 5]


@pytest.mark.parametrize(
    ("view", "window", "region", "counts"),
    [
        (DAY, "", "", True),
        (View(Selector(), Sliding(DAY_MS)), "", "", True),
        (View(Selector(buckets=("search",)), Sliding(DAY_MS)), "", "", False),
        # A limit that selects methods or jobs counts less than the bucket.
        (View(Selector(methods=("list",)), Sliding(DAY_MS)), "", "", False),
        (View(Selector(jobs=("job",)), Sliding(DAY_MS)), "", "", False),
        # A limit counts what upstream counted in a window as long as its own. A day may have 25 hours, or 24.
        (DAY, str(DAY_MS), "", True),
        (DAY, str(25 * HOUR_MS), "", True),
        (DAY, str(25 * HOUR_MS + 1), "", False),
        (DAY, str(HOUR_MS), "", False),
        (View(UNITS, Calendar("day", "UTC")), str(DAY_MS), "", True),
        (View(UNITS, Calendar("day", "UTC")), str(23 * HOUR_MS), "", False),
        (View(UNITS, Calendar("month", "UTC")), str(30 * DAY_MS), "", True),
        (View(UNITS, Calendar("month", "UTC")), str(29 * DAY_MS), "", False),
        # Units are no calls.
        (View(Selector(count="calls"), Sliding(DAY_MS)), str(DAY_MS), "", False),
        (View(Selector(count="calls"), Sliding(DAY_MS)), str(DAY_MS), CALLS, True),
    ],
)
def test_a_limit_counts_units_of_others_that_are_all_of_its_bucket_in_a_window_of_its_length(
    view: View, window: str, region: str, counts: bool
) -> None:
    heard = others(NOON, 900, NOON + 50, window=window)._replace(region=region)
    assert total_of(view, [heard], NOON).used_units == (900 if counts else 0)


def test_units_of_others_that_are_over_count_again_when_the_clock_goes_back_by_less_than_a_day() -> None:
    week = View(UNITS, Sliding(7 * DAY_MS))
    total = total_of(week, [others(NOON, 900, NOON + HOUR_MS)], NOON)
    for at_ms, units in ((NOON + HOUR_MS, 0), (NOON + DAY_MS, 0), (NOON + HOUR_MS - 1, 900)):
        assert (total.drop(at_ms), total.used_units) == (None, units)
    total.drop(NOON + 26 * HOUR_MS)
    assert total.others == {}, "they are forgotten some day"


# -- what is kept ------------------------------------------------------------------------------------------------------

KEPT = f"epoch 7 {NOON - DAY_MS}-4 {NOON}-1 {NOON} -"
TIP: Id = (NOON, 5)


@pytest.mark.parametrize(
    ("kept", "trimmed", "now_ms", "resumes"),
    [
        (KEPT, START, NOON, True),
        (KEPT.replace(" -", " 5:9:name:with:colons,6:9:other"), START, NOON, True),
        (KEPT.replace("epoch", "another"), START, NOON, False),
        # Its head is in the log and in the window.
        (KEPT.replace(f"{NOON}-1", f"{NOON}-5"), START, NOON, True),
        (KEPT.replace(f"{NOON}-1", f"{NOON}-6"), START, NOON, False),
        (KEPT, START, NOON + DAY_MS - 1, True),
        (KEPT, START, NOON + DAY_MS, False),
        # All that has yet to leave is in the log.
        (KEPT, (NOON - DAY_MS, 4), NOON, True),
        (KEPT, (NOON - DAY_MS, 5), NOON, False),
        # The clock has not gone back behind what left.
        (KEPT, START, NOON - 1, False),
        (KEPT.replace(f"{NOON - DAY_MS}-4", f"{NOON}-2"), START, NOON, False),
        ("", START, NOON, False),
        ("epoch 7", START, NOON, False),
        (KEPT.replace(" 7 ", " x "), START, NOON, False),
        (KEPT.replace(f"-4 {NOON}-1", f"-4 {NOON}"), START, NOON, False),
        (KEPT.replace(" -", " 5:9"), START, NOON, False),
    ],
)
def test_a_kept_total_is_taken_only_where_it_holds(kept: str, trimmed: Id, now_ms: int, resumes: bool) -> None:
    total = RunningTotal(DAY)
    assert total.resume(kept, "epoch", TIP, trimmed, now_ms) is resumes
    assert (total.charged, total.head) == ((7, read_head(kept)) if resumes else (0, START))


def read_head(kept: str) -> Id:
    ms, _, seq = kept.split()[3].partition("-")
    return int(ms), int(seq)


def test_a_kept_total_reads_back_as_it_was() -> None:
    entries = [charge(NOON, 5), others(NOON + 1, 900, NOON + 50, name="a:b c"), charge(NOON + 2, 7)]
    total = total_of(DAY, entries, NOON + 2)
    again = RunningTotal(DAY)
    assert again.resume(total.kept("epoch"), "epoch", entries[-1].id, START, NOON + 2)
    assert (again.charged, again.gone, again.head, again.others) == (12, total.gone, total.head, total.others)
    assert again.kept("epoch") == total.kept("epoch")
