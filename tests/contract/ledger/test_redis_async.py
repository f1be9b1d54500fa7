"""One connection for all tasks of a loop: an answer belongs to its question, whatever happens to either."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import redis

from quota.common.clock import elapsed_s
from quota.ledger.redis_async import AT_ONCE, FEW, MAX_IN_FLIGHT, AsyncConnections
from quota.ledger.redis_connection import Connections, Server
from quota.ledger.redis_errors import ErrorReply, Failed, Lost, NoAnswer, NotRedis
from quota.ledger.redis_url import client_maker
from quota.ledger.resp import pack
from support.loops import KINDS, Run
from support.processes import in_child
from support.proxy import Proxy
from support.resp import RespServer
from support.servers import RedisServer, free_port

TIMEOUT_S = 5.0
SHORT_S = 0.2
"""Where a test waits for it. A busy machine may take that long for a call, so that no other test counts on it."""

NAME, PASSWORD = "one-for-a-loop", "secret"

FAULTS = int(os.environ.get("QUOTA_TEST_FAULTS", "30"))


@contextmanager
def connected(port: int, timeout_s: float = TIMEOUT_S, name: str = NAME) -> Iterator[AsyncConnections]:
    server = Server(timeout_s, timeout_s, "127.0.0.1", port, client_name=name)
    connections = Connections(lambda _: server.connect(), timeout_s)
    lines = AsyncConnections(lambda: connections)
    try:
        yield lines
    finally:
        lines.close()


async def reply_to(lines: AsyncConnections, *words: str) -> Any:
    reply = await lines.ask(asyncio.get_running_loop(), pack(words), elapsed_s())
    if isinstance(reply, Exception):
        raise reply
    return reply


def echo(lines: AsyncConnections, word: str) -> Coroutine[Any, Any, Any]:
    return reply_to(lines, "ECHO", word)


def on_server(server: RedisServer) -> list[str]:
    """The ids of our connections that the server has."""
    with redis.Redis(port=server.port) as client:
        return [one["id"] for one in client.client_list() if one["name"] == NAME]


async def soon(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + 100
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.005)
    return True


class Told:
    """A server that gathers what it is sent, and sends what a test tells it to."""

    def __init__(self) -> None:
        self.heard = b""
        self.connections: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                self.connections.append(self._listener.accept()[0])
                threading.Thread(target=self._hear, args=(self.connections[-1],)).start()

    def _hear(self, one: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65_536):
                self.heard += data

    def say(self, said: bytes) -> None:
        """On the newest connection."""
        self.connections[-1].sendall(said)

    async def greet(self, lines: AsyncConnections) -> None:
        """Answer a first question, and forget it: on a new connection, few are asked at a time."""
        asking = asyncio.ensure_future(echo(lines, "first"))
        assert await soon(lambda: b"first" in self.heard)
        self.say(b"+first\r\n")
        assert await asking == "first"
        self.heard = b""

    def close(self) -> None:
        for one in (self._listener, *self.connections):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._thread.join()


@pytest.fixture
def told() -> Iterator[Told]:
    with contextlib.closing(Told()) as server:
        yield server


# -- an answer belongs to its question ---------------------------------------------------------------------------------


def test_all_tasks_of_a_loop_share_a_connection_and_each_gets_its_own_answer(server: RedisServer, run: Run) -> None:
    async def work(lines: AsyncConnections, task: int) -> None:
        for number in range(20):
            assert await echo(lines, f"{task} {number}") == f"{task} {number}"

    async def main() -> None:
        await echo(lines, "first")
        trips = proxy.trips
        await asyncio.gather(*(work(lines, task) for task in range(200)))
        assert len(on_server(server)) == 1
        assert proxy.trips - trips < 1_000, "4,000 questions: what is asked at once leaves together"

    with Proxy(server.port) as proxy, connected(proxy.port) as lines:
        run(main())


def test_no_more_than_64_questions_are_under_way(told: Told, run: Run) -> None:
    async def main() -> None:
        await told.greet(lines)
        asking = [asyncio.ensure_future(echo(lines, f"<{n}>")) for n in range(100)]
        assert await soon(lambda: told.heard.count(b"ECHO") == MAX_IN_FLIGHT == 64)
        await asyncio.sleep(0.05)
        assert told.heard.count(b"ECHO") == 64
        for n in range(100):
            told.say(b"+<%d>\r\n" % n)
            assert await asking[n] == f"<{n}>"
            if n < 36:
                assert await soon(lambda n=n: told.heard.count(b"ECHO") == 65 + n)

    with connected(told.port, name="") as lines:
        run(main())


def test_few_are_under_way_on_a_new_connection_and_while_the_server_has_more_to_read(told: Told, run: Run) -> None:
    async def main() -> None:
        asking = [asyncio.ensure_future(echo(lines, f"<{n}>")) for n in range(100)]
        for _ in range(2):
            assert await soon(lambda: told.heard.count(b"ECHO") == FEW)
            await asyncio.sleep(0.05)
            assert told.heard.count(b"ECHO") == FEW
            told.heard = b""
            told.say(b"*1\r\n$4\r\nMORE\r\n" * FEW)
        assert await soon(lambda: told.heard.count(b"ECHO") == FEW)
        assert await asyncio.gather(*asking[: 2 * FEW]) == [["MORE"]] * 2 * FEW
        told.heard = b""
        told.say(b"+said\r\n" * FEW)
        assert await soon(lambda: told.heard.count(b"ECHO") == MAX_IN_FLIGHT)
        told.say(b"+said\r\n" * MAX_IN_FLIGHT)
        assert await soon(lambda: told.heard.count(b"ECHO") == 100 - 3 * FEW)
        told.say(b"+said\r\n" * (100 - 3 * FEW - MAX_IN_FLIGHT))
        assert await asyncio.gather(*asking[2 * FEW :]) == ["said"] * (100 - 2 * FEW)

    with connected(told.port, name="") as lines:
        run(main())


def test_an_answer_makes_room_for_a_question_before_its_task_goes_on(told: Told, run: Run) -> None:
    """So the server works while the tasks do. Else each would wait for the other."""

    async def first() -> None:
        await echo(lines, "<0>")
        until_s = elapsed_s() + 5  # the loop stands still so long
        while told.heard.count(b"ECHO") == MAX_IN_FLIGHT:
            assert elapsed_s() < until_s
            time.sleep(0.001)

    async def main() -> None:
        await told.greet(lines)
        asking = [asyncio.ensure_future(first())]
        asking += [asyncio.ensure_future(echo(lines, f"<{n}>")) for n in range(1, MAX_IN_FLIGHT + 1)]
        assert await soon(lambda: told.heard.count(b"ECHO") == MAX_IN_FLIGHT)
        told.say(b"+<0>\r\n")
        await asking[0]
        for n in range(1, MAX_IN_FLIGHT + 1):
            told.say(b"+<%d>\r\n" % n)
        assert await asking[-1] == f"<{MAX_IN_FLIGHT}>"

    with connected(told.port, name="") as lines:
        run(main())


def test_a_long_question_and_a_long_answer_pass(server: RedisServer, run: Run) -> None:
    async def main() -> None:
        words = ["\u00e9" * size for size in (65_530, 3_000_000, 3, 65_536, 2_000_000)]
        assert await asyncio.gather(*(echo(lines, word) for word in words)) == words

    with connected(server.port) as lines:
        run(main())


def test_an_error_is_an_answer_and_its_connection_is_kept(server: RedisServer, run: Run) -> None:
    async def main() -> None:
        mine = await reply_to(lines, "CLIENT", "ID")
        for wrong in (("EVALSHA", "0" * 40, "0"), ("NONSENSE",)):
            with pytest.raises(ErrorReply) as raised:
                await reply_to(lines, *wrong)
        assert raised.value.code == ""
        assert await reply_to(lines, "CLIENT", "ID") == mine

    with connected(server.port) as lines:
        run(main())


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"+0\r\n+1\r\n+2\r\n+3\r\n", "more than was asked for"),
        (b"+0\r\n+1\r\n+2\r\n$9", "more than was asked for"),
        (b"+0\r\nHTTP/1.1 400 Bad Request\r\n", "Protocol error"),
    ],
)
def test_after_what_is_no_answer_nobody_gets_one(told: Told, run: Run, said: bytes, error: str) -> None:
    async def main() -> None:
        first = asyncio.ensure_future(echo(lines, "first"))
        assert await soon(lambda: b"first" in told.heard)
        told.say(b"+first\r\n")
        assert await first == "first"
        asking = [asyncio.ensure_future(echo(lines, f"<{n}>")) for n in range(3)]
        assert await soon(lambda: b"<2>" in told.heard)
        told.say(said)
        for one in asking:
            with pytest.raises(Lost, match=error) as raised:
                await one
            assert raised.value.left
        again = asyncio.ensure_future(echo(lines, "again"))
        assert await soon(lambda: b"again" in told.heard and len(told.connections) == 2)
        told.say(b"+again\r\n")
        assert await again == "again"

    with connected(told.port, name="") as lines:
        run(main())


def test_a_server_that_never_spoke_redis_is_called_so(run: Run) -> None:
    async def main() -> None:
        with pytest.raises(NotRedis):
            await echo(lines, "x")

    with RespServer(lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n") as other, connected(other.port, name="") as lines:
        run(main())


def test_what_comes_unasked_answers_nobody(told: Told, run: Run) -> None:
    """It came while the loop was held up, just before the next question."""

    async def main() -> None:
        first = asyncio.ensure_future(echo(lines, "first"))
        assert await soon(lambda: b"first" in told.heard)
        told.say(b"+first\r\n")
        await first
        told.say(b"+unasked\r\n")
        time.sleep(0.05)
        second = asyncio.ensure_future(echo(lines, "second"))
        assert await soon(lambda: b"second" in told.heard)
        told.say(b"+second\r\n")
        assert await second == "second"
        assert len(told.connections) == 2

    with connected(told.port, name="") as lines:
        run(main())


def test_a_primary_that_was_replaced_loses_what_it_refused_and_the_new_one_is_asked(told: Told, run: Run) -> None:
    async def main() -> None:
        asking = [asyncio.ensure_future(echo(lines, f"<{n}>")) for n in range(3)]
        assert await soon(lambda: b"<2>" in told.heard)
        told.say(b"+<0>\r\n-READONLY You can't write against a read only replica.\r\n+<2>\r\n")
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert isinstance(answers[1], Lost)
        assert (answers[0], answers[2]) == ("<0>", "<2>")
        again = asyncio.ensure_future(echo(lines, "again"))
        assert await soon(lambda: b"again" in told.heard and len(told.connections) == 2)
        told.say(b"+again\r\n")
        assert await again == "again"

    server = Server(TIMEOUT_S, TIMEOUT_S, "127.0.0.1", told.port)
    connections = Connections(lambda _: server.connect(), TIMEOUT_S, may_move=True)
    with contextlib.closing(AsyncConnections(lambda: connections)) as lines:
        run(main())


@pytest.mark.parametrize("kind", ["drop-request", "drop-reply", "cut-reply"])
def test_a_connection_that_ends_loses_what_was_asked_on_it_and_nothing_else(
    server: RedisServer, run: Run, kind: Any
) -> None:
    async def main() -> None:
        await echo(lines, "first")
        proxy.fail(kind, match=b"ECHO", keep_bytes=6)
        answers = await asyncio.gather(*(echo(lines, f"<{n}>") for n in range(100)), return_exceptions=True)
        left = [isinstance(one, Lost) and one.left for one in answers]
        assert left == sorted(left, reverse=True)
        assert AT_ONCE <= sum(left) <= MAX_IN_FLIGHT
        assert answers[sum(left) :] == [f"<{n}>" for n in range(sum(left), 100)]

    with Proxy(server.port) as proxy, connected(proxy.port) as lines:
        run(main())


def test_a_connection_that_was_closed_while_idle_is_found_out_before_it_is_used(server: RedisServer, run: Run) -> None:
    async def main() -> None:
        await echo(lines, "first")
        with redis.Redis(port=server.port) as client:
            client.client_kill_filter(on_server(server)[0])
        time.sleep(0.05)
        assert await echo(lines, "second") == "second"

    with connected(server.port) as lines:
        run(main())


# -- silence -----------------------------------------------------------------------------------------------------------


def test_a_silent_server_loses_what_was_asked_and_what_waits_is_not_asked(server: RedisServer, run: Run) -> None:
    """What waits gives up by itself: each connection it waits for takes the whole time to fall silent."""

    async def one(word: str, began_s: float) -> tuple[object, float]:
        try:
            return await echo(lines, word), 0.0
        except Lost as error:
            return error, elapsed_s() - began_s

    async def main() -> None:
        await echo(lines, "first")
        proxy.pause()
        began_s = elapsed_s()
        answers = await asyncio.gather(*(one(f"<{n}>", began_s) for n in range(400)))
        proxy.resume()
        assert {type(error) for error, _ in answers} == {NoAnswer}
        left = [after_s for error, after_s in answers if isinstance(error, Lost) and error.left]
        unsent = [after_s for error, after_s in answers if isinstance(error, Lost) and not error.left]
        assert len(left) <= 3 * 64
        assert len(unsent) >= 400 - 3 * 64
        assert min(left) >= SHORT_S
        assert min(unsent) >= 2 * SHORT_S
        assert await echo(lines, "again") == "again"

    with Proxy(server.port) as proxy, connected(proxy.port, timeout_s=SHORT_S) as lines:
        run(main())


def test_a_server_is_silent_that_sends_an_answer_byte_by_byte(told: Told, run: Run) -> None:
    async def main() -> None:
        asking = asyncio.ensure_future(echo(lines, "x"))
        assert await soon(lambda: b"ECHO" in told.heard)
        told.say(b"$9999\r\n")
        began_s = elapsed_s()
        while not asking.done() and elapsed_s() - began_s < 100:
            with suppress(OSError):
                told.say(b"x")
            await asyncio.sleep(0.02)
        with pytest.raises(NoAnswer):
            await asking
        again = asyncio.ensure_future(echo(lines, "again"))
        assert await soon(lambda: b"again" in told.heard)
        assert len(told.connections) == 2
        again.cancel()

    with connected(told.port, timeout_s=SHORT_S, name="") as lines:
        run(main())


def test_a_question_is_given_up_that_waits_too_long_behind_others_and_its_answer_is_read(told: Told, run: Run) -> None:
    """The server answers all the time, and too slowly for whoever stands at the end."""

    async def main() -> None:
        await told.greet(lines)
        asking = [asyncio.ensure_future(echo(lines, f"<{n}>")) for n in range(20)]
        assert await soon(lambda: b"<19>" in told.heard)
        said = 0
        while not asking[-1].done():
            told.say(b"+<%d>\r\n" % said)
            said += 1
            await asyncio.sleep(0.05)
        for n, one in enumerate(asking):
            if n < said - 1:
                assert await one == f"<{n}>"
        with pytest.raises(NoAnswer):
            await asking[-1]
        assert said < 20
        for n in range(said, 20):
            told.say(b"+<%d>\r\n" % n)
        last = asyncio.ensure_future(echo(lines, "last"))
        assert await soon(lambda: b"last" in told.heard)
        told.say(b"+last\r\n")
        assert await last == "last"
        assert len(told.connections) == 1

    with connected(told.port, timeout_s=SHORT_S, name="") as lines:
        run(main())


def test_a_loop_that_was_held_up_blames_nobody(server: RedisServer, run: Run) -> None:
    async def main() -> None:
        mine = await reply_to(lines, "CLIENT", "ID")
        asking = [asyncio.ensure_future(echo(lines, f"<{n}>")) for n in range(100)]
        for _ in range(3):
            await asyncio.sleep(0)
        for _ in range(3):
            time.sleep(5 * SHORT_S)
            await asyncio.sleep(0)
        assert await asyncio.gather(*asking[:64]) == [f"<{n}>" for n in range(64)]
        assert await reply_to(lines, "CLIENT", "ID") == mine
        await asyncio.gather(*asking, return_exceptions=True)

    with connected(server.port, timeout_s=SHORT_S) as lines:
        run(main())


# -- a task that is cancelled ------------------------------------------------------------------------------------------


def test_what_was_not_sent_is_withdrawn_and_what_was_is_done(server: RedisServer, run: Run) -> None:
    async def main() -> None:
        await echo(lines, "first")
        proxy.pause()
        asking = [asyncio.ensure_future(reply_to(lines, "INCR", f"{n}")) for n in range(AT_ONCE - 1)]
        await asyncio.sleep(0)
        asking[7].cancel()  # before anything of that turn was sent
        for _ in range(2):
            await asyncio.sleep(0)
        asking[9].cancel()
        asking += [asyncio.ensure_future(reply_to(lines, "INCR", f"{n}")) for n in range(AT_ONCE - 1, 100)]
        for _ in range(3):
            await asyncio.sleep(0)
        asking[80].cancel()
        proxy.resume()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        given_up = [n for n, answer in enumerate(answers) if isinstance(answer, asyncio.CancelledError)]
        assert given_up == [7, 9, 80]
        with redis.Redis(port=server.port, decode_responses=True) as client:
            done = {int(key) for key in client.scan_iter()}
        assert done == set(range(100)) - {7, 80}
        assert await echo(lines, "last") == "last"

    with Proxy(server.port) as proxy, connected(proxy.port) as lines:
        run(main())


# -- no connection -----------------------------------------------------------------------------------------------------


def test_without_a_server_nothing_has_left(run: Run) -> None:
    async def main() -> None:
        answers = await asyncio.gather(*(echo(lines, f"{n}") for n in range(100)), return_exceptions=True)
        assert [isinstance(one, Lost) and not one.left for one in answers] == [True] * 100
        assert len(set(map(id, answers))) == 100, "each task has an error of its own to raise"

    with connected(1) as lines:
        run(main())


def test_a_connection_that_takes_too_long_is_not_waited_for(run: Run) -> None:
    """A look into the DNS can take many seconds."""

    def connect(_ends_s: float) -> Any:
        waited.wait(100)
        raise Lost("no address")

    async def main() -> None:
        with pytest.raises(NoAnswer) as raised:
            await echo(lines, "x")
        assert not raised.value.left

    waited = threading.Event()
    connections = Connections(connect, SHORT_S)
    lines = AsyncConnections(lambda: connections)
    run(main())
    waited.set()
    lines.close()


def test_a_refused_password_is_the_servers_own_error(server: RedisServer, run: Run) -> None:
    async def main() -> None:
        with pytest.raises(ErrorReply) as raised:
            await echo(lines, "x")
        assert raised.value.asks_for_password

    wrong = Server(TIMEOUT_S, TIMEOUT_S, "127.0.0.1", server.port, password=PASSWORD[1:])
    connections = Connections(lambda _: wrong.connect(), TIMEOUT_S)
    with contextlib.closing(AsyncConnections(lambda: connections)) as lines:
        run(main())


@pytest.mark.parametrize("scheme", ["redis", "rediss", "unix"])
def test_every_server_that_is_reached_directly_is_asked_on_one(tmp_path: Path, run: Run, scheme: str) -> None:
    """With a password, and a database of its own."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    options, port = ["--unixsocket", "redis.sock"], free_port()
    if scheme == "rediss":
        made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        made += ["-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
        try:
            subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
        except OSError:
            pytest.skip("no openssl on PATH to make a certificate with")
        options += ["--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
        options += ["--tls-auth-clients", "no"]

    async def main(url: str) -> None:
        client: Any = client_maker(url, "x", TIMEOUT_S)()
        lines = AsyncConnections(lambda: client)
        long = "\u00e9" * 2_000_000
        words = [long if n == 30 else f"<{n}>" for n in range(100)]
        for _ in range(3):
            assert await asyncio.gather(*(echo(lines, word) for word in words)) == words
        await reply_to(lines, "SET", "key", "here")
        lines.close()

    try:
        own = RedisServer(*options)
    except RuntimeError:
        pytest.skip("this server was built without TLS")
    try:
        with redis.Redis(port=own.port) as client:
            client.config_set("requirepass", PASSWORD)
        run(
            main(
                {
                    "redis": f"redis://:{PASSWORD}@127.0.0.1:{own.port}/3",
                    "rediss": f"rediss://:{PASSWORD}@127.0.0.1:{port}/3?ssl_ca_certs={certificate}",
                    "unix": f"unix://:{PASSWORD}@{own.folder}/redis.sock?db=3",
                }[scheme]
            )
        )
        with redis.Redis(port=own.port, password=PASSWORD, db=3) as client:
            assert client.get("key") == b"here"
    finally:
        own.close()


# -- loops, threads, forks ---------------------------------------------------------------------------------------------


def test_one_object_serves_loops_one_after_another_and_side_by_side(server: RedisServer, run: Run) -> None:
    async def main() -> int:
        words = [f"<{n}>" for n in range(200)]
        assert await asyncio.gather(*(echo(lines, word) for word in words)) == words
        return int(await reply_to(lines, "CLIENT", "ID"))

    def work() -> None:
        ids.append(run(main()))

    ids: list[int] = []
    with connected(server.port) as lines:
        for _ in range(3):
            work()
        assert len(set(ids)) == 3
        assert len(on_server(server)) == 1, "the lines of closed loops are closed when another loop asks"
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(ids)) == 7
    deadline = time.monotonic() + 100
    while on_server(server) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert on_server(server) == []


def test_threads_that_find_the_same_loop_closed_do_not_meet(server: RedisServer) -> None:
    class Loop(asyncio.SelectorEventLoop):
        """Once it is closed, another thread is quicker than the first one that asks for that."""

        others: int = 0

        def is_closed(self) -> bool:
            closed = super().is_closed()
            if closed and looked_at and not self.others:
                self.others = 1
                thread = threading.Thread(target=lambda: said.append(asyncio.run(echo(lines, "quicker"))))
                thread.start()
                thread.join()
            return closed

    looked_at: list[bool] = []
    said: list[str] = []
    with connected(server.port) as lines:
        loop = Loop()
        loop.run_until_complete(echo(lines, "x"))
        loop.close()
        looked_at.append(True)
        assert asyncio.run(echo(lines, "slower")) == "slower"
    assert said == ["quicker"]


def test_after_close_the_next_question_connects_again(told: Told, run: Run) -> None:
    async def main() -> None:
        asking = [asyncio.ensure_future(echo(lines, "x")) for _ in range(100)]
        assert await soon(lambda: told.heard.count(b"ECHO") == FEW)
        lines.close()
        for n, one in enumerate(asking):
            with pytest.raises(Lost) as raised:
                await one
            assert raised.value.left == (n < FEW)
        again = asyncio.ensure_future(echo(lines, "again"))
        assert await soon(lambda: b"again" in told.heard)
        told.say(b"+again\r\n")
        assert await again == "again"

    with connected(told.port, name="") as lines:
        run(main())


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif(sys.platform == "win32", reason="no fork there")
def test_a_child_forked_in_a_loop_has_a_connection_of_its_own_and_leaves_the_parents_alone(
    server: RedisServer, run: Run
) -> None:
    async def client_id() -> int:
        return int(await reply_to(lines, "CLIENT", "ID"))

    def in_a_child() -> int:
        theirs = run(client_id())
        lines.close()
        return int(theirs)

    async def main() -> None:
        mine = await client_id()
        asking = [asyncio.ensure_future(echo(lines, f"<{n}>")) for n in range(100)]
        for _ in range(2):
            await asyncio.sleep(0)
        theirs = in_child(in_a_child)  # while 64 answers are awaited
        assert theirs != mine
        assert await asyncio.gather(*asking) == [f"<{n}>" for n in range(100)]
        assert await client_id() == mine

    with connected(server.port) as lines:
        run(main())


LEFT_OPEN = """
import asyncio, gc, sys
from quota.ledger.redis_async import AsyncConnections
from quota.ledger.redis_url import client_maker
from quota.common.clock import elapsed_s
from quota.ledger.resp import pack

async def asking(*words):
    return await lines.ask(asyncio.get_running_loop(), pack(words), elapsed_s())

async def main():
    asyncio.get_running_loop().slow_callback_duration = 60  # a busy machine is no noise of ours
    for _ in range(3):
        await asking("PING")
    asyncio.ensure_future(asking("BLPOP", "nothing", "0"))
    await asyncio.sleep(0.01)

run = asyncio.run
if sys.argv[2] == "uvloop":
    import uvloop
    run = uvloop.run
client = client_maker(sys.argv[1], "x", 5.0)()
lines = AsyncConnections(lambda: client)
run(main())
gc.collect()
run(main())
loop = asyncio.new_event_loop()
loop.slow_callback_duration = 60
loop.run_until_complete(asyncio.wait_for(asking("PING"), 5))
loop.close()
del lines, client
gc.collect()
"""


@pytest.mark.parametrize("loop", KINDS)
def test_a_loop_that_ends_with_a_connection_open_makes_no_noise(server: RedisServer, loop: str) -> None:
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", LEFT_OPEN, server.url, loop]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


# -- everything at once ------------------------------------------------------------------------------------------------


def attack(proxy: Proxy, server: RedisServer, r: random.Random, over: threading.Event) -> None:
    """Let connections fail in any way."""
    faults: list[Any] = ["drop-request", "swallow-request", "delay-request", "drop-reply", "cut-reply", "swallow-reply"]
    for _ in range(FAULTS):
        time.sleep(r.uniform(0.005, 0.15))
        if r.random() < 0.1:
            for one in on_server(server):
                with redis.Redis(port=server.port) as client, suppress(redis.ResponseError):
                    client.client_kill_filter(one)
        else:
            delay_s = r.uniform(0, 1.5 * SHORT_S)
            proxy.fail(r.choice(faults), match=b"EVAL", delay_s=delay_s, keep_bytes=r.randrange(60))
    over.set()


@pytest.mark.parametrize("seed", range(2))
def test_nothing_is_done_twice_and_nothing_confirmed_is_missing(server: RedisServer, run: Run, seed: int) -> None:
    """Every question is asked once, a fifth of the tasks are cancelled, and the network fails all the time."""
    r, outcomes = random.Random(seed), dict[str, str]()

    async def ask(word: str) -> None:
        outcomes[word] = "given up"
        script = "redis.call('HINCRBY', KEYS[1], ARGV[1], 1) return ARGV[1]"
        try:
            assert await reply_to(lines, "EVAL", script, "1", "done", word) == word
            outcomes[word] = "confirmed"
        except Failed as error:
            outcomes[word] = "lost" if getattr(error, "left", True) else "not sent"

    async def work(task: int) -> None:
        for number in count():
            if over.is_set():
                return
            asking = asyncio.ensure_future(ask(f"{task}.{number}"))
            if r.random() < 0.2:
                await asyncio.sleep(r.choice([0, 0, 0.0005, 0.002]))
                asking.cancel()
            await asyncio.wait([asking])
            if not asking.cancelled():
                asking.result()

    async def main() -> None:
        await asyncio.gather(*(work(task) for task in range(80)))
        lines.close()

    over = threading.Event()
    with Proxy(server.port) as proxy, connected(proxy.port, timeout_s=SHORT_S) as lines:
        attacking = threading.Thread(target=attack, args=(proxy, server, r, over))
        attacking.start()
        run(main())
        attacking.join()
        time.sleep(2 * SHORT_S)  # what was delayed has arrived by now
    with redis.Redis(port=server.port, decode_responses=True) as client:
        done = {word: int(times) for word, times in client.hgetall("done").items()}
    assert set(done.values()) <= {1}
    assert {word for word, outcome in outcomes.items() if outcome == "confirmed"} <= done.keys()
    assert {word for word, outcome in outcomes.items() if outcome == "not sent"}.isdisjoint(done)
    assert min(Counter(outcomes.values())[one] for one in ("confirmed", "lost", "given up")) > 0
