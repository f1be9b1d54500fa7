"""One run of a job: real HTTP to the emulator, the real client, the embedded ledger, the real store."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import quota
from quota.common.clock import host_clock
from quota.jobs.attempts import ATTEMPTS
from quota.jobs.interruption import interruptible
from quota.jobs.job import RunReport
from quota.jobs.lock import is_running, only_one
from quota.jobs.progress import Watcher
from quota.jobs.runner import RunOptions, run_job
from quota.jobs.store.checkpoints import Checkpoint
from quota.jobs.ticks import Tick
from support.certificates import Certificates, private_key
from support.configurations import configuration
from support.emulator import Emulator, faulted
from support.installation import Installation, outcomes
from support.plain_http import Answer, PlainServer
from support.processes import in_child
from support.servers import until

DAY_MS = 86_400_000
NOON_MS = 1_795_204_800_000  # far from the upstream's midnight
RECORDED = ["US", "GB", "DE", "FR", "IN", "BR", "CA"]


class Bench(Installation):
    def __init__(self, folder: Path, upstream: Emulator) -> None:
        super().__init__(folder, upstream)
        self.endpoint = upstream.address
        self.configure()

    def configure(
        self,
        *,
        units: int = 9_500,
        regions: list[str] | None = None,
        pages: int = 4,
        fetch: str = "trending",
        key: str | None = "a-key-for-tests",
        more: str = "",
        endpoint: str | None = None,
    ) -> None:
        if key is None:
            (self.folder / "key").unlink()
        else:
            (self.folder / "key").write_text(key)
        regions = RECORDED if regions is None else regions
        job = f'[jobs.t]\nfetch = "{fetch}"\npages = {pages}\nregions = {json.dumps(regions)}\n{more}'
        (self.folder / "quota.toml").write_text(configuration(endpoint or self.endpoint, job, units=units))

    def run(self, job: str = "t", **options: Any) -> RunReport:
        return super().run(job, **options)

    def charge(self, method: str, job: str = "") -> None:
        with quota.open(self.config, clock=self.clock) as session:
            assert session.budget().charge(method, job=job).admitted

    def await_requests(self, number: int) -> None:
        until(lambda: self.requests >= number)


@pytest.fixture
def bench(tmp_path: Path, state_dir: Path, upstream: Emulator, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return Bench(tmp_path, upstream)


@pytest.fixture
def recorded(tmp_path: Path, state_dir: Path, shared_data: Path) -> Iterator[Bench]:
    with Emulator(recorded=shared_data / "recorded" / "trending_2018") as emulator:
        yield Bench(tmp_path, emulator)


def test_ticks_cut_short_by_the_budget_add_up_to_one_round_with_nothing_fetched_twice(
    recorded: Bench, shared_data: Path
) -> None:
    folder = shared_data / "recorded" / "trending_2018"
    recordings = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    now_ms = NOON_MS
    recorded.clock = lambda: now_ms
    recorded.configure(units=10)
    first = recorded.run()
    assert (first.outcome, first.refused_by, first.attempts, recorded.requests) == ("stopped", "day", 10, 10)
    assert first.retry_at_ms == now_ms + DAY_MS
    done, skipped = ("US", "GB", "DE"), ("FR", "IN", "BR", "CA")  # ten pages: 4 + 2 + 4
    assert outcomes(first) == {**dict.fromkeys(done, "done"), **dict.fromkeys(skipped, "skipped")}
    now_ms += DAY_MS - 1
    assert recorded.run().attempts == 0
    now_ms += 1
    second = recorded.run()
    assert (second.outcome, second.attempts) == ("stopped", 10)
    assert outcomes(second) == {"FR": "done", "IN": "done", "BR": "partial", "CA": "skipped"}
    partial = second.regions[2]
    assert (partial.items, partial.pages, partial.units, partial.cursor) == (100, 2, 2, {"token": "eOEAAABk"})
    now_ms += DAY_MS
    third = recorded.run()
    assert (third.outcome, third.exit_status, outcomes(third)) == ("done", 0, {"BR": "done", "CA": "done"})
    assert sum(report.units for report in (first, second, third)) == recorded.requests == len(recordings)
    assert recorded.count("rankings") == 1_161
    assert recorded.rows("SELECT count(DISTINCT taken_at_ms || region) FROM rankings") == [(len(RECORDED),)]
    titles = {item["id"]: item["snippet"]["title"] for page in recordings for item in page["items"]}
    assert dict(recorded.rows("SELECT video_id, title FROM videos")) == titles


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_run_stops_at_its_own_most_and_the_next_one_goes_on(bench: Bench) -> None:
    bench.configure(regions=["US", "GB", "DE"], pages=2, more="max_units = 3")
    first = bench.run()
    bench.configure(regions=["US", "GB", "DE", "FR"], pages=2, more="max_units = 3")
    assert (first.outcome, first.refused_by, first.units, bench.requests) == ("stopped", "max_units", 3, 3)
    assert (first.why, first.next_step) == ("this run has spent 3 of its 3 units", "GB page 2")
    assert [bench.run().units for _ in range(2)] == [3, 2], "8 pages are one round, with those of a new region"
    assert bench.requests == 8, "no page is fetched twice"


@pytest.mark.parametrize(
    ("units", "more", "never"),
    [
        (102, "", "101 units, and 'day' holds 102"),
        (100, "", "101 units, and 'day' holds 100"),
        (200, "max_units = 100", "101 units, and 'max_units' holds 100"),
        (102, "leave = 2", "101 units, and 'day' holds 100"),
    ],
)
def test_a_step_that_costs_more_than_a_limit_holds_is_named(bench: Bench, units: int, more: str, never: str) -> None:
    """It would be paid for, and lost, in each run. So a quiet run names it, too."""
    fetch = bench.own_fetch(
        """
def fetch(client, region, cursor):
    client.search().list(part="id", q="x").execute()
    return Page(videos=client.videos().list(part="snippet", chart="mostPopular").execute()["items"])
"""
    )
    bench.configure(fetch=fetch, regions=["US", "DE"], units=units, more=more)
    run = bench.quota("run", "t", "--quiet")
    fits = units == 102 and not more
    assert (run.returncode, run.stdout[:26]) == ((0, "") if fits else (78, "t: stopped after 0 pages ("))
    assert (f"the calls of one step need {never}, so no run can finish it" in run.stdout) is not fits


@pytest.mark.parametrize(
    "body",
    [
        "try:\n        search(client)\n    except quota.Refused as refusal:\n        raise RuntimeError from refusal",
        "try:\n        search(client)\n    except quota.Refused:\n        pass\n    raise ValueError",
        "tenacity.retry(stop=tenacity.stop_after_attempt(2))(search)(client)",
        "with ThreadPoolExecutor() as pool:\n        pool.submit(search, client).exception()\n"
        "    return Page(videos=[{'id': 'x'}])",
    ],
)
def test_a_function_cannot_hide_a_refusal(bench: Bench, body: str) -> None:
    """The region would be done, or lose its place."""
    search = "def search(client):\n    client.search().list(part='id', q='x').execute()\n"
    imports = "import quota, tenacity\nfrom concurrent.futures import ThreadPoolExecutor\n"
    fetch = bench.own_fetch(f"{imports}{search}def fetch(client, region, cursor):\n    {body}\n")
    bench.configure(fetch=fetch, regions=["US", "DE"], units=150)
    bench.charge("search.list")
    report = bench.run()
    assert (report.outcome, report.exit_status, bench.requests) == ("stopped", 0, 0)
    assert outcomes(report) == {"US": "skipped", "DE": "skipped"}


@pytest.mark.parametrize(("units", "more"), [(5, ""), (99, "max_units = 5"), (99, ""), (99, "options.strict = true")])
def test_a_page_that_lacks_a_refused_call_is_fetched_again(bench: Bench, units: int, more: str) -> None:
    fetch = bench.own_fetch(
        """
from contextlib import suppress
def fetch(client, region, cursor, *, strict=False):
    rows = []
    for number in range(3):
        with suppress(Exception):
            client.videos().list(part="id", chart="mostPopular").execute()
            rows.append({"id": number})
    assert len(rows) == 3 or not strict
    return Page(rows={"clips": rows}, cursor={"n": cursor["n"] + 1 if cursor else 1})
"""
    )
    bench.configure(fetch=fetch, regions=["US"], units=units, more=more)
    bench.upstream.fault("exhaust", bucket="units", after=5)
    report = bench.run()
    assert (report.outcome, report.regions[0].pages, report.regions[0].cursor) == ("stopped", 1, {"n": 1})


def test_a_region_that_has_nothing_to_fetch_is_named_beside_others(bench: Bench) -> None:
    fetch = bench.own_fetch(
        """
def fetch(client, region, cursor):
    if region == "FR":
        return Page(complete=False)
    return Page(videos=client.videos().list(part="snippet", chart="mostPopular").execute()["items"])
"""
    )
    bench.configure(fetch=fetch, regions=["US", "FR"], pages=1)
    report = bench.run()
    assert (report.outcome, report.why) == ("done", "there was nothing to fetch in FR")


def test_a_function_may_do_without_the_call_that_was_refused(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    fetch = bench.own_fetch(
        """
import quota
def fetch(client, region, cursor):
    try:
        client.search().list(part="id", q="x").execute()
    except quota.Refused:
        if region != "DE":
            client.videos().list(part="snippet", chart="mostPopular").execute()
    return Page()
"""
    )
    bench.charge("search.list")
    for regions, outcome in (["US"], "done"), (["FR", "DE"], "stopped"):
        bench.configure(fetch=fetch, regions=regions, units=150)
        assert bench.run().outcome == outcome
        assert f"the fetch function went on without a call that was refused, in {regions[0]}" in caplog.text


def test_a_step_counts_its_own_calls_only(bench: Bench) -> None:
    fetch = bench.own_fetch(
        """
def fetch(client, region, cursor, *, store):
    store.select("SELECT 1")
    for _ in range(3):
        client.videos().list(part="snippet", chart="mostPopular").execute()
    return Page()
"""
    )
    bench.configure(fetch=fetch, regions=["US", "DE"], units=5)
    report = bench.run()
    assert (report.exit_status, report.units, "no run can finish it" in report.why) == (0, 5, False)
    assert [path.name for path in bench.folder.glob("videos.db*")] == ["videos.db"], "all is in the one file"


@pytest.mark.parametrize("how", ["it left the window", "it was corrected"])
def test_a_call_counts_no_longer_for_its_step_if(bench: Bench, how: str) -> None:
    lines = "for _ in range(6):\n        client.videos().list(part='id', id='x').execute()\n    return Page()\n"
    bench.configure(fetch=bench.own_fetch(f"def fetch(client, region, cursor):\n    {lines}"), regions=["US"], units=5)
    now_ms, ids = NOON_MS, []
    bench.clock = lambda: now_ms
    with quota.open(bench.config, clock=bench.clock) as session:

        class Meanwhile(Watcher):
            def decided(self, decision: quota.Decision) -> None:
                nonlocal now_ms
                ids.append(str(decision.id))
                if len(ids) == 4:
                    now_ms += DAY_MS if how == "it left the window" else 0
                    assert how == "it left the window" or all(map(session.budget().refund, ids))
                    for _ in ids:
                        bench.charge("videos.list")  # by another process

        report = run_job(session, "t", RunOptions(watcher=Meanwhile()))
    assert (report.exit_status, report.refused_by, len(ids)) == (0, "day", 6), report.why


def test_a_run_counts_its_own_calls_as_it_corrects_them(bench: Bench) -> None:
    bench.configure(regions=["US"], pages=3)
    ids: list[str] = []
    bench.charge("videos.list")
    with quota.open(bench.config, clock=bench.clock) as session:
        budget = session.budget()

        class Corrects(Watcher):
            def decided(self, decision: quota.Decision) -> None:
                ids.append(str(decision.id))

            def page(self, checkpoint: Checkpoint) -> None:
                if checkpoint.pages == 1:
                    bench.charge("videos.list", job="t")  # by another process
                    budget.settle(ids[0], 30)
                elif checkpoint.pages == 2:
                    budget.refund(ids[1])

        report = run_job(session, "t", RunOptions(watcher=Corrects()))
        assert (report.units, report.attempts, report.regions[0].units) == (31, 2, 31)
        assert budget.usage()[0].used_units == 31 + 2


# -- regions -----------------------------------------------------------------------------------------------------------


def test_other_options_begin_a_pass_of_their_own(bench: Bench) -> None:
    """The cursor of a pass names pages of the list that its options describe. With other options, one ranking would be
    made of two lists."""
    music = 'options = { category = "10" }'
    bench.configure(units=2, regions=["DE"])
    assert outcomes(bench.run()) == {"DE": "partial"}
    bench.configure(regions=["DE"], more=music)
    report = bench.run()
    assert (outcomes(report), report.attempts) == ({"DE": "done"}, 1)
    sql = "SELECT count(*), sum(category_id = '10') FROM rankings JOIN videos USING (video_id) GROUP BY taken_at_ms"
    (begun, _), (music_videos, of_music) = bench.rows(f"{sql} ORDER BY taken_at_ms")
    assert begun == 100
    assert music_videos == of_music > 0
    bench.configure(regions=["DE"])
    assert outcomes(bench.run()) == {"DE": "done"}
    assert bench.requests == 2 + 1 + 2, "the first pass goes on where it stopped"


def test_the_order_of_options_makes_no_other_work(bench: Bench) -> None:
    fetch = bench.own_fetch("def fetch(client, region, cursor, **options): return Page()\n")
    for options in "{ a = 1, b = [2] }", "{ b = [2], a = 1 }":
        bench.configure(fetch=fetch, regions=["DE"], more=f"options = {options}")
        bench.run()
    assert bench.count("checkpoints") == 1


def test_fewer_pages_than_before_complete_a_pass_and_the_run_begins_with_the_next_region(bench: Bench) -> None:
    bench.configure(units=3, regions=["US", "DE"])
    assert outcomes(bench.run()) == {"US": "partial", "DE": "skipped"}
    bench.configure(units=9, regions=["US", "DE"], pages=2)
    assert [outcomes(bench.run()) for _ in range(2)] == [{"DE": "done"}, {"US": "done", "DE": "done"}]
    assert bench.requests == 3 + 2 + 4


# -- trouble that passes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "status", "status": 503},
        {"kind": "close-after"},
        {"kind": "status", "status": 403, "reason": "userRateLimitExceeded"},
        {"kind": "truncate"},
    ],
)
def test_trouble_that_passes_is_tried_again_and_each_attempt_is_charged(bench: Bench, fault: dict[str, Any]) -> None:
    bench.configure(regions=["US"], pages=2)
    bench.upstream.fault(times=ATTEMPTS - 1, after=1, **fault)
    report = bench.run()
    assert report.outcome == "done"
    assert report.attempts == report.units == bench.requests == 2 + ATTEMPTS - 1
    assert bench.count("rankings") == 100


def test_trouble_that_stays_fails_the_region_alone_and_the_next_run_goes_on_from_its_checkpoint(bench: Bench) -> None:
    bench.configure(regions=["US", "DE", "FR"], pages=2)
    bench.upstream.fault("status", status=503, region="DE", after=1, times=ATTEMPTS)
    report = bench.run()
    assert outcomes(report) == {"US": "done", "DE": "failed", "FR": "done"}
    failed = report.regions[1]
    assert (failed.pages, failed.units, failed.cursor) == (1, 1 + ATTEMPTS, {"token": "rTEAAAAy"})
    assert failed.error is not None
    assert "in 4 attempts" in failed.error
    again = bench.run()
    assert list(outcomes(again).items()) == [("DE", "done"), ("US", "done"), ("FR", "done")]
    assert again.regions[0].pages == 1
    assert bench.rows("SELECT count(*), count(DISTINCT taken_at_ms) FROM rankings WHERE region = 'DE'") == [(100, 1)]


def test_a_long_wait_that_upstream_asks_for_costs_no_attempts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = replace(faulted(429, None), headers=(("Retry-After", "7200"),))
    monkeypatch.setattr("support.emulator.faulted", lambda *_: busy)
    bench.configure(regions=["US"], pages=2)
    bench.upstream.fault("status", status=429)
    (failed,) = bench.run().regions
    assert (failed.outcome, failed.units, bench.requests) == ("failed", 1, 1)
    assert failed.error is not None
    assert re.search(r"; upstream asks to wait (2h 00m|1h 59m)", failed.error)


@pytest.mark.parametrize(
    "error",
    [
        "ExceptionGroup('tasks', [OSError(errno.EHOSTUNREACH, 'No route to host')])",
        "requests.exceptions.ChunkedEncodingError('Response ended prematurely')",
        "aiohttp.ServerDisconnectedError()",
        "httpx.ConnectError('no route')",
        "httpx2.ConnectError('no route')",
        "urllib.error.URLError(ConnectionRefusedError())",
        "urllib.error.HTTPError('http://x', 503, 'No', None, None)",
        "urllib3.exceptions.ProtocolError('reset')",
    ],
)
def test_a_network_that_is_away_keeps_the_place_whatever_the_client_calls_it(bench: Bench, error: str) -> None:
    fetch = bench.own_fetch(
        f"""
import errno, os, aiohttp, httpx, httpx2, requests, urllib.error, urllib3
def fetch(client, region, cursor):
    if cursor is None:
        return Page(videos=[{{"id": "v1"}}], ranked=True, cursor={{"at": 2}})
    with open("attempts", "a") as file:
        file.write("x")
    if os.path.getsize("attempts") <= 4:
        raise {error}
    return Page(videos=[{{"id": "v2"}}], ranked=True)
""".replace('"attempts"', repr(str(bench.folder / "attempts")))
    )
    bench.configure(fetch=fetch, regions=["US"])
    (failed,) = bench.run().regions
    assert (failed.outcome, failed.cursor) == ("failed", {"at": 2})
    assert str(failed.error).endswith(", in 4 attempts"), "it may be about something else that the function asks"
    assert ".py, line 10)" in str(failed.error)
    assert outcomes(bench.run()) == {"US": "done"}
    assert bench.rows("SELECT rank, video_id FROM rankings") == [(1, "v1"), (2, "v2")]


def test_a_missing_package_ends_the_run_and_keeps_the_place(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.configure(regions=["US"], pages=2, more="max_units = 1")
    assert outcomes(bench.run()) == {"US": "partial"}
    with monkeypatch.context() as upgrade:
        upgrade.setitem(sys.modules, "quota.clients.upstream", None)
        failed = bench.run()
    assert failed.regions[0].cursor is not None
    assert (failed.outcome, failed.units, failed.exit_status) == ("failed", 0, 78)
    assert "install the packages again" in str(failed.why)
    done = bench.quota.shell("ulimit -c 0; HTTPLIB2_CA_CERTS=/nowhere quota run t")  # a process from nothing
    assert (done.returncode, done.stderr.count("\n")) == (78, 1), "no region's client can be made"
    assert outcomes(bench.run()) == {"US": "done"}
    bench.configure(fetch=bench.own_fetch("def fetch(client, region, cursor):\n    import not_there"))
    assert bench.run().why.endswith(".py, line 3)")


@pytest.mark.parametrize("bundle", ["", "/nowhere"])
def test_an_untrusted_certificate_ends_the_run_and_says_what_to_check(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundle: str
) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", bundle)
    with PlainServer(lambda _: Answer(200), Certificates(tmp_path).server) as foreign:
        bench.configure(endpoint=foreign.address)
        report = bench.run()
    assert (report.exit_status, "; check endpoint, proxies and trusted CAs (RE" in report.why) == (78, True)


@pytest.mark.parametrize("away", ["http://127.0.0.1:9", "the token server"])
def test_an_absent_server_ends_the_run_in_the_second_region(bench: Bench, away: str) -> None:
    if away == "the token server":
        account = {"client_email": "a@b.example", "token_uri": "http://127.0.0.1:9/", "private_key": private_key()}
        bench.configure(key=json.dumps(account))
        text = Path(bench.config).read_text().replace('key = "file:key"', 'auth = "service-account:key"')
        Path(bench.config).write_text(text)
    else:
        bench.configure(endpoint=away)
    report = bench.run()
    assert [*outcomes(report).values()] == ["failed"] * 2 + ["skipped"] * 5
    assert f"in 1 attempt to reach {away}; check " in str(report.regions[1].error)
    assert (report.outcome, report.exit_status) == ("failed", 1)
    assert report.why == f"no usable answer from {away}; the other regions wait for the next run"


def test_an_upstream_that_is_down_is_asked_once_in_each_further_region(bench: Bench) -> None:
    bench.upstream.fault("status", status=503, times=99)
    report = bench.run()
    assert outcomes(report) == dict.fromkeys(RECORDED, "failed")
    assert report.attempts == bench.requests == ATTEMPTS + len(RECORDED) - 1
    assert "in 1 attempt" in str(report.regions[1].error)


def test_no_attempt_begins_long_after_the_first(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quota.jobs.attempts.LAST_ATTEMPT_S", 0)
    bench.configure(regions=["US"])
    bench.upstream.fault("status", status=503, times=9)
    assert bench.run().why.endswith("in 1 attempt")


@pytest.mark.parametrize(
    ("wrong", "proxy", "status", "firsts"),
    [
        ({"endpoint": "http://127.0.0.1:9"}, None, 1, "US DE GB US"),
        ({"key": "invalid"}, None, 78, "US GB DE US"),
        ({"endpoint": "https://api.example"}, "{upstream}", 1, "US DE GB US"),  # it answers 501 to CONNECT
        ({"endpoint": "https://api.example"}, "http://", 78, "US GB DE US"),
    ],
)
def test_runs_that_cannot_begin_cost_no_region_its_turn(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, wrong: Any, proxy: str | None, status: int, firsts: str
) -> None:
    if proxy:
        monkeypatch.setenv("https_proxy", proxy.format(upstream=bench.upstream.address))
    regions, ticks = ["US", "GB", "DE"], iter(range(NOON_MS, 2 * NOON_MS))
    bench.clock = lambda: next(ticks)
    bench.configure(pages=1, regions=regions, **wrong)
    for first in firsts.split():
        report = bench.run()
        assert (report.exit_status, report.regions[0].region) == (status, first)
    bench.configure(pages=1, regions=regions)
    assert outcomes(bench.run()) == dict.fromkeys(regions, "done")


def test_a_missing_key_costs_the_last_region_of_a_round_no_turn(bench: Bench) -> None:
    """Although the region failed in the round before."""
    bench.upstream.fault("status", status=400)
    bench.configure(pages=1, regions=["DE"])
    assert outcomes(bench.run()) == {"DE": "failed"}
    for key, outcome in (("any", "skipped"), (None, "failed"), ("any", "done")):
        bench.configure(pages=1, regions=["US", "GB", "DE"], key=key, more="max_units = 2")
        assert outcomes(bench.run())["DE"] == outcome


def test_regions_that_end_the_run_do_not_keep_the_others_from_the_next_round(bench: Bench) -> None:
    for region in "US", "GB":
        bench.upstream.fault("status", status=401, region=region, times=9)
    bench.configure(regions=["DE", "US", "GB"], pages=1)
    assert [outcomes(bench.run()).get("DE") for _ in range(5)] == ["done", None, "done", "done", "done"]


def test_a_region_without_a_server_keeps_the_others_from_nothing(bench: Bench) -> None:
    """Each region may be a server of its own. The one that is away counts as covered: others answered in its round."""
    fetch = bench.own_fetch(
        """
import requests
def fetch(client, region, cursor):
    if region in ("a", "b"):
        requests.get(f"http://127.0.0.1:{9 if region == 'a' else 19}/")
    return Page()
"""
    )
    bench.configure(fetch=fetch, regions=["a", "b", "c"])
    assert outcomes(bench.run()) == {"a": "failed", "b": "failed", "c": "done"}
    assert list(outcomes(bench.run())) == ["a", "b", "c"]


def test_a_refusal_between_two_attempts_stops_the_run(bench: Bench) -> None:
    bench.configure(units=2, regions=["US", "DE"])
    bench.upstream.fault("status", status=503, times=9)
    report = bench.run()
    assert (report.outcome, bench.requests) == ("stopped", 2)
    assert outcomes(report) == {"US": "skipped", "DE": "skipped"}


@pytest.mark.parametrize(
    ("key", "remedy"), [("invalid-key", "check the credential's key"), ("disabled-x", "enable the API")]
)
def test_a_credential_that_is_not_set_up_stops_the_run_with_the_remedy(bench: Bench, key: str, remedy: str) -> None:
    bench.configure(key=key)
    report = bench.run()
    assert (report.outcome, report.exit_status, bench.requests) == ("failed", 78, 1)
    assert remedy in report.why
    assert key not in json.dumps(report.as_json()) + report.why
    assert list(outcomes(report).values()) == ["failed"] + ["skipped"] * 6
    asks = "def fetch(client, region, cursor):\n    client.videos().list(part='id', id='x').execute()"
    bench.configure(key=key, fetch=bench.own_fetch(asks))
    assert bench.run().why.endswith(".py, line 3)"), "the function may ask another API, too"


def test_a_cursor_that_upstream_forgot_is_given_up_once_without_duplicates(bench: Bench) -> None:
    now_ms = NOON_MS
    bench.clock = lambda: now_ms
    bench.configure(units=2, regions=["US"])
    assert outcomes(bench.run()) == {"US": "partial"}
    bench.change("UPDATE checkpoints SET cursor = ?", json.dumps({"token": "forgotten"}))
    now_ms += DAY_MS
    bench.configure(units=10, regions=["US"])
    report = bench.run()
    assert (outcomes(report), report.attempts) == ({"US": "done"}, 5)
    assert bench.rows("SELECT count(*), count(DISTINCT taken_at_ms), max(rank) FROM rankings") == [(200, 1, 200)]


# -- fetch functions of one's own --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
        ("store.select('SELECT 1 FROM videos_text WHERE videos_text MATCH :w', w='(')", "ValueError: store.select: "),
        ("store.select('SELECT :n', n=2**63)", "ValueError: store.select: Python int too large"),
        ("store.select('DELETE FROM rows')", "ValueError: store.select only reads"),
        ("store.select(\"ATTACH ':memory:' AS z\")", "ValueError: store.select only reads"),
        ("store.select('SELECT 1; DELETE FROM rows')", "ValueError: store.select: "),
        ("raise ValueError('key=AIza' + 'x' * 35)", "ValueError: key=[redacted]"),
        ("raise MemoryError", "MemoryError (/"),
        ("import httplib2; raise httplib2.RedirectLimit('circle', {}, b'')", "RedirectLimit: circle (/"),
        ("import quota; quota.open('none.toml')", "ConfigError: "),
        ("client.videos().list(part='zzz', id='x').execute()", "upstream said 400 (unknownPart): 'zzz' (/"),
        (
            'import requests; a = requests.Response(); a.status_code, a._content = 400, b\'{"error": "no"}\'\n'
            "        a.raise_for_status()",
            "upstream said 400: no (/",
        ),
        ("import quota; raise quota.BadAnswer('two\\nlines' + 'x' * 1_000)", "(/"),
        ("import asyncio; return asyncio.sleep(0)", ":fetch' returned coroutine, not a quota.jobs.job.Page"),
        ("return Page(videos=[{}])", 'ValueError: each of a page\'s videos must be an object with a text "id", not {}'),
        ("return Page(cursor={1: {2}})", "ValueError: a page's cursor must be JSON"),
        ("return Page(rows={'at': {}})", "ValueError: a page's rows of table 'at' must be a list, not dict"),
        ("return Page(cursor={'x': (cursor or {'x': 0})['x'] + 1}, complete=False)", "without completing a page"),
        ("return Page(cursor={'x': 1}, complete=False)", "the next page is one that this pass has already fetched"),
        ("return Page(cursor=deep(101))", "ValueError: a page's cursor is nested over 100 deep"),
        ("return Page(cursor={'x': 'y' * 1_000_000})", "a page's cursor has 1,000,009 characters, over 1,000,000"),
    ],
)
def test_a_function_that_misbehaves_fails_its_region_in_one_line(bench: Bench, body: str, error: str) -> None:
    fetch = bench.own_fetch(
        f"""
from functools import reduce

def deep(levels):
    return reduce(lambda inner, _: {{"in": inner}}, range(levels - 1), {{}})

def fetch(client, region, cursor, *, store):
    if region == "DE":
        {body}
    return Page()
"""
    )
    bench.configure(fetch=fetch, regions=["US", "DE", "FR"])
    report = bench.run()
    assert outcomes(report) == {"US": "done", "DE": "failed", "FR": "done"}
    message = str(report.regions[1].error)
    assert error in message
    assert "\n" not in message
    assert len(message.partition(" (/")[0]) <= 400


def test_changes_of_a_failed_attempt_to_its_cursor_are_dropped(bench: Bench) -> None:
    fetch = bench.own_fetch(
        """
seen = []
def fetch(client, region, cursor):
    if cursor is None:
        return Page(cursor={"left": [1, 2]})
    seen.append(list(cursor["left"]))
    cursor["left"].clear()
    if len(seen) < 3:
        raise ConnectionResetError
    assert seen == [[1, 2]] * 3
    return Page()
"""
    )
    bench.configure(fetch=fetch, regions=["US"])
    assert bench.run().outcome == "done"


def test_changes_of_a_function_to_its_options_are_dropped(bench: Bench) -> None:
    """Else the rest of the run, and in `quota schedule` each later one, would be other work with other checkpoints."""
    fetch = bench.own_fetch(
        """
def fetch(client, region, cursor, *, words):
    words.append(region)
    if cursor is None:
        return Page(videos=[{"id": ",".join(words)}], cursor={"at": 2})
    raise ValueError(",".join(words))
"""
    )
    bench.configure(fetch=fetch, regions=["US", "DE"], more='options = { words = ["cats"] }')
    with quota.open(bench.config) as session:
        for _ in range(2):
            report = run_job(session, "t")
            errors = [str(region.error).partition(" (")[0] for region in report.regions]
            assert errors == ["ValueError: cats,US", "ValueError: cats,DE"]
    assert bench.rows("SELECT video_id FROM videos ORDER BY 1") == [("cats,DE",), ("cats,US",)]
    assert bench.count("checkpoints") == 2


@pytest.mark.parametrize(
    ("name", "source", "error"),
    [
        ("other", "def fetch(client, region, cursor): ...", "has no function 'other'"),
        ("fetch", "fetch = 3", "is not a function but int"),
        ("fetch", "def fetch(client, region, cursor):\n    yield", "is a coroutine or a generator"),
        ("fetch", "def fetch(client, region): ...", "too many positional arguments"),
        ("fetch", "@first_attempt\ndef fetch(client, region, cursor): ...", "@first_attempt lacks the method; write"),
        ("fetch", "def fetch(client, region, cursor, *, words): ...", "missing a required"),
        ("fetch", "def fetch(", "cannot be imported: SyntaxError"),
        ("fetch", "import sys\nsys.exit(3)", ".py, line 3)"),
        ("fetch", "import asyncio\nraise asyncio.CancelledError", ".py, line 3)"),
    ],
)
def test_an_unusable_function_is_a_configuration_error(bench: Bench, name: str, source: str, error: str) -> None:
    module, _, _ = bench.own_fetch(source).partition(":")
    bench.configure(fetch=f"{module}:{name}")
    with pytest.raises(quota.ConfigError, match=f"^.*{re.escape(error)}.*$"):
        bench.run()
    assert error in bench.rows("SELECT why FROM past_runs WHERE outcome = 'failed'")[0][0], "an alert points there"


def test_a_quiet_run_prints_what_went_wrong_and_nothing_else(bench: Bench) -> None:
    command = bench.quota
    bench.configure(units=4, regions=["US", "XX", "DE"], pages=1)
    assert len(command("run", "t", "--region", "US").stdout.splitlines()) == 1
    done = command("run", "t", "--region", "DE", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert command("run", "t", "--region", "DE", "--quiet", "--json").stdout == ""
    failed = command("run", "t", "--region", "XX", "--quiet")
    assert (failed.returncode, failed.stdout) == (1, "")
    (line,) = failed.stderr.splitlines()
    assert line.startswith("quota: t XX: upstream said 400 (invalidRegionCode)")
    for words in (("t", "--region", "US"), ("--all", "--json")):
        refused = command("run", *words, "--quiet")
        assert (refused.returncode, refused.stdout, refused.stderr) == (0, "", "")
    asked = command("run", "t", "--region", "US", "--quiet", "--fail-on-refusal")
    (line,) = asked.stdout.splitlines()
    assert (asked.returncode, line.partition(" (")[0]) == (75, "t: stopped after 0 pages")
    assert bench.requests == 4


def test_a_refusal_between_search_and_details_loses_no_search(bench: Bench) -> None:
    """One unit is enough to go on: the run knows that its first call is not a search."""
    words = 'options = { words = "cats" }'
    bench.configure(units=100, fetch="search", regions=["DE"], pages=1, more=words)
    first = bench.run()
    assert (outcomes(first), first.units, first.refused_by) == ({"DE": "partial"}, 100, "day")
    cursor = first.regions[0].cursor
    assert cursor is not None
    assert len(cursor["ids"]) == 50
    assert first.regions[0].pages == 0
    bench.configure(units=101, fetch="search", regions=["DE"], pages=1, more=words)
    second = bench.run()
    assert (outcomes(second), second.units, second.regions[0].items) == ({"DE": "done"}, 1, 50)
    assert bench.upstream.usage()["by_method"] == {"search.list": 1, "videos.list": 1}
    ranked = [row[0] for row in bench.rows("SELECT video_id FROM rankings ORDER BY rank")]
    assert ranked == cursor["ids"]


def test_channels_are_those_of_the_regions_newest_ranking(bench: Bench) -> None:
    bench.configure(regions=["DE"], more='[jobs.channels]\nfetch = "channels"\nregions = ["DE", "FR"]\npages = 9\n')
    bench.run()
    wanted = bench.rows("SELECT count(DISTINCT channel_id) FROM videos")[0][0]
    report = bench.run("channels")
    assert (report.outcome, outcomes(report)) == ("done", {"DE": "done", "FR": "done"})
    assert bench.count("channels") == report.regions[0].items == wanted
    assert report.units == -(-wanted // 50)  # and none for FR, of which nothing is known


# -- kills, signals, overlap, disks ------------------------------------------------------------------------------------


def test_a_signal_that_the_caller_had_ignored_stays_ignored() -> None:
    """As `nohup` does with SIGHUP, and a script with the SIGINT of its background jobs."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGINT)}
    try:
        with interruptible(says=False) as stop:
            for number in before:
                os.kill(os.getpid(), number)
            assert stop() == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_process_that_a_fetch_function_starts_ends_by_sigterm() -> None:
    """As by `multiprocessing.Process.terminate`."""
    reader, writer = os.pipe()
    with interruptible(says=False):
        child = os.fork()
        if child == 0:
            os.write(writer, b"x")
            signal.pause()
            os._exit(0)
        os.read(reader, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitpid(child, 0) == (child, signal.SIGTERM)
    os.close(reader)
    os.close(writer)


def test_a_second_signal_while_it_waits_between_two_attempts_changes_nothing(bench: Bench) -> None:
    """Jobs that come after it call nobody, not even a health check, and name their regions."""
    bench.configure(regions=["US", "DE"], more='[jobs.u]\nfetch = "trending"\nregions = ["GB"]\nping = "env:NONE"')
    bench.upstream.fault("status", status=503, after=1, times=9)
    child = bench.start("run", "--all", "--json", "--quiet")
    bench.await_requests(2)
    child.send_signal(signal.SIGTERM)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=300)
    assert (child.returncode in (130, 143), err) == (True, "")
    report, later = json.loads(out)
    assert (report["outcome"], report["attempts"]) == ("stopped", bench.requests)
    assert (later["outcome"], later["attempts"], later["regions"][0]["region"]) == ("stopped", 0, "GB")
    assert bench.count("rankings") == 50


def test_check_and_run_report_a_first_call_that_fits_no_limit(bench: Bench) -> None:
    """No region loses its turn."""
    bench.configure(fetch="search", regions=["US", "GB"], units=50, more='options = { words = "cats" }')
    done, checked = bench.quota("run", "t"), bench.quota("check")
    why = "search.list costs 100 units and limit 'day' of credential 'main' holds 50: it can never fit"
    assert (done.returncode, why in done.stderr) == (2, True)
    assert (checked.returncode, f"error: jobs.t.fetch: {why}" in checked.stderr) == (78, True)
    assert bench.rows("SELECT pending FROM checkpoints") == [(1,), (1,)]


def test_a_run_that_fails_before_it_asks_for_its_first_page_has_an_end(bench: Bench) -> None:
    def refusal() -> None:
        raise quota.LedgerError("no places")

    bench.configure(regions=["US"])
    with pytest.raises(quota.LedgerError):
        bench.run(refusal=refusal)
    assert bench.rows("SELECT outcome, why FROM past_runs") == [("failed", "no places")]


@pytest.mark.parametrize("regions", ["GB", ()], ids=["of another region", "of all regions"])
def test_runs_of_a_job_wait_for_each_other_and_fetch_no_region_twice(bench: Bench, regions: Any) -> None:
    """Nor does a region count as covered that a wrong clock has dated ahead."""
    bench.configure(regions=["US", "GB"], pages=1)
    bench.run(regions="GB")
    bench.change("UPDATE checkpoints SET completed_at_ms = completed_at_ms + 86400000")
    bench.upstream.fault("latency", ms=300_000)
    child = bench.start("run", "t", "--region", "US", "--quiet")
    bench.await_requests(2)
    watcher = Watcher()
    watcher.waits = bench.upstream.go_on  # type: ignore[method-assign]
    assert outcomes(bench.run(regions=regions, watcher=watcher)) == {"GB": "done"}
    child.communicate()
    assert bench.requests == 3
    assert bench.rows("SELECT outcome FROM past_runs") == [("done",)] * 3


def test_runs_of_two_jobs_over_one_session_keep_their_numbers_apart(bench: Bench) -> None:
    """As under APScheduler, whose jobs are threads. A forked child waits for no run of its parent."""
    more = '[jobs.u]\nfetch = "trending"\npages = 2\n[jobs.v]\nfetch = "trending"'
    bench.configure(units=9, regions=["US"], pages=2, more=more)
    bench.upstream.fault("latency", ms=500, after=6, times=9)
    watcher = Watcher()
    with quota.open(bench.config) as session, ThreadPoolExecutor() as pool:
        watcher.page = lambda _: run_job(session, "u")  # type: ignore[assignment, method-assign]
        assert run_job(session, "t", RunOptions(watcher=watcher)).units == 2, "a run within its steps has 4"
        running = pool.map(lambda job: run_job(session, job), "tu")
        bench.await_requests(7)
        assert in_child(lambda: run_job(session, "v", RunOptions(stop=lambda: 15)).outcome) == "stopped"
        reports = [*running]
    ends = sorted((report.units, report.attempts, report.outcome) for report in reports)
    assert ends == [(1, 1, "stopped"), (2, 2, "done")]


def test_a_run_waits_for_no_other_thread_beyond_its_grace(bench: Bench) -> None:
    """That thread may wait for this run."""
    bench.configure(regions=["US"], pages=1, more='[jobs.u]\nfetch = "trending"\nmisfire_grace = "1ms"')
    watcher, inner = Watcher(), []
    with quota.open(bench.config) as session, ThreadPoolExecutor() as pool:
        watcher.page = lambda _: inner.append(pool.submit(run_job, session, "u").result(9))  # type: ignore[method-assign]
        assert run_job(session, "t", RunOptions(watcher=watcher)).outcome == "done"
    assert inner[0].why.startswith("nothing fetched: a run of another job has not ended within misfire_grace (1ms)")


def test_a_region_whose_turn_does_not_come_is_named(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.configure(more='misfire_grace = "1ms"', regions=["US", "GB"], pages=1)
    bench.upstream.fault("hang", ms=300_000)
    child = bench.start("run", "t", "--region", "US")
    bench.await_requests(1)
    report, of_tick = bench.run(regions="GB"), bench.run(tick=Tick(host_clock(), "t", ("GB",)))
    bench.run(regions="GB", stop=lambda: signal.SIGTERM)
    child.kill()
    child.communicate()
    assert of_tick.why.startswith("nothing fetched: another run of the job has not ended within misfire_grace (1ms)")
    assert (report.outcome, report.exit_status, outcomes(report)) == ("overlap", 0, {"GB": "skipped"})
    assert caplog.messages == [f"run_skipped job=t: {report.why}"], "and none of the interrupted run"
    assert report.why.startswith("GB not fetched: another run of the job has not ended within misfire_grace (1ms)")
    assert [*bench.rows("SELECT outcome, why FROM past_runs")][1] == ("overlap", report.why)


@pytest.mark.parametrize(("table", "ended"), [("past_runs", ("done", 0, 4)), ("checkpoints", ("failed", 1, 2))])
def test_a_run_whose_end_cannot_be_stored_still_reports(
    bench: Bench, caplog: pytest.LogCaptureFixture, table: str, ended: tuple[str, int, int]
) -> None:
    class Breaks(Watcher):
        def page(self, checkpoint: Checkpoint) -> None:
            for name in {"past_runs", table}:
                bench.change(f"DROP TABLE IF EXISTS {name}")

    bench.configure(regions=["US"])
    report = bench.run(watcher=Breaks())
    assert (report.outcome, report.exit_status, report.units) == ended
    (warning,) = (message for message in caplog.messages if message.startswith("run_not_kept"))
    damaged = "is damaged; move it away, with its -wal and -shm (the next runs fetch the data again)"
    assert warning == f"run_not_kept run={report.run} job=t: store sqlite:///{bench.folder / 'videos.db'} {damaged}"


RESTARTED = "UPDATE checkpoints SET cursor = NULL, pages = 0, items = 0, ranks = 0, started_at_ms = NULL"


@pytest.mark.parametrize("instead", ["nothing", "a copy from before", "a pass that begins again"])
def test_a_store_that_is_replaced_in_mid_run_ends_it_in_one_line_without_a_hole(bench: Bench, instead: str) -> None:
    """Upstream is not said to name its pages in a circle, and the next run stores the ranking whole."""
    path, before = bench.folder / "videos.db", bench.folder / "before.db"

    class Replaces(Watcher):
        def page(self, checkpoint: Checkpoint) -> None:
            if checkpoint.pages == 1 and instead == "a pass that begins again":
                bench.change(RESTARTED)
            elif checkpoint.pages == 1:
                for end in ("", "-wal", "-shm"):
                    path.with_name(path.name + end).unlink(missing_ok=True)
                if instead == "a copy from before":
                    shutil.copy(before, path)

    bench.configure(regions=["US"], pages=2)
    assert bench.run().outcome == "done"
    bench.change(f"VACUUM INTO '{before}'")
    report = bench.run(watcher=Replaces())
    assert (report.outcome, report.exit_status, report.attempts) == ("failed", 1, 2)
    assert report.why == f"store {path}: it was replaced or changed while the job ran; run again"
    assert bench.run().outcome == "done"
    newest = "SELECT count(*), max(rank) FROM rankings WHERE taken_at_ms = (SELECT max(taken_at_ms) FROM rankings)"
    assert bench.rows(newest) == [(100, 100)]
    assert bench.rows("SELECT pages, ranks FROM checkpoints") == [(2, 100)]


def test_runs_into_one_store_are_kept_apart_whatever_their_state_folders(bench: Bench) -> None:
    """A crontab may set QUOTA_STATE_DIR, and a shell not. Both runs would go on where the other one stopped."""
    bench.configure(regions=["US"], pages=1)
    bench.upstream.fault("hang", ms=300_000)
    child = bench.start("run", "t")
    bench.await_requests(1)
    (bench.folder / "link.db").symlink_to("videos.db")
    for spelt in "videos.db", "link.db", f"../{bench.folder.name}/./videos.db":
        (bench.folder / "other.toml").write_text(bench.config.read_text().replace("videos.db", spelt))
        for state in bench.quota.env["QUOTA_STATE_DIR"], str(bench.folder / "other"):
            report = bench.quota.json("run", "t", "--config", "other.toml", QUOTA_STATE_DIR=state)
            assert (report["outcome"], report["regions"]) == ("overlap", []), (spelt, state)
    quiet = bench.quota("run", "t", "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    child.kill()
    child.communicate()
    assert bench.requests == 1
    assert bench.run().outcome == "done", "the lock died with its holder"


@pytest.mark.parametrize("killed", [False, True])
def test_a_process_that_a_fetch_function_leaves_behind_does_not_hold_the_lock(tmp_path: Path, killed: bool) -> None:
    url, (reader, writer) = f"sqlite:///{tmp_path}/videos.db", os.pipe()
    if os.fork() == 0:
        with only_one(url, "t"):
            if os.fork() == 0:
                os.close(writer)
                os._exit(len(os.read(reader, 1)))  # waits for the end of the test
            if killed:
                os._exit(0)
        os._exit(0)
    os.wait()
    until(lambda: not is_running(url, "t"))
    with only_one(url, "t") as lock:
        assert lock is not None
    os.close(writer)
    os.close(reader)
