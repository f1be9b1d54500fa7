"""Threads, processes, forks and signal handlers at one log: what was decided by the same reading happens once."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator

import pytest

from contract.log.logs import P, Place, add, added, ask, charge, correction, entries_of, marker
from quota.ledger.log import Append, Log
from quota.rules.entry import END, START, Entry, Id
from support.interrupts import Interrupted, at_every_place, interrupt
from support.processes import Children, in_child, in_threads

CAP = 40
"""How many units may be charged in these tests."""


def charge_all(log: Log) -> int:
    """Charge a unit at a time with no room for anybody else, until the cap is reached; how many of them."""
    epoch, seen, used, made = "", START, 0, 0
    while True:
        entry = charge()
        entries = [entry] if used < CAP else []
        reply = log.append(P, Append(epoch, seen, entries, room=0, new_epoch="first"))
        assert reply.word in ("APPENDED", "AGAIN", "READ")
        epoch, used = reply.epoch, used + len(reply.unseen)
        seen = reply.unseen[-1].id if reply.unseen else seen
        if reply.word == "APPENDED" and reply.id is not None:
            used, made, seen = used + 1, made + 1, reply.id
        elif reply.word == "READ" and reply.whole:
            assert used == CAP
            return made


def ids_are_in_order(log: Log) -> bool:
    ids = [entry.id for entry in log.read(P, START, END, 5_000)]
    return ids == sorted(set(ids))


def test_the_cap_admits_exactly_its_number_of_eight_processes(place: Place, stored: Place) -> None:
    made = Children(lambda: charge_all(place.open()), *[()] * 8).answers()
    log = place.open()
    assert sum(made) == len(entries_of(log)) == CAP
    assert len({entry.key for entry in entries_of(log)}) == CAP
    assert ids_are_in_order(log)


def test_the_cap_admits_exactly_its_number_of_eight_threads(place: Place) -> None:
    log = place.open()
    made = in_threads(charge_all, *[(log,)] * 8)
    assert sum(made) == len(entries_of(log)) == CAP
    assert ids_are_in_order(log)


def test_one_of_eight_first_processes_gives_the_log_its_epoch(place: Place, stored: Place) -> None:
    def begin(n: int) -> str:
        return place.open().append(P, Append("", START, [charge()], room=9, new_epoch=f"e{n}")).word

    words = Children(begin, *[(n,) for n in range(8)]).answers()
    log = place.open()
    assert words.count("APPENDED") == len(entries_of(log)) >= 1
    assert set(words) <= {"APPENDED", "AGAIN"}
    assert log.begin(P).epoch in {f"e{n}" for n in range(8)}


def test_each_of_eight_corrections_has_read_the_last_correction(place: Place, stored: Place) -> None:
    log = place.open()
    (corrected,) = added(log, charge(100))

    def correct(units: int) -> int:
        log, tries = place.open(), 0
        while True:
            tries += 1
            tip = log.begin(P).tip
            standing = log.corrections(P, [corrected.key]).get(corrected.key)
            entry = correction(corrected, units, before_units=standing.units if standing else 100)
            if ask(log, entry, seen=tip, room=2**53).word == "APPENDED":
                return tries

    Children(correct, *[(n,) for n in range(8)]).answers()
    counted = 100
    for entry in entries_of(log)[1:]:
        assert entry.before_units == counted
        counted = entry.units
    assert log.corrections(P, [corrected.key])[corrected.key].units == counted


def test_a_forked_child_goes_on_with_the_log_of_its_parent(place: Place, stored: Place) -> None:
    log = place.open()
    add(log, charge())
    assert in_child(lambda: add(log, charge())) == entries_of(log)[1].id
    add(log, charge())
    assert len(entries_of(log)) == 3


@pytest.mark.parametrize("place", ["memory"], indirect=True)
def test_a_forked_child_has_a_copy_of_a_log_in_memory(place: Place) -> None:
    log = place.open()
    add(log, charge())

    def work() -> int:
        add(log, charge())
        return len(entries_of(log))

    assert in_child(work) == 2
    assert len(entries_of(log)) == 1


def test_a_handler_may_use_the_log_that_it_interrupts(place: Place) -> None:
    """An append is either before the handler's own, or after it, and has room for it then. The log grows at its end."""
    log, made, shown, words = place.open(), list[str](), list[Entry](), list[str]()

    def handler() -> None:
        entry = charge()
        add(log, entry)
        made.append(entry.key)
        shown[:] = entries_of(log)

    def work() -> None:
        tip = log.begin(P).tip
        entry = charge()
        reply = ask(log, entry, epoch="first", seen=tip, room=0, seq=0)
        words.append(reply.word)
        if reply.word == "APPENDED":
            made.append(entry.key)
            assert log.read(P, tip, END, 1)[0].key == entry.key
        else:
            assert (reply.word, len(reply.unseen)) == ("AGAIN", 1)

    add(log, charge())
    for error in at_every_place(handler, work, step=3):
        assert error is None
        assert entries_of(log)[: len(shown)] == shown
    assert {"AGAIN", "APPENDED"} == set(words)
    assert sorted(entry.key for entry in entries_of(log)[1:]) == sorted(made)
    assert ids_are_in_order(log)


def test_a_handler_that_raises_leaves_a_log_that_goes_on(place: Place) -> None:
    log, made = place.open(), list[str]()

    def work() -> None:
        entry = charge()
        add(log, entry)
        made.append(entry.key)
        log.change(P, {}, {"facts": entry.key}, marker())
        log.read(P, START, END, 10)

    add(log, charge())
    for error in at_every_place(interrupt, work, step=7):
        assert error is None or isinstance(error, Interrupted)
        del error
        gc.collect(0)
    assert add(log, charge())
    charges = [entry.key for entry in entries_of(log) if entry.kind == "charge"]
    assert set(made) <= set(charges)
    assert len(charges) == len(set(charges))
    assert ids_are_in_order(log)


def test_a_log_works_inside_exclusive_as_outside(log: Log) -> None:
    with log.exclusive(P):
        beginning = log.begin(P)
        first = ask(log, charge(), epoch=beginning.epoch, seen=beginning.tip).id
        assert [entry.id for entry in log.read(P, START, END, 10)] == [first]
        assert ask(log, charge(), epoch="first", seen=first).word == "APPENDED"
    assert len(entries_of(log)) == 2
    assert ask(log, charge(), seen=entries_of(log)[1].id).word == "APPENDED"


def test_nobody_else_appends_inside_exclusive(place: Place, stored: Place) -> None:
    log = place.open()
    seen = add(log, charge())
    go_on, tell = os.pipe()

    def append() -> Iterator[Id]:
        yield START
        os.read(go_on, 1)
        yield add(place.open(), charge())

    with Children(append, ()) as children:
        children.first_answers()
        with log.exclusive(P) as is_exclusive:
            assert list(ask(log, epoch="first", seen=seen).unseen) == []
            os.write(tell, b".")
            time.sleep(0.1)
            reply = ask(log, charge(), epoch="first", seen=seen, room=0 if is_exclusive else 9)
            assert reply.word == "APPENDED"
        children.processes[0].join()
    assert len(entries_of(log)) == 3
    for end in (go_on, tell):
        os.close(end)


def test_other_threads_wait_for_exclusive(place: Place) -> None:
    log = place.open()
    seen = add(log, charge())
    with log.exclusive(P) as is_exclusive:
        ask(log, epoch="first", seen=seen)
        thread = threading.Thread(target=add, args=(log, charge()))
        thread.start()
        time.sleep(0.05)
        assert ask(log, charge(), epoch="first", seen=seen, room=0 if is_exclusive else 9).word == "APPENDED"
    thread.join()
    assert len(entries_of(log)) == 3


def test_exclusive_that_appends_nothing_changes_nothing(log: Log, place: Place) -> None:
    add(log, charge())
    with log.exclusive(P):
        ask(log)
    with pytest.raises(ValueError, match="of the caller"), log.exclusive(P):
        raise ValueError("of the caller" if ask(log).unseen else "")
    assert len(entries_of(log)) == 1
    add(place.open(), charge())
