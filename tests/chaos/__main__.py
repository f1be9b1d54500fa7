"""One chaos run: `python -m chaos` in the folder `tests`.

QUOTA_TEST_SECONDS says how long faults strike (25), QUOTA_TEST_SEED which ones (drawn if not given, and printed).
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path

from chaos.evidence import gather
from chaos.plan import LOSSES
from chaos.report import table, write
from chaos.scene import Scene
from chaos.supervisor import Supervisor
from chaos.verdict import Verdict, judge

SECONDS = 25.0


def run(seed: int, seconds: float, folder: Path, *, losses: bool = LOSSES) -> tuple[Scene, Verdict]:
    scene = Scene(seed, seconds, folder, losses)
    verdict = judge(gather(scene, Supervisor(scene).run()))
    write(scene, verdict)
    return scene, verdict


def main() -> int:
    seed = int(os.environ.get("QUOTA_TEST_SEED") or random.randrange(1_000_000))
    seconds = float(os.environ.get("QUOTA_TEST_SECONDS") or SECONDS)
    print(f"seed {seed}, {seconds:g} s of faults", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="quota-chaos-"))
    scene, verdict = run(seed, seconds, folder)
    print(table(scene, verdict))
    print(f"  everything lies in {folder}")
    return 1 if verdict.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
