"""What stands ready to be pasted in `config/deploy/` is understood by those it is for, and runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quota.jobs.emulator import Emulator
from quota.settings.schedules import parse_schedule
from support.commands import Quota
from support.users import needs_root

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DEPLOY = ROOT / "config" / "deploy"
INSTALLED = "/opt/quota/bin/quota"


def crontab(text: str = "") -> tuple[dict[str, str], list[tuple[str, str]]]:
    """The settings and the (time, command) lines."""
    settings, lines = {}, []
    for line in (text or (DEPLOY / "crontab").read_text(encoding="utf-8")).splitlines():
        if not line or line.startswith("#"):
            continue
        if match := re.fullmatch(r"([A-Z_]+)=(.*)", line):
            settings[match[1]] = match[2]
        else:
            *when, command = line.split(None, 5)
            lines.append((" ".join(when), command))
    return settings, lines


def units(name: str) -> dict[str, list[str]]:
    texts: dict[str, list[str]] = {}
    for line in (DEPLOY / name).read_text(encoding="utf-8").splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            texts.setdefault(key, []).append(value)
    return texts


def as_cron(command: str, env: dict[str, str]) -> None:
    """Run a line as cron does: by sh, in another folder."""
    done = subprocess.run(["/bin/sh", "-c", command], cwd="/", env=env, capture_output=True, timeout=300, check=True)
    assert done.stdout + done.stderr == b"", "cron would send it as mail"


def configured(quota: Quota, upstream: Emulator, more: str = "") -> str:
    """The path of a configuration with the job `trending`, for the key in YOUTUBE_API_KEY."""
    quota.env |= {"PYTHONPATH": str(ROOT), "YOUTUBE_API_KEY": "a-key-for-tests"}
    return str(quota.configure(CONFIG.format(upstream.address) + more))


def test_the_crontab_lines_are_times_and_commands_that_run(quota: Quota, upstream: Emulator) -> None:
    settings, lines = crontab()
    assert [command for _, command in lines] == [
        "quota run trending --quiet",
        "quota run concerts --region DE --region FR --quiet",
    ], "the scheduler is a comment: with both, every job would run twice"
    assert all(parse_schedule(when) for when, _ in lines)
    assert Path(INSTALLED).parent.as_posix() in settings["PATH"].split(":")
    search = '[jobs.concerts]\nfetch = "search"\nregions = ["DE", "FR"]\npages = 1\noptions = { words = "x" }\n'
    path, (programs, _) = configured(quota, upstream, search), quota.programs()
    (programs / "quota").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m quota "$@"\n')
    for _, command in lines:
        as_cron(command, {**quota.env, "PATH": f"{programs}:/usr/bin:/bin", "QUOTA_CONFIG": path})
    assert upstream.usage()["by_method"] == {"videos.list": 3, "search.list": 2}


def test_the_readmes_crontab_runs_and_keeps_the_key_out_of_the_command(quota: Quota, upstream: Emulator) -> None:
    (block,) = re.findall(r"^```\n([^`]*\* \* \*[^`]*)^```", README, flags=re.MULTILINE)
    settings, ((when, command),) = crontab(block)
    assert parse_schedule(when)
    assert list(settings) == ["YOUTUBE_API_KEY", "QUOTA_CONFIG"]
    path = configured(quota, upstream)
    command = command.replace("/path/to/.venv/bin/quota", f"{shlex.quote(sys.executable)} -m quota")
    as_cron(command, {**quota.env, "QUOTA_CONFIG": path})
    assert upstream.usage()["requests"] == 1


@pytest.mark.parametrize(
    ("unit", "command", "needs_s"),
    [
        ("quota-run@.service", "run %i", 10),  # a page in flight is given 8 s
        ("quota-schedule.service", "schedule", 10),
        ("quota-dashboard.service", "dashboard", 5),
        ("quota-serve.service", "serve --listen 127.0.0.1:8080", 5),
        ("quota-proxy.service", "proxy", 5),
    ],
)
def test_the_services_keep_their_state_where_they_may_write(unit: str, command: str, needs_s: int) -> None:
    service = units(unit)
    assert service["ExecStart"] == [f"{INSTALLED} {command}"]
    assert "QUOTA_STATE_DIR=/var/lib/quota" in service["Environment"]
    assert service["StateDirectory"] == ["quota"]
    assert int(service["TimeoutStopSec"][0]) > needs_s


@pytest.mark.parametrize("unit", sorted(path.name for path in DEPLOY.glob("*.service")))
def test_the_guide_makes_the_services_user_and_looks_at_their_state_as_that_user(unit: str) -> None:
    """systemd starts nothing for a user that is not there, and to any other, root too, the state is somebody else's."""
    guide, service = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8"), units(unit)
    (user,) = service["User"]
    assert f"`useradd --system {user}`" in guide
    assert f"`sudo -u {user} env {' '.join(service['Environment'])} {INSTALLED} status`" in guide


def analyze(*args: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    env = {"PATH": os.environ["PATH"], "SYSTEMD_LOG_LEVEL": "warning"}
    return subprocess.run([program, *args], env=env, capture_output=True, text=True, check=False, timeout=300)


def test_systemd_understands_the_units(tmp_path: Path) -> None:
    for path in DEPLOY.glob("quota-*"):
        text = path.read_text(encoding="utf-8").replace(INSTALLED, "/bin/true")  # it looks whether the program is there
        (tmp_path / path.name.replace("@.", "@trending.")).write_text(text, encoding="utf-8")
        (tmp_path / path.name).write_text(text, encoding="utf-8")
    names = ["quota-run@trending.timer", "quota-run@trending.service"]
    names += ["quota-dashboard.service", "quota-schedule.service", "quota-serve.service", "quota-proxy.service"]
    done = analyze("verify", *(str(tmp_path / name) for name in names))
    # About this machine's own units it may have more to say.
    assert (done.returncode, [line for line in done.stderr.splitlines() if "quota-" in line]) == (0, []), done.stderr


@pytest.mark.parametrize("unit", sorted(path.name for path in DEPLOY.glob("*.service")))
def test_the_services_are_closed_to_what_they_do_not_need(unit: str) -> None:
    done = analyze("security", "--offline=true", "--threshold=15", "--no-pager", str(DEPLOY / unit))
    assert done.returncode == 0, done.stdout + done.stderr


def manifest(home: Path) -> list[Any]:
    """What the manifest makes, read by kubectl itself, or by a YAML reader where there is none."""
    path = DEPLOY / "cronjob.yaml"
    kubectl = shutil.which("kubectl")
    if kubectl is not None:
        done = subprocess.run(
            [kubectl, "annotate", "--local", "-f", str(path), "a=b", "-o", "json"],
            env={"PATH": os.environ["PATH"], "KUBECONFIG": os.devnull, "HOME": str(home)},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(each) for each in re.split(r"(?<=\n\})\n", done.stdout) if each]
    yaml = pytest.importorskip("yaml", reason="neither kubectl nor a YAML reader is installed")
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def test_all_that_the_pod_names_is_in_the_manifest_or_in_a_command_that_makes_it(tmp_path: Path) -> None:
    job, *others = manifest(tmp_path)
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    made = [f"{each['kind']} {each['metadata']['name']}" for each in others]
    commands = (DEPLOY / "cronjob.yaml").read_text(encoding="utf-8")
    for volume in pod["volumes"]:
        if "configMap" in volume:
            assert f"kubectl create configmap {volume['configMap']['name']} " in commands
        if "persistentVolumeClaim" in volume:
            assert f"PersistentVolumeClaim {volume['persistentVolumeClaim']['claimName']}" in made
    for variable in pod["containers"][0]["env"]:
        if "valueFrom" in variable:
            assert f"kubectl create secret generic {variable['valueFrom']['secretKeyRef']['name']} " in commands


def test_the_kubernetes_cron_job_runs_one_tick_at_a_time(tmp_path: Path) -> None:
    job = manifest(tmp_path)[0]
    spec = job["spec"]
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "CronJob")
    assert (spec["concurrencyPolicy"], spec["timeZone"]) == ("Forbid", "Etc/UTC")
    assert parse_schedule(spec["schedule"])
    assert spec["jobTemplate"]["spec"]["backoffLimit"] == 0
    pod = spec["jobTemplate"]["spec"]["template"]["spec"]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 30)
    (container,) = pod["containers"]
    assert container["command"] == ["quota", "run", "trending"]
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    env = {row["name"]: row.get("value", "") for row in container["env"]}
    assert {env["QUOTA_STATE_DIR"], str(Path(env["QUOTA_CONFIG"]).parent), "/tmp"} == mounted  # noqa: S108
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_pod_has_no_rights(tmp_path: Path) -> None:
    pod = manifest(tmp_path)[0]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_guide_links_to_every_file() -> None:
    guide = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    for path in DEPLOY.iterdir():
        assert f"](../config/deploy/{path.name})" in guide, path.name


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
def test_the_images_commands_run_as_its_user_on_a_read_only_root(tmp_path: Path) -> None:
    unshare, setpriv, chroot = map(shutil.which, ("unshare", "setpriv", "chroot"))
    if unshare is None or setpriv is None or chroot is None:
        pytest.skip("unshare, setpriv or chroot is not installed")
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
    tries = [["check"], ["run", "trending", "--quiet"], ["status", "--json"], ["search", "a*"]]
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
        assert upstream.usage()["by_method"] == {"videos.list": 1}
    assert {path.owner() if path.stat().st_uid == 0 else path.stat().st_uid for path in state.rglob("*")} == {10001}
    assert {"ledger.db", "said"} <= {path.name for path in state.iterdir()}
