"""Redis as it goes wrong: killed, started without its data, restored from an old copy, flushed."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import redis

from chaos.scene import PROJECT
from quota.ledger.log import EPOCH, is_closed
from quota.ledger.redis_log import keys_of
from quota.rules.claims import claim_field
from quota.rules.entry import read_id, unpacked
from quota.rules.spent import spent
from support.servers import RedisServer

Fsync = Literal["always", "everysec"]
Data = Literal["own", "none", "old-aof", "old-rdb"]

KEYS = keys_of(PROJECT)


@dataclass(frozen=True)
class Entry:
    """One charge in the ledger's log, with corrections applied."""

    ms: int
    seq: int
    units: int
    charged_units: int
    method: str
    token: str


class ChaosServer(RedisServer):
    """A redis-server with an append-only file. Its copies lie outside its folder."""

    def __init__(self, folder: Path) -> None:
        self._copies = folder
        folder.mkdir()
        self.fsync: Fsync = "always"
        self.database = 0
        """The one that holds the ledger of the moment."""
        super().__init__("--appendonly", "yes", "--appendfsync", "always", "--aof-use-rdb-preamble", "yes")

    def client(self, port: int | None = None) -> redis.Redis:
        return redis.Redis(port=port or self.port, db=self.database, decode_responses=True, socket_timeout=10)

    def restart(self, fsync: Fsync, data: Data) -> None:
        """Start again after `kill`, with `data` in place of what it had."""
        self.fsync = fsync
        if data != "own":
            shutil.rmtree(self.folder)
            self.folder.mkdir()
        base = self._command[: self._command.index("--appendonly")]
        tail = ["--appendfsync", fsync, "--aof-use-rdb-preamble", "yes"]
        if data == "old-aof":
            shutil.copytree(self._copies / "aof", self.folder, dirs_exist_ok=True)
        if data == "old-rdb":
            # With an append-only file switched on, a server does not look at its dump.
            shutil.copy(self._copies / "dump.rdb", self.folder / "dump.rdb")
            self._command = [*base, "--appendonly", "no", *tail]
            self.start()
            with self.client() as client:
                client.config_set("appendonly", "yes")
                while client.info("persistence")["aof_rewrite_in_progress"]:
                    time.sleep(0.005)
            self._command = [*base, "--appendonly", "yes", *tail]
            return
        self._command = [*base, "--appendonly", "yes", *tail]
        self.start()

    def copy_aof(self) -> None:
        """What a file-level backup of a running server has; the file's end may be torn."""
        shutil.rmtree(self._copies / "aof", ignore_errors=True)
        shutil.copytree(self.folder, self._copies / "aof", ignore=shutil.ignore_patterns("*.log", "temp-*"))

    def copy_rdb(self) -> None:
        with self.client() as client:
            client.save()
        shutil.copy(self.folder / "dump.rdb", self._copies / "dump.rdb")

    def flush(self) -> tuple[list[Entry], int]:
        """FLUSHALL; the log as it was in the very moment, and that moment."""
        with self.client() as client:
            pipe = client.pipeline(transaction=True)
            pipe.xrange(KEYS.log)
            pipe.time()
            pipe.flushall()
            log, (seconds, micros), _ = pipe.execute()
        return entries(log), seconds * 1_000 + micros // 1_000

    def log_of_the_dead(self) -> list[Entry]:
        """The log that a killed server's files hold, read by another one on a port that nobody knows."""
        reader = _Reader(self)
        try:
            return reader.log()
        finally:
            reader.kill()

    def log(self) -> list[Entry]:
        with self.client() as client:
            return entries(client.xrange(KEYS.log))

    def owner(self, job: str) -> str | None:
        """The id of the store that a job belongs to."""
        with self.client() as client:
            record = str(client.hget(KEYS.state, claim_field(job)) or "")
        runs = json.loads(record.partition(" ")[2] or "{}").get("runs") or [{}]
        owner: str | None = max(runs, key=lambda run: run.get("seen_ms", 0)).get("owner")
        return owner

    def fenced(self) -> bool:
        """Whether the ledger has moved, or is about to."""
        with self.client() as client:
            return is_closed(str(client.hget(KEYS.state, EPOCH) or ""))

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._copies, ignore_errors=True)


class _Reader(ChaosServer):
    def __init__(self, of: ChaosServer) -> None:
        from support.servers import free_port

        self.port = free_port()
        self.folder, self.database = of.folder, of.database
        self._command = [*of._command]
        self._command[self._command.index("--port") + 1] = str(self.port)
        self._process = None
        self.start()


def entries(rows: Any) -> list[Entry]:
    """The charges of a stream."""
    lines = [unpacked(read_id(name), fields["e"]) for name, fields in rows]
    counts = {charge.key: charge for charge in spent(lines)}
    return [
        Entry(*line.id, counts[line.key].units, counts[line.key].charged_units, line.method, line.key)
        for line in lines
        if line.kind == "charge"
    ]
