"""What sentinels, clusters and replicas say, from real ones: each is a line that tells what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from redis.crc import key_slot

from quota.errors import StorageAway, UnusableLedger
from quota.inbound.rules import open_storage
from quota.ledger.factory import open_ledger
from support.clusters import SERVICE, Nodes, Sentinels
from support.resp import RespServer
from support.servers import RedisServer, executables
from support.setup import budget_of, limit
from support.users import not_root

Ask = Callable[[str], str]

PASSWORD, OF_SENTINELS = "s3cret", "0f-sentinels"
WELL = f"?sentinel_password={OF_SENTINELS}"


def refusal(url: str) -> str:
    """What a charge is refused with; "" if it was admitted."""
    with closing(open_ledger(url)) as ledger:
        budget = budget_of(ledger, limit(500))
        return _safe(budget.charge("search.list").detail)


def told_inbound(url: str) -> str:
    with closing(open_storage(url)) as storage:
        try:
            storage.add_totals({"a": 1})
        except StorageAway as error:
            return _safe(str(error))
    return ""


def _safe(line: str) -> str:
    assert "\n" not in line
    assert PASSWORD not in line
    assert OF_SENTINELS not in line
    return line


BOTH = pytest.mark.parametrize("ask", [refusal, told_inbound])


@pytest.fixture(scope="module")
def sentinels() -> Iterator[Sentinels]:
    with Sentinels(password=PASSWORD, sentinel_password=OF_SENTINELS) as started:
        yield started


def at_sentinels(sentinels: Sentinels, service: str = SERVICE, query: str = "", user: str = f":{PASSWORD}@") -> str:
    hosts = ",".join(f"127.0.0.1:{each.port}" for each in sentinels.sentinels)
    return f"redis+sentinel://{user}{hosts}/{service}/0{query}"


@BOTH
def test_sentinels_may_have_their_own_password(sentinels: Sentinels, ask: Ask) -> None:
    assert ask(at_sentinels(sentinels, query=WELL)) == ""


@BOTH
@pytest.mark.parametrize(
    ("service", "query", "message"),
    [
        (SERVICE, "", "wants a password; add sentinel_password"),
        (SERVICE, "?sentinel_password=no", "refused the password; correct sentinel_username and sentinel_password"),
        ("mian", WELL, "knows no service 'mian'; write the name after `sentinel monitor`"),
    ],
)
def test_a_sentinels_error_names_the_sentinel(
    sentinels: Sentinels, ask: Ask, service: str, query: str, message: str
) -> None:
    line = ask(at_sentinels(sentinels, service, query))
    assert line.endswith(f"/{service}/0: sentinel 127.0.0.1:{sentinels.sentinels[0].port} {message}"), line


@BOTH
@pytest.mark.parametrize(
    ("user", "message"),
    [
        ("", 'wants a password; add password = "env:NAME" or "file:PATH"'),
        (":wrong@", "refused the password; check username and password"),
    ],
)
def test_an_error_of_the_primary_blames_no_sentinel(sentinels: Sentinels, ask: Ask, user: str, message: str) -> None:
    line = ask(at_sentinels(sentinels, query=WELL, user=user))
    assert f"/{SERVICE}/0 {message}" in line


@BOTH
def test_a_sentinel_under_a_server_url_is_named(sentinels: Sentinels, ask: Ask) -> None:
    for path in ("", "/1"):
        url = f"redis://:{OF_SENTINELS}@127.0.0.1:{sentinels.sentinels[0].port}{path}"
        line = ask(url)
        assert line.endswith("a sentinel, or lacks a command; for sentinels write redis+sentinel://HOST:PORT/SERVICE")


@BOTH
def test_a_server_that_lacks_a_command_is_named(ask: Ask) -> None:
    with RedisServer("--rename-command", "EXISTS", "", "--rename-command", "HINCRBY", "") as server:
        assert ask(server.url).endswith("/0 lacks a command; upgrade it to Redis 6.2, or undo its rename-command")


@BOTH
def test_a_single_server_under_a_url_of_several_is_named(redis_server: RedisServer, ask: Ask) -> None:
    for scheme, path, message in (
        ("sentinel", f"/{SERVICE}", "is no sentinel; name the sentinels' own addresses, or"),
        ("cluster", "", "is no cluster;"),
    ):
        line = ask(url := f"redis+{scheme}://127.0.0.1:{redis_server.port}{path}")
        assert line.endswith(f"{message} write redis:// for a single server"), line
        with closing(open_ledger(url)) as ledger, pytest.raises(UnusableLedger):
            ledger.begin("p")


@BOTH
def test_sentinels_without_a_primary_are_named(ask: Ask) -> None:
    """The first that answers explains it: each further question may need a TLS handshake."""
    state = b"".join(
        b"$%d\r\n%s\r\n" % (len(word), word) for word in (b"name", SERVICE.encode(), b"flags", b"s_down,master")
    )
    asked: list[int] = []
    answers = [lambda _, number=number: asked.append(number) or b"*1\r\n*4\r\n" + state for number in (1, 2)]
    with RespServer(answers[0]) as first, RespServer(answers[1]) as second:
        line = ask(f"redis+sentinel://127.0.0.1:{first.port},127.0.0.1:{second.port}/{SERVICE}")
    assert asked == [1, 2, 1] * (len(asked) // 3)
    assert line.endswith("has no primary now, as its sentinels see it; run again in a moment"), line


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (b"DENIED Redis is running in protected mode ... Setup a an authentication password", "set requirepass there"),
        (
            b"ERR max number of clients + cluster connections reached",
            "raise its maxclients; run again when the ledger answers",
        ),
        (b"LOADING Redis is loading the dataset in memory", ": ledger {} is loading its data; run again in a moment"),
    ],
)
def test_a_refusal_ends_with_the_remedy_of_the_servers_error(error: bytes, message: str) -> None:
    with (
        RespServer(lambda _: b"-%s\r\n" % error) as server,
        closing(open_ledger(f"redis://127.0.0.1:{server.port}")) as ledger,
    ):
        sentence = budget_of(ledger, limit(500)).charge("search.list").sentence()
        assert sentence.endswith(message.format(ledger.label)), sentence


@BOTH
def test_a_socket_that_this_user_may_not_open_is_named(ask: Ask) -> None:
    with RedisServer("--unixsocket", "redis.sock") as server:
        (path := server.folder / "redis.sock").chmod(0)
        with not_root():
            line = ask(f"unix://{path}")
    assert "this user may not open its socket; add it to the socket's group" in line, line


@BOTH
@pytest.mark.parametrize("executable", executables().values(), ids=executables())
def test_redis_with_too_few_replicas_takes_no_charge(ask: Ask, executable: str) -> None:
    with RedisServer("--min-replicas-to-write", "1", executable=executable) as server:
        line = ask(server.url)
    assert line.endswith(
        "has fewer replicas in reach than its min-replicas-to-write, and accepts no charges until they are back; "
        "see its replicas"
    ), line


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with Nodes() as started:
        yield started


def others(nodes: Nodes, key: str) -> RedisServer:
    """A primary that does not have this key."""
    return next(each for each in nodes.servers[:3] if each is not nodes.owner(key))


@pytest.mark.parametrize(("ask", "key"), [(refusal, "quota:{p}:log"), (told_inbound, "quota:inbound:{totals}")])
@pytest.mark.parametrize(("path", "more"), [("", ""), ("/1", ", which has no database numbers")])
def test_a_cluster_node_under_a_server_url_is_named(nodes: Nodes, ask: Ask, key: str, path: str, more: str) -> None:
    line = ask(f"redis://127.0.0.1:{others(nodes, key).port}{path}")
    assert line.endswith(f"is a node of a cluster{more}; write redis+cluster://HOST:PORT"), line


def test_a_slot_on_the_move_is_named(nodes: Nodes) -> None:
    """Half of its keys are here and half are there: neither node can run a script over all of them."""
    key = "quota:{p}:log"
    owner, other, slot = nodes.owner(key), others(nodes, key), key_slot(key.encode())
    assert refusal(nodes.url) == ""
    with nodes.client(owner) as here, nodes.client(other) as there:
        ours, theirs = (client.execute_command("CLUSTER MYID") for client in (here, there))
        there.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ours)
        here.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", theirs)
        here.execute_command("MIGRATE", "127.0.0.1", other.port, key, 0, 5_000)
        try:
            line, of_the_node = refusal(nodes.url), refusal(f"redis://127.0.0.1:{owner.port}")
        finally:
            for each in here.keys("quota:{p}:*"):
                here.execute_command("MIGRATE", "127.0.0.1", other.port, each, 0, 5_000)
            for client in (there, here):
                client.execute_command("CLUSTER SETSLOT", slot, "NODE", theirs)
    moving = "is moving its data or choosing a primary; run again in a moment"
    assert line.endswith(moving), line
    # Before Redis 7 a node that has a part of the keys names the other node.
    assert of_the_node.endswith((moving, "is a node of a cluster; write redis+cluster://HOST:PORT")), of_the_node
    assert refusal(nodes.url) == "", "the slot has arrived"
