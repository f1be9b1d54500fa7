"""What a call used is found in its answer while the caller reads it, however the pieces fall."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from typing import Any

import pytest

from quota.clients.answer_fields import NO_USAGE, TOO_LONG, Usage
from quota.clients.upstream_errors import MAX_BODY_BYTES
from quota.terms.api import Field, Figure, Used

TOTAL = Used((Figure((Field(pointer=("usage", "total_tokens")),)),))


def usage(used: Used = TOTAL, *, events: bool = True) -> Usage:
    chunked = {"content-type": "text/event-stream", "transfer-encoding": "chunked"}
    return Usage(used, chunked if events else {})


def units_said(*pieces: bytes, used: Used = TOTAL, events: bool = True, end: bool = True) -> int | None:
    reader = usage(used, events=events)
    units = [reader.feed(piece) for piece in pieces]
    if end:
        units.append(reader.end())
    return next((number for number in units if number is not None), None)


def event(units: object) -> bytes:
    return b"data: " + json.dumps({"usage": {"total_tokens": units}}).encode() + b"\n\n"


def test_the_last_event_with_a_figure_counts() -> None:
    quiet = b'event: delta\ndata: {"choices": [], "usage": null}\n\n'
    assert units_said(event(3), quiet, event(7), quiet, b": a comment\n\n") == 7
    assert units_said(quiet) is None
    assert units_said(b"\xef\xbb", b"\xbf" + event(3)) == 3, "a stream may begin with a mark of its bytes' order"
    assert units_said(event(3), b"data: no json\n\n", b"data\n\n", b"\n\n\n") == 3
    assert units_said(b'data: {"usage":\ndata:  {"total_tokens": 5}}\n\n') == 5, "one event of two lines"
    assert units_said(event(3)[:-2]) == 3, "the last event has no end"
    assert units_said(event(3), event(7)[:-9]) is None, "the last event is cut"
    for error in (b'event: error\ndata: {"type": "error"}', b'data: {"error": {"code": 503}}'):
        for end in (b"", b"data: [DONE]\n\n"):
            assert units_said(event(3), error + b"\n\n" + end) is None, "more may have been used"


def test_a_caller_that_stops_early_settles_only_after_the_final_event() -> None:
    assert units_said(event(3), event(7), end=False) is None
    assert units_said(event(7), b"data: [DONE]\n", end=False) == 7
    assert units_said(event(7), b"data: [DONE]\r\n\r\n", end=False) == 7
    assert units_said(event(7), b"data: [DONE]\r\r", end=False) == 7
    assert units_said(event(7), b"data: [DONE]\r", end=False) is None, "an LF may follow"
    assert units_said(event(7), b"data: [DONE]", end=False) is None
    assert units_said(event(7), b"data: [DONE]ish\n\n", end=False) is None
    assert units_said(event(7), b"data: [DONE]\n\n", event(9)) == 7


def test_a_body_that_may_be_cut_settles_nothing() -> None:
    """A document shows its own end."""
    document = event(5)[6:].strip() + b"\n"
    for fields, body, units in (
        ({"transfer-encoding": "chunked"}, event(5), 5),
        *((fields, event(5), None) for fields in ({"connection": "Close"}, {"transfer-encoding": "identity"})),
        ({}, event(5) + b"data: [DONE]\n\n", 5),
        ({"content-type": "application/json; charset=utf-8"}, document, 5),
        ({"content-type": "application/jsonl"}, document, None),
        ({"content-type": "application/json", "content-range": "bytes 0-9/99"}, document, None),
        *(({"content-length": text}, event(5), None) for text in ("x", "99, 99")),
        ({"content-type": "application/json", "content-length": "9, 99", "content-encoding": "br"}, document, None),
    ):
        reader = Usage(TOTAL, {"content-type": "text/event-stream", **fields})
        assert (reader.feed(body) or reader.end()) == units, fields
    reader = Usage(TOTAL, {"content-length": "38 , 38", "content-type": "text/event-stream"})
    assert (reader.feed(event(5)), reader.end()) == (5, None), "a reader of all that was announced may read no more"
    reader = Usage(TOTAL, {"content-type": "text/event-stream"}, framed=True)
    assert (reader.feed(event(5)), reader.end()) == (None, 5), "HTTP/2 marks its end"


@pytest.mark.parametrize("ends", [b"\n", b"\r\n", b"\r"])
def test_an_answer_may_be_cut_into_any_pieces(ends: bytes) -> None:
    dice = random.Random(3)
    text = b"".join(event(n) for n in (3, None, 8)) + b'data: {"usage":\ndata: {"total_tokens": 9}}\n\ndata: [DONE]\n\n'
    text = text.replace(b"\n", ends)
    for size in (1, 2, 3, 5, 1_000):
        assert units_said(*(text[at : at + size] for at in range(0, len(text), size))) == 9
    for _ in range(300):
        cuts = sorted(dice.sample(range(len(text)), 4))
        assert units_said(*(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))) == 9


@pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_a_body_that_no_client_unpacks_is_read_up_to_the_same_limits(coding: str, pack: Any) -> None:
    def units_of(whole: bytes) -> int | None:
        reader = Usage(TOTAL, {"content-encoding": coding})
        for at in range(0, len(whole), 7):
            assert reader.feed(whole[at : at + 7]) is None
            assert len(reader._kept) <= MAX_BODY_BYTES + MAX_BODY_BYTES
        return reader.end()

    document = event(12)[6:]
    packed = pack(document)
    assert [units_of(whole) for whole in (document, packed, pack(document[:9]) + pack(document[9:]))] == [12] * 3
    cut, torn, bomb = packed[:-4], packed[:20] + b"!!!" + packed[23:], pack(b" " * 100_000_000 + document)
    assert [units_of(whole) for whole in (cut, torn, bomb)] == [None] * 3


ODD = [(units, None) for units in (-1, "-1", "7 of 9", "1,234", True, None, [], 10**400, float("nan"))]


@pytest.mark.parametrize(("units", "settled"), [("7", 7), (7.0, 7), (6.5, 7), ("6.5", 7), (10**16, None), *ODD])
def test_a_figure_may_be_text_or_a_fraction(units: object, settled: int | None) -> None:
    """Google writes numbers of 64 bits as text. What is no number settles nothing."""
    assert units_said(event(units)) == units_said(event(units)[6:], events=False) == settled
    assert units_said(event(5), event(units)) == (5 if units is None else settled)
    twice = b'{"usage": {"total_tokens": 900, "total_tokens": %b}}' % json.dumps(units).encode()
    assert units_said(twice, events=False) is None, "a name that is there twice says nothing, unless with one value"
    assert units_said(b'{"usage": {"total_tokens": 9, "total_tokens": 9}}', events=False) == 9


def test_an_event_that_is_too_long_says_nothing_and_the_next_one_does() -> None:
    assert units_said(event(3), b'data: {"usage": {"total_tokens": 4}, "x": "' + b"x" * 250_000 + b'"}\n\n') == 4
    long = b'data: {"usage": {"total_tokens": 4}, "x": "' + b"x" * MAX_BODY_BYTES + b'"}\n\n'
    assert units_said(event(3), long, event(None)) is None, "it may say more"
    assert units_said(event(3), long, event(7)) == 7
    reader = usage()
    for _ in range(300):
        reader.feed(b"x" * 65_000)
        assert len(reader._kept) < 2 * MAX_BODY_BYTES, "no more than that is kept"
    for _ in range(300):
        reader.feed(b"\ndata: " + b"x" * 1_000)
    assert sum(map(len, reader._data)) <= MAX_BODY_BYTES
    assert reader.feed(b"\n\n" + event(6)) is None
    assert reader.end() == 6


def test_no_stream_raises_and_what_it_says_is_a_number_of_units() -> None:
    dice = random.Random(5)
    whole = b"".join(event(n) for n in (3, None, 8)) + b'event: x\ndata: {"usage": {"total_tokens": 4}}\n\n'
    for _ in range(700):
        text = bytearray(whole * dice.randint(1, 3))
        for _ in range(dice.randint(1, 9)):
            text[dice.randrange(len(text))] = dice.choice((10, 13, 58, 123, 45, dice.randrange(256)))
        cuts = sorted(dice.randrange(len(text)) for _ in range(3))
        pieces = [bytes(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        units = units_said(*pieces, events=dice.random() < 0.8)
        assert units is None or (type(units) is int and units >= 0)


def test_a_short_document_gives_its_usage_at_the_end() -> None:
    whole = event(12)[6:]
    assert units_said(whole[:5], whole[5:], events=False) == 12
    assert units_said(whole, events=False, end=False) is None
    assert units_said(whole[:-9], events=False) is None
    assert units_said(b"", events=False) is None
    reader = usage(events=False)
    for _ in range(16):
        reader.feed(b" " * 1_000_000)
        assert len(reader._kept) <= MAX_BODY_BYTES + 1_000_000
    assert (reader.feed(whole), reader.end()) == (None, None)


@pytest.mark.parametrize(("body", "why"), [(b"{}", NO_USAGE), (b" " * (MAX_BODY_BYTES + 1), TOO_LONG)])
def test_a_whole_answer_without_its_usage_says_why(body: bytes, why: str) -> None:
    reasons: list[str] = []
    reader = Usage(TOTAL, {}, missing=reasons.append)
    assert (reader.feed(body), reader.end(), reasons) == (None, None, [why])


# -- a sum of several figures ------------------------------------------------------------------------------------------


def figure(name: str, default: int | None = None) -> Figure:
    """A number that a whole answer has under `usage`, and the first event of a stream under `message`."""
    return Figure((Field(pointer=("usage", name)), Field(pointer=("message", "usage", name))), default)


SUM = Used((figure("input"), figure("cached", 0), figure("output")))


def begun(**usage: object) -> bytes:
    return b"data: " + json.dumps({"type": "message_start", "message": {"usage": usage}}).encode() + b"\n\n"


def went_on(**usage: object) -> bytes:
    return b"data: " + json.dumps({"type": "message_delta", "usage": usage}).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("events", "units"),
    [
        # The first event has what was sent, and the last one what came back.
        ((begun(input=25, cached=4, output=1), went_on(output=15)), 44),
        ((begun(input=25, output=1), went_on(output=7), went_on(output=15)), 40),
        # Where the last event repeats what was sent, it counts once.
        ((begun(input=25, cached=4, output=1), went_on(input=25, cached=4, output=15)), 44),
        ((begun(input=25, cached=None, output=1),), 26),
        # A figure that is missing, or no number, also one with a default: the bound stands.
        ((begun(input=25), begun(cached=3)), None),
        ((begun(input="many", output=1),), None),
        *[((begun(input=25, cached=4, output=1), went_on(cached=odd)), None) for odd in ("4 k", -5, [4])],
        ((begun(cached=4),), None),
        ((begun(),), None),
    ],
)
def test_the_last_event_with_each_figure_counts(events: tuple[bytes, ...], units: int | None) -> None:
    assert units_said(*events, used=SUM) == units


def test_the_figures_of_a_document_add_up() -> None:
    assert units_said(went_on(input=1, cached=2, output=3)[6:], used=SUM, events=False) == 6
    assert units_said(went_on(input=1, output=3)[6:], used=SUM, events=False) == 4
    assert units_said(went_on(cached=2, output=3)[6:], used=SUM, events=False) is None
    assert units_said(b"no json", used=SUM, events=False) is None
    optional = Used((figure("cached", 5),))
    assert units_said(went_on(output=3)[6:], used=optional, events=False) is None, "nothing was said at all"
