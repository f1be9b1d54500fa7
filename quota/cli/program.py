"""The program `quota`: it finds the module of a command, and gives it arguments, streams and an exit status.

A command's module is imported once the command is named. Commands of other packages come from the entry-point group
`quota.commands`, which is read only for an unknown command and for `--help`. Every failure is one line on stderr.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import warnings
from importlib import import_module
from typing import Any

import click

from quota.cli.options import PATH, Group
from quota.cli.output import fail, guard_streams, log_to_stderr, unprinted
from quota.common import log
from quota.common.files import LACKS_LIBRARY, remedy_for
from quota.errors import QuotaError

OURS = {
    **{name: f"quota.cli.deciding:{name}" for name in ("charge", "peek", "refund", "settle", "prove")},
    "exec": "quota.cli.deciding:exec_",
    **{name: f"quota.cli.reports:{name}" for name in ("status", "spend", "log", "explain", "reopen")},
    "reconcile": "quota.cli.reconcile:reconcile_",
    **{name: f"quota.cli.configuration:{name}" for name in ("init", "doctor")},
    "check": "quota.cli.configuration:check_",
    **{name: f"quota.cli.book:{name}" for name in ("book", "costs")},
    **{name: f"quota.cli.{name}:{name}" for name in ("inbound", "ledger")},
    **{name: f"quota.cli.serving:{name}" for name in ("dashboard", "proxy")},
    "run": "quota.jobs.tick:run",
    **{name: f"quota.jobs.commands:{name}" for name in ("demo", "emulate", "plan", "schedule", "serve")},
    **{name: f"quota.jobs.data:{name}" for name in ("export", "place", "runs", "search", "tables")},
}
"""Our commands and groups, each with its module. A search for entry points takes as long as a refused tick."""

SECTIONS = {
    "To begin": ("demo", "init", "check", "doctor", "costs", "book", "prove"),
    "Jobs": ("run", "runs", "schedule", "plan", "place", "search", "export", "tables", "emulate"),
    "What happens": ("status", "dashboard", "spend", "log", "explain"),
    "For scripts": ("charge", "peek", "exec", "refund", "settle", "proxy"),
    "Upstream and the ledger": ("reconcile", "reopen", "ledger"),
    "For others": ("serve", "inbound"),
}
"""The order of `quota --help`. Commands of other packages come last."""


class Commands(Group):
    """Our commands, and those that other packages add as entry points."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*OURS, *(point.name for point in _entry_points())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in OURS:
            module, name = OURS[cmd_name].split(":")
            command = getattr(import_module(module), name)
        else:
            command = next((point.load() for point in _entry_points() if point.name == cmd_name), None)
        assert command is None or isinstance(command, click.Command)  # noqa: S101  # the entry-point group's contract
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = self.list_commands(ctx)
        placed = {name for section in SECTIONS.values() for name in section}
        sections = {**SECTIONS, "More": tuple(name for name in names if name not in placed)}
        width = max(map(len, names))
        for title, section in sections.items():
            commands = [(name.ljust(width), self.get_command(ctx, name)) for name in section]
            rows = [(name, row.get_short_help_str(formatter.width - 6 - width)) for name, row in commands if row]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _entry_points() -> Any:
    from importlib.metadata import entry_points

    return entry_points(group="quota.commands")


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.option("--config", metavar="FILE", type=PATH, help="Configuration; --config after the command overrides it.")
@click.version_option(package_name="quota-ledger", prog_name="quota")
def cli(config: str | None) -> None:
    """The gate between scheduled jobs and a metered API.

    Before a call leaves, quota charges its price to a shared budget. If the call would overspend the budget, quota
    refuses the call and says when to try again.

    \b
    Example:
      quota demo            # try everything on this machine, without a key
      quota init            # write a commented quota.toml
      quota run trending    # run a job once
      quota status          # what is used and what remains

    Exit status: 0 done, even if the budget stops a run; 1 a check found a problem, or the work failed; 2 wrong usage;
    69 the ledger did not answer; 75 refused; 78 wrong configuration. QUOTA_LOG=info or debug shows more
    on stderr; QUOTA_LOG_FORMAT=json shows it as JSON.
    """


def main() -> None:
    """Run the command line on this process's arguments, and exit."""
    guard_streams()
    sys.exit(run())


def run() -> int:
    """Run the command that `sys.argv` names, and return its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # An argument that the locale cannot decode contains lone surrogates, which could not be printed.
        sys.stdout.reconfigure(errors="backslashreplace")
    log.begin = log_to_stderr
    try:
        if os.environ.get("QUOTA_LOG") or os.environ.get("QUOTA_LOG_FORMAT"):
            log_to_stderr()
        if not sys.warnoptions:  # Google's library warns of an old Python: cron would mail it with every run
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"google\.")
        result = cli.main(prog_name="quota", standalone_mode=False)
        status = result if isinstance(result, int) else 0
    except click.ClickException as error:
        fail(_usage(error))
        status = 2
    except click.Abort:
        status = 130
    except QuotaError as error:
        fail(str(error))
        return error.exit_status
    except KeyboardInterrupt:
        click.echo(err=True)  # ends the line in which the terminal shows ^C
        return 130
    except Exception as error:
        if os.environ.get("QUOTA_DEBUG"):
            raise
        fail(_unexpected(error))
        return 1
    return 1 if unprinted() and not status else status


def _unexpected(error: Exception) -> str:
    """What is wrong, and what to do, by an error that no command expects."""
    if isinstance(error, FileNotFoundError):
        try:
            os.getcwd()
        except FileNotFoundError:
            return "the working folder is gone; start the command in another folder"
    if isinstance(error, NotADirectoryError) and not os.path.exists(__file__):
        return "quota cannot run from a zip file; install it with pip, or unpack the file as shiv and pex do"
    if isinstance(error, UnicodeEncodeError) and sys.getfilesystemencoding() != "utf-8":
        return "the locale of this process cannot express a path; set PYTHONUTF8=1"
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return "no thread can be started; raise the limit of processes (ulimit -u, the container's pids)"
    if os.strerror(errno.EMFILE) in str(error):  # an import may say so in its own words
        return f"{os.strerror(errno.EMFILE)}; {remedy_for(errno.EMFILE, '')}"
    if isinstance(error, ImportError):
        return f"{error}; {LACKS_LIBRARY}"
    return f"unexpected {type(error).__name__}: {error}; QUOTA_DEBUG=1 shows where, please report it"


def _usage(error: click.ClickException) -> str:
    message = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    if context is None and isinstance(error, click.BadOptionUsage):  # click does not say of which command
        return f"{message}; see the --help of the command"
    if context is None or "--help" in message:
        return message
    return f"{message}{' See' if message.endswith('?') else '; see'} `{context.command_path} --help`"
