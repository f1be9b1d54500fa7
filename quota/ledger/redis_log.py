"""The log in Redis 6.2 or newer, or Valkey, shared by every machine that reaches the server. The contract is
`quota.ledger.log.Log`.

Each method is a script of `lua/`, or a command that reads: one atomic step, one round trip. The head of
`lua/append.lua` describes the keys. If a wrongly configured server evicts a key, the log appears to be behind a fence
that is over (`~:0`), so the next process that asks rebuilds it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from hashlib import sha1
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from quota.common.clock import elapsed_s
from quota.common.files import list_names, read_text
from quota.common.fork import OfOneProcess
from quota.errors import ConfigError, LedgerError, UnusableLedger
from quota.ledger.log import (
    BUILDING_MS,
    EPOCH,
    MAX_READ,
    VIEW,
    Append,
    Correction,
    Fields,
    Log,
    Moment,
    Reply,
    all_between,
    seq_of,
)
from quota.ledger.redis_connection import client_of
from quota.ledger.redis_errors import ErrorReply, Failed, Lost, Misconfigured, NotRedis, error_of, explained, is_denied
from quota.ledger.redis_url import checked_target, label_of, user_of
from quota.rules.entry import END, START, Entry, Id, id_text, packed, read_id, unpacked
from quota.terms.arguments import whole_clock

if TYPE_CHECKING:
    from quota.common.findings import Finding

T = TypeVar("T")

TIMEOUT_S = 0.35
"""How long one connect or one answer may take."""

READ_AGAIN_WITHIN_S = 0.5
"""A request that only reads is sent again if its answer is lost within this time: an idle connection may have ended."""

BUILD_AT_ONCE = 500
"""The most entries that one script adds to a log being built. Meanwhile the server answers nobody else."""

OF_THE_LOG = (EPOCH, "holds", "trimmed")
"""The log's own fields of the state: see `lua/append.lua`."""

TRIM_AT_ONCE = 250
"""The most entries that one script moves to the past."""

MAX_MERGES = 10
"""How often the past is rebuilt because others have added to it."""

UNREADABLE = (ValueError, TypeError, LookupError)
"""What reading a reply raises if no script of ours made it."""

_LASTING_WORDS = re.compile("WRONGTYPE |[Aa]uthenticat|WRONGPASS|unknown command|DB index|cluster (support|mode)")
"""The server's own errors that another try does not change."""

_OF_A_PROJECT = re.compile("[A-Za-z0-9._:-]{1,64}")
_LOG_OR_PAST = re.compile(r"quota:\{(.*)\}:ledger:(?:log|past)")
_INCLUDE = re.compile("^-- @include (.*)\n", re.MULTILINE)
"""A line of a script that a file of `lua/parts/` replaces."""


@cache
def script(name: str) -> tuple[str, str]:
    """The whole text of `lua/NAME.lua`, and its SHA-1 for EVALSHA."""
    text = _INCLUDE.sub(lambda match: read_text("quota.lua", match[1]), read_text("quota.lua", f"{name}.lua"))
    return text, sha1(text.encode(), usedforsecurity=False).hexdigest()


class LogKeys(NamedTuple):
    """The keys of a project, in one slot of a cluster."""

    log: str
    state: str
    corrected: str
    past: str


@lru_cache(maxsize=256)
def keys_of(project: str) -> LogKeys:
    if _OF_A_PROJECT.fullmatch(project) is None:
        raise ConfigError(f"project {project!r}: a name in Redis is 1 to 64 of A-Z a-z 0-9 . _ : -")
    return LogKeys(*(f"quota:{{{project}}}:ledger:{key}" for key in LogKeys._fields))


class RedisLog(OfOneProcess, Log):
    """The logs of a server, of the primary that sentinels name, or of a cluster. Contacts nothing until it is asked. In
    tests and simulations, `clock` replaces the server's clock."""

    shared = True

    _timeout_s = TIMEOUT_S

    def __init__(self, url: str, *, clock: Callable[[], int] | None = None) -> None:
        self.label = label_of(url)
        self._url = url
        self._client = client_of(checked_target(url, self._timeout_s))
        self._clock = None if clock is None else whole_clock(clock)

    # -- reading and appending ---------------------------------------------------------------------------------------

    def begin(self, project: str, fields: Sequence[str] = ()) -> Moment:
        beginning = super().begin(project, fields)
        if not beginning.epoch and int(self._command("EXISTS", f"quota:{{{project}}}:state")):
            raise UnusableLedger(
                f"ledger {self.label} was written by an older quota-ledger, whose charges this one cannot read; give "
                f"the ledger another database, or delete the keys quota:{{{project}}}:*"
            )
        return beginning

    def append(self, project: str, request: Append) -> Reply:
        limits = [
            (units, int(limit.count == "calls"), list(limit.buckets), list(limit.methods), list(limit.jobs))
            for limit, units in request.rooms
        ]
        args = (
            request.epoch,
            id_text(request.seen),
            str(request.now_ms),
            str(request.latest_ms),
            str(request.room),
            str(request.seq),
            self._clock_text(),
            " ".join(map(id_text, request.must)),
            request.new_epoch,
            json.dumps(limits) if limits else "",
            *map(packed, request.entries),
        )
        return self._read(_reply, self._run("append", keys_of(project)[:3], args, reads=not request.entries))

    def read(self, project: str, after: Id, through: Id, count: int) -> Sequence[Entry]:
        return self._range(keys_of(project).log, after, through, count)

    def corrections(self, project: str, keys: Sequence[str]) -> Mapping[str, Correction]:
        texts = self._command("HMGET", keys_of(project).corrected, *keys) if keys else ()
        return self._read(_corrections, zip(keys, texts, strict=True))

    # -- the state ---------------------------------------------------------------------------------------------------

    def change(self, project: str, expected: Fields, becomes: Fields, marker: Entry | None = None) -> Moment:
        line, new_epoch = ("", "") if marker is None else (packed(marker), marker.key)
        args = [self._clock_text(), str(seq_of(new_epoch)), line, new_epoch, str(len(expected))]
        for name, text in (*expected.items(), *becomes.items()):
            args += (name, "-" if text is None else f"={text}")

        def read(reply: Any) -> Moment:
            done, now_ms, epoch, tip, trimmed, *fields = reply
            state = dict(zip(fields[::2], fields[1::2], strict=True))
            return Moment(done == 1, now_ms, epoch, state, read_id(tip), read_id(trimmed))

        return self._read(read, self._run("change", keys_of(project)[:3], args, reads=not becomes))

    def names(self, project: str) -> Sequence[str]:
        fields = self._read(list, self._command("HKEYS", keys_of(project).state))
        return sorted(name for name in fields if name not in OF_THE_LOG and not name.startswith(VIEW))

    # -- another log in its place ------------------------------------------------------------------------------------

    def replace(
        self, project: str, fence: str, tip: Id, entries: Sequence[Entry], epoch: str, trimmed: Id | None = None
    ) -> bool:
        log, state, corrected, past = keys_of(project)
        built = _beside(log, corrected)
        self._build(built, entries)
        corrections = len({entry.of for entry in entries if entry.kind == "correction"})
        args = [fence, id_text(tip), epoch, str(len(entries)), str(corrections)]
        args.append("" if trimmed is None else id_text(trimmed))
        done = bool(self._run("replace", (log, state, corrected, *built), args) == 1)
        with suppress(LedgerError):  # then reports show them twice
            if done and trimmed is not None and self._range(past, trimmed, END, 1):
                self._merge_past(project, (), trimmed)
        return done

    def _build(self, built: Sequence[str], entries: Sequence[Entry]) -> None:
        for at in range(0, len(entries), BUILD_AT_ONCE):
            piece = entries[at : at + BUILD_AT_ONCE]
            words = [word for entry in piece for word in (id_text(entry.id), packed(entry))]
            self._run("build", built, [str(BUILDING_MS), *words])

    # -- the past ----------------------------------------------------------------------------------------------------

    def trim(self, project: str, before_ms: int, count: int = MAX_READ) -> int:
        gone = 0
        while before_ms > 0 and gone < count:
            wanted = min(TRIM_AT_ONCE, count - gone)
            moved, *lines = self._run("trim", keys_of(project), [self._clock_text(), str(before_ms), str(wanted)])
            if lines:
                self._merge_past(project, self._read(_entries, lines))
            gone += moved
            if moved < wanted:
                break
        return gone

    def past(self, project: str, after: Id, through: Id, count: int) -> Sequence[Entry]:
        return self._range(keys_of(project).past, after, through, count)

    def past_length(self, project: str) -> int:
        return int(self._command("XLEN", keys_of(project).past))

    def add_past(self, project: str, entries: Sequence[Entry]) -> None:
        self._merge_past(project, entries)

    def _merge_past(self, project: str, more: Sequence[Entry], through: Id = END) -> None:
        """Add entries to the past, and let those after `through` leave it. A stream changes only at its ends, so this
        rebuilds it."""
        past = keys_of(project).past
        for _ in range(MAX_MERGES):
            entries = all_between(self.past, project, START)
            ids = {entry.id for entry in entries}
            news = [entry for entry in more if entry.id not in ids]
            if not news and through == END:
                return
            merged = [entry for entry in sorted([*entries, *news]) if entry.id <= through]
            merged = [entry for entry in merged if entry.kind != "unreadable"]
            built = _beside(past)
            self._build(built, merged)
            args = [self._clock_text(), str(len(entries)), str(len(merged))]
            if self._run("replace_past", [past, *built], args):
                return
        raise LedgerError(f"ledger {self.label}: others added to the past each time; run again in a moment")

    # -- the server --------------------------------------------------------------------------------------------------

    def projects(self) -> Sequence[str]:
        keys = self._answer(lambda: [*self._client.scan("quota:{*}:ledger:[lp]*")], reads=True)
        return sorted({match[1] for match in map(_LOG_OR_PAST.fullmatch, keys) if match is not None})

    def examine(self, project: str) -> Sequence[Finding]:
        from quota.ledger.redis_needs import findings  # imported late: only `quota doctor` asks

        keys = keys_of(project)
        info, lifetimes, missing, refused = self._read(tuple, self._run("examine", keys, []))
        why = str(self._error(error_of(refused))) if refused else ""
        return list(findings(info, lifetimes, missing, keys, why))

    def unwritable(self, project: str) -> str:
        name = f"{keys_of(project)[1]}:none"  # there is no such key, so the command adds nothing
        try:
            self._command("XADD", name, "NOMKSTREAM", "*", "f", "v")
        except LedgerError as error:
            reply = error.__cause__
            # A user who may only read need not hear that.
            return str(error) if isinstance(reply, ErrorReply) and not is_denied(str(reply)) else ""
        return ""

    def now_ms(self) -> int:
        if self._clock is not None:
            return self._clock()
        seconds, micros = self._command("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    def close(self) -> None:
        self._client.close()

    # Every word of a command must be text: see `quota.ledger.redis_connection`.

    def _clock_text(self) -> str:
        """The clock for the scripts; "0" means the server's own clock."""
        return "0" if self._clock is None else str(self._clock())

    def _command(self, *command: str) -> Any:
        """The reply to a command that only reads."""
        return self._answer(lambda: self._client.execute_command(*command), reads=True)

    def _run(self, name: str, keys: Sequence[str], args: Sequence[str], *, reads: bool = False) -> Any:
        """The reply of a script. If the server does not know the script, it gets the whole text. No other request is
        sent twice, unless it only `reads`."""
        text, sha = script(name)
        words = (str(len(keys)), *keys, *args)

        def ask() -> Any:
            try:
                return self._client.execute_command("EVALSHA", sha, *words)
            except ErrorReply as error:
                if error.code != "NOSCRIPT":
                    raise
                return self._client.execute_command("EVAL", text, *words)

        return self._answer(ask, reads=reads)

    def _answer(self, ask: Callable[[], Any], *, reads: bool) -> Any:
        again_until_s = elapsed_s() + READ_AGAIN_WITHIN_S if reads else 0.0
        try:
            try:
                return ask()
            except Lost:
                if elapsed_s() > again_until_s:
                    raise
                return ask()
        except Failed as error:
            raise self._error(error) from error

    def _range(self, key: str, after: Id, through: Id, count: int) -> list[Entry]:
        rows = self._command("XRANGE", key, f"({id_text(after)}", id_text(through), "COUNT", str(count))
        return self._read(_rows, rows)

    def _read(self, reader: Callable[[Any], T], reply: Any) -> T:
        """A reply as values. Raises LedgerError for values that this package never writes: other programs may write
        here."""
        try:
            return reader(reply)
        except UNREADABLE as error:
            fault = f"ledger {self.label} holds data that no quota program writes, {reply!r:.200}"
            raise LedgerError(f"{fault}; give the ledger a database of its own, and delete this data") from error

    def _error(self, error: Failed) -> LedgerError:
        lasts = _LASTING_WORDS.search(str(error)) is not None or isinstance(error, NotRedis | Misconfigured)
        if isinstance(error, ErrorReply):
            lasts = lasts or error.asks_for_password or is_denied(str(error))
        line = explained(error, f"ledger {self.label}", self._timeout_s, user_of(self._url))
        return (UnusableLedger if lasts else LedgerError)(line)


def _reply(reply: Any) -> Reply:
    word, clock_ms, epoch, *rest = reply
    if not rest:
        return Reply(word, clock_ms, epoch)
    first, whole, *lines = rest
    return Reply(word, clock_ms, epoch, _entries(lines) if lines else (), whole == 1, read_id(first) if first else None)


def _entries(lines: Sequence[str]) -> list[Entry]:
    """The entries of a script's `ID, LINE, ID, LINE, ...`."""
    return [unpacked(read_id(entry_id), line) for entry_id, line in zip(lines[::2], lines[1::2], strict=True)]


def _rows(rows: Any) -> list[Entry]:
    """The entries of a stream. Other programs may have written some of them."""
    return [unpacked(read_id(entry_id), fields[1] if fields[::2] == ["e"] else "") for entry_id, fields in rows]


def _corrections(texts: Any) -> dict[str, Correction]:
    corrections = {}
    for key, text in texts:
        if text is not None:
            units, _, entry_id = text.partition(" ")
            corrections[key] = Correction(int(units), read_id(entry_id))
    return corrections


def _beside(*keys: str) -> list[str]:
    """The keys at which one try builds the replacements of these keys."""
    token = os.urandom(8).hex()
    return [f"{key}:building:{token}" for key in keys]


def script_names() -> list[str]:
    """The names of all scripts, sorted."""
    return list_names("quota.lua", ".", ".lua")
