"""Make the sources of the site in one folder: the pages of the repository, and pages made from the code.

    python docs/site/assemble.py build/site-source

docs/index.md gives each page its section. The pages keep their paths, so that their links work; only the index moves
to the top. The pages made from the code have the options of every command, every setting, and the names of the package.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
import sys
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import quota
from quota import errors
from quota.cli.program import cli

if TYPE_CHECKING:
    from collections.abc import Iterator

    import click

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "*.md",
    "LICENSE",
    "docs/*.md",
    "docs/examples/*.*",
    "docs/pictures/*",
    "lua/*.md",
    "config/*.json",
    "config/*.yml",
    "config/deploy/*",
)


def assemble(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for pattern in COPIED:
        for path in ROOT.glob(pattern):
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    (folder / "reference").mkdir()
    for page, make in MADE.items():
        (folder / "reference" / f"{page}.md").write_text(make(), encoding="utf-8")
    (folder / "index.md").write_text(
        index((folder / "docs" / "index.md").read_text(encoding="utf-8")), encoding="utf-8"
    )
    (folder / "docs" / "index.md").unlink()


def index(text: str) -> str:
    """docs/index.md as the page at the top, with a tree of contents from its lists."""
    text = re.sub(r"\]\((\.\./)?([^)]+)\)", lambda link: f"]({'' if link[1] else 'docs/'}{link[2]})", text)
    made = "".join(f"- [{page.capitalize()}](reference/{page}.md): {make.__doc__}\n" for page, make in MADE.items())
    before, heading, after = text.partition("## Reference\n\n")
    text = before + heading + made + after
    trees = []
    for section in text.split("\n## ")[1:]:
        pages = re.findall(r"^- \[[^]]*\]\(([^)]+)\.md\)", section, flags=re.MULTILINE)
        name = section.partition("\n")[0]
        trees.append("\n".join(["```{toctree}", ":hidden:", f":caption: {name}", "", *pages, "```"]))
    return "\n\n".join([text.rstrip(), *trees]) + "\n"


# -- made from the code ------------------------------------------------------------------------------------------------


def options() -> str:
    """every command with its `--help`"""
    context = cli.make_context("quota", ["status"], resilient_parsing=True)
    pages = [f"## quota {name}\n\n```text\n{text}\n```" for name, text in helps(cli, context, "")]
    return "\n\n".join(["# The options of every command", *pages]) + "\n"


def helps(group: click.Group, context: click.Context, prefix: str) -> Iterator[tuple[str, str]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        below = type(context)(command, info_name=name, parent=context, max_content_width=80, terminal_width=80)
        yield f"{prefix}{name}", command.get_help(below)
        if hasattr(command, "list_commands"):
            yield from helps(command, below, f"{prefix}{name} ")  # type: ignore[arg-type]


def settings() -> str:
    """every setting, from the schema, and the commented configuration that `quota init --full` writes"""
    schema = json.loads((ROOT / "config" / "quota.schema.json").read_text(encoding="utf-8"))
    rows = "".join(f"| `{key}` | {description} |\n" for key, description in keys(schema, ""))
    text = (ROOT / "config" / "quota.toml").read_text(encoding="utf-8")
    return f"# Every setting\n\n| key | means |\n| --- | --- |\n{rows}\n## Commented\n\n```toml\n{text}```\n"


def keys(schema: dict[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Every key below a table of the schema, with its description."""
    for name, value in schema.get("properties", {}).items():
        if "description" in value:
            default = f" Default: `{json.dumps(value['default'])}`." if "default" in value else ""
            yield prefix + name, value["description"].replace("|", "\\|") + default
        yield from keys(value, f"{prefix}{name}.")
    for below, name in (("additionalProperties", "NAME."), ("items", "")):
        if isinstance(schema.get(below), dict):
            yield from keys(schema[below], prefix + name)


def package() -> str:
    """the names of the Python package, with their docstrings"""
    parts = ["# The names of the package", described(quota)]
    for name in quota.__all__:
        parts += member(f"quota.{name}", getattr(quota, name))
    parts += ["## Errors", described(errors)]
    return "\n\n".join(parts) + "\n"


def member(name: str, thing: object) -> Iterator[str]:
    yield f"## {name}"
    if isinstance(thing, FunctionType):
        yield f"```text\n{name}{signature(thing)}\n```"
    yield described(thing)
    for attribute, value in vars(thing).items() if inspect.isclass(thing) else ():
        if not attribute.startswith("_") and isinstance(value, FunctionType | property) and value.__doc__:
            yield f"### {name}.{attribute}"
            if isinstance(value, FunctionType):
                yield f"```text\n{attribute}{signature(value)}\n```"
            yield described(value)


def signature(function: FunctionType) -> str:
    return str(inspect.signature(function)).replace("'", "")


def described(thing: object) -> str:
    """A docstring. Its indented parts become code blocks."""
    text = inspect.getdoc(thing) or ""
    return re.sub(
        r"(?m)^( {4,}.*(?:\n(?: {4,}.*|))*)", lambda block: f"\n```text\n{block[1].rstrip()}\n```\n\n", text
    ).strip()


MADE = {"options": options, "settings": settings, "package": package}
"""The pages made from the code, in the section Reference."""

if __name__ == "__main__":
    assemble(Path(sys.argv[1]).resolve())
