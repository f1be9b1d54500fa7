"""`quota ledger`: what an owner does to a ledger as a whole. The work itself is in `quota.deciding`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

import quota
from quota.cli.options import Group, config_option, json_option
from quota.cli.output import now_and_then, print_json, say
from quota.common.clock import host_clock, moment, rfc3339
from quota.common.text import listed, many, members
from quota.errors import ConfigError, LedgerError, UsageError
from quota.settings.toml import in_toml

if TYPE_CHECKING:
    from quota.deciding.moves import Moved, Step
    from quota.deciding.repairs import Ahead
    from quota.ledger.log import Log
    from quota.settings.model import Settings

SAY_EVERY_S = 2
"""How often a long copy says how far it is."""


@click.group("ledger", cls=Group)
def ledger() -> None:
    """Move a ledger, repair it, or share it with other languages.

    \b
    Example:
      quota ledger move sqlite:///ledger.db redis://ledger.internal:6379/0
      quota ledger repair
      quota ledger scripts lua
    """


@ledger.command()
@click.argument("old")
@click.argument("new")
@click.option("--all", "all_projects", is_flag=True, help="Every project in OLD, not only this configuration's.")
@json_option
@config_option
def move(old: str, new: str, all_projects: bool, as_json: bool, config: str | None) -> None:
    """Move the ledger at the url OLD to the url NEW, with its history.

    From the first moment OLD admits nobody: every program that still has its url is refused (exit status 69) and told
    the new one. Then everything is copied, and NEW opens. Nothing is granted twice: charges, corrections and what
    upstream closed count on.

    It moves the projects of this configuration. What NEW already holds of them counts on, too. The way back is a move
    like this one. An interrupted move goes on when it is run again; if it is not, OLD goes on by itself within
    2 s, unless all was copied by then. Exit status 1: it cannot be done, and nothing was changed.

    A url may be "env:NAME" or "file:PATH" here too: its password does not show in the list of processes then. That of
    this configuration's ledger is known.

    \b
    Example:
      quota ledger move sqlite:///ledger.db redis://ledger.internal:6379/0
      quota ledger move redis://a/0 env:NEW_LEDGER --all
    """
    from quota.deciding.moves import plan_move

    with quota.open(config) as session:
        settings = session.settings
    source, target = _movable("OLD", old, settings), _movable("NEW", new, settings)
    try:
        projects = list(dict.fromkeys(x.project for x in settings.credentials.values()))
        if all_projects:
            projects = _held(source, target) or projects
        moved = _carry_out(source, target, plan_move(source, target, projects))
        left = _others(source, target, projects)
    finally:
        source.close()
        target.close()
    if as_json:
        rows = [{"project": x.project, "outcome": _OUTCOMES[x.kind], "charges": x.charges} for x in moved]
        print_json({"old": source.label, "new": target.label, "projects": rows})
        return
    say(*(_line_of(source, target, project) for project in moved))
    if left:
        say(f"not moved, of other configurations: {listed(left)}; --all moves them too")
    if target.label != _label(settings.ledger.url):
        with_secrets = "" if target.label == new or not target.shared else ", with its user and password"
        say(f"now write the new url into {settings.path or 'quota.toml'} on every machine{with_secrets}:")
        say("  [ledger]")
        say(f"  url = {in_toml(target.label)}")
    say("A program that still has the old url is refused (69) and told the new one; restart `quota schedule`.")
    if source.shared and not target.shared:
        say("The new ledger is a file: only the programs of this machine can use it.")


_OUTCOMES = {
    "nothing": "empty",
    "move": "moved",
    "go on": "moved",
    "moved already": "already-moved",
}


def _line_of(source: Log, target: Log, moved: Moved) -> str:
    project = f"project {moved.project}:"
    if moved.kind == "moved already":
        return f"{project} moved already to {target.label}"
    if moved.kind == "nothing":
        return f"{project} holds nothing; {source.label} takes no charge of it any more"
    return f"{project} {many(moved.charges, 'charge')} moved to {target.label}"


def _movable(name: str, url: str, settings: Settings) -> Log:
    """The ledger at a url of the command line. Raises UsageError."""
    from quota.ledger.factory import file_of, open_ledger
    from quota.ledger.files import absolute

    url = _with_secrets(name, url, settings)
    try:
        return open_ledger(url if not file_of(url) else absolute(url, Path.cwd()))
    except ConfigError as error:
        raise UsageError(f"{name}: {error}") from None


def _with_secrets(name: str, url: str, settings: Settings) -> str:
    """A url as it is meant: where it stands, or that of the configuration if it names the same ledger. Other users of
    the machine see the command line, so a password should not stand there."""
    from quota.settings.references import is_reference, read_secret

    if is_reference(url):
        kind, _, place = url.partition(":")
        try:
            return read_secret(f"{kind}:{os.path.expanduser(place)}", "url")
        except ConfigError as error:
            raise UsageError(f"{name}: {error}") from None
    ours = settings.ledger.url
    return ours if settings.ledger.file is None and url == _label(ours) else url


def _label(url: str) -> str:
    from quota.ledger.factory import open_ledger

    ledger = open_ledger(url)
    ledger.close()
    return ledger.label


def _carry_out(source: Log, target: Log, steps: Sequence[Step]) -> list[Moved]:
    from quota.deciding.fence import FenceLostError
    from quota.deciding.moves import carry_out

    say_progress = now_and_then(SAY_EVERY_S)

    def progress(project: str, entries: int) -> None:
        say_progress(f"project {project}: {many(entries, 'entry')} copied")

    try:
        return [carry_out(source, target, step, progress) for step in steps]
    except FenceLostError:
        raise
    except LedgerError as error:
        raise LedgerError(f"{error}; {_UNFINISHED}") from error
    except KeyboardInterrupt:
        say(f"quota: {_UNFINISHED}", err=True)
        raise


_UNFINISHED = "the move is not finished, and nothing is lost: run it again"


def _held(source: Log, target: Log) -> list[str]:
    """The projects of a ledger, without those that have moved to a third one."""
    from quota.ledger.log import SEAL, is_seal

    def is_gone(project: str) -> bool:
        epoch = source.begin(project).epoch
        return is_seal(epoch) and epoch != SEAL + target.label

    return [project for project in source.projects() if not is_gone(project)]


def _others(source: Log, target: Log, projects: Sequence[str]) -> list[str]:
    """The projects that stay in the old ledger; none where this user may not list them."""
    try:
        return [project for project in _held(source, target) if project not in projects]
    except LedgerError:
        return []


# -- after a clock that was wrong --------------------------------------------------------------------------------------


@ledger.command()
@click.option("--yes", is_flag=True, help="Do it. Without this, nothing is changed.")
@json_option
@config_option
def repair(yes: bool, as_json: bool, config: str | None) -> None:
    """Date from now on what a clock that was wrong has dated ahead.

    First set the clock right. A charge that is dated ahead counts until that date and a window later, and all that is
    charged after it is dated behind it. Repaired, it counts for one window from now: not less than it should.

    It shows what would change; --yes does it, while others wait for a moment. If it is interrupted, run it again. Exit
    status 1: this machine's clock and the ledger's are more than 5 s apart, and nothing was changed.

    \b
    Example:
      quota ledger repair
      quota ledger repair --yes
    """
    from quota.deciding import repairs
    from quota.session import projects_of

    with quota.open(config) as session:
        log, projects = session.ledger, list(projects_of(session))
        ahead_of = {project: repairs.ahead(log, project) for project in projects}
        there_ms = log.now_ms()
        repairs.check_clocks(there_ms, host_clock())
        for project in projects if yes else ():
            repairs.repair(log, project, host_clock())
    if as_json:
        rows = [_ahead_json(project, ahead) for project, ahead in ahead_of.items()]
        print_json({"ledger": log.label, "at": rfc3339(there_ms), "repaired": yes, "projects": rows})
        return
    say(f"ledger {log.label}, where it is {moment(there_ms)}:")
    for project, ahead in ahead_of.items():
        say(*(f"  project {project}: {line}" for line in _lines(ahead, yes=yes)))
    if not yes:
        is_ahead = any(ahead.needs_repair for ahead in ahead_of.values())
        say("Nothing was changed." + (" If that time is right: quota ledger repair --yes" if is_ahead else ""))


def _lines(ahead: Ahead, *, yes: bool) -> list[str]:
    dated = "dated ahead, now dated now" if yes else "dated ahead"
    lines = []
    if ahead.charges:
        newest = f"the newest {moment(ahead.newest_ms)}"
        lines.append(f"{many(ahead.charges, 'charge')} of {many(ahead.units, 'unit')} {dated}, {newest}")
    if ahead.exhaustions:
        lines.append(f"{many(ahead.exhaustions, 'exhaustion')} of the future{' removed' if yes else ''}")
    if ahead.claims:
        lines.append(f"the claims of {many(ahead.claims, 'job')} {dated}")
    if ahead.newest_ms > ahead.now_ms and not lines:
        lines.append(f"entries other than charges {dated}, the newest {moment(ahead.newest_ms)}")
    return lines or ["nothing is dated ahead"]


def _ahead_json(project: str, ahead: Ahead) -> dict[str, object]:
    newest = rfc3339(ahead.newest_ms) if ahead.newest_ms else None
    return {"project": project, "newest": newest, **members(ahead, "charges units exhaustions claims")}


# -- for other languages -----------------------------------------------------------------------------------------------


@ledger.command()
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False))
def scripts(folder: str) -> None:
    """Write the Lua scripts into the folder DIR.

    Each is whole, for programs in other languages.

    The head of each file says what it does, its KEYS, ARGV and reply. Write them again after each upgrade: a ledger
    refuses the scripts of another format. DIR is made if it is not there; files of these names in it are replaced.

    \b
    Example:
      quota ledger scripts lua
    """
    from quota.ledger.redis_log import script, script_names

    names = script_names()
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name in names:
            (Path(folder) / f"{name}.lua").write_text(script(name)[0], encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}; name a folder that this user may write") from None
    say(f"wrote {many(len(names), 'script')} into {folder}")
