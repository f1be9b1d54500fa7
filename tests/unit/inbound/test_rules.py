"""Rules: which one counts a request, what makes one unusable, and how they stand in quota.toml."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quota.errors import ConfigError, UsageError
from quota.inbound import Limit, Rule, Rules, asgi, load_rules, wsgi
from quota.inbound.contract import MAX_SCALE, Policy
from quota.inbound.rules import is_there, open_storage, opened
from quota.settings.load import load_settings

MINUTE_MS = 60_000
MINUTE = Limit(100, MINUTE_MS)


def names(rules: Rules, method: str, path: str, **options: bool) -> list[str]:
    return [rule.name for rule in rules.find(method, path, **options)]


RULES = Rules(
    [
        Rule("login", Limit(5, 60_000), path="/login", methods=["post"]),
        Rule("reads", MINUTE, path="/api/*", methods=["GET"]),
        Rule("api", MINUTE, path="/api/*"),
        Rule("cors", MINUTE, path="/open/*", methods=["OPTIONS"]),
        Rule("default", MINUTE),
    ],
    exempt=["/healthz", "/static/*"],
)


@pytest.mark.parametrize(
    ("method", "path", "counted"),
    [
        ("POST", "/login", ["login"]),
        ("pOsT", "/Login/", ["login"]),
        ("GET", "/login", ["default"]),
        ("GET", "/api/a", ["reads"]),
        ("HEAD", "/api/a", ["reads"]),
        ("DELETE", "/api/a", ["api"]),
        ("BREW", "/api/a", ["api"]),
        ("GET", "/", ["default"]),
        ("GET", "/healthz", []),
        ("GET", "/static/a/b.css", []),
        # Whether or not the application resolves it, the rule of what it reaches counts.
        ("POST", "/healthz/../login", ["default", "login"]),
        ("POST", "/static/../login", ["login"]),
        ("GET", "/login/../healthz", ["default"]),
        ("POST", "/login/../healthz", ["default"]),
        ("GET", "/static/../healthz", []),
        ("GET", "/api/../x", ["reads", "default"]),
        ("GET", "/api/./x", ["reads"]),
    ],
)
def test_the_first_rule_that_matches_counts(method: str, path: str, counted: list[str]) -> None:
    assert names(RULES, method, path) == counted


@pytest.mark.parametrize("rule", ["/login", "/api/login"])
@pytest.mark.parametrize(
    ("path", "mount", "counted"),
    [
        ("/api/login", "/api", ["login"]),
        ("/login", "/api", ["login"]),
        ("/api/login\n", "/api/", ["login"]),
        ("/api/x/../login", "/api", ["default", "login"]),
        ("/api/../api/login", "/api", ["default", "login"]),
        # As Litestar reads it.
        ("/apilogin", "/api", ["default", "login"]),
        ("/x/api/login", "/api", ["default", "login"]),
        ("/api/healthz", "/api", []),
        ("/caf\u00e9/login", "/caf\u00e9", None),
    ],
)
def test_a_rule_names_a_path_with_what_it_is_mounted_under_or_without(
    rule: str, path: str, mount: str, counted: list[str] | None
) -> None:
    rules = Rules([Rule("login", MINUTE, path=rule), Rule("default", MINUTE)], exempt=["/healthz"])
    if counted is None:
        counted = ["login" if rule == "/login" else "default"]
    assert [one.name for one in rules.find("GET", path, mount)] == counted


def test_a_preflight_is_counted_only_by_a_rule_that_names_it() -> None:
    assert names(RULES, "OPTIONS", "/api/a", preflight=True) == []
    assert names(RULES, "OPTIONS", "/api/a") == ["api"]
    assert names(RULES, "OPTIONS", "/open/a", preflight=True) == ["cors"]


def test_a_flood_of_methods_and_paths_is_not_remembered() -> None:
    rules = Rules([Rule("get", MINUTE, path="/a", methods=["GET"]), Rule("default", MINUTE)])
    for number in range(100):
        assert names(rules, "X" * 60_000 + str(number), "/a") == ["default"]
        assert names(rules, "GET", "/a" * 1_000 + str(number)) == ["default"]
    assert names(rules, "get", "/a") == ["get"]
    assert rules._remembered.cache_info().currsize == 2


def test_without_a_default_rule_the_rest_is_not_limited() -> None:
    assert names(Rules([Rule("login", MINUTE, path="/login")]), "GET", "/") == []


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Rule("a", Limit(0, 60_000)), "rule a: .*a limit"),
        (lambda: Rule("a", [(1, 2)]), r"write each as Limit\(number, window_ms\)"),  # type: ignore[list-item]
        (lambda: Rule("a", MINUTE, fail="shut"), "fail: 'shut': known: open, closed"),  # type: ignore[arg-type]
        (lambda: Rule("a", MINUTE, cost=101), "cost: 101 is not a whole number from 1 to 100"),
        (lambda: Rule("a", [MINUTE, Limit(7, 1_000)], cost=8), "from 1 to 7"),
        (lambda: Rule("a", MINUTE, cost=True), "cost: True is not a whole number"),
        (lambda: Rule("a", Limit(9, 60_000, 3), algorithm="gcra", cost=4), "from 1 to 3"),
        (lambda: Rule("a", MINUTE, path="a"), "path: 'a' is not a path; a path begins with /"),
        (lambda: Rule("a", MINUTE, methods="GET"), "methods: a string where a list of methods is needed"),
        (lambda: Rule("a", MINUTE, methods=["GET /"]), "methods: 'GET /' is not a method"),
        (lambda: Rules([Rule("a", MINUTE), Rule("a", MINUTE)]), "the name a is used twice"),
        (lambda: Rules([MINUTE]), "rules: pass Rule objects"),  # type: ignore[list-item]
        (lambda: Rules([], exempt="/a"), "a list of paths"),
        (lambda: Rules([], exempt=[7]), "exempt: 7 is not a path"),  # type: ignore[list-item]
    ],
)
def test_an_unusable_rule_is_refused_with_the_reason(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


@pytest.mark.parametrize(
    ("rule", "limits", "algorithm", "says"),
    [
        ("", (Limit(1, MINUTE_MS),), "counter", "rule '': a name is 1 to 64"),
        ("a:b", (Limit(1, MINUTE_MS),), "counter", "a name is 1 to 64"),
        ("a", (Limit(1, MINUTE_MS),), "sliding", "algorithm: 'sliding': known: counter, gcra, log"),
        ("a", (), "counter", "give it 1 to 8 limits, not 0"),
        ("a", tuple(Limit(1, MINUTE_MS + n) for n in range(9)), "counter", "give it 1 to 8 limits, not 9"),
        ("a", (Limit(1, MINUTE_MS), Limit(2, MINUTE_MS)), "counter", "two limits have the same window"),
        ("a", (Limit(1, 999),), "counter", "from 1,000 to 2,678,400,000"),
        ("a", (Limit(1, 2_678_400_001),), "counter", "from 1,000 to 2,678,400,000"),
        ("a", (Limit(1.5, MINUTE_MS),), "counter", "whole number"),
        ("a", (Limit(MAX_SCALE // MINUTE_MS + 1, MINUTE_MS),), "counter", "too much to count"),
        ("a", (Limit(1_001, MINUTE_MS),), "log", "use counter for 1001"),
        ("a", (Limit(10, MINUTE_MS, 11),), "gcra", "needs a burst, from 1 up to its limit of 10"),
    ],
)
def test_a_policy_that_cannot_be_kept_is_refused_when_it_is_made(
    rule: str, limits: tuple[Limit, ...], algorithm: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        Policy(rule, limits, algorithm)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


def test_the_largest_limits_can_be_held() -> None:
    assert Policy("a", (Limit(MAX_SCALE // MINUTE_MS, MINUTE_MS),)).most == MAX_SCALE // MINUTE_MS
    assert Policy("a" * 64, (Limit(1_000, 1_000), Limit(10, 2_678_400_000)), "log").most == 10
    assert Policy("a", (Limit(10, 1_000, 3),), "gcra").most == 3


def test_another_scheme_is_no_storage() -> None:
    with pytest.raises(ConfigError, match="inbound storage of kind 'mysql' is not known"):
        open_storage("mysql://db")
    with pytest.raises(ConfigError, match=r"^inbound storage redis://h:0/x: its database is not a number"):
        open_storage("redis://secret:password@h:0/x")


def test_limits_have_names_that_clients_tell_apart() -> None:
    assert Rule("api", MINUTE).policy_field == '"api";q=100;w=60'
    both = Rule("api", [MINUTE, Limit(5_000, 86_400_000)])
    assert both.policies == ("api-1m", "api-24h")
    assert both.policy_field == '"api-1m";q=100;w=60, "api-24h";q=5000;w=86400'


# -- quota.toml --------------------------------------------------------------------------------------------------------

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


def test_rules_from_the_configuration(tmp_path: Path) -> None:
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
    ("text", "said"),
    [
        (
            "[inbound]\ntrusted_proxy = []\n" + RULE,
            "inbound.trusted_proxy: unknown key; did you mean 'trusted_proxies'?",
        ),
        (RULE + "algoritm = 'log'\n", "inbound.a.algoritm: unknown key; did you mean 'algorithm'?"),
        (
            "[inbound.a]\nlimits = [{ limit = 1, windw = '60s' }]\n",
            "inbound.a.limits[0].windw: unknown key; did you mean 'window'?",
        ),
        ("inbound = 3\n", "inbound: a number where a table is needed"),
    ],
)
def test_an_unknown_key_stops_every_command(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "quota.toml"
    path.write_text(text + CREDENTIAL, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load_settings(path)
    assert str(error.value) == f"{path}: {said}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", 'inbound: missing; add [inbound.default] with limit = 600 and window = "60s"'),
        ("[inbound]\n", "inbound: at least one rule is needed;"),
        ("[inbound.keys]\nlimit = 5\n", "inbound.keys: a key of [inbound] is called so; give the rule another name"),
        (RULE + "cost = 2\n", "inbound.a.cost: 2 is not a whole number from 1 to 1, its smallest limit"),
        (RULE.replace("60s", "soon"), "inbound.a.window: 'soon' is not a duration"),
        (
            RULE.replace("60s", "1500ms"),
            "inbound.a.window: '1500ms' is not in whole seconds; write for example \"60s\"",
        ),
        (RULE + "shadow = 'yes'\n", "inbound.a.shadow: a string where true or false is needed"),
        ('[inbound]\nurl = "sqlite://inbound.db"\n' + RULE, "inbound.url: a file is sqlite:///relative/path or"),
        ('[inbound]\nurl = "sqlite://"\n' + RULE, "inbound.url: a database in memory is lost"),
        (
            '[inbound]\ntrusted_proxies = ["0.0.0.0/0"]\n' + RULE,
            "inbound.trusted_proxies: '0.0.0.0/0' trusts everybody",
        ),
        (RULE + "burst = 1\n", "inbound.a: only the algorithm gcra has a burst"),
        (RULE + "limits = [{ limit = 1, window = '60s' }]\n", "inbound.a.limit: stands in each of limits"),
        ('[inbound]\nforwarded = "x-real-ip"\n' + RULE, "inbound.forwarded: 'x-real-ip'"),
        ('[inbound]\nkeys = "s3cret-key"\n' + RULE, 'inbound.keys: write "file:/path"'),
        ('[inbound]\nkeys = "file:absent"\n' + RULE, "inbound.keys: the file cannot be read: No such file"),
        ('[inbound]\nkey_field = "X Key"\n' + RULE, "inbound.key_field: 'X Key' is not the name of a header field"),
        ('[inbound]\nexempt = ["a"]\n' + RULE, "inbound.exempt: 'a' is not a path"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_rules(write(tmp_path, text))
    assert said in str(error.value)
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


def test_a_single_key_is_not_a_list_of_letters() -> None:
    with pytest.raises(ConfigError, match="keys: a string where a list"):
        Rules([Rule("a", MINUTE)], key_field="X-API-Key", keys="s3cret")


@pytest.mark.parametrize("given", [5, None, True, object(), print])
def test_a_value_that_is_not_a_list_is_one_line(given: Any) -> None:
    rule = Rule("a", MINUTE)
    doors = {
        "limits": lambda: Rule("a", given),
        "methods": lambda: Rule("a", MINUTE, methods=given),
        "rules": lambda: Rules(given),
        "exempt": lambda: Rules([rule], exempt=given),
        "trusted_proxies": lambda: Rules([rule], trusted_proxies=given),
        "forwarded": lambda: Rules([rule], forwarded=given),
    }
    if given is not None and not callable(given):
        doors["keys"] = lambda: Rules([rule], keys=given)
        doors["user"] = lambda: Rules([rule], user=given)
    for key, door in doors.items():
        with pytest.raises(ConfigError) as error:
            door()
        said = str(error.value)
        assert (said.startswith(f"{key}: "), said.isprintable(), len(said) < 200) == (True, True, True)


class Rude:
    """Nothing that a message could quote."""

    def __repr__(self) -> str:
        raise RuntimeError("no words\nfor it")


@pytest.mark.parametrize("given", ["no", "", 0, 1, None, [], Rude()], ids=lambda given: type(given).__name__)
def test_a_value_that_is_not_a_boolean_is_one_line(given: Any) -> None:
    """ "no" counted as yes: a shadow rule refuses nobody."""
    doors = {
        "shadow": lambda: Rule("a", MINUTE, shadow=given),
        "count_rejected": lambda: Rule("a", MINUTE, count_rejected=given),
        "x_fields": lambda: Rules([Rule("a", MINUTE)], x_fields=given),
    }
    for key, door in doors.items():
        with pytest.raises(ConfigError, match=f"^{key}: .* is neither True nor False") as refused:
            door()
        assert str(refused.value).isprintable()


@pytest.mark.parametrize("given", [5.5, b"redis://:s3cret@db/0", Rude()], ids=lambda given: type(given).__name__)
def test_an_argument_of_the_wrong_type_is_one_line(given: Any, state_dir: Path) -> None:
    rules = [Rule("a", MINUTE)]
    for door in (
        lambda: Rule("a", MINUTE, algorithm=given),
        lambda: Rule("a", MINUTE, fail=given),
        lambda: Rule("a", Limit(given, 60_000)),
        lambda: Rules(rules, forwarded=given),
        lambda: Rules(rules, url=given),
        lambda: Policy("a", (MINUTE,), given),
        lambda: asgi(given, rules),
        lambda: wsgi(given, rules),
    ):
        with pytest.raises(ConfigError) as refused:
            door()
        assert (str(refused.value).isprintable(), len(str(refused.value)) < 200) == (True, True)
    with pytest.raises(ConfigError) as refused:
        Rules(rules, url=given)
    assert "s3cret" not in str(refused.value)


async def late(_: object) -> Any:
    return "ada"


class Late:
    async def __call__(self, _: object) -> Any:
        return "ada"


@pytest.mark.parametrize("given", [late, Late(), partial(late)])
def test_a_function_that_must_be_awaited_is_one_line(given: Any) -> None:
    """Nobody awaits it, and what it answers first is true: each request would be another visitor's."""
    for key, options in ("user", {"user": given}), ("keys", {"key_field": "X-API-Key", "keys": given}):
        with pytest.raises(ConfigError, match=f"^{key}: the function is async; pass"):
            Rules([Rule("a", MINUTE)], **options)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("key", ["user", "keys"])
def test_an_awaitable_is_not_an_identity(key: str) -> None:
    options: dict[str, Any] = {"key_field": "X-API-Key"} | {key: lambda asked: late(asked)}
    identify = Rules([Rule("a", MINUTE)], **options).identify
    for ask in (
        lambda: identify.asgi({"headers": [(b"x-api-key", b"invented")]}),
        lambda: identify.wsgi({"HTTP_X_API_KEY": "invented"}),
    ):
        with pytest.raises(UsageError, match=f"^{key}: the function returned an awaitable; pass"):
            ask()


def test_a_url_may_stand_elsewhere_because_it_may_hold_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INBOUND_URL", "redis://:hunter2@127.0.0.1:1/0")
    rules, storage = opened(load_rules(write(tmp_path, '[inbound]\nurl = "env:INBOUND_URL"\n' + RULE)))
    assert rules.url == "redis://:hunter2@127.0.0.1:1/0"
    assert "hunter2" not in storage.label
    monkeypatch.delenv("INBOUND_URL")
    with pytest.raises(ConfigError, match="INBOUND_URL is not set"):
        load_rules(tmp_path / "quota.toml")


def test_without_a_url_the_workers_of_a_machine_share_a_file_in_the_state_folder(state_dir: Path) -> None:
    rules, storage = opened([Rule("a", MINUTE)])
    assert storage.label == f"sqlite:///{state_dir}/inbound.db"
    assert not is_there(rules)
    assert storage.decide(rules.rules[0].policy, "a:203.0.113.7").admitted
    assert is_there(rules)
    storage.close()


def test_without_any_configuration_rules_have_to_be_given(state_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"no quota\.toml was found: set QUOTA_CONFIG, or pass rules in code"):
        load_rules()
