"""The configuration that `quota init` writes is good as it is, and stays so when its numbers are made one's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from quota.cli.configuration import configuration_for, init
from quota.settings.books import book_names, default_limits, load_book
from quota.settings.lint import lint
from quota.settings.load import load_settings

WRITTEN = [["--full"], [], *(["--api", name] for name in book_names())]


@pytest.mark.parametrize("words", WRITTEN, ids=" ".join)
def test_another_quota_in_a_new_configuration_is_enough(words: list[str], tmp_path: Path, state_dir: Path) -> None:
    path = tmp_path / "quota.toml"
    assert CliRunner().invoke(init, [str(path), *words]).exit_code == 0
    written = path.read_text(encoding="utf-8")
    credential = next(iter(load_settings(path).credentials.values()))
    if words != ["--full"]:
        assert credential.limits == default_limits(credential.book), "the limits that the book alone gives"
    for method in re.findall(r"^#   quota peek (\S+)$", written, flags=re.MULTILINE):
        assert credential.book.price(method)
    numbers = sorted(set(re.findall(r"\bquota = ([0-9_]+)\b", written)))
    assert numbers, "there is a number to change"
    least = max(credential.book.least_units(limit.view.selector) for limit in credential.limits)
    for units in (least + -(-least // 19) + 1, 20 * least, 10**9):
        path.write_text(re.sub(r"\bquota = [0-9_]+\b", f"quota = {units}", written), encoding="utf-8")
        assert [str(each) for each in lint(load_settings(path)) if each.level == "error"] == [], units


def test_a_new_configuration_has_what_a_person_needs_and_fits_on_a_screen(tmp_path: Path, state_dir: Path) -> None:
    path = tmp_path / "quota.toml"
    assert CliRunner().invoke(init, [str(path)]).exit_code == 0
    written = path.read_text(encoding="utf-8")
    assert len(written.splitlines()) <= 46
    assert "Credentials of one project spend one budget, also those of other files." in written
    settings = load_settings(path)
    assert [job.schedule for job in settings.jobs.values()] == ["*/30 * * * *"]
    path.write_text(re.sub(r"^# (\[?[a-z]+(\]| = .*))$", r"\1", written, flags=re.M), encoding="utf-8")
    settings = load_settings(path)
    assert settings.notify is not None, "what it has in comments is good, too"
    assert settings.credentials["main"].endpoint == "http://127.0.0.1:8765"


def test_the_full_configuration_is_of_one_api(tmp_path: Path) -> None:
    done = CliRunner().invoke(init, [str(tmp_path / "quota.toml"), "--full", "--api", "github"])
    assert (done.exit_code, "--full and --api cannot be combined" in done.output) == (2, True)


def test_new_configurations_of_two_apis_have_two_projects(tmp_path: Path, state_dir: Path) -> None:
    apis: dict[str, set[str]] = {}
    for name in book_names():
        path = tmp_path / f"{name}.toml"
        assert CliRunner().invoke(init, [str(path), "--api", name]).exit_code == 0
        (credential,) = load_settings(path).credentials.values()
        apis.setdefault(credential.project, set()).add(credential.book.api)
    assert {project: len(of_it) for project, of_it in apis.items() if len(of_it) > 1} == {}
    assert apis["youtube"] == {"youtube"}, "its two books are of one upstream project"


def test_no_variable_begins_with_a_digit() -> None:
    assert "env:_4CHAN_" in configuration_for("4chan", load_book("strava-v3")._replace(api="4chan"))
