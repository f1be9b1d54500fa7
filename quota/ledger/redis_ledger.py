"""The shared ledger: Redis 6.2 or newer, or Valkey, through `lua/`. The contract is `quota.ledger.contract.Ledger`.

One decision is one script call, one round trip. The rules (L1, L2, ...) are in docs/ledger-rules.md; in Redis, scripts
implement them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from quota.common.clock import NEVER, elapsed_s
from quota.common.fork import OfOneProcess, start_over_in_child
from quota.common.log import warn
from quota.errors import LedgerError, UnusableLedger
from quota.ledger.compared import read_compared
from quota.ledger.contract import (
    COUNT_WITHIN_S,
    LONGEST_CLAIM_MS,
    MIN_RETENTION_MS,
    Ahead,
    ChargeRequest,
    ChargeResult,
    Exhaustion,
    Notes,
    Repair,
    checked_exhaustion,
    checked_range,
    read_entries,
    units_beyond,
)
from quota.ledger.entry import Charge, Entry
from quota.ledger.fence import FENCE, FILLING, UNSEALED, fenced_error
from quota.ledger.grants import read_grants
from quota.ledger.history import (
    HISTORY_MS,
    MAX_REFUSALS,
    History,
    RefusalCount,
)
from quota.ledger.redis_connection import Cluster, Connections, client_of
from quota.ledger.redis_decision import (
    FIRST_TRY,
    Question,
    policy_in,
    result_of,
)
from quota.ledger.redis_errors import (
    MAY_NOT_RUN,
    ErrorReply,
    Failed,
    Lost,
    Misconfigured,
    NotRedis,
    error_of,
    explained,
    is_denied,
)
from quota.ledger.redis_fields import (
    UNREADABLE,
    range_arguments,
    read_entry,
    units_text,
)
from quota.ledger.redis_scripts import FORMAT, history_key, keys_of, script
from quota.ledger.redis_url import checked_target, label_of, user_of
from quota.ledger.state_changes import Change, Rule, StateChanges
from quota.ledger.state_fields import (
    HISTORY_FIELDS,
    exhaustion_text,
    history_of,
    is_id,
    leading_ms,
    read_epoch,
    read_exhaustion,
    read_id,
    read_ms,
    read_repair,
    read_usages,
)
from quota.terms.arguments import MAX_NUMBER, whole, whole_clock
from quota.terms.limits import DAY_MS, HOUR_MS, View

if TYPE_CHECKING:
    from quota.common.findings import Finding

T = TypeVar("T")

TIMEOUT_S = 0.35
"""How long one connect or one answer may take. With one retry, a decision takes at most a second."""

RETRY_WITHIN_S = 0.5
"""A call whose answer was lost is retried only if the first try ended within this time."""

MAX_KEPT = 1_000
"""The most kinds of charges whose words are kept packed."""

MAX_PIECES = 100_000
"""The most script calls that a repair takes, of 250 entries each (L26)."""

READ_AT_ONCE = 250
"""The most entries that are read in one script: the server answers nobody else meanwhile."""

CHANGE_WITHIN_S = 3.0
"""A change of the state is tried anew for so long while others are quicker."""

MAX_CHANGES = 1_000
"""And so often."""

HOURS_AHEAD = 100
"""The most hours that are read ahead of the clock."""

_LASTING_WORDS = re.compile(
    "the ledger has (?:format|moved to)|WRONGTYPE |[Aa]uthenticat|WRONGPASS|unknown command|DB index"
)
"""Of the errors that the server itself reports, those that another try does not change."""

_FENCED = re.compile(r"^(?:ERR )?the ledger (has moved to|is being moved to|is being moved here from) (\S+) and takes")
_WAYS = {"has moved to": "", "is being moved to": UNSEALED, "is being moved here from": FILLING}
_OTHER_FORMAT = re.compile(r"^(?:ERR )?the ledger has format (.*), and this script needs")


class RedisLedger(StateChanges, OfOneProcess):
    """A ledger shared by every machine that reaches the server."""

    shared = True

    _timeout_s = TIMEOUT_S

    def __init__(self, url: str, *, clock: Callable[[], int] | None = None) -> None:
        self.label = label_of(url)
        self._clock = None if clock is None else whole_clock(clock)
        self._url = url
        self._target = checked_target(url, self.label, self._timeout_s)
        self._connected: Connections | Cluster | None = None
        self._say_evicts_at_s = 0.0
        self._questions: dict[tuple[object, ...], Question] = {}
        self._lock = threading.RLock()  # a signal handler may ask while its thread connects
        start_over_in_child(self)

    def now_ms(self) -> int:
        if self._clock is not None:
            return self._clock()
        seconds, micros = self._query("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    # -- the decision ------------------------------------------------------------------------------------------------

    def decide(self, request: ChargeRequest, *, commit: bool) -> ChargeResult:
        """Run charge.lua to a result, or for as long as a decision may count (L21).

        A retry after a lost answer says so, and so never charges twice (L16). What was lost before it left is asked
        again as a first try. A server that does not know the script gets the whole of it.
        """
        started_s, question, age = elapsed_s(), self._question(request, commit), FIRST_TRY
        may_be_done = last_try = False
        counting = None
        while True:
            if may_be_done:
                age = str(int((elapsed_s() - started_s) * 1000))
            try:
                reply = self._ask(request.project, question.words(request, self._now(), age), started_s)
            except Failed as error:
                if _is_unknown_script(error) and not question.whole:
                    question = Question(request, commit, whole=True)
                    continue
                never_left = isinstance(error, Lost) and not error.left
                if last_try or not _may_retry(error, started_s):
                    if counting is None or may_be_done or not never_left:
                        raise self._error(error, request.project) from error
                    return counting
                may_be_done, last_try = may_be_done or not never_left, True  # what may be retried was lost
                continue
            result = self._read(partial(result_of, request), reply)
            if policy := policy_in(reply):
                self._say_evicts(policy)
            if result.outcome != "counting" or elapsed_s() - started_s >= COUNT_WITHIN_S:
                return result
            counting = result

    def _question(self, request: ChargeRequest, commit: bool) -> Question:
        """The packed words of a kind of charge, kept for the next one of it."""
        checks, charge = request.checks, request.charge
        if request.also or type(checks) is not tuple:
            return Question(request, commit)
        of_the_call = request.closed_by, request.jitter_ms, request.retention_ms, request.granted, commit
        kind = (request.project, *charge[:-1], id(checks), *of_the_call)
        known = self._questions.get(kind)
        if known is None or known.checks is not checks:
            if len(self._questions) >= MAX_KEPT:
                self._questions.clear()
            known = self._questions[kind] = Question(request, commit)
        return known

    def _ask(self, project: str, words: list[bytes], since_s: float) -> Any:
        """Of a decision that began then: it ends within the second, whatever it waits for."""
        client = self._connected or self._connect_once()
        return client.ask(words, since_s + client.wall_s, key=keys_of(project).log)

    def _say_evicts(self, policy: str) -> None:
        """Warn once a day for each server, whichever project noticed; once a process if the server drops the claim."""
        if elapsed_s() < self._say_evicts_at_s:
            return
        self._say_evicts_at_s = elapsed_s() + DAY_MS / 1000
        try:
            first = self._command("SET", "quota:{claim}:eviction", policy, "NX", "PX", str(DAY_MS))
        except Failed:
            first = True
        if first:
            from quota.ledger.redis_health import evicts

            warn("ledger_evicts", "; ".join(evicts(policy)), ledger=self.label)

    def examine(self, project: str) -> Sequence[Finding]:
        from quota.ledger.redis_health import findings  # late: `quota doctor` alone asks

        reply = self._script("examine", project, [], with_history=True)
        info, lifetimes, missing, refused = self._read(tuple, reply)
        keys = (*keys_of(project), history_key(project))
        why = str(self._error(error_of(refused))) if refused else ""
        return list(findings(info, lifetimes, missing, keys, why))

    # -- corrections and reading -------------------------------------------------------------------------------------

    def repay(
        self,
        project: str,
        machine: str,
        charges: Sequence[tuple[int, Charge]],
        retention_ms: int = MIN_RETENTION_MS,
        caller_ms: int | None = None,
    ) -> bool:
        args = [self._now(), str(caller_ms or 0), machine, str(retention_ms)]
        for number, charge in charges:
            args += (str(number), units_text(charge), charge.method, charge.job, charge.region, charge.idempotency_key)
        return bool(self._script("repay", project, args) != "CLOCK")

    def settle(
        self, project: str, charge_id: str, units: int, views: Sequence[View], also: Sequence[str] = ()
    ) -> Entry | None:
        units = whole(units, "units: what a charge counts", 0, MAX_NUMBER)
        if not all(map(is_id, (charge_id, *also))):
            return None
        # It keeps all views up to date.
        reply = self._script("settle", project, [charge_id, str(units), *also], with_history=True)
        return self._read(read_entry, [charge_id, *reply]) if reply else None

    def read(
        self, project: str, after: tuple[int, int], until_ms: int, count: int, within_s: float | None = None
    ) -> Sequence[Entry]:
        keys, since_s = keys_of(project), elapsed_s()
        after, until_ms, count = checked_range(after, until_ms, count)
        found: list[Entry] = []
        while True:
            piece = min(count - len(found), READ_AT_ONCE)
            args = range_arguments(after, until_ms, piece)
            left_s = None if within_s is None else max(0.0, within_s - (elapsed_s() - since_s))
            rows = self._retried(lambda ends_s: self._run("read", keys, args, ends_s, left_s), project)  # noqa: B023
            found += [self._read(read_entry, row) for row in rows]
            if len(rows) < piece or len(found) >= count:
                return found
            after = found[-1].ms, found[-1].seq

    def whole_after_ms(self, project: str) -> int:
        return self._read(read_ms, self._field(project, "trimmed_through_ms") or "0")

    def exhaust(self, project: str, exhaustion: Exhaustion) -> Exhaustion:
        exhaustion = checked_exhaustion(exhaustion)
        record = exhaustion_text(exhaustion)
        # An upstream's day ends well within that lifetime, and every call that is refused for it begins another.
        reply = self._script("exhaust", project, [self._now(), exhaustion.bucket, record, str(MIN_RETENTION_MS)])
        return self._read(read_exhaustion, reply)

    def _exhaustions(self, state: Mapping[str, str]) -> Sequence[Exhaustion]:
        lifted = [self._read(read_exhaustion, state[field]) for field in state if field.startswith("reopened:")]
        closed = [self._read(read_exhaustion, state[field]) for field in state if field.startswith("closed:")]
        known = {exhaustion.bucket: exhaustion for exhaustion in lifted + closed}  # of two, the one that stands
        return [known[bucket] for bucket in sorted(known)]

    def _field(self, project: str, name: str) -> str | None:
        """A field of a ledger that is ours, and open (L24, L27)."""
        words: list[str | None] = self._query("HMGET", keys_of(project).state, "format", "epoch", "last", name)
        self._check_format(words[0], words[1], is_new=words[2] is None)
        return words[3]

    def _state(self, project: str) -> dict[str, str]:
        reply = self._query("HGETALL", keys_of(project).state)
        state: dict[str, str] = dict(zip(reply[::2], reply[1::2], strict=True))
        self._check_format(state.get("format"), state.get("epoch"), is_new=not state)
        return state

    def notes(self, project: str) -> Notes:
        state = self._state(project)
        return Notes(
            exhaustions=self._exhaustions(state),
            whole_after_ms=self._read(read_ms, state.get("trimmed_through_ms") or "0"),
            grants=self._read(read_grants, state.get("granted") or ""),
            compared=read_compared(state.get("compared") or ""),
        )

    def _change_state(self, project: str, names: Sequence[str], rule: Rule[T], *, once: bool = False) -> T:
        """See `StateChanges`. One trip reads, and each further one changes what was read, or reads it anew."""
        keys, ends_s, now, seen = keys_of(project), elapsed_s() + CHANGE_WITHIN_S, self._now(), ""
        change: Change[T] | None = None
        for _ in range(MAX_CHANGES):
            keep_ms, fields = (1, {}) if change is None else (change.keep_ms, change.fields)
            becomes = [word for name, text in fields.items() for word in (name, "-" if text is None else f"={text}")]
            args = [now, str(keep_ms), seen, str(len(names)), *names, *becomes]
            reply = self._retried(partial(self._run, "swap", keys, args), project)
            if change is not None and (once or reply == 1):
                return change.answer
            if change is not None and elapsed_s() > ends_s:
                break
            now_ms, seen, *texts = reply
            known = {name: text for name, text in zip(names, texts, strict=True) if text is not None}
            change = self._read(partial(rule, int(now_ms)), known)
            if all(known.get(name) == text for name, text in change.fields.items()):
                return change.answer
        raise LedgerError(f"ledger {self.label}: others change the same without end; run again in a moment")

    # -- after a clock that was wrong --------------------------------------------------------------------------------

    def ahead(self, project: str) -> Ahead:
        now_ms = self.now_ms()
        charges = units = newest_ms = 0
        newest = self._query("XREVRANGE", keys_of(project).log, "+", "-", "COUNT", "1")
        if newest:
            newest_ms = self._read(lambda entry: read_id(entry[0])[0], newest[0])
        for entry in read_entries(self, project, now_ms + 1, NEVER):
            charges += 1
            units += entry.units
        state = self._state(project)
        lines = {field[len("unlogged:") :]: line for field, line in state.items() if field.startswith("unlogged:")}
        usages = [usage for view, line in lines.items() for usage in self._read(partial(read_usages, view), line)]
        exhaustions = [max(x.since_ms, x.reopened_ms) for x in self._exhaustions(state)]
        claims_ms = [self._read(leading_ms, text) for field, text in state.items() if field.startswith("claim:")]
        return Ahead(
            now_ms,
            newest_ms,
            charges,
            units,
            sum(units_beyond(usage, now_ms) for usage in usages),
            sum(at_ms > now_ms for at_ms in exhaustions),
            sum(until_ms > now_ms + LONGEST_CLAIM_MS for until_ms in claims_ms),
        )

    def repair(self, project: str, epoch: str, caller_ms: int) -> str | None:
        keys = keys_of(project)
        aside = keys.log.removesuffix(":log") + ":repair"
        history = history_key(project)
        started_s = elapsed_s()
        rolled = self._query("HGET", history, "rolled_up")
        if rolled and self._read(read_id, rolled)[0] > caller_ms - HOUR_MS:
            self._roll_up_all(project, caller_ms)
        for _ in range(MAX_PIECES):
            passed_ms = int((elapsed_s() - started_s) * 1000) if self._clock is None else 0
            args = [self._now(), str(caller_ms + passed_ms), epoch]
            reply = self._retried(
                partial(self._run, "repair", (*keys, f"{aside}:log", f"{aside}:corrections", history), args), project
            )
            if reply != "MORE":
                return None if reply == "CLOCK" else self._read(read_epoch, reply)
        raise LedgerError(
            f"ledger {self.label}: charges are settled faster than its log is copied; run `quota ledger repair --yes` "
            "again when less is going on"
        )

    def _roll_up_all(self, project: str, caller_ms: int) -> None:
        """The sums of the history need each charge once, and a repair gives charges other ids."""
        for _ in range(MAX_PIECES):
            args = [self._now(), str(caller_ms), "1"]
            if not int(self._script("roll_up", project, args, with_history=True)[1]):
                return

    def repairs(self, project: str) -> Sequence[Repair]:
        lines = (self._field(project, "repaired") or "").splitlines()
        return [self._read(read_repair, line) for line in reversed(lines)]

    # -- the history -------------------------------------------------------------------------------------------------

    def roll_up(
        self, project: str, caller_ms: int, within_s: float | None = None, *, present_hour: bool = False
    ) -> bool:
        args = [self._now(), str(caller_ms), *(["1"] if present_hour else [])]
        _, more = self._once("roll_up", project, args, within_s)  # the next one to ask goes on from there
        return bool(int(more))

    def history(self, project: str, since_ms: int, now_ms: int) -> History:
        formerly = self._field(project, "rolled_up")
        rolled = self._query("HMGET", history_key(project), "rolled_up")[0] or formerly
        # The clock may have gone back since hours were rolled up that are over by the other time only.
        ahead_ms = self._read(read_id, rolled)[0] if rolled else 0
        first, last_hour = max(since_ms, now_ms - HISTORY_MS, 0) // HOUR_MS, now_ms // HOUR_MS
        several = {*range(first, last_hour + 1)}
        several |= {*range(max(last_hour, ahead_ms // HOUR_MS - HOURS_AHEAD) + 1, ahead_ms // HOUR_MS + 1)}
        hours = [str(hour) for hour in sorted(several)]
        words = [*HISTORY_FIELDS, *(f"hour:{hour}" for hour in hours), *(f"refused:{hour}" for hour in hours)]
        reply = self._query("HMGET", history_key(project), *words)
        return self._read(lambda reply: history_of(hours, reply, formerly), reply)

    def add_refusals(
        self, project: str, counts: Sequence[RefusalCount], refusals: Sequence[str], within_s: float | None = None
    ) -> None:
        args = [str(len(counts))]
        for one in counts:
            args += (str(one.hour_ms // HOUR_MS), one.limit, one.job, one.reason, str(one.calls))
        self._once("add_refusals", project, [*args, *refusals], within_s)

    def refusals(self, project: str) -> Sequence[str]:
        self._field(project, "last")
        return self._refusals(project)

    def _refusals(self, project: str) -> list[str]:
        fields = [f"refusal:{n}" for n in range(MAX_REFUSALS)]
        kept, *texts = self._query("HMGET", history_key(project), "refusals", *fields)
        newest = self._read(int, kept or 0) % MAX_REFUSALS
        return [text for text in texts[newest:] + texts[:newest] if text is not None]

    # -- the connection ----------------------------------------------------------------------------------------------

    # Every word of a command must be text: see `quota.ledger.redis_connection`.

    def _connect_once(self) -> Connections | Cluster:
        client = self._connected
        if client is None:
            with self._lock:
                client = self._connected = self._connected or client_of(self._target)
        return client

    def _command(self, *command: str, ends_s: float | None = None, within_s: float | None = None) -> Any:
        return self._connect_once().execute_command(*command, ends_s=ends_s, within_s=within_s)

    def _run(
        self,
        name: str,
        keys: Sequence[str],
        args: Sequence[str],
        ends_s: float | None = None,
        within_s: float | None = None,
    ) -> Any:
        text, sha = script(name)
        words = (str(len(keys)), *keys, *args)
        try:
            return self._command("EVALSHA", sha, *words, ends_s=ends_s, within_s=within_s)
        except ErrorReply as error:
            if not _is_unknown_script(error):
                raise
            return self._command("EVAL", text, *words, ends_s=ends_s, within_s=within_s)

    def _now(self) -> str:
        """The time that the scripts go by: "0" for the server's own."""
        return "0" if self._clock is None else str(self._clock())

    def _script(self, name: str, project: str, args: Sequence[str], *, with_history: bool = False) -> Any:
        """Run a script that may run twice: it only reads, or sets absolute values, or goes on from where it came to."""
        keys = (*keys_of(project), history_key(project)) if with_history else keys_of(project)
        return self._retried(partial(self._run, name, keys, args), project)

    def _once(self, name: str, project: str, args: Sequence[str], within_s: float | None) -> Any:
        """Run a script over the history, which is not tried again."""
        try:
            return self._run(name, (*keys_of(project), history_key(project)), args, within_s=within_s)
        except Failed as error:
            raise self._error(error, project) from error

    def _query(self, *command: str) -> Any:
        return self._retried(lambda ends_s: self._command(*command, ends_s=ends_s))

    def _retried(self, work: Callable[[float], Any], project: str = "") -> Any:
        """Both tries end by the time that `work` is given (`elapsed_s`)."""
        started = elapsed_s()
        ends_s = started + self._connect_once().wall_s
        for last in (False, True):
            try:
                return work(ends_s)
            except Failed as error:
                if last or not _may_retry(error, started):
                    raise self._error(error, project) from error
        raise AssertionError("unreachable")

    def _read(self, reader: Callable[[Any], T], reply: Any) -> T:
        """A reply as values. Raises LedgerError for what this package never writes: other programs may write here."""
        try:
            return reader(reply)
        except UNREADABLE as error:
            raise LedgerError(f"ledger {self.label} holds what no quota program writes: {reply!r:.200}") from error

    def _error(self, error: Failed, project: str = "") -> LedgerError:
        """What is raised for it. With the `project` that a script was about, it also finds out what it may not do."""
        if isinstance(error, ErrorReply) and is_denied(str(error)):
            return UnusableLedger(self._explain(self._denied(error, project)))
        lasts = _LASTING_WORDS.search(str(error)) is not None or isinstance(error, (NotRedis, Misconfigured))
        if isinstance(error, ErrorReply):
            lasts = lasts or error.asks_for_password
        return (UnusableLedger if lasts else LedgerError)(self._explain(error))

    def _denied(self, error: ErrorReply, project: str) -> ErrorReply:
        """The same error with the names of all that is missing. A script names one, and none before Redis 7.2."""
        if not project or MAY_NOT_RUN in str(error):
            return error
        try:
            missing = self._run("examine", (*keys_of(project), history_key(project)), [])[2]
        except Failed:
            return error
        return ErrorReply(f"{MAY_NOT_RUN} {', '.join(missing)}") if missing else error

    def _explain(self, error: Failed) -> str:
        """One line for an operator, without the driver's own words where these could quote the url."""
        where, said = f"ledger {self.label}", (str(error).splitlines() or [""])[0][:200]
        moved = _FENCED.search(str(error))
        if moved is not None:
            return str(fenced_error(where, FENCE + _WAYS[moved[1]] + moved[2]))
        other_format = _OTHER_FORMAT.search(said)
        if other_format is not None:
            return self._wrong_format(other_format[1])
        return explained(error, where, self._timeout_s, user_of(self._url))

    def _check_format(self, found: str | None, epoch: str | None, *, is_new: bool) -> None:
        """L24 and L27, for what is read without a script."""
        if found != FORMAT and not (found is None and is_new):
            raise UnusableLedger(self._wrong_format(found or "0"))
        if epoch is not None and epoch.startswith(FENCE):
            raise fenced_error(f"ledger {self.label}", epoch)

    def _wrong_format(self, found: str) -> str:
        if re.fullmatch(r"[1-9][0-9]{0,8}", found) and int(found) > int(FORMAT):
            return (
                f"ledger {self.label} was written by a newer quota-ledger (its format {found}, ours {FORMAT}): "
                "upgrade this machine"
            )
        shown = found if re.fullmatch(r"[0-9]{1,9}", found) else repr(found[:20])
        return (
            f"ledger {self.label} was written by an older quota-ledger (its format {shown}, ours {FORMAT}); give the "
            "ledger another database, or delete its keys quota:{...} (this machine still counts what it has seen)"
        )

    def close(self) -> None:
        with self._lock:
            client, self._connected = self._connected, None
        if client is not None:
            client.close()

    def start_over_in_child(self) -> None:
        """A thread that the child lacks may hold the lock. The connections see to themselves."""
        self._lock = threading.RLock()


def _may_retry(error: Failed, started_s: float) -> bool:
    """Whether the answer was lost, early enough to retry within the second."""
    return isinstance(error, Lost) and elapsed_s() - started_s <= RETRY_WITHIN_S


def _is_unknown_script(error: Failed) -> bool:
    return isinstance(error, ErrorReply) and error.code == "NOSCRIPT"
