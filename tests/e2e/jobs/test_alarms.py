"""Telling somebody: a real command, a real server, once for each thing, and never at the run's expense."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
from base64 import b64encode
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import quota
from quota.common.clock import host_clock
from quota.jobs.afterwards import _notices_of_run, follow_up
from quota.jobs.job import Away, RunReport
from quota.jobs.lock import only_one
from quota.jobs.places import work_of
from quota.jobs.store.store import Store
from quota.reports.notify import RETRY_MS, Notice, Ping, _send, notify
from quota.rules.facts import Grant
from quota.settings.references import read_address
from quota.terms.limits import DAY_MS, HOUR_MS
from support.certificates import Certificates
from support.commands import Quota
from support.emulator import Emulator
from support.plain_http import Answer, PlainServer, RawServer, head
from support.servers import RedisServer, free_port
from support.users import needs_root

CONFIG = """
{top}
[ledger]
url = "{ledger}"
unavailable = {{ max_cost = 1, allowance = 2, machines = 1 }}
[store]
url = "sqlite:///videos.db"
[credentials.main]
api = "youtube-v3"
project = "research"
key = "env:KEY"
endpoint = "{endpoint}"
[[credentials.main.limits]]
name = "day"
quota = 12
headroom = 2
window = "24h"
[jobs.trending]
fetch = "trending"
regions = ["US", "DE"]
pages = 4
{job}
[jobs.broken]
fetch = "trending"
regions = ["XX"]
pages = 1
{notify}
"""
TELL = '[notify]\ncommand = ["./tell.sh"]\n'
POST = '[notify]\nurl = "env:HOOK"\n'


def listener(status: int = 200) -> PlainServer:
    """A server that takes what it is sent, and answers with this status."""
    return PlainServer(lambda arrived: Answer(status, b"", {"Location": "/elsewhere"}))


def machine(
    folder: Path,
    upstream: Emulator,
    ledger: str = "sqlite:///ledger.db",
    *,
    alerts: str = TELL,
    job: str = "",
    top: str = "",
) -> Quota:
    folder.mkdir(exist_ok=True)
    script = folder / "tell.sh"
    script.write_text('#!/bin/sh\nnotice=$(cat)\nprintf "%s\\n" "$notice" >> told.json\n')
    script.chmod(0o755)
    command = Quota(folder)
    command.configure(CONFIG.format(ledger=ledger, endpoint=upstream.address, notify=alerts, job=job, top=top))
    command.env["KEY"] = "a-key-for-alarms"
    return command


@pytest.fixture
def command(tmp_path: Path, upstream: Emulator) -> Quota:
    return machine(tmp_path, upstream)


def alerts(command: Quota) -> list[dict[str, Any]]:
    path = command.folder / "told.json"
    return [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test itself is a process of this machine."""
    monkeypatch.setenv("QUOTA_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


# -- what is told ------------------------------------------------------------------------------------------------------


def test_each_event_is_sent_once(command: Quota) -> None:
    for _ in range(3):
        assert command("run", "trending").returncode == 0
    events = [(alert["event"], alert["subject"]) for alert in alerts(command)]
    assert events == [("near_limit", "day"), ("refused", "trending day")]
    near, refused = alerts(command)
    assert (near["project"], near["used_units"], near["limit_units"]) == ("research", 8, 10)
    assert near["message"] == "limit day of project research has 8 of 10 units used"
    assert (refused["job"], refused["refused_by"]) == ("trending", "day")
    assert refused["retry_at"] > refused["at"]
    assert re.fullmatch(r"job trending was stopped: .*; a run goes on from 2\S+", refused["message"])
    assert "a-key-for-alarms" not in json.dumps(alerts(command))


def test_a_test_event_arrives_or_the_doctor_gives_the_reason(tmp_path: Path, upstream: Emulator) -> None:
    with listener() as server:
        command = machine(tmp_path, upstream, alerts=TELL + 'url = "env:HOOK"\n')
        command.env["HOOK"] = server.address
        for times in (1, 2):
            done = command("doctor", "--notify", COLUMNS="")
            sent = [(notice["event"], notice["project"]) for notice in alerts(command)]
            assert sent == [("test", "research")] * times
        assert "read the test event and exited with 0" in done.stdout
        assert "took the test event" in done.stdout
    command = machine(tmp_path, upstream, alerts='[notify]\ncommand = ["false"]\nurl = "env:HOOK"\n')
    command.env["HOOK"] = server.address
    failed = {row["location"]: row for row in command.json("doctor", "--notify", status=1)["findings"]}
    assert failed["notify command"]["message"] == "the test event did not arrive: false ended with 1"
    assert failed["notify url"]["level"] == "error"
    command = machine(tmp_path, upstream, alerts='[notify]\ncommand = ["cat", "no-such-file"]\n')
    assert "cat: no-such-file: No such file" in command("doctor", "--notify").stderr, "the command's own words"
    assert "cat: no-such-file" not in command("run", "trending").stderr, "nor are they in a log: they may hold a secret"
    command = machine(tmp_path, upstream, alerts="")
    failed = {row["location"]: row for row in command.json("doctor", "--notify", status=1)["findings"]}
    assert failed["notify"]["message"] == "the configuration has no [notify]"
    assert "--acl and --notify" in command("doctor", "--acl", "--notify").stderr


def test_an_alert_about_a_shadow_limit_names_the_shadow(tmp_path: Path, upstream: Emulator) -> None:
    shadow = '[[credentials.main.limits]]\nname = "trial"\nunits = 2\nwindow = "24h"\nshadow = true\n'
    command = machine(tmp_path, upstream, alerts=shadow + TELL)
    assert command("run", "trending").returncode == 0
    (near,) = [alert for alert in alerts(command) if alert.get("limit") == "trial"]
    assert near["message"] == "shadow limit trial of project research has 8 of 2 units used"


def test_a_run_and_its_alert_name_the_remedy_if_waiting_does_not_help(
    command: Quota, tmp_path: Path, upstream: Emulator
) -> None:
    now_ms = host_clock()
    with quota.open(tmp_path / "quota.toml") as session:
        session.budget().grant([Grant("units", 0, now_ms, now_ms + DAY_MS)])
    remedy = "waiting will not help: ask upstream for quota, then `quota reconcile`"
    assert remedy in command("run", "trending").stdout
    refused = next(alert for alert in alerts(command) if alert["event"] == "refused")
    assert refused["message"].endswith(f"; {remedy}")


def test_failed_and_raising_runs_send_an_alert(command: Quota) -> None:
    config = (command.folder / "quota.toml").read_text().replace("quota = 12", "quota = 20")
    command.configure(config.replace('["XX"]', '["XX", "YY", "US"]'))
    assert command("run", "broken", "--region", "XX", "--region", "YY").returncode == 1
    assert command("run", "broken", "--region", "US").returncode == 0, "XX still fails"
    assert command("run", "broken", "--region", "XX").returncode == 1
    assert command("run", "broken", KEY="").returncode == 78
    assert command("run", "trending", "--region", "DF").returncode == 2, "somebody's typo"
    for key, status in (("", 78), ("a-key", 0), ("", 78)):
        assert command("run", "trending", "--region", "US", KEY=key).returncode == status
    first, again, *of_trending = alerts(command)
    assert (again["job"], again["exit_status"]) == ("broken", 78), "another cause"
    assert (first["event"], first["job"], first["exit_status"]) == ("run_failed", "broken", 1)
    assert ": 2 of 2 regions failed (XX, YY): upstream said 400" in first["message"]
    sent = [(alert["event"], alert["job"], alert["exit_status"]) for alert in of_trending]
    assert sent == [("run_failed", "trending", 78)] * 2, "it had succeeded meanwhile"


@pytest.mark.parametrize("file", ["ledger.db", "videos.db"])
def test_a_run_that_may_not_use_a_file_sends_its_alert_and_makes_no_lock(
    tmp_path: Path, upstream: Emulator, file: str
) -> None:
    command = machine(tmp_path, upstream, alerts=TELL + 'stale = "6h"\n', top='textfile = "."')
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    command.configure((tmp_path / "quota.toml").read_text().replace(file, f"open/{file}"))
    assert command("run", "broken").returncode == 78
    assert [alert["event"] for alert in alerts(command)] == ["run_failed"]
    assert 'quota_job="broken"} 78\n' in (tmp_path / "quota-research-broken.prom").read_text()
    assert [*(tmp_path / "open").iterdir()] == [], "the folder's owner could not open a lock of this user"


def test_a_run_that_a_signal_ended_has_not_failed() -> None:
    report = RunReport("a-run", "trending", "stopped", exit_status=128 + signal.SIGTERM)
    assert list(_notices_of_run("research", report, None)) == []


def test_closing_and_reopening_a_bucket_send_one_alert_each(command: Quota, upstream: Emulator) -> None:
    upstream.fault("status", status=403, reason="quotaExceeded")
    assert command("run", "trending").returncode == 0
    assert command("reopen", "units", "--because", "raised").returncode == 0
    assert command("run", "trending").returncode == 0
    closed, opened = [alert for alert in alerts(command) if alert.get("bucket") == "units"]
    assert (closed["event"], opened["event"]) == ("exhausted", "reopened")
    assert closed["message"].startswith("bucket units of project research is closed by upstream until 2")
    assert opened["message"].endswith(": raised")


def test_a_tick_that_finds_a_hung_run_says_which_regions_are_stale(
    tmp_path: Path, upstream: Emulator, here: None
) -> None:
    command = machine(tmp_path, upstream, alerts=TELL + 'stale = "1ms"\n')
    command("run", "broken")
    with only_one("sqlite:///videos.db", "broken"):
        for _ in range(2):
            assert "already running" in command("run", "broken").stdout
    assert [notice["event"] for notice in alerts(command)].count("stale") == 1


@needs_root
def test_a_container_sees_a_run_of_another_with_the_same_files(tmp_path: Path, upstream: Emulator, here: None) -> None:
    command = machine(tmp_path, upstream)
    elsewhere = ("sh", "-c", 'mount --bind . /mnt && cd /mnt && "$@"', "sh")
    command.prefix, command.forked = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", *elsewhere), False
    if subprocess.run([*command.prefix, "true"], capture_output=True, check=False, cwd=tmp_path).returncode:
        pytest.skip("no namespaces of processes here")
    with only_one("sqlite:///videos.db", "broken"):
        assert [job["running"] for job in command.json("status")["credentials"][0]["jobs"]] == [False, True]


def test_a_stale_region_sends_an_alert(
    tmp_path: Path, upstream: Emulator, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = machine(tmp_path, upstream, alerts=TELL + 'stale = "1ms"\n')
    for _ in range(2):
        assert command("run", "trending", "--region", "US").returncode == 0
    stale = [notice for notice in alerts(command) if notice["event"] == "stale"]
    assert [notice["region"] for notice in stale] == ["US", "DE", "US"], "it was complete meanwhile"
    complete, never, _ = (notice["message"] for notice in stale)
    assert (" was last complete " in complete, " was never complete: its job first ran " in never) == (True, True)
    config = command.configure((tmp_path / "quota.toml").read_text().replace('"1ms"', '"1h"'))
    monkeypatch.setattr("quota.jobs.afterwards.host_clock", lambda: host_clock() - 2 * HOUR_MS)
    with quota.open(config) as session:
        follow_up(session, RunReport(session.run, "trending", "done"), None)
    assert [alert["event"] for alert in alerts(command)].count("stale") == 3, "this machine's clock is behind"


@pytest.mark.parametrize(
    ("silent_ms", "away", "stale"), [(1, "US DE", ""), (1, "US", "DE"), (2, "US", "US DE"), (2, "US DE", "US DE")]
)
def test_a_region_on_another_machine_is_stale_only_if_that_is_silent(
    tmp_path: Path, upstream: Emulator, here: None, silent_ms: int, away: str, stale: str
) -> None:
    """Even if the region was never here."""
    command = machine(tmp_path, upstream)
    command("run", "trending", "--region", "DE")
    config = command.configure((tmp_path / "quota.toml").read_text() + 'stale = "1ms"\n')
    with quota.open(config) as session, Store.existing(session.settings.store) as store:
        there = Away("another", DAY_MS - silent_ms, 2 * DAY_MS, DAY_MS)
        store.note_elsewhere("trending", work_of(session.settings, session.settings.jobs["trending"]), there)
        elsewhere = dict.fromkeys(away.split(), there)
        outcome = "elsewhere" if away == "US DE" else "done"
        follow_up(session, RunReport(session.run, "trending", outcome, elsewhere=elsewhere), None)
    assert [alert["region"] for alert in alerts(command) if alert["event"] == "stale"] == stale.split()


def test_a_run_of_one_region_leaves_another_machines_regions_to_it(tmp_path: Path, upstream: Emulator) -> None:
    with closing(RedisServer()) as server:
        command = machine(tmp_path / "one", upstream, server.url, alerts=TELL + 'stale = "1ms"\n')
        other = machine(tmp_path / "two", upstream, server.url)
        for each, region in ((other, "DE"), (command, "US")):
            assert each("run", "trending", "--region", region).returncode == 0
        server.kill()
        shutil.rmtree(command.folder / "state" / "notified")
        command("run", "trending", "--region", "US")
    of_here, of_other, without_ledger = [alert["message"] for alert in alerts(command) if alert["event"] == "stale"]
    assert ("region US " in of_here, "region US " in without_ledger) == (True, True)
    assert "region DE of job trending runs on " in of_other


def test_two_machines_tell_a_thing_once_whatever_the_ledger_loses(tmp_path: Path, upstream: Emulator) -> None:
    with closing(RedisServer()) as server:
        command, other = (machine(tmp_path / name, upstream, server.url) for name in ("one", "two"))
        assert command("charge", "videos.list", "--units", "3").returncode == 0
        assert other("charge", "videos.list", "--units", "4").returncode == 0
        for _ in range(2):
            server.kill()
            server.start()
            for each in (other, command, other):
                assert each("run", "trending").returncode == 0
        sent = [notice for each in (command, other) for notice in alerts(each)]
        assert sorted(notice["event"] for notice in sent) == ["ledger_lost", "ledger_lost", "near_limit", "refused"]
        lost = [notice for notice in sent if notice["event"] == "ledger_lost"]
        assert [(notice["charges"], notice["units"]) for notice in lost] == [(2, 7), (5, 10)]
        assert lost[0]["message"].startswith("the ledger had lost 2 charges of 7 units of project research; ")


def test_a_run_on_the_allowance_reports_that_the_ledger_is_away(tmp_path: Path, upstream: Emulator) -> None:
    with closing(RedisServer()) as server:
        command = machine(tmp_path, upstream, server.url)
        us = ("run", "trending", "--region", "US")
        command.configure((command.folder / "quota.toml").read_text().replace("pages = 4", "pages = 1"))
        server.kill()
        assert command(*us).returncode == 0
        server.start()
        assert command(*us).returncode == 0
        server.kill()
        assert [command(*us).returncode for _ in range(2)] == [0, 69]
    away, again, failed = alerts(command)
    assert (away["owed_units"], again["event"], failed["event"]) == (1, "ledger_away", "run_failed")
    why = f"ledger {server.url} cannot be reached; see whether the server is running there; "
    assert away["message"].startswith(f"job trending drew 1 unit of this machine's allowance, 1 left: {why}")


# -- how it is delivered -----------------------------------------------------------------------------------------------


def test_a_relative_command_is_beside_the_configuration(tmp_path: Path, upstream: Emulator) -> None:
    command = machine(tmp_path / "site", upstream)
    (tmp_path / "home").mkdir()
    command.folder = tmp_path / "home"
    done = command("run", "broken", QUOTA_CONFIG=str(tmp_path / "site" / "quota.toml"))
    assert (done.returncode, "notify_failed" in done.stderr) == (1, False)
    assert [alert["event"] for alert in alerts(command)] == ["run_failed"], "its own folder stays cron's"


@pytest.mark.parametrize(("script", "message"), [("exit 3", "ended with 3"), (None, "Permission denied")])
def test_a_command_that_fails_is_one_line(tmp_path: Path, upstream: Emulator, script: str | None, message: str) -> None:
    command = machine(tmp_path, upstream, alerts='[notify]\ncommand = ["./tell.sh", "a-secret-argument"]\n')
    tell = tmp_path / "tell.sh"
    if script is None:
        tell.chmod(0o644)
    else:
        tell.write_text(f"#!/bin/sh\n{script}\n")
    done = command("run", "broken")
    assert done.returncode == 1
    (line,) = [text for text in done.stderr.splitlines() if "notify_failed" in text]
    assert line.startswith("quota: notify_failed event=run_failed subject=broken: ")
    assert message in line
    assert "a-secret-argument" not in done.stderr + done.stdout


@pytest.mark.parametrize("status", [500, 302])
def test_an_address_that_refuses_is_one_line_and_stays_secret(tmp_path: Path, upstream: Emulator, status: int) -> None:
    with listener(status) as server:
        command = machine(tmp_path, upstream, alerts=POST)
        command.env["HOOK"] = f"{server.address}/hook/a-secret-path"
        done = command("run", "broken", QUOTA_LOG="debug")
    assert f"subject=broken: it answered {status}\n" in done.stderr
    assert "a-secret-path" not in done.stderr + done.stdout
    assert len(server.arrived) == 1, "a redirect is not followed"


@pytest.mark.parametrize(("start", "piece"), [(head(), b"x: y\r\n"), (b"", b"")])
def test_an_address_that_drips_is_not_waited_for(start: bytes, piece: bytes) -> None:
    def readers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.endswith("(work)")}

    with RawServer(lambda _: server.drip(start, piece)) as server:
        before = readers()
        with pytest.raises(TimeoutError, match="no answer within"):
            _send(f"{server.address}/hook", b"{}", 0.3)
        for reader in readers() - before:
            reader.join(60)
        assert readers() <= before


def test_an_address_of_another_machine_is_not_asked_in_plain_text(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOOK", "http://hooks.invalid/a-secret-path")
    for setting in ("url", "ping"):
        with pytest.raises(quota.ConfigError) as caught:
            read_address("env:HOOK", setting, insecure=False)
        assert str(caught.value) == (
            "env:HOOK holds an http:// address on another machine, which would get it in plain text; store an https:// "
            f"one, or set insecure_endpoint = true beside {setting}"
        )
        assert read_address("env:HOOK", setting, insecure=True) == "http://hooks.invalid/a-secret-path"
    Ping("env:HOOK", "trending", insecure=False).end(0)
    assert "ping_failed job=trending ping=0: env:HOOK holds an http:// address" in caplog.text
    Ping("env:HOOK", "trending", insecure=True).end(0)
    assert "a-secret-path" not in caplog.text


def test_an_address_gets_the_same_notice_as_a_command_with_its_user_and_password(
    tmp_path: Path, upstream: Emulator
) -> None:
    with listener() as server:
        command = machine(tmp_path, upstream, alerts=POST)
        hook = f"http://us%65r:p%40ss@{server.host}/hook?token=a-secret-token"
        assert command("run", "broken", HOOK=hook).returncode == 1
    (arrived,) = server.arrived
    body = json.loads(arrived.body)
    assert (arrived.verb, arrived.target) == ("POST", "/hook?token=a-secret-token")
    assert (body["event"], body["subject"]) == ("run_failed", "broken")
    assert arrived.headers["authorization"] == "Basic " + b64encode(b"user:p@ss").decode()
    assert arrived.headers["host"] == server.host


def test_an_address_is_asked_through_the_proxy_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = Certificates(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with PlainServer(lambda _: Answer(200, b""), certificates.server) as hook, listener() as proxy:
        port = hook.host.rpartition(":")[2]
        monkeypatch.setenv("https_proxy", f"http://us:a-proxy-password@{proxy.host}")
        _send(f"https://localhost:{port}/hook", b"{}", 10)
        monkeypatch.setenv("https_proxy", proxy.host)
        _send(f"https://localhost:{port}/hook", b"{}", 10)
        _send(f"https://127.0.0.1:{port}/direct", b"{}", 10)
        with pytest.raises(ValueError, match="certificate verify failed"):
            _send(f"https://other.example:{port}/hook", b"{}", 10)
        for wrong in ("socks5://127.0.0.1:1", "http://", "http://127.0.0.1:a-proxy-password", "127.0.0.1:0"):
            monkeypatch.setenv("https_proxy", wrong)
            with pytest.raises(ValueError, match=r"^HTTPS_PROXY names no http:// proxy; ") as caught:
                _send(f"https://localhost:{port}/hook", b"{}", 10)
            assert "a-proxy-password" not in str(caught.value)
    assert [arrived.target for arrived in hook.arrived] == ["/hook", "/hook", "/direct"]
    assert {arrived.verb for arrived in proxy.arrived} == {"CONNECT"}
    assert [arrived.target for arrived in proxy.arrived] == [*[f"localhost:{port}"] * 2, f"other.example:{port}"]
    credentials = "Basic " + b64encode(b"us:a-proxy-password").decode()
    assert [arrived.headers.get("proxy-authorization") for arrived in proxy.arrived] == [credentials, None, None]


def test_an_http_address_is_shown_to_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with listener() as hook, listener() as proxy:
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy.address)
        _send(f"{hook.address}/a-secret-path", b"{}", 10)
    assert ([arrived.target for arrived in hook.arrived], proxy.arrived) == (["/a-secret-path"], [])


# -- health checks -----------------------------------------------------------------------------------------------------


def test_a_health_check_hears_the_beginning_and_the_end(tmp_path: Path, upstream: Emulator) -> None:
    with listener() as server:
        command = machine(tmp_path, upstream, alerts="", job='ping = "env:PING"')
        command.env["PING"] = f"{server.address}/a-secret-check/"
        assert command("run", "trending").returncode == 0
        assert command("run", "broken").returncode == 1, "it has no health check"
        assert command("run", "trending", KEY="").returncode == 78
    paths = [(arrived.verb, arrived.target) for arrived in server.arrived]
    assert paths == [("GET", f"/a-secret-check/{word}") for word in ("start", "0", "start", "78")]


def test_a_run_that_finds_another_one_under_way_says_nothing(
    tmp_path: Path, upstream: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the other run hangs, somebody must hear of it: it must not look as if it had ended."""
    with listener() as server:
        command = machine(tmp_path, upstream, alerts="", job='ping = "env:PING"', top='textfile = "."')
        command.env["PING"] = server.address
        monkeypatch.setenv("QUOTA_STATE_DIR", command.env["QUOTA_STATE_DIR"])
        with only_one(f"sqlite:///{tmp_path}/videos.db", "trending") as lock:
            assert lock is not None
            done = command("run", "trending")
            assert (done.returncode, "already running" in done.stdout) == (0, True)
            waiting = command.start("run", "trending", "--region", "US")
            assert waiting.stderr is not None
            assert waiting.stderr.readline() == "trending: waits for another run of the job to end\n"
            waiting.send_signal(signal.SIGTERM)
            assert ("interrupted; US not fetched" in waiting.communicate()[0], waiting.returncode) == (True, 143)
        assert (server.arrived, list(tmp_path.glob("*.prom"))) == ([], [])


def test_a_machine_where_the_job_does_not_run_says_nothing_of_its_runs(tmp_path: Path, upstream: Emulator) -> None:
    with closing(RedisServer()) as redis_server:
        with listener() as server:
            for name in ("one", "two"):
                more = {"alerts": "", "job": 'ping = "env:PING"', "top": 'textfile = "."'}
                command = machine(tmp_path / name, upstream, redis_server.url, **more)
                done = command("run", "trending", PING=f"{server.address}/{name}")
                assert (done.returncode, "runs on" in done.stdout) == (0, name == "two")
            assert [arrived.target for arrived in server.arrived] == ["/one/start", "/one/0"]
        there, here = ((tmp_path / name / "quota-research-trending.prom").read_text() for name in ("one", "two"))
        assert "quota_run_last_exit_status" in there
        assert "quota_run_last" not in here
        assert "quota_textfile_written_timestamp_seconds" in here
        assert command("run", "trending", "--region", "DE", "--here").returncode == 0
        assert "runs on" in command("run", "trending", "--region", "US").stdout
        assert "quota_run_last" in (tmp_path / "two" / "quota-research-trending.prom").read_text(), "DE runs here"


def test_a_health_check_that_is_away_is_one_line_each(tmp_path: Path, upstream: Emulator) -> None:
    command = machine(tmp_path, upstream, alerts="", job='ping = "env:PING"')
    failed = ["ping_failed job=trending ping=0", "ping_failed job=trending ping=start"]
    for address in (f"http://127.0.0.1:{free_port()}", "https://[::ffff:127.0.0.1]"):
        done = command("run", "trending", PING=f"{address}/a-secret-check")
        assert done.returncode == 0
        assert sorted(line.split(": ")[1] for line in done.stderr.splitlines() if "ping_failed" in line) == failed
        assert "a-secret-check" not in done.stderr
    for address in ("hc.example:a-secret", "[a-secret"):
        done = command("run", "trending", PING=f"https://{address}/")
        assert "a-secret" not in done.stderr, "nor a part of an address that is none"
        assert "ping_failed job=trending ping=0: env:PING holds no https:// address" in done.stderr


@pytest.mark.usefixtures("here")
def test_a_refusal_is_sent_in_each_period_of_a_calendar_limit(
    command: Quota, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "quota.toml"
    text = config.read_text().replace('window = "24h"', 'window = { calendar = "day", zone = "UTC" }')
    config.write_text(text)
    monkeypatch.setenv("KEY", command.env["KEY"])
    midnight_ms = 14_600 * DAY_MS
    for hours in (15, 16, 24 + 14, 24 + 15, 7 * 24 + 13):
        at_ms = midnight_ms + hours * HOUR_MS
        with quota.open(config, clock=lambda at_ms=at_ms: at_ms) as session:
            while (decision := session.budget("main").charge("videos.list")).admitted:
                pass
            refused: dict[str, Any] = {"refused_by": "day", "why": str(hours), "refusal": decision.as_json()}
            follow_up(session, RunReport(session.run, "trending", "stopped", refused=True, **refused), None)
    told_of = [
        (alert["subject"], alert["message"].split()[-1]) for alert in alerts(command) if alert["event"] == "refused"
    ]
    assert told_of == [
        (f"trending day {midnight_ms + days * DAY_MS}", str(hours)) for days, hours in ((0, 15), (1, 38), (7, 181))
    ]


@pytest.mark.usefixtures("here")
def test_a_failed_delivery_is_retried_ten_minutes_later(
    tmp_path: Path, upstream: Emulator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_ms = 40 * 365 * DAY_MS
    with listener() as server:
        command = machine(tmp_path, upstream, alerts=TELL + 'url = "env:HOOK"\n')
        monkeypatch.setenv("HOOK", f"{server.address}/hook")
        tell = tmp_path / "tell.sh"
        sound = tell.read_text()
        again_ms = 2 * RETRY_MS + HOUR_MS
        for at_ms in (0, RETRY_MS - 1, RETRY_MS, 2 * RETRY_MS - 1, 2 * RETRY_MS, again_ms - 1, again_ms):
            tell.write_text(sound if at_ms >= 2 * RETRY_MS else "#!/bin/sh\nexit 3\n")
            with quota.open(tmp_path / "quota.toml", clock=lambda at_ms=at_ms: now_ms + at_ms) as session:
                notify(session, [Notice("refused", "research", "s", f"at {at_ms}", HOUR_MS)])
        assert [alert["message"] for alert in alerts(command)] == [f"at {2 * RETRY_MS}", f"at {again_ms}"]
        assert len(server.arrived) == 2, "the address had it at once"
    assert len([alert for alert in caplog.messages if "notify_failed" in alert]) == 2


@pytest.mark.usefixtures("here")
def test_a_notice_of_one_machine_is_tried_again_too(command: Quota, tmp_path: Path) -> None:
    tell = tmp_path / "tell.sh"
    sound = tell.read_text()
    tell.write_text("#!/bin/sh\nexit 3\n")
    notice = Notice("ledger_lost", "research", "day", "m", DAY_MS, here=True)
    with quota.open(tmp_path / "quota.toml") as session:
        notify(session, [notice])
        tell.write_text(sound)
        notify(session, [notice])
        assert alerts(command) == [], "not yet"
        (note,) = (tmp_path / "state" / "notified").iterdir()
        earlier_s = note.stat().st_mtime - RETRY_MS / 1000
        os.utime(note, (earlier_s, earlier_s))
        for _ in range(2):
            notify(session, [notice])
    assert [alert["event"] for alert in alerts(command)] == ["ledger_lost"]


@pytest.mark.usefixtures("here")
def test_a_command_that_hangs_does_not_keep_the_other_notices(
    command: Quota, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quota.reports.notify.DEADLINE_S", 2.0)
    tell = tmp_path / "tell.sh"
    tell.write_text(
        tell.read_text().replace("notice=$(cat)", "notice=$(cat); case $notice in *bad*) sleep 60 & sleep 60;; esac")
    )
    notices = [Notice("stale", "research", subject, "m", DAY_MS) for subject in ("bad", "good")]
    for _ in range(2):
        with quota.open(tmp_path / "quota.toml") as session:
            notify(session, notices)
    assert [alert["subject"] for alert in alerts(command)] == ["good"]
    assert "tell.sh was killed after 2 s, the most that all deliveries may take" in caplog.text


PAGE = (Path(__file__).resolve().parents[3] / "docs" / "alarms.md").read_text(encoding="utf-8")
EVENT = {"event": "refused", "project": "research", "message": "it's 'full'", "at": "2026-11-21T12:00:00Z", "host": "h"}


def run_script(name: str, folder: Path) -> None:
    if any(shutil.which(tool) is None for tool in ("jq", "curl")):
        pytest.skip("jq or curl is not installed")
    (script,) = re.findall(rf"^`{name}`:\n\n```sh\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    (folder / name).write_text(script.replace("/usr/sbin/sendmail -t", "cat > mail"))
    (folder / name).chmod(0o700)
    subprocess.run([f"./{name}"], cwd=folder, input=json.dumps(EVENT), text=True, check=True, timeout=60)


def test_the_scripts_for_slack_and_mail_send_the_message(tmp_path: Path) -> None:
    with listener() as server:
        (tmp_path / "slack.curl").write_text(f'url = "http://127.0.0.1:{server.port}/services/x"\n')
        run_script("alert-slack", tmp_path)
    (arrived,) = server.arrived
    assert (arrived.verb, arrived.target) == ("POST", "/services/x")
    assert arrived.headers["content-type"] == "application/json"
    assert json.loads(arrived.body) == {"text": "research: it's 'full'"}
    run_script("alert-mail", tmp_path)
    head, _, body = (tmp_path / "mail").read_text().partition("\n\n")
    assert head == "To: ops@example.org\nSubject: quota: refused research"
    assert body == "it's 'full'\n2026-11-21T12:00:00Z, h\n"
