"""One run of a job and a store at a time on a machine: file locks, which end with their process.

A run locks a file in the state folder, which other users cannot fill or empty, and a file beside the store: users who
write to the store may have other state folders.

only_one      takes the lock for a block, and may wait for the run that has it
Lock          the lock of a run, with the regions that the run covers
lock_name     names the lock, so that the ledger can tell a dead run from a run on another machine
store_id_of   the id of the store, which the locked file keeps too
hashed        a short name for a long text
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import quota
from quota.common.files import NotAloneError, open_alone
from quota.common.log import line
from quota.jobs.store.store import Store
from quota.terms.arguments import machine_name

log = logging.getLogger("quota.jobs")


POLL_S = 0.1
"""How often a run asks whether the run before it has ended."""

_COVERS_AT = 64
"""The offset in a locked file at which its run writes what it covers, after the store's id."""


class Covers(NamedTuple):
    """The regions that a run covers. `whole`: it covers all the work of its job."""

    whole: bool = False
    regions: tuple[str, ...] = ()


WHOLE = Covers(whole=True)


class Lock:
    """The locked files of a run: `descriptor` is the first one."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._descriptors = descriptors
        self.descriptor = descriptors[0]

    def note(self, covers: Covers | None) -> None:
        """Write for other runs what this run covers; None: nothing."""
        text = b"" if covers is None else json.dumps(covers).encode()
        for descriptor in self._descriptors:
            with suppress(OSError):  # some users may only read the file
                os.ftruncate(descriptor, _COVERS_AT)
                os.pwrite(descriptor, text, _COVERS_AT)


@contextmanager
def only_one(
    store_url: str,
    job: str,
    covers: Covers = WHOLE,
    waits: Callable[[Covers], bool] = lambda covers: False,
) -> Iterator[Lock | None]:
    """Lock this job and this store on this machine for the block, which `covers` this work. Yields None if another run
    has the lock.

    The lock is on a file, so the kernel releases it however the process ends. While another run has it, `waits` decides
    whether to try again; its argument is the work that the other run covers.
    """
    descriptors = [lock_file(store_url, job)]
    try:
        beside = _lock_beside(_path_beside(store_url, job), descriptors[0])
        descriptors += [] if beside is None else [beside]
        while (taken := _lock_all(descriptors, beside)) is not None:
            if not waits(_covers_of([taken, *descriptors])):
                yield None
                return
            time.sleep(POLL_S)
        # The files stay. If this run removed one, a third run could lock a new one while a second holds the old one.
        lock = Lock(descriptors)
        lock.note(covers)
        try:
            yield lock
        finally:
            lock.note(None)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _lock_all(descriptors: Sequence[int], beside: int | None) -> int | None:
    """Lock all these files, or none. Returns the file that another run has; None if this run has all."""
    for descriptor in descriptors:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(descriptors[0], fcntl.LOCK_UN)
            return descriptor
        except OSError:
            if descriptor != beside:  # a store may be on a file system without such locks
                raise
    return None


def _covers_of(descriptors: Sequence[int]) -> Covers:
    """The work of the run that has locked these files; nothing while no file names any."""
    for descriptor in descriptors:
        with suppress(OSError, ValueError, TypeError):
            whole, regions = json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, _COVERS_AT))
            return Covers(whole, tuple(regions))
    return Covers()


def lock_name(descriptor: int) -> str:
    """The name of the lock on this open file. Two locks have the same name only if they exclude each other.

    The name is made of the kernel's boot, the host and the file. Even a copy of this machine has another boot.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
    except OSError:  # not Linux
        boot = ""
    file_status = os.fstat(descriptor)
    text = f"{boot}\n{machine_name()}\n{file_status.st_dev}\n{file_status.st_ino}"
    return hashed(text, 12)


def hashed(text: str, size: int) -> str:
    """A short name for a text: a hash of `size` bytes, in hexadecimal digits."""
    return blake2b(text.encode(errors="surrogateescape"), digest_size=size).hexdigest()


def store_id_of(store: Store, lock: int) -> str:
    """The store's id. The locked file keeps it too, so a new store in the place of a moved or lost store holds the same
    regions."""
    kept = os.pread(lock, _COVERS_AT, 0).rstrip(b"\0").decode("ascii", "replace")
    if store.is_new() and re.fullmatch(r"[0-9a-f]{32}", kept):
        store.take_id(kept)
    store_id = store.id()
    if kept != store_id:
        with suppress(OSError):  # some users may only read the file
            os.pwrite(lock, store_id.encode(), 0)
    return store_id


def lock_file(store_url: str, job: str) -> int:
    """Open the file to lock. It is in the state folder, or beside the store if the state folder is not writable: every
    run of this job can write there."""
    from quota.settings.folders import make_state_folder

    beside = _path_beside(store_url, job)
    try:
        return _opened(make_state_folder() / beside.name)
    except NotAloneError as error:
        raise _not_alone(error) from None
    except (quota.ConfigError, OSError) as error:
        why = error
        if isinstance(error, OSError):
            remedy = "set QUOTA_STATE_DIR to a folder that you can write to"
            why = quota.ConfigError(f"{error.filename}: {error.strerror}; {remedy}")
        try:
            descriptor = _opened(beside)
        except OSError:
            raise why from None
        log.warning("%s: %s", line("lock_beside_store", job=job), why)
        return descriptor


def _lock_beside(path: Path, other: int) -> int | None:
    """The file beside the store. None if it is the `other` file, or if this user cannot open it: then this user cannot
    open the store either, or may only write existing files there."""
    try:
        descriptor = _opened(path)
    except NotAloneError as error:
        raise _not_alone(error) from None
    except OSError:
        return None
    if os.path.samestat(os.fstat(descriptor), os.fstat(other)):
        os.close(descriptor)
        return None
    return descriptor


def _path_beside(store_url: str, job: str) -> Path:
    """The path of the lock beside the store. All spellings of the store's path give the same name."""
    store = os.path.realpath(store_url.partition(":///")[2])
    readable, digest = re.sub(r"[^A-Za-z0-9._-]", "_", job)[:64], hashed(f"{store}\n{job}", 6)
    return Path(store).parent / f"run-{readable}-{digest}.lock"


def _opened(path: Path) -> int:
    try:
        return open_alone(path, os.O_RDWR | os.O_CREAT)
    except NotAloneError:
        raise
    except OSError as error:
        with suppress(FileNotFoundError):
            return open_alone(path, os.O_RDONLY)  # an existing file can be locked without writing to it
        raise error


def _not_alone(error: NotAloneError) -> quota.ConfigError:
    return quota.ConfigError(f"{error.filename}: {error.strerror}; delete it")
