"""A ledger that only decides: what needs a part that it lacks says so in one line, and all else works."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

import quota
from quota.cli.check import check
from quota.cli.rights import acl_lines
from quota.errors import UnusableLedger, UsageError
from quota.ledger import factory
from quota.ledger.contract import Exhaustion, Ledger
from quota.ledger.factory import open_ledger
from quota.ledger.parts import claims_in, correctable, history_in, notes_in, places_in, repairable
from quota.reports.spending import read_spending
from quota.reports.status import read_status
from quota.terms.limits import DAY_MS
from support.setup import Setup, limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from quota.ledger.contract import ChargeRequest, ChargeResult
    from quota.ledger.entry import Entry, Id


class Bare:
    """The core of a ledger, over another one."""

    label, shared = "bare", False

    def __init__(self, whole: Ledger) -> None:
        self._whole = whole

    def decide(self, request: ChargeRequest, *, commit: bool) -> ChargeResult:
        return self._whole.decide(request, commit=commit)

    def read(
        self, project: str, after: Id, until_ms: int, count: int, within_s: float | None = None
    ) -> Sequence[Entry]:
        return self._whole.read(project, after, until_ms, count, within_s)

    def whole_after_ms(self, project: str) -> int:
        return self._whole.whole_after_ms(project)

    def now_ms(self) -> int:
        return self._whole.now_ms()

    def close(self) -> None:
        self._whole.close()


@pytest.fixture
def setup() -> Iterator[Setup]:
    setup = Setup.open("sqlite://")
    setup.ledger = Bare(setup.ledger)  # type: ignore[assignment]
    with closing(setup.ledger):
        yield setup


def test_it_decides_and_says_when_there_is_room(setup: Setup) -> None:
    budget, begun_ms = setup.budget(limit(100)), setup.now_ms
    assert budget.charge("search.list").admitted
    refused = budget.charge("search.list")
    assert (refused.refused_by, refused.retry_at_ms) == ("day", begun_ms + DAY_MS)
    assert [state.used_units for state in budget.usage()] == [100]


PARTS: dict[str, Callable[[Ledger], Any]] = {
    "takes no corrections": lambda ledger: correctable(ledger).settle("p", "1-0", 0, ()),
    "keeps no notes of what upstream said": lambda ledger: notes_in(ledger).exhaust(
        "p", Exhaustion("units", 1, 2, "said so", "the test")
    ),
    "keeps no claims of runs": lambda ledger: claims_in(ledger),
    "keeps no places of jobs": lambda ledger: places_in(ledger),
    "keeps no history": lambda ledger: history_in(ledger).refusals("p"),
    "cannot be examined or repaired": lambda ledger: repairable(ledger).ahead("p"),
}


@pytest.mark.parametrize("lacks", PARTS)
def test_what_needs_a_part_says_so_in_one_line(setup: Setup, lacks: str) -> None:
    with pytest.raises(UnusableLedger) as raised:
        PARTS[lacks](setup.ledger)
    assert str(raised.value) == f"ledger bare {lacks}; take one in SQLite or Redis for that"


def test_a_charge_that_cannot_be_given_back_stays(setup: Setup) -> None:
    budget = setup.budget(limit(100))
    charge_id = str(budget.charge("search.list").id)
    with pytest.raises(UnusableLedger, match="ledger bare takes no corrections; "):
        budget.refund(charge_id)
    assert not budget.peek("videos.list").admitted


def test_those_that_we_bring_have_every_part(ledger_url: str) -> None:
    with closing(open_ledger(ledger_url)) as ledger:
        for part in (correctable, notes_in, claims_in, places_in, history_in, repairable):
            assert part(ledger) is ledger


@pytest.mark.parametrize("other", [None, "sqlite://", object(), type("Half", (), {"decide": print})()])
def test_what_is_no_ledger_is_refused(setup: Setup, other: Any) -> None:
    setup.ledger = other
    with pytest.raises(UsageError, match=r"is not one; quota\.ledger\.factory\.open_ledger"):
        setup.budget()
    setup.ledger = open_ledger("sqlite://")


# -- a third kind ------------------------------------------------------------------------------------------------------


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A configuration whose ledger is of a kind that has one row, and no part."""
    row = factory.Backend(
        ("bare",), lambda url, clock: Bare(open_ledger("sqlite://")), factory.BACKENDS[0].open_movable
    )
    monkeypatch.setattr(factory, "BACKENDS", (*factory.BACKENDS, row))
    path = tmp_path / "quota.toml"
    path.write_text('[ledger]\nurl = "bare://somewhere"\n[credentials.main]\napi = "youtube-v3"\n')
    return path


def test_a_third_kind_of_ledger_takes_one_row(config: Path) -> None:
    with quota.open(config) as session:
        assert session.settings.ledger.file is None
        assert session.budget().charge("search.list").admitted
        assert [finding.location for finding in check(session) if finding.level == "error"] == []
        with pytest.raises(UnusableLedger, match="ledger bare keeps no history; "):
            read_spending(session.ledger, "main", "job", 0)
        with pytest.raises(UnusableLedger, match="ledger bare keeps no notes"):
            read_status(session)
    assert acl_lines(session.settings, (), cluster=False)[0].startswith("ACL SETUSER quota ")
