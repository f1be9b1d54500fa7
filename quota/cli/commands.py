"""The `quota` command: where each command stands, and what is the same for all of them.

A command's module is imported once the command is named. Commands of other packages come from the entry-point group
`quota.commands`, which is read only for an unknown command and for `--help`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from quota.cli.options import Group
from quota.cli.output import fail, ignore_old_python

OURS = {
    **{name: f"quota.cli.deciding:{name}" for name in ("charge", "peek", "refund", "settle")},
    "exec": "quota.cli.deciding:exec_",
    **{name: f"quota.cli.reports:{name}" for name in ("status", "spend", "log", "explain", "reopen")},
    "reconcile": "quota.cli.reports:reconcile_",
    **{name: f"quota.cli.configuration:{name}" for name in ("init", "doctor")},
    **{name: f"quota.cli.configuration:{name}_" for name in ("check", "prove")},
    **{name: f"quota.cli.{name}:{name}" for name in ("costs", "dashboard", "inbound", "ledger", "proxy")},
    "run": "quota.jobs.tick:run",
    **{
        name: f"quota.jobs.commands:{name}"
        for name in ("demo", "emulate", "plan", "runs", "schedule", "search", "serve")
    },
    **{name: f"quota.jobs.data:{name}" for name in ("export", "place", "tables")},
}
"""Our commands and groups, and where each stands. To look for entry points takes as long as to refuse a tick."""

SECTIONS = {
    "To begin": ("demo", "init", "check", "doctor", "costs", "prove"),
    "Jobs": ("run", "runs", "schedule", "plan", "place", "search", "export", "tables", "emulate"),
    "What happens": ("status", "dashboard", "spend", "log", "explain"),
    "For scripts": ("charge", "peek", "exec", "refund", "settle", "proxy"),
    "Upstream and the ledger": ("reconcile", "reopen", "ledger"),
    "For others": ("serve", "inbound"),
}
"""The order of `quota --help`. A command in none of them, as another package may add, comes last."""


class Commands(Group):
    """Our commands, and those that other packages add as entry points."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*OURS, *(point.name for point in _entry_points())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in OURS:
            module, name = OURS[cmd_name].split(":")
            found = getattr(import_module(module), name)
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
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)
@click.option("--config", metavar="FILE", help="Configuration of the command that follows; its own --config wins.")
@click.version_option(package_name="quota-ledger", prog_name="quota")
def cli(config: str | None) -> None:
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


def run_click() -> int:
    """Run the command that `sys.argv` names, with the arguments as click reads them, and return its exit status."""
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
