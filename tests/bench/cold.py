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

CHEAPEST = "import sys, redis; redis.Redis.from_url(sys.argv[1]).eval('return 1', 0)"
"""The cheapest process that asks Redis for a script."""

ON_SQLITE, ON_REDIS, BARE_REDIS = "quota charge, SQLite", "quota charge, Redis", "bare Redis: import, one script"
SQLITE_MOST = 8
"""Beside a Python that does nothing. As from a wheel, where that is measured."""

REDIS_MOST = 1.7
"""Beside the cheapest process on Redis."""


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

    def start(python: str, *arguments: str) -> Callable[[], object]:
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
            assert done.returncode == 0, done.stderr.decode()

        return call

    quota = folder / "quota"
    quota.write_text(SCRIPT)
    charge = (str(quota), "charge", "videos.list")
    for config in (full, full_too):
        start(sys.executable, *charge, "--config", str(config))()
    tick = (str(quota), "run", "trending", "--config")

    def contestants(python: str, kind: str = "") -> list[Contestant]:
        return [
            Contestant(f"floor: python -c pass{kind}", start(python, *NOTHING)),
            Contestant(f"{BARE_REDIS}{kind}", start(python, "-c", CHEAPEST, redis_url)),
            Contestant(f"{ON_SQLITE}{kind}", start(python, *charge)),
            Contestant(f"{ON_REDIS}{kind}", start(python, *charge, "--config", str(shared))),
            Contestant(f"refused run, SQLite{kind}", start(python, *tick, str(full))),
            Contestant(f"refused run, Redis{kind}", start(python, *tick, str(full_too))),
        ]

    rows = race(contestants(sys.executable), rounds, 1, report.progress)
    if installed:
        rows += race(contestants(_installed(folder / "installed"), ", installed"), rounds, 1, report.progress)
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
    sqlite, shared_one, bare = (ratio[f"{name}{ending}"] for name in (ON_SQLITE, ON_REDIS, BARE_REDIS))
    report.bars += [
        Bar(f"cold, {ON_SQLITE}, beside python", sqlite, SQLITE_MOST),
        Bar(f"cold, {ON_REDIS}, beside bare Redis", shared_one / bare, REDIS_MOST),
    ]


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
