"""Printing, tables, errors and logging. Tables fit any width of a terminal. Every failure is one line on stderr."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import click

import quota
from quota.common.text import csv_writer, many, printable, shorten, show
from quota.errors import ConfigError, LedgerError

if TYPE_CHECKING:
    import logging

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

    from quota.session import Session
    from quota.wording import Part, Table

MAX_LINE = 1_000
PROGRESS_S = 2
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


# -- printing ----------------------------------------------------------------------------------------------------------


def print_json(data: object, indent: int | None = 2) -> None:
    """One JSON document on stdout; without `indent` on one line."""
    click.echo(json_text(data, indent))


def json_text(data: object, indent: int | None = None) -> str:
    """JSON for stdout: UTF-8, or ASCII with escapes if stdout has another encoding. Control characters are always
    escaped."""
    text = json.dumps(data, indent=indent, ensure_ascii=not takes_unicode())
    if not text.replace("\n", "").isprintable():
        text = "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
    return text


def print_as(
    form: str,
    data: object,
    columns: Sequence[str] = (),
    rows: Iterable[Mapping[str, Any]] = (),
    parts: Iterable[Part] | None = None,
) -> bool:
    """Print a report in a form of --format: its `data` as JSON, its `rows` as CSV with a header, or its `parts`, if
    any. Returns False if it is for people: the caller may have more for them."""
    if form == "json":
        print_json(data)
    elif form == "csv":
        write_row = csv_writer(sys.stdout, columns)
        for row in rows:
            write_row(row)
    elif parts is not None:
        print_parts(parts)
    return form != "text"


def can_ask() -> bool:
    """Whether a person at a terminal can answer."""
    return os.isatty(0) and os.isatty(2)


def confirmed(question: str, *, yes: bool) -> bool:
    """Whether to go on. It asks a person at a terminal, unless --yes is set; without a terminal it goes on."""
    return yes or not can_ask() or click.confirm(question, err=True)


def takes_unicode() -> bool:
    """Whether stdout is UTF-8."""
    return (getattr(sys.stdout, "encoding", None) or "").lower() in ("utf-8", "utf8")


def new_console(**options: Any) -> Console:
    """The console for rich. In a pipe or a file it folds no line, unless COLUMNS has the width of the reader (`watch`).

    COLUMNS=0 means that the width is unknown; rich would take 0 for the width, and print nothing.
    """
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False, **options)
    columns = os.environ.get("COLUMNS", "")
    if not (columns.isdecimal() and int(columns)):
        if not console.file.isatty():
            console.width = ANY_WIDTH
        elif not console.width:
            console.width = 80
    return console


def print_parts(parts: Iterable[Part], *, err: bool = False) -> None:
    """Lines and tables for people. A terminal gets colours; a pipe or a file gets no spaces at the ends of lines."""
    console, drawn = new_console(stderr=err), render_parts(parts)
    if console.is_terminal:
        console.print(drawn, crop=False)  # all that is printed fits
        return
    with console.capture() as printed:
        console.print(drawn, crop=False)
    stream = sys.stderr if err else sys.stdout
    stream.write("\n".join(line.rstrip(" ") for line in printed.get().split("\n")))
    stream.flush()


def say(*lines: str, err: bool = False) -> None:
    """Lines for people, without control characters."""
    for line in lines:
        click.echo(printable(line), err=err)


def announce(address: str) -> None:
    """The line of a server that now listens. If nobody can read it, stderr gets it, and the server goes on."""
    say(address)
    unprinted(address)


def now_and_then() -> Callable[[str], None]:
    """Shows progress on stderr to people who wait: one of the given lines in two seconds."""
    from quota.common.clock import elapsed_s

    last_s = elapsed_s()

    def say_progress(progress: str) -> None:
        nonlocal last_s
        if elapsed_s() - last_s >= PROGRESS_S:
            last_s = elapsed_s()
            say(progress, err=True)

    return say_progress


@contextmanager
def opened(config: str | None, *, err: bool) -> Iterator[Session]:
    """A session. Without a configuration it says so, because the user may expect another budget to be charged."""
    from quota.settings.model import BUILT_IN_NOTICE

    with quota.open(config) as session, naming_allowances(session):
        if session.settings.path is None:
            say(f"quota: {BUILT_IN_NOTICE}" if err else BUILT_IN_NOTICE, err=err)
        yield session


@contextmanager
def naming_allowances(session: Session) -> Iterator[None]:
    """If the ledger does not answer, the error of the block has what this machine may spend meanwhile."""
    try:
        yield
    except LedgerError as error:
        from quota.reports.status import with_allowances  # late: few commands need it

        raise with_allowances(error, session) from error


# -- tables ------------------------------------------------------------------------------------------------------------


def render_parts(parts: Iterable[Part]) -> RenderableType:
    """Render lines and tables. A line is folded where it is too long; if it begins with spaces, all is indented."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    from quota.wording import Line  # late: few commands draw a table

    drawn: list[RenderableType] = []
    for part in parts:
        if not isinstance(part, Line):
            drawn.append(FirstThatFits(part))
            continue
        text = part.text.lstrip(" ")
        paragraph = Text(printable(text), _TONE_STYLE[part.tone], overflow="fold")
        indent = len(part.text) - len(text)
        drawn.append(Padding(paragraph, (0, 0, 0, indent), expand=False) if indent else paragraph)
    return Group(*drawn)


_TONE_STYLE = {
    "": "",
    "strong": "bold",
    "note": "yellow",
    "bad": "red",
    "verdict": "bold red",
    "open": "bold green",
    "good": "green",
}


class FirstThatFits(NamedTuple):
    """A table in the first of its layouts that fits the width; in the last one if none does."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        lines: list[Text] = []
        for lines in layouts(self.table):
            if lines[0].cell_len <= options.max_width:
                break
        yield from lines


ANY_WIDTH = 10_000
"""More than any line has."""

_FOLDS = (40, 32, 24, 16, 12)
_LAYOUTS = ((3, 0), (2, 0), (1, 0), *((1, fold) for fold in _FOLDS))
"""The spaces between the columns, and to how many characters their cells are folded (0: not)."""

MAX_JOINED = 30
"""The longest value in a joined column. A single long name would push out the other columns."""

_PIECE = r"\d{4}-\d\d-\d\dT|(?:[^ @/._-]|(?<=\d)-(?=\d))*[ @/._-]*"
"""A word with the separators after it. A date is one word, also with a time after it."""


def layouts(table: Table) -> Iterator[list[Text]]:
    """The lines of the same table, narrower each time: first with less space between the columns, then with cells
    folded between words, then with the columns in `joined` as one, then without the columns in `without`, one after the
    other, then with long words broken, at last unfolded. The lines of a layout are equally wide. Cells are plain text,
    and numbers are aligned right.
    """
    forms = [table._replace(joined=(), without=()), _joined(table)] if table.joined else [table]
    for form in forms:
        for least in dict.fromkeys((form.least_fold, 0)):
            for left_out in range(len(form.without) + 1):
                columns = [n for n in form.shown if n not in form.without[:left_out]]
                for between, maximum in _LAYOUTS:
                    if not maximum or maximum >= least:
                        yield _lines(form, columns, between, maximum)
    for maximum in (*_FOLDS, *range(10, 1, -1), 0):
        yield _lines(forms[-1], columns, 1, maximum, breaks=True)


def _joined(table: Table) -> Table:
    """The same table, whose `joined` columns share the column of the first of them. Long values are cut."""
    first, *others = [n for n in table.joined if n in table.shown]

    def join(cells: Sequence[str]) -> Sequence[str]:
        together = " ".join(shorten(cells[n], MAX_JOINED) for n in (first, *others) if cells[n])
        return [together if n == first else "" if n in others else cell for n, cell in enumerate(cells)]

    return table._replace(
        headings=join(table.headings),
        rows=[*map(join, table.rows)],
        footer=join(table.footer) if table.footer else (),
    )


def _lines(table: Table, columns: Sequence[int], between: int, maximum: int, *, breaks: bool = False) -> list[Text]:
    """The lines of these columns of a table, with so many spaces `between` them, and with cells folded to `maximum`
    characters (0: not folded), as `fold` does it. Numbers and `whole` columns are never folded."""
    from rich.cells import cell_len
    from rich.text import Text

    unfolded = {*table.whole, *table.numbers}
    heading = [fold(printable(table.headings[n]), 0 if n in table.whole else maximum, breaks) for n in columns]
    rows = [[fold(printable(row[n]), 0 if n in unfolded else maximum, breaks) for n in columns] for row in table.rows]
    footer = [[[table.footer[n]] for n in columns]] if table.footer else []
    each_column = zip(heading, *rows, *footer, strict=True)
    widths = [max(cell_len(text) for cell in cells for text in cell) for cells in each_column]

    def drawn(cells: Sequence[Sequence[str]], style: str) -> Iterator[Text]:
        for texts in zip_longest(*cells, fillvalue=""):
            padded = []
            for n, text, width in zip(columns, texts, widths, strict=True):
                spaces = " " * (width - cell_len(text))
                padded.append(spaces + text if n in table.numbers else text + spaces)
            yield Text((" " * between).join(padded), style, no_wrap=True, overflow="ignore")

    lines = [*drawn([cell[::-1] for cell in heading], "bold")][::-1]  # the last lines of all headings are on one line
    lines.append(Text(("\u2500" if takes_unicode() else "-") * (sum(widths) + between * (len(columns) - 1))))
    for cells, tone in zip(rows, table.tones or [""] * len(rows), strict=True):
        lines += drawn(cells, _TONE_STYLE[tone])
    for cells in footer:
        lines += [Text(), *drawn(cells, "bold")]
    return lines


def fold(text: str, maximum: int, breaks: bool) -> list[str]:
    """`text` in lines of at most `maximum` characters (0: one line), broken between words only; if it `breaks`, also
    within longer words."""
    lines, piece = [""], f".{{1,{maximum if breaks else ''}}}"
    for word in re.findall(_PIECE, text) if maximum else ():
        for part in re.findall(piece, word):
            if lines[-1] and len(lines[-1]) + len(part.rstrip()) > maximum:
                lines.append("")
            lines[-1] += part
    return [line.rstrip() for line in lines] if maximum else [text.rstrip()]


# -- failing and logging -----------------------------------------------------------------------------------------------


def fail(message: str) -> None:
    """One line on stderr, without secrets and control characters. A very long line is cut in the middle."""
    from quota.common.redact import redact

    text = printable(" ".join(redact(message).splitlines()))
    if len(text) > MAX_LINE:
        text = f"{text[: MAX_LINE - 200]}...{text[-197:]}"
    click.echo(f"quota: {text}", err=True)


def fail_each(error: ConfigError) -> int:
    """A line on stderr for each of the first mistakes. Returns the exit status."""
    from quota.settings.books import MAX_MISTAKES  # late: few commands list mistakes

    for mistake in error.mistakes[:MAX_MISTAKES] or (str(error),):
        fail(mistake)
    if more := error.mistakes[MAX_MISTAKES:]:
        fail(f"and {many(len(more), 'more mistake')}")
    return error.exit_status


@contextmanager
def temporary_folder(name: str) -> Iterator[str]:
    """A folder that ends with the block, also after a signal. Raises ConfigError if none can be made."""
    from tempfile import TemporaryDirectory  # late: few commands need one

    with unwound():
        try:
            folder = TemporaryDirectory(prefix=f"quota-{name}-")
        except OSError as error:
            raise ConfigError(
                f"no temporary folder can be made ({error.strerror}); set TMPDIR to a folder for it"
            ) from error
        with folder as path:
            yield path


def log_to_stderr(formatter: logging.Formatter | None = None) -> None:
    """Warnings on stderr as `quota: ...`; with QUOTA_LOG=info or debug the whole log. Secrets are redacted.

    With QUOTA_LOG_FORMAT=json each line is an object. Otherwise `formatter` writes the line, if there is a formatter.

    Commands that load `logging` anyway call this; any other command calls it for its first warning. A refused `quota
    charge` does not load `logging`.
    """
    import logging

    from quota.common.log_lines import JsonFormatter, LineFormatter, install

    level = _chosen("QUOTA_LOG", LOG_LEVELS)
    handler = logging.StreamHandler()
    shown = "%(asctime)s %(levelname)s %(name)s %(message)s" if level else "quota: %(message)s"
    handler.setFormatter(formatter or LineFormatter(shown))
    if _chosen("QUOTA_LOG_FORMAT", LOG_FORMATS) == "json":
        handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=(level or "warning").upper(), handlers=[handler], force=formatter is not None)
    install()
    quiet_libraries()


def _chosen(variable: str, choices: tuple[str, ...]) -> str:
    """The value of an environment variable, in small letters; "" if it is not set. Raises ConfigError."""
    value = os.environ.get(variable, "").lower()
    if value not in ("", *choices):
        raise ConfigError(f"{variable}={show(value)}: choose from {', '.join(choices)}; see `quota --help`")
    return value


def quiet_libraries() -> None:
    """Silence libraries that warn of upstream's error answers: the command explains them itself."""
    import logging

    if not os.environ.get("QUOTA_LOG"):
        logging.getLogger("googleapiclient.http").setLevel(logging.ERROR)


# -- standard output and error -----------------------------------------------------------------------------------------


class _Output(io.FileIO):
    """Standard output or error. A failure to print never stops a command: the text is dropped, and `lost` says why."""

    lost: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
            if written is None:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        except OSError as error:
            self.lost = error
            return len(data)
        return written

    def close(self) -> None:
        """A user's function may close a stream, or a wrapper of its own around it, and a line of ours may follow."""


class _Buffer(io.BufferedWriter):
    def close(self) -> None:
        self.flush()


def guard_streams() -> None:
    """Make sure that printing and logging never raise, whatever standard output and error are."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # It is closed. The next file that we open would get this number, and with it the output. Open a dummy.
            os.open(os.devnull, os.O_RDONLY)
    for number, name in ((1, "stdout"), (2, "stderr")):
        before = getattr(sys, name)  # None if it was closed
        file = _Buffer(_Output(number, "w", closefd=False))
        encoding, errors = getattr(before, "encoding", None), getattr(before, "errors", None)
        buffering = getattr(before, "line_buffering", False)
        setattr(sys, name, io.TextIOWrapper(file, encoding, errors, line_buffering=buffering))


@contextmanager
def handling(handlers: Mapping[int, Any]) -> Iterator[None]:
    """Handle these signals so during the block, and as before after it."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def unwound() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block by an exception, as Ctrl-C does, so that it can undo its work. An ignored
    signal stays ignored."""
    ending = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]

    def end(number: int, _: object) -> None:
        for each in ending:
            signal.signal(each, signal.SIG_IGN)  # a second signal must not interrupt that
        raise SystemExit(128 + number)

    with handling(dict.fromkeys(ending, end)):
        yield


def output_lost() -> OSError | None:
    """The error that stopped output to stdout; None if everything was written."""
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    lost: OSError | None = getattr(raw, "lost", None)
    return lost


def unprinted(result: str = "") -> bool:
    """Whether output to stdout was lost. If so, it prints a line on stderr, with the `result` that was lost.

    A reader that closed the pipe (`quota status | head -1`) has everything it wanted: nothing was lost.
    """
    lost = output_lost()
    if lost is None or lost.errno == errno.EPIPE:
        return False
    sys.stdout = io.StringIO()  # so that nobody reports it again
    fail(f"stdout cannot be written: {lost.strerror}" + (f"; {result}" if result else ""))
    return True
