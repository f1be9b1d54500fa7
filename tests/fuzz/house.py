"""A whole installation with something in each of its rows and keys, and all that people and programs read of it."""

from __future__ import annotations

import asyncio
import io
import json
import re
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path

import httpx
import pytest
import redis

import quota
from fuzz.generate import damaged, mutated, text
from fuzz.inputs import Input, check_line
from quota.cli.program import run
from quota.common.clock import host_clock
from quota.common.text import printable
from quota.dashboard.app import make_app as make_page
from quota.errors import LedgerError, UnknownCharge
from quota.inbound.configured import load_rules
from quota.inbound.rules import opened
from quota.jobs.api.app import make_app as make_api
from quota.jobs.runner import run_job
from quota.journal.files import framed, unframed
from quota.journal.journal import FOLDER
from quota.reports.spending import read_sums
from quota.rules.entry import Entry
from quota.rules.facts import Compared, Grant
from quota.rules.refusals import RefusalCount
from quota.session import Session
from quota.terms.limits import DAY_MS, HOUR_MS
from support.commands import every_command
from support.plain_http import Answer, Arrived, PlainServer
from support.setup import claim_of

STATUSES = (0, 1, 2, 69, 75, 78)
SCRIPT = "<script>alert(1)</script>"
"""What a neighbour would like to run in the browser of whoever looks at the page."""

CONFIG = """
textfile = "metrics"
[ledger]
url = "{ledger}"
unavailable = {{ max_cost = 1, allowance = 50, machines = 1 }}
[store]
url = "sqlite:///videos.db"
[credentials.main]
api = "youtube-v3"
project = "main"
key = "file:key"
endpoint = "{endpoint}"
limits = [
  {{ name = "day", units = 2000, window = "24h" }},
  {{ name = "pacific-day", units = 2500, window = {{ calendar = "day", zone = "America/Los_Angeles" }} }},
  {{ name = "searches", units = 3, methods = ["search.list"], count = "calls", window = "24h" }},
]
[jobs.trending]
fetch = "trending"
regions = ["US", "DE"]
pages = 1
schedule = "0 */6 * * *"
[inbound]
url = "{inbound}"
[inbound.counted]
path = "/counted"
limit = 5
window = "1h"
[inbound.paced]
path = "/paced"
algorithm = "gcra"
burst = 5
limit = 5
window = "1h"
[inbound.logged]
algorithm = "log"
limit = 5
window = "1h"
"""
COMMANDS = (
    "charge videos.list --job trending",
    "charge search.list",
    "charge --file calls",
    "peek videos.list",
    "refund ID",
    "settle ID 5",
    "settle DRAW 5",
    "exec videos.list -- /no/such/program",
    "status",
    "status --check",
    "spend --by job,region",
    "spend --by hour --since 30d",
    "spend --by run",
    "log --since 30d",
    "log --refused",
    "explain",
    "explain ID",
    "explain DRAW",
    "reopen uploads --because so",
    "check",
    "doctor",
    "plan --days 1",
    "run trending",
    "run trending --here",
    "runs",
    "search live",
    "inbound status",
    "inbound top counted",
    "inbound top logged",
    "inbound top paced",
    "inbound rotate",
    "ledger repair",
    "ledger repair --yes",
    "ledger move OLD sqlite:///elsewhere.db",
    "ledger move OLD sqlite:///elsewhere.db --all",
    "reconcile --dry-run",
)
"""Where a command prints data, half of the time with `--json`."""

WITH_JSON = {name for name, command in every_command().items() for each in command.params if "--json" in each.opts}
PAGES = ("/", "/metrics", "/healthz", "/refusals/x", "/runs/x")
ANSWERS = (
    "/",
    "/healthz",
    "/api/v1/videos/trending?region=US",
    "/api/v1/search?q=live",
    "/api/v1/search?q=live+v*&region=DE",
    "/api/v1/channels/c1",
    "/api/v1/videos/v1",
)


@contextmanager
def one_video() -> Iterator[PlainServer]:
    """An upstream that always has one video or channel, and a next page."""
    pages = count()

    def serve(request: Arrived) -> Answer:
        item = {
            "id": {"videoId": "v1"} if "/search" in request.target else "v1",
            "snippet": {"title": "live", "channelId": "c1", "totalReplyCount": 1},
            "statistics": {"viewCount": "7", "commentCount": "1"},
            "contentDetails": {
                "relatedPlaylists": {"uploads": "u1"},
                "videoId": "v1",
                "videoPublishedAt": "2026-11-01T10:00:00Z",
            },
        }
        return Answer(200, json.dumps({"items": [item], "nextPageToken": f"t{next(pages)}"}).encode())

    with PlainServer(serve) as server:
        yield server


def unlink(name: str) -> None:
    """An SQLite file, with what lies beside it."""
    for suffix in ("", "-wal", "-shm"):
        Path(f"{name}{suffix}").unlink(missing_ok=True)


class House:
    """An installation in the working folder. What it has is put back before each input."""

    def __init__(self, ledger: str, inbound: str, upstream: str) -> None:
        self.ledger = ledger
        Path("quota.toml").write_text(CONFIG.format(ledger=ledger, inbound=inbound, endpoint=upstream))
        Path("key").write_text("a-key-of-the-tests")
        Path("key").chmod(0o600)
        Path("calls").write_text("videos.list\nsearch.list\n")
        now_ms = host_clock()
        clock_ms = now_ms - 3 * HOUR_MS
        with quota.open("quota.toml", clock=lambda: clock_ms) as session:
            self.charge_id = furnish(session, clock_ms)
            clock_ms = now_ms
            for _ in range(3):
                session.budget().charge("search.list", job="trending")  # the last ones are refused
        with quota.open("quota.toml") as session:
            assert run_job(session, "trending").outcome == "done"
        rules, storage = opened(load_rules("quota.toml"))
        for rule in rules.rules:
            storage.decide(rule.policy, "ann")
        storage.add_totals({"requests|counted|admitted": 5, "took|0": 5, "took_us": 77})
        storage.close()
        self.draw_id = self._away()
        for name in ("videos.db", "ledger.db", "inbound.db"):
            if Path(name).exists():
                with closing(sqlite3.connect(name)) as db:
                    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.files = {path: path.read_bytes() for path in sorted(Path().rglob("*")) if path.is_file()}

    def _away(self) -> str:
        """Draw on the allowance; returns the id of the draw."""
        here = Path("quota.toml").read_text()
        Path("quota.toml").write_text(here.replace(self.ledger, "redis://127.0.0.1:1/0"))
        with quota.open("quota.toml") as session:
            drawn = session.budget().charge("videos.list")
            assert drawn.source == "allowance"
        Path("quota.toml").write_text(here)
        return str(drawn.id)

    def put_back(self) -> None:
        for path in Path().rglob("*"):
            if path.is_file() and (path.suffix == ".db" or path not in self.files):
                path.unlink()  # another file for each input: SQLite keeps locks of those that are still open
        for path, data in self.files.items():
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)


def furnish(session: Session, now_ms: int) -> str:
    """Give a ledger something of everything that it holds; returns the id of a charge that was corrected."""
    budget, state, ledger = session.budget(), session.project().state, session.ledger
    for _ in range(2):
        charge = budget.charge("search.list", job="trending", region="US")
    budget.charge("videos.list", job="other", region="DE")
    budget.settle(str(charge.id), 7)
    budget.exhaust("uploads", now_ms, now_ms + DAY_MS, "upstream says so", "host:1")
    budget.exhaust("old", now_ms, now_ms + DAY_MS, "upstream says so", "host:1")
    budget.reopen("old", "because")
    compared = [Compared("units", 300, 200, 100, 0, now_ms - HOUR_MS, now_ms, now_ms)]
    budget.grant([Grant("units", 10_000, now_ms, now_ms + DAY_MS)], compared)
    budget.add_others("units", 9, now_ms - HOUR_MS, now_ms + DAY_MS, "usage")
    state.claim(claim_of("a", tick="t", regions=("FR",)))
    state.keep_places(claim_of("a", regions=("FR",)), "job", {"FR": "page 2"})
    state.add_refusals([RefusalCount(now_ms // HOUR_MS * HOUR_MS, "day", "trending", "limit", 3)], [])
    old = Entry((now_ms - 3 * DAY_MS, 1), 5, "units", "videos.list", "old", "DE", "an-old-charge")
    ledger.add_past(session.project().name, [old, old._replace(id=(now_ms - 2 * DAY_MS, 1), key="another")])
    read_sums(session.project())
    session.project().keep()
    return str(charge.id)


# -- what a neighbour writes -------------------------------------------------------------------------------------------

ESCAPES = ("\x1b[31mred", "\x1b]0;title\x07", "\x9b2J", "\u202egnp.exe", "a\r\nb", SCRIPT)
SPELLED = (b"0", b"-1", b"9" * 20, b"%d" % (2**53 - 1), b"%d" % (10**14), b"", b"\x1b[31m", b"1e3", b"5_0")
FAR_MS = (10**14, 2**53, 2**64 - 1)
NUMBERS = (-5, 0, 7, 10**6, 10**14, 10**14 - 1, 2**53 - 1, 2**53, 2**63 - 1, -(2**63))
TEXTS = (
    *("", "x", *ESCAPES, "-1", "0", "nan", "1e400", "{}", "[]", "null", "*|*|*|24h"),
    *("9" * 20, f"{2**53}", f"{10**14}-0", f"{2**53}-{2**53}", "units=1:2:3", f"units={10**14}:1:{10**14 - 1}"),
    *("[" * 5_000, '{"a":' * 2_000, "5" * 5_000, "x" * 5_000, '{"runs": 5}', '{"ticks": {"t": 1e999}}'),
)


def put(r: Input, before: object) -> object:
    """Another value for its place: of another kind, or the same with damage."""
    kind = r.random()
    if kind < 0.25:
        return r.choice(NUMBERS)
    if kind < 0.45:
        return r.choice(TEXTS)
    if kind < 0.55:
        return r.choice((text(r), r.randbytes(9), 1.5, 1e300, None, b"\xff"))
    if isinstance(before, int):
        return r.choice((before + 1, -before, before * 1000, before // 1000, str(before), before + 10**9))
    data = before.encode() if isinstance(before, str) else bytes(before) if isinstance(before, bytes) else b""
    with suppress(ValueError, RecursionError):
        nested = json.loads(data)
        if isinstance(nested, dict | list) and r.random() < 0.8:
            return json.dumps(mutated(r, nested))
    if r.random() < 0.5:
        numbers = list(re.finditer(rb"\d+", data))
        if numbers:
            number = r.choice(numbers)
            return data[: number.start()] + r.choice(SPELLED) + data[number.end() :]
    return damaged(r, data, 2)


def damage_rows(r: Input, name: str) -> tuple[object, ...]:
    """One field of one row of a file."""
    with closing(sqlite3.connect(name, isolation_level=None)) as db:
        kinds = "type = 'table' AND sql NOT LIKE '%VIRTUAL%'"
        tables = [row[0] for row in db.execute(f"SELECT name FROM sqlite_master WHERE {kinds}")]  # noqa: S608
        filled = [table for table in tables if db.execute(f"SELECT EXISTS (SELECT * FROM {table})").fetchone()[0]]  # noqa: S608
        table = r.choice(filled)
        column = r.choice([row[1] for row in db.execute(f"PRAGMA table_info({table})")])
        db.text_factory = bytes  # it may be damaged already
        rows = [row[0] for row in db.execute(f'SELECT "{column}" FROM {table} LIMIT 20')]  # noqa: S608
        before = r.choice(rows)
        is_line = column == "line" and isinstance(before, bytes) and r.random() < 0.7
        now = spoiled(r, before) if is_line else put(r, before)
        if isinstance(now, str):
            now = now.encode("utf-8", "surrogatepass")
        as_text = "CAST(? AS TEXT)" if isinstance(now, bytes) and r.random() < 0.8 else "?"
        where = f'WHERE "{column}" IS ?' if r.random() < 0.6 else ""
        with suppress(sqlite3.Error, OverflowError):  # not even SQLite would take it
            values = (now, before) if where else (now,)
            db.execute(f'UPDATE OR IGNORE {table} SET "{column}" = {as_text} {where}', values)  # noqa: S608
        return name, table, column, before, now


def texts_of(name: str) -> list[tuple[str, str]]:
    """The tables of a file with their columns in which there is text."""
    with closing(sqlite3.connect(name)) as db:
        tables = db.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND sql NOT LIKE '%VIRTUAL%'")
        columns = [(table, row[1]) for (table,) in tables for row in db.execute(f"PRAGMA table_info({table})")]
        text_in = "SELECT 1 FROM {0} WHERE typeof({1}) = 'text' AND {1} != ''"
        return [column for column in columns if db.execute(text_in.format(*column)).fetchone()]


def damage_file(r: Input, path: Path) -> tuple[object, ...]:
    """Bytes of a file. What a journal says is also changed with checksums that fit."""
    data = path.read_bytes()
    if FOLDER in path.parts and data and r.random() < 0.8:
        lines = data.split(b"\n") if path.name != "notes" else [data]
        at = r.choice([at for at, line in enumerate(lines) if line])
        line = spoiled(r, unframed(lines[at]) or b"")
        lines[at] = framed(line)
        path.write_bytes(b"\n".join(lines))
        return path, line
    path.write_bytes(damaged(r, data) if r.random() < 0.9 else r.randbytes(100))
    return path, "bytes"


def spoiled(r: Input, line: bytes) -> bytes:
    """A line of fields with one of them changed, or one too few or too many."""
    fields = line.split(b"\t")
    at, kind = r.randrange(len(fields)), r.random()
    if kind < 0.1:
        del fields[at]
    elif kind < 0.2:
        fields.insert(at, as_bytes(put(r, fields[at])))
    else:
        fields[at] = as_bytes(put(r, fields[at]))
    return b"\t".join(fields)


def damage_key(r: Input, client: redis.Redis, now_ms: int) -> tuple[object, ...]:
    """One field of one of our keys in Redis, or a whole key."""
    key = r.choice(sorted(client.keys("quota:*")))
    kind = client.type(key).decode()
    with suppress(redis.ResponseError):
        if r.random() < 0.1:
            now = as_bytes(put(r, b""))
            client.delete(key)
            if r.random() < 0.5:
                client.set(key, now)
                return key, "SET", now
            return key, "DEL"
        if kind == "hash":
            fields = sorted(client.hkeys(key))
            field = r.choice(fields) if r.random() < 0.85 else as_bytes(put(r, r.choice(fields)))
            now = as_bytes(put(r, client.hget(key, field) or b""))
            client.hset(key, field, now)
            return key, field, now
        if kind == "stream":
            rows = client.xrange(key)
            line = rows[r.randrange(len(rows))][1].get(b"e", b"") if rows else b"1\tk\tunits\tm\tj\tr"
            entry = {r.choice(("e", "e", "e", "e", "e", "x")): spoiled(r, line)}
            if rows and r.random() < 0.5:
                replace_entry(client, key, r.randrange(len(rows)), entry)
                return key, "instead", entry
            at = r.choice(("*", "*", *(f"{ms}-0" for ms in (now_ms - HOUR_MS, now_ms + DAY_MS, *FAR_MS))))
            client.xadd(key, entry, id=at)
            return key, at, entry
        if kind == "string":
            now = as_bytes(put(r, client.get(key)))
            client.set(key, now, keepttl=True)
            return key, now
        if kind == "list":
            now = as_bytes(put(r, client.lindex(key, 0)))
            client.lset(key, 0, now)
            return key, now
        if kind == "zset":
            now = as_bytes(put(r, client.zrange(key, 0, 0)[0]))
            score = r.choice((0, -1, 1e300, float("inf"), 2**53, now_ms))
            client.zadd(key, {now: score})
            return key, now, score
        raise AssertionError(f"what is a {kind}?")
    return ()


def replace_entry(client: redis.Redis, key: bytes, number: int, entry: dict[str, bytes]) -> None:
    """A stream takes nothing in its middle: all of it is written anew."""
    rows, left_ms = client.xrange(key), client.pttl(key)
    client.delete(key)
    for at, (entry_id, fields) in enumerate(rows):
        client.xadd(key, entry if at == number else fields, id=entry_id)
    client.pexpire(key, left_ms)


def as_bytes(value: object) -> bytes:
    made = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
    return made[:6_000]


# -- who reads it ------------------------------------------------------------------------------------------------------


def use(r: Input, house: House, patch: pytest.MonkeyPatch) -> None:
    """Some commands, the page, the API and a budget on an event loop."""
    for command in r.sample(COMMANDS, 6):
        args = [{"ID": house.charge_id, "DRAW": house.draw_id, "OLD": house.ledger}.get(x, x) for x in command.split()]
        if "--" not in args and WITH_JSON & {args[0], " ".join(args[:2])} and r.random() < 0.5:
            args.append("--json")
        try:
            check_command(args, *run_quota(patch, args))
        except AssertionError as error:
            raise AssertionError(f"quota {' '.join(args)}: {error}") from error
    asyncio.run(_serve(r))


def run_quota(patch: pytest.MonkeyPatch, args: list[str]) -> tuple[int, str, str]:
    """What `quota ARGS` exits with and prints, on streams as a process has them."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True)
    with patch.context() as within:
        within.setattr(sys, "argv", ["quota", *args])
        within.setattr(sys, "stdout", out)
        within.setattr(sys, "stderr", err)
        status = run()
    return status, out.detach().getvalue().decode(), err.detach().getvalue().decode()  # type: ignore[attr-defined]


def check_command(args: list[str], status: int, out: str, err: str) -> None:
    assert status in STATUSES or (args[0] == "exec" and status in (126, 127)), (status, err)
    for line in err.splitlines():
        check_line(line)
    assert out or err or args[0] in ("run", "log"), "nothing is said"  # a log in JSON has a line for each entry
    check_text(out)
    if "--json" in args and out:
        for text_ in out.splitlines() if args[0] == "log" else [out]:
            check_numbers(json.loads(text_, parse_constant=_no_number))


def check_text(text_: str) -> None:
    for line in text_.split("\n"):
        assert line == printable(line), f"control characters: {line!r:.500}"
        assert "Traceback" not in line


def _no_number(name: str) -> object:
    raise AssertionError(f"{name} is no number of JSON")


def check_numbers(value: object) -> None:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            check_numbers(inner)
    elif isinstance(value, int | float):
        assert -1 <= value < 2**54, f"an absurd number: {value}"  # the sum of two that are within their bound


async def _serve(r: Input) -> None:
    with quota.open("quota.toml") as session:
        page = make_page(session, None)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(page), base_url="http://localhost") as client:  # type: ignore[arg-type]
            for path in PAGES:
                check_answer(path, answer := await client.get(path))
                if path == "/":
                    links = re.findall(r'href="(/(?:refusals|runs)/[^"]+)"', answer.text)
                    for link in r.sample(links, min(2, len(links))):
                        check_answer(link, await client.get(link))
        api = make_api(session)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://localhost") as client:  # type: ignore[arg-type]
            for path in ANSWERS:
                check_answer(path, await client.get(path))
        for thread in threading.enumerate():
            if thread.name == "quota-dashboard":
                thread.join(60)
    async with quota.open_async("quota.toml") as several:
        budget = several.budget()
        for ask in (budget.peek, budget.charge):
            decision = await ask("videos.list", job="trending")
            check_line(decision.sentence())
            check_numbers(decision.as_json())
            if decision.admitted and decision.id:
                with suppress(LedgerError, UnknownCharge):
                    await budget.settle(decision.id, 0)
        with suppress(LedgerError):
            check_numbers([state._asdict() for state in await budget.usage()])


def check_answer(path: str, answer: httpx.Response) -> None:
    shown = f"{path}: {answer.status_code} {answer.text[:500]}"
    assert answer.status_code in (200, 304, 400, 404, 503), shown
    assert "please report" not in answer.text, shown
    assert not re.search(r"(Type|Value|Key|Attribute|Overflow|Index|Assertion|Recursion)Error", answer.text), shown
    assert SCRIPT not in answer.text or "html" not in answer.headers["content-type"], shown
    for line in answer.text.split("\n"):
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", line), f"{path}: {line!r:.500}"
    if path == "/metrics":
        for line in answer.text.removesuffix("\n").split("\n"):
            assert line.isprintable(), repr(line)
            if not line.startswith("#"):
                assert -1 <= float(line.rpartition(" ")[2]) < 2**53, line
    elif "json" in answer.headers["content-type"]:
        check_numbers(json.loads(answer.text, parse_constant=_no_number))
