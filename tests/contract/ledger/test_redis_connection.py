"""Connections: an answer belongs to its question, whatever happens between the two."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import FrameType

import pytest
import redis

from quota.ledger.factory import open_ledger
from quota.ledger.log import ANY, Append
from quota.ledger.redis_connection import Connections
from quota.ledger.redis_errors import ErrorReply, NoAnswer, NotRedis
from quota.ledger.redis_url import target_of
from quota.rules.entry import START, Entry
from support.processes import in_threads
from support.proxy import Proxy
from support.resp import RespServer
from support.servers import RedisServer, until
from support.setup import budget_of, claim_of, limit, state_at

TIMEOUT_S = 5.0
SHORT_S = 1.0
"""Where a test waits for it. A busy machine may take that long for a call, so that no other test counts on it."""

NAME = "of-the-tests"


@contextmanager
def connected(
    port: int, timeout_s: float = TIMEOUT_S, name: str = NAME, place: str = "", login: str = ""
) -> Iterator[Connections]:
    named = f"?client_name={name}" if name else ""
    target = target_of(f"redis://{login}127.0.0.1:{port}{place}{named}", timeout_s)
    with closing(Connections(target)) as connections:
        yield connections


def on_server(server: RedisServer) -> int:
    with redis.Redis(port=server.port) as client:
        return sum(each["name"] == NAME for each in client.client_list())


def ask_at_once(server: RedisServer, connections: Connections, calls: int) -> None:
    """Let several calls be under way at the same time, so that there are as many connections."""

    def check() -> None:
        connections.execute_command("BLPOP", "held", "0")

    asking = [threading.Thread(target=check) for _ in range(calls)]
    with redis.Redis(port=server.port) as client:
        for thread in asking:
            thread.start()
        until(lambda: client.info("clients")["blocked_clients"] == calls, "the server has not noticed")
        client.rpush("held", *range(calls))
    for thread in asking:
        thread.join()


def test_an_answer_that_comes_too_late_answers_nothing_else(server: RedisServer) -> None:
    with Proxy(server.port) as proxy, connected(proxy.port, timeout_s=SHORT_S) as connections:
        connections.execute_command("PING")
        proxy.fail("delay-request", match=b"first", delay_s=SHORT_S + 0.1)
        with pytest.raises(NoAnswer):
            connections.execute_command("ECHO", "first")
        assert connections.execute_command("ECHO", "two") == "two"
        time.sleep(0.2)  # the late answer has arrived by now
        assert connections.execute_command("ECHO", "three") == "three"


def test_more_than_an_answer_is_not_read_as_the_next_one() -> None:
    replies = iter([b"+first\r\n+PONG\r\n", b"+two\r\n"])
    with RespServer(lambda _: next(replies)) as server, connected(server.port, name="") as connections:
        assert connections.execute_command("ECHO", "first") == "first"
        assert connections.execute_command("ECHO", "two") == "two"


def test_an_answer_of_another_protocol_is_an_error() -> None:
    replies = iter([b"HTTP/1.1 400 Bad Request\r\n", b"+two\r\n"])
    with RespServer(lambda _: next(replies)) as server, connected(server.port, name="") as connections:
        with pytest.raises(NotRedis):
            connections.execute_command("ECHO", "first")
        assert connections.execute_command("ECHO", "two") == "two"


def test_a_long_command_and_a_long_answer_pass(server: RedisServer) -> None:
    with connected(server.port) as connections:
        for size in (65_530, 65_536, 3_000_000):
            assert connections.execute_command("ECHO", "\u00e9" * size) == "\u00e9" * size


def test_an_exception_of_a_handler_during_connect_passes_through(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a TimeoutError, which is what the library catches: after each call of something written in C, as a handler
    would."""
    monkeypatch.setattr(sys, "unraisablehook", id)
    passed, number, raised = 0, 0, list[type[BaseException]]()

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        nonlocal passed
        if event == "c_return" and frame.f_code.co_filename == redis.connection.__file__:
            passed += 1
            if passed == number:
                raise TimeoutError

    while passed >= number:
        passed, number = 0, number + 1
        with closing(Connections(target_of(server.url, TIMEOUT_S))) as connections:
            sys.setprofile(interrupt)
            try:
                connections.execute_command("PING")
            except BaseException as error:
                raised.append(type(error))
            finally:
                sys.setprofile(None)
    gc.collect()  # a socket that was just made when the handler came
    assert {*raised} == {TimeoutError}
    assert len(raised) > 5


def test_an_error_is_an_answer_and_its_connection_is_kept(server: RedisServer) -> None:
    with connected(server.port) as connections:
        mine = connections.execute_command("CLIENT", "ID")
        connections.execute_command("SET", "text", "x", "EX", "100")
        for wrong in (("EVALSHA", "0" * 40, "0"), ("LPUSH", "text", "1"), ("NONSENSE",)):
            with pytest.raises(ErrorReply):
                connections.execute_command(*wrong)
        assert connections.execute_command("CLIENT", "ID") == mine


def test_a_connection_that_the_server_closed_is_noticed_before_it_is_used(server: RedisServer) -> None:
    with connected(server.port) as connections, redis.Redis(port=server.port) as client:
        ask_at_once(server, connections, 3)
        for each in client.client_list():
            if each["name"] == NAME:
                client.client_kill_filter(each["id"])
        assert connections.execute_command("ECHO", "here") == "here"
        assert on_server(server) == 1


def test_an_append_after_a_restart_is_sent_once() -> None:
    """An append whose answer is lost would raise: it is not sent twice."""
    own = RedisServer()
    charge = Entry(START, 1, "units", "videos.list", "", "", "key")
    request = Append("", START, [charge], ANY, new_epoch="e")
    try:
        with closing(open_ledger(own.url)) as ledger:
            assert ledger.append("p", request).word == "APPENDED"
            own.kill()
            own.start()
            assert ledger.append("p", request).word == "APPENDED"
    finally:
        own.close()


def test_there_are_as_many_connections_as_calls_at_once_and_none_after_close(server: RedisServer) -> None:
    with connected(server.port) as connections:
        wrong: list[str] = []

        def work(name: str) -> None:
            for n in range(200):
                if connections.execute_command("ECHO", f"{name} {n}") != f"{name} {n}":
                    wrong.append(name)

        for _ in range(3):
            in_threads(work, *[(f"thread {n}",) for n in range(4)])
            assert 1 <= on_server(server) <= 4
        assert wrong == []
        connections.close()
        until(lambda: on_server(server) == 0, "the server has not noticed")
        connections.close()
        assert connections.execute_command("ECHO", "again") == "again", "closed means let go of, not ended"


def test_a_missing_database_takes_no_command(server: RedisServer) -> None:
    with connected(server.port, place="/99") as connections, redis.Redis(port=server.port) as client:
        with pytest.raises(ErrorReply, match="DB index is out of range"):
            connections.execute_command("SET", "x", "y")
        assert client.keys("*") == []


def test_options_in_the_url_are_the_librarys(server: RedisServer) -> None:
    named = f"{server.url}?socket_timeout=5&socket_connect_timeout=5&client_name={NAME}"
    with closing(open_ledger(named)) as ledger:
        assert budget_of(ledger, limit(500)).charge("search.list").admitted
        state = state_at(ledger)
        assert state.facts().exhaustions == ()
        assert not state.claim(claim_of("a")).elsewhere
        assert sorted(state.claim(claim_of("b")).elsewhere) == ["DE", "US"]
        assert abs(ledger.now_ms() - time.time_ns() // 1_000_000) < 5_000
        assert on_server(server) == 1


def test_a_forked_child_waits_for_no_lock_of_the_library() -> None:
    connections = Connections(target_of("redis+sentinel://127.0.0.1:1/s", TIMEOUT_S))
    child = threading.Thread(target=connections.start_over_in_child, daemon=True)
    with connections._sentinels[0].connection_pool._lock:  # by a thread that the child does not have
        child.start()
        child.join(SHORT_S)
        assert not child.is_alive()
