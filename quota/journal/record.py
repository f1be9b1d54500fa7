"""One line of a journal's file, with its length and checksum: what was torn or damaged is told from what is whole.

EPOCH  MS-SEQ  ENTRY...  LENGTH-CHECKSUM       an entry, as `quota.rules.entry.packed` writes it
EPOCH  MS-SEQ  LENGTH-CHECKSUM                 a note: the newest entry of this epoch, which stands further back
"""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32

from quota.rules.entry import Id, read_id

SPELLING = "surrogatepass"
"""Every text of Python's has bytes, and these bytes give that text."""


class Record(NamedTuple):
    """What a line says. `text` is the packed entry, "" of a note."""

    epoch: str
    id: Id
    text: str


def framed(body: bytes) -> bytes:
    """What is stored, with its length and checksum."""
    return b"%b\t%d-%d" % (body, len(body), crc32(body))


def unframed(stored: bytes) -> bytes | None:
    """What was stored; None if that is not what was written."""
    body, _, frame = stored.rpartition(b"\t")
    return body if frame == b"%d-%d" % (len(body), crc32(body)) else None


def record_line(epoch: str, entry_id: Id, text: str = "") -> bytes:
    """The line of a record. What another program put into a name and would end the line is a space."""
    fields = f"{epoch}\t{entry_id[0]}-{entry_id[1]}\t{text}" if text else f"{epoch}\t{entry_id[0]}-{entry_id[1]}"
    if "\n" in fields:
        fields = fields.replace("\n", " ")
    body = fields.encode(errors=SPELLING)
    return b"%b\t%d-%d" % (body, len(body), crc32(body))


def read_record(line: bytes) -> Record | None:
    """The record of a line; None of one that is empty, torn or damaged."""
    body = unframed(line)
    if not body:
        return None
    try:
        epoch, entry_id, *text = body.decode(errors=SPELLING).split("\t", 2)
        return Record(epoch, read_id(entry_id), text[0] if text else "")
    except ValueError:
        return None
