"""A process that starts reads one moment of a log, with what was kept of its views."""

from __future__ import annotations

import pytest

from contract.log.logs import (
    NOW_MS,
    Clock,
    P,
    Place,
    add,
    add_many,
    added,
    ask,
    charge,
    correction,
    entries_of,
    fence,
    marker,
)
from quota.budget import Budget
from quota.deciding.project import Project
from quota.ledger.log import ANY, LEASE_MS, VIEW, Log, fence_is_over, is_fence
from quota.rules.entry import END, START, Id, id_text
from quota.rules.total import RunningTotal
from quota.terms.limits import DAY_MS, Selector, Sliding, View
from support.books import BOOK
from support.setup import limit


def kept(epoch: str, head: Id) -> str:
    """The kept text of a view that has read up to there."""
    return f"{epoch} 5 0-0 {id_text(head)} -"


def test_a_log_that_lacks_methods_names_them_when_it_is_opened() -> None:
    with pytest.raises(TypeError, match=r"abstract methods? .*\bchange\b.*\bread\b"):
        type("Half", (Log,), {"append": print})()


def test_a_beginning_has_the_epoch_the_time_and_the_state(log: Log, clock: Clock) -> None:
    *_, last = added(log, charge(), charge())
    clock.now_ms += 5
    log.change(P, {}, {"facts": "a\tb\nc", "claim:x": "{}"})
    beginning = log.begin(P, ("facts", "none"))
    assert (beginning.clock_ms, beginning.epoch, beginning.tip) == (clock.now_ms, "first", last.id)
    assert (beginning.trimmed, dict(beginning.state)) == (START, {"facts": "a\tb\nc"})


def test_a_kept_view_is_a_running_total_of_entries_that_the_log_has(log: Log) -> None:
    entries = added(log, charge(3), charge(4))
    view = View(Selector(), Sliding(DAY_MS))
    total = RunningTotal(view)
    total.start_at(NOW_MS)
    total.take(entries[0])
    log.keep_views(P, "first", {view.name: total.kept("first")})
    log.keep_views(P, "first", {"v": kept("first", (NOW_MS - 1, 7))})
    assert [*log.begin(P, ("view:v", VIEW + view.name)).state] == [VIEW + view.name], "only a lost copy had the other"


@pytest.mark.parametrize("text", ["", "?", "other 5 0-0 0-0 -", "first 5 0-0 x -", "first 5 0-0", "first 5 0-0 0-0"])
def test_a_view_of_another_epoch_or_that_nobody_can_read_stays_as_it_is(log: Log, text: str) -> None:
    add(log, charge())
    log.keep_views(P, "first", {"v": text})
    assert log.begin(P, ("view:v",)).state == {VIEW + "v": text}


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
    assert dict(log.begin(P, ("view:v",)).state) == {}
    assert log.keep_views(P, "second", {"v": "x"})
    assert dict(log.begin(P, ("view:v",)).state) == {"view:v": "x"}


def test_a_read_returns_the_entries_after_an_entry_up_to_another(log: Log) -> None:
    entries = added(log, *[charge() for _ in range(6)])
    ids = [entry.id for entry in entries]
    assert list(log.read(P, ids[1], ids[4], 10)) == entries[2:5]
    assert list(log.read(P, ids[1], ids[4], 2)) == entries[2:4]
    assert list(log.read(P, START, END, 10)) == entries
    assert list(log.read(P, (NOW_MS - 1, 2**53), ids[0], 10)) == entries[:1]
    assert list(log.read(P, ids[4], ids[1], 10)) == []
    assert list(log.read(P, ids[-1], END, 10)) == []


def test_a_fenced_or_sealed_log_can_be_read(log: Log) -> None:
    (first,) = added(log, charge(100))
    (corrected,) = added(log, correction(first, 40))
    log.change(P, {}, {"facts": "x"})
    for close in (lambda: fence(log), lambda: log.seal(P, fence(log, "token"), "redis://elsewhere/0")):
        close()
        assert entries_of(log) == [first, corrected]
        assert log.corrections(P, [first.key])[first.key].units == 40
        assert dict(log.begin(P, ("facts",)).state) == {"facts": "x"}
        assert dict(log.change(P, {"facts": None}, {}).state) == {"facts": "x"}


def test_the_newest_correction_sets_what_a_charge_counts(log: Log) -> None:
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


def test_two_apis_that_begin_at_once_do_not_share_a_project(log: Log, clock: Clock) -> None:
    asana, hubspot = (of_api(api, log, clock) for api in ("asana", "hubspot"))
    for project, _ in (asana, hubspot):
        project.begin(())
    assert [budget.charge("search.list").admitted for _, budget in (asana, hubspot)] == [True, False]


def is_behind(log: Log, epoch: str, seen: Id = START, **fields: object) -> bool:
    """Whether an author who has read so far is behind, who appends as well as who only reads."""
    stood = entries_of(log)
    replies = [ask(log, *entries, epoch=epoch, seen=seen, room=ANY, **fields) for entries in ((), (charge(),))]
    words = [reply.word for reply in replies]
    if words != ["BEHIND", "BEHIND"]:
        assert words in (["READ", "APPENDED"], ["READ", "AGAIN"])
        return False
    for reply in replies:
        assert (list(reply.unseen), reply.id, reply.epoch) == ([], None, log.begin(P).epoch)
    assert entries_of(log) == stood
    return True


def test_a_log_is_behind_for_whoever_has_read_another_log_or_what_an_empty_log_lacks(log: Log) -> None:
    for epoch, seen in (("first", START), ("first", (NOW_MS, 7)), ("", (NOW_MS, 7))):
        assert is_behind(log, epoch, seen)
    seen = add(log, charge())
    assert not is_behind(log, "first")
    assert not is_behind(log, ""), "who has read nothing"
    assert is_behind(log, "other")
    assert is_behind(log, "other", seen)


@pytest.mark.parametrize("lacking", [(NOW_MS - 1, 7), (NOW_MS, 6), (NOW_MS, 8), (NOW_MS, 10), (NOW_MS + 1, 0)])
def test_a_log_that_lacks_what_its_author_or_the_authors_machine_has_seen_is_behind(
    log: Log, lacking: Id, clock: Clock
) -> None:
    ask(log, charge(), seq=7)
    clock.now_ms += 1
    ask(log, charge(), seen=(NOW_MS, 7), seq=10)
    assert not is_behind(log, "first", (NOW_MS, 7))
    assert is_behind(log, "first", lacking)
    assert is_behind(log, "first", (NOW_MS, 7), must=[(NOW_MS, 7), lacking])


def test_a_log_that_has_what_the_machine_has_seen_is_not_behind(log: Log) -> None:
    first, second, third = added(log, charge(), charge(), charge())
    for must in (first, second, third):
        assert not is_behind(log, "first", first.id, must=[must.id])
    add_far = [charge() for _ in range(600)]
    *_, last = added(log, *add_far)
    assert ask(log, epoch="first", seen=first.id, must=[last.id]).word == "READ"


def test_a_trimmed_entry_is_not_missing_but_a_later_entry_may_be(log: Log, clock: Clock) -> None:
    """A process that has read up to there goes on; any other may have missed a marker."""
    first, second = added(log, charge(), charge())
    clock.now_ms += 1_000
    (last,) = added(log, charge())
    assert log.trim(P, NOW_MS + 1) == 2
    assert log.begin(P).trimmed == second.id
    assert list(ask(log, epoch="first", seen=second.id).unseen) == [last]
    for must in (first.id, second.id, (NOW_MS - 5, 0)):
        assert ask(log, epoch="first", seen=last.id, must=[must]).word == "READ"
    assert is_behind(log, "first", first.id)
    assert is_behind(log, "first", (NOW_MS - 5, 0))
    assert is_behind(log, "first", (second.id[0], second.id[1] + 1))
    assert is_behind(log, "first", last.id, must=[(second.id[0], second.id[1] + 1)])


def test_a_log_that_was_trimmed_to_its_end_goes_on(log: Log) -> None:
    (last,) = added(log, charge())
    assert log.trim(P, NOW_MS + 1) == 1
    assert (log.begin(P).epoch, log.begin(P).tip) == ("first", START)
    assert is_behind(log, "first", (last.id[0], last.id[1] + 1))
    reply = ask(log, charge(), epoch="first", seen=last.id, seq=0)
    assert (reply.word, reply.id) == ("APPENDED", (NOW_MS, last.id[1] + 1))


def test_an_empty_log_gives_no_id_twice_under_an_earlier_clock(log: Log, clock: Clock) -> None:
    (last,) = added(log, charge())
    log.trim(P, NOW_MS + 1)
    clock.now_ms -= 5_000
    assert ask(log, charge(), epoch="first", seq=3).id == (NOW_MS, last.id[1] + 4)


def test_nobody_appends_after_a_fence_has_ended(log: Log, clock: Clock) -> None:
    """Nor before, nor behind a seal. Its owner may have put half a log together. The next one fences anew."""
    seen = add(log, charge())
    epoch = fence(log)
    for passed_ms in (0, LEASE_MS):
        clock.now_ms += passed_ms
        assert fence_is_over(epoch, clock.now_ms) == bool(passed_ms)
        for author in ("first", "", epoch):
            assert is_behind(log, author, seen if author else START)
    assert log.seal(P, epoch, "redis://elsewhere/0")
    for author in ("first", "", "!redis://elsewhere/0"):
        assert is_behind(log, author, seen if author else START)


@pytest.mark.parametrize("part", ["log", "state"])
def test_a_log_that_lost_a_part_is_behind_for_everybody(log: Log, place: Place, part: str) -> None:
    """Entries without an epoch, or an epoch without entries: what was read last may be gone, or not. It stands behind a
    fence that is over, so whoever asks next fences it, and puts it together."""
    entries = added(log, charge(), charge())
    place.lose(part)
    for author in ("first", ""):
        assert is_behind(log, author)
    assert is_behind(log, "first", entries[-1].id)
    assert not log.change(P, {}, {"facts": "x"}, marker()).done
    assert log.trim(P, NOW_MS + 1) == 0
    assert not log.keep_views(P, "first", {"v": "first 1 0-0 0-0 -"})
    beginning = log.begin(P)
    assert is_fence(beginning.epoch)
    assert fence_is_over(beginning.epoch, beginning.clock_ms)
    epoch = fence(log)
    assert log.replace(P, epoch, log.begin(P).tip, entries, "second")
    assert entries_of(log) == entries
    assert not is_behind(log, "second", entries[-1].id)
