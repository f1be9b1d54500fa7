"""Text that neighbours wrote into our keys and rows, wherever we show it: the command line, the page, the API."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis

from fuzz.house import House, check_command, damage_file, damage_key, damage_rows, one_video, run_quota, texts_of, use
from fuzz.inputs import PARTS, Input, every
from quota.common.clock import host_clock
from quota.journal.journal import FOLDER
from support.servers import RedisServer

READERS = {
    "ledger.db": ("status", "log", "log --refused", "spend --by job,region", "explain"),
    "videos.db": ("status", "spend --by run", "runs", "search live"),
    "inbound.db": ("inbound status", "inbound top counted", "inbound top logged"),
}


@pytest.fixture
def upstream(tmp_path: Path, state_dir: Path, caplog: pytest.LogCaptureFixture) -> Iterator[str]:
    caplog.set_level("CRITICAL", logger="quota")  # what is logged is no part of what is said
    with one_video() as server:
        yield server.address


@pytest.mark.parametrize("part", range(PARTS))
def test_any_row_content_is_shown_or_named(part: int, upstream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    house = House("sqlite:///ledger.db", "sqlite:///inbound.db", upstream)

    def attempt(r: Input) -> None:
        house.put_back()
        others = [path for path, data in house.files.items() if FOLDER in path.parts and data]
        r.data = [
            damage_rows(r, r.choice([*READERS])) if r.random() < 0.8 else damage_file(r, r.choice(others))
            for _ in range(r.choice((1, 1, 2, 4)))
        ]
        use(r, house, monkeypatch)

    every("neighbours-of-files", part, attempt)


@pytest.mark.parametrize("name", READERS)
def test_no_text_of_a_row_moves_the_cursor(name: str, upstream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each column alone: what is chosen at random seldom meets one that is shown, with what would show it."""
    house = House("sqlite:///ledger.db", "sqlite:///inbound.db", upstream)
    for table, column in texts_of(name):
        house.put_back()
        with closing(sqlite3.connect(name)) as db, db:
            db.execute(f"UPDATE OR IGNORE {table} SET {column} = {column} || ?", ("\x1b[31m\u202e\x9b2J",))  # noqa: S608
        for command in READERS[name]:
            args = command.split()
            try:
                check_command(args, *run_quota(monkeypatch, args))
            except AssertionError as error:
                raise AssertionError(f"{table}.{column}: quota {command}: {error}") from error


@pytest.mark.parametrize("part", range(PARTS))
def test_any_key_content_is_shown_or_named(
    part: int, upstream: str, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
        house = House(redis_server.url, redis_server.url, upstream)
        kept = {key: (client.dump(key), client.pttl(key)) for key in client.keys("*")}

        def attempt(r: Input) -> None:
            house.put_back()
            client.flushall()
            for key, (value, left_ms) in kept.items():
                client.restore(key, max(0, left_ms), value)
            r.data = [damage_key(r, client, host_clock()) for _ in range(r.choice((1, 1, 2, 4)))]
            use(r, house, monkeypatch)
            client.ping()  # no script goes on for ever

        every("neighbours-of-keys", part, attempt)
