"""The options that several commands share. An option means the same in every command: CONTRIBUTING.md has the
grammar, and `tests/unit/cli/test_grammar.py` checks each command against it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import click

from quota.common.clock import host_clock
from quota.common.text import nearest, number_in, show
from quota.errors import UsageError
from quota.terms.limits import parse_duration

F = TypeVar("F", bound="Callable[..., Any] | click.Command")


class Group(click.Group):
    """Commands under one name. Without a command it prints its help. The error for an unknown command names the nearest
    command. `--config` before a command that reads no configuration is an error."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help())
            ctx.exit(click.UsageError.exit_code)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            name, command, rest = super().resolve_command(ctx, args)
        except click.UsageError:
            hint = nearest(args[0], self.list_commands(ctx), f"`{ctx.command_path} --help` lists the commands")
            raise click.UsageError(f"no such command {show(args[0])}; {hint}", ctx) from None
        if command is None or isinstance(command, Group) or ctx.resilient_parsing:
            return name, command, rest
        takes_config = any(option.name == "config" for option in command.params)
        if not takes_config and ctx.find_root().params.get("config") is not None:
            raise click.UsageError(f"`{ctx.command_path} {name}` reads no configuration; leave --config out", ctx)
        return name, command, rest


PATH = click.Path(readable=False)
"""A path that shells complete. The command itself checks it."""

# -- what comes out ----------------------------------------------------------------------------------------------------


_A_ROW = "One line of JSON for each row."


def _formats(*formats: str, short: str = "The same as --format json.") -> Callable[[F], F]:
    """`--format`, whose default is the first of these, and `--json`, its short form. The command gets the `form`."""

    def decorate(command: Any) -> Any:
        @wraps(command)
        def with_format(*, form: str | None, as_json: bool, **rest: Any) -> Any:
            if as_json and form not in (None, "json"):
                raise click.UsageError(f"--json is --format json; leave --json or --format {form} out")
            return command(form="json" if as_json else form or formats[0], **rest)

        with_format = click.option("--json", "as_json", is_flag=True, help=short)(with_format)
        what = f"What to print.  [default: {formats[0]}]"
        return click.option("--format", "form", type=click.Choice(formats), help=what)(with_format)

    return decorate


# -- which rows --------------------------------------------------------------------------------------------------------


def list_options(
    *, since: str | None, what: str = "How far back.", limit: int | None, most: int = 1_000_000
) -> Callable[[F], F]:
    """`--since DURATION`, `--limit N` and `--job J`. Without a default a list has all rows."""

    def decorate(command: F) -> F:
        command = limit_option(limit, most)(shared(Options.only_job)(command))
        return click.option("--since", default=since, metavar="DURATION", show_default=True, help=what)(command)

    return decorate


def limit_option(default: int | None, most: int) -> Callable[[F], F]:
    """`--limit N`, for a list that may be long."""
    kind = click.IntRange(1, most)
    return click.option("--limit", type=kind, default=default, metavar="N", show_default=True, help="At most N rows.")


FETCHED_SINCE = "Only data fetched within this time, for example 7d."


# -- where to listen ---------------------------------------------------------------------------------------------------


class Listen(NamedTuple):
    """An address to listen on."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def listen_option(default: Listen, *, required: bool = True) -> Callable[[F], F]:
    """`--listen HOST:PORT`, for a server. Without it the command gets the default; None if it need not listen so."""

    def parsed(ctx: click.Context, param: click.Parameter, value: str | None) -> Listen | None:
        if value is None:
            return default if required else None
        host, _, digits = value.rpartition(":")
        port = number_in(digits, 0, 65_535)
        if port is None or not re.fullmatch(r"\[[^][]+\]|[^][:/@]+", host):
            raise click.UsageError(f"{param.opts[0]} {show(value)}: write HOST:PORT, for example {default}", ctx)
        return Listen(host.strip("[]"), port)

    return click.option(
        "--listen",
        "listen_at",
        metavar="HOST:PORT",
        callback=parsed,
        help=f"Where to listen; port 0 takes a free port.  [default: {default}]",
    )


def _folder(_ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value == "":  # a variable that is not set; the working folder would get the metrics
        raise UsageError(f"{param.opts[0]} '' is not the path of a folder")
    return value


class Options:
    """The options of several commands, each as people type it, some with what they mean here. A command without a
    `--config` of its own takes the one before its name. CSV has a header and a line for each row. `records` are for an
    export, which no person reads."""

    config = click.option(
        "--config",
        metavar="FILE",
        type=PATH,
        callback=lambda ctx, _, own: ctx.find_root().params.get("config") if own is None else own,
        help="Configuration file  [default: $QUOTA_CONFIG, ./quota.toml, the user's]",
    )
    credential = click.option("--credential", metavar="C", help="The credential to use, if there are several.")
    credential_of_book = click.option("--credential", metavar="C", help="The cost book of this credential.")
    only_credential = click.option("--credential", metavar="C", help="Only this credential's project.")
    only_job = click.option("--job", metavar="J", help="Only this job.")
    dry_run = click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
    yes = click.option("--yes", is_flag=True, help="Do it without asking.")
    clock = click.option(
        "--clock", "at", metavar="TIME", help="Rehearse at TIME (+1d, or RFC 3339) on a copied ledger and store."
    )
    textfile = click.option(
        "--textfile",
        metavar="DIR",
        type=PATH,
        callback=_folder,
        help="Write metrics into this folder, for node_exporter.",
    )
    format = _formats("text", "json")
    format_of_rows = _formats("text", "json", "csv")
    format_of_lines = _formats("text", "json", "csv", short=_A_ROW)
    format_of_records = _formats("json", "csv", short=_A_ROW)


def shared(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """These of `Options`, in this order."""

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def apart(**options: object) -> None:
    """Refuse options that cannot be combined, by their names."""
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)} cannot be combined: leave one out")


def duration_ms(option: str, value: str) -> int:
    """The milliseconds in the value of an option. Raises UsageError."""
    try:
        return parse_duration(value)
    except ValueError as error:
        raise click.UsageError(f"{option} {error}") from None


def since_ms_of(since: str | None) -> int:
    """The time so long ago; 0 without `--since`."""
    return 0 if since is None else max(1, host_clock() - duration_ms("--since", since))


def call_options(command: Callable[..., Any], method: str = "METHOD", *, required: bool = True) -> Callable[..., Any]:
    """The options of one call: METHOD, --units, --credential, --job, --region."""
    for option in (
        click.option("--region", metavar="R", default="", help="The region of the call."),
        click.option("--job", metavar="J", default="", help="The job of the call. Its limits and `leave` apply."),
        shared(Options.credential),
        click.option("--units", type=int, metavar="N", help="Cost in units, instead of the price in the cost book."),
        click.argument("method", metavar=method, required=required),
    ):
        command = option(command)
    return command
