"""The `quota` command. Each command opens a session, calls one public function and prints the result.

The commands that scripts start all day come here only with arguments that `quota.cli.plain` does not read. Commands of
other packages come from the entry-point group `quota.commands`, which is read only for an unknown command and for
`--help`.
"""

from __future__ import annotations

import gc
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from quota.cli import deciding
from quota.cli.options import (
    Group,
    call_options,
    config_option,
    credential_option,
    json_option,
    since_option,
)
from quota.cli.output import fail, ignore_old_python, output_lost, print_json, print_rich, say
from quota.common.text import many, show
from quota.errors import ConfigError, QuotaError

if TYPE_CHECKING:
    from collections.abc import Callable

WATCH_S = 2

NEIGHBOURS = {
    **dict.fromkeys(("demo", "emulate", "plan", "run", "runs", "schedule", "search", "serve"), "quota.jobs.commands"),
    **{name: f"quota.cli.{name}" for name in ("dashboard", "inbound", "ledger")},
}
"""Our commands and groups in other modules, by name. To look for entry points takes as long as to refuse a tick."""

SECTIONS = {
    "To begin": ("demo", "init", "check", "doctor", "costs", "prove"),
    "Jobs": ("run", "runs", "schedule", "plan", "search", "emulate"),
    "What happens": ("status", "dashboard", "spend", "log", "explain"),
    "For scripts": ("charge", "peek", "exec", "refund", "settle"),
    "Upstream and the ledger": ("reconcile", "reopen", "ledger"),
    "For others": ("serve", "inbound"),
}
"""The order of `quota --help`. A command in none of them, as another package may add, comes last."""


class Commands(Group):
    """The commands in this file, those of NEIGHBOURS, and those that other packages add as entry points."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self.commands, *NEIGHBOURS, *(point.name for point in _entry_points())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        if cmd_name in NEIGHBOURS:
            from importlib import import_module

            found = getattr(import_module(NEIGHBOURS[cmd_name]), cmd_name)
            assert isinstance(found, click.Command)  # noqa: S101  # our own
            return found
        for point in _entry_points():
            if point.name == cmd_name:
                command = point.load()
                assert isinstance(command, click.Command)  # noqa: S101  # the entry-point group's contract
                return command
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = self.list_commands(ctx)
        placed = {name for section in SECTIONS.values() for name in section}
        sections = {**SECTIONS, "More": tuple(name for name in names if name not in placed)}
        width = max(map(len, names))
        for title, section in sections.items():
            commands = [(name.ljust(width), self.get_command(ctx, name)) for name in section if name in names]
            rows = [(name, one.get_short_help_str(formatter.width - 6 - width)) for name, one in commands if one]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _entry_points() -> Any:
    from importlib.metadata import entry_points

    return entry_points(group="quota.commands")


@click.group(
    cls=Commands,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)
@click.option("--config", metavar="FILE", help="Configuration of the command that follows; its own --config wins.")
@click.version_option(package_name="quota-ledger", prog_name="quota")
@click.pass_context
def cli(ctx: click.Context, config: str | None) -> None:
    """The gate between scheduled jobs and a metered API.

    Every call is priced and charged to a shared budget before it leaves. A call that would overspend is refused, and
    the refusal says when to come back.

    \b
    Example:
      quota demo            # try everything on this machine, without a key
      quota init            # write a commented quota.toml
      quota run trending    # one cron tick of a job
      quota status          # what is used and what remains

    Exit status: 0 done; 1 the answer is no, or the work failed; 2 wrong usage; 69 the ledger did not answer;
    75 refused; 78 wrong configuration. Set QUOTA_LOG=info (or debug) to log to stderr,
    QUOTA_LOG_FORMAT=json to log JSON.
    """
    name = ctx.invoked_subcommand
    if name is None:
        click.echo(ctx.get_help())
        ctx.exit(click.UsageError.exit_code)
    command = cli.get_command(ctx, name)
    if config is not None and command is not None and not _reads_config(command):
        raise click.UsageError(f"`quota {name}` reads no configuration; leave --config out", ctx)


def _reads_config(command: click.Command) -> bool:
    commands = [command, *command.commands.values()] if isinstance(command, click.Group) else [command]
    return any(param.name == "config" for one in commands for param in one.params)


# -- decisions ---------------------------------------------------------------------------------------------------------


@cli.command()
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
    if file is None:
        if call["method"] is None:
            raise click.UsageError("say what to charge: METHOD, or --file CALLS for several calls")
    elif call["method"] is not None:
        raise click.UsageError("METHOD and --file are two ways to say what to charge; leave one out")
    elif call["units"] is not None:
        raise click.UsageError("with --file, units go into the file, behind the method: METHOD UNITS")
    return deciding.charge(file=file, **call)


@cli.command()
@call_options
@json_option
@config_option
def peek(**call: Any) -> int:
    """Say what `charge` would decide now. Charges nothing. Exit 75 when it would be refused.

    \b
    Example:
      quota peek search.list || exit 0
    """
    return deciding.peek(**call)


@cli.command()
@click.argument("charge_id", metavar="ID")
@credential_option
@config_option
def refund(charge_id: str, credential: str | None, config: str | None) -> None:
    """Give back a charge whose request never left this machine.

    An unknown ID exits with 1.

    \b
    Example:
      quota refund 1795233255077-0
    """
    _settle(charge_id, 0, credential, config)


@cli.command()
@click.argument("charge_id", metavar="ID")
@click.argument("units", type=int)
@credential_option
@config_option
def settle(charge_id: str, units: int, credential: str | None, config: str | None) -> None:
    """Set what a charge really cost, in units. May be repeated.

    An unknown ID exits with 1.

    \b
    Example:
      quota settle 1795233255077-0 35
    """
    _settle(charge_id, units, credential, config)


def _settle(charge_id: str, units: int, credential: str | None, config: str | None) -> None:
    import quota

    with quota.open(config) as session:
        deciding.say_built_in(session, err=False)
        before = session.budget(credential).settle(charge_id, units)
    say(f"{before.method} {charge_id}: now {many(units, 'unit')}, before {before.units:,}")


class BeforeCommand(click.Command):
    """A command whose own arguments end at the first `--`. The rest belongs to another program and is not parsed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        rest = super().parse_args(ctx, args[:end])
        ctx.params["command"] = args[end + 1 :]
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "-- COMMAND..."]


@cli.command("exec", cls=BeforeCommand)
@click.option("--units", type=int, metavar="N", help="Cost in units, instead of the cost book's.")
@credential_option
@click.option("--job", metavar="J", default="", help="Job that the charge belongs to.")
@click.option("--region", metavar="R", default="", help="Region that the charge belongs to.")
@config_option
@click.argument("method")
def exec_(command: list[str], **call: Any) -> int:
    """Charge METHOD, then run COMMAND.

    If the charge is refused, COMMAND does not run and the exit status is 75. Options for quota come before the first
    `--`, the command after it.

    \b
    Example:
      quota exec search.list -- ./search.sh DE
      quota exec search.list --job nightly -- ./search.sh --region DE
    """
    if not command or not command[0]:
        raise click.UsageError("no command to run; write: quota exec METHOD -- COMMAND...")
    return deciding.charge_and_become(command=command, **call)


# -- what is used ------------------------------------------------------------------------------------------------------


@cli.command()
@click.option("--watch", is_flag=True, help="Refresh every two seconds until Ctrl-C.")
@click.option("--check", "checks", is_flag=True, help="Exit 75 if any credential is full or closed.")
@json_option
@config_option
def status(watch: bool, checks: bool, as_json: bool, config: str | None) -> None:
    """Show whether calls are admitted and what each limit has left.

    OPEN: the cheapest call would be admitted now. FULL: a limit is used up until the time shown. CLOSED: upstream
    reported that its quota is used up. If the ledger does not answer, the exit status is 69.

    \b
    Example:
      quota status
      quota status --check > /dev/null || echo "not now"
      quota status --json | jq '.credentials[].limits[].remaining_units'
      quota status --watch --json     # one line of JSON each time
    """
    import quota
    from quota.cli.render import render_status
    from quota.status import read_status

    if watch and checks:
        raise click.UsageError("--check and --watch cannot be combined: --watch never ends")
    with quota.open(config) as session:
        if as_json:
            deciding.say_built_in(session, err=True)
        if watch and as_json:
            _repeat(lambda: print_json(read_status(session).as_json(), indent=None))
            return
        if watch:
            _watch(lambda: render_status(read_status(session, next_capacity=False)))
            return
        gc.set_threshold(10_000_000)  # of what a status reads nothing is garbage, and of many credentials it reads much
        progress = _said_now_and_then() if sys.stderr.isatty() else None
        current = read_status(session, progress=progress, next_capacity=as_json)  # no table shows it
    if as_json:
        print_json(current.as_json())
    else:
        print_rich(render_status(current))
    if checks:
        click.get_current_context().exit(current.exit_status)


def _said_now_and_then() -> Callable[[int, int], None]:
    """A line for people who wait, every two seconds."""
    from quota.common.clock import elapsed_s

    said_s = elapsed_s()

    def progress(read: int, credentials: int) -> None:
        nonlocal said_s
        if elapsed_s() - said_s >= WATCH_S:
            said_s = elapsed_s()
            say(f"{read:,} of {many(credentials, 'credential')} read", err=True)

    return progress


def _repeat(draw: Callable[[], None]) -> None:
    """Draw again and again, until nobody reads it."""
    import time

    while True:
        draw()
        if output_lost() is not None:
            return
        time.sleep(WATCH_S)


def _watch(render: Callable[[], Any]) -> None:
    if not sys.stdout.isatty():
        _repeat(lambda: print_rich(render()))
        return
    import time

    from rich.live import Live

    with Live(render(), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(WATCH_S)
            live.update(render(), refresh=True)


@cli.command()
@click.option(
    "--by", default="method", metavar="FIELDS", help="Any of method,job,region,run,day,hour,bucket.", show_default=True
)
@since_option
@credential_option
@json_option
@config_option
def spend(by: str, since: str, credential: str | None, as_json: bool, config: str | None) -> None:
    """Show who spent the budget: charges and units, largest first.

    The ledger keeps 35 days by the hour: who charged what, and what was refused. Runs are known as long as the ledger
    has single charges, at least 49 hours. If you ask for more, a line says where the history begins. Another line says
    how many units the limits count for charges that the ledger's log lacks.

    \b
    Example:
      quota spend --by job,region --since 2d
      quota spend --by day --since 30d
    """
    from dataclasses import replace

    import quota
    from quota.cli.render import render_spending, spending_notes
    from quota.common.clock import weekday
    from quota.spending import SPEND_FIELDS, read_spending

    fields = [field.strip() for field in by.split(",")]
    for field in fields:
        if field not in SPEND_FIELDS:
            raise click.UsageError(f"--by {show(field)}: choose from {', '.join(SPEND_FIELDS)}")
    since_ms = _duration(since)
    with quota.open(config) as session:
        deciding.say_built_in(session, err=as_json)
        chosen = session.settings.credentials.values() if credential is None else [session.credential(credential)]
        start_ms = max(0, session.ledger.now_ms() - since_ms)
        projects = {c.project: session.budget(c.name) for c in chosen}
        usage = [sorted(budget.usage(), key=lambda one: one.unlogged_units) for budget in projects.values()]
        fullest = [state for states in usage for state in states[-1:]]
        spending = replace(
            read_spending(session.ledger, projects, fields, start_ms),
            unlogged_units=sum(state.unlogged_units for state in fullest),
            upstream_units=sum(state.upstream_units for state in fullest),
        )
    if as_json:
        print_json(spending.as_json())
        return
    cut = spending.since_ms > start_ms
    if spending.rows:
        print_rich(render_spending(spending))
    else:
        say(f"nothing was charged {f'since {weekday(spending.since_ms)}' if cut else f'in the last {since}'}")
    for note in spending_notes(spending):
        say(note)
    if cut:
        why = "the history does not keep runs" if "run" in fields else "the ledger has dropped older charges"
        say(f"only since {weekday(spending.since_ms)}, not {since}: {why}")
    lost_units = spending.unlogged_units - spending.upstream_units
    if lost_units:
        lost = many(lost_units, "unit")
        say(f"not listed: {lost} of charges that the ledger's log lacks; its limits still count them")
    if spending.upstream_units:
        say(f"not listed: {many(spending.upstream_units, 'unit')} that only upstream counted; see `quota reconcile`")


def _duration(since: str) -> int:
    """The value of `--since` in ms."""
    from quota.limits import parse_duration

    try:
        return parse_duration(since)
    except ValueError as error:
        raise click.UsageError(f"--since {error}") from None


@cli.command()
@since_option
@click.option("--job", metavar="J", help="Only charges of this job.")
@click.option("--method", metavar="M", help="Only charges of this API method.")
@click.option("--refused", is_flag=True, help="Show refused calls instead: the last 100 of a project.")
@credential_option
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON for each.")
@config_option
def log(
    since: str,
    job: str | None,
    method: str | None,
    refused: bool,
    credential: str | None,
    as_json: bool,
    config: str | None,
) -> None:
    """Show single charges with their ids, the newest last.

    The ids are for `quota refund`, `quota settle` and `quota explain`. The ledger keeps single charges as long as the
    longest window needs them, at least 49 hours; `quota spend` sums up 35 days.

    \b
    Example:
      quota log --since 1h --job trending
      quota log --method search.list --json | jq -r .id
      quota log --refused
    """
    import quota
    from quota.cli.log import print_charges, print_refusals

    since_ms = _duration(since)
    with quota.open(config) as session:
        deciding.say_built_in(session, err=as_json)
        chosen = session.settings.credentials.values() if credential is None else [session.credential(credential)]
        books = {one.project: one.book for one in chosen}
        start_ms = max(0, session.ledger.now_ms() - since_ms)
        print_ = print_refusals if refused else print_charges
        print_(session.ledger, books, since, start_ms, job=job, method=method, as_json=as_json)


@cli.command()
@click.argument("charge_id", metavar="[CHARGE-ID | --last]", required=False)
@click.option("--last", is_flag=True, help="The last refusal. So it is without CHARGE-ID, too.")
@click.option("--job", metavar="J", help="The last refusal of this job.")
@credential_option
@json_option
@config_option
def explain(
    charge_id: str | None, last: bool, job: str | None, credential: str | None, as_json: bool, config: str | None
) -> None:
    """Explain the last refusal, or a charge.

    For a refusal: which limit decided, what fills it, when it has room again, and which change would have admitted the
    call. For a charge: who made it, how it was corrected, each limit before and after it, and when it stops counting.

    The ledger keeps the last 100 refusals of a project, and single charges for at least 49 hours. If it has no such
    refusal or charge, the exit status is 1. It asks again for the call that was refused, and charges nothing.

    \b
    Example:
      quota explain
      quota explain --last --job backfill
      quota explain 1795233255077-0
      quota explain --json | jq '.admits'
    """
    import quota
    from quota.cli.explain import render_charge, render_refusal
    from quota.explain.charge import explain_charge
    from quota.explain.refusal import explain_refusal

    if charge_id is not None and (last or job is not None):
        raise click.UsageError(
            "a CHARGE-ID and --last or --job cannot be combined: one is a charge, the other a refusal"
        )
    with quota.open(config) as session:
        deciding.say_built_in(session, err=as_json)
        if charge_id is not None:
            charge = explain_charge(session, charge_id, credential)
            data, text = charge.as_json(), render_charge(charge)
        else:
            refusal = explain_refusal(session, credential, job)
            if refusal is None:
                of = f" of job {show(job)}" if job is not None else ""
                raise QuotaError(
                    f"the ledger keeps no refused call{of}: a process tells it of one within 10 s, or as it ends"
                )
            data, text = refusal.as_json(), render_refusal(refusal)
    if as_json:
        print_json(data)
    else:
        print_rich(text)


@cli.command()
@click.argument("bucket")
@click.option("--because", required=True, metavar="TEXT", help="Why you expect upstream to admit calls again.")
@credential_option
@config_option
def reopen(bucket: str, because: str, credential: str | None, config: str | None) -> None:
    """Open a bucket that upstream reported as used up.

    `quota status` shows the reason until upstream reports it again. If the bucket is not closed, the exit status is 1.

    \b
    Example:
      quota reopen units --because "quota raised to 50,000 today"
    """
    import logging

    import quota
    from quota.common.log import line
    from quota.common.redact import redact
    from quota.common.text import one_line

    reason = one_line(redact(because)).strip()
    if not reason:
        raise click.UsageError("--because needs a reason")
    with quota.open(config) as session:
        deciding.say_built_in(session, err=False)
        project = session.credential(credential).project
        lifted = bucket.isprintable() and session.ledger.reopen(project, bucket, reason)
        known = [x.bucket for x in session.ledger.exhaustions(project) if not x.reopened_ms]
    if not lifted:
        raise QuotaError(
            f"bucket {show(bucket)} of project {project!r} is not closed; closed: {', '.join(known) or 'none'}"
        )
    reopened = line("bucket_reopened", project=project, bucket=bucket, because=reason)
    logging.getLogger("quota").info("%s", reopened)
    say(f"bucket {bucket} of project {project} is open again: {reason}")


@cli.command("reconcile")
@click.option("--dry-run", is_flag=True, help="Compare only; change nothing.")
@click.option("--check", "checks", is_flag=True, help="Exit 1 if the two counts differ.")
@click.option("--credential", metavar="C", help="Only this credential's project.")
@json_option
@config_option
def reconcile_(dry_run: bool, checks: bool, credential: str | None, as_json: bool, config: str | None) -> None:
    """Compare our count with the provider's own, and tighten ours.

    It reads what upstream counted and what it grants from Cloud Monitoring, for every project whose credential has a
    cloud_project. Units that only upstream knows of count here from now on; a smaller quota lowers the limits. Nothing
    is ever freed. The account that `auth` names needs the permission monitoring.timeSeries.list. If upstream's figures
    cannot be had, the exit status is 1 and nothing is changed.

    \b
    Example:
      quota reconcile
      quota reconcile --check || echo "somebody else spends this project"
      quota reconcile > /dev/null     # from cron, every hour
    """
    import quota
    from quota.errors import BadAnswer
    from quota.reconcile.reconcile import chosen_credentials, reconcile

    results, failed = [], False
    with quota.open(config) as session:
        for one in chosen_credentials(session, credential):
            try:
                results.append(reconcile(session, one, commit=not dry_run))
            except BadAnswer as error:  # another project may do better
                failed = True
                fail(f"{one.name}: {error}")
        if failed and not results:
            click.get_current_context().exit(BadAnswer.exit_status)
        if as_json:
            print_json({"dry_run": dry_run, "projects": [result.as_json() for result in results]})
        else:
            from quota.cli.reconciled import render_reconciled

            for result in results:
                print_rich(render_reconciled(result, dry_run=dry_run))
        if session.settings.notify is not None and not dry_run:
            from quota.cli.reconciled import notices_of
            from quota.notify import notify

            notify(session, [notice for result in results for notice in notices_of(result)])
    if failed or (checks and any(result.differs for result in results)):
        click.get_current_context().exit(1)


# -- configuration and prices ------------------------------------------------------------------------------------------


@cli.command()
@click.argument("method", required=False)
@click.option("--book", metavar="NAME", help="A cost book by name, instead of a credential's.")
@credential_option
@json_option
@config_option
def costs(method: str | None, book: str | None, credential: str | None, as_json: bool, config: str | None) -> None:
    """Show what each API method costs, and when its price changes.

    \b
    Example:
      quota costs search.list
      quota costs --book youtube-v3-buckets
    """
    import quota
    from quota.common.clock import NEVER, host_clock
    from quota.settings.books import load_book

    if book is not None:
        chosen = load_book(book)
    else:
        with quota.open(config) as session:
            chosen = session.credential(credential).book
    known, chosen = chosen, chosen.at(host_clock())
    if method is not None:
        chosen.price(method)
    names = [chosen.canonical(method)] if method is not None else sorted(chosen.methods)
    changes_ms = {name: known.price_at(name, host_clock())[1][1] for name in names}
    coming = {name: known.price_at(name, at_ms)[0] for name, at_ms in changes_ms.items() if at_ms != NEVER}
    if as_json:
        print_json(
            {
                "book": chosen.name,
                "source": chosen.source,
                "read_on": chosen.read_on.isoformat(),
                "methods": [
                    {
                        "method": name,
                        "units": chosen.price(name).units,
                        "bucket": chosen.price(name).bucket,
                        "next": {
                            "units": coming[name].units,
                            "bucket": coming[name].bucket,
                            "since": coming[name].since.isoformat(),
                        }
                        if name in coming
                        else None,
                    }
                    for name in names
                ],
            }
        )
        return
    width = max(map(len, names))
    for name in names:
        price = chosen.price(name)
        later = f"; {coming[name].units:,} {coming[name].bucket} from {coming[name].since}" if name in coming else ""
        say(f"{name:<{width}}  {price.units:>6,}  {price.bucket}{later}")
    say(f"cost book {chosen.name}, read on {chosen.read_on} from")
    say(chosen.source)


@cli.command()
@click.argument("path", default="quota.toml", type=click.Path())
@click.option("--force", is_flag=True, help="Replace an existing file.")
def init(path: str, force: bool) -> None:
    """Write a commented configuration to PATH [default: quota.toml].

    \b
    Example:
      quota init && $EDITOR quota.toml && quota check
    """
    from shlex import quote

    from quota.common.resources import read_text

    text = read_text("quota.config", "quota.toml")
    try:
        _write_whole(path, text, replace=force)
    except FileExistsError:
        raise QuotaError(f"{path} exists already; name another file, or use --force to replace it") from None
    except OSError as error:
        raise QuotaError(f"{path} cannot be written: {error.strerror}") from None
    say(f"wrote {path}; set your key and project in it, then run: quota check --config {quote(path)}")


def _write_whole(path: str, text: str, *, replace: bool) -> None:
    """Write all of a file, or leave what was there: a disk may be full. Raises OSError."""
    import os
    from contextlib import suppress

    from quota.common.folders import readable

    mode = None
    if replace:
        with suppress(FileNotFoundError), open(path, "rb", opener=readable) as before:
            mode = os.fstat(before.fileno()).st_mode & 0o777
    written = f"{path}.{os.getpid()}" if replace else path
    with open(written, "x", encoding="utf-8", opener=readable) as file:
        try:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            if replace:
                os.replace(written, path)
        except BaseException:
            os.unlink(written)
            raise


@cli.command("check")
@json_option
@config_option
def check_(as_json: bool, config: str | None) -> None:
    """Check the configuration for errors and surprises. Errors exit with 78.

    It also asks the ledger: a ledger that does not answer is a warning, one that every command will refuse is an error.
    An allowance's journal that cannot be used is a warning.
    `quota doctor` examines the ledger and this machine.

    \b
    Example:
      quota check --config quota.toml
    """
    from quota.cli.check import check
    from quota.session import Session
    from quota.settings.load import load_settings

    with Session(load_settings(config)) as session:  # inbound limits alone need no credential
        findings = check(session)
        source = session.settings.source
    wrong = [finding for finding in findings if finding.level == "error"]
    if as_json:
        print_json({"config": source, "findings": [finding.as_json() for finding in findings]})
    else:
        for finding in findings:
            say(str(finding), err=finding.level == "error")
        if not wrong:
            warnings = f", {many(len(findings), 'warning')}" if findings else ""
            say(f"{source}: no errors{warnings}")
    if wrong:
        click.get_current_context().exit(ConfigError.exit_status)


@cli.command()
@click.option("--call", is_flag=True, help="Also try each key with one call, of a unit or so.")
@click.option("--acl", is_flag=True, help="Only print the least rights on a Redis server. Nothing is contacted.")
@click.option("--project", "projects", metavar="P", multiple=True, help="With --acl: of this project alone.")
@click.option("--cluster", is_flag=True, help="With --acl: on a cluster, whatever the configuration says.")
@json_option
@config_option
def doctor(call: bool, acl: bool, projects: tuple[str, ...], cluster: bool, as_json: bool, config: str | None) -> None:
    """Examine the ledger, this machine and the keys. Errors exit with 1.

    Each line says what was found and, where something is wrong, what to do. `quota check` examines the
    configuration.

    With --acl, stdout has the least rights of the user that the ledger's url names, else of `quota`: a command for
    redis-cli, with PASSWORD for you to replace. Further lines are for the users of its sentinels and of the inbound
    storage, where there are such.

    \b
    Example:
      quota doctor
      quota doctor --acl --project research
      quota doctor --call --json | jq '.findings[] | select(.level != "ok")'
    """
    if acl and call:
        raise click.UsageError("--acl and --call cannot be combined: --acl contacts nothing")
    if acl:
        _print_rights(projects, cluster, as_json, config)
        return
    if projects or cluster:
        raise click.UsageError("--project and --cluster belong to --acl; add it")
    import quota
    from quota.cli.doctor import examine
    from quota.cli.render import render_findings

    with quota.open(config) as session:
        findings = examine(session, call=call)
        source = session.settings.source
    if as_json:
        print_json({"config": source, "findings": [finding.as_json() for finding in findings]})
    else:
        print_rich(render_findings(findings))
    if any(finding.level == "error" for finding in findings):
        click.get_current_context().exit(1)


def _print_rights(projects: tuple[str, ...], cluster: bool, as_json: bool, config: str | None) -> None:
    from quota.cli.rights import acl_lines
    from quota.settings.load import load_settings

    lines = acl_lines(load_settings(config), projects, cluster=cluster)
    if as_json:
        print_json({"acl": lines})
        return
    for line in lines:
        say(line)
    say("In a users.acl, write `user` for `ACL SETUSER`. For `quota ledger move --all`, add +scan.", err=True)
    say("+info may be left out: then nobody sees whether the server's maxmemory-policy is noeviction.", err=True)


@cli.command("prove")
@click.option("--http", "over_http", is_flag=True, help="Bursts of requests against the inbound limits, over HTTP.")
@json_option
def prove_(over_http: bool, as_json: bool) -> None:
    """Show how a fixed window can admit twice its limit; ours cannot.

    With --http a server is started on loopback, for some 5 s, and each algorithm of the inbound limits meets the same
    two bursts as a fixed window.

    \b
    Example:
      quota prove
      quota prove --http
    """
    if over_http:
        _prove_over_http(as_json)
        return
    from quota.cli.prove import MIDNIGHT_MS, prove
    from quota.limits import DAY_MS

    proof = prove()
    if as_json:
        print_json(proof.as_json())
        return
    limit = many(proof.limit_units, "unit")
    click.echo(f"Searches of 100 units around midnight, against a limit of {limit} in 24 hours:\n")
    click.echo(f"{'time':>16}  {'asked':>6}  {'fixed window':>13}  {'sliding window':>14}")
    for row in proof.rows:
        clock_ms = (row.at_ms - MIDNIGHT_MS) % DAY_MS
        minutes, millis = divmod(clock_ms, 60_000)
        day = "Mon" if row.at_ms < MIDNIGHT_MS else "Tue"
        at = f"{day} {minutes // 60:02}:{minutes % 60:02}:{millis // 1000:02}.{millis % 1000:03}"
        click.echo(f"{at:>16}  {row.asked_units:>6}  {row.fixed_units:>13}  {row.sliding_units:>14}")
    click.echo(
        f"\nMost in any 24 hours: fixed {proof.fixed_peak_units:,}, sliding {proof.sliding_peak_units:,}; "
        f"the limit is {proof.limit_units:,}."
    )


def _prove_over_http(as_json: bool) -> None:
    from quota.cli.prove_http import LIMIT, prove_http
    from quota.cli.tables import Column, FirstThatFits, tables

    proof = prove_http()
    if as_json:
        print_json(proof.as_json())
        return
    window = f"{proof.window_ms // 1000} s"
    click.echo(f"{LIMIT} requests, and half a window later {LIMIT} again, against a limit of {LIMIT} in {window}:\n")
    columns = [Column("algorithm"), Column("first", number=True), Column("then", number=True)]
    columns.append(Column(f"most in any {window}", number=True))
    shown = [(row.kind, str(row.first), str(row.second), str(row.most)) for row in proof.rows]
    print_rich(FirstThatFits(tables(columns, shown)))


def run_click() -> int:
    """Run the command that `sys.argv` names, with the arguments as click reads them, and return its exit status."""
    gc.set_threshold(50_000, 20, 50)  # what a command reads it needs to its end: to look for garbage in it takes long
    ignore_old_python()
    try:
        result = cli.main(prog_name="quota", standalone_mode=False)
    except click.ClickException as error:
        fail(_usage(error))
        return 2
    except click.Abort:
        return 130
    return result if isinstance(result, int) else 0


def _usage(error: click.ClickException) -> str:
    message = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "quota"
    if "--help" in message:
        return message
    return f"{message}{' See' if message.endswith('?') else '; see'} `{path} --help`"
