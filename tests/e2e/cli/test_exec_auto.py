"""`quota exec --auto`: programs that know nothing of quota, and their children."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import urllib3

from quota.cli.deciding import SITE
from support.commands import Quota, one_line
from support.plain_http import Answer, PlainServer
from support.servers import free_port

BOOK = """\
api = "things"
source = "https://things.example/limits"
read_on = 2026-11-25
hosts = ["api.things.example"]
buckets = { calls = { quota = 1_000, resets = "1h" } }
default = { get = 1, other = 1 }
methods = { read = 1 }
routes = { "GET /**" = "read" }
"""

# Four processes share a ledger, and a disk may stall: none of them is refused for that.
PROGRAM = f"""\
import multiprocessing, os, subprocess, sys, urllib3
sys.path.append({str(Path(__file__).parents[2])!r})
from support.patience import be_patient
be_patient()

def get(path):
    return urllib3.request("GET", os.environ["ADDRESS"] + path, retries=False).status

if __name__ == "__main__":
    get("/parent")
    multiprocessing.get_context("spawn").Pool(1).apply(get, ["/spawned"])
    multiprocessing.get_context("fork").Process(target=get, args=["/forked"]).start()
    subprocess.run([sys.executable, "-c", "import program; program.get('/started')"], check=True)
"""

UNTIL_REFUSED = """\
import os, sys, urllib3
try:
    while True:
        urllib3.request("GET", os.environ["ADDRESS"])
except urllib3.exceptions.HTTPError as error:
    if "caught" in sys.argv:
        sys.exit(3)
    raise
"""


def summed_up(quota: Quota, *command: str) -> tuple[int, str]:
    """The exit status of a command that quota charges, and what the summary says below its table."""
    done = quota("exec", "--auto", "--summary", "--", *command)
    return done.returncode, done.stderr.splitlines()[-1]


ASKS = "import os, urllib3; urllib3.request('GET', os.environ['ADDRESS'], retries=False)"
ADDRESS = "{'ADDRESS': os.environ['ADDRESS']}"
ASKING = f"[sys.executable, '-c', {ASKS!r}]"
ONE_CALL = "1 call, 1 unit, 0 refused"


@pytest.fixture
def server() -> Iterator[PlainServer]:
    with PlainServer(lambda _: Answer()) as server:
        yield server


@pytest.fixture
def quota(tmp_path: Path, server: PlainServer) -> Quota:
    quota = Quota(tmp_path)
    quota.env["ADDRESS"] = server.address
    quota.env_of_programs["PYTHONPATH"] = str(tmp_path)
    (tmp_path / "things.toml").write_text(BOOK)
    limit = '[[credentials.main.limits]]\nname = "hour"\nquota = 5\nwindow = "1h"\n'
    config = f'[credentials.main]\napi = "things.toml"\nendpoint = "{server.address}"\n{limit}'
    (tmp_path / "quota.toml").write_text(config)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "until_refused.py").write_text(UNTIL_REFUSED)
    return quota


def test_a_program_and_its_children_are_charged(quota: Quota, server: PlainServer) -> None:
    """The sitecustomize that ours hides is called, too, and ours is gone from the path."""
    hidden = "import sys; print(__file__, [one for one in sys.path if one.endswith('site')], file=sys.stderr)"
    (quota.folder / "sitecustomize.py").write_text(hidden)
    done = quota("exec", "--auto", "--summary", "--job", "nightly", "--", sys.executable, "program.py")
    lines = done.stderr.splitlines()
    assert (done.returncode, lines[-1]) == (0, "4 calls, 4 units, 0 refused")
    assert lines[-2].split() == [*quota("spend").stdout.splitlines()[2].split(), "0"]
    assert sorted(each.target for each in server.arrived) == ["/forked", "/parent", "/spawned", "/started"]
    assert f"{quota.folder / 'sitecustomize.py'} []" in lines
    assert quota("spend", "--by", "job").stdout.splitlines()[2].split() == ["nightly", "4", "4"]


OWN = """\
import quota, sys
with quota.open() as q:
    q.requests("main").get(os.environ["ADDRESS"])
    budget = q.budget("main")
    budget.settle(budget.charge("read").id, 1)
    budget.refund(budget.charge("read").id)
for command in ("charge read --credential main", "exec read --units 50 --credential main -- true"):
    os.system(f"{sys.executable} -m quota {command}")
"""


def test_a_summary_counts_each_bucket_as_spend_does(quota: Quota, server: PlainServer) -> None:
    """Also of our own clients and commands, and of a call that never left, which is refunded in each bucket."""
    several = BOOK.replace("buckets = {", 'buckets = { points = { quota = 900, resets = "1h" },')
    several = several.replace("read = 1", 'read = [{ units = 3 }, { units = 1, bucket = "calls" }]')
    (quota.folder / "things.toml").write_text(several.replace("get = 1", 'get = { units = 2, bucket = "calls" }'))
    config = (quota.folder / "quota.toml").read_text().replace("quota = 5", "quota = 50")
    quota.configure(
        f'{config}[credentials.other]\nproject = "main"\napi = "things.toml"\nendpoint = "http://127.0.0.1:1"\n'
    )
    failing = "\ntry: urllib3.request('GET', 'http://127.0.0.1:1/x', retries=False)\nexcept Exception: pass"
    program = f"{ASKS};{ASKS}{failing}\n{OWN}"
    summary = "5 calls, 18 units, 1 refused; units of several buckets are added up"
    assert summed_up(quota, sys.executable, "-c", program) == (0, summary)
    spend = quota.json("spend")
    assert (spend["total_units"], sum(row["calls"] for row in spend["refused"])) == (18, 1)


def test_a_sitecustomize_that_goes_on_with_no_other_hides_nothing(quota: Quota, server: PlainServer) -> None:
    """OpenTelemetry's is one, and it comes first again in what it has instrumented."""
    command = "quota exec --auto --summary -- env opentelemetry-instrument sh -c 'python small.py'"
    (quota.folder / "small.py").write_text(f"import subprocess, sys; {ASKS}; subprocess.run({ASKING}, check=True)")
    traced = {f"OTEL_{name}_EXPORTER": "console" for name in ("TRACES", "METRICS", "LOGS")}
    traced["OTEL_PYTHON_DISABLED_INSTRUMENTATIONS"] = "urllib3"
    programs = f"{Path(sys.executable).parent}:{quota.env['PATH']}"
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=quota.folder,
        env=quota.env | quota.env_of_programs | traced | {"PATH": programs},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "2 calls, 2 units, 0 refused"), done.stderr
    assert len(server.arrived) == 2


MAKES_ENVIRONMENTS = f"""\
import os, pickle, shlex, subprocess, sys
subprocess.run({ASKING}, env={{**os.environ, "PYTHONPATH": "src"}})
subprocess.run({ASKING}, env={ADDRESS}, cwd="/")
os.waitpid(os.posix_spawn(sys.executable, {ASKING}, {ADDRESS}), 0)
os.environ["PYTHONPATH"] = "src"
pickle.loads(pickle.dumps(os.system))(shlex.join({ASKING}))  # as in a pool of processes
os.execve(sys.executable, {ASKING}, {ADDRESS})
"""


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (MAKES_ENVIRONMENTS, "5 calls, 5 units, 0 refused"),
        (f"import os, sys; os.environ['PYTHONPATH'] = 'src'; os.execv(sys.executable, {ASKING})", ONE_CALL),
        (f"import os, sys; a = {ADDRESS}; os.environ.clear(); os.environ.update(a); os.chdir('/'); {ASKS}", ONE_CALL),
        (f"import atexit; atexit.register(lambda: exec({ASKS!r}))", ONE_CALL),
        (f"import quota; quota.instrument(); {ASKS}", ONE_CALL),
    ],
    ids=["makes environments", "goes on as", "empties its own", "at exit", "instruments itself"],
)
def test_a_program_with_an_odd_environment_is_charged(
    quota: Quota, server: PlainServer, program: str, message: str
) -> None:
    """It makes the environment of its children, empties its own, asks at its very end, or instruments itself."""
    assert summed_up(quota, sys.executable, "-c", program) == (0, message)
    assert len(server.arrived) == int(message[0])


AT_ONCE = """\
import asyncio, os, threading
import importlib.metadata, importlib.resources  # threads that import both at once may meet CPython's _DeadlockError
ADDRESS = os.environ["ADDRESS"]

def by_aiohttp():
    import aiohttp
    async def main():
        async with aiohttp.ClientSession() as session, session.get(ADDRESS):
            pass
    asyncio.run(main())

def by_httplib2():
    import httplib2
    httplib2.Http().request(ADDRESS)

def by_httpx():
    import httpx
    httpx.get(ADDRESS)

def by_requests():
    import requests
    requests.get(ADDRESS)

def by_urllib3():
    import urllib3
    urllib3.request("GET", ADDRESS)

threads = [threading.Thread(target=each) for each in (by_aiohttp, by_httplib2, by_httpx, by_requests, by_urllib3)]
for step in (threading.Thread.start, threading.Thread.join):
    list(map(step, threads))
"""


def test_threads_that_import_their_libraries_at_once_are_all_charged(quota: Quota, server: PlainServer) -> None:
    """None sends before all is ready, whichever imports the first library."""
    assert summed_up(quota, sys.executable, "-c", AT_ONCE) == (0, "5 calls, 5 units, 0 refused")
    assert len(server.arrived) == 5


def test_a_library_that_is_imported_before_ours_is_charged(quota: Quota, server: PlainServer) -> None:
    """As by a .pth file of an editable installation."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", quota.folder / "theirs"], check=True)
    (packages,) = (quota.folder / "theirs").glob("lib/python*/site-packages")
    (packages / "a.pth").write_text(str(Path(urllib3.__file__).parents[1]))
    (packages / "b.pth").write_text("import urllib3")
    assert summed_up(quota, "theirs/bin/python", "-c", ASKS) == (0, ONE_CALL)
    assert len(server.arrived) == 1


def test_a_refusal_that_ends_the_program_ends_it_with_75(quota: Quota, server: PlainServer) -> None:
    done = quota("exec", "--auto", "--", sys.executable, "until_refused.py")
    assert (done.returncode, len(server.arrived)) == (75, 5)
    assert "refused read (1 unit) on main: limit 'hour' has 5 of 5 units used; next at" in done.stderr.splitlines()[-1]
    caught = f"{sys.executable} until_refused.py caught"
    assert summed_up(quota, "sh", "-c", caught) == (3, "0 calls, 0 units, 1 refused"), "it ends as it likes"
    (quota.folder / "things.toml").write_text(BOOK.replace("read = 1", "read = 9"))
    assert summed_up(quota, sys.executable, "-c", ASKS) == (2, "0 calls, 0 units, 1 refused"), "it can never fit"


def test_a_python_that_cannot_be_instrumented_does_not_run(quota: Quota) -> None:
    (quota.folder / "theirs").mkdir()  # the program has a module of our name, and its own come first
    (quota.folder / "theirs" / "quota.py").touch()
    for variable, why in (
        ("QUOTA_CONFIG=nowhere.toml", "nowhere.toml: "),
        ("PYTHONPATH=$PYTHONPATH:theirs", "No module named 'quota.auto'"),
    ):
        done = quota("exec", "--auto", "--", "sh", "-c", f"{variable} {sys.executable} -c 'import urllib3; print(1)'")
        line = f"{sys.executable} cannot be instrumented, so it does not run: {why}"
        assert (one_line(done, 78)[: len(line)], done.stdout) == (line, "")
    for node in ast.walk(ast.parse((SITE / "sitecustomize.py").read_text())):  # else an old one ignores it
        assert not isinstance(node, (ast.AnnAssign, ast.JoinedStr, ast.NamedExpr, ast.Nonlocal))
        assert getattr(node, "annotation", None) is getattr(node, "returns", None) is None
        assert not any(isinstance(element, ast.Starred) for element in getattr(node, "elts", ()))
    for old in Path.home().glob(".pyenv/versions/[23].[67].*/bin/python"):
        done = quota("exec", "--auto", "--", sys.executable, "-c", f"import os; os.execl(*['{old}'] * 2, '-Bc', '')")
        assert one_line(done, 78).startswith(f"{old} cannot be instrumented, so it does not run")


def test_a_killed_program_has_reported_what_it_spent(quota: Quota, server: PlainServer) -> None:
    killed = "import os, program; program.get('/a'); program.get('/b'); os.kill(os.getpid(), 9)"
    assert summed_up(quota, sys.executable, "-c", killed) == (137, "2 calls, 2 units, 0 refused")
    assert len(server.arrived) == 2


def test_without_the_ledger_nothing_leaves_and_the_program_ends_with_69(quota: Quota, server: PlainServer) -> None:
    away = f"redis://127.0.0.1:{free_port()}/0"
    done = quota("exec", "--auto", "--", sys.executable, "until_refused.py", QUOTA__LEDGER__URL=away)
    assert (done.returncode, server.arrived) == (69, [])


NOT_CHARGED = "its requests are not charged; see docs/auto.md, or send them through `quota proxy`"
NOTHING = "0 calls, 0 units, 0 refused; no Python ran that quota can instrument"


@pytest.mark.parametrize(
    ("command", "program"),
    [(["./fetch"], "fetch"), (["sh", "-c", "./fetch"], "fetch"), ([sys.executable, "-Ic", ""], "python -I")],
)
def test_a_program_whose_requests_nobody_sees_is_named(quota: Quota, command: list[str], program: str) -> None:
    (quota.folder / "fetch").symlink_to("/bin/true")
    done = quota("exec", "--auto", "--summary", "--", *command)
    named = program.replace("python", Path(sys.executable).name)
    assert (done.returncode, done.stderr) == (0, f"quota: {named} is not instrumented: {NOT_CHARGED}\n{NOTHING}\n")


CHILDREN = """\
import os, subprocess
subprocess.run(["called"], executable="./ran")
subprocess.run(["in_its_path"], env={"PATH": "."})
subprocess.run("uname | ./ran", shell=True)
os.system("./from_a_shell")
os.waitpid(os.posix_spawn("./spawned", ["spawned"], os.environ), 0)
os.execv("./gone_on_as", ["gone_on_as"])
"""


def test_a_child_whose_requests_nobody_sees_is_named_once(quota: Quota) -> None:
    names = ("ran", "in_its_path", "from_a_shell", "spawned", "gone_on_as")
    for name in names:
        (quota.folder / name).symlink_to("/bin/true")
    done = quota("exec", "--auto", "--", sys.executable, "-c", CHILDREN)
    lines = [f"not_instrumented program={name}: {NOT_CHARGED}" for name in names]
    assert (done.returncode, done.stderr.splitlines()) == (0, lines)


def test_a_program_without_charged_requests_gets_a_hint(quota: Quota, server: PlainServer) -> None:
    program = "import os, sys, urllib3; os.unlink('quota.toml'); sys.exit(3)"  # the configuration was read before
    done = quota("exec", "--auto", "--summary", "--", sys.executable, "-c", program)
    assert done.returncode == 3
    summary = f"0 calls, 0 units, 0 refused; quota charged no request to {server.address[7:]} (free calls aside)"
    ways = "see docs/auto.md for what it cannot see, or name another address as `endpoint` of the credential"
    assert done.stderr == f"{summary}; {ways}\n"


def test_no_file_of_the_folder_where_it_starts_takes_the_place_of_ours(quota: Quota, server: PlainServer) -> None:
    """The program's own folder is on its path only once we are there."""
    for name in ("quota.py", "sitecustomize.py"):
        (quota.folder / name).write_text("print('not ours', file=__import__('sys').stderr)")
    del quota.env_of_programs["PYTHONPATH"]
    quota.env["PYTHONSAFEPATH"] = "1"  # for our own command, as `python -m` looks into the folder
    program = ["env", "-u", "PYTHONSAFEPATH", sys.executable, "until_refused.py", "caught"]
    assert summed_up(quota, *program) == (3, "5 calls, 5 units, 1 refused")
    assert len(server.arrived) == 5


def test_wrong_usage_is_one_line(quota: Quota) -> None:
    for args, status, message in (
        (["--auto"], 2, "no command to run; write: quota exec --auto -- COMMAND; see"),
        (["read", "--auto", "--", "true"], 2, "with --auto each request names its method; leave METHOD, --units and"),
        (["--summary", "read", "--", "true"], 2, "--summary belongs to --auto"),
        (["--", "true"], 2, "say what to charge: METHOD, or --auto for the requests of a Python program"),
        (["--auto", "--credential", "x", "--", "true"], 2, "quota.toml has no credential 'x'; known: main"),
        (["--auto", "--", "./nowhere"], 127, "./nowhere: No such file or directory"),
    ):
        assert one_line(quota("exec", *args), status).startswith(message)
