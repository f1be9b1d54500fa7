"""Variables `QUOTA__...` say any key of the configuration; `quota check --show` says which value came from where."""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner

import quota
from fuzz.generate import text
from fuzz.inputs import check_line
from quota.cli.configuration import check_
from quota.errors import ConfigError, UsageError
from quota.inbound.configured import load_rules
from quota.settings.load import find_config, load_settings
from quota.settings.model import state_folder
from quota.settings.origins import in_force
from quota.settings.tables import ROOT
from quota.terms.limits import DAY_MS, MINUTE_MS, Calendar, Sliding

FILE = """\
# A comment
[credentials.my-key]
api = "youtube-v3"
limits = [
  { name = "day", quota = 10_000, headroom = 500, window = "24h" },
]
[jobs."trending now"]
fetch = "trending"
leave = { day = 5 }
"""


@pytest.fixture
def path(state_dir: Path, tmp_path: Path) -> Path:
    path = tmp_path / "quota.toml"
    path.write_text(FILE, encoding="utf-8")
    return path


def named(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(f"QUOTA__{name}", value)


def test_a_variable_may_set_each_key(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named(
        monkeypatch,
        LEDGER__URL="redis://ledger:6379/0",
        LEDGER__UNAVAILABLE='{ max_cost = 1, allowance = 50 }',
        LEDGER__UNAVAILABLE__MACHINES="3",
        CREDENTIALS__MY_KEY__KEY="file:/run/key",
        CREDENTIALS__MY_KEY__LIMITS__DAY__QUOTA="1_000_000",
        CREDENTIALS__MY_KEY__LIMITS__DAY__HEADROOM="5%",
        CREDENTIALS__MY_KEY__LIMITS__MINUTE__UNITS="60",
        CREDENTIALS__MY_KEY__LIMITS__MINUTE__WINDOW="60s",
        CREDENTIALS__MY_KEY__LIMITS__UTC__UNITS="70",
        CREDENTIALS__MY_KEY__LIMITS__UTC__WINDOW__CALENDAR="day",
        CREDENTIALS__MY_KEY__LIMITS__UTC__WINDOW__ZONE="UTC",
        JOBS__TRENDING_NOW__PAGES="7",
        JOBS__TRENDING_NOW__REGIONS='["DE", "FR"]',
        JOBS__TRENDING_NOW__LEAVE__DAY="9",
        JOBS__TRENDING_NOW__OPTIONS__CATEGORY="10",
        STORE__RETENTION="2d",
        INBOUND__DEFAULT__LIMIT="5",
        INBOUND__DEFAULT__WINDOW="60s",
    )  # fmt: skip
    settings = load_settings(path)
    main, job = settings.credentials["my-key"], settings.jobs["trending now"]
    assert settings.ledger.url == "redis://ledger:6379/0"
    assert settings.ledger.unavailable == (1, 50, 3)
    assert main.key_ref == "file:/run/key"
    assert [(limit.name, limit.limit_units, limit.view.window) for limit in main.limits] == [
        ("day", 950_000, Sliding(DAY_MS)),
        ("minute", 60, Sliding(MINUTE_MS)),
        ("utc", 70, Calendar("day", "UTC")),
    ]
    assert (job.pages, job.regions, job.leave, job.options) == (7, ("DE", "FR"), {"day": 9}, {"category": 10})
    assert settings.store.retention_ms == 2 * DAY_MS
    assert [rule.limits for rule in load_rules(path).rules] == [((5, 60_000, 0),)]


def test_without_a_file_the_variables_alone_are_a_configuration(
    state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("QUOTA_CONFIG", raising=False)
    named(monkeypatch, CREDENTIALS__MAIN__API="youtube-v3")
    assert list(load_settings().credentials) == ["main"]
    named(monkeypatch, INBOUND__DEFAULT__LIMIT="5", INBOUND__DEFAULT__WINDOW="1s", INBOUND__URL="sqlite:///in.db")
    assert load_rules().url == f"sqlite:///{state_dir / 'in.db'}", "a path starts at the state folder"


NO_TOML = 'not a value of TOML; write for example 500, true or ["DE", "FR"]'


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("LEDGER__ULR", "x", "no such key; did you mean 'QUOTA__LEDGER__URL'?"),
        ("JOBS__TRENDING_NOW__PAGE", "1", "no such key; did you mean 'QUOTA__JOBS__TRENDING_NOW__PAGES'?"),
        ("LEDGER__URL__X", "1", "no such key; none is known"),
        ("STORE__RETENTION", "9999d", "'9999d' is longer than 3650 days"),
        *(("JOBS__TRENDING_NOW__PAGES", value, NO_TOML) for value in ("a lot", "1\npages = 2")),
        ("CREDENTIALS__MY_KEY__KEY", "AIza", 'do not write the key itself here; write "env:VARIABLE" or "file:/path"'),
        (
            "CREDENTIALS__MY_KEY__LIMITS",
            '[{ name = "x", units = 1, windw = "1h" }]',
            "credentials.my-key.limits[0].windw: unknown key; did you mean 'window'?",
        ),
    ],
)
def test_a_mistake_names_the_variable(
    path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str
) -> None:
    named(monkeypatch, **{variable: value})
    with pytest.raises(ConfigError) as error:
        load_settings(path)
    assert str(error.value) == f"environment variable QUOTA__{variable}: {says}"


def test_a_variable_that_may_mean_two_names_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text('[credentials.a-b]\napi = "github"\n[credentials.a_b]\napi = "github"\n')
    named(monkeypatch, CREDENTIALS__A_B__KEY="env:X")
    with pytest.raises(ConfigError, match="QUOTA__CREDENTIALS__A_B__KEY may mean a-b, a_b; rename one of them"):
        load_settings(path)


def test_two_variables_of_one_key_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, LEDGER__URL="memory:", ledger__url="sqlite:///x.db")
    with pytest.raises(ConfigError, match="variables QUOTA__LEDGER__URL and QUOTA__ledger__url set the same key; remo"):
        load_settings(path)


def test_a_table_that_a_variable_began_is_named_with_the_variable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, JOBS__TRENDIN__PAGES="2")
    with pytest.raises(ConfigError, match=r"missing.*; QUOTA__JOBS__TRENDIN__PAGES began this table, which the file"):
        load_settings(path)


def test_any_variables_are_read_or_refused_in_one_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*ROOT, "url", "my_key", "main", "limits", "day", "window", "zone", "leave", "options", "tables", "x", ""]
    for number in range(int(os.environ.get("QUOTA_TEST_EXAMPLES", "200"))):
        r = Random(f"variables {number}")
        with monkeypatch.context() as patch:
            for _ in range(r.choice((1, 1, 3))):
                name = "__".join(r.choice(words).upper() for _ in range(r.randrange(1, 6)))
                value = r.choice(("1", "true", "[1]", "{ a = 1 }", '[{ name = "x" }]', text(r, surrogates=False)))
                patch.setenv(f"QUOTA__{name}", value.replace("\0", ""))
            try:
                settings = load_settings(path)
            except ConfigError as error:
                check_line(str(error))
            else:
                assert in_force(path)[0] == settings


MISTYPED = (
    "hunter2@h/0 :hunter2192.0.2.1:6379/0 u:hunter2:192.0.2.1:6379/0 hunter2/x h/hunter2 h/0#hunter2 "
    "h/0?pasword=hunter2 h/0?auth=hunter2 h/0?Password=hunter2"
)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        *((table, f"redis://{url}") for table in ("LEDGER__URL", "INBOUND__URL") for url in MISTYPED.split()),
        *(("LEDGER__URL", f"redis://:{word}@h/0") for word in ("a hunter2", "a@hunter2")),
        ("LEDGER__URL", "redis+sentinel://:a'hunter2@h:26379/mymaster"),
        ("JOBS__TRENDING_NOW__OPTIONS", '{ a = "Bearer hunter2hunter2", b = [{ c = "Bearer hunter2hunter2" }] }'),
        ("NOTIFY__COMMAND", '["curl", "-H", "Authorization: Bearer hunter2hunter2"]'),
        ("LEDGER", '{ url = "redis://h/0", password = "hunter2" }'),
        ("LEDGER__PASSWORD", "hunter2"),
        ("CREDENTIALS__MY_KEY__KEY", "hunter2"),
        ("NOTIFY__URL", "https://hooks.example.org/hunter2"),
        ("INBOUND__KEYS", "hunter2"),
        ("JOBS__TRENDING_NOW__PAGES", "hunter2"),
    ],
)
def test_a_secret_in_a_variable_is_shown_by_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    path.chmod(0o644)
    monkeypatch.setattr(os, "environ", {**os.environ, f"QUOTA__{variable}": value, "QUOTA__INBOUND__A__LIMIT": "1",
                                        "QUOTA__INBOUND__A__WINDOW": "1s"})  # fmt: skip
    for option in ((), ("--show",), ("--show", "--json")):
        result = CliRunner().invoke(check_, [*option, "--config", str(path)])
        text = f"{result.output}{result.exception!r}"
        assert "hunter2" not in text
        assert "stands here" not in text
        assert result.exception is None or isinstance(result.exception, ConfigError | SystemExit), text


@pytest.mark.parametrize("table", ["LEDGER", "INBOUND"])
def test_check_names_the_variable_that_holds_a_mistake(path: Path, monkeypatch: pytest.MonkeyPatch, table: str) -> None:
    named(monkeypatch, **{f"{table}__URL": "redis://h/0#x"}, INBOUND__A__LIMIT="1", INBOUND__A__WINDOW="1s")
    result = CliRunner().invoke(check_, ["--config", str(path)])
    assert f"error: environment variable QUOTA__{table}__URL: " in result.output


def test_each_value_is_shown_with_its_origin(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, JOBS__TRENDING_NOW__PAGES="7", LEDGER__URL="redis://u:secret@h/0?ssl_password=geheim")
    rows = {row.key: row for row in in_force(path)[1]}
    assert rows["credentials.my-key.api"][1:] == ("youtube-v3", "file", None)
    assert rows["credentials.my-key.limits[0].quota"][1:] == (10_000, "file", None)
    assert rows["credentials.my-key.project"][1:] == ("my-key", "default", None)
    assert rows["jobs.'trending now'.pages"][1:] == (7, "environment", "QUOTA__JOBS__TRENDING_NOW__PAGES")
    assert rows["jobs.'trending now'.leave.day"][1:] == (5, "file", None)
    assert rows["jobs.'trending now'.max_items"][1:] == (10_000, "default", None)
    assert rows["store.retention"][1:] == ("30d", "default", None)
    assert "secret" not in rows["ledger.url"].value + str(rows["ledger.url"])
    assert "geheim" not in rows["ledger.url"].value


def test_limits_that_nobody_wrote_are_shown_as_the_cost_books(state_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "quota.toml"
    path.write_text('[credentials.a]\napi = "youtube-v3"\n', encoding="utf-8")
    rows = {row.key: str(row) for row in in_force(path)[1]}
    assert rows["credentials.a.limits[0].headroom"].endswith(" = 500  # cost book youtube-v3")
    assert rows["credentials.a.limits[1].window"].endswith('= "day@America/Los_Angeles"  # cost book youtube-v3')


def test_the_command_prints_them_for_people_and_for_programs(path: Path) -> None:
    lines = CliRunner().invoke(check_, ["--show", "--config", str(path)]).output.splitlines()
    assert lines[0] == f"# {path}"
    assert "jobs.'trending now'.fetch = \"trending\"  # file" in lines
    data = json.loads(CliRunner().invoke(check_, ["--show", "--json", "--config", str(path)]).output)
    assert {"key": "store.retention", "value": "30d", "from": "default", "detail": None} in data["values"]
    assert len(data["values"]) == len(lines) - 1


MAIN: dict[str, Any] = {"api": "youtube-v3", "limits": [{"name": "day", "units": 5, "window": "24h"}]}


def test_a_program_may_give_the_settings_itself(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, CREDENTIALS__MAIN__LIMITS__DAY__UNITS="7")
    with quota.open(settings={"ledger": {"url": "sqlite:///l.db"}, "credentials": {"main": MAIN}}) as session:
        assert session.budget().limits[0].limit_units == 5
        assert session.settings.ledger.url == f"sqlite:///{Path.cwd()}/l.db"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], 'settings: give a dict, as {"credentials": {"main": {"api": "youtube-v3"}}}'),
        ({"credentials": {"main": {"api": None}}}, "settings: credentials.main.api: a non-empty "
         "string is needed"),
        ({"credentials": {"main": MAIN}, 5: 1}, "settings: 5: unknown key; known: ledger, credentials, jobs, store, "
         "textfile, notify, inbound"),
    ],
)  # fmt: skip
def test_settings_given_in_code_are_checked_like_a_file(state_dir: Path, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        quota.open(settings=settings)
    assert str(error.value) == message


def test_settings_beside_a_path_or_that_hold_themselves_are_refused(state_dir: Path) -> None:
    endless: dict[str, Any] = {}
    endless["credentials"] = endless
    with pytest.raises(ConfigError, match="nested too deep"):
        quota.open(settings=endless)
    with pytest.raises(UsageError, match="not both"):
        quota.open("quota.toml", settings={})


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's home, and the working folder, with no variable set but HOME."""
    for name in ("QUOTA_CONFIG", "QUOTA_STATE_DIR", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("named", "folder"),
    [
        ({}, ".local/state/quota-ledger"),
        ({"XDG_STATE_HOME": "relative"}, ".local/state/quota-ledger"),
        ({"XDG_STATE_HOME": "/x/"}, "/x/quota-ledger"),
        ({"XDG_STATE_HOME": "/x", "QUOTA_STATE_DIR": "/named"}, "/named"),
        ({"QUOTA_STATE_DIR": "relative"}, "relative"),
        ({"QUOTA_STATE_DIR": "~/named"}, "named"),  # as in a crontab, where no shell expands it
    ],
)
def test_the_state_is_where_the_user_says_else_in_the_home(
    home: Path, monkeypatch: pytest.MonkeyPatch, named: dict[str, str], folder: str
) -> None:
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    assert state_folder() == home / folder


@pytest.mark.parametrize(
    ("xdg", "folder"), [(None, ".config"), ("relative", ".config"), ("/", None), ("{home}/x", "x")]
)
def test_the_configuration_is_where_the_user_says_else_in_the_home(
    home: Path, monkeypatch: pytest.MonkeyPatch, xdg: str | None, folder: str | None
) -> None:
    if xdg is not None:
        monkeypatch.setenv("XDG_CONFIG_HOME", xdg.format(home=home))
    for place in (".config", "x"):
        (home / place / "quota-ledger").mkdir(parents=True)
        (home / place / "quota-ledger" / "quota.toml").touch()
    assert find_config() == (None if folder is None else home / folder / "quota-ledger" / "quota.toml")


def test_a_user_without_a_home_has_no_configuration_there_and_must_name_the_state(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 987_654_321)
    assert find_config() is None
    with pytest.raises(ConfigError, match="this user has no home for a state folder; set QUOTA_STATE_DIR"):
        state_folder()


def test_a_relative_folder_in_one_that_is_gone_is_one_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "gone").mkdir()
    monkeypatch.chdir(home / "gone")
    (home / "gone").rmdir()
    monkeypatch.setenv("QUOTA_STATE_DIR", "state")
    with pytest.raises(ConfigError, match="QUOTA_STATE_DIR is relative, and the current folder is gone; set"):
        state_folder()
