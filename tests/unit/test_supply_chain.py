"""What CI installs is what pyproject.toml asks for, held to hashes; and an audit of nothing is no audit."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCKED = (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8")
ENTRIES = [entry for entry in re.split(r"^(?=[a-z0-9])", LOCKED, flags=re.MULTILINE) if "==" in entry]
PINS = [Requirement(entry.partition("\\")[0]) for entry in ENTRIES]


def asked_for() -> list[Requirement]:
    """All that pyproject.toml names, but for its own extras."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = data["project"]
    several = [data["build-system"]["requires"], project["dependencies"], *project["optional-dependencies"].values()]
    requirements = [Requirement(text) for texts in several for text in texts]
    return [each for each in requirements if each.name != project["name"]]


@pytest.mark.parametrize("asked", asked_for(), ids=str)
def test_each_dependency_is_pinned_to_an_allowed_version(asked: Requirement) -> None:
    versions = [
        next(iter(pin.specifier)).version
        for pin in PINS
        if canonicalize_name(pin.name) == canonicalize_name(asked.name)
    ]
    assert versions, f"{asked} is not in .ci/constraints.txt: make constraints"
    assert all(asked.specifier.contains(version) for version in versions), (asked, versions)


def test_every_pin_has_hashes_and_names_no_host() -> None:
    assert len(PINS) > 80
    for entry in ENTRIES:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry
    assert "://" not in LOCKED
    assert not re.search(r"^--", LOCKED, flags=re.MULTILINE)


def test_ci_installs_what_is_pinned_and_nothing_else() -> None:
    make = shutil.which("make")
    assert make is not None
    done = subprocess.run([make, "-n", "locked"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=100)
    pinned, ours = [line for line in done.stdout.splitlines() if "pip install" in line]
    assert pinned.endswith("--require-hashes -r .ci/constraints.txt")
    assert ours.endswith("--no-deps --no-build-isolation -e .")
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "pip install" not in run
    assert re.findall(r"^ *(?:\w+=\S+ )*make (\w+)", run, flags=re.MULTILINE)[0] == "locked"


def test_the_version_stands_in_one_place_and_the_others_follow() -> None:
    """pyproject.toml has it. The changelog begins with it, and the examples run its image."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+?),? ", changelog, flags=re.MULTILINE)[0] == version
    deploy = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "config" / "deploy").iterdir())
    assert set(re.findall(r"quota-ledger:(\d[\w.]*)", deploy)) == {version}
    sources = [path for wing in ("quota", "jobs") for path in (ROOT / wing).rglob("*.py")]
    assert [path for path in sources if f'"{version}"' in path.read_text(encoding="utf-8")] == []


SOUND = {"name": "a", "version": "1", "vulns": []}
SKIPPED = {"name": "b", "skip_reason": "not found"}
HURT = {"name": "c", "version": "2", "vulns": [{"id": "X-1", "fix_versions": ["3"]}]}


@pytest.mark.parametrize(
    ("dependencies", "status", "output"),
    [
        ([SKIPPED], 0, "audit: skipped: the database knows none of 1 packages, so nothing was audited"),
        ([], 0, "audit: skipped: the database knows none of 0 packages, so nothing was audited"),
        (None, 0, "audit: skipped: nothing was audited"),
        ([SOUND, SKIPPED], 0, "audit: 1 of 2 packages audited, 0 vulnerable"),
        ([SOUND, HURT], 1, "audit: c 2: X-1, mended in ['3']\naudit: 2 of 2 packages audited, 1 vulnerable"),
    ],
)
def test_an_audit_names_what_it_audited(dependencies: object, status: int, output: str, tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    if dependencies is not None:
        path.write_text(json.dumps({"dependencies": dependencies}))
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "audited.py", path], capture_output=True, text=True, check=False, timeout=100
    )
    assert (done.returncode, done.stderr) == (status, "")
    assert done.stdout.startswith(output)
