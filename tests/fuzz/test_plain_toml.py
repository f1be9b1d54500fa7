"""Plain TOML is read without `tomllib`, and exactly as it would."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fuzz.generate import damaged
from fuzz.inputs import PARTS, Input, every
from fuzz.test_configuration import BOOKS, CONFIGURATIONS
from quota.settings.plain_toml import read_plain

CONFIG = Path(__file__).resolve().parents[2] / "config"

HEADERS = ("[a]", "[b]", "[a.b]", "[a.c]", "[a.b.c]", "[[a]]", "[[b]]", "[[a.b]]", "[[a.c]]", "[a.b.d]", '["a"."b"]')
ODD_HEADERS = (
    "[a]]", "[[a]", "[[ab]", "[]", "[a] # x", "[ [a] ]", "[a.'b']", "[a", "[a] b", "[a..b]", '["a.b"]', "[ a . b ]",
)  # fmt: skip
PLAIN_KEYS = ("a", "b", "c", "d-e", "F_1", "1", '"a"', '"x.y"', '"a b"')
ODD_KEYS = ("b.c", "a.b", "'a'", '""', '"a', '"a\\tb"', "", "é", '"é"', '"a=b"')
PLAIN = ("1", "0", "9_500", "10_000", '"x"', '""', "true", "false", "2026-06-01", "[]", "{}", '["a", "b"]', "[1, 2]")
ODD = (
    "-1", "+1", "007", "1__0", "_1", "1_", "0_0", "1.5", "1e5", "0x1", "inf", "nan", "9" * 18, "9" * 19, "٣", "True",
    '"a"b', '"a" "b"', '"""a"""', "'a'", '"a\\n"', '"a#b"', '"a" # "b"', '"a"#', "1 # c", "# c", "", "a", '"a', '"é\t"',
    "2026-02-30", "2026-6-01", "07:32:00", "2026-06-01T00:00:00", "2026-06-01 00:00:00", "20-06-2026", "202606-01-1",
    "2026-06-0²", "[1,]", "[,]", "[1 2]", "[[1], [2]]", "[1], [2]", "[1", "1]", "[{a = 1}]", '["a,b"]', '["]"]',
    "[1] # c", "[[[[[1]]]]]", '["a", 1 # c]', "['a']", '["a"], ["b"]', "{a = 1}, {b = 2}", "{ a = 1 }", '["a#b"]',
    "{ a = 1, b = { c = [1] } }", "{a = 1,}", "{a}", "{a = 1, a = 2}", "{ a.b = 1 }", "{ } # c", "{a = }", "{ a = 1 ",
    "{[}]", "[{]}", '{ "a" = "b" }', '{ "a,b" = 1 }', "{ a = 1 } x", "[1]\n[a]", "[\n1,\n]", '["a" "b"]',
)  # fmt: skip


@pytest.mark.parametrize("part", range(PARTS))
def test_plain_toml_is_read_as_tomllib_reads_it(part: int) -> None:
    tried = read = 0

    def attempt(r: Input) -> None:
        nonlocal tried, read
        if r.random() < 0.2:
            text = damaged(r, r.choice(CONFIGURATIONS + BOOKS), 2).decode("utf-8", "replace")
        else:
            text = "\n".join(_line(r) for _ in range(r.randrange(1, 7)))
        r.data = text
        found = read_plain(text)
        tried += 1
        if found is not None:
            read += 1
            assert repr(found) == repr(tomllib.loads(text))

    every("plain-toml", part, attempt)
    assert read >= tried // 5, "nearly everything is left to tomllib"


def _line(r: Input) -> str:
    kind = r.random()
    if kind < 0.1:
        return r.choice(("", " ", "# c", "\t# é", "a", "a = ", "= 1", "a = 1 = 2", "a = 1\r", "\x0b", "\x00", "\x7f"))
    if kind < 0.5:
        return r.choice(HEADERS if r.random() < 0.9 else ODD_HEADERS)
    key, value = r.choice(PLAIN_KEYS if r.random() < 0.9 else ODD_KEYS), r.choice(PLAIN if r.random() < 0.8 else ODD)
    return "".join((r.choice(("", "", " ")), key, r.choice((" = ", "=", "\t=\t")), value, r.choice(("", "", "  # c"))))


@pytest.mark.parametrize("path", [*CONFIG.glob("*.toml"), *CONFIG.glob("costs/*.toml")], ids=lambda path: path.name)
def test_what_is_shipped_is_plain(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert read_plain(text) == tomllib.loads(text)


def test_what_is_nested_deeply_or_very_long_is_read_in_no_time() -> None:
    for text in (
        "a = " + "[" * 500_000 + "]" * 500_000,
        "a = [" + "1, " * 300_000 + "1]",
        "[a]\n" + "".join(f"k{n} = {n}\n" for n in range(50_000)),
    ):
        found = read_plain(text)
        assert found is None or found == tomllib.loads(text)
