"""The commands and options that messages name exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import click

from support.commands import every_command

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for wing in ("quota", "jobs") for path in (ROOT / wing).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


COMMANDS = every_command(groups=True)


def options_of(command: str) -> set[str]:
    return {name for param in COMMANDS[command].params for name in param.opts if name.startswith("--")} | {"--help"}


@cache
def texts(tree: ast.Module) -> list[str]:
    """All texts of a module but docstrings and the declarations of options, with `{}` for what an f-string computes."""
    nodes = list(ast.walk(tree))
    docs = {
        id(node.body[0].value)
        for node in nodes
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    docs |= {id(part) for node in nodes if is_option(node) for part in ast.walk(node)}
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    literals = []
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            literals.append(
                "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (docs | parts):
            literals.append(node.value)
    return literals


def is_option(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="click"), attr="option")):
            return True
    return False


def test_every_command_that_a_message_names_exists_with_its_options() -> None:
    for text in (text for path in SOURCES for text in texts(tree_of(path))):
        for words in re.findall(r"(?:`|: |#   )quota ([a-z][^`\n]*)", text):
            name, *more = words.split(" ")
            command = f"{name} {more[0]}" if isinstance(COMMANDS.get(name), click.Group) and more else name
            assert command in COMMANDS, text
            assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", words)) <= options_of(command), text


def test_every_option_that_a_message_names_is_one_of_a_command() -> None:
    options = {option for command in COMMANDS for option in options_of(command)}
    for text in (text for path in SOURCES for text in texts(tree_of(path)) if " " in text):  # several words
        ours = re.sub(r"`quota [^`]*`|(?:: |#   )quota .*|pipx .*", "", text)
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", ours)) <= options, text
