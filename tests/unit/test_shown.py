"""What people and schedulers see of sessions, budgets and answers: one line, no secret, and when to try again."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import quota
from quota.common.clock import host_clock, utc
from quota.decision import UNKNOWN_WAIT_MS, Decision, LimitState, Reason
from support.configurations import limited


class Printer:
    """The part of IPython's printer that is used."""

    def __init__(self) -> None:
        self.shown = ""

    def text(self, text: str) -> None:
        self.shown += text


def displayed(decision: quota.Decision) -> str:
    printer = Printer()
    decision._repr_pretty_(printer, False)
    return printer.shown


def written(folder: Path) -> Path:
    path = folder / "quota.toml"
    path.write_text(limited(1), encoding="utf-8")
    return path


def test_the_repr_of_a_session_and_a_budget_names_their_project(tmp_path: Path) -> None:
    path = written(tmp_path)
    with quota.open(path) as q:
        assert repr(q) == f"<quota.Session of {path}: main>"
        assert repr(q.budget()) == "<quota.Budget of main: project p, limits day>"
    assert repr(q) == f"<quota.Session of {path}: main, closed>"


def test_a_decision_is_displayed_as_its_sentence_and_has_its_fields_in_its_repr(tmp_path: Path) -> None:
    with quota.open(written(tmp_path)) as q:
        decision = q.budget().charge("videos.list")
        refused = q.budget().charge("videos.list")
    assert str(decision) == displayed(decision) == "admitted videos.list (1 unit) on main; 0 units left"
    assert displayed(refused).startswith(
        "refused videos.list (1 unit) on main: limit 'day' has 1 of 1 unit used; next at "
    )
    assert repr(decision).startswith("Decision(admitted=True, id='")


def test_a_refusal_is_its_sentence_wherever_an_exception_surfaces(tmp_path: Path) -> None:
    """A worker logs `repr`, a queue stores `args`, and a process hands on a pickle."""
    with quota.open(written(tmp_path)) as q:
        q.budget().charge("videos.list")
        with pytest.raises(quota.Refused) as raised:
            q.budget().spend("videos.list").__enter__()
    sentence = raised.value.decision.sentence()
    assert "limit 'day' has 1 of 1 unit used; next at " in sentence
    for error in (raised.value, pickle.loads(pickle.dumps(raised.value)), quota.Refused(*raised.value.args)):  # noqa: S301
        assert (str(error), repr(error), error.args) == (sentence, f'Refused("{sentence}")', (sentence,))
    assert pickle.loads(pickle.dumps(raised.value)).decision == raised.value.decision  # noqa: S301


HOUR_MS = 3_600_000


def refused(reason: Reason, retry_at_ms: int | None = None, **more: object) -> Decision:
    return Decision(
        False, None, None, "main", "project", "search.list", 100, reason, "day", 0, host_clock(), retry_at_ms, ()
    )._replace(**more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("noun", "cost"), [("unit", "1 unit, 10 in limit 'day'"), ("call", "1 unit")])
def test_a_refusal_names_the_cost_in_the_limit_that_refused(noun: str, cost: str) -> None:
    """The first bucket's cost may be another."""
    state = LimitState("day", 10, 90, 95, 5, noun=noun)
    decision = refused("limit", cost_units=1, limits=(state,))
    full = f"limit 'day' has 90 of 95 {noun}s used"
    assert decision.sentence().startswith(f"refused search.list ({cost}) on main: {full}")
    assert decision._replace(method="").why() == f"{full}, a call needs 10"


def test_when_has_the_time_and_the_seconds_until_then() -> None:
    at_ms = host_clock() + HOUR_MS
    when = refused("limit", at_ms).when()
    assert when is not None
    assert (when.at, when.at.tzinfo) == (utc(at_ms), UTC)
    assert 0 < when.seconds <= HOUR_MS / 1_000


def test_when_counts_from_a_given_time_and_a_past_time_is_a_wait_of_zero() -> None:
    assert refused("limit", 7_500).when(now_ms=5_000) == (utc(7_500), 2.5)
    assert refused("exhausted", 1_000).when() == (utc(1_000), 0)
    with pytest.raises(TypeError, match="float"):  # of seconds, as time.time() has them
        refused("limit", 7_500).when(5.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("reason", ["limit", "run", "ledger-unavailable"])
def test_when_is_soon_if_the_time_is_unknown(reason: Reason) -> None:
    before = datetime.now(UTC)
    when = refused(reason).when()
    assert when is not None
    wait = timedelta(milliseconds=UNKNOWN_WAIT_MS)
    assert before - timedelta(milliseconds=1) <= when.at - wait <= datetime.now(UTC)
    assert when.seconds == UNKNOWN_WAIT_MS / 1_000


@pytest.mark.parametrize("decision", [refused("closed"), refused("clock"), refused("ledger-unavailable", lasting=True)])
def test_when_is_none_if_somebody_must_act(decision: Decision) -> None:
    assert decision.when() is None


def test_a_call_that_was_admitted_is_worth_a_try_now() -> None:
    when = refused("ok", admitted=True).when()
    assert when is not None
    assert when.seconds == 0


def test_every_error_says_itself_in_another_process(tmp_path: Path) -> None:
    """An error that cannot be made again breaks a whole pool of processes."""
    session = quota.open(written(tmp_path))
    session.close()
    with pytest.raises(quota.UsageError) as closed:
        session.budget()
    kinds = [
        kind for kind in vars(quota.errors).values() if isinstance(kind, type) and issubclass(kind, quota.QuotaError)
    ]
    others = [kind("what is wrong; what to do") for kind in kinds if kind is not quota.Refused]
    for error in (closed.value, *others):
        again = pickle.loads(pickle.dumps(error))  # noqa: S301
        assert (type(again), str(again)) == (type(error), str(error))
