"""Folders that only this user may read, and files that only this user may write, whatever the umask."""

from __future__ import annotations

import os


def make_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder and its missing parents, readable by this user alone. Existing folders stay as they are.

    `os.makedirs` applies its mode to the last folder only, and leaves the others to the umask. Raises OSError.
    """
    above = os.fspath(path)
    missing = [above]
    while (above := os.path.dirname(above.rstrip(os.sep))) and not os.path.exists(above):
        missing.append(above)
    for folder in reversed(missing):
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:  # another process made it first, or it is a file: then the error is right
            if not os.path.isdir(folder):
                raise


def private(path: str, flags: int) -> int:
    """Opens a file that only this user may read and write: an `opener` for `open`."""
    return os.open(path, flags, 0o600)


def readable(path: str, flags: int) -> int:
    """Opens a file that others may read, as the umask allows: an `opener` for `open`."""
    return os.open(path, flags, 0o644)
