"""An upstream that is hostile or broken, over real HTTP, with the real client: bounded in memory, time and units."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import pytest

import quota
from quota.jobs.attempts import ATTEMPTS
from quota.jobs.job import RunReport
from quota.jobs.progress import Watcher
from support.configurations import configuration
from support.installation import Installation
from support.plain_http import RawServer, head, whole
from support.servers import until

MB = 1_000_000
VIDEO = {"id": "v1", "snippet": {"title": "T"}}
PAGE = json.dumps({"items": [VIDEO]}).encode()
MEMORY_KB = 300_000
MEASURED = """
import atexit, quota.cli.program
def measure():
    (peak,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
    open("memory_kb", "w").write(peak)
atexit.register(measure)
quota.cli.program.main()
"""

Answer = Callable[[str], Iterable[bytes]]


class Site(Installation):
    """A configuration whose upstream sends what `answer` says."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.answer: Answer = lambda _: [whole(PAGE)]
        self.server = RawServer(lambda target: self.answer(target))
        self.configure()

    def configure(
        self, more: str = "", *, fetch: str = "trending", regions: tuple[str, ...] = ("US",), pages: int = 4
    ) -> None:
        if fetch == "search" and not more:
            more = '\noptions = { words = "cats" }'
        if fetch == "channels":
            more += '\noptions = { ids = ["c1"] }'
        job = f'[jobs.j]\nfetch = "{fetch}"\nregions = {json.dumps(regions)}\npages = {pages}\n{more}'
        self.quota.configure(configuration(self.server.address, job))

    def run(self, job: str = "j", **options: Any) -> RunReport:
        return super().run(job, **options)

    def fails(self, report: RunReport, attempts: int = 1) -> str:
        """The one plain line of the only region, which failed at the cost of so many attempts."""
        (region,) = report.regions
        assert (report.outcome, region.outcome) == ("failed", "failed"), report
        assert report.attempts == len(self.server.targets) == attempts
        assert region.error is not None
        assert region.error.isprintable()
        assert not re.match(r"[A-Za-z]+(Error|Exception|Read)\b", region.error), region.error
        return region.error

    def measured(self) -> tuple[Any, int]:
        """The report of `quota run` and the most memory that it took, in kB."""
        done = self.quota("run", "j", "--json", script=MEASURED)
        report = json.loads(done.stdout)
        assert done.returncode == (report["outcome"] == "failed"), done
        return report, int((self.folder / "memory_kb").read_text())

    def arrived(self, number: int) -> None:
        until(lambda: len(self.server.targets) >= number)

    def stored(self) -> int:
        return self.count("rankings")


@pytest.fixture
def site(tmp_path: Path, state_dir: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    with site.server:
        yield site


def page(number: int = 1, token: str | None = None) -> bytes:
    items = [{"id": f"v{number}-{n}"} for n in range(3)]
    return whole(json.dumps({"items": items} | ({"nextPageToken": token} if token else {})).encode())


# -- too large ---------------------------------------------------------------------------------------------------------


def bomb(megabytes: int) -> bytes:
    """A gzip file of a few kilobytes that unpacks to so much, made without holding that."""
    packing = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join([*(packing.compress(bytes(MB)) for _ in range(megabytes)), packing.flush()])


PIECE = b"x" * 65_536
TOO_LARGE: dict[str, Callable[[], Iterable[bytes]]] = {
    "without an end": lambda: [head() + b"\r\n", *repeat(PIECE, 20_000)],
    "in tiny chunks": lambda: [head("Transfer-Encoding: chunked") + b"\r\n", *repeat(b"2\r\nxx\r\n" * 8_000, 20_000)],
    "an error": lambda: [head("Content-Length: 99999999999", status="503 No") + b"\r\n", *repeat(PIECE, 20_000)],
    "packed": lambda: [whole(bomb(400), "Content-Encoding: gzip")],
}
"""Each is made by the test that sends it: every process of a run of the tests imports this."""


@pytest.mark.parametrize("kind", TOO_LARGE)
def test_a_body_beyond_its_bound_fails_the_region_in_bounded_memory(site: Site, kind: str) -> None:
    bound = 2 if "tiny" in kind else 16
    site.configure(f"max_body_mb = {bound}" if bound != 16 else "")
    sent = TOO_LARGE[kind]()
    site.answer = lambda _: sent
    report, memory_kb = site.measured()
    assert memory_kb < MEMORY_KB
    assert (report["attempts"], len(site.server.targets)) == (1, 1)
    error = f"upstream's answer is larger than {bound} MB; if this is expected, raise max_body_mb"
    assert report["regions"][0]["error"] == error


FULL = 15_900_000


def filled(start: str, piece: str, end: str) -> bytes:
    """As many pieces as a body may hold."""
    return (start + piece * (FULL // len(piece.encode()) - 1) + end).encode()


MUCH = {  # what it starts with, the piece that fills it, and how it ends
    "objects as many as may be": ('{"items":[{"id":"v1","snippet":{"tags":[', '{"a":0},' + " " * 24, "0]}}]}"),
    "an escaped title": ('{"items":[{"id":"v1","snippet":{"title":"', "\\u6771", '"}}]}'),
}


@pytest.mark.parametrize("kind", MUCH)
def test_a_body_within_its_bound_takes_bounded_memory_whatever_it_holds(site: Site, kind: str) -> None:
    sent = whole(filled(*MUCH[kind]))
    site.answer = lambda _: [sent]
    report, memory_kb = site.measured()
    assert memory_kb < MEMORY_KB
    assert report["attempts"] == 1
    error = report["regions"][0]["error"]
    assert error is None or error.startswith("upstream's answer ")


# -- too slow ----------------------------------------------------------------------------------------------------------


DRIPS = {
    "a body": (head("Content-Length: 9999999") + b"\r\n{", b" "),
    "chunks": (head("Transfer-Encoding: chunked") + b"\r\n", b"1\r\n \r\n"),
    "a header": (head() + b"X-A: ", b"a"),
    "interim answers": (b"", head(status="100 Continue") + b"\r\n"),
    "nothing": (b"", b""),
}


@pytest.mark.parametrize("kind", DRIPS)
def test_an_answer_has_a_deadline_however_it_drips(site: Site, kind: str) -> None:
    start, piece = DRIPS[kind]
    site.configure("max_answer_s = 1")
    site.answer = lambda _: site.server.drip(start, piece)
    error = site.fails(site.run())
    assert error == "upstream's answer was not complete after 1 s; if this is expected, raise max_answer_s"


def test_redirects_share_one_deadline_and_two_slow_answers_end_the_run(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quota.jobs.attempts.SILENT_S", 0.2)

    def answer(target: str) -> Iterator[bytes]:
        if "=DE" in target:  # slow, but never silent
            drops = site.server.drip(head(f"Content-Length: {len(PAGE) + 8}") + b"\r\n" + PAGE)
            yield from islice(drops, 1 + 8)
            return
        site.server.pause(0.4)
        yield whole(b"", "Location: /youtube/v3/videos?x=1", status="302 Found")

    site.configure("max_answer_s = 1", regions=("US", "DE", "FR", "GB", "IT"))
    site.answer = answer
    report = site.run()
    assert "not complete after 1 s" in str(report.regions[0].error)
    assert f"timed out, in 1 attempt to reach {site.server.address}" in str(report.regions[3].error), "a short one"
    assert (len(site.server.targets) <= 2 * (3 + 1), report.regions[3].units) == (True, 1)
    assert [region.outcome for region in report.regions] == ["failed", "done", "failed", "failed", "skipped"]
    assert report.why == f"no usable answer from {site.server.address}; the other regions wait for the next run"


# -- not what the API promises -----------------------------------------------------------------------------------------

HTML = b"<!DOCTYPE html><html><body><h1>Sign in to the network</h1></body></html>"
SHAPES = {
    "html": (whole(HTML, "Content-Type: text/html"), "is no JSON object (text/html, 72 bytes); check endpoint"),
    "empty": (whole(b"", "Content-Type: application/json"), "is no JSON object (application/json, 0 bytes)"),
    "an error that is none": (
        whole(b'{"error": {"message": "Daily limit"}}'),
        "holds an error, but no status of one: 'Daily limit'; check endpoint",
    ),
    "cut": (whole(PAGE[:-3], "Content-Type: application/json"), "is no JSON object (application/json"),
    "deep": (whole(b"[" * 100_000), "is no JSON object"),
    "a number too long": (whole(b'{"items": ' + b"9" * 5_000 + b"}"), "is no JSON object"),
    "an array": (whole(b"[]"), "is no JSON object"),
    "items: texts": (whole(b'{"items": ["v1"]}'), "items that are not a list of objects"),
    "an item without an id": (whole(b'{"items": [{}]}'), "an item with an invalid id: None"),
    "an id that is long": (whole(b'{"items": [{"id": "%s"}]}' % (b"x" * 129)), "an item with an invalid id"),
    "a token that is long": (whole(b'{"nextPageToken": "%s"}' % (b"x" * 9_000)), "an invalid nextPageToken"),
    "a token of half a pair": (whole(b'{"nextPageToken": "\\ud800"}'), "an invalid nextPageToken"),
    "another protocol": (b"SSH-2.0-OpenSSH_9.2p1\r\n", "answer is no HTTP; check endpoint and proxies"),
    "a long status line": (b"HTTP/1.1 200 " + b"x" * 70_000, "answer is no HTTP"),
    "no gzip": (whole(HTML, "Content-Encoding: gzip"), "does not unpack"),
    "cut gzip": (whole(gzip.compress(HTML)[:-9], "Content-Encoding: gzip"), "is no JSON object"),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_a_malformed_answer_is_one_plain_line(site: Site, kind: str) -> None:
    answer, line = SHAPES[kind]
    site.answer = lambda _: [answer]
    assert line in site.fails(site.run())


@pytest.mark.parametrize(
    ("answer", "more", "attempts"),
    [
        *((SHAPES[kind][0], "", 2) for kind in ("html", "another protocol")),
        (head("Location: /", "Content-Length: 0", status="302 Found") + b"\r\n", "", 12),
        *((SHAPES["html"][0], f"options = {{ words = {words} }}", 3) for words in (["a", "b"], ["a", "b", "c"])),
    ],
)
def test_somebody_else_who_answers_ends_the_run_in_the_second_region(
    site: Site, answer: bytes, more: str, attempts: int
) -> None:
    site.configure(more, fetch="search" if more else "trending", regions=("US", "DE", "FR"))
    site.answer = lambda _: [answer]
    report = site.run()
    assert ([x.outcome for x in report.regions], report.attempts) == (["failed", "failed", "skipped"], attempts)


@pytest.mark.parametrize(("fetch", "what"), [("trending", "DE"), ("search", "cats in DE")])
def test_an_empty_answer_is_named_once(site: Site, fetch: str, what: str) -> None:
    site.configure(fetch=fetch, regions=["DE"])
    site.answer = lambda _: [whole(b'{"items": []}')]
    assert [site.run().why for _ in "12"] == [f"upstream has nothing for {what!r}: correct or remove them", ""]


def test_a_body_that_ends_before_its_length_is_not_stored(site: Site) -> None:
    site.answer = lambda _: [head(f"Content-Length: {len(PAGE) + 1}") + b"\r\n" + PAGE]
    report = site.run()
    assert (report.outcome, site.stored()) == ("failed", 0)
    assert report.attempts == len(site.server.targets) == ATTEMPTS


def test_a_page_of_too_many_items_is_not_stored(site: Site) -> None:
    body = json.dumps({"items": [{"id": f"v{n}"} for n in range(10_001)]}).encode()
    site.answer = lambda _: [whole(body)]
    assert (
        site.fails(site.run())
        == "upstream's answer holds 10,001 items, over 10,000; if this is expected, raise max_items"
    )
    assert site.stored() == 0
    site.configure("max_items = 10_001")
    assert site.run().regions[0].items == site.stored() == 10_001


def test_a_page_of_a_function_of_ones_own_has_the_same_bound(site: Site) -> None:
    many = "def fetch(client, region, cursor):\n    return Page(videos=[{'id': str(n)} for n in range(11)])\n"
    site.configure("max_items = 10", fetch=site.own_fetch(many))
    report = site.run()
    assert report.regions[0].error == "a page holds 11 items, more than 10; if that is right, raise max_items"


# -- in circles --------------------------------------------------------------------------------------------------------


def tokens(*following: str) -> Answer:
    """Page after page, each naming the next; the last of them names itself for ever."""

    def answer(target: str) -> Iterable[bytes]:
        asked = re.search("pageToken=([a-z]+)", target)
        at = 0 if asked is None else following.index(asked[1]) + 1
        return [page(at, following[min(at, len(following) - 1)])]

    return answer


CIRCLE = "the next page is one that this pass has already fetched; the next round begins with the first page"


def test_later_runs_know_the_tokens_of_a_pass(site: Site) -> None:
    class Stops(Watcher):
        signal_number = 0

        def page(self, checkpoint: Any) -> None:
            self.signal_number = signal.SIGTERM

    site.configure(pages=1_000)
    site.answer = tokens("a", "b", "c", "a")
    for _ in range(3):
        watcher = Stops()
        assert site.run(watcher=watcher, stop=lambda: watcher.signal_number).outcome == "stopped"  # noqa: B023  # used at once
    assert site.run().regions[0].error == CIRCLE
    assert len(site.server.targets) == 4
    # The next round may use the same tokens, and so may one after a round that was done.
    site.answer = tokens("a", "b", "c")
    site.configure(pages=3)
    assert [site.run().outcome for _ in range(2)] == ["done", "done"]


def test_an_unused_repeated_token_is_no_error(site: Site) -> None:
    site.configure(pages=2)
    site.answer = tokens("a")
    assert site.run().outcome == "done"


# -- told to stop ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drip", ["a body", "nothing"])
def test_a_page_that_does_not_arrive_is_abandoned_and_stays_charged(
    site: Site, monkeypatch: pytest.MonkeyPatch, drip: str
) -> None:
    monkeypatch.setattr("quota.jobs.interruption.STOP_WITHIN_S", 0.3)
    start, piece = DRIPS[drip]
    site.answer = lambda target: site.server.drip(start, piece) if "pageToken" in target else [page(1, "t")]
    report = site.run(stop=lambda: signal.SIGTERM if len(site.server.targets) == 2 else 0)
    assert (report.outcome, report.exit_status, report.attempts) == ("stopped", 128 + signal.SIGTERM, 2)
    assert report.why == "interrupted; the page in flight took over 0.3 s and was abandoned"
    assert (report.regions[0].outcome, report.regions[0].cursor) == ("partial", {"token": "t"})
    assert site.stored() == 3
    site.answer = lambda _: [page(2)]
    assert site.run().regions[0].pages == 1


STOPPING = "quota: interrupted; the page in flight is stored if it arrives within 8 s\n"

WALLS_S = os.environ.get("QUOTA_TEST_WALLS") or "0.8, 0.9"
"""What a page and a process have after a signal, where no test is about how long that is. `8, 9` is the real time."""

HASTY = f"""
import quota.cli.program, quota.jobs.interruption as interruption
interruption.STOP_WITHIN_S, interruption.END_WITHIN_S = {WALLS_S}
quota.cli.program.main()
"""


def test_a_run_ends_in_time_after_a_signal(site: Site) -> None:
    start, piece = DRIPS["a body"]
    site.answer = lambda _: site.server.drip(start, piece)
    child = site.start("run", "j", "--json")
    site.arrived(1)
    started = time.monotonic()
    child.send_signal(signal.SIGINT)
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    child.send_signal(signal.SIGTERM)
    assert child.stderr is not None
    assert child.stderr.readline() == STOPPING
    assert child.poll() is None, "it says so while it waits"
    out, err = child.communicate(timeout=300)
    assert (child.returncode, err) == (130, "")
    assert 7 < time.monotonic() - started < 100
    report = json.loads(out)
    assert (report["outcome"], report["attempts"], report["units"]) == ("stopped", 1, 1)


@pytest.mark.parametrize(
    ("number", "times", "more", "message"), [(signal.SIGINT, 3, ["--quiet"], ""), (signal.SIGHUP, 1, [], STOPPING)]
)
def test_the_page_in_flight_is_stored_after_any_signals(
    site: Site, number: int, times: int, more: list[str], message: str
) -> None:
    def answer(target: str) -> Iterator[bytes]:
        assert told.wait(100)
        yield page(1, "t")

    site.answer, told = answer, threading.Event()
    child = site.start("run", "j", "--json", *more)
    site.arrived(1)
    for _ in range(times):
        child.send_signal(number)
        time.sleep(0.05)
    assert child.stderr is not None
    assert (child.stderr.readline() if message else "") == message
    told.set()
    out, err = child.communicate(timeout=300)
    assert (child.returncode, bool(err)) == (128 + number, bool(message))
    report = json.loads(out)
    assert (report["outcome"], report["refused_by"], report["regions"][0]["pages"]) == ("stopped", None, 1)
    assert site.stored() == 3


@pytest.mark.parametrize(("command", "status"), [("run j", 143), ("schedule", 0)])
def test_a_call_that_no_signal_interrupts_is_abandoned_too(site: Site, command: str, status: int) -> None:
    """A fetch function waits inside a C library, where Python's own signal handlers do not come to run."""
    busy = """
import sqlite3

def fetch(client, region, cursor):
    open("in-the-call", "w").close()
    sqlite3.connect("locked.db", timeout=60).execute("BEGIN IMMEDIATE")
    return Page()
"""
    site.configure('schedule = "every 6d"\nmisfire_grace = "6d"', fetch=site.own_fetch(busy))
    with closing(sqlite3.connect(site.folder / "locked.db")) as db:
        db.execute("BEGIN IMMEDIATE")
        child = site.start(*command.split(), script=HASTY)
        until((site.folder / "in-the-call").exists)
        child.send_signal(signal.SIGTERM)
        _, err = child.communicate(timeout=300)
    assert child.returncode == status
    assert "abandoned" in err.splitlines()[-1]
    assert "Traceback" not in err


def test_a_stderr_that_takes_no_more_holds_up_no_end(site: Site) -> None:
    waits = """
import threading

def fetch(client, region, cursor):
    open("in-the-call", "w").close()
    threading.Event().wait()
"""
    site.configure(fetch=site.own_fetch(waits))
    reading, writing = os.pipe()
    try:
        child = site.start("run", "j", script=HASTY, stderr=writing)
        until((site.folder / "in-the-call").exists)
        os.set_blocking(writing, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writing, b"x" * 4096)
        os.set_blocking(writing, True)
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=100)
        assert child.returncode == 143
    finally:
        child.kill()
        os.close(reading)
        os.close(writing)


def test_a_thread_that_a_function_leaves_behind_holds_up_no_end(site: Site) -> None:
    leaves = """
import os, threading, time

def fetch(client, region, cursor):
    threading.Thread(target=threading.Event().wait).start()
    open("in-the-call", "w").close()
    while not os.path.exists("go-on"):
        time.sleep(0.01)
    return Page(videos=[{"id": "v1"}], ranked=True)
"""
    site.configure(fetch=site.own_fetch(leaves))
    child = site.start("run", "j", script=HASTY)
    until((site.folder / "in-the-call").exists)
    child.send_signal(signal.SIGTERM)
    (site.folder / "go-on").touch()
    try:
        _, err = child.communicate(timeout=100)
    finally:
        child.kill()
    assert child.returncode == 143
    end_s = WALLS_S.split(", ")[1]
    assert f"a thread that a fetch function left behind took over {end_s} s and was abandoned" in err.splitlines()[-1]
    assert site.stored() == 1


# -- in one's own code -------------------------------------------------------------------------------------------------


def test_without_limits_a_client_is_as_it_was(site: Site) -> None:
    many = whole(json.dumps({"items": [{"id": n} for n in range(10_001)], "more": "x" * 17 * MB}).encode())
    with quota.open(site.folder / "quota.toml") as session:
        client = session.google()
        site.answer = lambda _: [many]
        assert len(client.videos().list(part="id").execute()["items"]) == 10_001
        site.answer = lambda _: [whole(HTML)]
        assert client.videos().list(part="id").execute() == HTML.decode()
