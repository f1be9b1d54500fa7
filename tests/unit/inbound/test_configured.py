"""Rules in quota.toml, and what `quota check` says of those that cannot be meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from quota.errors import ConfigError
from quota.inbound import Limit, load_rules
from quota.inbound.configured import examine
from quota.inbound.rules import opened
from quota.settings.load import load_settings

CREDENTIAL = '[credentials.main]\napi = "youtube-v3"\nkey = "env:KEY"\n'
FULL = """
[inbound]
url = "sqlite:///here.db"
exempt = ["/healthz"]
trusted_proxies = ["10.0.0.0/8", "unix"]
forwarded = "Forwarded"
key_field = "X-API-Key"
keys = "file:keys.txt"
x_fields = true

[inbound.login]
methods = ["POST"]
path = "/login"
limit = 5
window = "15m"
algorithm = "log"
fail = "closed"
count_rejected = true

[inbound.downloads]
path = "/files/{name}"
algorithm = "gcra"
limits = [{ limit = 60, window = "1m", burst = 10 }, { limit = 1_000, window = "1d", burst = 100 }]
cost = 2
shadow = true

[inbound.default]
limit = 600
window = "60s"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "quota.toml"
    path.write_text(CREDENTIAL + text, encoding="utf-8")
    (folder / "keys.txt").write_text("good\n\nbetter\r\n", encoding="utf-8")
    return path


def test_load_rules_reads_the_rules_of_the_configuration(tmp_path: Path) -> None:
    rules = load_rules(write(tmp_path, FULL))
    login, downloads, default = rules.rules
    assert login.limits == (Limit(5, 900_000),)
    assert (login.policy.algorithm, login.fail, login.policy.count_rejected) == ("log", "closed", True)
    assert downloads.limits == (Limit(60, 60_000, 10), Limit(1_000, 86_400_000, 100))
    assert (downloads.cost, downloads.shadow, downloads.policies) == (2, True, ("downloads-1m", "downloads-24h"))
    assert (default.path, default.methods, default.limits) == (None, frozenset(), (Limit(600, 60_000),))
    assert (rules.url, rules.x_fields) == (f"sqlite:///{tmp_path}/here.db", True)
    scope = {"client": ("10.0.0.1", 1), "headers": [(b"forwarded", b"for=203.0.113.7"), (b"x-api-key", b"better")]}
    assert rules.identify.asgi(scope).startswith("k:")
    scope["headers"] = [(b"forwarded", b"for=203.0.113.7"), (b"x-api-key", b"bad")]
    assert rules.identify.asgi(scope) == "a:203.0.113.7"


RULE = '[inbound.a]\npath = "/a"\nlimit = 1\nwindow = "60s"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", 'inbound: missing; add [inbound.default] with limit = 600 and window = "60s"'),
        ("[inbound.keys]\nlimit = 5\n", "inbound.keys: a non-empty string is needed"),
        (RULE.replace("60s", "1500ms"), "inbound.a.window: '1500ms' is not in whole seconds, at most 31 days; write"),
        (RULE.replace("60s", "32d"), "inbound.a.window: '32d' is not in whole seconds, at most 31 days; write"),
        ('[inbound]\nurl = "sqlite://inbound.db"\n' + RULE, "inbound.url: a file is sqlite:///relative/path or"),
        ('[inbound]\ntrusted_proxies = ["0.0.0.0/0"]\n' + RULE, "inbound.trusted_proxies: '0.0.0.0/0' trusts"),
        (RULE + "burst = 1\n", "inbound.a: only the algorithm gcra has a burst"),
        (RULE + "limits = [{ limit = 1, window = '60s' }]\n", "inbound.a.limit: stands in each of limits"),
        ('[inbound]\nkeys = "s3cret-key"\n' + RULE, 'inbound.keys: write "file:/path"'),
        ('[inbound]\nkey_field = "X Key"\n' + RULE, "inbound.key_field: 'X Key' is not the name of a header"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_rules(write(tmp_path, text))
    assert message in str(error.value)
    assert str(error.value).startswith(f"{tmp_path}/quota.toml: inbound")
    assert str(error.value).count("quota.toml: ") == 1
    assert "s3cret" not in str(error.value)


def test_a_file_of_keys_may_come_from_any_editor(tmp_path: Path) -> None:
    path = write(tmp_path, '[inbound]\nkey_field = "X-API-Key"\nkeys = "file:keys.txt"\n' + RULE)

    def is_known(key: bytes) -> bool:
        return load_rules(path).identify.asgi({"headers": [(b"x-api-key", key)]}).startswith("k:")

    (tmp_path / "keys.txt").write_bytes(b"\xef\xbb\xbfgood\r\n" + "\u00c5ngstr\u00f6m".encode() + b"\r\n")
    keys = (b"good", "\u00c5ngstr\u00f6m".encode(), b"ngstr\xc3\xb6m", b"bad")
    assert [is_known(key) for key in keys] == [True, True, False, False]
    for key in "voil\u00e0", "\u00c5ngstr\u00f6m":
        for editor in "utf-8", "latin-1":
            (tmp_path / "keys.txt").write_bytes(f"{key}\r\n".encode(editor))
            assert is_known(key.encode())
            assert is_known(key.encode("latin-1"))
    (tmp_path / "keys.txt").write_bytes("good\r\n".encode("utf-16"))
    with pytest.raises(ConfigError, match="line 1 of the file has a character that no header field has"):
        load_rules(path)


def test_a_url_may_stand_elsewhere_as_it_may_hold_a_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INBOUND_URL", "redis://:hunter2@127.0.0.1:1/0")
    rules, storage = opened(load_rules(write(tmp_path, '[inbound]\nurl = "env:INBOUND_URL"\n' + RULE)))
    assert rules.url == "redis://:hunter2@127.0.0.1:1/0"
    assert "hunter2" not in storage.label
    monkeypatch.delenv("INBOUND_URL")
    with pytest.raises(ConfigError, match="INBOUND_URL is not set"):
        load_rules(tmp_path / "quota.toml")


def test_load_rules_without_a_configuration_is_an_error(state_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"no quota\.toml was found: set QUOTA_CONFIG\. Rules in code need no file"):
        load_rules()


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


def lines_of(folder: Path, rules: str) -> list[str]:
    """What `quota check` says of these rules, a line each."""
    path = folder / "quota.toml"
    path.write_text(rules, encoding="utf-8")
    (folder / "keys.txt").write_text("good\n", encoding="utf-8")
    return [str(finding).removeprefix("error: ") for finding in examine(load_settings(path))]


@pytest.mark.parametrize(
    ("rules", "line"),
    [
        (
            LOGIN + AGAIN,
            "inbound.again: no request reaches it: rule login before it takes '/login'; put again before it",
        ),
        (
            '[inbound]\nexempt = ["/login/*"]\n' + LOGIN,
            "inbound.login: no request reaches it: exempt covers all of its paths; remove this rule or change exempt",
        ),
        (
            '[inbound]\nkey_field = "X-API-Key"\n' + LOGIN,
            "inbound.key_field: has no effect without keys; add keys, or remove this key",
        ),
        (
            LOGIN + "cost = 3\n",
            "inbound.login.cost: 3 is not a whole number from 1 to 2, its smallest limit; correct it",
        ),
        (
            '[inbound]\nkeys = "file:keys.txt"\n' + LOGIN,
            "inbound.keys: has no effect without key_field; add key_field, or remove this key",
        ),
        (
            '[inbound]\nurl = "sqlite:///~nobody-has-it/x.db"\n' + LOGIN,
            "inbound.url: ~nobody-has-it/x.db: this home folder is unknown; write the path out",
        ),
        (
            LOGIN.replace('"POST"', '"PSOT", "PURGE", "get"'),
            "warning: inbound.login.methods: PSOT is not a usual method; did you mean 'POST'?",
        ),
        # A narrower rule before it, or one for other methods, or in shadow, hides nothing.
        (LOGIN + "shadow = true\n" + AGAIN, None),
        (LOGIN + DEFAULT, None),
        (LOGIN + AGAIN.replace("POST", "GET") + DEFAULT, None),
    ],
)
def test_a_rule_that_no_request_reaches_or_that_cannot_be_used(rules: str, line: str | None, tmp_path: Path) -> None:
    assert lines_of(tmp_path, rules) == ([] if line is None else [line])


@pytest.mark.parametrize(("used", "spelt"), [("ledger", "{}-link.db"), ("store", "sub/../{}.db")])
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
