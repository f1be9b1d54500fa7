"""What `quota charge`, `quota peek` and `quota exec` do, each with the values of its options, without click: a script
starts them all day. They return the exit status.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import quota
from quota.cli.output import decision_status, fail, print_json, say, unprinted
from quota.common.text import many
from quota.errors import UnknownMethod

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quota.session import Session


def charge(*, config: str | None, as_json: bool, file: str | None, **call: Any) -> int:
    """`quota charge`: the call, or with `file` the calls in it, together."""
    if file is None:
        return _decide(config, as_json, call, commit=True)
    return _charge_together(config, as_json, file, call)


def peek(*, config: str | None, as_json: bool, **call: Any) -> int:
    """`quota peek`"""
    return _decide(config, as_json, call, commit=False)


def _decide(config: str | None, as_json: bool, call: dict[str, Any], *, commit: bool) -> int:
    with quota.open(config) as session:
        say_built_in(session, err=as_json)
        budget = session.budget(call.pop("credential"))
        with _units_instead():
            decision = (budget.charge if commit else budget.peek)(**call)
        # Before the session ends: it then tells the ledger of a refusal, and that may wait for the ledger.
        if as_json:
            print_json(decision.as_json())
        elif decision.admitted:
            say(decision.sentence() + (f"; id {decision.id}" if decision.id else ""))
        else:
            fail(decision.sentence())
        unprinted(f"the charge stands, its id is {decision.id}" if decision.id else "")
    return decision_status(decision)


def _charge_together(config: str | None, as_json: bool, file: str, call: dict[str, Any]) -> int:
    from quota.cli.calls import check_calls, read_calls

    lines = read_calls(file)
    with quota.open(config) as session:
        say_built_in(session, err=as_json)
        budget = session.budget(call["credential"])
        with _units_instead("METHOD UNITS"):
            check_calls(budget, lines, call["job"])
            decisions = budget.charge_many([line.call for line in lines], job=call["job"], region=call["region"])
        first = decisions[0]
        if as_json:
            print_json([decision.as_json() for decision in decisions])
        elif first.admitted:
            for decision in decisions:
                say(f"{decision.sentence()}; id {decision.id}")
            if len(decisions) > 1:
                units = many(sum(decision.cost_units for decision in decisions), "unit")
                left = many(first.remaining_units, "unit")
                say(f"{many(len(decisions), 'call')}, {units} charged together; {left} left after all of them")
        else:
            fail(first.sentence())
        unprinted(f"the charges stand, their ids are {first.id} to {decisions[-1].id}" if first.id else "")
    return decision_status(first)


def charge_and_become(
    *, method: str, command: list[str], config: str | None, credential: str | None, **call: Any
) -> int:
    """`quota exec`: returns only where the command does not run."""
    with quota.open(config) as session:
        say_built_in(session, err=True)
        budget = session.budget(credential)
        with _units_instead():
            decision = budget.charge(method, **call)
        if not decision.admitted:
            fail(decision.sentence())
            return decision_status(decision)
    try:
        _become(command)
    except OSError as error:
        with quota.open(config) as session:  # the command did not start, so no call left
            session.budget(credential).refund(str(decision.id))
        fail(f"{command[0]}: {error.strerror}; the charge was refunded")
        return 127 if isinstance(error, FileNotFoundError) else 126
    raise AssertionError("another program has taken the place of this one")


def _become(command: list[str]) -> None:
    """Replace this process by another program, with default signal handling. Python ignores SIGPIPE and SIGXFSZ, and
    the program would inherit that: `yes | head` would not end.
    """
    import signal

    before = {
        number: signal.signal(number, signal.SIG_DFL)
        for number in (getattr(signal, name, None) for name in ("SIGPIPE", "SIGXFSZ"))
        if number is not None
    }
    try:
        os.execvp(command[0], command)  # noqa: S606  # running the caller's command is the purpose
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say_built_in(session: Session, *, err: bool) -> None:
    """Say that no configuration was found: the user may think of another budget than the one that is charged."""
    from quota.settings.model import BUILT_IN_NOTICE

    if session.settings.path is None:
        say(f"quota: {BUILT_IN_NOTICE}" if err else BUILT_IN_NOTICE, err=err)


@contextmanager
def _units_instead(units: str = "--units N") -> Iterator[None]:
    """Adds to an UnknownMethod error what else the command can do."""
    try:
        yield
    except UnknownMethod as error:
        raise UnknownMethod(f"{error} Or give its units: {units}") from None
