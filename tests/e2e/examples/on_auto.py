"""`quota exec --auto` under what starts processes or wraps the same methods: wire = ledger."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from e2e.examples.conftest import ROOT

if TYPE_CHECKING:
    from e2e.examples.conftest import Taken

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


@pytest.mark.parametrize("ours", ["before", "after"])
def test_ddtrace_patches_before_or_after_us(taken: Taken, ours: str) -> None:
    silent = {"DD_TRACE_ENABLED": "false", "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false"}
    run(taken, "ddtrace", "python", "-c", UNDER_DDTRACE, ours, **silent)
    assert charged(taken) == taken.sent() == 20


def test_the_tasks_of_a_dag_of_airflow(taken: Taken) -> None:
    home = {"AIRFLOW_HOME": str(taken.folder / "airflow"), "AIRFLOW__CORE__LOAD_EXAMPLES": "false"}
    (taken.folder / "airflow" / "dags").mkdir(parents=True)
    (taken.folder / "airflow" / "dags" / "things.py").write_text(DAG)
    run(taken, "apache-airflow", "airflow", "db", "migrate", **home)
    run(taken, "apache-airflow", "quota", "exec", "--auto", "--", "airflow", "dags", "test", "things", **home)
    assert charged(taken) == taken.sent() == 20
