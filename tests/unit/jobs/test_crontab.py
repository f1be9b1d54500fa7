"""`quota schedule --crontab`: lines for cron, and comments about what cron cannot do."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from quota import ConfigError
from quota.jobs.ticks import crontab
from quota.settings.load import load_settings

CREDENTIAL = '[credentials.main]\napi = "youtube-v3"\nkey = "env:MY_KEY"\n'


def lines(folder: Path, job: str, name: str = "mine") -> list[str]:
    path = folder / "quota.toml"
    path.write_text(f'{CREDENTIAL}[jobs."{name}"]\nfetch = "trending"\nregions = ["DE", "FR"]\n{job}\n')
    text = "\n".join(crontab(load_settings(path)))
    return text.partition("\n\n")[2].splitlines()


@pytest.fixture
def in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


@pytest.mark.parametrize(
    ("schedule", "line"),
    [
        ("*/30 * * * *", "*/30 * * * *"),
        (" 15  6 * *  mon-fri", "15 6 * * mon-fri"),
        ("every 1m", "* * * * *"),
        ("every 20m", "*/20 * * * *"),
        ("every 6h", "0 */6 * * *"),
    ],
)
def test_a_schedule_is_a_line_with_the_path_of_the_program(
    schedule: str, line: str, tmp_path: Path, in_utc: None
) -> None:
    program = Path(sys.executable).with_name("quota")
    assert lines(tmp_path, f'schedule = "{schedule}"') == [f"{line}  {program} run mine --quiet"]


@pytest.mark.parametrize("schedule", ["every 45m", "every 10s", "every 5h", "every 48h"])
def test_an_interval_that_cron_does_not_have_is_a_comment(schedule: str, tmp_path: Path) -> None:
    (comment,) = lines(tmp_path, f'schedule = "{schedule}"')
    assert comment.startswith(f"# mine: cron cannot run a job {schedule!r}; choose")


def test_a_comment_above_a_crontab_line_names_what_cron_does_differently(tmp_path: Path, in_utc: None) -> None:
    job = 'schedule = "15 6 * * *"\ntimezone = "Europe/Berlin"\nstagger = "2m"\njitter = "30s"'
    zone, remedy, stagger, jitter, line = lines(tmp_path, job)
    assert "these times are in Europe/Berlin" in zone
    assert "CRON_TZ=Europe/Berlin" in remedy
    assert "no stagger (2m): the line fetches 2 regions in one run" in stagger
    assert "no jitter (30s)" in jitter
    assert line.startswith("15 6 * * *  ")
    for zone, count in (("Europe/Berlin", 1), ("Asia/Kathmandu", 3)):  # 15 minutes apart, too
        assert len(lines(tmp_path, f'schedule = "*/20 * * * *"\ntimezone = "{zone}"')) == count


def test_a_name_is_quoted_for_the_shell_and_for_cron(tmp_path: Path) -> None:
    (line,) = lines(tmp_path, 'schedule = "0 * * * *"', name="50% off")
    assert line.endswith("run '50\\% off' --quiet")
    (line,) = lines(tmp_path, 'schedule = "0 * * * *"', name="-x")
    assert line.endswith("run --quiet -- -x")


def test_the_crontab_head_names_the_configuration_and_every_variable_that_a_run_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QUOTA_STATE_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("MY_PASSWORD", "hush")
    monkeypatch.setenv("QUOTA__LEDGER__URL", "redis://127.0.0.1:1/0")
    ledger = '[ledger]\npassword = "env:MY_PASSWORD"\n'
    notify = '[notify]\nurl = "env:MY_HOOK"\n'
    lines(tmp_path, f'schedule = "0 * * * *"\nping = "env:MY_PING"\n{ledger}{notify}')
    head = list(crontab(load_settings(tmp_path / "quota.toml")))
    assert f"QUOTA_CONFIG={tmp_path / 'quota.toml'}" in head
    assert f"QUOTA_STATE_DIR={tmp_path / 'xdg' / 'quota-ledger'}" in head, "else cron would have another ledger"
    once, *named = head[3 : head.index("")]
    assert "Cron does not know" in once
    assert named == ["# MY_HOOK=...", "# MY_KEY=...", "# MY_PASSWORD=...", "# MY_PING=...", "# QUOTA__LEDGER__URL=..."]


def test_a_job_without_a_schedule_is_a_comment_and_none_at_all_an_error(tmp_path: Path) -> None:
    other = '[jobs.other]\nfetch = "trending"\nregions = ["DE"]'
    assert lines(tmp_path, f'schedule = "0 * * * *"\n{other}')[-1].startswith("# other: it has no schedule")
    with pytest.raises(ConfigError, match="no job has a schedule"):
        lines(tmp_path, "")
