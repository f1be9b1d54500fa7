"""The command line: what it prints, and its exit statuses, which other programs rely on."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
from contextlib import closing
from pathlib import Path

import click
import pytest

from quota.cli.program import cli
from quota.ledger.sqlite_log import SqliteLog
from quota.rules.facts import Exhaustion
from support.commands import QUOTA, Quota, every_command, one_line
from support.servers import RedisServer, free_port, until
from support.setup import state_at

SMALL = """
[credentials.main]
api = "youtube-v3"
project = "p"
[[credentials.main.limits]]
name = "day"
units = 150
window = "24h"
"""
TWO = SMALL + '[credentials.other]\napi = "youtube-v3"\n'

COMMANDS = every_command(groups=True)


def test_every_command_has_help_with_an_example() -> None:
    for name, command in COMMANDS.items():
        assert "Example:" in (command.help or ""), f"{name} shows no example"
        short = command.get_short_help_str(limit=66)
        assert "..." not in short, f"{name} does not fit its line in the list of commands: {short}"


def test_an_example_can_be_pasted_into_a_shell() -> None:
    """Its explanations are comments of the shell, and each `quota` in it has arguments that its command takes."""
    tried = 0
    for name, command in {"": cli, **COMMANDS}.items():
        shown = command.get_help(click.Context(command, info_name="quota", max_content_width=80))
        for line in shown.partition("Example:\n")[2].partition("\n\n")[0].splitlines():
            tokens = shlex.shlex(line, posix=True, punctuation_chars=True)
            tokens.whitespace_split = True
            parts: list[list[str]] = [[]]
            for token in tokens:
                if set(token) <= set("();<>|&"):
                    parts.append([])
                else:
                    parts[-1].append(token)
            called = [part[1:] for part in parts if part[:1] == ["quota"]]
            assert called or parts[0][0] in ("curl", "pip", "ssh"), f"{name}: {line}"
            for arguments in called:
                inner: click.Command = cli
                while isinstance(inner, click.Group):
                    subcommand = inner.get_command(click.Context(inner), arguments.pop(0))
                    assert subcommand is not None, line
                    inner = subcommand
                inner.make_context(name, arguments).close()
                tried += 1
    assert tried > 50


def test_every_command_takes_a_configuration() -> None:
    without = {"init", "prove", "demo", "emulate", "ledger scripts"}
    without |= {f"book {name}" for name in ("list", "show", "check", "diff", "new")}
    for name, command in COMMANDS.items():
        if name not in without and not isinstance(command, click.Group):
            assert "config" in {parameter.name for parameter in command.params}, name


def test_quota_alone_prints_its_help(quota: Quota) -> None:
    alone = quota()
    assert (alone.returncode, alone.stderr) == (2, "")
    assert alone.stdout == quota("--help").stdout
    assert "  status    " in alone.stdout
    listed = alone.stdout.partition("Options:")[2]
    assert [line for line in listed.splitlines() if "..." in line] == [], "each command fits its line"
    names = re.findall("^  ([a-z]+)  ", listed, flags=re.MULTILINE)
    assert sorted(names) == cli.list_commands(click.Context(cli)), "each is listed once"
    assert "More:" not in listed, "and in its section"


def test_a_configuration_named_before_the_command_is_the_commands(quota: Quota) -> None:
    (quota.folder / "small.toml").write_text(SMALL, encoding="utf-8")
    (quota.folder / "two.toml").write_text(TWO, encoding="utf-8")
    before, own = ("--config", "small.toml"), ("--config", "two.toml")

    def credentials(*args: str) -> list[str]:
        return [credential["name"] for credential in quota.json(*args)["credentials"]]

    assert credentials(*before, "status") == credentials("status", *before) == ["main"]
    assert credentials(*before, "status", *own) == ["main", "other"], "the command's own wins"
    assert "small.toml" in one_line(quota(*before, "run", "no-such-job"), 2), "commands of other packages read it too"
    assert "`quota prove` reads no configuration" in one_line(quota(*before, "prove"), 2)
    assert "--schema and --config cannot be combined" in one_line(quota("check", "--schema", *before), 2)


def test_help_fits_eighty_columns() -> None:
    for name, command in {"": cli, **COMMANDS}.items():
        shown = command.get_help(click.Context(command, info_name=f"quota {name}", max_content_width=80))
        assert [line for line in shown.splitlines() if len(line) > 80] == [], name


def test_charge_prints_the_contracts_json(quota: Quota) -> None:
    quota.configure(SMALL)
    decision = quota.json("charge", "youtube.search.list", "--job", "backfill", "--region", "DE")
    assert re.fullmatch(r"\d+-[\w-]+", decision.pop("id"))
    assert decision == {
        "admitted": True,
        "source": "ledger",
        "credential": "main",
        "project": "p",
        "method": "search.list",
        "cost_units": 100,
        "reason": "ok",
        "refused_by": None,
        "remaining_units": 50,
        "retry_at": None,
        "retry_after_ms": None,
        "limits": [{"name": "day", "cost_units": 100, "used_units": 100, "limit_units": 150, "remaining_units": 50}],
    }


def test_a_refused_charge_exits_75_and_says_when(quota: Quota) -> None:
    quota.configure(SMALL)
    quota("charge", "search.list")
    refusal = quota.json("charge", "search.list", status=75)
    assert {"admitted": False, "reason": "limit", "refused_by": "day", "id": None}.items() <= refusal.items()
    assert 0 < refusal["retry_after_ms"] <= 86_400_000
    assert refusal["retry_at"].endswith("Z")
    assert "100 of 150 units used; next at 20" in one_line(quota("charge", "search.list"), 75)
    assert quota("peek", "search.list").returncode == 75


def test_peek_charges_nothing(quota: Quota) -> None:
    quota.configure(SMALL)
    for _ in range(3):
        peeked = quota.json("peek", "search.list")
        assert {"admitted": True, "id": None, "source": None, "remaining_units": 150}.items() <= peeked.items()
    assert quota("peek", "videos.list", "--units", "150").returncode == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["chrage"], "no such command 'chrage'; did you mean 'charge'? See `quota --help`"),
        (["ledger", "mvoe"], "did you mean 'move'? See `quota ledger --help`"),
        (["charge", "vidoes.list"], "did you mean 'videos.list'? Or give its units: --units N"),
        (["costs", "nope"], "cost book 'youtube-v3' has no method 'nope'; `quota costs` lists the 51 it has."),
        (["charge", "search.list", "--units", "151"], "it can never fit; raise the limit or make a cheaper call"),
        (["charge", "videos.list", "--units", "0"], "0 units: a charge is a whole number from 1"),
        (["settle", "1-1", "--", "-1"], "-1 units: a settled charge is a whole number from 0"),
        (["charge", "--units", "3"], "say what to charge: METHOD, or --file CALLS for several calls"),
        (["charge", "videos.list", "--file", "x"], "METHOD and --file cannot be combined: leave METHOD or --file out"),
        (["charge", "--file", "x", "--units", "3"], "with --file, write the units into the file, after the method"),
        (["peek"], "Missing argument 'METHOD'"),
        (["log", "--since"], "Option '--since' requires an argument; see the --help of the command"),
        (["exec", "videos.list", "touch", "--", "ran"], "Got unexpected extra argument (touch)"),
        (["exec", "--auto", "python", "etl.py", "-v"], "write -- before the command; see `quota exec --help`"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(quota: Quota, args: list[str], message: str) -> None:
    quota.configure(SMALL)
    assert message in one_line(quota(*args), 2)


@pytest.mark.parametrize(
    "ours", ["--job=J videos.list --region=R --units=7", "--region R --units 7 --job J videos.list"], ids=len
)
def test_exec_takes_its_options_before_the_first_dashes_and_none_after_them(quota: Quota, ours: str) -> None:
    theirs = ["--job", "other", "--help", "--", "-x"]
    program = "import sys; print(sys.argv[1:], flush=True); sys.exit(7)"
    done = quota("exec", *ours.split(), "--", sys.executable, "-c", program, *theirs)
    assert (done.returncode, done.stdout) == (7, f"{theirs}\n"), done.stderr
    (row,) = quota.json("spend", "--by", "method,job,region")["rows"]
    assert row == {"method": "videos.list", "job": "J", "region": "R", "charges": 1, "units": 7}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to read what a process ignores")
def test_exec_hands_its_command_the_signals_as_a_shell_does(quota: Quota) -> None:
    done = quota("exec", "videos.list", "--", "grep", "SigIgn", "/proc/self/status")
    ignored = int(done.stdout.split()[1], 16)
    assert [s.name for s in (signal.SIGPIPE, signal.SIGXFSZ) if ignored >> (s - 1) & 1] == []


def test_exec_gives_back_a_charge_whose_command_could_not_start(quota: Quota) -> None:
    quota.configure(SMALL)
    for exec_it in ("quota exec", "cat quota.toml | quota exec --config /dev/stdin"):  # which can be read once
        done = quota.shell(f"{exec_it} search.list -- no-such-command")
        assert "the charge was refunded" in one_line(done, 127)
    assert quota.json("spend")["total_units"] == 0


def test_status_prints_the_contracts_json(quota: Quota) -> None:
    quota("charge", "search.list")
    status = quota.json("status")
    assert set(status) == {"at", "ledger", "credentials"}
    (credential,) = status["credentials"]
    verdict = ("open", "closed_by", "full_by", "next_at")
    assert set(credential) == {"name", "project", "api", *verdict, "limits", "exhausted"}
    assert [credential[key] for key in verdict] == [True, None, None, None]
    day = credential["limits"][0]
    fields = "name window quota_units headroom_units limit_units used_units remaining_units next_capacity_at resets_at"
    assert set(day) == set(fields.split())
    assert (day["quota_units"], day["headroom_units"], day["limit_units"]) == (10_000, 500, 9_500)
    assert (day["used_units"], day["remaining_units"]) == (100, 9_400)
    assert day["next_capacity_at"] > status["at"]


def test_tables_fit_eighty_columns_and_carry_no_colour_into_a_file(quota: Quota) -> None:
    job = "a job with quite a long name, up to sixty-four characters"
    quota("charge", "search.list", "--job", job, "--region", "DE")
    for args in (["status"], ["log"], ["spend", "--by", "method,job,region,run,hour"], ["costs"], ["prove"]):
        done = quota(*args)
        assert done.returncode == 0
        assert "\x1b" not in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 80, done.stdout


def test_the_reason_of_a_reopening_is_kept_without_secrets_and_a_plan_begins_open(quota: Quota) -> None:
    quota.configure(SMALL + '[jobs.t]\nfetch = "trending"\nschedule = "every 12h"\n')
    assert "is not closed" in one_line(quota("reopen", "units", "--because", "raised", "--dry-run"), 1)
    with closing(SqliteLog(f"sqlite:///{quota.folder}/state/ledger.db")) as ledger:
        now_ms = ledger.now_ms()
        state_at(ledger).exhaust(Exhaustion("units", now_ms, now_ms + 50 * 3_600_000, "no more", "host:1"))
    shown = quota("reopen", "units", "--because", "raised", "--dry-run")
    assert (shown.returncode, shown.stdout) == (0, "bucket units of project p would no longer be closed: raised\n")
    assert quota("charge", "videos.list").returncode == 75
    assert quota("plan", "--days", "1").returncode == 1
    assert "needs a reason" in one_line(quota("reopen", "units", "--because", " "), 2)
    reopened = quota("reopen", "units", "--because", "raised,\nsee ?key=AIzaSyThisIsTheSecretOfTheTests_0123456")
    assert reopened.stdout == r"bucket units of project p is no longer closed: raised,\nsee ?key=[redacted]" + "\n"
    (exhaustion,) = quota.json("status")["credentials"][0]["exhausted"]
    assert exhaustion["reopened_because"] == r"raised,\nsee ?key=[redacted]"
    assert quota("charge", "videos.list").returncode == 0
    assert quota("plan", "--days", "1").returncode == 0
    assert "is not closed; closed: none" in one_line(quota("reopen", "units", "--because", "again"), 1)


STARTED = """
import os, signal, sys
from importlib.metadata import entry_points
class Interrupts:
    def find_spec(self, name, *more):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
(command,) = entry_points(group="console_scripts", name="quota")
sys.argv[1:] = ["status"]
command.load()()
"""


def test_an_interrupt_before_the_command_begins_is_quiet(quota: Quota) -> None:
    quota.forked = False
    done = quota(script=STARTED)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "")


ENDED = """
import os, runpy, signal, sys
from quota.cli.output import temporary_folder
os.replace = lambda *_: signal.raise_signal(signal.SIGTERM)
if sys.argv[1:]:
    runpy.run_module("quota", run_name="__main__")
with temporary_folder("copies"):
    os.replace()
"""


@pytest.mark.parametrize("words", ["", "init new.toml", "ledger scripts ."])
def test_a_signal_leaves_no_unfinished_file_and_no_copy(quota: Quota, words: str) -> None:
    quota.configure(f"{SMALL}[inbound.default]\nlimit = 6\nwindow = '60s'\n")
    assert quota(*words.split(), script=ENDED, TMPDIR=str(quota.folder)).returncode == 143
    assert {path.name for path in quota.folder.iterdir()} <= {"quota.toml", "state"}


@pytest.mark.parametrize("more", ["", " --json"])
def test_without_a_reader_a_charge_exits_by_its_decision_and_stands(quota: Quota, more: str) -> None:
    quota.configure(SMALL)
    for command in ("costs --json", "--help", f"charge search.list{more}"):
        done = quota.shell(f"quota {command} | true")
        assert (done.returncode, done.stderr) == (0, ""), command
    assert quota.json("status")["credentials"][0]["limits"][0]["used_units"] == 100
    assert quota.shell("quota charge search.list --json | true").returncode == 75


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_watching_goes_on_while_the_ledger_does_not_answer(quota: Quota, more: tuple[str, ...]) -> None:
    port = free_port()
    quota.configure(f'[ledger]\nurl = "redis://127.0.0.1:{port}/0"\n' + SMALL)
    watch = quota.start("status", "--watch", *more)
    assert watch.stdout is not None
    assert "cannot be reached" in watch.stdout.readline()
    with RedisServer(port=port):
        until(lambda: "main" in (watch.stdout.readline() if watch.stdout else ""), "the status comes back")
        watch.send_signal(signal.SIGINT)
        assert (watch.communicate(timeout=300)[1].strip(), watch.returncode) == ("", 130)


@pytest.mark.parametrize("command", ["dashboard --listen 127.0.0.1:0", "emulate --port 0"])
def test_a_server_whose_address_cannot_be_printed_says_it_on_stderr_and_serves(quota: Quota, command: str) -> None:
    quota.configure(SMALL)
    with open("/dev/full", "w") as full, quota.start(*command.split(), stdout=full.fileno()) as served:
        assert served.stderr is not None
        assert "stdout cannot be written: No space left on device; " in served.stderr.readline()
        served.send_signal(signal.SIGTERM)
        assert served.wait(timeout=300) == 0


@pytest.mark.parametrize(("where", "more"), [(">&-", " --json"), ("> /dev/full", "")])
def test_a_charge_that_cannot_be_printed_is_named_and_stands(quota: Quota, where: str, more: str) -> None:
    quota.configure(SMALL)
    line = one_line(quota.shell(f"quota charge search.list{more} {where}"), 0)
    charge = re.fullmatch(r"stdout cannot be written: .+; the charge stands, its id is (\d+-[\w-]+)", line)
    assert charge, line
    assert one_line(quota.shell(f"quota refund {charge[1]} {where}"), 0).endswith("; the correction stands")
    one_line(quota.shell(f"quota status --check{more} {where}"), 0)


def test_a_stdout_that_cannot_be_written_is_one_line_and_a_stderr_changes_no_exit_status(quota: Quota) -> None:
    quota.configure(SMALL)
    for command in ("costs --json > /dev/full", "--version > /dev/full", "status --json <&- >&-"):
        assert one_line(quota.shell(f"quota {command}"), 1).startswith("stdout cannot be written: "), command
    quota("charge", "search.list")
    assert quota.shell("quota charge search.list 2> /dev/full").returncode == 75
    assert quota.shell("quota charge no.such.method >&- 2>&-").returncode == 2


def test_a_path_that_the_locale_cannot_express_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "\u00e9").mkdir()
    quota, plain = Quota(tmp_path / "\u00e9"), {"LC_ALL": "C", "PYTHONUTF8": "0"}
    quota.configure(f'{SMALL}[ledger]\nurl = "sqlite:///ledger.db"\n')
    assert quota("charge", "search.list", **plain).returncode == 0
    moved = quota("ledger", "move", "sqlite:///ledger.db", "sqlite:///new.db", "--yes", **plain)
    assert one_line(moved, 1) == "the locale of this process cannot express a path; set PYTHONUTF8=1"


KEYED = '[credentials.main]\napi = "youtube-v3"\nkey = "env:KEY"\n'
RENAMED = KEYED.replace("main", "other")


def test_the_first_charge_of_a_renamed_credential_warns(quota: Quota) -> None:
    """Not only `check`, which nobody runs from cron."""
    quota.configure(KEYED)
    assert quota("charge", "videos.list").stderr == ""
    quota.configure(KEYED + RENAMED)
    assert quota("charge", "videos.list", "--credential", "other").stderr == "", "another one"
    quota.configure(KEYED.replace("main", "third"))
    assert quota("check").stderr == "", "a finding on stdout"
    lines = quota("charge", "videos.list").stderr.splitlines()
    warnings = [line.split(" until=")[0] for line in lines]
    assert warnings == ["quota: project_left project=main", "quota: project_left project=other"]
    assert lines[0].endswith('; if you renamed a credential, add project = "main" to it')
    assert quota("charge", "videos.list").stderr == "", "once"


def test_check_says_that_a_credential_was_renamed(quota: Quota) -> None:
    """Without `project`, the project is renamed with it: charged units would be granted once more."""

    def messages(credentials: str, name: str = "quota.toml", more: str = "") -> list[str]:
        (quota.folder / name).write_text(f'[ledger]\nurl = "sqlite:///ledger.db"\n{credentials}{more}')
        findings = json.loads(quota("check", "--config", name, "--json", KEY="k").stdout)["findings"]
        return [each["message"] for each in findings if each["location"] == "credentials"]

    assert messages(KEYED) == []
    assert quota("charge", "search.list").returncode == 0
    assert messages(KEYED) == []
    (warning,) = messages(RENAMED)
    assert warning.startswith("charges for project 'main' count here until ")
    assert "warning configuration" in quota("doctor", KEY="k").stdout
    assert messages(f'{RENAMED}project = "main"\n') == []
    assert messages(RENAMED + KEYED) == [], "another one"
    assert messages(f'{KEYED}endpoint = "http://127.0.0.1:1"\n') == [], "the same one somewhere else"
    assert messages(RENAMED, "another.toml") == [], "it never charged that"
    there = 'endpoint = "https://youtube.example.org"\n'
    assert messages(KEYED, "there.toml", there) == []
    quota("charge", "search.list", "--config", "there.toml")
    assert len(messages(RENAMED, "there.toml", there)) == 1, "nor does an endpoint hide it"


def test_check_and_doctor_name_charges_that_another_cost_book_would_count_elsewhere(quota: Quota) -> None:
    quota.configure(KEYED)
    quota("charge", "search.list")
    quota("charge", "videos.list")
    quota.configure(KEYED.replace("v3", "v3-buckets"))
    for command in "check", "doctor":
        assert re.findall("bucket 'units' has .* of ([a-z.]+)", quota(command, KEY="k").stdout) == ["search.list"]


def test_init_writes_a_configuration_that_check_accepts(quota: Quota) -> None:
    assert quota("init").returncode == 0
    checked = quota("check", YOUTUBE_API_KEY="not-a-real-key")
    assert (checked.returncode, checked.stderr) == (0, ""), checked.stdout
    assert "exists already" in one_line(quota("init"), 1)
    assert "'-' is not the path of a file" in one_line(quota("init", "-"), 2)
    assert quota("init", "my own.toml").stdout.endswith("then run: quota check --config 'my own.toml'\n")


@pytest.mark.parametrize("lack", ["threading; threading.stack_size(2**47)", "sys; sys.modules['sqlite3'] = None"])
def test_without_a_thread_or_a_library_a_command_says_what_to_do(quota: Quota, lack: str) -> None:
    line = one_line(quota("demo", script=f"import {lack}; from quota.cli.program import main; main()"), 1)
    assert "; install the packages again" in line or line.startswith("no thread can be started; raise the limit")


def test_a_command_in_a_deleted_folder_is_one_line(quota: Quota) -> None:
    config = quota.configure(SMALL)
    gone = f"mkdir gone; cd gone; rmdir ../gone; {shlex.join(QUOTA)}"
    for command in (f"run x --textfile t --config {config}", "charge videos.list"):
        done = quota.shell(f"{gone} {command}")
        assert one_line(done, 1) == "the working folder is gone; start the command in another folder"


@pytest.mark.parametrize("before", [None, "the configuration of years\n"])
def test_an_init_that_fails_leaves_the_old_file(quota: Quota, before: str | None) -> None:
    path = quota.folder / "quota.toml"
    path.unlink(missing_ok=True)
    if before is not None:
        path.write_text(before, encoding="utf-8")
        path.chmod(0o640)
    there = sorted(os.listdir(quota.folder))
    full = quota.shell(f"ulimit -f 1; quota init {'--force' if before else ''}")
    assert one_line(full, 1) == "quota.toml cannot be written: File too large"
    assert sorted(os.listdir(quota.folder)) == there
    if before is not None:
        assert path.read_text(encoding="utf-8") == before
    assert quota("init", "--force").returncode == 0
    assert before is None or path.stat().st_mode & 0o777 == 0o640


def test_a_bad_configuration_is_one_line_and_exit_78(quota: Quota) -> None:
    assert one_line(quota("run", "x"), 78).startswith("no quota.toml was found; run `quota init`, or name a file with")
    quota.configure(SMALL + "[ledgr]\nurl = 'x'\n")
    for command in (["charge", "videos.list"], ["run", "trending"]):
        assert "did you mean 'ledger'?" in one_line(quota(*command), 78)
        assert "nowhere.toml: cannot be read" in one_line(quota(*command, "--config", "nowhere.toml"), 78)


@pytest.mark.parametrize(("mode", "why"), [(0o666, "can be written by every user"), (0o000, "")])
def test_check_and_doctor_say_that_the_allowance_cannot_be_used(quota: Quota, mode: int, why: str) -> None:
    """A file that others may write decides nothing, and anything but a file is no allowance."""
    away = '[ledger]\nurl = "redis://127.0.0.1:1/0"\nunavailable = { max_cost = 1, allowance = 1 }\n' + SMALL
    quota.configure(away.replace("units = 150", "quota = 150\nheadroom = 10"))
    assert quota("charge", "videos.list").returncode == 0, "drawn"

    def findings(command: str, location: str = "ledger.unavailable") -> list[str]:
        lines = json.loads(quota(command, "--json").stdout)["findings"]
        return [f"{x['level']} {x['message']}; {x['remedy']}" for x in lines if x["location"] == location]

    assert findings("check") == findings("doctor") == []
    (used_up,) = findings("doctor", "allowance of p")
    assert (used_up[:8], "1 of 1 unit drawn, 0 left, more from 20" in used_up) == ("warning ", True)
    (draws,) = (quota.folder / "state" / "journals").glob("*/draws")
    if mode:
        draws.chmod(mode)
    else:
        draws.unlink()
        draws.mkdir()
    (checked,) = findings("check")
    assert checked.startswith(f"warning allowance {draws}")
    assert why in checked
    assert findings("doctor") == [checked]
    refused = quota("charge", "videos.list")
    assert refused.returncode == 69
    assert str(draws) in refused.stderr


def test_a_call_without_the_ledger_is_one_line_and_runs_nothing(quota: Quota) -> None:
    address, nowhere = f"redis://127.0.0.1:{free_port()}/0", "redis{}://nowhere.invalid{}"
    names = [nowhere.format(*parts) for parts in (("", ""), ("s", ""), ("+cluster", ""), ("+sentinel", "/x"))]
    for url, why in ((address, "; see whether"), *((name, ": a host name does not resolve") for name in names)):
        quota.configure(f'[ledger]\nurl = "{url}"\n' + SMALL)
        for words in (["charge", "videos.list", "--json"], ["exec", "videos.list", "--", "touch", "ran"]):
            assert f"cannot be reached{why}" in one_line(quota(*words), 69)
    assert not (quota.folder / "ran").exists()


def test_a_status_without_the_ledger_has_the_drawn_units(quota: Quota) -> None:
    away = '[ledger]\nurl = "redis://127.0.0.1:1/0"\nunavailable = { max_cost = 1, allowance = 5 }\n'
    jobs = "".join(f'[jobs.{name}]\nfetch = "{name}"\n' for name in ("trending", "search"))
    quota.configure(away + SMALL + jobs + 'options = { words = ["tea"] }\n')
    assert quota("charge", "videos.list").returncode == 0
    assert "job search could not go on now: ledger redis://127.0.0.1:1/0 cannot be" in quota("status").stdout
    done = quota("status", "--json")
    assert "1 of 5 units drawn, 4 left, more from 20" in done.stderr
    status = json.loads(done.stdout)
    assert (status["credentials"], [x["drawn_units"] for x in status["allowances"].values()]) == ([], [1])
    assert [job["could_go_on"] for job in status["jobs"]] == [True, False]
    assert "jobs trending, search could not" in quota("status", QUOTA__STORE__PLACES="ledger").stdout
    for command in ("spend", "plan", "run trending --dry-run", "status --clock +1h", "ledger repair"):
        assert quota(*command.split()).stderr.count("1 of 5 units drawn, 4 left, more from 20") == 1, command


MODULES = """
import json, sys
from quota.cli.program import run
sys.argv[1:] = {args!r}
status = run()
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
raise SystemExit(status)
"""

THEIRS = ("redis", "googleapiclient", "httplib2", "google.auth", "apscheduler", "tenacity", "rich")


@pytest.mark.parametrize(
    ("args", "status", "unneeded"),
    [
        ("charge search.list", 75, (*THEIRS, "importlib.metadata", "asyncio", "ssl", "quota.jobs", "quota.wording")),
        ("run refused", 0, (*THEIRS, "importlib.metadata", "requests", "httpx")),
        ("--version", 0, (*THEIRS, "asyncio", "ssl", "quota.jobs", "quota.budget", "quota.settings")),
        ("exec --help", 0, (*THEIRS, "quota.jobs", "quota.settings.books")),
        ("book list --json", 0, (*THEIRS, "quota.jobs", "quota.budget")),
        ("check", 78, ("redis", "httplib2", "google.auth", "quota.jobs.plan")),
        ("reconcile --help", 0, ("googleapiclient", "httplib2", "google.auth")),
    ],
)
def test_a_command_loads_nothing_it_does_not_need(quota: Quota, args: str, status: int, unneeded: tuple[str]) -> None:
    quota.configure(SMALL + '[jobs.refused]\nfetch = "search"\noptions = { words = "x" }\n')
    quota("charge", "search.list")
    quota.forked = False
    done = quota(script=MODULES.format(args=args.split()))
    assert done.returncode == status
    modules = json.loads(done.stderr.splitlines()[-1])
    assert [name for name in modules if name.startswith(unneeded)] == []


@pytest.mark.parametrize("args", [["charge", "videos.list"], ["status"], ["log"]])
def test_a_command_without_a_configuration_file_warns_first(quota: Quota, args: list[str]) -> None:
    notice = "no quota.toml was found: the built-in one is used; `quota init` writes one"
    done = quota(*args)
    first, *more = done.stdout.splitlines()
    assert (done.returncode, done.stderr, " ".join([first, more[0]])[: len(notice)]) == (0, "", notice)
    assert more
    in_json = quota(*args, "--json")
    assert one_line(in_json, 0) == notice
    json.loads(in_json.stdout or "null")
    quota.configure(SMALL)
    assert "quota.toml" not in quota(*args).stdout
    assert quota(*args, "--json").stderr == ""


def test_a_command_of_another_package_is_found(quota: Quota) -> None:
    """An installed package is a folder `.dist-info` beside its modules."""
    installed = quota.folder / "installed"
    metadata = installed / "theirs-1.0.dist-info"
    metadata.mkdir(parents=True)
    (installed / "theirs.py").write_text(
        "import click\n@click.command('hello')\ndef hello():\n    'Say hello.'\n    click.echo('hello from afar')\n"
    )
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[quota.commands]\nhello = theirs:hello\n")
    assert quota("hello", PYTHONPATH=str(installed)).stdout == "hello from afar\n"
    assert "Say hello." in quota("--help", PYTHONPATH=str(installed)).stdout
    assert "hello" in quota("hello").stderr
