"""What `quota check` says of rules that cannot be meant."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from quota.errors import ConfigError
from quota.inbound import load_rules
from quota.inbound.check import examine
from quota.settings.load import load_settings

if TYPE_CHECKING:
    from pathlib import Path

LOGIN = """
[inbound.login]
path = "/login"
methods = ["POST"]
limit = 2
window = "1h"
"""
DEFAULT = """
[inbound.default]
limit = 100
window = "60s"
"""
AGAIN = LOGIN.replace("login]", "again]").replace('"/login"', '"/Login/"')


@pytest.mark.parametrize(
    ("rules", "location", "said"),
    [
        (
            DEFAULT + LOGIN,
            "inbound.login",
            "no request reaches it: rule default before it has no path, so it takes every request; put login before it",
        ),
        (
            LOGIN + AGAIN,
            "inbound.again",
            "no request reaches it: rule login before it takes '/login'; put again before it",
        ),
        (
            '[inbound]\nexempt = ["/login/*"]\n' + LOGIN,
            "inbound.login",
            "no request reaches it: exempt covers all of its paths; remove this rule or change exempt",
        ),
        (
            '[inbound]\nkey_field = "X-API-Key"\n' + LOGIN,
            "inbound.key_field",
            "'X-API-Key' has no effect without valid keys: a client could invent a key for each request; "
            'add keys = "file:/path", a file with one key per line',
        ),
        (LOGIN + "cost = 3\n", "inbound.login.cost", "3 is not a whole number from 1 to 2, its smallest limit"),
        (
            '[inbound]\nkeys = "file:keys.txt"\n' + LOGIN,
            "inbound.keys",
            "has no effect without key_field; add key_field, or remove this key",
        ),
        (
            '[inbound]\nforwarded = "forwarded"\n' + LOGIN,
            "inbound.forwarded",
            "has no effect without trusted_proxies; add trusted_proxies, or remove this key",
        ),
        (LOGIN + DEFAULT, None, None),
    ],
)
def test_a_rule_that_no_request_reaches_or_that_cannot_be_used(
    rules: str, location: str | None, said: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "quota.toml"
    path.write_text(rules, encoding="utf-8")
    (tmp_path / "keys.txt").write_text("good\n", encoding="utf-8")
    assert list(examine(load_settings(path))) == ([] if location is None else [(location, said)])


def test_a_method_that_nobody_sends_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "quota.toml"
    path.write_text(LOGIN.replace('"POST"', '"PSOT", "PURGE", "get"'), encoding="utf-8")
    assert [str(found) for found in examine(load_settings(path))] == [
        "warning: inbound.login.methods: PSOT is not a usual method; did you mean 'POST'?"
    ]


@pytest.mark.parametrize("spelt", ["{}.db", "./{}.db", "{}-link.db", "sub/../{}.db"])
@pytest.mark.parametrize("used", ["ledger", "store"])
def test_a_storage_in_the_file_of_the_ledger_or_the_store_is_an_error(tmp_path: Path, used: str, spelt: str) -> None:
    """Whichever were there first, the other would not open it: all budgets would be refused, or nobody limited."""
    (tmp_path / "sub").mkdir()
    (tmp_path / f"{used}-link.db").symlink_to(f"{used}.db")
    path = tmp_path / "quota.toml"
    other = '[ledger]\nurl = "sqlite:///ledger.db"\n[store]\nurl = "sqlite:///store.db"\n'
    path.write_text(f'{other}[inbound]\nurl = "sqlite:///{spelt.format(used)}"\n{LOGIN}', encoding="utf-8")
    said = f"the {used} uses this file already; give the inbound limits a file of their own"
    assert list(examine(load_settings(path))) == [("inbound.url", said)]
    with pytest.raises(ConfigError, match=said):
        load_rules(path)


@pytest.mark.parametrize(
    ("key", "line"), [("url", 'url = "sqlite:///~{}/x.db"'), ("keys", 'key_field = "X-Key"\nkeys = "file:~{}/keys"')]
)
def test_a_file_in_the_folder_of_nobody_is_one_line(tmp_path: Path, key: str, line: str) -> None:
    path = tmp_path / "quota.toml"
    path.write_text(f"[inbound]\n{line.format('nobody-is-called-so')}\n{LOGIN}", encoding="utf-8")
    assert list(examine(load_settings(path))) == [(f"inbound.{key}", "Could not determine home directory.")]


def test_all_rules_that_cannot_be_used_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "quota.toml"
    path.write_text(LOGIN.replace("/login", "login") + DEFAULT.replace("60s", "soon"), encoding="utf-8")
    assert [location for location, _ in examine(load_settings(path))] == [
        "inbound.login.path",
        "inbound.default.window",
    ]


def test_a_rule_for_other_methods_hides_nothing(tmp_path: Path) -> None:
    path = tmp_path / "quota.toml"
    path.write_text(LOGIN + AGAIN.replace("POST", "GET") + DEFAULT, encoding="utf-8")
    assert list(examine(load_settings(path))) == []
