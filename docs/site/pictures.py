"""The pictures in docs/pictures/, made from the real thing: `make pictures`. It needs Chromium.

A day is lived through over the emulated upstream: a job, a backfill that fills the limit, and a refusal. Then the page
is looked at in a browser, and what `quota plan` prints on a terminal is set as it stands.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from quota.jobs.emulator import Emulator

if TYPE_CHECKING:
    from collections.abc import Iterator

PICTURES = Path(__file__).resolve().parents[1] / "pictures"
CONFIG = """
[credentials.main]
api = "youtube-v3"
project = "video-research"
key = "env:YOUTUBE_API_KEY"
endpoint = "{address}"

[[credentials.main.limits]]
name = "day"
units = 500
window = "24h"

[[credentials.main.limits]]
name = "pacific-day"
units = 500
window = {{ calendar = "day", zone = "America/Los_Angeles" }}

[jobs.trending]
fetch = "trending"
regions = ["US", "GB", "DE", "FR"]
pages = 2
schedule = "*/20 * * * *"
"""


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, Emulator() as upstream:
        folder = Path(name)
        (folder / "quota.toml").write_text(CONFIG.format(address=upstream.address), encoding="utf-8")
        quota(folder, "run", "trending")
        for region in ("US", "DE", "FR", "GB", "IN"):
            quota(folder, "charge", "search.list", "--job", "backfill", "--region", region)
        picture_of_plan(quota(folder, "plan", "--from", "2026-11-22"))
        with served(folder) as address:
            picture_of_page(folder, address)


def quota(folder: Path, *args: str) -> str:
    """What the command prints, in the colours of a terminal."""
    command = [sys.executable, "-m", "quota", *args]
    return subprocess.run(command, cwd=folder, env=env(folder), capture_output=True, text=True, check=False).stdout


def env(folder: Path) -> dict[str, str]:
    ours = {"QUOTA_STATE_DIR": str(folder / "state"), "YOUTUBE_API_KEY": "a-key", "FORCE_COLOR": "1", "COLUMNS": "96"}
    return {**os.environ, **ours, "TZ": "UTC"}


def picture_of_plan(printed: str) -> None:
    console = Console(record=True, width=96, file=open(os.devnull, "w"))  # noqa: SIM115  # it lives as long as we do
    console.print(Text.from_ansi("$ quota plan\n" + printed))
    picture = console.export_svg(title="quota plan")
    # The font that the reader has: a picture fetches nothing.
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL).replace("Fira Code, ", "")
    (PICTURES / "plan.svg").write_text(picture, encoding="utf-8")


@contextmanager
def served(folder: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "quota", "dashboard", "--listen", f"127.0.0.1:{port}"]
    page = subprocess.Popen(command, cwd=folder, env=env(folder), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{address}/healthz", timeout=20).close()
                break
            except OSError:
                time.sleep(0.1)
        yield address
    finally:
        page.terminate()
        page.wait()


def picture_of_page(folder: Path, address: str) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        sys.exit("chromium is not installed, and the page is looked at in it")
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'b'}",
    ]
    command += ["--window-size=1100,1130", f"--screenshot={PICTURES / 'page.png'}", address]
    subprocess.run(command, check=True, capture_output=True, timeout=300)


if __name__ == "__main__":
    main()
