"""What the seam of gRPC reads from a channel's target and options. Its calls are in `make examples`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quota.clients.instrument.grpc import _answer, _place, _without_retries

METERED: Any = SimpleNamespace(knows=lambda host, port: port == 8765)


@pytest.mark.parametrize(
    ("target", "place"),
    [
        ("dns:///api.example.com:443", ("api.example.com", 443)),
        ("api.example.com", ("api.example.com", 443)),
        (b"ipv6:[::1]:8765", ("::1", 8765)),
        ("ipv4:127.0.0.1:1,127.0.0.1:8765", ("127.0.0.1", 8765)),
        ("ipv4:127.0.0.1:1,127.0.0.1:2", ("127.0.0.1", 1)),
    ],
)
def test_a_target_of_several_addresses_is_metered_if_one_of_them_is(
    target: str | bytes, place: tuple[str, int]
) -> None:
    assert _place(METERED, target) == place


def test_a_channel_makes_no_retries_whatever_its_program_wants() -> None:
    """Of two values for one option the first would count."""
    options = _without_retries([("grpc.enable_retries", 1), ("grpc.max_send_message_length", 9)])
    assert options == (("grpc.max_send_message_length", 9), ("grpc.enable_retries", 0))


def test_a_code_is_read_in_programs_without_other_packages_of_google() -> None:
    answers = [_answer(SimpleNamespace(name=name), "", None) for name in ("OK", "RESOURCE_EXHAUSTED", "UNAVAILABLE")]
    assert [answer and answer[0] for answer in answers] == [200, 429, None]
