"""One worker process, which notes what it does.

    ticks     one tick of the real runner after the other, each in a session of its own as cron would start it
    calls     the Google client in a loop
    charges   `budget.charge`, then a plain HTTP request: now and then a dear one

It goes on until the file `finish` appears. Then it does its last tick, sees to it that nothing is owed, and ends.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import random
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

from googleapiclient.errors import HttpError
from httplib2 import HttpLib2Error

import quota
from chaos.scene import CHEAP, DEAR, JOB, KEY, PAGE_ITEMS, REGIONS, Scene
from quota.budget import Listener
from quota.decision import Decision
from quota.jobs.job import Cursor, Page, first_attempt
from quota.jobs.progress import Watcher
from quota.jobs.runner import RunOptions, run_job
from quota.jobs.store.checkpoints import Checkpoint
from support.patience import be_impatient, without_waits

DEAR_SHARE = 0.04
"""Of the plain charges, how many are dear: more than they get."""

TROUBLE = (HttpError, HttpLib2Error, OSError, http.client.HTTPException)
"""Upstream's."""

_right_ns = time.time_ns


def now_ms() -> int:
    """The time by a clock that is right, whatever the one of this process says."""
    return _right_ns() // 1_000_000


class Notes(Watcher, Listener):
    """What a worker says it did: one JSON line an event, in a file for each of its lives.

    A line is one write to a file opened for appending, so a killed worker leaves whole lines, up to the last thing it
    did.

        decision   the budget's answer, before anything leaves
        fetched    the page of a region is there; stored: page and checkpoint are in the store
    """

    def __init__(self, scene: Scene, machine: str, life: str) -> None:
        self._file = os.open(scene.folder / "notes" / life, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._ahead, self._machine, self._life = scene.folder / machine / "ahead_ms", machine, life
        self._calls = self.ahead_ms = 0
        self.call = ""
        """The name of the call in hand. It travels as `quotaUser`, so that the wire shows it."""

    def note(self, event: str, **fields: Any) -> None:
        who = {"ms": now_ms(), "event": event, "machine": self._machine, "life": self._life}
        os.write(self._file, json.dumps(who | fields).encode() + b"\n")

    def next_call(self) -> str:
        self.set_clock()
        self._calls += 1
        self.call = f"{self._life}.{self._calls}"
        return self.call

    def set_clock(self) -> None:
        """Set the clock of this process to its machine's."""
        self.ahead_ms = int(self._ahead.read_text() or 0)

    def clock_ns(self) -> int:
        return _right_ns() + self.ahead_ms * 1_000_000

    def decided(self, decision: Decision) -> None:
        asked = {"call": self.call, "ahead_ms": self.ahead_ms, "at_ms": decision.decided_at_ms}
        self.note("decision", **asked, **decision.as_json())

    def page(self, checkpoint: Checkpoint) -> None:
        self.note("stored", region=checkpoint.region, pages=checkpoint.pages, taken_ms=checkpoint.started_at_ms)


notes: Notes
"""Those of this process."""


def call(client: Any, region: str, token: str | None, items: int) -> Any:
    """One call of the chart, under a name of its own."""
    wanted = {"part": "snippet", "chart": "mostPopular", "regionCode": region, "maxResults": items}
    return client.videos().list(**wanted, pageToken=token, quotaUser=notes.next_call()).execute()


@first_attempt(CHEAP)
def fetch(client: Any, region: str, cursor: Cursor | None) -> Page:
    """A region's chart in small pages: the fetch function of the ticks."""
    answer = call(client, region, cursor["token"] if cursor else None, PAGE_ITEMS)
    notes.note("fetched", region=region, ids=[item["id"] for item in answer["items"]])
    token = answer.get("nextPageToken")
    return Page(videos=answer["items"], ranked=True, cursor={"token": token} if token else None)


class Worker:
    def __init__(self, scene: Scene, machine: str, seed: int) -> None:
        self.finish, self.configuration = scene.folder / "finish", scene.folder / machine / "quota.toml"
        self.random = random.Random(seed)

    def pause(self, longest_s: float = 0.06) -> None:
        """A short one, so that eight workers leave some of two processors to the ledger."""
        time.sleep(self.random.uniform(longest_s / 4, longest_s))

    def ticks(self) -> None:
        is_last = False
        while not is_last:
            finishing = self.finish.exists()
            notes.set_clock()
            with quota.open(self.configuration) as session, without_waits():
                report = run_job(session, JOB, RunOptions(watcher=notes))
                # A run that only ends a round leaves out the regions that failed in it.
                is_last = finishing and report.outcome == "done" and len(report.regions) == len(REGIONS)
                if is_last:
                    self.repay(session.budget())
            self.pause(0.12)

    def calls(self) -> None:
        with quota.open(self.configuration) as session:
            client, budget = session.google(), session.budget()
            budget.listener = notes
            while not self.finish.exists():
                try:
                    call(client, self.random.choice(REGIONS), None, 1)
                except (quota.Refused, *TROUBLE):
                    self.pause()
                self.pause(0.02)
            self.repay(budget)

    def charges(self) -> None:
        with quota.open(self.configuration) as session:
            budget, endpoint = session.budget(), str(session.credential().endpoint)
            budget.listener = notes
            while not self.finish.exists():
                method = DEAR if self.random.random() < DEAR_SHARE else CHEAP
                name = notes.next_call()
                if budget.charge(method).admitted:
                    send(endpoint, method, name)
                else:
                    self.pause()
                self.pause(0.02)
            self.repay(budget)

    def repay(self, budget: quota.Budget) -> None:
        """The next decision that reaches the ledger repays; a peek is one."""
        while budget.peek(CHEAP).reason not in ("ok", "limit") or budget.owed_units():
            self.pause()


def send(endpoint: str, method: str, name: str) -> None:
    """A plain request of this name, whatever comes of it."""
    wanted = {"part": "snippet", "key": KEY, "quotaUser": name}
    wanted |= {"videoId": "v"} if method == DEAR else {"chart": "mostPopular", "maxResults": "1"}
    url = f"{endpoint}/youtube/v3/{method.partition('.')[0]}?{urlencode(wanted)}"
    with suppress(*TROUBLE), urlopen(url, timeout=10) as answer:  # noqa: S310  # our own address
        answer.read()


def work(scene: Scene, machine: str, kind: str, life: str, seed: int) -> None:
    """One life of a worker of this kind."""
    global notes
    be_impatient()
    logging.getLogger("quota").setLevel(logging.CRITICAL)  # each outage is a warning
    for name in [*os.environ]:  # what whoever starts a run has for work of their own
        if name.startswith("QUOTA_"):
            del os.environ[name]
    os.environ["QUOTA_STATE_DIR"] = str(scene.folder / machine / "state")
    notes = Notes(scene, machine, life)
    time.time_ns = notes.clock_ns
    getattr(Worker(scene, machine, seed), kind)()
