"""What an error means: an error answer of upstream, and an exception of a client library.

    classify        what an error answer means. Pure: it uses only the status and the raw body
    error_in        the parts of an error answer
    answer_in       upstream's answer, if an exception has one
    is_transient    whether the network may be back soon
    refused_login   one line about a refused login

    kind              means                                                     what helps
    daily_exhausted   upstream's own daily count of one pool has run out        its reset
    project_blocked   upstream grants this project nothing in that pool         more quota; no reset
    transient_rate    too many calls in a short time                            a pause
    transient_server  upstream is in trouble                                    a retry
    config            key, scopes, project or API are not set up                an operator; see `remedy`
    channel_limit     a limit on the channel or user, not on the project        that channel's own time
    closed            upstream has closed one pool for a time                   that time
    request           this call is wrong, others are not                        another call

Status and reason are not enough: an exhausted daily pool and a short burst both answer 429 `rateLimitExceeded`. So the
most precise evidence comes first: the limit named in `details`, then the message, then the reason.
"""

from __future__ import annotations

import contextlib
import html
import re
import sys
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from quota.common.redact import redact
from quota.common.text import shorten, spaced
from quota.terms.api import document_in
from quota.terms.costs import CostBook

Kind = Literal[
    "daily_exhausted", "project_blocked", "transient_rate", "transient_server", "config", "channel_limit", "closed",
    "request",
]  # fmt: skip

MAX_BODY_BYTES = 256 * 1024
"""Longer bodies are not parsed. Upstream's own errors have about 2 kB."""

MAX_MESSAGE_LENGTH = 300


class UpstreamError(NamedTuple):
    """One error answer, understood. `message` is one line without markup or keys; `reason` is upstream's own word.

    `bucket` is the name to close, for "daily_exhausted", "project_blocked" and "closed": a bucket of the cost book or
    one of its pools. `remedy` says what an operator should do; "" when there is nothing to set up.
    """

    kind: Kind
    bucket: str | None
    reason: str
    message: str
    remedy: str = ""


def classify(status: int, body: bytes, *, method: str, book: CostBook) -> UpstreamError:
    """What this answer to a call of `method` means. Never raises: an unreadable body is classified by its status."""
    error = error_in(body)
    kind: Kind | None = _quota_kind(status, error)
    message = error.words or f"HTTP {status}"
    if kind is None:
        kind, remedy = _other_kind(status, error)
        return UpstreamError(kind, None, error.reason, message, remedy)
    bucket = None if kind == "transient_rate" else _bucket(error, method, book)
    return UpstreamError(kind, bucket, error.reason, message)


def buckets_of(method: str, book: CostBook) -> list[str]:
    """The buckets that a call of `method` is charged to; the main bucket for a free or unknown method. A request
    without a method is named by its verb, as `GET /path`."""
    verb, _, path = method.partition(" ")
    prices = book.methods.get(book.canonical(method)) or ((book.default_price(verb),) if path else ())
    return [part.bucket for price in prices[-1:] for part in price.parts] or [book.main_bucket.name]


# -- reading the body --------------------------------------------------------------------------------------------------


class ErrorBody(NamedTuple):
    """The meaningful parts of an error body. A part that is missing is "" or empty. `words` are for people; only the
    error's own `message` is judged. Of the `reasons` those in `details` come first."""

    words: str = ""
    message: str = ""
    structured: bool = False
    status: str = ""
    reasons: tuple[str, ...] = ()
    limits: tuple[_NamedLimit, ...] = ()

    @property
    def reason(self) -> str:
        return self.reasons[0] if self.reasons else self.status


class _NamedLimit(NamedTuple):
    """A limit as `details[].metadata` names it: `quota_limit`, `quota_metric`, `quota_unit`, `quota_limit_value`."""

    limit: str
    metric: str
    unit: str
    value: str


def error_in(body: bytes) -> ErrorBody:
    """What a body says is wrong. Never raises."""
    if len(body) > MAX_BODY_BYTES:
        return ErrorBody()
    try:
        data = document_in(body)
    except (ValueError, RecursionError):
        return ErrorBody(plain(body[:8192].decode("utf-8", "replace"), _ANY_TAG))
    words = _words(data)
    if isinstance(data, list) and data:
        data = data[0]  # some upstreams wrap the error in a list
    error = data.get("error") if isinstance(data, dict) else None
    if isinstance(error, str):
        return ErrorBody(words, words, structured=True, reasons=(_word(error),))  # the shape of an OAuth server
    if not isinstance(error, dict):
        return ErrorBody(words)
    details = list(_dicts(error.get("details")))
    metadata = [info for detail in details for info in _dicts([detail.get("metadata")])]
    errors = list(_dicts(error.get("errors")))
    reasons = [_word(item.get("reason")) for item in (*details, *errors)]
    messages = (plain(text) for item in (error, *errors) if isinstance(text := item.get("message"), str))
    return ErrorBody(
        words=words,
        message=next(filter(None, messages), ""),
        structured=True,
        status=_word(error.get("status")),
        reasons=tuple(reason for reason in reasons if reason),
        limits=tuple(
            _NamedLimit(*(_word(info.get(f"quota_{name}")) for name in ("limit", "metric", "unit", "limit_value")))
            for info in metadata
            if "quota_limit" in info or "quota_unit" in info
        ),
    )


_WORDS = (
    *("message", "detail", "description", "error_description", "error_message", "msg", "faultstring", "title"),
    *("", "errors", "reason", "error", "code", "type"),
)
"""The names under which APIs say what is wrong, the clearest first; "" is a text without a name."""

MAX_VALUES = 500


def _words(document: object) -> str:
    """What an error says: the text under the clearest name, of several the outermost."""
    texts: dict[str, str] = {}
    left = deque([("", document)])
    for _ in range(MAX_VALUES):
        if not left:
            break
        name, value = left.popleft()
        if isinstance(value, dict):
            left.extend((inner.lower(), part) for inner, part in value.items())
        elif isinstance(value, list):
            left.extend((name, part) for part in value)
        elif isinstance(value, str) and value.strip():
            texts.setdefault(name, value)
    return next((plain(texts[name]) for name in _WORDS if name in texts), "")


def _dicts(value: object) -> Iterator[dict[str, object]]:
    """The objects in a list, the first 20 of them; none when it is not a list."""
    if isinstance(value, list):
        yield from (item for item in value[:20] if isinstance(item, dict))


def _word(value: object) -> str:
    """A name or figure as upstream writes it; numbers are accepted where upstream sends text."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value) if abs(value) < 10**18 else ""
    return plain(value)[:128] if isinstance(value, str) else ""


# In a message, only tags that upstream really uses: "Requests from referer <empty> are blocked" is not markup.
_KNOWN_TAG = re.compile(r"(?i)</?(?:a|b|i|p|br|em|li|ul|code|span|strong)\b[^<>]*>")
_ANY_TAG = re.compile(r"(?is)<(script|style)\b.*?</\1>|<[^<>]*>")


def plain(text: str, tags: re.Pattern[str] = _KNOWN_TAG) -> str:
    """One line of printable text without markup or keys, cut at MAX_MESSAGE_LENGTH."""
    text = tags.sub(" " if tags is _ANY_TAG else "", text[:20_000])
    with contextlib.suppress(ValueError):  # `&#` with thousands of digits
        text = html.unescape(text)
    return shorten(redact(" ".join(spaced(text).split())), MAX_MESSAGE_LENGTH)


# -- judging it --------------------------------------------------------------------------------------------------------

_PER_DAY = re.compile(r"(?i)\bper[ _-]?day\b")
_PER_SHORTER = re.compile(r"(?i)\bper[ _-]?(?:minute|second|hour|\d+ ?(?:minutes|seconds))\b")

_DAILY = frozenset({"quotaExceeded", "dailyLimitExceeded"})
_RATE = frozenset(
    {"rateLimitExceeded", "userRateLimitExceeded", "RATE_LIMIT_EXCEEDED", "concurrentLimitExceeded", "tooManyRequests"}
)
_CHANNEL = frozenset({"uploadLimitExceeded", "uploadRateLimitExceeded", "maxPlaylistExceeded"})


def _quota_kind(
    status: int, error: ErrorBody
) -> Literal["daily_exhausted", "project_blocked", "transient_rate"] | None:
    """The kind of a quota error; None for another error."""
    if error.limits:
        # A limit for each user may be 0 for one of them and open to others.
        if any(limit.value.strip() == "0" and "{user}" not in limit.unit for limit in error.limits):
            return "project_blocked"
        is_daily = any("perday" in limit.limit.lower() or "/d/" in f"{limit.unit}/" for limit in error.limits)
        return "daily_exhausted" if is_daily else "transient_rate"
    reasons = set(error.reasons)
    if reasons & _CHANNEL:
        return None
    named = bool(reasons & (_DAILY | _RATE)) or error.status == "RESOURCE_EXHAUSTED"
    # A wrong request may quote something "per day" too, and a proxy's page may speak of its own limits.
    about_quota = named or (status in (403, 429) and error.structured and not reasons)
    if about_quota and _PER_DAY.search(error.message):
        return "daily_exhausted"
    if about_quota and _PER_SHORTER.search(error.message):
        return "transient_rate"
    if reasons & _DAILY:
        return "daily_exhausted"
    return "transient_rate" if named or status == 429 else None


def _bucket(error: ErrorBody, method: str, book: CostBook) -> str:
    """The name to close: the pool whose mark the error carries, else the bucket that `method` is charged to.

    The limit's own name counts for more than the message, and a longer mark for more than a shorter one.
    """
    named = " ".join(f"{limit.limit} {limit.metric}" for limit in error.limits).lower()
    for text in (named, error.message.lower()):
        hits = [(len(mark), pool.name) for pool in book.pools for mark in pool.marks if mark and mark.lower() in text]
        if hits:
            return max(hits, key=lambda hit: hit[0])[1]
    return buckets_of(method, book)[0]


_KEY = "check the credential's key: create or restore it in the upstream's console, under Credentials"
_KEY_RESTRICTED = "the key's restrictions do not allow this machine or API: change them in the upstream's console"
_API_OFF = "enable the API for this project in the upstream's console, then wait a few minutes"
_SCOPES = "this method needs OAuth access with more scopes: authorize the user again with the scopes it documents"
_LOGIN = "the key or token is wrong or has expired, or this method needs OAuth access"
_ACCESS = "the credential may not do this: check its project, restrictions and permissions in the upstream's console"
_PROXY = "a proxy between this machine and upstream asks for credentials: check the proxy settings"

_REASONS = {
    _KEY: ("API_KEY_INVALID", "API_KEY_EXPIRED", "keyInvalid", "keyExpired"),
    "the call carried no key: set the credential's `key`": ("dailyLimitExceededUnreg",),
    _KEY_RESTRICTED: (
        "API_KEY_HTTP_REFERRER_BLOCKED",
        "API_KEY_IP_ADDRESS_BLOCKED",
        "API_KEY_ANDROID_APP_BLOCKED",
        "API_KEY_IOS_APP_BLOCKED",
        "API_KEY_SERVICE_BLOCKED",
        "ipRefererBlocked",
    ),
    _API_OFF: ("SERVICE_DISABLED", "accessNotConfigured"),
    _ACCESS: ("CONSUMER_INVALID", "CONSUMER_SUSPENDED", "BILLING_DISABLED"),
    _SCOPES: ("ACCESS_TOKEN_SCOPE_INSUFFICIENT", "insufficientPermissions"),
    _LOGIN: ("CREDENTIALS_MISSING", "ACCESS_TOKEN_EXPIRED", "authError", "invalid_grant", "invalid_client"),
    "the authorized Google account has no channel: create one, or use another account": ("youtubeSignupRequired",),
}
"""The reasons of errors, by what helps against them."""

_REMEDIES = {reason: remedy for remedy, reasons in _REASONS.items() for reason in reasons}


def _other_kind(status: int, error: ErrorBody) -> tuple[Kind, str]:
    """The kind of an error that is not about quota, and the remedy where it is the configuration's."""
    if any(reason in _CHANNEL for reason in error.reasons):
        return "channel_limit", ""
    if status >= 500 or status == 408:
        return "transient_server", ""
    remedy = next((_REMEDIES[reason] for reason in error.reasons if reason in _REMEDIES), None)
    if remedy is not None:
        return "config", remedy
    if status == 401 or error.status == "UNAUTHENTICATED":
        return "config", _LOGIN
    if status == 407:
        return "config", _PROXY
    # A method of the API refuses with its own reason (`commentsDisabled`), Google's front door with a general reason.
    if error.status == "PERMISSION_DENIED" or (status == 403 and set(error.reasons) <= {"forbidden", "badRequest"}):
        return "config", _ACCESS
    return "request", ""


# -- the exceptions of client libraries --------------------------------------------------------------------------------

# No other module names them. The functions look only at loaded modules: an exception comes from no other.

Names = tuple[tuple[str, str], ...]
"""Classes, each by its module and its name."""

_TRANSIENT: Names = (
    ("http.client", "HTTPException"),
    ("socket", "gaierror"),
    ("ssl", "SSLError"),
    ("urllib.error", "URLError"),
    ("urllib3.exceptions", "MaxRetryError"),
    ("urllib3.exceptions", "ProtocolError"),
    ("urllib3.exceptions", "TimeoutError"),
    ("httplib2", "ServerNotFoundError"),
    ("google.auth.exceptions", "TransportError"),
    ("requests.exceptions", "ConnectionError"),
    ("requests.exceptions", "ChunkedEncodingError"),  # the answer was cut off
    ("requests.exceptions", "Timeout"),
    ("httpx", "TransportError"),
    ("httpx2", "TransportError"),
    ("aiohttp", "ClientConnectionError"),
    ("aiohttp", "ClientPayloadError"),
)

_WITH_RESPONSE: Names = (
    ("requests.exceptions", "HTTPError"),
    ("httpx", "HTTPStatusError"),
    ("httpx2", "HTTPStatusError"),
)


class RawAnswer(NamedTuple):
    """An answer of upstream. `body` is the part that the client has read."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def answer_in(error: Any) -> RawAnswer | None:
    """The answer in an exception of Google's client, urllib, requests, httpx, httpx2 or aiohttp; None if there is
    none."""
    if is_any(error, (("googleapiclient.errors", "HttpError"),)):
        return RawAnswer(int(error.resp.status), error.resp, error.content)
    if is_any(error, (("urllib.error", "HTTPError"),)):
        return RawAnswer(error.code, error.headers or {}, b"")
    if is_any(error, (("aiohttp", "ClientResponseError"),)) and error.status:
        return RawAnswer(error.status, error.headers or {}, b"")
    if is_any(error, _WITH_RESPONSE) and error.response is not None:
        # These libraries keep the body that they have read in `_content`; `content` would read it, or fail.
        body = getattr(error.response, "_content", b"")
        return RawAnswer(error.response.status_code, error.response.headers, body if isinstance(body, bytes) else b"")
    return None


def is_transient(error: Exception) -> bool:
    """Whether the exception means that the network failed."""
    return is_any(error, _TRANSIENT)


def passed(error: BaseException | None, code: str) -> bool:
    """Whether an exception came through a function whose name, `module.function`, begins with this pattern."""
    frames = () if error is None else traceback.walk_tb(error.__traceback__)
    names = (f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_name}" for frame, _ in frames)
    return any(re.match(code, name) for name in names)


def refused_login(error: Exception) -> str | None:
    """One line about a refused login; None for another error. The error itself may quote the token server's whole
    answer."""
    if not is_any(error, (("google.auth.exceptions", "GoogleAuthError"),)):
        return None
    text = str(error.args[0]) if error.args else ""
    reason = shorten(spaced(redact(text)), 80)
    return f"auth was not accepted ({reason or type(error).__name__}); renew it"


def is_any(error: object, classes: Names) -> bool:
    """Whether an exception is of one of these classes."""
    loaded = (getattr(sys.modules.get(module), name, None) for module, name in classes)
    return isinstance(error, tuple(cls for cls in loaded if isinstance(cls, type)))
