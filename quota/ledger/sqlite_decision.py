"""One decision of the SQLite ledger: what `lua/charge.lua` does in Redis. The rules are in docs/ledger-rules.md.

Each function works in a transaction of `quota.ledger.sqlite_ledger`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from quota.ledger import sqlite_history
from quota.ledger.contract import (
    CLOCK_SLACK_MS,
    RETENTION_SLACK_MS,
    ChargeOutcome,
    ChargeRequest,
    ChargeResult,
    Exhaustion,
    LimitCheck,
    clocks_agree,
)
from quota.ledger.entry import Id
from quota.ledger.grants import read_grants
from quota.ledger.history import HISTORY_MS
from quota.ledger.sqlite_fields import (
    append_charge,
    drop_fields,
    drop_kind,
    drop_lapsed,
    fields_of,
    following_id,
    newest_id,
    put_fields,
    read_fields,
    trimmed_through_ms,
)
from quota.ledger.sqlite_views import ViewState, advance
from quota.ledger.state_fields import id_text, read_exhaustion, read_usages
from quota.terms.limits import MINUTE_MS

TRIM_AT_ONCE = 10_000
"""The most charges that are trimmed at once (L13)."""

ROWS_AT_ONCE = 50_000
"""The most charges that are read for the views of a decision in one transaction (L21)."""

_CHANGES_NOTHING = "UPDATE state SET value = value WHERE 0"


def decide(
    db: sqlite3.Connection,
    request: ChargeRequest,
    clock: Callable[[], int],
    check_fence: Callable[[str], None],
    *,
    commit: bool,
) -> ChargeResult:
    """The answer; "counting" where the next transaction goes on (L21). `check_fence` raises LedgerError for the epoch
    of a ledger that moves (L27)."""
    if not commit:  # of a file that may only be read, SQLite says so at the first statement that writes
        db.execute(_CHANGES_NOTHING)
    project, clock_ms = request.project, clock()
    now_ms = min(clock_ms, request.caller_ms + CLOCK_SLACK_MS)  # L11
    fields = read_fields(db, project, _names(request))
    last, epoch = newest_id(db, project), fields.get("epoch", "")
    check_fence(epoch)
    undecided = partial(ChargeResult, id=None, now_ms=now_ms, last=last, used_units=(), epoch=epoch)
    if not clocks_agree(clock_ms, request.caller_ms) or not _edges_fit(request.checks, now_ms):
        return undecided("clock", now_ms=clock_ms)
    if request.expected.epoch and _is_behind(db, request, last, epoch):
        return undecided("behind")
    granted = fields.get("granted", "")
    if request.granted is not None and request.granted != granted:  # L28
        read_grants(granted)
        return undecided("granted", granted=granted)

    changed: dict[str, str | int] = {}
    views, used, unlogged, fits, room = [], [], [], True, ROWS_AT_ONCE
    for check in request.checks:
        of_view, of_usage = f"view:{check.view.name}", f"unlogged:{check.view.name}"
        stored = ViewState.of(fields.get(of_view))
        view, room = advance(db, project, check, now_ms, last, stored, room)
        if view != stored:
            fields[of_view] = changed[of_view] = view.text()
        if not room:  # what a peek has read is kept too
            put_fields(db, project, changed.items())
            return undecided("counting")
        lost = read_usages(check.view.name, fields.get(of_usage, ""))
        live = tuple([usage for usage in lost if usage.until_ms > now_ms])
        total = view.total + sum([usage.units_at(now_ms) for usage in live])
        fits = fits and (not check.cost_units or total + check.cost_units <= check.cap_units)  # L9
        views.append(view)
        used.append(total)
        unlogged.append(live)
    exhaustion = _longest(request.closed_by, fields, now_ms - request.jitter_ms)
    outcome: ChargeOutcome = "exhausted" if exhaustion is not None else "admitted" if fits else "refused"
    counting = tuple(unlogged) if any(unlogged) else ()
    ids: list[Id] = []
    newest = last
    if commit:
        retention_ms = int(fields.get("retention_ms", 0))
        if request.retention_ms > retention_ms:
            changed["retention_ms"] = retention_ms = request.retention_ms
        if outcome == "admitted":
            ids = _append(db, request, last, clock_ms)
            newest = ids[-1]
            if not epoch:
                changed["epoch"] = epoch = request.charge.idempotency_key
            for n, (check, view) in enumerate(zip(request.checks, views, strict=True)):
                changed[f"view:{check.view.name}"] = view.charged(check.cost_units, newest).text()
                used[n] += check.cost_units
        put_fields(db, project, changed.items())
        if newest[0] // MINUTE_MS != last[0] // MINUTE_MS:
            # A clock that stood ahead for this one charge costs no history.
            _trim(db, project, min(now_ms, last[0]), retention_ms)
    first, *also = map(id_text, ids) if ids else (None,)
    return ChargeResult(outcome, first, now_ms, newest, tuple(used), exhaustion, epoch, counting, also=tuple(also))


def _names(request: ChargeRequest) -> list[str]:
    """The fields that the decision goes by."""
    of_views = [f"{kind}:{check.view.name}" for check in request.checks for kind in ("view", "unlogged")]
    closing = [f"closed:{bucket}" for bucket in request.closed_by]
    return ["epoch", "granted", "retention_ms", *closing, *of_views]


def _edges_fit(checks: Sequence[LimitCheck], now_ms: int) -> bool:
    """L11. Whether the caller's clock and ours are in the same calendar periods, or in neighbouring ones."""
    return all(check.edges is None or check.edges[0] <= now_ms < check.edges[2] for check in checks)


def _is_behind(db: sqlite3.Connection, request: ChargeRequest, last: Id, epoch: str) -> bool:
    """L18. Whether this ledger lacks what the caller expects of it."""
    if request.expected.epoch != epoch:
        return True
    sql = "SELECT 1 FROM charges WHERE project = ? AND ms = ? AND seq = ?"
    ids = [at for at in request.expected.ids if at != last]
    missing_ms = [at[0] for at in ids if db.execute(sql, (request.project, *at)).fetchone() is None]
    return bool(missing_ms) and max(missing_ms) > trimmed_through_ms(db, request.project)


def _longest(buckets: Sequence[str], fields: Mapping[str, str], now_ms: int) -> Exhaustion | None:
    """L20. Of the exhaustions that close a call, the one that lasts longest, of several the first; None if there is
    none."""
    closed = [read_exhaustion(text) for bucket in buckets if (text := fields.get(f"closed:{bucket}"))]
    longest = max(closed, key=lambda one: one.until_ms, default=None)
    return longest if longest is not None and longest.until_ms > now_ms else None


def _append(db: sqlite3.Connection, request: ChargeRequest, last: Id, clock_ms: int) -> list[Id]:
    """L10. Log all that is charged. Returns the ids."""
    ids = [last]
    for charge in (request.charge, *request.also):
        ids.append(following_id(ids[-1], clock_ms))
        append_charge(db, request.project, ids[-1], charge)
    return ids[1:]


def _trim(db: sqlite3.Connection, project: str, now_ms: int, retention_ms: int) -> None:
    """L13. Remove what no window can reach any more and the history has (L29), a bounded number of charges at once."""
    through_ms, rolled = now_ms - retention_ms, sqlite_history.rolled_up(db, project)
    if rolled is not None:
        through_ms = min(through_ms, max(rolled[0] - 1, now_ms - HISTORY_MS))
    newest_trimmed = db.execute(
        "SELECT MAX(ms) FROM (SELECT ms FROM charges WHERE project = ? AND ms <= ? ORDER BY ms, seq LIMIT ?)",
        (project, through_ms, TRIM_AT_ONCE),
    ).fetchone()[0]
    if newest_trimmed is not None:
        db.execute("DELETE FROM charges WHERE project = ? AND ms <= ?", (project, newest_trimmed))
        # A view that still counts some of these could not drop them later: it starts afresh at its next use.
        views = {name: ViewState.of(text) for name, text in fields_of(db, project, "view").items()}
        gone = [name for name, view in views.items() if view is None or view.tail[0] <= newest_trimmed]
        drop_fields(db, project, [f"view:{name}" for name in gone])
        through_ms = max(newest_trimmed, trimmed_through_ms(db, project))
        put_fields(db, project, [("trimmed_through_ms", through_ms)])
    drop_lapsed(db, project, "claim", now_ms)  # L25
    drop_lapsed(db, project, "place", now_ms)  # L31
    until_ms = read_fields(db, project, ("unlogged_until_ms",)).get("unlogged_until_ms", "0")
    if int(until_ms) <= now_ms - RETENTION_SLACK_MS:  # L17
        drop_kind(db, project, "unlogged")
