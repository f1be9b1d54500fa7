"""Commands that die in the middle: a process watches its own calls, and sends itself SIGKILL at one of them."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

    from support.installation import Installation

KILLED = """
import os, sys
from quota.cli.program import main
event, where, nth, then = sys.argv[1:5]
nth, seen = int(nth), 0
(module, function), (then_module, then_function) = where.split(":"), then.split(":")
def any_of_ours(frame, what, _):
    global seen
    name = frame.f_globals.get("__name__") or ""
    # The store takes nine of ten calls, to put a page's texts together.
    if what == "call" and name.startswith("quota.") and name not in ("quota.jobs.store.store", "quota.jobs.store.rows"):
        seen += 1
        if seen == nth:
            os.kill(os.getpid(), 9)
def this_one(frame, what, _):
    global seen
    if what == event and frame.f_code.co_qualname == function and frame.f_globals.get("__name__") == module:
        seen += 1
        if seen == nth:
            if not then_function:
                os.kill(os.getpid(), 9)
            sys.setprofile(that_one)
def that_one(frame, what, _):
    if what == "call" and frame.f_code.co_qualname == then_function and frame.f_globals.get("__name__") == then_module:
        os.kill(os.getpid(), 9)
del sys.argv[1:5]
sys.setprofile(this_one if function else any_of_ours)
main()
"""


def killed_anywhere(machine: Installation, dice: random.Random, calls: int, *command: str) -> bool:
    """Run a command of `quota` that dies at one of its first `calls` of functions of ours. Whether it came to that."""
    nth = str(dice.randint(1, calls))
    with machine.start("call", ":", nth, ":", *command, script=KILLED) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode in (0, -signal.SIGKILL), (process.returncode, out, err)
    return process.returncode != 0
