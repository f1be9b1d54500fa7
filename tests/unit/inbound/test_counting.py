"""Whom a window met, until the storage is told."""

from __future__ import annotations

import pytest

from quota.errors import StorageAway
from quota.inbound.counting import Met

SEARCH = ("search", 60_000, 7)
LOGIN = ("login", 1_000, 9)


def take_nothing(met: Met) -> None:
    """As a storage that goes away, while further identities come."""
    with met.handed_over():
        met.note(SEARCH, was_before=True)
        met.note(LOGIN, was_before=True)
        raise StorageAway("away")


def test_new_identities_and_those_of_the_window_before_are_counted_apart() -> None:
    met = Met()
    met.note(SEARCH, was_before=False)
    met.note(SEARCH, was_before=True)
    met.note(SEARCH, was_before=True)
    met.note(LOGIN, was_before=False)

    with met.handed_over() as counts:
        assert counts == {SEARCH: [1, 2], LOGIN: [1, 0]}

    assert len(met) == 0


def test_what_the_storage_did_not_take_is_added_to_what_came_meanwhile() -> None:
    met = Met()
    met.note(SEARCH, was_before=False)
    with pytest.raises(StorageAway):
        take_nothing(met)

    with met.handed_over() as counts:
        assert counts == {SEARCH: [1, 1], LOGIN: [0, 1]}
