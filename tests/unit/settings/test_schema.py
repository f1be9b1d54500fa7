"""The JSON Schema of the configuration: made from the reader's own tables, it takes the files that the reader takes."""

from __future__ import annotations

import json
import os
from datetime import date
from pathlib import Path
from random import Random
from typing import Any
from urllib.request import url2pathname

import pytest
from click.testing import CliRunner
from jsonschema import Draft7Validator

from fuzz.generate import to_toml
from quota.cli.configuration import check_, init
from quota.common.files import read_text
from quota.errors import ConfigError
from quota.inbound.configured import rules_of
from quota.settings.load import load_settings
from quota.settings.tables import json_schema
from quota.settings.toml import parse_toml
from support.configurations import EVERY_KEY

FILES = int(os.environ.get("QUOTA_TEST_EXAMPLES", "100"))
SCHEMA = json.loads(json_schema())
VALIDATOR = Draft7Validator(SCHEMA)

ODD = (True, 0, -1, 10**15 + 1, 1.5, "", [], {}, ["x", "x"], [1], {"zzz": 1}, {"a b": 1}, date(2026, 1, 1))
"""Values of every type. Texts stand below: of most only the reader knows which are names of something."""

TEXTS = {
    "name": ("a", "a b", "x" * 64, "x" * 65, "a\tb"),
    "project": ("a", "a b", "x" * 65),
    "key": ("env:A", "file:x", "env:", "file:", "secret", "env:A B"),
    "ping": ("env:A", "secret"),
    "auth": ("bearer:env:A", "bearer:secret", "service-account:x", "service-account:", "adcx"),
    "endpoint": ("https://h", "h", "http://127.0.0.1/?key=a"),
    "cloud_project": ("12", "abc", "abcdef", "A", 7, -7),
    "headroom": ("0%", "99%", "100%", "5 %", 0),
    "fetch": ("search", "a.b:c", "trendin", "a:b:c"),
    "window": ("1h", "1 h", "0h", "h", "1w"),
    "stale": ("1h", "0h", "1"),
    "retention": ("1d", "1y"),
    "jitter": ("1s", "s"),
    "leave": (0, 9, -1, "500", "5%"),
    "allowance": ("10%", "99 %", "50"),
    "count": ("units", "units "),
    "per": ("job", "jobs"),
    "calendar": ("month", "year"),
    "ssl_cert_reqs": ("none", "optional"),
    "machines": ("one", "two", 1, 0, 1_001),
    "algorithm": ("counter", "gcra2"),
    "fail": ("closed", "close"),
    "pages": (1, 100_000, 100_001),
    "max_body_mb": (1_000, 1_001),
    "day": (31, 32),
    "history": (["a"], ["a", ""]),
    "regions": (["DE"], ["DE", "\n"], ["x" * 65]),
    "jobs": (["x"], ["x", "x"], [""]),
}

REFERENCES: dict[str, tuple[Any, ...]] = {"leave": ({"zzz": 1}, {"a b": 1}), "inbound": ({},)}
"""Tables that are well formed and still refused because of other tables. So no credential gets another name either, and
one rule of `[inbound]` stays."""


def changed(r: Random, value: Any, key: str = "") -> Any:
    """A copy with one thing in it changed, removed, renamed or put in."""
    if not isinstance(value, (dict, list)) or not value or (key and r.random() < 0.15):
        return r.choice([value for value in (*ODD, *TEXTS.get(key, ())) if value not in REFERENCES.get(key, ())])
    copy = value.copy()
    at: Any = r.choice(list(copy)) if isinstance(copy, dict) else r.randrange(len(copy))
    kind = r.random()
    if isinstance(copy, list) and not isinstance(copy[at], dict):
        copy[at] = r.choice((1, "", "x" * 65, copy[-1]) if key in ("regions", "jobs") else (1, "", copy[-1]))
    elif isinstance(copy, dict) and kind < 0.15 and at != "default":
        del copy[at]
    elif isinstance(copy, dict) and kind < 0.2 and key != "credentials":
        copy["zzz"] = copy.pop(at)
    elif isinstance(copy, dict) and kind < 0.25:
        copy["zzz"] = r.choice((1, "x"))
    else:
        copy[at] = changed(r, copy[at], key if isinstance(at, int) else at)
    return copy


def taken(path: Path) -> str:
    """What the reader says of a file; "" if it takes it."""
    try:
        rules_of(load_settings(path))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("part", range(2))
def test_the_reader_and_the_schema_agree_on_random_files(part: int, tmp_path: Path, state_dir: Path) -> None:
    path, good, outcomes = tmp_path / "quota.toml", parse_toml(EVERY_KEY, "good"), {True: 0, False: 0}
    for number in range(part, FILES, 2):
        r, data = Random(f"schema {number}"), good
        for _ in range(r.choice((1, 1, 2))):
            data = changed(r, data)
        path.write_text(to_toml(data), encoding="utf-8")
        answer, errors = taken(path), [error.message[:300] for error in VALIDATOR.iter_errors(data)]
        assert bool(answer) == bool(errors), (
            f"file {number}: {answer or 'taken'}; the schema: {errors}\n{to_toml(data)}"
        )
        outcomes[not answer] += 1
    assert min(outcomes.values()) >= FILES // 20, "of both sorts there are some"


def test_the_shipped_schema_is_the_one_that_the_tables_make() -> None:
    is_same = read_text("quota.config", "quota.schema.json") == json_schema()
    assert is_same, "`quota check --schema > config/quota.schema.json` rewrites it"
    Draft7Validator.check_schema(SCHEMA)


def test_the_first_line_of_a_new_configuration_names_the_schema(tmp_path: Path) -> None:
    path = tmp_path / "quota.toml"
    assert CliRunner().invoke(init, [str(path)]).exit_code == 0
    directive, _, url = path.read_text().partition("\n")[0].partition(" ")
    assert directive == "#:schema"
    named = Path(url2pathname(url.removeprefix("file://"))).read_text(encoding="utf-8")
    assert named == json_schema() == CliRunner().invoke(check_, ["--schema"]).output


@pytest.mark.parametrize("name", ["quota.toml", "default.toml"])
def test_the_shipped_configurations_match_the_schema(name: str) -> None:
    assert list(VALIDATOR.iter_errors(parse_toml(read_text("quota.config", name), name))) == []


def test_every_key_has_a_description() -> None:
    def keys(schema: dict[str, Any], path: str) -> list[str]:
        undescribed = []
        for key, inner in schema.get("properties", {}).items():
            undescribed += [] if "description" in inner else [f"{path}{key}"]
            undescribed += keys(inner, f"{path}{key}.")
        for inner in (schema.get("items"), schema.get("additionalProperties"), *schema.get("anyOf", ())):
            undescribed += keys(inner, f"{path}*.") if isinstance(inner, dict) else []
        return undescribed

    assert keys(SCHEMA, "") == []
