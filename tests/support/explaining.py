"""A session whose refusals and charges are explained, under a clock that the test moves."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from rich.console import Console, RenderableType

from quota.budget import Budget, project_of
from quota.cli.output import render_parts
from quota.deciding.history import charges
from quota.decision import Decision
from quota.ledger.factory import open_ledger
from quota.ledger.state import State
from quota.reports.refusal import RefusalExplained, explain_refusal
from quota.rules.spent import Spent
from quota.session import Session
from quota.settings.load import load_settings
from quota.terms.limits import DAY_MS, HOUR_MS, Calendar, Limit, View
from quota.wording import Part, refusal_parts
from support.setup import budget_of

NOON_MS = 1_795_291_200_000  # noon on the Pacific coast

CONFIG = """
[ledger]
url = "{url}"
{unavailable}
[credentials.main]
api = "youtube-v3"
[[credentials.main.limits]]
name = "day"
units = 2_000
window = "24h"
[[credentials.main.limits]]
name = "pacific"
units = {pacific}
window = {{ calendar = "day", zone = "America/Los_Angeles" }}
pacing = {pacing}
[[credentials.main.limits]]
name = "searches"
units = 9
window = "1h"
methods = ["search.list"]
count = "calls"
[jobs.backfill]
fetch = "search"
leave = {{ day = 700, pacific = 100 }}
options = {{ words = "x" }}
[jobs.trending]
fetch = "trending"
"""


class World:
    """A session over a ledger, under a clock that the test moves."""

    def __init__(
        self, url: str, folder: Path, *, pacing: bool = False, pacific: str = "1_900", unavailable: str = ""
    ) -> None:
        self.now_ms = NOON_MS
        self.path = folder / "quota.toml"
        paced = str(pacing).lower()
        text = CONFIG.format(url=url, pacing=paced, pacific=pacific, unavailable=unavailable)
        self.path.write_text(text, encoding="utf-8")
        self.session = Session(load_settings(self.path), clock=lambda: self.now_ms)
        self.budget = self.session.budget()

    def charge(self, method: str, **more: object) -> Decision:
        decision = self.budget.charge(method, **more)  # type: ignore[arg-type]
        self.budget.hand_over_refusals()
        return decision

    @contextmanager
    def away(self) -> Iterator[None]:
        """Meanwhile the ledger does not answer."""
        project = project_of(self.budget)
        log, project.log = project.log, open_ledger("redis://127.0.0.1:1")
        try:
            yield
        finally:
            project.log = log

    def pass_days(self, days: int) -> None:
        """A charge each day, and what is old leaves the log."""
        project = self.session.project()
        for _ in range(days):
            self.now_ms += DAY_MS
            assert self.charge("videos.list", job="later").admitted
            project.log.trim(project.name, self.now_ms - 2 * DAY_MS - HOUR_MS)

    @property
    def state(self) -> State:
        return self.session.project().state

    def close_bucket(self, bucket: str, words: str, until_ms: int | None = None) -> None:
        until_ms = self.now_ms + HOUR_MS if until_ms is None else until_ms
        self.budget.exhaust(bucket, self.now_ms, until_ms, words, "job trending on host-2")

    def explain(self, job: str | None = None) -> RefusalExplained:
        explained = explain_refusal(self.session, job=job)
        assert explained is not None
        return explained

    def explain_under(self, text: str) -> RefusalExplained:
        """The last refusal, explained under another configuration."""
        self.path.write_text(text, encoding="utf-8")
        with closing(Session(load_settings(self.path), clock=lambda: self.now_ms)) as session:
            explained = explain_refusal(session)
        assert explained is not None
        return explained

    def shown(self) -> str:
        """What is shown of the last refusal, on one line."""
        return text_of(refusal_parts(self.explain()))

    def log(self) -> list[Spent]:
        return charges(self.session.project())

    def other(self, limits: tuple[Limit, ...], leave: dict[str, int], job: str) -> Budget:
        """The same budget with other limits, and another `leave` of the job."""
        return budget_of(
            self.session.ledger,
            *limits,
            project=self.budget.project,
            book=self.budget.book,
            leave={job: leave},
            clock=lambda: self.now_ms,
        )


def units_in(view: View, entries: list[Spent], now_ms: int) -> Counter[tuple[str, str, str]]:
    """What a view counts at a moment, by who spent it: the slow and obvious way."""
    start_ms = view.window.edges(now_ms)[0] - 1 if isinstance(view.window, Calendar) else now_ms - view.window.window_ms
    units: Counter[tuple[str, str, str]] = Counter()
    for entry in entries:
        if start_ms < entry.id[0] <= now_ms and view.selector.counts(entry.bucket, entry.method, entry.job):
            units[entry.job, entry.method, entry.region] += view.selector.cost(entry.units)
    return +units


def text_of(parts: Iterable[Part]) -> str:
    """All that is shown, on one line."""
    return " ".join(" ".join(shown_lines(render_parts(parts))).split())


def shown_lines(what: RenderableType) -> list[str]:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    console.print(what)
    lines: list[str] = console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # the StringIO above
    assert all(len(line) <= 80 for line in lines)
    return lines
