"""One grammar for all commands: an option has one name and one meaning, and CONTRIBUTING.md has the table."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import click
import pytest

from support.commands import every_command

ROOT = Path(__file__).resolve().parents[3]

COMMANDS = every_command()
LISTS = ("export", "log", "runs", "search", "spend")
OF_JOBS = ("explain", "export", "log", "place list", "runs", "search", "spend")
ROWS = (*LISTS, "book list", "book show", "costs", "place list", "place show", "tables")
SERVERS = ("dashboard", "emulate", "proxy", "serve")
CHANGES = ("ledger move", "ledger repair", "place reset")
WITHOUT_DATA = {
    *("book check", "book new", "dashboard", "emulate", "exec", "init", "ledger scripts", "place reset", "proxy"),
    *("refund", "reopen", "schedule", "serve", "settle"),
}
"""Commands that print a line or two for people, a file, or what another program prints."""


def options(name: str, *, hidden: bool = False) -> dict[str, click.Option]:
    """The options of a command by their long names."""
    shown = [x for x in COMMANDS[name].params if isinstance(x, click.Option) and (hidden or not x.hidden)]
    return {written: option for option in shown for written in option.opts if written.startswith("--")}


def having(option: str) -> list[str]:
    return sorted(name for name in COMMANDS if option in options(name))


def formats(name: str) -> tuple[str, ...]:
    kind = options(name)["--format"].type
    assert isinstance(kind, click.Choice)
    return tuple(kind.choices)


def test_every_command_that_prints_data_has_a_format_and_its_short_form() -> None:
    assert having("--format") == having("--json") == sorted({*COMMANDS} - WITHOUT_DATA)
    assert [name for name in COMMANDS if "--format" in options(name) and "csv" in formats(name)] == sorted(ROWS)
    assert {formats(name)[0] for name in having("--format") if name != "export"} == {"text"}


def test_every_list_is_narrowed_alike() -> None:
    assert having("--since") == sorted(LISTS)
    assert having("--limit") == sorted([*LISTS, "inbound top"])
    assert {name for name in having("--job") if "--units" not in options(name)} - {"exec"} == {*OF_JOBS}


def test_every_server_listens_alike() -> None:
    assert having("--listen") == sorted(SERVERS)
    assert [name for name in COMMANDS if "--port" in options(name, hidden=True)] == ["emulate"], "as others call it"


def test_every_command_that_changes_much_shows_it_first_and_asks() -> None:
    assert having("--yes") == sorted(CHANGES)
    assert {*CHANGES, "reconcile"} <= {*having("--dry-run")}


def test_an_option_takes_the_same_in_every_command() -> None:
    taken = defaultdict(set)
    for name in COMMANDS:
        for written, option in options(name).items():
            taken[written].add((option.is_flag, option.metavar))
    different = {written: kinds for written, kinds in taken.items() if len(kinds) > 1}
    assert different == {}


@pytest.mark.parametrize("name", COMMANDS)
def test_each_option_has_one_sentence_of_help(name: str) -> None:
    for written, option in options(name).items():
        text = option.help or ""
        assert re.match("[A-Z]", text), written
        assert re.search(r"[.\]]$", text), written


def test_the_table_of_the_grammar_has_each_option() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = page.partition("## The grammar of commands")[2].partition("\n## ")[0]
    for option in ("--config", "--credential", "--dry-run", "--format", "--job", "--json", "--limit", "--listen"):
        assert f"`{option}" in table, option
    for option in ("--region", "--since", "--yes"):
        assert f"`{option}" in table, option
    assert 10 <= table.count("\n|") <= 14
