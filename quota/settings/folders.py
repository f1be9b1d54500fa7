"""The folder for the state of one machine."""

from __future__ import annotations

import os
from pathlib import Path

from quota.common.text import one_line
from quota.errors import ConfigError


def state_folder() -> Path:
    """The folder for what must survive a reboot: QUOTA_STATE_DIR, else the platform's. This does not create it."""
    named = os.environ.get("QUOTA_STATE_DIR")
    if named:
        return Path(named).absolute()
    from platformdirs import user_state_path

    return user_state_path("quota-ledger")


def make_state_folder() -> Path:
    """The state folder. If it is missing it is created, readable by this user alone. Raises ConfigError."""
    folder = state_folder()
    if os.path.isdir(folder):
        return folder
    from quota.common.folders import make_folder  # late: needed once per machine

    try:
        make_folder(folder)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"state folder {one_line(folder)} cannot be made: {reason}; set QUOTA_STATE_DIR to another folder"
        ) from error
    return folder
