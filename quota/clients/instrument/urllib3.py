"""Where the bytes of urllib3 leave, and so those of requests: `_make_request` sends one attempt, and reads its head."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from quota.clients.instrument.patches import Seam
from quota.clients.instrument.payers import Payer, Payers, answer_to
from quota.common.hosts import default_port
from quota.errors import Refused
from quota.terms.reserve import RequestBody


def seams(payers: Payers) -> Iterator[Seam]:
    def charging(make_request: Callable[..., Any]) -> Callable[..., Any]:
        def _make_request(pool: Any, conn: Any, method: str, url: str, *args: Any, **options: Any) -> Any:
            address, scheme, host, port = "", pool.scheme, pool.host, pool.port
            if url[:1] != "/" and "//" in url:  # the pool is of a proxy
                parts = urlsplit(url)
                address, scheme, host, port = url, parts.scheme, parts.hostname or "", parts.port
            payer = None
            if payers.knows(host, port or default_port(scheme)):
                address = address or address_of(scheme, host, port, url)
                payer = payers.of(method, address)
            if payer is None:
                return make_request(pool, conn, method, url, *args, **options)
            options = {**dict(zip(("body", "headers"), args, strict=False)), **options} if args else options
            try:
                return _attempt(payer, address, pool, conn, method, url, options)
            except Refused as refusal:
                return _refused(refusal, payer, pool, conn, method, url, options)

        def _attempt(
            payer: Payer, address: str, pool: Any, conn: Any, method: str, url: str, options: dict[str, Any]
        ) -> Any:
            from quota.clients.urllib3 import never_left, noted  # late: it imports urllib3, which is here only now

            headers = options.get("headers") or {}
            body = RequestBody.of(options.get("body"), headers.get("content-length"))
            attempt = payer.gate.charge(method, address, body, headers)
            if attempt is None:
                return make_request(pool, conn, method, url, **options)
            try:
                raw = make_request(pool, conn, method, url, **options)
            except Exception as error:
                if body.makes_no_requests and never_left(error):
                    attempt.never_left()
                raise
            try:
                return noted(attempt, raw, preloaded=options.get("preload_content", True))
            except BaseException:  # interrupted: nobody else knows of the response
                raw.close()
                raise

        return _make_request

    yield Seam(
        "urllib3.connectionpool",
        "HTTPConnectionPool",
        "_make_request",
        ("conn", "method", "url", "preload_content"),
        charging,
    )


def _refused(
    refusal: Refused, payer: Payer, pool: Any, conn: Any, method: str, url: str, options: dict[str, Any]
) -> Any:
    """An answer of 429, or the error that urllib3 itself does not try again."""
    from urllib3 import HTTPResponse
    from urllib3.exceptions import MaxRetryError

    if not payer.answers_429:
        error = MaxRetryError(pool, url.partition("?")[0], refusal)
        error.args = (str(refusal),)
        raise error from refusal
    if options.get("response_conn") is not None:  # else urllib3 itself takes the unused connection back
        pool._put_conn(conn)
    answer = answer_to(refusal)
    return HTTPResponse(
        body=io.BytesIO(b"" if method == "HEAD" else answer.body),
        headers=answer.headers,
        status=answer.status,
        reason=answer.reason,
        version=11,
        preload_content=options.get("preload_content", True),
        decode_content=options.get("decode_content", True),
        request_method=method,
        request_url=url,
        retries=options.get("retries"),
    )


def address_of(scheme: str, host: str, port: int | None, target: str) -> str:
    """The URL of a request by the connection that it leaves on."""
    shown = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{scheme}://{shown}{'' if port is None else f':{port}'}{target}"
