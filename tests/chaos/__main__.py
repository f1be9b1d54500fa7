"""One chaos run: `python -m chaos` in the folder `tests`.

QUOTA_TEST_SECONDS says how long faults strike (300), QUOTA_TEST_SEED which ones (drawn if not given, and printed).
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

from chaos.course import Chaos
from chaos.judge import Verdict, gather, judge
from chaos.scene import Scene

SECONDS = 300.0
PAGE = Path(__file__).resolve().parents[2] / "FAULTS.md"


def main() -> int:
    seed = int(os.environ.get("QUOTA_TEST_SEED") or random.randrange(1_000_000))
    seconds = float(os.environ.get("QUOTA_TEST_SECONDS") or SECONDS)
    folder = Path(tempfile.mkdtemp(prefix="quota-chaos-"))
    print(f"seed {seed}, {seconds:g} s of faults; everything lies in {folder}", flush=True)
    scene = Scene(seed, seconds, folder)
    Chaos(scene).run()
    return conclude(judge(gather(scene)))


def conclude(verdict: Verdict, page: Path = PAGE) -> int:
    """Show what came of a run. One that failed keeps its folder."""
    print(table(verdict))
    publish(verdict, page)
    if verdict.wrong:
        return 1
    shutil.rmtree(verdict.scene.folder)
    return 0


def table(verdict: Verdict) -> str:
    """One line a figure, and one for each thing that is wrong."""
    lines = [f"  {name:<50} {value}" for name, value in verdict.rows.items()]
    lines += [f"  WRONG: {what}" for what in verdict.wrong] or ["  everything holds"]
    return "\n".join(lines)


def publish(verdict: Verdict, page: Path) -> None:
    """Put the figures between the marks of the page that says what happens when things break."""
    lines = ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in verdict.rows.items())]
    before, start, rest = page.read_text(encoding="utf-8").partition("<!-- figures -->\n")
    _, end, after = rest.partition("<!-- /figures -->")
    page.write_text(before + start + "\n".join(lines) + "\n" + end + after, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
