"""Read TOML strictly: only known keys, only values of the right kind, every error one line that names the place.

    TomlTable                    one table of a file; `read` returns what a key holds, or raises ConfigError
    Keys                         the keys of one sort of table, with their kinds
    Text, Name, Label, Span      texts: any, part of a key in the ledger, shown beside charges, a duration
    Whole, Flag, Day             whole numbers, true or false, a date
    Texts                        an array of texts, distinct except in a command
    Table, Rows, Values          a table, an array of tables, values by name
    Either                       one of several kinds, by the type of the value
    Needs, Apart, Some           rules about several keys of a table

A message reads `quota.toml: credentials.main.limits[1].windw: unknown key; did you mean 'window'?`

Neither pydantic nor msgspec names the nearest key or the environment variable of a value, and msgspec names no key of a
table of names (`credentials[...]`). To import pydantic takes a cron tick ten times as long as to read its file.

`schema_of` makes the JSON Schema. A schema sees one file only: the reader alone checks that a name exists, that a path
is there, or that a number is below another.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import date, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from quota.common.files import read_named
from quota.common.text import listed, nearest, one_line, show
from quota.errors import ConfigError, QuotaError
from quota.terms.limits import DAY_MS, MAX_UNITS, parse_duration

Schema = dict[str, Any]

NAME = r"[A-Za-z0-9._:-]{1,64}"
MISSING = "missing; the key is required"

_DERIVED: dict[type[Any], type[Any]] = {int: bool, date: datetime}
"""Python derives these types from others. In TOML, true is no number, and a time no date."""

_SCHEMA_TYPES = {bool: "boolean", int: "integer", str: "string", list: "array"}


def dotted(path: str, key: str) -> str:
    """The path of a key in a table, always short and on one line."""
    shown = key if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", key) else show(key)
    return f"{path}.{shown}" if path else shown


@dataclass(eq=False, repr=False)
class Kind:
    """What a key may hold: any value. `about` describes the key, also in an editor. `default` is the value without the
    key, as a file would write it; None: it is `unset`. An error for a missing key shows the `example`. A
    value that is not `of_type`, or that is empty and may not be `blank`, raises an error that names `wanted`."""

    about: str = ""
    _: KW_ONLY
    default: Any = None
    required: bool = False
    example: str = ""
    of_type: type[Any] = object
    wanted: str = ""
    unset: Any = None
    blank: bool = True

    def read(self, table: TomlTable, key: str) -> Any:
        """The value at a key of the table. Raises ConfigError."""
        value = table.value(key)
        if not self.takes(value):
            raise table.error(f"{self.wanted} is needed", key)  # not the value: it may be a secret
        return self.parse(table, value, key)

    def takes(self, value: Any) -> bool:
        """Whether the value has the right type, and is not empty where it must not be."""
        is_right = isinstance(value, self.of_type) and not isinstance(value, _DERIVED.get(self.of_type, ()))
        return is_right and (self.blank or bool(value))

    def parse(self, table: TomlTable, value: Any, key: str = "", index: int | None = None) -> Any:
        """What a value of the right type means: at a key, in an array, or as the key of a table. Raises ConfigError."""
        return value


class Keys(dict[str, Any]):
    """The keys of one sort of table, with their kinds, and rules about several keys. Further keys have the kind
    `others`; None: there are no further keys."""

    def __init__(self, kinds: Mapping[str, Kind], *rules: Needs | Apart | Some, others: Kind | None = None) -> None:
        super().__init__(kinds)
        self.rules = rules
        self.others = others


NOTHING = Kind()
ANY = Keys({}, others=NOTHING)
"""For a table whose keys are names."""


@dataclass(repr=False)
class TomlTable:
    """One table of a TOML file. It may have only these `keys`.

    A table is checked before it is read, so that a misspelt key is reported as misspelt, not as missing: `inner` does
    it, and whoever makes the root calls `check`. `places` has a hint for each key that belongs in another table.
    `variables` has the environment variable of each path that a variable set. Paths in the table are relative to
    `folder`.
    """

    data: Mapping[str, Any]
    source: str
    path: str = ""
    keys: Keys = field(default_factory=lambda: ANY)
    _: KW_ONLY
    places: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    folder: Path = Path()

    def misspelt(self) -> list[str]:
        """The unknown keys."""
        further = [key for key in self.data if key not in self.keys]
        if self.keys.others is None:
            return further
        # If further keys name tables, any other value is a misspelt key.
        are_tables = self.keys and isinstance(self.keys.others, Table)
        return [key for key in further if are_tables and not isinstance(self.data[key], dict)]

    def check(self) -> None:
        """Raise ConfigError for unknown keys, and for a broken rule."""
        choices = f"known: {listed(self.keys)}"
        hints = {key: self.places.get(key) or nearest(key, self.keys, choices) for key in self.misspelt()}
        if len(hints) == 1:
            (key,) = hints
            raise self.error(f"unknown key; {hints[key]}", key)
        if hints:
            each = [
                dotted("", key) if hint == choices else f"{dotted('', key)} ({hint})" for key, hint in hints.items()
            ]
            ending = f"; {choices}" if choices in hints.values() else ""
            raise self.error(f"unknown keys: {listed(each)}{ending}")
        for rule in self.keys.rules:
            rule.check(self)

    def read(self, key: str) -> Any:
        """The value of a key as its kind reads it, or the default. Raises ConfigError."""
        kind = self.keys.get(key, self.keys.others)
        assert kind is not None  # noqa: S101  # `check` refused unknown keys
        if key in self.data or kind.required:
            return kind.read(self, key)
        if isinstance(kind, Table) and kind.empty:
            return self.inner({}, key, kind.keys)
        return kind.unset if kind.default is None else kind.parse(self, kind.default, key)

    def members(self, keys: str) -> dict[str, Any]:
        """The values of these keys, as `read` gives them. `keys` has a space between two keys."""
        return {key: self.read(key) for key in keys.split()}

    def all(self) -> dict[str, Any]:
        """The values of all keys in the file, as `read` gives them."""
        return {key: self.read(key) for key in self.data}

    def choose(self, key: str, choices: Collection[str]) -> Any:
        """The text of a key, which must be one of these choices. Raises ConfigError."""
        text = self.read(key)
        if text is not None:
            self.check_choice(text, choices, key, f"{show(text)} is not allowed here")
        return text

    def value(self, key: str) -> Any:
        """The value of a required key as the file has it."""
        if key not in self.data:
            example = self.keys[key].example if key in self.keys else ""
            raise self.error(f"{MISSING}, for example {example}" if example else MISSING, key)
        return self.data[key]

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def inner(self, value: object, key: str, keys: Keys = ANY, index: int | None = None) -> TomlTable:
        """`value`, found at `key`, as a checked table."""
        if not isinstance(value, dict):
            raise self.error("a table is needed", key)
        path = dotted(self.path, key) + ("" if index is None else f"[{index}]")
        table = replace(self, data=value, path=path, keys=keys)
        table.check()
        return table

    # -- errors ------------------------------------------------------------------------------------------------------

    def error(self, message: str, key: str = "", index: int | None = None) -> ConfigError:
        """A ConfigError about a key of this table, or about the table."""
        where = dotted(self.path, key) if key else self.path
        if index is not None:
            where += f"[{index}]"
        for named, variable in self.variables.items():
            if where == named or (where.startswith(named) and where[len(named)] in ".["):
                inside = "" if where == named else f"{where}: "
                return ConfigError(f"environment variable {variable}: {inside}{message}")
        begun = [variable for named, variable in self.variables.items() if named.startswith(f"{self.path}.")]
        if message.startswith("missing") and begun and len(begun) >= len(self.data.keys() - {"name"}):
            message += f"; {begun[0]} began this table, which the file does not have"
        return ConfigError(f"{self.source}: {where}: {message}" if where else f"{self.source}: {message}")

    def check_choice(self, text: str, choices: Collection[str], key: str, says: str, index: int | None = None) -> None:
        """Raise the ConfigError that `says` so, and names the nearest choice, if the text is none of these choices."""
        if text not in choices:
            raise self.error(f"{says}; {nearest(text, choices)}", key, index)

    @contextmanager
    def blamed(self, key: str, index: int | None = None) -> Iterator[None]:
        """Raise an error inside this block as a ConfigError about the key."""
        try:
            yield
        except (QuotaError, ValueError) as error:
            blamed = self.error(str(error), key, index)
            blamed.mistakes = tuple(str(self.error(text, key, index)) for text in getattr(error, "mistakes", ()))
            raise blamed from None


# -- what a key may hold -----------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False, kw_only=True)
class Text(Kind):
    """A text that is not empty. If it does not match `pattern`, the message is `says`, with the text for {text};
    without `says`, `reads` checks it, and returns what the text means. Nothing shows a `secret`. With `blank`, an empty
    text reads as None."""

    choices: tuple[str, ...] = ()
    pattern: str = ""
    says: str = ""
    secret: bool = False
    reads: Callable[[TomlTable, str, str, int | None], Any] | None = None
    blank: bool = False
    of_type: type[Any] = str
    wanted: str = "a non-empty string"

    def parse(self, table: TomlTable, value: str, key: str = "", index: int | None = None) -> Any:
        if self.blank and not value:
            return None
        if self.choices:
            table.check_choice(value, self.choices, key, f"{show(value)} is not allowed here")
        if self.says and not re.fullmatch(self.pattern, value):
            raise table.error(self.says.replace("{text}", show(value)), key, index)
        return value if self.reads is None else self.reads(table, value, key, index)


Name = partial(Text, pattern=NAME, says="a name here has 1 to 64 characters out of A-Z a-z 0-9 . _ : -")
"""A name that becomes part of a key in the ledger."""


def read_label(table: TomlTable, text: str, key: str, index: int | None = None) -> str:
    """Raises ConfigError unless the text can be a Label."""
    if not 1 <= len(text) <= 64 or not text.isprintable():
        raise table.error(f"{show(text)}: a name has 1 to 64 printable characters", key, index)
    return text


Label = partial(Text, pattern=r"[^\u0000-\u001f\u007f]{1,64}", reads=read_label)
"""A name that is stored with charges or shown with them."""


@dataclass(eq=False, repr=False)
class Span(Text):
    """A duration of at most `most_days`, read as ms."""

    most_days: int = 3650
    pattern: str = r"\s*0*[1-9][0-9]*\s*(ms|s|m|h|d)\s*"
    wanted: str = 'a duration such as "24h"'

    def parse(self, table: TomlTable, value: str, key: str = "", index: int | None = None) -> Any:
        with table.blamed(key):
            duration_ms = parse_duration(value)
        if duration_ms > self.most_days * DAY_MS:
            raise table.error(f"{show(value)} is longer than {self.most_days} days", key)
        return duration_ms


@dataclass(eq=False, repr=False, kw_only=True)
class Whole(Kind):
    """A whole number. If it is out of bounds, the message is `says`, or names the bounds."""

    minimum: int = 1
    maximum: int = MAX_UNITS
    says: str = ""
    of_type: type[Any] = int
    wanted: str = "a whole number"

    def parse(self, table: TomlTable, value: int, key: str = "", index: int | None = None) -> Any:
        if not self.minimum <= value <= self.maximum:
            bounds = f"{show(value)} is not a whole number from {self.minimum} to {self.maximum}"
            raise table.error(self.says or bounds, key)
        return value


Flag = partial(Kind, of_type=bool, wanted="true or false", default=False)
"""True or false."""

Day = partial(Kind, of_type=date, wanted="a date such as 2026-06-01")
"""A date without a time."""


@dataclass(eq=False, repr=False, kw_only=True)
class Texts(Kind):
    """An array of texts, `each` of this kind. `several`: a text may appear twice."""

    each: Text = field(default_factory=Text)
    several: bool = False
    of_type: type[Any] = list
    wanted: str = "an array of strings"
    unset: Any = ()

    def takes(self, value: Any) -> bool:
        return super().takes(value) and all(isinstance(text, str) for text in value)

    def parse(self, table: TomlTable, value: list[str], key: str = "", index: int | None = None) -> Any:
        if not value:
            raise table.error("an empty array selects nothing; remove the key or add a name", key)
        seen: set[str] = set()
        for n, text in enumerate(value):
            if not self.each.takes(text):
                raise table.error(f"{self.each.wanted} is needed", key, n)
            if text in seen and not self.several:
                raise table.error(f"{show(text)} appears twice", key, n)
            seen.add(text)
        return tuple([self.each.parse(table, text, key, n) for n, text in enumerate(value)])


@dataclass(eq=False, repr=False)
class Table(Kind):
    """A table with these keys. `empty`: if the key is missing, an empty table is read."""

    keys: Keys = field(default_factory=lambda: ANY)
    _: KW_ONLY
    empty: bool = False
    of_type: type[Any] = dict
    wanted: str = "a table"

    def parse(self, table: TomlTable, value: Any, key: str = "", index: int | None = None) -> Any:
        return table.inner(value, key, self.keys)


@dataclass(eq=False, repr=False, kw_only=True)
class Rows(Table):
    """An array of tables with these keys. If it has more than `most`, the message is `says`."""

    most: int = MAX_UNITS
    says: str = ""
    of_type: type[Any] = list
    wanted: str = "a non-empty array of tables"
    unset: Any = ()
    blank: bool = False

    def parse(self, table: TomlTable, value: Any, key: str = "", index: int | None = None) -> Any:
        rows = [table.inner(row, key, self.keys, n) for n, row in enumerate(value)]
        if len(rows) > self.most:
            raise table.error(self.says.format(count=len(rows)), key)
        return rows


@dataclass(eq=False, repr=False, kw_only=True)
class Values(Table):
    """Values of one kind, by name: `least` or more. `TomlTable.all` reads them."""

    each: Kind = NOTHING
    names: Text = field(default_factory=Text)
    least: int = 0
    empty: bool = True

    def __post_init__(self) -> None:
        self.keys = Keys({}, others=self.each)

    def parse(self, table: TomlTable, value: Any, key: str = "", index: int | None = None) -> Any:
        values = table.inner(value, key, self.keys)
        for name in value:
            self.names.parse(values.inner({}, name), name)
        return values


@dataclass(eq=False, repr=False)
class Either(Kind):
    """One of these kinds, by the type of the value. The last kind reports a value of any other type."""

    kinds: tuple[Kind, ...] = ()

    def kind_of(self, value: object) -> Kind:
        return next((kind for kind in self.kinds if type(value) is kind.of_type), self.kinds[-1])

    def read(self, table: TomlTable, key: str) -> Any:
        return self.kind_of(table.value(key)).read(table, key)


def tables_in(kind: Kind, value: Any, path: str) -> list[tuple[str, Keys, Any]]:
    """The tables in a value of a kind: the path of each, its possible keys, and its value."""
    if isinstance(kind, Rows) and isinstance(value, list):
        return [(f"{path}[{index}]", kind.keys, row) for index, row in enumerate(value)]
    return [(path, kind.keys, value)] if isinstance(kind, Table) else []


# -- rules about several keys ------------------------------------------------------------------------------------------


class Needs(NamedTuple):
    """Each of these keys needs the key `needed`. The message is about the first such key, or about the key `at`."""

    keys: tuple[str, ...]
    needed: str
    says: str
    at: str = ""

    def check(self, table: TomlTable) -> None:
        for key in self.keys:
            if key in table and self.needed not in table:
                raise table.error(self.says, self.at or key)


class Apart(NamedTuple):
    """A key that cannot stand beside some others. `says` has a place for the `{other}` key."""

    key: str
    others: tuple[str, ...]
    says: str
    at_other: bool = False

    def check(self, table: TomlTable) -> None:
        for other in self.others:
            if self.key in table and other in table:
                raise table.error(self.says.format(other=other), other if self.at_other else self.key)


class Some(NamedTuple):
    """At least one of these sets of keys must be there. The message is about the key that the last set misses."""

    sets: tuple[tuple[str, ...], ...]
    says: str

    def check(self, table: TomlTable) -> None:
        if not any(all(key in table for key in keys) for keys in self.sets):
            raise table.error(self.says, next(key for key in self.sets[-1] if key not in table))


# -- schemas -----------------------------------------------------------------------------------------------------------


def _schema(kind: Kind) -> Schema:
    """The JSON Schema of a value of this kind."""
    form: Schema = {"type": _SCHEMA_TYPES[kind.of_type]} if kind.of_type in _SCHEMA_TYPES else {}
    if isinstance(kind, Text) and kind.choices:
        form["enum"] = list(kind.choices)
    elif isinstance(kind, Text):
        form |= {"pattern": f"^({kind.pattern})$"} if kind.pattern else {"minLength": 1}
    elif isinstance(kind, Whole):
        form |= {"minimum": kind.minimum, "maximum": kind.maximum}
    elif isinstance(kind, Texts):
        form |= {"items": _schema(kind.each), "minItems": 1, **({} if kind.several else {"uniqueItems": True})}
    elif isinstance(kind, Rows):
        form |= {"minItems": 1, "items": schema_of(kind.keys)}
    elif isinstance(kind, Values):
        least = {"minProperties": kind.least} if kind.least else {}
        names, each = _schema(kind.names), _schema(kind.each)
        form = {"type": "object", **least, "propertyNames": names, "additionalProperties": each}
    elif isinstance(kind, Table):
        form = schema_of(kind.keys)
    elif isinstance(kind, Either):
        form = {"anyOf": [_schema(inner) for inner in kind.kinds]}
    description = {"description": kind.about} if kind.about else {}
    return description | form | ({} if kind.default is None else {"default": kind.default})


def schema_of(keys: Keys) -> Schema:
    """The JSON Schema of a table with these keys."""
    required = [key for key, kind in keys.items() if kind.required]
    together: list[Schema] = []
    for rule in keys.rules:
        if isinstance(rule, Needs):
            together.append({"dependencies": {key: [rule.needed] for key in rule.keys}})
        elif isinstance(rule, Apart):
            others = [{"required": [other]} for other in rule.others]
            together.append({"not": {"required": [rule.key], "anyOf": others}})
        else:
            together.append({"anyOf": [{"required": list(each)} for each in rule.sets]})
    return {
        "type": "object",
        "properties": {key: _schema(kind) for key, kind in keys.items()},
        "additionalProperties": False if keys.others is None else _schema(keys.others),
        **({"required": required} if required else {}),
        **({"allOf": together} if together else {}),
    }


# -- files -------------------------------------------------------------------------------------------------------------

MAX_FILE_BYTES = 1 << 20


def read_file(path: Path) -> str:
    """The text of a TOML file. Raises ConfigError, on one line, if it cannot be read."""
    try:
        data = read_named(path, MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # a ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{one_line(path)}: cannot be read: {reason}") from error
    if len(data) > MAX_FILE_BYTES:
        remedy = "give some credentials, with their jobs, a file of their own"
        raise ConfigError(f"{one_line(path)}: larger than {MAX_FILE_BYTES >> 10} KiB; {remedy}")
    try:
        return data.decode("utf-8-sig")  # some editors add a byte order mark
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{one_line(path)}: line {line}: not UTF-8 text; save the file as UTF-8") from None


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises ConfigError, on one line, with the number of the broken line."""
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"{source}: not TOML: {one_line(error)}") from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deep") from None


def in_toml(text: str) -> str:
    """A text as TOML writes it, with what cannot be printed escaped. JSON would escape half characters."""
    import json  # late: only what writes TOML needs it

    return "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in json.dumps(text, ensure_ascii=False))
