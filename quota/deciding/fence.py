"""Keeps everybody from appending to a log while its owner, a move, a repair or a union, replaces it.

A fence is a lease. Its owner renews it, and restores the old epoch if the work fails. If the owner is killed, the lease
ends by itself.

    Fence            the fence around one log
    given_back       gives the log back if the work fails
    FenceLostError   another process was quicker
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event, RLock, Thread
from weakref import ref

from quota.common.clock import elapsed_s
from quota.common.text import show
from quota.errors import LedgerError, QuotaError
from quota.ledger.log import BROKEN, EPOCH, FENCE, LEASE_MS, Fields, Log, Moment, is_fence, is_seal
from quota.rules.entry import Entry, Id

WAIT_S = 5.0
"""How long an owner waits for another owner's fence."""

LOOK_AGAIN_S = 0.02

RENEW_S = LEASE_MS / 4_000
"""How often a fence is renewed."""


class FenceLostError(LedgerError):
    """Another process has changed the log meanwhile. Nothing was lost."""


def place(log: Log, project: str) -> str:
    """The place of a log, for messages."""
    return f"project {show(project)} of ledger {log.label}"


class Fence:
    """The fence of a move or a repair around one log.

    `stood` is the epoch that the log had before. `epoch` is our current fence, or "". `lifts` is the seal that this
    owner may lift, because the log moves back to where it came from. It works behind that seal, which no lease ends.
    """

    def __init__(self, log: Log, project: str, token: str, lifts: str = "") -> None:
        self.log, self.project, self.token, self.lifts = log, project, token, lifts
        self.stood = self.epoch = ""
        self._lock = RLock()

    def take(self) -> None:
        """Fence the log. Waits for another owner's fence."""
        ends_s = elapsed_s() + WAIT_S
        while True:
            beginning = self.log.begin(self.project)
            epoch = beginning.epoch
            if is_fence(epoch) and self.token in epoch:
                raise QuotaError(f"{place(self.log, self.project)} is behind both urls: nothing was changed")
            if self.take_at(beginning):
                return
            if elapsed_s() > ends_s:
                raise self.overtaken()
            time.sleep(LOOK_AGAIN_S)

    def take_at(self, beginning: Moment) -> bool:
        """Fence the log as it was at this moment. False if another process was quicker."""
        epoch = beginning.epoch
        if not is_seal(epoch):
            done, fence = self.log.fence(self.project, epoch, self.token)
        elif epoch == self.lifts:
            done, fence = True, epoch
        else:
            raise self.overtaken()
        if done:
            self.stood, self.epoch = epoch, fence
        return done

    def change(self, becomes: Fields) -> None:
        """Change fields of the state behind the fence."""
        with self._lock:
            if not self.log.change(self.project, {EPOCH: self.epoch}, becomes).done:
                raise self.overtaken()

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Renew the fence during long work. While it is renewed, nobody else has the log."""
        ended, owned = Event(), ref(self)  # a signal handler may end the work here: nobody owns the fence then

        def renew() -> None:
            with suppress(LedgerError):  # the next change raises it
                while not ended.wait(RENEW_S) and _renew(owned()):
                    pass

        thread = Thread(target=renew, name="quota-fence", daemon=True)
        try:
            with suppress(RuntimeError):  # this process may start no more threads: then the fence ends by itself
                thread.start()
            yield
        finally:
            ended.set()
            if thread.is_alive():
                thread.join()

    def replace(self, entries: Sequence[Entry], trimmed: Id) -> None:
        """Replace the log by these entries. It stays behind the fence."""
        tip = self.log.begin(self.project).tip
        if not self.log.replace(self.project, self.epoch, tip, entries, "", trimmed=trimmed):
            raise self.overtaken()
        if not is_seal(self.epoch):
            self.stood = BROKEN  # the old log is gone

    def seal(self, url: str) -> None:
        if not self.log.seal(self.project, self.epoch, url):
            raise self.overtaken()
        self.epoch = ""

    def lift(self) -> None:
        """Put a fence in the place of the seal, if there is one."""
        if is_seal(self.epoch):
            fence = f"{FENCE}{self.token}:{self.log.now_ms() + LEASE_MS}"
            self.change({EPOCH: fence})
            self.epoch = fence

    def open(self) -> None:
        """Let everybody append to the new log."""
        self.change({EPOCH: os.urandom(8).hex()})
        self.epoch = ""

    def give_back(self) -> None:
        """Restore the epoch that the log had before. If that was a fence too, our lease just ends."""
        if is_fence(self.epoch) and not is_fence(self.stood):
            self.log.change(self.project, {EPOCH: self.epoch}, {EPOCH: self.stood or None})

    def overtaken(self) -> FenceLostError:
        """The error of an owner that has lost its fence."""
        return FenceLostError(
            f"another `quota ledger move`, or a repair, is at work on {place(self.log, self.project)}; run this again "
            "when it has ended"
        )


def _renew(fence: Fence | None) -> bool:
    """Renew a fence that still has an owner. The thread that renews it must not own it while it waits."""
    if fence is None:
        return False
    with fence._lock:
        done, stands = fence.log.fence(fence.project, fence.epoch, fence.token)
        if done:
            fence.epoch = stands
        return done


@contextmanager
def given_back(*fences: Fence) -> Iterator[None]:
    """Give the logs back if the block raises."""
    try:
        yield
    except BaseException:
        for fence in fences:
            with suppress(LedgerError):
                fence.give_back()
        raise
