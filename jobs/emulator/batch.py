"""The API's two multipart formats: batches of calls, and uploads with their metadata."""

import hashlib
from collections.abc import Sequence
from email.message import Message
from email.parser import Parser
from http import HTTPStatus
from typing import NamedTuple

from quota.jobs.emulator import replies
from quota.jobs.emulator.replies import Rejected, Reply

MAX_BATCHED_CALLS = 1_000


class BatchedCall(NamedTuple):
    """One call inside a batch. Its answer refers to it by `content_id`."""

    content_id: str | None
    verb: str
    target: str
    headers: Message
    body: bytes


def split_multipart(content_type: str, body: bytes) -> list[tuple[Message, bytes]]:
    """(headers, content) of each part."""
    whole = _parsed(b"Content-Type: " + content_type.encode("latin-1", "replace") + b"\r\n\r\n" + body)
    if not whole.is_multipart() or whole.defects:
        raise Rejected(replies.bad_request("The request's multipart boundary is missing."))
    return [(part, _content(part)) for part in whole.get_payload() if isinstance(part, Message)]


def _parsed(section: bytes) -> Message:
    """Headers and content. As Latin-1 every byte is one character."""
    return Parser().parsestr(section.decode("latin-1"))


def _content(message: Message) -> bytes:
    content = message.get_payload(decode=True)
    return content if isinstance(content, bytes) else b""


def parse_batch(content_type: str, body: bytes) -> list[BatchedCall]:
    """The calls in a batch, in order. One unreadable part rejects the whole batch."""
    calls = []
    for outer, content in split_multipart(content_type, body):
        line, _, rest = content.replace(b"\r\n", b"\n").lstrip().partition(b"\n")
        words = line.decode("utf-8", "replace").split()
        if len(words) not in (2, 3):
            raise Rejected(replies.bad_request("Failed to parse batch request."))
        inner = _parsed(rest)
        calls.append(BatchedCall(outer["Content-ID"], words[0], words[1], inner, _content(inner)))
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
    return f"Content-ID: <response-{bare}>\r\n".encode("latin-1")
