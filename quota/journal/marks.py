"""How far a journal was compared with its log, and from where to where it is whole: a small file that is replaced."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import NamedTuple

from quota.common.folders import make_folder, open_alone
from quota.journal.record import SPELLING, framed, unframed
from quota.rules.entry import START, Id, id_text, read_id

MAX_BYTES = 2**20

Position = Mapping[str, int]
"""How far: a byte of each file, and of what is in memory (""), how many entries there ever were."""


class Marks(NamedTuple):
    """All records up to `compared` are in the log of `epoch`. Of the log of `whole_epoch`, all that lies behind
    `whole_from` and up to `whole_to` is in the journal."""

    epoch: str = ""
    compared: Position = MappingProxyType({})
    whole_epoch: str = ""
    whole_from: Id = START
    whole_to: Id = START


def marks_text(marks: Marks) -> str:
    """Marks as a file has them."""
    lines = [marks.epoch, f"{marks.whole_epoch}\t{id_text(marks.whole_from)}\t{id_text(marks.whole_to)}"]
    return "\n".join([*lines, *(f"{name}\t{at}" for name, at in marks.compared.items() if name)])


def read_marks(text: str) -> Marks:
    """The marks of a file; none of one that cannot be read: then all is compared again."""
    try:
        epoch, whole, *files = text.split("\n")
        whole_epoch, whole_from, whole_to = whole.split("\t")
        compared = {name: int(at) for name, at in (line.split("\t") for line in files)}
        return Marks(epoch, compared, whole_epoch, read_id(whole_from), read_id(whole_to))
    except ValueError:
        return Marks()


def replace_text(path: str, text: str) -> None:
    """Put a text in the place of a file, in one step. Only who holds the lock beside it does that. Raises OSError."""
    make_folder(os.path.dirname(path))
    fd = open_alone(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        data = framed(text.encode(errors=SPELLING))
        while data:
            data = data[os.write(fd, data) :]
    finally:
        os.close(fd)
    os.replace(f"{path}.new", path)


def read_text(path: str) -> str:
    """The text of a file; "" where there is none, or a damaged one. Raises OSError."""
    try:
        fd = open_alone(path, os.O_RDONLY)
    except FileNotFoundError:
        return ""
    try:
        body = unframed(os.pread(fd, MAX_BYTES, 0))
    finally:
        os.close(fd)
    with suppress(ValueError):
        return (body or b"").decode(errors=SPELLING)
    return ""
