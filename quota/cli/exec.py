"""`quota exec` charges a call and becomes another program; with --auto it charges each attempt of a Python program."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

import quota
from quota.cli.deciding import units_instead
from quota.cli.options import call_options, config_option
from quota.cli.output import fail, say, say_built_in
from quota.common.text import listed, many
from quota.errors import decision_status

SITE = Path(__file__).absolute().parent / "site"
"""The folder of the `sitecustomize.py` that instruments a Python."""

FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


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
@click.option("--summary", is_flag=True, help="With --auto: print at the end what the run spent.")
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

    With --auto COMMAND is a Python program, or starts Python programs. Each request to a host that a cost book names is
    charged before it leaves. If a refusal ends Python, the exit status is 75. If several credentials could pay, name
    one with --credential.

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
        with units_instead():
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
        raise click.UsageError("with --auto each request names its method; leave METHOD, --units and --region out")
    from quota.clients.instrument.unseen import REMEDY, unseen_program

    program = unseen_program(command)
    if program is not None:
        fail(f"{program} is not instrumented: {REMEDY}")
    try:
        if summary:
            return _run_and_sum_up(command, config, credential, job)
        _become(command, _environment(config, credential, job))
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


# -- --auto: no change to the program ----------------------------------------------------------------------------------


def _environment(config: str | None, credential: str | None, job: str, tally: str = "") -> dict[str, str]:
    """The environment that instruments every Python. Its processes count in the folder `tally` what they spend. Raises
    ConfigError or UsageError for a wrong configuration or one without hosts."""
    from quota.auto import TALLY, payers_of

    with quota.open(config) as session:
        say_built_in(session, err=True)
        payers_of(session, credential)
        path = session.settings.path
    given = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH")))),
        "QUOTA_AUTO_HOME": str(SITE.parents[2]),
        "QUOTA_AUTO_CREDENTIAL": credential or "",
        TALLY: tally,
    }
    if path is not None:
        given["QUOTA_CONFIG"] = os.path.abspath(path)  # absolute: the program may change its folder
    if job:
        given["QUOTA_JOB"] = job
    return {**os.environ, **given}


def _run_and_sum_up(command: list[str], config: str | None, credential: str | None, job: str) -> int:
    """Run a command to its end, and print what it and its children spent. Raises OSError if it does not start."""
    import tempfile

    from quota.auto import payers_of
    from quota.clients.instrument.tally import Spent, spent_in

    with tempfile.TemporaryDirectory(prefix="quota-") as tally:
        status = _run(command, _environment(config, credential, job, tally))
        spent, had_python = spent_in(tally), any(Path(tally).iterdir())
    line = f"{many(spent.calls, 'call')}, {many(spent.units, 'unit')}, {spent.refused:,} refused"
    if not had_python:
        line += "; no Python ran that quota can instrument"
    elif spent == Spent():
        with quota.open(config) as session:
            line += f"; charged is what goes to {listed(payers_of(session, credential).hosts)}"
            line += "; name another address as `endpoint` of the credential"
    say(line, err=True)
    return status


def _run(command: list[str], env: Mapping[str, str]) -> int:
    """Run a command as a child. Returns its exit status as a shell does."""
    import subprocess

    with subprocess.Popen(command, env=env) as running:  # noqa: S603  # running the caller's command is the purpose
        before = {number: signal.signal(number, lambda got, _: running.send_signal(got)) for number in FORWARDED}
        before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal signals the program, too
        try:
            status = running.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return 128 - status if status < 0 else status
