"""Rows of a job's own: stored with their page, read by SQL, exported; and the places from which runs go on."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sqlite3
import stat
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas
import pytest

import quota
from quota.jobs.contributions import jobs
from quota.jobs.emulator import Emulator
from quota.jobs.job import Page, RunReport
from quota.jobs.store.rows import MAX_COLUMNS, rows_of
from support.commands import QUOTA, ROOT, one_line
from support.configurations import configuration
from support.installation import Installation

FETCH = '''
import json, pathlib

PAGES = pathlib.Path(__file__).with_name("pages.json")

@first_attempt("videos.list")
def fetch(client, region, cursor):
    """One call a page; what it "found" stands in a file."""
    client.videos().list(part="id", id="x").execute()
    pages = eval(PAGES.read_text())[region]
    at = cursor["at"] if cursor else 0
    return Page(rows=pages[at], cursor={"at": at + 1} if at + 1 < len(pages) else None)
'''

ROWS = int(os.environ.get("QUOTA_TEST_ROWS", "20000"))


class Site(Installation):
    upstream: Emulator

    def __init__(self, folder: Path, upstream: Emulator) -> None:
        super().__init__(folder, upstream)
        self.fetch_with(FETCH)

    def fetch_with(self, source: str) -> None:
        self.module = self.own_fetch(source).partition(":")[0]
        self.configure()

    def configure(self, more: str = "", units: int = 9_000) -> Path:
        job = f'[jobs.own]\nfetch = "{self.module}:fetch"\nregions = ["US", "DE"]\npages = 10\n{more}'
        return self.quota.configure(configuration(self.upstream.address, job, units=units))

    def pages(self, us: list[dict[str, Any]], de: list[dict[str, Any]] | None = None) -> None:
        (self.folder / "pages.json").write_text(repr({"US": us, "DE": de or [{}]}).replace("nan", "float('nan')"))

    def run(self, job: str = "own", **options: Any) -> RunReport:
        return super().run(job, **options)


@pytest.fixture
def site(tmp_path: Path, upstream: Emulator) -> Site:
    return Site(tmp_path, upstream)


def comment(number: int, **more: Any) -> dict[str, Any]:
    return {"id": f"c{number}", "text": f"text {number}", "likes": number, **more}


# -- stored ------------------------------------------------------------------------------------------------------------


def test_rows_are_stored_with_their_page_and_refreshed_by_key(site: Site) -> None:
    site.pages([{"comments": [comment(1), comment(2)]}, {"comments": [comment(2, likes=9)], "threads": [{"id": 7}]}])
    report = site.run()
    assert (report.outcome, [each.items for each in report.regions]) == ("done", [4, 0])
    assert site.rows("SELECT name, key, job, region, json_extract(data, '$.likes') FROM rows ORDER BY id") == [
        ("comments", "c1", "own", "US", 1),
        ("comments", "c2", "own", "US", 9),
        ("threads", "7", "own", "US", None),
    ]


def test_a_table_may_have_a_key_of_several_fields_and_a_history(site: Site) -> None:
    site.configure('tables = { comments = { key = ["thread", "id"], history = ["likes"] } }')
    for likes in (1, 1, 2, 1):
        site.pages([{"comments": [comment(1, thread=4, likes=likes), comment(1, thread=5, likes=0)]}])
        site.run()
    assert site.rows("SELECT key FROM rows ORDER BY id") == [('["4", "c1"]',), ('["5", "c1"]',)]
    readings = site.rows("SELECT key, data FROM history ORDER BY key, taken_at_ms")
    assert [json.loads(data)["likes"] for _, data in readings] == [1, 2, 1, 0]


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


BAD = [
    ("no_key", [{"text": "x"}], "row 1: it has no 'id', which is its key"),
    ("empty", [{"id": ""}], "row 1: its key 'id' is '', and must be text (not empty) or a whole number"),
    ("nan", [comment(1, likes=float("nan"))], "row 1: Out of range float values are not JSON compliant"),
    ("large", [comment(1, likes=[{"n": 2**63}])], "row 1: it holds a whole number of more than 64 bits"),
    ("long", [comment(1, text="x" * 2_000_000)], "row 1: it has 2,000,"),
    ("numbers", [{"id": 1, 2: 3}], "row 1: it is no object with text names"),
    ("deep", [comment(1, replies=nested(150))], "row 1: it is nested over 100 deep"),
    ("set", [{"id": 1, "tags": {1}}], "row 1: Object of type set is not JSON serializable"),
]


@pytest.mark.parametrize(("rows", "message"), [pytest.param(*row, id=name) for name, *row in BAD])
def test_a_row_that_cannot_be_stored_is_named_in_one_line(rows: list[Any], message: str) -> None:
    with pytest.raises(quota.BadAnswer) as caught:
        rows_of("own:fetch", {}, {"threads": [{"id": 1}], "comments": rows})
    assert str(caught.value).startswith(f"fetch = 'own:fetch': table 'comments', {message}")
    assert "\n" not in str(caught.value)


def test_a_row_that_cannot_be_stored_fails_its_region_and_its_page_is_fetched_again(site: Site) -> None:
    site.pages([{"comments": [comment(7)]}, {"threads": [{"id": 1}], "comments": [comment(1), comment(1)]}])
    report = site.run()
    failed = report.regions[0]
    assert (report.exit_status, failed.outcome, failed.pages, failed.cursor) == (1, "failed", 1, {"at": 1})
    assert "table 'comments', row 2: its key 'c1' stands twice in this page" in str(failed.error)
    assert site.rows("SELECT name, key FROM rows") == [("comments", "c7")], "the page is stored whole or not at all"
    site.pages([{"comments": [comment(7)]}, {"comments": [comment(8)]}])
    assert site.run().outcome == "done"
    assert len(site.rows("SELECT 1 FROM rows")) == 2


@pytest.mark.parametrize("name", ["Rankings", "sqlite_x", "unknown_ids", "with space", "", 'a"b'])
def test_a_table_must_have_a_name_that_is_free(name: str) -> None:
    with pytest.raises(ValueError, match="table"):
        Page(rows={name: [comment(1)]})


def test_two_jobs_agree_on_a_table_that_both_have(site: Site) -> None:
    keyed = 'tables = { comments = { key = ["id", "thread"] } }\n'
    site.configure(f'{keyed}[jobs.other]\nfetch = "trending"\ntables = {{ comments = {{}} }}')
    message = "jobs.other.tables.comments: job 'own' has another key or history for it"
    assert message in one_line(site.quota("check"), 78)
    site.configure(f'[jobs.other]\nfetch = "{site.module}:fetch"\nregions = ["US"]\n{keyed}')
    site.pages([{"comments": [comment(1, thread=7)]}])
    assert (site.run().outcome, site.run("other").outcome) == ("done", "done")
    assert site.rows("SELECT key FROM rows") == [('["c1", "7"]',)], "one job declares the key for both"
    site.configure()
    why = "table 'comments' has rows of other by id, thread, not by id; set the `key` that it had, or give the table"
    why += " another name"
    assert site.run().why == why
    site.configure("tables = { comments = { history = ['text'] } }\n[jobs.third]\nfetch = 'trending'\npages = 1")
    requests = site.upstream.usage()["requests"]
    assert site.run().why == why
    assert site.upstream.usage()["requests"] == requests, "a key that is configured is known before a call"
    checked = site.quota("check").stderr
    assert (f"jobs.own.tables: {why}" in checked, checked.count(why)) == (True, 1)
    assert site.run("third").outcome == "done", "it has fetched none of these rows"
    assert why in site.quota("status", "--json").stdout
    assert one_line(site.quota("run", "own", "--dry-run"), 1) == why


# -- handed over -------------------------------------------------------------------------------------------------------

SINK = '''
import json, pathlib

FOLDER = pathlib.Path(__file__).parent

def put(page, job, region):
    """Keeps what it gets, spoils its own copy, and fails while there is a file `down`."""
    with open(FOLDER / "sink.jsonl", "a") as file:
        file.write(json.dumps([job, region, [row["id"] for row in page.rows.get("comments", ())]]) + "\\n")
    page.rows.clear()
    if (FOLDER / "down").exists():
        exec((FOLDER / "down").read_text())
'''


def with_sink(site: Site) -> None:
    (site.folder / f"{site.module}_sink.py").write_text(SINK)
    site.configure(f'sink = "{site.module}_sink:put"')


def handed(site: Site) -> list[Any]:
    return [json.loads(line) for line in (site.folder / "sink.jsonl").read_text().splitlines()]


def test_a_sink_gets_each_page_that_has_items_before_it_is_stored(site: Site) -> None:
    with_sink(site)
    site.pages([{"comments": [comment(1), comment(2)]}, {}, {"comments": [comment(3)]}])
    assert site.run().outcome == "done"
    assert handed(site) == [["own", "US", ["c1", "c2"]], ["own", "US", ["c3"]]]
    assert [key for (key,) in site.rows("SELECT key FROM rows ORDER BY id")] == ["c1", "c2", "c3"], "a copy"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise ExceptionGroup('tasks', [ValueError('no\\nspace')])", "ValueError: no space"),
        ("import quota; raise quota.QuotaError('the other ledger is away')", "QuotaError: the other ledger is away"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_a_sink_that_fails_keeps_the_place_and_gets_the_page_again(site: Site, code: str, message: str) -> None:
    with_sink(site)
    site.pages([{"comments": [comment(1)]}, {"comments": [comment(2)]}], [{"comments": [comment(3)]}])
    (site.folder / "down").write_text(f"if region == 'US': {code}")
    report = site.run()
    assert (report.exit_status, [each.outcome for each in report.regions]) == (1, ["failed", "done"])
    error, place, _ = re.split(r" \(|; ", str(report.regions[0].error))
    assert error == f"sink = '{site.module}_sink:put': {message}"
    assert place.endswith(f"/{site.module}_sink.py, line 12)")
    assert [key for (key,) in site.rows("SELECT key FROM rows")] == ["c3"], "the page is not stored"
    (site.folder / "down").unlink()
    assert site.run().outcome == "done"
    us = [ids for _, region, ids in handed(site) if region == "US"]
    assert us == [["c1"], ["c1"], ["c2"]], "at least once"


ASYNC_SINKS = """
import asyncio

class Put:
    async def __call__(self, page, job, region): ...

def wrapped(function):
    return lambda *given: function(*given)

put = Put()

@wrapped
async def hidden(page, job, region): ...
"""


@pytest.mark.parametrize(("sink", "status"), [("put", 78), ("hidden", 1)])
def test_a_sink_that_nobody_would_run_stores_no_page(site: Site, sink: str, status: int) -> None:
    site.pages([{"comments": [comment(1)]}])
    (site.folder / f"{site.module}_async.py").write_text(ASYNC_SINKS)
    site.configure(f'sink = "{site.module}_async:{sink}"')
    done = site.quota("run", "own")
    assert done.returncode == status
    assert "write a plain function" in done.stderr
    assert "never awaited" not in done.stderr
    assert status == 78 or site.rows("SELECT 1 FROM rows") == []


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        ("sinks:putt", "has no function 'putt'"),
        ("sinks:two", "it is called as sink(page, job, region)"),
        ("sinks", 'not a function; write it as "package.module:function"'),
    ],
)
def test_a_sink_that_cannot_be_used_is_named_before_anything_is_fetched(site: Site, sink: str, message: str) -> None:
    site.pages([{"comments": [comment(1)]}])
    (site.folder / "sinks.py").write_text("def two(page, job): ...\n")
    site.configure(f'sink = "{sink}"')
    checked = site.quota("check")
    assert checked.returncode == 78
    assert message in " ".join((checked.stdout + checked.stderr).split())
    assert message in one_line(site.quota("run", "own"), 78)
    assert site.upstream.usage()["requests"] == 0


# -- read --------------------------------------------------------------------------------------------------------------


def test_a_view_has_a_column_for_each_field_whatever_it_is_called(site: Site) -> None:
    odd = {'say "hi"': 1, "it's": 2, "a.b": 3, "back\\slash": 4, "new\nline": 5, "KEY": 6, "job": 7, "ü": [1, 2]}
    wide = {f"f{n}": n for n in range(300)}
    site.pages([{"odd": [{"id": 1, **odd}], "Wide": [{"id": 1, **wide}], "wide": [comment(1), comment(2)]}])
    site.run()
    shown = site.quota.json("tables", "--views", "--json")
    sizes = [(each["name"], each["rows"], len(each["fields"])) for each in shown["tables"]]
    assert sizes == [("Wide", 1, 301), ("odd", 1, 9), ("wide", 2, 3)]
    assert site.rows("SELECT count(*) FROM wide_") == [(2,)], "for SQLite, wide is Wide"
    with closing(sqlite3.connect(site.folder / "videos.db")) as db:
        db.row_factory = sqlite3.Row
        row = dict(db.execute("SELECT * FROM odd").fetchone())
        assert len(db.execute("SELECT * FROM wide").fetchone()) == MAX_COLUMNS + 5
    assert {name: row[name] for name in odd if name not in ("KEY", "job", "ü")} == {
        name: value for name, value in odd.items() if name not in ("KEY", "job", "ü")
    }
    assert (row["key"], row["KEY_"], row["job"], row["job_"], row["ü"]) == ("1", 6, "own", 7, "[1,2]")
    site.pages([{"odd": [{"id": 2, "later": True}], "ODD": [comment(1)]}])
    site.run()
    assert "9 fields" not in site.quota("tables", "--views").stdout.splitlines()[0]
    assert site.rows("SELECT later FROM odd ORDER BY key") == [(None,), (1,)], "a view keeps its table"


def test_an_export_calls_fields_as_the_view_does_and_leaves_none_out(site: Site) -> None:
    own = {"key": "k", "job": "cook", "REGION": "EU", "refreshed_at": "noon", "likes": 1, "Likes": 2}
    site.pages([{"jobs": [{"id": 1, **own}]}])
    site.run()
    (listed,) = csv.DictReader(io.StringIO(site.quota("tables", "--views", "--format", "csv").stdout))
    assert set(json.loads(listed["fields"])) == {"id", *own}, "a list is JSON"
    with closing(sqlite3.connect(site.folder / "videos.db")) as db:
        view = [name for name, *_ in db.execute("SELECT * FROM jobs").description]
    line = json.loads(site.quota("export", "jobs").stdout)
    row = next(csv.DictReader(io.StringIO(site.quota("export", "jobs", "--format", "csv").stdout)))
    called = {"key_": "k", "job_": "cook", "REGION_": "EU", "refreshed_at_": "noon", "likes": 1, "Likes_": 2}
    assert {name: line[name] for name in called} == called
    assert {name: row[name] for name in called} == {name: str(value) for name, value in called.items()}
    assert (line["key"], line["job"], line["region"]) == (row["key"], row["job"], row["region"]) == ("1", "own", "US")
    assert {re.sub("_ms$", "_at", name) for name in view} == set(line) == set(row)


def test_rows_are_exported_as_they_came(site: Site) -> None:
    of_us = [comment(1, tags=["a", "b"]), comment(2, text='say "hi",\r\nyes')]
    site.pages([{"comments": of_us}], [{"comments": [comment(3)]}])
    site.run()
    lines = [json.loads(line) for line in site.quota("export", "comments").stdout.splitlines()]
    assert [(each["id"], each["region"]) for each in lines] == [("c1", "US"), ("c2", "US"), ("c3", "DE")]
    assert lines[0]["tags"] == ["a", "b"]
    assert lines[0]["refreshed_at"].endswith("Z")
    done = site.quota("export", "comments", "--format", "csv", "--region", "US", "--output", "out.csv")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "out.csv: 2 records\n")
    with (site.folder / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["text"] for row in rows] == ["text 1", 'say "hi",\r\nyes']
    assert [row["tags"] for row in rows] == ['["a", "b"]', ""]
    assert list(rows[0])[:5] == ["key", "job", "region", "first_seen_at", "refreshed_at"]


def test_an_export_and_the_file_itself_land_in_a_data_frame(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.configure('[jobs.trending]\nfetch = "trending"\nregions = ["DE", "BR"]\npages = 2')
    assert site.run("trending").outcome == "done"
    site.pages([{"comments": [comment(n, id=f"0{n}") for n in (1, 2, 3)]}], [{"comments": []}])
    site.configure()
    site.run()
    site.quota("export", "comments", "--output", "comments.jsonl")
    monkeypatch.chdir(site.folder)
    snippets = re.findall(r"`(pandas\.[^`]*)`", (ROOT / "docs" / "data.md").read_text().replace("\n", " "))
    names = {"pandas": pandas, "sqlite3": sqlite3}
    from_file, from_lines = (eval(each, names) for each in snippets)  # noqa: S307  # our own page
    [(videos, views)] = site.rows("SELECT count(*), sum(view_count) FROM videos")
    assert 50 < videos == len(from_file)
    assert views == from_file["view_count"].sum()
    assert [*from_lines["key"]] == ["01", "02", "03"]
    assert from_lines["likes"].sum() == 6


def test_the_stores_own_tables_are_exported(site: Site) -> None:
    site.configure('[jobs.trending]\nfetch = "trending"\nregions = ["DE"]\npages = 1')
    site.run("trending")
    for table, rows in (("videos", 50), ("rankings", 50), ("history", 50), ("channels", 0)):
        lines = [json.loads(line) for line in site.quota("export", table, "--since", "1h").stdout.splitlines()]
        assert len(lines) == rows, table
        assert not [name for line in lines for name in line if name.endswith(("_ms", "_words"))]
        head = site.quota("export", table, "--format", "csv").stdout.splitlines()[0]
        assert not lines or head.split(",") == list(lines[0])
    assert site.quota("export", "videos", "--region", "US").stdout == ""
    assert len(site.quota("export", "rankings", "--region", "DE").stdout.splitlines()) == 50


def test_an_export_without_records_says_so_beside_the_data(site: Site) -> None:
    site.pages([{"comments": [comment(1)]}])
    site.run()
    of_job = "of job 'ownn', of region 'US', of the last 1ms; did you mean 'own'?"
    for arguments, why in (
        ("videos", "videos: nothing is stored; `quota runs` lists the runs"),
        ("comments --job ownn --region US --since 1ms", f"comments: nothing is stored {of_job}"),
    ):
        for form in ("json", "csv"):
            done = site.quota("export", *arguments.split(), "--format", form)
            assert (done.returncode, done.stderr) == (0, f"{why}\n")
            assert len(done.stdout.splitlines()) == (form == "csv"), "the header"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("export video", "no table 'video' can be exported; did you mean 'videos'?"),
        ("spend --by jb", "--by has no field 'jb'; did you mean 'job'?"),
        ("export channels --region DE", "table channels has no regions; leave out --region"),
        ("export videos --output none/x", "--output 'none/x': No such file or directory"),
        ("place show owm", "has no job 'owm'; did you mean 'own'?"),
        ("place reset own FR", "job 'own' has no region 'FR'; known: US, DE"),
    ],
)
def test_an_impossible_export_or_place_is_one_line(site: Site, arguments: str, message: str) -> None:
    site.pages([{}])
    site.run()
    assert message in one_line(site.quota(*arguments.split()), 2)
    assert sorted(path.name for path in site.folder.glob(".quota-export*")) == []


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_lines_of_an_export_are_json_whatever_stdout_holds(site: Site, encoding: str) -> None:
    """Where stdout cannot hold a letter, Python writes `\\xe9` for it, which no JSON has. Control characters are
    escaped, as in all JSON of ours: a title may move no cursor."""
    text = "caf\xe9 \u6771\u4eac \U0001f642 \x9b2J \u202e \u2028"
    site.pages([{"comments": [comment(1, text=text)]}])
    site.run()
    printed = site.quota("export", "comments", PYTHONIOENCODING=encoding, PYTHONUTF8="0").stdout
    assert [json.loads(line)["text"] for line in printed.splitlines()] == [text]
    assert printed.removesuffix("\n").isprintable()


def test_an_export_takes_the_place_of_a_file_alone(site: Site) -> None:
    site.pages([{}])
    site.run()
    os.mkfifo(site.folder / "pipe")
    (site.folder / "link").symlink_to("file")
    (site.folder / "file").touch(0o600)
    for other in ("pipe", "-", "", "folder/"):
        assert f"--output '{other}' is not a file" in one_line(site.quota("export", "videos", "--output", other), 2)
    for ours in ("quota.toml", "./videos.db", "videos.db-wal"):
        assert "is a file of this configuration" in one_line(site.quota("export", "videos", "--output", ours), 2)
    assert site.quota("export", "videos", "--output", "link").returncode == 0
    assert ((site.folder / "pipe").is_fifo(), (site.folder / "link").is_symlink()) == (True, True)
    assert (site.folder / "file").stat().st_mode == stat.S_IFREG | 0o600
    (site.folder / "file").write_text("before")
    done = site.quota.shell("ulimit -f 0; quota export videos --format csv --output file")
    assert (done.returncode != 0, (site.folder / "file").read_text()) == (True, "before"), "a failure leaves it"
    assert sorted(path.name for path in site.folder.glob(".quota-export*")) == []


def test_a_large_table_is_exported_in_constant_memory(site: Site) -> None:
    """Each row has 1 kB, or 100 bytes of a million rows; all of them in memory would be ten times what is allowed."""
    site.pages([{"comments": [comment(0)]}])
    site.run()

    def peak_kb(rows: int) -> int:
        site.change(
            "WITH RECURSIVE n(i) AS (SELECT ifnull((SELECT max(id) FROM rows), 0) + 1"  # noqa: S608 - numbers
            f" UNION ALL SELECT i + 1 FROM n WHERE i < {rows})"
            " INSERT INTO rows SELECT i, 'comments', 'c' || i, 'id', 'own', 'US', json_object('id', 'c' || i,"
            f" 'likes', i, 'text', hex(zeroblob({500 if ROWS <= 20_000 else 50}))), 1795233255000, 1795233255000 FROM n"
        )
        command = [*QUOTA, "export", "comments", "--format", "csv", "--output", "out"]
        process = subprocess.Popen(command, cwd=site.folder, env=site.quota.env, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)  # nobody else has to wait for it
        assert process.returncode == 0
        return usage.ru_maxrss

    few, many = peak_kb(100), peak_kb(ROWS)
    with (site.folder / "out").open() as file:
        assert sum(1 for _ in file) == 1 + ROWS
    assert many - few < 8_000, f"{few:,} kB for 100 rows, {many:,} kB for {ROWS:,}"


def test_the_yield_of_pages_is_known_by_number(site: Site) -> None:
    site.configure('schedule = "every 6h"')

    def page(begin: int, count: int) -> dict[str, Any]:
        return {"comments": [comment(n) for n in range(begin, begin + count)]}

    for begin in (0, 30, 60):
        site.pages([page(begin, 30), page(begin, 20), page(begin, 10)], [page(begin, 30), page(begin, 1)])
        report = site.run()
        assert report.outcome == "done", report
    site.pages([page(0, 30), page(0, 20), {"comments": [{}]}], [page(0, 30)])
    assert site.run().outcome == "failed"
    yields = site.quota.json("spend", "--bought", "--json")["bought"]
    numbers = [[each[name] for name in ("page", "pages", "items", "new", "units")] for each in yields]
    assert numbers == [[1, 8, 240, 90, 8], [2, 7, 83, 0, 7], [3, 3, 30, 0, 4]]
    message = "pages 2 and 3 of own brought 0% of the new entries for 58% of its units"
    shown = site.quota("spend", "--bought", "--since", "7d").stdout
    assert shown.splitlines()[-1] == message
    assert "90" in shown
    assert f"in the last 7 days {message}" in " ".join(site.quota("plan").stdout.split())
    with quota.open(site.folder / "quota.toml") as session:
        assert f"in the last 7 days {message}" in jobs(session).notes
    assert "--bought and --by cannot be combined" in one_line(site.quota("spend", "--bought", "--by", "job"), 2)


def test_places_show_the_next_page_and_are_reset_one_by_one(site: Site) -> None:
    site.configure("max_units = 3")
    site.pages([{"comments": [comment(n)]} for n in range(2)], [{"comments": [comment(n)]} for n in range(5, 8)])
    site.run()
    listed = site.quota("place", "list").stdout.splitlines()
    assert listed[0].startswith("own US: this round is done; complete ")
    assert listed[1] == "own DE: page 2 comes next, 1 page and 1 item of this round stored; never complete"
    [shown] = site.quota.json("place", "show", "own", "DE", "--json")["places"]
    assert (shown["pages"], shown["cursor"], shown["pending"]) == (1, {"at": 1}, True)
    assert '  cursor {"at": 1}' in site.quota("place", "show", "own").stdout
    assert site.quota("place", "reset", "own", "DE").stdout == "own begins anew with the next run, in DE\n"
    assert [each["pages"] for each in site.quota.json("place", "list", "--json")["places"]] == [2, 0]
    assert len(site.rows("SELECT 1 FROM rows")) == 3, "what is stored stays"
    assert site.run().outcome == "done"
    assert site.upstream.usage()["requests"] == 3 + 3
    site.change("UPDATE checkpoints SET failed_at_ms = completed_at_ms + iif(region = 'US', 1, -1)")
    listed = site.quota("place", "list").stdout.splitlines()
    assert [("tries it again" in line, ", failed " in line) for line in listed] == [(True, True), (False, False)]
    assert site.quota("place", "reset", "own").stdout == "own begins anew with the next run, in US, DE\n"


def test_a_search_is_bounded_by_region_and_time_and_comes_as_csv(site: Site) -> None:
    site.fetch_with(FETCH.replace("Page(rows=pages[at]", "Page(videos=pages[at]['v'], ranked=True"))
    names = {name: {"id": name, "snippet": {"title": f'=cat "{name}",\n{name}'}} for name in ("old", "back", "new")}
    site.pages([{"v": [names["old"], names["back"]]}], [{"v": [names["new"]]}])
    site.run()
    site.change("UPDATE rankings SET taken_at_ms = taken_at_ms - 8 * 86400000")
    site.change("UPDATE videos SET refreshed_ms = refreshed_ms - 8 * 86400000")
    site.pages([{"v": [names["new"]]}], [{"v": [names["back"]]}])
    site.run()

    def ids(*options: str) -> set[str]:
        lines = csv.DictReader(io.StringIO(site.quota("search", "cat", "--format", "csv", *options).stdout))
        return {line["video_id"] for line in lines if line["title"] == names[line["video_id"]]["snippet"]["title"]}

    assert ids() == {"old", "back", "new"}
    assert ids("--since", "7d") == {"back", "new"}
    assert ids("--region", "US") == {"old", "back", "new"}
    assert ids("--region", "US", "--since", "7d") == {"new"}, "the other was ranked there before"
    assert ids("--region", "FR") == set()
    header, *_ = site.quota("search", "nothing", "--format", "csv").stdout.splitlines()
    assert header == "video_id,title,channel_title,published_at,view_count,rankings"
    [row] = csv.DictReader(
        io.StringIO(site.quota("search", "cat", "--format", "csv", "--region", "US", "--since", "7d").stdout)
    )
    assert [(each["region"], each["rank"]) for each in json.loads(row["rankings"])] == [("US", 1)]


def test_each_documented_query_finds_something_in_a_store_with_two_passes(site: Site) -> None:
    site.fetch_with(
        FETCH.replace("Page(rows=pages[at]", "Page(videos=pages[at]['v'], ranked=True, rows={'comments': [{'id': 1}]}")
    )
    site.configure()
    for views, ids, title in ((1, "ab", "t"), (5, "abc", "u")):
        videos = [
            {
                "id": each if each != "a" else "VIDEO",
                "snippet": {"title": title, "channelId": "c", "tags": ["x"], "publishedAt": "2026-11-01T10:00:00Z"},
                "statistics": {"viewCount": str(views)},
            }
            for each in ids
        ]
        site.pages([{"v": videos}], [{"v": videos}])
        site.run()
    queries = re.findall(r"```sql\n(.*?)```", (ROOT / "docs" / "data.md").read_text(), re.DOTALL)
    assert len(queries) == 3
    for query in queries:
        assert site.rows(query.replace("'trending'", "'own'")), query
