"""Rules: which one counts a request, and what makes one unusable."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quota.errors import ConfigError, UsageError
from quota.inbound import Limit, Rule, Rules, asgi, wsgi
from quota.inbound.contract import MAX_SCALE, Policy
from quota.inbound.rules import is_there, open_storage, opened

MINUTE_MS = 60_000
MINUTE = Limit(100, MINUTE_MS)


def names(rules: Rules, method: str, path: str, **options: Any) -> list[str]:
    return [rule.name for rule in rules.find(method, path, **options)]


RULES = Rules(
    [
        Rule("login", Limit(5, 60_000), path="/login", methods=["post"]),
        Rule("reads", MINUTE, path="/api/*", methods=["GET"]),
        Rule("trial", MINUTE, path="/api/*", methods=["PUT"], shadow=True),
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
        ("PUT", "/api/a", ["trial", "api"]),
        ("GET", "/healthz", []),
        ("GET", "/static/A//\u00e9.PNG", []),
        # The application may serve something else at another spelling.
        *(("GET", path, ["default"]) for path in ("/Healthz", "/healthz/", "//healthz", "/\u017ftatic/1", "/STATIC/1")),
        # Whether or not the application resolves it, the rule of what it reaches counts.
        ("POST", "/healthz/../login", ["default", "login"]),
        ("POST", "/login/../healthz", ["default"]),
        ("GET", "/static/../healthz", []),
        ("GET", "/api/./x", ["reads"]),
    ],
)
def test_the_first_rule_and_shadow_rules_before_it_count(method: str, path: str, counted: list[str]) -> None:
    assert names(RULES, method, path) == counted


@pytest.mark.parametrize("rule", ["/login", "/api/login"])
@pytest.mark.parametrize(
    ("path", "mount", "counted"),
    [
        ("/api/login", "/api", ["login"]),
        ("/login", "/api", ["login"]),
        ("/api/x/../login", "/api", ["default", "login"]),
        # As Litestar reads it.
        ("/apilogin", "/api", ["default", "login"]),
        ("/api/healthz", "/api", []),
        ("/caf\u00e9/login", "/caf\u00e9", None),
    ],
)
def test_a_rule_may_leave_out_the_mount_of_a_path(rule: str, path: str, mount: str, counted: list[str] | None) -> None:
    rules = Rules([Rule("login", MINUTE, path=rule), Rule("default", MINUTE)], exempt=["/healthz"])
    if counted is None:
        counted = ["login" if rule == "/login" else "default"]
    assert [each.name for each in rules.find("GET", path, mount)] == counted


def test_a_preflight_is_counted_only_by_a_rule_that_names_it() -> None:
    assert names(RULES, "OPTIONS", "/api/a", preflight=True) == []
    assert names(RULES, "OPTIONS", "/api/a") == ["api"]
    assert names(RULES, "OPTIONS", "/open/a", preflight=True) == ["cors"]
    assert names(RULES, "OPTIONS", "/api/a", preflight=True, overrides=["put, get"]) == ["api", "reads", "trial"]


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
    ("make", "message"),
    [
        (lambda: Rule("a", Limit(0, 60_000)), "rule a: .*a limit"),
        (lambda: Rule("a", [(1, 2)]), r"write each as Limit\(number, window_ms\)"),  # type: ignore[list-item]
        (lambda: Rule("a", [MINUTE, Limit(7, 1_000)], cost=8), "from 1 to 7"),
        (lambda: Rule("a", MINUTE, cost=True), "cost: True is not a whole number"),
        (lambda: Rule("a", Limit(9, 60_000, 3), algorithm="gcra", cost=4), "from 1 to 3"),
        (lambda: Rule("a", MINUTE, path="a"), "path: 'a' is not a decoded path"),
        (lambda: Rule("a", MINUTE, methods="GET"), "methods: a string where a list of methods is needed"),
        (lambda: Rule("a", MINUTE, methods=["GET /"]), "methods: 'GET /' is not a method"),
        (lambda: Rules([Rule("a", MINUTE), Rule("a", MINUTE)]), "the name a is used twice"),
        (lambda: Rules([MINUTE]), "rules: pass Rule objects"),  # type: ignore[list-item]
        (lambda: open_storage("mysql://db"), "inbound storage mysql:// has an unknown scheme; write sqlite:///PATH"),
        (lambda: open_storage("redis.internal?password=secret"), "inbound storage has an unknown scheme; write"),
        (
            lambda: open_storage("redis://secret:password@h:0/x"),
            r"^inbound storage redis://...: its database is not a number",
        ),
    ],
)
def test_an_unusable_rule_or_storage_is_refused_with_the_reason(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("rule", "limits", "algorithm", "says"),
    [
        ("a:b", (Limit(1, MINUTE_MS),), "counter", "a name is 1 to 64"),
        ("a", (Limit(1, MINUTE_MS),), "sliding", "algorithm: 'sliding': known: counter, gcra, log"),
        ("a", tuple(Limit(1, MINUTE_MS + n) for n in range(9)), "counter", "give it 1 to 8 limits, not 9"),
        ("a", (Limit(1, MINUTE_MS), Limit(2, MINUTE_MS)), "counter", "two limits have the same window"),
        ("a", (Limit(1, 999),), "counter", "from 1,000 to 2,678,400,000"),
        ("a", (Limit(1.5, MINUTE_MS),), "counter", "whole number"),
        ("a", (Limit(MAX_SCALE // MINUTE_MS + 1, MINUTE_MS),), "counter", "too much to count"),
        ("a", (Limit(1_001, MINUTE_MS),), "log", "at most 1000 requests; use counter"),
        ("a", (Limit(10, MINUTE_MS, 11),), "gcra", "needs a burst, from 1 up to its limit of 10"),
    ],
)
def test_a_policy_that_cannot_be_kept_is_refused(
    rule: str, limits: tuple[Limit, ...], algorithm: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        Policy(rule, limits, algorithm)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


def test_the_largest_limits_can_be_held() -> None:
    assert Policy("a", (Limit(MAX_SCALE // MINUTE_MS, MINUTE_MS),)).most == MAX_SCALE // MINUTE_MS
    assert Policy("a" * 64, (Limit(1_000, 1_000), Limit(10, 2_678_400_000)), "log").most == 10
    assert Policy("a", (Limit(10, 1_000, 3),), "gcra").most == 3


class Rude:
    """Nothing that a message could quote."""

    def __repr__(self) -> str:
        raise RuntimeError("no words\nfor it")


RULE = Rule("a", MINUTE)
DOORS: dict[str, Callable[[Any], object]] = {
    "^limits: ": lambda given: Rule("a", given),
    "^methods: ": lambda given: Rule("a", MINUTE, methods=given),
    "^rules: ": lambda given: Rules(given),
    "^exempt: ": lambda given: Rules([RULE], exempt=given),
    "^trusted_proxies: ": lambda given: Rules([RULE], trusted_proxies=given),
    "^keys: ": lambda given: Rules([RULE], keys=given),
    "^shadow: .* is neither True nor False": lambda given: Rule("a", MINUTE, shadow=given),
    "^count_rejected: .* is neither True nor False": lambda given: Rule("a", MINUTE, count_rejected=given),
    "^x_fields: .* is neither True nor False": lambda given: Rules([RULE], x_fields=given),
    "algorithm: ": lambda given: Rule("a", MINUTE, algorithm=given),
    "fail: ": lambda given: Rule("a", MINUTE, fail=given),
    "^rule a: ": lambda given: Rule("a", Limit(given, 60_000)),
    "^forwarded: ": lambda given: Rules([RULE], forwarded=given),
    "^user: ": lambda given: Rules([RULE], user=given),
    "^url: ": lambda given: Rules([RULE], url=given),
    "is not an application": lambda given: asgi(given, [RULE]),
    "; pass an ASGI or WSGI": lambda given: wsgi(given, [RULE]),
}


@pytest.mark.parametrize("message", DOORS)
def test_an_argument_of_the_wrong_type_is_one_line(message: str, state_dir: Path) -> None:
    """ "no" counted as yes: a shadow rule refuses nobody."""
    booleans: list[Any] = ["no", "", 0, None] if "True" in message else []
    for given in (5.5, object(), Rude(), *booleans):
        with pytest.raises(ConfigError, match=message) as refused:
            DOORS[message](given)
        assert (str(refused.value).isprintable(), len(str(refused.value)) < 200) == (True, True)


def test_a_url_of_the_wrong_type_is_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        Rules([RULE], url=b"redis://:s3cret@db/0")  # type: ignore[arg-type]
    assert "s3cret" not in str(refused.value)


async def late(_: object) -> Any:
    return "ada"


class Late:
    async def __call__(self, _: object) -> Any:
        return "ada"


@pytest.mark.parametrize("given", [late, Late(), partial(late)])
def test_a_function_that_must_be_awaited_is_one_line(given: Any) -> None:
    """Nobody awaits it, and its first answer is always true: each request would be a new visitor."""
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


def test_without_a_url_the_workers_of_a_machine_share_a_file_in_the_state_folder(state_dir: Path) -> None:
    rules, storage = opened([Rule("a", MINUTE)])
    assert storage.label == f"sqlite:///{state_dir}/inbound.db"
    assert not is_there(rules)
    assert storage.decide(rules.rules[0].policy, "a:203.0.113.7").admitted
    assert is_there(rules)
    storage.close()
