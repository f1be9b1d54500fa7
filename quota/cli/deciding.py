"""The commands that decide, and those that correct a charge: charge, peek, exec, refund, settle."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import click

import quota
from quota.cli.options import call_options, config_option, credential_option, json_option
from quota.cli.output import fail, print_json, say, say_built_in, unprinted
from quota.common.text import many
from quota.errors import UnknownMethod, decision_status


@click.command()
@click.option("--file", metavar="CALLS", help="Charge the calls in this file together; `-` is stdin.")
@partial(call_options, method="[METHOD | --file CALLS]", required=False)
@json_option
@config_option
def charge(file: str | None, **call: Any) -> int:
    """Charge one call of METHOD before it leaves. Exit 75 when refused.

    With --file up to 100 calls are charged in one step, all or none. Each line is METHOD [UNITS]; `#` begins a comment.
    A METHOD with its units may have any name. The units left are those after all calls.

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
        raise click.UsageError("METHOD and --file are two ways to say what to charge; leave one out")
    if call["units"] is not None:
        raise click.UsageError("with --file, units go into the file, behind the method: METHOD UNITS")
    return _charge_together(file=file, **call)


@click.command()
@call_options
@json_option
@config_option
def peek(**call: Any) -> int:
    """Say what `charge` would decide now. Charges nothing. Exit 75 when it would be refused.

    \b
    Example:
      quota peek search.list || exit 0
    """
    return _decide(commit=False, **call)


def _decide(*, commit: bool, credential: str | None, config: str | None, as_json: bool, **call: Any) -> int:
    with quota.open(config) as session:
        say_built_in(session, err=as_json)
        budget = session.budget(credential)
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


def _charge_together(
    *, file: str, credential: str | None, job: str, region: str, config: str | None, as_json: bool, **_none: None
) -> int:
    from quota.cli.calls import check_calls, read_calls

    lines = read_calls(file)
    with quota.open(config) as session:
        say_built_in(session, err=as_json)
        budget = session.budget(credential)
        with _units_instead("METHOD UNITS"):
            check_calls(budget, lines, job)
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
    """Give back a charge whose request never left this machine.

    Of a call of several buckets it gives back all. An unknown ID exits with 1.

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
    """Set what a charge really cost, in units. May be repeated.

    Of a call of several buckets it sets what it cost in the first. An unknown ID exits with 1.

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


class BeforeCommand(click.Command):
    """A command whose own arguments end at the first `--`. The rest belongs to another program and is not parsed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        try:
            rest = super().parse_args(ctx, args[:end])
        except click.UsageError as error:
            if end < len(args):
                raise
            raise click.UsageError(f"{error.format_message().rstrip('.')}; write -- before the command", ctx) from None
        ctx.params["command"] = args[end + 1 :]
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "-- COMMAND..."]


@click.command("exec", cls=BeforeCommand)
@click.option("--auto", is_flag=True, help="Charge each HTTP request of a Python program, instead of METHOD.")
@click.option("--summary", is_flag=True, help="With --auto: say at the end what was spent.")
@partial(call_options, method="[METHOD | --auto]", required=False)
@config_option
def exec_(
    *,
    auto: bool,
    summary: bool,
    method: str | None,
    command: list[str],
    credential: str | None,
    config: str | None,
    **call: Any,
) -> int:
    """Charge METHOD, then run COMMAND.

    If the charge is refused, COMMAND does not run and the exit status is 75. Options for quota come before the first
    `--`, the command after it.

    With --auto COMMAND is a Python program, or starts some. Each request to a host that a cost book names is charged
    before it leaves. If an error about a refusal ends Python, the exit status is 75. Where several credentials could
    pay, it is the one named.

    \b
    Example:
      quota exec search.list -- ./search.sh DE
      quota exec search.list --job nightly -- ./search.sh --region DE
      quota exec --auto --summary -- python etl.py
    """
    if auto:
        return _auto(summary=summary, method=method, command=command, credential=credential, config=config, **call)
    if summary:
        raise click.UsageError("--summary belongs to --auto")
    if method is None:
        raise click.UsageError("say what to charge: METHOD, or --auto for the requests of a Python program")
    if not command or not command[0]:
        raise click.UsageError("no command to run; write: quota exec METHOD -- COMMAND...")
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
        refunded = ""
        if decision.id is not None:
            with quota.open(config) as session:  # the command did not start, so no call left
                session.budget(credential).refund(decision.id)
            refunded = "; the charge was refunded"
        return _not_started(command, error, refunded)


def _auto(
    *,
    summary: bool,
    method: str | None,
    command: list[str],
    credential: str | None,
    config: str | None,
    job: str,
    region: str,
    units: int | None,
) -> int:
    if not command or not command[0]:
        raise click.UsageError("no command to run; write: quota exec --auto -- COMMAND...")
    if method is not None or units is not None or region:
        raise click.UsageError("with --auto each request says what it is; leave METHOD, --units and --region out")
    from quota.cli.instrumented import environment_of, run_and_sum_up

    try:
        if summary:
            return run_and_sum_up(command, config, credential, job)
        _become(command, environment_of(config, credential, job))
    except OSError as error:
        return _not_started(command, error)


def _not_started(command: list[str], error: OSError, refunded: str = "") -> int:
    fail(f"{command[0]}: {error.strerror}{refunded}")
    return 127 if isinstance(error, FileNotFoundError) else 126


def _become(command: list[str], env: Mapping[str, str] = os.environ) -> NoReturn:
    """Replace this process by another program, with default signal handling. Python ignores SIGPIPE and SIGXFSZ, and
    the program would inherit that: `yes | head` would not end.
    """
    before = {
        number: signal.signal(number, signal.SIG_DFL)
        for number in (getattr(signal, name, None) for name in ("SIGPIPE", "SIGXFSZ"))
        if number is not None
    }
    try:
        os.execvpe(command[0], command, env)  # noqa: S606  # running the caller's command is the purpose
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _units_instead(units: str = "--units N") -> Iterator[None]:
    """Adds to an UnknownMethod error what else the command can do."""
    try:
        yield
    except UnknownMethod as error:
        raise UnknownMethod(f"{error} Or give its units: {units}") from None
