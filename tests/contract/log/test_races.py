"""Processes at one log: what was decided by the same reading happens once."""

from __future__ import annotations

from contract.log.logs import P, Place, charge, entries_of
from quota.ledger.log import Append, Log
from quota.rules.entry import START
from support.processes import Children

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


def test_the_cap_admits_exactly_its_number_of_eight_processes(place: Place) -> None:
    made = Children(lambda: charge_all(place.open()), *[()] * 8).answers()
    log = place.open()
    ids = [entry.id for entry in entries_of(log)]
    assert sum(made) == len(ids) == CAP
    assert len({entry.key for entry in entries_of(log)}) == CAP
    assert ids == sorted(set(ids))
