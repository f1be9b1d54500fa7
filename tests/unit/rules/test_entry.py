"""The line that stores an entry, the text of an id, and the ends of keys: reservations and further charges are told by
them."""

from __future__ import annotations

import pytest

from quota.rules.entry import (
    END,
    FURTHER,
    RESERVED,
    START,
    Entry,
    id_text,
    is_first,
    is_reservation,
    packed,
    read_id,
    unpacked,
)

ID = (1_795_233_255_077, 4)


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        (Entry(ID, 100, "search", "search.list", "daily", "DE", "KEY"), "100\tKEY\tsearch\tsearch.list\tdaily\tDE"),
        (
            Entry(ID, 40, "search", "search.list", "", "", "KEY", "correction", "OF", (7, 2), 100),
            "c40\tKEY\tsearch\tsearch.list\t\t\tOF\t7-2\t100",
        ),
        (Entry(ID, 900, "units", "", "", "", "KEY", "others", "NAME", (7, 9)), "o900\tKEY\tunits\t\t\t\tNAME\t7-9\t0"),
        (Entry(ID, 0, "", "", "", "", "KEY", "marker"), "m0\tKEY\t\t\t\t"),
    ],
)
def test_an_entry_is_one_line_of_fields_between_tabs(entry: Entry, line: str) -> None:
    assert packed(entry) == line
    assert unpacked(ID, line) == entry


@pytest.mark.parametrize(
    "line",
    [
        "",
        "100\tKEY\tsearch\tsearch.list\tbackfill",
        "²1\tKEY\tsearch\tsearch.list\tbackfill\tDE",
        "1x\tKEY\tsearch\tsearch.list\tbackfill\tDE",
        "1000000000000000\tKEY\tsearch\tsearch.list\tbackfill\tDE",  # beyond 2^53 another program reads another number
        "-1\tKEY\tsearch\tsearch.list\tbackfill\tDE",
        "c40\tKEY\tsearch\tsearch.list\t\t\tOF\t7-2",
        "c40\tKEY\tsearch\tsearch.list\t\t\tOF\t7\t100",
        "c-40\tKEY\tsearch\tsearch.list\t\t\tOF\t7-2\t100",
        "c40\tKEY\tsearch\tsearch.list\t\t\tOF\t7-2\t-100",
    ],
)
def test_an_unreadable_line_counts_nothing(line: str) -> None:
    assert unpacked(ID, line) == Entry(ID, 0, "", "", "", "", "", "unreadable")


def test_an_id_reads_back_from_its_text() -> None:
    for entry_id in (START, ID, END):
        assert read_id(id_text(entry_id)) == entry_id
    assert id_text(ID) == "1795233255077-4"


@pytest.mark.parametrize(
    ("end", "reservation", "first"),
    [
        ("", False, True),
        (RESERVED, True, True),
        (f"{FURTHER}1", False, False),
        (f"{RESERVED}{FURTHER}9", False, False),
        (f"{FURTHER}0", False, True),
        (FURTHER, False, True),
        ("9", False, True),
    ],
)
def test_the_end_of_a_key_marks_reservations_and_first_charges(end: str, reservation: bool, first: bool) -> None:
    key = f"0123456789abAAAAAAAAAAA{end}"
    assert (is_reservation(key), is_first(key)) == (reservation, first)
