"""An upstream that means harm, over real sockets, with every client and little memory to spare (RLIMIT_AS)."""

from __future__ import annotations

import functools
import gzip
import json
import subprocess
import sys
import zlib
from collections.abc import Iterable
from itertools import repeat
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import brotli

from support.plain_http import RawServer, head, whole

MB = 1_000_000
MOST_BYTES = 48 * MB
"""Cloud Monitoring's answers may have 16 MB, and are in memory twice while they are unpacked."""

CONFIG = """
[ledger]
url = "sqlite:///ledger.db"
[credentials.main]
api = "youtube-v3"
project = "main"
cloud_project = "my-project-123456"
key = "file:key"
endpoint = "{}"
limits = [{{ name = "day", units = 1_000_000, window = "24h" }}]
"""
PIECE = b"x" * 65_536
SPENT = json.dumps({"error": {"code": 403, "errors": [{"reason": "quotaExceeded"}]}}).encode()


def packed(window_bits: int) -> bytes:
    """64 MB, packed without holding them."""
    packing = zlib.compressobj(6, zlib.DEFLATED, window_bits)
    return b"".join([*(packing.compress(bytes(MB)) for _ in range(64)), packing.flush()])


def packed_by_brotli() -> bytes:
    """64 MB in pieces that are all the same, so that they can be packed again into some bytes."""
    packing = brotli.Compressor(quality=5)
    first, again = (packing.process(bytes(MB)) + packing.flush() for _ in range(2))
    return first + again * 63 + packing.finish()


def attacks(status: str, zipped: bytes, deflated: bytes, squeezed: bytes) -> dict[str, Iterable[bytes]]:
    code = status[:3]
    chunked = head("Transfer-Encoding: chunked", status=status) + b"\r\n"
    body = {"error": {"code": 403, "message": "\x1b[31mred\x07\u202e\x9b2J\r\nX", "errors": [{"reason": "\x1b]0;t"}]}}
    return {
        f"{code}-gzip": [whole(zipped, "Content-Encoding: gzip", status=status)],
        f"{code}-gzip-twice": [whole(gzip.compress(zipped), "Content-Encoding: gzip, gzip", status=status)],
        f"{code}-brotli": [whole(squeezed, "Content-Encoding: br", status=status)],
        f"{code}-brotli-twice": [whole(brotli.compress(squeezed), "Content-Encoding: br, br", status=status)],
        f"{code}-deflate": [whole(deflated, "Content-Encoding: deflate", status=status)],
        f"{code}-http-1.0": [f"HTTP/1.0 {status}\r\n\r\n".encode(), *repeat(PIECE, 400)],
        f"{code}-chunk-beyond-all": [chunked + b"ffffffffffffffff\r\n", *repeat(PIECE, 400)],
        f"{code}-chunk-of-no-number": [chunked + b"zz\r\n{}\r\n"],
        f"{code}-chunk-below-nothing": [chunked + b"-5\r\n{}\r\n0\r\n\r\n"],
        f"{code}-trailers": [chunked + b"2\r\n{}\r\n0\r\n", *repeat(b"x: " + b"y" * 60_000 + b"\r\n", 300)],
        f"{code}-headers": [head(status=status), *repeat(b"x: " + b"y" * 60_000 + b"\r\n", 400)],
        f"{code}-a-header": [head(status=status) + b"x: ", *repeat(PIECE, 400)],
        f"{code}-large": [head("Content-Length: 100000000", status=status) + b"\r\n", *repeat(PIECE, 400)],
        f"{code}-escapes": [whole(json.dumps(body).encode(), status=status)],
        f"{code}-no-text": [whole(b"\x1b[31m\x9b\xff\xfe", status=status)],
        f"{code}-deep": [whole(b'{"error":' + b"[" * 100_000, status=status)],
        f"{code}-digits": [whole(b'{"error":{"code":' + b"9" * 100_000 + b"}}", status=status)],
        f"{code}-nan": [
            whole(b'{"error":{"code":NaN,"message":Infinity},"items":[],"timeSeries":[NaN]}', status=status)
        ],
        f"{code}-reason": [head(status=f"{code} \x1b[31mred") + b"Content-Length: 2\r\n\r\n{}"],
    }


REDIRECTS = (
    "file:///etc/passwd",
    "gopher://127.0.0.1:9/",
    "ftp://127.0.0.1/",
    "javascript:x",
    "data:,x",
    "http://[",
    "",
    "//",
)
REDIRECTS += ("http://u:p@127.0.0.1:9/", "http://a\x01b/", "http://127.0.0.1:0/", "https:///x")


@functools.cache
def answers() -> dict[str, Iterable[bytes]]:
    """Packed where they are sent: every process of a run of the tests imports this."""
    large = packed(31), packed(15), packed_by_brotli()
    return {
        **attacks("200 OK", *large),
        **attacks("403 No", *large),
        **{f"to-{n}": [whole(b"", f"Location: {to}", status="302 Found")] for n, to in enumerate(REDIRECTS)},
        "to-nowhere": [whole(b"", status="302 Found")],
        "spent": [whole(SPENT, status="403 No")],
        "spent-gzip": [whole(gzip.compress(SPENT), "Content-Encoding: gzip", status="403 No")],
        "spent-brotli": [whole(brotli.compress(SPENT), "Content-Encoding: br", status="403 No")],
    }


def asked(kinds: Iterable[str], folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What each client made of these answers, in a process of their own."""

    def answer(target: str) -> Iterable[bytes]:
        parts = urlsplit(target)
        if parts.path.startswith("/v3/projects"):
            return answers().get((folder / "target").read_text(), [whole(b"{}")])
        names = parse_qs(parts.query).get("id", [parts.path.strip("/")])
        return answers().get(names[0], [whole(b"{}")])

    questions = [(kind, name) for kind in kinds for name in names]
    with RawServer(answer) as server:
        (folder / "quota.toml").write_text(CONFIG.format(server.address))
        (folder / "key").write_text("a-key-of-the-tests")
        done = subprocess.run(
            [sys.executable, "-m", "support.bounded_client", server.address, *kinds],
            input="\n".join([*(f"{kind} fine" for kind in kinds), "spare", *map(" ".join, questions)]) + "\n",
            cwd=folder,
            env={"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "QUOTA_STATE_DIR": str(folder / "state")},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    ends = list(map(json.loads, done.stdout.splitlines()))
    fine, ends = ends[: -len(questions)], ends[-len(questions) :]
    assert not any("raised" in ended for ended in fine)
    outcomes: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    for (kind, name), ended in zip(questions, ends, strict=True):
        assert ended["memory"] < MOST_BYTES, (kind, name, ended)
        assert ended["seconds"] < 60, (kind, name, ended)
        outcomes[kind][name] = ended
    return outcomes


PLAIN = {"google": ("BadAnswer", "NoAnswer", "HttpError"), "monitoring": ("BadAnswer",), "notify": ("ValueError",)}


def test_our_clients_refuse_hostile_answers_in_one_line_and_bounded_memory(tmp_path: Path) -> None:
    """An error answer is the Google client's HttpError, as ever; a broken chunk is a connection that broke."""
    for kind, outcomes in asked(PLAIN, tmp_path, answers()).items():
        for name, ended in outcomes.items():
            if "raised" in ended:
                broken = "IncompleteRead" if name.endswith(("of-no-number", "below-nothing")) else ""
                assert ended["raised"] in (*PLAIN[kind], broken), (kind, name, ended)
                assert ended["said"].isprintable() or ended["raised"] == "HttpError", (kind, name, ended)
            if name.startswith("to-"):
                assert "redirect" in ended["said"] or "302" in ended["said"], (kind, name, ended)


def test_a_packed_error_is_understood_without_unpacking_all_of_it(tmp_path: Path) -> None:
    """256 kB of gzip may hold 256 MB, of brotli more; what is packed several times is known by its status alone."""
    names = [name for name in answers() if not name.startswith("200")]
    for kind, outcomes in asked(["Requests", "Httpx", "AsyncHttpx", "Aiohttp"], tmp_path, names).items():
        closing = {name for name, ended in outcomes.items() if ended["closed"]}
        assert closing == {"spent", "spent-gzip", "spent-brotli"}, kind
