"""Machines whose owner edits the ledger's url, and ledgers that can be lost, stopped and left: all of it through the
configuration and the state folder, as its owner has them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import quota
from support.losses import LedgerStorage, RedisStorage, SqliteStorage

if TYPE_CHECKING:
    from collections.abc import Callable

    from quota.session import Session
    from support.servers import RedisServer

MAX_COST, ALLOWANCE = 1, 6
PROJECT = "p"


class Place(LedgerStorage, Protocol):
    """A ledger that an owner may name in a configuration, by several urls."""

    def urls(self, folder: Path) -> list[str]:
        """Every way to name it from a configuration in this folder."""
        ...

    def stop(self) -> None:
        """From now on it answers no decision."""
        ...

    def go_on(self) -> None: ...


class RedisPlace(RedisStorage):
    """A server of its own: by address, by host name, without its database's number, by socket."""

    def __init__(self, server: RedisServer, socket: Path) -> None:
        super().__init__(server.url)
        self._urls = [server.url, server.url.replace("127.0.0.1", "localhost"), server.url[:-2], f"unix://{socket}"]

    def urls(self, folder: Path) -> list[str]:
        return self._urls

    def stop(self) -> None:
        """As a primary that has lost its replicas."""
        self.client.config_set("min-replicas-to-write", 1)

    def go_on(self) -> None:
        self.client.config_set("min-replicas-to-write", 0)


class SqlitePlace(SqliteStorage):
    """A file: by its path, relative to the configuration, through a linked folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        super().__init__(folder)
        self._folder = folder
        self._link = folder.with_name(f"{folder.name}-link")
        self._link.symlink_to(folder)
        self._aside = folder / "aside"

    def urls(self, folder: Path) -> list[str]:
        relative = os.path.relpath(self.path, folder.resolve())
        return [self.url, f"sqlite:///{relative}", f"sqlite:///{self._link / 'ledger.db'}"]

    def stop(self) -> None:
        """Another program's file stands where it was."""
        self._aside.mkdir()
        for path in self._folder.glob("ledger.db*"):
            path.rename(self._aside / path.name)
        self.path.write_text("not a ledger")

    def go_on(self) -> None:
        self.path.unlink()
        for path in self._aside.iterdir():
            path.rename(self._folder / path.name)
        self._aside.rmdir()


class Owner:
    """Who edits one configuration of one machine. `paths` all name it; the ledger's url is that of `place`."""

    def __init__(self, state: Path, paths: list[Path], limits: str, machines: int, name: str | None = None) -> None:
        self.state = state
        self.paths = paths
        self.place: Place | None = None
        self.spelling = 0
        self._limits = limits
        self._machines = machines
        self._name = f'name = "{name}"\n' if name else ""

    def edit(self, place: Place, spelling: int) -> None:
        self.place, self.spelling = place, spelling
        for path in self.paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            urls = place.urls(path.parent)
            path.write_text(
                f'[ledger]\nurl = "{urls[spelling % len(urls)]}"\n{self._name}'
                f"unavailable = {{ max_cost = {MAX_COST}, allowance = {ALLOWANCE}, machines = {self._machines} }}\n"
                f'[credentials.main]\napi = "youtube-v3"\nproject = "{PROJECT}"\n{self._limits}'
            )

    def open(self, path: int, clock: Callable[[], int]) -> Session:
        """A process of this machine that begins now."""
        os.environ["QUOTA_STATE_DIR"] = str(self.state)
        return quota.open(self.paths[path % len(self.paths)], clock=clock)
