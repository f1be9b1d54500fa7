"""Patches methods of other libraries' classes, now or when their module is imported, and takes the patches off again.

Nothing here imports a library. If another package has wrapped a patch meanwhile, the patch stays under that wrapper and
does what the original does.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from threading import RLock
from types import ModuleType
from typing import Any, NamedTuple, cast

from quota.common.log import warn

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

_bootstrap: Any = importlib._bootstrap
_SEARCHES: tuple[Any, ...] = (_bootstrap, importlib.util)
"""Where Python looks up `_find_spec`. That function asks all finders, so no finder can hide a module from a patch of
it."""

UNSEEN = (
    "aioquic.asyncio.client", "aiosonic", "asks", "blacksheep.client", "curl_cffi", "cycletls", "geventhttpclient",
    "grpclib.client", "hrequests", "httpcloak", "httpmorph", "httpr", "httpunk", "httpx_socks", "impit", "lomond",
    "noble_tls", "picows", "primp", "pycurl", "pyqwest", "pyreqwest", "rnet", "tls_client", "tls_requests",
    "tornado.simple_httpclient", "twisted.web.client", "websocket._core", "websockets.asyncio.client",
    "websockets.legacy.client", "websockets.sync.client", "wreq", "ws4py.client", "zapros",
)  # fmt: skip
"""Libraries with network code of their own, which has no place to patch."""

SEEN_THROUGH = {"httpcore": "httpx", "httpcore2": "httpx2"}
"""Libraries whose requests are charged only if another library, which the program has imported before, makes them."""

NAMED = (*UNSEEN, *SEEN_THROUGH)
"""Libraries that a warning names when a program imports them."""

RECORDER = "vcr.patch"
"""The module in which vcrpy keeps the originals that it has seen when it was imported. It sends over them."""

MAX_WRAPPERS = 100
"""The most wrappers of one method that are looked through. An object may claim any number."""


class Seam(NamedTuple):
    """The method `name` of a class in a module. `wrap` takes the original and returns the replacement. Without these
    `parameters` the library is a version that is not supported, and stays unpatched."""

    module: str
    owner: str
    name: str
    parameters: tuple[str, ...]
    wrap: Wrap


class Patches:
    """Patches for these seams. `put_on` once, `take_off` once."""

    def __init__(self, seams: Iterable[Seam]) -> None:
        self._seams: dict[str, list[Seam]] = {name: [] for name in NAMED}
        self._named: set[str] = set()
        # PRAW and other SDKs import it for calls that few programs make, so it is named when it connects.
        for seam in (*seams, Seam("websocket._core", "WebSocket", "connect", ("url",), self._naming)):
            self._seams.setdefault(seam.module, []).append(seam)
        self._on: list[tuple[Any, str, Any, Any]] = []

    def put_on(self) -> None:
        for place in _SEARCHES:
            self._replace(place, "_find_spec", self._patching)
        for name in self._seams:
            if name in sys.modules:
                self._patch(importlib.import_module(name))  # waits for a thread that is importing it

    def take_off(self) -> None:
        while self._on:
            owner, name, patch, before = self._on.pop()
            for place, known_as in ((owner, name), *_recorded([patch])):
                if vars(place).get(known_as) is patch:
                    setattr(place, known_as, before)

    def _replace(self, owner: Any, name: str, wrap: Wrap) -> None:
        methods: list[Any] = []  # the method, and those that it wraps
        method = getattr(owner, name)
        while method is not None and len(methods) < MAX_WRAPPERS:
            methods.append(method)
            method = getattr(method, "__wrapped__", None)
        for place, known_as in ((owner, name), *_recorded(methods)):
            original = getattr(place, known_as)
            patch = functools.wraps(original)(wrap(original))
            self._on.append((place, known_as, patch, vars(place)[known_as]))
            setattr(place, known_as, patch)

    def _patching(self, search: Callable[..., Any]) -> Callable[..., Any]:
        """Patches a module once it is loaded, whatever finder finds it."""

        def _find_spec(name: str, path: Any, target: Any = None) -> ModuleSpec | None:
            spec: ModuleSpec | None = search(name, path, target)
            if name in self._seams and self._on and spec is not None and spec.loader is not None:
                spec.loader = cast("Any", _Loader(spec.loader, self._patch))
            return spec

        return _find_spec

    def _patch(self, module: ModuleType) -> None:
        """Patch all seams of a module, or none, and only once: two nested searches may find the same module."""
        if not self._on:  # the patches were taken off while it was loaded
            return
        through = SEEN_THROUGH.get(module.__name__)
        if through in sys.modules:
            return
        seams = self._seams[module.__name__]
        owners = [getattr(module, seam.owner, None) for seam in seams]
        owners = [getattr(owner, "_baseclass", owner) for owner in owners]  # a recorder (vcrpy) may stand in its place
        if any(owner is patched for patched, *_ in self._on for owner in owners):
            return
        if not seams or not all(map(_fits, seams, owners)):
            self._name(module.__name__, f"requests that {through} does not make" if through else "its requests")
            return
        for seam, owner in zip(seams, owners, strict=True):
            self._replace(owner, seam.name, seam.wrap)

    def _name(self, module: str, which: str = "its requests") -> None:
        """Say once that a library is not charged."""
        library = module.partition(".")[0]
        if library not in self._named:
            self._named.add(library)
            version = getattr(sys.modules.get(library), "__version__", None)
            warn("not_instrumented", f"{which} are not charged; see docs/auto.md", library=library, version=version)

    def _naming(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def named(*args: Any, **options: Any) -> Any:
            self._name(original.__module__)
            return original(*args, **options)

        return named


def _recorded(methods: Sequence[Any]) -> list[tuple[Any, str]]:
    """The places where vcrpy keeps one of these methods."""
    kept = list(vars(sys.modules[RECORDER]).items()) if RECORDER in sys.modules else []
    return [(sys.modules[RECORDER], name) for name, value in kept if any(value is method for method in methods)]


def _fits(seam: Seam, owner: Any) -> bool:
    if owner is None or seam.name not in vars(owner):
        return False
    import inspect  # late: few processes import a library

    try:
        parameters = inspect.signature(getattr(owner, seam.name)).parameters
    except (ValueError, TypeError):
        return False
    return all(name in parameters for name in seam.parameters)


FIRST = "http.client"
"""The module that `begin` imports first. It is awaited, too."""


def call_before(names: Iterable[str], begin: Callable[[], None]) -> None:
    """Call `begin` before Python searches for the first of these modules. Other threads wait until `begin` ends."""
    awaited, began = frozenset(names), False
    search, lock = _bootstrap._find_spec, RLock()

    def _find_spec(name: str, path: Any, target: Any = None) -> Any:
        nonlocal awaited, began
        if name not in awaited:
            return search(name, path, target)
        if name != FIRST and not began:
            # A thread that waits below holds Python's lock of the module that it imports. If that is FIRST, and another
            # thread were in `begin`, each would wait for the other. So only a thread that imports FIRST calls `begin`.
            importlib.import_module(FIRST)
        with lock:
            if began and awaited:  # `begin` itself imports it
                return search(name, path, target)
            if awaited:
                began = True
                try:
                    begin()
                    awaited = frozenset()
                finally:
                    began = not awaited  # if interrupted, the next search calls it again
        return _bootstrap._find_spec(name, path, target)  # `begin` may have replaced it

    for place in _SEARCHES:
        place._find_spec = _find_spec


class _Loader:
    """A loader that restores the original loader, loads the module and patches it."""

    def __init__(self, loader: Any, patch: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._patch = patch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._patch(module)
