"""Read TOML strictly: only known keys, only values of the right kind, every error one line that names the place.

    TomlTable                    one table of a file; `read` returns what a key holds, or raises ConfigError
    Keys                         the keys of one sort of table, with their kinds
    Text, Name, Label, Span      texts: any, part of a key in the ledger, shown beside charges, a duration
    Whole, Flag, Day             whole numbers, true or false, a date
    Texts                        an array of texts, distinct except in a command
    Table, Named, Rows, Values   a table, tables by name, an array of tables, values by name
    Either                       one of several kinds, by the type of the value
    Needs, Apart, Some           rules about several keys of a table

A message reads `quota.toml: credentials.main.limits[1].windw: unknown key; did you mean 'window'?`

Each kind also gives its JSON Schema. A schema sees one file only: the reader alone checks that a name exists, that a
path is there, or that a number is below another.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from datetime import date, datetime, time
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

from quota.common.files import read_named
from quota.common.text import listed, nearest, one_line, show
from quota.errors import ConfigError, QuotaError
from quota.terms.limits import DAY_MS, MAX_UNITS, format_duration, parse_duration

Schema = dict[str, Any]

NAME = r"[A-Za-z0-9._:-]{1,64}"

NO_PLACES: Mapping[str, str] = MappingProxyType({})

_TYPES = {
    bool: "a boolean",
    int: "a number",
    float: "a number with a fraction",
    str: "a string",
    list: "an array",
    dict: "a table",
    **dict.fromkeys((date, datetime, time), "a date or time"),
}


def dotted(path: str, key: str) -> str:
    """The path of a key in a table, always short and on one line."""
    shown = key if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", key) else show(key)
    return f"{path}.{shown}" if path else shown


@dataclass(eq=False, repr=False)
class Kind:
    """What a key may hold: any value. `about` describes the key, also in an editor. `default` is the value without the
    key, as a file would write it; None: no value."""

    about: str = ""
    _: KW_ONLY
    default: Any = None
    required: bool = False
    of_type: ClassVar[type[Any]] = object

    def read(self, table: TomlTable, key: str) -> Any:
        """The value at a key of the table. Raises ConfigError."""
        return table.value(key)

    def absent(self, table: TomlTable, key: str) -> Any:
        """The value without the key."""
        return self.default

    def tables(self, value: Any, path: str) -> Iterable[tuple[str, Keys, Any]]:
        """The tables in a value: the path of each, its possible keys, and its value."""
        return ()

    def form(self) -> Schema:
        """The schema without description and default."""
        return {}

    def schema(self) -> Schema:
        """The JSON Schema of the value."""
        description = {"description": self.about} if self.about else {}
        return description | self.form() | ({} if self.default is None else {"default": self.default})


class Rule(Protocol):
    """A rule about several keys of a table."""

    def check(self, table: TomlTable) -> None: ...
    def schema(self) -> Schema: ...


class Keys(dict[str, Any]):
    """The keys of one sort of table, with their kinds, and rules about several keys. Further keys have the kind
    `others`; None: there are no further keys."""

    def __init__(self, kinds: Mapping[str, Kind], *rules: Rule, others: Kind | None = None) -> None:
        super().__init__(kinds)
        self.rules = rules
        self.others = others

    def unknown(self, data: Mapping[str, Any]) -> list[str]:
        """The keys of a table that it may not have. If further keys name tables, any other value is a misspelt key."""
        further = [key for key in data if key not in self]
        if isinstance(self.others, Table):
            return [key for key in further if not isinstance(data[key], dict)]
        return further if self.others is None else []

    def with_unknown(self, data: object, path: str = "") -> Iterator[tuple[str, list[str], Keys]]:
        """Each table with unknown keys, from this table on: its path, these keys, and the keys that it may have."""
        if not isinstance(data, dict):
            return
        if unknown := self.unknown(data):
            yield path, unknown, self
        for key in data:
            for at, keys, inner in self.get(key, self.others or NOTHING).tables(data[key], dotted(path, key)):
                yield from keys.with_unknown(inner, at)


NOTHING = Kind()
ANY = Keys({}, others=NOTHING)
"""For a table whose keys are names."""


class TomlTable:
    """One table of a TOML file. It may have only these `keys`.

    The keys are checked first, so a misspelt key is reported as misspelt, not as missing. `places` has a hint for each
    key that belongs in another table. `variables` has the environment variable of each path that a variable set.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        source: str,
        path: str = "",
        keys: Keys = ANY,
        places: Mapping[str, str] = NO_PLACES,
        variables: Mapping[str, str] = NO_PLACES,
    ) -> None:
        self._data = data
        self.source = source
        self.path = path
        self._keys = keys
        self._places = places
        self.variables = variables
        self._check_unknown()
        for rule in keys.rules:
            rule.check(self)

    def _check_unknown(self) -> None:
        """Raise ConfigError for unknown keys: of this table, or of all tables if this is the whole file."""
        rows = [(show(key), key, self._keys) for key in self._keys.unknown(self._data)]
        tables = [] if self.path else [*self._keys.with_unknown(self._data)]
        if len(tables) > 1:
            rows = [(dotted(at, key), key, keys) for at, unknown, keys in tables for key in unknown]
        hints = ((shown, key, self._places.get(key) or nearest(key, keys)) for shown, key, keys in rows)
        if len(rows) == 1:
            _, key, hint = next(hints)
            raise self.error(f"unknown key; {hint}", key)
        if rows:
            raise self.error(f"unknown keys: {listed(f'{shown} ({hint})' for shown, _, hint in hints)}")

    def read(self, key: str) -> Any:
        """The value of a key as its kind reads it, or the default. Raises ConfigError."""
        kind = self._keys.get(key, self._keys.others)
        assert kind is not None  # noqa: S101  # `__init__` refused unknown keys
        if key in self._data:
            return kind.read(self, key)
        if kind.required:
            self.value(key)
        return kind.absent(self, key)

    def members(self, keys: str) -> dict[str, Any]:
        """The values of these keys, as `read` gives them. `keys` has a space between two keys."""
        return {key: self.read(key) for key in keys.split()}

    def choose(self, key: str, choices: Iterable[str]) -> Any:
        """The text of a key, which must be one of these choices. Raises ConfigError."""
        text = self.read(key)
        if text is not None:
            self.check_choice(key, text, tuple(choices))
        return text

    def value(self, key: str) -> Any:
        """The value of a required key as the file has it."""
        if key not in self._data:
            raise self.error("missing; the key is required", key)
        return self._data[key]

    def items(self) -> Iterable[tuple[str, Any]]:
        """The keys with their values, as the file has them."""
        return self._data.items()

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def inner(self, value: object, key: str, keys: Keys = ANY, index: int | None = None) -> TomlTable:
        """`value`, found at `key`, as a table."""
        if not isinstance(value, dict):
            raise self.type_error(key, value, "a table")
        path = self.at(key) + ("" if index is None else f"[{index}]")
        return TomlTable(value, self.source, path, keys, self._places, self.variables)

    def at(self, key: str) -> str:
        """The dotted path of a key, always short and on one line."""
        return dotted(self.path, key)

    # -- errors ------------------------------------------------------------------------------------------------------

    def error(self, message: str, key: str = "", index: int | None = None) -> ConfigError:
        """A ConfigError about a key of this table, or about the table."""
        where = self.at(key) if key else self.path
        if index is not None:
            where += f"[{index}]"
        if self.variables:
            for path, variable in self.variables.items():
                if where == path or (where.startswith(path) and where[len(path)] in ".["):
                    inside = "" if where == path else f"{where}: "
                    return ConfigError(f"environment variable {variable}: {inside}{message}")
        return ConfigError(f"{self.source}: {where}: {message}" if where else f"{self.source}: {message}")

    def type_error(self, key: str, value: object, wanted: str) -> ConfigError:
        """A ConfigError about a value of the wrong type. It never shows a string, which could be a secret."""
        if value in ("", []):
            got = "an empty string" if value == "" else "an empty array"
        else:
            got = _TYPES.get(type(value), f"a {type(value).__name__}")
        return self.error(f"{got} where {wanted} is needed", key)

    def check_choice(self, key: str, text: str, choices: tuple[str, ...]) -> None:
        if text not in choices:
            raise self.error(f"{show(text)} is not allowed here; {nearest(text, choices)}", key)

    @contextmanager
    def blamed(self, key: str, index: int | None = None) -> Iterator[None]:
        """Raise an error inside this block as a ConfigError about the key."""
        try:
            yield
        except (QuotaError, ValueError) as error:
            raise self.error(str(error), key, index) from None


# -- what a key may hold -----------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class Text(Kind):
    """A text that is not empty. If it does not match `pattern`, the message is `says`, with the text for {text};
    without `says`, a caller checks the pattern. Nothing shows a `secret`. With `blank`, an empty text reads as None."""

    _: KW_ONLY
    choices: tuple[str, ...] = ()
    pattern: str = ""
    says: str = ""
    secret: bool = False
    blank: bool = False
    of_type: ClassVar[type[Any]] = str

    def read(self, table: TomlTable, key: str) -> Any:
        text = table.value(key)
        if self.blank and text == "":
            return None
        if not isinstance(text, str) or not text:
            raise table.type_error(key, text, "a non-empty string")
        if self.choices:
            table.check_choice(key, text, self.choices)
        return self.parse(table, text, key)

    def parse(self, table: TomlTable, text: str, key: str = "", index: int | None = None) -> Any:
        """The value of a text: at a key, in an array, or as the key of a table."""
        if self.says and not re.fullmatch(self.pattern, text):
            raise table.error(self.says.replace("{text}", show(text)), key, index)
        return text

    def form(self) -> Schema:
        if self.choices:
            return {"type": "string", "enum": list(self.choices)}
        return {"type": "string", **({"pattern": f"^({self.pattern})$"} if self.pattern else {"minLength": 1})}


@dataclass(eq=False, repr=False)
class Name(Text):
    """A name that becomes part of a key in the ledger."""

    pattern: str = NAME

    def parse(self, table: TomlTable, text: str, key: str = "", index: int | None = None) -> Any:
        if not re.fullmatch(NAME, text):
            shown = f"{show(text)}: " if key else ""
            raise table.error(f"{shown}a name here has 1 to 64 characters out of A-Z a-z 0-9 . _ : -", key)
        return text


@dataclass(eq=False, repr=False)
class Label(Text):
    """A name that is stored with charges or shown with them."""

    pattern: str = r"[^\u0000-\u001f\u007f]{1,64}"

    def parse(self, table: TomlTable, text: str, key: str = "", index: int | None = None) -> Any:
        if not 1 <= len(text) <= 64 or not text.isprintable():
            raise table.error(f"{show(text)}: a name has 1 to 64 printable characters", key, index)
        return text


@dataclass(eq=False, repr=False)
class Span(Text):
    """A duration of at most 10 years, read as ms."""

    pattern: str = r"\s*0*[1-9][0-9]*\s*(ms|s|m|h|d)\s*"
    _: KW_ONLY
    default_ms: int | None = None

    def parse(self, table: TomlTable, text: str, key: str = "", index: int | None = None) -> Any:
        with table.blamed(key):
            duration_ms = parse_duration(text)
        if duration_ms > 3650 * DAY_MS:
            raise table.error(f"{show(text)} is longer than 3650 days", key)
        return duration_ms

    def absent(self, table: TomlTable, key: str) -> Any:
        return self.default_ms

    def schema(self) -> Schema:
        if self.default_ms is None:
            return super().schema()
        days, rest = divmod(self.default_ms, DAY_MS)
        return super().schema() | {"default": format_duration(self.default_ms) if rest else f"{days}d"}


@dataclass(eq=False, repr=False)
class Whole(Kind):
    """A whole number. If it is out of bounds, the message is `says`, or names the bounds."""

    _: KW_ONLY
    minimum: int = 1
    maximum: int = MAX_UNITS
    says: str = ""
    of_type: ClassVar[type[Any]] = int

    def read(self, table: TomlTable, key: str) -> Any:
        value = table.value(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise table.type_error(key, value, "a whole number")
        if not self.minimum <= value <= self.maximum:
            bounds = f"{show(value)} is not a whole number from {self.minimum} to {self.maximum}"
            raise table.error(self.says or bounds, key)
        return value

    def form(self) -> Schema:
        return {"type": "integer", "minimum": self.minimum, "maximum": self.maximum}


@dataclass(eq=False, repr=False)
class Flag(Kind):
    """True or false."""

    default: bool = False
    of_type: ClassVar[type[Any]] = bool

    def read(self, table: TomlTable, key: str) -> Any:
        value = table.value(key)
        if not isinstance(value, bool):
            raise table.type_error(key, value, "true or false")
        return value

    def form(self) -> Schema:
        return {"type": "boolean"}


class Day(Kind):
    """A date without a time."""

    def read(self, table: TomlTable, key: str) -> Any:
        value = table.value(key)
        if type(value) is not date:
            raise table.type_error(key, value, "a date such as 2026-06-01")
        return value


@dataclass(eq=False, repr=False)
class Texts(Kind):
    """An array of texts, `each` of this kind. `several`: a text may appear twice."""

    _: KW_ONLY
    each: Text = field(default_factory=Text)
    several: bool = False
    of_type: ClassVar[type[Any]] = list

    def read(self, table: TomlTable, key: str) -> Any:
        texts = table.value(key)
        if not isinstance(texts, list | tuple) or any(not isinstance(text, str) or not text for text in texts):
            raise table.type_error(key, texts, "an array of strings")
        if not texts:
            raise table.error("an empty array selects nothing; remove the key or add a name", key)
        seen: set[str] = set()
        for index, text in enumerate(() if self.several else texts):
            if text in seen:
                raise table.error(f"{show(text)} appears twice", key, index)
            seen.add(text)
        return tuple([self.each.parse(table, text, key, index) for index, text in enumerate(texts)])

    def absent(self, table: TomlTable, key: str) -> Any:
        return ()

    def form(self) -> Schema:
        texts = {"type": "array", "items": self.each.schema(), "minItems": 1}
        return texts if self.several else {**texts, "uniqueItems": True}


@dataclass(eq=False, repr=False)
class Table(Kind):
    """A table with these keys. `empty`: if the key is missing, an empty table is read."""

    keys: Keys = field(default_factory=lambda: ANY)
    _: KW_ONLY
    empty: bool = False
    of_type: ClassVar[type[Any]] = dict

    def read(self, table: TomlTable, key: str) -> Any:
        return table.inner(table.value(key), key, self.keys)

    def absent(self, table: TomlTable, key: str) -> Any:
        return table.inner({}, key, self.keys) if self.empty else None

    def tables(self, value: Any, path: str) -> Iterable[tuple[str, Keys, Any]]:
        return ((path, self.keys, value),)

    def form(self) -> Schema:
        return schema_of(self.keys)


@dataclass(eq=False, repr=False)
class Named(Table):
    """Tables with these keys, by name: `least` or more."""

    _: KW_ONLY
    names: Text
    least: int = 0

    def read(self, table: TomlTable, key: str) -> Any:
        named = table.inner(table.value(key), key)
        rows = {name: named.inner(value, name, self.keys) for name, value in named.items()}
        for name, row in rows.items():
            self.names.parse(row, name)
        return rows

    def absent(self, table: TomlTable, key: str) -> Any:
        return {}

    def tables(self, value: Any, path: str) -> Iterable[tuple[str, Keys, Any]]:
        return (
            (dotted(path, name), self.keys, row) for name, row in (value.items() if isinstance(value, dict) else ())
        )

    def form(self) -> Schema:
        least = {"minProperties": self.least} if self.least else {}
        return {"type": "object", **least, "propertyNames": self.names.form(), "additionalProperties": super().form()}


@dataclass(eq=False, repr=False)
class Rows(Table):
    """An array of tables with these keys. If it has more than `most`, the message is `says`."""

    _: KW_ONLY
    most: int = MAX_UNITS
    says: str = ""
    of_type: ClassVar[type[Any]] = list

    def read(self, table: TomlTable, key: str) -> Any:
        values = table.value(key)
        if not isinstance(values, list) or not values:
            raise table.type_error(key, values, "a non-empty array of tables")
        rows = [table.inner(value, key, self.keys, index) for index, value in enumerate(values)]
        if len(rows) > self.most:
            raise table.error(self.says.format(count=len(rows)), key)
        return rows

    def absent(self, table: TomlTable, key: str) -> Any:
        return []

    def tables(self, value: Any, path: str) -> Iterable[tuple[str, Keys, Any]]:
        if not isinstance(value, list):
            return super().tables(value, path)
        return ((f"{path}[{index}]", self.keys, row) for index, row in enumerate(value))

    def form(self) -> Schema:
        return {"type": "array", "minItems": 1, "items": super().form()}


@dataclass(eq=False, repr=False)
class Values(Table):
    """Values of one kind, by name. `names` is the pattern of the names."""

    _: KW_ONLY
    each: Kind = NOTHING
    names: str = ""

    def read(self, table: TomlTable, key: str) -> Any:
        return table.inner(table.value(key), key, Keys({}, others=self.each))

    def form(self) -> Schema:
        names = {"propertyNames": {"pattern": f"^({self.names})$"}} if self.names else {}
        return {"type": "object", **names, "additionalProperties": self.each.schema()}


@dataclass(eq=False, repr=False)
class Either(Kind):
    """One of these kinds, by the type of the value. The last kind reports a value of any other type."""

    kinds: tuple[Kind, ...] = ()

    def kind_of(self, value: object) -> Kind:
        return next((kind for kind in self.kinds if type(value) is kind.of_type), self.kinds[-1])

    def read(self, table: TomlTable, key: str) -> Any:
        return self.kind_of(table.value(key)).read(table, key)

    def form(self) -> Schema:
        return {"anyOf": [kind.schema() for kind in self.kinds]}


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

    def schema(self) -> Schema:
        return {"dependencies": {key: [self.needed] for key in self.keys}}


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

    def schema(self) -> Schema:
        return {"not": {"required": [self.key], "anyOf": [{"required": [other]} for other in self.others]}}


class Some(NamedTuple):
    """At least one of these sets of keys must be there. The message is about the key that the last set misses."""

    sets: tuple[tuple[str, ...], ...]
    says: str

    def check(self, table: TomlTable) -> None:
        if not any(all(key in table for key in keys) for keys in self.sets):
            raise table.error(self.says, next(key for key in self.sets[-1] if key not in table))

    def schema(self) -> Schema:
        return {"anyOf": [{"required": list(keys)} for keys in self.sets]}


def schema_of(keys: Keys) -> Schema:
    """The JSON Schema of a table with these keys."""
    required = [key for key, kind in keys.items() if kind.required]
    together = [rule.schema() for rule in keys.rules]
    return {
        "type": "object",
        "properties": {key: kind.schema() for key, kind in keys.items()},
        "additionalProperties": keys.others.schema() if keys.others is not None else False,
        **({"required": required} if required else {}),
        **({"allOf": together} if together else {}),
    }


# -- files -------------------------------------------------------------------------------------------------------------

MAX_FILE_BYTES = 1 << 20


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError, on one line, if it cannot be read."""
    return parse_toml(read_file(path), one_line(path))


def read_file(path: Path) -> str:
    """The text of a TOML file. Raises ConfigError, on one line, if it cannot be read."""
    try:
        data = read_named(path, MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # a ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{one_line(path)}: cannot be read: {reason}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(
            f"{one_line(path)}: larger than {MAX_FILE_BYTES >> 10} KiB, the most for a configuration; "
            "give some of its credentials, with their jobs, a file of their own that names the same ledger"
        )
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
