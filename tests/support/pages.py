"""A page of documentation, tried as its reader would: its files are written, its commands typed, their output compared.

    `NAME`:             as the end of a paragraph: the block below it is that file
    ```console          commands behind `$ `, each with what it prints; a line `...` stands for any number of lines
    ```python           a program, unless it is a file

A command ends with status 0, unless `echo $?` is the next one. Times, ids and places are compared by their shape.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from support.commands import Quota

_BLOCK = re.compile(r"([^\n]*)\n\n?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHAPES = {
    r"\d{4}-\d\d-\d\dT[\d:.]+(Z|[+-]\d\d:\d\d)": "TIME",
    r"\b\d\d:\d\d(:\d\d)?\b": "TIME",
    r"\b\d{13}-[\w~+-]+": "ID",
    r"\bin \d+[dhms]\w*( \d+[hms])*": "in SPAN",
    r"\b\d+[dhms]\w*( \d+[hms])* ago\b": "SPAN ago",
    r"\w+://\S*?(?=[,\s]|$)": "URL",
    r"127\.0\.0\.1:\d+": "HOST",
    r"/\S*/bin/(?=quota\b)": "BIN/",
    r"─+": "─",
    r" +": " ",
}

WARNINGS_ARE_ERRORS = "import warnings; warnings.simplefilter('error')\n"
"""Stands before a program of a page."""


class Block(NamedTuple):
    file: str
    """The file that this is; empty for commands and programs."""
    language: str
    text: str


class Command(NamedTuple):
    line: str
    output: list[str]


def blocks(text: str) -> list[Block]:
    fenced_blocks = []
    for before, language, body in _BLOCK.findall(text):
        name = re.search(r"`([\w./-]+)`:$", before)
        fenced_blocks.append(Block(name[1] if name else "", language, body))
    return fenced_blocks


def commands(text: str) -> list[Command]:
    transcript: list[Command] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            transcript.append(Command(line[2:], []))
        else:
            transcript[-1].output.append(line)
    return transcript


def try_page(text: str, quota: Quota, replace: Mapping[str, str]) -> list[tuple[Command, list[str]]]:
    """Everything on a page in its order, in one folder. Each command with what it really printed."""
    done = []
    for block in blocks(text):
        body = block.text
        for old, new in replace.items():
            body = body.replace(old, new)
        if block.file:
            path: Path = quota.folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(body, encoding="utf-8")
        elif block.language == "console":
            done += _type(commands(body), quota)
        elif block.language == "python":
            ran = quota(script=WARNINGS_ARE_ERRORS + body)
            assert ran.returncode == 0, (ran.stdout + ran.stderr)[-2000:]
        elif block.language not in ("sql", "http"):  # jobs/test_data.py and inbound/test_examples.py try these
            raise AssertionError(f"nobody tries this block of {block.language or 'no language'}: {body[:200]}")
    return done


def _type(typed: list[Command], quota: Quota) -> list[tuple[Command, list[str]]]:
    programs, fds = quota.programs()  # no functions: what runs in the background can be killed
    lines = [f'PATH="{programs}:$PATH"', "trap 'kill $(jobs -p) 2>/dev/null' EXIT", "status=0"]
    for command in typed:
        lines += ["(exit $status)", command.line, 'status=$?; echo "@@$status"']
    printed = _run(["bash", "-c", "\n".join(lines)], quota, fds).split("@@")
    outputs = []
    status = 0
    for n, command in enumerate(typed):
        output = printed[n] if n == 0 else printed[n].partition("\n")[2]
        status = int(printed[n + 1].partition("\n")[0])
        expected_failure = n + 1 < len(typed) and typed[n + 1].line == "echo $?"
        assert status == 0 or expected_failure, (command.line, status, output)
        outputs.append((command, output.splitlines()))
    return outputs


def _run(command: list[str], quota: Quota, fds: Sequence[int] = ()) -> str:
    done = subprocess.run(
        command,
        cwd=quota.folder,
        env=quota.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=500,
        check=False,
        pass_fds=fds,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout


def shape(line: str) -> str:
    for pattern, name in _SHAPES.items():
        line = re.sub(pattern, name, line)
    return line.strip()


def differs(expected: list[str], printed: list[str]) -> str:
    """The first expected line that was not printed in its place; empty when all were."""
    rest = [shape(line) for line in printed]
    anywhere = False
    for line in expected:
        if line == "...":
            anywhere = True
            continue
        wanted = shape(line)
        if wanted not in (rest if anywhere else rest[:1]):
            return line
        rest = rest[rest.index(wanted) + 1 :]
        anywhere = False
    return "" if anywhere or not any(rest) else f"after that also: {rest[0]}"
