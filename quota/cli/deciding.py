"""The commands that decide and that correct a charge: charge, peek, exec, refund, settle; `prove` decides in memory."""

from __future__ import annotations

import codecs
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource

from quota.budget import MAX_CHARGES, Budget, check_call
from quota.cli.options import PATH, Options, call_options, shared
from quota.cli.output import fail, handling, opened, print_as, print_parts, say, temporary_folder, unprinted
from quota.common.files import read_named
from quota.common.text import listed, many, number_in, show
from quota.decision import Decision
from quota.errors import Refused, UnknownMethod, UsageError, decision_status
from quota.terms.arguments import check_name
from quota.terms.limits import DAY_MS, MAX_UNITS, MINUTE_MS, Calendar, Limit, Selector, Sliding, View, Window

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from quota.clients.instrument.payers import Payers

MAX_FILE_BYTES = 65_536
"""A hundred calls with comments need less. `/dev/zero` has more."""


@click.command()
@click.option("--file", metavar="CALLS", type=PATH, help="Charge the calls in this file together; `-` is stdin.")
@partial(call_options, method="[METHOD | --file CALLS]", required=False)
@shared(Options.format, Options.config)
def charge(file: str | None, method: str | None, units: int | None, **call: Any) -> int:
    """Charge one call of METHOD before it leaves. Exit with 75 if the call is refused.

    --file charges all calls of the file, or none. It makes at most 100 charges; a call charged to two buckets
    makes two. Each line of the file is METHOD [UNITS]; `#` begins a comment. With UNITS, METHOD need not be in the cost
    book. The output shows the units left after all calls.

    \b
    Example:
      quota charge search.list --job backfill --region DE && curl ...
      quota charge videos.list --json
      printf 'search.list\\nvideos.list 3\\n' | quota charge --file -
    """
    if file is None and method is None:
        raise click.UsageError("say what to charge: METHOD, or --file CALLS for several calls")
    if file is None:
        return _decide(commit=True, method=method, units=units, **call)
    if method is not None:
        raise click.UsageError("METHOD and --file cannot be combined: leave METHOD or --file out")
    if units is not None:
        raise click.UsageError("with --file, write the units into the file, after the method: METHOD UNITS")
    return _charge_together(file=file, **call)


@click.command()
@call_options
@shared(Options.format, Options.config)
def peek(**call: Any) -> int:
    """Show what `quota charge` would decide now, and charge nothing.

    If the call would be refused, the exit status is 75.

    \b
    Example:
      quota peek search.list || exit 0
    """
    return _decide(commit=False, **call)


def _decide(*, commit: bool, credential: str | None, config: str | None, form: str, **call: Any) -> int:
    with opened(config, err=form == "json") as session:
        budget = session.budget(credential)
        with units_instead():
            decision = (budget.charge if commit else budget.peek)(**call)
        return _show([decision], form, decision.as_json(), f"the charge stands, its id is {decision.id}")


def _charge_together(*, file: str, credential: str | None, job: str, region: str, config: str | None, form: str) -> int:
    name, lines = read_calls(file)
    with opened(config, err=form == "json") as session:
        budget = session.budget(credential)
        check_name("job", job)
        with units_instead("METHOD UNITS"):
            decisions = budget.charge_many(_calls(name, lines, budget, job), job=job, region=region)
        data = [decision.as_json() for decision in decisions]
        return _show(decisions, form, data, f"the charges stand, their ids are {decisions[0].id} to {decisions[-1].id}")


def _show(decisions: Sequence[Decision], form: str, data: object, stands: str) -> int:
    """Print one decision, or those of calls that were charged together. Returns the exit status. Call it before the
    session ends: then the session reports a refusal to the ledger, and may wait for it."""
    first, status = decisions[0], decision_status(decisions[0])
    in_json = print_as(form, data)
    if first.admitted and not in_json:
        say(*(decision.sentence() + (f"; id {decision.id}" if decision.id else "") for decision in decisions))
        if len(decisions) > 1:
            units = many(sum(decision.cost_units for decision in decisions), "unit")
            say(f"{many(len(decisions), 'call')}, {units} charged together; {first.left()} left after all of them")
    # The JSON says why a budget refuses, but not what is wrong with the ledger or the configuration.
    if not first.admitted and (not in_json or status != Refused.exit_status):
        fail(first.sentence())
    unprinted(stands if first.id else "")
    return status


@click.command()
@click.argument("charge_id", metavar="ID")
@shared(Options.credential, Options.config)
def refund(charge_id: str, credential: str | None, config: str | None) -> None:
    """Give back the charge for a request that was never sent.

    If the call was charged to several buckets, each bucket gets its units back. If the ID is unknown, the exit
    status is 1.

    \b
    Example:
      quota refund 1795233255077-0ff326d374b1gnQ2ZQJQO7o
    """
    _correct(charge_id, None, credential, config)


@click.command(context_settings={"ignore_unknown_options": True})  # -3 is a number, and is refused as one
@click.argument("charge_id", metavar="ID")
@click.argument("units", type=int)
@shared(Options.credential, Options.config)
def settle(charge_id: str, units: int, credential: str | None, config: str | None) -> None:
    """Set the real cost of a charge, in units. You may repeat this.

    If the call was charged to several buckets, the command sets the cost in the first bucket. If the ID is unknown, the
    exit status is 1.

    \b
    Example:
      quota settle 1795233255077-0ff326d374b1gnQ2ZQJQO7o 35
    """
    _correct(charge_id, units, credential, config)


def _correct(charge_id: str, units: int | None, credential: str | None, config: str | None) -> None:
    with opened(config, err=False) as session:
        budget = session.budget(credential)
        before = budget.refund(charge_id) if units is None else budget.settle(charge_id, units)
    say(f"{before.method} {charge_id}: now {many(units or 0, 'unit')}, before {before.units:,}")
    unprinted("the correction stands")


@contextmanager
def units_instead(units: str = "--units N") -> Iterator[None]:
    """Adds to an UnknownMethod error that the command also takes units."""
    try:
        yield
    except UnknownMethod as error:
        raise UnknownMethod(f"{error} Or give its units: {units}") from None


# -- several calls, from a file ----------------------------------------------------------------------------------------


def read_calls(path: str) -> tuple[str, list[bytes]]:
    """What messages call a file, `-` for stdin, and its lines. Raises UsageError."""
    name = "calls from stdin" if path == "-" else f"calls {show(path)}"
    try:
        if path != "-":
            data = read_named(path, MAX_FILE_BYTES + 1)
        else:
            data = b""
            # A read that would block fails, because more calls may come.
            while more := os.read(0, MAX_FILE_BYTES + 1 - len(data)):
                data += more
    except OSError as error:
        raise UsageError(
            f"{name}: cannot be read: {error.strerror}; name a file with METHOD [UNITS] on each line, or - for stdin"
        ) from None
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"{name}: larger than {MAX_FILE_BYTES >> 10} KiB, so it is not a list of calls")
    return name, data.removeprefix(codecs.BOM_UTF8).splitlines()


def _calls(name: str, lines: Sequence[bytes], budget: Budget, job: str) -> list[str | tuple[str, int]]:
    """The calls as `Budget.charge_many` takes them: `METHOD [UNITS]` on a line, `#` begins a comment. Raises
    UsageError, with its line, for a call that can never succeed."""
    calls: list[str | tuple[str, int]] = []
    for number, line in enumerate(lines, 1):
        try:
            if (call := _call(line)) is None:
                continue
            if len(calls) == MAX_CHARGES:
                raise UsageError(f"more than {MAX_CHARGES} calls cannot be charged together; make two files")
            check_call(budget, call, job)
            calls.append(call)
        except UsageError as error:
            raise type(error)(f"{name}, line {number}: {error}") from None
    if not calls:
        raise UsageError(f"{name}: no call in it; write METHOD [UNITS] on a line")
    return calls


def _call(line: bytes) -> str | tuple[str, int] | None:
    """The call on a line; None if the line has no call."""
    try:
        method, *units = line.decode().partition("#")[0].split() or [""]
    except UnicodeDecodeError:
        raise UsageError("not UTF-8 text; save the file as UTF-8") from None
    if not units:
        return method or None
    if len(units) > 1:
        raise UsageError(f"{show(' '.join([method, *units]))} is not METHOD [UNITS]")
    number = number_in(units[0], 1, MAX_UNITS)
    if number is None:
        raise UsageError(f"UNITS {show(units[0])} is not a whole number from 1 to {MAX_UNITS:,}")
    return method, number


# -- exec: charge a call and become another program, or charge each request of a Python program ------------------------

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
        if end < len(args):  # completion then knows that METHOD is there
            ctx.set_parameter_source("method", ParameterSource.COMMANDLINE)
        ctx.params["command"] = args[end + 1 :]
        return rest

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Options, and files for the command."""
        return [*PATH.shell_complete(ctx, self.params[0], incomplete), *super().shell_complete(ctx, incomplete)]

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "-- COMMAND..."]


@click.command("exec", cls=BeforeCommand)
@click.option("--auto", is_flag=True, help="Charge each HTTP request of a Python program, instead of METHOD.")
@click.option("--summary", is_flag=True, help="With --auto: print at the end what the run spent.")
@partial(call_options, method="[METHOD | --auto]", required=False)
@shared(Options.config)
def exec_(*, auto: bool, summary: bool, method: str | None, command: list[str], config: str | None, **call: Any) -> int:
    """Charge METHOD, then run COMMAND.

    If the charge is refused, COMMAND does not run and the exit status is 75. Options for quota come before the first
    `--`, and the command after it.

    With --auto, COMMAND is a Python program, or starts Python programs. Each request to the API of a credential is
    charged before it leaves. If a refusal ends the program, the exit status is 75; if the ledger did not answer, 69; if
    the call can never fit, 2. If several credentials could pay, --credential names the payer; without it, the most
    specific route of their cost books decides.

    \b
    Example:
      quota exec search.list -- ./search.sh DE
      quota exec search.list --job nightly -- ./search.sh --region DE
      quota exec --auto --summary -- python etl.py
    """
    if summary and not auto:
        raise click.UsageError("--summary belongs to --auto")
    if method is None and not auto:
        raise click.UsageError("say what to charge: METHOD, or --auto for the requests of a Python program")
    if not command or not command[0]:
        raise click.UsageError(f"no command to run; write: quota exec {'--auto' if auto else 'METHOD'} -- COMMAND...")
    credential = call.pop("credential")
    if method is None or auto:
        if method is not None or call["units"] is not None or call["region"]:
            raise click.UsageError("with --auto each request names its method; leave METHOD, --units and --region out")
        return _auto(command, config, credential, call["job"], summary=summary)
    with opened(config, err=True) as session:
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
            from quota.session import Session  # late: `--help` needs none

            with Session(session.settings) as again:  # the command did not start, so no call left
                again.budget(credential).refund(decision.id)
            refunded = "; the charge was refunded"
        return _not_started(command, error, refunded)


def _auto(command: list[str], config: str | None, credential: str | None, job: str, *, summary: bool) -> int:
    from quota.auto import payers_of
    from quota.clients.instrument.processes import REMEDY, unseen_program

    program = unseen_program(command)
    if program is not None:
        fail(f"{program} is not instrumented: {REMEDY}")
    with opened(config, err=True) as session:
        payers = payers_of(session, credential)
        environment = _environment(session.settings.path, credential, job)
    if summary:
        return _run_and_sum_up(command, environment, payers)
    try:
        _become(command, environment)
    except OSError as error:
        return _not_started(command, error)


def _not_started(command: list[str], error: OSError, refunded: str = "") -> int:
    fail(f"{command[0]}: {error.strerror}{refunded}")
    return 127 if isinstance(error, FileNotFoundError) else 126


def _become(command: list[str], env: Mapping[str, str] = os.environ) -> NoReturn:
    """Replace this process by another program, with default signal handling. Python ignores SIGPIPE and SIGXFSZ, and
    the program would inherit that: `yes | head` would not end.
    """
    with handling(dict.fromkeys((signal.SIGPIPE, signal.SIGXFSZ), signal.SIG_DFL)):
        os.execvpe(command[0], command, env)  # noqa: S606  # running the caller's command is the purpose


# -- --auto: no change to the program ----------------------------------------------------------------------------------


def _environment(config: Path | None, credential: str | None, job: str) -> dict[str, str]:
    """The environment that instruments every Python, with the configuration in this file."""
    given = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH")))),
        "QUOTA_AUTO_HOME": str(SITE.parents[2]),
        "QUOTA_AUTO_CREDENTIAL": credential or "",
    }
    if config is not None:
        given["QUOTA_CONFIG"] = os.path.abspath(config)  # absolute: the program may change its folder
    if job:
        given["QUOTA_JOB"] = job
    return {**os.environ, **given}


def _run_and_sum_up(command: list[str], environment: Mapping[str, str], payers: Payers) -> int:
    """Run a command to its end, and print what it and its children spent, by method. Its processes count that in a
    folder."""
    from quota.clients.instrument import TALLY
    from quota.clients.instrument.processes import Total, spent_in
    from quota.wording import Table

    with temporary_folder("tally") as tally:
        try:
            status = _run(command, {**environment, TALLY: tally})
        except OSError as error:
            return _not_started(command, error)
        methods, had_python = spent_in(tally), any(Path(tally).iterdir())
    spent = reduce(Total.plus, methods.values(), Total())
    if methods:
        rows = [(method, *(f"{number:,}" for number in row)) for method, row in methods.items()]
        headings = ("method", *Total._fields)
        print_parts([Table(headings, rows, numbers=range(1, len(headings)))], err=True)
    line = f"{many(spent.calls, 'call')}, {many(spent.units, 'unit')}, {spent.refused:,} refused"
    if not had_python:
        line += "; no Python ran that quota can instrument"
    elif not methods:
        line += f"; quota charged no request to {listed(payers.hosts)} (free calls aside)"
        line += "; see docs/auto.md for what it cannot see, or name another address as `endpoint` of the credential"
    elif payers.adds_buckets_up(methods):
        line += "; units of several buckets are added up"
    say(line, err=True)
    return status


def _run(command: list[str], env: Mapping[str, str]) -> int:
    """Run a command as a child. Returns its exit status as a shell does. Raises OSError if it does not start."""
    import subprocess

    with subprocess.Popen(command, env=env) as running:  # noqa: S603  # running the caller's command is the purpose
        handlers: dict[int, Any] = dict.fromkeys(FORWARDED, lambda got, _: running.send_signal(got))
        handlers[signal.SIGINT] = signal.SIG_IGN  # the terminal signals the program, too
        with handling(handlers):
            status = running.wait()
    return 128 - status if status < 0 else status


# -- prove: a fixed window and a sliding window at midnight ------------------------------------------------------------

LIMIT_UNITS = 500
MIDNIGHT_MS = 20_000 * DAY_MS
BURSTS = (
    (-2 * MINUTE_MS, 3),
    (-MINUTE_MS, 3),
    (-1, 2),
    (0, 3),
    (MINUTE_MS, 3),
    (DAY_MS - 2 * MINUTE_MS - 1, 1),
    (DAY_MS - 2 * MINUTE_MS, 4),
)
"""The times after midnight, and how many searches each burst has."""


@click.command("prove", short_help="Show that a fixed window overspends at midnight.")
@shared(Options.format)
def prove(form: str) -> None:
    """Show that a fixed window can admit twice its limit, and a sliding window cannot.

    It charges the same bursts around midnight to both windows, in memory.

    \b
    Example:
      quota prove
    """
    rows = list(_admitted())
    peaks = {}
    for window in ("fixed", "sliding"):
        spent = [(row["offset_ms"], row[f"{window}_units"]) for row in rows]
        of_days = [sum(units for ms, units in spent if end_ms - DAY_MS < ms <= end_ms) for end_ms, _ in spent]
        peaks[f"{window}_peak_units"] = max(of_days)  # the most in any 24 hours
    if print_as(form, {"limit_units": LIMIT_UNITS, **peaks, "rows": rows}):
        return
    limit = many(LIMIT_UNITS, "unit")
    click.echo(f"Searches of 100 units around midnight, against a limit of {limit} in 24 hours:\n")
    click.echo(f"{'time':>16}  {'asked':>6}  {'fixed window':>13}  {'sliding window':>14}")
    for row in rows:
        minutes, millis = divmod(row["offset_ms"] % DAY_MS, 60_000)
        day = "Mon" if row["offset_ms"] < 0 else "Tue"
        at = f"{day} {minutes // 60:02}:{minutes % 60:02}:{millis // 1000:02}.{millis % 1000:03}"
        click.echo(f"{at:>16}  {row['asked_units']:>6}  {row['fixed_units']:>13}  {row['sliding_units']:>14}")
    fixed, sliding = peaks.values()
    click.echo(f"\nMost in any 24 hours: fixed {fixed:,}, sliding {sliding:,}; the limit is {LIMIT_UNITS:,}.")


def _admitted() -> Iterator[dict[str, int]]:
    """Charge bursts of searches around one midnight, to a ledger in memory whose clock this function sets. Yields for
    each burst the units that it asked for, and the units that each kind of window admitted."""
    from quota.deciding.project import Project
    from quota.ledger.factory import open_ledger
    from quota.settings.books import load_book

    now_ms = MIDNIGHT_MS
    ledger, book = open_ledger("memory:", clock=lambda: now_ms), load_book("youtube-v3")
    windows: dict[str, Window] = {"fixed_units": Calendar("day", "UTC"), "sliding_units": Sliding(DAY_MS)}
    budgets = {
        column: Budget(
            credential="proof",
            book=book,
            limits=[Limit("day", LIMIT_UNITS, View(Selector(), window), LIMIT_UNITS, 0)],
            project=Project(ledger, column, clock=lambda: now_ms),
        )
        for column, window in windows.items()
    }
    for offset_ms, searches in BURSTS:
        now_ms = MIDNIGHT_MS + offset_ms
        row = {"offset_ms": offset_ms, "asked_units": searches * 100}
        for column, budget in budgets.items():
            row[column] = sum(100 for _ in range(searches) if budget.charge("search.list").admitted)
        yield row
    ledger.close()
