"""The shared ledger: Redis 6.2 or newer, or Valkey, through `lua/`. The contract is `quota.ledger.contract.Ledger`.

One decision is one script call, one round trip. The rules (L1, L2, ...) are in ARCHITECTURE.md; in Redis the scripts
implement them. `_keys` builds the keys of a project, and the head of `lua/charge.lua` describes them.
"""

from __future__ import annotations

import json
import re
import threading
from bisect import bisect_left
from collections import Counter
from functools import lru_cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from quota.arguments import MAX_NUMBER, text, whole, whole_clock
from quota.common.clock import LATEST_MS, NEVER, elapsed_s
from quota.common.fork import start_over_in_child
from quota.common.log import warn
from quota.common.steps import run
from quota.common.values import NamedTuple, new_tuple
from quota.errors import ConfigError, LedgerError, UnusableLedger, UsageError
from quota.ledger.compared import compared_text, read_compared
from quota.ledger.contract import (
    COUNT_WITHIN_S,
    LONGEST_CLAIM_MS,
    MAX_READ,
    MIN_RETENTION_MS,
    Ahead,
    ChargeResult,
    Exhaustion,
    Notes,
    Repair,
    asked_again,
    checked_exhaustion,
    checked_range,
    entries_between,
    read_entries,
    units_beyond,
)
from quota.ledger.entry import DEFAULT_BUCKET, Entry
from quota.ledger.fence import FENCE, FILLING, UNSEALED, fenced_error
from quota.ledger.grants import grants_text, read_grants
from quota.ledger.history import (
    HISTORY_MS,
    MAX_REFUSALS,
    RUN_CHARS,
    History,
    HourOfLog,
    HourOfSpending,
    RefusalCount,
    RefusedSum,
    RunningSum,
    hours_of,
    read_cells,
)
from quota.ledger.redis_connection import Connections
from quota.ledger.redis_errors import (
    MAY_NOT_RUN,
    ErrorReply,
    Failed,
    Lost,
    Misconfigured,
    NotRedis,
    explained,
    is_denied,
)
from quota.ledger.redis_scripts import script
from quota.ledger.redis_url import client_maker, label_of, user_of
from quota.ledger.resp import bulk, pack
from quota.ledger.state_fields import (
    checked_count,
    exhaustion_text,
    id_text,
    read_epoch,
    read_exhaustion,
    read_id,
    read_ms,
    read_usages,
)
from quota.limits import DAY_MS, HOUR_MS, Sliding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from quota.common.findings import Finding
    from quota.common.steps import Steps
    from quota.ledger.claims import Claim, Claimed, Ending, Holder
    from quota.ledger.compared import Compared
    from quota.ledger.contract import ChargeOutcome, ChargeRequest, Expected, LimitCheck, Repeated
    from quota.ledger.entry import Charge, Id
    from quota.ledger.grants import Grant
    from quota.ledger.redis_cluster import Cluster
    from quota.ledger.unlogged import UnloggedUsage
    from quota.limits import View

T = TypeVar("T")

FORMAT = "5"
"""The format of everything stored in Redis; the same number stands in each script (L24)."""

TIMEOUT_S = 0.35
"""How long one connect or one answer may take. With one retry, a decision takes at most a second."""

RETRY_WITHIN_S = 0.5
"""A call whose answer was lost is retried only if the first try ended within this time."""

MAX_PIECES = 100_000
"""A repair may take so many script calls of 250 entries each (L26)."""

READ_AT_ONCE = 250
"""So many entries are read in one script: the server answers nobody else meanwhile."""

MAX_QUESTIONS = 1_000
"""So many kinds of questions are kept packed."""

RETRY_AGE_MS = 8
"""The index of retry_age_ms among the arguments of charge.lua."""

FIRST_TRY = "-1"
"""The retry_age_ms of a first try."""

BEFORE_USED = 7
"""So many words stand before the used units in a reply of charge.lua."""

# None of these is compiled before it is needed.
_LASTING_WORDS = "the ledger has (?:format|moved to)|WRONGTYPE |[Aa]uthenticat|WRONGPASS|unknown command|DB index"
"""Of the errors that the server itself reports, those that another try does not change."""

_FENCED = r"^(?:ERR )?the ledger (has moved to|is being moved to|is being moved here from) (\S+) and takes"
_WAYS = {"has moved to": "", "is being moved to": UNSEALED, "is being moved here from": FILLING}
_OTHER_FORMAT = r"^(?:ERR )?the ledger has format (.*), and this script needs"
_OF_A_PROJECT = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-")


class RedisLedger:
    """A ledger shared by every machine that reaches the server."""

    shared = True

    _timeout_s = TIMEOUT_S

    def __init__(self, url: str, *, clock: Callable[[], int] | None = None) -> None:
        self.label = label_of(url)
        self._clock = None if clock is None else whole_clock(clock)
        self._url = url
        self._connect = client_maker(url, self.label, self._timeout_s)
        self._connected: Connections | Cluster | None = None
        self._questions: dict[tuple[int, str, bool], _Question | Sequence[LimitCheck]] = {}
        self._say_evicts_at_s = 0.0
        self._lock = threading.RLock()  # a signal handler may ask while its thread connects
        start_over_in_child(self)

    def now_ms(self) -> int:
        if self._clock is not None:
            return self._clock()
        seconds, micros = self._query("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    # -- the decision ------------------------------------------------------------------------------------------------

    def decide(self, request: ChargeRequest, *, commit: bool) -> ChargeResult:
        return run(self.deciding(request, commit=commit))

    def repeating(self, request: ChargeRequest, *, commit: bool) -> Repeated:
        """See `quota.ledger.contract.repeating`."""
        return _Question(self, request, commit).decide

    def deciding(self, request: ChargeRequest, *, commit: bool) -> Steps[ChargeResult]:
        """`decide`, for whoever does its steps: nearly always one, a Command."""
        started_s = elapsed_s()
        reply: Any
        try:
            reply = yield Command(self._ask, request.project, self._packed(request, commit), started_s)
        except Failed as error:
            reply = error
        if type(reply) is str and "+" not in reply:
            return self._result(request, reply, commit)
        return (yield from self._concluding(request, commit, started_s, reply))

    def _concluding(self, request: ChargeRequest, commit: bool, started_s: float, reply: Any) -> Steps[ChargeResult]:
        """What follows from the first reply of a decision that began at `started_s`, or from a Failed in its place."""
        if isinstance(reply, Failed):
            again = _may_retry(reply, started_s)
            if not again and not _is_unknown_script(reply):
                raise (yield partial(self._error, reply, request.project)) from reply
            reply = yield from self._charge(request, commit, started_s, retry=_may_be_done(reply), last_try=again)
        elif _says_more(reply):
            reply = yield from self._charge(request, commit, started_s)
        if _is_unfinished(request, reply):
            reply = yield from self._to_the_end(request, commit, started_s, reply)
        if isinstance(reply, list) and len(reply) > BEFORE_USED + len(request.checks):
            yield partial(self._say_evicts, str(reply.pop()))
        return self._result(request, reply, commit)

    def _packed(self, request: ChargeRequest, commit: bool) -> bytes:
        """The first question of a decision."""
        question = None
        if type(request.checks) is tuple and not request.also:
            question = self._question(request, commit)
        if question is not None:
            return question.packed(request, self._now())
        return _call_of_charge(request.project, _arguments(request, self._now(), commit))

    def _result(self, request: ChargeRequest, reply: Any, commit: bool) -> ChargeResult:
        try:
            return (
                _result_of_line(request.checks, request.expected.epoch, reply, commit)
                if type(reply) is str
                else _result(request, reply)
            )
        except _UNREADABLE as error:
            raise self._unreadable(reply) from error

    def _ask(self, project: str, words: bytes, since_s: float) -> Any:
        """Of a decision that began then: it ends within the second, whatever it waits for."""
        client = self._connected or self._connect_once()
        if isinstance(client, Connections):
            return client.ask(words, since_s + client.wall_s)
        return client.ask(_keys(project).log, words, since_s + client.wall_s)

    def _question(self, request: ChargeRequest, commit: bool) -> _Question | None:
        """What is the same in all questions about these checks: a budget asks it for hours. None for the first one: of
        many projects each is asked once."""
        checks, charge = request.checks, request.charge
        key = id(checks), charge.region, commit
        question = self._questions.get(key)
        if question is None:
            if len(self._questions) >= MAX_QUESTIONS:
                self._questions = {}
            self._questions[key] = checks
            return None
        if not isinstance(question, _Question) or question.charge != charge[:-1] or question.fixed != _fixed(request):
            question = self._questions[key] = _Question(self, request, commit)
        return question

    def _charge(
        self, request: ChargeRequest, commit: bool, started_s: float, *, retry: bool = False, last_try: bool = False
    ) -> Steps[Any]:
        """Run charge.lua to a result, or while a decision may count (L21). A retry after a lost answer says so, and
        so never charges twice (L16). What was lost before it left is asked again as a first try."""
        args = _arguments(request, self._now(), commit)
        while True:
            if retry:
                args[RETRY_AGE_MS] = str(int((elapsed_s() - started_s) * 1000))
            try:
                reply = yield from self._run_charge(request.project, args, started_s)
            except Failed as error:
                if last_try or not _may_retry(error, started_s):
                    raise (yield partial(self._error, error, request.project)) from error
                retry, last_try = retry or _may_be_done(error), True
                continue
            if not _says_more(reply) or elapsed_s() - started_s >= COUNT_WITHIN_S:
                return reply

    def _run_charge(self, project: str, args: list[str], since_s: float) -> Steps[Any]:
        """`_run`, for this script, in steps."""
        try:
            return (yield Command(self._ask, project, _call_of_charge(project, args), since_s))
        except ErrorReply as error:
            if not _is_unknown_script(error):
                raise
        return (yield Command(self._ask, project, _call_of_charge(project, args, whole=True), since_s))

    def _to_the_end(self, request: ChargeRequest, commit: bool, started_s: float, reply: Any) -> Steps[Any]:
        """Ask again until a refusal says when there is room, or while a decision may count (L21). The last answer
        counts. That it was refused stands, whatever fails after it."""
        while True:
            try:
                reply = yield from self._charge(request, commit, started_s, retry=True, last_try=True)
            except LedgerError:
                return reply
            if not _is_unfinished(request, reply):
                return reply
            if elapsed_s() - started_s >= COUNT_WITHIN_S:
                return _still_counting(reply)

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

            warn("ledger_evicts ledger=%s: %s; %s", self.label, *evicts(policy))

    def examine(self, project: str) -> Sequence[Finding]:
        from quota.ledger.redis_health import findings  # late: `quota doctor` alone asks

        reply = self._script("examine", project, [], with_history=True)
        info, lifetimes, missing = self._read(tuple, reply)
        keys = (*_keys(project), _history_key(project))
        return list(findings(info, lifetimes, missing, keys))

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
            args += (str(number), _units(charge), charge.method, charge.job, charge.region, charge.idempotency_key)
        return bool(self._script("repay", project, args) != "CLOCK")

    def add_unlogged(
        self, project: str, epoch: str, usages: Sequence[UnloggedUsage], retention_ms: int = MIN_RETENTION_MS
    ) -> str:
        args = [self._now(), epoch, str(retention_ms)]
        for usage in usages:
            args += (usage.view, *usage.fields())
        return str(self._script("add_unlogged", project, args))

    def settle(self, project: str, charge_id: str, units: int, views: Sequence[View]) -> Entry | None:
        units = whole(units, "units: what a charge counts", 0, MAX_NUMBER)
        # It keeps all views up to date.
        reply = self._script("settle", project, [charge_id, str(units)], with_history=True)
        return self._read(_entry, [charge_id, *reply]) if reply else None

    def read(
        self, project: str, after: tuple[int, int], until_ms: int, count: int, within_s: float | None = None
    ) -> Sequence[Entry]:
        keys, since_s = _keys(project), elapsed_s()

        def ask(args: list[str]) -> Steps[Any]:
            left_s = None if within_s is None else max(0.0, within_s - (elapsed_s() - since_s))
            return (yield partial(self._retried, lambda ends_s: self._run("read", keys, args, ends_s, left_s), project))

        return run(self._in_pieces(after, until_ms, count, ask))

    def reading(
        self, project: str, after: tuple[int, int], until_ms: int, count: int, *_: object
    ) -> Steps[Sequence[Entry]]:
        """`read`, in steps. It is not asked again where the answer is lost: others are asked for at the same time."""
        keys = _keys(project)

        def ask(args: list[str]) -> Steps[Any]:
            words = pack(("EVALSHA", script("read")[1], str(len(keys)), *keys, *args))
            try:
                return (yield Command(self._ask, project, words, elapsed_s()))
            except Failed as error:
                if not _is_unknown_script(error):
                    raise self._error(error, project) from error
            return (yield partial(self._script, "read", project, args))

        return self._in_pieces(after, until_ms, count, ask)

    def _in_pieces(
        self, after: Id, until_ms: int, count: int, ask: Callable[[list[str]], Steps[Any]]
    ) -> Steps[Sequence[Entry]]:
        """The entries of a range, of which no answer has so many that it holds the server."""
        after, until_ms, count = checked_range(after, until_ms, count)
        found: list[Entry] = []
        while True:
            piece = min(count - len(found), READ_AT_ONCE)
            rows = yield from ask(_of_a_range(after, until_ms, piece))
            found += [self._read(_entry, row) for row in rows]
            if len(rows) < piece or len(found) >= count:
                return found
            after = found[-1].ms, found[-1].seq

    def add_up(self, project: str, after: Id, through: Id) -> Iterator[HourOfLog]:
        keys, until = _keys(project), id_text(through)
        found, epoch, last = self._query("HMGET", keys.state, "format", "epoch", "last")
        self._check_format(found, epoch, is_new=last is None)
        any_corrections = self._query("EXISTS", keys.corrections)
        while True:
            rows = self._query("XRANGE", keys.log, _from(after), until, "COUNT", str(MAX_READ))
            if not rows:
                return
            first, last_id = self._read(read_id, rows[0][0]), self._read(read_id, rows[-1][0])
            units = self._query("HMGET", keys.corrections, *(row[0] for row in rows)) if any_corrections else []
            if units and self.whole_after_ms(project) >= first[0]:  # some of the corrections may be gone
                yield from hours_of(entries_between(self, project, after, last_id))
            else:
                yield from self._read(partial(_added_up, rows), units)
            if len(rows) < MAX_READ:
                return
            after = last_id

    def whole_after_ms(self, project: str) -> int:
        fields = ("format", "epoch", "last", "trimmed_through_ms")
        found, epoch, last, trimmed_through_ms = self._query("HMGET", _keys(project).state, *fields)
        self._check_format(found, epoch, is_new=last is None)
        return self._read(read_ms, trimmed_through_ms or "0")

    def exhaust(self, project: str, exhaustion: Exhaustion) -> Exhaustion:
        exhaustion = checked_exhaustion(exhaustion)
        record = exhaustion_text(exhaustion)
        # An upstream's day ends well within that lifetime, and every call that is refused for it begins another.
        reply = self._script("exhaust", project, [self._now(), exhaustion.bucket, record, str(MIN_RETENTION_MS)])
        return self._read(read_exhaustion, reply)

    def exhaustions(self, project: str) -> Sequence[Exhaustion]:
        return self._exhaustions(self._state(project))

    def _exhaustions(self, state: Mapping[str, str]) -> Sequence[Exhaustion]:
        kinds = [(field.partition(":")[0], record) for field, record in state.items()]
        lifted = [self._read(read_exhaustion, record) for kind, record in kinds if kind == "reopened"]
        closed = [self._read(read_exhaustion, record) for kind, record in kinds if kind == "closed"]
        known = {exhaustion.bucket: exhaustion for exhaustion in lifted + closed}  # of two, the one that stands
        return [known[bucket] for bucket in sorted(known)]

    def _state(self, project: str) -> dict[str, str]:
        return self._checked_state(self._query("HGETALL", _keys(project).state))

    def _checked_state(self, reply: Any) -> dict[str, str]:
        state: dict[str, str] = dict(zip(reply[::2], reply[1::2], strict=True))
        self._check_format(state.get("format"), state.get("epoch"), is_new=not state)
        return state

    def notes(self, project: str) -> Notes:
        return self._notes(self._state(project))

    def noting(self, project: str) -> Steps[Notes]:
        """`notes`, in steps."""
        command = "HGETALL", _keys(project).state
        try:
            reply = yield Command(self._ask, project, pack(command), elapsed_s())
        except Failed:
            reply = yield partial(self._query, *command)
        return self._notes(self._checked_state(reply))

    def _notes(self, state: Mapping[str, str]) -> Notes:
        return Notes(
            exhaustions=self._exhaustions(state),
            whole_after_ms=self._read(read_ms, state.get("trimmed_through_ms") or "0"),
            grants=self._read(read_grants, state.get("granted") or ""),
            compared=read_compared(state.get("compared") or ""),
        )

    def reopen(self, project: str, bucket: str, because: str = "") -> bool:
        return bool(self._script("reopen", project, [self._now(), text(bucket, "bucket"), json.dumps(because)]))

    def grant(self, project: str, grants: Sequence[Grant], compared: Sequence[Compared] | None = None) -> None:
        try:
            args = [grants_text(grants), str(MIN_RETENTION_MS)]
            args += [] if compared is None else [compared_text(compared)]
        except ValueError as error:
            raise UsageError(f"grants: {error}") from None
        self._script("grant", project, args)

    def grants(self, project: str) -> Sequence[Grant]:
        fields = ("format", "epoch", "last", "granted")
        found, epoch, last, stored = self._query("HMGET", _keys(project).state, *fields)
        self._check_format(found, epoch, is_new=last is None and stored is None)
        return self._read(read_grants, stored or "")

    def compared(self, project: str) -> Sequence[Compared]:
        fields = ("format", "epoch", "last", "compared")
        found, epoch, last, stored = self._query("HMGET", _keys(project).state, *fields)
        self._check_format(found, epoch, is_new=last is None and stored is None)
        return read_compared(stored or "")

    def claim(self, project: str, claim: Claim, *, take_over: bool = False) -> Claimed:
        from quota.ledger.claims import checked_claim  # late: a charge claims nothing

        claim = checked_claim(claim)
        args = self._claim_args("take" if take_over else "claim", claim)
        return self._read(lambda reply: _claimed(claim, reply), self._script("claim", project, [*args, *claim.regions]))

    def end_claim(self, project: str, claim: Claim, ending: Ending) -> None:
        from quota.ledger.claims import checked_claim

        self._script("claim", project, self._claim_args(ending, checked_claim(claim)))

    def _claim_args(self, mode: str, claim: Claim) -> list[str]:
        names = (claim.name, claim.owner, claim.run, claim.machine, claim.host)
        return [self._now(), mode, *names, str(claim.hold_ms), str(claim.lease_ms), claim.tick, str(claim.tick_ms)]

    # -- after a clock that was wrong --------------------------------------------------------------------------------

    def ahead(self, project: str) -> Ahead:
        now_ms = self.now_ms()
        charges = units = newest_ms = 0
        newest = self._query("XREVRANGE", _keys(project).log, "+", "-", "COUNT", "1")
        if newest:
            newest_ms = self._read(lambda entry: read_id(entry[0])[0], newest[0])
        for entry in read_entries(self, project, now_ms + 1, NEVER):
            charges += 1
            units += entry.units
        state = self._state(project)
        lines = {field[len("unlogged:") :]: line for field, line in state.items() if field.startswith("unlogged:")}
        usages = [usage for view, line in lines.items() for usage in self._read(partial(read_usages, view), line)]
        exhaustions = [max(x.since_ms, x.reopened_ms) for x in self.exhaustions(project)]
        claims_ms = [self._read(_leading_ms, text) for field, text in state.items() if field.startswith("claim:")]
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
        keys = _keys(project)
        aside = keys.log.removesuffix(":log") + ":repair"
        history = _history_key(project)
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
        fields = ("format", "epoch", "last", "repaired")
        found, epoch, last, repaired = self._query("HMGET", _keys(project).state, *fields)
        self._check_format(found, epoch, is_new=last is None)
        return [self._read(_repair, line) for line in reversed((repaired or "").splitlines())]

    # -- the history -------------------------------------------------------------------------------------------------

    def roll_up(
        self, project: str, caller_ms: int, within_s: float | None = None, *, present_hour: bool = False
    ) -> bool:
        keys = (*_keys(project), _history_key(project))
        args = [self._now(), str(caller_ms), *(["1"] if present_hour else [])]
        try:
            _, more = self._run("roll_up", keys, args, within_s=within_s)
        except Failed as error:  # whoever asks next goes on from where it came to
            raise self._error(error, project) from error
        return bool(int(more))

    def history(self, project: str, since_ms: int, now_ms: int) -> History:
        fields = ("format", "epoch", "last", "rolled_up")
        found, epoch, last, formerly = self._query("HMGET", _keys(project).state, *fields)
        self._check_format(found, epoch, is_new=last is None)
        rolled = self._query("HMGET", _history_key(project), "rolled_up")[0] or formerly
        # The clock may have gone back since hours were rolled up that are over by the other time only.
        ahead_ms = self._read(read_id, rolled)[0] if rolled else 0
        first, last_hour = max(since_ms, now_ms - HISTORY_MS, 0) // HOUR_MS, now_ms // HOUR_MS
        several = {*range(first, last_hour + 1)}
        several |= {*range(max(last_hour, ahead_ms // HOUR_MS - HOURS_AHEAD) + 1, ahead_ms // HOUR_MS + 1)}
        hours = [str(hour) for hour in sorted(several)]
        words = [*_HISTORY, *(f"hour:{hour}" for hour in hours), *(f"refused:{hour}" for hour in hours)]
        reply = self._query("HMGET", _history_key(project), *words)
        return self._read(lambda reply: _history(hours, reply, formerly), reply)

    def add_refusals(
        self, project: str, counts: Sequence[RefusalCount], refusals: Sequence[str], within_s: float | None = None
    ) -> None:
        args = [str(len(counts))]
        for one in counts:
            args += (str(one.hour_ms // HOUR_MS), one.limit, one.job, one.reason, str(one.calls))
        keys = (*_keys(project), _history_key(project))
        try:
            self._run("add_refusals", keys, [*args, *refusals], within_s=within_s)
        except Failed as error:
            raise self._error(error, project) from error

    def refusals(self, project: str) -> Sequence[str]:
        found, epoch, last = self._query("HMGET", _keys(project).state, "format", "epoch", "last")
        self._check_format(found, epoch, is_new=last is None)
        return self._refusals(project)

    def _refusals(self, project: str) -> list[str]:
        fields = [f"refusal:{n}" for n in range(MAX_REFUSALS)]
        kept, *texts = self._query("HMGET", _history_key(project), "refusals", *fields)
        newest = self._read(int, kept or 0) % MAX_REFUSALS
        return [text for text in texts[newest:] + texts[:newest] if text is not None]

    # -- the connection ----------------------------------------------------------------------------------------------

    # Every word of a command must be text: see `quota.ledger.redis_connection`.

    def connections(self) -> Connections | None:
        """The connections to its server, for who does the steps of `deciding`; None for a cluster of servers. Contacts
        nothing."""
        client = self._connect_once()
        return client if isinstance(client, Connections) else None

    def _connect_once(self) -> Connections | Cluster:
        client = self._connected
        if client is None:
            with self._lock:
                client = self._connected = self._connected or self._connect()
        return client

    def _command(self, *command: str, ends_s: float | None = None, within_s: float | None = None) -> Any:
        client = self._connect_once()
        if isinstance(client, Connections):
            return client.execute_command(*command, ends_s=ends_s, within_s=within_s)
        return client.execute_command(*command, ends_s=ends_s if within_s is None else elapsed_s() + within_s)

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
        keys = (*_keys(project), _history_key(project)) if with_history else _keys(project)
        return self._retried(partial(self._run, name, keys, args), project)

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
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._unreadable(reply) from error

    def _unreadable(self, reply: object) -> LedgerError:
        return LedgerError(f"ledger {self.label} holds what no quota program writes: {reply!r:.200}")

    def _error(self, error: Failed, project: str = "") -> LedgerError:
        """What is raised for it. With the `project` that a script was about, it also finds out what it may not do."""
        if isinstance(error, ErrorReply) and is_denied(str(error)):
            return UnusableLedger(self._explain(self._denied(error, project)))
        lasts = re.search(_LASTING_WORDS, str(error)) is not None or isinstance(error, (NotRedis, Misconfigured))
        if isinstance(error, ErrorReply):
            lasts = lasts or error.asks_for_password
        return (UnusableLedger if lasts else LedgerError)(self._explain(error))

    def _denied(self, error: ErrorReply, project: str) -> ErrorReply:
        """The same error with the names of all that is missing. A script names one, and none before Redis 7.2."""
        if not project or MAY_NOT_RUN in str(error):
            return error
        try:
            missing = self._run("examine", (*_keys(project), _history_key(project)), [])[2]
        except Failed:
            return error
        return ErrorReply(f"{MAY_NOT_RUN} {', '.join(missing)}") if missing else error

    def _explain(self, error: Failed) -> str:
        """One line for an operator, without the driver's own words where these could quote the url."""
        where, said = f"ledger {self.label}", (str(error).splitlines() or [""])[0][:200]
        moved = re.search(_FENCED, str(error))
        if moved is not None:
            return str(fenced_error(where, FENCE + _WAYS[moved[1]] + moved[2]))
        other_format = re.search(_OTHER_FORMAT, said)
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


def _may_be_done(error: Failed) -> bool:
    """Whether the server may have done what has no answer."""
    return isinstance(error, Lost) and error.left


def _says_more(reply: Any) -> bool:
    """Whether the script has more to read, and is to be called again (L21)."""
    return isinstance(reply, list) and reply[:1] == ["MORE"]


def _is_unknown_script(error: Failed) -> bool:
    return isinstance(error, ErrorReply) and error.code == "NOSCRIPT"


class Keys(NamedTuple):
    """The keys of a project that every script takes, in one slot of a cluster. `_history_key` is a fourth."""

    log: str
    state: str
    corrections: str


@lru_cache(maxsize=256)
def _keys(project: str) -> Keys:
    if not (0 < len(project) <= 64 and _OF_A_PROJECT.issuperset(project)):
        raise ConfigError(f"project {project!r}: a name in Redis is 1 to 64 of A-Z a-z 0-9 . _ : -")
    return Keys(*(f"quota:{{{project}}}:{key}" for key in Keys._fields))


def _history_key(project: str) -> str:
    """The fourth key of a project: no decision touches it."""
    return f"{_keys(project).log.removesuffix(':log')}:history"


_HISTORY = ("rolled_up", "whole_after_ms", "gap", "sums_after", "sums", "refused_sums")
"""The fields of the history that are read beside its hours; `lua/roll_up.lua` and `lua/add_refusals.lua` describe
them."""


HOURS_AHEAD = 100
"""So many hours are read that lie ahead of the clock."""


def _history(hours: Sequence[str], reply: Sequence[str | None], formerly: str | None) -> History:
    """`formerly` is the state's copy of `rolled_up`: it says what was in the sums of a history that is lost."""
    rolled_up, whole_after_ms, gap, summed_after, sums, refused_sums = reply[: len(_HISTORY)]
    texts = reply[len(_HISTORY) :]
    spent, refused = texts[: len(hours)], texts[len(hours) :]
    gap_from, gap_to = gap.split(" ") if gap else ("", "")
    return History(
        rolled_up=read_id(rolled_up or "0-0"),
        whole_after_ms=read_ms(whole_after_ms or "0"),
        gap=(read_ms(gap_from), read_ms(gap_to)) if gap else None,
        summed_after=read_id((summed_after if rolled_up else formerly) or "0-0"),
        hours=tuple(
            HourOfSpending(int(hour) * HOUR_MS, names[0], names[1], names[2], names[3], *numbers)
            for hour, text in zip(hours, spent, strict=True)
            for names, numbers in read_cells(text or "", 4, 2)
        ),
        sums=tuple(RunningSum(names[0], names[1], *numbers) for names, numbers in read_cells(sums or "", 2, 3)),
        refused=tuple(
            RefusalCount(int(hour) * HOUR_MS, names[0], names[1], names[2], *numbers)
            for hour, text in zip(hours, refused, strict=True)
            for names, numbers in read_cells(text or "", 3, 1)
        ),
        refused_sums=tuple(
            RefusedSum(names[0], names[1], names[2], *numbers)
            for names, numbers in read_cells(refused_sums or "", 3, 1)
        ),
    )


def _units(charge: Charge) -> str:
    """The field `u` of an entry."""
    return str(charge.units) if charge.bucket == DEFAULT_BUCKET else f"{charge.bucket}={charge.units}"


# -- what a decision asks ----------------------------------------------------------------------------------------------


def _arguments(request: ChargeRequest, now: str, commit: bool) -> list[str]:
    """The arguments of charge.lua, for a first try."""
    charges = (request.charge, *request.also)
    words = [
        now,
        str(request.caller_ms),
        "1t" if commit else "0t",
        "\n".join(map(_units, charges)),
        "\n".join([charge.method for charge in charges]),
        "\n".join([charge.job for charge in charges]),
        "\n".join([charge.region for charge in charges]),
        "\n".join([charge.idempotency_key for charge in charges]),
        FIRST_TRY,
        str(request.retention_ms),
        str(request.jitter_ms),
        ",".join(request.closed_by),
        _expected(request.expected, request.granted),
    ]
    for check in request.checks:
        words += (check.view.name, str(check.cap_units), str(check.cost_units), str(_span(check)))
    return words


def _call_of_charge(project: str, args: Sequence[str], *, whole: bool = False) -> bytes:
    """A packed call of charge.lua by its name; `whole`: with its text."""
    text, sha = script("charge")
    keys, head = _keys(project), ("EVAL", text) if whole else ("EVALSHA", sha)
    return pack((*head, str(len(keys)), *keys, *args))


class Command:
    """A packed command for the server that has a project's keys: a step, which asks on the ledger's own connections.

    Whoever has a connection of its own may ask `words` there instead. It sends the reply back as it came, or throws the
    Failed that `Connections.ask` would raise. `since_s` is when the decision began.
    """

    __slots__ = ("_ask", "project", "since_s", "words")

    def __init__(self, ask: Callable[[str, bytes, float], Any], project: str, words: bytes, since_s: float) -> None:
        self._ask, self.project, self.words, self.since_s = ask, project, words, since_s

    def __call__(self) -> Any:
        return self._ask(self.project, self.words, self.since_s)


class _Question:
    """A call of charge.lua, packed but for the words that each decision has of its own.

    Whatever it says is said by `_arguments` too. To pack that anew takes longer than the server needs to answer.
    """

    __slots__ = (
        *("_after", "_before", "_granted", "_how", "_ledger", "_longer", "_project", "_what"),
        *("charge", "commit", "fixed", "request"),
    )

    def __init__(self, ledger: RedisLedger, request: ChargeRequest, commit: bool) -> None:
        self._ledger, self._project, self.request, self.commit = ledger, request.project, request, commit
        self.charge, self.fixed = request.charge[:-1], _fixed(request)
        keys, args = _keys(request.project), _arguments(request, "0", commit)
        head = ("EVALSHA", script("charge")[1], str(len(keys)), *keys)
        self._before = f"*{len(head) + len(args)}\r\n{_bulks(head)}"
        self._what, self._how = f"{_bulks(args[2:7])}$", f"{_bulks(args[8:12])}$"
        self._after = f"\r\n{_bulks(args[13:])}"
        self._granted = request.granted
        fixed = f"{self._before}{self._what}{self._how}{self._after}"
        self._longer = len(fixed.encode()) - len(fixed)

    def packed(self, request: ChargeRequest, now: str) -> bytes:
        """What this request asks: it is the same but for what each decision has of its own."""
        return self._words(now, request.caller_ms, request.charge.idempotency_key, request.expected)

    def _words(self, now: str, caller_ms: int, idempotency_key: str, expected: Expected) -> bytes:
        at, seen = str(caller_ms), _expected(expected, self._granted)
        words = (
            f"{self._before}${len(now)}\r\n{now}\r\n${len(at)}\r\n{at}\r\n{self._what}{len(idempotency_key)}\r\n"
            f"{idempotency_key}\r\n{self._how}{len(seen)}\r\n{seen}{self._after}"
        )
        packed = words.encode()
        if len(packed) - len(words) != self._longer:  # a word's length is that of its bytes
            request = asked_again(self.request, caller_ms, idempotency_key, expected)
            return _call_of_charge(self._project, _arguments(request, now, self.commit))
        return packed

    def decide(self, caller_ms: int, idempotency_key: str, expected: Expected) -> ChargeResult:
        """`RedisLedger.decide`, for this question."""
        ledger, started_s = self._ledger, elapsed_s()
        reply: Any
        try:
            words = self._words(ledger._now(), caller_ms, idempotency_key, expected)
            reply = ledger._ask(self._project, words, started_s)
        except Failed as error:
            reply = error
        if type(reply) is str and "+" not in reply:
            try:
                return _result_of_line(self.request.checks, expected[0], reply, self.commit)
            except _UNREADABLE as error:
                raise ledger._unreadable(reply) from error
        request = asked_again(self.request, caller_ms, idempotency_key, expected)
        return run(ledger._concluding(request, self.commit, started_s, reply))


_fixed = attrgetter("project", "checks", "closed_by", "jitter_ms", "retention_ms", "granted", "also")
"""What is the same in a request that is asked again, but for its charge."""


def _bulks(words: Iterable[str]) -> str:
    return "".join(map(bulk, words))


def _expected(expected: Expected, granted: str | None) -> str:
    """`EPOCH ID ID @GRANTS`: what the caller has seen of this ledger, and the grants that its caps go by."""
    words, ids = expected
    for ms, seq in ids:  # mostly one; half the time of `join` and a generator
        words += f" {ms}-{seq}"
    return words if granted is None else f"{words} @{granted}"


def _span(check: LimitCheck) -> str | int:
    window = check.view.window
    if isinstance(window, Sliding):
        return window.window_ms
    assert check.edges is not None  # noqa: S101  # a calendar limit comes with its edges
    return f"{check.edges[0]} {check.edges[1]} {check.edges[2]}"


_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError)
"""What is raised where a reply is none of ours."""


def _result(request: ChargeRequest, reply: list[Any]) -> ChargeResult:
    outcome, ids, now_ms, last, closed, epoch, unlogged, *used = reply
    charge_id, *also = ids.split(" ")
    if ids and len(also) != len(request.also):
        raise ValueError("an id for each charge")
    if len(used) > len(request.checks):
        raise ValueError("more numbers than limits")
    if outcome == "RETRIED":  # only a first try that comes after its own retry sees this, and nobody waits for it
        raise LedgerError("the ledger answered a call that was given up; run again")
    if outcome == "GRANTED":
        read_grants(closed)
        return ChargeResult("granted", None, int(now_ms), read_id(last), (), epoch=read_epoch(epoch), granted=closed)
    return ChargeResult(
        "counting" if outcome == "MORE" else outcome.lower(),
        charge_id or None,
        int(now_ms),
        read_id(last),
        _used_units(request.checks, outcome, used),
        read_exhaustion(closed) if closed and outcome != "REFUSED" else None,
        read_epoch(epoch),
        _usages(request.checks, unlogged) if unlogged else (),
        leaving_ms=_leaving_ms(request.checks, closed.split(" ")) if closed and outcome == "REFUSED" else (),
        also=tuple(also),
    )


def _result_of_line(checks: Sequence[LimitCheck], known_epoch: str, line: str, commit: bool) -> ChargeResult:
    """The result of an ordinary decision, which comes as one line of text."""
    words = line.split(" ")
    outcome, now_ms, last, epoch = words[:4]
    end = 4 + len(checks)
    ms, _, seq = last.partition("-")
    return new_tuple(  # a quarter of the time that the class itself takes
        ChargeResult,
        (
            _ORDINARY[outcome],
            last if commit and outcome == "ADMITTED" else None,
            int(now_ms),
            (int(ms), int(seq)),
            _used_units(checks, outcome, words[4:end]),
            None,
            epoch if epoch == known_epoch else read_epoch(epoch),
            (),
            0,
            "",
            _leaving_ms(checks, words[end:]) if len(words) > end else (),
            (),
        ),
    )


_ORDINARY: dict[str, ChargeOutcome] = {"ADMITTED": "admitted", "REFUSED": "refused"}


def _used_units(checks: Sequence[LimitCheck], outcome: str, words: Sequence[str]) -> tuple[int, ...]:
    used_units = tuple(map(int, words))
    for units in used_units:
        if not 0 <= units < NEVER:
            raise ValueError("less than nothing is used, or more than can be counted")
    if outcome == "REFUSED":
        for units, check in zip(used_units, checks, strict=True):
            if units + check.cost_units > check.cap_units:
                break
        else:
            raise ValueError("a refusal of what fits")
    return used_units


def _is_unfinished(request: ChargeRequest, reply: Any) -> bool:
    """Whether a refusal has more to read before it can say when there is room."""
    if isinstance(reply, str):
        return reply[:8] == "REFUSED " and "+" in reply.split(" ")[-len(request.checks) :]
    return isinstance(reply, list) and reply[:1] == ["REFUSED"] and "+" in str(reply[4:5])


def _still_counting(reply: Any) -> list[str]:
    """The answer of a ledger that has more to read, instead of a refusal that cannot say yet when there is room."""
    if isinstance(reply, str):
        _, now_ms, last, epoch, *_ = reply.split(" ")
    else:
        _, _, now_ms, last, _, epoch, *_ = reply
    return ["MORE", "", now_ms, last, "", epoch, ""]


def _leaving_ms(checks: Sequence[LimitCheck], words: list[str]) -> tuple[int | None, ...]:
    """A word for each limit."""
    leaving_ms = tuple([None if word in ("-", "+") else int(word) for word in words])
    for at_ms in leaving_ms:
        if at_ms is not None and not 0 <= at_ms < LATEST_MS:
            raise ValueError("a charge in the far future")
    if len(leaving_ms) != len(checks):
        raise ValueError("a word for each limit")
    return leaving_ms


def _usages(checks: Sequence[LimitCheck], text: str) -> tuple[tuple[UnloggedUsage, ...], ...]:
    """A line for each limit."""
    return tuple(read_usages(check.view.name, line) for check, line in zip(checks, text.split("\n"), strict=True))


def _of_a_range(after: Id, until_ms: int, count: int) -> list[str]:
    """The arguments of read.lua."""
    return [_from(after), str(until_ms), str(count)]


def _leading_ms(text: str) -> int:
    return int(text.partition(" ")[0])


def _repair(line: str) -> Repair:
    newest, begun_ms, at_ms, through = line.split(" ")
    return Repair(read_id(newest), read_ms(begun_ms), read_ms(at_ms), read_id(through))


def _claimed(claim: Claim, reply: list[Any]) -> Claimed:
    from quota.ledger.claims import Claimed

    now_ms, tick, *holders = reply
    if tick == "done" or tick == "running":
        return Claimed(int(now_ms), {}, tick)
    found = zip(claim.regions, holders, strict=True)
    return Claimed(int(now_ms), {region: _holder(holder) for region, holder in found if holder})


def _holder(text: str) -> Holder:
    from quota.ledger.claims import Holder

    holder = Holder(**json.loads(text))
    read_ms(str(holder.seen_ms))
    read_ms(str(holder.until_ms))
    if not (isinstance(holder.owner, str) and isinstance(holder.host, str)):
        raise ValueError("a holder without names")
    return holder


def _entry(row: Sequence[str]) -> Entry:
    charge_id, u, method, job, region, idempotency_key, corrected = row
    ms, seq = read_id(charge_id)
    bucket, charged = _bucket_and_units(u)
    counted = checked_count(int(corrected)) if corrected else charged
    return Entry(
        ms=ms,
        seq=seq,
        units=counted,
        charged_units=charged,
        bucket=bucket,
        method=method,
        job=job,
        region=region,
        idempotency_key=idempotency_key,
    )


def _bucket_and_units(u: str) -> tuple[str, int]:
    """What the field `u` of an entry says."""
    bucket, equals, units = u.rpartition("=")
    return bucket if equals else DEFAULT_BUCKET, checked_count(int(units))


def _from(after: Id) -> str:
    """Where a range begins that has what comes after this id."""
    return f"{after[0] + 1}-0" if after[1] == NEVER else f"({after[0]}-{after[1]}"


def _added_up(rows: Sequence[tuple[str, Sequence[str]]], corrected: Sequence[str | None]) -> list[HourOfLog]:
    """Entries as the server has them, and what was corrected of them: by hour, and by all that they say but their
    number."""

    def ms_of(row: tuple[str, Sequence[str]]) -> int:
        return int(row[0].partition("-")[0])

    hours, begin = [], 0
    while begin < len(rows):
        hour_ms = ms_of(rows[begin]) // HOUR_MS * HOUR_MS
        end = bisect_left(rows, hour_ms + HOUR_MS, begin, key=ms_of)
        said = [(f[1], f[3], f[5], f[7], f[9][:RUN_CHARS]) for _, f in rows[begin:end]]
        more = dict.fromkeys(said, 0)
        for what, now in zip(said, corrected[begin:end], strict=False):  # empty where there are none
            if now is not None:
                more[what] += checked_count(int(now)) - _bucket_and_units(what[0])[1]
        for what, charges in Counter(said).items():
            u, method, job, region, run = what
            bucket, units = _bucket_and_units(u)
            hours.append(HourOfLog(hour_ms, method, job, region, bucket, run, charges, charges * units + more[what]))
        begin = end
    return hours
