"""Damaged checkpoints in the store: the region continues, begins again or fails in one line, and recovers."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

import quota
from fuzz.generate import damaged, mutated, text, value
from fuzz.house import one_video, unlink
from fuzz.inputs import PARTS, Input, check_line, every
from quota.common.text import printable
from quota.jobs.data import _video_line
from quota.jobs.fetches import _RANKED_CHANNELS
from quota.jobs.runner import ATTEMPTS, run_job
from quota.jobs.store.file import StoreError
from quota.jobs.store.store import Store
from quota.terms.limits import DAY_MS
from support.configurations import configuration
from support.patience import without_waits
from support.plain_http import PlainServer

JOBS = "".join(
    f'[jobs.{job}]\nfetch = "{job}"\nregions = ["US", "DE"]\npages = 3\n'
    for job in ("trending", "channels", "uploads", "videos", "comments", "search")
)
OPTIONS = 'options = { words = "w" }'
"""Of the last job."""

CURSORS: dict[str, list[dict[str, Any]]] = {
    "trending": [{"token": "t"}],
    "search": [
        {"turns": [["x", "t"]]},
        {"ids": ["v1", "v2"], "next": "t", "turns": [["x", None], ["y", "t"]]},
        {"ids": ["v1"], "next": None, "turns": [["x", "t"]]},
    ],
    "channels": [{"after": "c1"}],
    "uploads": [{"began": 1, "step": 2}],
    "videos": [{"began_ms": 1795204800000, "step": 1}],
    "comments": [{"began": 1, "step": 1}],
}
NUMBERS = ("pending", "pages", "items", "ranks", "started_at_ms", "completed_at_ms", "failed_at_ms")


@pytest.fixture
def _upstream(tmp_path: Path, state_dir: Path) -> Any:
    with one_video() as server:
        (tmp_path / "key").write_text("a-key")
        (tmp_path / "quota.toml").write_text(configuration(server.address, JOBS + OPTIONS, units=1_000_000_000))
        with quota.open("quota.toml") as session:
            for job in CURSORS:
                assert run_job(session, job).outcome == "done"
        shutil.copy("videos.db", "good.db")
        yield server


@pytest.mark.parametrize("part", range(PARTS))
def test_a_region_recovers_from_any_checkpoint(part: int, _upstream: PlainServer) -> None:  # noqa: PT019  # its requests count
    def attempt(r: Input) -> None:
        job = r.choice(list(CURSORS))
        cursor, column, number = _cursor(r, job), r.choice(NUMBERS), r.choice((value(r, 0), r.randrange(-5, 5)))
        if not isinstance(number, int) or not -(2**63) <= number < 2**63:
            number = str(number).encode("utf-8", "replace") if r.random() < 0.5 else str(number)[:50]
        r.data = job, cursor, column, number
        unlink("videos.db")
        shutil.copy("good.db", "videos.db")
        with closing(sqlite3.connect("videos.db", isolation_level=None)) as db:
            db.execute(
                "UPDATE checkpoints SET pending = 1, pages = 1, started_at_ms = 1795204800000 WHERE job = ?", (job,)
            )
            db.execute("UPDATE checkpoints SET cursor = CAST(? AS TEXT) WHERE job = ? AND region = 'US'", (cursor, job))
            if r.random() < 0.5:
                number = number.encode("utf-8", "replace") if isinstance(number, str) else number
                change = f"UPDATE OR IGNORE checkpoints SET {column} = ? WHERE job = ? AND region = 'US'"  # noqa: S608
                db.execute(change, (number, job))
        before = len(_upstream.arrived)
        done: set[str] = set()
        for _ in range(3):
            with quota.open("quota.toml", clock=lambda: 1795204800000 + 1) as session, without_waits():
                report = run_job(session, job)
            assert report.outcome in ("done", "failed"), report
            for each in report.regions:
                if each.error is not None:
                    check_line(printable(each.error))
                if each.outcome == "done":
                    done.add(each.region)
            check_line(printable(report.sentence(0)))
        assert done == {"US", "DE"}
        assert len(_upstream.arrived) - before <= 3 * 2 * 3 * 2 * ATTEMPTS

    every("checkpoint", part, attempt)


def _cursor(r: Input, job: str) -> bytes:
    good = r.choice(CURSORS[job])
    kind = r.random()
    if kind < 0.5:
        return json.dumps(mutated(r, good)).encode()
    if kind < 0.7:
        return damaged(r, json.dumps(good).encode(), 2)
    return r.choice((json.dumps(value(r)).encode(), text(r).encode("utf-8", "replace"), r.randbytes(9), b"[" * 5_000))


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.usefixtures("_upstream")
def test_a_damaged_store_answers_or_is_one_line(part: int) -> None:
    """Flipped bytes anywhere in the file: search, a pass and the clean-up work, or raise StoreError."""

    def attempt(r: Input) -> None:
        with closing(sqlite3.connect("good.db")) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        data = bytearray(Path("good.db").read_bytes())
        r.data = changes = [(r.randrange(len(data)), r.randrange(256)) for _ in range(r.choice((1, 3, 30, 300)))]
        for at, byte in changes:
            data[at] = byte
        if r.random() < 0.2:
            del data[r.randrange(len(data)) :]
        unlink("videos.db")
        Path("videos.db").write_bytes(data)
        try:
            with Store("videos.db", retention_ms=DAY_MS, clock=lambda: 1795204800000) as store:
                for video in store.search("live"):
                    check_line(_video_line(video), 200_000)
                    json.dumps(video.as_json())
                with suppress(ValueError):  # a column has another name
                    store.select(_RANKED_CHANNELS, region="US", after="")
                store.delete_expired()
                for job in CURSORS:
                    for checkpoint in store.start_round(job, ["US", "DE"]):
                        assert 0 <= checkpoint.pages < 2**53
                        store.restart(checkpoint)
                        store.fail(checkpoint, keep_cursor=True)
        except StoreError as error:
            check_line(printable(str(error)))

    every("store", part, attempt)
