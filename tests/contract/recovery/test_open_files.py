"""A process that uses many projects keeps few files of what it saw open, and forgets nothing for it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from quota.recovery import registry
from quota.session import Session
from quota.settings.load import load_settings

if TYPE_CHECKING:
    from pathlib import Path

    from support.losses import LedgerStorage

NOW_MS = 1_795_255_200_000
SEARCH_UNITS = 100


def configure(folder: Path, url: str, projects: int) -> Path:
    lines = [f'[ledger]\nurl = "{url}"\nname = "tests"\n']
    lines += [f'[credentials.p{n}]\napi = "youtube-v3"\nproject = "p{n}"\n' for n in range(projects)]
    path = folder / "quota.toml"
    path.write_text("".join(lines), encoding="utf-8")
    return path


def open_marks(state: Path) -> int:
    """How many files of what was seen, in this state folder, are open in this process."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{fd}").startswith(f"{state}/high-water-marks/")
        except OSError:
            continue
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no /proc: open files cannot be counted")
@pytest.mark.parametrize("same_process", [True, False])
def test_what_was_seen_of_many_projects_is_remembered_with_few_open_files(
    ledger_place: LedgerStorage, state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, same_process: bool
) -> None:
    monkeypatch.setattr(registry, "MAX_FILES", 3)
    settings = load_settings(configure(tmp_path, ledger_place.url, 10))
    session, now_ms = Session(settings, clock=lambda: now_ms), NOW_MS
    for _ in range(2):
        for name in settings.credentials:
            assert session.budget(name).charge("search.list").admitted
            assert open_marks(state_dir) <= 3
        now_ms += 1_000
    copy = ledger_place.copy()
    for name in settings.credentials:
        assert session.budget(name).charge("search.list").admitted
    if not same_process:
        session.close()
    ledger_place.restore(copy)  # type: ignore[arg-type]
    if not same_process:
        session = Session(settings, clock=lambda: now_ms)
    for name in settings.credentials:
        assert session.budget(name).peek("search.list").limits[0].used_units == 3 * SEARCH_UNITS
    assert open_marks(state_dir) <= 3
    session.close()


def test_what_a_decision_shows_is_kept_though_its_file_was_closed_meanwhile(
    ledger_place: LedgerStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_settings(configure(tmp_path, ledger_place.url, 1))
    with Session(settings, clock=lambda: NOW_MS) as session:
        budget = session.budget("p0")
        assert budget.charge("search.list").admitted
        copy = ledger_place.copy()
        (mark,) = session._high_water_marks.values()
        decide = session.ledger.decide

        def closing(*args: object, **options: object) -> object:
            assert mark.close_if_idle()
            return decide(*args, **options)  # type: ignore[arg-type]

        with monkeypatch.context() as closes:
            closes.setattr(session.ledger, "decide", closing)
            assert budget.charge("search.list").admitted
    ledger_place.restore(copy)  # type: ignore[arg-type]
    with Session(settings, clock=lambda: NOW_MS) as session:
        assert session.budget("p0").peek("search.list").limits[0].used_units == 2 * SEARCH_UNITS


def test_a_status_of_many_projects_needs_no_more_files_than_a_system_allows(tmp_path: Path) -> None:
    configure(tmp_path, f"sqlite:///{tmp_path}/ledger.db", 400)
    code = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (200, 200)); from quota.cli.entry import main; main()"
    command = [sys.executable, "-c", code, "status", "--json"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.count('"project":') == 400
