"""The options that all commands share, as a user types them: formats, lists, questions, and the Tab key."""

from __future__ import annotations

import csv
import io
import os
import pty
import shutil
import subprocess
import time
from contextlib import suppress

import pytest

from quota import open as open_session
from quota.jobs.store.store import Store
from support.commands import QUOTA, Quota, one_line
from support.configurations import limited

JOBS = """
[jobs.trending]
fetch = "trending"
regions = ["US", "DE"]
[store]
url = "sqlite:///videos.db"
"""


@pytest.fixture
def quota(quota: Quota) -> Quota:
    quota.configure(limited(250, JOBS))
    return quota


@pytest.fixture
def spent(quota: Quota) -> Quota:
    """Two searches of two jobs, a call for a unit, and a search that was refused."""
    for words in (("search.list", "--job", "a"), ("search.list", "--job", "b"), ("videos.list", "--job", "b")):
        assert quota("charge", *words).returncode == 0
    assert quota("charge", "search.list", "--job", "b").returncode == 75
    return quota


def store(quota: Quota) -> Store:
    return Store(str(quota.folder / "videos.db"), retention_ms=86_400_000)


def rows(printed: str) -> list[dict[str, str]]:
    return [*csv.DictReader(io.StringIO(printed))]


def test_json_is_a_format_and_has_a_short_form(spent: Quota) -> None:
    assert spent.json("spend", "--format", "json")["rows"] == spent.json("spend")["rows"]
    assert spent("spend", "--format", "text").stdout == spent("spend").stdout
    both = one_line(spent("spend", "--json", "--format", "csv"), 2)
    assert both == "--json is --format json; leave --json or --format csv out; see `quota spend --help`"
    assert "'xml' is not one of 'text', 'json', 'csv'" in one_line(spent("log", "--format", "xml"), 2)


def test_the_same_rows_are_json_and_csv(spent: Quota) -> None:
    listed = rows(spent("spend", "--by", "job,method", "--format", "csv").stdout)
    in_json = spent.json("spend", "--by", "job,method")["rows"]
    assert listed == [{name: str(value) for name, value in row.items()} for row in in_json]
    assert [(row["job"], row["units"]) for row in in_json] == [("a", 100), ("b", 100), ("b", 1)], "largest first"
    assert len(spent.json("spend", "--by", "run")["rows"]) == 3, "each command is a run of its own"
    charges = rows(spent("log", "--format", "csv").stdout)
    assert [(row["job"], row["units"]) for row in charges] == [("a", "100"), ("b", "100"), ("b", "1")]
    (refusal,) = rows(spent("log", "--refused", "--format", "csv").stdout)
    assert (refusal["job"], refusal["refused_by"], refusal["calls"]) == ("b", "day", "1")


@pytest.mark.parametrize("words", ["spend", "log --refused", "runs", "tables"])
def test_csv_of_nothing_is_its_header(quota: Quota, words: str) -> None:
    store(quota).close()
    done = quota(*words.split(), "--format", "csv")
    assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stderr
    assert "," in done.stdout


def test_a_list_is_of_one_job(spent: Quota) -> None:
    spending = spent.json("spend", "--by", "method", "--job", "b")
    assert {row["method"]: row["units"] for row in spending["rows"]} == {"search.list": 100, "videos.list": 1}
    assert [row["job"] for row in spending["refused"]] == ["b"]
    assert spent.json("spend", "--job", "a")["refused"] == []
    assert len(rows(spent("log", "--job", "a", "--format", "csv").stdout)) == 1


def test_a_limit_shows_the_dearest_and_the_total_is_of_all(spent: Quota) -> None:
    spending = spent.json("spend", "--by", "job,method", "--limit", "1")
    assert (len(spending["rows"]), spending["total_units"]) == (1, 201)
    lines = spent("spend", "--by", "job,method", "--limit", "1").stdout.splitlines()
    assert "2 more rows; the total includes them" in lines
    assert [line.split()[-1] for line in lines if line.lstrip().startswith("total")] == ["201"]


def answered(quota: Quota, *args: str, answer: str) -> tuple[int, str]:
    """The exit status of a command at a terminal whose user types this, and what the terminal shows."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*QUOTA, *args], cwd=quota.folder, env=quota.env, stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    os.write(master, f"{answer}\n".encode())
    shown = b""
    with suppress(OSError):  # the terminal is gone
        while piece := os.read(master, 1_024):
            shown += piece
    os.close(master)
    return process.wait(timeout=100), shown.decode()


def test_a_move_is_shown_asked_unless_told_otherwise_and_done(spent: Quota) -> None:
    words = ("ledger", "move", "sqlite:///ledger.db", "sqlite:///new.db")
    dry = spent(*words, "--dry-run")
    assert dry.returncode == 0
    assert dry.stdout.startswith("project p: 3 charges would move to ")
    assert dry.stdout.splitlines()[-1] == "nothing was changed"
    assert spent.json(*words, "--dry-run")["projects"] == [{"project": "p", "outcome": "moved", "charges": 3}]
    status, shown = answered(spent, *words, answer="n")
    assert (status, "nothing was changed" in shown) == (1, True), shown
    assert spent("peek", "videos.list").returncode == 0, "the old ledger goes on"
    status, shown = answered(spent, *words, answer="y")
    assert (status, "project p: 3 charges moved to" in shown) == (0, True), shown
    status, shown = answered(spent, "ledger", "move", "sqlite:///new.db", "sqlite:///ledger.db", "--yes", answer="")
    assert (status, "[y/N]" in shown) == (0, False), shown


def test_a_place_is_reset_after_a_question(quota: Quota) -> None:
    with store(quota) as made:
        made.start_round("trending", ["US", "DE"])
    dry = quota("place", "reset", "trending", "DE", "--dry-run")
    assert dry.stdout == "trending would begin anew with the next run, in DE; nothing was changed\n"
    status, shown = answered(quota, "place", "reset", "trending", "DE", answer="n")
    assert (status, "Begin trending anew, in DE? [y/N]" in shown) == (1, True), shown
    status, shown = answered(quota, "place", "reset", "trending", "DE", answer="y")
    assert (status, "trending begins anew with the next run, in DE" in shown) == (0, True), shown


def test_a_repair_asks_at_a_terminal(quota: Quota, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUOTA_STATE_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, quota.env[name])
    a_year_ahead_ms = time.time_ns() // 1_000_000 + 365 * 86_400_000
    with open_session(quota.folder / "quota.toml", clock=lambda: a_year_ahead_ms) as session:
        assert session.budget().charge("videos.list").admitted
    status, shown = answered(quota, "ledger", "repair", answer="n")
    assert (status, "repair the ledger? [y/N]" in shown, "Nothing was changed." in shown) == (1, True, True), shown
    status, shown = answered(quota, "ledger", "repair", answer="y")
    assert (status, "1 charge of 1 unit dated ahead, now corrected" in shown) == (0, True), shown
    assert "nothing is dated ahead" in quota("ledger", "repair").stdout


def test_old_spellings_of_other_programs_work(spent: Quota) -> None:
    assert spent("explain", "--last").stdout.split("Now")[0] == spent("explain").stdout.split("Now")[0]
    assert "--last" not in spent("explain", "--help").stdout
    assert "--port" not in spent("emulate", "--help").stdout


BASH = """
source <(_QUOTA_COMPLETE=bash_source quota)
complete -p quota
compopt() { COMPREPLY=(FILES); }
tried() {
  COMP_WORDS=(quota "$@") COMP_CWORD=$# COMPREPLY=()
  _quota_completion quota
  printf '%s\n' "${COMPREPLY[@]}" .
}
"""
ZSH = """
compdef() { :; }
_path_files() { print FILES; }
_describe() { shift 2; print -l -- "${(@P)1}"; }
compadd() { while [[ $1 == -* ]]; do if [[ $1 == -a ]]; then print -l -- "${(@P)2}"; return; fi; shift; done }
source <(_QUOTA_COMPLETE=zsh_source quota)
tried() {
  words=(quota "$@") CURRENT=$(($# + 1))
  _quota_completion
  print .
}
"""
COMPLETED = {"st": "status", "ledger mo": "move", "book li": "list", "log --form": "--format"}
COMPLETED |= dict.fromkeys(["--config ''", "charge --file c", "book show ./", "exec --auto -- c"], "FILES")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_tab_key_completes_in_a_shell(quota: Quota, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    programs, fds = quota.programs()
    done = subprocess.run(
        [shell, "-c", "\n".join([BASH if shell == "bash" else ZSH, *(f"tried {words}" for words in COMPLETED)])],
        env={**quota.env, "PATH": f"{programs}:{os.environ['PATH']}"},
        cwd=quota.folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        pass_fds=fds,
    )
    completed = done.stdout.split("\n.\n")
    for lines, wanted in zip(completed[:-1], COMPLETED.values(), strict=True):
        assert wanted in {line.partition(":")[0] for line in lines.splitlines()}, done
