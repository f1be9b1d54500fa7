"""Options and groups that several commands share: an option of one name means the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import click

from quota.common.text import show
from quota.errors import UsageError
from quota.terms.limits import parse_duration

F = TypeVar("F", bound="Callable[..., Any] | click.Command")


class _Context(click.Context):
    """Names its command in errors of click's parser, which knows no command: they point to that command's help."""

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, tb: TracebackType | None
    ) -> bool | None:
        if isinstance(exc_value, click.UsageError) and exc_value.ctx is None:
            exc_value.ctx = self
        return super().__exit__(exc_type, exc_value, tb)


class Group(click.Group):
    """Commands under one name; without one it prints its help. The error for an unknown one names the nearest, that for
    a wrong option the command. A --config before the name of a command that reads none is an error."""

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
            from difflib import get_close_matches

            near = get_close_matches(args[0], self.list_commands(ctx), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"`{ctx.command_path} --help` lists the commands"
            raise click.UsageError(f"no such command {show(args[0])}; {hint}", ctx) from None
        if command is not None:
            command.context_class = _Context
            config = None if ctx.resilient_parsing else ctx.find_root().params.get("config")
            if (
                config is not None
                and not isinstance(command, Group)
                and all(x.name != "config" for x in command.params)
            ):
                raise click.UsageError(f"`{ctx.command_path} {name}` reads no configuration; leave --config out", ctx)
        return name, command, rest


config_option = click.option(
    "--config",
    metavar="FILE",
    callback=lambda ctx, _, own: ctx.find_root().params.get("config") if own is None else own,
    help="Configuration (default: $QUOTA_CONFIG, ./quota.toml, the user's).",
)
"""The same for every command; without it, the one before the command's name."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
credential_option = click.option("--credential", metavar="C", help="Whose budget; needed if there are several.")
only_credential_option = click.option("--credential", metavar="C", help="Only this credential's project.")
only_job_option = click.option("--job", metavar="J", help="Only what is of this job.")
host_option = click.option(
    "--host", default="127.0.0.1", metavar="ADDRESS", show_default=True, help="Address to listen on."
)


FETCHED_SINCE = "Only what was fetched within this time, for example 7d."


def since_option(default: str | None = None, what: str = "How far back.") -> Callable[[F], F]:
    """`--since DURATION`. Without a default the command looks at all that there is."""
    return click.option("--since", default=default, metavar="DURATION", show_default=True, help=what)


def limit_option(default: int, most: int) -> Callable[[F], F]:
    """`--limit N`, for a list that may be long."""
    kind = click.IntRange(1, most)
    return click.option("--limit", type=kind, default=default, metavar="N", show_default=True, help="Show at most N.")


def port_option(default: int) -> Callable[[F], F]:
    """`--port P`, for a server."""
    kind = click.IntRange(0, 65_535)
    return click.option(
        "--port", type=kind, default=default, metavar="P", show_default=True, help="Port; 0 takes a free one."
    )


def _folder(_ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value == "":  # of a variable that is not set: the metrics would be in whatever folder this is
        raise UsageError(f"{param.opts[0]} '' is not the path of a folder")
    return value


textfile_option = click.option(
    "--textfile", metavar="DIR", callback=_folder, help="Write metrics into this folder, for node_exporter."
)


def duration_ms(option: str, value: str) -> int:
    """The value of an option that is a duration."""
    try:
        return parse_duration(value)
    except ValueError as error:
        raise click.UsageError(f"{option} {error}") from None


def since_ms_of(option: str, since: str | None) -> int:
    """The time that lies so long back; 0 without the option."""
    from quota.common.clock import host_clock

    return 0 if since is None else max(1, host_clock() - duration_ms(option, since))


def call_options(command: Callable[..., Any], method: str = "METHOD", *, required: bool = True) -> Callable[..., Any]:
    """What describes one call: METHOD, --units, --credential, --job, --region."""
    for option in (
        click.option("--region", metavar="R", default="", help="Region that the charge belongs to."),
        click.option(
            "--job", metavar="J", default="", help="Job that the charge belongs to; its limits and `leave` apply."
        ),
        credential_option,
        click.option("--units", type=int, metavar="N", help="Cost in units, instead of the cost book's."),
        click.argument("method", metavar=method, required=required),
    ):
        command = option(command)
    return command
