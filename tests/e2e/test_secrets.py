"""The key is in no output, log, error, ledger, store or file name, whatever goes well or wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from quota.jobs.emulator import Emulator
from support.commands import Quota

if TYPE_CHECKING:
    from pathlib import Path

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


@pytest.mark.parametrize("level", ["", "debug"])
@pytest.mark.parametrize("where", ["env:YOUTUBE_API_KEY", "file:the-key"])
@pytest.mark.parametrize(
    ("key", "fault", "status"),
    [
        ("AIzaSyThisIsTheSecretOfTheTests_0123456", None, 0),
        ("not~of.the+usual/shape", None, 0),
        ("invalid-AIzaSyThisIsTheSecretOfTheTests", None, 78),
        ("disabled-AIzaSyThisIsTheSecretOfTheTest", None, 78),
        ("AIzaSyThisIsTheSecretOfTheTests_0123456", "exhaust", 0),
        ("AIzaSyThisIsTheSecretOfTheTests_0123456", "truncate", 0),
    ],
)
def test_the_key_is_seen_nowhere(
    tmp_path: Path, level: str, where: str, key: str, fault: str | None, status: int
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
