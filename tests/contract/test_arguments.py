"""Every number and every name at every public door: an impossible value is one line, and leaves nothing behind."""

from __future__ import annotations

import copy
import enum
import pickle
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import quota
from quota.budget import Budget
from quota.clients.google import service
from quota.clients.httpx import httpx_transport
from quota.clients.metering import Meter
from quota.common.clock import NEVER
from quota.deciding.project import Project
from quota.errors import UnknownCharge, UsageError
from quota.ledger.factory import open_ledger
from quota.rules.facts import Exhaustion
from quota.terms.arguments import labels
from quota.terms.costs import Part, Price
from quota.terms.limits import DAY_MS, Limit, Selector, Sliding, View
from support.books import BOOK
from support.setup import Setup, budget_of, claim_of, limit


class Whole:
    """A whole number that is no int: as numpy's."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Size(enum.IntEnum):
    ONE = 1


class Verb(enum.StrEnum):
    VIDEOS = "videos.list"


class Rude:
    """Nothing that a message could quote."""

    def __repr__(self) -> str:
        raise RuntimeError("no words\nfor it")


NO_NUMBERS = [
    *(True, False, 1.0, 33.4, float("nan"), float("inf"), Decimal(1), Fraction(1)),
    *("1", b"1", None, [], {}, -1, 2**63, 10**5_000, Rude()),
]
NUMBERS = [1, Whole(1), Size.ONE]

NUMBER_DOORS: dict[str, Callable[[Setup, Any], object]] = {
    "charge": lambda s, n: s.budget().charge("videos.list", units=n),
    "peek": lambda s, n: s.budget().peek("videos.list", units=n),
    "spend": lambda s, n: s.budget().spend("videos.list", units=n).__enter__(),
    "settle": lambda s, n: s.budget().settle(str(s.budget().charge("videos.list").id), n),
    "settle an unknown charge": lambda s, n: settle_unknown(s.budget(), n),
    "leave": lambda s, n: s.budget(leave={"job": {"day": n}}).charge("videos.list", job="job"),
    "price": lambda s, n: priced(s, n).charge("videos.list"),
    "clock": lambda s, n: budget_of(s.ledger, limit(500), clock=lambda: n).peek("videos.list"),
    "limit": lambda s, n: s.budget(Limit("day", n, VIEW, 500, 0)).peek("videos.list"),
    "quota": lambda s, n: Limit("day", 500, VIEW, n, 0),
    "headroom": lambda s, n: Limit("day", 500, VIEW, 500, n),
    "window": lambda s, n: Sliding(n),
    "ledger's clock": lambda s, n: open_ledger("sqlite://", clock=lambda: n).now_ms(),
    "hold of a claim": lambda s, n: s.state.claim(claim_of("a", hold_ms=n)),
    "lease of a claim": lambda s, n: s.state.claim(claim_of("a", lease_ms=n)),
    "memory of a tick": lambda s, n: s.state.end_claim(claim_of("a", tick_ms=n), "done"),
    "exhausted until": lambda s, n: s.state.exhaust(Exhaustion("units", 1, n, "", "")),
    "exhausted since": lambda s, n: s.state.exhaust(Exhaustion("units", n, NEVER, "", "")),
}
NONE_IS_AN_ANSWER = ("charge", "peek", "spend")

VIEW = View(Selector(buckets=("units",)), Sliding(DAY_MS))


@pytest.fixture
def ledger_url(any_ledger_url: str) -> str:
    """No ledger knows these rules."""
    return any_ledger_url


def priced(setup: Setup, units: Any) -> Budget:
    price = Price((Part("units", units),))
    methods = {**BOOK.methods, "videos.list": (price,)}
    return setup.budget(book=BOOK._replace(methods=methods, default_get=price))


def settle_unknown(budget: Budget, units: Any) -> None:
    with pytest.raises(UnknownCharge):
        budget.settle("1-1", units)


@pytest.mark.parametrize("door", NUMBER_DOORS)
def test_a_number_that_is_not_whole_is_one_line_and_changes_nothing(setup: Setup, door: str) -> None:
    for number in NO_NUMBERS:
        if number is None and door in NONE_IS_AN_ANSWER:
            continue
        with pytest.raises(UsageError) as refused:
            NUMBER_DOORS[door](setup, number)
        message = str(refused.value)
        assert (message.isprintable(), len(message) < 250, "whole number" in message) == (True, True, True), number
    entries = setup.entries()
    assert all(type(entry.units) is int and entry.units == 1 for entry in entries)
    assert setup.state.facts().exhaustions == ()
    assert setup.budget().charge("videos.list", units=1).admitted


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: type(number).__name__)
@pytest.mark.parametrize("door", NUMBER_DOORS)
def test_objects_with_an_index_are_whole_numbers(setup: Setup, door: str, number: Any) -> None:
    NUMBER_DOORS[door](setup, number)
    assert all(type(entry.units) is int for entry in setup.entries())


def test_units_must_be_whole_even_if_they_equal_a_whole_number(setup: Setup) -> None:
    """True == 1 == 1.0, also as a key of what was worked out before."""
    budget = setup.budget()
    assert budget.charge("videos.list", units=1).admitted
    for number in (True, 1.0, Decimal(1)):
        with pytest.raises(UsageError, match="a whole number from 1"):
            budget.charge("videos.list", units=number)  # type: ignore[arg-type]
    assert budget.charge("videos.list", units=1).admitted


def made(setup: Setup, **parts: Any) -> Budget:
    project = Project(setup.ledger, "p")
    usual = {"credential": "main", "project": project, "book": BOOK, "limits": [limit(500)]}
    return Budget(**usual | parts)


PART_DOORS: dict[str, Callable[[Setup, Any], object]] = {
    **{
        f"{name} of a budget": lambda s, part, name=name: made(s, **{name: part})
        for name in ("credential", "book", "limits", "leave")
    },
    "leave of a job": lambda s, part: made(s, leave={"job": part}),
    "name of a limit": lambda s, part: Limit(part, 500, VIEW, 500, 0),
    "selector of a view": lambda s, part: View(part, Sliding(DAY_MS)),
    "settings of a session": lambda s, part: quota.Session(part),
    "budget of an event loop": lambda s, part: quota.AsyncBudget(part, part),
    "budget of a service": lambda s, part: service(part),
    "key of a service": lambda s, part: service(s.budget(), key=part),
    "transport of httpx": lambda s, part: httpx_transport(s.budget(), "videos.list", hosts=["api.org"], inner=part),
}
NO_PARTS = [5, b"24h", 1.5, Rude(), object(), ["24h"], ("24h", 5)]
NONE_IS_A_PART = {"leave of a budget", "key of a service", "transport of httpx"}


@pytest.mark.parametrize("door", PART_DOORS)
def test_a_part_of_the_wrong_shape_is_one_line(setup: Setup, door: str) -> None:
    """It was an AttributeError from inside, of some only at the first charge."""
    for part in (*NO_PARTS, *([] if door in NONE_IS_A_PART else [None])):
        with pytest.raises(UsageError) as refused:
            PART_DOORS[door](setup, part)
        message = str(refused.value)
        assert (message.isprintable(), len(message) < 250) == (True, True)


def test_a_secret_that_is_no_str_is_not_shown(setup: Setup) -> None:
    with pytest.raises(UsageError) as refused:
        service(setup.budget(), key=b"AIza-the-secret")  # type: ignore[arg-type]
    assert "AIza" not in str(refused.value)


@pytest.fixture
def session(ledger_url: str, state_dir: Path, tmp_path: Path) -> Iterator[quota.Session]:
    path = tmp_path / "quota.toml"
    path.write_text(f'[ledger]\nurl = "{ledger_url}"\n[credentials.main]\napi = "youtube-v3"\n', encoding="utf-8")
    with quota.open(path) as session:
        yield session


def test_a_session_takes_no_other_key_for_a_service(session: quota.Session) -> None:
    for option in ("key", "budget"):
        with pytest.raises(UsageError, match=f"takes the {option} of its credential") as refused:
            session.google(**{option: "AIza-the-secret"})
        assert "AIza" not in str(refused.value)


@pytest.mark.parametrize("again", [pickle.dumps, copy.copy, copy.deepcopy])
def test_objects_of_one_process_cannot_be_pickled(session: quota.Session, again: Callable[[object], object]) -> None:
    """As where a pool of processes is handed a budget: "cannot pickle '_thread.RLock' object" named nothing of ours."""
    awaited = quota.AsyncSession(session)
    for each in (session, session.budget(), session.ledger, awaited, awaited.budget()):
        with pytest.raises(TypeError, match=rf"{type(each).__name__} belongs to one process.*quota\.open"):
            again(each)


TIMEOUTS: list[Any] = [True, 0, -1, float("nan"), float("inf"), 10**400, "60", b"60", None, [], Rude()]


def test_a_wrong_number_of_seconds_is_one_line(setup: Setup) -> None:
    for wrong in TIMEOUTS:
        with pytest.raises(UsageError, match="is not a number of seconds above 0") as refused:
            service(setup.budget(), timeout_s=wrong)
        assert (refused.value.args[0].isprintable(), len(str(refused.value)) < 200) == (True, True)
    for right in (1, 0.5, Decimal("2.5"), Fraction(1, 3)):
        service(setup.budget(), timeout_s=right).close()


NAME_DOORS: dict[str, Callable[[Setup, Any], object]] = {
    "method": lambda s, name: s.budget().charge(name),
    "method of an attempt": lambda s, name: Meter(s.budget()).attempt(name, "GET"),
    "job": lambda s, name: s.budget().charge("videos.list", job=name),
    "region": lambda s, name: s.budget().charge("videos.list", region=name),
    "job of labels": lambda s, name: labels(job=name).__enter__(),
    "job of usage": lambda s, name: s.budget().usage(name),
    "methods of an outlook": lambda s, name: s.budget().outlook([name]),
    "api of a service": lambda s, name: service(s.budget(), api=name),
    "refund": lambda s, name: s.budget().refund(name),
    "settle": lambda s, name: s.budget().settle(name, 1),
    **{
        f"{field} of a claim": lambda s, name, field=field: s.state.claim(claim_of("a")._replace(**{field: name}))
        for field in ("name", "owner", "run", "machine", "host", "tick")
    },
    "region of a claim": lambda s, name: s.state.claim(claim_of("a", regions=(name,))),
}


@pytest.mark.parametrize("door", NAME_DOORS)
def test_a_wrong_name_is_one_line_and_changes_nothing(setup: Setup, door: str) -> None:
    for name in (5, True, b"DE", ["DE"], {"DE"}, 1.5, Rude()):
        with pytest.raises(UsageError) as refused:
            NAME_DOORS[door](setup, name)
        message = str(refused.value)
        assert (message.isprintable(), len(message) < 200, "is not a str" in message) == (True, True, True)
    assert setup.entries() == []


def test_a_name_by_inheritance_is_a_name(setup: Setup) -> None:
    assert setup.budget().charge(Verb.VIDEOS, job=Verb.VIDEOS, region=Verb.VIDEOS).admitted
    (entry,) = setup.entries()
    assert (entry.method, entry.job, entry.region) == ("videos.list",) * 3


@pytest.mark.parametrize("name", ["x" * 65, "\n", "a\x1b", 0, False, b""])
def test_an_invalid_name_raises_where_it_is_given(setup: Setup, name: Any) -> None:
    """Not at the charge inside a block of labels, which may be far from there; and no 0 is taken for none."""
    budget = setup.budget()
    for give in (lambda: labels(job=name), lambda: labels(region=name)):
        with pytest.raises(UsageError), give():
            pytest.fail("the block began")
    with pytest.raises(UsageError):
        budget.usage(name)


def test_a_refusal_without_a_decision_can_be_shown() -> None:
    """A program's own tests may raise it with anything."""
    assert str(quota.Refused(None)) == "None"  # type: ignore[arg-type]
