"""Patches of methods, in modules that are there and that come."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from quota.clients.instrument.patches import _SEARCHES, Patches, Seam, call_before
from quota.clients.instrument.processes import unseen_program


def louder(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: original(*args, **kwargs).upper()


@pytest.fixture(autouse=True)
def _none_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that another test has imported would be named here."""
    monkeypatch.delitem(sys.modules, "websockets.sync.client", raising=False)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A library that nobody has imported yet."""
    (tmp_path / "a_library.py").write_text("class Client:\n    def say(self, what):\n        return what\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "a_library"
    sys.modules.pop("a_library", None)


@pytest.fixture
def patches(made: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Patches]:
    for place in _SEARCHES:  # what `call_before` puts there stays
        monkeypatch.setattr(place, "_find_spec", place._find_spec)
    patches = Patches([Seam(made, "Client", "say", ("what",), louder)])
    yield patches
    patches.take_off()


def test_a_library_is_patched_when_it_comes(made: str, patches: Patches) -> None:
    patches.put_on()
    assert made not in sys.modules
    library = importlib.import_module(made)
    assert library.Client().say("a") == "A"
    assert type(library.__loader__).__module__ == "_frozen_importlib_external"
    assert library.__spec__.loader is library.__loader__
    patches.take_off()
    assert library.Client().say("a") == "a"
    assert "__wrapped__" not in vars(library.Client.say)


@pytest.mark.parametrize("seam", [("Other", "say", ()), ("Client", "other", ()), ("Client", "say", ("whom",))])
def test_a_library_without_the_seam_stays_unpatched_and_is_logged(
    made: str, seam: tuple[str, str, tuple[str, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    patches = Patches([Seam(made, "Client", "say", (), louder), Seam(made, *seam, louder)])
    patches.put_on()
    try:
        with caplog.at_level(logging.WARNING, "quota"):
            library = importlib.import_module(made)
    finally:
        patches.take_off()
    assert library.Client().say("a") == "a"
    assert caplog.messages == ["not_instrumented library=a_library: its requests are not charged; see docs/auto.md"]


def by_all(name: str, path: Any = None, target: Any = None) -> Any:
    """As wrapt and ddtrace do: it stands aside while it asks all finders."""
    if name == "a_library" and not asked:
        asked.append(name)
        return importlib.util.find_spec(name)
    return None


asked: list[str] = []


@pytest.mark.parametrize("find_spec", [PathFinder.find_spec, by_all])
def test_no_finder_in_front_hides_a_library_or_has_it_patched_twice(
    find_spec: Any, made: str, patches: Patches, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bool] = []
    call_before([made], lambda: begun.append(patches.put_on() is None))
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find_spec), *sys.meta_path])
    library = importlib.import_module(made)
    assert library.Client().say("a") == "A"
    assert begun == [True]
    assert not hasattr(library.Client.say.__wrapped__, "__wrapped__")


def test_an_interrupted_patch_begins_again_with_the_next_library(made: str, patches: Patches) -> None:
    def begin() -> None:
        begun.append(made in sys.modules)
        if len(begun) == 1:
            raise KeyboardInterrupt
        patches.put_on()

    begun: list[bool] = []
    call_before([made], begin)
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module(made)
    assert importlib.import_module(made).Client().say("a") == "A"
    assert begun == [False, False]


def test_a_library_that_was_found_before_all_was_taken_off_is_left_alone(made: str, patches: Patches) -> None:
    patches.put_on()
    spec = importlib.util.find_spec(made)
    assert spec is not None
    assert spec.loader is not None
    patches.take_off()
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    assert library.Client().say("a") == "a"


@pytest.mark.parametrize("module", ["pycurl", "websocket._core", "blacksheep.client"])
def test_a_library_that_has_no_place_to_patch_is_named_once(
    module: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, patches: Patches
) -> None:
    file, library = tmp_path / f"{module.replace('.', '/')}.py", module.partition(".")[0]
    file.parent.mkdir(exist_ok=True)
    file.touch()
    patches.put_on()
    for _ in range(2):
        importlib.import_module(module)
        sys.modules.pop(module)
    assert caplog.messages == [f"not_instrumented library={library}: its requests are not charged; see docs/auto.md"]


def test_a_library_that_sdks_rarely_use_is_named_when_it_connects(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, patches: Patches
) -> None:
    (tmp_path / "websocket").mkdir()
    (tmp_path / "websocket/_core.py").write_text("class WebSocket:\n    def connect(self, url):\n        return url\n")
    patches.put_on()
    client = importlib.import_module("websocket._core").WebSocket()
    assert (caplog.messages, [client.connect("a"), client.connect("b")]) == ([], ["a", "b"])
    assert caplog.messages == ["not_instrumented library=websocket: its requests are not charged; see docs/auto.md"]
    del sys.modules["websocket._core"]


@pytest.mark.parametrize("through", [True, False])
def test_httpcore_is_named_unless_httpx_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, patches: Patches, through: bool
) -> None:
    (tmp_path / "httpcore.py").touch()
    monkeypatch.setitem(sys.modules, "httpcore", ModuleType("httpcore"))
    monkeypatch.setitem(sys.modules, "httpx", ModuleType("httpx"))
    del sys.modules["httpcore"]
    if not through:
        del sys.modules["httpx"]
    patches.put_on()
    importlib.import_module("httpcore")
    remedy = "requests that httpx does not make are not charged; see docs/auto.md"
    assert caplog.messages == ([] if through else [f"not_instrumented library=httpcore: {remedy}"])


TWO_IMPORTS = """
import sys, threading, time
from quota.clients.instrument import patches
assert "http.client" not in sys.modules
searching, began = threading.Event(), threading.Event()

def begin():
    began.set()
    searching.wait(0.3)  # until the other thread holds Python's lock of http.client, if it can
    import http.client

patches.call_before(("http.client", "a_library"), begin)
inner = patches._bootstrap._find_spec

def _find_spec(name, *more):
    if name == "http.client" and threading.current_thread() is other:
        searching.set()
    return inner(name, *more)

patches._bootstrap._find_spec = _find_spec

def search():
    began.wait()
    import http.client

other = threading.Thread(target=search, daemon=True)
other.start()
import a_library
other.join()
"""


def test_two_threads_that_import_libraries_at_once_do_not_wait_for_each_other(made: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", TWO_IMPORTS]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=60, check=True)


# -- programs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("fetch -s http://api.example/", "fetch"),
        ("env -vi python x.py", "env -i"),
        ("sh -c 'exec -c python x.py'", "exec -c"),
        ("timeout 5 nice -n 3 fetch x", "fetch"),
        ("bash -ec 'if true; then fetch; fi'", "fetch"),
        ("python -I x.py", "python -I"),
        ("python -W ignore -Ec pass", "python -E"),
        ("script", "script"),
        ("find . -name x -exec fetch {} ;", "fetch"),
        ("sh -c 'cat x | A=b xargs -n 1 fetch - >y 2>&1'", "fetch"),
        ("sh -c 'eval \"a=b fetch\" x'", "fetch"),
        ('sh -c \'trap "fetch x" EXIT; env -S "python -I x"\'', "fetch"),
        ('sh -c \'env "-Spython -I x"; flock x -c "fetch x"\'', "python -I"),
        ("awk 'BEGIN { system(\"fetch x\") }'", "awk"),
        ("awk '/a|b/ { print }'", None),
        ("env PYTHONPATH=src python x.py", "python with its own PYTHONPATH"),
        ("sh -c 'cd x && export PYTHONPATH=src; nice python x.py'", "python with its own PYTHONPATH"),
        ("sh -c 'PYTHONPATH=src:$PYTHONPATH python x.py'", None),
        ("sh -c 'unset A PYTHONPATH; python x.py'", "python with its own PYTHONPATH"),
        ("bash -c 'export -n PYTHONPATH; python x.py'", "python with its own PYTHONPATH"),
        ("env python -i x.py -I", None),
        ("tool -I", None),
        ("sh -c 'python x.py; unset PYTHONPATH; echo done | tee y'", None),
        ("sh -c 'echo \"unclosed", None),
        ("sh -c '# it is\necho \"a # b\" && fetch x'", "fetch"),
        ("sh -c 'echo \"$(fetch x)\" `date`'", "fetch"),
        ("sh -c '# python first\nPYTHONPATH=src python x.py'", "python with its own PYTHONPATH"),
        ("sh -c 'cat <<X\nan apostrophe\u0027\\\u0027\u0027s\nX'", "sh -c"),
        ("not-there", None),
        ("", None),
    ],
)
def test_a_program_that_nobody_charges_is_known_by_its_command(
    command: str, program: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter = f"#!{sys.executable}"
    for name, begins in (("fetch", "\x7fELF"), ("tool", interpreter), ("script", f"{interpreter} -Es")):
        (tmp_path / name).write_text(f"{begins}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    options, quote, text = command.partition("'")
    assert unseen_program([*options.split(), *([text.removesuffix("'")] if quote else [])]) == program
