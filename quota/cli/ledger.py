"""`quota ledger`: the commands about a ledger as a whole. The work itself is in `quota.deciding`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

import quota
from quota.cli.options import Group, Options, apart, shared
from quota.cli.output import can_ask, confirmed, naming_allowances, now_and_then, print_as, say, unwound
from quota.common.clock import host_clock, rfc3339, stamp
from quota.common.files import make_folder
from quota.common.text import listed, many, members
from quota.deciding import repairs
from quota.deciding.fence import FenceLostError
from quota.deciding.moves import Step, carry_out, charges_in, plan_move
from quota.deciding.repairs import Ahead
from quota.errors import ConfigError, LedgerError, UsageError
from quota.ledger.factory import file_of, open_ledger
from quota.ledger.files import absolute
from quota.ledger.log import SEAL, Log, is_seal
from quota.session import projects_of
from quota.settings.model import Settings
from quota.settings.references import completed, is_reference, read_secret
from quota.settings.toml import in_toml


@click.group("ledger", cls=Group)
def ledger() -> None:
    """Move a ledger, repair it, or share it with other programs.

    \b
    Example:
      quota ledger move sqlite:///ledger.db redis://ledger.internal:6379/0
      quota ledger repair
      quota ledger scripts lua
    """


@ledger.command()
@click.argument("old")
@click.argument("new")
@click.option("--all", "all_projects", is_flag=True, help="Move every project in OLD, not only this configuration's.")
@shared(Options.dry_run, Options.yes, Options.format, Options.config)
def move(old: str, new: str, all_projects: bool, dry_run: bool, yes: bool, form: str, config: str | None) -> int:
    """Move the ledger at the url OLD to the url NEW, with its history.

    It moves the projects of this configuration. OLD closes when the move starts; NEW opens when everything is copied.
    Nothing is granted twice: NEW keeps what it has and adds OLD's charges, corrections and closed buckets. A program
    that still uses OLD draws on its allowance, or ends with exit status 69; the message has the url of NEW.

    If a move is interrupted, run it again. OLD admits calls again 2 s after the interruption, unless everything was
    copied. To go back, move from NEW to OLD. On a terminal, the command asks first. Exit status 1: the move is not
    possible, and nothing was changed.

    OLD and NEW may be "env:NAME" or "file:PATH": that hides a password from other users of this machine. If OLD or
    NEW is on the configured ledger's server, leave password and options out of its url: the configuration has them.

    \b
    Example:
      quota ledger move sqlite:///ledger.db redis://ledger/0 --dry-run
      quota ledger move redis://a/0 env:NEW_LEDGER --all
    """
    with quota.open(config) as session:
        settings, configured = session.settings, session.ledger.label
    source, target = _movable("OLD", old, settings), _movable("NEW", new, settings)
    try:
        projects = list(dict.fromkeys(credential.project for credential in settings.credentials.values()))
        if all_projects:
            projects = _held(source, target) or projects
        steps = plan_move(source, target, projects)
        if dry_run:
            steps = [step._replace(charges=charges_in(source, step.project)) for step in steps]
            if not _printed(source, target, steps, form, done=False):
                say("nothing was changed")
            return 0
        if not confirmed(f"Move {listed(projects)} from {source.label} to {target.label}?", yes=yes):
            say("nothing was changed", err=form == "json")
            return 1
        moved = _carry_out(source, target, steps)
        left = _others(source, target, projects)
    finally:
        source.close()
        target.close()
    if _printed(source, target, moved, form, done=True):
        return 0
    if left:
        say(f"not moved, because other configurations have them: {listed(left)}; --all moves them too")
    if target.label != configured:
        ours = settings.ledger
        has_all = target.label == new and ("url" not in dict(ours.secrets) or new == completed(new, ours.url))
        with_secrets = "" if has_all or not target.shared else ", with its user and password"
        say(f"now write the new url into {settings.path or 'quota.toml'} on every machine{with_secrets}:")
        say("  [ledger]")
        say(f"  url = {in_toml(target.label)}")
    say(
        "A program with the old url draws on its allowance or is refused (69); the message has the new url. "
        "Restart `quota schedule`, `dashboard`, `proxy` and `serve`."
    )
    if source.shared and not target.shared:
        say("The new ledger is a file: only programs on this machine can use it.")
    return 0


def _printed(source: Log, target: Log, steps: Sequence[Step], form: str, *, done: bool) -> bool:
    """Print the steps of a move, or with `done` their outcomes. Returns whether they were printed as data."""
    rows = [{"project": step.project, "outcome": _OUTCOMES[step.kind], "charges": step.charges} for step in steps]
    data = {"old": source.label, "new": target.label, **({} if done else {"dry_run": True}), "projects": rows}
    if print_as(form, data):
        return True
    says = {
        "nothing": f"holds nothing; {source.label} takes no more charges of it" if done else "holds nothing",
        "moved already": f"moved already to {target.label}",
    }
    for step in steps:
        moved = f"{many(step.charges, 'charge')} {'moved' if done else 'would move'} to {target.label}"
        say(f"project {step.project}: {says.get(step.kind, moved)}")
    return False


_OUTCOMES = {"nothing": "empty", "move": "moved", "go on": "moved", "moved already": "already-moved"}


def _movable(name: str, url: str, settings: Settings) -> Log:
    """The ledger at a url of the command line, or behind a reference. On the configured ledger's server, the
    configuration has the password: other users of the machine see the command line. Raises UsageError."""
    try:
        if is_reference(url):
            kind, _, place = url.partition(":")
            url = read_secret(f"{kind}:{os.path.expanduser(place)}", "url")
        is_file = file_of(url) is not None
        return open_ledger(absolute(url, Path.cwd()) if is_file else completed(url, settings.ledger.url))
    except ConfigError as error:
        raise UsageError(f"{name}: {error}") from None


def _carry_out(source: Log, target: Log, steps: Sequence[Step]) -> list[Step]:
    say_progress = now_and_then()

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
    """The projects of a ledger, without the projects that have moved to a third ledger."""
    held = []
    for project in source.projects():
        epoch = source.begin(project).epoch
        if not is_seal(epoch) or epoch == SEAL + target.label:
            held.append(project)
    return held


def _others(source: Log, target: Log, projects: Sequence[str]) -> list[str]:
    """The projects that stay in the old ledger; none if this user may not list projects."""
    try:
        return [project for project in _held(source, target) if project not in projects]
    except LedgerError:
        return []


# -- after a clock that was wrong --------------------------------------------------------------------------------------


@ledger.command()
@shared(Options.dry_run)
@click.option("--yes", is_flag=True, help="Do it without asking. Required without a terminal.")
@shared(Options.format, Options.config)
def repair(dry_run: bool, yes: bool, form: str, config: str | None) -> int:
    """Correct charges that a wrong clock dated in the future.

    First set the clock right. A future-dated charge counts too long, and every charge made after it gets an even later
    date. A repair gives these charges the present time, so they count for one window from now.

    The command shows the charges and asks first. Other programs wait during the repair. If a repair is interrupted, run
    it again. Exit status 1: this machine's clock and the ledger's are more than 5 s apart; nothing was changed.

    In JSON, all values are from before the repair. `newest`, the date of the log's newest entry, may be in the future.

    \b
    Example:
      quota ledger repair --dry-run
      quota ledger repair --yes
    """
    apart(dry_run=dry_run, yes=yes)
    with quota.open(config) as session, naming_allowances(session):
        log, projects = session.ledger, list(projects_of(session))
        ahead_of = {project: repairs.ahead(log, project) for project in projects}
        there_ms = log.now_ms()
        repairs.check_clocks(there_ms, host_clock())
        needs_repair = any(ahead.needs_repair for ahead in ahead_of.values())
        if form == "text" and not yes:
            _show_ahead(log, there_ms, ahead_of, yes=False)
        asks = needs_repair and not dry_run and not yes and can_ask()
        does = yes or (asks and confirmed("If the ledger's clock is right: repair the ledger?", yes=False))
        for project in projects if does else ():
            repairs.repair(log, project, host_clock())
    rows = [
        {
            "project": project,
            "newest": rfc3339(ahead.newest_ms) if ahead.newest_ms else None,
            **members(ahead, "charges units exhaustions claims"),
        }
        for project, ahead in ahead_of.items()
    ]
    print_as(form, {"ledger": log.label, "at": rfc3339(there_ms), "repaired": does, "projects": rows})
    if form == "text" and does:
        _show_ahead(log, there_ms, ahead_of, yes=True)
    elif form == "text":
        hint = " If the ledger's clock is right: quota ledger repair --yes" if needs_repair and not asks else ""
        say(f"Nothing was changed.{hint}")
    return int(asks and not does)


def _show_ahead(log: Log, there_ms: int, ahead_of: Mapping[str, Ahead], *, yes: bool) -> None:
    say(f"ledger {log.label}, whose clock shows {stamp(there_ms)}:")
    dated = "dated ahead, now corrected" if yes else "dated ahead"
    for project, ahead in ahead_of.items():
        lines = []
        if ahead.charges:
            newest = f"the newest {stamp(ahead.newest_ms)}"
            lines.append(f"{many(ahead.charges, 'charge')} of {many(ahead.units, 'unit')} {dated}, {newest}")
        if ahead.exhaustions:
            lines.append(f"{many(ahead.exhaustions, 'exhaustion')} of the future{' removed' if yes else ''}")
        if ahead.claims:
            lines.append(f"the claims of {many(ahead.claims, 'job')} {dated}")
        if ahead.newest_ms > ahead.now_ms and not lines:
            lines.append(f"entries other than charges {dated}, the newest {stamp(ahead.newest_ms)}")
        say(*(f"  project {project}: {line}" for line in lines or ["nothing is dated ahead"]))


# -- for other languages -----------------------------------------------------------------------------------------------


@ledger.command()
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False))
def scripts(folder: str) -> None:
    """Write the Lua scripts into the folder DIR.

    Programs in other languages run them. The head of each file describes its purpose, KEYS, ARGV and reply. After an
    upgrade, write them again: a ledger refuses scripts of another format. The command makes DIR if needed, and replaces
    the scripts in it.

    \b
    Example:
      quota ledger scripts lua
    """
    from quota.ledger.redis_log import script, script_names
    from quota.reports.metrics import write_file

    names = script_names()
    if not folder:  # an unset variable of a shell
        raise UsageError("'' is not a folder; name one")
    try:
        make_folder(folder, 0o755)  # programs of other users may read the scripts, but nobody else may change them
        with unwound():
            for name in names:
                write_file(folder, f"{name}.lua", script(name)[0], mode=None)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}; name a folder that this user may write") from None
    say(f"wrote {many(len(names), 'script')} into {folder}")
