"""The processes of one run of `quota exec --auto`: what they spent, and which programs nobody charges.

    tally_in, spent_in   each process keeps its numbers in a file, so a killed process counts, too
    unseen_program       a program that may send requests without a seam, because it is not Python

It judges a program by its command. A shell and `env` send nothing themselves, so it looks at the commands inside. It
cannot know what a shell script or a program that is not Python starts.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import dropwhile
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

from quota.common.files import Opened
from quota.common.fork import start_here_and_in_child
from quota.common.log import warn


class Total(NamedTuple):
    """What a run spent on one method, or on all."""

    calls: int = 0
    units: int = 0
    refused: int = 0

    def plus(self, more: Iterable[int]) -> Total:
        return Total(*map(sum, zip(self, more, strict=True)))


class FileTally:
    """Counts what this process spends, by method, in a file of this folder. A forked child has its own."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        start_here_and_in_child(self)

    def start_over_in_child(self) -> None:
        self._lock = RLock()
        self._spent: dict[str, Total] = {}
        self._file: Opened | None = None

    def __call__(self, method: str, calls: int, units: int, refused: int) -> None:
        more = Total(calls, units, refused)
        with self._lock:
            self._spent[method] = self._spent.get(method, Total()).plus(more)
            text = json.dumps(self._spent).encode()
            try:
                if self._file is None:
                    path = os.path.join(self._folder, f"{os.getpid()}-{os.urandom(4).hex()}")
                    self._file = Opened(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
                if self._file.stat() is not None:
                    os.pwrite(self._file.fd, text, 0)
            except OSError:
                return  # the run that reads the file is over


tally_in = cache(FileTally)
"""The one tally of all sessions of this process."""


def spent_in(folder: str) -> dict[str, Total]:
    """What all processes of a run spent, by method: the dearest first."""
    total: dict[str, Total] = {}
    for path in Path(folder).iterdir():
        # A signal handler that counts meanwhile may leave the end of a longer text behind the last one.
        spent_here, _ = json.JSONDecoder().raw_decode(path.read_text(encoding="ascii") or "{}")
        for method, spent in spent_here.items():
            total[method] = total.get(method, Total()).plus(spent)
    return dict(sorted(total.items(), key=lambda row: (-row[1].units, row[0])))


# -- programs ----------------------------------------------------------------------------------------------------------

REMEDY = "its requests are not charged; see docs/auto.md, or send them through `quota proxy`"

_SHELLS = frozenset(("ash", "bash", "busybox", "dash", "ksh", "sh", "zsh"))

_STARTERS = frozenset(
    shlex.split(
        "chrt command dumb-init env exec find flock gosu ionice nice nohup pdm pipenv pipx poetry setpriv setsid "
        "stdbuf strace taskset time timeout tini uv uvx xargs"
    )
)
"""Programs that send nothing themselves, and start the command in their arguments."""

_SILENT = frozenset(
    shlex.split(
        "[ awk basename cat cc chmod chown clear cp cut date df dirname du echo expr false file g++ gcc getconf "
        "grep head hostname id ld ldconfig ln ls lsb_release lscpu lsof mkdir mktemp mv objdump printenv printf ps pwd "
        "readlink realpath rm rmdir sed seq sleep sort stat stty tail tar tee test touch tput tr true tty uname uniq "
        "wc which who whoami"
    )
)
"""Tools of the system that ask no API."""

_IS_AHEAD = re.compile(r"(!|do|elif|else|if|then|until|while|\{)$|[A-Za-z_][A-Za-z_0-9]*=").match
"""Whether a word stands ahead of a command: a keyword of the shell, or a variable."""

_AWK_STARTS = re.compile(r"\bsystem\s*\(|\s\|\s*([\"&]|getline\b)").search
"""Whether a script of awk starts a command."""

MAX_DEPTH = 8
"""How many nested commands are examined."""


@cache
def warn_of(program: str) -> None:
    """Warn once of a program that a Python starts and whose requests nobody charges."""
    warn("not_instrumented", REMEDY, program=program)


def unseen_program(command: Sequence[Any]) -> str | None:
    """The program in a command that may send uncharged requests; None if there is none. Never raises: running a wrong
    command gives its own error."""
    try:
        return _unseen([os.fsdecode(word) for word in command])
    except (OSError, TypeError, ValueError):
        return None


_HIDES = re.compile(
    r"(\b(unset|export -n|(declare|typeset) \+x)( -?\w+)* |\s-u ?|-{2}unset=)PYTHONPATH\b"
    r"|\bPYTHONPATH=(?!\S*(\$\{?PYTHONPATH|/quota/cli/site\b))"
)
"""Matches what takes our folder, which instruments a Python, out of PYTHONPATH."""

_EMPTIES = {"env": "-|-[0v]*i.*|-{2}ignore-e.*", "exec": "-l?cl?"}
"""The options by which a command starts another with an empty environment."""


def _unseen(given: Sequence[str], depth: int = 0, before: str = "") -> str | None:
    """`before` are the words ahead of a command, which may change its environment."""
    words = [*dropwhile(_IS_AHEAD, given)]
    before = " ".join([before, *given[: len(given) - len(words)]])
    name = os.path.basename(words[0]) if words and depth < MAX_DEPTH else ""
    if name in ("eval", "trap"):
        return _unseen_in_script(name, " ".join(words[1:]), depth, before)
    if name in _SHELLS:
        at = next((at for at, word in enumerate(words) if re.fullmatch("-[a-z]*c", word)), len(words))
        return _unseen_in_script(name, "".join(words[at + 1 : at + 2]), depth, before)
    if name in _STARTERS:
        start = next((at for at, word in enumerate(words) if at and shutil.which(word) is not None), len(words))
        if name in _EMPTIES and any(re.fullmatch(_EMPTIES[name], word) for word in words[1:start]):
            return "env -i" if name == "env" else "exec -c"
        if start == len(words):  # `flock FILE -c`, `env -S`: it may be in a word
            script = re.sub(r"^-(\w*S|-split-string=)", "", words[-1])
            return _unseen_in_script(name, script, depth, " ".join([before, *words[:-1]]))
        return _unseen(words[start:], depth + 1, " ".join([before, *words[:start]]))
    is_silent = name in _SILENT and not (name == "awk" and _AWK_STARTS(" ".join(words)))
    path = None if is_silent or not name else shutil.which(words[0])
    if path is None:
        return None
    if re.match("(python|pypy)[0-9.]*[a-z]*$", os.path.basename(os.path.realpath(path))):
        isolated = _isolated(words[1:]) or ("with its own PYTHONPATH" if _HIDES.search(before) else None)
        return None if isolated is None else f"{name} {isolated}"
    with open(path, "rb") as file:
        interpreter = re.match(rb"#!([^\n]+)", file.read(512))
    if interpreter is None:
        return name
    behind = interpreter[1].decode("utf-8", "replace").split()
    return name if _unseen([*behind, path], depth + 1, before) is not None else None


def _unseen_in_script(shell: str, text: str, depth: int, before: str) -> str | None:
    try:
        commands = _commands(text)
    except ValueError:  # a text between the lines, or a mistake, which ends the shell
        return f"{shell} -c" if "<<" in text else None
    for command in commands:
        if (unseen := _unseen(command, depth + 1, before)) is not None:
            return unseen
        before = " ".join([before, *command])
    return None


_COMMENT = r"""('[^']*'|"(?:\\.|[^"\\])*"|\\.)|(?<![^\s;&|()])#[^\n]*"""
"""Matches a comment, or what may hold a `#` that begins none."""


def _commands(text: str) -> list[list[str]]:
    """The commands in a shell script. Raises ValueError for a script that cannot be split into commands."""
    text = re.sub(_COMMENT, lambda match: match[1] or "", text)
    inner = [
        command for words in re.findall(r"\$\(([^()]*)\)|`([^`]*)`", text) for command in _commands("".join(words))
    ]
    lexer = shlex.shlex(text.replace("\n", ";"), posix=True, punctuation_chars=True)
    lexer.commenters = ""
    commands: list[list[str]] = [*inner, []]
    for word in lexer:
        if set(word) <= set("();|&"):
            commands.append([])
        else:
            commands[-1].append(word)
    return commands


def _isolated(options: Sequence[str]) -> str | None:
    """The option that makes a Python ignore its environment or sitecustomize."""
    left = iter(options)
    for word in left:
        if not re.match("-[A-Za-z]", word):
            return None
        letters = re.match("[^cmWX]*", word[1:])
        harmful = re.search("[EIS]", letters[0] if letters else "")
        if harmful:
            return f"-{harmful[0]}"
        if word[-1] in "WX":
            next(left, None)
        elif re.search("[cm]", word):
            return None
    return None
