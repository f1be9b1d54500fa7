"""The log in memory, for simulations, tests and programs that end with their budget. The contract is
`quota.ledger.log.Log`, and this is the shortest code that fulfils it.

A moment of a log never changes. A change makes the next moment, and links it to the moment that it read, unless another
change was quicker; then it begins again. The link is one step of the interpreter (`dict.setdefault`), so no thread
waits for another, a signal handler may interrupt anything, and a fork copies a whole log.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from quota.common.clock import host_clock
from quota.common.fork import OfOneProcess
from quota.ledger.log import (
    EPOCH,
    MAX_PAST,
    MAX_READ,
    MAX_UNSEEN,
    PAST_MS,
    VIEW,
    Append,
    Beginning,
    Changed,
    Correction,
    Log,
    Reply,
    earliest_head,
    is_closed,
    may_replace,
    next_id,
    word_of,
)
from quota.rules.entry import START, Entry, Id, just_before
from quota.terms.arguments import whole_clock

if TYPE_CHECKING:
    from quota.common.findings import Finding

T = TypeVar("T")

MAX_NEWER = 256
"""The most entries that are copied with each new entry."""

_LAST = 2**60
"""Stands in the place of units, and sorts after every entry with the same id."""


class _Moment(NamedTuple):
    """One moment of a log. Its entries are the `older` entries, then a few `newer` entries. `corrected` has the
    corrections among the older entries, by charge. `next` has the next moment under "", once there is one."""

    next: dict[str, _Moment]
    epoch: str = ""
    older: tuple[Entry, ...] = ()
    newer: tuple[Entry, ...] = ()
    corrected: Mapping[str, Correction] = {}
    state: Mapping[str, str] = {}
    trimmed: Id = START
    past: tuple[Entry, ...] = ()

    @property
    def tip(self) -> Id:
        """The newest entry."""
        last = self.newer[-1:] or self.older[-1:]
        return last[0].id if last else START

    def behind(self, after: Id, count: int) -> tuple[Entry, ...]:
        """At most `count` entries after this id."""
        entries = _behind(self.older, after, count)
        if len(entries) < count:
            entries += _behind(self.newer, after, count - len(entries))
        return entries

    def has(self, entry_id: Id) -> bool:
        """Whether the log has an entry, or has trimmed it."""
        return entry_id <= self.trimmed or any(entry.id == entry_id for entry in self.behind(_before(entry_id), 1))

    def becomes(self, **fields: object) -> _Moment:
        """The next moment, with these fields."""
        return self._replace(next={}, **fields)  # type: ignore[arg-type]  # of any type

    def with_entries(self, entries: Sequence[Entry], first: Id, epoch: str) -> _Moment:
        """The next moment, with these entries added."""
        ms, seq = first
        newer = self.newer + tuple([entry._replace(id=(ms, seq + n)) for n, entry in enumerate(entries)])
        added = self.becomes(newer=newer, epoch=self.epoch or epoch)
        return added if len(newer) <= MAX_NEWER else added.aged()

    def aged(self) -> _Moment:
        """The same moment, with older entries only."""
        corrected = {**self.corrected, **_corrections(self.newer)}
        return self.becomes(older=self.older + self.newer, newer=(), corrected=corrected)

    def with_state(self, fields: Mapping[str, str | None]) -> _Moment:
        """The next moment, with these fields changed; None removes a field."""
        state = {**self.state, EPOCH: self.epoch or None, **fields}
        epoch = state.pop(EPOCH) or ""
        return self.becomes(epoch=epoch, state={name: text for name, text in state.items() if text is not None})

    def named(self, names: Sequence[str]) -> dict[str, str]:
        """The fields with these names that exist."""
        state = {**self.state, EPOCH: self.epoch} if self.epoch else self.state
        return {name: state[name] for name in names if name in state}


class MemoryLog(OfOneProcess, Log):
    """The logs of all projects of this process. A forked child goes on with a copy. `clock` is the ledger's clock, in
    ms since 1970. The past is kept for `past_ms`."""

    shared = False

    def __init__(
        self, label: str = "memory:", *, clock: Callable[[], int] | None = None, past_ms: int = PAST_MS
    ) -> None:
        self.label = label
        self._clock = host_clock if clock is None else whole_clock(clock)
        self._past_ms = past_ms
        self._moments: dict[str, _Moment] = {}

    def _now(self, project: str) -> _Moment:
        """The newest moment of a log."""
        moment = self._moments.setdefault(project, _Moment({}))
        while moment.next:
            moment = moment.next[""]
        self._moments[project] = moment
        return moment

    def _change(self, project: str, rule: Callable[[_Moment], tuple[T, _Moment | None]]) -> T:
        """Change a log by a rule, which takes a moment and returns the answer and the next moment."""
        while True:
            moment = self._now(project)
            answer, becomes = rule(moment)
            if becomes is None or moment.next.setdefault("", becomes) is becomes:
                return answer

    # -- reading and appending ---------------------------------------------------------------------------------------

    def begin(self, project: str, views: Sequence[str] = (), fields: Sequence[str] = ()) -> Beginning:
        moment, clock_ms = self._now(project), self._clock()
        view_fields = [VIEW + name for name in views]
        state = moment.named([*fields, *view_fields])
        head = earliest_head(state, view_fields, moment.epoch, moment.has)
        beginning = Beginning(clock_ms, moment.epoch, moment.tip, moment.trimmed, state)
        if head is None:
            return beginning
        entries = moment.behind(head, MAX_UNSEEN + 1)
        return beginning._replace(entries=entries[:MAX_UNSEEN], whole=len(entries) <= MAX_UNSEEN)

    def append(self, project: str, request: Append) -> Reply:
        def rule(moment: _Moment) -> tuple[Reply, _Moment | None]:
            epoch, seen = moment.epoch, request.seen
            clock_ms = self._clock()
            is_another = request.epoch not in ("", epoch) or is_closed(epoch)
            if is_another or seen < moment.trimmed or not all(map(moment.has, (seen, *request.must))):
                return Reply("BEHIND", clock_ms, epoch), None
            unseen = moment.behind(seen, MAX_UNSEEN + 1)
            whole, unseen = len(unseen) <= MAX_UNSEEN, unseen[:MAX_UNSEEN]
            word, first = word_of(request, epoch, clock_ms, unseen, whole=whole)
            if word != "APPENDED" or first is not None:
                return Reply(word, clock_ms, epoch, unseen, whole, first), None
            first = next_id(max(moment.tip, moment.trimmed), clock_ms, request.seq)
            becomes = moment.with_entries(request.entries, first, request.new_epoch or request.entries[0].key)
            return Reply(word, clock_ms, becomes.epoch, unseen, whole, first), becomes

        return self._change(project, rule)

    def read(self, project: str, after: Id, through: Id, count: int) -> Sequence[Entry]:
        return [entry for entry in self._now(project).behind(after, count) if entry.id <= through]

    def corrections(self, project: str, keys: Sequence[str]) -> Mapping[str, Correction]:
        moment = self._now(project)
        corrections = {**moment.corrected, **_corrections(moment.newer)}
        return {key: corrections[key] for key in keys if key in corrections}

    # -- the state ---------------------------------------------------------------------------------------------------

    def change(
        self,
        project: str,
        expected: Mapping[str, str | None],
        becomes: Mapping[str, str | None],
        marker: Entry | None = None,
    ) -> Changed:
        names = [*expected, *becomes]

        def rule(moment: _Moment) -> tuple[Changed, _Moment | None]:
            now_ms = self._clock()
            state = moment.named(names)
            is_so = all(state.get(name) == text for name, text in expected.items())
            if not becomes or not is_so or (is_closed(moment.epoch) and EPOCH not in expected):
                return Changed(False, now_ms, moment.epoch, state), None
            changed = moment.with_state(becomes)
            if marker is not None:
                first = next_id(max(moment.tip, moment.trimmed), now_ms, int.from_bytes(os.urandom(5)))
                changed = changed.with_entries([marker], first, marker.key)
            return Changed(True, now_ms, changed.epoch, changed.named(names)), changed

        return self._change(project, rule)

    def names(self, project: str) -> Sequence[str]:
        return sorted(name for name in self._now(project).state if not name.startswith(VIEW))

    # -- another log in its place ------------------------------------------------------------------------------------

    def replace(
        self, project: str, fence: str, tip: Id, entries: Sequence[Entry], epoch: str, trimmed: Id | None = None
    ) -> bool:
        def rule(moment: _Moment) -> tuple[bool, _Moment | None]:
            if not may_replace(fence, moment.epoch) or moment.tip != tip:
                return False, None
            return True, moment.becomes(
                epoch=epoch or moment.epoch,
                older=tuple(entries),
                newer=(),
                corrected=_corrections(entries),
                state={name: text for name, text in moment.state.items() if not name.startswith(VIEW)},
                trimmed=moment.trimmed if trimmed is None else trimmed,
            )

        return self._change(project, rule)

    # -- the past ----------------------------------------------------------------------------------------------------

    def trim(self, project: str, before_ms: int, count: int = MAX_READ) -> int:
        def rule(moment: _Moment) -> tuple[int, _Moment | None]:
            leaving, _ = _split(moment.behind(START, count), just_before(before_ms))
            if not leaving or is_closed(moment.epoch):
                return 0, None
            moment = moment.aged()
            corrected, past = dict(moment.corrected), []
            for entry in leaving:
                if entry.kind == "unreadable":
                    continue
                correction = corrected.pop(entry.key, None) if entry.kind == "charge" else None
                past.append(entry if correction is None else entry._replace(units=correction.units))
                if entry.kind == "correction" and entry.of in corrected and corrected[entry.of].id == entry.id:
                    del corrected[entry.of]  # the charge had left before its correction came
            return len(leaving), moment.becomes(
                older=moment.older[len(leaving) :],
                corrected=corrected,
                trimmed=leaving[-1].id,
                past=self._past(moment, past),
            )

        return self._change(project, rule)

    def past(self, project: str, after: Id, through: Id, count: int) -> Sequence[Entry]:
        return [entry for entry in _behind(self._now(project).past, after, count) if entry.id <= through]

    def past_length(self, project: str) -> int:
        return len(self._now(project).past)

    def add_past(self, project: str, entries: Sequence[Entry]) -> None:
        def rule(moment: _Moment) -> tuple[None, _Moment | None]:
            return None, moment.becomes(past=self._past(moment, entries))

        return self._change(project, rule)

    def _past(self, moment: _Moment, entries: Sequence[Entry]) -> tuple[Entry, ...]:
        """The past of a moment with these entries added, shortened to what is kept."""
        if not entries:
            return moment.past
        older, since = _split(moment.past, _before(min(entries).id))
        since = tuple(sorted({entry.id: entry for entry in [*entries, *since]}.values()))
        older, since = _split((*older, *since), just_before(self._clock() - self._past_ms))
        return (*older[-1:], *since)[-MAX_PAST:]

    # -- the ledger --------------------------------------------------------------------------------------------------

    def projects(self) -> Sequence[str]:
        return sorted(project for project in [*self._moments] if self._now(project).epoch)

    def examine(self, project: str) -> Sequence[Finding]:
        from quota.common.findings import warning  # late: `quota doctor` alone asks

        return [warning("ledger", "in memory: it ends with this process", "name a file in the url")]

    def now_ms(self) -> int:
        return self._clock()

    def close(self) -> None:
        """Does nothing: there is nothing to release."""


def _split(entries: tuple[Entry, ...], after: Id) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
    """The entries up to this id, and the entries after it."""
    first = bisect_right(entries, (after, _LAST))
    return entries[:first], entries[first:]


def _behind(entries: tuple[Entry, ...], after: Id, count: int) -> tuple[Entry, ...]:
    first = bisect_right(entries, (after, _LAST))  # an entry is a tuple, its id first
    return entries[first : first + count]


def _before(entry_id: Id) -> Id:
    return entry_id[0], entry_id[1] - 1


def _corrections(entries: Sequence[Entry]) -> dict[str, Correction]:
    return {entry.of: Correction(entry.units, entry.id) for entry in entries if entry.kind == "correction"}
