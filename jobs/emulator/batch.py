"""The API's two multipart formats: batches of calls, and uploads with their metadata."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from http import HTTPStatus

from quota.jobs.emulator import replies
from quota.jobs.emulator.replies import Rejected, Reply

MAX_BATCHED_CALLS = 1_000


@dataclass(frozen=True)
class BatchedCall:
    """One call inside a batch. Its answer refers to it by `content_id`."""

    content_id: str | None
    verb: str
    target: str
    headers: Message
    body: bytes


def split_multipart(content_type: str, body: bytes) -> list[tuple[Message, bytes]]:
    """(headers, content) of each part."""
    outer = Message()
    outer["Content-Type"] = content_type
    boundary = outer.get_boundary()
    if not boundary:
        raise Rejected(replies.bad_request("The request's multipart boundary is missing."))
    delimiter = rb"(?:^|\r?\n)--" + re.escape(boundary.encode()) + rb"(?:--)?[ \t]*(?=\r?\n|$)"
    sections = re.split(delimiter, body)[1:-1]  # drops the text before and after the parts
    return [_headers_and_content(re.sub(rb"^\r?\n", b"", section)) for section in sections]


def _headers_and_content(section: bytes) -> tuple[Message, bytes]:
    head, _, content = _partition_blank_line(section)
    return HeaderParser().parsestr(head.decode("utf-8", "replace")), content


def _partition_blank_line(text: bytes) -> tuple[bytes, bytes, bytes]:
    if text.startswith((b"\r\n", b"\n")):  # no headers at all
        return b"", b"", text.lstrip(b"\r\n")
    found = re.search(rb"\r?\n\r?\n", text)
    return (text[: found.start()], found[0], text[found.end() :]) if found else (text, b"", b"")


def parse_batch(content_type: str, body: bytes) -> list[BatchedCall]:
    """The calls in a batch, in order. One unreadable part rejects the whole batch."""
    calls = []
    for outer, content in split_multipart(content_type, body):
        line, _, rest = content.replace(b"\r\n", b"\n").lstrip().partition(b"\n")
        words = line.decode("utf-8", "replace").split()
        if len(words) not in (2, 3):
            raise Rejected(replies.bad_request("Failed to parse batch request."))
        headers, inner_body = _headers_and_content(rest)
        calls.append(BatchedCall(outer["Content-ID"], words[0], words[1], headers, inner_body))
    if not 0 < len(calls) <= MAX_BATCHED_CALLS:
        message = f"A batch holds 1 to {MAX_BATCHED_CALLS} calls, not {len(calls)}."
        raise Rejected(replies.bad_request(message))
    return calls


def compose_batch(answers: Sequence[tuple[str | None, int, bytes]]) -> Reply:
    """The reply to a batch, from each call's (content_id, status, body)."""
    digest = hashlib.blake2b(digest_size=16)
    for _, _, body in answers:
        digest.update(body)
    boundary = f"batch_{digest.hexdigest()}"
    parts = [
        b"".join(
            (
                f"--{boundary}\r\nContent-Type: application/http\r\n".encode(),
                _answered_id(content_id),
                f"\r\nHTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode(),
                b"Content-Type: application/json; charset=UTF-8\r\n",
                f"Content-Length: {len(body)}\r\n\r\n".encode(),
                body,
                b"\r\n",
            )
        )
        for content_id, status, body in answers
    ]
    whole = b"".join((*parts, f"--{boundary}--\r\n".encode()))
    return Reply(200, whole, content_type=f"multipart/mixed; boundary={boundary}")


def _answered_id(content_id: str | None) -> bytes:
    """The answer to `<one>` has the id `<response-one>`."""
    if content_id is None:
        return b""
    bare = " ".join(content_id.split()).strip("<>")
    return f"Content-ID: <response-{bare}>\r\n".encode("utf-8", "replace")
