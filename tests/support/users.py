"""Root may read and write everything, so what is forbidden is tried without that right."""

from __future__ import annotations

import ctypes
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import pytest

T = TypeVar("T")

NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")

_VERSION_3 = 0x20080522
_READS_ALL = 1 << 2
_OVERRIDES = 1 << 1 | 1 << 2 | 1 << 3
"""CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH and CAP_FOWNER: what lets root pass by the modes of files."""


@contextmanager
def not_root() -> Iterator[None]:
    """Inside the block the modes of files and folders count for root as for anybody else. For this thread; a command
    that it starts has root's rights again.

    It stays the same user, so that it may go on reading a checkout in a folder of root's own.
    """
    rights = _rights() if os.geteuid() == 0 else None
    if rights is not None:
        _set_rights([rights[0] & ~_OVERRIDES, *rights[1:]])
    try:
        yield
    finally:
        if rights is not None:
            _set_rights(rights)


def as_user(uid: int, gid: int, groups: Sequence[int], work: Callable[[], T]) -> T:
    """What `work` returns or raises in a forked process of this user and these groups. It may import what it likes."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups(groups)
            os.setegid(gid)
            os.seteuid(uid)
            if uid != 0:
                _set_rights([_READS_ALL, *_rights()[1:]])
            answer: tuple[bool, object] = (True, work())
        except BaseException as error:
            answer = (False, error)
        with open(writer, "wb") as file:
            pickle.dump(answer, file)
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        done, result = pickle.load(file)  # noqa: S301  # our own child's
    os.waitpid(child, 0)
    if not done:
        raise result
    return result  # type: ignore[no-any-return]


def _rights() -> list[int]:
    """Effective, permitted and inheritable capabilities, 32 at a time."""
    words = (ctypes.c_uint32 * 6)()
    _call("capget", words)
    return list(words)


def _set_rights(rights: list[int]) -> None:
    _call("capset", (ctypes.c_uint32 * 6)(*rights))


def _call(name: str, words: ctypes.Array[ctypes.c_uint32]) -> None:
    head = (ctypes.c_uint32 * 2)(_VERSION_3, 0)
    if getattr(ctypes.CDLL(None, use_errno=True), name)(head, words):
        raise OSError(ctypes.get_errno(), name)
