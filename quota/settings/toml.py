"""Read TOML strictly: only known keys, only values of the right type, every error one line that names the place.

    TomlTable    one table of a file; its methods return checked values or raise ConfigError

A message reads `quota.toml: credentials.main.limits[1].windw: unknown key; did you mean 'window'?`
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date, datetime, time
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

from quota.common.named import read_named
from quota.common.text import nearest, one_line, show
from quota.errors import ConfigError, QuotaError
from quota.terms.limits import DAY_MS, MAX_UNITS, parse_duration

MAX_FILE_BYTES = 1 << 20

_REQUIRED: Final = object()

NO_PLACES: Mapping[str, str] = MappingProxyType({})


def dotted(path: str, key: str) -> str:
    """The path of a key in a table, always short and on one line."""
    shown = key if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", key) else show(key)
    return f"{path}.{shown}" if path else shown


class Kind(Protocol):
    """What a key may hold: see `quota.settings.kinds`."""

    @property
    def required(self) -> bool: ...
    def read(self, table: TomlTable, key: str) -> Any: ...
    def absent(self, table: TomlTable, key: str) -> Any: ...
    def schema(self) -> dict[str, Any]: ...


class Rule(Protocol):
    """What several keys of a table together must be."""

    def check(self, table: TomlTable) -> None: ...
    def schema(self) -> dict[str, Any]: ...


class Keys(dict[str, Any]):
    """The keys of one sort of table, with their kinds, and the rules about several of them. If `others` is given,
    further keys name tables of that kind."""

    def __init__(self, kinds: Mapping[str, Any], *rules: Rule, others: Kind | None = None) -> None:
        super().__init__(kinds)
        self.rules = rules
        self.others = others


class TomlTable:
    """One table of a TOML file. It may have only these `keys`; None allows any, for a table whose keys are names.

    The keys are checked first, so that a misspelt key is reported as misspelt, not as missing. `places` has what
    to say of keys that stand in the wrong table. `variables` says by its path what came
    from which variable of the environment.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        source: str,
        path: str = "",
        keys: Iterable[str] | None = None,
        places: Mapping[str, str] = NO_PLACES,
        variables: Mapping[str, str] = NO_PLACES,
    ) -> None:
        self._data = data
        self.source = source
        self.path = path
        self._places = places
        self.variables = variables
        self._kinds = keys if isinstance(keys, Keys) else Keys({})
        if keys is None:
            return
        known = tuple(keys)
        for key, value in data.items():
            if key not in known and not (self._kinds.others is not None and isinstance(value, dict)):
                hint = places.get(key) or nearest(key, known)
                raise self.error(f"unknown key; {hint}", key)
        for rule in self._kinds.rules:
            rule.check(self)

    def read(self, key: str) -> Any:
        """The value of a key as its kind reads it, or what holds without it."""
        kind = self._kinds[key]
        if key in self._data:
            return kind.read(self, key)
        if kind.required:
            self.value(key)
        return kind.absent(self, key)

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def error(self, message: str, key: str = "", index: int | None = None) -> ConfigError:
        """A ConfigError about one key of this table, or about the table itself."""
        where = self.at(key) if key else self.path
        if index is not None:
            where += f"[{index}]"
        if self.variables:
            for path, variable in self.variables.items():
                if where == path or (where.startswith(path) and where[len(path)] in ".["):
                    inside = "" if where == path else f"{where}: "
                    return ConfigError(f"environment variable {variable}: {inside}{message}")
        return ConfigError(f"{self.source}: {where}: {message}" if where else f"{self.source}: {message}")

    @contextmanager
    def blamed(self, key: str, index: int | None = None) -> Iterator[None]:
        """An error within is about this key, and is raised as a ConfigError that says so."""
        try:
            yield
        except (QuotaError, ValueError) as error:
            raise self.error(str(error), key, index) from None

    def at(self, key: str) -> str:
        """The dotted path of a key, always short and on one line."""
        return dotted(self.path, key)

    # -- values ------------------------------------------------------------------------------------------------------

    def value(self, key: str) -> Any:
        """The raw value of a required key."""
        return self._take(key, _REQUIRED)

    def text(self, key: str, default: Any = _REQUIRED, *, choices: Iterable[str] = ()) -> str:
        """A non-empty string; one of `choices` if they are given."""
        value = self._take(key, default)
        if value is default:
            return default  # type: ignore[no-any-return]  # the caller's own value
        if not isinstance(value, str) or not value:
            raise self._type_error(key, value, "a non-empty string")
        known = tuple(choices)
        if known and value not in known:
            raise self.error(f"{show(value)} is not allowed here; {nearest(value, known)}", key)
        return value

    def whole(self, key: str, default: Any = _REQUIRED, *, minimum: int = 1, maximum: int = MAX_UNITS) -> int:
        """A whole number, from `minimum` to `maximum`."""
        value = self._take(key, default)
        if value is default:
            return default  # type: ignore[no-any-return]  # the caller's own value
        return self.as_whole(value, key, minimum=minimum, maximum=maximum)

    def as_whole(self, value: object, key: str, *, minimum: int = 1, maximum: int = MAX_UNITS) -> int:
        """`value`, found at `key`, as a whole number."""
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._type_error(key, value, "a whole number")
        if not minimum <= value <= maximum:
            raise self.error(f"{show(value)} is not a whole number from {minimum} to {maximum}", key)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self._take(key, default)
        if not isinstance(value, bool):
            raise self._type_error(key, value, "true or false")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """An array of distinct strings; () if the key is missing."""
        value = self.list_of_texts(key)
        seen: set[str] = set()
        for index, item in enumerate(value):
            if item in seen:
                raise self.error(f"{show(item)} appears twice", key, index)
            seen.add(item)
        return value

    def list_of_texts(self, key: str) -> tuple[str, ...]:
        """An array of strings, in which one may stand twice; () if the key is missing."""
        value = self._take(key, ())
        if not isinstance(value, list | tuple) or any(not isinstance(item, str) or not item for item in value):
            raise self._type_error(key, value, "an array of strings")
        if key in self and not value:
            raise self.error("an empty array selects nothing; remove the key or add a name", key)
        return tuple(value)

    def day(self, key: str) -> date:
        """A date without a time."""
        value = self.value(key)
        if type(value) is not date:
            raise self._type_error(key, value, "a date such as 2026-06-01")
        return value

    # -- names -------------------------------------------------------------------------------------------------------

    def check_name(self, name: str, key: str = "") -> str:
        """`name`, checked: it becomes part of a key in the ledger."""
        if not re.fullmatch(r"[A-Za-z0-9._:-]{1,64}", name):
            shown = f"{show(name)}: " if key else ""
            raise self.error(f"{shown}a name here has 1 to 64 characters out of A-Z a-z 0-9 . _ : -", key)
        return name

    def check_label(self, name: str, key: str = "", index: int | None = None) -> str:
        """`name`, checked: it is stored with charges or shown with them."""
        if not 1 <= len(name) <= 64 or not name.isprintable():
            raise self.error(f"{show(name)}: a name has 1 to 64 printable characters", key, index)
        return name

    # -- tables ------------------------------------------------------------------------------------------------------

    def table(self, key: str, keys: Iterable[str] | None = None, default: Any = _REQUIRED) -> TomlTable:
        """A table inside this one; `default` if the key is missing and a default is given."""
        return self.as_table(self._take(key, default), key, keys)

    def as_table(
        self, value: object, key: str, keys: Iterable[str] | None = None, index: int | None = None
    ) -> TomlTable:
        """`value`, found at `key`, as a table."""
        if not isinstance(value, dict):
            raise self._type_error(key, value, "a table")
        path = self.at(key) + ("" if index is None else f"[{index}]")
        return TomlTable(value, self.source, path, keys, self._places, self.variables)

    def tables(self, keys: Collection[str]) -> dict[str, TomlTable]:
        """The tables in this table by name; each may have only these keys."""
        return {name: self.as_table(value, name, keys) for name, value in self._data.items()}

    def array(self, key: str, keys: Collection[str]) -> list[TomlTable]:
        """An array of tables."""
        value = self.value(key)
        if not isinstance(value, list) or not value:
            raise self._type_error(key, value, "a non-empty array of tables")
        return [self.as_table(item, key, keys, index) for index, item in enumerate(value)]

    def items(self) -> Iterable[tuple[str, Any]]:
        """The raw entries, in file order."""
        return self._data.items()

    def _take(self, key: str, default: Any) -> Any:
        value = self._data.get(key, default)
        if value is _REQUIRED:
            raise self.error("missing; the key is required", key)
        return value

    def _type_error(self, key: str, value: object, wanted: str) -> ConfigError:
        # Never show a string: it could be a secret in the wrong place.
        if value in ("", []):
            got = "an empty string" if value == "" else "an empty array"
        else:
            got = _KINDS.get(type(value), f"a {type(value).__name__}")
        return self.error(f"{got} where {wanted} is needed", key)


_KINDS = {
    bool: "a boolean",
    int: "a number",
    float: "a number with a fraction",
    str: "a string",
    list: "an array",
    dict: "a table",
    **dict.fromkeys((date, datetime, time), "a date or time"),
}


def parse_span(table: TomlTable, key: str) -> int:
    """The duration at a key, in ms: at most 10 years."""
    text = table.text(key)
    with table.blamed(key):
        duration_ms = parse_duration(text)
    if duration_ms > _MAX_MS:
        raise table.error(f"{show(text)} is longer than 3650 days", key)
    return duration_ms


_MAX_MS = 3650 * DAY_MS


def in_toml(text: str) -> str:
    """A text as TOML writes it, with what cannot be printed escaped. JSON would escape half characters."""
    import json  # late: only what writes TOML needs it

    return "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in json.dumps(text, ensure_ascii=False))


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError, on one line, if it cannot be read."""
    return parse_toml(read_file(path), one_line(path))


def read_file(path: Path) -> str:
    """The text of a TOML file. Raises ConfigError, on one line, if it cannot be read."""
    try:
        data = read_named(path, MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{one_line(path)}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a NUL in the name
        raise ConfigError(f"{one_line(path)}: cannot be read: {error}") from error
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
