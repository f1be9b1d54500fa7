"""Whatever upstream answers: a kind of error or an outcome for each region, in short lines without the key."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any, get_args

import pytest

import quota
from fuzz.generate import ODD_TEXT, damaged, mutated, nested, text, value
from fuzz.inputs import PARTS, Input, check_line, every
from quota.clients.google import batched_answers
from quota.clients.upstream_errors import MAX_MESSAGE_LENGTH, Kind, RawAnswer, classify
from quota.common.redact import register
from quota.common.text import printable
from quota.jobs.attempts import _classify_answer
from quota.jobs.runner import ATTEMPTS, run_job
from quota.settings.books import load_book
from support.book_evidence import evidence_of
from support.configurations import configuration
from support.patience import without_waits
from support.plain_http import Answer, Arrived, PlainServer

BOOKS = [load_book("youtube-v3"), load_book("youtube-v3-buckets")]
KEY = "A-key/that-is+in-no-message-0123456789"
PLENTY = 1_000_000_000
KINDS = get_args(Kind)
STATUSES = (200, 308, 400, 401, 403, 403, 404, 407, 408, 409, 412, 429, 429, 500, 502, 503, 504, 599)

_RECORDED = Path(os.environ.get("QUOTA_SHARED_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"), "errors")
BODIES = [json.dumps(answer["body"]).encode() for book in BOOKS for answer in evidence_of(book.name)[1]]
BODIES.append(b'{"error": "invalid_grant", "error_description": "Token has been expired or revoked."}')
BODIES += [path.read_bytes() for path in sorted(_RECORDED.glob("4*.json"))]
PAGE = b"<!DOCTYPE html><html><head><title>502 Bad Gateway</title><style>b{}</style></head><body><h1>No</h1></body>"

VIDEO: dict[str, Any] = {
    "id": "v1",
    "snippet": {
        "title": "T", "description": "D", "channelId": "c", "tags": ["a", "b"], "publishedAt": "2026-01-01T00:00:00Z",
        "thumbnails": {"high": {"url": "https://i/x.jpg"}},
    },
    "statistics": {"viewCount": "12", "likeCount": "3"},
    "contentDetails": {"duration": "PT1M", "caption": "false", "licensedContent": True},
}  # fmt: skip


@pytest.mark.parametrize("part", range(PARTS))
def test_an_error_answer_is_understood_or_classified_by_its_status(part: int) -> None:
    register(KEY)

    def attempt(r: Input) -> None:
        status, body = r.choice(STATUSES), _error_body(r)
        book, method = r.choice(BOOKS), r.choice(("videos.list", "search.list", "videos.insert", "odd", ""))
        r.data = status, method, body
        error = classify(status, body, method=method, book=book)
        assert error.kind in KINDS
        assert (error.bucket is not None) == (error.kind in ("daily_exhausted", "project_blocked"))
        assert (
            error.bucket is None or error.bucket in book.buckets or error.bucket in [pool.name for pool in book.pools]
        )
        assert len(error.message) <= MAX_MESSAGE_LENGTH
        assert len(error.reason) <= 128
        failure = _classify_answer(RawAnswer(status, {}, body), method, book)
        check_line(failure.message, 1_000)
        for line in (error.message, error.reason, failure.message, error.remedy):
            assert not line or line.isprintable()
            assert KEY not in line

    every("answer", part, attempt)


@pytest.mark.parametrize("part", range(PARTS))
def test_the_parts_of_a_batchs_answer_each_have_a_status(part: int) -> None:
    def attempt(r: Input) -> None:
        kind = r.choice(("multipart/mixed; boundary=b", 'multipart/mixed; boundary="b"', text(r), "multipart/x; " * 3))
        inner = b"".join(
            b"--b\r\nContent-Type: application/http\r\nContent-ID: <response-x + %d>\r\n\r\n"
            b"HTTP/1.1 %s No\r\n\r\n%s\r\n"
            % (number, r.choice((b"200", b"403", b"9" * 5_000, b"-1", b"", b"\xb2")), r.choice(BODIES))
            for number in range(r.randrange(4))
        )
        r.data = kind, damaged(r, inner + b"--b--")
        for status, body, content_id in batched_answers(*r.data):
            assert 0 <= status <= 999
            assert isinstance(body, bytes)
            assert content_id

    every("batch", part, attempt)


@pytest.mark.parametrize("part", range(PARTS))
def test_a_run_ends_with_an_outcome_for_each_region(part: int, tmp_path: Path, state_dir: Path) -> None:
    """Over real HTTP, with the real client; the server says anything."""
    (tmp_path / "key").write_text(KEY)
    answers: list[Answer] = []

    def serve(request: Arrived) -> Answer:
        return answers[len(server.arrived) % len(answers)]

    with PlainServer(serve) as server:

        def attempt(r: Input) -> None:
            answers[:] = [_answer(r, server.address) for _ in range(r.randrange(1, 4))]
            r.data = answers
            fetch, options = r.choice((("trending", ""), ("search", 'options = { words = "w" }'), ("channels", _IDS)))
            job = f'[jobs.j]\nfetch = "{fetch}"\nregions = ["US", "DE"]\npages = 3\n{options}'
            (tmp_path / "quota.toml").write_text(configuration(server.address, job, units=PLENTY))
            (tmp_path / "videos.db").unlink(missing_ok=True)
            arrived = len(server.arrived)
            with quota.open(tmp_path / "quota.toml") as session, without_waits():
                report = run_job(session, "j")
                for bucket in ("units", "search", "uploads"):
                    session.project().state.reopen(bucket)
            assert report.outcome in ("done", "stopped", "failed")
            assert {each.region for each in report.regions} == {"US", "DE"}
            # Two steps a page, each attempt with redirects of its own.
            assert len(server.arrived) - arrived <= 2 * 3 * 2 * ATTEMPTS * 7
            for each in report.regions:
                assert each.outcome in ("done", "partial", "skipped", "failed")
                assert (each.error is not None) == (each.outcome == "failed")
                if each.error is not None:
                    check_line(printable(each.error))
            check_line(printable(report.sentence(0)))
            output = json.dumps(report.as_json()) + report.sentence(0) + report.why
            assert KEY not in output

        every("client", part, attempt)


_IDS = "options = { ids = [" + ", ".join(f'"c{number:03}"' for number in range(120)) + "] }"


def _error_body(r: Input) -> bytes:
    kind, body = r.random(), r.choice(BODIES)
    if kind < 0.35:
        body = damaged(r, body)
    elif kind < 0.75:
        error: object = json.loads(body)
        for _ in range(r.choice((1, 1, 2, 4))):
            error = mutated(r, error)
        body = json.dumps(r.choice((error, error, error, [error]))).encode(r.choice(("utf-8", "utf-8", "utf-16")))
    elif kind < 0.85:
        body = json.dumps(value(r)).encode()
    elif kind < 0.95:
        body = damaged(r, PAGE) + text(r).encode("utf-8", "replace") * r.choice((1, 1, 50))
    else:
        body = r.choice((b"", r.randbytes(300), b"a." * 9_000, b"<script" * 1_200, gzip.compress(body), b"[" * 3_000))
    if r.random() < 0.5:
        at = r.randrange(len(body) + 1)
        body = body[:at] + KEY.encode() + body[at:]
    return body


def _answer(r: Input, address: str) -> Answer:
    kind = r.random()
    if kind < 0.15:
        return Answer(r.choice(STATUSES[1:]), _error_body(r))
    item: object = VIDEO
    if r.random() < 0.3:
        item = {"id": {"kind": "youtube#video", "videoId": "v1"}}
    page: object = {"items": [item] * r.randrange(3), "nextPageToken": "t"}
    for _ in range(r.randrange(3)):
        page = mutated(r, page)
    if r.random() < 0.4 and isinstance(page, dict):
        page["nextPageToken"] = r.choice((value(r), "t", "\ud800", nested(600, 1, in_list=True)))
    if r.random() < 0.1 and isinstance(page, dict):
        page["items"] = [{**VIDEO, "snippet": {"tags": nested(r.randrange(900), "x", in_list=True)}}]
    body = json.dumps(page).encode()
    headers: dict[str, str] = {}
    status, hang_up = 200, False
    if kind < 0.25:
        body, headers = gzip.compress(body), {"Content-Encoding": "gzip"}
        body = r.choice((body, body[: len(body) // 2], damaged(r, body), b""))
    elif kind < 0.35:
        headers = {"Content-Length": r.choice((str(len(body) + 5), str(len(body) // 2), "-1", "x", "9" * 30))}
        hang_up = True
    elif kind < 0.45:
        body = r.choice((PAGE, b"", b"null", b"[]", b"5", b'"x"', b"\xff\xfe", r.randbytes(50), b"[" * 3_000))
    elif kind < 0.55:
        headers = {r.choice(("X-Odd", "Content-Type", "Set-Cookie", "ETag", "Vary")): "h" * r.choice((0, 900, 70_000))}
    elif kind < 0.62:
        status = r.choice((301, 302, 303, 307, 308))
        headers = {
            "Location": r.choice((address + "/youtube/v3/videos?key=" + KEY, "/", "", "http://[", "//", "x:y", "?"))
        }
    elif kind < 0.68:
        headers = {"Transfer-Encoding": "chunked"}
        body = r.choice((b"5\r\nab", b"zz\r\n\r\n", b"0\r\n\r\n", b"-1\r\n\r\n", b"2\r\n{}\r\n0\r\n\r\n"))
        hang_up = True
    elif kind < 0.74:
        status = r.choice((201, 204, 206, 299, 304))
        body = r.choice((body, b""))
    elif kind < 0.78:
        headers = {"Content-Type": r.choice(("text/html", "application/json; charset=utf-16", "x", ""))}
        headers["Retry-After"] = r.choice((*ODD_TEXT[:5], "9" * 20)).strip() or "0"
    elif kind < 0.82:
        hang_up, body = True, body[: r.randrange(len(body) + 1)]
    return Answer(status, body, headers, hang_up)
