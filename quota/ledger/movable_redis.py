"""A Redis ledger that can move, or be moved to: `quota.ledger.fence.Movable`, through `lua/fence.lua`, `clear.lua` and
`fill.lua`.

Every step is one command or one script of bounded work, so the server serves others in between.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote

from quota.errors import LedgerError
from quota.ledger.entry import DEFAULT_BUCKET, Entry, Id
from quota.ledger.fence import NOT_MOVED, REFUSALS, ROLES, Field, OvertakenError, Standing, Wanted, fence_to
from quota.ledger.redis_errors import Failed
from quota.ledger.redis_ledger import RedisLedger
from quota.ledger.redis_scripts import history_key, keys_of
from quota.ledger.state_fields import id_text, read_epoch, read_id, read_ms

SCAN_PIECE = "500"


class MovableRedisLedger(RedisLedger):
    """See `quota.ledger.fence.Movable`."""

    _timeout_s = 5.0
    """Nobody waits for a decision here, and both ledgers stay closed until the move is done."""

    def counts_lost(self) -> bool:
        return True

    def projects(self) -> list[str]:
        pattern = "quota:{*}:*"
        try:
            found = list(self._connect_once().scan(pattern))
        except Failed as error:
            raise LedgerError(self._explain(error)) from error
        named = (re.fullmatch(r"quota:\{(.*)\}:(?:log|state|corrections)", key) for key in found)
        return sorted({match[1] for match in named if match is not None})

    def _error(self, error: Failed, project: str = "") -> LedgerError:
        overtaken = "another move has begun, or this one has ended" in str(error)
        return (
            OvertakenError(f"ledger {self.label}: another move has begun, or this one has ended")
            if overtaken
            else (super()._error(error, project))
        )

    def standing(self, project: str) -> Standing:
        return self._change(project, "", "open", "", "", "", "")

    def change(self, project: str, before: Standing, wanted: Wanted) -> Standing:
        role, move, peer, epoch, charges = wanted
        counted = "" if charges is None else str(charges)
        return self._change(project, f"{before.role} {before.move}", role, move, fence_to(peer), epoch, counted)

    def _change(self, project: str, *words: str) -> Standing:
        return self._read(_standing, self._script("fence", project, [self._now(), *words]))

    def clear(self, project: str, move: str) -> Iterator[None]:
        cursor = ""
        while cursor != "0-0":
            cursor = str(self._script("clear", project, [move, cursor], with_history=True))
            yield

    def fill(self, project: str, move: str, after: Id, entries: Sequence[Entry], retention_ms: int) -> Id:
        words = [move, str(retention_ms), id_text(after), str(len(entries))]
        for entry in entries:
            charged = str(entry.charged_units)
            words += (
                entry.id,
                charged if entry.bucket == DEFAULT_BUCKET else f"{entry.bucket}={charged}",
                entry.method,
                entry.job,
                entry.region,
                entry.idempotency_key,
                str(entry.units) if entry.settled else "",
            )
        return self._read(read_id, self._script("fill", project, words, with_history=True))

    def put_state(self, project: str, move: str, after: Id, fields: Sequence[Field], retention_ms: int) -> None:
        words: list[str] = []
        for name, value in fields:
            if name == REFUSALS:
                texts = json.loads(value)
                words += [REFUSALS, str(len(texts))]
                words += [word for n, text in enumerate(texts) for word in (f"history:refusal:{n}", text)]
            else:
                words += [name, value]
        args = [move, str(retention_ms), id_text(after), "0", *words]
        self._script("fill", project, args, with_history=True)

    def state(self, project: str) -> Iterator[list[Field]]:
        keys = keys_of(project)
        lost = self._lost_field(project)
        yield lost
        known = {name for name, _ in lost} | NOT_MOVED
        for key, begins in ((keys.state, ""), (history_key(project), "history:")):
            cursor = ""
            while cursor != "0":
                cursor, piece = self._query("HSCAN", key, cursor or "0", "COUNT", SCAN_PIECE)
                fields = [(f"{begins}{name}", value) for name, value in zip(piece[::2], piece[1::2], strict=True)]
                yield [one for one in fields if one[0] not in known and not one[0].startswith("history:refusal")]
        yield [(REFUSALS, json.dumps(self._refusals(project)))]

    def _lost_field(self, project: str) -> list[Field]:
        """L14. What the next decision would find out: the log or its corrections are gone; or the state is, and the
        life of the log tells how long that is kept."""
        keys = keys_of(project)
        last, has_corrections, trimmed = self._query(
            "HMGET", keys.state, "last", "has_corrections", "trimmed_through_ms"
        )
        missing = [key for key in (keys.log, keys.corrections) if not self._query("EXISTS", key)]
        if last is None:
            return [("retention_ms", str(max(1, self._query("PTTL", keys.log))))]
        if not (keys.log in missing or (has_corrections == "1" and keys.corrections in missing)):
            return []
        return [("trimmed_through_ms", str(max(self._read(read_ms, trimmed or "0"), self._read(read_id, last)[0])))]


def _standing(reply: list[Any]) -> Standing:
    role, move, epoch, peer, filled, charges, last = reply
    known = read_id(filled) if filled else None
    return Standing(ROLES[role], move, read_epoch(epoch), unquote(peer), known, int(charges), read_id(last))
