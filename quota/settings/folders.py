"""The folder for the state of one machine."""

from __future__ import annotations

import os
from pathlib import Path

from quota.common.files import doubt_at, make_folder
from quota.common.text import one_line
from quota.errors import ConfigError

REMEDY = "set QUOTA_STATE_DIR to a folder of your own"


def state_folder() -> Path:
    """The folder for what must survive a reboot: QUOTA_STATE_DIR, else the platform's. This does not create it.

    Raises ConfigError if others could change the folder, or the user has no home.
    """
    named = os.environ.get("QUOTA_STATE_DIR")
    try:
        if named:
            folder = Path(named).absolute()
        else:
            from platformdirs import user_state_path  # late: it takes 8 ms

            folder = user_state_path("quota-ledger").expanduser()
    except RuntimeError as error:
        raise ConfigError(f"this user has no home for a state folder; {REMEDY}") from error
    except FileNotFoundError as error:
        raise ConfigError(f"QUOTA_STATE_DIR is relative, and the current folder is gone; {REMEDY}") from error
    why = doubt_at(folder)
    if why:
        remedy = f"run this as that user, or {REMEDY}" if why.startswith("belongs to") else REMEDY
        raise ConfigError(f"state folder {one_line(folder)} {why}; {remedy}")
    return folder


def make_state_folder() -> Path:
    """The state folder; if it is missing, this creates it for this user alone. Raises ConfigError."""
    folder = state_folder()
    if os.path.isdir(folder):
        return folder
    try:
        make_folder(folder)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"state folder {one_line(folder)} cannot be made: {reason}; set QUOTA_STATE_DIR to another folder"
        ) from error
    return state_folder()  # somebody else may have made it meanwhile
