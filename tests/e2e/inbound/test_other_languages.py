"""docs/examples/login_limit.php and .js: PHP, Node and Python share one limit, and the count is exact."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quota.inbound.contract import Limit, Policy
from quota.inbound.storage import open_storage

if TYPE_CHECKING:
    from support.servers import RedisServer

ROOT = Path(__file__).resolve().parents[3]
LOGIN = Policy("login", (Limit(3, 10_000),), "log")

SEND = """
// RESP over a socket, enough for these commands.
function connect(port) {
  const waiting = [];
  let rest = Buffer.alloc(0);
  const socket = require('node:net').connect(port, '127.0.0.1');
  const line = (at) => {
    const end = rest.indexOf('\\r\\n', at);
    return end < 0 ? null : [rest.toString('latin1', at, end), end + 2];
  };
  const read = (at) => {
    const head = line(at);
    if (!head) return null;
    const [text, next] = head, kind = text[0], value = text.slice(1);
    if (kind === '+') return [value, next];
    if (kind === '-') return [new Error(value), next];
    if (kind === ':') return [Number(value), next];
    if (kind === '$') {
      if (value === '-1') return [null, next];
      const end = next + Number(value);
      return rest.length < end + 2 ? null : [rest.toString('utf8', next, end), end + 2];
    }
    const items = [];
    let place = next;
    for (let n = 0; n < Number(value); n++) {
      const one = read(place);
      if (!one) return null;
      items.push(one[0]);
      place = one[1];
    }
    return [items, place];
  };
  socket.on('data', (data) => {
    rest = Buffer.concat([rest, data]);
    for (let found; (found = read(0)); ) {
      rest = rest.subarray(found[1]);
      const [resolve, reject] = waiting.shift();
      found[0] instanceof Error ? reject(found[0]) : resolve(found[0]);
    }
  });
  const send = (...words) => new Promise((resolve, reject) => {
    waiting.push([resolve, reject]);
    const parts = [Buffer.from(`*${words.length}\\r\\n`)];
    for (const word of words.map((word) => Buffer.from(word))) {
      parts.push(Buffer.from(`$${word.length}\\r\\n`), word, Buffer.from('\\r\\n'));
    }
    socket.write(Buffer.concat(parts));
  });
  return { send, close: () => socket.end() };
}
"""

LOOPS = {
    "php": """
$ends = microtime(true) + 1.5;
while (microtime(true) < $ends) {
    $answer = admit($redis, 'ann', 20, 1000);
    if ($answer['admitted']) { echo $answer['now_ms'], "\\n"; }
}
""",
    "js": """
(async () => {
  const { send, close } = connect(PORT);
  console.log(JSON.stringify(await admit(send, '203.0.113.7')));
  for (const ends = Date.now() + LASTING; Date.now() < ends; ) {
    const answer = await admit(send, 'ann', 20, 1000);
    if (answer.admitted) console.log(answer.now_ms);
  }
  close();
})();
""",
}


def example(language: str) -> str:
    return (ROOT / "docs" / "examples" / f"login_limit.{language}").read_text(encoding="utf-8")


def program(language: str, server: RedisServer, folder: Path, *, loops: bool) -> list[str]:
    """The command that runs the example, and then asks one limit for a while."""
    path = folder / f"inbound.{language}"
    if language == "php":
        if shutil.which("php") is None:
            pytest.skip("no php on PATH; on Debian: apt-get install php-cli php-redis")
        path.write_text(example("php").replace("6379", str(server.port)) + (LOOPS["php"] if loops else ""))
        return ["php", str(path)]
    if shutil.which("node") is None:
        pytest.skip("no node on PATH; on Debian: apt-get install nodejs")
    loop = LOOPS["js"].replace("PORT", str(server.port)).replace("LASTING", "1500" if loops else "0")
    path.write_text(example("js") + SEND + loop)
    return ["node", str(path)]


@pytest.mark.parametrize("languages", [("php", "python", "js"), ("js", "php", "python"), ("python", "js", "php")])
def test_one_visitor_has_three_logins_whatever_they_are_counted_by(
    server: RedisServer, home: Path, languages: tuple[str, ...]
) -> None:
    """Whoever comes first makes the salts for all."""
    storage = open_storage(server.url)
    for _ in range(2):
        left = []
        for language in languages:
            if language == "python":
                left.append(storage.decide(LOGIN, "203.0.113.7").admitted)
            else:
                command = program(language, server, home, loops=False)
                done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=300, check=False)
                assert (done.stderr, done.returncode) == ("", 0), done.stdout
                left.append(json.loads(done.stdout)["admitted"])
        assert left in ([True] * 3, [False] * 3)
    assert left == [False] * 3
    storage.close()


def test_php_node_and_python_together_are_exact(server: RedisServer, home: Path) -> None:
    worker = [sys.executable, "-m", "support.inbound_worker", server.url, "log", "20", "1000", "1.5", "0", "login"]
    commands = [program("php", server, home, loops=True), program("js", server, home, loops=True)]
    running = [subprocess.Popen(command, cwd=home, stdout=subprocess.PIPE, text=True) for command in commands]
    running.append(subprocess.Popen(worker, cwd=ROOT / "tests", stdout=subprocess.PIPE, text=True))
    printed = [one.communicate(timeout=300)[0].splitlines() for one in running]
    found = sorted(int(line) for lines in printed for line in lines if line.isdigit())
    assert [one.returncode for one in running] == [0, 0, 0]
    assert len(found) >= 40
    assert min(late - early for early, late in zip(found, found[20:], strict=False)) >= 1_000
