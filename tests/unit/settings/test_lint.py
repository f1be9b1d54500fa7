"""The findings of `quota check`: each with its place and its remedy, and none about a configuration that is fine."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import redis

import quota
from quota.cli.doctor import ask_ledger
from quota.common.findings import file_system
from quota.decision import Allowance
from quota.errors import ConfigError
from quota.jobs.store.store import Store
from quota.session import Session
from quota.settings.lint import Finding, lint
from quota.settings.load import load_settings
from quota.terms.limits import DAY_MS
from support.servers import RedisServer
from support.users import not_root

EXAMPLE = Path(__file__).resolve().parents[3] / "config" / "quota.toml"

GOOD = """\
[ledger]
url = "redis://127.0.0.1:6379/0"
unavailable = { max_cost = 1, allowance = 250, machines = 2 }
[credentials.main]
api = "youtube-v3"
key = "env:LINT_KEY"
[[credentials.main.limits]]
name = "day"
quota = 10_000
headroom = 500
window = "24h"
[[credentials.main.limits]]
name = "pacific-day"
quota = 10_000
headroom = 500
window = { calendar = "day", zone = "America/Los_Angeles" }
[[credentials.main.limits]]
name = "search"
methods = ["search.list"]
units = 4_000
window = "24h"
[jobs.trending]
fetch = "trending"
regions = ["US", "GB"]
leave = 500
"""
KEYLESS = GOOD.replace('key = "env:LINT_KEY"\n', "")


@pytest.fixture(autouse=True)
def _key(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINT_KEY", "k")


@pytest.mark.parametrize(
    ("old", "new", "warns"),
    [
        ("", "", True),
        ('videos.db"', 'videos.db"\nname = "cluster"', False),
        ("leave = 500", 'leave = 500\nmachines = "each"', False),
        ("redis://127.0.0.1:6379/0", "sqlite:///ledger.db", False),
        ("sqlite:////dev/shm/videos.db", "sqlite:////proc/videos.db", False),
    ],
)
def test_a_store_that_ends_with_its_pod_needs_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, warns: bool
) -> None:
    in_memory = "/dev/shm/videos.db"  # noqa: S108
    warns = warns and file_system(in_memory) == "tmpfs"  # elsewhere than on Linux it is not seen
    text = f'{GOOD}[store]\nurl = "sqlite:///{in_memory}"\n'.replace(old, new)
    assert [f for f in findings(tmp_path, text) if f.location == "store.name"] == []
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert [f.level for f in findings(tmp_path, text) if f.location == "store.name"] == ["warning"] * warns
    has_no_disk = any("does not last" in f.message for f in findings(tmp_path, text))
    assert has_no_disk is ("cluster" in new), "its allowance would be anew in each pod"


@pytest.mark.parametrize(
    ("ledger", "message"),
    [
        ('url = "redis://127.0.0.1:6379/0"', "without the number of machines"),
        ('url = "sqlite:///ledger.db"', "has no effect"),
        (None, None),
    ],
)
def test_a_job_of_each_machine_needs_their_number(tmp_path: Path, ledger: str | None, message: str | None) -> None:
    text = GOOD.replace("leave = 500", 'machines = "each"')
    if ledger is not None:
        text = text[text.index("[credentials.main]") :] + f"[ledger]\n{ledger}\n"
    reported = [finding for finding in findings(tmp_path, text) if finding.location == "jobs.trending.machines"]
    assert [message in finding.message for finding in reported if message] == [True] * (message is not None)
    assert len(reported) == (message is not None)


@pytest.mark.parametrize(
    ("fetch", "places", "warns"), [("videos", "ledger", 1), ("videos", "store", 0), ("channels", "ledger", 0)]
)
def test_a_job_that_goes_by_its_store_needs_one_that_lasts(tmp_path: Path, fetch: str, places: str, warns: int) -> None:
    text = GOOD.replace("[jobs.trending]", f'[store]\nplaces = "{places}"\n[jobs.trending]')
    text = text.replace('fetch = "trending"', f'fetch = "{fetch}"')
    reported = [finding for finding in findings(tmp_path, text) if finding.location == "jobs.trending.fetch"]
    assert [finding.level for finding in reported] == ["warning"] * warns


def findings(tmp_path: Path, text: str) -> list[Finding]:
    return lint(load_settings(_written(tmp_path, text)))


def _written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "quota.toml"
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_a_folder_that_is_not_there_is_a_warning(tmp_path: Path) -> None:
    for folder in ("none", f"{'x' * 300}/in"):
        (reported,) = findings(tmp_path, GOOD + f'[store]\nurl = "sqlite:///{folder}/videos.db"\n')
        assert str(reported).startswith(f"warning: store.url: folder {tmp_path}/{folder[:99]}")
        assert str(reported).endswith(" is not there; make it, or correct the path")
        assert len(str(reported)) < 500


@pytest.mark.parametrize("variable", ["QUOTA_LEDGER__URL", "quota__ledger__url", "QUOTA_LEDGER_URL"])
def test_a_variable_that_almost_sets_a_key_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    """Where it can mean nothing else, it stops every command: another ledger has another budget."""
    monkeypatch.setenv(variable, "memory:")
    with nullcontext() if variable == "QUOTA_LEDGER_URL" else pytest.raises(ConfigError, match=f"{variable}: sets no"):
        (finding,) = findings(tmp_path, GOOD)
        assert str(finding).startswith(f"warning: environment variable {variable}: sets no key of the configuration; ")
    monkeypatch.setenv(variable, "k")
    assert findings(tmp_path, GOOD.replace("env:LINT_KEY", f"env:{variable}")) == []


def test_the_example_has_no_findings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("YOUTUBE_API_KEY", "k")
    text = EXAMPLE.read_text(encoding="utf-8")
    (finding,) = findings(tmp_path, text)
    assert (finding.level, finding.location) == ("warning", "credentials.main.project")
    assert "still 'my-project'" in finding.message
    assert findings(tmp_path, text.replace("my-project", "a-project-of-mine")) == []


def test_check_without_a_file_names_only_the_missing_key() -> None:
    assert list(map(str, lint(load_settings()))) == [
        "warning: credentials.demo.key: there is no key, so the API answers only programs that bring their own; "
        'add key = "env:NAME" or "file:/path"'
    ]


FINDINGS = [
    # What may be spent without the ledger has to fit into what is left unspent.
    (
        "machines = 2",
        "machines = 3",
        "error: ledger.unavailable: 3 machines may spend 750 units while the ledger is away, but limit 'day' of "
        "project 'main' leaves 500 unspent; "
        "lower allowance to 166, or raise that limit's headroom to 750",
    ),
    (
        "redis://127.0.0.1:6379/0",
        "sqlite:///ledger.db",
        "warning: ledger.url: each of the 2 machines has an embedded ledger and a budget of its own; give all machines "
        "one redis:// ledger",
    ),
    (
        'url = "redis://127.0.0.1:6379/0"\nunavailable = { max_cost = 1, allowance = 250, machines = 2 }',
        'url = "memory:"',
        "warning: ledger.url: is for tests: the charges end with each process; name a file or a server",
    ),
    # Limits that admit nothing, or too much.
    (
        "units = 4_000",
        "units = 99",
        "error: credentials.main.limits[2]: limit 'search' holds 99, and search.list costs 100: it never fits; raise "
        "the limit to 100 or more",
    ),
    (
        "leave = 500",
        "leave = 9_500",
        "error: jobs.trending.leave: leaves 9,500 of the 9,500 of limit 'day': no call of this job fits; leave "
        "9_499 or less",
    ),
    (
        '["US", "GB"]',
        '["US", "uk"]\n[jobs.own]\nfetch = "quota.jobs.fetches:videos"\nregions = ["uk"]',
        "error: jobs.trending.regions[1]: 'uk' is no region code of ISO 3166-1, like 'US'; did you mean 'GB'?",
    ),
    (
        '["US", "GB"]',
        '["US", "ZZ"]',
        "warning: jobs.trending.regions[1]: upstream lists no region 'ZZ'; ignore this if upstream takes the code",
    ),
    (
        "units = 4_000",
        'units = 4_000\njobs = ["trendng"]',
        "warning: credentials.main.limits[2].jobs: no job 'trendng' is configured for this project; "
        "ignore this if scripts charge under that name; its jobs: trending",
    ),
    # What the commands that use it reject.
    (
        'fetch = "trending"',
        'fetch = "json:fetch"',
        f"error: jobs.trending.fetch: 'json:fetch': module json ({json.__file__}) has no function 'fetch'; "
        "no run of this job can begin: correct it",
    ),
    (
        'fetch = "trending"',
        'fetch = "search"',
        "error: jobs.trending.fetch: 'search': missing a required argument: 'words'; "
        "it is called as fetch(client, region, cursor)",
    ),
    (
        "leave = 500",
        "leave = 500\noptions = { catgory = 10 }",
        "error: jobs.trending.fetch: 'trending' has no option 'catgory'; did you mean 'category'?",
    ),
    # What upstream refuses at the full price.
    (
        "leave = 500",
        'leave = 500\noptions = { category = "music" }',
        "error: jobs.trending.fetch: 'trending': category: 'music' is not a category id, like '10'; correct it",
    ),
    *(
        (
            'fetch = "trending"',
            f'fetch = "search"\noptions = {{ {options} }}',
            f"error: jobs.trending.fetch: 'search': {why}",
        )
        for options, why in (
            ('words = ["a", " "]', "words has a blank text, which asks for nothing; remove it"),
            ('words = ["a b", " A  b"]', "words: ' A  b' appears twice; remove one"),
            (
                'words = "a", order = "best"',
                "order: 'best' is not one of date, rating, relevance, title, videoCount, viewCount; correct it",
            ),
            (
                'words = "a", published_after = "2026-02-30T00:00:00Z"',
                "published_after: '2026-02-30T00:00:00Z' is not a time like '2026-01-01T00:00:00Z'; correct it",
            ),
            ('words = "a", pages = "2"', "`pages` is a key of the job; write it beside `options`, not in them"),
        )
    ),
    (
        'fetch = "trending"',
        'fetch = "channels"',
        "warning: jobs.trending.regions: no job fetches a chart for 'US', 'GB'; add one, or there is nothing to fetch",
    ),
    (
        'fetch = "trending"\nregions = ["US", "GB"]',
        'fetch = "channels"',
        "warning: jobs.trending.regions: it has neither regions nor `ids`; add some, or there is nothing to fetch",
    ),
    (
        'fetch = "trending"',
        'fetch = "uploads"',
        "warning: jobs.trending.regions: no job fetches a chart for 'US', 'GB'; add one, or there is nothing to fetch",
    ),
    (
        'fetch = "trending"\nregions = ["US", "GB"]',
        'fetch = "comments"',
        "warning: jobs.trending.regions: no other job stores what it reads; add one, or there is nothing to fetch",
    ),
    (
        'fetch = "trending"',
        'fetch = "comments"\noptions = { videos = "dQw4w9WgXcQ" }',
        "warning: jobs.trending.regions: each of 2 regions fetches the same `videos`; remove all but one",
    ),
    (
        "leave = 500",
        "max_items = 20",
        "warning: jobs.trending.max_items: a page of this job has up to 50 items, and a longer page fails its region; "
        "raise it to 50, or remove it",
    ),
    (
        "leave = 500",
        'schedule = "0 * * * *"\nmisfire_grace = "20ms"',
        "warning: jobs.trending.misfire_grace: a tick starts some milliseconds late, and after 20ms it is dropped; "
        'set "1m" or more',
    ),
    (
        'key = "env:LINT_KEY"\n',
        "",
        "error: credentials.main.key: there is no key, so the API answers only programs that bring their own; "
        'add key = "env:NAME" or "file:/path"',
    ),
    *(
        (
            old,
            new,
            f"warning: {location}: environment variable NO_SUCH is not set; put the {what} into it, or write "
            "file:/path instead of env:NO_SUCH",
        )
        for old, new, location, what in (
            ("leave = 500", 'ping = "env:NO_SUCH"', "jobs.trending.ping", "address"),
            ("[jobs.trending]", '[notify]\nurl = "env:NO_SUCH"\n[jobs.trending]', "notify.url", "address"),
            ("env:LINT_KEY", "env:NO_SUCH", "credentials.main.key", "key"),
            ('key = "env:LINT_KEY"', 'auth = "bearer:env:NO_SUCH"', "credentials.main.auth", "token"),
        )
    ),
    (
        "[jobs.trending]",
        '[notify]\nurl = "env:LINT_KEY"\n[jobs.trending]',
        "warning: notify.url: env:LINT_KEY holds no https:// address; store one, with %XX for special characters",
    ),
    (
        "leave = 500",
        'ping = "env:LINT_KEY"',
        "warning: jobs.trending.ping: env:LINT_KEY holds no https:// address; store one, with %XX for special "
        "characters",
    ),
    (
        "[jobs.trending]",
        '[store]\nretention = "31d"\n[jobs.trending]',
        "warning: store.retention: after 30 days the terms of youtube want data fetched again or deleted; "
        'set retention = "30d", or fetch everything older again',
    ),
    (
        "[jobs.trending]",
        '[store]\nretention = "23h"\n[jobs.trending]',
        "warning: store.retention: the pages of a refused run are deleted before it goes on a day later; "
        'set retention = "2d" or more',
    ),
]


@pytest.mark.parametrize(("text", "instead", "message"), FINDINGS, ids=[message[:70] for _, _, message in FINDINGS])
def test_a_finding_says_where_what_and_what_to_do(tmp_path: Path, text: str, instead: str, message: str) -> None:
    assert text in GOOD
    reported = [str(finding) for finding in findings(tmp_path, GOOD.replace(text, instead, 1))]
    # As of Python 3.12.
    reported = [line.replace("required keyword-only argument", "required argument") for line in reported]
    assert message in reported
    # A number for `leave` stands for several limits, and each of them says so.
    assert len({line.partition(" of limit")[0] for line in reported}) == 1


def test_a_key_or_token_is_one_budget_in_each_api(tmp_path: Path) -> None:
    def message(login: str, *apis: str) -> list[str]:
        each = (f'[credentials.c{n}]\napi = "{api}"\n{login}\n' for n, api in enumerate(apis))
        return [str(finding) for finding in findings(tmp_path, "".join(each)) if finding.location.endswith(".project")]

    assert message('key = "env:LINT_KEY"', "youtube-v3", "calendar-v3") == []
    assert message('auth = "bearer:env:LINT_KEY"', "github", "github-graphql") == []
    assert message('auth = "service-account:account.json"', "gmail-v1", "gmail-v1") == []  # it may call for several
    for login, what, api in (("key = ", "key", "youtube-v3"), ("auth = ", "token", "github")):
        ref = '"env:LINT_KEY"' if what == "key" else '"bearer:env:LINT_KEY"'
        assert message(login + ref, api, api) == [
            f"error: credentials.c1.project: the same {what} as credential 'c0', whose project is 'c0': upstream "
            "counts them as one; give both the same project, for example 'c0'"
        ]


def test_a_limit_may_name_the_jobs_of_any_credential_of_its_project(tmp_path: Path) -> None:
    second = '[credentials.second]\napi = "youtube-v3"\nkey = "env:LINT_KEY"\nproject = "main"\n'
    limited = GOOD.replace("units = 4_000", 'units = 4_000\njobs = ["trending"]', 1)
    reported = findings(
        tmp_path, limited.replace("[jobs.trending]", f'{second}[jobs.trending]\ncredential = "main"', 1)
    )
    assert not [str(finding) for finding in reported if finding.location.endswith(".jobs")]


def limits(text: str) -> str:
    return f'[credentials.main]\napi = "youtube-v3-buckets"\nkey = "env:LINT_KEY"\nlimits = [{text}]\n'


UNITS = '{ name = "u", quota = 10_000, window = { calendar = "day", zone = "America/Los_Angeles" } }'


def test_given_limits_replace_the_default_ones_so_every_bucket_needs_one(tmp_path: Path) -> None:
    reported = findings(tmp_path, limits(UNITS))
    assert [(f.level, f.location, f.message) for f in reported] == [
        ("error", "credentials.main.limits", f"no limit counts any call of bucket '{name}'")
        for name in ("search", "uploads", "batch-stats")
    ]
    assert reported[0].remedy == 'add a limit with bucket = "search" and quota = 100'


def test_a_limit_for_some_jobs_does_not_hold_a_bucket(tmp_path: Path) -> None:
    text = limits('{ name = "x", units = 5, window = "24h", jobs = ["a"], bucket = ["units", "search"] }')
    reported = [f.message for f in findings(tmp_path, text) if f.level == "warning" and "bucket" in f.message]
    assert reported == [f"no limit counts all calls of bucket '{name}'" for name in ("units", "search")]


@pytest.mark.parametrize(
    ("units", "window", "fits"),
    [
        # A day of 25 hours touches two windows of 24 hours, or 25 of one hour, but only one of 26.
        (5_000, '"24h"', True),
        (5_001, '"24h"', False),
        (401, '"1h"', False),
        (10_000, '"26h"', True),
        # Two calendar days of another zone.
        (5_001, '{ calendar = "day", zone = "UTC" }', False),
    ],
)
def test_a_limit_with_another_window_than_upstreams_holds_if_enough_of_them_fit(
    tmp_path: Path, units: int, window: str, fits: bool
) -> None:
    text = limits(f'{{ name = "x", units = {units}, window = {window} }}').replace("-buckets", "")
    assert (findings(tmp_path, text) == []) is fits


def test_a_limit_on_all_methods_of_a_bucket_holds_it(tmp_path: Path) -> None:
    search = '{ name = "s", quota = 100, headroom = 50, window = "1d", methods = ["search.list"] }'
    text = limits(f"{UNITS}, {search}")
    assert not [f for f in findings(tmp_path, text) if "'search'" in f.message]


def test_an_allowance_has_to_fit_into_every_bucket_that_such_calls_draw_on(tmp_path: Path) -> None:
    text = '[ledger]\nunavailable = { max_cost = 1, allowance = 50 }\n[credentials.main]\napi = "youtube-v3-buckets"\n'
    (reported, _) = findings(tmp_path, text)
    assert "limit 'search-day' of project 'main' leaves 5 unspent" in reported.message
    assert reported.remedy == "lower allowance to 5, or raise that limit's headroom to 50"


def test_a_written_quota_without_headroom_leaves_nothing_for_the_allowance(tmp_path: Path) -> None:
    """A written quota is upstream's, whatever the book says; `units` alone stay below the book's quota."""
    without = GOOD.replace("quota = 10_000\nheadroom = 500", "quota = 400").replace("leave = 500\n", "")
    reported = findings(tmp_path, without)[0]
    assert "limit 'day' of project 'main' leaves 0 unspent" in reported.message
    assert findings(tmp_path, without.replace("quota = 400", "units = 400")) == []
    share = without.replace("allowance = 250", 'allowance = "10%"')
    with pytest.raises(ConfigError, match="a limit leaves nothing unspent, so no allowance fits; give it headroom"):
        findings(tmp_path, share)
    share = share.replace("quota = 400", "quota = 400\nheadroom = 20")
    assert load_settings(_written(tmp_path, share)).ledger.unavailable == Allowance(1, 2, 2)


def test_the_gap_of_units_is_to_the_quota_of_no_longer_window(tmp_path: Path) -> None:
    """Of 100 an hour and 1,000 a day, a limit of 90 an hour leaves 10, not 910."""
    (tmp_path / "own.toml").write_text(
        'api = "own"\nsource = "x"\nread_on = 2026-01-01\n[methods]\nread = 1\n[default]\nget = 1\nother = 1\n'
        '[buckets.calls]\nwindows = [{ quota = 100, resets = "1h" }, { quota = 1_000, resets = "24h" }]\n'
    )
    text = (
        '[ledger]\nunavailable = { max_cost = 1, allowance = 11 }\n[credentials.main]\napi = "own.toml"\n'
        'key = "env:LINT_KEY"\nlimits = [{ name = "hour", units = 90, window = "1h" }, '
        '{ name = "day", quota = 1_000, headroom = 50, window = "24h" }]\n'
    )
    (reported,) = findings(tmp_path, text)
    assert "limit 'hour' of project 'main' leaves 10 unspent" in reported.message


def test_a_narrow_limit_that_only_dear_calls_count_against_does_not_bound_the_allowance(tmp_path: Path) -> None:
    assert findings(tmp_path, GOOD.replace("units = 4_000", "quota = 4_000\nheadroom = 1")) == []


def test_check_warns_of_a_relative_path_that_looks_absolute(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    slashless = str(tmp_path / "real" / "ledger.db").lstrip("/")
    text = GOOD.replace("redis://127.0.0.1:6379/0", f"sqlite:///{slashless}").replace("machines = 2", "machines = 1")
    (reported,) = findings(tmp_path, text)
    assert (reported.level, reported.location) == ("warning", "ledger.url")
    assert reported.remedy == f"write sqlite:////{slashless} for the absolute path"


RECONCILED = """cloud_project = "cloud-project-1"
auth = "adc"
"""


def test_check_names_what_reconcile_needs(tmp_path: Path) -> None:
    def message(text: str) -> list[str]:
        return list(map(str, findings(tmp_path, GOOD.replace("[[cred", f"{text}\n[[cred", 1))))

    assert message(RECONCILED) == []
    assert message('auth = "adc"') == [
        "warning: credentials.main.auth: has no effect beside a key; add cloud_project, or remove auth"
    ]
    assert message('cloud_project = "cloud-project-1"') == [
        "warning: credentials.main.auth: missing: `quota reconcile` may not read the project's figures; "
        'add "adc", "service-account:PATH" or "authorized-user:PATH"'
    ]
    file = tmp_path / "account.json"
    text = RECONCILED.replace("adc", "service-account:account.json")
    file.write_text("{}")
    file.chmod(0o644)
    assert message(text) == [
        "warning: credentials.main.auth: every user of this machine can read this file; chmod 600 the file"
    ]


def test_scopes_are_for_an_account(tmp_path: Path) -> None:

    def message(text: str) -> list[str]:
        text = KEYLESS.replace("[[cred", f'{text}\nscopes = ["openid"]\n[[cred', 1)
        return [str(finding) for finding in findings(tmp_path, text) if finding.location.endswith(".scopes")]

    assert message('auth = "adc"') == message('auth = "service-account:account.json"') == []
    for text in ("", 'auth = "authorized-user:user.json"', 'key = "env:KEY"\nauth = "adc"'):
        assert message(text) == [
            "warning: credentials.main.scopes: have no effect: only an account asks for them; remove them, or add auth "
            '= "adc" or "service-account:PATH"'
        ]


def test_a_project_has_one_name_in_the_cloud_and_that_name_one_project(tmp_path: Path) -> None:
    def message(project: str, cloud: str) -> list[str]:
        other = f'[credentials.b]\napi = "youtube-v3"\nkey = "env:LINT_KEY2"\nproject = "{project}"\n{cloud}'
        first = GOOD.replace("[[cred", f"{RECONCILED}[[cred", 1).replace("fetch =", 'credential = "main"\nfetch =')
        return [str(f) for f in findings(tmp_path, first + other) if f.level == "error"]

    assert message("main", RECONCILED) == message("other", "") == message("other", RECONCILED.replace("-1", "-2")) == []
    assert message("main", RECONCILED.replace("-1", "-2")) == [
        "error: credentials.b.cloud_project: credential 'main' of the same project 'main' has another one; give both "
        "the same, or different projects"
    ]
    assert message("other", RECONCILED) == [
        "error: credentials.b.project: the same cloud_project as credential 'main', whose project is 'main': upstream "
        "counts them as one; give both the same project, for example 'main'"
    ]


BOUND = """
api = "chat"
source = "https://chat.example/limits"
read_on = 2026-11-25
default = {{ get = 1, other = 1 }}
methods = {{ chat = {price}, models = 1 }}
{answers}
[buckets.tokens]
quota = 1_000
resets = "1h"
"""


def test_check_names_what_is_unwise_in_a_book_once(tmp_path: Path) -> None:
    def message(price: str, answers: str = "") -> list[str]:
        (tmp_path / "chat.toml").write_text(BOUND.format(price=price, answers=answers))
        text = "".join(f'[credentials.{name}]\napi = "chat.toml"\nkey = "env:LINT_KEY"\n' for name in ("a", "b"))
        return [str(finding) for finding in findings(tmp_path, text) if finding.level == "warning"]

    assert message("{ reserve = { default = 9 } }", 'answers = { units = "X-Cost" }') == []
    assert message("9") == message("950") == []
    assert message("951")[0] == (
        "warning: credentials.a.limits[0]: limit 'hour' holds 950, and chat costs 951: it never fits; "
        "lower the headroom, or ignore this if nobody makes this call"
    )
    for units, why in ((951, "chat reserves 951: it never"), (1_001, "chat reserves 1,001 units of bucket")):
        reserve = f'{{ reserve = {{ json = "/n", default = {units} }} }}'
        assert why in message(reserve, 'answers = { units = "X-Cost" }')[0]
    for price, text, why in (
        ("{ reserve = { default = 9 } }", "", "chat: `answers` has no `units` that say what a call with"),
        ("9", 'answers = { units = "X-Cost" }', "`units` of `answers` changes nothing: it settles calls with"),
        ("9", "answers = { free = [{ status = 200 }] }", "answers.free[0]: every good answer has status 200"),
    ):
        (line,) = message(price, text)
        assert line.startswith(f"warning: cost book chat: {why}")


def test_check_warns_of_a_key_file_that_everybody_can_read(tmp_path: Path) -> None:
    key: Any = tmp_path / "key"
    key.write_text("k\n")
    text = GOOD.replace("env:LINT_KEY", "file:key")
    key.chmod(0o640)
    assert findings(tmp_path, text) == []
    key.chmod(0o644)
    (line,) = map(str, findings(tmp_path, text))
    assert line == "warning: credentials.main.key: every user of this machine can read the key file; chmod 600 the file"


def test_a_fetch_function_is_looked_for_beside_the_configuration(tmp_path: Path) -> None:
    text = GOOD.replace('fetch = "trending"', 'fetch = "fetched_by_lint:fetch"')
    (reported,) = findings(tmp_path, text)
    assert (reported.level, reported.location) == ("error", "jobs.trending.fetch")
    assert reported.message.startswith("'fetched_by_lint:fetch' cannot be imported: ModuleNotFoundError")
    assert reported.remedy == f"install it, or put it in {tmp_path}"
    (tmp_path / "fetched_by_lint.py").write_text("def fetch(client, region, cursor): ...\n")
    assert findings(tmp_path, text) == []


ALONE = '[credentials.main]\napi = "youtube-v3"\n[credentials.two]\napi = "gmail-v1"\n'


def asked(tmp_path: Path, url: str) -> list[str]:
    with Session(load_settings(_written(tmp_path, f'[ledger]\nurl = "{url}"\n' + ALONE))) as session:
        return list(map(str, ask_ledger(session)))


def test_a_ledger_that_answers_has_no_finding(tmp_path: Path, redis_server: RedisServer) -> None:
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()  # other tests write there what no ledger does
    assert asked(tmp_path, redis_server.url) == []
    assert asked(tmp_path, "sqlite:///ledger.db") == []
    assert asked(tmp_path, "sqlite:///new/folder/ledger.db") == []
    assert not (tmp_path / "ledger.db").exists(), "asking makes nothing"
    assert not (tmp_path / "new").exists()
    with quota.open(tmp_path / "quota.toml") as session:
        session.budget("main").charge("videos.list")
    assert asked(tmp_path, "sqlite:///new/folder/ledger.db") == []


@pytest.mark.usefixtures("real_walls")
def test_a_server_that_does_not_answer_is_one_warning(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        (line,) = asked(tmp_path, f"redis://:s3cret@127.0.0.1:{port}/0")
        assert line.startswith(f"warning: ledger.url: ledger redis://127.0.0.1:{port}/0 did not answer within")
    (line,) = asked(tmp_path, f"redis://127.0.0.1:{port}/0")
    assert line.startswith(f"warning: ledger.url: ledger redis://127.0.0.1:{port}/0 cannot be reached; ")


def test_a_server_that_no_command_can_use_is_one_error(tmp_path: Path) -> None:
    own = RedisServer()
    try:
        with redis.Redis(port=own.port) as client:
            client.hset("quota:{main}:state", mapping={"format": "0", "last": "1-0"})
            client.config_set("requirepass", "right")
        lines = [asked(tmp_path, own.url.replace("://", f"://{who}")) for who in ("", ":wrong@", ":right@")]
    finally:
        own.close()
    for line, message in zip(lines, ("wants a password", "refused the password", "an older quota-ledger"), strict=True):
        assert len(line) == 1
        assert line[0].startswith("error: ledger.url: ")
        assert message in line[0]


def test_a_store_of_another_format_is_an_error(tmp_path: Path) -> None:
    text = GOOD + '[store]\nurl = "sqlite:///videos.db"\n'
    with Store(str(tmp_path / "videos.db"), retention_ms=DAY_MS):
        assert findings(tmp_path, text) == []
    with closing(sqlite3.connect(tmp_path / "videos.db")) as db:
        db.execute("PRAGMA user_version = 1")
    (reported,) = findings(tmp_path, text)
    assert (reported.level, reported.location) == ("error", "store.url")
    assert "was written by an older quota-ledger (its version 1, ours " in reported.message
    assert "move it away" in reported.remedy
    (tmp_path / "videos.db").write_text("")
    assert findings(tmp_path, text) == []
    assert (tmp_path / "videos.db").stat().st_size == 0, "a check makes nothing"


def test_an_address_that_lint_rejects_is_not_asked(tmp_path: Path) -> None:
    assert asked(tmp_path, "redis://h:99999/0") == []


@pytest.mark.parametrize("key", ["ledger", "store", "inbound"])
def test_check_names_every_file_that_no_run_could_make_or_use(tmp_path: Path, key: str) -> None:
    def levels(url: str) -> list[tuple[str, bool]]:
        rule = '[inbound.all]\nlimit = 5\nwindow = "1s"\n' if key == "inbound" else ""
        settings = load_settings(_written(tmp_path, f'[{key}]\nurl = "sqlite:///{url}"\n{rule}{ALONE}'))
        with not_root():
            reported = [*lint(settings), *ask_ledger(Session(settings))]
        return [(finding.level, bool(finding.remedy)) for finding in reported if finding.location == f"{key}.url"]

    os.mkfifo(tmp_path / "pipe", 0o600)
    shut = tmp_path / "shut"
    shut.mkdir()
    shut.chmod(0o555)
    (tmp_path / "text").write_text("nothing of the kind")
    (tmp_path / "loop").symlink_to("loop")
    assert set(levels("pipe")) == {("error", True)}
    assert levels("shut/x.db") == [("warning", True)]
    assert levels("loop") == [("warning", True)]
    assert levels("text") == [("error", True)]
    assert levels("new.db") == []
    assert not (tmp_path / "new.db").exists()
