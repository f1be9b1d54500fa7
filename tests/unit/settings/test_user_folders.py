"""Where a user's configuration and state are: as the XDG specification says, where nobody names another folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from quota.errors import ConfigError
from quota.settings.folders import state_folder
from quota.settings.load import find_config


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's home, and the working folder, with no variable set but HOME."""
    for name in ("QUOTA_CONFIG", "QUOTA_STATE_DIR", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("named", "folder"),
    [
        ({}, ".local/state/quota-ledger"),
        ({"XDG_STATE_HOME": ""}, ".local/state/quota-ledger"),
        ({"XDG_STATE_HOME": "relative"}, ".local/state/quota-ledger"),
        ({"XDG_STATE_HOME": "/x/"}, "/x/quota-ledger"),
        ({"XDG_STATE_HOME": "/x", "QUOTA_STATE_DIR": "/named"}, "/named"),
        ({"QUOTA_STATE_DIR": "relative"}, "relative"),
    ],
)
def test_the_state_is_where_the_user_says_else_in_the_home(
    home: Path, monkeypatch: pytest.MonkeyPatch, named: dict[str, str], folder: str
) -> None:
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    assert state_folder() == home / folder


@pytest.mark.parametrize(
    ("xdg", "folder"), [(None, ".config"), ("", ".config"), ("relative", ".config"), ("/", None), ("{home}/x", "x")]
)
def test_the_configuration_is_where_the_user_says_else_in_the_home(
    home: Path, monkeypatch: pytest.MonkeyPatch, xdg: str | None, folder: str | None
) -> None:
    if xdg is not None:
        monkeypatch.setenv("XDG_CONFIG_HOME", xdg.format(home=home))
    for place in (".config", "x"):
        (home / place / "quota-ledger").mkdir(parents=True)
        (home / place / "quota-ledger" / "quota.toml").touch()
    assert find_config() == (None if folder is None else home / folder / "quota-ledger" / "quota.toml")


def test_a_user_without_a_home_has_no_configuration_there_and_must_name_the_state(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a container's user that no /etc/passwd knows."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 987_654_321)
    assert find_config() is None
    with pytest.raises(ConfigError, match="this user has no home for a state folder; set QUOTA_STATE_DIR"):
        state_folder()


def test_a_relative_folder_in_one_that_is_gone_is_one_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "gone").mkdir()
    monkeypatch.chdir(home / "gone")
    (home / "gone").rmdir()
    monkeypatch.setenv("QUOTA_STATE_DIR", "state")
    with pytest.raises(ConfigError, match="QUOTA_STATE_DIR is relative, and the current folder is gone; set"):
        state_folder()
