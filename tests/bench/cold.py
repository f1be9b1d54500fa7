"""A process that makes one decision and ends: what a line in a crontab pays."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path
from typing import TYPE_CHECKING

from bench.race import Contestant, race
from bench.report import Bar, Report

if TYPE_CHECKING:
    from collections.abc import Callable

REPOSITORY = Path(__file__).resolve().parents[2]
NOTHING = ("-c", "pass")
SCRIPT = "import sys\nfrom quota.cli.entry import main\nsys.exit(main())\n"
"""What pip installs as the command `quota`."""

FULL = """
[credentials.main]
api = "youtube-v3"
[[credentials.main.limits]]
name = "day"
units = 1
window = "24h"
[jobs.trending]
fetch = "trending"
regions = ["US"]
"""

BARS = {"quota charge, SQLite": 4.5, "quota charge, Redis": 6, "refused tick, SQLite": 6, "refused tick, Redis": 8}
"""Ratios to a Python that does nothing. As from a wheel, where that is measured."""


def measure(report: Report, folder: Path, redis_url: str, rounds: int, *, installed: bool) -> None:
    """Whole processes, started by turns. `installed` adds a copy laid out as a wheel installs it."""
    report.progress.begin("cold processes")
    state = folder / "state"
    full, shared = folder / "full.toml", folder / "shared.toml"
    full.write_text(f'[ledger]\nurl = "sqlite:///{folder}/full.db"\n{FULL}')
    shared.write_text(f'[ledger]\nurl = "{redis_url}"\n[credentials.main]\napi = "youtube-v3"\n')
    full_too = folder / "full-too.toml"
    full_too.write_text(full.read_text().replace(f"sqlite:///{folder}/full.db", redis_url))
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("QUOTA_", "PYTHON"))}
    environment |= {"QUOTA_STATE_DIR": str(state), "XDG_CONFIG_HOME": str(folder / "no-config")}

    def start(python: str, *arguments: str, status: int = 0) -> Callable[[], object]:
        def call() -> None:
            done = subprocess.run(
                [python, *arguments],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                check=False,
            )
            assert done.returncode == status, done.stderr.decode()

        return call

    quota = folder / "quota"
    quota.write_text(SCRIPT)
    charge, peek = (str(quota), "charge", "videos.list"), (str(quota), "peek", "videos.list")
    for config in (full, full_too):
        start(sys.executable, *charge, "--config", str(config))()
    tick = (str(quota), "run", "trending", "--config")
    contestants = [
        Contestant("floor: python -c pass", start(sys.executable, *NOTHING)),
        Contestant("quota charge, SQLite", start(sys.executable, *charge)),
        Contestant("quota charge, Redis", start(sys.executable, *charge, "--config", str(shared))),
        Contestant("quota peek, refused", start(sys.executable, *peek, "--config", str(full), status=75)),
        Contestant("refused tick, SQLite", start(sys.executable, *tick, str(full))),
        Contestant("refused tick, Redis", start(sys.executable, *tick, str(full_too))),
    ]
    rows = race(contestants, rounds, 1, report.progress)
    if installed:
        python = _installed(folder / "installed")
        contestants = [
            Contestant("floor: python -c pass, installed", start(python, *NOTHING)),
            Contestant("quota charge, SQLite, installed", start(python, *charge)),
            Contestant("quota charge, Redis, installed", start(python, *charge, "--config", str(shared))),
            Contestant("refused tick, SQLite, installed", start(python, *tick, str(full))),
            Contestant("refused tick, Redis, installed", start(python, *tick, str(full_too))),
        ]
        rows += race(contestants, rounds, 1, report.progress)
    report.race(
        "cold",
        "Cold process: start, decide, end",
        rows,
        "ratio to `python -c pass` of the same interpreter; `installed`: not editable, as\nfrom a wheel"
        if installed
        else "ratio to `python -c pass` of the same interpreter",
    )
    ending = ", installed" if installed else ""
    ratio = {row.name: row.ratio for row in rows}
    report.bars += [Bar(f"cold, {name}{ending}", ratio[f"{name}{ending}"], most) for name, most in BARS.items()]


def _installed(folder: Path) -> str:
    """A Python with the packages copied to where a wheel would put them; its dependencies are this one's."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    [packages] = (folder / "lib").glob("python*/site-packages")
    lay_out(packages)
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    subprocess.run([python, "-m", "compileall", "-q", packages], check=True)
    return str(python)


def lay_out(packages: Path) -> None:
    """Copy today's packages to where a wheel would put them."""
    skip = shutil.ignore_patterns("__pycache__")
    for name, place in {"quota": "quota", "jobs": "quota/jobs", "lua": "quota/lua", "config": "quota/config"}.items():
        shutil.copytree(REPOSITORY / name, packages / place, ignore=skip)
