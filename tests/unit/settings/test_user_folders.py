"""Where a user's configuration and state are: where `platformdirs` says, which is seldom imported for it."""

from __future__ import annotations

import subprocess
import sys
from typing import Literal

import platformdirs
import pytest

from quota.settings.folders import user_folder

VARIABLES = ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME")


@pytest.mark.parametrize("xdg", [None, "", "/x", "/x/", "relative", "~/x", " /x", "/"])
@pytest.mark.parametrize("home", [None, "", "/home/u", "/home/u/", "relative", "~", "/"])
@pytest.mark.parametrize("kind", ["config", "state"])
def test_a_users_folder_is_that_of_platformdirs(
    monkeypatch: pytest.MonkeyPatch, kind: Literal["config", "state"], home: str | None, xdg: str | None
) -> None:
    for name in VARIABLES:
        value = home if name == "HOME" else xdg
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    theirs = platformdirs.user_config_path if kind == "config" else platformdirs.user_state_path
    assert user_folder(kind) == theirs("quota-ledger")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere platformdirs is always asked")
@pytest.mark.parametrize("environment", [{"HOME": "/home/u"}, {"XDG_CONFIG_HOME": "/x", "XDG_STATE_HOME": "/y"}])
def test_where_it_is_plain_nothing_is_imported_to_find_it(environment: dict[str, str]) -> None:
    script = "import sys; from quota.settings.folders import *; user_folder('config'), user_folder('state')\n"
    script += "print('platformdirs' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "False\n"
