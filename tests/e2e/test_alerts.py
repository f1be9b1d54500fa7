"""The alert rules and the dashboard: each rule fires where it should and nowhere else, by Prometheus' own tool."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from quota.reports.metrics import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "config" / "alerts.yml"
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for rule in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"][0]["rules"]
}
BOARD = json.loads((ROOT / "config" / "grafana.json").read_text(encoding="utf-8"))
DAY = '{project="p",limit="day"}'
JOB = '{project="p",quota_job="j"}'
BUCKET = '{project="p",bucket="units"}'
CHARGED = '{project="p",quota_job="j",method="videos.list"}'
REFUSED = '{project="p",quota_job="j",limit="day",reason="limit"}'
REGION = '{project="p",quota_job="j",region="DE"}'

# A sample a minute for 6 h. Each: what is exported, and the minute at which the alert fires, or does not.
CASES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "QuotaNearLimit": (
        {f"quota_limit_used_units{DAY}": "801x360", f"quota_limit_units{DAY}": "1000x360"},
        {f"quota_limit_used_units{DAY}": "800x360", f"quota_limit_units{DAY}": "1000x360"},
    ),
    # 100 units an hour, 500 used after 5 h; the reset is 12 h after the start.
    "QuotaDryBeforeReset": (
        {
            f"quota_limit_used_units{DAY}": "0+2x360",
            f"quota_limit_units{DAY}": "1000x360",
            f"quota_limit_reset_timestamp_seconds{DAY}": "43200x360",
        },
        {
            f"quota_limit_used_units{DAY}": "0+1x360",
            f"quota_limit_units{DAY}": "1000x360",
            f"quota_limit_reset_timestamp_seconds{DAY}": "43200x360",
        },
    ),
    "QuotaExhausted": (
        {'quota_bucket_exhausted{project="p",bucket="units"}': "1x360"},
        {'quota_bucket_exhausted{project="p",bucket="units"}': "0x360"},
    ),
    # Of two machines, the one that completed a region last counts.
    "QuotaRegionStale": (
        {f"quota_region_completed_timestamp_seconds{REGION}": "1800x360"},
        {
            f"quota_region_completed_timestamp_seconds{REGION}": "1800x360",
            'quota_region_completed_timestamp_seconds{project="p",quota_job="j",region="DE",instance="b"}': "9000x360",
        },
    ),
    # Stopped by the budget, or ended by a signal, is no failure.
    "QuotaRunFailing": (
        {f"quota_run_last_exit_status{JOB}": "1x360"},
        {f'quota_run_last_exit_status{{project="p",quota_job="j{n}"}}': f"{n}x360" for n in (0, 75, 129, 130, 143)},
    ),
    "QuotaTextfileStale": (
        {f"quota_textfile_written_timestamp_seconds{JOB}": "600x360"},
        {
            f"quota_textfile_written_timestamp_seconds{JOB}": "0+60x360",
            'quota_textfile_written_timestamp_seconds{project="p"}': "0x360",
        },
    ),
    "QuotaLedgerDown": ({'quota_ledger_up{project="p"}': "0x360"}, {'quota_ledger_up{project="p"}': "1x360"}),
    "QuotaLedgerLost": (
        {'quota_ledger_put_back_charges{project="p"}': "7x360"},
        {'quota_ledger_put_back_charges{project="p"}': "0x360"},
    ),
    # More than 5% of what upstream counted; nothing is said of it once the figures are a day old.
    "QuotaDrift": (
        {
            f"quota_upstream_drift_units{BUCKET}": "7x360",
            f"quota_upstream_used_units{BUCKET}": "100x360",
            f"quota_upstream_compared_timestamp_seconds{BUCKET}": "7200x360",
        },
        {
            f"quota_upstream_drift_units{BUCKET}": "5x360",
            f"quota_upstream_used_units{BUCKET}": "100x360",
            f"quota_upstream_compared_timestamp_seconds{BUCKET}": "7200x360",
            'quota_upstream_drift_units{project="old",bucket="units"}': "7x360",
            'quota_upstream_used_units{project="old",bucket="units"}': "0x360",
            'quota_upstream_compared_timestamp_seconds{project="old",bucket="units"}': "-90000x360",
        },
    ),
    # A job that is never admitted has no charges at all; another job's do not count for it.
    "QuotaRejectionRate": (
        {
            f"quota_refusals_total{REFUSED}": "0+2x360",
            'quota_charges_total{project="p",quota_job="k",method="videos.list"}': "0+9x360",
        },
        {
            f"quota_refusals_total{REFUSED}": "0+2x360",
            'quota_refusals_total{project="p",limit="day"}': "0+9x360",
            f"quota_charges_total{CHARGED}": "0+3x360",
        },
    ),
}


def promtool(*args: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed")
    return subprocess.run([program, *args], capture_output=True, text=True, timeout=300, check=False)


def test_every_rule_has_a_case() -> None:
    assert CASES.keys() == ALERTS.keys()


def cases(alert: str) -> Iterator[dict[str, Any]]:
    """Its two cases, as promtool reads them."""
    rule = ALERTS[alert]
    kept = re.findall(r"by \(([a-z_, ]+)\)", rule["expr"])[0].split(", ")
    value = "7" if alert in ("QuotaLedgerLost", "QuotaDrift") else "1"
    for fires, series in zip((True, False), CASES[alert], strict=True):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', next(iter(series))))
        labels = {name: labels[name] for name in kept}
        shown = {**{f"$labels.{name}": given for name, given in labels.items()}, "$value": value}
        words = {}
        for name, text in rule["annotations"].items():
            for place, given in shown.items():
                text = text.replace(f"{{{{ {place} }}}}", given)
            words[name] = text
        expected = [{"exp_labels": {**labels, **rule["labels"]}, "exp_annotations": words}] if fires else []
        yield {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "alert_rule_test": [{"alertname": alert, "eval_time": "5h", "exp_alerts": expected}],
        }


def test_a_rule_fires_where_it_should_and_nowhere_else(tmp_path: Path) -> None:
    tests = [case for alert in CASES for case in cases(alert)]
    file = tmp_path / "cases.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "5m", "tests": tests}))
    done = promtool("test", "rules", str(file))
    assert done.returncode == 0, (done.stdout, done.stderr)


def expressions() -> dict[str, str]:
    """Every expression of the rules and the dashboard, with its place."""
    queries = {f"alerts.yml {name}": rule["expr"] for name, rule in ALERTS.items()}
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            queries[f"grafana.json {panel['title']} {target['refId']}"] = target["expr"]
    return queries


def test_every_name_that_is_used_is_exported() -> None:
    used = {name: set(re.findall(r"\bquota_[a-z_]+\b", text)) - {"quota_job"} for name, text in expressions().items()}
    assert len(used) > 15
    assert {place: names - FAMILIES.keys() for place, names in used.items() if names - FAMILIES.keys()} == {}
    assert all(names for names in used.values())


def test_prometheus_can_read_every_expression(tmp_path: Path) -> None:
    plain = [text.replace("$project", ".*") for text in expressions().values()]
    rules = [{"record": f"checked:{n}", "expr": text} for n, text in enumerate(plain)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    done = promtool("check", "rules", str(file))
    assert (done.returncode, f"{len(rules)} rules found" in done.stdout) == (0, True), done.stderr


def test_the_page_lists_every_metric() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(quota_\w+)` \|", page, flags=re.MULTILINE)) == FAMILIES.keys()
