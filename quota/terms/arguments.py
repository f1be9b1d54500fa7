"""Checks what callers pass: whole numbers, names, functions, and who spends. Anything else raises a one-line
UsageError.

Without this check the ledger would store a bad number, and everybody who reads it would fail later.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ContextDecorator, contextmanager, suppress
from contextvars import ContextVar
from functools import cache, partial
from operator import index
from typing import Any, TypeVar, get_type_hints

from quota.common.clock import LATEST_MS, NEVER
from quota.common.log import warn
from quota.common.text import show
from quota.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
R = TypeVar("R", bound=tuple[Any, ...])

MAX_NUMBER = 2**53 - 1
"""Larger numbers are not exact in Lua and JSON."""

MAX_SECONDS = 10**6
"""Eleven days. Nobody waits that long for an answer, and the system accepts no longer timeout."""


def whole(value: object, what: str, minimum: int, maximum: int) -> int:
    """`value` as an int: an int, or an integer type such as numpy's. Raises UsageError for anything else, also a
    bool."""
    number = None
    if type(value) is int:
        number = value
    elif not isinstance(value, bool):
        with suppress(TypeError):
            number = index(value)  # type: ignore[arg-type]  # raises if it is not an integer
    if number is None or not minimum <= number <= maximum:
        raise UsageError(f"{show(value)} {what} is a whole number from {minimum:,} to {maximum:,}")
    return number


def seconds(value: object, what: str) -> float:
    """`value` as a number of seconds above 0, fractions included."""
    number = 0.0
    if not isinstance(value, (bool, str, bytes)):
        with suppress(TypeError, ValueError, OverflowError):
            number = float(value)  # type: ignore[arg-type]  # raises if it is not a number
    if not 0 < number <= MAX_SECONDS:
        raise UsageError(f"{what} {show(value)} is not a number of seconds above 0, up to {MAX_SECONDS:,}")
    return number


def whole_clock(clock: Callable[[], int]) -> Callable[[], int]:
    """`clock` with a check that it returns whole milliseconds: `time.time`, for example, returns fractions."""
    if not callable(clock):
        raise UsageError(f"clock {show(clock)} is not a function")
    return lambda: whole(clock(), "ms: what a clock says", 0, MAX_NUMBER)


def instance(value: object, kind: type[T], what: str, remedy: str) -> T:
    """`value`, if it is a `kind`. Raises UsageError with the `remedy` for anything else."""
    if not isinstance(value, kind):
        raise UsageError(f"{what} {show(value)} is no {kind.__name__}; {remedy}")
    return value


def text(value: object, what: str) -> str:
    """`value` as a plain str: a str, or an instance of a subclass, such as a StrEnum member."""
    if not isinstance(value, str):
        raise UsageError(f"{what} {show(value)} is not a str")
    return str.__str__(value)


def texts(value: str | Iterable[str], what: str) -> tuple[str, ...]:
    """`value` as a tuple of names. A lone str is one name, not its characters."""
    if isinstance(value, str):
        value = (value,)
    try:
        names = tuple(value)
    except TypeError:
        raise UsageError(f"{what} {show(value)} is neither a str nor a list of str") from None
    names = tuple(text(name, what) for name in names)
    if "" in names:
        raise UsageError(f"{what} '' is an empty name")
    return names


_types_of = cache(get_type_hints)


def checked(record: R) -> R:
    """A named tuple with each value of the type that its class names. A number is 0 or more; a time (`_ms`) is one that
    may be stored, and an end (`until_ms`) may be NEVER. Raises UsageError, and TypeError for a list that is none."""
    kind = type(record)
    fields = _types_of(kind).items()
    values: list[Any] = [_checked(value, *field) for value, field in zip(record, fields, strict=True)]
    return kind(*values)


def _checked(value: Any, name: str, kind: object) -> object:
    if kind is str:
        return text(value, name)
    if kind is bool:
        return value is True
    if kind == tuple[str, ...]:
        return tuple([text(part, name) for part in value])
    if kind == tuple[int, ...]:
        return tuple([_checked(part, name, int) for part in value])
    if name == "until_ms" and value == NEVER:
        return NEVER
    return whole(value, f"{name}: that", 0, LATEST_MS - 1 if name.endswith("_ms") else MAX_NUMBER)


def made_by(func: Any) -> str:
    """The kind of object that a call of `func` returns: "coroutine", "generator", "async generator", or "" for its
    result. A caller who expects a result would not await or run it. `func` may be any callable object."""
    while isinstance(func, partial):
        func = func.func
    if not inspect.isroutine(func):
        func = type(func).__call__
    kinds = {
        "coroutine": inspect.iscoroutinefunction,
        "generator": inspect.isgeneratorfunction,
        "async generator": inspect.isasyncgenfunction,
    }
    return next((kind for kind, is_kind in kinds.items() if is_kind(func)), "")


# -- who spends --------------------------------------------------------------------------------------------------------

_blocks = ContextVar[tuple["labels", ...]]("quota_labels", default=())
"""The blocks of `labels` that are open, the innermost last."""

_of_process = ("", "")

run_under_way = ContextVar[str | None]("quota_run", default=None)


def current_attribution(of_run: tuple[str, str] | None) -> tuple[str, str]:
    """(job, region), each of the enclosing `labels`, else of the current run, else of `label_process`, else ""."""
    job, region = of_run or _of_process
    for block in _blocks.get():
        job, region = block.job or job, block.region or region
    return job, region


def label_process(job: str) -> None:
    """Label the charges of this process, in all threads. `labels` take precedence."""
    global _of_process
    check_name("job", text(job, "job"))
    _of_process = (job, "")


class labels(ContextDecorator):  # noqa: N801  # a block, as `suppress`
    """Label the charges made inside this block with this job and region, unless a charge names its own. The
    block around it, or the run, names what is left out.

    A block around a `yield` may end in another context, or before a later block. Then its end logs a warning."""

    def __init__(self, *, job: str = "", region: str = "") -> None:
        self.job, self.region = text(job, "job"), text(region, "region")
        check_name("job", self.job)
        check_name("region", self.region)

    def __call__(self, func: F) -> F:
        """`func` with these labels. Raises UsageError for a coroutine or generator function."""
        if kind := made_by(func):
            raise UsageError(f"labels would end before the {kind} runs; write `with quota.labels(...):` inside it")
        return super().__call__(func)

    def _recreate_cm(self) -> labels:
        return labels(job=self.job, region=self.region)

    def __enter__(self) -> None:
        _blocks.set((*_blocks.get(), self))

    def __exit__(self, *error: object) -> None:
        blocks = _blocks.get()
        _blocks.set(tuple([block for block in blocks if block is not self]))
        if self not in blocks[-1:]:
            warn_crossed()


@cache
def warn_crossed() -> None:
    """Log, once, that a block of `labels` did not end where it began."""
    warn("labels_crossed", "quota.labels around a yield labels other charges; open it around each call instead")


@contextmanager
def in_run(run: str) -> Iterator[None]:
    """Let sessions that are opened inside this block take the id of this run, so that its charges stand together."""
    reset = run_under_way.set(run)
    try:
        yield
    finally:
        run_under_way.reset(reset)


def attribution(job: str | None, region: str | None, of_run: tuple[str, str] | None) -> tuple[str, str]:
    """Who spends: this job and region, or `current_attribution`. Raises UsageError."""
    labelled_job, labelled_region = current_attribution(of_run)
    job = labelled_job if job is None else text(job, "job")
    if region is None:
        return job, labelled_region
    region = text(region, "region")
    check_name("region", region)
    return job, region


def check_name(what: str, name: str, least: int = 0) -> None:
    """Raises UsageError for a name that no charge may have."""
    if not least <= len(name) <= 64 or not name.isprintable():
        raise UsageError(f"{what} {name[:80]!r}: a name has 1 to 64 printable characters")


def machine_name() -> str:
    """This machine's host name."""
    return os.uname().nodename
