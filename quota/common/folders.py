"""Folders for what is this user's business alone."""

from __future__ import annotations

import os


def make_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder, and those above it that are missing, readable by this user alone; those that are there stay as
    they are. Raises OSError.

    `os.makedirs` gives its mode to the last one only, and the umask decides about the others.
    """
    above = os.fspath(path)
    missing = [above]
    while (above := os.path.dirname(above.rstrip(os.sep))) and not os.path.exists(above):
        missing.append(above)
    for folder in reversed(missing):
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:  # another process was faster; or it is a file, which says so itself
            if not os.path.isdir(folder):
                raise
