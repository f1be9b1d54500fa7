"""The command line as its users have it: a process of its own."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from support.forked import Forked, can_be_forked, for_a_shell

ROOT = Path(__file__).resolve().parents[2]

QUOTA = [sys.executable, "-m", "quota"]


def program(module: str) -> str:
    """The script that runs a module of the tests as a program, for `Quota.start`."""
    path = f"import runpy, sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); "
    return path + f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"


class Quota:
    """Runs `quota` commands in one folder with one state folder."""

    def __init__(self, folder: Path, prefix: Sequence[str] = ()) -> None:
        """`prefix`: a command that runs what `start` starts, elsewhere."""
        self.folder, self.prefix = folder, prefix
        self.forked = not prefix
        """False where it matters what a process has imported, or how its interpreter starts."""
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("QUOTA_", "YOUTUBE_"))},
            "QUOTA_STATE_DIR": str(folder / "state"),
            "XDG_CONFIG_HOME": str(folder / "no-config"),
            "COLUMNS": "80",
        }
        self.env_of_programs: dict[str, str] = {}
        """What only those programs read that a command starts: an interpreter, as it begins."""

    def __call__(self, *args: str, script: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        """The result of a `quota` command, or of a Python program, with these arguments."""
        with self.start(*args, script=script, env=env) as process:
            try:
                stdout, stderr = process.communicate(timeout=300)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(process.args, process.wait(), stdout, stderr)

    def start(
        self, *args: str, script: str = "", env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str] | Forked:
        """A `quota` command that goes on meanwhile, or a Python program; `options` are its streams."""
        env = {**self.env, **(env or {})}
        if self.forked and can_be_forked(args, env, script):
            return Forked(args, self.folder, env | self.env_of_programs, script=script, **options)
        env |= self.env_of_programs
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        command = [*self.prefix, *_command(script), *args]
        return subprocess.Popen(command, cwd=self.folder, env=env, text=True, **streams)

    def shell(self, script: str) -> subprocess.CompletedProcess[str]:
        """The result of `script` in a shell, in which `quota` is the command. A command that gets limits or closed
        streams from the shell starts from nothing."""
        anew = "ulimit" in script or "&-" in script
        command, fds = (QUOTA, []) if anew else for_a_shell(self.env)
        prefix = f'set -o pipefail; quota() {{ {shlex.join(command)} "$@"; }}; '
        return subprocess.run(
            ["bash", "-c", prefix + script],
            cwd=self.folder,
            # Under a limit on files, Python would leave half of a module's bytecode behind, for everybody.
            env={**self.env, "PYTHONDONTWRITEBYTECODE": "1"} if anew else self.env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
        )

    def programs(self) -> tuple[Path, list[int]]:
        """A folder for a PATH, in which `quota` and `python` are, and the descriptors that they have to inherit."""
        folder = self.folder / ".bin"
        folder.mkdir(exist_ok=True)
        command, fds = for_a_shell(self.env)
        for name, program in (("quota", command), ("python", [sys.executable])):
            (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(program)} "$@"\n')
            (folder / name).chmod(0o755)
        return folder, fds

    def json(self, *args: str, status: int = 0, **env: str) -> Any:
        done = self(*args, "--json", **env)
        assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
        return json.loads(done.stdout)

    def configure(self, text: str) -> Path:
        path = self.folder / "quota.toml"
        path.write_text(text, encoding="utf-8")
        return path


def _command(script: str) -> list[str]:
    return [sys.executable, "-c", script] if script else QUOTA


def every_command(*, groups: bool = False) -> dict[str, click.Command]:
    """Every command by all its words: `spend`, `ledger move`. With `groups`, those too that only have others."""
    from quota.cli.program import cli

    def walk(group: click.Group, prefix: str) -> Iterator[tuple[str, click.Command]]:
        for name in group.list_commands(click.Context(group)):
            command = group.get_command(click.Context(group), name)
            assert command is not None
            if groups or not isinstance(command, click.Group):
                yield prefix + name, command
            if isinstance(command, click.Group):
                yield from walk(command, f"{prefix}{name} ")

    return dict(walk(cli, ""))


def one_line(done: subprocess.CompletedProcess[str], status: int) -> str:
    """The one line on stderr that a failed command leaves; asserts that it is one and names its program."""
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("quota: "), lines[0]
    assert "Traceback" not in done.stderr
    return lines[0].removeprefix("quota: ")
