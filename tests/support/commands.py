"""The command line as its users have it: a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.forked import can_be_forked, run_forked

ROOT = Path(__file__).resolve().parents[2]

QUOTA = [sys.executable, "-m", "quota"]


class Quota:
    """Runs `quota` commands in one folder with one state folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("QUOTA_", "YOUTUBE_"))},
            "QUOTA_STATE_DIR": str(folder / "state"),
            "XDG_CONFIG_HOME": str(folder / "no-config"),
            "COLUMNS": "80",
        }

    def __call__(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        if can_be_forked(args, {**self.env, **env}):
            return run_forked(args, self.folder, {**self.env, **env}, 300)
        return subprocess.run(
            [*QUOTA, *args],
            cwd=self.folder,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def shell(self, script: str) -> subprocess.CompletedProcess[str]:
        """What a shell makes of `script`, in which `quota` is the command."""
        prefix = f'set -o pipefail; quota() {{ "{sys.executable}" -m quota "$@"; }}; '
        return subprocess.run(
            ["bash", "-c", prefix + script],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def json(self, *args: str, status: int = 0, **env: str) -> Any:
        done = self(*args, "--json", **env)
        assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
        return json.loads(done.stdout)

    def configure(self, text: str) -> Path:
        path = self.folder / "quota.toml"
        path.write_text(text, encoding="utf-8")
        return path


def one_line(done: subprocess.CompletedProcess[str], status: int) -> str:
    """The one line on stderr that a failed command leaves; asserts that it is one and names its program."""
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("quota: "), lines[0]
    assert "Traceback" not in done.stderr
    return lines[0].removeprefix("quota: ")
