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
from typing import TYPE_CHECKING, Any

from chaos.evidence import Evidence, gather
from chaos.plan import LOSSES
from chaos.scene import Scene
from chaos.supervisor import Supervisor
from chaos.verdict import judge

if TYPE_CHECKING:
    from chaos.verdict import Verdict

SECONDS = 300.0
COURSE = "course.pickle"
"""What the supervisor saw, among what it left behind."""


def run(scene: Scene) -> tuple[Evidence, Verdict]:
    """One run, judged, and its table printed."""
    course = Supervisor(scene).run()
    (scene.folder / COURSE).write_bytes(pickle.dumps((scene, course)))
    return again(scene.folder)


def again(folder: Path) -> tuple[Evidence, Verdict]:
    """What an earlier run left in its folder, judged."""
    scene, course = pickle.loads((folder / COURSE).read_bytes())  # noqa: S301  # our own
    evidence = gather(scene, course)
    verdict = judge(evidence)
    print(table(scene, verdict))
    return evidence, verdict


def main() -> int:
    if len(sys.argv) > 1:
        _, verdict = again(Path(sys.argv[1]))
        return bool(verdict.wrong)
    seed = int(os.environ.get("QUOTA_TEST_SEED") or random.randrange(1_000_000))
    seconds = float(os.environ.get("QUOTA_TEST_SECONDS") or SECONDS)
    print(f"seed {seed}, {seconds:g} s of faults", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="quota-chaos-"))
    evidence, verdict = run(Scene(seed, seconds, folder, LOSSES))
    publish(evidence.scene, verdict)
    if not verdict.wrong:
        shutil.rmtree(folder)
        return 0
    print(f"  everything lies in {folder}")
    return 1


# -- the figures of a run ----------------------------------------------------------------------------------------------

TABLES = ("limits", "against the truth")
"""Figures of each limit: a table each."""

PAGE = Path(__file__).resolve().parents[2] / "FAULTS.md"


def publish(scene: Scene, verdict: Verdict, path: Path = PAGE) -> None:
    """Put the figures between the marks of the page that says what happens when things break."""
    figures = verdict.figures
    limits, answers = figures["limits"].values(), figures["decisions by answer"]
    beyond = sum(max(0, row["overspent by the ledger"] - row["excused there"]) for row in limits)
    unknown = figures["spent before a loss was known"]
    too_much = [row["too much, share"] for row in figures["against the truth"].values()]
    recovery, wasted, pages = figures["recovery ms"], figures["wasted"], figures["pages"]
    moves, shared, clocks = figures["moves"], figures["shared pages"], figures["wrong clocks"]
    rows = {
        "seed, seconds of faults": f"{scene.seed}, {scene.seconds:g}",
        "faults": f"{sum(figures['faults'].values())} of {len(figures['faults'])} kinds",
        "decisions": f"{figures['decisions']:,}, admitted {answers['admitted']:,}",
        "units on the wire / charged": f"{figures['wire units']:,} / {figures['charged units']:,}",
        "of these on allowances, repaid": f"{figures['allowance units']:,}, {_repaid(figures['debts'])}",
        "losses of the ledger": str(figures["losses"]),
        "moves by editing its url / by the command, killed on its way": f"{moves['by editing the url']} / "
        f"{moves['by the command']}, {moves['killed on their way']}",
        "units spent before a loss or an edit was known": f"{sum(unknown)}, after one at most {max([0, *unknown])}",
        "units overspent beyond that and the allowance": str(beyond),
        "calls that upstream refused for its quota": str(figures["refused by upstream"]),
        "pages fetched / lost / stored twice": f"{pages['fetched']:,} / {pages['lost']} / {pages['stored twice']}",
        "of these for a shared job / its regions taken over / given to two": f"{shared['fetched']:,} / "
        f"{shared['regions taken over']} / {shared['regions given to two']}",
        "refused for a clock hours behind / sent in spite of it": f"{clocks['refused for that']} / {clocks['sent']}",
        "back after an outage, median / longest": f"{recovery['median']} ms / {recovery['max']} ms",
        "budget wasted by caution": f"{wasted['units']} units, {100 * wasted['share']:.1f}%",
        "limits counted too high, on average": f"by {100 * min(too_much):.1f} to {100 * max(too_much):.1f}%",
    }
    lines = ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())]
    before, start, rest = path.read_text(encoding="utf-8").partition("<!-- figures -->\n")
    _, end, after = rest.partition("<!-- /figures -->")
    path.write_text(before + start + "\n".join(lines) + "\n" + end + after, encoding="utf-8")


def _repaid(debts: dict[str, int]) -> str:
    return "all, once" if not debts["unpaid"] and not debts["missing"] else f"but for {debts}"


def table(scene: Scene, verdict: Verdict) -> str:
    """Seed, faults by kind, and one line a figure; the limits as a table of their own."""
    lines = [f"chaos run, seed {scene.seed}, {scene.seconds:g} s of faults, losses {'on' if scene.losses else 'off'}"]
    lines += [f"  {name:<30} {_inline(value)}" for name, value in verdict.figures.items() if name not in TABLES]
    for table_name in TABLES:
        lines += _columns(verdict.figures[table_name])
    lines += [f"  WRONG: {what}" for what in verdict.wrong] or ["  everything holds"]
    return "\n".join(lines)


def _columns(rows: dict[str, dict[str, Any]]) -> list[str]:
    columns = list(next(iter(rows.values())))
    lines = ["  limit    " + "  ".join(columns)]
    for name, row in rows.items():
        lines.append(f"  {name:<8} " + "  ".join(f"{row[column]:>{len(column)},}" for column in columns))
    return lines


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_inline(each)}" for name, each in value.items()) or "-"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    sys.exit(main())
