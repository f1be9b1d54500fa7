"""What `config/deploy/Containerfile` starts, as its user over a root that nobody may write to: in a mount namespace.

No image is built here."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quota.jobs.emulator import Emulator
from support.users import needs_root

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "config" / "deploy"
TEXT = (DEPLOY / "Containerfile").read_text(encoding="utf-8").replace("\\\n", "")
CONFIG = """
[credentials.main]
api = "youtube-v3"
key = "env:YOUTUBE_API_KEY"
endpoint = "{}"
[jobs.trending]
fetch = "trending"
regions = ["US"]
pages = 1
schedule = "*/30 * * * *"
"""


def words(name: str) -> list[str]:
    return re.findall(rf"^{name} (.+)$", TEXT.rpartition("\nFROM ")[2], flags=re.MULTILINE)


def test_the_image_has_a_user_of_its_own_and_names_no_registry() -> None:
    cron_job = (DEPLOY / "cronjob.yaml").read_text(encoding="utf-8")
    assert words("USER") == ["10001:10001"]
    assert "runAsUser: 10001" in cron_job
    assert "readOnlyRootFilesystem: true" in cron_job
    bases = re.findall(r"^(?:FROM|ARG BASE=) ?(\S+)", TEXT, flags=re.MULTILINE)
    assert bases == ["python:3.12-slim", "${BASE}", "${BASE}"]
    for host in ("://", "docker.io", "ghcr.io"):
        assert host not in TEXT


def mounts(new: Path, state: Path, config: Path) -> list[str]:
    """The commands that make a read-only copy of the root at `new`, with Python, this checkout and a program in it."""
    lines = [f"mount --rbind / {new}", f"mount --make-rslave {new}", f"mount -o remount,bind,ro {new}"]
    lines += [f"mount -t tmpfs -o mode=1777 tmp {new}/tmp"]  # noqa: S108  # as the manifest does
    hidden = {"/tmp"}  # noqa: S108
    for needed in (Path(sys.base_prefix), Path(sys.prefix), ROOT):
        # Another user may pass through none of root's own folders: an empty one in its place leads there.
        for above in [*reversed(needed.parents)][1:]:
            is_hidden = any(above.is_relative_to(folder) for folder in hidden)
            if not is_hidden and not above.stat().st_mode & 0o001:
                lines.append(f"mount -t tmpfs -o mode=755 above {new}{above}")
                hidden.add(str(above))
        if any(needed.is_relative_to(folder) for folder in hidden):
            lines += [f"mkdir -p {new}{needed}", f"mount --bind {needed} {new}{needed}"]
            lines += [f"mount -o remount,bind,ro {new}{needed}"]
    program = f'#!/bin/sh\nexec {sys.executable} -m quota "$@"\n'
    lines += [f"mount -t tmpfs -o mode=755 opt {new}/opt", f"mkdir -p {new}/opt/quota/bin"]
    lines += [f"printf %s {shlex.quote(program)} >{new}/opt/quota/bin/quota", f"chmod 755 {new}/opt/quota/bin/quota"]
    lines += [f"mount -t tmpfs -o mode=755 etc {new}/srv", f"mkdir -p {new}/srv/etc {new}/srv/lib"]
    lines += [f"mount --bind {config} {new}/srv/etc", f"mount -o remount,bind,ro {new}/srv/etc"]
    return [*lines, f"mount --bind {state} {new}/srv/lib"]


@needs_root
def test_its_commands_run_as_its_user_over_a_root_that_nobody_may_write_to(tmp_path: Path) -> None:
    unshare, setpriv = shutil.which("unshare"), shutil.which("setpriv")
    if unshare is None or setpriv is None:
        pytest.skip("unshare or setpriv is not installed")
    tried = subprocess.run([unshare, "-m", "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no mount namespaces here: {tried.stderr.strip()}")
    new, state, config = (tmp_path / name for name in ("new", "state", "config"))
    for folder in (new, state, config):
        folder.mkdir()
    os.chown(state, 10001, 10001)
    env = dict(line.split("=", 1) for line in words("ENV"))
    # The places that the manifest mounts do not exist here, and a read-only root takes no new folder.
    env = {
        name: value.replace("/etc/quota", "/srv/etc").replace("/var/lib/quota", "/srv/lib")
        for name, value in env.items()
    }
    env |= {"YOUTUBE_API_KEY": "a-key-for-tests", "PYTHONPATH": str(ROOT)}
    (program,) = map(json.loads, words("ENTRYPOINT"))
    tries = [
        ["check"],
        ["run", "trending", "--quiet"],
        ["run", "trending", "--quiet"],
        ["status", "--json"],
        ["search", "a*"],
        ["spend"],
    ]
    with Emulator() as upstream:
        (config / "quota.toml").write_text(CONFIG.format(upstream.address))
        user = f"{setpriv} --reuid 10001 --regid 10001 --clear-groups --bounding-set=-all --no-new-privs"
        inside = "; ".join(
            [f"cd {env['QUOTA_STATE_DIR']}", "! touch /x 2>/dev/null", "! touch /srv/etc/x 2>/dev/null"]
            + [
                f"{shlex.join([*program, *command])} >>/srv/lib/said || echo {shlex.join(command)}: $? >&2"
                for command in tries
            ]
        )
        passed = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
        lines = ["set -e", *mounts(new, state, config)]
        lines.append(f"exec chroot {new} env -i {passed} {user} /bin/sh -ec {shlex.quote(inside)}")
        done = subprocess.run(
            [unshare, "-m", "sh", "-c", "\n".join(lines)], capture_output=True, text=True, check=False, timeout=300
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert upstream.usage()["by_method"] == {"videos.list": 2}
    assert {path.owner() if path.stat().st_uid == 0 else path.stat().st_uid for path in state.rglob("*")} == {10001}
    assert {"ledger.db", "said"} <= {path.name for path in state.iterdir()}
