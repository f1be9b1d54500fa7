"""What this machine has seen of a project's ledger, so that losing the ledger does not restore budget.

A server may be flushed, restarted without its data, restored from an old copy, or replaced by a replica that lagged. A
ledger file may be deleted. So each process keeps a *watermark*: the ledger's epoch, its newest entry and what each view
counted when the process saw them last. Three calls stand around every decision:

    expected()          before it: the epoch and the ids that the ledger must have. A ledger of another epoch, or one
                        without these ids, answers "behind" and decides nothing
    record()            after it: keep what it showed
    restore_missing()   after "behind": compare all watermarks of this machine with the log, and hand the ledger what is
                        missing as unlogged usage. The ledger counts that until it would have expired, and begins a new
                        epoch

For example with a limit of 9,500 units in 24 h:

    12:00   the log holds 5,000 units, charged at 08:20 and 11:40, in epoch e1. Somebody copies the ledger
    14:30   1,500 units are charged, and 600 at 15:15. The watermark: e1, newest entry 15:15, the view counts 7,100
    15:30   the copy is put back. The next charge expects e1 and the entry of 15:15. The ledger is behind
    15:30   the log still holds 5,000 of 7,100. The missing 2,100 are the newest: 1,500 count until 15:00 tomorrow, 600
            until 15:15. The ledger adds them to the view and begins epoch e1/e2. The charge is decided against 7,100

The time at which missing units expire is known to a *slice*, a 24th of the window: when a slice is over, `read_on`
reads it from the log and keeps its sum. The 1,500 of 14:30 belong to the slice that ends at 15:00. Of newer units only
the sum is known; they expire with the newest entry. So do those that were not read yet: what a decision shows is kept
at once, but the log behind it may be long, and is read a piece at a time, after decisions and at the end.

A ledger is known by its root, and the file by its identity (quota.ledger.contract.Identity), not by the ledger's url.
So what was seen at one place counts on at the next, as a carry: see quota.recovery.loss.

Each process has a slot of its own in one file (quota.recovery.watermark_file). So the next process knows what a killed
one saw, and each process sees what the others of its machine saw last. Writing a slot costs some microseconds and waits
for nothing; a crash of the whole machine may lose the last of it. Where the folder cannot be written, a process still
remembers what it saw itself.

What cannot be known: charges seen only by machines that no longer run. They are at most what was spent between the loss
and the first decision of a machine that had seen more.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from quota.common.clock import NEVER, rfc3339
from quota.common.fork import start_over_in_child
from quota.common.log import warn
from quota.common.text import one_line, quoted
from quota.errors import LedgerError
from quota.ledger.contract import (
    NOTHING_EXPECTED,
    RETENTION_SLACK_MS,
    Expected,
    root_of,
)
from quota.ledger.unlogged import is_carry
from quota.recovery.loss import carries, compare, largest, not_counted, renamed_log
from quota.recovery.observations import (
    SeenAheadError,
    SlicedUsage,
    ViewObservation,
    Watermark,
    furthest_slices,
    merge,
    next_slice_end_ms,
    observation_of,
    slice_ms_of,
    span_of,
    with_entries,
    with_slices,
)
from quota.recovery.watermark_file import SLOTS, WatermarkFile, epoch_tag, read_slots
from quota.recovery.watermark_folder import first_today, make_room, siblings_of, watermark_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from quota.ledger.contract import ChargeResult, Identity, Ledger, LimitCheck
    from quota.ledger.entry import Entry, Id
    from quota.ledger.unlogged import UnloggedUsage
    from quota.limits import View
    from quota.recovery.loss import Loss, Usages

LOOK_EVERY_S = 0.05
"""A process looks at most so often at what the others of its machine have seen."""

STEP_MS, MAX_STEPS = 100, 1_024
"""A process remembers the newest entry as it was so often, and at most so many times."""

NO_EPOCH = "?"
"""No ledger has this epoch, so one that is expected to have it is behind."""

TIDY_EVERY_MS = 600_000
"""So often what has expired is forgotten."""

PIECE = 250
"""So many entries of the log are read at once after a decision."""

LAST_PIECE = 1_000
"""So many when the process gives up its ledger."""

READ_SHARE = 0.1
"""While there is more to be read, reading takes no more than about this part of the time."""

READ_AGAIN_S = 60.0
"""A ledger that could not be read is asked so much later."""

END_WITHIN_S = 0.05
"""So long it waits for these, of all its projects together."""

FRESH_S = 5.0
"""The log is read only so shortly after a decision: later another log may lie in its place."""

CARRY_EVERY_S = 60.0
"""A process looks at most so often at what the others have seen of other logs, and at other configurations' files."""

_HANDLES = frozenset(
    (
        "path",
        "_project",
        "_configuration",
        "_file",
        "_writable_file",
        "_is_unmade",
        "_said_full",
        "_lock",
        "_started",
        "_changing",
        "_reading",
        "_deferred",
    )
)
"""Attributes of a HighWaterMark that are not knowledge: `_change` does not restore them."""


class _Unread(NamedTuple):
    """What of the log is in no slice of a view yet: after an entry, up to the end of a slice."""

    view: View
    known: SlicedUsage | None
    after: Id
    end_ms: int


class HighWaterMark:
    """What one process knows of one project's ledger. Safe to share between threads and after a fork.

    `open_high_water_mark` makes it, one for each file in a process. Without a path it is kept in memory only. `label`
    says where the ledger is, and `configuration` whose it is, for people and for other processes.
    """

    def __init__(self, path: str | None, project: str, *, label: str = "", configuration: str = "") -> None:
        self.path = path
        self._project = project
        self._label = one_line(label)
        self._configuration = one_line(configuration)
        self._file: WatermarkFile | None = None
        self._writable_file: WatermarkFile | None = None  # the same, if one of its slots is ours
        self._is_unmade = False  # this machine saw nothing of the project yet: the file is made to be written
        self._said_full = False
        self._glanced: Watermark | None = None  # all that this machine had seen, at a first glance
        self._start_process()
        start_over_in_child(self)

    def _start_process(self) -> None:
        """Begin as a new process."""
        self._lock = threading.RLock()
        self._started = False
        # Who holds the lock and finds this True is a signal handler, in the middle of its own thread's change.
        self._changing = False
        # Somebody reads a piece of the log, and holds no lock meanwhile.
        self._reading = False
        # What the decisions of such handlers showed; recorded once the change is over.
        self._deferred: list[tuple[Sequence[LimitCheck], ChargeResult]] = []
        self._start_afresh()

    def start_over_in_child(self) -> None:
        """A forked child must not write its parent's slot: it claims one of its own."""
        self._start_process()

    def _start_afresh(self) -> None:
        """Forget everything."""
        # Other logs that this machine saw, kept for the day on which one of them comes back.
        self._other_observations: set[ViewObservation] = set()
        self._other_losses: Usages = {}
        # What others saw of other logs: whether this ledger lacks a carry, and what was looked at last.
        self._lacks_carry = False
        self._other_logs_tag = 0
        self._next_carry_s = 0.0
        # Other configurations for the same project.
        self._siblings: tuple[Watermark, ...] = ()
        self._next_siblings_s = 0.0
        self._start_epoch("")

    def _start_epoch(self, epoch: str) -> None:
        """Forget everything about this log; from now on the ledger is in this epoch."""
        self._epoch = epoch
        self._epoch_tag = epoch_tag(epoch)
        self._seen_at = self._label
        # The last decision: what it checked, what each view counted of the log, when, and the newest entry.
        self._checks: Sequence[LimitCheck] = ()
        self._logged_units: tuple[int, ...] = ()
        self._decided_ms = 0
        self._newest_id: Id = (0, 0)
        self._last_unlogged: tuple[tuple[UnloggedUsage, ...], ...] = ()
        self._trail: list[Id] = []  # the newest entry, time and again
        self._next_step_ms = 0  # when it is kept next
        # Everything else that is known.
        self._observations: dict[str, ViewObservation] = {}  # of views that the last decision did not check
        self._usages: Usages = {}  # that the ledger counts: what it lost, and carries
        self._sliced: dict[str, SlicedUsage] = {}  # by view
        self._next_slice_end_ms = NEVER  # an entry this new completes a slice
        self._next_read_s = 0.0  # until then nothing is read
        # The other processes of this machine.
        self._ids_of_others: tuple[Id, ...] = ()  # entries that they saw, until a decision of ours has shown as much
        self._outdated = False  # one of them saw the ledger in another epoch, later than we did and than:
        self._compared_ms = 0
        self._must_compare = False  # one of them saw this log in another epoch, before it went on to another log
        self._expected = NOTHING_EXPECTED
        self._next_look_s = 0.0  # until then `_expected` is the answer
        self._next_tidy_ms = 0  # until then a decision about the same views changes only the head of the slot

    # -- before a decision ---------------------------------------------------------------------------------------------

    def expected(self) -> Expected:
        """What the ledger must have: its epoch, and entries that this machine saw in it."""
        with self._lock:
            if not (self._changing or self.known()):
                if self._started:
                    self._change(self._look_and_set_expected)
                else:  # what a signal handler interrupts begins anew
                    self._changing = True
                    try:
                        self._look_and_set_expected()
                    finally:
                        self._changing = False
            return self._expected

    def glance(self) -> Expected:
        """The same for who only looks. Where all that this machine saw lies in one slot of one file, it is but read: no
        slot is claimed unless the answer shows more. So who looks at thousands of projects writes nothing."""
        with self._lock:
            if not (self._started or self._changing or self.path is None):
                siblings = siblings_of(self.path)
                slots = read_slots(self.path) if siblings == [] else []
                seen = Watermark.from_slot(*slots[0]) if len(slots) == 1 else None
                if seen is not None and seen.label == self._label and _is_plain(seen):
                    self._glanced = seen
                    return Expected(seen.epoch, (slots[0].head.newest,))
            return self.expected()

    def known(self) -> Expected | None:
        """The same without a look at the files; None where it is time for one."""
        return self._expected if time.monotonic() < self._next_look_s else None

    def _look_and_set_expected(self) -> None:
        begins = not self._started
        if begins:
            self._start()
            self._started = not self._is_unmade  # until there is something to write, each look begins anew
        self._look(begins=begins)
        self._set_expected()
        self._next_look_s = time.monotonic() + LOOK_EVERY_S

    def _start(self) -> None:
        """In a new process: claim a slot, and go on from what the processes of this machine have written."""
        file, self._file, self._writable_file = self._file, None, None
        if file is not None:  # its parent's in a forked child, or left by an interrupted start
            file.close()
        self._glanced = None
        self._start_afresh()
        if self.path is None:
            return
        self._is_unmade = not os.path.isdir(os.path.dirname(self.path))
        if not self._is_unmade:
            try:
                self._recall(self._claim(_opened(self.path)))
            except OSError as error:
                self._give_up(error)

    def _claim(self, file: WatermarkFile) -> int | None:
        """Go on with this file, and return which slot of it is ours."""
        self._file, self._is_unmade = file, False
        _close_others(self)
        if file.own_slot is not None:
            self._writable_file = file
        else:
            self._warn(f"more than {SLOTS} processes use it at once")
        return file.own_slot

    def _recall(self, own_slot: int | None) -> None:
        """Begin with the epoch that was seen last, at this place if it was seen here at all.

        What our own slot holds is nowhere else, so we take it over.
        """
        by_slot = self._read_slots()
        own, watermarks = None if own_slot is None else by_slot.get(own_slot), [*by_slot.values()]
        self._read_siblings()
        here = [watermark for watermark in watermarks if watermark.label == self._label]
        known = here or watermarks or [sibling for sibling in self._siblings if sibling.label == self._label]
        latest = max(known, key=lambda watermark: watermark.at_ms, default=None)
        if latest is None:
            return
        self._start_epoch(latest.epoch)
        self._seen_at = latest.label
        self._decided_ms = latest.at_ms
        same_log = [one for one in (*watermarks, *self._siblings) if one.root == latest.root]
        # Siblings may have read further, and know no more of what has expired since. What moves along is ours alone.
        self._sliced = furthest_slices(same_log if here else watermarks, latest.epoch)
        since_ms = latest.at_ms - RETENTION_SLACK_MS
        for watermark in same_log:
            # A later report says what survived its loss, which only its own observations hold.
            if watermark.epoch == latest.epoch or watermark.at_ms <= latest.at_ms:
                for usage in watermark.counted():
                    if usage.until_ms > since_ms:
                        merge(self._usages, usage, latest.at_ms)
            if watermark.epoch == latest.epoch:
                logged = _logged(watermark, since_ms)
                self._ids_of_others += tuple({observation.last for observation in logged})
                if watermark is own:
                    self._observations = {observation.view: observation for observation in logged}
                    self._newest_id = max((observation.last for observation in logged), default=(0, 0))
        if own is not None:
            self._take_over(own, since_ms)
        if any(watermark.root != latest.root for watermark in watermarks):
            self._find_carries(watermarks)
        self._say_two_ledgers()

    def _take_over(self, own: Watermark, since_ms: int) -> None:
        """Keep what our slot holds of other logs. Carries among it are in the ledger, or `_find_carries` finds them."""
        root = root_of(self._epoch)
        for observation in own.observations:
            if observation.until_ms > since_ms and root_of(observation.epoch) != root:
                with_its = furthest_slices([own], own.epoch) if observation.epoch == own.epoch else {}
                self._other_observations.add(with_slices(observation, with_its))
        for usage in own.usages:
            if usage.until_ms > since_ms and not is_carry(usage.epoch) and root_of(usage.epoch) != root:
                merge(self._other_losses, usage, self._decided_ms)

    def _look(self, *, begins: bool) -> None:
        """Find out what the other processes of this machine have seen. `begins`: all of it was read just now."""
        if self._file is None:
            return
        try:
            if not (self._epoch or begins):
                self._recall(None)
            others = self._file.newest_of_others(self._epoch_tag)
        except OSError as error:
            self._give_up(error)
            return
        newest, other_epoch_ms, now_s = others.newest, others.other_epoch_ms, time.monotonic()
        if now_s >= self._next_siblings_s:
            self._read_siblings()
            self._say_two_ledgers()
        for sibling in self._siblings:
            if sibling.epoch == self._epoch:
                newest = max(newest, *(observation.last for observation in _logged(sibling, 0)), (0, 0))
            elif sibling.root == root_of(self._epoch):
                other_epoch_ms = max(other_epoch_ms, sibling.at_ms)
        if newest > self._newest_id and newest not in self._ids_of_others:
            self._ids_of_others += (newest,)
        self._outdated = other_epoch_ms > max(self._decided_ms, self._compared_ms)
        if others.other_logs_tag != self._other_logs_tag and now_s >= self._next_carry_s:
            self._other_logs_tag = others.other_logs_tag
            self._find_carries(self._read_watermarks())

    def _find_carries(self, watermarks: Sequence[Watermark]) -> None:
        """Find out whether processes of this machine saw anything of other logs that this ledger does not count."""
        self._next_carry_s = time.monotonic() + CARRY_EVERY_S
        root, since_ms = root_of(self._epoch), self._decided_ms - RETENTION_SLACK_MS
        counted = self._usages.copy()
        for watermark in watermarks:
            if watermark.root == root:
                for usage in watermark.counted():
                    merge(counted, usage, self._decided_ms)
        found = carries(watermarks, root, since_ms).usages
        self._lacks_carry = self._lacks_carry or bool(not_counted(found, counted, self._decided_ms))
        # What they saw of this log before they went on to another, or were told of it there.
        known = {told for one in watermarks if one.root != root for told in one.told_of(root, since_ms)}
        self._must_compare = self._must_compare or any(epoch != self._epoch for epoch, _ in known)
        self._ids_of_others = tuple({*self._ids_of_others, *(last for epoch, last in known if epoch == self._epoch)})

    def _set_expected(self) -> None:
        """Work out what `expected` answers from now on."""
        ids = (*self._ids_of_others, self._newest_id) if self._checks or self._observations else self._ids_of_others
        # When outdated: an old copy may have been put back that holds all that this process saw, but not what others
        # saw since. An epoch that no ledger has makes it compare everything, or carry over what is lacking.
        if self._outdated or self._must_compare or self._lacks_carry:
            self._expected = Expected(NO_EPOCH, ids)
        else:
            self._expected = Expected(self._epoch, ids) if self._epoch else NOTHING_EXPECTED

    # -- after a decision ----------------------------------------------------------------------------------------------

    def record(self, checks: Sequence[LimitCheck], result: ChargeResult) -> bool:
        """Keep what a decision showed. Returns whether more is to be done: then do `follow_up`."""
        with self._lock:
            if self._changing:
                self._deferred.append((checks, result))
                return False
            if not self._record_head(checks, result):
                self._change(partial(self._record_all, checks, result))
            if self._deferred:
                self.record(*self._deferred.pop(0))
            return self._lacks_carry or self._must_read() or self._is_too_late(result)

    def record_at_once(self, checks: Sequence[LimitCheck], result: ChargeResult) -> bool | None:
        """The same where it takes some microseconds; None where it takes longer: then call `record`. An event loop may
        call it: it waits for nobody who reads files."""
        if self._changing or not self._lock.acquire(False):
            return None
        try:
            if self._glanced is not None and not self._started and _shows_no_more(self._glanced, checks, result):
                return False
            if self._changing or not self._record_head(checks, result) or self._deferred:
                return None
            return self._lacks_carry or (self._newest_id[0] >= self._next_slice_end_ms and self._must_read())
        finally:
            self._lock.release()

    def _record_head(self, checks: Sequence[LimitCheck], result: ChargeResult) -> bool:
        """Most decisions are about the same views as the one before: only the numbers in the head change. False where
        more does."""
        now_ms, last, units, epoch = result.now_ms, result.last, result.used_units, result.epoch
        if (
            not self._started  # closed meanwhile
            or epoch != self._epoch
            or result.unlogged != self._last_unlogged
            or now_ms >= self._next_tidy_ms
            or (checks is not self._checks and not _same_views(checks, self._checks))
        ):
            return False
        if last < self._newest_id:  # another thread has seen more
            return True
        if result.unlogged:
            units = _without_unlogged(result)
        try:
            self._changing = True
            self._newest_id, self._logged_units, self._decided_ms = last, units, now_ms
            if last[0] >= self._next_step_ms:
                self._step(last)
            self._ids_of_others = ()
            self._expected = Expected(epoch, (last,))
            if self._writable_file is not None:
                self._writable_file.write_head(last, now_ms, units)
        except OSError as error:
            self._give_up(error)
        finally:
            self._changing = False
        return True

    def _step(self, newest: Id) -> None:
        """Keep this entry on the trail. Of a long one the older half loses every other entry: it only gets coarser."""
        if len(self._trail) >= MAX_STEPS:
            self._trail[: MAX_STEPS // 2] = self._trail[: MAX_STEPS // 2 : 2]
        self._trail.append(newest)
        self._next_step_ms = newest[0] + STEP_MS

    def _record_all(self, checks: Sequence[LimitCheck], result: ChargeResult) -> None:
        """More has changed than the numbers: write the slot anew."""
        if not result.epoch:
            return
        if not self._started:
            if not self._is_unmade:  # else there was nothing to be read just now
                self._start()
            self._started = True
        if result.epoch != self._epoch:
            if self._checks or self._observations:
                return  # decided before another thread restored what was missing
            self._start_epoch(result.epoch)
        if result.last >= self._newest_id:
            self._keep_last_observations(checks, result.now_ms)
            self._keep_usages(checks, result)
            self._last_unlogged = result.unlogged
            self._newest_id, self._logged_units = result.last, _without_unlogged(result)
            if result.last[0] >= self._next_step_ms:
                self._step(result.last)
            self._decided_ms, self._seen_at = result.now_ms, self._label
            self._write()
        self._ids_of_others = ()
        self._next_slice_end_ms = self._earliest_slice_end_ms()
        self._set_expected()

    def _keep_usages(self, checks: Sequence[LimitCheck], result: ChargeResult) -> None:
        """Keep what the ledger counts of what it lacks: our own reports and those of others.

        A carry begins no new epoch. So a copy that is put back may lack one although it has all else: that shows here.
        """
        counted = {(usage.view, usage.epoch): usage for of_view in result.unlogged for usage in of_view}
        views = {check.view.name for check in checks}
        carried = {key: u for key, u in self._usages.items() if key[0] in views and is_carry(u.epoch)}
        lacking = not_counted(carried, counted, result.now_ms)
        loss = largest(lacking, lacking, result.now_ms)
        if loss is not None:
            self._lacks_carry = True
            self._say_behind(loss)
        self._usages |= counted
        for usage in lacking:
            merge(self._usages, usage, result.now_ms)

    def _keep_last_observations(self, checks: Sequence[LimitCheck], now_ms: int) -> None:
        """Keep what the last decision showed beside the next one, which checks other views. Forget what has expired."""
        self._observations.update((observation.view, observation) for observation in self._last_observations())
        for check in checks:
            self._observations.pop(check.view.name, None)
        self._checks = checks
        if now_ms >= self._next_tidy_ms:
            self._next_tidy_ms = now_ms + TIDY_EVERY_MS
            since_ms = now_ms - RETENTION_SLACK_MS
            live = {view: o for view, o in self._observations.items() if o.until_ms > since_ms and o.units > 0}
            self._observations = live
            self._other_observations = {o for o in self._other_observations if o.until_ms > since_ms}
            self._other_losses = {key: u for key, u in self._other_losses.items() if u.until_ms > since_ms}
            self._usages = {key: usage for key, usage in self._usages.items() if usage.until_ms > since_ms}
            views = {*self._observations, *(check.view.name for check in checks)}
            self._sliced = {view: sliced for view, sliced in self._sliced.items() if view in views}

    # -- the log, slice by slice ---------------------------------------------------------------------------------------

    def follow_up(self, ledger: Ledger, result: ChargeResult, new_epoch: str, retention_ms: int) -> bool:
        """Hand the ledger a carry that it lacks, or else read on. If it does not answer, try again: the carry with the
        next decision, the log in a minute. The arguments are as in `restore_missing`.

        Returns whether the decision must be made again: a carry was handed over, and it was made without that; or what
        was missing has been restored since, and that without this charge.
        """
        carried = False
        with self._lock:
            if self._is_too_late(result):
                return True
            if not self._changing and self._lacks_carry and result.epoch == self._epoch:
                with contextlib.suppress(LedgerError, SeenAheadError):
                    watermarks = self._all_that_was_seen(ledger, result)
                    self._change(partial(self._carry_over, ledger, result, new_epoch, retention_ms, watermarks))
                    carried = True
        if not carried:
            self._reading_on(ledger, PIECE)
        return carried

    def _is_too_late(self, result: ChargeResult) -> bool:
        """Whether a charge was made before another task restored what was missing, and may itself be missing."""
        return result.id is not None and result.epoch not in ("", self._epoch)

    def _must_read(self) -> bool:
        """Whether a slice is over that was not read yet, and it is time to do so."""
        return self._newest_id[0] >= self._next_slice_end_ms and time.monotonic() >= self._next_read_s

    def end(self, ledger: Ledger, within_s: float = END_WITHIN_S) -> None:
        """Read a last piece of the log, if the ledger answers in time: this process is about to give it up."""
        if time.monotonic() < self._next_look_s + FRESH_S:
            self._next_read_s = 0.0
            self._reading_on(ledger, LAST_PIECE, within_s)

    def _reading_on(self, ledger: Ledger, count: int, within_s: float | None = None) -> None:
        """Read a piece of the slices that are over, for all views of the last decision at once, and keep their sums.

        Nobody waits for it: no lock is held meanwhile.
        """
        with self._lock:
            if self._changing or self._reading or not self._must_read():
                return
            epoch, unread = self._epoch, self._unread()
            self._next_read_s = time.monotonic() + READ_AGAIN_S
        after = min((one.after for one in unread), default=(0, 0))
        until_ms = max((one.end_ms for one in unread), default=0)
        started_s = time.monotonic()
        try:
            self._reading = True
            nothing = after >= (until_ms, NEVER)
            of_the_log = self._project, after, until_ms, count, within_s
            entries: Sequence[Entry] = [] if nothing else ledger.read(*of_the_log)
        except LedgerError:
            return
        finally:
            self._reading = False
        with self._lock:
            if not self._changing and self._epoch == epoch:
                more = len(entries) == count
                self._change(partial(self._keep_slices, unread, entries, more=more))
                now_s = time.monotonic()
                self._next_read_s = now_s + (now_s - started_s) / READ_SHARE if more else 0.0

    def _unread(self) -> list[_Unread]:
        """For each view of the last decision that has slices which are over and not read: from where to where to read.
        The last one ends before the newest entry, so no charge is added to it any more.
        """
        found = []
        for view in dict.fromkeys(check.view for check in self._checks):
            if self._newest_id[0] >= next_slice_end_ms(view, self._sliced):
                slice_ms = slice_ms_of(view.window.longest_ms)
                end_ms = (self._newest_id[0] - 1) // slice_ms * slice_ms
                since_ms = (self._decided_ms - view.window.longest_ms) // slice_ms * slice_ms
                known = self._sliced.get(view.name)
                after = max((max(since_ms, 0), NEVER), (0, 0) if known is None else known.through)
                found.append(_Unread(view, known, after, end_ms))
        return found

    def _keep_slices(self, unread: Sequence[_Unread], entries: Sequence[Entry], *, more: bool) -> None:
        read_through = (entries[-1].ms, entries[-1].seq) if more else (NEVER, NEVER)
        for view, known, after, end_ms in unread:
            if self._sliced.get(view.name) is known:  # else another thread has read more
                through = min(max(after, read_through), (end_ms, NEVER))
                live = [] if known is None else [part for part in known.expiries if part[1] > self._decided_ms]
                self._sliced[view.name] = SlicedUsage(through, with_entries(live, view, entries, after, through))
        self._next_slice_end_ms = self._earliest_slice_end_ms()
        self._write()

    def _earliest_slice_end_ms(self) -> int:
        """How new an entry must be to complete a slice of any view that the last decision checked."""
        return min((next_slice_end_ms(check.view, self._sliced) for check in self._checks), default=NEVER)

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
            if self._changing:
                raise LedgerError(f"ledger {ledger.label} has lost charges, and a signal handler cannot restore them")
            if self._expected.epoch not in (expected.epoch, NO_EPOCH):
                return
            self._change(partial(self._restore_missing, ledger, result, new_epoch, retention_ms))

    def _restore_missing(self, ledger: Ledger, result: ChargeResult, new_epoch: str, retention_ms: int) -> None:
        watermarks = self._all_that_was_seen(ledger, result)
        self._label = one_line(ledger.label)
        root = root_of(result.epoch)
        told: Usages = {}
        for watermark in watermarks:
            if watermark.root == root:
                for usage in watermark.counted():
                    merge(told, usage, result.now_ms)
        only_carry = self._lacks_carry and not (self._outdated or self._must_compare)
        if only_carry and result.epoch == self._epoch:
            self._carry_over(ledger, result, new_epoch, retention_ms, watermarks)
        else:
            self._compare(ledger, result, new_epoch, retention_ms, watermarks)
        self._say_carried(ledger, result, carries(watermarks, root, 0).labels, told)

    def _all_that_was_seen(self, ledger: Ledger, result: ChargeResult) -> list[Watermark]:
        """What all processes of this machine saw, this one last, as it is since the ledger's last repair."""
        from quota.recovery.repaired import as_repaired, concerns  # late: a decision that loses nothing needs neither

        watermarks: list[Watermark] = [*self._read_watermarks(), self._watermark(*self._last_observations())]
        if concerns((*watermarks, *self._siblings), result.epoch, result.now_ms):
            since = ledger.repairs(self._project), result.epoch, result.last, result.now_ms
            watermarks, self._siblings = as_repaired(watermarks, *since), tuple(as_repaired(self._siblings, *since))
        return watermarks

    def _carry_over(
        self,
        ledger: Ledger,
        result: ChargeResult,
        new_epoch: str,
        retention_ms: int,
        watermarks: Sequence[Watermark],
    ) -> None:
        """Hand the ledger what counts of other logs. What it has itself lost shows in the next request."""
        root, since_ms = root_of(result.epoch), result.now_ms - RETENTION_SLACK_MS
        renamed = renamed_log(ledger, self._project, root, result.last, watermarks)
        found = carries(watermarks, root, since_ms, renamed).usages
        if found:
            ledger.add_unlogged(self._project, new_epoch, list(found.values()), retention_ms)
        for usage in found.values():
            merge(self._usages, usage, result.now_ms)
        self._lacks_carry = False
        self._write()
        self._set_expected()

    def _compare(
        self,
        ledger: Ledger,
        result: ChargeResult,
        new_epoch: str,
        retention_ms: int,
        watermarks: Sequence[Watermark],
    ) -> None:
        """Compare all that is known with the log, and begin anew with what it has."""
        now_ms, root = result.now_ms, root_of(result.epoch)
        siblings = [_of_its_own_log(sibling) for sibling in self._siblings if sibling.root == root]
        everything = [*watermarks, *siblings]
        found = compare(ledger, self._project, result.epoch, result.last, now_ms, everything)
        epoch = result.epoch
        if found.usages:
            epoch = ledger.add_unlogged(self._project, new_epoch, list(found.usages.values()), retention_ms)
        self._start_epoch(epoch)
        self._lacks_carry = False
        self._usages = found.usages
        self._other_observations, self._other_losses = found.other_observations, found.other_losses
        for logged in sorted(found.still_logged, key=_last):
            if logged.units > 0:
                self._observations[logged.view] = logged._replace(epoch=epoch)
                self._newest_id = max(self._newest_id, logged.last)
        self._decided_ms = now_ms
        self._compared_ms = max(watermark.at_ms for watermark in everything)
        self._write(clear=True)
        self._set_expected()
        loss = found.largest_loss(now_ms)
        if loss is not None:
            self._say_behind(loss)

    def _say_behind(self, loss: Loss) -> None:
        warn(
            "ledger_behind project=%s ledger=%s lost_units=%d until=%s: charges that this machine saw are missing "
            "there (emptied? restored from an old copy?); they still count until they would have expired",
            self._project,
            self._label,
            loss.units,
            rfc3339(loss.until_ms),
        )

    def _say_carried(self, ledger: Ledger, result: ChargeResult, labels: dict[str, str], told: Usages) -> None:
        """Say what counts on that was seen in other logs, if the ledger was not told of it before."""
        carried = {key: usage for key, usage in self._usages.items() if is_carry(usage.epoch)}
        news = not_counted(carried, told, result.now_ms)
        for label in sorted({labels.get(root_of(usage.epoch), "") for usage in news}):
            of_label = [usage for usage in news if labels.get(root_of(usage.epoch), "") == label]
            loss = largest(of_label, of_label, result.now_ms)
            if loss is None or loss.units == 0:
                continue
            if label in ("", self._label):
                self._say_behind(loss)
                continue
            warn(
                "ledger_moved project=%s from=%s to=%s carried=%d until=%s: what this machine saw there counts on here "
                "until it would have expired; if these are two upstream projects, give each its own `project` name",
                self._project,
                quoted(label),
                quoted(self._label),
                loss.units,
                rfc3339(loss.until_ms),
            )

    # -- what is stored ------------------------------------------------------------------------------------------------

    def _write(self, *, clear: bool = False) -> None:
        """Write all that is known. `clear`: our slot now holds what ended processes knew, so empty theirs."""
        if self._is_unmade and self.path is not None:
            try:
                self._claim(_made(self.path))
            except OSError as error:
                self._give_up(error)
        if self._writable_file is None:
            return
        watermark = self._watermark()
        text = watermark.to_text([(check.view.name, span_of(check)) for check in self._checks])
        try:
            lines = self._writable_file.write(
                self._newest_id, self._epoch_tag, self._decided_ms, self._logged_units, text
            )
            if clear:
                self._writable_file.clear_abandoned()
        except OSError as error:
            self._give_up(error)
            return
        # The lines of slices come last and may be missing.
        needed = 1 + len(self._checks) + len(watermark.observations) + len(watermark.usages)
        if lines < needed and not self._said_full:
            self._said_full = True
            warn(
                "memory_full path=%s: there is no room for what was seen of %d limits; use fewer, or shorter names",
                self.path,
                needed - lines,
            )

    def _watermark(self, *more: ViewObservation) -> Watermark:
        """All that is known, without what the last decision showed, and with `more`."""
        observations = (*more, *self._observations.values(), *self._other_observations)
        usages = (*self._usages.values(), *self._other_losses.values())
        return Watermark(
            self._epoch,
            self._decided_ms,
            observations,
            usages,
            self._sliced,
            self._seen_at,
            self._configuration,
            tuple(self._trail),
        )

    def _last_observations(self) -> list[ViewObservation]:
        """What the last decision showed of each view."""
        return [
            observation_of(check.view.name, span_of(check), self._epoch, units, self._newest_id, self._decided_ms)
            for check, units in zip(self._checks, self._logged_units, strict=False)
        ]

    def _read_watermarks(self) -> list[Watermark]:
        return [*self._read_slots().values()]

    def _read_slots(self) -> dict[int, Watermark]:
        """What the processes of this machine saw, by slot."""
        if self._file is None:
            return {}
        try:
            slots = self._file.read_all().items()
        except OSError as error:
            self._give_up(error)
            return {}
        return {slot: known for slot, found in slots if (known := Watermark.from_slot(*found)) is not None}

    def _read_siblings(self) -> None:
        """Read what other configurations of this machine saw of the same upstream project. Where it is of the same log,
        it is as good as our own."""
        self._next_siblings_s = time.monotonic() + CARRY_EVERY_S
        if self.path is None:
            return
        slots = [slot for path in siblings_of(self.path) or () for slot in read_slots(path)]
        self._siblings = tuple(found for found in (Watermark.from_slot(*slot) for slot in slots) if found is not None)

    def _say_two_ledgers(self) -> None:
        """Where another configuration saw another log that still counts, say so: nothing is joined then."""
        apart = [one for one in self._siblings if one.label != self._label and self._counts_apart(one)]
        if apart and self._epoch and self.path is not None and first_today(self.path):
            other = max(apart, key=lambda watermark: watermark.at_ms)
            warn(
                "two_ledgers project=%s ledger=%s other=%s: %s and %s count one project apart, and upstream sees the "
                "sum; give both the same url, or, if these are two upstream projects, each its own `project` name",
                self._project,
                quoted(self._label),
                quoted(other.label),
                self._configuration,
                other.configuration,
            )

    def _counts_apart(self, other: Watermark) -> bool:
        """Whether a process of another configuration saw units of another log that still count."""
        now_ms = max(other.at_ms, self._decided_ms)
        seen = (o for o in other.observations if o.epoch == other.epoch)
        return other.root != root_of(self._epoch) and any(o.units > 0 and o.until_ms > now_ms for o in seen)

    def _give_up(self, error: OSError) -> None:
        """The file cannot be used. From now on this process remembers only what it sees itself."""
        if error.errno is None:  # not the system's: the TimeoutError of a signal handler
            raise error
        self._warn(error.strerror or error)
        self._is_unmade = False
        file, self._file, self._writable_file = self._file, None, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _warn(self, why: object) -> None:
        warn("memory_unusable path=%s: %s; what this process sees of its ledger is lost when it ends", self.path, why)

    def close_if_idle(self) -> bool:
        """`close`, but not in the middle of what another thread does, or of what a signal handler interrupted."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if not self._changing:
                self.close()
            return not self._changing
        finally:
            self._lock.release()

    def close(self) -> None:
        """Give the slot back; its content stays. A later decision claims one again."""
        with self._lock:
            file, self._file, self._writable_file = self._file, None, None
            if file is not None:
                file.close()
            self._started = False
            self._next_look_s = 0.0

    # -- signal handlers -----------------------------------------------------------------------------------------------

    def _change(self, work: Callable[[], object]) -> None:
        """Do all of `work`, or nothing of it if a signal handler raises in the middle."""
        before = {
            name: value.copy() if type(value) is dict or type(value) is set else value
            for name, value in vars(self).items()
            if name not in _HANDLES
        }
        try:
            self._changing = True
            work()
        except BaseException:
            vars(self).update(before)
            raise
        finally:
            self._changing = False


def _opened(path: str) -> WatermarkFile:
    """The file, made if it is not there. Raises OSError."""
    try:
        return WatermarkFile(path)
    except FileNotFoundError:
        return _made(path)


def _made(path: str) -> WatermarkFile:
    """A new file. Raises OSError."""
    make_room(path)
    return WatermarkFile(path, make=True)


def _same_views(checks: Sequence[LimitCheck], others: Sequence[LimitCheck]) -> bool:
    """Whether two decisions check the same views. These and their edges are made once and used often."""
    if len(checks) != len(others):
        return False
    for check, other in zip(checks, others, strict=True):  # half the time of `all` and a generator
        if check.view is not other.view or check.edges is not other.edges:
            return False
    return True


def _is_plain(seen: Watermark) -> bool:
    """Whether a slot has nothing but the last decision about a ledger, all of which may still count."""
    observations = seen.observations
    return (
        bool(observations)
        and not seen.usages
        and len(_logged(seen, seen.at_ms - RETENTION_SLACK_MS)) == len(observations)
    )


def _shows_no_more(seen: Watermark, checks: Sequence[LimitCheck], result: ChargeResult) -> bool:
    """Whether an answer is what was seen already, with all of its slices read."""
    if result.epoch != seen.epoch or result.unlogged or len(checks) != len(seen.observations):
        return False
    for check, units, known in zip(checks, result.used_units, seen.observations, strict=True):
        now = observation_of(check.view.name, span_of(check), result.epoch, units, result.last, seen.at_ms)
        if now != known or result.last[0] >= next_slice_end_ms(check.view, seen.sliced):
            return False
    return True


def _logged(watermark: Watermark, since_ms: int) -> list[ViewObservation]:
    """What a process observed of the log that it saw last, and may still count."""
    return [o for o in watermark.observations if o.epoch == watermark.epoch and o.until_ms > since_ms]


def _of_its_own_log(watermark: Watermark) -> Watermark:
    """Without what it knows of other logs, except for what its ledger counts of them."""
    return watermark._replace(observations=tuple(_logged(watermark, 0)), usages=tuple(watermark.counted()))


def _last(observation: ViewObservation) -> Id:
    return observation.last


def _without_unlogged(result: ChargeResult) -> tuple[int, ...]:
    """What each view counts of the log alone."""
    if not result.unlogged:
        return result.used_units
    pairs = zip(result.used_units, result.unlogged, strict=True)
    return tuple(max(0, units - sum(u.units_at(result.now_ms) for u in usages)) for units, usages in pairs)


# -- one for each file of a process ------------------------------------------------------------------------------------

_open: dict[str, tuple[HighWaterMark, int]] = {}
_open_lock = threading.RLock()  # a signal handler may open a session while its thread does

MAX_FILES = 100
"""So many of their files are open in a process. It may use thousands of projects; some systems allow it 256 files."""

_with_file: dict[HighWaterMark, None] = {}
"""The high-water marks whose file is open, in the order in which they were opened."""


def _close_others(opened: HighWaterMark) -> None:
    """Where too many files are open, close those that were opened first, as if their processes had ended. The next
    decision about their projects opens them again."""
    with _open_lock:
        if opened.path not in _open or _open[opened.path][0] is not opened:
            return
        _with_file.pop(opened, None)
        _with_file[opened] = None
        for other in list(islice(_with_file, max(0, len(_with_file) - MAX_FILES))):
            if other.close_if_idle():
                del _with_file[other]


def open_high_water_mark(folder: Path, identity: Identity, label: str) -> HighWaterMark:
    """The high-water mark of an identity in a state folder, whose ledger is at `label`. All of this process that ask
    for it share it. Give it back with `close_high_water_mark`."""
    path = watermark_path(folder, identity)
    with _open_lock:
        high_water_mark, users = _open.get(path) or (
            HighWaterMark(path, identity.project, label=label, configuration=identity.ledger),
            0,
        )
        _open[path] = high_water_mark, users + 1
        return high_water_mark


def end_all(high_water_marks: Iterable[HighWaterMark], ledger: Ledger) -> None:
    """`end` each of one ledger, all within END_WITHIN_S. What is not read by then, a later decision reads: its process
    goes on from the slices that this one wrote."""
    ends_s = time.monotonic() + END_WITHIN_S
    for high_water_mark in high_water_marks:
        left_s = ends_s - time.monotonic()
        if left_s <= 0:
            return
        high_water_mark.end(ledger, left_s)


def close_high_water_mark(high_water_mark: HighWaterMark) -> None:
    """Give back what `open_high_water_mark` gave; the last one to do so frees its slot."""
    with _open_lock:
        if high_water_mark.path not in _open:
            return
        _, users = _open[high_water_mark.path]
        if users > 1:
            _open[high_water_mark.path] = high_water_mark, users - 1
            return
        del _open[high_water_mark.path]
        _with_file.pop(high_water_mark, None)
    high_water_mark.close()
