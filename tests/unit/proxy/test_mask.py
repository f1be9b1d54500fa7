"""A secret that an answer says back passes as stars, however the answer is cut into pieces."""

from __future__ import annotations

import pytest

from quota.proxy.mask import Mask

SECRET = "abcab/cabd"  # noqa: S105


def masked(pieces: list[bytes]) -> bytes:
    mask = Mask(SECRET)
    return b"".join([mask.feed(piece) for piece in pieces] + [mask.end()])


@pytest.mark.parametrize(
    ("said", "passes"),
    [
        (b"xx" + SECRET.encode() + b"yy" + SECRET.encode(), b"xx**********yy**********"),
        (b"abcabcab/cabd", b"abc**********"),
        (b"abcab/cab abcab%2Fcabd abcab\\/cabd", b"abcab/cab ************ ***********"),
        (b"abcab/cab", b"abcab/cab"),
    ],
)
def test_wherever_it_is_cut(said: bytes, passes: bytes) -> None:
    for at in range(len(said) + 1):
        assert masked([said[:at], said[at:]]) == passes
    assert masked([said[n : n + 1] for n in range(len(said))]) == passes


def test_what_can_be_no_beginning_of_it_is_not_kept_back() -> None:
    mask = Mask(SECRET)
    assert mask.feed(b"data: 1\n\n") == b"data: 1\n\n"
    assert mask.feed(b"abca") == b""
    assert mask.feed(b"x") == b"abcax"
    assert Mask(None).feed(b"abca") == b"abca"
    assert Mask("short").feed(b"short") == b"short"
