"""The program `quota`: its arguments, its streams and its exit status. Every failure is one line on stderr."""

from __future__ import annotations

import io
import os
import sys

import click

from quota.cli.commands import run_click
from quota.cli.output import fail, guard_streams, log_to_stderr, unprinted
from quota.common import log
from quota.errors import QuotaError


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
        status = run_click()
    except QuotaError as error:
        fail(str(error))
        return error.exit_status
    except KeyboardInterrupt:
        click.echo(err=True)  # ends the line in which the terminal shows ^C
        return 130
    except Exception as error:
        if os.environ.get("QUOTA_DEBUG"):
            raise
        if isinstance(error, FileNotFoundError) and _folder_is_gone():
            fail("the folder that this was started in is gone; start it in another one")
            return 1
        fail(f"unexpected {type(error).__name__}: {error}; QUOTA_DEBUG=1 shows where, please report it")
        return 1
    return 1 if unprinted() and not status else status


def _folder_is_gone() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False
