"""A key or a password is in no output, log, error, ledger, store or file name, whatever goes well or wrong."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

import pytest

from support.commands import Quota
from support.emulator import Emulator
from support.plain_http import Answer, Arrived, PlainServer
from support.servers import RedisServer

CONFIG = """
[credentials.main]
api = "youtube-v3"
key = "{key}"
endpoint = "{address}"
[jobs.trending]
fetch = "trending"
regions = ["US", "DE"]
pages = 1
[jobs.search]
fetch = "search"
regions = ["US"]
options = {{ words = "music" }}
"""


def _everything(quota: Quota, *outputs: str) -> str:
    """All that was printed, and every file's name and bytes."""
    seen = list(outputs)
    for path in quota.folder.rglob("*"):
        seen.append(str(path))
        if path.is_file() and path.name != "the-key":
            seen.append(path.read_bytes().decode("latin-1"))
    return "\n".join(seen)


@pytest.mark.parametrize(
    ("where", "level", "key", "fault", "status"),
    [
        ("file:the-key", "debug", "not~of.the+usual/shape", None, 0),
        ("file:the-key", "", "invalid-AIzaSyThisIsTheSecretOfTheTests", None, 78),
        ("file:the-key", "debug", "AIzaSyThisIsTheSecretOfTheTests_0123456", "exhaust", 0),
        ("env:YOUTUBE_API_KEY", "debug", "AIzaSyThisIsTheSecretOfTheTests_0123456", "truncate", 0),
    ],
)
def test_the_key_is_seen_nowhere(
    tmp_path: Path, where: str, level: str, key: str, fault: str | None, status: int
) -> None:
    quota = Quota(tmp_path)
    (tmp_path / "the-key").write_text(f"{key}\n")
    with Emulator() as emulator:
        quota.configure(CONFIG.format(key=where, address=emulator.address))
        if fault:
            emulator.fault(fault)
        more = {"YOUTUBE_API_KEY": key, "QUOTA_LOG": level} if level else {"YOUTUBE_API_KEY": key}
        runs = [quota("run", "trending", **more), quota("run", "search", **more), quota("status", **more)]
        runs += [quota("check", **more), quota("spend", **more)]
        assert emulator.usage()["requests"] > 0
    assert runs[0].returncode == status, runs[0].stderr
    everything = _everything(quota, *(run.stdout + run.stderr for run in runs))
    assert key not in everything
    assert quote(key, safe="") not in everything
    assert len(everything) > 1_000


OWN_JOB = """
[jobs.own]
fetch = "own:fetch"
regions = ["US", "DE"]
"""

OWN_CODE = """
import logging
import os

def fetch(client, region, cursor):
    key = os.environ["YOUTUBE_API_KEY"]
    logging.getLogger("own").warning("asking with %s", key)
    raise ValueError(f"no luck with {key}" if region == "US" else f"{'-' * 275}{key}")
"""

ECHOED = "not~of.the+usual/shape"


def _error(code: int, message: str, reason: str) -> Answer:
    error = {"code": code, "message": message, "status": message, "errors": [{"reason": reason, "message": message}]}
    return Answer(code, json.dumps({"error": error}).encode())


ECHOES = {
    "US": _error(400, f"the key {ECHOED} is wrong", "badRequest"),
    "DE": _error(403, "no", ECHOED),
    "FR": _error(400, f"{quote(ECHOED)} {quote(ECHOED, safe='')}", "badRequest"),
    "GB": Answer(200, b"<html>", {"Content-Type": f"text/{ECHOED}"}),
    "IN": Answer(302, headers={"Location": f"ftp://example.org/{ECHOED}"}),
}
"""What upstream answers for each region."""


def _echo(request: Arrived) -> Answer:
    return ECHOES[parse_qs(urlsplit(request.target).query).get("regionCode", ["US"])[0]]


@pytest.mark.parametrize("how", [{}, {"QUOTA_LOG": "debug", "QUOTA_LOG_FORMAT": "json"}])
def test_a_key_that_upstream_or_a_job_says_back_is_seen_nowhere(tmp_path: Path, how: dict[str, str]) -> None:
    """No shape gives it away, and commands that read no key show later what was kept."""
    quota = Quota(tmp_path)
    (tmp_path / "own.py").write_text(OWN_CODE)
    with PlainServer(_echo) as upstream:
        config = CONFIG.format(key="env:YOUTUBE_API_KEY", address=upstream.address) + OWN_JOB
        quota.configure(config.replace('["US", "DE"]', json.dumps([*ECHOES])))
        asking = [
            quota(*words, YOUTUBE_API_KEY=ECHOED, **how)
            for words in (("run", "trending"), ("doctor", "--call"), ("run", "own"))
        ]
    everything = _everything(quota, *(run.stdout + run.stderr for run in [*asking, quota("runs"), quota("status")]))
    for run in asking:
        assert "[redacted]" in run.stdout + run.stderr
    assert asking[0].stderr.count("[redacted]") >= len(ECHOES)
    for text in (ECHOED, quote(ECHOED), quote(ECHOED, safe=""), ECHOED[:6]):  # a long message is cut
        assert text not in everything


@pytest.mark.parametrize("where", ["env:LEDGER_PASSWORD", "file:the-key", "clear", "url"])
def test_a_ledgers_password_is_seen_nowhere(tmp_path: Path, where: str) -> None:
    secret = "the-ledgers/p@ss:word"  # noqa: S105  # what is looked for in every output
    (tmp_path / "the-key").write_text(f"{secret}\n")
    quota = Quota(tmp_path)
    with RedisServer("--requirepass", secret) as server:
        label = f"redis://127.0.0.1:{server.port}/0"
        full = label.replace("://", f"://:{quote(secret, safe='')}@")
        url = f'url = "{full}"' if where == "url" else f'url = "{label}"'
        password = {"url": "", "clear": f'password = "{secret}"'}.get(where, f'password = "{where}"')
        config = '[ledger]\n{}\n{}\n[credentials.main]\napi = "youtube-v3"\n'
        quota.configure(config.format(url, password))
        right = {"LEDGER_PASSWORD": secret, "OTHER": full.replace("/0", "/1"), "QUOTA_LOG": "debug"}
        runs = [
            quota(*words, **right)
            for words in (
                ("charge", "search.list"),
                ("status", "--json"),
                ("check",),
                ("doctor", "--json"),
                ("ledger", "move", label, label.replace("/0", "/1")),
                ("charge", "search.list"),
                ("ledger", "move", "env:OTHER", label),
                ("charge", "search.list"),
            )
        ]
        assert [run.returncode for run in runs if run is not runs[3]] == [0, 0, 0, 0, 69, 0, 0], runs
        quota.configure(config.format(f'url = "{label}"', 'password = "the-ledgers/wrong"'))
        wrong = quota("charge", "search.list", QUOTA_LOG="debug")
        assert "refused the password; check username and password" in wrong.stderr
        (tmp_path / "quota.toml").unlink()
    everything = _everything(quota, *(run.stdout + run.stderr for run in [*runs, wrong]))
    assert "the-ledgers" not in everything
    assert len(everything) > 1_000
