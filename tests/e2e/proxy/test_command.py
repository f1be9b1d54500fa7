"""`quota proxy` as a process: where it listens, who gets in, how it ends, and that bodies pass in constant memory."""

from __future__ import annotations

import os
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection

import pytest

from support.commands import QUOTA, Quota
from support.plain_http import Reached, answer
from support.proxying import SECRET, House
from support.servers import until
from support.web import Served, served_by

BODY_MB = int(os.environ.get("QUOTA_TEST_BODY_MB", "24"))
"""The size of the bodies that pass up and down."""

SLOW = int(os.environ.get("QUOTA_TEST_SLOW", "40"))
"""How many callers are slow at once."""

MB = 1_000_000


@pytest.fixture
def quota(house: House) -> Quota:
    house.write()
    return Quota(house.folder)


def run(quota: Quota, *options: str) -> Served:
    return Served(quota.start("proxy", *options))


def over(path: str, sent: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(100)
        connection.connect(path)
        connection.sendall(sent)
        got = b""
        while piece := connection.recv(1 << 16):
            got += piece
        return got


def test_a_socket_is_its_users_alone_and_gone_with_the_process(house: House, quota: Quota) -> None:
    path = house.folder / "proxy.sock"
    asked = b"GET /main/things HTTP/1.1\r\nHost: any\r\nConnection: close\r\n\r\n"
    for ends in (signal.SIGKILL, signal.SIGTERM):  # the second finds what the first left behind
        process = Served(quota.start("proxy", "--unix", "proxy.sock"), "unix:")
        with process:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert over(str(path), asked).startswith(b"HTTP/1.1 200 ")
            second = quota("proxy", "--unix", "proxy.sock")
            assert (second.returncode, second.stderr.count("\n")) == (1, 1)
            assert over(str(path), asked).startswith(b"HTTP/1.1 200 ")
            process.end(ends)
    assert not path.exists()
    path.write_text("a file")
    assert quota("proxy", "--unix", "proxy.sock").returncode == 1
    assert path.read_text() == "a file"


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (["--listen", "0.0.0.0:0"], 2),
        (["--listen", "8790"], 2),
        (["--listen", "127.0.0.1:0", "--unix", "x"], 2),
        (["--token", SECRET], 2),
        (["--token", "file:nothing"], 78),
        (["--unix", "no/folder/x"], 1),
    ],
)
def test_an_address_open_to_others_is_one_line(quota: Quota, options: list[str], status: int) -> None:
    done = quota("proxy", *options)
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (status, 1, "")
    assert SECRET not in done.stderr


def test_with_a_token_other_machines_may_ask(house: House, quota: Quota) -> None:
    (house.folder / "token").write_text("t-o-k-e-n\n")
    with run(quota, "--listen", "0.0.0.0:0", "--token", f"file:{house.folder / 'token'}") as served:
        for token, status in (("t-o-k-e-n", 200), ("another", 401)):
            connection = HTTPConnection("127.0.0.1", served.port, timeout=100)
            connection.request("GET", "/main/things", headers={"Host": "a-name", "Quota-Token": token})
            assert connection.getresponse().status == status
            connection.close()


def test_a_credential_without_its_key_is_not_served_and_the_others_are(house: House, quota: Quota) -> None:
    house.write(rest='[credentials.other]\napi = "things.toml"\nkey = "env:NOT_SET"\n')
    with run(quota, "--listen", "127.0.0.1:0") as served:
        house.port = served.port
        assert house.ask("/things").status == 200
        got = house.ask("/things", credential="other")
        assert (got.status, "NOT_SET" in got.problem["detail"]) == (500, True)
        _, stderr = served.end(signal.SIGTERM)
    assert "proxy_without credential=other" in stderr
    house.write(auth='key = "env:NOT_SET"')
    done = quota("proxy", "--listen", "127.0.0.1:0")
    assert (done.returncode, done.stderr.count("\n")) == (78, 1), "it is said once"


def test_a_signal_ends_the_proxy_and_each_refusal_is_a_line(house: House, quota: Quota) -> None:
    """A request that upstream does not answer holds nobody up; its charge stands."""
    house.write(limit=1)
    silent = threading.Event()
    house.upstream.answer = lambda _: [answer(b"{}")] if silent.wait(100) else []
    with (
        run(quota, "--listen", "127.0.0.1:0") as served,
        socket.create_connection(("127.0.0.1", served.port)) as waiting,
    ):
        waiting.sendall(b"GET /main/things?q=private HTTP/1.1\r\nHost: localhost\r\n\r\n")
        house.port = served.port
        until(lambda: bool(house.upstream.reached))
        assert house.ask("/things?q=private").status == 429
        status, stderr = served.end(signal.SIGTERM)
        silent.set()
        assert waiting.recv(100).startswith(b"HTTP/1.1 503 ")
    assert status == 0
    assert stderr.count("\n") == 1
    assert stderr.startswith("quota: proxy_refused credential=main reason=limit: refused read (1 unit) on main: ")
    assert "private" not in stderr
    assert quota.json("status")["credentials"][0]["limits"][0]["used_units"] == 1


def memory_mb(served: Served) -> float:
    """The most that the process has held."""
    with open(f"/proc/{served.process.pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1_000


def test_bodies_pass_in_constant_memory(house: House, quota: Quota) -> None:
    piece = b"x" * 100_000

    def down(request: Reached) -> Iterator[bytes]:
        if request.target != "/down":
            yield answer(b"{}")
            return
        yield b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (BODY_MB * MB)
        for _ in range(BODY_MB * MB // len(piece)):
            yield piece

    house.upstream.answer = down
    with run(quota, "--listen", "127.0.0.1:0") as served:
        house.port = served.port
        house.ask("/things", "POST", b"x")
        before_mb = memory_mb(served)
        for headers in ({"Content-Length": str(BODY_MB * MB)}, {}):
            body = (piece for _ in range(BODY_MB * MB // len(piece)))
            assert house.ask("/up", "POST", body, headers).status == 200
        connection = HTTPConnection("127.0.0.1", served.port, timeout=500)
        connection.request("GET", "/main/down")
        got, answered = 0, connection.getresponse()
        while read := answered.read(1 << 16):
            got += len(read)
        connection.close()
        assert got == BODY_MB * MB
        assert memory_mb(served) < before_mb + 16
    assert [each.complete for each in house.upstream.reached] == [True] * 4


def test_slow_callers_hold_little_and_nobody_else_waits(house: House, quota: Quota) -> None:
    """Half of them take nothing of a long answer, and half send a body without an end. Each holds two of the files that
    the process may open, and a shell allows fewer than they need."""
    large = answer(b"x" * 8 * MB)
    house.upstream.answer = lambda request: [large if request.target == "/large" else answer(b"{}")]
    house.write(limit=10**6)
    takes_nothing = b"GET /main/large HTTP/1.1\r\nHost: localhost\r\n\r\n"
    sends_on = b"POST /main/things HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 1_000
    few = ["bash", "-c", f'ulimit -Sn {SLOW} && exec "$@"', "-"]
    command = [*few, *QUOTA, "proxy", "--listen", "127.0.0.1:0"]
    with served_by(command, cwd=quota.folder, env=quota.env) as served, ExitStack() as slow:
        house.port = served.port
        for number in range(SLOW):
            connection = slow.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            connection.connect(("127.0.0.1", served.port))
            connection.sendall(takes_nothing if number % 2 else sends_on)
        until(lambda: len(house.upstream.reached) >= SLOW)
        assert [house.ask("/things").status for _ in range(20)] == [200] * 20
        print(f"{SLOW} slow callers: {memory_mb(served):.0f} MB at most")
        assert memory_mb(served) < 80 + SLOW // 2
