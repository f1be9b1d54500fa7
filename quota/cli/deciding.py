"""The commands that decide, and the commands that correct a charge: charge, peek, refund, settle."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import click

import quota
from quota.budget import MAX_CHARGES, Budget, check_call
from quota.cli.options import call_options, config_option, credential_option, format_option
from quota.cli.output import fail, print_json, say, say_built_in, unprinted
from quota.common.files import read_named
from quota.common.text import many, show
from quota.errors import UnknownMethod, UsageError, decision_status
from quota.rules.calls import MAX_CHARGE_UNITS
from quota.terms.arguments import check_name

MAX_FILE_BYTES = 65_536
"""A hundred calls with comments need less. `/dev/zero` has more."""


@click.command()
@click.option("--file", metavar="CALLS", help="Charge the calls in this file together; `-` is stdin.")
@partial(call_options, method="[METHOD | --file CALLS]", required=False)
@format_option
@config_option
def charge(file: str | None, **call: Any) -> int:
    """Charge one call of METHOD before it leaves. Exit 75 when refused.

    --file charges up to 100 calls in one step, all or none. Each line of the file is METHOD [UNITS]; `#` begins a
    comment. With UNITS, METHOD need not be in the cost book. The output has the units that are left after all calls.

    \b
    Example:
      quota charge search.list --job backfill --region DE && curl ...
      quota charge videos.list --json
      printf 'search.list\\nvideos.list 3\\n' | quota charge --file -
    """
    if file is None and call["method"] is None:
        raise click.UsageError("say what to charge: METHOD, or --file CALLS for several calls")
    if file is None:
        return _decide(commit=True, **call)
    if call["method"] is not None:
        raise click.UsageError("METHOD and --file cannot be combined: leave METHOD or --file out")
    if call["units"] is not None:
        raise click.UsageError("with --file, write the units into the file, after the method: METHOD UNITS")
    return _charge_together(file=file, **call)


@click.command()
@call_options
@format_option
@config_option
def peek(**call: Any) -> int:
    """Show what `quota charge` would decide now, and charge nothing.

    If the call would be refused, the exit status is 75.

    \b
    Example:
      quota peek search.list || exit 0
    """
    return _decide(commit=False, **call)


def _decide(*, commit: bool, credential: str | None, config: str | None, as_json: bool, **call: Any) -> int:
    with quota.open(config) as session:
        say_built_in(session, err=as_json)
        budget = session.budget(credential)
        with units_instead():
            decision = (budget.charge if commit else budget.peek)(**call)
        # Before the session ends: then it reports a refusal to the ledger, and may wait for the ledger.
        if as_json:
            print_json(decision.as_json())
        elif decision.admitted:
            say(decision.sentence() + (f"; id {decision.id}" if decision.id else ""))
        else:
            fail(decision.sentence())
        unprinted(f"the charge stands, its id is {decision.id}" if decision.id else "")
    return decision_status(decision)


def _charge_together(
    *, file: str, credential: str | None, job: str, region: str, config: str | None, as_json: bool, **_none: None
) -> int:
    lines = read_calls(file)
    with quota.open(config) as session:
        say_built_in(session, err=as_json)
        budget = session.budget(credential)
        with units_instead("METHOD UNITS"):
            _check_calls(budget, lines, job)
            decisions = budget.charge_many([line.call for line in lines], job=job, region=region)
        first = decisions[0]
        if as_json:
            print_json([decision.as_json() for decision in decisions])
        elif first.admitted:
            for decision in decisions:
                say(decision.sentence() + (f"; id {decision.id}" if decision.id else ""))
            if len(decisions) > 1:
                units = many(sum(decision.cost_units for decision in decisions), "unit")
                say(f"{many(len(decisions), 'call')}, {units} charged together; {first.left()} left after all of them")
        else:
            fail(first.sentence())
        unprinted(f"the charges stand, their ids are {first.id} to {decisions[-1].id}" if first.id else "")
    return decision_status(first)


@click.command()
@click.argument("charge_id", metavar="ID")
@credential_option
@config_option
def refund(charge_id: str, credential: str | None, config: str | None) -> None:
    """Give back the charge for a request that was never sent.

    If the call was charged to several buckets, each bucket gets its units back. An unknown ID exits with 1.

    \b
    Example:
      quota refund 1795233255077-0ff326d374b1gnQ2ZQJQO7o
    """
    _correct(charge_id, None, credential, config)


@click.command()
@click.argument("charge_id", metavar="ID")
@click.argument("units", type=int)
@credential_option
@config_option
def settle(charge_id: str, units: int, credential: str | None, config: str | None) -> None:
    """Set the real cost of a charge, in units. You may repeat it.

    If the call was charged to several buckets, it sets the cost in the first. An unknown ID exits with 1.

    \b
    Example:
      quota settle 1795233255077-0ff326d374b1gnQ2ZQJQO7o 35
    """
    _correct(charge_id, units, credential, config)


def _correct(charge_id: str, units: int | None, credential: str | None, config: str | None) -> None:
    with quota.open(config) as session:
        say_built_in(session, err=False)
        budget = session.budget(credential)
        before = budget.refund(charge_id) if units is None else budget.settle(charge_id, units)
    say(f"{before.method} {charge_id}: now {many(units or 0, 'unit')}, before {before.units:,}")


@contextmanager
def units_instead(units: str = "--units N") -> Iterator[None]:
    """Adds to an UnknownMethod error that the command also takes units."""
    try:
        yield
    except UnknownMethod as error:
        raise UnknownMethod(f"{error} Or give its units: {units}") from None


# -- several calls, from a file ----------------------------------------------------------------------------------------


class Line(NamedTuple):
    """A call as `Budget.charge_many` takes it, and its file and line, for messages."""

    call: str | tuple[str, int]
    place: str


def read_calls(path: str) -> list[Line]:
    """The calls in a file, `-` for stdin: `METHOD [UNITS]` on a line, `#` begins a comment. Raises UsageError."""
    name = "calls from stdin" if path == "-" else f"calls {show(path)}"
    try:
        data = _read(path)
    except OSError as error:
        raise UsageError(
            f"{name}: cannot be read: {error.strerror}; name a file with METHOD [UNITS] on each line, or - for stdin"
        ) from None
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"{name}: larger than {MAX_FILE_BYTES >> 10} KiB, so it is not a list of calls")
    if path == "-" and not data:
        raise UsageError(f"{name}: stdin is closed or empty; pipe METHOD [UNITS] into it, a call on a line")
    lines: list[Line] = []
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).splitlines(), 1):
        place = f"{name}, line {number}"
        call = _call(line, place)
        if call is not None and len(lines) == MAX_CHARGES:
            raise UsageError(f"{place}: more than {MAX_CHARGES} calls cannot be charged together; make two files")
        if call is not None:
            lines.append(Line(call, place))
    if not lines:
        raise UsageError(f"{name}: no call in it; write METHOD [UNITS] on a line")
    return lines


def _check_calls(budget: Budget, lines: list[Line], job: str) -> None:
    """Raises UsageError, with its line, for a call that can never succeed."""
    check_name("job", job)
    for call, place in lines:
        try:
            check_call(budget, call, job)
        except UsageError as error:
            raise type(error)(f"{place}: {error}") from None


def _read(path: str) -> bytes:
    """The content of a file, up to one byte more than the maximum. Raises OSError, also if a read would block, because
    more calls may come."""
    if path != "-":
        return read_named(path, MAX_FILE_BYTES + 1)
    data = b""
    while more := os.read(0, MAX_FILE_BYTES + 1 - len(data)):
        data += more
    return data


def _call(line: bytes, place: str) -> str | tuple[str, int] | None:
    """The call on a line; None if the line has no call."""
    try:
        method, *units = line.decode().partition("#")[0].split() or [""]
    except UnicodeDecodeError:
        raise UsageError(f"{place}: not UTF-8 text; save the file as UTF-8") from None
    if not units:
        return method or None
    if len(units) > 1:
        raise UsageError(f"{place}: {show(' '.join([method, *units]))} is not METHOD [UNITS]")
    digits = units[0].lstrip("0")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 10 and int(digits) <= MAX_CHARGE_UNITS):
        raise UsageError(f"{place}: UNITS {show(units[0])} is not a whole number from 1 to {MAX_CHARGE_UNITS:,}")
    return method, int(digits)
