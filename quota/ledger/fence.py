"""A ledger while its content moves to another one: its standing, and what both ledgers must be able to do for it.

The rule is L27 in docs/ledger-rules.md. `quota.ledger.move` takes the steps:

    OLD     open -> fenced -> sealed
    NEW     empty, or sealed by an earlier move -> filling -> open

A ledger in any of these standings except "open" refuses every decision and every other write. NEW opens only after OLD
is sealed, and OLD can be opened again only before that. So at most one of them is ever open, wherever the move is
stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, get_args
from urllib.parse import quote, unquote

from quota.errors import LedgerError, UnusableLedger
from quota.ledger.contract import Ledger
from quota.ledger.entry import Entry, Id

FENCE, UNSEALED, FILLING = "!", ">", "<"
"""The epoch of a ledger that has moved: FENCE, then where to; with UNSEALED between them until it is sealed, because
nothing may be there yet. That of a ledger that is being filled: FENCE, FILLING, then where from."""

Role = Literal["empty", "open", "fenced", "sealed", "filling"]
ROLES: Mapping[str, Role] = {role: role for role in get_args(Role)}
"""To read a stored role."""

Field = tuple[str, str]
"""A field of a project's state: its name and its value, as `lua/charge.lua` lists them. The form in which a state
moves between any two ledgers."""

NOT_MOVED = frozenset(
    (
        *("format", "epoch", "fenced_epoch", "fence", "move", "filled"),
        *("has_corrections", "maintained_ms", "housekeeping_cursor", "eviction_checked_ms", "repairing"),
    )
)
"""Fields of the state that belong to one ledger, or follow from what is in it."""

ONLY_IN_REDIS = frozenset(("last", "rolled_up", "retried", "history:swept_hour"))
"""Fields that other ledgers do not store: there they follow from the log and the other fields, or have no use (L16)."""


REFUSALS = "history:refusals"
"""The field that holds the refusals kept as a whole while they move: a JSON list, oldest first. The other fields of the
history are `history:` and the name that `lua/roll_up.lua` lists."""


class Standing(NamedTuple):
    """What a project's ledger is in a move.

    `move` names the last move that touched it. `epoch` is that without the fence. `peer` says where a fenced ledger
    moves to, or a filling one is filled from: its label. `filled` is the id up to which it is filled; None until it is
    cleared of what it held before. `charges` is the length of its log, `last` the id of its newest entry.
    """

    role: Role
    move: str
    epoch: str
    peer: str
    filled: Id | None
    charges: int
    last: Id


class Wanted(NamedTuple):
    """What a standing is to become. With `charges` the log must hold as many, or nothing changes. `epoch` is that of a
    ledger without one, and of one that is to be filled."""

    role: Role
    move: str
    peer: str = ""
    epoch: str = ""
    charges: int | None = None


class OvertakenError(LedgerError):
    """A step of a move did not find the ledger as the step before left it. Another move has changed it, or it lost
    data. Nothing was done."""


class Movable(Ledger, Protocol):
    """A ledger that can move, or be moved to. Every method raises LedgerError if the storage cannot answer."""

    def projects(self) -> list[str]:
        """The projects that this ledger holds anything of, by name."""

    def standing(self, project: str) -> Standing:
        """The standing of a project. Changes and creates nothing."""

    def change(self, project: str, before: Standing, wanted: Wanted) -> Standing:
        """Change the standing in one atomic step, if role and move are still those of `before`; returns what it is now.

        What this wrote outlives a crash of the machine as far as the storage allows.
        """

    def clear(self, project: str, move: str) -> Iterator[None]:
        """Remove, a piece at each step, what a ledger that is to be filled held before."""

    def fill(self, project: str, move: str, after: Id, entries: Sequence[Entry], retention_ms: int) -> Id:
        """Append entries (at most MAX_READ) that follow the id `after`. Returns the id up to which it is filled now,
        which is not that of the last entry if somebody else has filled it meanwhile."""

    def state(self, project: str) -> Iterator[list[Field]]:
        """The state of a fenced ledger, in pieces, without what is NOT_MOVED."""

    def put_state(self, project: str, move: str, after: Id, fields: Sequence[Field], retention_ms: int) -> None:
        """Set fields of the state of a ledger that is filled up to `after`."""

    def counts_lost(self) -> bool:
        """Whether its views go on counting what its log has lost (L14)."""


def fence_to(label: str) -> str:
    """The label of a ledger as a fence holds it: one word."""
    return quote(label, safe=":/?&=.,@+-_~[]()<")


def peer_of(epoch: str) -> str:
    """The place that the epoch of a fenced ledger names, as `fence_to` wrote it."""
    return epoch.removeprefix(FENCE).removeprefix(UNSEALED).removeprefix(FILLING)


def fenced_error(where: str, epoch: str) -> LedgerError:
    """What a fenced ledger says to everybody: one line."""
    way, peer = epoch[1:2], unquote(peer_of(epoch))
    if way == FILLING:
        return LedgerError(
            f"{where} is being filled from {peer} and takes no charge until all of it is here; if that move was "
            f"interrupted, finish it: quota ledger move {peer} {where.removeprefix('ledger ')}"
        )
    if way == UNSEALED:
        return LedgerError(
            f"{where} is being moved to {peer}, which takes no charge either until all of it is there; if that move "
            f"was interrupted, finish it: quota ledger move {where.removeprefix('ledger ')} {peer}"
        )
    return UnusableLedger(
        f"{where} has moved to {peer} and takes no charge any more; write that url into the configuration"
    )
