"""What a key of the configuration may hold. Each kind reads a value strictly, and says the same as a JSON Schema.

    Text, Name, Label, Span      texts: any, part of a key in the ledger, shown beside charges, a duration
    Whole, Flag                  whole numbers, true or false
    Texts                        an array of distinct texts; of a command also equal ones
    Table, Named, Rows, Values   a table, tables by name, an array of tables, values by name
    Either                       one of these, by the type that the file has

A schema knows one file and nothing else: that a name is known, a path is there or one number is below another, the
reader alone says.
"""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from quota.settings.toml import Keys, TomlTable, parse_span
from quota.terms.limits import DAY_MS, MAX_UNITS, format_duration

Schema = dict[str, Any]

NAME = r"[A-Za-z0-9._:-]{1,64}"


@dataclass(frozen=True)
class Kind:
    """`about` is for people, in an editor too. `default` is what holds without the key, as a file would have it; None:
    nothing."""

    about: str = ""
    _: KW_ONLY
    default: Any = None
    required: bool = False
    of_type: ClassVar[type[Any]] = object

    def read(self, table: TomlTable, key: str) -> Any:
        """The value at a key that is there. Raises ConfigError."""
        return table.value(key)

    def absent(self, table: TomlTable, key: str) -> Any:
        """What holds without the key."""
        return self.default

    def form(self) -> Schema:
        """The schema, without what is said about it."""
        return {}

    def schema(self) -> Schema:
        """The JSON Schema of the value."""
        said = {"description": self.about} if self.about else {}
        return said | self.form() | ({} if self.default is None else {"default": self.default})


@dataclass(frozen=True)
class Text(Kind):
    """A text that is not empty. One that does not have the form `pattern` is answered with what it `says`; without
    that, the reader does so. A `secret` is shown to nobody."""

    _: KW_ONLY
    choices: tuple[str, ...] = ()
    pattern: str = ""
    says: str = ""
    secret: bool = False
    of_type: ClassVar[type[Any]] = str

    def read(self, table: TomlTable, key: str) -> Any:
        text = table.text(key, choices=self.choices)
        self.check_name(table, text, key)
        return text

    def check_name(self, row: TomlTable, name: str, key: str = "", index: int | None = None) -> None:
        """Check a text as the name of a table, or one of an array."""
        if self.says and not re.fullmatch(self.pattern, name):
            raise row.error(self.says, key, index)

    def form(self) -> Schema:
        if self.choices:
            return {"type": "string", "enum": list(self.choices)}
        return {"type": "string", **({"pattern": f"^({self.pattern})$"} if self.pattern else {"minLength": 1})}


@dataclass(frozen=True)
class Name(Text):
    """A name that becomes part of a key in the ledger."""

    pattern: str = NAME

    def check_name(self, row: TomlTable, name: str, key: str = "", index: int | None = None) -> None:
        row.check_name(name, key)


@dataclass(frozen=True)
class Label(Text):
    """A name that is stored with charges or shown with them."""

    pattern: str = r"[^\u0000-\u001f\u007f]{1,64}"

    def check_name(self, row: TomlTable, name: str, key: str = "", index: int | None = None) -> None:
        row.check_label(name, key, index)


@dataclass(frozen=True)
class Span(Text):
    """A duration, read as ms."""

    pattern: str = r"\s*0*[1-9][0-9]*\s*(ms|s|m|h|d)\s*"
    _: KW_ONLY
    default_ms: int | None = None

    def read(self, table: TomlTable, key: str) -> Any:
        return parse_span(table, key)

    def absent(self, table: TomlTable, key: str) -> Any:
        return self.default_ms

    def schema(self) -> Schema:
        if self.default_ms is None:
            return super().schema()
        days, rest = divmod(self.default_ms, DAY_MS)
        return super().schema() | {"default": format_duration(self.default_ms) if rest else f"{days}d"}


@dataclass(frozen=True)
class Whole(Kind):
    """A whole number."""

    _: KW_ONLY
    minimum: int = 1
    maximum: int = MAX_UNITS
    says: str = ""
    of_type: ClassVar[type[Any]] = int

    def read(self, table: TomlTable, key: str) -> Any:
        if self.says and not self.minimum <= table.value(key) <= self.maximum:
            raise table.error(self.says, key)
        return table.whole(key, minimum=self.minimum, maximum=self.maximum)

    def form(self) -> Schema:
        return {"type": "integer", "minimum": self.minimum, "maximum": self.maximum}


@dataclass(frozen=True)
class Flag(Kind):
    """True or false."""

    default: bool = False
    of_type: ClassVar[type[Any]] = bool

    def read(self, table: TomlTable, key: str) -> Any:
        return table.flag(key, self.default)

    def form(self) -> Schema:
        return {"type": "boolean"}


@dataclass(frozen=True)
class Texts(Kind):
    """An array of texts, `each` of this kind. `several`: the same one may stand in it again."""

    _: KW_ONLY
    each: Text = Text()
    several: bool = False
    of_type: ClassVar[type[Any]] = list

    def read(self, table: TomlTable, key: str) -> Any:
        texts = table.list_of_texts(key) if self.several else table.texts(key)
        for index, text in enumerate(texts):
            self.each.check_name(table, text, key, index)
        return texts

    def absent(self, table: TomlTable, key: str) -> Any:
        return ()

    def form(self) -> Schema:
        some = {"type": "array", "items": self.each.schema(), "minItems": 1}
        return some if self.several else {**some, "uniqueItems": True}


@dataclass(frozen=True)
class Table(Kind):
    """A table with these keys. `empty`: a table without any holds where the key is missing."""

    keys: Keys | None = None
    _: KW_ONLY
    empty: bool = False
    of_type: ClassVar[type[Any]] = dict

    def read(self, table: TomlTable, key: str) -> Any:
        return table.table(key, self.keys)

    def absent(self, table: TomlTable, key: str) -> Any:
        return table.table(key, self.keys, default={}) if self.empty else None

    def form(self) -> Schema:
        return {"type": "object"} if self.keys is None else schema_of(self.keys)


@dataclass(frozen=True)
class Named(Table):
    """Tables with these keys, by their names; at `least` so many."""

    _: KW_ONLY
    names: Text
    least: int = 0

    def read(self, table: TomlTable, key: str) -> Any:
        assert self.keys is not None  # noqa: S101  # each has some
        rows = table.table(key).tables(self.keys)
        for name, row in rows.items():
            self.names.check_name(row, name)
        return rows

    def absent(self, table: TomlTable, key: str) -> Any:
        return {}

    def form(self) -> Schema:
        some = {"minProperties": self.least} if self.least else {}
        return {"type": "object", **some, "propertyNames": self.names.form(), "additionalProperties": super().form()}


@dataclass(frozen=True)
class Rows(Table):
    """An array of tables with these keys."""

    of_type: ClassVar[type[Any]] = list

    def read(self, table: TomlTable, key: str) -> Any:
        assert self.keys is not None  # noqa: S101  # each has some
        return table.array(key, self.keys)

    def form(self) -> Schema:
        return {"type": "array", "minItems": 1, "items": super().form()}


@dataclass(frozen=True)
class Values(Table):
    """Values of one kind, by names that have this form."""

    _: KW_ONLY
    each: Kind = Kind()
    names: str = ""

    def form(self) -> Schema:
        named = {"propertyNames": {"pattern": f"^({self.names})$"}} if self.names else {}
        return {"type": "object", **named, "additionalProperties": self.each.schema()}


@dataclass(frozen=True)
class Either(Kind):
    """One of these kinds, by the type of the value. Of another type it is what the last would say."""

    kinds: tuple[Kind, ...] = ()

    def read(self, table: TomlTable, key: str) -> Any:
        value = table.value(key)
        kind = next((one for one in self.kinds if type(value) is one.of_type), self.kinds[-1])
        return kind.read(table, key)

    def form(self) -> Schema:
        return {"anyOf": [kind.schema() for kind in self.kinds]}


# -- what several keys together may be ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Needs:
    """None of these keys has an effect without another one. The message is about it, or about the key `at`."""

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


@dataclass(frozen=True)
class Apart:
    """A key that cannot stand beside some others; `says` has a place for the `{other}` one."""

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


@dataclass(frozen=True)
class Some:
    """One of these sets of keys, at least, must be there. The message is about what is missing of the last."""

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
