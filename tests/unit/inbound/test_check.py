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
NO_HOME = "Could not determine home directory."
AGAIN = LOGIN.replace("login]", "again]").replace('"/login"', '"/Login/"')


def lines_of(folder: Path, rules: str) -> list[str]:
    """What `quota check` says of these rules, a line each."""
    path = folder / "quota.toml"
    path.write_text(rules, encoding="utf-8")
    (folder / "keys.txt").write_text("good\n", encoding="utf-8")
    findings = examine(load_settings(path))
    return [": ".join(finding) if isinstance(finding, tuple) else str(finding) for finding in findings]


@pytest.mark.parametrize(
    ("rules", "line"),
    [
        (
            DEFAULT + LOGIN,
            "login: no request reaches it: rule default before it has no path, so it takes every request; put login "
            "before it",
        ),
        (LOGIN + AGAIN, "again: no request reaches it: rule login before it takes '/login'; put again before it"),
        (
            '[inbound]\nexempt = ["/login/*"]\n' + LOGIN,
            "login: no request reaches it: exempt covers all of its paths; remove this rule or change exempt",
        ),
        (
            '[inbound]\nkey_field = "X-API-Key"\n' + LOGIN,
            "key_field: 'X-API-Key' has no effect without valid keys: a client could invent a key for each request; "
            'add keys = "file:/path", a file with one key per line',
        ),
        (LOGIN + "cost = 3\n", "login.cost: 3 is not a whole number from 1 to 2, its smallest limit"),
        (
            '[inbound]\nkeys = "file:keys.txt"\n' + LOGIN,
            "keys: has no effect without key_field; add key_field, or remove this key",
        ),
        (
            '[inbound]\nforwarded = "forwarded"\n' + LOGIN,
            "forwarded: has no effect without trusted_proxies; add trusted_proxies, or remove this key",
        ),
        ('[inbound]\nurl = "sqlite:///~nobody-is-called-so/x.db"\n' + LOGIN, f"url: {NO_HOME}"),
        ('[inbound]\nkey_field = "X-Key"\nkeys = "file:~nobody-is-called-so/keys"\n' + LOGIN, f"keys: {NO_HOME}"),
    ],
)
def test_a_rule_that_no_request_reaches_or_that_cannot_be_used(rules: str, line: str, tmp_path: Path) -> None:
    assert lines_of(tmp_path, rules) == [f"inbound.{line}"]


@pytest.mark.parametrize("rules", [LOGIN + DEFAULT, LOGIN + AGAIN.replace("POST", "GET") + DEFAULT])
def test_a_narrower_rule_or_one_for_other_methods_hides_nothing(rules: str, tmp_path: Path) -> None:
    assert lines_of(tmp_path, rules) == []


def test_a_method_that_nobody_sends_is_a_warning(tmp_path: Path) -> None:
    assert lines_of(tmp_path, LOGIN.replace('"POST"', '"PSOT", "PURGE", "get"')) == [
        "warning: inbound.login.methods: PSOT is not a usual method; did you mean 'POST'?"
    ]


@pytest.mark.parametrize("spelt", ["{}.db", "./{}.db", "{}-link.db", "sub/../{}.db"])
@pytest.mark.parametrize("used", ["ledger", "store"])
def test_a_storage_in_the_file_of_the_ledger_or_the_store_is_an_error(tmp_path: Path, used: str, spelt: str) -> None:
    """Whichever were there first, the other would not open it: all budgets would be refused, or nobody limited."""
    (tmp_path / "sub").mkdir()
    (tmp_path / f"{used}-link.db").symlink_to(f"{used}.db")
    other = '[ledger]\nurl = "sqlite:///ledger.db"\n[store]\nurl = "sqlite:///store.db"\n'
    message = f"the {used} uses this file already; give the inbound limits a file of their own"
    lines = lines_of(tmp_path, f'{other}[inbound]\nurl = "sqlite:///{spelt.format(used)}"\n{LOGIN}')
    assert lines == [f"inbound.url: {message}"]
    with pytest.raises(ConfigError, match=message):
        load_rules(tmp_path / "quota.toml")


def test_all_rules_that_cannot_be_used_are_named_at_once(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, LOGIN.replace("/login", "login") + DEFAULT.replace("60s", "soon"))
    assert [line.partition(": ")[0] for line in lines] == ["inbound.login.path", "inbound.default.window"]
