"""What an upstream's error answer means, from its status and raw body."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from quota.clients.upstream_errors import MAX_BODY_BYTES, MAX_MESSAGE_LENGTH, answer_in, classify, error_in
from quota.common.redact import register
from quota.settings.books import load_book

POOL = load_book("youtube-v3")
BUCKETS = load_book("youtube-v3-buckets")

SEARCH_DAY = {"quota_limit": "defaultSearchListPerDayPerProject", "quota_unit": "1/d/{project}"}
SEARCH_METRIC = {"quota_unit": "1/d/", "quota_metric": "youtube.googleapis.com/search_list"}
USER_DAY = {"quota_unit": "1/d/{project}/{user}", "quota_limit_value": "0"}
PER_DAY = "Quota exceeded for quota metric 'Queries' and limit 'Queries per day' of service 'x'."
PER_MINUTE = "Quota exceeded for quota metric 'Queries' and limit 'Queries per minute' of service 'x'."


def body(
    message: str = "No.", reason: str | None = None, status: str | None = None, metadata: dict[str, Any] | None = None
) -> bytes:
    """An error body in the shape of Google's APIs."""
    error: dict[str, Any] = {"code": 0, "message": message}
    if reason is not None:
        error["errors"] = [{"message": message, "domain": "global", "reason": reason}]
    if status is not None:
        error["status"] = status
    if metadata is not None:
        error["details"] = [{"@type": "x", "reason": "RATE_LIMIT_EXCEEDED", "metadata": metadata}]
    return json.dumps({"error": error}).encode()


# The names that the recordings' index uses for upstream's pools, and a method that would draw on each.
METHODS = {"search_list": "search.list", "video_insert": "videos.insert"}
CLOSED = {"default": "units", "search_list": "search", "video_insert": "uploads"}


def test_every_recorded_body_is_what_its_index_says(shared_data: Path) -> None:
    """26 bodies seen from the real API: the class of each, and under both cost books the bucket it closes."""
    rows = json.loads((shared_data / "errors" / "index.json").read_text())["bodies"]
    assert len(rows) >= 26
    for row in rows:
        raw = (shared_data / "errors" / row["file"]).read_bytes()
        for book in (POOL, BUCKETS):
            method = METHODS.get(row["bucket"], "videos.list")
            error = classify(row["http_status"], raw, method=method, book=book)
            closes = row["class"] in ("daily_exhausted", "project_blocked")
            assert (error.kind, error.bucket) == (row["class"], CLOSED[row["bucket"]] if closes else None), row["file"]
            assert bool(error.remedy) == (row["class"] == "config"), row["file"]
            assert error.reason
            assert "<a" not in error.message
            assert "<code" not in error.message
            assert error.message.isprintable()


@pytest.mark.parametrize(
    ("status", "raw", "kind"),
    [
        # The same status and reason, told apart by the limit that the details name.
        (429, body("Too many", "rateLimitExceeded", metadata=SEARCH_DAY), "daily_exhausted"),
        (429, body("Too many", "rateLimitExceeded", metadata={"quota_unit": "1/min/{project}"}), "transient_rate"),
        (429, body("Too many", "rateLimitExceeded"), "transient_rate"),
        # The details outweigh the message, the message outweighs the reason.
        (429, body(PER_DAY, "quotaExceeded", metadata={"quota_unit": "1/min/{project}"}), "transient_rate"),
        (403, body(PER_MINUTE, "quotaExceeded"), "transient_rate"),
        (429, body(PER_DAY, "rateLimitExceeded"), "daily_exhausted"),
        (429, body(PER_DAY, "rateLimitExceeded").replace(PER_DAY.encode(), b" ", 1), "daily_exhausted"),
        (403, body("Spent.", "quotaExceeded"), "daily_exhausted"),
        # A limit of 0 does not recover at any reset. One for each user may be open to others.
        (429, body("No.", "rateLimitExceeded", metadata={**SEARCH_DAY, "quota_limit_value": "0"}), "project_blocked"),
        (429, body("No.", "x", metadata=USER_DAY), "daily_exhausted"),
        # "Per day" in an error that is not about the project's quota.
        (400, body("A channel may upload 5 videos per day.", "uploadLimitExceeded"), "channel_limit"),
        # A call without a key is a matter of configuration, not of quota.
        (403, body("Daily Limit for Unauthenticated Use Exceeded.", "dailyLimitExceededUnreg"), "config"),
        (403, b'{"error": "invalid_grant", "error_description": "Token has been revoked."}', "config"),
        # A reason that names quota is about quota whatever the status; a message alone needs the status for it.
        (400, body("Spent.", "quotaExceeded"), "daily_exhausted"),
        (400, body(PER_DAY), "request"),
        (500, b"[" + body("Backend Error", "backendError") + b"]", "transient_server"),
    ],
)
def test_the_evidence_is_asked_in_the_order_of_its_precision(status: int, raw: bytes, kind: str) -> None:
    assert classify(status, raw, method="videos.list", book=POOL).kind == kind


@pytest.mark.parametrize(
    ("raw", "method", "closed"),
    [
        # A mark in the limit's name, in the metric's name, or in the message.
        (body("No.", "rateLimitExceeded", metadata=SEARCH_DAY), "search.list", "search"),
        (body("No.", "rateLimitExceeded", metadata=SEARCH_METRIC), "search.list", "search"),
        (body("'Search Queries per day' reached", "rateLimitExceeded"), "search.list", "search"),
        (body("'Video Uploads per day' reached", "rateLimitExceeded"), "videos.insert", "uploads"),
        # The limit's name outweighs the message.
        (body("'Video Uploads per day'", "rateLimitExceeded", metadata=SEARCH_DAY), "search.list", "search"),
        # Without a mark it is the bucket that the method is charged to.
        (body("Spent.", "quotaExceeded"), "youtube.search.list", "units"),
    ],
)
def test_the_bucket_to_close_is_the_one_that_the_error_names(raw: bytes, method: str, closed: str) -> None:
    assert classify(429, raw, method=method, book=POOL).bucket == closed


def test_under_the_book_with_buckets_an_unmarked_error_closes_the_methods_own() -> None:
    for method, bucket in ("search.list", "search"), ("videos.batchGetStats", "batch-stats"):
        assert classify(403, body("Spent.", "quotaExceeded"), method=method, book=BUCKETS).bucket == bucket


GARBAGE = [
    b"",
    b'"per day"',
    b"\xff\xfe\x00\x01",
    b"<html><title>Quota per day</title><body>You used 5 GB per day</body>",
    body("Spent. Queries per day", "quotaExceeded", metadata=SEARCH_DAY)[:-30],
    b"[" * 100_000,
    b'{"error": {"code": ' + b"9" * 10_000 + b"}}",
    b'{"error": {"errors": {"reason": "quotaExceeded"}, "details": 3, "message": ["per day"], "status": {}}}',
    b'{"error": {"errors": [null, 1, "x", []], "details": [{"metadata": "1/d/"}], "message": 12}}',
    b'{"error": {"message": "\\ud800"}}',
    b"&#" + b"9" * 5_000 + b";",  # more digits than Python reads
    b"a." * 10_000,  # time by the square of it, once
    body(message=[[]]),  # type: ignore[arg-type]
    b" " * (MAX_BODY_BYTES + 1) + body("Spent.", "quotaExceeded"),
]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "request"),
        (401, "config"),
        (407, "config"),
        (408, "transient_server"),
        (429, "transient_rate"),
        (503, "transient_server"),
    ],
)
def test_a_body_that_cannot_be_read_is_judged_by_its_status(status: int, kind: str) -> None:
    """And so a proxy's page about its own limit "per day" closes nothing."""
    for raw in GARBAGE:
        error = classify(status, raw, method="videos.list", book=POOL)
        assert (error.kind, error.bucket) == (kind, None), raw[:60]
        assert error.message.isprintable()
        assert 0 < len(error.message) <= MAX_MESSAGE_LENGTH


def test_a_message_is_one_line_without_markup_and_without_keys() -> None:
    register("a-registered-secret")
    raw = body(
        'Line one\n\tof <a href="/quota">quota</a> &amp; more; referer <empty>. '
        "https://x/?key=hidden1 AIzaSyA0123456789012345678901234567890 a-registered-secret \x1b[31m" + "long " * 200,
        "quotaExceeded",
    )
    message = classify(403, raw, method="videos.list", book=POOL).message
    cleaned = "Line one of quota & more; referer <empty>. https://x/?key=[redacted] [redacted] [redacted]"
    assert message.startswith(cleaned)
    assert message.endswith("...")
    assert len(message) == MAX_MESSAGE_LENGTH
    assert "\x1b" not in message


def test_an_html_error_is_shown_as_text() -> None:
    page = b"<html><style>p {}</style><h1>502 Bad Gateway</h1><p>nginx</p></html>"
    assert classify(502, page, method="videos.list", book=POOL).message == "502 Bad Gateway nginx"


def test_the_reasons_of_an_error_are_those_of_its_details_and_those_of_its_errors() -> None:
    error = {"details": [{"reason": "A_NEWER_NAME"}], "errors": [{"reason": "commentsDisabled"}]}
    assert error_in(json.dumps({"error": error}).encode()).reasons == ("A_NEWER_NAME", "commentsDisabled")
    assert error_in(b"no JSON").reasons == ()


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
def test_the_answer_in_an_error_is_found(library: str) -> None:
    response = import_module(library).Response(503, content=b"busy")
    error = import_module(library).HTTPStatusError("busy", request=None, response=response)
    assert answer_in(error) == (503, response.headers, b"busy")
