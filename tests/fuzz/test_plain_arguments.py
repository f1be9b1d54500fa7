"""The commands that scripts start all day read plain arguments without click, and exactly as click would."""

from __future__ import annotations

from typing import Any

import click
import pytest

from fuzz.generate import ODD_TEXT
from fuzz.inputs import PARTS, Input, every
from quota.cli import plain
from quota.cli.commands import cli

COMMANDS = {name: cli.get_command(click.Context(cli), name) for name in plain.COMMANDS}

WORDS = (
    *("videos.list", "x", "US", "5", "007", "0", "-1", "+5", " 5", "1_000", "9" * 18, "9" * 19, "٣", "5.0", "", " "),
    *("-", "--", "---", "-h", "--help", "--version", "=", "a=b", "--=x", "-x", "--unknown", "\udcff", "über"),
    *("--unit", "--no-json", "--JSON", "--json=", "--json=1", "--units=", "--units==5", "--units=-5", "--file"),
)


@pytest.mark.parametrize("part", range(PARTS))
def test_plain_arguments_are_read_as_click_reads_them(part: int) -> None:
    tried = read = 0

    def attempt(r: Input) -> None:
        nonlocal tried, read
        name = r.choice(list(plain.COMMANDS))
        arguments = r.data = [name, *_arguments(r, name)]
        found = plain.read(arguments)
        tried += 1
        if found is not None:
            read += 1
            assert found == (plain.COMMANDS[name].function, _by_click(arguments))

    every("plain-arguments", part, attempt)
    assert read >= tried // 5, "nearly everything is left to click"


@pytest.mark.parametrize(
    "arguments",
    [
        "charge videos.list",
        "charge search.list --units 5 --job=nightly --region DE --credential main --config quota.toml --json",
        "peek search.list --config=quota.toml",
        "run trending --quiet --config quota.toml",
        "run trending --region DE --region=FR --fail-on-refusal --here --textfile metrics --json",
        "exec search.list --job nightly -- curl --json -- https://example.org",
    ],
)
def test_what_stands_in_crontabs_is_read_without_click(arguments: str) -> None:
    words = arguments.split()
    found = plain.read(words)
    assert found is not None
    assert found[1] == _by_click(words)


def test_completion_is_left_to_click(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_QUOTA_COMPLETE", "bash_complete")
    assert plain.read(["charge", "videos.list"]) is None


def _by_click(arguments: list[str]) -> dict[str, Any]:
    """What click passes to the command. It raises what click raises."""
    command = COMMANDS[arguments[0]]
    assert command is not None
    with command.make_context(arguments[0], arguments[1:], parent=click.Context(cli)) as context:
        return context.params


def _arguments(r: Input, name: str) -> list[str]:
    command = COMMANDS[name]
    assert command is not None
    words = ["videos.list"] if r.random() < 0.8 else []
    for _ in range(r.randrange(5)):
        param = r.choice(command.params)
        option = param.opts[-1] if param.opts[-1].startswith("--") else r.choice(command.params).opts[0]
        value = "5" if param.name == "units" and r.random() < 0.8 else r.choice(WORDS) if r.random() < 0.3 else "value"
        kind = r.random()
        if kind < 0.1:
            added = [r.choice((*WORDS, *ODD_TEXT))]
        elif isinstance(param, click.Option) and param.is_flag:
            added = [option]
        else:
            added = [f"{option}={value}"] if kind < 0.4 else [option, value]
        place = r.randrange(len(words) + 1) if r.random() < 0.2 else r.choice((0, len(words)))
        words[place:place] = added
    if name == "exec" and r.random() < 0.9:
        words += ["--", "command", *r.sample(WORDS, 2)]
    return words
