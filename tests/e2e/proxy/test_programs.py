"""Programs that know nothing of us, through one proxy, on connections that are cut: wire = ledger."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from googleapiclient.discovery import build

from quota.jobs.emulator import Emulator
from support.proxy import Proxy
from support.proxying import House
from support.setup import charges_at

if TYPE_CHECKING:
    from pathlib import Path

CALLS = 12

SCRIPTS = {
    "bash": """
for n in $(seq $1); do
  for again in 1 2 3 4; do curl -sf -m 60 -o /dev/null "$2/main/things/$n" && break; done
done
""",
    "php": """<?php
for ($n = 0; $n < $argv[1]; $n++) {
    for ($again = 0; $again < 4; $again++) {
        $within = stream_context_create(["http" => ["timeout" => 60]]);
        $body = @file_get_contents("$argv[2]/main/things/$n", false, $within);
        if ($body === "{}") break;
    }
}
""",
    "node": """
(async () => {
  const [calls, address] = process.argv.slice(2);
  for (let n = 0; n < calls; n++) {
    for (let again = 0; again < 4; again++) {
      try {
        const sent = { method: "POST", body: "a=1", headers: { Authorization: "Bearer mine" } };
        const answer = await fetch(`${address}/main/things/${n}`, sent);
        if (answer.ok && (await answer.text()) === "{}") break;
      } catch {}
    }
  }
})();
""",
}


def start(language: str, folder: Path, address: str) -> subprocess.Popen[bytes]:
    if shutil.which(language) is None or (language == "bash" and shutil.which("curl") is None):
        pytest.skip(f"no {language}, or no curl, on PATH")
    script = folder / f"script.{'js' if language == 'node' else language}"
    script.write_text(SCRIPTS[language])
    plain = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    return subprocess.Popen([language, script, str(CALLS), address], env=plain)


def test_scripts_in_three_languages_are_charged_what_reached_upstream(house: House) -> None:
    """Each sends again what failed, as it does without us, and each attempt is charged."""
    with house.open(), Proxy(house.port) as cutting:
        for keep_bytes in range(0, 180, 20):
            cutting.fail("cut-reply", match=b" /main/", keep_bytes=keep_bytes)
            cutting.pass_next(match=b" /main/")
            cutting.fail("drop-request", match=b" /main/")
        running = [start(one, house.folder, f"http://127.0.0.1:{cutting.port}") for one in SCRIPTS]
        assert [one.wait(300) for one in running] == [0, 0, 0]
        targets = [one.target for one in house.upstream.reached]
        assert len(set(targets)) >= CALLS
        charged = [entry.method for entry in house.spent() if entry.units]
        assert len(charged) == len(targets) >= 3 * CALLS
        assert charged.count("write") == sum(one.head.startswith(b"POST") for one in house.upstream.reached)


def test_googles_client_needs_no_key_and_is_charged_by_the_methods_of_its_api(house: House) -> None:
    with Emulator() as upstream:
        google = f'[credentials.yt]\napi = "youtube-v3"\nendpoint = "{upstream.address}"\nkey = "file:key"\n'
        with house.open(rest=google):
            with build(
                "youtube",
                "v3",
                developerKey="mine",
                client_options={"api_endpoint": f"http://127.0.0.1:{house.port}/yt/"},
            ) as youtube:
                youtube.videos().list(part="snippet", chart="mostPopular", regionCode="DE").execute()
                youtube.search().list(part="snippet", q="x").execute()
                youtube.search().list(part="snippet", q="x" * 3_000).execute()  # it leaves as a POST
            got = house.ask("/batch/youtube/v3", "POST", b"x", credential="yt")
            assert (got.status, "batch" in got.problem["detail"]) == (501, True)
            spent = [(one.method, one.units) for one in charges_at(house.session.ledger, "yt")]
        assert spent == [("videos.list", 1), ("search.list", 100), ("search.list", 100)]
        assert upstream.usage()["requests"] == 3
