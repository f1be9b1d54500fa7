"""One project's log, as far as this process has read it. This module waits and handles failures; the rules are in
`quota.rules`.

    Project        begins to read, reads on, asks the ledger to append, and notes all entries in this machine's journal
    BehindError    the ledger has lost entries that this machine has read
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from threading import RLock
from typing import Any, TypeVar

from quota.common.clock import UNKNOWN_UPTIME, SinceBoot, elapsed_s, host_clock, rfc3339, since_boot
from quota.common.fork import OfOneProcess, start_here_and_in_child
from quota.common.log import warn
from quota.common.text import listed
from quota.deciding.keys import Keys
from quota.deciding.recorder import Recorder
from quota.decision import COUNTING, REPAIR
from quota.errors import ClosedLedger, LedgerError, UnusableLedger, UsageError
from quota.journal.journal import Journal
from quota.ledger.log import MAX_READ, MAX_UNSEEN, VIEW, Append, Log, Moment, Reply, is_fence, is_seal, seq_of
from quota.ledger.state import API, LONGEST, State, begin, check_api, longest_of
from quota.rules.entry import START, Entry, Id, Others, ids_of_calls, just_before
from quota.rules.facts import FACTS, Exhaustion, Facts, closing, exhaust, union
from quota.rules.reading import Mark, Reading
from quota.rules.total import RunningTotal, Wanted
from quota.terms.arguments import whole_clock
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS, SLACK_MS, View

T = TypeVar("T")

WALL_SLACK_MS = 5_000
"""A decision uses the ledger's clock, but at most the caller's clock plus this."""

MAX_CLOCK_AHEAD_MS = HOUR_MS
"""How far the ledger's clock may be ahead of this machine's."""

READ_BACK_S = 1.0
"""How often a process reads a piece of the entries that it only counted."""

END_WITHIN_S = 0.05
"""How long a process goes on reading, at its end, the entries that it only counted."""

KEEP_AFTER = 250
"""After so many entries, a process keeps its totals for new processes."""

TRIM_AFTER_MS = MINUTE_MS
"""The least time between two trims by a process: a trim moves entries that have left every window to the past."""

ASK_AGAIN_WITHIN_S = 0.5
"""An append is sent again if it failed within this time: a decision must end within a second."""

MAX_REFUSED = 1_000
"""How many calls a process remembers that it refused because the ledger did not answer."""


class BehindError(Exception):
    """The log lacks entries that this machine has read, or a fence stands: see `quota.deciding.losses`."""


class Project(OfOneProcess):
    """The log of a project, with what this process has read of it. Safe to share between threads: while one waits for
    the ledger, the others go on, except while it reads the next charges to leave.

    `clock`, in ms since 1970, is the clock of a ledger that was opened with it, and the caller's; `wall` replaces only
    the caller's. `longest_ms` is the longest window of its budgets. `jitter_ms` is the most that is added to the
    end of an exhaustion. `api` is the only API whose charges the log may have; "": any.
    """

    def __init__(
        self,
        log: Log,
        name: str,
        *,
        journal: Journal | None = None,
        keys: Keys | None = None,
        clock: Callable[[], int] | None = None,
        wall: Callable[[], int] | None = None,
        longest_ms: int = DAY_MS,
        jitter_ms: int = 0,
        api: str = "",
    ) -> None:
        self.log, self.name, self.journal, self.api = log, name, journal, api
        self.keys = keys or Keys()
        self.longest_ms, self.jitter_ms = longest_ms, jitter_ms
        self._clock = clock = None if clock is None else whole_clock(clock)
        self.wall = wall or clock or host_clock
        # The ledger may lose the facts of this process before anybody reads them, and may have lost others already.
        self.state = State(log, name, self.keys.next, self._note_facts)
        self.recorder: Recorder | None = None
        """Reports refusals to the ledger; None: nobody does."""
        self.reading = Reading()
        self.drawn: dict[str, int] = {}
        """The draws of this process in an outage: the units of each, by its key."""
        self._refused: dict[str, tuple[str, Sequence[Entry]]] = {}
        """What was refused because the ledger did not answer, by its first key. The ledger may have it all the same."""
        self._is_ahead = False
        self._trimmed_at_ms = self._newest_at_trim_ms = 0
        self._read_back_s = self.owes_again_s = 0.0
        """When this process reads back again; and when `quota.deciding.allowance` next looks for draws to hand over."""
        self.stored_ms = 0
        """The longest window that the ledger has; 0 until it has the API too."""
        self._unread: tuple[Id, Id] | None = None
        """The range of the log that this machine has counted through kept totals but not read: after the first id, up
        to the second."""
        start_here_and_in_child(self)

    def start_over_in_child(self) -> None:
        """The fork may have come in the middle of another thread's decision."""
        self._lock = RLock()
        self._busy = False
        self._torn = True

    def now_ms(self) -> int:
        """The time by which this process decides."""
        return min(self._ledgers_ms(), self.wall() + WALL_SLACK_MS)

    def since_boot(self) -> SinceBoot:
        """The time since the machine's start; unknown if the caller's clock is not the host's."""
        return since_boot() if self.wall is host_clock else UNKNOWN_UPTIME

    def dated_ms(self, decided_ms: int) -> int:
        """The time of a decision, by the ledger's clock if this machine's is behind."""
        ledgers_ms = self._ledgers_ms()
        return ledgers_ms if ledgers_ms > decided_ms + WALL_SLACK_MS else decided_ms

    def _ledgers_ms(self) -> int:
        """A lower bound of the ledger's clock."""
        return self.reading.clock_ms(elapsed_ms()) if self._clock is None else self._clock()

    def latest_ms(self) -> int:
        """The later of the two clocks: a fact that is later than both has a wrong time."""
        return max(self._ledgers_ms(), self.wall())

    def request(self, mark: Mark, now_ms: int = 0, charges: Sequence[Entry] = (), room: int = 0) -> Append:
        """A request after this mark, decided at `now_ms`. Without charges it only reads."""
        epoch, seen = mark
        must: Sequence[Id] = ()
        if self.journal is not None:  # of all processes of this machine
            newest = self.journal.newest(epoch)
            must = self.journal.late(epoch)
            must = (newest, *must) if newest > seen else must
        return Append(
            epoch=epoch,
            seen=seen,
            entries=charges,
            room=room,
            now_ms=now_ms,
            latest_ms=self.wall() + MAX_CLOCK_AHEAD_MS,
            must=must,
            seq=seq_of(charges[0].key) if charges else 0,
            new_epoch=self.keys.next() if not epoch else "",
        )

    # -- asking ------------------------------------------------------------------------------------------------------

    def ask(self, request: Append, views: Sequence[View] = ()) -> tuple[Reply, tuple[int, ...] | None]:
        """Send a request to the log, and take the entries of its answer. Also returns the units of these views then;
        None if a total is missing. If an append fails within ASK_AGAIN_WITHIN_S, this sends it again with the same key,
        so the log never has the charge twice. Raises LedgerError and BehindError."""
        again_until_s = elapsed_s() + ASK_AGAIN_WITHIN_S if request.entries else 0.0
        try:
            reply = self.log.append(self.name, request)
        except UnusableLedger:
            raise
        except LedgerError:
            if elapsed_s() > again_until_s:
                raise
            self.reading.pending[request.entries[0].key] = None
            reply = self.log.append(self.name, request)
        if reply.word == "BEHIND":
            raise BehindError
        if self.journal is not None and request.must:
            self.journal.proved(request.epoch, request.must)
        return reply, self.in_turn(partial(self._hear, request, reply, views))

    def _hear(self, request: Append, reply: Reply, views: Sequence[View]) -> tuple[int, ...] | None:
        word, clock_ms, epoch, unseen, _, first = reply
        reading = self.reading
        reading.hear_clock(clock_ms, elapsed_ms(), went_back=word == "CLOCK")
        entries: Sequence[Entry] = unseen
        own: list[Entry] = []
        if first is not None and unseen and first <= unseen[-1].id:  # an earlier try appended them
            keys = {entry.key for entry in request.entries}
            own = [entry for entry in unseen if entry.key in keys]
        elif first is not None:
            ms, seq = first
            own = [Entry((ms, seq + n), *entry[1:]) for n, entry in enumerate(request.entries)]
            entries = [*unseen, *own]
        reading.take(Mark(request.epoch, request.seen), epoch, entries)
        if self._refused:
            self._warn_of_refused(unseen)
        if entries:  # also of another log than this process reads: the journal is compared with it
            noted = START if self.journal is None else self.journal.newest(epoch)
            self._note(epoch, unseen, own)
            is_lacking = request.seen < noted <= entries[-1].id and all(entry.id != noted for entry in entries)
            if is_lacking and self.journal is not None:  # it was noted, and lost, while the request was on its way
                self.journal.doubt(epoch, noted)
        totals = [total for view in views if (total := reading.totals.get(view.name))]
        return tuple([total.used_units for total in totals]) if len(totals) == len(views) else None

    def _warn_of_refused(self, unseen: Sequence[Entry]) -> None:
        """Warn of charges whose calls were refused here, because the ledger's answer was late."""
        for entry in unseen:
            if (refused := self._refused.pop(entry.key, None)) is not None:
                method, charges = refused
                ids = listed(dict.fromkeys(ids_of_calls([(entry.id[0], charge.key) for charge in charges])))
                about = {"method": method, "job": entry.job, "units": sum(charge.units for charge in charges)}
                detail = "the ledger got the call, but gave no answer in time; `quota refund` gives it back"
                warn("refused_but_charged", detail, project=self.name, **about, charge=ids)

    def note_refused(self, method: str, charges: Sequence[Entry]) -> None:
        """Note what was refused because the ledger did not answer."""
        if len(self._refused) >= MAX_REFUSED:
            self._refused.clear()
        self._refused[charges[0].key] = method, charges

    def _note(self, epoch: str, entries: Sequence[Entry], own: Sequence[Entry] = ()) -> None:
        """Note in the journal the entries of others and this process's `own`, also those whose answer was lost. Other
        processes of this machine note their own."""
        if self.journal is not None:
            is_ours, pending = self.keys.is_of_this_machine, self.reading.pending
            seen = [*(entry for entry in entries if not is_ours(entry.key) or entry.key in pending), *own]
            if seen:
                self.journal.write(epoch, seen)

    def read_on(self) -> None:
        """Read all new entries of the log. Raises LedgerError and BehindError."""
        is_whole = False
        while not is_whole:
            is_whole = self.ask(self.request(self.mark()))[0].whole

    # -- reading -----------------------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """How far this process has read the log, which it begins to read if necessary: an interruption may have thrown
        its reading away. Raises LedgerError and BehindError."""
        while True:
            began, mark = self.in_turn(lambda: (self.reading.began, self.reading.mark))
            if began:
                return mark
            self.begin(())

    def begin(self, views: Sequence[View]) -> None:
        """Begin to read the log, or the totals of more of these views, with the kept ones. Raises LedgerError and
        BehindError."""
        fields = [*(VIEW + view.name for view in views), FACTS, LONGEST]
        beginning = begin(self.log, self.name, fields, self.api)
        epoch, journal = beginning.epoch, self.journal
        if is_fence(epoch) or self.is_behind(beginning):
            self.in_turn(lambda: self.reading.hear_clock(beginning.clock_ms, elapsed_ms()))
            raise BehindError
        facts = self.whole_facts(beginning)
        if self.reading.began and beginning.tip > self.reading.seen:
            self.read_on()

        def take() -> None:
            self.reading.hear_clock(beginning.clock_ms, elapsed_ms())
            if not self.reading.began:
                self.reading.begin(epoch, beginning.tip, beginning.trimmed, Facts.read(facts))
            is_same_log = epoch == self.reading.epoch
            if is_same_log:
                self.reading.trimmed = beginning.trimmed
            for view in views:
                if view.name not in self.reading.totals:
                    kept = beginning.state.get(VIEW + view.name) if is_same_log else None
                    self.reading.open(view, kept, self.now_ms(), beginning.tip)

        self.in_turn(take)
        self._newest_at_trim_ms = self._newest_at_trim_ms or beginning.tip[0]
        self._note_facts(facts)
        if journal is not None and beginning.tip != START:
            edge = max(beginning.trimmed, just_before(self.now_ms() - self.longest_ms))
            through = journal.whole(epoch) or edge
            self._unread = (through, beginning.tip) if through < beginning.tip else None
        self.stored_ms = longest_of(beginning.state) if not self.api or API in beginning.state else 0

    def is_behind(self, beginning: Moment) -> bool:
        """Whether this machine's journal has records that nobody has compared with this log, or the log lacks the
        newest entry that this machine has noted of it, or a late one. Others may have appended since."""
        journal = self.journal
        if journal is None:
            return False
        if journal.uncompared(beginning.epoch):
            return True
        must = {journal.newest(beginning.epoch), *journal.late(beginning.epoch)} - {START, beginning.tip}
        seen = max(beginning.tip, beginning.trimmed)
        return bool(must) and self.log.lacks(self.name, beginning.epoch, seen, must)

    def whole_facts(self, beginning: Moment) -> str:
        """The facts of the log as text, with the facts of this machine's journal that the log lacks: puts these back.
        Raises LedgerError."""
        stored = beginning.state.get(FACTS, "")
        facts = Facts.read(stored)
        whole = union(facts, self._noted_facts(max(beginning.clock_ms, self.wall())))
        if whole == facts:
            return stored
        before, after = self.state.unite(whole)
        if after != before:  # otherwise another process has added them, or made them just now
            say = "the ledger lacked facts that this machine had noted, and this machine added them"
            warn("ledger_behind", say, ledger=self.log.label, project=self.name)
        return after.text()

    def store_longest_window(self) -> None:
        """Name the longest window and the API in the ledger, so that the log keeps enough entries, of one API."""
        stands = self.log.change(self.name, {LONGEST: None, API: None}, {})
        check_api(self.log.label, self.name, self.api, stands.state)
        stored_ms = max(longest_of(stands.state), self.longest_ms)
        becomes = {LONGEST: str(stored_ms)} | ({API: self.api} if self.api else {})
        if not becomes.items() <= stands.state.items():
            expected = {API: stands.state.get(API)}
            # Another program may have written a text that has no equal in UTF-8.
            if LONGEST not in stands.state or longest_of(stands.state):
                expected[LONGEST] = stands.state.get(LONGEST)
            stands = self.log.change(self.name, expected, becomes)
            if not stands.done and not is_fence(stands.epoch) and not is_seal(stands.epoch):
                return  # another process was quicker; read what it named
        self.stored_ms = stored_ms

    def read_behind(self, head: Id) -> None:
        """Read a piece of the entries after `head`, which some totals have not counted yet. Raises LedgerError and
        BehindError."""
        reading, epoch = self.reading, self.reading.epoch
        wanted = Wanted(head, reading.seen, MAX_READ)
        entries = self.log.read(self.name, *wanted)
        if self.in_turn(partial(reading.take_behind, epoch, wanted, entries)):
            self._note(epoch, entries)
        else:
            raise BehindError

    def read_leaving(self, total: RunningTotal, wanted: Wanted) -> None:
        """Read the next entries to leave, with all their corrections up to the total's head. In turn, because nothing
        may be corrected meanwhile."""
        entries = self.log.read(self.name, *wanted)
        if self.log.begin(self.name).trimmed > wanted.after:  # they have left the log unread
            total.start_at(self.now_ms())
            return
        corrections = self.log.corrections(self.name, [entry.key for entry in entries if entry.kind == "charge"])
        if any(correction.id > total.head for correction in corrections.values()):
            request = self.request(self.reading.mark)
            reply = self.log.append(self.name, request)
            if reply.word == "BEHIND":
                self.reading.forget()
                return
            self._hear(request, reply, ())
            if reply.unseen:
                return
            # Otherwise the correction has no entry: another try would change nothing.
        total.take_leaving(wanted, entries, {key: correction.units for key, correction in corrections.items()})

    def read_facts(self) -> None:
        """Read the facts after a marker: they have changed."""
        markers = self.reading.markers
        text = self.log.change(self.name, {FACTS: None}, {}).state.get(FACTS, "")
        self.in_turn(lambda: self.reading.learn_facts(Facts.read(text), markers))
        self._note_facts(text)

    def exhaust(self, exhaustion: Exhaustion) -> Exhaustion:
        """Close a bucket, as `State.exhaust` does. If that fails, this machine notes it: until the ledger answers, its
        calls are refused here. Raises LedgerError."""
        try:
            return self.state.exhaust(exhaustion)
        except LedgerError:
            now_ms = self.latest_ms()
            self._note_facts(exhaust(self._noted_facts(now_ms), exhaustion, now_ms).text())
            raise

    def noted_closing(self, buckets: Sequence[str]) -> Exhaustion | None:
        """The exhaustion of one of these buckets that this machine has noted, for while the ledger does not answer."""
        now_ms = self.latest_ms()
        return closing(self._noted_facts(now_ms), buckets, now_ms, self.jitter_ms)

    def _noted_facts(self, now_ms: int) -> Facts:
        """The facts that this machine has noted, without facts of the future."""
        return Facts() if self.journal is None else Facts.read(self.journal.notes().facts).happened(now_ms)

    def _note_facts(self, text: str) -> None:
        if self.journal is not None and text:
            self.journal.note_facts(text, self.latest_ms())

    def _read_back(self) -> None:
        """Read a piece of the entries that were only counted, so that this machine can put them back. Failing does no
        harm."""
        journal, unread, epoch = self.journal, self._unread, self.reading.epoch
        if journal is None or unread is None:
            return
        with suppress(LedgerError):
            entries = self.log.read(self.name, *unread, MAX_UNSEEN)
            self._note(epoch, entries)
            done = len(entries) < MAX_UNSEEN
            self._unread = None if done else (entries[-1].id, unread[1])
            if epoch == self.reading.epoch:  # later entries were noted when they were read
                journal.note_whole(epoch, self.reading.seen if done else entries[-1].id)

    def ahead_ms(self, now_ms: int) -> int:
        """The time of the newest entry if a wrong clock dated it ahead, else 0. Logs that once, until it is
        repaired."""
        newest_ms = self.reading.seen[0]
        # Also of the ledger's clock: this machine's may be behind.
        is_ahead = newest_ms > now_ms + SLACK_MS and newest_ms > self._ledgers_ms() + SLACK_MS
        if is_ahead and not self._is_ahead:
            what = "a wrong clock dated charges in the future, where they count longer"
            times = {"newest": rfc3339(newest_ms), "now": rfc3339(now_ms)}
            message = f"{what}; once the clocks are right, run `{REPAIR}`"
            warn("ledger_ahead", message, project=self.name, ledger=self.log.label, **times)
        self._is_ahead = is_ahead
        return newest_ms if is_ahead else 0

    # -- leaving entries ---------------------------------------------------------------------------------------------

    def frees_at_ms(self, view: View, units: int) -> int | None:
        """When so many of a view's used units will have left its window; None if fewer are used."""
        return self._of_leaving(view, lambda total: total.frees_at_ms(units))

    def used_after(self, view: View, at_ms: int) -> int:
        """The units of a view that are still used at a later time, if nothing more is charged."""
        return self._of_leaving(view, lambda total: total.used_after(at_ms)) or 0

    def _of_leaving(self, view: View, number: Callable[[RunningTotal], int | None]) -> int | None:
        """A number about leaving entries, which may need the log. Raises LedgerError, also if the view's total is gone:
        another thread reads the log anew."""

        def step() -> int | Callable[[], None] | None:
            total = self.reading.totals.get(view.name)
            if total is None or not self.reading.began:
                raise BehindError
            if total.head < self.reading.seen:
                return partial(self.read_behind, total.head)
            answer, leaving = number(total), total.wants_leaving()
            if answer is None and leaving is not None:
                return partial(self.in_turn, partial(self.read_leaving, total, leaving))
            return answer

        try:
            while callable(answer := self.in_turn(step)):
                answer()
        except BehindError:
            raise LedgerError(f"ledger {self.log.label}: {COUNTING}") from None
        return answer

    def others(self, view: View) -> list[Others]:
        """The units in a view that only upstream has counted."""
        return self.in_turn(lambda: self.reading.others(view))

    def used_units(self) -> dict[str, int]:
        """The units in each view, by its name, as far as this process has read."""
        return self.in_turn(lambda: {name: total.used_units for name, total in self.reading.totals.items()})

    # -- keeping -----------------------------------------------------------------------------------------------------

    def maintain(self) -> None:
        """Keep the totals, trim the log, and read a piece of the entries that were only counted: each now and then.
        Failing does no harm."""
        if self.reading.unkept >= KEEP_AFTER:
            self.keep()
            self._trim()
        if self._unread is not None and elapsed_s() >= self._read_back_s:
            self._read_back_s = elapsed_s() + READ_BACK_S
            self._read_back()

    def keep(self) -> bool:
        """Keep the totals for new processes. Failing does no harm: returns False."""
        try:
            epoch, views = self.in_turn(lambda: (self.reading.epoch, self.reading.kept_views()))
            self.reading.unkept = 0
            return bool(views and epoch) and self.log.keep_views(self.name, epoch, views)
        except LedgerError:
            return False

    def _trim(self) -> None:
        """Move entries that have left every window to the past, now and then. Failing does no harm.

        It trims by a time at most a day after the newest entry of the last trim: a clock that is far ahead must not
        empty the log.
        """
        now_ms = self.now_ms()
        if not 0 <= now_ms - self._trimmed_at_ms < TRIM_AFTER_MS:
            self._trimmed_at_ms = now_ms
            by_ms = min(now_ms, self._newest_at_trim_ms + DAY_MS) if self._newest_at_trim_ms else now_ms
            self._newest_at_trim_ms = self.reading.seen[0]
            with suppress(LedgerError):
                stored_ms = longest_of(self.log.change(self.name, {LONGEST: None}, {}).state)
                self.log.trim(self.name, by_ms - max(self.longest_ms, stored_ms) - SLACK_MS)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, ends_s: float = inf) -> None:
        """Keep the totals, if there is time until `ends_s`. Every later decision raises SessionClosedError."""
        if self.reading.unkept and elapsed_s() < ends_s and self.keep():
            self._trim()
        ends_s = min(elapsed_s() + END_WITHIN_S, ends_s)
        while self._unread is not None and elapsed_s() < ends_s:
            before = self._unread
            self._read_back()
            if self._unread == before:  # the ledger does not answer
                break
        if self.journal is not None:
            self.journal.close(self.log.label)
        closed: Any = ClosedLedger()
        self.log = self.state = self.journal = closed

    # -- turns -------------------------------------------------------------------------------------------------------

    def in_turn(self, work: Callable[[], T]) -> T:
        """Do work on the reading, one thread at a time. If an exception interrupts the work, the log is read again.
        Raises UsageError in a signal handler that interrupts such work."""
        with self._lock:
            if self._busy:
                raise UsageError(
                    "a signal handler cannot ask in the middle of a decision; let it set a flag, and ask afterwards"
                )
            try:
                self._busy = True
                if self._torn:
                    pending, self.reading = self.reading.pending, Reading()
                    self.reading.pending = pending
                self._torn = True
                answer = work()
                self._torn = False
                return answer
            finally:
                self._busy = False


def elapsed_ms() -> int:
    """A clock for the time between two answers. It rounds down, so it never shows more than has passed."""
    return int(elapsed_s() * 1_000)
