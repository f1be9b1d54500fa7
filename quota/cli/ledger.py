"""`quota ledger`: what an owner does to a ledger as a whole. The work itself is in `quota.ledger`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

import quota
from quota.cli.options import Group, config_option, json_option
from quota.cli.output import now_and_then, print_json, say
from quota.common.clock import host_clock, rfc3339
from quota.common.members import members
from quota.common.text import listed, many
from quota.decision import SET_THE_CLOCK
from quota.errors import ConfigError, LedgerError, RepairRefused, UsageError
from quota.settings.toml import in_toml

if TYPE_CHECKING:
    from quota.ledger.contract import Ahead
    from quota.ledger.fence import Movable
    from quota.ledger.move import Moved, Step
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

    It moves the projects of this configuration. NEW must hold nothing of them, unless it is where they came from: the
    way back is a move too. An interrupted move goes on when it is run again; until it is done, `quota ledger move NEW
    OLD` takes it back. Exit status 1: it cannot be done, and nothing was changed.

    A url may be "env:NAME" or "file:PATH" here too: its password does not show in the list of processes then. That of
    this configuration's ledger is known.

    \b
    Example:
      quota ledger move sqlite:///ledger.db redis://ledger.internal:6379/0
      quota ledger move redis://a/0 env:NEW_LEDGER --all
    """
    from quota.ledger.move import plan_move

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
    say(*(_told(source, target, one) for one in moved))
    if left:
        say(f"not moved, of other configurations: {listed(left)}; --all moves them too")
    if target.label != _label(settings.ledger.url):
        with_secrets = "" if target.label == new or not target.shared else ", with its user and password"
        say(f"now write the new url into {settings.path or 'quota.toml'} on every machine{with_secrets}:")
        say("  [ledger]")
        say(f"  url = {in_toml(target.label)}")
    if all(one.kind == "take back" for one in moved):
        return
    say("A program that still has the old url is refused (69) and told the new one; restart `quota schedule`.")
    if source.shared and not target.shared:
        say("The new ledger is a file: only the programs of this machine can use it.")


_OUTCOMES = {
    "nothing": "empty",
    "move": "moved",
    "go on": "moved",
    "moved already": "already-moved",
    "take back": "taken-back",
}


def _told(source: Movable, target: Movable, moved: Moved) -> str:
    project = f"project {moved.project}:"
    if moved.kind == "take back":
        return f"{project} the unfinished move is taken back; {target.label} is open again"
    if moved.kind == "moved already":
        return f"{project} moved already to {target.label}"
    if moved.kind == "nothing":
        return f"{project} holds nothing; {source.label} takes no charge of it any more"
    return f"{project} {many(moved.charges, 'charge')} moved to {target.label}"


def _movable(name: str, url: str, settings: Settings) -> Movable:
    """The ledger at a url of the command line. Raises UsageError."""
    from quota.ledger.factory import file_of, open_movable
    from quota.ledger.file_url import absolute

    url = _with_secrets(name, url, settings)
    try:
        return open_movable(url if file_of(url) is None else absolute(url, Path.cwd()))
    except ConfigError as error:
        raise UsageError(f"{name}: {error}") from None


def _with_secrets(name: str, url: str, settings: Settings) -> str:
    """A url as it is meant: where it stands, or that of the configuration if it names the same ledger. Other users of
    the machine see the command line, so a password should not stand there."""
    from quota.settings.address import is_reference
    from quota.settings.keys import read_secret

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


def _carry_out(source: Movable, target: Movable, steps: Sequence[Step]) -> list[Moved]:
    from quota.ledger.fence import OvertakenError
    from quota.ledger.move import carry_out

    say_progress = now_and_then(SAY_EVERY_S)

    def progress(project: str, copied: int, charges: int) -> None:
        say_progress(f"project {project}: {copied:,} of {many(charges, 'charge')} copied")

    try:
        return [carry_out(source, target, step, progress) for step in steps]
    except OvertakenError:
        raise
    except (LedgerError, KeyboardInterrupt) as error:
        stands = f"nothing was moved, and {source.label} is as it was"
        if _begun(source, steps):
            back = f"quota ledger move {target.label} {source.label}"
            stands = f"the move is not finished: run it again, or take it back: {back}"
        if isinstance(error, LedgerError):
            raise LedgerError(f"{error}; {stands}") from error
        say(f"quota: {stands}", err=True)
        raise


def _begun(source: Movable, steps: Sequence[Step]) -> bool:
    """Whether the old ledger is fenced by now, or may be."""
    try:
        return any(source.standing(step.project).role not in ("open", "empty") for step in steps)
    except LedgerError:
        return True


def _held(source: Movable, target: Movable) -> list[str]:
    """The projects of a ledger, without those that have moved to a third one."""

    def is_gone(project: str) -> bool:
        standing = source.standing(project)
        return standing.role == "sealed" and target.standing(project).move != standing.move

    return [project for project in source.projects() if not is_gone(project)]


def _others(source: Movable, target: Movable, projects: Sequence[str]) -> list[str]:
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
    charged after it is dated behind it. Repaired, it counts for one window from now: not less than it should. What
    machines remember of such charges is mended too, also where the ledger was emptied meanwhile: run this then as well.

    It shows what would change; --yes does it, while others go on charging. If it is interrupted, run it again. Exit
    status 1: this machine's clock and the ledger's are more than 5 s apart, and nothing was changed.

    \b
    Example:
      quota ledger repair
      quota ledger repair --yes
    """
    from quota.ledger.contract import clocks_are_one
    from quota.ledger.parts import repairable
    from quota.session import projects_of

    with quota.open(config) as session:
        projects = list(projects_of(session))
        label, ahead_in = session.ledger.label, repairable(session.ledger).ahead
        found = {project: ahead_in(project) for project in projects}
        here_ms, there_ms = host_clock(), session.ledger.now_ms()
        if not clocks_are_one(there_ms, here_ms) or (yes and not all(map(session.repair, projects))):
            raise RepairRefused(
                f"this machine's clock reads {rfc3339(here_ms)}, the ledger's {rfc3339(there_ms)}; {SET_THE_CLOCK}"
            )
    if as_json:
        rows = [_ahead_json(project, ahead) for project, ahead in found.items()]
        print_json({"ledger": label, "at": rfc3339(there_ms), "repaired": yes, "projects": rows})
        return
    say(f"ledger {label}, where it is {rfc3339(there_ms)}:")
    for project, ahead in found.items():
        say(*(f"  project {project}: {line}" for line in _told_ahead(ahead, yes=yes)))
    if not yes and any(ahead.found for ahead in found.values()):
        say("Nothing was changed. If that time is right: quota ledger repair --yes")
    elif not yes:
        say("Nothing was changed. Where a program is refused for its clock all the same: quota ledger repair --yes")


def _told_ahead(ahead: Ahead, *, yes: bool) -> list[str]:
    dated = "dated ahead, now dated now" if yes else "dated ahead"
    lines = []
    if ahead.charges:
        newest = f"the newest {rfc3339(ahead.newest_ms)}"
        lines.append(f"{many(ahead.charges, 'charge')} of {many(ahead.units, 'unit')} {dated}, {newest}")
    if ahead.unlogged_units:
        window = "now for a window" if yes else "for longer than a window"
        lines.append(f"{many(ahead.unlogged_units, 'unit')} of charges that the ledger lost count {window}")
    removed = " removed" if yes else ""
    if ahead.exhaustions:
        lines.append(f"{many(ahead.exhaustions, 'exhaustion')} of the future{removed}")
    if ahead.claims:
        lines.append(f"{many(ahead.claims, 'claim')} of the future{removed}")
    return lines or [
        "nothing is dated ahead" + ("; what machines remember as ahead counts for one window" if yes else "")
    ]


def _ahead_json(project: str, ahead: Ahead) -> dict[str, object]:
    newest = rfc3339(ahead.newest_ms) if ahead.newest_ms else None
    counts = members(ahead, "charges units unlogged_units exhaustions claims")
    return {"project": project, "newest": newest, **counts}


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
    from quota.ledger.redis_scripts import script, script_names

    names = script_names()
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name in names:
            (Path(folder) / f"{name}.lua").write_text(script(name)[0], encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}; name a folder that this user may write") from None
    say(f"wrote {many(len(names), 'script')} into {folder}")
