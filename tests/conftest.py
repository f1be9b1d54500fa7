"""Fixtures that several folders share."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from uuid import uuid4

import hypothesis
import pytest

import support
from support import memory
from support.certificates import Certificates
from support.patience import REAL, WALLS, be_patient
from support.servers import RedisServer

ROOT = Path(__file__).resolve().parent.parent

# Started in the background of a script, this process ignores Ctrl-C, and so would every command that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup

# As on a user's machine: without bytecode, each of the thousand commands that the tests start compiles all of `quota`.
# And without it, each worker rewrites all assertions of the tests in each run.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# How long an example takes is a matter of the machine.
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")

DISK = memory.use()
"""Where temporary folders would lie, were they not in memory."""

# Each client of HTTP or TLS reads the CAs that it trusts, and a machine's own list takes 40 ms: here it is one that
# signed nothing. `CAS_OUTSIDE` is for what asks others than our own servers.
os.environ.setdefault("CAS_OUTSIDE", os.environ.get("SSL_CERT_FILE", ""))
os.environ["SSL_CERT_FILE"] = str(Path(support.__file__).with_name("one_ca.pem"))

# google-auth that finds no default credentials asks the metadata server of Google's machines. No test leaves loopback.
os.environ["NO_GCE_CHECK"] = "true"

# What whoever runs the tests has for work of their own. In a pod `quota check` warns of a store that ends with it, and
# these tests' stores do.
for name in [*os.environ]:
    ours = name.startswith("QUOTA_") and not name.startswith(("QUOTA_SHARED_", "QUOTA_TEST_"))
    if ours or name in ("A_TOKEN", "COLUMNS", "HOOK", "KEY", "KUBERNETES_SERVICE_HOST", "NO_COLOR", "PING"):
        del os.environ[name]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: twice as many as there are CPUs, because the tests wait for half of their time."""
    return 2 * (os.cpu_count() or 1)


def pytest_collection(session: pytest.Session) -> None:
    """Where all tests run, each worker first imports a part of them. Rewriting all assertions takes a quarter of a
    minute, so each finds most of it done by the others. The collection reports modules that cannot be imported."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    if session.config.args == session.config.getini("testpaths") and "PYTEST_XDIST_WORKER_COUNT" in os.environ:
        tests = Path(__file__).parent
        paths = sorted(tests.rglob("test_*.py"))
        for path in paths[int(worker.removeprefix("gw")) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]:
            with suppress(Exception, pytest.skip.Exception):
                import_module(".".join(path.relative_to(tests).with_suffix("").parts))


NO_SKIPS = os.environ.get("QUOTA_TEST_NO_SKIPS") == "1"
"""Where everything that a test may need should be installed, a test that is skipped fails and says what is missing."""


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if NO_SKIPS and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: {reason}; with QUOTA_TEST_NO_SKIPS=1 no test may be skipped"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_if_skipped(report)
    return report


@pytest.fixture(scope="session", autouse=True)
def _patience() -> None:
    be_patient()


@pytest.fixture
def real_walls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ledgers, allowances and inbound storages wait no longer than they do for users."""
    for (owner, name), wall_s in zip(WALLS, REAL, strict=True):
        monkeypatch.setattr(owner, name, wall_s)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Pytest's, in memory where possible; with the mark `on_disk` one on the disk."""
    if request.node.get_closest_marker("on_disk") is None:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=DISK, prefix="quota-") as folder:
        yield Path(folder).resolve()


@pytest.fixture(scope="session")
def _states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(autouse=True)
def _no_state_of_the_user(_states: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that names no state folder gets one of its own, never that of whoever runs the tests."""
    monkeypatch.setenv("XDG_STATE_HOME", str(_states / uuid4().hex))


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A real redis-server of this test run (one for each worker process)."""
    server = RedisServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of recorded upstream responses; tests that need it are skipped where it is absent."""
    folder = Path(os.environ.get("QUOTA_SHARED_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"recorded upstream data is not at {folder}; name its folder in QUOTA_SHARED_DATA")
    return folder


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of the test's own, and no configuration found by accident."""
    folder = tmp_path / "state"
    monkeypatch.setenv("QUOTA_STATE_DIR", str(folder))
    monkeypatch.delenv("QUOTA_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    return folder
