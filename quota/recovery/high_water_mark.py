"""What this machine has seen of a project's ledger, so that a ledger that loses it gives no budget back.

A server may be flushed, restarted without its data, restored from an old copy, replaced by a replica that lagged; a
ledger file may be deleted. Each process notes, after each decision, what that showed: the ledger's epoch, its newest
entry, and how much each view counted. Before each decision it says which entries must be there. A ledger that has
another epoch, or lacks one of them, answers "behind":

    lost      what a view counted when last seen, less what the log still has of that: the newest of it
    carry     the ledger adds that to the view, part by part, until it would have expired, and begins a new epoch

How much expires when is known to an hour for a window of a day: the units in each such *cell* of time are read from the
log, once, when it is over, and noted too. Of what is newer only the sum is known, and expires with its newest entry.

Every process has a slot of its own in one file (quota.recovery.watermark_file), so that what a killed process saw is
known to the next, and each looks at what the others of its machine saw last. Writing a slot costs some microseconds and
waits for nothing; a crash of the whole machine may lose the last of it. Without a folder that can be written, a process
still remembers what it saw itself.

What cannot be known: charges that no machine which still asks has seen. They are at most what was spent between the
loss and the first decision of a machine that had seen more.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import zlib
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet

from quota.common.clock import NEVER, rfc3339
from quota.common.log import warn
from quota.errors import LedgerError
from quota.ledger.contract import NOTHING_EXPECTED, RETENTION_SLACK_MS, Expected, read_entries
from quota.recovery.loss import compare
from quota.recovery.observations import (
    SlicedUsage,
    ViewObservation,
    Watermark,
    furthest_slices,
    merge,
    next_slice_end_ms,
    observation_of,
    slice_ms_of,
    span_of,
)
from quota.recovery.watermark_file import SLOTS, WatermarkFile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from quota.ledger.contract import ChargeResult, Ledger, LimitCheck
    from quota.ledger.entry import Id
    from quota.ledger.unlogged import UnloggedUsage
    from quota.limits import View

LOOK_EVERY_S = 0.05
"""How often at most a process looks at what the others of its machine have seen."""

NO_EPOCH = "?"
"""The name of no epoch: whatever the ledger's is, it is behind."""

TIDY_EVERY_MS = 60_000

FOLDER = "watermarks"
"""Of the state folder: one file in it for each project of each ledger."""

FORMER_FOLDER = "seen"
"""What an older version wrote there is not read any more."""

FORGET_AFTER_DAYS = 400
"""A file that nobody has written for so long, longer than any window in use, is removed."""


_HANDLES = frozenset(
    ("path", "_project", "_file", "_writable_file", "_said_full", "_lock", "_started", "_changing", "_deferred")
)
"""What of a Memory is not what it knows."""


class HighWaterMark:
    """What one process knows of one project's ledger. Safe to share between threads and after a fork.

    `open_high_water_mark` makes it: there is one for each file in a process. Without a path it lasts as long as the
    process.
    """

    def __init__(self, path: str | None, project: str) -> None:
        self.path = path
        self._project = project
        self._file: WatermarkFile | None = None
        self._writable_file: WatermarkFile | None = None  # the same, where one of them is ours
        self._said_full = False
        self._start_process()
        _all.add(self)

    def _start_process(self) -> None:
        """As it is made, and again in a forked child: its parent's slot is not its own."""
        self._lock = threading.RLock()
        self._started = False
        self._changing = False  # by this thread, if it holds the lock: then a signal handler asks in the middle of that
        self._deferred: list[
            tuple[Sequence[LimitCheck], ChargeResult]
        ] = []  # what such handlers saw, noted once the change is over
        self._start_epoch("")

    def _start_epoch(self, epoch: str) -> None:
        """Nothing is known yet of the ledger in this epoch."""
        self._epoch = epoch
        self._epoch_tag = zlib.crc32(epoch.encode())
        self._newest_id: Id = (0, 0)
        self._checks: Sequence[LimitCheck] = ()  # of the last decision: what its units count
        self._logged_units: tuple[int, ...] = ()
        self._decided_ms = 0
        self._observations: dict[str, ViewObservation] = {}  # of views that it did not ask about
        self._lost_log_observations: set[ViewObservation] = set()  # of other logs
        self._usages: dict[tuple[str, str], UnloggedUsage] = {}
        self._last_unlogged: tuple[tuple[UnloggedUsage, ...], ...] = ()  # of these, what the last decision showed
        self._sliced: dict[str, SlicedUsage] = {}
        self._next_slice_end_ms = NEVER  # an entry this new ends a cell
        self._ids_of_others: tuple[
            Id, ...
        ] = ()  # what the machine's other processes saw, until the ledger has shown it
        self._expected = NOTHING_EXPECTED
        self._outdated = False  # another process has seen the ledger in another epoch since:
        self._compared_ms = 0  # later than this
        self._next_look_s = 0.0  # until then, `_expected` is the answer
        self._next_tidy_ms = 0  # until then, and after a decision noted whole, only the head changes

    # -- before a decision ---------------------------------------------------------------------------------------------

    def expected(self) -> Expected:
        """What the ledger must have."""
        if time.monotonic() < self._next_look_s:
            return self._expected
        with self._lock:
            if not self._changing:
                self._change(self._look_and_set_expected)
            return self._expected

    def _look_and_set_expected(self) -> None:
        if not self._started:
            self._start()
            self._started = True
        self._look()
        self._set_expected()
        self._next_look_s = time.monotonic() + LOOK_EVERY_S

    def _start(self) -> None:
        """In a new process: get a slot of its own, and go on from what this machine's processes have noted."""
        file, self._file, self._writable_file = self._file, None, None
        if file is not None:  # a forked child's parent's, or what an interrupted start has left
            file.close()
        self._start_epoch("")
        if self.path is not None:
            try:
                _make_room(self.path)
                self._file = WatermarkFile(self.path)
                if self._file.writable:
                    self._writable_file = self._file
                else:
                    self._warn(f"more than {SLOTS} processes use it at once")
                own = self._file.read_own()
                self._recall(own and Watermark.from_slot(*own))
            except OSError as error:
                self._give_up(error)

    def _recall(self, own: Watermark | None) -> None:
        """Begin with the epoch that was noted last. What stands in our own slot is only there: it goes on with us."""
        watermarks = self._read_watermarks()
        latest = max(watermarks, key=lambda watermark: watermark.at_ms, default=None)
        if latest is None:
            return
        self._start_epoch(latest.epoch)
        self._decided_ms = latest.at_ms
        self._sliced = furthest_slices(watermarks, latest.epoch)
        since_ms = latest.at_ms - RETENTION_SLACK_MS
        for watermark in watermarks:
            for usage in watermark.usages:
                if usage.until_ms > since_ms:
                    merge(self._usages, usage, latest.at_ms)
            if watermark.epoch == latest.epoch:
                live = [observation for observation in watermark.observations if observation.until_ms > since_ms]
                logged = [observation for observation in live if observation.epoch == watermark.epoch]
                self._ids_of_others += tuple({observation.last for observation in logged})
                self._lost_log_observations.update(set(live).difference(logged))
                if watermark == own:
                    self._observations = {observation.view: observation for observation in logged}
                    self._newest_id = max((observation.last for observation in logged), default=(0, 0))

    def _look(self) -> None:
        """See what the other processes of this machine have seen."""
        if self._file is None:
            return
        try:
            if not self._epoch:
                self._recall(None)
            newest, other_epoch_ms = self._file.newest_of_others(self._epoch_tag)
        except OSError as error:
            self._give_up(error)
            return
        if newest > self._newest_id and newest not in self._ids_of_others:
            self._ids_of_others += (newest,)
        self._outdated = other_epoch_ms > max(self._decided_ms, self._compared_ms)

    def _set_expected(self) -> None:
        """What `expected` answers from now on."""
        ids = (*self._ids_of_others, self._newest_id) if self._checks or self._observations else self._ids_of_others
        # What this process saw last may be just what an old copy has, put there since: then compare all that was seen.
        self._expected = Expected(NO_EPOCH if self._outdated else self._epoch, ids) if self._epoch else NOTHING_EXPECTED

    # -- after a decision ----------------------------------------------------------------------------------------------

    def record(self, checks: Sequence[LimitCheck], result: ChargeResult) -> bool:
        """Remember what a decision showed. Whether it is time to `read_log`."""
        _, _, now_ms, last, units, _, epoch, unlogged = result
        with self._lock:
            if self._changing:
                self._deferred.append((checks, result))
                return False
            other = epoch != self._epoch or unlogged != self._last_unlogged or not _same_views(checks, self._checks)
            if other or now_ms >= self._next_tidy_ms:
                self._change(partial(self._record_all, checks, result))
            elif last >= self._newest_id:  # else another thread has seen more
                if unlogged:
                    units = _without_unlogged(result)
                try:
                    self._changing = True
                    self._newest_id, self._logged_units, self._decided_ms = last, units, now_ms
                    self._ids_of_others = ()
                    self._expected = Expected(epoch, (last,))
                    if self._writable_file is not None:
                        self._writable_file.write_head(last, now_ms, units)
                except OSError as error:
                    self._give_up(error)
                finally:
                    self._changing = False
            if self._deferred:
                self.record(*self._deferred.pop(0))
            return self._newest_id[0] >= self._next_slice_end_ms

    def _record_all(self, checks: Sequence[LimitCheck], result: ChargeResult) -> None:
        """The same where more has changed than the numbers."""
        _, _, now_ms, last, _, _, epoch, unlogged = result
        if not epoch:
            return
        if epoch != self._epoch:
            if self._checks or self._observations:
                return  # decided before another thread made a loss good
            self._start_epoch(epoch)
        if last >= self._newest_id:
            self._keep_last_observations(checks, now_ms)
            # What the ledger says holds our own report and the others'.
            self._usages |= {(usage.view, usage.epoch): usage for of_view in unlogged for usage in of_view}
            self._last_unlogged = unlogged
            self._newest_id, self._logged_units, self._decided_ms = last, _without_unlogged(result), now_ms
            self._write()
        self._ids_of_others = ()
        self._next_slice_end_ms = self._earliest_slice_end_ms()
        self._set_expected()

    def _keep_last_observations(self, checks: Sequence[LimitCheck], now_ms: int) -> None:
        """Another question than the last: what that one showed is kept beside it; what has expired is forgotten."""
        self._observations.update((observation.view, observation) for observation in self._last_observations())
        for check in checks:
            self._observations.pop(check.view.name, None)
        self._checks = checks
        if now_ms >= self._next_tidy_ms:
            self._next_tidy_ms = now_ms + TIDY_EVERY_MS
            since_ms = now_ms - RETENTION_SLACK_MS
            self._observations = {v: r for v, r in self._observations.items() if r.until_ms > since_ms and r.units > 0}
            self._lost_log_observations = {
                observation for observation in self._lost_log_observations if observation.until_ms > since_ms
            }
            self._usages = {key: usage for key, usage in self._usages.items() if usage.until_ms > since_ms}
            views = {*self._observations, *(check.view.name for check in checks)}
            self._sliced = {view: sliced for view, sliced in self._sliced.items() if view in views}

    # -- the log, slice by slice ---------------------------------------------------------------------------------------

    def read_log(self, ledger: Ledger) -> None:
        """Note what is in the cells of time that are over. Where the ledger cannot answer, a minute later will do."""
        with self._lock:
            if not self._changing:
                self._change(partial(self._read_log, ledger))

    def _read_log(self, ledger: Ledger) -> None:
        self._next_slice_end_ms = self._newest_id[0] + TIDY_EVERY_MS
        for check in self._checks:
            if self._newest_id[0] >= next_slice_end_ms(check, self._sliced):
                try:
                    self._sliced[check.view.name] = self._read_slices(ledger, check.view)
                except LedgerError:
                    return
        self._next_slice_end_ms = self._earliest_slice_end_ms()
        self._write()

    def _read_slices(self, ledger: Ledger, view: View) -> SlicedUsage:
        """What is known of a view's cells and what is new. The last of them ends before the newest entry: nothing comes
        into it any more.
        """
        selector, window_ms = view.selector, view.window.longest_ms
        slice_ms = slice_ms_of(window_ms)
        end_ms = (self._newest_id[0] - 1) // slice_ms * slice_ms
        known = self._sliced.get(view.name, SlicedUsage(0, ()))
        first_ms = max(known.until_ms, (self._decided_ms - window_ms) // slice_ms * slice_ms)
        units: dict[int, int] = {}
        for entry in read_entries(ledger, self._project, first_ms + 1, end_ms):
            if selector.counts(entry.bucket, entry.method, entry.job):
                left_ms = -(-entry.ms // slice_ms) * slice_ms + window_ms
                units[left_ms] = units.get(left_ms, 0) + selector.cost(entry.units)
        live = [part for part in known.expiries if part[1] > self._decided_ms]
        return SlicedUsage(end_ms, (*live, *((n, left_ms) for left_ms, n in units.items() if n)))

    def _earliest_slice_end_ms(self) -> int:
        """How new an entry must be to end a cell of anything that was asked."""
        return min((next_slice_end_ms(check, self._sliced) for check in self._checks), default=NEVER)

    # -- after a loss --------------------------------------------------------------------------------------------------

    def restore_missing(self, ledger: Ledger, result: ChargeResult, new_epoch: str, retention_ms: int) -> None:
        """Tell a ledger that is behind what it has lost, as far as anybody on this machine has seen it. `retention_ms`
        as in a question.

        Raises LedgerError. May be repeated: the ledger merges reports of one loss.
        """
        with self._lock:
            if self._changing:
                raise LedgerError(f"ledger {ledger.label} has lost something, and a signal handler cannot make it good")
            self._change(partial(self._restore_missing, ledger, result, new_epoch, retention_ms))

    def _restore_missing(self, ledger: Ledger, result: ChargeResult, new_epoch: str, retention_ms: int) -> None:
        now_ms = result.now_ms
        watermarks = [*self._read_watermarks(), self._watermark(*self._last_observations())]
        found = compare(ledger, self._project, result.epoch, now_ms, watermarks)
        epoch = result.epoch
        if found.usages:
            epoch = ledger.add_unlogged(self._project, new_epoch, list(found.usages.values()), retention_ms)
        self._start_epoch(epoch)
        self._usages = found.usages
        self._lost_log_observations = found.lost_log_observations
        for logged in sorted(found.still_logged, key=_last):
            if logged.units > 0:
                self._observations[logged.view] = logged._replace(epoch=epoch)
                self._newest_id = max(self._newest_id, logged.last)
        self._decided_ms = now_ms
        self._compared_ms = max(watermark.at_ms for watermark in watermarks)
        self._write(clear=True)
        self._set_expected()
        loss = found.largest_loss(now_ms)
        if loss is not None:
            warn(
                "ledger_behind project=%s ledger=%s lost_units=%d until=%s: charges that this machine saw are missing "
                "there (emptied? restored from an old copy?); they count on until they would have expired",
                self._project,
                ledger.label,
                loss.units,
                rfc3339(loss.until_ms),
            )

    # -- what is stored ------------------------------------------------------------------------------------------------

    def _write(self, *, clear: bool = False) -> None:
        """Note all that is known. `clear`: what processes that are gone have noted stands in our slot now."""
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
        # Cells come last: without theirs, units only count longer.
        needed = 1 + len(self._checks) + len(watermark.observations) + len(watermark.usages)
        if lines < needed and not self._said_full:
            self._said_full = True
            warn(
                "memory_full path=%s: what was seen of %d limits does not fit; have fewer, or shorter names",
                self.path,
                needed - lines,
            )

    def _watermark(self, *asked: ViewObservation) -> Watermark:
        """What is known beside what was asked about last, or with it."""
        observations = (*asked, *self._observations.values(), *self._lost_log_observations)
        return Watermark(self._epoch, self._decided_ms, observations, tuple(self._usages.values()), self._sliced)

    def _last_observations(self) -> list[ViewObservation]:
        """What the last decision showed."""
        return [
            observation_of(check.view.name, span_of(check), self._epoch, units, self._newest_id, self._decided_ms)
            for check, units in zip(self._checks, self._logged_units, strict=False)
        ]

    def _read_watermarks(self) -> list[Watermark]:
        if self._file is None:
            return []
        try:
            return [
                watermark
                for watermark in (Watermark.from_slot(*found) for found in self._file.read_all())
                if watermark is not None
            ]
        except OSError as error:
            self._give_up(error)
            return []

    def _give_up(self, error: OSError) -> None:
        """The file cannot be used: from now on this process remembers for itself alone."""
        if error.errno is None:  # not the system's: the TimeoutError of a signal handler
            raise error
        self._warn(error.strerror or error)
        file, self._file, self._writable_file = self._file, None, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _warn(self, why: object) -> None:
        warn("memory_unusable path=%s: %s; what this process sees of its ledger ends with it", self.path, why)

    def close(self) -> None:
        """Give the slot back; what it holds stays. A later decision takes one again."""
        with self._lock:
            file, self._file, self._writable_file = self._file, None, None
            if file is not None:
                file.close()
            self._started = False
            self._next_look_s = 0.0

    # -- signal handlers -----------------------------------------------------------------------------------------------

    def _change(self, work: Callable[[], object]) -> None:
        """Do `work` whole, or, where a signal handler raises in the middle of it, nothing of it."""
        known = [(name, value) for name, value in vars(self).items() if name not in _HANDLES]
        before = {name: value.copy() if isinstance(value, (dict, set)) else value for name, value in known}
        try:
            self._changing = True
            work()
        except BaseException:
            vars(self).update(before)
            raise
        finally:
            self._changing = False


_all: WeakSet[HighWaterMark] = WeakSet()


def _after_fork() -> None:
    for high_water_mark in _all:
        high_water_mark._start_process()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _same_views(checks: Sequence[LimitCheck], others: Sequence[LimitCheck]) -> bool:
    """Whether two questions were about the same windows. Views and edges are made once and asked about often."""
    if checks is others:
        return True
    if len(checks) != len(others):
        return False
    for check, other in zip(checks, others, strict=True):  # half the time of `all` and a generator
        if check[0] is not other[0] or check[3] is not other[3]:
            return False
    return True


def _last(observation: ViewObservation) -> Id:
    return observation.last


def _without_unlogged(result: ChargeResult) -> tuple[int, ...]:
    """What the views count of the log alone."""
    if not result.unlogged:
        return result.used_units
    both = zip(result.used_units, result.unlogged, strict=True)
    return tuple(max(0, units - sum(c.units_at(result.now_ms) for c in usages)) for units, usages in both)


def _make_room(path: str) -> None:
    """Make the folder, and remove from it what nobody has used for longer than any window lasts."""
    if os.path.exists(path):
        return
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        from quota.common.folders import make_folder  # late: a machine needs it once

        make_folder(folder)
        former = os.path.join(os.path.dirname(folder), FORMER_FOLDER)
        if os.path.isdir(former):
            warn("memory_unusable path=%s: an older quota-ledger wrote it, and this one begins anew; delete it", former)
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # another process is as tidy
            if time.time() - entry.stat().st_mtime > FORGET_AFTER_DAYS * 86_400:
                os.unlink(entry.path)


# -- one memory for each file ------------------------------------------------------------------------------------------

_open: dict[str, tuple[HighWaterMark, int]] = {}
_open_lock = threading.RLock()  # a signal handler may open a session while its thread does


def open_high_water_mark(path: str, project: str) -> HighWaterMark:
    """The memory in this file, shared by all of this process that ask for it. Give it back with
    `close_high_water_mark`."""
    with _open_lock:
        high_water_mark, users = _open.get(path) or (HighWaterMark(path, project), 0)
        _open[path] = high_water_mark, users + 1
        return high_water_mark


def close_high_water_mark(high_water_mark: HighWaterMark) -> None:
    """Let go of a memory from `open_high_water_mark`; the last to do so gives its slot back."""
    with _open_lock:
        if high_water_mark.path not in _open:
            return
        _, users = _open[high_water_mark.path]
        if users > 1:
            _open[high_water_mark.path] = high_water_mark, users - 1
            return
        del _open[high_water_mark.path]
    high_water_mark.close()


def watermark_path(folder: Path, ledger: str, project: str) -> str:
    """The file for one project of the ledger that calls itself `ledger`, in a state folder."""
    spelled = re.sub(r"[^A-Za-z0-9._-]", "_", project)
    return str(folder / FOLDER / f"{spelled}-{zlib.crc32(f'{ledger} {project}'.encode()):08x}")
