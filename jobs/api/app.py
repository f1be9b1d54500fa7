"""`quota serve`: a read-only HTTP API over the store. It never spends quota; only /healthz asks the ledger.

    run_api     where it may listen, and the rules and host check before the application
    make_app    the application: its routes, the threads that read the store, and answers that caches may keep
    _Api        its answers; /healthz says whether the store is readable, the ledger answers, and the data is fresh

`openapi.json` beside this file is its OpenAPI 3.1 document; tests check every answer against it. The page at / lists
the document. It has no script and loads only its style sheet.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from importlib.metadata import version as version_of
from ipaddress import ip_address
from typing import Any, TypeVar

from jinja2 import Environment, StrictUndefined
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import quota
from quota.cli.options import Listen
from quota.cli.output import announce
from quota.common.clock import elapsed_s, host_clock, rfc3339
from quota.common.files import read_text
from quota.common.hosts import is_loopback
from quota.common.log import line
from quota.common.text import show
from quota.errors import UsageError
from quota.inbound.configured import rules_of
from quota.inbound.middleware import asgi
from quota.jobs.api import wire
from quota.jobs.store.checkpoints import is_stale
from quota.jobs.store.file import StoreError
from quota.jobs.store.reader import Reader, StoredRow
from quota.session import Session, ledger_trouble
from quota.web.documents import App, Check, Problem, health
from quota.web.serving import address_of, listen, names_of, protected, serve

ASKED = ("/api/v1/videos/trending", "/api/v1/videos/ID", "/api/v1/search", "/api/v1/channels/ID")
"""The paths that rules must limit before the server listens for other machines."""

_HOST_NAME = re.compile(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")

NOT_LIMITED = ("/healthz",)
"""The paths that no rule counts: supervisors call /healthz often."""

POLICY = "default-src 'none'; frame-ancestors 'none'"
"""The answers are for programs. A browser that shows one loads nothing for it."""


def run_api(config: str | None, listen_at: Listen, names: Sequence[str], *, unlimited: bool) -> None:
    """Serve until a signal ends it. Prints the line with the address. Raises QuotaError."""
    host, port = listen_at
    session = quota.open(config)  # a mistake in the configuration ends the command before it listens
    settings, rules = session.settings, rules_of(session.settings, exempt=NOT_LIMITED)
    needs_limits = not (unlimited or is_loopback(host))
    for path in ASKED if needs_limits else ():
        limiting = () if rules is None else rules.find("GET", path)
        if all(rule.shadow for rule in limiting):
            raise UsageError(
                f"--listen {listen_at}: other machines can reach it, and no rule limits {path}: write [inbound.NAME] "
                f"in {settings.source}, or set --unlimited"
            )
    hosts = {*map(_host_name, names), *(names_of(host) if is_loopback(host) else ())}

    def make() -> App:
        app = make_app(session)
        return protected(app if rules is None else asgi(app, rules), hosts=hosts or None, policy=POLICY)

    with listen(host, port) as listener:
        address = address_of(listener)
        serve(make, listener, ready=lambda: announce(f"quota serve: {address} ({settings.source})"))


def _host_name(text: str) -> str:
    """A name as the Host field has it, without the port. Raises UsageError for other text."""
    name = text.lower().removesuffix(".")
    if _HOST_NAME.fullmatch(name):
        return name
    try:
        return str(ip_address(name.strip("[]")))
    except ValueError:
        raise UsageError(
            f"--hostname {show(text)}: write only the name that clients send in Host, for example api.example.org"
        ) from None


T = TypeVar("T")
Find = Callable[[Reader, str], StoredRow | None]

THREADS = 2
"""SQLite searches without Python's lock, but needs it to return rows."""

MAX_WAITING = 200
"""The most requests that wait for a thread. More would wait longer than their clients."""

MIN_FRESH_S, MAX_FRESH_S = 10, 300
STATIC_FRESH_S = 3600

PAGE_POLICY = "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
STYLE = read_text("quota.jobs.api", "style.css").encode()

KEPT_S = 2.0
"""How long an answer is kept. Anybody may call /healthz, and each examination asks the ledger."""

STORE_AWAY = Problem(503, "The store cannot be read at the moment.", retry_after_s=2)
BUSY = Problem(503, "Too many requests are waiting.", retry_after_s=1)

logger = logging.getLogger("quota.api")


def make_app(session: Session) -> App:
    """The application over the store of this configuration. Only /healthz uses the session after this."""
    api, openapi = _Api(session), document()
    jinja = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = jinja.from_string(read_text("quota.jobs.api", "page.html"))  # it lists the paths of the document
    page = template.render(document=openapi, resolved=resolved).encode()
    routes: list[tuple[str, Callable[..., Any]]] = [
        ("/api/v1/videos/trending", api.trending),
        ("/api/v1/videos/{video_id}", partial(api.resource, "video", Reader.video)),
        ("/api/v1/search", api.search),
        ("/api/v1/channels/{channel_id}", partial(api.resource, "channel", Reader.channel)),
        ("/healthz", api.health),
        ("/openapi.json", _unchanging(json.dumps(openapi).encode(), "application/json")),
        ("/", _unchanging(page, "text/html; charset=utf-8", PAGE_POLICY)),
        ("/style.css", _unchanging(STYLE, "text/css; charset=utf-8")),
    ]
    app = Starlette(
        routes=[Route(path, answer, methods=["GET"]) for path, answer in routes],
        exception_handlers={HTTPException: _problem_response, wire.ProblemError: _problem_response},
    )
    app.router.redirect_slashes = False
    return app


class _Readers:
    """Threads that read the store, each with its own connection. They log the first failure of an outage, and its
    end."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="reader")
        self._waiting = 0
        self.away = False

    async def read(self, question: Callable[[Reader], T]) -> T:
        """The result of `question` in a thread. Raises ProblemError if the store is unreadable or too many wait."""
        if self._waiting >= MAX_WAITING:
            raise wire.ProblemError(BUSY)
        self._waiting += 1
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, question)
        except StoreError as error:
            if not self.away:
                logger.error("%s", line("store_away", error=error))
            self.away = True
            raise wire.ProblemError(STORE_AWAY) from None
        finally:
            self._waiting -= 1
        if self.away:
            logger.warning("%s", line("store_back"))
        self.away = False
        return answer

    def _ask(self, question: Callable[[Reader], T]) -> T:
        if not hasattr(self._own, "reader"):
            self._own.reader = Reader(self._url)
        return question(self._own.reader)


class _Api:
    def __init__(self, session: Session) -> None:
        self._session = session
        settings = session.settings
        self._jobs: dict[str, list[str]] = {}
        for job in settings.jobs.values():
            for region in job.regions:
                self._jobs.setdefault(region, []).append(job.name)
        self.store = _Readers(settings.store.url)
        self._examining = asyncio.Lock()
        self._examined: tuple[int, dict[str, object]] = (503, {})
        self._examined_s = -KEPT_S

    async def trending(self, request: Request) -> Response:
        parameters = _parameters(request, "region", "limit", "cursor", needed="region")
        region, limit = parameters["region"], wire.limit_of(parameters)
        question = f"trending {region}"
        version, after = wire.decode(question, parameters)
        jobs = self._jobs.get(region, [])
        chart = await self.store.read(lambda reader: reader.chart(region, jobs, after, limit))
        if chart is None:
            if jobs:
                raise wire.ProblemError(
                    Problem(404, f"No ranking of {show(region)} is complete yet.", retry_after_s=60)
                )
            raise wire.ParameterError("region", f"region={show(region)}: no job fetches it")
        wire.check_version(version, chart.version)
        token = wire.encode(question, chart.version, chart.rows[-1][0]) if chart.more else None
        return _json(request, wire.chart_response(chart, token), chart.completed_ms)

    async def search(self, request: Request) -> Response:
        parameters = _parameters(request, "q", "limit", "cursor", needed="q")
        words, limit = wire.words_of(parameters), wire.limit_of(parameters)
        question = f"search {words}"
        version, skip = wire.decode(question, parameters)
        try:
            hits = await self.store.read(lambda reader: reader.search(words, skip, limit))
        except UsageError as error:
            raise wire.ParameterError("q", str(error)) from None
        wire.check_version(version, hits.version)
        behind = skip + len(hits.rows)
        token = wire.encode(question, hits.version, behind) if behind < hits.total else None
        return _json(request, wire.search_response(hits, token), hits.changed_ms)

    async def resource(self, kind: str, find: Find, request: Request) -> Response:
        """The answer about one video or channel."""
        _parameters(request)
        name = request.path_params[f"{kind}_id"]
        row = await self.store.read(lambda reader: find(reader, name))
        if row is None:
            raise wire.ProblemError(Problem(404, f"The store has no {kind} {show(name)}."))
        refreshed_ms = row["refreshed_ms"]
        return _json(request, wire.resource(kind, row), refreshed_ms if isinstance(refreshed_ms, int) else 0)

    async def health(self, request: Request) -> Response:
        """The health of store and ledger, at most KEPT_S old."""
        _parameters(request)
        async with self._examining:
            if elapsed_s() - self._examined_s >= KEPT_S:
                of_store = await self._store_health()
                trouble = await asyncio.to_thread(ledger_trouble, self._session)
                says = "nothing was charged yet" if trouble is None else trouble and f"{trouble}; the store is served"
                ledger = Check("ledger", "warn" if says else "pass", says)  # the API serves the store without it
                self._examined = health([*of_store, ledger])
                self._examined_s = elapsed_s()
            status, document = self._examined
        return Response(json.dumps(document), status, {"cache-control": "no-store"}, "application/json")

    async def _store_health(self) -> list[Check]:
        """Whether the store is readable, and the age of the data of the configured jobs. Warns if a region is older
        than the configured `stale`."""
        try:
            ended, first_runs = await self.store.read(Reader.completed)
        except Exception as error:  # the store is away: `read` has logged why
            return [Check("store", "fail", str(error))]
        now_ms = host_clock()
        jobs = self._session.settings.jobs
        regions = [(job.name, region) for job in jobs.values() for region in job.regions or ("",)]
        due = [ended.get(region) or first_runs.get(region[0]) for region in regions]
        completed = [ended[region] for region in regions if region in ended]
        if not completed:
            return [Check("store"), Check("freshness", "warn", "no pass of a region is complete yet")]
        notify = self._session.settings.notify
        stale_ms = None if notify is None else notify.stale_ms
        oldest_ms, newest_ms = min(completed), max(completed)
        members: dict[str, Any] = {
            "newest": rfc3339(newest_ms),
            "oldest": rfc3339(oldest_ms),
            "age_s": max(0, now_ms - newest_ms) // 1_000,
            "oldest_age_s": max(0, now_ms - oldest_ms) // 1_000,
        }
        if any(is_stale(due_ms, now_ms, stale_ms) for due_ms in due):
            return [Check("store"), Check("freshness", "warn", "a region is stale", members)]
        return [Check("store"), Check("freshness", members=members)]


# -- the OpenAPI document ----------------------------------------------------------------------------------------------


def document() -> dict[str, Any]:
    written: dict[str, Any] = json.loads(read_text("quota.jobs.api", "openapi.json"))
    written["info"]["version"] = version_of("quota-ledger")
    return written


def resolved(document: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """A part of the document, or the part that its `$ref` names."""
    if "$ref" not in part:
        return part
    _, _, kind, name = part["$ref"].split("/")
    component: dict[str, Any] = document["components"][kind][name]
    return component


# -- requests ---------------------------------------------------------------------------------------------------------


def _parameters(request: Request, *names: str, needed: str = "") -> Mapping[str, str]:
    return wire.read_parameters(request.scope["query_string"], names, needed)


# -- answers -----------------------------------------------------------------------------------------------------------


def _json(request: Request, document: wire.Json, changed_ms: int) -> Response:
    """A document that last changed at `changed_ms`. Caches may keep it for a tenth of its age, the heuristic of RFC
    9111 (4.2.2): data that has not changed for long will probably not change soon."""
    body = json.dumps(document, ensure_ascii=False).encode(errors="replace")
    age_s = (host_clock() - changed_ms) // 1_000
    return _kept(request, body, "application/json", min(MAX_FRESH_S, max(MIN_FRESH_S, age_s // 10)))


def _kept(request: Request, body: bytes, media_type: str, fresh_s: int = STATIC_FRESH_S) -> Response:
    """An answer that caches may keep for `fresh_s`. A client that sends its tag gets 304 without the body."""
    tag = f'"{blake2b(body, digest_size=12).hexdigest()}"'
    headers = {"etag": tag, "cache-control": f"public, max-age={fresh_s}"}
    # A proxy that compresses a body makes its tag weak; the body is the same.
    conditions = ",".join(request.headers.getlist("if-none-match")).split(",")
    if {"*", tag} & {condition.strip().removeprefix("W/") for condition in conditions}:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=media_type)


def _unchanging(body: bytes, media_type: str, policy: str = POLICY) -> Callable[[Request], Awaitable[Response]]:
    """Always gives the same answer."""

    async def answer(request: Request) -> Response:
        _parameters(request)
        response = _kept(request, body, media_type)
        response.headers["content-security-policy"] = policy
        return response

    return answer


def _problem_response(request: Request, error: Exception) -> Response:
    """The answer to a problem, or to one of Starlette's own errors: no such path, or another method."""
    if isinstance(error, wire.ProblemError):
        problem = error.problem
    elif isinstance(error, HTTPException) and error.status_code == 405:
        detail = f"{show(request.method)}: this API is read-only"
        problem = Problem(405, detail, more=(("allow", "GET, HEAD"),))
    else:
        assert isinstance(error, HTTPException)  # noqa: S101  # the handler's own type
        problem = Problem(error.status_code, f"Nothing is at {show(request.url.path)}; / lists the paths.")
    return Response(problem.body(), problem.status, dict(problem.fields()))
