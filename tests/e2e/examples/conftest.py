"""A folder of somebody who took an example: its file, a small budget, and an upstream on loopback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quota.jobs.emulator import Emulator
from support.commands import Quota

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "docs" / "examples"


class Taken(Quota):
    """An example in a folder, with an upstream of its own."""

    def __init__(self, folder: Path, upstream: Emulator) -> None:
        super().__init__(folder)
        self.upstream, self.ledger = upstream, "sqlite:///ledger.db"
        self.env |= {"YOUTUBE_API_KEY": "a-key-for-the-examples", "PYTHONPATH": str(folder)}

    def take(self, name: str, *, units: int, window: str = "1h") -> None:
        """Put the example there, for the upstream on loopback and a limit of so many units."""
        text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
        host = self.upstream.address.partition("://")[2]
        text = text.replace("https://www.googleapis.com", self.upstream.address).replace("www.googleapis.com", host)
        (self.folder / f"{name}.py").write_text(text, encoding="utf-8")
        self.allow(units, window)

    def allow(self, units: int, window: str = "1h") -> None:
        self.configure(
            f'ledger.url = "{self.ledger}"\n'
            '[credentials.main]\napi = "youtube-v3"\nkey = "env:YOUTUBE_API_KEY"\n'
            f'endpoint = "{self.upstream.address}"\n'
            f'[[credentials.main.limits]]\nname = "hour"\nunits = {units}\nwindow = "{window}"\n'
        )

    def python(self, program: str, package: str = "", **env: str) -> str:
        """What a program prints that imports the example: where `make examples` installed a package that is too heavy
        for the other tests, or here."""
        there = ROOT / "build" / "examples" / package / "bin" / "python"
        done = subprocess.run(
            [there if package else sys.executable, "-c", program],
            cwd=self.folder,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def sent(self) -> int:
        return int(self.upstream.usage()["requests"])


@pytest.fixture
def taken(tmp_path: Path) -> Iterator[Taken]:
    with Emulator() as upstream:
        yield Taken(tmp_path, upstream)
