"""`quota exec --auto`: a program whose every attempt to a metered host is charged, without a change to it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import quota
from quota.auto import TALLY, payers_of
from quota.cli.output import say, say_built_in
from quota.clients.instrument.tally import Spent, spent_in
from quota.common.text import listed, many

SITE = Path(__file__).absolute().parent / "site"
"""Has nothing but the `sitecustomize.py` with which an instrumented Python begins."""

FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def environment_of(config: str | None, credential: str | None, job: str, tally: str = "") -> dict[str, str]:
    """The environment in which every Python is instrumented. `tally` is a folder for what its processes spend. Raises
    what makes that useless: a wrong configuration, no host."""
    with quota.open(config) as session:
        say_built_in(session, err=True)
        payers_of(session, credential)
        path = session.settings.path
    given = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH")))),
        "QUOTA_AUTO_HOME": str(SITE.parents[2]),
        "QUOTA_AUTO_CREDENTIAL": credential or "",
        TALLY: tally,
    }
    if path is not None:
        given["QUOTA_CONFIG"] = os.path.abspath(path)  # wherever the program goes
    if job:
        given["QUOTA_JOB"] = job
    return {**os.environ, **given}


def run_and_sum_up(command: list[str], config: str | None, credential: str | None, job: str) -> int:
    """Run a command to its end, and say what it and its children spent. Raises OSError if it does not start."""
    with tempfile.TemporaryDirectory(prefix="quota-") as tally:
        status = _run(command, environment_of(config, credential, job, tally))
        spent = spent_in(tally)
    said = f"{many(spent.calls, 'call')}, {many(spent.units, 'unit')}, {spent.refused:,} refused"
    if spent == Spent():
        with quota.open(config) as session:
            said += f"; charged is what goes to {listed(payers_of(session, credential).hosts)}"
            said += "; name another address as `endpoint` of the credential"
    say(said, err=True)
    return status


def _run(command: list[str], env: Mapping[str, str]) -> int:
    """The exit status of a command that runs beneath this process, as a shell says it."""
    with subprocess.Popen(command, env=env) as running:  # noqa: S603  # running the caller's command is the purpose
        before = {number: signal.signal(number, lambda got, _: running.send_signal(got)) for number in FORWARDED}
        before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal tells the program, too
        try:
            status = running.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return 128 - status if status < 0 else status
