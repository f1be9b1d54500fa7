"""A process that starts is told one moment of a log, with what was kept of its views and what lies behind these."""

from __future__ import annotations

import pytest

from contract.log.logs import NOW_MS, Clock, P, add, add_many, added, charge, correction, entries_of, fence
from quota.budget import Budget
from quota.deciding.project import Project
from quota.ledger.log import MAX_UNSEEN, Log
from quota.rules.entry import END, START, Id, id_text
from quota.rules.total import RunningTotal
from quota.terms.limits import DAY_MS, Selector, Sliding, View
from support.books import BOOK
from support.setup import limit


def kept(epoch: str, head: Id) -> str:
    """A view as it is kept, that has read up to there."""
    return f"{epoch} 5 0-0 {id_text(head)} -"


def test_a_beginning_is_the_moment_as_it_is(log: Log, clock: Clock) -> None:
    *_, last = added(log, charge(), charge())
    clock.now_ms += 5
    log.change(P, {}, {"facts": "a\tb\nc", "claim:x": "{}"})
    beginning = log.begin(P, (), ("facts", "none"))
    assert (beginning.clock_ms, beginning.epoch, beginning.tip) == (clock.now_ms, "first", last.id)
    assert (beginning.trimmed, dict(beginning.state)) == (START, {"facts": "a\tb\nc"})
    assert (list(beginning.entries), beginning.whole) == ([], False)


def test_a_text_of_the_state_may_be_empty(log: Log) -> None:
    log.change(P, {}, {"facts": ""})
    assert dict(log.begin(P, (), ("facts",)).state) == {"facts": ""}


def test_what_was_kept_of_a_view_comes_with_what_lies_behind_it(log: Log) -> None:
    entries = added(log, *[charge() for _ in range(5)])
    assert log.keep_views(P, "first", {"v": kept("first", entries[1].id)})
    beginning = log.begin(P, ("v",), ())
    assert dict(beginning.state) == {"view:v": kept("first", entries[1].id)}
    assert (list(beginning.entries), beginning.whole) == (entries[2:], True)


def test_the_format_of_what_is_kept_is_that_of_running_totals(log: Log) -> None:
    entries = added(log, charge(3), charge(4))
    view = View(Selector(), Sliding(DAY_MS))
    total = RunningTotal(view)
    total.start_at(NOW_MS)
    total.take(entries[0])
    log.keep_views(P, "first", {view.name: total.kept("first")})
    assert list(log.begin(P, (view.name,), ()).entries) == entries[1:]


def test_of_several_views_the_earliest_says_what_is_shown(log: Log) -> None:
    entries = added(log, *[charge() for _ in range(5)])
    log.keep_views(P, "first", {"late": kept("first", entries[3].id), "early": kept("first", entries[0].id)})
    assert list(log.begin(P, ("late", "early"), ()).entries) == entries[1:]
    assert list(log.begin(P, ("late",), ()).entries) == entries[4:]


def test_a_view_that_has_read_everything_comes_with_nothing(log: Log) -> None:
    last = add(log, charge())
    log.keep_views(P, "first", {"v": kept("first", last)})
    beginning = log.begin(P, ("v",), ())
    assert (list(beginning.entries), beginning.whole) == ([], True)


def test_where_one_view_is_not_kept_no_entries_are_shown(log: Log) -> None:
    first, _ = added(log, charge(), charge())
    log.keep_views(P, "first", {"v": kept("first", first.id)})
    beginning = log.begin(P, ("v", "w"), ())
    assert (list(beginning.entries), beginning.whole) == ([], False)
    assert "view:v" in beginning.state


@pytest.mark.parametrize("text", ["", "?", "other 5 0-0 0-0 -", "first 5 0-0 x -", "first 5 0-0", "first 5 0-0 0-0"])
def test_a_view_of_another_epoch_or_that_nobody_can_read_is_not_kept(log: Log, text: str) -> None:
    add(log, charge())
    log.keep_views(P, "first", {"v": text})
    beginning = log.begin(P, ("v",), ())
    assert (list(beginning.entries), beginning.whole) == ([], False)


@pytest.mark.parametrize("more", [0, 1])
def test_a_beginning_carries_500_entries_and_says_whether_that_is_all(log: Log, more: int) -> None:
    (first,) = added(log, charge())
    entries = add_many(log, MAX_UNSEEN + more)
    log.keep_views(P, "first", {"v": kept("first", first.id)})
    beginning = log.begin(P, ("v",), ())
    assert (list(beginning.entries), beginning.whole) == (entries[:MAX_UNSEEN], not more)
    assert beginning.tip == entries[-1].id


def test_views_are_kept_only_in_their_epoch(log: Log) -> None:
    assert not log.keep_views(P, "first", {"v": "x"})
    add(log, charge())
    assert not log.keep_views(P, "other", {"v": "x"})
    assert not log.keep_views(P, "", {"v": "x"})
    epoch = fence(log)
    for closed in ("first", epoch):
        assert not log.keep_views(P, closed, {"v": "x"})
    assert log.replace(P, epoch, log.begin(P).tip, entries_of(log), "second")
    assert not log.keep_views(P, "first", {"v": "x"})
    assert dict(log.begin(P, ("v",), ()).state) == {}
    assert log.keep_views(P, "second", {"v": "x"})
    assert dict(log.begin(P, ("v",), ()).state) == {"view:v": "x"}


def test_a_view_that_is_kept_again_takes_the_place_of_what_was_kept(log: Log) -> None:
    add(log, charge())
    log.keep_views(P, "first", {"v": "x", "w": "y"})
    log.keep_views(P, "first", {"v": "z"})
    assert dict(log.begin(P, ("v", "w"), ()).state) == {"view:v": "z", "view:w": "y"}


# -- reading ---------------------------------------------------------------------------------------------------------


def test_a_piece_of_the_log_is_read_from_behind_one_entry_through_another(log: Log) -> None:
    entries = added(log, *[charge() for _ in range(6)])
    ids = [entry.id for entry in entries]
    assert list(log.read(P, ids[1], ids[4], 10)) == entries[2:5]
    assert list(log.read(P, ids[1], ids[4], 2)) == entries[2:4]
    assert list(log.read(P, START, END, 10)) == entries
    assert list(log.read(P, (NOW_MS - 1, 2**53), ids[0], 10)) == entries[:1]
    assert list(log.read(P, ids[4], ids[1], 10)) == []
    assert list(log.read(P, ids[-1], END, 10)) == []


def test_many_entries_are_read_at_once(log: Log) -> None:
    entries = add_many(log, 2_300)
    assert list(log.read(P, START, END, 5_000)) == entries
    assert list(log.read(P, START, END, 2_100)) == entries[:2_100]


def test_a_fence_or_a_seal_keeps_nobody_from_reading(log: Log) -> None:
    (first,) = added(log, charge(100))
    (corrected,) = added(log, correction(first, 40))
    log.change(P, {}, {"facts": "x"})
    for close in (lambda: fence(log), lambda: log.seal(P, fence(log, "token"), "redis://elsewhere/0")):
        close()
        assert entries_of(log) == [first, corrected]
        assert log.corrections(P, [first.key])[first.key].units == 40
        assert dict(log.begin(P, (), ("facts",)).state) == {"facts": "x"}
        assert dict(log.change(P, {"facts": None}, {}).state) == {"facts": "x"}


# -- corrections -----------------------------------------------------------------------------------------------------


def test_the_newest_correction_of_a_charge_says_what_it_counts(log: Log) -> None:
    first, second, third = added(log, charge(100), charge(100), charge(100))
    assert dict(log.corrections(P, [first.key])) == {}
    added(log, correction(first, 40), correction(second, 0))
    *_, last = added(log, correction(first, 60, before_units=40))
    corrections = log.corrections(P, [first.key, second.key, third.key, "none"])
    assert set(corrections) == {first.key, second.key}
    assert corrections[first.key] == (60, last.id)
    assert corrections[second.key].units == 0
    assert dict(log.corrections(P, [])) == {}


def test_corrections_of_many_charges_are_read_at_once(log: Log) -> None:
    charges = add_many(log, 1_500)
    for first in range(0, len(charges), 100):
        added(log, *[correction(each, n) for n, each in enumerate(charges[first : first + 100])])
    corrections = log.corrections(P, [each.key for each in charges])
    assert [corrections[each.key].units for each in charges] == [n % 100 for n in range(1_500)]


# -- one project is of one API -----------------------------------------------------------------------------------------

OF_ANOTHER = (
    f"ledger {{}}: project {P!r} has the charges of api 'asana', and upstream counts 'hubspot' separately; give this "
    "credential another project"
)


def of_api(api: str, log: Log, clock: Clock) -> tuple[Project, Budget]:
    project = Project(log, P, clock=clock, api=api)
    return project, Budget(credential="main", book=BOOK, limits=(limit(500),), project=project)


def test_a_project_takes_no_charge_of_another_api(log: Log, clock: Clock) -> None:
    assert of_api("asana", log, clock)[1].charge("search.list").admitted
    refused = of_api("hubspot", log, clock)[1].charge("search.list")
    assert (refused.admitted, refused.lasting, refused.detail) == (False, True, OF_ANOTHER.format(log.label))
    again = of_api("asana", log, clock)[1].peek("search.list")
    assert again.limits[0].used_units == 100


def test_of_two_apis_that_begin_at_once_one_has_the_project(log: Log, clock: Clock) -> None:
    asana, hubspot = (of_api(api, log, clock) for api in ("asana", "hubspot"))
    for project, _ in (asana, hubspot):
        project.begin(())
    assert [budget.charge("search.list").admitted for _, budget in (asana, hubspot)] == [True, False]
