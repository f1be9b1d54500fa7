"""`quota doctor`: each finding is provoked on real parts, and is gone after its remedy."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

import quota
from quota.cli.doctor import PEEKS, examine
from quota.common.clock import host_clock
from quota.common.findings import examine_folder, file_system, is_mounted_alone
from quota.dashboard.app import Dashboard
from quota.inbound.redis_storage import COMMANDS as INBOUND_COMMANDS
from quota.ledger.factory import open_ledger
from quota.ledger.redis_needs import COMMANDS, OF_A_SENTINEL, acl_line
from quota.reports.metrics import exposition
from quota.session import ledger_trouble
from quota.terms.limits import HOUR_MS
from support.commands import Quota, one_line
from support.emulator import Emulator
from support.page import overview
from support.plain_http import Answer, PlainServer
from support.servers import RedisServer
from support.users import not_root

# It is to say nothing of the file system.
pytestmark = pytest.mark.on_disk

MAIN = """
[credentials.main]
api = "youtube-v3"
project = "research"
key = "env:KEY"
"""


def findings(command: Quota, *args: str, **env: str) -> dict[str, dict[str, str]]:
    """The first finding about each location."""
    done = command("doctor", "--json", *args, **{"KEY": "k", **env})
    rows = json.loads(done.stdout)["findings"]
    assert done.returncode == any(row["level"] == "error" for row in rows), done.stderr
    ranks = [("error", "warning", "ok").index(row["level"]) for row in rows]
    assert ranks == sorted(ranks)
    assert all(row["remedy"] for row in rows if row["level"] != "ok")
    return {row["location"]: row for row in reversed(rows)}


def expect(command: Quota, location: str, level: str, *words: str, args: tuple[str, ...] = (), **env: str) -> None:
    """The first finding about `location` has this level, and these words in its message or its remedy."""
    row = findings(command, *args, **env)[location]
    text = f"{row['message']} -> {row['remedy']}"
    assert (row["level"], [word for word in words if word not in text]) == (level, []), text


@pytest.fixture
def command(quota: Quota) -> Quota:
    return quota


@pytest.fixture
def server() -> Iterator[RedisServer]:
    own = RedisServer("--appendonly", "yes")
    yield own
    own.close()


def test_a_sound_machine_is_all_ok(command: Quota, server: RedisServer) -> None:
    command.configure(f'[ledger]\nurl = "{server.url}"\n' + MAIN)
    done = command("doctor", KEY="k")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("0 errors, 0 warnings, ")
    assert "error " not in done.stdout.replace("0 errors", "")
    assert f"{server.url} answers in " in " ".join(done.stdout.split())
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_doctor_makes_no_ledger_and_no_store(command: Quota) -> None:
    command.configure('[ledger]\nurl = "sqlite:///a/ledger.db"\n[store]\nurl = "sqlite:///videos.db"\n' + MAIN)
    assert command("doctor", KEY="k").returncode == 0
    assert sorted(path.name for path in command.folder.iterdir()) == ["quota.toml"]


def test_the_configuration_is_left_to_check(command: Quota) -> None:
    expect(command, "configuration", "warning", "no quota.toml was found")
    assert "warning: configuration: no quota.toml was found; run `quota init`" in command("check").stdout
    command.configure(MAIN.replace("research", "my-project"))
    expect(command, "configuration", "warning", "1 warning -> run `quota check`")
    command.configure(MAIN)
    expect(command, "configuration", "ok")
    command.configure('[inbound.all]\nlimit = 9\nwindow = "1m"\n')
    assert command("doctor").returncode == 0, "inbound limits alone need no credential"
    assert "`quota doctor`" in " ".join(command("check", "--help").stdout.split())
    assert "`quota check`" in command("doctor", "--help").stdout


def test_a_key_that_cannot_be_read_is_an_error(command: Quota) -> None:
    command.configure(MAIN)
    done = command("doctor")
    assert (done.returncode, "environment variable KEY is not set" in done.stdout) == (1, True)
    expect(command, "key of main", "ok", KEY="the-secret")
    assert "the-secret" not in command("doctor", KEY="the-secret").stdout


def test_doctor_warns_of_a_relative_state_folder_and_of_one_in_memory(command: Quota) -> None:
    command.configure(MAIN)
    says = "QUOTA_STATE_DIR=here is relative: a command that starts in another folder"
    remedy = f"-> QUOTA_STATE_DIR={command.folder}/here"
    expect(command, "state folder", "warning", says, remedy, QUOTA_STATE_DIR="here")
    in_memory = "/dev/shm"  # noqa: S108
    if file_system(in_memory) != "tmpfs":
        pytest.skip(f"{in_memory} is no tmpfs here")
    with tempfile.TemporaryDirectory(dir=in_memory) as folder:
        says = "is on tmpfs: a restart forgets what this machine saw"
        expect(command, "state folder", "warning", says, QUOTA_STATE_DIR=folder)


def test_doctor_warns_of_a_network_file_system(tmp_path: Path) -> None:
    mounts, folder = tmp_path / "mountinfo", tmp_path / "a folder with\N{NO-BREAK SPACE}two kinds of spaces"
    folder.mkdir()
    quoted = str(folder).replace(" ", r"\040")
    lines = [
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw",
        f"23 22 0:40 / {quoted} rw - tmpfs tmpfs rw",
        f"24 22 0:41 / {quoted} rw shared:9 master:2 - nfs4 server:/export rw",
        "25 22 0:42 / /proc rw - proc proc rw",
        "no mount",
    ]
    mounts.write_text("\n".join(lines), encoding="utf-8")
    (finding,) = examine_folder("store", folder, "what was fetched", str(mounts))
    assert finding.level == "warning"
    assert "is on nfs4, where locks may not hold: what was fetched may be damaged" in finding.message
    for beside in (tmp_path / "a folder and more", tmp_path, folder.parent / "not there" / "yet"):
        assert [each.level for each in examine_folder("store", beside, "it", str(mounts))] == ["ok"]
    assert file_system(str(folder), str(tmp_path / "nowhere")) == ""
    assert [is_mounted_alone(str(path), str(mounts)) for path in (folder, folder / "ledger.db")] == [True, False]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
def test_doctor_rejects_a_store_folder_of_another_owner(command: Quota) -> None:
    command.configure(MAIN + '[store]\nurl = "sqlite:///stored/videos.db"\n')
    stored = command.folder / "stored"
    stored.mkdir()
    os.chown(stored, 1, 1)
    says = "belongs to daemon, and this is root: nothing in it is used"
    remedy = "-> make it this user's alone (chown, chmod), or name another folder"
    expect(command, "store", "error", says, remedy)
    assert command("doctor").stdout.count("belongs to daemon") == 1
    os.chown(stored, 0, 0)
    expect(command, "store", "ok")


def test_doctor_reports_a_missing_metrics_folder(command: Quota) -> None:
    command.configure('textfile = "metrics"\n' + MAIN)
    expect(command, "textfile folder", "error", "-> make it, or correct the path")
    assert "warning: textfile: " in command("check", KEY="k").stdout
    (command.folder / "metrics").mkdir()
    expect(command, "textfile folder", "ok")


def test_doctor_checks_where_alerts_go(command: Quota) -> None:
    job = '[jobs.t]\nfetch = "trending"\nregions = ["US"]\nping = "env:PING"\n'
    command.configure(MAIN + '[notify]\ncommand = ["no-such-program"]\nurl = "env:HOOK"\n' + job)
    expect(command, "notify command", "error")
    missing = "warning: notify.command: no-such-program is not a program; correct the path, or chmod +x it\n"
    assert missing in command("check", KEY="k").stdout
    expect(command, "notify url", "error", "-> put the address into it, or write file:/path instead of env:HOOK")
    expect(command, "ping of t", "error", "-> put the address into it, or write file:/path instead of env:PING")
    for wrong in ("hooks.example", "https://a.example:b-s3cret/", "https://a.example/ b-s3cret"):
        done = command("doctor", KEY="k", PING=wrong, HOOK="https://b.example/c")
        assert (done.returncode, "s3cret" in done.stdout + done.stderr) == (1, False), wrong
    command.configure(MAIN + '[notify]\ncommand = ["sh", "-c", "cat"]\nurl = "env:HOOK"\n' + job)
    address = "https://user:s3cret@a.example:8443/b"
    results = findings(command, PING=address, HOOK=address)
    assert {results[location]["level"] for location in ("notify command", "notify url", "ping of t")} == {"ok"}


def test_doctor_warns_of_charges_dated_ahead(command: Quota, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUOTA_STATE_DIR", str(command.folder / "state"))
    path = command.configure('[ledger]\nurl = "sqlite:///ledger.db"\n' + MAIN)
    with quota.open(path, clock=lambda: host_clock() + 3 * HOUR_MS) as session:
        session.budget().charge("search.list")
    says = "a clock was wrong and dated 1 charge of 100 units ahead, the newest 20"
    expect(command, "project research", "warning", says)
    assert command("ledger", "repair", "--yes").returncode == 0
    assert "project research" not in command("doctor", KEY="k").stdout


def test_doctor_warns_of_a_nearly_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The free space is given: a disk can only be filled by root."""
    usage = namedtuple("usage", "total used free")
    for free, level in ((99_999_999, "warning"), (9_999_999, "error"), (100_000_000, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage(10**12, 0, free))
        assert [each.level for each in examine_folder("store", tmp_path, "it")] == [level]


def test_doctor_rejects_a_dangling_link_as_ledger_or_state_folder(command: Quota) -> None:
    """As where its disk is not mounted. The first charge makes neither."""
    command.configure('[ledger]\nurl = "sqlite:///ledger.db"\n' + MAIN)
    (command.folder / "disk").mkdir()
    (command.folder / "ledger.db").symlink_to(command.folder / "disk" / "ledger.db")
    expect(command, "ledger", "error", "accepts no charges: it is a link to nothing ->")
    assert "ledger.db cannot be opened: it is a link to nothing; make what it names" in command("check", KEY="k").stdout
    assert "it is a link to nothing" in one_line(command("charge", "search.list", KEY="k"), 69)
    (command.folder / "state").symlink_to(command.folder / "unmounted/quota")
    expect(command, "state folder", "error", "/state is a link to nothing -> make what it names, or correct the path")


def test_doctor_rejects_a_read_only_ledger(command: Quota, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers every question and admits no charge, so all else looks well."""
    for name, value in (command.env | {"KEY": "k"}).items():
        monkeypatch.setenv(name, value)
    path = command.configure('[ledger]\nurl = "sqlite:///ledger.db"\n' + MAIN)
    assert command("charge", "search.list", KEY="k").returncode == 0
    (command.folder / "ledger.db").chmod(0o400)
    with not_root(), quota.open(path) as session:
        assert session.budget().charge("search.list").reason == "ledger-unavailable"
        (finding,) = (each for each in examine(session) if each.level == "error" and "ledger" in each.location)
    why = "accepts no charges: this user may not write to it"
    assert (finding.location, finding.message[-len(why) :]) == ("ledger", why)
    (command.folder / "ledger.db").chmod(0o600)
    with not_root(), quota.open(path) as session:  # SQLite gave the files beside it the same mode, and they stay
        why = "is read-only; give this user write access to the file, its -wal and -shm"
        assert why in session.budget().charge("search.list").detail
        (finding,) = (each for each in examine(session) if each.level == "error" and "ledger" in each.location)
        assert finding.message.endswith(f"accepts no charges: this user may not write to {path.parent}/ledger.db-shm")
        assert why in session.budget().peek("search.list").detail
    for beside in command.folder.glob("ledger.db-*"):
        beside.chmod(0o600)
    with not_root(), quota.open(path) as session:
        assert session.budget().charge("search.list").admitted


def test_doctor_reports_a_silent_server(command: Quota, server: RedisServer) -> None:
    command.configure(f'[ledger]\nurl = "{server.url}"\n' + MAIN)
    server.kill()
    other = f'[ledger]\nurl = "{server.url}"\nunavailable = {{ max_cost = 1, allowance = 9 }}\n'
    (command.folder / "other.toml").write_text(other + MAIN, encoding="utf-8")
    assert command("charge", "videos.list", "--config", "other.toml").returncode == 0
    expect(command, "project research", "warning", f"{command.folder}/other.toml owes 1 unit that it")
    expect(command, "ledger", "error", "cannot be reached")
    server.start()
    expect(command, "ledger", "ok", f"(median of {PEEKS} peeks)")


def test_doctor_names_charges_that_were_lost_and_put_back(command: Quota, server: RedisServer) -> None:
    """Also in a project that is not the first."""
    other = MAIN.replace("main", "other").replace("research", "second")
    command.configure(f'[ledger]\nurl = "{server.url}"\n' + MAIN + other)
    assert command("charge", "videos.list", "--credential", "other").returncode == 0
    says = "the ledger had lost 1 charge of 1 unit, put back at 20"
    for _ in range(2):
        with redis.Redis(port=server.port) as client:
            client.flushall()
        expect(command, "project second", "warning", says, "the budget needs nothing", "FLUSHALL")
        says = "the ledger had lost 2 charges of 2 units in 2 losses, the last put back at 20"
    expect(command, "server emptied", "ok", "2 times since 20")
    (notes,) = command.folder.glob("state/journals/second-*/*/20*")
    notes.unlink()
    notes.mkdir()
    expect(command, "project second", "warning", "2 losses", "could not note may be missing")


def test_doctor_warns_of_a_removed_ledger_file(command: Quota) -> None:
    command.configure(MAIN)
    assert command("charge", "videos.list").returncode == 0
    (command.folder / "state" / "ledger.db").unlink()
    says = "is gone, with 1 charge that this machine saw; the next call puts them back"
    expect(command, "ledger", "warning", says)


@pytest.mark.parametrize("together", [False, True])
def test_doctor_warns_of_a_project_that_two_configurations_count_apart(
    command: Quota, server: RedisServer, together: bool
) -> None:
    """Each would grant the whole budget."""
    ledgers = [server.url, server.url if together else server.url.removesuffix("0") + "1"]
    for name, url in zip(("other", "quota"), ledgers, strict=True):
        (command.folder / f"{name}.toml").write_text(f'[ledger]\nurl = "{url}"\n{MAIN}')
        assert command("charge", "videos.list", "--config", f"{name}.toml").returncode == 0
    if together:  # also after a move, which gives the log a new epoch
        moved = server.url.removesuffix("0") + "2"
        assert command("ledger", "move", server.url, moved, "--yes", "--config", "quota.toml").returncode == 0
        (command.folder / "quota.toml").write_text(f'[ledger]\nurl = "{moved}"\n{MAIN}')
    of_project = findings(command).get("project research", {"message": ""})
    assert ("charged it in another ledger at 20" in of_project["message"]) is not together


@pytest.mark.parametrize("name", ["lock", "notes"])
def test_doctor_warns_of_a_journal_that_cannot_be_used(command: Quota, name: str) -> None:
    command.configure(MAIN)
    assert command("charge", "videos.list").returncode == 0
    (own,) = command.folder.glob("state/journals/*/*/")
    (own / name).unlink(missing_ok=True)
    (own / name).mkdir()
    expect(command, "journal of research", "warning", "is a folder")
    (command.folder / "state" / "journals").rename(command.folder / "moved")
    (command.folder / "state" / "journals").symlink_to("nowhere")
    expect(command, "journal of research", "warning", "journals is a link to nothing; entries are kept in memory")
    (command.folder / "state" / "journals").unlink()
    (command.folder / "state" / "journals").touch()
    expect(command, "journal of research", "warning", "Not a directory; entries are kept in memory")


def test_doctor_warns_of_a_server_that_forgets_and_evicts(command: Quota) -> None:
    own = RedisServer("--maxmemory-policy", "allkeys-lru")
    try:
        command.configure(f'[ledger]\nurl = "{own.url}"\n' + MAIN)
        expect(command, "server persistence", "warning", "-> set appendonly yes")
        expect(command, "server eviction", "error", "-> set it to noeviction")
        with redis.Redis(port=own.port) as client:
            client.config_set("appendonly", "yes")
            client.config_set("maxmemory-policy", "volatile-ttl")
            expect(command, "server eviction", "warning")
            client.config_set("maxmemory-policy", "noeviction")
        results = findings(command)
        assert (results["server persistence"]["level"], results["server eviction"]["level"]) == ("ok", "ok")
        assert results["server version"]["message"].startswith(("Redis 6.2", "Redis 7.", "Valkey"))
    finally:
        own.close()


def test_doctor_reports_a_server_that_takes_no_charge(command: Quota, server: RedisServer) -> None:
    """It answers every question, so all else looks well."""
    allowance = "unavailable = { max_cost = 1, allowance = 50 }\n"
    text = f'[ledger]\nurl = "{server.url}"\n{allowance}' + MAIN + '\n[jobs.t]\nfetch = "trending"\n'
    command.configure(text.replace('"research"', '"others"'))
    assert command("charge", "search.list", KEY="k").returncode == 0
    (two := command.folder / "two.toml").write_text(f'{text}[credentials.others]\napi = "gmail-v1"\nkey = "env:KEY"')
    path = command.configure(text)
    assert command("charge", "search.list", KEY="k").returncode == 0
    with redis.Redis(port=server.port) as client:
        for break_it, mend_it, message, remedy in (
            (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE"), "is a replica", "name the primary"),
            (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0"), "is out of memory", "raise its"),
        ):
            client.execute_command(*break_it)
            expect(command, "server writes", "error", message, f"-> {remedy}")
            for asked in ("charge", "peek"):
                assert message in one_line(command(asked, "search.list", KEY="k"), 69)
            assert message in command("check", KEY="k").stdout
            assert message in one_line(command("run", "t", "--dry-run", KEY="k"), 69)
            for seed in "23":  # the order in which projects are asked
                assert command("check", "--config", str(two), KEY="k", PYTHONHASHSEED=seed).returncode == 78
            assert "OPEN: this machine's allowance, for calls of at most 1 unit: 0 of" in command("status").stdout
            with quota.open(path) as session:
                assert ledger_trouble(session) == "the ledger accepts no charges"
                dashboard = Dashboard(session)
                assert "The ledger accepts no charges" in overview(dashboard)
                assert dashboard.checks()[0].status == "warn"
                assert 'quota_ledger_up{project="research"} 0' in exposition(dashboard.samples())
            client.execute_command(*mend_it)
            assert "server writes" not in command("doctor", KEY="k").stdout
            assert command("charge", "search.list", KEY="k").returncode == 0
        client.execute_command(*break_it)
        assert command("charge", "videos.list").returncode == 0
        for report in ("spend", "log"):
            assert "not listed: 1 unit that this machine drew without the ledger" in command(report).stdout
        client.execute_command(*mend_it)


def test_each_right_that_is_missing_is_named(tmp_path: Path, server: RedisServer) -> None:
    """And none of the others: each command of the scripts is taken away once."""
    path = tmp_path / "quota.toml"
    path.write_text(f'[ledger]\nurl = "{server.url.replace("://", "://some:any@")}"\n' + MAIN)
    with redis.Redis(port=server.port) as client:
        for command in sorted({*COMMANDS} - {"eval", "evalsha", "info"}):
            granted = ["+@all", f"-{command}"]
            client.acl_setuser("some", enabled=True, nopass=True, keys=["quota:*"], commands=granted)
            with quota.open(path) as session:
                findings = session.ledger.examine("research")
            rights = [(each.level, each.message) for each in findings if each.location == "server rights"]
            assert rights == [("error", f"this user may not run {command.upper()}: calls are refused")]
        client.acl_setuser("some", enabled=True, nopass=True, keys=["quota:*"], commands=["+@all"])
    with quota.open(path) as session:
        levels = {each.location: each.level for each in session.ledger.examine("research")}
    assert levels["server rights"] == "ok"


def test_the_printed_rights_are_enough_for_a_user(command: Quota, server: RedisServer) -> None:
    """The messages alone lead from the first error to a charge."""
    with redis.Redis(port=server.port) as client:
        client.execute_command("ACL", "SETUSER", "app", "on", ">secret", "~quota:*", "+eval", "+evalsha")
    command.configure(f'[ledger]\nurl = "{server.url.replace("://", "://app:secret@")}"\n' + MAIN)
    refused = command("charge", "videos.list")
    line = one_line(refused, 69)
    assert line.endswith("user app lacks a right; give it those that `quota doctor --acl` prints")
    printed = command("doctor", "--acl")
    assert (printed.returncode, len(printed.stdout.splitlines())) == (0, 1)
    assert "secret" not in printed.stdout
    with redis.Redis(port=server.port) as client:
        client.execute_command(*printed.stdout.replace("PASSWORD", "secret").split())
    assert command("charge", "videos.list").returncode == 0
    assert command("status").returncode == 0
    results = findings(command)
    assert (results["server rights"]["level"], results["server eviction"]["level"]) == ("ok", "ok")


@pytest.mark.parametrize(
    ("config", "options", "lines"),
    [
        ("", ("--project", "a", "--project", "b"), [("quota", ["quota:{a}:*", "quota:{b}:*"], [])]),
        ("redis+cluster://app:s3cret@h:1", (), [("app", ["quota:{*}:*"], ["cluster|slots", "asking"])]),
        ("redis://h:1/2?username=app&password=s3cret", (), [("app", ["quota:{*}:*"], ["select"])]),
        (
            "redis+sentinel://a:1/main/0?sentinel_username=watch&sentinel_password=s3cret",
            (),
            [("quota", ["quota:{*}:*"], []), ("watch", [], None)],
        ),
    ],
)
def test_the_rights_go_by_the_url(
    command: Quota, config: str, options: tuple[str, ...], lines: list[tuple[str, list[str], list[str] | None]]
) -> None:
    """And nothing is contacted."""
    command.configure((f'[ledger]\nurl = "{config}"\n' if config else "") + MAIN)
    expected = [
        acl_line(user, keys, OF_A_SENTINEL if more is None else (*COMMANDS, *more)) for user, keys, more in lines
    ]
    assert command("doctor", "--acl", *options).stdout.splitlines() == expected
    assert command.json("doctor", "--acl", *options) == {"acl": expected}


@pytest.mark.parametrize(
    ("ledger", "inbound", "users"),
    [
        ("", "redis://h:1/0", ["inbound"]),
        ("redis://app:a@h:1/0", "redis://app:a@h:1/0", ["app"]),
        ("redis://h:1/0", "redis://h:1/0", ["quota", "inbound"]),
        ("redis://h:1/0", "sqlite:///inbound.db", ["quota"]),
    ],
)
def test_the_rights_of_the_inbound_storage_are_a_line_of_their_own(
    command: Quota, ledger: str, inbound: str, users: list[str]
) -> None:
    """But where one user has both, or no credential needs a ledger."""
    limits = f'[inbound]\nurl = "{inbound}"\n[inbound.all]\nlimit = 9\nwindow = "1m"\n'
    command.configure((f'[ledger]\nurl = "{ledger}"\n' + MAIN if ledger else "") + limits)
    done = command("doctor", "--acl")
    lines = done.stdout.splitlines()
    assert [line.split()[2] for line in lines] == users
    assert ("+scan" in done.stderr, "+info" in done.stderr) == (bool(ledger), bool(ledger))
    if inbound.startswith("redis"):
        assert " ~quota:inbound:* " in lines[-1]
        assert {f"+{each}" for each in INBOUND_COMMANDS} <= set(lines[-1].split())


@pytest.mark.parametrize("options", [("--project", "p"), ("--acl", "--call"), ("--acl", "--project", "*")])
def test_doctor_rejects_options_that_do_not_go_together(command: Quota, options: tuple[str, ...]) -> None:
    command.configure(MAIN)
    done = command("doctor", *options)
    assert one_line(done, 2)
    assert done.stdout == ""


def test_doctor_warns_of_a_server_key_without_a_lifetime(command: Quota, server: RedisServer) -> None:
    command.configure(f'[ledger]\nurl = "{server.url}"\n' + MAIN)
    assert command("charge", "videos.list").returncode == 0
    with redis.Redis(port=server.port) as client:
        assert client.persist("quota:{research}:ledger:log") == 1
    says = "quota:{research}:ledger:log has no lifetime: another program removed it -> charge once: that sets it again"
    expect(command, "server keys", "warning", says)
    assert command("charge", "videos.list").returncode == 0
    assert "server keys" not in command("doctor", KEY="k").stdout


@pytest.mark.parametrize(
    ("ahead_ms", "level", "way"), [(0, "ok", ""), (-1_500, "warning", "ahead of"), (6_000, "error", "behind")]
)
def test_doctor_compares_the_clocks(tmp_path: Path, server: RedisServer, ahead_ms: int, level: str, way: str) -> None:
    path = tmp_path / "quota.toml"
    path.write_text(f'[ledger]\nurl = "{server.url}"\n' + MAIN)
    with quota.open(path) as session:
        session._ledger = open_ledger(server.url, clock=lambda: host_clock() + ahead_ms)
        clock = next(each for each in examine(session) if each.location == "clock")
    assert clock.level == level
    assert f"s {way} the ledger's" in clock.message or level == "ok"


def test_a_key_is_tried_with_one_call(command: Quota, upstream: Emulator) -> None:
    command.configure(MAIN + f'endpoint = "{upstream.address}"\n')
    expect(command, "key of main", "ok", "there; `quota doctor --call` tries it with one call ->")
    usage: Any = upstream.usage()
    assert usage["requests"] == 0
    says = "upstream accepts it (videos.list, 1 of bucket units)"
    expect(command, "key of main", "ok", says, args=("--call",))
    assert upstream.usage()["requests"] == 1
    assert command.json("spend")["total_units"] == 1
    command.configure('[credentials.main]\napi = "youtube-v3"\nauth = "adc"\n')
    expect(command, "key of main", "ok", "an account that the first call looks for; `quota doctor --call` tries it")


@pytest.mark.parametrize(
    ("reason", "level", "words"),
    [
        ("forbidden", "error", "upstream does not accept it: "),
        ("accessNotConfigured", "error", "-> enable the API"),
        ("quotaExceeded", "warning", "-> see `quota status`"),
    ],
)
def test_doctor_call_says_what_upstreams_answer_means(
    command: Quota, upstream: Emulator, reason: str, level: str, words: str
) -> None:
    command.configure(MAIN + f'endpoint = "{upstream.address}"\n')
    upstream.fault("status", status=403, reason=reason, times=9)
    finding = findings(command, "--call", KEY="the-secret")["key of main"]
    assert (finding["level"], "the-secret" in finding["message"]) == (level, False)
    assert words in f"{finding['message']} -> {finding['remedy']}"


def test_an_upstream_that_cannot_be_asked_says_nothing_of_the_key(command: Quota) -> None:
    with Emulator() as upstream:
        command.configure(MAIN + f'endpoint = "{upstream.address}"\n')
        upstream.fault("status", status=503, times=9)
        expect(command, "key of main", "warning", "-> run it again later", args=("--call",))
    says = ("upstream did not answer: ConnectionRefusedError: ", "-> check network and `endpoint`")
    expect(command, "key of main", "error", *says, args=("--call",))
    with PlainServer(lambda _: Answer(body=b"<html>Sign in</html>")) as portal:
        command.configure(MAIN + f'endpoint = "{portal.address}"\n')
        expect(command, "key of main", "error", "is no JSON object", args=("--call",))
