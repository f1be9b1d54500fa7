"""What this machine has seen of a project's ledger, so that losing the ledger does not restore budget.

A server may be flushed, restarted without its data, restored from an old copy, or replaced by a replica that lagged. A
ledger file may be deleted. So each process keeps a *watermark*: the ledger's epoch, its newest entry and what each view
counted when the process saw them last. These calls stand around every decision:

    expected()          before it: the epoch and the ids that the ledger must have. A ledger of another epoch, or one
                        without these ids, answers "behind" and decides nothing
    record()            after it: keep what it showed. Where there is more to be done, `follow_up` does it
    restore_missing()   after "behind": compare all watermarks of this machine with the log, and hand the ledger what is
                        missing as unlogged usage. The ledger counts that until it would have expired, and begins a new
                        epoch

For example with a limit of 9,500 units in 24 h:

    12:00   the log holds 5,000 units, charged at 08:20 and 11:40, in epoch e1. Somebody copies the ledger
    14:30   1,500 units are charged, and 600 at 15:15. The watermark: e1, newest entry 15:15, the view counts 7,100
    15:30   the copy is put back. The next charge expects e1 and the entry of 15:15. The ledger is behind
    15:30   the log still holds 5,000 of 7,100. The missing 2,100 are the newest: 1,500 count until 15:00 tomorrow, 600
            until 15:15. The ledger adds them to the view and begins epoch e1/e2. The charge is decided against 7,100

The time at which missing units expire is known to a *slice*, a 24th of the window (quota.recovery.slices): when a slice
is over, a process reads it from the log and keeps its sum. The 1,500 of 14:30 belong to the slice that ends at 15:00.
Of newer units only the sum is known; they expire with the newest entry. So do those that were not read yet: what a
decision shows is kept at once, but the log behind it may be long, and is read a piece at a time, after decisions and at
the end.

A ledger is known by its root, and the file by its identity (quota.ledger.identity.Identity), not by the ledger's url.
So what was seen at one place counts on at the next, as a carry: see quota.recovery.loss.

All that a process knows is one value (quota.recovery.knowledge), and a change puts another one in its place. It is
written to a slot of the process's own in one file (quota.recovery.watermark_file). So the next process knows what a
killed one saw, and each process sees what the others of its machine saw last. A process claims its slot with the first
decision that shows more than the file has: a process that only looks writes nothing. Writing a slot costs some
microseconds and waits for nothing; a crash of the whole machine may lose the last of it. Where the folder cannot be
written, a process still remembers what it saw itself.

What cannot be known: charges seen only by machines that no longer run. They are at most what was spent between the loss
and the first decision of a machine that had seen more.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Concatenate, ParamSpec

from quota.common.clock import NEVER, rfc3339
from quota.common.fork import start_over_in_child
from quota.common.log import warn
from quota.common.text import many, one_line
from quota.errors import LedgerError
from quota.ledger.contract import RETENTION_SLACK_MS, ChargeResult, Expected, Ledger, LimitCheck, root_of
from quota.ledger.entry import Entry
from quota.ledger.parts import correctable, repairable
from quota.ledger.unlogged import UnloggedUsage, is_carry
from quota.recovery import knowledge
from quota.recovery.knowledge import Knowledge, Rest
from quota.recovery.loss import Loss, Usages, carries, compare, largest, not_counted, renamed_log
from quota.recovery.observations import SeenAheadError, Watermark
from quota.recovery.repaired import as_repaired, concerns
from quota.recovery.watermark_file import SLOTS, SlotContent, WatermarkFile, Written, epoch_tag, read_slots, slots_of
from quota.recovery.watermark_folder import first_today, make_room, siblings_of

P = ParamSpec("P")
Reports = list[UnloggedUsage]
Tell = Callable[[Reports], "str | None"]
"""Reports to a ledger what it lacks, and returns the epoch that holds then. None, and nothing is told, where another
log lies there now than was compared: the next answer shows that."""

LOOK_EVERY_S = 0.05
"""A process looks at most so often at what the others of its machine have seen."""

PIECE = 250
"""The most entries of the log that are read at once after a decision."""

LAST_PIECE = 1_000
"""The most that are read when the process gives up its ledger."""

READ_SHARE = 0.1
"""While there is more to be read, reading takes no more than about this part of the time."""

READ_AGAIN_S = 60.0
"""A ledger that could not be read is asked so much later."""

FRESH_S = 5.0
"""The log is read only so shortly after a decision: later another log may lie in its place."""

CARRY_EVERY_S = 60.0
"""A process looks at most so often at what the others have seen of other logs, and at other configurations' files."""


class HighWaterMark:
    """What one process knows of one project's ledger. Safe to share between threads and after a fork.

    A session takes it from `quota.recovery.registry`, one for each file in a process. `label` says where the ledger
    is, and `configuration` whose it is, for people and for other processes.
    `opened` is called with it whenever it has opened its file.

    `_known` is all that it knows, None before it has read its file. It is only ever replaced as a whole, by a statement
    that no signal handler can interrupt; what a handler's own decisions showed meanwhile is kept (`_change`).
    """

    def __init__(
        self,
        path: str,
        project: str,
        *,
        label: str = "",
        configuration: str = "",
        opened: Callable[[HighWaterMark], object] | None = None,
    ) -> None:
        self.path = path
        self._project = project
        self._label = one_line(label)
        self._configuration = one_line(configuration)
        self._opened = opened
        self._file: WatermarkFile | None = None
        self._said_full = False
        self._forget()
        start_over_in_child(self)

    def _forget(self) -> None:
        """Begin as a new process."""
        self._lock = threading.RLock()
        self._known: Knowledge | None = None
        self._is_usable = True
        self._slots_read: Sequence[SlotContent] = ()  # all that is in these is known
        # What the slot of this process holds: what was known then, and the text of which `rest`.
        self._saved: Knowledge | None = None
        self._written: tuple[Rest, Written] | None = None
        self._siblings: tuple[Watermark, ...] = ()  # what other configurations for the same project saw
        self._other_logs_tag = 0  # of what others saw of other logs, when it was looked at last
        # By the monotonic clock: until then nothing is looked at, or read.
        self._next_look_s = 0.0
        self._next_siblings_s = 0.0
        self._next_carry_s = 0.0
        self._next_read_s = 0.0

    def start_over_in_child(self) -> None:
        """A forked child must not write its parent's slot: it claims one of its own."""
        file, self._file = self._file, None
        self._forget()
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def close_if_idle(self) -> bool:
        """`close`, but not in the middle of what another thread does."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self.close()
            return True
        finally:
            self._lock.release()

    def close(self) -> None:
        """Give the slot back; its content stays. A later decision claims one again."""
        with self._lock:
            if self._file is not None:
                self._save()
            self._known, self._is_usable, self._next_look_s = None, True, 0.0
            self._close_file()

    def _close_file(self) -> None:
        file, self._file, self._written = self._file, None, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _change(
        self, work: Callable[Concatenate[Knowledge, P], Knowledge], *args: P.args, **options: P.kwargs
    ) -> Knowledge:
        """Replace what is known by what `work` makes of it, and return that. Where a signal handler has changed it
        meanwhile, begin again with what it has become."""
        while True:
            before = self._known or self._begin()
            after = work(before, *args, **options)
            if self._known is before:  # between this and the next line no signal handler runs
                self._known = after
                return after

    # -- before a decision ---------------------------------------------------------------------------------------------

    def expected(self) -> Expected:
        """What the ledger must have: its epoch, and entries that this machine saw in it."""
        known = self._known
        if known is not None and time.monotonic() < self._next_look_s:
            return known.expected
        with self._lock:
            known = self._known
            if known is None or (self._is_usable and (self._file is None or not known.epoch)):
                known = self._begin()
            if self._file is not None:
                known = self._look(known, self._file)
            self._next_look_s = time.monotonic() + LOOK_EVERY_S
            return known.expected

    def _begin(self) -> Knowledge:
        """Read all that the processes of this machine have written. Nothing that this one knows is lost, because it
        claims a slot as soon as it knows more."""
        before, slots = self._known, self._read_slots()
        watermarks = _watermarks(slots)
        self._read_siblings()
        known = knowledge.recalled(watermarks, self._siblings, self._label)
        if self._known is not before:  # a signal handler has charged meanwhile, and read them itself
            return self._begin() if self._known is None else self._known
        self._known = known
        self._slots_read = slots
        if any(watermark.root != root_of(known.epoch) for watermark in watermarks):
            self._next_carry_s = time.monotonic() + CARRY_EVERY_S
        self._say_two_ledgers(known)
        return known

    def _look(self, known: Knowledge, file: WatermarkFile) -> Knowledge:
        """Find out what the other processes of this machine have seen."""
        try:
            seen = file.newest_of_others(epoch_tag(known.epoch))
        except OSError as error:
            self._give_up(error, file)
            return known
        now_s = time.monotonic()
        if now_s >= self._next_siblings_s:
            self._read_siblings()
            self._say_two_ledgers(known)
        known = self._change(knowledge.looked, seen, self._siblings)
        if seen.other_logs_tag != self._other_logs_tag and now_s >= self._next_carry_s:
            known = self._change(knowledge.with_other_logs, _watermarks(self._read_slots()))
            self._other_logs_tag, self._next_carry_s = seen.other_logs_tag, now_s + CARRY_EVERY_S
        return known

    # -- after a decision ----------------------------------------------------------------------------------------------

    def record(self, checks: Sequence[LimitCheck], result: ChargeResult) -> bool:
        """Keep what a decision showed. Returns whether more is to be done: then do `follow_up`."""
        with self._lock:
            before = self._known or self._begin()
            if self._file is None and self._is_usable and knowledge.adds_nothing(before, checks, result):
                return before.others.lacks_carry
            known = self._change(knowledge.decided, checks, result, self._label)
            if known.rest is not before.rest:
                lacking = knowledge.lacking_carries(before, checks, result)
                self._say_behind(largest(lacking, lacking, result.now_ms))
            self._save()
            return known.others.lacks_carry or self._must_read(known) or known.is_without(result)

    def follow_up(self, ledger: Ledger, result: ChargeResult, new_epoch: str, retention_ms: int) -> bool:
        """Hand the ledger a carry that it lacks, or else read on. If it does not answer, try again: the carry with the
        next decision, the log in a minute. The arguments are as in `restore_missing`.

        Returns whether the decision must be made again: a carry was handed over, and it was made without that; or what
        was missing has been restored since, and that without this charge.
        """
        with self._lock:
            known = self._known or self._begin()
            if known.is_without(result):
                return True
            if known.others.lacks_carry and result.epoch == known.epoch:
                with contextlib.suppress(LedgerError, SeenAheadError):
                    watermarks, _, _ = self._all_that_was_seen(known, ledger, result)
                    tell = self._tell(ledger, result, new_epoch, retention_ms)
                    self._carry_over(ledger, result, watermarks, tell)
                    return True
        self._read_on(ledger, PIECE)
        return False

    def _must_read(self, known: Knowledge) -> bool:
        """Whether a slice is over that was not read yet, and it is time to do so."""
        return known.newest[0] >= known.rest.slice_end_ms and time.monotonic() >= self._next_read_s

    def end(self, ledger: Ledger, within_s: float) -> None:
        """Read a last piece of the log, if the ledger answers in time: this process is about to give it up."""
        if time.monotonic() < self._next_look_s + FRESH_S:
            self._next_read_s = 0.0
            self._read_on(ledger, LAST_PIECE, within_s)

    def _read_on(self, ledger: Ledger, count: int, within_s: float | None = None) -> None:
        """Read a piece of the slices that are over, for all views of the last decision at once, and keep their sums.

        Nobody waits for it: no lock is held meanwhile.
        """
        with self._lock:
            known = self._known
            if known is None or not self._must_read(known):
                return
            unread = known.unread()
            self._next_read_s = time.monotonic() + READ_AGAIN_S  # so nobody else reads meanwhile
        after = min((one.after for one in unread), default=(0, 0))
        until_ms = max((one.end_ms for one in unread), default=0)
        started_s = time.monotonic()
        entries: Sequence[Entry] = []
        if after < (until_ms, NEVER):
            try:
                entries = ledger.read(self._project, after, until_ms, count, within_s)
            except LedgerError:
                return
        with self._lock:
            if self._known is not None and self._known.epoch == known.epoch:
                more = len(entries) == count
                self._change(knowledge.with_read, unread, entries, more=more)
                self._save()
                now_s = time.monotonic()
                self._next_read_s = now_s + (now_s - started_s) / READ_SHARE if more else 0.0

    # -- after a loss --------------------------------------------------------------------------------------------------

    def restore_missing(
        self, ledger: Ledger, result: ChargeResult, expected: Expected, new_epoch: str, retention_ms: int
    ) -> None:
        """Hand a ledger that is behind what it has lost, as far as any process of this machine saw it.

        `result` is its answer "behind", and `expected` what it was asked for. If there is something to report, the
        ledger begins `new_epoch`. `retention_ms` as in a request. Raises LedgerError, and SeenAheadError, where nothing
        was reported. May be repeated: the ledger merges the reports of one loss. Of several calls that find the same
        loss at once, the first restores, and the others only wait for it.
        """
        with self._lock:
            known = self._known or self._begin()
            if known.expected.epoch not in (expected.epoch, knowledge.NO_EPOCH):
                return
            watermarks, siblings, slots = self._all_that_was_seen(known, ledger, result)
            self._label = one_line(ledger.label)
            root = root_of(result.epoch)
            told: Usages = {}
            knowledge.merge_counted(told, watermarks, root, result.now_ms)
            tell = self._tell(ledger, result, new_epoch, retention_ms)
            if known.others.lacks_carry and not known.must_compare and result.epoch == known.epoch:
                self._carry_over(ledger, result, watermarks, tell)
            else:
                same_log = [*watermarks, *(_of_its_own_log(one) for one in siblings if one.root == root)]
                self._compare(known, ledger, result, same_log, slots, tell)
            self._say_carried(result, carries(watermarks, root, 0).labels, told)

    def _tell(self, ledger: Ledger, result: ChargeResult, new_epoch: str, retention_ms: int) -> Tell:
        """What reports to the ledger what it lacks."""
        root = root_of(result.epoch)

        def tell(reports: Reports) -> str | None:
            epoch = correctable(ledger).add_unlogged(self._project, new_epoch, reports, retention_ms, root)
            return epoch if root_of(epoch) == (root or new_epoch) else None

        return tell

    def _all_that_was_seen(
        self, known: Knowledge, ledger: Ledger, result: ChargeResult
    ) -> tuple[list[Watermark], list[Watermark], Sequence[SlotContent]]:
        """What all processes of this machine saw, this one last, and those of its other configurations, as it is since
        the ledger's last repair; and the slots that this was read from."""
        slots = self._read_slots()
        watermarks, siblings = [*_watermarks(slots), known.watermark(self._configuration)], [*self._siblings]
        if concerns((*watermarks, *siblings), result.epoch, result.now_ms):
            since = repairable(ledger).repairs(self._project), result.epoch, result.last, result.now_ms
            watermarks, siblings = as_repaired(watermarks, *since), as_repaired(siblings, *since)
        return watermarks, siblings, slots

    def _carry_over(self, ledger: Ledger, result: ChargeResult, watermarks: Sequence[Watermark], tell: Tell) -> None:
        """Tell the ledger what counts of other logs. What it has itself lost shows in the next request."""
        root, since_ms = root_of(result.epoch), result.now_ms - RETENTION_SLACK_MS
        renamed = renamed_log(ledger, self._project, root, result.last, watermarks)
        found = carries(watermarks, root, since_ms, renamed).usages
        if found and tell([*found.values()]) is None:
            return
        self._change(knowledge.carried, found, result.now_ms)
        self._save()

    def _compare(
        self,
        known: Knowledge,
        ledger: Ledger,
        result: ChargeResult,
        watermarks: Sequence[Watermark],
        slots: Sequence[SlotContent],
        tell: Tell,
    ) -> None:
        """Compare all that was seen with the log, tell the ledger what it lacks, and begin anew with what it has."""
        found = compare(ledger, self._project, result.epoch, result.last, result.now_ms, watermarks)
        epoch = tell([*found.usages.values()]) if found.usages else result.epoch
        if epoch is None:
            return
        compared_ms = max(watermark.at_ms for watermark in watermarks)
        after = knowledge.compared(found, epoch, self._label, result.now_ms, compared_ms)
        if self._known is not known:
            return  # a signal handler has restored it meanwhile, and both reports are in the ledger
        self._known = after
        self._slots_read = slots
        self._save(clear=True)
        self._say_behind(found.largest_loss(result.now_ms))

    def _say_behind(self, loss: Loss | None) -> None:
        if loss is not None:
            said = "charges that this machine saw are missing there (emptied? restored from an old copy?); they still "
            said += "count until they would have expired"
            lost = {"lost_units": loss.units, "until": rfc3339(loss.until_ms)}
            warn("ledger_behind", said, project=self._project, ledger=self._label, **lost)

    def _say_carried(self, result: ChargeResult, labels: dict[str, str], told: Usages) -> None:
        """Say what counts on that was seen in other logs, if the ledger was not told of it before."""
        if self._known is None:
            return
        carries_now = {key: usage for key, usage in self._known.rest.usages.items() if is_carry(usage.epoch)}
        news = not_counted(carries_now, told, result.now_ms)
        for label in sorted({labels.get(root_of(usage.epoch), "") for usage in news}):
            of_label = [usage for usage in news if labels.get(root_of(usage.epoch), "") == label]
            loss = largest(of_label, of_label, result.now_ms)
            if loss is None or loss.units == 0:
                continue
            if label in ("", self._label):
                self._say_behind(loss)
                continue
            said = "what this machine saw there counts on here until it would have expired; if these are two upstream "
            said += "projects, give each its own `project` name"
            counts = {"from": label, "to": self._label, "carried": loss.units, "until": rfc3339(loss.until_ms)}
            warn("ledger_moved", said, project=self._project, **counts)

    # -- what is stored ------------------------------------------------------------------------------------------------

    def _save(self, *, clear: bool = False) -> None:
        """Write what is known to the slot of this process, until that is what it holds: a signal handler may change it
        meanwhile. `clear`: it holds now what ended processes knew, so empty theirs."""
        while (known := self._known) is not self._saved and known is not None and self._is_usable:
            file, written = self._file, self._written
            try:
                file = file or self._claimed()
                if written is not None and written[0] is known.rest:  # most decisions change only the numbers
                    file.write_head(written[1], known.newest, known.at_ms, known.units)
                elif file.own_slot is not None:
                    self._write(file, known)
                if clear and file.own_slot is not None:
                    file.clear_abandoned(self._slots_read)
            except OSError as error:
                self._give_up(error, file)
            else:
                self._saved = known

    def _write(self, file: WatermarkFile, known: Knowledge) -> None:
        """Write the whole slot. Raises OSError."""
        text, needed_lines = known.text(self._configuration)
        newly = file.write(known.newest, epoch_tag(known.epoch), known.at_ms, known.units, text)
        self._written = known.rest, newly
        if newly.lines < needed_lines and not self._said_full:
            self._said_full = True
            lacking = many(needed_lines - newly.lines, "limit")
            said = f"there is no room for what was seen of {lacking}; use fewer, or shorter names"
            warn("memory_full", said, path=self.path)

    def _claimed(self) -> WatermarkFile:
        """The file, made if it is not there, with a slot for this process if one is free. Raises OSError."""
        try:
            file = WatermarkFile(self.path, known=self._slots_read)
        except FileNotFoundError:
            make_room(self.path)
            file = WatermarkFile(self.path, make=True, known=self._slots_read)
        self._file, self._written = file, None
        if self._opened is not None:
            self._opened(self)
        if file.own_slot is None:
            self._warn(f"more than {SLOTS} processes use it at once")
        return file

    def _read_slots(self) -> list[SlotContent]:
        """What the processes of this machine have written."""
        if not self._is_usable:
            return []
        try:
            return slots_of(self.path)
        except FileNotFoundError:
            return []
        except OSError as error:
            self._give_up(error, self._file)
            return []

    def _read_siblings(self) -> None:
        """Read what other configurations of this machine saw of the same upstream project. Where it is of the same log,
        it is as good as our own."""
        self._siblings = tuple(_watermarks(slot for path in siblings_of(self.path) for slot in read_slots(path)))
        self._next_siblings_s = time.monotonic() + CARRY_EVERY_S

    def _say_two_ledgers(self, known: Knowledge) -> None:
        """Where another configuration saw another log that still counts, say so: nothing is joined then."""
        apart = [one for one in self._siblings if one.label != self._label and _counts_apart(one, known)]
        if apart and known.epoch and first_today(self.path):
            other = max(apart, key=lambda watermark: watermark.at_ms)
            warn(
                "two_ledgers",
                f"{self._configuration} and {other.configuration} count one project apart, and upstream sees the sum; "
                "give both the same url, or, if these are two upstream projects, each its own `project` name",
                project=self._project,
                ledger=self._label,
                other=other.label,
            )

    def _give_up(self, error: OSError, file: WatermarkFile | None) -> None:
        """The file cannot be used. From now on this process remembers only what it sees itself."""
        if error.errno is None:  # not the system's: the TimeoutError of a signal handler
            raise error
        if file is not self._file:  # a signal handler has closed it
            return
        self._warn(error.strerror or error)
        self._is_usable = False
        self._close_file()

    def _warn(self, why: object) -> None:
        warn("memory_unusable", f"{why}; what this process sees of its ledger is lost when it ends", path=self.path)


def _watermarks(slots: Iterable[SlotContent]) -> list[Watermark]:
    return [watermark for slot in slots if (watermark := Watermark.from_slot(*slot)) is not None]


def _of_its_own_log(watermark: Watermark) -> Watermark:
    """Without what it knows of other logs, except for what its ledger counts of them."""
    return watermark._replace(observations=tuple(knowledge.logged(watermark, 0)), usages=tuple(watermark.counted()))


def _counts_apart(other: Watermark, known: Knowledge) -> bool:
    """Whether a process of another configuration saw units of another log that still count."""
    now_ms = max(other.at_ms, known.at_ms)
    return other.root != root_of(known.epoch) and any(
        one.units > 0 and one.until_ms > now_ms for one in knowledge.logged(other, now_ms)
    )
