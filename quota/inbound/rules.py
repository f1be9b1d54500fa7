"""What is limited: the rules of an application, and which of them a request falls under. Read this file first.

    Rule      whose requests: methods and a path, with one or more limits, one algorithm, and what happens in an outage
    Rules     the rules of one application in their order, and what applies to all of them

The first rule that matches counts the request; a rule without a path matches everything, so it stands last. A request
that no rule matches is not limited. With several limits, a request is admitted by all of them or counted by none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

from quota.common.functions import made_by
from quota.common.text import listed, nearest, show
from quota.errors import ConfigError
from quota.inbound.contract import Algorithm, Limit, Policy
from quota.inbound.identity import X_FORWARDED_FOR, Identify, Proxies, several
from quota.inbound.match import EVERYTHING, Pattern, Segments, names, parse_pattern
from quota.terms.limits import format_duration
from quota.web.documents import seconds

Fail = Literal["open", "closed"]

MAX_RULES = 500
"""The totals of a storage have room for the outcomes of this many."""

MAX_REMEMBERED_PATH, MAX_REMEMBERED_PATHS = 256, 1024
"""For how many paths the rules are remembered, and how many characters such a path may have."""

_FIELD = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_METHOD = re.compile(r"[A-Z][A-Z-]{0,19}")


class Rule:
    """Requests with one of these `methods` (none: all) and a path that the pattern means, and how often they may come:
    `limits` of (number, window in ms, for gcra also the burst).

    `cost` is what one request counts. `fail` says what happens while the storage does not answer: `"open"` admits,
    `"closed"` answers 503. A `shadow` rule counts and never refuses: the metrics say what it would have done.
    With `count_rejected` a refused request counts, too, so a client that keeps asking stays out.
    GET means HEAD as well: it costs as much. Raises ConfigError, which begins with the key that is wrong.
    """

    def __init__(
        self,
        name: str,
        limits: Limit | Sequence[Limit],
        *,
        path: str | None = None,
        methods: Iterable[str] = (),
        algorithm: Algorithm = "counter",
        cost: int = 1,
        fail: Fail = "open",
        shadow: bool = False,
        count_rejected: bool = False,
    ) -> None:
        self.limits = (limits,) if isinstance(limits, Limit) else several("limits", limits, "Limit(number, window_ms)")
        self.policy = Policy(name, self.limits, algorithm, _flag("count_rejected", count_rejected))
        """How the storage is asked."""
        if fail not in get_args(Fail):
            raise ConfigError(f"fail: {show(fail)}: {nearest(fail, get_args(Fail))}")
        if not isinstance(cost, int) or isinstance(cost, bool) or not 1 <= cost <= self.policy.most:
            raise ConfigError(f"cost: {show(cost)} is not a whole number from 1 to {self.policy.most}, its least limit")
        self.name, self.cost = name, cost
        self.path, self.pattern = path, EVERYTHING if path is None else _pattern("path", path)
        self.methods = self._methods(methods)
        self.fail: Fail = fail
        self.shadow = _flag("shadow", shadow)
        windows = [format_duration(limit.window_ms) for limit in self.limits]
        self.policies = (name,) if len(windows) == 1 else tuple(f"{name}-{window}" for window in windows)
        """The names of its limits, for clients."""
        self.policy_field = ", ".join(
            f'"{policy}";q={limit.number};w={seconds(limit.window_ms)}'
            for policy, limit in zip(self.policies, self.limits, strict=True)
        )
        """The value of `RateLimit-Policy`: see `quota.inbound.answers`."""

    def __repr__(self) -> str:
        return f"<Rule {self.name}: {' '.join(self.methods) or 'any method'} {self.path or 'any path'}>"

    def matches(self, method: str, path: Segments) -> bool:
        """Whether a request falls under this rule by one reading of its path."""
        return (not self.methods or method in self.methods) and self.pattern.matches(path)

    def hides(self, later: Rule) -> bool:
        """Whether this rule, standing before `later`, takes all that `later` means."""
        methods = not self.methods or (bool(later.methods) and set(later.methods) <= set(self.methods))
        return methods and self.pattern.covers(later.pattern)

    @staticmethod
    def _methods(methods: Iterable[str]) -> frozenset[str]:
        given = []
        for method in several("methods", methods, "methods"):
            if not isinstance(method, str) or not _METHOD.fullmatch(method.upper()):
                raise ConfigError(f'methods: {show(method)} is not a method; write for example "GET" or "POST"')
            given.append(method.upper())
        return frozenset([*given, "HEAD"] if "GET" in given else given)


class Rules:
    """The rules of an application, the storage that its workers share, and how they tell who asks.

    `url` is the storage: redis://... as for a ledger, or sqlite:///path; None: SQLite in the state folder. `exempt`
    are path patterns that no rule counts. `trusted_proxies`, `forwarded`, `key_field`, `keys` and `user` say who a
    request is from: see `quota.inbound.identity`. `keys` is a function that knows the valid keys, or the keys. Neither
    function may be async.
    With `x_fields` every answer has the `X-RateLimit-*` fields, too. Raises ConfigError.
    """

    def __init__(
        self,
        rules: Iterable[Rule],
        *,
        url: str | None = None,
        exempt: Iterable[str] = (),
        trusted_proxies: Iterable[str] = (),
        forwarded: str = X_FORWARDED_FOR,
        key_field: str | None = None,
        keys: Callable[[str], bool] | Iterable[str] | None = None,
        user: Callable[[Any], str | None] | None = None,
        x_fields: bool = False,
    ) -> None:
        self.rules = several("rules", rules, "Rules")
        if not all(isinstance(rule, Rule) for rule in self.rules):
            raise ConfigError("rules: each is a Rule")
        names = [rule.name for rule in self.rules]
        if len(names) > MAX_RULES or len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ConfigError(
                f"rules: the name {listed(twice)} stands twice" if twice else f"more than {MAX_RULES} rules"
            )
        self._methods = frozenset(method for rule in self.rules for method in rule.methods)
        self._remembered = lru_cache(maxsize=MAX_REMEMBERED_PATHS)(self._find)
        if not isinstance(url, str | None):
            raise ConfigError("url: it is not a str")  # not shown: it may hold a password
        self.url = url
        self.x_fields = _flag("x_fields", x_fields)
        self.exempt = tuple(_pattern("exempt", path) for path in several("exempt", exempt, "paths"))
        if key_field is not None and not (isinstance(key_field, str) and _FIELD.fullmatch(key_field)):
            raise ConfigError(
                f'key_field: {show(key_field)} is no name of a header field; write for example "X-API-Key"'
            )
        if keys is not None and not callable(keys):
            keys = several("keys", keys, "keys, or a function that knows them,")
        if user is not None and not callable(user):
            raise ConfigError(f"user: {show(user)} is no function")
        for key, function in ("keys", keys), ("user", user):
            if callable(function) and made_by(function) == "coroutine":
                raise ConfigError(f"{key}: an async function; give one that answers without being awaited")
        self.key_field = key_field
        self.any_key = key_field is not None and keys is None
        """A key field is named, and nobody knows which keys are valid: none counts."""
        self.identify = Identify(
            Proxies(trusted_proxies, forwarded),
            key_field=key_field,
            knows_key=keys if keys is None or callable(keys) else frozenset(keys).__contains__,
            user=user,
        )

    def find(self, method: str, path: str, mount: str = "", *, preflight: bool = False) -> tuple[Rule, ...]:
        """The rules that count a request: the first that matches, for each reading of its path. () if there is none.

        `path` is decoded. A rule may name it with or without `mount`, which the application is mounted under. A
        browser's preflight asks on behalf of the request that follows, so only a rule that names OPTIONS counts it.
        """
        method = method.upper()
        if method not in self._methods:  # a client may send 60 KB of it, and what was found is remembered
            method = ""
        if len(path) > MAX_REMEMBERED_PATH:
            return self._find(method, path, mount, preflight)
        return self._remembered(method, path, mount, preflight)

    def _find(self, method: str, path: str, mount: str, preflight: bool) -> tuple[Rule, ...]:
        rules: dict[str, Rule] = {}
        for called in names(path, mount):
            if any(pattern.matches(name) for name in called for pattern in self.exempt):
                continue
            for rule in self.rules:
                if any(rule.matches(method, name) for name in called) and (not preflight or method in rule.methods):
                    rules[rule.name] = rule
                    break
        return tuple(rules.values())


def _pattern(key: str, path: object) -> Pattern:
    if not isinstance(path, str):
        raise ConfigError(f"{key}: {show(path)} is no path; it begins with /")
    try:
        return parse_pattern(path)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None


def _flag(key: str, value: object) -> bool:
    if not isinstance(value, bool):  # "no" would be yes, and a shadow rule refuses nobody
        raise ConfigError(f"{key}: {show(value)} is neither True nor False")
    return value
