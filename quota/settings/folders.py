"""The folder for what a machine must keep."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from quota.common.text import one_line
from quota.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


from pathlib import Path
from typing import TYPE_CHECKING


def state_folder() -> Path:
    """Where this machine keeps what must survive a reboot: QUOTA_STATE_DIR, else the platform's. Not created here."""
    named = os.environ.get("QUOTA_STATE_DIR")
    if named:
        return Path(named).absolute()
    from platformdirs import user_state_path

    return user_state_path("quota-ledger")


def make_state_folder() -> Path:
    """The state folder, made readable by this user alone if it was not there."""
    folder = state_folder()
    if os.path.isdir(folder):
        return folder
    from quota.common.folders import make_folder  # late: a machine needs it once

    try:
        make_folder(folder)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"state folder {one_line(folder)} cannot be made: {reason}; set QUOTA_STATE_DIR to a folder that can"
        ) from error
    return folder
