"""The configuration that `quota init` writes is good as it is, and stays so when its numbers are made one's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from quota.cli.configuration import init
from quota.settings.books import book_names
from quota.settings.limits import default_limits
from quota.settings.lint import lint
from quota.settings.load import load_settings


@pytest.mark.parametrize("api", [None, *book_names()], ids=str)
def test_another_quota_in_a_new_configuration_is_enough(api: str | None, tmp_path: Path, state_dir: Path) -> None:
    path = tmp_path / "quota.toml"
    assert CliRunner().invoke(init, [str(path), *(["--api", api] if api else [])]).exit_code == 0
    written = path.read_text(encoding="utf-8")
    credential = next(iter(load_settings(path).credentials.values()))
    if api is not None:
        assert credential.limits == default_limits(credential.book), "the limits that the book alone gives"
    numbers = sorted(set(re.findall(r"^quota = ([0-9_]+)$", written, re.M)))
    assert numbers, "there is a number to change"
    least = max(credential.book.least_units(limit.view.selector) for limit in credential.limits)
    for units in (least + -(-least // 19) + 1, 2 * least + 5, 20 * least, 10**6, 10**9):
        path.write_text(re.sub(r"^quota = [0-9_]+$", f"quota = {units}", written, flags=re.M), encoding="utf-8")
        assert [str(one) for one in lint(load_settings(path)) if one.level == "error"] == [], units


def test_new_configurations_of_two_apis_have_two_projects(tmp_path: Path, state_dir: Path) -> None:
    apis: dict[str, set[str]] = {}
    for name in book_names():
        path = tmp_path / f"{name}.toml"
        assert CliRunner().invoke(init, [str(path), "--api", name]).exit_code == 0
        (credential,) = load_settings(path).credentials.values()
        apis.setdefault(credential.project, set()).add(credential.book.api)
    assert {project: len(of_it) for project, of_it in apis.items() if len(of_it) > 1} == {}
    assert apis["youtube"] == {"youtube"}, "its two books are of one upstream project"
