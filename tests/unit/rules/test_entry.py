"""The line that stores an entry, and the text of an id."""

from __future__ import annotations

import random
import string

import pytest

from quota.rules.entry import END, START, Entry, Kind, id_text, just_before, packed, read_id, unpacked

ID = (1_795_233_255_077, 4)


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        (
            Entry(ID, 100, "search", "search.list", "backfill", "DE", "KEY"),
            "100\tKEY\tsearch\tsearch.list\tbackfill\tDE",
        ),
        (
            Entry(ID, 40, "search", "search.list", "", "", "KEY", "correction", "OF", (7, 2), 100),
            "c40\tKEY\tsearch\tsearch.list\t\t\tOF\t7-2\t100",
        ),
        (
            Entry(ID, 900, "units", "", "", "", "KEY", "others", "NAME", (7, 9)),
            "o900\tKEY\tunits\t\t\t\tNAME\t7-9\t0",
        ),
        (Entry(ID, 0, "", "", "", "", "KEY", "marker"), "m0\tKEY\t\t\t\t"),
    ],
)
def test_an_entry_is_one_line_of_fields_between_tabs(entry: Entry, line: str) -> None:
    assert packed(entry) == line
    assert unpacked(ID, line) == entry


@pytest.mark.parametrize("seed", range(5))
def test_any_entry_reads_back_as_it_was(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        entry = _any_entry(rng)
        assert unpacked(entry.id, packed(entry)) == entry


def _any_entry(rng: random.Random) -> Entry:
    kinds: tuple[Kind, ...] = ("charge", "correction", "others", "marker")
    kind = rng.choice(kinds)
    fields = ["".join(rng.choices(string.printable[:95] + "äß漢😀", k=rng.randint(0, 12))) for _ in range(6)]
    bucket, method, job, region, key, of = fields
    entry = Entry(
        (rng.randint(1, END[0]), rng.randint(0, END[1])), rng.randint(0, 10**15 - 1), bucket, method, job, region, key
    )
    if kind in ("charge", "marker"):
        return entry._replace(kind=kind)
    return entry._replace(
        kind=kind, of=of, at=(rng.randint(0, END[0]), rng.randint(0, END[1])), before_units=rng.randint(0, 10**9)
    )


@pytest.mark.parametrize(
    "line",
    [
        "",
        "100",
        "100\tKEY\tsearch\tsearch.list\tbackfill",
        "100\tKEY\tsearch\tsearch.list\tbackfill\tDE\tmore",
        "1x\tKEY\tsearch\tsearch.list\tbackfill\tDE",
        "1000000000000000\tKEY\tsearch\tsearch.list\tbackfill\tDE",  # beyond 2^53 another program reads another number
        "-1\tKEY\tsearch\tsearch.list\tbackfill\tDE",
        "x40\tKEY\tsearch\tsearch.list\t\t\tOF\t7-2\t100",
        "c40\tKEY\tsearch\tsearch.list\t\t\tOF\t7-2",
        "c40\tKEY\tsearch\tsearch.list\t\t\tOF\t7\t100",
        "cx\tKEY\tsearch\tsearch.list\t\t\tOF\t7-2\t100",
        "c40\tKEY\tsearch\tsearch.list\t\t\tOF\t7-2\tx",
        "c-40\tKEY\tsearch\tsearch.list\t\t\tOF\t7-2\t100",
        "c40\tKEY\tsearch\tsearch.list\t\t\tOF\t7-2\t-100",
        "o-900\tKEY\tunits\t\t\t\tNAME\t7-9\t0",
    ],
)
def test_a_line_that_is_none_is_an_entry_that_nobody_can_read_and_counts_nothing(line: str) -> None:
    assert unpacked(ID, line) == Entry(ID, 0, "", "", "", "", "", "unreadable")


@pytest.mark.parametrize("seed", range(3))
def test_no_damage_makes_reading_fail(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(500):
        line = list(packed(_any_entry(rng)))
        for _ in range(rng.randint(1, 4)):
            line[rng.randrange(len(line))] = rng.choice(["", "\t", "-", "c", "9", "\0", "²"])
        entry = unpacked(ID, "".join(line))
        assert entry.id == ID
        assert entry.units >= 0


def test_an_id_reads_back_from_its_text() -> None:
    for entry_id in (START, ID, END):
        assert read_id(id_text(entry_id)) == entry_id
    assert id_text(ID) == "1795233255077-4"


@pytest.mark.parametrize("text", ["", "7", "7-", "-7", "7-x", "7-1-2"])
def test_a_text_that_is_no_id_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        read_id(text)


def test_just_before_a_millisecond_is_behind_all_of_the_one_before_it() -> None:
    assert (6, 2**53) == just_before(7) < (7, 0)
    assert just_before(0) == START
