"""What the errors of our SQLite files say: of a ledger, the allowance beside it, a store, an inbound storage."""

from __future__ import annotations

from quota.common.folders import doubt_of_database
from quota.common.owners import NO_FILE
from quota.common.sqlite_file import DEADLINE_S, Wording
from quota.common.text import one_line
from quota.errors import ConfigError


def file_wording(
    path: str, what: str, *, version: int, lost_then: str, remedy: str = "move it away", waited_s: float = DEADLINE_S
) -> Wording:
    """The errors of the file `what` at `path`. `lost_then` says what becomes of its content if it is moved away, and
    `waited_s` how long a transaction waits for others."""
    file = f"{what} sqlite:///{path}" if path else f"{what} in memory"
    return Wording(
        foreign=f"{file} is another program's database; {remedy}",
        newer=f"{file} was written by a newer quota-ledger (its version {{version}}, ours {version}): "
        "upgrade this machine",
        older=f"{file} was written by an older quota-ledger (its version {{version}}, ours {version}); "
        f"{remedy} ({lost_then})",
        locked=f"{file} is locked by another process (waited {waited_s:g} s); find it: fuser {path}",
        not_a_database=f"{file} is not an SQLite database; {remedy}",
        read_only=f"{file} is read-only; give this user write access to the file, its -wal and -shm, and their folder",
        cannot_open=f"{file} cannot be opened; check that its folder exists and this user may write there",
        no_file=f"{file}: {{reason}}; check its folder",
        disk_full=f"{file}: the disk is full; nothing was charged",
        damaged=f"{file} is damaged; move it away ({lost_then})",
        disk_fails=f"{file}: reading or writing it failed; check the disk and its space, or, if its -wal was "
        f"deleted, restart what has it open: fuser {path}",
        other=f"{file}: {{reason}}",
    )


def refuse_others(path: str, what: str) -> None:
    """Raises ConfigError for a file that others could change. So it is not opened, and no allowance takes its place."""
    why = doubt_of_database(path) if path else ""
    if why.endswith(NO_FILE):
        raise ConfigError(f"{what} {one_line(path)}: {one_line(why)}; name another file, or move that one away")
    if why:
        raise ConfigError(f"{what} {one_line(path)}: {one_line(why)}; make both this user's alone (chown, chmod)")
