"""The rules of an application, and which of them count a request. Read this file first.

    Rule      methods and a path, with one or more limits, an algorithm, and what happens in an outage
    Rules     the rules of one application in their order, with the settings for all of them
    Pattern   a path pattern, and whether it matches a reading of a path
    opened    the rules and the storage that its workers share

The first rule that matches counts the request, and so does each shadow rule before it that matches. A rule without a
path matches every request, so it comes last. A request that no rule matches is not limited. With several limits, all of
them admit a request, or none counts it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, get_args
from unicodedata import combining, normalize

from quota.common.hosts import one_spelling, without_dots
from quota.common.text import listed, nearest, show
from quota.errors import ConfigError
from quota.inbound.contract import Algorithm, Limit, Policy, Storage
from quota.inbound.identity import X_FORWARDED_FOR, Identify, Proxies, UserOf, several
from quota.ledger.factory import REDIS_SCHEMES, canonical, file_of, shown_scheme
from quota.ledger.files import check_options
from quota.settings.model import make_state_folder
from quota.terms.arguments import made_by
from quota.terms.limits import format_duration
from quota.web.documents import seconds

Fail = Literal["open", "closed"]

MAX_RULES = 500
"""The most rules: the totals of a storage have room for their outcomes."""

MAX_REMEMBERED_PATH, MAX_REMEMBERED_PATHS = 256, 1024
"""The most characters of a path whose rules are cached, and the most cached paths."""

_FIELD = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_METHOD = re.compile(r"[A-Z][A-Z-]{0,19}")


class Rule:
    """Limits the requests with one of these `methods` (none: all) and a path that matches the pattern. A limit is
    (number, window in ms, for gcra also the burst).

    A request counts `cost` units. If the storage does not answer, `fail` decides: `"open"` admits, `"closed"` answers
    503. A `shadow` rule counts and never refuses; the metrics show what it would have refused. With `count_rejected`, a
    refused request counts too, so a client that keeps asking stays out. GET includes HEAD, which costs the application
    as much. Raises ConfigError, which begins with the wrong key.
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
        """The part that the storage needs."""
        if fail not in get_args(Fail):
            raise ConfigError(f"fail: {show(fail)}: {nearest(fail, get_args(Fail))}")
        most = self.policy.most
        if not isinstance(cost, int) or isinstance(cost, bool) or not 1 <= cost <= most:
            raise ConfigError(f"cost: {show(cost)} is not a whole number from 1 to {most}, its smallest limit")
        self.name, self.cost = name, cost
        self.path = path
        self.pattern = EVERYTHING if path is None else parse_pattern(path)
        given = []
        for method in several("methods", methods, "methods"):
            if not isinstance(method, str) or not _METHOD.fullmatch(method.upper()):
                raise ConfigError(f'methods: {show(method)} is not a method; write for example "GET" or "POST"')
            given.append(method.upper())
        self.methods = frozenset([*given, "HEAD"] if "GET" in given else given)
        self.fail: Fail = fail
        self.shadow = _flag("shadow", shadow)
        windows = [format_duration(limit.window_ms) for limit in self.limits]
        self.policies = (name,) if len(windows) == 1 else tuple(f"{name}-{window}" for window in windows)
        """The names of the limits in responses."""
        self.policy_field = ", ".join(
            f'"{policy}";q={limit.number // cost};w={seconds(limit.window_ms)}'
            for policy, limit in zip(self.policies, self.limits, strict=True)
        )
        """The value of `RateLimit-Policy`: see `quota.inbound.middleware`."""

    def __repr__(self) -> str:
        return f"<Rule {self.name}: {' '.join(self.methods) or 'any method'} {self.path or 'any path'}>"

    def hides(self, later: Rule) -> bool:
        """Whether no request reaches `later` behind this rule. A shadow rule lets all pass."""
        methods = not self.methods or (bool(later.methods) and set(later.methods) <= set(self.methods))
        return not self.shadow and methods and self.pattern.covers(later.pattern)


class Rules:
    """The rules of an application, the storage that its workers share, and how to identify visitors.

    `url` is the storage: redis://... as for a ledger, or sqlite:///path; None means SQLite in the state folder. Other
    applications there share the counts of rules with the same name. No rule counts the path patterns in `exempt`.
    `trusted_proxies`, `forwarded`, `key_field`, `keys` and `user` identify the visitor: see `quota.inbound.identity`.
    `keys` are the valid keys, or a function that tells whether a key is valid. `keys` and `user` cannot be async
    functions. With `x_fields`, answers also have the `X-RateLimit-*` fields. Raises ConfigError.
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
        user: UserOf = None,
        x_fields: bool = False,
    ) -> None:
        self.rules = several("rules", rules, "Rules")
        if not all(isinstance(rule, Rule) for rule in self.rules):
            raise ConfigError("rules: pass Rule objects")
        names = [rule.name for rule in self.rules]
        if len(names) > MAX_RULES or len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            why = f"the name {listed(twice)} is used twice" if twice else f"more than {MAX_RULES}"
            raise ConfigError(f"rules: {why}")
        self._methods = frozenset(method for rule in self.rules for method in rule.methods)
        self._remembered = lru_cache(maxsize=MAX_REMEMBERED_PATHS)(self._find)
        if not isinstance(url, str | None):
            raise ConfigError("url: not a str")  # not shown: it may hold a password
        self.url = url
        self.x_fields = _flag("x_fields", x_fields)
        paths = several("exempt", exempt, "paths")
        self.exempt = tuple(parse_pattern(path, "exempt") for path in paths)
        self._exempt_spelled = re.compile("|".join(map(_spelled, paths)) or "(?!)", re.DOTALL)
        if key_field is not None and not (isinstance(key_field, str) and _FIELD.fullmatch(key_field)):
            raise ConfigError(f"key_field: {show(key_field)} is not the name of a header, as X-API-Key is")
        if keys is not None and not callable(keys):
            keys = frozenset(several("keys", keys, "keys, or a function,")).__contains__
        if user is not None and not callable(user):
            raise ConfigError(f"user: {show(user)} is not a function")
        for key, function in ("keys", keys), ("user", user):
            if callable(function) and made_by(function) == "coroutine":
                raise ConfigError(f"{key}: the function is async; pass a function that is not async")
        self.identify = Identify(Proxies(trusted_proxies, forwarded), key_field=key_field, knows_key=keys, user=user)

    def find(
        self, method: str, path: str, mount: str = "", *, preflight: bool = False, overrides: Sequence[str] = ()
    ) -> tuple[Rule, ...]:
        """The rules that count a request: for each reading of its path, the first rule that matches, and the shadow
        rules before it that match. () if none.

        `path` is decoded. A rule may name it with or without `mount`, the path under which the application is mounted.
        A browser sends a preflight for another request, so only a rule that names OPTIONS counts the preflight.
        `overrides` are the values of the header fields in OVERRIDES: the application may read the method there.
        """
        if overrides:  # no browser's preflight has them
            named = {name.strip() for name in ",".join(overrides).upper().split(",")}
            counting = [self.find(each, path, mount) for each in (method, *sorted(named & self._methods))]
            return tuple({rule.name: rule for rules in counting for rule in rules}.values())
        method = method.upper()
        if method not in self._methods:  # a client may send 60 KB of method, which would stay in the cache
            method = ""
        if len(path) > MAX_REMEMBERED_PATH:
            return self._find(method, path, mount, preflight)
        return self._remembered(method, path, mount, preflight)

    def _find(self, method: str, path: str, mount: str, preflight: bool) -> tuple[Rule, ...]:
        rules: dict[str, Rule] = {}
        above = mount.rstrip("/")
        is_exempt = any(map(self._exempt_spelled.fullmatch, (path, above + path, path.removeprefix(above))))
        for called in names(path, mount):
            if is_exempt and any(pattern.matches(name) for name in called for pattern in self.exempt):
                continue
            for rule in self.rules:
                counts_method = method in rule.methods or not (rule.methods or preflight)
                if counts_method and any(rule.pattern.matches(name) for name in called):
                    rules[rule.name] = rule
                    if not rule.shadow:
                        break
        return tuple(rules.values())


def _flag(key: str, value: object) -> bool:
    if not isinstance(value, bool):  # "no" would be true, and a shadow rule refuses nothing
        raise ConfigError(f"{key}: {show(value)} is neither True nor False")
    return value


# -- patterns and paths ------------------------------------------------------------------------------------------------

# Patterns and the paths that they match. A visitor cannot avoid a rule by spelling a path differently: rules match
# every reading of a path, and `exempt` only the path as it is spelled.
#
#     /login              this path
#     /users/{id}         any one segment in this place
#     /api/*              this path and everything below it; `*` is only allowed at the end
#
# A pattern is matched segment by segment. The time depends on the length of the pattern, not on what a client sends.
#
# Paths are decoded, as the server passes them to the application. Their meaning depends on the application, which this
# package does not know. So it assumes every meaning:
#
# - Upper case, empty segments, and a slash or line feed at the end make no difference: `//Login/` is `/login`. (Many
#   routers match with a regular expression that ends with `$`, which accepts a last line feed.)
# - A path with `.` or `..`, with letters that Unicode writes in several ways, with bytes that are not UTF-8, or in the
#   form of a url has several readings. All of them count: see `readings`.
# - An application mounted at `/api` is reached as `/api/login` and sees `/login`. A rule may use either: see `names`.

ANY_SEGMENT = "{}"
"""A segment of a pattern that matches any segment. No literal segment is spelled like this."""

MAX_PATTERN = 256
MAX_MARKS = 30
"""The most marks, such as accents, of one letter that are compared, as in Unicode's stream-safe text (UAX #15). Sorting
takes the square of their number, which a client chooses."""

_MANY = re.compile(rf"[^\x00-\x7f]{{{MAX_MARKS + 1}}}")
_NO_UTF_8, _NO_TEXT = re.compile("[\udc80-\udcff]"), re.compile("[\ud800-\udc7f\udd00-\udfff]")
_SEGMENT = re.compile(r"\{[A-Za-z_][A-Za-z0-9_]{0,63}\}|(?!\.\.?$|<.*>$|:\w+$|.*%[0-9A-Fa-f]{2})[^*{}?#\\]*(?<!\$)")
"""A segment: `{name}` or a text. Routes of Flask, Django, Rails and Express, and regular expressions are refused."""

_ORIGIN = re.compile(r"^[^/?#]*:(//[^/?#]*)?")
"""The beginning of a URL, as in `GET http://HOST/login`: some servers pass the whole URL on as the path."""

Segments = tuple[str, ...]


class Pattern(NamedTuple):
    """A parsed pattern. `below`: everything below these segments matches too."""

    segments: Segments
    below: bool

    def matches(self, path: Segments) -> bool:
        """Whether the pattern matches one reading of a path."""
        own = self.segments
        if len(path) < len(own) or (len(path) > len(own) and not self.below):
            return False
        return all(mine is ANY_SEGMENT or mine == theirs for mine, theirs in zip(own, path, strict=False))

    def covers(self, other: Pattern) -> bool:
        """Whether this pattern matches every path that `other` matches."""
        return self.matches(other.segments) and (self.below or not other.below)


EVERYTHING = Pattern((), below=True)


def parse_pattern(text: object, key: str = "path") -> Pattern:
    """Parse a pattern. Raises ConfigError with the mistake and the remedy."""
    segments = [segment for segment in text.split("/") if segment] if isinstance(text, str) else []
    below = segments[-1:] == ["*"]
    if below:
        segments.pop()
    is_path = isinstance(text, str) and text.startswith("/") and text.isprintable() and len(text) <= MAX_PATTERN
    if not is_path or not all(map(_SEGMENT.fullmatch, segments)):
        remedy = "write for example /login, /users/{id} or /api/*"
        message = f"{show(text)} is not a decoded path of at most {MAX_PATTERN} characters, without a query"
        raise ConfigError(f"{key}: {message}; {remedy}")
    return Pattern(tuple([ANY_SEGMENT if segment.startswith("{") else _folded(segment) for segment in segments]), below)


def _spelled(pattern: str) -> str:
    """The expression for the paths that a pattern matches as they are spelled."""
    text = re.sub(r"\\\{[^{}]*\\\}", "[^/]+", re.escape(pattern.removesuffix("/*")))
    return f"{text}(?:/.*)?" if pattern.endswith("/*") else text


def readings(path: str) -> Iterable[Segments]:
    """Every way in which an application may read a path; almost always only one.

    An application may resolve `..` before or after it joins slashes, or treat it as a name. It may compare letters as
    they are, or as Unicode normalizes them. It may replace bytes that are not UTF-8, drop them, or read the whole path
    as Latin-1. It may take the path for a url, whose path ends at `?` or `#`. The rules of all readings count the
    request.

    Such bytes are surrogates here, from `surrogateescape`. WSGI passes them on; ASGI does not.
    """
    path = path.removesuffix("\n")
    is_url = not path.startswith("/") or "?" in path or "#" in path
    if path.isascii() and "/." not in path and not is_url:
        return (_split(path.lower()),)
    ways: dict[Segments, None] = {}
    decodings = [path, re.split("[?#]", _ORIGIN.sub("", path))[0]] if is_url else [path]
    if _NO_UTF_8.search(path):
        as_latin = _NO_TEXT.sub("", path).encode("utf-8", "surrogateescape").decode("latin-1")
        decodings += [_NO_UTF_8.sub("", path), as_latin]
    for decoded in decodings:
        for text in dict.fromkeys((decoded.casefold(), _folded(decoded))):
            spelled = _split(text)
            for segments in (spelled, without_dots(spelled), without_dots(text.split("/"))):
                ways[tuple(filter(None, segments))] = None
    return ways


def names(path: str, mount: str) -> Iterable[tuple[Segments, ...]]:
    """The readings of a path, each with every name that a rule may use for it.

    `mount` is the path under which the application is mounted, or "": root_path of ASGI, SCRIPT_NAME of WSGI. Some
    servers include it in the path and some do not, and frameworks serve the same page for both.
    """
    mount = mount.rstrip("/")
    if not mount:
        return [(reading,) for reading in readings(path)]
    rest = path.removeprefix(mount)
    if rest and not rest.startswith("/"):
        rest = path
    above = _split(_folded(mount))
    named: dict[Segments, tuple[Segments, ...]] = {}
    for inside in readings(rest):
        named[(*above, *inside)] = ((*above, *inside), inside)
    for whole in readings(mount + rest):
        below = whole[: len(above)] == above
        named.setdefault(whole, (whole, whole[len(above) :]) if below else (whole,))
    _, _, behind = path.partition(mount)
    if behind:  # Litestar removes everything up to the first occurrence of the mount
        for inside in readings(behind):
            named.setdefault((*above, *inside), ((*above, *inside), inside))
    return named.values()


def _split(path: str) -> Segments:
    return tuple([segment for segment in path.split("/") if segment])


def _folded(text: str) -> str:
    """The text as `one_spelling` has it, without the marks beyond MAX_MARKS of each letter."""
    if text.isascii():
        return text.lower()
    if _MANY.search(text):  # leave out the marks beyond MAX_MARKS of each letter
        kept, marks = [], 0
        for char in text:
            marks = marks + 1 if _is_mark(char) else 0
            if marks <= MAX_MARKS:
                kept.append(char)
        text = "".join(kept)
    return one_spelling(text)


@lru_cache(maxsize=1024)
def _is_mark(char: str) -> bool:
    return combining(normalize("NFKD", char)[0]) > 0


# -- the storage -------------------------------------------------------------------------------------------------------

STATE_FILE = "inbound.db"


def open_storage(url: str, *, clock: Callable[[], int] | None = None) -> Storage:
    """The storage at a URL: `sqlite:///path`, or a Redis url as for a ledger.

    It connects at the first use. `clock` (ms since 1970) replaces the storage's own clock, for tests and simulation
    only. Raises ConfigError for any other scheme.
    """
    url = canonical(url)
    scheme, slashes, _ = url.partition("://")
    if file_of(url) is not None and slashes:
        from quota.inbound.sqlite_storage import SqliteStorage

        check_options(url, "inbound storage")
        return SqliteStorage(url, clock=clock)
    if scheme in REDIS_SCHEMES and slashes:
        from quota.inbound.redis_storage import RedisStorage

        return RedisStorage(url, clock=clock)
    message = f"inbound storage{shown_scheme(url)} has an unknown scheme"
    raise ConfigError(f"{message}; write sqlite:///PATH or redis://HOST:PORT/DB")


def opened(rules: Rules | Sequence[Rule]) -> tuple[Rules, Storage]:
    """The rules and their storage, which connects at the first use. Raises ConfigError."""
    whole = rules if isinstance(rules, Rules) else Rules(rules)
    return whole, open_storage(_url_of(whole))


def is_there(rules: Rules) -> bool:
    """Whether the storage exists. A missing file is left to the first worker, whose user then owns it."""
    path = file_of(_url_of(rules))
    return path is None or os.path.exists(path)


def _url_of(rules: Rules) -> str:
    """The url of the storage. Default: SQLite in the state folder, for the workers of one machine."""
    if rules.url is not None:
        return rules.url
    return f"sqlite:///{make_state_folder() / STATE_FILE}"
