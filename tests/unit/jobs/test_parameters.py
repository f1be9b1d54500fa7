"""The parameters of a plain fetch function are read without `inspect`, and as `inspect` reads them."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest

from quota.errors import ConfigError
from quota.jobs.job import _check_signature, wants_store


def three(client: Any, region: str, cursor: Any) -> None: ...
def with_store(client: Any, region: str, cursor: Any, store: Any) -> None: ...
def with_option(client: Any, region: str, cursor: Any, store: Any = None, *, words: str) -> None: ...
def with_default(client: Any, region: str, cursor: Any, more: int, words: str = "cats", *, pages: int = 1) -> None: ...
def two(client: Any, region: str) -> None: ...
def only_by_name(client: Any, region: str, *, cursor: Any) -> None: ...
def starred(*args: Any, **options: Any) -> None: ...
def by_position(client: Any, region: str, cursor: Any, words: str, /) -> None: ...


@functools.wraps(with_option)
def wrapped(client: Any, region: str, cursor: Any) -> None: ...


class Fetch:
    def __call__(self, client: Any, region: str, cursor: Any, words: str) -> None: ...


FUNCTIONS = [
    *(three, with_store, with_option, with_default, two, only_by_name, starred, by_position, wrapped),
    *(functools.partial(with_option, words="dogs"), Fetch(), Fetch().__call__, lambda a, b, c: None),
]
OPTIONS: list[dict[str, Any]] = [{}, {"words": "cats"}, {"more": 1}, {"more": 1, "pages": 2}, {"cursor": 1}, {"odd": 1}]


@pytest.mark.parametrize("fetch", FUNCTIONS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_function_is_taken_if_it_can_be_called(fetch: Any, options: dict[str, Any]) -> None:
    signature = inspect.signature(fetch)
    assert wants_store(fetch) == ("store" in signature.parameters)
    given = options | ({"store": None} if wants_store(fetch) else {})
    try:
        signature.bind(None, "US", None, **given)
        fits = True
    except TypeError:
        fits = False
    if fits:
        _check_signature(fetch, "a:b", options)
    else:
        with pytest.raises(ConfigError):
            _check_signature(fetch, "a:b", options)
