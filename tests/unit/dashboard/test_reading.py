"""What was read stays while it cannot be read again, and nobody waits for a reading that takes long."""

from __future__ import annotations

import itertools
import threading

import pytest

from quota.dashboard import reading as module
from quota.dashboard.reading import Kept
from quota.errors import LedgerError
from support.processes import in_threads


class Source:
    """What is read; each reading waits for its turn where `gate` is closed."""

    def __init__(self) -> None:
        self.reads = 0
        self.error: BaseException | None = None
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self) -> int:
        self.gate.wait(100)
        self.reads += 1
        if self.error is not None:
            raise self.error
        return self.reads


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value is due again as soon as it was read."""
    for pause in ("FRESH_S", "TIMES", "RETRY_S"):
        monkeypatch.setattr(module, pause, 0)


def test_a_value_is_read_once_for_all_who_ask_at_the_same_time() -> None:
    source = Source()
    kept = Kept(source)
    in_threads(kept.get, *[(30,)] * 8)
    assert (source.reads, kept.last.value) == (1, 1)


@pytest.mark.usefixtures("at_once")
def test_the_last_value_stays_with_what_is_wrong_and_since_when(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source()
    monkeypatch.setattr(module, "host_clock", itertools.count(5).__next__)
    kept = Kept(source)
    assert kept.get(30).read_ms == 5
    source.error = LedgerError("ledger x cannot be reached")
    first, second = kept.get(30), kept.get(30)
    assert (first.value, first.read_ms, first.error) == (1, 5, "ledger x cannot be reached")
    assert (first.failing_ms, second.failing_ms) == (6, 6)
    source.error = RuntimeError("a defect")
    assert kept.get(30).error == "RuntimeError: a defect"
    source.error = None
    mended = kept.get(30)
    assert (mended.value, mended.error, mended.failing_ms) == (source.reads, None, None)


@pytest.mark.usefixtures("at_once")
def test_nobody_waits_for_a_slow_reading_while_there_is_a_value() -> None:
    source = Source()
    kept = Kept(source)
    assert kept.get(30).value == 1
    source.gate.clear()
    assert [kept.get(0).value for _ in range(3)] == [1, 1, 1]
    source.gate.set()
    assert kept.get(30).value == 2


@pytest.mark.usefixtures("at_once")
def test_a_reading_for_which_there_is_no_thread_is_made_later() -> None:
    """The last state must not stay for ever, as if it were new."""
    kept = Kept(Source())
    assert kept.get(30).value == 1
    threading.stack_size(1 << 46)
    try:
        without = kept.get(30)
    finally:
        threading.stack_size(0)
    assert (without.value, without.error) == (1, "can't start new thread")
    assert (kept.get(30).value, kept.last.error) == (2, None)


def test_a_reading_of_ten_seconds_ago_is_not_shown_as_the_present(monkeypatch: pytest.MonkeyPatch) -> None:
    source, now_s = Source(), [100.0]
    monkeypatch.setattr(module, "elapsed_s", lambda: now_s[0])
    monkeypatch.setattr(module, "FIRST_S", 100)
    kept = Kept(source)
    assert kept.get(30).value == 1
    now_s[0] += 10
    source.gate.clear()
    threading.Timer(0.1, source.gate.set).start()
    assert kept.get(0).value == 2


def test_an_exception_that_ends_a_thread_is_an_error() -> None:
    source = Source()
    source.error = SystemExit(3)
    assert Kept(source).get(30).error == "SystemExit: 3"
