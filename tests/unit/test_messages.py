"""What messages say about counts, and that the commands and options they name exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import click

from support.commands import every_command

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for wing in ("quota", "jobs") for path in (ROOT / wing).rglob("*.py"))
COUNTED = (
    "units|calls|charges|pages|items|regions|ticks|jobs|days|hours|errors|warnings|limits|attempts|requests|entries"
)
COUNTED += "|machines|methods|videos|searches|steps|processes|passes|credentials"


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def is_constant(value: ast.expr) -> bool:
    """A name in capitals: a number that is known to be large."""
    return isinstance(value, ast.Name) and value.id.isupper()


def test_a_noun_behind_a_count_is_written_by_the_one_function_for_it() -> None:
    """`1 units` is how it looks otherwise."""
    found = []
    for path in SOURCES:
        if not re.search(rf"}}[\s\"'f]*({COUNTED})\b", path.read_text(encoding="utf-8")):
            continue
        for text in (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.JoinedStr)):
            for value, after in zip(text.values, text.values[1:], strict=False):
                if not isinstance(value, ast.FormattedValue) or not isinstance(after, ast.Constant):
                    continue
                if re.match(rf" ({COUNTED})\b", str(after.value)) and not is_constant(value.value):
                    spec = "" if value.format_spec is None else ":" + ast.literal_eval(value.format_spec.values[0])
                    found.append(
                        f"{path.relative_to(ROOT)}:{text.lineno} {{{ast.unparse(value.value)}{spec}}}{after.value}"
                    )
    assert [one for one in found if one.partition(" ")[2] not in NEVER_ONE] == []


NEVER_ONE = (
    "{steps} steps in a row without completing a page",
    "{len(regions)} regions failed (",
    "{len(claim.regions):,} regions: at most ",
)


COMMANDS = every_command(groups=True)
SAID_BY = {
    "jobs/api/app.py": ["serve"],
    "jobs/plan/plan.py": ["plan"],
    "jobs/store/reader.py": ["export"],
    "jobs/store/store.py": ["search"],
    "jobs/ticks.py": ["run"],
    "quota/cli/rehearsal.py": ["run", "status"],
    "jobs/tick.py": ["run", "schedule"],
    "quota/cli/options.py": ["status", "spend"],  # of a format
}
"""The commands whose users see a file's messages. Those of any other file may reach the users of all commands."""


MANY_COMMANDS = {
    "quota/cli/book.py": "quota.cli.book",
    "quota/cli/configuration.py": "quota.cli.configuration",
    "quota/cli/deciding.py": "quota.cli.deciding",
    "quota/cli/inbound.py": "quota.cli.inbound",
    "quota/cli/ledger.py": "quota.cli.ledger",
    "quota/cli/reconcile.py": "quota.cli.reconcile",
    "quota/cli/reports.py": "quota.cli.reports",
    "quota/cli/serving.py": "quota.cli.serving",
    "jobs/commands.py": "quota.jobs.commands",
    "jobs/data.py": "quota.jobs.data",
}
"""Where commands are defined, and the module that is."""


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
    found = []
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (docs | parts):
            found.append(node.value)
    return found


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


def test_every_option_in_a_message_belongs_to_its_command() -> None:
    """A message of the library may reach the user through every command, or through none."""
    for path in SOURCES:
        check_options(str(path.relative_to(ROOT)), tree_of(path))


def check_options(name: str, tree: ast.Module) -> None:
    if name not in MANY_COMMANDS:
        said = [(SAID_BY.get(name, CONFIGURED), tree)]
    else:
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        said = [
            (commands_that_run(one, functions, MANY_COMMANDS[name]) or CONFIGURED, ast.Module(body, []))
            for one in functions.values()
            if (body := one.body)
        ]
    for commands, part in said:
        known = {"--config"}.union(set.intersection(*map(options_of, commands)))  # `quota` itself has that one
        for text in (text for text in texts(part) if " " in text):  # a message has several words
            named = set(
                re.findall(r"(?<![\w-])--[a-z][a-z-]+", re.sub(r"`quota [^`]*`|(?:: |#   )quota .*|pipx .*", "", text))
            )
            assert named <= known, (commands, text)


CONFIGURED = [name for name in COMMANDS if "--config" in options_of(name)]


def commands_that_run(function: ast.FunctionDef, functions: dict[str, ast.FunctionDef], module: str) -> list[str]:
    """The command that a function of a module is, or the commands that call it."""
    callbacks = {
        command.callback.__name__: name
        for name, command in COMMANDS.items()
        if command.callback and command.callback.__module__ == module
    }
    if function.name in callbacks:
        return [callbacks[function.name]]
    calls = [
        other
        for other in functions.values()
        if any(isinstance(node, ast.Name) and node.id == function.name for node in ast.walk(other))
    ]
    return [name for caller in calls if caller is not function for name in commands_that_run(caller, functions, module)]
