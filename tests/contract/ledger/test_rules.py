"""The rules of docs/ledger-rules.md, each cited by its implementations and its tests, and one in every language."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from quota.common.clock import LATEST_MS, NEVER
from quota.deciding.checklist import MAX_CHARGE_UNITS
from quota.ledger import contract, history, redis_decision, redis_ledger, redis_scripts
from quota.ledger.contract import ChargeRequest, LimitCheck
from quota.ledger.entry import DEFAULT_BUCKET, Charge
from quota.recovery.allowance import REPAID_AT_ONCE
from quota.terms.limits import DAY_MS, HOUR_MS, Selector, Sliding, View, longest_ms_of, selector_of

if TYPE_CHECKING:
    from support.setup import Setup

ROOT = Path(__file__).parents[3]
FILES = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "lua").glob("*.lua"))}
PARTS = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "lua" / "parts").glob("*.lua"))}
SCRIPTS = {name: redis_scripts.script(name.removesuffix(".lua"))[0] for name in FILES}
PAGE = (ROOT / "docs" / "ledger-rules.md").read_text(encoding="utf-8")
LEDGER_FILES = [*(ROOT / "lua").rglob("*.lua"), *(ROOT / "quota").rglob("*.py"), *(ROOT / "quota").rglob("*.sql")]
RULES = re.findall(r"^\*\*(L[0-9]+)\. ", PAGE, re.MULTILINE)


# -- citations ---------------------------------------------------------------------------------------------------------


def cited_in(paths: list[Path]) -> set[str]:
    return {rule for path in paths for rule in re.findall(r"\bL[0-9]+\b", path.read_text(encoding="utf-8"))}


def test_the_rules_are_numbered_without_a_gap() -> None:
    assert [f"L{n}" for n in range(1, 32)] == RULES


def test_every_rule_is_cited_by_an_implementation_and_by_a_test_and_no_other_rule_is() -> None:
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    assert cited_in(LEDGER_FILES) == set(RULES)
    assert set(RULES) <= cited_in(tests)


def test_each_rule_says_why() -> None:
    paragraphs = {text.split(".")[0]: text for text in re.split(r"\n\*\*(?=L[0-9]+\. )", PAGE)[1:]}
    without = {rule for rule, text in paragraphs.items() if "*Why" not in text}
    assert without == {"L7", "L9", "L22", "L23"}, "these say it in their own sentences, or rest on another rule"


# -- what stands in several scripts ------------------------------------------------------------------------------------


def included_in(text: str) -> list[str]:
    return re.findall(r"^-- @include parts/(\w+\.lua)$", text, re.MULTILINE)


def test_each_part_is_included_and_once_by_each_script() -> None:
    """By several scripts, or by one: an idea of its own."""
    assert {name for text in FILES.values() for name in included_in(text)} == PARTS.keys()
    for name, text in FILES.items():
        assert len({*included_in(text)}) == len(included_in(text)), name


def test_a_whole_script_has_each_part_in_its_place() -> None:
    assert [*redis_scripts.script_names()] == [name.removesuffix(".lua") for name in sorted(FILES)]
    for name, text in FILES.items():
        whole = text
        for part in included_in(text):
            whole = whole.replace(f"-- @include parts/{part}\n", PARTS[part])
        assert SCRIPTS[name] == whole
        assert "@include" not in whole
        assert whole.startswith(f"-- {name}: ")


def test_what_two_scripts_share_is_a_part() -> None:
    """A function of one name in two scripts is a copy, and copies drift apart."""
    found: dict[str, list[str]] = {}
    for name, text in {**FILES, **PARTS}.items():
        for function in re.findall(r"^\s*local function (\w+)", text, re.MULTILINE):
            found.setdefault(function, []).append(name)
    assert len(found) > 5
    assert {function: names for function, names in found.items() if len(names) > 1} == {}


def test_every_script_checks_the_format() -> None:
    for name, text in FILES.items():
        if name == "examine.lua" or name.startswith("inbound_"):  # these read nothing of what a ledger stores
            continue
        assert "format.lua" in included_in(text), name
        assert text.count("other_format(") == 1, f"{name} asks once"


# -- constants ---------------------------------------------------------------------------------------------------------


def constants_of(text: str) -> dict[str, int | str]:
    found: dict[str, int | str] = {}
    for names, values in re.findall(r"^local ([A-Z_]+(?:, [A-Z_]+)*) = ([0-9', ]+)", text, re.MULTILINE):
        for name, value in zip(names.split(", "), values.split(","), strict=True):
            found[name] = value.strip().strip("'") if "'" in value else int(value)
    return found


IN_PYTHON: dict[str, int | str] = {
    "FORMAT": redis_scripts.FORMAT,
    "CLOCK_SLACK_MS": contract.CLOCK_SLACK_MS,
    "CLOCK_BEHIND_MS": contract.CLOCK_BEHIND_MS,
    "RETENTION_SLACK_MS": contract.RETENTION_SLACK_MS,
    "MAX_SEQ": NEVER,
    "LATEST_MS": LATEST_MS,
    "MAX_UNITS": MAX_CHARGE_UNITS,
    "MIN_RETENTION_MS": contract.MIN_RETENTION_MS,
    "MAX_CHARGES": REPAID_AT_ONCE,
    "LONGEST_CLAIM_MS": contract.LONGEST_CLAIM_MS,
    "MAX_REPAIRS": contract.MAX_REPAIRS,
    "MAX_REPAIR_MS": contract.MAX_REPAIR_MS,
    "MONTH_MS": longest_ms_of("*|*|*|month@UTC"),
    "HISTORY_MS": history.HISTORY_MS,
    "HOUR_MS": HOUR_MS,
    "MAX_CELLS": history.MAX_CELLS,
    "MAX_NAME": history.MAX_NAME_BYTES,
    "MAX_REFUSALS": history.MAX_REFUSALS,
    "MAX_REFUSAL": history.MAX_REFUSAL_BYTES,
    "MAX_COUNTS": history.MAX_COUNTS,
}
"""Constants of the scripts that Python has too; `contract.ledger.test_script_bounds` knows the others."""


def test_a_constant_is_the_same_in_lua_and_in_python() -> None:
    seen = set()
    for script, text in SCRIPTS.items():
        for name, value in constants_of(text).items():
            if name in IN_PYTHON:
                assert value == IN_PYTHON[name], (script, name)
                seen.add(name)
    assert seen == IN_PYTHON.keys()


def test_the_places_of_arguments_are_those_that_the_scripts_heads_number() -> None:
    head = SCRIPTS["charge.lua"]
    request = ChargeRequest("p", Charge(1, DEFAULT_BUCKET, "m", "", "", "k"), (), (), 0)
    place = redis_decision.arguments(request, "0", commit=False).index(redis_decision.FIRST_TRY) + 1
    assert f"\n--       {place} retry_age_ms " in head
    assert f"\n--      {constants_of(head)['FIRST_LIMIT'] - 1} expected " in head  # type: ignore[operator]


def test_what_the_scripts_and_the_readme_say_of_retention_is_what_python_does() -> None:
    readme = (ROOT / "lua" / "README.md").read_text(encoding="utf-8")
    named = {int(number) for number in re.findall(r"\b[0-9]{9}\b", readme)}
    assert contract.MIN_RETENTION_MS in named
    assert f"count >= 1 and count <= {redis_ledger.READ_AT_ONCE})" in SCRIPTS["read.lua"]
    assert f"bucket or '{DEFAULT_BUCKET}'" in SCRIPTS["charge.lua"]


# -- L2: what a view counts --------------------------------------------------------------------------------------------

ANY, ODD = Selector(), "a,b|c*%"
COUNTS: tuple[tuple[Selector, tuple[str, str, str], int], ...] = (
    # selector, (bucket, method, job), what it counts of 7 units
    (ANY, ("units", "search.list", "nightly"), 7),
    (Selector(count="calls"), ("units", "search.list", "nightly"), 1),
    (Selector(buckets=("units",)), ("units", "m", ""), 7),
    (Selector(buckets=("units",)), ("search", "m", ""), 0),
    (Selector(methods=("a", "b")), ("units", "b", ""), 7),
    (Selector(methods=("a", "b")), ("units", "a,b", ""), 0),
    (Selector(methods=("a,b",)), ("units", "a", ""), 0),
    (Selector(methods=("a,b",)), ("units", "a,b", ""), 7),
    (Selector(methods=("%2C",)), ("units", ",", ""), 0),
    (Selector(methods=("%2C",)), ("units", "%2C", ""), 7),
    (Selector(methods=("*",)), ("units", "m", ""), 0),
    (Selector(methods=("*",)), ("units", "*", ""), 7),
    (Selector(buckets=(ODD,), methods=(ODD,), jobs=(ODD,)), (ODD, ODD, ODD), 7),
    (Selector(buckets=(ODD,), methods=(ODD,), jobs=("j",)), (ODD, ODD, ODD), 0),
    (Selector(jobs=("j",), count="calls"), ("units", "m", "j"), 1),
    (Selector(jobs=("j",), count="calls"), ("units", "m", "k"), 0),
)


@pytest.mark.parametrize(("selector", "names", "counted"), COUNTS)
def test_every_implementation_counts_the_same(
    setup: Setup, selector: Selector, names: tuple[str, str, str], counted: int
) -> None:
    """L2 in Python, in SQL or charge.lua (counted from the log), and where a correction changes the total (L15)."""
    view = View(selector, Sliding(DAY_MS))
    bucket, method, job = names
    assert selector_of(view.name) == selector
    assert (selector.cost(7) if selector.counts(bucket, method, job) else 0) == counted

    def decide(commit: bool, *checks: LimitCheck) -> Any:
        charge = Charge(7, bucket, method, job, "", "k1")
        return setup.ledger.decide(ChargeRequest(setup.project, charge, checks, (), setup.now_ms), commit=commit)

    def used(of: View) -> int:
        return int(decide(False, LimitCheck(of, 0, 0, None)).used_units[0])

    charge_id = decide(True).id
    assert used(view) == counted
    setup.ledger.settle(setup.project, charge_id, 3, [view])
    assert used(view) == used(View(selector, Sliding(DAY_MS + 1))) == min(counted, 3)
    setup.ledger.settle(setup.project, charge_id, 0, [view])
    assert used(view) == used(View(selector, Sliding(DAY_MS + 2))) == 0
