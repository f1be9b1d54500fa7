"""The ASGI application of the page.

    Dashboard    reads the parts of a session, and keeps them
    make_app     the application over it: pages, `/metrics`, `/healthz`

It answers GET and HEAD and changes nothing. Threads read the parts (`quota.dashboard.reading`) and make the pages, so
the event loop never waits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from functools import partial
from importlib.metadata import entry_points
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from quota.common.clock import elapsed_s, host_clock
from quota.common.text import number_in
from quota.dashboard.pages import Site, State
from quota.dashboard.reading import Kept, Reading, forecast_of, key_of, read_curves, read_now, read_samples, read_spent
from quota.errors import LedgerError
from quota.reports.metrics import MEDIA_TYPE, Sample, exposition
from quota.reports.refusal import explain_kept
from quota.reports.runs import GROUP, Contribution
from quota.reports.status import all_jobs
from quota.session import Session
from quota.web.documents import App, Check, health
from quota.web.serving import protected
from quota.wording import jobs_alone

T = TypeVar("T")

PATIENCE_S = 0.04
"""How long a page waits for newer values than it has."""

SCRAPE_PATIENCE_S = 5.0
WARM_S = 60.0
LEAST_REFRESH_S, MOST_REFRESH_S = 5, 3600


class Dashboard:
    """The parts of a session. Each part is read and kept by itself."""

    def __init__(self, session: Session) -> None:
        self.session = session
        for name in session.settings.credentials:
            session.budget(name)  # before several threads open it
        self.site = Site(session.settings, session.ledger.label, shared=session.ledger.shared)
        points = sorted(entry_points(group=GROUP), key=lambda point: point.name)
        self.added: dict[str, Kept[Contribution]] = {
            point.name: Kept(partial(point.load(), session)) for point in points
        }
        self.now = Kept(lambda: read_now(session))
        self.alone = Kept(lambda: tuple(jobs_alone(list(all_jobs(session, here=False)), host_clock())))
        self.curves = Kept(lambda: read_curves(session, forecast_of(kept.get(0) for kept in self.added.values())))
        self.spent = Kept(lambda: read_spent(session))
        self.parts: list[Kept[Any]] = [self.now, *self.added.values(), self.curves, self.spent]

    def state(self) -> State:
        """The present state, with what can be read anew within PATIENCE_S."""
        for kept in self.parts:
            kept.begin()
        until_s = elapsed_s() + PATIENCE_S

        def get(kept: Kept[T]) -> Reading[T]:
            return kept.get(max(0.0, until_s - elapsed_s()))

        added = [(name, get(kept)) for name, kept in self.added.items()]
        now, curves, spent = get(self.now), get(self.curves), get(self.spent)
        alone = () if now.error is None else get(self.alone).value or ()
        return State(host_clock(), now, curves, spent, added, alone)

    async def keep_warm(self) -> None:
        """Read the parts that are due, one after the other, again and again: the next request finds new values."""
        while True:
            await asyncio.sleep(WARM_S)
            for kept in self.parts:
                with contextlib.suppress(RuntimeError):  # no more threads can be started; the next time one may be
                    await run_in_threadpool(kept.get, SCRAPE_PATIENCE_S)

    def samples(self) -> list[Sample]:
        """The samples for `/metrics`."""
        now = self.now.get(SCRAPE_PATIENCE_S)
        samples = read_samples(self.session, now.value.status if now.value is not None and now.error is None else None)
        for kept in self.added.values():
            added = kept.get(PATIENCE_S).value
            if added is not None:
                samples += added.samples
        return samples

    def checks(self) -> list[Check]:
        """The checks of `/healthz`. The page works without the ledger, so trouble with it is a warning."""
        now = self.now.get(SCRAPE_PATIENCE_S)
        trouble = "the ledger cannot be used; the page says why, and shows its last state"
        if now.error is None and now.value is not None:
            trouble = "the ledger accepts no charges; the page says why" if now.value.status.unwritable else ""
        checks = [Check("ledger", "warn" if trouble else "pass", trouble)]
        for name, kept in self.added.items():
            failing = kept.get(PATIENCE_S).error is not None
            checks.append(Check(name, "warn", f"{name} cannot be read") if failing else Check(name))
        return checks


def make_app(session: Session, hosts: Collection[str] | None) -> App:
    """The application over an open session, for requests that name one of `hosts`."""
    dashboard = Dashboard(session)
    site = dashboard.site

    page = partial(HTMLResponse, headers={"cache-control": "no-store"})

    def missing(text: str) -> Response:
        return page(site.error("Not found", text, host_clock()), 404)

    def overview(request: Request) -> Response:
        asked_s = number_in(request.query_params.get("refresh", ""), 0, 99_999)
        refresh_s = None if asked_s is None else min(max(asked_s, LEAST_REFRESH_S), MOST_REFRESH_S)
        return page(site.overview(dashboard.state(), refresh_s))

    def refusal(request: Request) -> Response:
        now, key = dashboard.now.get(PATIENCE_S), request.path_params["key"]
        kept = None if now.value is None else next((row for row in now.value.refusals if key_of(row) == key), None)
        if kept is None:
            return missing("This refusal is no longer kept: the ledger has the last 100 of a project.")
        try:
            explained = explain_kept(session, kept)
        except LedgerError as error:
            return page(site.error("The ledger cannot be used", str(error), host_clock()), 503)
        return page(site.refusal(explained, host_clock()))

    def run(request: Request) -> Response:
        state = dashboard.state()
        run_asked = next((run for run in state.runs if run.key == request.path_params["key"]), None)
        if run_asked is None:
            return missing("This run is no longer listed: the page has the last 50 of 35 days.")
        kept = () if state.now.value is None else state.now.value.refusals
        return page(site.run(run_asked, kept, state.now_ms))

    def metrics(_: Request) -> Response:
        return PlainTextResponse(
            exposition(dashboard.samples()), media_type=MEDIA_TYPE, headers={"cache-control": "no-store"}
        )

    def healthz(_: Request) -> Response:
        status, document = health(dashboard.checks())
        return JSONResponse(document, status, {"cache-control": "no-store"})

    def file(content: str, media_type: str) -> Callable[[Request], Response]:
        return lambda _: Response(content, media_type=media_type, headers={"cache-control": "max-age=86400"})

    # Starlette finds a handler by its status only for an HTTPException.
    async def not_found(_: Request, error: Any) -> Response:
        is_missing = error.status_code == 404
        text = "There is no such page." if is_missing else "This page answers GET and HEAD only."
        html = await run_in_threadpool(site.error, "Not found" if is_missing else "Not allowed", text, host_clock())
        return HTMLResponse(html, error.status_code, {"cache-control": "no-store", **(error.headers or {})})

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        await run_in_threadpool(lambda: site.overview(dashboard.state()))
        warm = asyncio.create_task(dashboard.keep_warm())
        yield
        warm.cancel()

    app = Starlette(
        routes=[
            Route("/", overview),
            Route("/refusals/{key}", refusal),
            Route("/runs/{key}", run),
            Route("/metrics", metrics),
            Route("/healthz", healthz),
            Route("/style.css", file(site.style, "text/css")),
            Route("/icon.svg", file(site.icon, "image/svg+xml")),
            Route("/favicon.ico", lambda _: RedirectResponse("/icon.svg", 301)),
        ],
        exception_handlers={404: not_found, 405: not_found},
        lifespan=lifespan,
    )
    return protected(app, hosts=hosts)
