"""A project whose provider is the emulator, at a time that the test chooses."""

from __future__ import annotations

import http.client
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import quota
from quota.deciding.history import entries
from quota.reconcile.monitoring import read_figures
from quota.reconcile.reconcile import Reconciled, chosen_credentials, reconcile
from quota.session import Session
from quota.terms.limits import HOUR_MS, Calendar
from support.emulator import Emulator
from support.losses import LedgerStorage

NOON = Calendar("day", "America/Los_Angeles").edges(1_793_000_000_000)[0] + 12 * HOUR_MS

CONFIG = """\
[ledger]
url = "{url}"
[credentials.main]
api = "{api}"
project = "p"
key = "file:key"
endpoint = "{endpoint}"
cloud_project = "cloud-project-1"
"""


@dataclass
class Site:
    """One machine, its ledger, and upstream. `now_ms` is the time of all three. Unless a test configures it, it gets
    the configuration above with its first session."""

    folder: Path
    place: LedgerStorage
    now_ms: int = NOON
    api: str = "youtube-v3"
    more: str = ""
    _open: list[Any] = field(default_factory=list)
    upstream: Emulator | None = None

    def emulate(self, **options: Any) -> Emulator:
        self.upstream = Emulator(clock=lambda: self.now_ms, projects={"a-key": "ours"}, **options)
        self._open.append(self.upstream.__enter__())
        return self.upstream

    def configure(self, endpoint: str | None = None, **parts: str) -> Path:
        (self.folder / "key").write_text("a-key")
        where = endpoint or (self.upstream or self.emulate()).address
        config = self.folder / "quota.toml"
        text = CONFIG.format(url=self.place.url, api=parts.get("api", self.api), endpoint=where)
        config.write_text(text.replace("cloud-project-1", parts.get("cloud_project", "cloud-project-1")) + self.more)
        return config

    def session(self) -> Session:
        path = self.folder / "quota.toml"
        session = quota.open(path if path.exists() else self.configure(), clock=lambda: self.now_ms)
        self._open.append(session)
        return session

    def call(self, method: str = "videos.list", times: int = 1, *, charged: bool = True, key: str = "a-key") -> None:
        """Calls that reach upstream; charged here first, or somebody else's."""
        with self.session() as session:
            assert self.upstream is not None
            connection = http.client.HTTPConnection(self.upstream.address.removeprefix("http://"), timeout=300)
            for _ in range(times):
                if charged:
                    assert session.budget().charge(method).admitted
                path = {"videos.list": "videos?part=id&id=x", "search.list": "search?part=id&q=x"}[method]
                connection.request("GET", f"/youtube/v3/{path}&key={key}")
                connection.getresponse().read()
        connection.close()

    def reconcile(self, *, after_ms: int = 0, **options: Any) -> Reconciled:
        self.now_ms += after_ms
        with self.session() as session:
            (credential,) = chosen_credentials(session, None)
            return reconcile(session, credential, read_figures, **options)

    def used(self) -> dict[str, int]:
        with self.session() as session:
            return {state.name: state.used_units for state in session.budget().usage()}

    def stored(self) -> tuple[object, ...]:
        """Everything in the ledger that a failure might have changed."""
        with self.session() as session:
            states = session.budget().usage()
            project = session.project()
            facts = project.state.facts()
            return (
                states,
                [entry for entry in entries(project) if entry.kind != "marker"],
                tuple(facts.grants),
                tuple(facts.exhaustions),
            )

    def empty_ledger(self) -> None:
        """Empty the ledger behind everybody's back."""
        self.place.empty()

    def close(self) -> None:
        for each in reversed(self._open):
            each.stop() if isinstance(each, Emulator) else each.close()
