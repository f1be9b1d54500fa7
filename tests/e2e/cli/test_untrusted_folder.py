"""A quota.toml that is read only because it stands there is the user's own or root's, and its code is run only then."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import quota
from quota.cli.program import cli
from quota.inbound.configured import load_rules
from quota.jobs.contributions import forecast
from support.commands import Quota, every_command, one_line
from support.users import NOBODY, needs_root
from support.web import served

pytestmark = needs_root

CONFIGURATION = """\
[credentials.main]
api = "youtube-v3"

[jobs.own]
fetch = "their_code:fetch"
schedule = "*/30 * * * *"

[inbound]
url = "sqlite:///inbound.db"

[inbound.default]
limit = 600
window = "60s"
"""

THEIR_CODE = """\
open("ran", "w").close()

def fetch(client, region, cursor):
    raise NotImplementedError
"""


@pytest.fixture
def folder(tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, which belongs to somebody else, with a configuration and a module of theirs."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "quota.toml").write_text(CONFIGURATION)
    (theirs / "their_code.py").write_text(THEIR_CODE)
    for path in (theirs, theirs / "quota.toml", theirs / "their_code.py"):
        os.chown(path, NOBODY, NOBODY)
    monkeypatch.setenv("QUOTA_STATE_DIR", str(state_dir))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(theirs)
    path = list(sys.path)
    yield theirs
    sys.path[:] = path
    sys.modules.pop("their_code", None)


def make_ours(folder: Path) -> None:
    for path in (folder, *folder.iterdir()):
        os.chown(path, 0, 0)


def _needed(command: click.Command) -> Iterator[str]:
    for param in command.params:
        if isinstance(param, click.Option) and param.required:
            yield from (param.opts[0], "x")
    for param in command.params:
        if isinstance(param, click.Argument):
            text = "7" if isinstance(param.type, click.types.IntParamType) else "videos.list"
            yield from ["--", text] if param.nargs == -1 else [text]


COMMANDS = {
    (*name.split(), *_needed(command), *(("--", "true") if name == "exec" else ()))
    for name, command in every_command().items()
    if any(param.name == "config" for param in command.params)
}
"""Every command that reads a configuration, with an argument for each that it needs."""


def test_no_command_reads_a_configuration_that_others_could_have_written(folder: Path) -> None:
    assert {("check",), ("serve",), ("dashboard",), ("schedule",), ("inbound", "status")} <= COMMANDS
    assert len(COMMANDS) > 20
    for command in sorted(COMMANDS - {("check",)}):  # which lists all mistakes itself
        with pytest.raises(quota.ConfigError) as caught:
            cli.main([*command], prog_name="quota", standalone_mode=False)
        assert str(caught.value) == (
            f"quota.toml: not read, because {folder} belongs to nobody, and this is root; if you trust it, "
            "use --config quota.toml, or QUOTA_CONFIG"
        ), command
    for words in (["charge", "videos.list"], ["check"]):
        assert "; if you trust it, use --config quota.toml" in one_line(Quota(folder)(*words), 78)
    assert not (folder / "ran").exists()


async def _opened() -> None:
    async with quota.open_async():
        pass


def test_a_program_reads_only_a_file_that_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for read in (quota.open, lambda: asyncio.run(_opened()), load_rules):
        with pytest.raises(quota.ConfigError, match=r"quota\.toml: not read, because .* belongs to nobody"):
            read()
    quota.open("quota.toml").close()
    monkeypatch.setenv("QUOTA_CONFIG", "quota.toml")
    quota.open().close()
    monkeypatch.delenv("QUOTA_CONFIG")
    make_ours(folder)
    quota.open().close()


def test_the_users_own_folder_of_configurations_is_no_exception(folder: Path, tmp_path: Path) -> None:
    """Under `sudo` it may still be the folder of the caller."""
    users = tmp_path / "config" / "quota-ledger"
    users.mkdir(parents=True)
    (folder / "quota.toml").rename(users / "quota.toml")
    with pytest.raises(quota.ConfigError, match=r"quota\.toml belongs to nobody"):
        quota.open()


def test_a_pipe_is_not_a_configuration(folder: Path) -> None:
    os.chown(folder, 0, 0)
    (folder / "quota.toml").unlink()
    os.mkfifo(folder / "quota.toml")
    with pytest.raises(quota.ConfigError, match=r"quota\.toml is neither a file nor a folder"):
        quota.open()
    (folder / "quota.toml").unlink()
    (folder / "quota.toml").symlink_to("nothing")
    with pytest.raises(quota.ConfigError, match=r"quota\.toml: cannot be read: No such file"):
        quota.open()


def test_a_named_configuration_runs_no_code_of_others_when_inspected(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["check", "--config", "quota.toml"], standalone_mode=False)
    assert "warning: jobs.own.fetch: 'their_code:fetch' is not imported here, because " in capsys.readouterr().out
    for read in (lambda: cli.main(["plan", "--config", "quota.toml"], standalone_mode=False), see_forecast):
        with pytest.raises(quota.ConfigError) as caught:
            read()
        assert str(caught.value) == (
            f"fetch = 'their_code:fetch' is not imported here, because {folder} belongs to nobody, and this is root; "
            "change that, or only run the job"
        )
    assert not (folder / "ran").exists()
    make_ours(folder)
    cli.main(["check"], standalone_mode=False)
    assert (folder / "ran").exists()


def test_no_variable_makes_a_foreign_file_or_code_trusted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUOTA__LEDGER__URL", "sqlite:////root/ledger.db")
    monkeypatch.setenv("QUOTA__CREDENTIALS__MAIN__API", "youtube-v3")
    monkeypatch.setenv("QUOTA__JOBS__OWN__FETCH", "their_code:other")
    with pytest.raises(quota.ConfigError, match=r"quota\.toml: not read, because "):
        quota.open()
    cli.main(["check", "--config", "quota.toml"], standalone_mode=False)
    printed = capsys.readouterr().out
    assert "QUOTA__JOBS__OWN__FETCH: 'their_code:other' is not imported here, because " in printed
    assert not (folder / "ran").exists()


def see_forecast() -> None:
    with quota.open("quota.toml") as session:
        forecast(session)


def test_a_configuration_from_a_pipe_runs_no_code_when_it_is_looked_at(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in `quota check --config <(...)`."""
    reader, writer = os.pipe()
    os.write(writer, CONFIGURATION.encode())
    os.close(writer)
    cli.main(["check", "--config", f"/dev/fd/{reader}"], standalone_mode=False)
    os.close(reader)
    printed = capsys.readouterr().out
    assert f"'their_code:fetch' is not imported here, because nobody can say who wrote /dev/fd/{reader}" in printed


def test_a_server_of_ours_imports_nothing_of_the_current_folder(folder: Path) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        raise NotImplementedError(scope["type"])

    (folder / "uvicorn.py").write_text(THEIR_CODE)
    with served(application) as port:
        socket.create_connection(("127.0.0.1", port), 10).close()
    assert not (folder / "ran").exists()
