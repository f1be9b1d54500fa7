"""`quota exec --auto` under what starts processes or wraps the same methods: wire = ledger."""

from __future__ import annotations

import subprocess

import pytest

from e2e.examples.conftest import ROOT, Taken
from support.servers import free_port

CALL = """
import os, httplib2, requests
def call():
    assert requests.get(os.environ["URL"]).status_code == 200
    assert httplib2.Http().request(os.environ["URL"])[0].status == 200
"""

UNDER_GEVENT = f"""
import sys
from gevent import monkey, joinall, spawn
if sys.argv[1] == "before":
    monkey.patch_all()
{CALL}
if sys.argv[1] == "after":
    monkey.patch_all()
joinall([spawn(call) for _ in range(10)], raise_error=True)
"""

UNDER_DDTRACE = f"""
import sys, ddtrace, quota
{CALL}
first, second = quota.instrument, lambda: ddtrace.patch(requests=True, urllib3=True)
for one in (first, second) if sys.argv[1] == "before" else (second, first):
    one()
for _ in range(10):
    call()
"""

UNDER_NIQUESTS = """
import asyncio, os, niquests
from contextlib import suppress
url = os.environ["URL"]
unreachable = url.replace("http:", "https:")
for _ in range(5):
    assert niquests.get(url).status_code == 200
with suppress(niquests.RequestException):
    niquests.get(unreachable)
async def main():
    async with niquests.AsyncSession() as session:
        with suppress(niquests.RequestException):
            await session.get(unreachable)
        for answer in await asyncio.gather(*[session.get(url) for _ in range(5)]):
            assert answer.status_code == 200
        assert (await session.get(url.replace("part=id", "part=no"))).status_code == 400
asyncio.run(main())
"""

UNDER_GRPC = """
import asyncio, sys
from concurrent.futures import ThreadPoolExecutor
from threading import Event
import grpc
from google.analytics import data_v1beta as data
from google.analytics.data_v1beta.services.beta_analytics_data import transports
from google.api_core.exceptions import FailedPrecondition
from google.api_core.retry import Retry, if_transient_error

arrived, gone, asked, settled = [], Event(), Event(), Event()

def answer(request, context):
    arrived.append(request)
    assert asked.wait(100)
    if request.property == "properties/slow":
        context.add_callback(gone.set)
        assert gone.wait(100)
    quota = data.PropertyQuota(tokens_per_day=data.QuotaStatus(consumed=3, remaining=1_000))
    return data.RunReportResponse(property_quota=quota)

reads = data.RunReportRequest.deserialize, data.RunReportResponse.serialize
methods = {"RunReport": grpc.unary_unary_rpc_method_handler(answer, *reads)}
server = grpc.server(ThreadPoolExecutor(4))
server.add_generic_rpc_handlers(
    [grpc.method_handlers_generic_handler("google.analytics.data.v1beta.BetaAnalyticsData", methods)]
)
server.add_insecure_port(sys.argv[1])
server.start()
report, slow = {"property": "properties/1"}, {"property": "properties/slow"}
retry = Retry(predicate=if_transient_error, initial=60)

over = transports.BetaAnalyticsDataGrpcTransport(channel=grpc.insecure_channel(sys.argv[1]))
client = data.BetaAnalyticsDataClient(transport=over)
later = over.run_report.future(data.RunReportRequest(report))
later.add_done_callback(lambda _: settled.set())
asked.set()
assert settled.wait(100)
client.run_report(report)

async def main():
    over = transports.BetaAnalyticsDataGrpcAsyncIOTransport(channel=grpc.aio.insecure_channel(sys.argv[1]))
    try:
        await asyncio.wait_for(data.BetaAnalyticsDataAsyncClient(transport=over).run_report(slow), 1)
    except TimeoutError:
        assert await asyncio.to_thread(gone.wait, 10), "a cancelled call goes on"
    await data.BetaAnalyticsDataAsyncClient(transport=over).run_report(report)
    try:
        await data.BetaAnalyticsDataAsyncClient(transport=over).run_report(report)
    except FailedPrecondition as error:
        assert error.message.startswith("refused properties.runReport"), error

asyncio.run(main())
try:
    client.run_report(report, retry=retry)
except FailedPrecondition as error:
    assert error.message.startswith("refused properties.runReport"), error
    assert error.errors[0].debug_error_string() == error.message, "google-ads reads it as JSON"
assert len(arrived) == 4, arrived
"""

DAG = f"""
from datetime import datetime
from airflow.sdk import dag, task
{CALL}
@dag(schedule=None, start_date=datetime(2026, 1, 1), catchup=False)
def things():
    for number in range(10):
        task(call, task_id=f"call{{number}}")()
things()
"""


def run(taken: Taken, package: str, *command: str, **env: str) -> None:
    if not (taken.folder / "quota.toml").exists():
        taken.allow(1_000)
    bin_folder = ROOT / "build" / "examples" / package / "bin"
    url = f"{taken.upstream.address}/youtube/v3/videos?part=id&chart=mostPopular&regionCode=DE&key=k"
    env = {**taken.env, "URL": url, "PATH": f"{bin_folder}:{taken.env['PATH']}", **env}
    done = subprocess.run(
        [str(bin_folder / command[0]), *command[1:]],
        cwd=taken.folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def charged(taken: Taken) -> int:
    return int(taken.json("spend")["total_units"])


@pytest.mark.parametrize("patched", ["before", "after"])
def test_gevent_patches_before_or_after_the_libraries_are_there(taken: Taken, patched: str) -> None:
    run(taken, "gevent", "quota", "exec", "--auto", "--", "python", "-c", UNDER_GEVENT, patched)
    assert charged(taken) == taken.sent() == 20


def test_eventlets_copy_of_http_client_is_charged(taken: Taken) -> None:
    program = "import os; from eventlet.green.urllib.request import urlopen; urlopen(os.environ['URL'])"
    run(taken, "eventlet", "quota", "exec", "--auto", "--", "python", "-c", program)
    assert charged(taken) == taken.sent() == 1


@pytest.mark.parametrize("ours", ["before", "after"])
def test_ddtrace_patches_before_or_after_us(taken: Taken, ours: str) -> None:
    silent = {"DD_TRACE_ENABLED": "false", "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false"}
    run(taken, "ddtrace", "python", "-c", UNDER_DDTRACE, ours, **silent)
    assert charged(taken) == taken.sent() == 20


def test_niquests_is_charged_awaited_or_not(taken: Taken) -> None:
    """It brings a urllib3 of its own, which Google's client gets too."""
    run(taken, "niquests", "quota", "exec", "--auto", "--", "python", "-c", UNDER_NIQUESTS)
    assert charged(taken) == taken.sent() == 11
    run(taken, "niquests", "quota", "demo")


def test_grpc_is_charged_settled_and_refused_once(taken: Taken) -> None:
    """A report that is cancelled costs the 10 tokens of its charge, and three others cost 3 each: there is no room for
    10 more."""
    place = f"127.0.0.1:{free_port()}"
    limit = '[[credentials.main.limits]]\nname = "hour"\nunits = 28\nwindow = "1h"\n'
    taken.configure(f'[credentials.main]\napi = "analyticsdata-v1beta"\nendpoint = "http://{place}"\n{limit}')
    program = ["python", "-c", UNDER_GRPC, place]
    run(taken, "google-analytics-data", "quota", "exec", "--auto", "--", *program)
    assert charged(taken) == 19


def test_airflow_tasks_under_auto_are_charged(taken: Taken) -> None:
    home = {"AIRFLOW_HOME": str(taken.folder / "airflow"), "AIRFLOW__CORE__LOAD_EXAMPLES": "false"}
    (taken.folder / "airflow" / "dags").mkdir(parents=True)
    (taken.folder / "airflow" / "dags" / "things.py").write_text(DAG)
    run(taken, "apache-airflow", "airflow", "db", "migrate", **home)
    run(taken, "apache-airflow", "quota", "exec", "--auto", "--", "airflow", "dags", "test", "things", **home)
    assert charged(taken) == taken.sent() == 20
