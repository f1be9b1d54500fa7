"""`quota inbound`, `quota check` and Prometheus: what an operator sees of the rules."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from quota.inbound import asgi, load_rules, metrics_app
from support.commands import Quota
from support.inbound_http import Client, answer, running

RULES = """
[inbound]
url = "sqlite:///inbound.db"

[inbound.login]
path = "/login"
methods = ["POST"]
algorithm = "log"
limit = 2
window = "1h"

[inbound.default]
limit = 100
window = "1h"
"""


@pytest.fixture
def quota(tmp_path: Path) -> Quota:
    quota = Quota(tmp_path)
    quota.configure(RULES)
    return quota


def ask_all(quota: Quota) -> None:
    app = asgi(answer, load_rules(quota.folder / "quota.toml"))
    with running(app) as port:
        client = Client(port)
        client("/")  # the first one makes the file
        assert [client("/login", "POST").status for _ in range(3)] == [200, 200, 429]
        client.close()
    app._decider.hand_over()


def test_an_operator_sees_rules_and_who_uses_most_by_hash(quota: Quota) -> None:
    ask_all(quota)
    status = quota.json("inbound", "status")
    login, default = status["rules"]
    assert (login["admitted"], login["refused"], login["identities"]) == (2, 1, 1)
    assert (default["admitted"] + default["failed_open"], default["refused"], default["algorithm"]) == (1, 0, "counter")
    assert login["limits"] == [{"name": "login", "limit": 2, "window_ms": 3_600_000, "burst": None}]
    (top,) = quota.json("inbound", "top", "login")["identities"]
    assert re.fullmatch("[0-9a-f]{16}", top["name"])
    assert (top["used"], top["limit"], top["window_ms"]) == (2, 2, 3_600_000)
    shown = quota("inbound", "status").stdout.splitlines()
    assert max(map(len, shown[:-1])) <= 80
    narrow = quota("inbound", "status", COLUMNS="40").stdout.splitlines()
    assert max(map(len, narrow[:-1])) <= 40
    assert narrow[2].split() == ["login", "2", "1", "0"]
    assert shown[2].split() == ["login", "POST", "/login", "2", "in", "1h", "log", "1", "2", "1", "0"]
    assert quota("inbound", "top", "login").stdout.splitlines()[2].split() == [top["name"], "2", "2", "1h"]
    assert re.search("begin at 20.*[+]00:00 or later", quota("inbound", "rotate").stdout)
    unknown = quota("inbound", "top", "logn")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (2, 1)
    assert "did you mean 'login'?" in unknown.stderr


def test_prometheus_reads_the_numbers_from_the_application(quota: Quota) -> None:
    ask_all(quota)
    with running(metrics_app(load_rules(quota.folder / "quota.toml"))) as port:
        client = Client(port)
        got = client("/metrics")
        client.close()
    text = got.body.decode()
    assert got.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'quota_inbound_requests_total{outcome="refused",rule="login"} 1\n' in text
    assert 'quota_inbound_identities{rule="login"} 1\n' in text
    assert "quota_inbound_storage_up 1\n" in text
    assert "quota_inbound_decision_seconds_count 4\n" in text
    assert 'quota_inbound_decision_seconds_bucket{le="+Inf"} 4\n' in text
    if shutil.which("promtool") is None:
        pytest.skip("no promtool: install Debian's package prometheus")
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_an_absent_storage_is_reported_as_absent(quota: Quota) -> None:
    quota.configure(RULES.replace("sqlite:///inbound.db", "redis://127.0.0.1:1/0"))
    away = quota("inbound", "status")
    assert (away.returncode, away.stderr.count("\n")) == (69, 1)
    with running(metrics_app(load_rules(quota.folder / "quota.toml"))) as port:
        client = Client(port)
        body = client().body.decode()
        client.close()
    assert "quota_inbound_storage_up 0\n" in body
    assert "requests_total" not in body


def test_check_finds_rules_that_cannot_be_meant(quota: Quota) -> None:
    assert quota("check").stdout == "quota.toml: no errors\n"
    quota.configure(RULES + "[inbound.late]\nlimit = 1\nwindow = '1s'\n")
    done = quota("check")
    message = (
        "error: inbound.late: no request reaches it: rule default before it has no path, so it takes every request;"
    )
    assert (done.returncode, done.stderr) == (78, f"{message} put late before it\n")


def test_the_inbound_commands_make_no_file(quota: Quota) -> None:
    assert [rule["admitted"] for rule in quota.json("inbound", "status")["rules"]] == [0, 0]
    assert quota.json("inbound", "top", "login")["identities"] == []
    done = quota("inbound", "rotate")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert not (quota.folder / "inbound.db").exists()
