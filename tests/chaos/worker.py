"""One worker process: `python -m chaos.worker SCENE MACHINE KIND LIFE SEED`, with QUOTA_STATE_DIR set.

    ticks     one tick of the real runner after the other, each in a session of its own as cron would start it
    calls     the Google client in a loop
    charges   `budget.charge`, then a plain HTTP request: now and then a dear one
    spends    cheap charges without a request, as fast as it can

It goes on until the file `finish` appears; then it does its last tick, or sees to it that nothing is owed, and ends.
"""

from __future__ import annotations

import http.client
import logging
import os
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit

from googleapiclient.errors import HttpError
from httplib2 import HttpLib2Error
from tenacity import wait_fixed

import quota
from chaos import pages
from chaos.journal import Journal, NotedSession, NotedWarnings
from chaos.scene import AHEAD_MS, CHEAP, DEAR, HEAL_S, JOB, KEY, REGIONS, SHARED
from quota.jobs.progress import Watcher
from quota.jobs.runner import run_job
from quota.settings.load import load_settings

if TYPE_CHECKING:
    from quota.jobs.store.checkpoints import Checkpoint

DEAR_SHARE = 0.04
"""Of the plain charges, how many are dear: more than they get."""


TROUBLE = (HttpError, HttpLib2Error, OSError, http.client.HTTPException)


class NotingWatcher(Watcher):
    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def page(self, checkpoint: Checkpoint) -> None:
        self._journal.note(
            "stored",
            call=self._journal.call,
            region=checkpoint.region,
            pages=checkpoint.pages,
            taken_ms=checkpoint.started_at_ms,
        )


class Worker:
    def __init__(self, scene: Path, machine: str, life: str, seed: int) -> None:
        self.journal = Journal(scene / "journals" / f"{life}.jsonl", life, int(os.environ.get(AHEAD_MS, 0)))
        self.finish = scene / "finish"
        self.here = scene / machine / "here"
        self.settings = load_settings(scene / machine / "quota.toml")
        self.random = random.Random(seed)
        logging.getLogger("quota").addHandler(NotedWarnings(self.journal))
        pages.journal = self.journal

    def poll(self, longest_s: float = 0.06) -> None:
        """A short pause, so that eight workers leave some of two processors to the ledger."""
        time.sleep(self.random.uniform(longest_s / 4, longest_s))

    def ticks(self) -> None:
        left = [JOB, SHARED]
        while left:
            finishing = self.finish.exists()
            for job in tuple(left):
                outcome = self.tick(job, finishing=finishing)
                if finishing and outcome in (("done", "elsewhere") if job == SHARED else ("done",)):
                    left.remove(job)
            self.poll(0.12)

    def tick(self, job: str, *, finishing: bool) -> str:
        here = job == SHARED and self.here.exists()
        with NotedSession(self.settings, self.journal) as session:
            report = run_job(session, job, here=here, watcher=NotingWatcher(self.journal), wait=wait_fixed(0.05))
        self.journal.note("tick", job=job, outcome=report.outcome, why=report.why[:120], finishing=finishing)
        if here and report.outcome != "overlap":
            self.here.unlink(missing_ok=True)
        return report.outcome

    def calls(self) -> None:
        with NotedSession(self.settings, self.journal) as session:
            client = session.google()
            while not self.finish.exists():
                try:
                    pages.call(client, self.random.choice(REGIONS), None, 1)
                except quota.Refused:
                    self.poll()
                except TROUBLE:  # upstream's; noted where it happened
                    self.poll()
                self.poll(0.02)
            self.settle_debts(session)

    def spends(self) -> None:
        self.charges(sends=False, dear_share=0, pause_s=0.005)

    def charges(self, *, sends: bool = True, dear_share: float = DEAR_SHARE, pause_s: float = 0.02) -> None:
        with NotedSession(self.settings, self.journal) as session:
            budget = session.budget()
            host = urlsplit(session.credential().endpoint or "").netloc
            while not self.finish.exists():
                dear = self.random.random() < dear_share
                name = self.journal.next_call()
                decision = budget.charge(DEAR if dear else CHEAP)
                if decision.admitted and sends:
                    self.send(host, "captions" if dear else "videos", name)
                else:
                    self.poll()
                self.poll(pause_s)
            self.settle_debts(session)

    def send(self, host: str, resource: str, name: str) -> None:
        wanted = {"part": "snippet", "key": KEY, "quotaUser": name}
        wanted |= {"videoId": "v"} if resource == "captions" else {"chart": "mostPopular", "maxResults": "1"}
        connection = http.client.HTTPConnection(host, timeout=10)
        try:
            connection.request("GET", f"/youtube/v3/{resource}?{urlencode(wanted)}")
            answer = connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException) as error:
            self.journal.note("failed", call=name, kind=type(error).__name__)
        else:
            self.journal.note("answered", call=name, status=answer.status)
        finally:
            connection.close()

    def settle_debts(self, session: quota.Session) -> None:
        """The next decision that reaches the ledger repays; a peek is one."""
        deadline = time.monotonic() + HEAL_S
        while time.monotonic() < deadline:
            answered = session.budget().peek(CHEAP).reason != "ledger-unavailable"
            if answered and session.budget().owed_units() == 0:
                return
            self.poll()


def main() -> None:
    scene, machine, kind, life, seed = sys.argv[1:]
    worker = Worker(Path(scene), machine, life, int(seed))
    worker.journal.note("start", machine=machine, kind=kind, ahead_ms=int(os.environ.get(AHEAD_MS, 0)))
    getattr(worker, kind)()
    worker.journal.note("end")


if __name__ == "__main__":
    main()
