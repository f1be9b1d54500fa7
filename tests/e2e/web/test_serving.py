"""A process that serves HTTP ends when it is told to, whatever it is doing; why it cannot begin is one line."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection
from pathlib import Path

import pytest

from quota.errors import QuotaError
from quota.web import serving
from support.commands import Quota
from support.servers import until
from support.web import Served, hanging

ENDINGS = [
    # signal, what its connections are doing
    (signal.SIGTERM, ["/waits", "/begins", "/waits-for-a-thread", ""]),
    (signal.SIGINT, [""]),
    (signal.SIGTERM, ["/blocks"]),
    (signal.SIGINT, ["/waits", "/waits", "/begins", "", ""]),
]


def ask(served: Served, path: str) -> HTTPConnection:
    """A connection on which this was asked; with "" one that is open and idle."""
    connection = HTTPConnection("127.0.0.1", served.port, timeout=300)
    connection.request("GET", path or "/")
    if not path:
        connection.getresponse().read()
    return connection


def test_a_signal_ends_it_whatever_its_connections_do() -> None:
    with ExitStack() as stack:
        running = []
        for number, paths in ENDINGS:
            served = stack.enter_context(hanging())
            connections = [stack.enter_context(closing(ask(served, path))) for path in sorted(paths)]
            running.append((number, served, connections))
        for number, served, _ in running:
            served.process.send_signal(number)
        ended = [(served.process.wait(timeout=300), served.end(number)[1]) for number, served, _ in running]
        assert ended == [(0, "")] * len(ENDINGS)
        assert running[0][2][-2].getresponse().status == 503  # it waited, and got an answer


def test_an_application_that_fails_to_start_ends_the_server() -> None:
    with hanging("misconfigured") as served:
        _, stderr = served.process.communicate(timeout=300)
    assert (served.process.returncode, stderr) == (78, "quota.toml: no\n")


def test_an_error_is_a_line_and_a_problem() -> None:
    with hanging() as served:
        with closing(ask(served, "/fails")) as connection:
            answer = connection.getresponse()
            assert (answer.status, answer.headers["content-type"]) == (500, "application/problem+json")
            assert b"two" not in answer.read()
        assert served.end(signal.SIGINT) == (
            0,
            'request_failed method=GET path=/fails error="RuntimeError: two lines"\n',
        )


def test_a_client_that_sends_no_request_is_let_go() -> None:
    with ExitStack() as stack:
        served = stack.enter_context(hanging("impatient"))
        waits = stack.enter_context(closing(ask(served, "/waits")))
        kept = stack.enter_context(closing(ask(served, "")))
        kept.sock.sendall(b"GET / HTTP/1.1\r\nHost")
        silent = stack.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=300))
        slow = stack.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=300))
        slow.sendall(b"GET / HTTP/1.1\r\nX:")
        assert [each.recv(100) for each in (kept.sock, silent, slow)] == [b"", b"", b""]
        assert served.end(signal.SIGTERM) == (0, "")
        assert waits.getresponse().status == 503  # a request that takes its time is waited for


def test_a_client_that_takes_no_answer_is_let_go() -> None:
    """Neither an answer that is larger than what the system holds for it, nor many that were asked for at once."""
    with ExitStack() as stack:
        served = stack.enter_context(hanging("impatient"))
        opened = [
            stack.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=300)) for _ in range(2)
        ]
        for each, requests in zip(opened, (1, 3), strict=True):
            each.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n" * requests)
        until(lambda: not any(connections_of(served.process.pid, each) for each in opened))


def test_only_the_sender_of_a_malformed_request_gets_an_error() -> None:
    """Our log says nothing of it: whoever can connect could fill it."""
    with hanging() as served:
        for verb, rest in ((b"GET", b"zz\r\n"), (b"HEAD", b"zz\r\n"), (b"GET", b"0\r\n" + b"x: y\r\n" * 40_000)):
            with closing(socket.create_connection(("127.0.0.1", served.port), timeout=300)) as each:
                each.sendall(verb + b" / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + rest)
                with suppress(ConnectionError):
                    assert each.recv(1000).startswith(b"HTTP/1.1 4")
        assert served.end(signal.SIGTERM) == (0, "")


def test_a_head_without_an_end_is_not_waited_for_and_no_other_parser_reads_it(tmp_path: Path) -> None:
    """uvicorn would take httptools, which holds a head of any size, wherever somebody has installed it."""
    (tmp_path / "httptools.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\nraise ImportError\n")
    with hanging(path=tmp_path) as served:
        for start in (b"GET /", b"GET / HTTP/1.1\r\nx: "):
            with closing(socket.create_connection(("127.0.0.1", served.port), timeout=300)) as each:
                each.sendall(start)
                with pytest.raises(ConnectionError):
                    each.sendall(b"y" * 100_000_000)
    assert not (tmp_path / "imported").exists()


def connections_of(pid: int, client: socket.socket) -> list[str]:
    """What this process still has open to the client."""
    port, inodes = client.getsockname()[1], set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, _, remote, *_, inode = line.split()[:10]
        if int(remote.partition(":")[2], 16) == port:
            inodes.add(f"socket:[{inode}]")
    connections = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            connections.append(os.readlink(fd))
    return [each for each in connections if each in inodes]


def test_errors_of_the_event_loop_are_logged_at_intervals(caplog: pytest.LogCaptureFixture) -> None:
    faults = serving._Faults()
    for _ in range(3):
        faults.say(None, {"message": "accept failed", "exception": OSError(24, "Too many open files")})
    assert [record.getMessage() for record in caplog.records] == [
        'server_fault error="OSError: [Errno 24] Too many open files"'
    ]


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(QuotaError, match=f"127.0.0.1:{port}: Address already in use; choose another port") as error:
            serving.listen("127.0.0.1", port)
    assert error.value.exit_status == 1


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "a\0b"])
def test_an_address_of_no_interface_here_is_one_line(host: str) -> None:
    with pytest.raises(QuotaError) as error:
        serving.listen(host, 0)
    assert (error.value.exit_status, str(error.value).isprintable()) == (1, True)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]", "localhost"])
def test_port_0_takes_a_free_one(host: str) -> None:
    with serving.listen(host, 0) as listener:
        address = serving.address_of(listener)
        assert int(address.rpartition(":")[2]) > 0
        assert address.startswith(("http://127.0.0.1:", "http://[::1]:"))


@pytest.mark.parametrize("command", ["dashboard", "proxy", "serve"])
def test_a_server_reads_its_configuration_once(quota: Quota, command: str) -> None:
    """A pipe, as of `quota proxy --config <(...)`, can be read no second time."""
    reader, writer = os.pipe()
    os.write(writer, b'[credentials.hub]\napi = "github"\n')
    os.close(writer)
    with Served(quota.start(command, "--listen", "127.0.0.1:0", "--config", "/dev/stdin", stdin=reader)) as served:
        assert served.end(signal.SIGTERM) == (0, "")
