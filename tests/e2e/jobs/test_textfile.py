"""The metrics that a run leaves for node_exporter: scraped by a real one, with everything that loses a file."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from quota.reports.metrics import FAMILIES, MAX_FILE_NAME, Sample, exposition, file_name, write_file
from quota.terms.limits import DAY_MS
from support.commands import Quota
from support.emulator import Emulator
from support.servers import free_port, until

CONFIG = """
textfile = "metrics"
[ledger]
url = "{ledger}"
[credentials.main]
api = "youtube-v3"
project = "video-research"
key = "env:KEY"
endpoint = "{endpoint}"
cloud_project = "cloud-project-1"
limits = [
    {{ name = "day", quota = 100, headroom = 10, window = "24h" }},
    {{ name = 'a "pacific" \\ day', units = 80, window = {{ calendar = "day", zone = "America/Los_Angeles" }} }},
]
[jobs.trending]
fetch = "trending"
regions = ["US", "DE"]
pages = 1
[jobs."a/b-c d"]
fetch = "trending"
regions = ["FR"]
pages = 1
"""

Series = dict[str, float]


def machine(folder: Path, upstream: Emulator, ledger: str = "sqlite:///ledger.db") -> Quota:
    folder.mkdir(exist_ok=True)
    (folder / "metrics").mkdir()
    quota = Quota(folder)
    quota.configure(CONFIG.format(ledger=ledger, endpoint=upstream.address))
    quota.env["KEY"] = "a-key-for-metrics"
    return quota


def scrape(folder: Path) -> Series:
    """What Prometheus would get of a real collector: every series of ours, and the collector's own word on errors."""
    program = shutil.which("prometheus-node-exporter")
    if program is None:
        pytest.skip("prometheus-node-exporter is not installed")
    address = f"127.0.0.1:{free_port()}"
    command = [program, "--collector.disable-defaults", "--collector.textfile"]
    command += [f"--collector.textfile.directory={folder}", f"--web.listen-address={address}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: _is_up(address), "the collector")
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=100) as answer:  # our own
                text = answer.read().decode()
        finally:
            process.terminate()
    samples = re.findall(r"^((?:quota_|node_textfile_scrape_error).*) (\S+)$", text, flags=re.MULTILINE)
    return {name: float(value) for name, value in samples}


def _is_up(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@pytest.fixture
def quota(tmp_path: Path, upstream: Emulator) -> Quota:
    return machine(tmp_path / "one", upstream)


def test_a_real_collector_reads_two_jobs(quota: Quota) -> None:
    assert quota("run", "trending").returncode == 0
    assert quota("reconcile").returncode == 0
    assert quota("run", "a/b-c d").returncode == 0
    folder = quota.folder / "metrics"
    assert sorted(path.name for path in folder.iterdir()) == [
        "quota-video%2Dresearch-a%2Fb%2Dc%20d.prom",
        "quota-video%2Dresearch-trending.prom",
        "quota-video%2Dresearch.prom",
    ]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o644}
    series = scrape(folder)
    assert series.pop("node_textfile_scrape_error") == 0
    status = quota.json("status")["credentials"][0]
    day, pacific = status["limits"]
    label = 'limit="day",project="video-research"'
    assert series[f"quota_limit_units{{{label}}}"] == day["limit_units"] == 90
    assert series[f"quota_limit_used_units{{{label}}}"] == day["used_units"] == 3
    assert series[f"quota_limit_remaining_units{{{label}}}"] == day["remaining_units"] == 87
    other = r'limit="a \"pacific\" \\ day",project="video-research"'
    assert series[f"quota_limit_used_units{{{other}}}"] == pacific["used_units"]
    assert f"quota_limit_reset_timestamp_seconds{{{label}}}" not in series, "a sliding window has no reset"
    assert series[f"quota_limit_reset_timestamp_seconds{{{other}}}"] > time.time()
    assert series['quota_bucket_exhausted{bucket="units",project="video-research"}'] == 0
    assert series['quota_ledger_up{project="video-research"}'] == 1
    units = 'bucket="units",project="video-research"'
    assert series[f"quota_upstream_used_units{{{units}}}"] == 2, "when it was asked, before the second job"
    assert series[f"quota_upstream_drift_units{{{units}}}"] == 0
    assert 0 <= time.time() - series[f"quota_upstream_compared_timestamp_seconds{{{units}}}"] < 600
    for job, regions in (("trending", ("US", "DE")), ("a/b-c d", ("FR",))):
        assert series[f'quota_run_last_exit_status{{project="video-research",quota_job="{job}"}}'] == 0
        for region in regions:
            labels = f'project="video-research",quota_job="{job}",region="{region}"'
            assert abs(series[f"quota_region_completed_timestamp_seconds{{{labels}}}"] - time.time()) < 600
    assert "a-key-for-metrics" not in "".join(path.read_text() for path in folder.iterdir())


def test_the_total_of_charges_only_grows(quota: Quota) -> None:
    charged = quota.json("charge", "videos.list", "--units", "5")
    assert quota("run", "trending").returncode == 0

    def totals() -> Series:
        series = scrape(quota.folder / "metrics")
        assert series.pop("node_textfile_scrape_error") == 0
        return {name: value for name, value in series.items() if "_total{" in name}

    by_hand = 'method="videos.list",project="video-research"'
    by_job = f'{by_hand},quota_job="trending"'
    assert totals() == {
        f"quota_charges_total{{{by_hand}}}": 1,
        f"quota_charged_units_total{{{by_hand}}}": 5,
        f"quota_corrected_units_total{{{by_hand}}}": 0,
        f"quota_charges_total{{{by_job}}}": 2,
        f"quota_charged_units_total{{{by_job}}}": 2,
        f"quota_corrected_units_total{{{by_job}}}": 0,
    }
    assert quota("settle", charged["id"], "2").returncode == 0
    assert quota("run", "trending").returncode == 0
    after = totals()
    assert after[f"quota_charged_units_total{{{by_hand}}}"] == 5, "as it was charged"
    assert after[f"quota_charged_units_total{{{by_job}}}"] == 4


def test_a_refused_run_and_a_failed_one_are_exported(quota: Quota) -> None:
    ended = 'quota_run_last_exit_status{project="video-research",quota_job="trending"}'
    assert quota("charge", "videos.list", "--units", "80").returncode == 0
    assert quota("run", "trending", "--fail-on-refusal").returncode == 75
    series = scrape(quota.folder / "metrics")
    assert series[ended] == 75
    refusals = {name: value for name, value in series.items() if name.startswith("quota_refusals_total")}
    limit = r'limit="a \"pacific\" \\ day",project="video-research",quota_job="trending",reason="limit"'
    assert refusals == {f"quota_refusals_total{{{limit}}}": 1}, "with the refusal that ended this run"
    assert not [name for name in series if name.startswith("quota_region_completed")]
    assert series['quota_limit_remaining_units{limit="a \\"pacific\\" \\\\ day",project="video-research"}'] == 0
    shutil.rmtree(quota.folder / "state", ignore_errors=True)
    (quota.folder / "ledger.db").unlink()
    assert quota("run", "trending", KEY="").returncode == 78
    assert scrape(quota.folder / "metrics")[ended] == 78


def test_the_textfile_has_a_closed_bucket_and_its_end(quota: Quota, upstream: Emulator) -> None:
    upstream.fault("exhaust", bucket="units", times=10)
    assert quota("run", "trending").returncode == 0
    series = scrape(quota.folder / "metrics")
    assert series['quota_bucket_exhausted{bucket="units",project="video-research"}'] == 1
    ends_s = series['quota_bucket_exhausted_until_timestamp_seconds{bucket="units",project="video-research"}']
    assert 0 < ends_s - time.time() < DAY_MS / 1000 + 3_700


def test_a_folder_that_cannot_be_written_is_one_line(quota: Quota) -> None:
    shutil.rmtree(quota.folder / "metrics")
    done = quota("run", "trending", "--quiet")
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("quota: textfile_not_written folder=")


def test_a_ledger_that_is_away_is_exported_as_down(tmp_path: Path, upstream: Emulator) -> None:
    quota = machine(tmp_path / "one", upstream, f"redis://127.0.0.1:{free_port()}/0")
    assert quota("run", "trending").returncode == 69
    series = scrape(quota.folder / "metrics")
    assert series['quota_ledger_up{project="video-research"}'] == 0
    assert series['quota_run_last_exit_status{project="video-research",quota_job="trending"}'] == 69
    assert not [name for name in series if name.startswith("quota_limit_")], "no stale number"


def test_every_family_has_its_help_once_and_nothing_has_a_timestamp() -> None:
    labels = {"project": 'a"\\\n', "region": ""}
    text = exposition([Sample(name, labels, 0.5) for name in FAMILIES])
    assert text.endswith("\n")
    for name, (kind, words) in FAMILIES.items():
        assert re.fullmatch(r"[A-Z0-9].*\.", words)
        head = f'# HELP {name} {words}\n# TYPE {name} {kind}\n{name}{{project="a\\"\\\\\\\\n"}} 0.5\n'
        assert text.count(head) == 1
        assert name.endswith("_total") == (kind == "counter")


def test_the_exposition_merges_samples_with_equal_labels() -> None:
    labels = {"project": "p", "reason": "a\udc80"}
    text = exposition([Sample("quota_refusals_total", labels, value) for value in (3, 5, 4)])
    assert text.splitlines()[2:] == ['quota_refusals_total{project="p",reason="a\\\\udc80"} 5']


def test_no_two_names_share_a_file() -> None:
    short = ["a", "a-b", "b", "b-c", "c", "a%2Db", "-", "", "a~b", "a/b", "a b", "ü"]
    names = [*short, "東京" * 32, "東京" * 31 + "東", "x" * 64]
    files = [file_name(project, job) for project in names for job in (None, *names)]
    assert len(set(files)) == len(files)
    for name in files:
        assert re.fullmatch(r"quota-[A-Za-z0-9%._~-]*\.prom", name)
        assert len(name) <= MAX_FILE_NAME + len("quota-.prom")


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    write_file(str(tmp_path), "quota-p.prom", "one\n")
    os.umask(0o077)
    try:
        write_file(str(tmp_path), "quota-p.prom", "two\n")
    finally:
        os.umask(0o022)
    assert [path.name for path in tmp_path.iterdir()] == ["quota-p.prom"]
    assert (tmp_path / "quota-p.prom").read_text() == "two\n"
    assert stat.S_IMODE((tmp_path / "quota-p.prom").stat().st_mode) == 0o644
