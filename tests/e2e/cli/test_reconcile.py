"""`quota reconcile` as operators and cron have it: what it prints, and its exit statuses."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
from pathlib import Path

import pytest

from quota.clients.metering import Meter
from quota.ledger.sqlite_log import SqliteLog
from quota.rules.facts import Exhaustion
from quota.settings.books import load_book
from support.commands import Quota, one_line
from support.emulator import Emulator
from support.servers import free_port
from support.setup import budget_of, state_at

CONFIG = """\
[ledger]
url = "{url}"
[credentials.main]
api = "youtube-v3"
project = "p"
key = "env:A_KEY"
endpoint = "{endpoint}"
cloud_project = "{cloud_project}"
"""


@pytest.fixture
def quota(quota: Quota, upstream: Emulator) -> Quota:
    quota.env["A_KEY"] = "a-key"
    configure(quota, upstream)
    return quota


def configure(quota: Quota, upstream: Emulator, *, url: str = "sqlite:///l.db", more: str = "") -> None:
    quota.configure(CONFIG.format(url=url, endpoint=upstream.address, cloud_project="cloud-project-1") + more)


def searches(upstream: Emulator, times: int) -> None:
    """Somebody else's."""
    connection = http.client.HTTPConnection(upstream.address.removeprefix("http://"), timeout=300)
    for _ in range(times):
        connection.request("GET", "/youtube/v3/search?part=id&q=x&key=somebody-else")
        connection.getresponse().read()
    connection.close()


def test_somebody_else_is_found_and_counts_from_then_on(quota: Quota, upstream: Emulator) -> None:
    assert quota("reconcile", "--check").returncode == 0
    searches(upstream, 3)
    dry = quota("reconcile", "--dry-run")
    assert dry.stdout.splitlines()[-1] == "a dry run: nothing was changed"
    done = quota("reconcile")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "main: project p, in Google Cloud cloud-project-1"
    assert lines[-1] == "tightened"
    since = r"\S+ \(\S+T00:00:00-0[78]:00 in America/Los_Angeles\)"
    assert re.search(rf"units: upstream alone counted 300 since {since}: search.list 300 ", " ".join(lines))
    assert max(map(len, lines)) <= 80
    assert quota("reconcile", "--check").returncode == 1
    assert "OPEN: 9,200 units" in quota("status").stdout


def test_reconcile_prints_json(quota: Quota, upstream: Emulator) -> None:
    searches(upstream, 1)
    answer = quota.json("reconcile")
    assert answer["dry_run"] is False
    (project,) = answer["projects"]
    assert (project["credential"], project["project"], project["changed"]) == ("main", "p", True)
    assert project["tolerance_ms"] == 600_000
    assert project["lag_ms"] < 60_000
    (bucket,) = project["buckets"]
    units = {"upstream_units": 100, "our_units": 0, "unknown_units": 100, "granted_units": 10_000}
    assert {name: bucket[name] for name in ("bucket", *units)} == {"bucket": "units", **units}
    assert [row["limit"] for row in project["others"]] == ["day", "pacific-day"]


def test_a_difference_sends_one_alert_and_stays_in_the_status(quota: Quota, upstream: Emulator, tmp_path: Path) -> None:
    tell = '[notify]\ncommand = ["sh", "-c", "cat >> told.json; echo >> told.json"]\n'
    configure(quota, upstream, more=tell)
    assert "upstream" not in quota.json("status")["credentials"][0]
    searches(upstream, 1)
    for command in (("reconcile", "--dry-run"), ("reconcile",), ("reconcile", "--check")):
        assert not (tmp_path / "told.json").exists() or command == ("reconcile", "--check")
        assert "notify_failed" not in quota(*command).stderr
    (notice,) = map(json.loads, (tmp_path / "told.json").read_text().splitlines())
    assert (notice["event"], notice["project"]) == ("drift", "p")
    assert (notice["unknown_units"], notice["drift_units"]) == (100, 0)
    assert notice["message"].startswith("bucket units of project p: upstream counted 100 units since ")
    assert quota("charge", "search.list").returncode == 0
    (last,) = quota.json("status")["credentials"][0]["upstream"]
    numbers = [last[name] for name in ("bucket", "upstream_units", "our_units", "unknown_units", "drift_units")]
    assert numbers == ["units", 100, 0, 100, 0], "as it was then"
    assert last["since"] <= last["through"] <= last["compared_at"]


def test_reconcile_and_status_show_a_smaller_quota(quota: Quota) -> None:
    with Emulator(quota=1_800) as upstream:
        configure(quota, upstream)
        output = " ".join(quota("reconcile").stdout.split())
    assert "day: is held to 1,300 instead of 9,500: upstream grants 1,800." in output
    status = " ".join(quota("status").stdout.split())
    assert "day 24h 0 1,300 1,300" in status
    assert "day: held to 1,300 instead of 9,500: upstream grants 1,800 (said" in status
    (row,) = quota.json("status")["credentials"]
    assert [(limit["enforced_units"], limit["granted_units"]) for limit in row["limits"]] == [(1_300, 1_800)] * 2
    never = "limit 'day' never has room for 1,400 units: upstream grants 1,800, of which 500 stay unspent"
    assert never in one_line(quota("charge", "captions.insert", "--units", "1400"), 75)
    assert "limit 'day': headroom = 400 instead of 500" in quota("explain").stdout
    assert "1 call refused: 1 by upstream's grant for 'day'" in quota("spend").stdout


def test_without_monitoring_no_command_names_reconcile(quota: Quota) -> None:
    quota.configure('[ledger]\nurl = "sqlite:///l.db"\n[credentials.main]\napi = "github"\n')
    with contextlib.closing(SqliteLog(f"sqlite:///{quota.folder}/l.db")) as ledger:
        now_ms = ledger.now_ms()
        until_ms = now_ms + 3_600_000
        state_at(ledger, "main").exhaust(Exhaustion("core", now_ms, until_ms, "no more", "host:1"))
        quota("charge", "read")
        for command in ("status", "explain"):
            output = " ".join(quota(command).stdout.split())
            assert "its quota is smaller; the provider's own console may tell which" in output
            assert "reconcile" not in output
        budget_of(ledger, project="main").add_others("core", 7, now_ms - 1, until_ms, "upstream")
    assert quota("spend").stdout.endswith("not listed: 7 units used by others, as upstream said\n")


def test_one_answer_of_429_accuses_nobody(quota: Quota) -> None:
    quota.configure('[ledger]\nurl = "sqlite:///l.db"\n[credentials.main]\napi = "asana"\n')
    with contextlib.closing(SqliteLog(f"sqlite:///{quota.folder}/l.db")) as ledger:
        meter = Meter(budget_of(ledger, project="main", book=load_book("asana")))
        meter.attempt("read", "GET").answered(429, b'{"message": "Slow down."}', {"Retry-After": "900"})
        quota("charge", "read")
        for command in ("status", "explain"):
            shown = " ".join(quota(command).stdout.split())
            assert "Slow down." in shown
            assert "somebody else" not in shown
    (row,) = quota.json("status")["credentials"]
    assert "early" not in row["exhausted"][0]


def test_reconcile_needs_a_cloud_project(quota: Quota, upstream: Emulator) -> None:
    configured = (quota.folder / "quota.toml").read_text()
    quota.configure(configured.replace('cloud_project = "cloud-project-1"\n', ""))
    line = one_line(quota("reconcile"), 78)
    assert "quota.toml: credentials.main.cloud_project: missing; give the id or number" in line
    assert upstream.usage()["free"] == {}


def test_reconcile_rejects_a_book_without_monitoring(quota: Quota) -> None:
    quota.configure('[credentials.main]\napi = "github"\n')
    line = one_line(quota("reconcile"), 78)
    assert line.startswith("cost book 'github' has no [monitoring]: `quota reconcile` reads Google's Cloud Monitoring")
    assert line.endswith("of another API, `quota status` shows what its answers say")
    quota.configure('[credentials.main]\napi = "gmail-v1"\ncloud_project = "cloud-project-1"\n')
    assert "main: cost book 'gmail-v1' has no [monitoring]" in one_line(quota("reconcile"), 78)


def test_an_auth_that_cannot_be_used_stands_in_the_way_of_no_other_project(quota: Quota, upstream: Emulator) -> None:
    main = CONFIG.format(url="sqlite:///l.db", endpoint=upstream.address, cloud_project="cloud-project-1")
    ledger, table, credential = main.partition("[credentials.main]\n")
    broken = credential.replace('"p"', '"q"') + 'auth = "bearer:env:A_TOKEN"\n'
    quota.configure(f"{ledger}[credentials.broken]\n{broken}{table}{credential}")
    searches(upstream, 3)
    done = quota("reconcile")
    assert "broken: environment variable A_TOKEN is not set" in one_line(done, 78)
    assert done.stdout.splitlines()[-1] == "tightened"


def test_one_project_that_fails_does_not_hide_the_others(quota: Quota, upstream: Emulator) -> None:
    more = CONFIG.partition("[credentials.main]")[2].replace('project = "p"', 'project = "q"')
    text = CONFIG.format(url="sqlite:///l.db", endpoint=upstream.address, cloud_project="denied-project")
    quota.configure(
        text + "[credentials.other]" + more.format(endpoint=upstream.address, cloud_project="cloud-project-1")
    )
    done = quota("reconcile", "--json")
    assert one_line(done, 1).startswith("main: Cloud Monitoring refused project 'denied-project' with 403")
    assert [project["credential"] for project in json.loads(done.stdout)["projects"]] == ["other"]
    assert quota("reconcile", "--credential", "other").returncode == 0


def test_reconcile_exits_69_without_the_ledger(quota: Quota, upstream: Emulator) -> None:
    configure(quota, upstream, url=f"redis://127.0.0.1:{free_port()}/0")
    assert "cannot be reached" in one_line(quota("reconcile"), 69)
    assert upstream.usage()["free"] == {}
