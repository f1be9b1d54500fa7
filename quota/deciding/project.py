"""One project's log, as the threads of this process share it. Here is what waits and fails; the rules are in
`quota.rules`.

    Project     reads the log, decides by what it has read, and has the ledger append

A decision takes these steps (`Project.decide`):

1. **Read**: the totals of the limits are read up to what this process has seen of the log, and drop what has left.
2. **Compare**: a call fits if every limit has room for it, and no bucket that it needs is closed.
3. **Append**: the ledger appends the charge unless something unread might change that. One round trip.
4. **Refuse**: only where nothing unread might change that either. One round trip, too: the last that was read.

Where the ledger has lost what this machine saw, `quota.deciding.losses` puts it back, and the decision begins again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from threading import RLock
from typing import Any, TypeVar

from quota.common.clock import elapsed_s, host_clock, rfc3339
from quota.common.fork import OfOneProcess, start_over_in_child
from quota.common.log import warn
from quota.deciding.allowance import hand_over, say_used
from quota.deciding.losses import StillCountingError, is_behind, put_back
from quota.deciding.question import Look, Others, Outcome, Question
from quota.decision import REPAIR
from quota.errors import LedgerError, SessionClosedError, UnusableLedger, UsageError
from quota.journal.journal import Journal
from quota.ledger.log import MAX_READ, MAX_UNSEEN, SLACK_MS, VIEW, Append, Beginning, Log, Reply, is_fence, is_seal
from quota.ledger.state import API, State, check_api, moved
from quota.rules.entry import START, Entry, Id, Keys, just_before
from quota.rules.facts import FACTS, Facts, closing
from quota.rules.reading import WALL_SLACK_MS, Mark, Reading
from quota.rules.total import RunningTotal, Wanted
from quota.terms.arguments import whole_clock
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS, View, cutoff

T = TypeVar("T")

LONGEST = "longest_ms"
"""The field of the state that has the longest window ever named: so long an entry stays in the log."""

COUNT_WITHIN_S = 0.7
"""How long a decision reads for totals that have far to go. Then it answers "counting"; the next one goes on there."""

LEAVING_WITHIN_S = 1.0
SHORTER = 8
"""How long a refusal asks a ledger that does not answer for ever shorter pieces of what leaves next."""

ROOMS_AFTER = 2
"""After so many tries for which others were too quick, a decision names what each of its limits counts."""

MAX_CLOCK_TRIES = 3
"""How often a decision is made again because the ledger's clock went back."""

MAX_LOSSES = 5
"""How often one decision puts back what a ledger has lost."""

LATEST_MS = HOUR_MS
"""How far the ledger's clock may be ahead of this machine's."""

AGAIN_S = 1.0
"""How often a process looks whether this machine owes the ledger what it drew, and reads what it only counted."""

END_WITHIN_S = 0.05
"""How long it goes on with that at its end."""

KEEP_AFTER = 250
"""After so many entries, what was computed of them is kept for processes that start."""

TRIM_AFTER_MS = MINUTE_MS
"""How often a process moves what has left every window to the past, at most."""

_MAX_SEQ = 2**40 - 1
"""A new millisecond begins with a number out of a key's random bits, so entries of two histories seldom meet."""


class OvertakenError(Exception):
    """Others have changed again and again what a decision went by, and its log can keep them from it for a moment."""


class Project(OfOneProcess):
    """The log of a project, with what this process has read of it. Safe to share between threads, which do not hold
    each other up while one waits for the ledger.

    `clock` stands for the ledger's clock and the caller's, in ms since 1970; `wall` for the caller's alone.
    `longest_ms` is the longest window of the configuration. `jitter_ms` is added to the end of an exhaustion. `api` is
    the only API whose charges the log may have; "": any.
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
        self.state = State(log, name, self.keys.next, clock)
        self.reading = Reading()
        self.drawn: list[tuple[int, int]] = []
        """What this process has drawn in an outage, each time with what remained of the allowance, in units."""
        self._is_ahead = False
        self._trimmed_at_ms = self._before_ms = 0
        self._owes_again_s = self._read_back_s = 0.0
        self.named_ms = 0
        """The longest window that is named in the ledger; 0 while the API is not."""
        self._unread: tuple[Id, Id] | None = None
        """What of the log this machine has counted through kept totals, and has not read: behind which entry, and up to
        which."""
        self.start_over_in_child()
        start_over_in_child(self)

    def start_over_in_child(self) -> None:
        """A forked child may have been copied in the middle of a decision of another thread."""
        self._lock = RLock()
        self._busy = False
        self._torn = True

    def now_ms(self) -> int:
        """The time by which this process decides."""
        if self._clock is not None:
            return min(self._clock(), self.wall() + WALL_SLACK_MS)
        return self.reading.now_ms(elapsed_ms(), self.wall())

    # -- the decision ------------------------------------------------------------------------------------------------

    def decide(self, question: Question, *, commit: bool) -> Outcome:
        """Decide about calls that leave together; with `commit` those that fit are charged when this returns.

        Raises LedgerError where the ledger does not answer. The calls may have been charged then.
        """
        try:
            self._repay()
            try:
                outcome = self._decide(question, question.charges if commit else ())
            except OvertakenError:
                with self.log.exclusive(self.name):
                    outcome = self._decide(question, question.charges, is_alone=True)
        except StillCountingError:
            self.keep()
            return Outcome("counting", self.now_ms(), self.now_ms())
        finally:
            if commit and question.charges:
                self.reading.pending.pop(question.charges[0].key, None)
        if self.reading.unkept >= KEEP_AFTER:
            self.keep()
            self._trim()
        if self._unread is not None and elapsed_s() >= self._read_back_s:
            self._read_back_s = elapsed_s() + AGAIN_S
            self._read_back()
        return outcome

    def repay(self) -> None:
        """Hand over what this machine drew, as who reaches the ledger first does. Raises nothing: where
        it fails, the draws are still owed."""
        with suppress(LedgerError, StillCountingError):
            self._repay()

    def _repay(self) -> None:
        if self.drawn or elapsed_s() >= self._owes_again_s:
            self._owes_again_s = elapsed_s() + AGAIN_S
            hand_over(self)

    def _decide(self, question: Question, charges: Sequence[Entry], *, is_alone: bool = False) -> Outcome:
        costs, ends_s = question.costs, elapsed_s() + COUNT_WITHIN_S
        fresh, losses, clock_tries, refusals = False, 0, 0, 0
        while True:
            look = self.in_turn(partial(self._look, question))
            if not isinstance(look, Look):
                look()  # what must be read first
                if elapsed_s() > ends_s:
                    raise StillCountingError
                continue
            first = self.reading.pending.get(charges[0].key) if charges else None
            if first is not None:  # an earlier try, whose answer was lost, has appended them: they were read since
                used = tuple(look.used_units)
                return Outcome("ok", look.now_ms, look.now_ms, used, look.caps, None, first, look.facts)
            # Here a call is refused, and nowhere else: a limit has no room for it, or upstream has closed its bucket.
            room = look.room(costs)
            fits = room >= 0 and look.closing is None
            if fresh and not (fits and charges):
                reason = "ok" if fits else "limit" if look.closing is None else "exhausted"
                return Outcome(
                    reason, look.now_ms, look.now_ms, tuple(look.used_units), look.caps, look.closing, None, look.facts
                )
            request = self.request(look, charges if fits else (), room)
            if refusals >= ROOMS_AFTER and request.entries:
                if not (self.log.shared or is_alone):
                    raise OvertakenError
                request = request._replace(rooms=look.rooms(question.views, costs))
            is_late = self.journal is not None and self.journal.is_late(look.mark.epoch)
            reply, used_units = (None, None) if is_late else self.ask(request, question.views)
            if reply is None or reply.word == "BEHIND":
                losses += 1
                if losses > MAX_LOSSES:
                    raise StillCountingError
                put_back(self)
                fresh = False
                continue
            first = reply.id or (self.reading.pending.get(charges[0].key) if charges else None)
            if first is not None:
                if used_units is None:  # another thread has found a loss meanwhile
                    used_units = tuple([used + cost for used, cost in zip(look.used_units, costs, strict=True)])
                return Outcome("ok", look.now_ms, look.now_ms, used_units, look.caps, None, first, look.facts)
            if reply.clock_ms > self.wall() + LATEST_MS or (reply.word == "CLOCK" and clock_tries >= MAX_CLOCK_TRIES):
                return Outcome("clock", look.now_ms, reply.clock_ms)
            clock_tries += reply.word == "CLOCK"
            refusals += reply.word == "AGAIN"
            fresh = reply.whole and reply.word != "CLOCK"

    def _look(self, question: Question) -> Look | Callable[[], None]:
        """What a decision sees now, or what it has to read first."""
        reading, views = self.reading, question.views
        if not reading.began:
            return partial(self.begin, views)
        if reading.facts_are_old:
            return self._read_facts
        if self.named_ms < self.longest_ms:
            return self._name
        now_ms = self.now_ms()
        used_units = []
        for view in views:
            total = reading.totals.get(view)
            if total is None:
                return partial(self._open, [view for view in views if view not in reading.totals])
            if total.head < reading.seen:
                total.skip_left(cutoff(view.window, now_ms))
            if total.head >= reading.seen and (wanted := total.drop(now_ms)) is not None:
                return partial(self.in_turn, partial(self._read_leaving, total, wanted))
            if total.head < reading.seen:
                return partial(self._read_behind, total)
            used_units.append(total.used_units)
        caps = tuple(question.caps(reading.facts, now_ms))
        closed = closing(reading.facts, question.closed_by, now_ms, self.jitter_ms) if question.closed_by else None
        return Look(Mark(reading.epoch, reading.seen), now_ms, used_units, caps, closed, reading.facts)

    def request(self, look: Look, charges: Sequence[Entry] = (), room: int = 0) -> Append:
        epoch, seen = look.mark
        newest = START if self.journal is None else self.journal.newest(epoch)  # of all processes of this machine
        return Append(
            epoch,
            seen,
            charges,
            room,
            look.now_ms,
            self.wall() + LATEST_MS,
            newest if newest > seen else START,
            (),
            hash(charges[0].key) & _MAX_SEQ if charges else 0,
            self.keys.next() if not epoch else "",
            None if self._clock is None else self._clock(),
            self.longest_ms + SLACK_MS,
        )

    def look_at(self, mark: Mark) -> Look:
        """For a request that compares nothing."""
        return Look(mark, 0, [], (), None, self.reading.facts)

    # -- asking ------------------------------------------------------------------------------------------------------

    def ask(self, request: Append, views: Sequence[View] = ()) -> tuple[Reply, tuple[int, ...] | None]:
        """Ask the log, and take what its answer shows; returns also what these views count then, None where they are
        not read up to there. Where the answer of an append is lost, it is asked again with the same key: the log has it
        already, or never will have it twice. Raises LedgerError."""
        try:
            reply = self.log.append(self.name, request)
        except UnusableLedger:
            raise
        except LedgerError:
            if not request.entries:
                raise
            self.reading.pending[request.entries[0].key] = None
            reply = self.log.append(self.name, request)
        return reply, self.in_turn(partial(self._hear, request, reply, views))

    def _hear(self, request: Append, reply: Reply, views: Sequence[View]) -> tuple[int, ...] | None:
        word, clock_ms, epoch, unseen, _, first = reply
        reading = self.reading
        reading.hear_clock(clock_ms, elapsed_ms(), went_back=word == "CLOCK")
        if word == "BEHIND":
            return None
        entries: Sequence[Entry] = unseen
        own: list[Entry] = []
        if first is not None and unseen and first <= unseen[-1].id:  # an earlier try appended them
            keys = {entry.key for entry in request.entries}
            own = [entry for entry in unseen if entry.key in keys]
        elif first is not None:
            ms, seq = first
            own = [Entry((ms, seq + n), *entry[1:]) for n, entry in enumerate(request.entries)]
            entries = [*unseen, *own]
        new = reading.take(Mark(request.epoch, request.seen), epoch, entries)
        if request.epoch != reading.epoch and epoch != reading.epoch:
            new = list(entries)  # of another log than this process reads now: the journal is compared with that
        if new or own:
            self._note(epoch, new, own)
        totals = reading.totals
        return tuple([totals[view].used_units for view in views]) if all(map(totals.__contains__, views)) else None

    def _note(self, epoch: str, entries: Sequence[Entry], own: Sequence[Entry] = ()) -> None:
        """Note in the journal what was read of others, and this process's `own`, also where an answer that was lost
        would have shown it. Other processes of this machine have noted theirs."""
        if self.journal is not None:
            is_ours, pending = self.keys.is_of_this_machine, self.reading.pending
            seen = [*(entry for entry in entries if not is_ours(entry.key) or entry.key in pending), *own]
            if seen:
                self.journal.write(epoch, seen)

    def read_on(self) -> None:
        """Read all that is new in the log. Raises LedgerError, and StillCountingError while it is put together."""
        losses = 0
        while True:
            if not self.reading.began:
                self.begin(())
            mark = self.in_turn(lambda: Mark(self.reading.epoch, self.reading.seen))
            reply, _ = self.ask(self.request(self.look_at(mark)))
            if reply.word == "BEHIND":
                losses += 1
                if losses > MAX_LOSSES:
                    raise StillCountingError
                put_back(self)
            elif reply.whole:
                return

    # -- reading -----------------------------------------------------------------------------------------------------

    def begin(self, views: Sequence[View]) -> None:
        """Begin at the log as it is now, with what was kept of these views. What this machine has seen and the log
        lacks is put back first."""
        names = [view.name for view in views]
        beginning = self.log.begin(self.name, names, (FACTS, LONGEST, API))
        epoch, journal = beginning.epoch, self.journal
        if is_seal(epoch):
            raise moved(self.log.label, epoch)
        check_api(self.log.label, self.name, self.api, beginning.state)
        if is_fence(epoch) or (journal is not None and is_behind(self, journal, beginning)):
            self.in_turn(lambda: self.reading.hear_clock(beginning.clock_ms, elapsed_ms()))
            put_back(self)
            return
        facts = beginning.state.get(FACTS, "")

        def take() -> None:
            self.reading.hear_clock(beginning.clock_ms, elapsed_ms())
            self.reading.begin(epoch, beginning.tip, beginning.trimmed, Facts.read(facts))
            self._take_views(views, beginning)

        self.in_turn(take)
        self._before_ms = self._before_ms or beginning.tip[0]
        self._note(epoch, beginning.entries)
        self._note_facts(epoch, facts, beginning.tip)
        if journal is not None and beginning.tip != START:
            whole = journal.whole(epoch) or (
                START,
                max(beginning.trimmed, just_before(self.now_ms() - self.longest_ms)),
            )
            self._unread = (whole[1], beginning.tip) if whole[1] < beginning.tip else None
        self.named_ms = _whole(beginning.state.get(LONGEST)) if not self.api or API in beginning.state else 0

    def _name(self) -> None:
        """See to it that the log is kept for the longest window that anybody has, and is of one API."""
        stands = self.log.change(self.name, {LONGEST: None, API: None}, {})
        check_api(self.log.label, self.name, self.api, stands.state)
        stored, api = stands.state.get(LONGEST), stands.state.get(API)
        named_ms = max(_whole(stored), self.longest_ms)
        becomes = {LONGEST: str(named_ms)} | ({API: self.api} if self.api else {})
        if not becomes.items() <= stands.state.items():
            stands = self.log.change(self.name, {LONGEST: stored, API: api}, becomes)
            if not stands.done and not is_fence(stands.epoch) and not is_seal(stands.epoch):
                return  # another process was quicker: look at what it has named
        self.named_ms = named_ms

    def _open(self, views: Sequence[View]) -> None:
        """Begin the totals of further views."""
        beginning = self.log.begin(self.name, [view.name for view in views], ())
        if beginning.epoch != self.reading.epoch:
            put_back(self)
            return
        if beginning.tip > self.reading.seen:
            self.read_on()
        self.in_turn(partial(self._take_views, views, beginning))

    def _take_views(self, views: Sequence[View], beginning: Beginning) -> None:
        entries = beginning.entries if beginning.whole else None
        if beginning.epoch == self.reading.epoch:
            self.reading.trimmed = beginning.trimmed
        for view in views:
            kept = beginning.state.get(VIEW + view.name) if beginning.epoch == self.reading.epoch else None
            self.reading.open(view, kept, self.now_ms(), beginning.tip, entries)

    def _read_behind(self, total: RunningTotal) -> None:
        """Read a piece of what a total has yet to read."""
        wanted = Wanted(total.head, self.reading.seen, MAX_READ, corrected=False)
        epoch = self.reading.epoch
        entries = self.log.read(self.name, wanted.after, wanted.through, wanted.most)
        self.in_turn(partial(self.reading.take_behind, total, wanted, entries))
        self._note(epoch, entries)

    def _read_leaving(self, total: RunningTotal, wanted: Wanted) -> None:
        """Read what leaves next, with what it counts by all corrections up to the total's head. In turn: nothing may be
        corrected meanwhile."""
        entries = self.log.read(self.name, wanted.after, wanted.through, wanted.most)
        if self.log.begin(self.name).trimmed > wanted.after:  # it has left the log unread
            total.start_at(self.now_ms())
            return
        corrections = self.log.corrections(self.name, [entry.key for entry in entries if entry.kind == "charge"])
        if any(correction.id > total.head for correction in corrections.values()):
            mark = Mark(self.reading.epoch, self.reading.seen)
            request = self.request(self.look_at(mark))
            reply = self.log.append(self.name, request)
            self._hear(request, reply, ())
            if reply.unseen:
                return
            # Else what is noted is of no entry, or nobody may read on now: reading again would change nothing.
        total.take_leaving(wanted, entries, {key: correction.units for key, correction in corrections.items()})

    def _read_facts(self) -> None:
        """Read the facts that a marker says have changed."""
        markers, seen = self.reading.markers, self.reading.seen
        changed = self.log.change(self.name, {FACTS: None}, {})
        text = changed.state.get(FACTS, "")
        self.in_turn(lambda: self.reading.learn_facts(Facts.read(text), markers))
        self._note_facts(changed.epoch, text, seen)

    def _note_facts(self, epoch: str, text: str, seen: Id) -> None:
        if self.journal is not None and text:
            self.journal.write_facts(epoch, text, seen)

    def _read_back(self) -> None:
        """Read a piece of what was only counted, so that it can be put back after a loss. It may fail without harm."""
        journal, unread, epoch = self.journal, self._unread, self.reading.epoch
        if journal is None or unread is None:
            return
        with suppress(LedgerError):
            entries = self.log.read(self.name, *unread, MAX_UNSEEN)
            self._note(epoch, entries)
            done = len(entries) < MAX_UNSEEN
            self._unread = None if done else (entries[-1].id, unread[1])
            if epoch == self.reading.epoch:  # what came since was noted as it was read
                journal.note_whole(epoch, unread[0], self.reading.seen if done else entries[-1].id)

    def ahead_ms(self, now_ms: int) -> int:
        """The time of the newest entry, if that is so far ahead that a clock was wrong, else 0. That is logged once,
        until it is mended."""
        newest_ms = self.reading.seen[0]
        is_ahead = newest_ms > now_ms + SLACK_MS
        if is_ahead and not self._is_ahead:
            warn(
                "ledger_ahead",
                "a clock was wrong, and what it dated ahead counts for that much longer; if the clocks are right now, "
                f"run `{REPAIR}`",
                project=self.name,
                ledger=self.log.label,
                newest=rfc3339(newest_ms),
                now=rfc3339(now_ms),
            )
        self._is_ahead = is_ahead
        return newest_ms if is_ahead else 0

    # -- what leaves -------------------------------------------------------------------------------------------------

    def frees_at_ms(self, view: View, units: int) -> int | None:
        """When so many of a view's used units will have left its window; None where so many are not used."""
        return self._of_leaving(view, lambda total: total.frees_at_ms(units))

    def used_after(self, view: View, at_ms: int) -> int:
        """The units of a view that will still be used at a time, if nothing more is charged."""
        return self._of_leaving(view, lambda total: total.used_after(at_ms)) or 0

    def _of_leaving(self, view: View, number: Callable[[RunningTotal], int | None]) -> int | None:
        """A number of what will leave, for which the log may have to be read. A busy server may be too slow for a long
        piece: then shorter ones are asked for, which it may answer."""
        most, ends_s = MAX_READ, elapsed_s() + LEAVING_WITHIN_S

        def step() -> tuple[bool, int | None]:
            total = self.reading.totals.get(view)
            if total is None:
                return True, None
            if total.head < self.reading.seen:
                wanted = Wanted(total.head, self.reading.seen, most, corrected=False)
                entries = self.log.read(self.name, wanted.after, wanted.through, wanted.most)
                self.reading.take_behind(total, wanted, entries)
                return False, None
            answer, leaving = number(total), total.wants_leaving()
            if answer is None and leaving is not None:
                self._read_leaving(total, leaving._replace(most=min(leaving.most, most)))
                return False, None
            return True, answer

        def tried() -> tuple[bool, int | None]:
            nonlocal most
            try:
                return step()
            except LedgerError as error:  # nothing was taken of it: the reading is whole
                if isinstance(error, UnusableLedger) or most < SHORTER or elapsed_s() > ends_s:
                    raise
                most //= SHORTER
                return False, None

        while True:
            done, answer = self.in_turn(tried)
            if done:
                return answer

    def others(self, view: View) -> list[Others]:
        """What a view counts that only upstream has counted. Of one name only the largest counts."""

        def rows() -> list[Others]:
            total = self.reading.totals.get(view)
            heard = [] if total is None else [(*key, n) for key, n in total.others.items() if key[1] > total.at_ms]
            return [Others(name, units, leaves_ms) for name, leaves_ms, units in sorted(heard)]

        return self.in_turn(rows)

    def upstream_units(self, view: View) -> int:
        """The units that a view counts, and that only upstream has counted."""
        largest: dict[str, int] = {}
        for of in self.others(view):
            largest[of.name] = max(of.units, largest.get(of.name, 0))
        return sum(largest.values())

    def others_leave_ms(self, view: View) -> list[int]:
        """When units leave that only upstream has counted in a view, in order."""
        return sorted(of.until_ms for of in self.others(view))

    def others_units(self, view: View, name: str) -> int:
        """The units that a view counts under one name of what was heard."""
        return max((of.units for of in self.others(view) if of.name == name), default=0)

    # -- keeping -----------------------------------------------------------------------------------------------------

    def keep(self) -> bool:
        """Keep what was computed of the log, for processes that start. It may fail without harm: False."""
        try:
            mark, views = self.in_turn(lambda: (self.reading.epoch, self.reading.kept_views()))
            self.reading.unkept = 0
            return bool(views and mark) and self.log.keep_views(self.name, mark, views)
        except LedgerError:
            return False

    def _trim(self) -> None:
        """Move what has left every window to the past, now and then. It may fail without harm.

        No more leaves than by a day after the newest entry of before: a clock that is far ahead must not empty the log.
        """
        now_ms = self.now_ms()
        if not 0 <= now_ms - self._trimmed_at_ms < TRIM_AFTER_MS:
            self._trimmed_at_ms = now_ms
            by_ms = min(now_ms, self._before_ms + DAY_MS) if self._before_ms else now_ms
            self._before_ms = self.reading.seen[0]
            with suppress(LedgerError):
                stored = self.log.change(self.name, {LONGEST: None}, {}).state.get(LONGEST)
                self.log.trim(self.name, by_ms - max(self.longest_ms, _whole(stored)) - SLACK_MS)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, ends_s: float = inf) -> None:
        """Keep what was computed, if there is time until `ends_s`, and let every later decision raise
        SessionClosedError: its ledger is closed."""
        say_used(self)
        if self.reading.unkept and elapsed_s() < ends_s and self.keep():
            self._trim()
        ends_s = min(elapsed_s() + END_WITHIN_S, ends_s)
        while self._unread is not None and elapsed_s() < ends_s:
            before = self._unread
            self._read_back()
            if self._unread == before:  # the ledger does not answer
                break
        if self.journal is not None:
            self.journal.close()
        self.log = self.state = self.journal = _CLOSED

    # -- turns -------------------------------------------------------------------------------------------------------

    def in_turn(self, work: Callable[[], T]) -> T:
        """Do work on the reading, one thread at a time. What a signal interrupts is read anew. Raises UsageError in a
        signal handler that interrupts such work."""
        with self._lock:
            if self._busy:
                raise UsageError(
                    "a signal handler cannot ask in the middle of a decision: let it note that, and ask after"
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


class _Closed:
    """Stands for the ledger of a closed session."""

    def __getattr__(self, name: str) -> Any:
        raise SessionClosedError


_CLOSED: Any = _Closed()


def _whole(stored: str | None) -> int:
    return int(stored) if stored is not None and stored.isdigit() else 0


def elapsed_ms() -> int:
    """For the time between two answers: never more than has passed."""
    return int(elapsed_s() * 1_000)
