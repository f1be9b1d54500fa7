"""The parts of a job. READ FIRST in this package.

    fetch           a plain function: one step of one region, `fetch(client, region, cursor, **options) -> Page`
    Page            what one step fetched, and the cursor of the next step
    sink            a plain function that gets each page before it is stored: `sink(page, job, region)`
    RunReport       how the run ended: what `quota run --json` prints
    functions_of    the fetch function and the sink that the configuration names; `regions_of` the regions

A fetch function makes one call to the API and returns. It holds no state and needs no error handling: the runner
stores the page together with the new cursor, retries transient errors, and stops the run when the budget refuses a
call. A fetch function with a parameter called `store` gets the local store to read from.

    from quota.jobs.job import Page, first_attempt

    @first_attempt("videos.list")
    def fetch(client, region, cursor):
        answer = client.videos().list(part="snippet", chart="mostPopular", regionCode=region).execute()
        return Page(videos=answer["items"])
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from inspect import Parameter, signature
from itertools import chain
from pathlib import Path
from threading import current_thread, main_thread
from traceback import extract_tb
from typing import Any, NamedTuple, TypeGuard, TypeVar

import quota
from quota.common.clock import moment, stamp
from quota.common.files import doubt_of_path
from quota.common.log import line, warn
from quota.common.text import describe, many, members, nearest, one_line, show, spell
from quota.errors import behind
from quota.reports.runs import Run
from quota.settings.model import BUILT_IN_FETCHES, JobSettings, Settings, check_table
from quota.terms.arguments import made_by, texts
from quota.terms.costs import unlimited


class NotImported(quota.ConfigError):
    """A function was not imported, because others could have written the configuration that names it."""


_PYTHON = Path(logging.__file__).parents[1]
"""The folder of Python's own modules."""

MAX_ID_LENGTH = 128
"""Upstream's own ids have up to 34 characters. One URL carries 50 of them."""

MAX_CURSOR_CHARACTERS = 1_000_000
MAX_DEPTH = 100
"""How deep a cursor or a row may be nested. Python and SQLite fail at several hundred levels."""

log = logging.getLogger("quota.jobs")

Cursor = dict[str, Any]
Fetch = Callable[..., "Page"]
Sink = Callable[["Page", str, str], object]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Page:
    """What one step fetched. `videos` and `channels` are the API's own resources, as it sent them.

    `rows` are JSON objects of any other kind, by the name of their table: `rows={"comments": [{"id": ...}, ...]}`. A
    row's key is its `id`, or the fields that the job's `tables` name.

    `ranked`: the order of the videos is a ranking. Their ranks continue the ranks of the page before.
    `cursor`: what the next step needs, any JSON object; None when the region has no more pages. If a step returns the
    cursor of an earlier step of the same pass, the region fails: following it would never end.
    `complete` False: a step on the way to a page, for example a step that found ids and leaves their videos to the
    next. The store keeps it, so that a stop loses nothing, but it does not count towards the job's `pages`. Without a
    cursor it is empty: there was nothing left to fetch.
    `again`: the step fetched stored videos once more. That does not make the store keep them longer, and brings back no
    expired video. If upstream did not return a video, the page has only its id.
    `places`: rows that only say where the job stands. They are not items, and a page of places alone reaches no sink.
    `unknown`: the ids in the configuration for which upstream has nothing. A run names each once.
    """

    videos: Sequence[Mapping[str, Any]] = ()
    ranked: bool = False
    channels: Sequence[Mapping[str, Any]] = ()
    cursor: Cursor | None = None
    complete: bool = True
    rows: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    again: bool = False
    places: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    unknown: Sequence[str] = ()

    @property
    def items(self) -> int:
        return len(self.videos) + len(self.channels) + sum(map(len, self.rows.values()))

    def __post_init__(self) -> None:
        for what in ("ranked", "complete", "again"):
            if not isinstance(getattr(self, what), bool):
                raise ValueError(f"a page's {what} must be True or False, not {show(getattr(self, what))}")
        for what, resources in (("videos", self.videos), ("channels", self.channels)):
            if not isinstance(resources, (list, tuple)):
                raise ValueError(f"a page's {what} must be a list, not {type(resources).__name__}")
            for resource in resources:
                if not isinstance(resource, Mapping) or not isinstance(resource.get("id"), str):
                    raise ValueError(
                        f'each of a page\'s {what} must be an object with a text "id", not {show(resource)}'
                    )
        if not isinstance(self.rows, dict):
            raise ValueError(f"a page's rows must be lists by the name of their table, not {show(self.rows)}")
        for table, objects in self.rows.items():
            check_table(table)
            if not isinstance(objects, (list, tuple)):
                raise ValueError(f"a page's rows of table {table!r} must be a list, not {type(objects).__name__}")
        if not isinstance(self.unknown, (list, tuple)) or not all(isinstance(name, str) for name in self.unknown):
            raise ValueError(f"a page's unknown ids must be a list of texts, not {show(self.unknown)}")
        if self.cursor is not None and not isinstance(self.cursor, dict):
            raise ValueError(f"a page's cursor must be a dict or None, not {show(self.cursor)}")
        if is_deep(self.cursor):
            raise ValueError(f"a page's cursor is nested over {MAX_DEPTH} deep")
        if self.cursor is None and not self.complete and self.items:
            raise ValueError("an incomplete step needs a cursor that says how to complete it")
        try:
            size = len(json.dumps(self.cursor, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(f"a page's cursor must be JSON: {error}") from error
        if size > MAX_CURSOR_CHARACTERS:
            raise ValueError(f"a page's cursor has {size:,} characters, over {MAX_CURSOR_CHARACTERS:,}")


def is_deep(value: object, levels: int = MAX_DEPTH) -> bool:
    """Whether a JSON value is nested over MAX_DEPTH deep."""
    if not isinstance(value, dict | list | tuple):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return not levels or any(is_deep(value, levels - 1) for value in inside)


def resources(answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The items of upstream's answer to a list call. Raises BadAnswer if one of them has no usable id."""
    items: list[Mapping[str, Any]] = answer.get("items", [])
    for item in items:
        checked_id(item.get("id") if isinstance(item, Mapping) else item)
    return items


def is_id(value: object) -> TypeGuard[str]:
    """Whether a value is an id as upstream has them."""
    return isinstance(value, str) and 1 <= len(value) <= MAX_ID_LENGTH


def checked_id(value: object) -> str:
    """An id as upstream sent it. Raises BadAnswer if it is not a valid id."""
    if not is_id(value):
        raise quota.BadAnswer(f"upstream's answer has an item with an invalid id: {show(value)}")
    return value


class Away(NamedTuple):
    """The machine that covers a region which this run did not get. The ledger last heard from `runs_on` at `heard_ms`,
    by its own clock, which is now at `now_ms`. The region is free at `until_ms` if the ledger hears nothing more.

    `same_store`: a run of the same store covers it, on another machine. `new_store`: this store never ran the job.
    """

    runs_on: str
    heard_ms: int
    until_ms: int
    now_ms: int
    same_store: bool = False
    new_store: bool = False

    def __str__(self) -> str:
        until = moment(self.until_ms)
        heard = f"(last {stamp(self.heard_ms)}, {spell(self.now_ms - self.heard_ms)} ago)"
        if self.same_store:
            return f"runs on {self.runs_on} for the same store {heard}; goes on here if silent until {until}"
        return f"runs on {self.runs_on} {heard}; taken over if silent until {until}"


@dataclass(frozen=True)
class RunReport(Run):
    """How a run of this process ended.

    `quota run` exits with `exit_status`, unless `--fail-on-refusal` applies. `elsewhere` names the machine of each
    region that this run did not get. `waits`: a new try may succeed soon. `silent`: the address that did not answer at
    the end. `failed_region`: the only region of this run, if it failed and the job has others.
    """

    exit_status: int = 0
    refused: bool = False
    next_step: str = field(default="", compare=False)
    elsewhere: Mapping[str, Away] = field(default_factory=dict)
    waits: bool = field(default=False, compare=False)
    silent: str = field(default="", compare=False)
    failed_region: str = field(default="", compare=False)

    @property
    def cannot_run(self) -> bool:
        """Whether this machine may be the cause of the end, as with a missing key or a wrong clock."""
        return self.outcome == "failed" or (self.refusal or {}).get("reason") == "clock"

    @property
    def away(self) -> Away | None:
        """The machine whose region is away for longest; None if no region is away."""
        return max(self.elsewhere.values(), key=lambda away: away.until_ms, default=None)

    def as_json(self) -> dict[str, object]:
        """The report as `quota run --json` prints it."""
        return {
            **members(self, "run job outcome"),
            **({} if self.away is None else members(self.away, "runs_on until")),
            "regions": [asdict(region) for region in self.regions],
            **members(self, "units attempts refused_by retry_at"),
        }

    def sentence(self, now_ms: int) -> str:
        """One line for people: what the run did, why it ended, and where and when the next one resumes."""
        rest = "" if self.away is None else f"; the rest {self.away}"
        pages, items = sum(r.pages for r in self.regions), sum(r.items for r in self.regions)
        units = "no call of `client` was charged" if pages and not self.attempts else many(self.units, "unit")
        done = f"{many(pages, 'page')} ({units})"
        if self.outcome == "overlap":
            return f"{self.job}: {self.why}"
        if self.outcome == "elsewhere":
            began = f"stopped after {done}: " if self.units or pages else ""
            is_new = self.away is not None and self.away.new_store
            now = f"; this store is new to it: `quota run {self.job} --here` takes over now" if is_new else ""
            return f"{self.job}: {began}{self.away or self.why}{now}"
        if self.outcome == "done":
            why = f"; {self.why}" if self.why else ""
            covered = [r.region for r in self.regions if r.outcome == "done"]
            regions = "" if covered == [""] else f"{many(len(covered), 'region')}, "
            return f"{self.job}: done: {regions}{many(items, 'item')}, {done}{why}{rest}"
        if self.outcome == "failed":
            return f"{self.job}: failed after {done}"  # `why` is printed as an error
        # Without a ledger, `why` is printed as an error too.
        why = "" if self.exit_status == quota.LedgerError.exit_status else f": {self.why}"
        sentence = f"{self.job}: {self.outcome} after {done}{why}"
        if self.outcome == "stopped" and self.next_step:
            sentence += f"; next: {self.next_step}"
            if self.retry_at_ms is not None:
                sentence += f" at {moment(self.retry_at_ms)} (in {spell(self.retry_at_ms - now_ms)})"
        return sentence + rest


def leave_out(error: Exception, part: str, page: Page) -> None:
    """Note on the error of a step that the pass may go on without `part`. `page` says where it goes on."""
    error.goes_on = part, page  # type: ignore[attr-defined]


def left_out_by(error: Exception) -> tuple[str, Page] | None:
    """The note of `leave_out` on an error; None if the error ends the pass."""
    left_out: tuple[str, Page] | None = getattr(error, "goes_on", None)
    return left_out


# -- fetch functions ---------------------------------------------------------------------------------------------------

Attempt = str | Callable[[Cursor | None], str]


def first_attempt(method: Attempt) -> Callable[[F], F]:
    """Name the API method that a fetch function calls first. A refused run then ends without importing the client.

    `method` is a name such as "videos.list", or a function of the cursor if the steps call different methods.
    """
    if callable(method) and len(signature(method).parameters) > 2:  # the fetch function itself
        raise quota.UsageError('@first_attempt lacks the method; write for example @first_attempt("videos.list")')
    return marked(first_attempt=method)


def marked(**marks: object) -> Callable[[F], F]:
    """Mark a fetch function with the `shapes` of its options, or with the options that have `names`: ids of a shape, or
    words (None). Upstream refuses texts of another shape, and counts the call."""

    def mark(fetch: F) -> F:
        vars(fetch).update(marks)
        return fetch

    return mark


class Shape(NamedTuple):
    """The texts that upstream takes for an option, or has as ids: a pattern, and the words for it."""

    pattern: str
    like: str


def names_in(fetch: Fetch, options: Mapping[str, Any]) -> Iterator[tuple[str, Shape | None, tuple[str, ...]]]:
    """The names in the options of a marked function, each with its option and its shape. Raises UsageError if an option
    is not a list of names."""
    names: Mapping[str, Shape | None] = getattr(fetch, "names", {})
    for option, shape in names.items():
        if option in options:
            yield option, shape, texts(options[option], f"{option}:")


def attempt_of(fetch: Fetch, cursor: Cursor | None) -> str | None:
    """The API method that `fetch` calls first at this cursor. None if the function has no mark, or if the mark is
    invalid or fails: a mark only saves work."""
    mark: Attempt | None = getattr(fetch, "first_attempt", None)
    try:
        with apart():
            method = mark(cursor) if callable(mark) else mark
        if not isinstance(method, str | None):
            raise TypeError(f"{show(method)} is no method")
    except (Exception, SystemExit) as error:
        why = describe(error) + line_of(error, getattr(fetch, "__module__", ""))
        warn("first_attempt_failed", why, fetch=getattr(fetch, "__name__", "fetch"))
        return None
    return method


def pages_of(job: JobSettings) -> int:
    """The most pages of a pass over one region: `pages`, or `pages` of each search if a job has several."""
    words = job.options.get("words") if job.fetch == "search" else None
    return job.pages * max(1, len(words)) if isinstance(words, list | tuple) else job.pages


def load_fetch(name: str, options: Mapping[str, Any], folder: Path | None = None) -> Fetch:
    """The fetch function that the configuration names: a built-in job, or `package.module:function`.

    The module is an installed one or is in `folder`, where the configuration file is. The current folder does not
    matter: cron starts its commands in the home folder. The function must accept the job's `options`. Raises
    ConfigError, one line, if it cannot be used.
    """
    function = f"quota.jobs.fetches:{name}" if name in BUILT_IN_FETCHES else name
    fetch: Fetch = _load("fetch", name, function, folder)
    setting = f"fetch = {name!r:.100}"
    beside = next((key for key in options if key in JobSettings._fields), None)
    if name in BUILT_IN_FETCHES and beside is not None:
        raise quota.ConfigError(f"{setting}: `{beside}` is a key of the job; write it beside `options`, not in them")
    _check_signature(fetch, setting, options)
    _check_names(fetch, setting, options)
    return fetch


def load_sink(name: str, folder: Path | None) -> Sink | None:
    """The sink that the configuration names, loaded like `load_fetch`; None if it names none."""
    if not name:
        return None
    sink: Sink = _load("sink", name, name, folder)
    try:
        signature(sink).bind(None, "", "")
    except (TypeError, ValueError) as error:
        raise quota.ConfigError(f"sink = {name!r:.100}: {error}; it is called as sink(page, job, region)") from error
    return sink


def fetch_to_look_at(settings: Settings, job: JobSettings) -> Fetch:
    """The fetch function of a job, for a command that only looks at a configuration: `check`, `plan`, the dashboard.

    A user who names a file to such a command has not decided to run its code. So the function imports code only from a
    configuration that nobody else could have written. Raises NotImported for any other, and ConfigError as
    `load_fetch`.
    """
    return load_fetch(job.fetch, job.options, _folder_to_look_at(settings, "fetch", job.fetch))


def sink_to_look_at(settings: Settings, job: JobSettings) -> Sink | None:
    """The sink of a job, loaded like `fetch_to_look_at`."""
    return load_sink(job.sink, _folder_to_look_at(settings, "sink", job.sink))


def _folder_to_look_at(settings: Settings, key: str, name: str) -> Path | None:
    if settings.path is None:
        return None
    if name and name not in BUILT_IN_FETCHES:
        try:
            why = doubt_of_path(settings.path)
        except OSError as error:  # for example a pipe
            why = f"nobody can say who wrote {one_line(settings.path)} ({error.strerror or error})"
        if why:
            remedy = "change that, or only run the job"
            raise NotImported(f"{key} = {name!r:.100} is not imported here, because {why}; {remedy}")
    return settings.path.absolute().parent


def line_of(error: BaseException, name: str) -> str:
    """The file and line in which the user's code raised this error, after a space; empty if no frame is in that code.
    Frames count if they are below the folder of `name`'s module: the last frame of the error, else of an error behind
    it."""
    file = getattr(sys.modules.get(name.partition(":")[0]), "__file__", None)
    if not file or name in BUILT_IN_FETCHES:
        return ""
    return next(filter(None, (_line_below(Path(file).parent, cause) for cause in behind(error))), "")


def _line_below(folder: Path, error: BaseException) -> str:
    for frame in reversed(extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        # An environment may lie there, and Python itself.
        is_own = path.is_relative_to(folder) and "site-packages" not in path.relative_to(folder).parts
        if is_own and not path.is_relative_to(_PYTHON):
            return f" ({frame.filename}, line {frame.lineno})"
    return ""


def _load(key: str, name: str, function: str, folder: Path | None) -> Any:
    """A function that the configuration names as `key`: `package.module:function`."""
    setting = f"{key} = {name!r:.100}"
    module_name, colon, attribute = function.partition(":")
    if not colon or not module_name or not attribute:
        choice = f"{', '.join(BUILT_IN_FETCHES)}, or your own as " if key == "fetch" else "it as "
        raise quota.ConfigError(f'{setting}: write {choice}"package.module:function"')
    module = _import(module_name, setting, folder)
    value = getattr(module, attribute, None)
    if value is None:
        file = getattr(module, "__file__", None)  # perhaps of Python, and not the user's own
        raise quota.ConfigError(f"{setting}: module {module_name:.100} ({file}) has no function {attribute!r:.100}")
    if not callable(value) or isinstance(value, type):
        kind = "a class" if isinstance(value, type) else type(value).__name__
        raise quota.ConfigError(f"{setting}: {attribute:.100} is not a function but {kind}")
    if made_by(value):
        remedy = "write a plain function that returns a Page" if key == "fetch" else "write a plain function"
        raise quota.ConfigError(f"{setting}: {attribute:.100} is a coroutine or a generator; {remedy}")
    return value


def _import(module_name: str, setting: str, folder: Path | None) -> object:
    if folder is not None and str(folder) not in sys.path:
        # At the end, so that a file beside the configuration never hides an installed module. It stays there, because
        # the function may import its neighbours when it is called.
        sys.path.append(str(folder))
    try:
        with apart():
            return importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a script may call sys.exit where it is imported
        function = setting.partition(" = ")[2]
        log.debug("%s", line("function_not_imported", function=function, folder=folder), exc_info=True)
        lacking = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
        missing = lacking != "" and f"{module_name}.".startswith(f"{lacking}.")
        where = f"; install it, or put it in {folder}" if missing else ""
        if not missing and lacking in ("jobs", "jobs.job"):
            where = "; quota-ledger's module is quota.jobs.job: write for example `from quota.jobs.job import Page`"
        place = "" if folder is None or missing else _line_below(folder, error)
        raise quota.ConfigError(f"{setting} cannot be imported: {describe(error)}{place}{where}") from error


@contextmanager
def apart() -> Iterator[None]:
    """Keep what the user's code or its child processes print out of a command's output, often JSON. Only in the main
    thread: threads that redirect at once would undo each other's redirection."""
    with ExitStack() as block:
        with suppress(OSError, ValueError):  # a program may have replaced or closed it
            if current_thread() is main_thread() and getattr(sys.stdout, "fileno", int)() == 1:
                sys.stdout.flush()
                block.callback(os.close, stdout := os.dup(1))
                block.callback(os.dup2, stdout, 1)
                os.dup2(2, 1)
                block.enter_context(redirect_stdout(sys.stderr))
        yield


def _check_names(fetch: Fetch, setting: str, options: Mapping[str, Any]) -> None:
    try:
        for option, shape, values in names_in(fetch, options):
            if not values:
                raise quota.ConfigError(f"{setting}: {option} = [] asks for nothing; name at least one")
            plain = [" ".join(value.casefold().split()) for value in values]
            for index, value in enumerate(values):
                if shape is None and plain[index] in plain[:index]:
                    raise quota.ConfigError(f"{setting}: {option}: {show(value)} appears twice; remove one")
                if shape is None and not value.strip():
                    raise quota.ConfigError(f"{setting}: {option} has a blank text, which asks for nothing; remove it")
                if shape is not None and not re.fullmatch("[A-Za-z0-9_-]+", value):
                    raise quota.ConfigError(f"{setting}: {option}: {show(value)} is not {shape.like}; write the id")
    except quota.UsageError as error:
        raise quota.ConfigError(f"{setting}: {error}; correct it") from None
    for option, shape in getattr(fetch, "shapes", {}).items():
        if option in options and not re.fullmatch(shape.pattern, str(options[option]), re.ASCII):
            raise quota.ConfigError(f"{setting}: {option}: {show(options[option])} is not {shape.like}; correct it")


def _check_signature(fetch: Fetch, setting: str, options: Mapping[str, Any]) -> None:
    try:
        accepted = signature(fetch)
    except (TypeError, ValueError) as error:
        raise quota.ConfigError(f"{setting}: its parameters cannot be read: {error}") from error
    if "store" in options:
        raise quota.ConfigError(f"{setting}: the name 'store' is reserved for the local store")
    has = [option for option in list(accepted.parameters)[3:] if option != "store"]
    open_ended = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in accepted.parameters.values())
    unknown = next((option for option in options if option not in accepted.parameters), None)
    if unknown is not None and not open_ended:
        raise quota.ConfigError(f"{setting} has no option {show(unknown)}; {nearest(unknown, has)}")
    values = {**options, **({"store": None} if "store" in accepted.parameters else {})}
    try:
        accepted.bind(None, "US", None, **values)
    except TypeError as error:
        given = "".join(f", {option}=..." for option in values)
        raise quota.ConfigError(f"{setting}: {error}; it is called as fetch(client, region, cursor{given})") from error


# -- jobs and their regions --------------------------------------------------------------------------------------------


def job_called(settings: Settings, name: str) -> JobSettings:
    """The job of this name. Raises UsageError if there is none."""
    if name not in settings.jobs:
        raise quota.UsageError(f"{settings.source} has no job {show(name)}; {nearest(name, settings.jobs)}")
    return settings.jobs[name]


def functions_of(settings: Settings, job: JobSettings) -> tuple[Fetch, Sink | None]:
    """The fetch function and the sink of a job. Raises ConfigError if no run of the job can begin."""
    folder = None if settings.path is None else settings.path.absolute().parent
    fetch, sink = load_fetch(job.fetch, job.options, folder), load_sink(job.sink, folder)
    check_job(settings, job)
    return fetch, sink


def check_job(settings: Settings, job: JobSettings) -> None:
    """Raises ConfigError if upstream cannot know a region of the job, or no limit holds its calls of some bucket."""
    credential = settings.credentials[job.credential]
    for bucket in unlimited(credential.limits, credential.book):
        where = f"{settings.source}: credentials.{credential.name}.limits"
        raise quota.ConfigError(f"{where}: no limit counts any call of bucket {bucket.name!r}; {bucket.limit_to_add}")
    users = regions_of_users(settings, job)
    for index, region in enumerate(job.regions if job.fetch in BUILT_IN_FETCHES else ()):
        if fault := fault_of_region(region, users):
            raise quota.ConfigError(f"{settings.source}: jobs.{job.name}.regions[{index}]: {'; '.join(fault)}")


READ_STORED = {"channels": "ids", "videos": "", "uploads": "channels", "comments": "videos"}
"""The built-in jobs that fetch no chart, each with the option that names what to fetch instead of the store."""


def regions_of_users(settings: Settings, job: JobSettings) -> frozenset[str]:
    """The regions, of any name, of jobs with the user's own functions, if this job may read their data."""
    own = (other.regions for other in settings.jobs.values() if other.fetch not in BUILT_IN_FETCHES)
    return frozenset(chain.from_iterable(own if job.fetch in READ_STORED else ()))


def fault_of_region(region: str, users: frozenset[str]) -> tuple[str, str] | None:
    """Why upstream cannot know a region of a built-in job, and a hint; None if it may. `users` are regions that the
    user's own functions may have stored."""
    code = region.upper()
    is_code = region == code and len(code) == 2 and code.isascii() and code.isalpha() and code != "UK"
    if is_code or region in users:
        return None
    from quota.jobs.emulator.catalogue import REGIONS  # most ticks need no names of regions

    near = "did you mean 'GB'?" if code == "UK" else nearest(code, REGIONS)
    return f"{region!r:.100} is no region code of ISO 3166-1, like 'US'", near


def regions_of(job: JobSettings, wanted: Sequence[str]) -> tuple[str, ...]:
    """The regions of a job, in their order: all of them, or those that are `wanted`. Raises UsageError."""
    unknown = [region for region in wanted if region not in job.regions]
    if unknown:
        raise quota.UsageError(f"job {job.name!r} has no region {show(unknown[0])}; {nearest(unknown[0], job.regions)}")
    if wanted:
        return tuple(region for region in job.regions if region in wanted)
    return job.regions or ("",)
