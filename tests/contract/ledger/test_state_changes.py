"""What changes seldom in a state, by one rule on every ledger: in Redis also where others change the same meanwhile,
and where an answer is lost."""

from __future__ import annotations

import multiprocessing
import time
from contextlib import closing, contextmanager
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest
import redis

from contract.ledger.test_charge_script import LOG, MIN_RETENTION_MS, NOW, STATE, Scripts, scripts
from quota.errors import LedgerError, UsageError
from quota.ledger import redis_ledger
from quota.ledger.contract import Exhaustion
from quota.ledger.factory import open_ledger
from quota.ledger.grants import Grant
from quota.ledger.redis_ledger import MAX_CHANGES, RedisLedger
from quota.ledger.redis_scripts import FORMAT
from quota.ledger.state_changes import Change, StateChanges
from quota.ledger.state_fields import read_usages
from quota.ledger.unlogged import UnloggedUsage
from quota.terms.limits import DAY_MS
from support.claims import claim_of
from support.processes import Children
from support.proxy import Proxy
from support.setup import Setup, limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from multiprocessing.synchronize import Barrier

    from support.servers import RedisServer

__all__ = ["scripts"]  # a fixture

SWAP = (NOW, MIN_RETENTION_MS)
VIEW = limit(500).view.name


@pytest.fixture
def proxied(server: RedisServer) -> Iterator[tuple[Proxy, Setup]]:
    """A ledger behind a proxy, and connected."""
    with Proxy(server.port) as proxy:
        setup = Setup.open(proxy.url)
        setup.project = "p"
        setup.ledger.reopen("p", "none")
        yield proxy, setup
        setup.ledger.close()


def exhausted(setup: Setup, bucket: str = "units") -> Exhaustion:
    return Exhaustion(bucket, setup.now_ms, setup.now_ms + DAY_MS, "quotaExceeded", "a test")


# -- swap.lua ----------------------------------------------------------------------------------------------------------


def test_what_was_read_is_changed(scripts: Scripts) -> None:
    now_ms, seen, *texts = scripts.run("swap", *SWAP, "", 2, "a", "b")
    assert (now_ms, texts, scripts.client.keys("*")) == (str(NOW), [None, None], [])
    assert scripts.run("swap", *SWAP, seen, 2, "a", "b", "a", "=1", "c", "=-") == 1
    assert scripts.client.hgetall(STATE) == {"format": FORMAT, "a": "1", "c": "-"}
    _, seen, *texts = scripts.run("swap", *SWAP, seen, 2, "a", "b", "b", "=2")
    assert texts == ["1", None], "that stood before"
    assert scripts.run("swap", *SWAP, seen, 2, "a", "b", "b", "=", "a", "-") == 1
    assert scripts.client.hgetall(STATE) == {"format": FORMAT, "b": "", "c": "-"}


def test_fields_that_are_alike_together_are_apart(scripts: Scripts) -> None:
    seen = set()
    for a, b in (("1", "2"), ("12", ""), ("", "12"), ("1 1:2", "-"), ("1", "1:2 -"), ("-", "-")):
        scripts.client.hset(STATE, mapping={"format": FORMAT, "a": a, "b": b})
        scripts.client.expire(STATE, 100)
        seen.add(scripts.run("swap", *SWAP, "", 2, "a", "b")[1])
    scripts.client.hdel(STATE, "a", "b")
    seen.add(scripts.run("swap", *SWAP, "", 2, "a", "b")[1])
    assert len(seen) == 7


def test_the_keys_live_at_least_so_long(scripts: Scripts) -> None:
    scripts.charge()
    before = [scripts.client.pttl(key) for key in (LOG, STATE)]
    for more_ms, extended in ((-DAY_MS, False), (DAY_MS, True)):
        seen = scripts.run("swap", *SWAP, "", 1, "a")[1]
        assert scripts.run("swap", NOW, before[0] + more_ms, seen, 1, "a", "a", f"={more_ms}") == 1
        after = [scripts.client.pttl(key) for key in (LOG, STATE)]
        assert [after > before for before, after in zip(before, after, strict=True)] == [extended] * 2


@pytest.mark.parametrize(
    "args",
    [
        ("x", 1, "", 1, "a"),
        (NOW, 0, "", 1, "a"),
        (NOW, 1, "", "x", "a"),
        (NOW, 1, "", -1, "a"),
        (NOW, 1, "", 2, "a"),
        (NOW, 1, "", 1, "a", "b"),
        (NOW, 1, "", 2_001, *range(2_001)),
        (NOW, 1, "", 0, *range(4_002)),
        (),
    ],
)
def test_arguments_that_cannot_be_right_are_an_error(scripts: Scripts, args: tuple[object, ...]) -> None:
    with pytest.raises(redis.ResponseError, match=r"swap.lua: now_ms and keep_ms are numbers"):
        scripts.run("swap", *args)
    assert scripts.client.keys("*") == []


def test_two_thousand_fields_are_changed_at_once(scripts: Scripts) -> None:
    """MAX_FIELDS."""
    names = list(range(2_000))
    seen = scripts.run("swap", *SWAP, "", 2_000, *names)[1]
    assert scripts.run("swap", *SWAP, seen, 2_000, *names, *(word for name in names for word in (name, "=x"))) == 1
    assert scripts.client.hlen(STATE) == 2_001


# -- others change the same --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 1, 5])
def test_a_change_that_comes_too_late_is_decided_anew(server: RedisServer, lost: int) -> None:
    setup = Setup.open(server.url)
    asked = []
    with redis.Redis(port=server.port, decode_responses=True) as client:

        def rule(now_ms: int, fields: Mapping[str, str]) -> Change[str]:
            asked.append(fields)
            setup.now_ms += 1
            if len(asked) <= lost:
                client.hset(STATE, mapping={"format": FORMAT, "claim:a": f"{len(asked)}"})
                client.expire(STATE, 100)
            return Change("done", {"claim:a": f"{fields.get('claim:a', '')} and mine at {now_ms}"})

        assert isinstance(setup.ledger, RedisLedger)
        assert setup.ledger._change_state("p", ("claim:a",), rule) == "done"
        assert asked == [{}, *({"claim:a": f"{n + 1}"} for n in range(lost))]
        assert client.hget(STATE, "claim:a") == f"{lost or ''} and mine at {NOW}"
    setup.ledger.close()


@pytest.mark.parametrize(("within_s", "times"), [(None, MAX_CHANGES), (0.0, 1)])
def test_a_change_that_always_comes_too_late_is_one_line(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, within_s: float | None, times: int
) -> None:
    """After so many tries, or so long."""
    if within_s is not None:
        monkeypatch.setattr(redis_ledger, "CHANGE_WITHIN_S", within_s)
    setup = Setup.open(server.url)
    asked = 0
    with redis.Redis(port=server.port, decode_responses=True) as client:

        def rule(now_ms: int, fields: Mapping[str, str]) -> Change[str]:
            nonlocal asked
            asked += 1
            client.hset(STATE, mapping={"format": FORMAT, "claim:a": f"{asked}"})
            client.expire(STATE, 100)
            return Change("done", {"claim:a": "mine"})

        assert isinstance(setup.ledger, RedisLedger)
        with pytest.raises(LedgerError, match=r"others change the same without end; run again in a moment$"):
            setup.ledger._change_state("p", ("claim:a",), rule)
        assert asked == times
        assert client.hget(STATE, "claim:a") == f"{times}"
    setup.ledger.close()


def test_a_change_that_nobody_hinders_is_made_however_slow_it_is(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_ledger, "CHANGE_WITHIN_S", 0.0)
    setup = Setup.open(server.url)
    assert isinstance(setup.ledger, RedisLedger)
    assert setup.ledger._change_state("p", ("a",), lambda *_: Change("done", {"a": "x"})) == "done"
    setup.ledger.close()


def test_what_changes_nothing_is_not_written(server: RedisServer) -> None:
    setup = Setup.open(server.url)
    with redis.Redis(port=server.port, decode_responses=True) as client:
        for becomes in ("x", "x", None, None):
            setup.ledger._change_state("p", ("a",), lambda *_, becomes=becomes: Change(0, {"a": becomes}))  # type: ignore[attr-defined]
        assert client.hgetall(STATE) == {"format": FORMAT}
        assert client.info("commandstats")["cmdstat_evalsha"]["calls"] >= 6
    setup.ledger.close()


# -- lost answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["drop-reply", "drop-request"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_bucket_is_reopened_once_whichever_answer_is_lost(proxied: tuple[Proxy, Setup], kind: Any, at: int) -> None:
    proxy, setup = proxied
    stood = setup.ledger.exhaust("p", exhausted(setup))
    for _ in range(at):
        proxy.pass_next()
    proxy.fail(kind)
    connections = proxy.connections
    assert setup.ledger.reopen("p", "units", "raised")
    assert proxy.connections == connections + 1, "it was lost, and asked for again"
    assert list(setup.ledger.notes("p").exhaustions) == [stood._replace(reopened_ms=NOW, reopened_because="raised")]
    assert not setup.ledger.reopen("p", "units", "raised")


def test_what_upstream_says_after_a_reopening_is_not_lifted_by_its_repeat(
    proxied: tuple[Proxy, Setup], server: RedisServer
) -> None:
    """The answer is lost, and before it is asked for again, upstream closes the bucket anew."""
    proxy, setup = proxied
    setup.ledger.exhaust("p", exhausted(setup))
    other = Setup.open(server.url, now_ms=NOW + 5)
    reopened = []
    with repeat_held(proxy, lambda: reopened.append(setup.ledger.reopen("p", "units", "raised"))):
        news = other.ledger.exhaust("p", exhausted(other))
        assert news.since_ms == NOW + 5, "the first try had arrived"
    assert reopened == [True], "and then closed again"
    assert list(other.ledger.notes("p").exhaustions) == [news]
    other.ledger.close()


def test_what_is_granted_after_a_grant_is_not_replaced_by_its_repeat(
    proxied: tuple[Proxy, Setup], server: RedisServer
) -> None:
    proxy, setup = proxied
    earlier, later = (Grant("units", units, NOW, NOW + DAY_MS) for units in (100, 200))
    other = Setup.open(server.url)
    with repeat_held(proxy, lambda: setup.ledger.grant("p", [earlier], [])):
        assert list(other.ledger.notes("p").grants) == [earlier]
        other.ledger.grant("p", [later])
    assert list(other.ledger.notes("p").grants) == [later]
    other.ledger.close()


@pytest.mark.parametrize("kind", ["drop-reply", "drop-request"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_loss_is_reported_once_whichever_answer_is_lost(proxied: tuple[Proxy, Setup], kind: Any, at: int) -> None:
    """L17, L18."""
    proxy, setup = proxied
    budget = setup.budget()
    epoch = str(budget.charge("videos.list").id)
    for _ in range(at):
        proxy.pass_next()
    proxy.fail(kind)
    lost = UnloggedUsage(VIEW, "lost", ((7, NOW + DAY_MS),), (1, 0))
    epoch = setup.ledger.add_unlogged("p", "e2", [lost])
    assert epoch.endswith("/e2")
    assert setup.ledger.add_unlogged("p", "e3", [lost]) == epoch, "nothing new"
    assert budget.usage()[0].used_units == 1 + 7


@contextmanager
def repeat_held(proxy: Proxy, work: Callable[[], object]) -> Iterator[None]:
    """What stands in this block happens after a change was made whose answer is lost, and before that is repeated."""
    proxy.pass_next()
    proxy.fail("drop-reply")
    proxy.fail("hold-request")
    working = Thread(target=work)
    working.start()
    while not proxy.held:
        time.sleep(0.001)
    yield
    assert proxy.release() == 1
    working.join()


@pytest.mark.usefixtures("real_walls")
def test_a_first_try_that_arrives_after_its_repeat_changes_nothing(
    proxied: tuple[Proxy, Setup], server: RedisServer
) -> None:
    proxy, setup = proxied
    setup.ledger.exhaust("p", exhausted(setup))
    proxy.fail("hold-request", match=b"reopened:units")
    assert setup.ledger.reopen("p", "units", "raised")
    setup.now_ms += 5
    news = setup.ledger.exhaust("p", exhausted(setup))
    with redis.Redis(port=server.port) as client:
        before = client.info("commandstats")["cmdstat_evalsha"]["calls"]
        assert proxy.release() == 1
        while client.info("commandstats")["cmdstat_evalsha"]["calls"] == before:
            time.sleep(0.001)
    assert list(setup.ledger.notes("p").exhaustions) == [news]


# -- many processes ----------------------------------------------------------------------------------------------------


def _report(url: str, me: int, times: int, barrier: Barrier) -> None:
    with closing(open_ledger(url, clock=lambda: NOW)) as ledger:
        barrier.wait()
        for n in range(times):
            lost = UnloggedUsage(VIEW, f"lost by {me}".replace(" ", "-"), ((n + 1, NOW + DAY_MS),), (n + 1, 0))
            ledger.add_unlogged("p", f"e-{me}-{n}", [lost])


def test_many_processes_report_losses_of_one_view_and_none_is_missing(ledger_url: str) -> None:
    """L17."""
    processes, times = 8, 10
    barrier = multiprocessing.get_context("forkserver").Barrier(processes)
    rows = [(ledger_url, n, times, barrier) for n in range(processes)]
    Children(_report, *rows, start="anew").answers()
    setup = Setup.open(ledger_url)
    setup.project = "p"
    assert setup.budget().usage()[0].used_units == processes * times
    setup.ledger.close()


# -- what is expired, and what cannot be stored ------------------------------------------------------------------------


def test_reports_that_have_expired_are_forgotten_once_the_log_is_trimmed_beyond_them(setup: Setup) -> None:
    """L17. Someone reports a loss each day: what is stored does not grow, and a clock that jumps takes nothing away."""
    budget, stored = setup.budget(), []
    for day in range(12):
        budget.charge("videos.list")
        while setup.ledger.roll_up(setup.project, setup.now_ms):
            pass
        lost = UnloggedUsage(VIEW, f"lost{day}", ((1, setup.now_ms + DAY_MS),), (1, 0))
        setup.ledger.add_unlogged(setup.project, f"e{day}", [lost])
        stored.append(len(unlogged(setup)))
        setup.now_ms += DAY_MS
    assert stored[:4] == [1, 2, 3, 4]
    assert max(stored) == stored[-1] == stored[-4] == 7
    jumped = unlogged(setup)
    setup.now_ms += 400 * DAY_MS
    setup.ledger.add_unlogged(setup.project, "e99", [lost._replace(epoch="lost99")])
    assert unlogged(setup)[:-1] == jumped


def unlogged(setup: Setup) -> list[UnloggedUsage]:
    ledger = setup.ledger
    assert isinstance(ledger, StateChanges)
    field = f"unlogged:{VIEW}"
    text = ledger._change_state(setup.project, (field,), lambda _, fields: Change(fields.get(field, "")))
    return list(read_usages(VIEW, text))


@pytest.mark.parametrize(
    ("epoch", "change"),
    [
        ("two words", {}),
        ("", {}),
        ("a@1", {}),
        ("a/b", {}),
        ("e", {"epoch": "two words"}),
        ("e", {"expiries": ()}),
        ("e", {"expiries": ((-1, NOW),)}),
        ("e", {"expiries": ((1, 10**15),)}),
        ("e", {"last": (-1, 0)}),
        ("e", {"kept_units": -1}),
    ],
)
def test_a_report_that_cannot_be_read_again_is_refused(setup: Setup, epoch: str, change: dict[str, Any]) -> None:
    lost = UnloggedUsage(VIEW, "lost", ((1, NOW + DAY_MS),), (1, 0))._replace(**change)
    with pytest.raises(UsageError):
        setup.ledger.add_unlogged(setup.project, epoch, [lost])
    assert unlogged(setup) == []


DEEP = "[" * 100_000


def put(setup: Setup, name: str, text: str) -> None:
    setup.ledger._change_state(setup.project, (name,), lambda *_: Change(None, {name: text}))


def test_a_field_that_is_nested_deeper_than_python_reads_is_one_line(setup: Setup) -> None:
    put(setup, "closed:units", f"{MIN_RETENTION_MS} 1 {DEEP}")
    with pytest.raises(LedgerError):
        setup.ledger.notes(setup.project)


def test_claims_that_are_nested_deeper_than_python_reads_are_written_anew(setup: Setup) -> None:
    claim = claim_of("a")
    put(setup, f"claim:{claim.name}", f"{setup.now_ms + DAY_MS} {DEEP}")
    assert not setup.ledger.claim(setup.project, claim).elsewhere
