"""One chaos run: `python -m chaos` in the folder `tests`; with the folder of an earlier run that one is judged again.

QUOTA_TEST_SECONDS says how long faults strike (300), QUOTA_TEST_SEED which ones (drawn if not given, and printed).
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
import sys
import tempfile
from pathlib import Path

from chaos.evidence import Evidence, gather
from chaos.plan import LOSSES
from chaos.report import publish, table, write
from chaos.scene import Scene
from chaos.supervisor import Supervisor
from chaos.verdict import judge

SECONDS = 300.0
COURSE = "course.pickle"
"""What the supervisor saw, among what it left behind."""


def run(scene: Scene) -> Evidence:
    """One run, judged, its figures written and its table printed."""
    course = Supervisor(scene).run()
    (scene.folder / COURSE).write_bytes(pickle.dumps((scene, course)))
    return again(scene.folder)


def again(folder: Path) -> Evidence:
    """What an earlier run left in its folder, judged."""
    scene, course = pickle.loads((folder / COURSE).read_bytes())  # noqa: S301  # our own
    evidence = gather(scene, course)
    verdict = judge(evidence)
    write(scene, verdict)
    print(table(scene, verdict))
    return evidence


def main() -> int:
    if len(sys.argv) > 1:
        return bool(judge(again(Path(sys.argv[1]))).wrong)
    seed = int(os.environ.get("QUOTA_TEST_SEED") or random.randrange(1_000_000))
    seconds = float(os.environ.get("QUOTA_TEST_SECONDS") or SECONDS)
    print(f"seed {seed}, {seconds:g} s of faults", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="quota-chaos-"))
    evidence = run(Scene(seed, seconds, folder, LOSSES))
    verdict = judge(evidence)
    publish(evidence.scene, verdict)
    if not verdict.wrong:
        shutil.rmtree(folder)
        return 0
    print(f"  everything lies in {folder}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
