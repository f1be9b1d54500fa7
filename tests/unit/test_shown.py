"""What the last line of a notebook's cell shows: which file, which budget, which answer. One line, and no secret."""

from __future__ import annotations

import asyncio
import pickle
from typing import TYPE_CHECKING

import pytest

import quota

if TYPE_CHECKING:
    from pathlib import Path

CONFIGURATION = """
[ledger]
url = "sqlite:///ledger.db"
[credentials.main]
api = "youtube-v3"
project = "charts"
[[credentials.main.limits]]
name = "day"
units = 1
window = "24h"
"""


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
    path.write_text(CONFIGURATION, encoding="utf-8")
    return path


def test_the_repr_of_a_session_and_a_budget_names_their_project(tmp_path: Path) -> None:
    path = written(tmp_path)
    with quota.open(path) as q:
        assert repr(q) == f"<quota.Session of {path}: main>"
        assert repr(q.budget()) == "<quota.Budget of main: project charts, limits day>"
    assert repr(q) == f"<quota.Session of {path}: main, closed>"


def test_async_objects_have_the_same_repr(tmp_path: Path) -> None:
    path = written(tmp_path)

    async def shown() -> list[str]:
        async with quota.open_async(path) as q:
            return [repr(q), repr(q.budget())]

    said = asyncio.run(shown())
    assert said == [f"<quota.AsyncSession of {path}: main>", "<quota.AsyncBudget of main: project charts, limits day>"]


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
