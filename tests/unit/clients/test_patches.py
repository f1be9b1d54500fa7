"""Patches of methods, in modules that are there and that come."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quota.clients.instrument.patches import Patches, Seam


def louder(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: original(*args, **kwargs).upper()


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A library that nobody has imported yet."""
    (tmp_path / "a_library.py").write_text("class Client:\n    def say(self, what):\n        return what\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "a_library"
    sys.modules.pop("a_library", None)


@pytest.fixture
def patches(made: str) -> Iterator[Patches]:
    patches = Patches([Seam(made, "Client", "say", ("what",), louder)])
    yield patches
    patches.take_off()


def test_a_library_is_patched_when_it_comes(made: str, patches: Patches) -> None:
    patches.put_on()
    assert made not in sys.modules
    library = importlib.import_module(made)
    assert library.Client().say("a") == "A"
    assert type(library.__loader__).__module__ == "_frozen_importlib_external"
    assert library.__spec__.loader is library.__loader__
    patches.take_off()
    assert library.Client().say("a") == "a"
    assert "__wrapped__" not in vars(library.Client.say)


def test_a_library_that_is_there_is_patched_at_once(made: str, patches: Patches) -> None:
    library = importlib.import_module(made)
    original = library.Client.say
    patches.put_on()
    assert library.Client().say("a") == "A"
    patches.take_off()
    assert library.Client.say is original


@pytest.mark.parametrize("seam", [("Other", "say", ()), ("Client", "other", ()), ("Client", "say", ("whom",))])
def test_of_a_library_without_the_seam_nothing_is_patched_and_one_line_says_so(
    made: str, seam: tuple[str, str, tuple[str, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    patches = Patches([Seam(made, "Client", "say", (), louder), Seam(made, *seam, louder)])
    patches.put_on()
    try:
        with caplog.at_level(logging.WARNING, "quota"):
            library = importlib.import_module(made)
    finally:
        patches.take_off()
    assert library.Client().say("a") == "a"
    assert caplog.messages == ["not_instrumented library=a_library: its requests are not charged"]
