"""The plain arguments of the commands that scripts start all day, read without click: to import it and to declare every
command and option takes longer than a decision.

`read` says which function to call, and with what, exactly as click would; or None, and click reads the arguments
itself: for help and errors, and for all that is rare. A fuzz test compares the two.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class _Command(NamedTuple):
    function: str
    """`module:name`; it takes the values by name."""

    word: str
    """The name of the one value that stands without an option."""

    options: Mapping[str, str]
    """Option -> the name of its value."""

    values: Mapping[str, Any]
    """What they are without options: False for a flag, an empty tuple for an option that may be repeated."""

    before_command: bool = False
    """Its own arguments end at the first `--`; behind it stands the command of another program."""


_CALL = {"--units": "units", "--credential": "credential", "--job": "job", "--region": "region", "--config": "config"}
_NO_CALL = {"units": None, "credential": None, "job": "", "region": "", "config": None}
_JSON = {"--json": "as_json"}

COMMANDS = {
    "charge": _Command(
        "quota.cli.deciding:charge", "method", _CALL | _JSON, _NO_CALL | {"as_json": False, "file": None}
    ),
    "peek": _Command("quota.cli.deciding:peek", "method", _CALL | _JSON, _NO_CALL | {"as_json": False}),
    "exec": _Command("quota.cli.deciding:charge_and_become", "method", _CALL, _NO_CALL, before_command=True),
    "run": _Command(
        "quota.jobs.tick:run",
        "job",
        {
            "--region": "regions",
            "--fail-on-refusal": "fail_on_refusal",
            "--here": "here",
            "--quiet": "quiet",
            "--textfile": "textfile",
            "--config": "config",
            **_JSON,
        },
        {**dict.fromkeys(("fail_on_refusal", "here", "quiet", "as_json"), False), "regions": ()}
        | dict.fromkeys(("textfile", "config")),
    ),
}


def read(arguments: Sequence[str]) -> tuple[str, dict[str, Any]] | None:
    """The function and its values, or None where click must read these arguments."""
    command = COMMANDS.get(arguments[0]) if arguments else None
    if command is None or os.environ.get("_QUOTA_COMPLETE"):
        return None
    values = dict(command.values)
    own = arguments[1:]
    if command.before_command:
        if "--" not in own:
            return None
        end = own.index("--")
        own, values["command"] = own[:end], list(own[end + 1 :])
        if not any(values["command"][:1]):
            return None
    words = iter(own)
    for word in words:
        option, equals, value = word.partition("=")
        name = command.options.get(option)
        if not word.startswith("-"):
            if not word or command.word in values:
                return None
            values[command.word] = word
        elif name is None:
            return None
        elif values[name] is False or values[name] is True:
            if equals:
                return None
            values[name] = True
        else:
            if not equals:
                value = next(words, "")
            if not value:
                return None
            values[name] = (*values[name], value) if isinstance(values[name], tuple) else value
    units = values.get("units")
    if units is not None:
        if not (units.isascii() and units.isdigit() and len(units) <= MAX_DIGITS):
            return None
        values["units"] = int(units)
    return (command.function, values) if command.word in values else None


MAX_DIGITS = 18
"""Python converts no number of several thousand digits, and nobody means one."""
