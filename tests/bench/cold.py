"""A process that makes one decision and ends: what a line in a crontab pays."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import venv
from collections.abc import Callable
from pathlib import Path

from bench.race import Contestant, race
from bench.report import Bar, Report

REPOSITORY = Path(__file__).resolve().parents[2]
NOTHING = ("-c", "pass")
SCRIPT = "import sys\nfrom quota.cli.entry import main\nsys.exit(main())\n"
"""What pip installs as the command `quota`."""

FULL = """
[credentials.main]
api = "youtube-v3"
limits = [{ name = "day", units = 1, window = "24h" }]
[jobs.trending]
fetch = "trending"
regions = ["US"]
"""

CHEAPEST = "import sys, redis; redis.Redis.from_url(sys.argv[1]).eval('return 1', 0)"
"""The cheapest process that asks Redis for a script."""

ON_SQLITE, ON_REDIS, BARE_REDIS = "quota charge, SQLite", "quota charge, Redis", "bare Redis: import, one script"
SQLITE_MOST = 9
"""Beside a Python that does nothing."""

REDIS_MOST = 1.3
"""Beside the cheapest process on Redis."""


def measure(report: Report, folder: Path, redis_url: str, rounds: int) -> None:
    """Whole processes, started by turns, from a copy laid out as a wheel installs it. An editable install would slow
    down every start of its Python, also one that does nothing, and so make everything else look fast beside that."""
    report.begin("cold processes")
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

    python, quota = _installed(folder / "installed"), folder / "quota"
    quota.write_text(SCRIPT)
    charge = (str(quota), "charge", "videos.list")
    for config in (full, full_too):
        start(python, *charge, "--config", str(config))()
    tick = (str(quota), "run", "trending", "--config")

    contestants = [
        Contestant("floor: python -c pass", start(python, *NOTHING)),
        Contestant(BARE_REDIS, start(python, "-c", CHEAPEST, redis_url)),
        Contestant(ON_SQLITE, start(python, *charge)),
        Contestant(ON_REDIS, start(python, *charge, "--config", str(shared))),
        Contestant("refused run, SQLite", start(python, *tick, str(full))),
        Contestant("refused run, Redis", start(python, *tick, str(full_too))),
    ]
    rows = race(contestants, rounds, 1)
    report.race(
        "Cold process: start, decide, end",
        rows,
        "ratio to `python -c pass` of the same interpreter; installed as from a wheel",
    )
    ratio = {row.name: row.ratio for row in rows}
    report.bars += [
        Bar(f"cold, {ON_SQLITE}, beside python", ratio[ON_SQLITE], SQLITE_MOST),
        Bar(f"cold, {ON_REDIS}, beside bare Redis", ratio[ON_REDIS] / ratio[BARE_REDIS], REDIS_MOST),
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
    """Copy today's packages to where a wheel would put them, with what is compiled of them already."""
    for name, place in {"quota": "quota", "jobs": "quota/jobs", "lua": "quota/lua", "config": "quota/config"}.items():
        shutil.copytree(REPOSITORY / name, packages / place)
