"""The application: what is asked, the threads that read the store, and answers that others may keep.

What takes SQLite less than a millisecond is read on the event loop: with threads the slowest answers took twice as
long, because each hop waits for Python's lock. A search for more than a word may take 50 ms, and has a thread.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from quota.common.clock import host_clock
from quota.common.log import line
from quota.common.text import show
from quota.errors import UsageError
from quota.jobs.api import cursor, pages, resources
from quota.jobs.api.health import Health
from quota.jobs.api.kept import KeptAnswers
from quota.jobs.api.openapi import document
from quota.jobs.api.parameters import ParameterError, limit_of, read_parameters, required, words_of
from quota.jobs.store.file import StoreError
from quota.jobs.store.fulltext import is_one_word
from quota.jobs.store.reader import Reader
from quota.web.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.requests import Request

    from quota.session import Session
    from quota.web.protection import App

T = TypeVar("T")

THREADS = 2
"""SQLite searches without Python's lock, but its rows are made with it."""

MAX_WAITING = 200
"""Requests that wait for a thread. More would wait longer than their clients do."""

MIN_FRESH_S, MAX_FRESH_S = 10, 300
STATIC_FRESH_S = 3600

STORE_AWAY = Problem(503, "The store cannot be read at the moment.", retry_after_s=2)
BUSY = Problem(503, "Too many requests are waiting.", retry_after_s=1)

logger = logging.getLogger("quota.api")


def make_app(session: Session) -> App:
    """The application over the store of this configuration. The session is read for /healthz alone."""
    api = _Api(session)
    routes = [
        ("/api/v1/videos/trending", api.trending),
        ("/api/v1/search", api.search),
        ("/api/v1/channels/{channel_id}", api.channel),
        ("/healthz", api.healthz),
        ("/openapi.json", api.openapi),
        ("/", api.page),
        ("/style.css", api.style),
    ]
    app = Starlette(
        routes=[Route(path, answer, methods=["GET"]) for path, answer in routes],
        exception_handlers={
            HTTPException: _http_error,
            ParameterError: _bad_parameter,
            _Answer: lambda _request, answer: _problem_response(answer.problem),
        },
    )
    app.router.redirect_slashes = False
    return app


class _Answer(Exception):  # noqa: N818  # it ends a request, as an answer
    """Answer with this problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem


class _Readers:
    """A connection on the event loop for what is quick, and threads, each with a connection, for what may not be.

    The first failure of an outage is logged, and its end.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._here = Reader(url, busy_timeout_ms=0)
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="reader")
        self._waiting = 0
        self._away = False

    def state(self) -> object:
        """The store's state; None if it cannot be told without waiting."""
        try:
            return self._here.state()
        except StoreError:
            return None

    async def read(self, question: Callable[[Reader], T], *, quick: bool = True) -> T:
        """The answer of a reader. Raises _Answer if the store cannot be read, or too many wait."""
        if quick:
            try:
                return self._back(question(self._here))
            except StoreError:
                pass  # perhaps only locked for a moment, and a thread may wait
        if self._waiting >= MAX_WAITING:
            raise _Answer(BUSY)
        self._waiting += 1
        try:
            return self._back(await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, question))
        except StoreError as error:
            if not self._away:
                logger.error("%s", line("store_away", error=error))
            self._away = True
            raise _Answer(STORE_AWAY) from None
        finally:
            self._waiting -= 1

    def _back(self, found: T) -> T:
        if self._away:
            logger.warning("%s", line("store_back"))
        self._away = False
        return found

    def _ask(self, question: Callable[[Reader], T]) -> T:
        reader: Reader | None = getattr(self._own, "reader", None)
        if reader is None:
            reader = self._own.reader = Reader(self._url)
        return question(reader)


class _Api:
    def __init__(self, session: Session) -> None:
        settings = session.settings
        self._jobs: dict[str, list[str]] = {}
        for job in sorted(settings.jobs.values(), key=lambda job: job.fetch != "trending"):
            for region in job.regions:
                self._jobs.setdefault(region, []).append(job.name)
        self._store = _Readers(settings.store.url)
        self._health = Health(session, self._store.read)
        self._answers: KeptAnswers[Written] = KeptAnswers()
        listed = document()
        self._document = _static(json.dumps(listed).encode(), "application/json")
        self._page = _static(pages.page(listed), "text/html; charset=utf-8")

    async def trending(self, request: Request) -> Response:
        parameters = _parameters(request, "region", "limit", "cursor")
        region, limit = required(parameters, "region"), limit_of(parameters)
        question = f"trending {region}"
        version, after = _begin(question, parameters)
        jobs = self._jobs.get(region, [])

        async def answer() -> Written:
            chart = await self._store.read(lambda reader: reader.chart(region, jobs, after, limit))
            if chart is None:
                known = bool(jobs) or await self._store.read(lambda reader: reader.ranks(region))
                if known:
                    raise _Answer(Problem(404, f"No ranking of {show(region)} is complete yet.", retry_after_s=60))
                raise ParameterError("region", f"region={show(region)}: no job fetches it")
            _check_version(version, chart.version)
            token = cursor.encode(question, chart.version, chart.rows[-1][0]) if chart.more else None
            return written(resources.chart_response(chart, token), chart.completed_ms)

        return await self._kept(request, f"{question} {limit} {parameters.get('cursor', '')}", answer)

    async def search(self, request: Request) -> Response:
        parameters = _parameters(request, "q", "limit", "cursor")
        words, limit = words_of(parameters), limit_of(parameters)
        question = f"search {words}"
        version, skip = _begin(question, parameters)

        async def answer() -> Written:
            try:
                hits = await self._store.read(
                    lambda reader: reader.search(words, skip, limit), quick=is_one_word(words)
                )
            except UsageError as error:
                raise ParameterError("q", str(error)) from None
            _check_version(version, hits.version)
            behind = skip + len(hits.rows)
            token = cursor.encode(question, hits.version, behind) if behind < hits.total else None
            return written(resources.search_response(hits, token), hits.changed_ms)

        return await self._kept(request, f"{question} {limit} {parameters.get('cursor', '')}", answer)

    async def channel(self, request: Request) -> Response:
        _parameters(request)
        channel_id = _path_parameter(request, "channel_id")

        async def answer() -> Written:
            row = await self._store.read(lambda reader: reader.channel(channel_id))
            if row is None:
                raise _Answer(Problem(404, f"The store has no channel {show(channel_id)}."))
            return written(resources.channel(row), row.refreshed_ms if isinstance(row.refreshed_ms, int) else 0)

        return await self._kept(request, f"channel {channel_id}", answer)

    async def _kept(self, request: Request, question: str, answer: Callable[[], Awaitable[Written]]) -> Response:
        """What was answered to this question before, as long as the store has not changed since."""
        state = self._store.state()
        found = None if state is None else self._answers.get(state, question)
        if found is None:
            found = await answer()
            self._answers.put(state, question, found, len(found.body))
        return found.response(request)

    async def healthz(self, request: Request) -> Response:
        _parameters(request)
        status, found = await self._health.examine()
        return Response(json.dumps(found), status, {"cache-control": "no-store"}, "application/json")

    async def openapi(self, request: Request) -> Response:
        _parameters(request)
        return _kept(request, self._document, STATIC_FRESH_S)

    async def page(self, request: Request) -> Response:
        _parameters(request)
        answer = _kept(request, self._page, STATIC_FRESH_S)
        answer.headers["content-security-policy"] = pages.POLICY
        return answer

    async def style(self, request: Request) -> Response:
        _parameters(request)
        return _kept(request, _STYLE, STATIC_FRESH_S)


# -- what is asked -----------------------------------------------------------------------------------------------------


def _parameters(request: Request, *known: str) -> Mapping[str, str]:
    return read_parameters(request.scope["query_string"], known)


def _path_parameter(request: Request, name: str) -> str:
    """A part of the path. The server replaces bytes that are not UTF-8, and what they stood for is lost."""
    value: str = request.path_params[name]
    if "\ufffd" in value:
        raise ParameterError(name, "the path is not UTF-8")
    return value


def _begin(question: str, parameters: Mapping[str, str]) -> tuple[bytes | None, int]:
    """Where to go on, and the version that it is of; None for a list's first page."""
    if "cursor" not in parameters:
        return None, 0
    try:
        return cursor.decode(question, parameters["cursor"])
    except cursor.ForeignCursorError:
        raise ParameterError("cursor", "this is no nextPageToken of this query; ask without a cursor") from None


def _check_version(asked: bytes | None, version: str) -> None:
    if asked is not None and not cursor.is_of(asked, version):
        raise ParameterError("cursor", "the list has changed since this nextPageToken; begin again without a cursor")


# -- answers -----------------------------------------------------------------------------------------------------------


class Written(NamedTuple):
    """A body and its tag, and when what it tells changed last."""

    body: bytes
    tag: str
    changed_ms: int
    media_type: str = "application/json"

    def response(self, request: Request) -> Response:
        """What has been the same for long will be for a while: it may be kept for a tenth of its age, as caches do
        with answers that say nothing about that (RFC 9111, 4.2.2)."""
        age_s = (host_clock() - self.changed_ms) // 1_000
        return _kept(request, self, min(MAX_FRESH_S, max(MIN_FRESH_S, age_s // 10)))


def written(document: resources.Json, changed_ms: int) -> Written:
    body = json.dumps(document, ensure_ascii=False).encode(errors="replace")
    return Written(body, _tag_of(body), changed_ms)


def _tag_of(body: bytes) -> str:
    return f'"{blake2b(body, digest_size=12).hexdigest()}"'


def _static(body: bytes, media_type: str) -> Written:
    return Written(body, _tag_of(body), 0, media_type)


def _kept(request: Request, answer: Written, fresh_s: int) -> Response:
    headers = {"etag": answer.tag, "cache-control": f"public, max-age={fresh_s}"}
    if _matches(request.headers.getlist("if-none-match"), answer.tag):
        return Response(status_code=304, headers=headers)
    return Response(answer.body, headers=headers, media_type=answer.media_type)


def _matches(conditions: list[str], tag: str) -> bool:
    """Whether the client has this body. A proxy that compressed it made its tag weak; the body is still the same."""
    listed = [one.strip().removeprefix("W/") for one in ",".join(conditions).split(",")]
    return "*" in listed or tag in listed


_STYLE = _static(pages.STYLE, "text/css; charset=utf-8")


def _problem_response(problem: Problem) -> Response:
    return Response(problem.body(), problem.status, dict(problem.fields()))


def _bad_parameter(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ParameterError)  # noqa: S101  # the handler's own type
    members: dict[str, Any] = {"parameter": error.name} if error.name else {}
    return _problem_response(Problem(400, error.detail, members=members))


def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such path, or another method."""
    assert isinstance(error, HTTPException)  # noqa: S101  # the handler's own type
    if error.status_code == 405:
        detail = f"{show(request.method)}: everything here is only read"
        return _problem_response(Problem(405, detail, more=(("allow", "GET, HEAD"),)))
    return _problem_response(
        Problem(error.status_code, f"There is nothing at {show(request.url.path)}; / lists what is.")
    )
