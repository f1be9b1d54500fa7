"""The lock of a run: one run of a job and a store at a time on this machine.

    only_one      locks a file for a block
    note_covers   writes into the locked file which regions the run covers
    made_lock     that file, to look at
    lock_name     names the lock, so that the ledger can tell a dead run from a run on another machine
    store_id_of   the id of the store, which the locked file keeps too
    noted_id      the id of the store that was last at a path

The file is beside the store: whoever writes to the store finds it there. The lock ends with its process.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import quota
from quota.common.clock import boot_id
from quota.common.files import NotAloneError, open_alone, remedy_for
from quota.common.findings import obstacle
from quota.common.fork import start_over_in_child
from quota.jobs.store.file import StoreError, path_of
from quota.jobs.store.store import Store
from quota.ledger.files import refuse_others
from quota.settings.model import make_state_folder, state_folder
from quota.terms.arguments import machine_name

POLL_S = 0.1
"""How often a run asks whether the run before it has ended."""

_COVERS_AT = 64
"""The offset in a locked file at which its run writes what it covers, after the store's id."""


class Covers(NamedTuple):
    """The regions that a run covers. `whole`: it covers all the work of its job."""

    whole: bool = False
    regions: tuple[str, ...] = ()


WHOLE = Covers(whole=True)

Lock = int
"""The lock of a run: the descriptor of its file."""


def note_covers(lock: Lock, covers: Covers | None) -> None:
    """Write for other runs what this run covers; None: nothing."""
    text = b"" if covers is None else json.dumps(covers).encode()
    with suppress(OSError):  # a full disk
        os.ftruncate(lock, _COVERS_AT)
        os.pwrite(lock, text, _COVERS_AT)


def _covers_of(lock: Lock) -> Covers:
    """The work of the run that has this lock; nothing while the file names none."""
    with suppress(OSError, ValueError, TypeError):
        whole, regions = json.loads(os.pread(lock, os.fstat(lock).st_size, _COVERS_AT))
        return Covers(whole, tuple(regions))
    return Covers()


@contextmanager
def only_one(
    store_url: str, job: str, covers: Covers = WHOLE, waits: Callable[[Covers], bool] = lambda covers: False
) -> Iterator[Lock | None]:
    """Lock this job and this store on this machine for the block, which `covers` this work. Yields None if another run
    has the lock.

    The lock is on a file, so the kernel releases it however the process ends. While another run has it, `waits` decides
    whether to try again; its argument is the work that the other run covers. Raises ConfigError and StoreError.
    """
    lock = lock_file(store_url, job)
    copy = _Copy(lock)
    start_over_in_child(copy)
    try:
        while not _take(lock, fcntl.LOCK_EX):
            if not waits(_covers_of(lock)):
                yield None
                return
            time.sleep(POLL_S)
        # The file stays. If this run removed it, a third run could lock a new one while a second holds the old one.
        note_covers(lock, covers)
        try:
            yield lock
        finally:
            note_covers(lock, None)
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)  # a child may have a copy
    finally:
        del copy  # the next file that is opened gets the number of this one
        os.close(lock)


@dataclass(eq=False)
class _Copy:
    """The copy of a lock in a forked child, which would hold it as long as the child lives: a fetch function may leave
    one behind."""

    lock: Lock

    def start_over_in_child(self) -> None:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(nothing, self.lock, inheritable=False)
        os.close(nothing)


def _take(lock: Lock, kind: int) -> bool:
    """Take the lock. False if another run has it. Raises StoreError."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        remedy = "put the store on a file system that has locks"
        raise StoreError(f"the lock beside the store: {error.strerror}; {remedy}") from None
    return True


def lock_name(lock: Lock) -> str:
    """The name of a lock. Two locks have the same name only if they exclude each other.

    The name is made of the kernel's boot, the host and the file. Even a copy of this machine has another boot.
    """
    file_status = os.fstat(lock)
    text = f"{boot_id()}\n{machine_name()}\n{file_status.st_dev}\n{file_status.st_ino}"
    return hashed(text, 12)


def hashed(text: str, size: int) -> str:
    """A short name for a text: a hash of `size` bytes, in hexadecimal digits."""
    return blake2b(text.encode(errors="surrogateescape"), digest_size=size).hexdigest()


def store_id_of(store: Store, lock: Lock) -> str:
    """The store's id. The locked file keeps it too, so a new store in the place of a moved or lost store holds the
    same regions."""
    kept = kept_id(lock)
    store_id = store.id(kept)
    if kept != store_id:
        with suppress(OSError):  # a full disk
            os.pwrite(lock, store_id.encode(), 0)
    return store_id


def noted_id(store: str, current: str = "") -> str:
    """The id of the store that this machine has at a path, as the state folder keeps it; "" if unknown."""
    with suppress(OSError, quota.ConfigError):
        file = make_state_folder() / f"store-{hashed(f'{machine_name()}:{store}', 12)}"
        noted = file.read_text(errors="replace") if file.exists() else ""
        if current not in ("", noted):
            file.write_text(current)
        return current or noted
    return ""


def kept_id(lock: Lock) -> str:
    """The id of the store that was last in its place; "" if the locked file has none."""
    kept = os.pread(lock, _COVERS_AT, 0).rstrip(b"\0").decode("ascii", "replace")
    return kept if re.fullmatch(r"[0-9a-f]{32}", kept) else ""


def lock_file(store_url: str, job: str) -> Lock:
    """Open the file to lock. Raises ConfigError and StoreError."""
    refuse_others(path_of(store_url), "store")  # whose owner could not open a lock of this user
    path = _lock_path(store_url, job)
    if not path.parent.is_dir() and path.parent == state_folder().resolve():
        make_state_folder()
    try:
        return _open(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        store = path_of(store_url)
        remedy = remedy_for(error.errno, "check its folder")
        why = obstacle(store) or (f"its lock {path.name}: {error.strerror}", remedy)
        raise StoreError(f"store {store}: {'; '.join(why)}") from None


def _lock_path(store_url: str, job: str) -> Path:
    """The path of the lock, beside the store: the same file by all spellings of the store's path, and all mounts."""
    store = Path(os.path.realpath(path_of(store_url)))
    readable, digest = re.sub(r"[^A-Za-z0-9._-]", "_", job)[:64], hashed(f"{store.name}\n{job}", 6)
    return store.parent / f"run-{readable}-{digest}.lock"


def _open(path: Path, flags: int) -> Lock:
    """Open a file that is this user's alone. Raises ConfigError if it is not, and OSError."""
    try:
        return open_alone(path, flags)
    except NotAloneError as error:
        remedy = "run the job always as the same user, or delete it while no run is under way"
        raise quota.ConfigError(f"{error.filename}: {error.strerror}; {remedy}") from None


@contextmanager
def made_lock(store_url: str, job: str) -> Iterator[Lock | None]:
    """The file that a run of this job has locked, to look at for the block; None if it is not there or not readable.
    Raises ConfigError if it is not this user's alone, so that a run could not lock it."""
    try:
        lock = _open(_lock_path(store_url, job), os.O_RDONLY)
    except OSError:
        yield None
        return
    try:
        yield lock
    finally:
        os.close(lock)


def is_running(store_url: str, job: str) -> bool:
    """Whether a run has the job's lock, perhaps in another container that shares the store."""
    with suppress(quota.ConfigError, StoreError), made_lock(store_url, job) as lock:
        return lock is not None and is_taken(lock)
    return False


def is_taken(lock: Lock) -> bool:
    """Whether a run has this lock. It tries the lock only if the file says what a run covers, since a try turns away a
    run that begins at this moment."""
    return os.fstat(lock).st_size > _COVERS_AT and not _take(lock, fcntl.LOCK_SH)
