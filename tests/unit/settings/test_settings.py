"""Reading the configuration: what it means, and what every mistake in it says."""

from __future__ import annotations

import os
import tomllib
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

import quota
from quota.decision import Allowance
from quota.errors import ConfigError, UsageError
from quota.jobs import fetches
from quota.settings.load import find_config, load_settings, settings_of
from quota.settings.model import BUILT_IN_FETCHES
from quota.settings.references import read_key
from quota.settings.tables import CREDENTIAL, JOB, LIMIT, OPTIONS, ROOT
from quota.settings.toml import TomlTable
from quota.terms.limits import DAY_MS, MAX_UNITS, MINUTE_MS, Limit, Selector, Sliding, View
from support.setup import charges_at
from support.users import not_root

EXAMPLE = Path(__file__).resolve().parents[3] / "config" / "quota.toml"

FULL = """\
[ledger]
url = "redis://127.0.0.1:6379/0"
unavailable = { max_cost = 1, allowance = 50, machines = 2 }
[credentials.main]
api = "youtube-v3"
project = "my-project"
key = "env:YOUTUBE_API_KEY"
endpoint = "http://127.0.0.1:8765"
[[credentials.main.limits]]
name = "day"
quota = 10_000
headroom = 500
window = "24h"
[[credentials.main.limits]]
name = "search"
methods = ["youtube.search.list"]
units = 4_000
window = "24h"
[jobs.trending]
credential = "main"
fetch = "trending"
regions = ["US", "GB"]
pages = 4
schedule = "*/30 * * * *"
stagger = "2m"
leave = 500
options = { category = "10" }
[store]
url = "sqlite:///videos.db"
retention = "7d"
"""


@pytest.fixture
def write(state_dir: Path, tmp_path: Path) -> Any:
    """Writes a configuration and answers its path."""

    def write(text: str | bytes, name: str = "quota.toml") -> Path:
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def message(path: Path | str) -> str:
    """What loading a bad configuration says, without the file's name: always one line."""
    with pytest.raises(ConfigError) as error:
        load_settings(path)
    text, other = str(error.value), error.value.__context__
    assert error.value.__suppress_context__ or not isinstance(other, ConfigError), "a traceback would show it twice"
    assert text.isprintable()
    assert len(text) < 600
    prefix = f"{path}: "
    assert text.startswith(prefix)
    return text.removeprefix(prefix)


def test_load_settings_reads_a_full_configuration_behind_a_byte_order_mark(write: Any, tmp_path: Path) -> None:
    settings = load_settings(write(b"\xef\xbb\xbf" + FULL.encode()))
    assert settings.path == tmp_path / "quota.toml"
    assert settings.ledger.url == "redis://127.0.0.1:6379/0"
    assert settings.ledger.unavailable == Allowance(max_cost_units=1, allowance_units=50, machines=2)
    main = settings.credentials["main"]
    assert (main.name, main.api, main.project, main.key_ref) == (
        "main",
        "youtube-v3",
        "my-project",
        "env:YOUTUBE_API_KEY",
    )
    assert main.endpoint == "http://127.0.0.1:8765"
    assert main.limits == (
        Limit("day", 9_500, View(Selector(("units",)), Sliding(DAY_MS)), 10_000, 500),
        Limit(
            "search",
            4_000,
            View(Selector(("units",), ("search.list",)), Sliding(DAY_MS)),
            4_000,
            0,
            quota_unwritten=True,
        ),
    )
    job = settings.jobs["trending"]
    assert (job.credential, job.fetch, job.regions, job.pages) == ("main", "trending", ("US", "GB"), 4)
    assert (job.schedule, job.stagger_ms, job.options) == ("*/30 * * * *", 2 * MINUTE_MS, {"category": "10"})
    assert job.leave == {"day": 500}, "a number is for the limits that count everything"
    assert settings.store.url == f"sqlite:///{tmp_path}/videos.db"
    assert settings.store.retention_ms == 7 * DAY_MS


@pytest.mark.parametrize(("share", "units"), [("10%", 1_000), ("0%", 0), ("99%", 9_900), ("7%", 701)])
def test_headroom_may_be_a_share_of_the_quota_rounded_up(write: Any, share: str, units: int) -> None:
    grant = 10_001 if share == "7%" else 10_000
    settings = load_settings(
        write(FULL.replace("quota = 10_000\nheadroom = 500", f'quota = {grant}\nheadroom = "{share}"'))
    )
    day = settings.credentials["main"].limits[0]
    assert (day.headroom_units, day.limit_units) == (units, grant - units)


def test_settings_load_without_any_file(state_dir: Path) -> None:
    settings = load_settings()
    assert settings.path is None
    assert settings.ledger.url == f"sqlite:///{state_dir}/ledger.db"
    assert settings.ledger.unavailable is None
    demo = settings.credentials["demo"]
    assert (demo.api, demo.project, demo.key_ref, demo.endpoint) == ("youtube-v3", "demo", None, None)
    assert not settings.jobs, "nothing that calls the API, for which there is no key"
    assert settings.store.url == f"sqlite:///{state_dir}/videos.db"
    assert not state_dir.exists(), "reading settings makes nothing"


def test_a_limit_counts_the_buckets_that_its_methods_are_charged_to(write: Any) -> None:
    path = write("""
        [credentials.main]
        api = "youtube-v3-buckets"
        limits = [
          { name = "a", units = 1, window = "1h", methods = ["search.list", "videos.list"] },
          { name = "b", units = 1, window = "1h", jobs = ["x"] },
          { name = "c", units = 1, window = "1h", bucket = ["units", "search"], count = "calls" },
          { name = "d", units = 1, window = { calendar = "hour", zone = "UTC" }, bucket = "uploads" },
        ]
    """)
    limits = load_settings(path).credentials["main"].limits
    assert [x.view.name for x in limits] == [
        "search,units|search.list,videos.list|*|1h",
        "units|*|x|1h",
        "search,units|*|*|1h|calls",
        "uploads|*|*|hour@UTC",
    ]


def test_a_number_to_leave_is_for_the_limits_of_the_main_bucket(write: Any) -> None:
    """A job of searches alone takes nothing of `units`, so it is not held back."""
    jobs = "".join(f'[jobs.{name}]\nfetch = "trending"\nleave = 9_499\n' for name in "jk")
    first, second = load_settings(write(f'[credentials.x]\napi = "youtube-v3-buckets"\n{jobs}')).jobs.values()
    assert first.leave == {"day": 9_499, "pacific-day": 9_499}
    assert second.leave is first.leave, "many jobs leave the same units of many limits"


def test_the_file_that_was_named_wins_then_the_variable_then_here_then_the_users(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    users = tmp_path / "home" / "quota-ledger" / "quota.toml"
    assert find_config() is None
    users.parent.mkdir(parents=True)
    users.write_text("")
    assert find_config() == users
    write("")
    assert find_config() == Path("quota.toml")
    monkeypatch.setenv("QUOTA_CONFIG", "elsewhere.toml")
    assert find_config() == Path("elsewhere.toml")
    assert find_config("named.toml") == Path("named.toml")
    monkeypatch.setenv("QUOTA_CONFIG", "")
    assert find_config() == Path("quota.toml")


def test_the_name_or_the_path_identifies_the_ledger(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_settings().ledger.identity == "built-in configuration"
    (tmp_path / "conf.d").mkdir()
    path = write(FULL, "conf.d/quota.toml")
    monkeypatch.chdir(tmp_path / "conf.d")
    (tmp_path / "link").symlink_to("conf.d")
    (tmp_path / "deep").mkdir()
    spellings = ("quota.toml", "./quota.toml", "../conf.d/quota.toml", path, f"{path.parent}//quota.toml")
    assert {load_settings(path_text).ledger.identity for path_text in spellings} == {str(path)}
    assert load_settings("../link/quota.toml").ledger.identity == f"{tmp_path}/link/quota.toml", "links stay"
    Path("settings").symlink_to(path)  # as messages call a configuration without a file
    assert load_settings("settings").ledger.identity == f"{tmp_path}/conf.d/settings"
    through = f"{tmp_path}/deep/../conf.d/quota.toml"
    assert load_settings(through).ledger.identity == str(path)
    write(FULL)
    (tmp_path / "conf.d" / "deeper").mkdir()
    (tmp_path / "away").symlink_to("conf.d/deeper")
    behind_a_link = f"{tmp_path}/away/../quota.toml"  # conf.d/quota.toml, whatever it looks like
    assert load_settings(behind_a_link).ledger.identity == behind_a_link
    named = write(FULL.replace("[ledger]\n", '[ledger]\nname = "production"\n'), "named.toml")
    assert load_settings(named).ledger.identity == "name production"
    readable, writable = os.pipe()
    os.write(writable, path.read_bytes())
    os.close(writable)
    assert load_settings(f"/dev/fd/{readable}").ledger.identity == ""


def test_paths_are_relative_to_the_configuration(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write('[ledger]\nurl = "sqlite:///l.db"\n[credentials.x]\napi = "youtube-v3"\nkey = "file:secret"\n')
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    settings = load_settings("../quota.toml")
    assert settings.ledger.url == f"sqlite:///{tmp_path}/sub/../l.db"
    assert settings.credentials["x"].key_ref == f"file:{tmp_path}/sub/../secret"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[ledger\n", "not TOML: Expected ']' at the end of a table declaration (at line 1, column 8)"),
        (b"x = " + b"[" * 5_000, "nested too deep"),
        (b"x." + b"a." * 100 + b"a = 1", "nested too deep"),
        (b"a = 1\nb = 'caf\xe9'\n", "line 2: not UTF-8 text; save the file as UTF-8"),
        (b"\0" * 2_000_000, "larger than 1024 KiB; give some credentials, with their jobs, a file of their own"),
        (b"", 'credentials: missing; add [credentials.main] with api = "youtube-v3"'),
        (b"[credentials]", 'credentials: at least one is needed; add [credentials.main] with api = "youtube-v3"'),
    ],
)
def test_an_invalid_configuration_is_one_line(write: Any, content: bytes, expected: str) -> None:
    assert message(write(content)) == expected


def test_messages_shorten_long_values(write: Any, state_dir: Path) -> None:
    keys = "ledger, credentials, jobs, store, textfile, notify, inbound"
    assert message(write(f"{'k' * 5_000} = 1\n")) == f"'{'k' * 56}...: unknown key; known: {keys}"
    with pytest.raises(ConfigError, match=r"^xxx.*\.\.\..*book\.toml: cannot be read: File name too long$") as error:
        load_settings("x" * 5_000 + "/book.toml")
    assert len(str(error.value)) < 500


def test_a_file_that_cannot_be_read_is_one_line(write: Any, tmp_path: Path) -> None:
    assert message(tmp_path / "no.toml") == "cannot be read: No such file or directory"
    assert message(tmp_path) == "cannot be read: Is a directory"
    assert message(tmp_path / ("x" * 300)) == "cannot be read: File name too long"
    path = write(FULL)
    path.chmod(0)
    with not_root():
        text = message(path)
    assert text == "cannot be read: Permission denied"
    with pytest.raises(ConfigError, match=r"^a\\x00b: cannot be read: "):
        load_settings("a\0b")


WHOLE = f"is not a whole number from 1 to {MAX_UNITS}"
NAME_RULE = "a name here has 1 to 64 characters out of A-Z a-z 0-9 . _ : -"
KEY_RULE = 'do not write the key itself here; write "env:VARIABLE" or "file:/path"'
SCHEMES = (
    "sqlite://, memory:, redis://, rediss://, unix://, redis+sentinel://, rediss+sentinel://, redis+cluster://, "
    "rediss+cluster://"
)

NO_PROJECT = 'not a project id such as "my-project-123456" or its number; the Google Cloud console shows both'
AUTHS = 'write "adc", "service-account:PATH", "authorized-user:PATH" or "bearer:env:VARIABLE"'

MISTAKES = {
    "credentials.main.limits[0].": [
        ('window = "24h"\n[[', "[[", "window: missing; the key is required"),
        ("10_000", "500", "headroom: 500 of a quota of 500 leaves nothing to spend"),
        ("headroom = 500", "headroom = 0.05", 'headroom: whole units, or a share such as "10%", is needed'),
        ("headroom = 500", 'headroom = "5 %"', 'headroom: write whole units, or a share below 100%, such as "10%"'),
        ('"24h"', '"hour@UTC"', 'window: a calendar window is written { calendar = "hour", zone = "UTC" }'),
        ('"24h"', "24", 'window: a window is a duration such as "24h" or { calendar = "day", zone = "..." }'),
        ('"24h"', '"24h"\npacing = true', "pacing: only a calendar window can be paced; pace a calendar limit instead"),
        (
            '"24h"',
            '{ calendar = "day", zone = "PST8" }',
            "window.zone: 'PST8' is not a time zone; write for example \"America/Los_Angeles\"",
        ),
    ],
    "credentials.main.limits[1].": [
        (
            "units = 4_000",
            'units = 4_000\nper = "job"\njobs = ["trending"]',
            "per: gives each job a limit of its own and cannot be combined with jobs; remove one of them",
        ),
        ("units = 4_000", "units = 0", f"units: 0 {WHOLE}"),
        (
            "units = 4_000",
            "units = 4_000\nquota = 5",
            "units: cannot be combined with quota; give quota and headroom, or units alone",
        ),
        ("units = 4_000\n", "", "quota: missing; give quota (granted by upstream) and headroom, or units (enforced)"),
        ('name = "search"', 'name = "day"', "name: 'day' is the name of another limit of this credential"),
        (
            "units = 4_000",
            'units = 4_000\nbucket = ["units", "searches"]',
            "bucket[1]: cost book 'youtube-v3' has no bucket 'searches'; known: units",
        ),
        (
            'methods = ["youtube.search.list"]',
            'methods = ["search.lits"]',
            "methods[0]: cost book 'youtube-v3' has no method 'search.lits'; did you mean 'search.list'?",
        ),
    ],
    "credentials.main.": [
        ("[[cred", 'cloud_project = "AIzaSecret"\n[[cred', f"cloud_project: {NO_PROJECT}"),
        ("[[cred", 'on_refusal = "500"\n[[cred', "on_refusal: '500' is not allowed here; known: error, 429"),
        ("[[cred", "headroom = 5\n[[cred", "headroom: unknown key; it belongs in [[credentials.NAME.limits]]"),
        ("[[cred", 'auth = "ya29.secret"\n[[cred', f"auth: {AUTHS}"),
        ('api = "youtube-v3"', 'api = "youtube"', "api: there is no cost book 'youtube'; did you mean 'youtube-v3'?"),
        ('"env:YOUTUBE_API_KEY"', '"env:AIzaSyA1secretsecretsecretsecretsecrets"', f"key: {KEY_RULE}"),
        ('"env:YOUTUBE_API_KEY"', '"env:sk_live_51secretSECRETsecretsecret"', f"key: {KEY_RULE}"),
        ('"env:YOUTUBE_API_KEY"', '"env:a_0secretsecretsecret"', f"key: {KEY_RULE}"),
        ('"env:YOUTUBE_API_KEY"', '"AIzaSyA-secret-secret-secret-secret-secr"', f"key: {KEY_RULE}"),
        *(
            (
                "http://127.0.0.1:8765",
                wrong,
                "endpoint: not an address such as http://127.0.0.1:8765, without user, query or fragment",
            )
            for wrong in (
                "http://127.0.0.1:8765/?key=AIzaSecret",
                "127.0.0.1:8765",
                "http://127.0.0.1:99999",
                "http://[::1",
            )
        ),
    ],
    "jobs.trending.": [
        (
            "leave = 500",
            "cron = true",
            "cron: unknown key; known: credential, fetch, regions, pages, schedule, timezone, stagger, jitter, "
            "misfire_grace, leave, max_units, tables, sink, options, max_body_mb, max_answer_s, max_items, machines, "
            "ping, insecure_endpoint",
        ),
        ('regions = ["US", "GB"]', 'regions = "US"', "regions: an array of strings is needed"),
        ('regions = ["US", "GB"]', 'regions = ["US", ""]', "regions[1]: a non-empty string is needed"),
        ('regions = ["US", "GB"]', 'regions = ["US", "US"]', "regions[1]: 'US' appears twice"),
        (
            'fetch = "trending"',
            'fetch = "trendng"',
            'fetch: write trending, search, channels, uploads, videos, comments, or your own "package.module:function"',
        ),
        ('"*/30 * * * *"', '"61 * * * *"', "schedule: minute '61' is not a number from 0 to 59"),
        ('schedule = "*/30 * * * *"\n', "", "stagger: has no effect without a schedule; add one, or remove this key"),
        (
            'stagger = "2m"',
            'jitter = "30m"',
            "jitter: a start may be 30m late, and '*/30 * * * *' starts the next after 30m; lower it or run less often",
        ),
        ('stagger = "2m"', 'misfire_grace = "8d"', "misfire_grace: '8d' is longer than 7 days"),
        (
            'stagger = "2m"',
            'timezone = "Europe/Brelin"',
            "timezone: 'Europe/Brelin' is not a time zone; did you mean 'Europe/Berlin'?",
        ),
        ('stagger = "2m"', 'timezone = "utc"', "timezone: 'utc' is not a time zone; did you mean 'UTC'?"),
        (
            'schedule = "*/30 * * * *"\nstagger = "2m"',
            'schedule = "every 45m"\ntimezone = "UTC"',
            "timezone: an interval does not depend on the time zone; remove this key",
        ),
        ("leave = 500", "leave = { dya = 5 }", "leave.dya: credential 'main' has no such limit; did you mean 'day'?"),
        ("{ category =", '{ "cate-gory" =', "options.cate-gory: not a valid argument name; use letters, digits and _"),
    ],
    "ledger.": [
        ("[ledger]\n", '[ledger]\nname = "a b"\n', f"name: {NAME_RULE}"),
        ("[ledger]\n", "[ledger]\nallowance = 5\n", "allowance: unknown key; it belongs in `unavailable` of [ledger]"),
        ("redis://127", "http://127", f"url: unsupported URL scheme http://; use one of {SCHEMES}"),
        (
            "redis://127.0.0.1:6379/0",
            "sqlite://ledger.db",
            "url: a file is sqlite:///relative/path or sqlite:////absolute/path",
        ),
        (
            "redis://127.0.0.1:6379/0",
            "sqlite:///:memory:",
            "url: a database in memory is lost when the command ends; a file is sqlite:///relative/path or "
            "sqlite:////absolute/path",
        ),
        (
            "max_cost = 1",
            "max_cost = 51",
            "unavailable.max_cost: no call of this cost fits in an allowance of 50; lower max_cost or raise allowance",
        ),
    ],
    "store.": [
        ("retention =", '"re\\ntention" =', "'re\\ntention': unknown key; did you mean 'retention'?"),
        ('retention = "7d"', "retention = 7", 'retention: a duration such as "24h" is needed'),
        ('retention = "7d"', 'retention = "99999d"', "retention: '99999d' is longer than 3650 days"),
        ("sqlite:///videos.db", "sqlite:///.", "url: this is a folder; name a file in it"),
        ("sqlite:///videos.db", "redis://:secret@h", "url: unsupported URL scheme redis://; use one of sqlite://"),
    ],
    "notify": [
        (
            "[store]",
            "[notify]\n[store]",
            '.command: nobody is told; add command = ["program", "argument"] or url = "env:VARIABLE"',
        ),
        (
            "[store]",
            '[notify]\nurl = "https://hooks.example/secret"\n[store]',
            '.url: do not write the url itself here; write "env:VARIABLE" or "file:/path"',
        ),
    ],
    "credentials.second.": [  # of one project, which has one budget
        (
            "[store]",
            '[credentials.second]\napi = "youtube-v3-buckets"\nproject = "my-project"\n[store]',
            "api: credential 'main' of the same project 'my-project' has api 'youtube-v3'; give them the same "
            "api, or different projects",
        ),
        (
            "[store]",
            '[credentials.second]\napi = "youtube-v3"\nproject = "my-project"\n'
            'limits = [{ name = "mine", units = 9, window = "1h" }]\n[store]',
            "limits: credential 'main' of the same project 'my-project' already has limits; give its limits once",
        ),
    ],
    "inbound": [
        ("[ledger]", "inbound = 3\n[ledger]", ": a table is needed"),
        ("[store]", "[inbound]\nkeyfield = 'X'\n[store]", ".keyfield: unknown key; did you mean 'key_field'?"),
    ],
    "": [
        (
            "[store]",
            '[[credentials.main.limits]]\nname = "share"\nunits = 9\nwindow = "1h"\nper = "job"\n'
            '[jobs.low]\nfetch = "trending"\nleave = { share = 2 }\n[store]',
            "jobs.low.leave.share: this limit is per job: no other job uses its units; remove this key",
        ),
        (
            "stagger =",
            "fech = 1\nstaggered =",
            "jobs.trending: unknown keys: fech (did you mean 'fetch'?), staggered (did you mean 'stagger'?)",
        ),
        (
            "[store]",
            "[store]\nul = 1\nzz = 1",
            "store: unknown keys: ul (did you mean 'url'?), zz; known: url, retention, name, places",
        ),
        (
            "[jobs.trending]",
            '[credential.x]\n[jobs.trending]\npags = 1\nmax_items = "4"',
            "3 mistakes: (1) credential: unknown key; did you mean 'credentials'? (2) jobs.trending.pags: unknown key; "
            "did you mean 'pages'? (3) jobs.trending.max_items: a whole number is needed",
        ),
        (
            "[jobs.trending]",
            '[credentials.other]\n[jobs.trending]\napi = "youtube-v3"',
            "2 mistakes: (1) credentials.other.api: missing; the key is required "
            "(2) jobs.trending.api: unknown key; it belongs in [credentials.NAME]",
        ),
        (
            "pages = 4",
            'pages = 0\nmax_items = "4"',
            "2 mistakes: (1) jobs.trending.pages: 0 is not a whole number from 1 to 100000 "
            "(2) jobs.trending.max_items: a whole number is needed",
        ),
        ("[credentials.main]", '[credentials.""]', f"credentials.'': {NAME_RULE}"),
        ("[jobs.trending]", '[jobs."tr\\u0000"]', "jobs.'tr\\x00': 'tr\\x00': a name has 1 to 64 printable characters"),
    ],
}


def test_a_variable_that_is_set_may_look_like_a_key(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("googleCredentialsV3", "k")
    path = write(FULL.replace("env:YOUTUBE_API_KEY", "env:googleCredentialsV3"))
    assert load_settings(path).credentials["main"].key_ref == "env:googleCredentialsV3"


@pytest.mark.parametrize(
    ("text", "instead", "expected"),
    [(text, instead, place + says) for place, rows in MISTAKES.items() for text, instead, says in rows],
)
def test_a_mistake_is_one_line_that_names_the_place(write: Any, text: str, instead: str, expected: str) -> None:
    assert FULL.count(text) >= 1
    assert message(write(FULL.replace(text, instead, 1))) == expected


@pytest.mark.parametrize(
    ("written", "meant"), [('"my-project-1"', "my-project-1"), ('"123456789012"', "123456789012"), ("42", "42")]
)
def test_a_project_of_the_cloud_is_an_id_or_a_number(write: Any, written: str, meant: str) -> None:
    text = FULL.replace("[[cred", f'cloud_project = {written}\nauth = "service-account:~x.json"\n[[cred', 1)
    path = write(text.replace("~x", "x"))
    credential = load_settings(path).credentials["main"]
    assert (credential.cloud_project, credential.auth_ref) == (meant, f"service-account:{path.parent / 'x.json'}")
    assert load_settings(write(FULL)).credentials["main"].cloud_project is None


@pytest.mark.parametrize("host", ["emulator:8765", "[2001:db8::1]"])
def test_a_key_goes_to_no_other_machine_in_plain_text(write: Any, host: str) -> None:
    endpoint = f'endpoint = "http://{host}"\n'
    text = f'[credentials.main]\napi = "youtube-v3"\n{endpoint}'
    for secret in ('key = "env:KEY"', 'auth = "bearer:env:TOKEN"'):
        assert message(write(f"{text}{secret}\n")) == (
            "credentials.main.endpoint: the secret would go there in plain text; give an https:// address, or set "
            "insecure_endpoint = true"
        )
    for more in ('key = "env:KEY"\ninsecure_endpoint = true\n', ""):
        assert load_settings(write(text + more)).credentials["main"].endpoint == f"http://{host}"
    secure = f'{text}key = "env:KEY"\ninsecure_endpoint = true\n'.replace("http:", "https:")
    assert not load_settings(write(secure)).credentials["main"].insecure_endpoint, "a redirect may lead to http"


def test_with_two_credentials_a_job_has_to_say_whose_budget_it_spends(write: Any) -> None:
    text = FULL.replace('credential = "main"\n', "") + '[credentials.second]\napi = "youtube-v3"\n'
    assert message(write(text)) == "jobs.trending.credential: missing; name one of these: main, second"


def test_a_link_to_the_ledgers_file_is_that_file(write: Any, tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to("ledger.db")
    text = FULL.replace("redis://127.0.0.1:6379/0", "sqlite:///ledger.db").replace("videos.db", "link.db")
    assert message(write(text)) == "store.url: the ledger uses this file already; give the store a file of its own"


@pytest.mark.parametrize(
    "tables",
    [
        {"credentials": {"main": {"api": "youtube-v3", "limits": [{"window": {"calendar": "day", "zone": "a\0"}}]}}},
        {"credentials": {"main": {"api": "~nobody-here/x.toml"}}},
        {"credentials": {"main": {"api": "youtube-v3", "key": "file:~nobody-here/x"}}},
    ],
)
def test_a_zone_or_a_home_that_nobody_has_is_a_config_error(tables: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        settings_of(TomlTable(tables, "f", keys=ROOT, folder=Path("/nowhere")))
    assert str(error.value).isprintable(), "one line"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\n\n", "is empty; put the key into it"),
        (b"top secret", "has a space or an invalid character; store only the key in it"),
        (b"secret\x00", "is too long, or has an invalid character; store only the key in it"),
        ("sécret→".encode(), "has a space or an invalid character; store only the key in it"),
        (b"secret" * 9_000, "is too long, or has an invalid character; store only the key in it"),
    ],
)
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_key(f"file:{path}")
    assert str(error.value) == f"key file {path} {expected}"
    assert error.value.__cause__ is None


def test_the_example_explains_every_key() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    keys = {"ledger", "credentials", "jobs", "store", "url", "unavailable", "max_cost", "allowance", "machines"}
    keys |= {"retention", "main", "trending", "day", "search", "calendar", "zone", *CREDENTIAL, *LIMIT, *JOB}
    assert [key for key in keys if key not in text] == []
    assert max(map(len, text.splitlines())) <= 100


def test_every_commented_key_of_the_example_can_be_uncommented(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEDGER_PASSWORD", "SENTINEL_PASSWORD", "CLIENT_KEY_PASSWORD"):
        monkeypatch.setenv(name, "secret")
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    switched_on = []
    for line in lines:
        inner = line.removeprefix("# ")
        is_toml = inner != line and (inner.startswith("[") or inner.split(" = ")[0].isidentifier())
        switched_on.append(inner if is_toml else line)
    text = "\n".join(switched_on)
    assert tomllib.loads(text)["credentials"]["main"]["endpoint"]
    assert tomllib.loads(text)["credentials"]["main"]["auth"] == "adc"
    settings = load_settings(write(text))
    assert settings.ledger.url.startswith("redis://")
    assert [x.name for x in settings.credentials["main"].limits] == ["day", "pacific-day", "search"]
    assert settings.jobs["concerts"].options == {"words": "live concert", "order": "date"}


def test_a_session_opens_its_ledger_when_it_is_asked_for_and_its_charges_carry_its_run(state_dir: Path) -> None:
    with quota.open() as session:
        assert not state_dir.exists()
        assert session.budget("demo") is session.budget()
        assert all(session.budget().charge("videos.list").admitted for _ in range(2))
        assert state_dir.stat().st_mode & 0o777 == 0o700
        tokens = [entry.key for entry in charges_at(session.ledger, "demo")]
        assert (len(session.run), len(set(tokens))) == (8, 2)
        assert [token[:8] for token in tokens] == [session.run] * 2
    session.close()


@pytest.mark.parametrize("nothing", ["", [], {}, 0, False, b""], ids=repr)
def test_an_empty_path_selects_no_other_configuration(
    write: Any, monkeypatch: pytest.MonkeyPatch, nothing: Any
) -> None:
    monkeypatch.chdir(write(FULL).parent)
    with pytest.raises(UsageError, match="is not the path of a file"):
        quota.open(nothing)
    monkeypatch.setenv("QUOTA_CONFIG", "")  # as if it were not set
    quota.open().close()


def test_two_credentials_and_none_named_is_a_question(write: Any) -> None:
    path = write('[credentials.a]\napi = "youtube-v3"\n[credentials.b]\napi = "youtube-v3"\n')
    with quota.open(path) as session:
        with pytest.raises(UsageError) as error:
            session.budget()
        assert str(error.value) == f"which credential? {path} has a, b; name one (--credential)"
        with pytest.raises(UsageError) as error:
            session.budget("c" * 3)
        assert str(error.value) == f"{path} has no credential 'ccc'; known: a, b"


def test_each_option_of_a_built_in_job_has_a_hint() -> None:
    built_in = [getattr(fetches, name) for name in BUILT_IN_FETCHES]
    options = {option for fetch in built_in for option in list(signature(fetch).parameters)[3:]}
    assert options - {"store", "pages"} == {*OPTIONS}
