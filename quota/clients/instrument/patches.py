"""Puts patches on methods of other people's classes, now or when their module is imported, and takes them off again.

Nothing here imports a library. A method that another package has wrapped meanwhile stays under its wrapper, and does
what the original does.
"""

from __future__ import annotations

import functools
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from quota.common.log import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Seam(NamedTuple):
    """The method `name` of a class in a module: `wrap` makes of the original what replaces it. It must have the
    `parameters`, or the library is one that nobody has tried."""

    module: str
    owner: str
    name: str
    parameters: tuple[str, ...]
    wrap: Wrap


class Patches:
    """Patches for these seams. `put_on` once, `take_off` once."""

    def __init__(self, seams: Iterable[Seam]) -> None:
        self._seams: dict[str, list[Seam]] = {}
        for seam in seams:
            self._seams.setdefault(seam.module, []).append(seam)
        self._on: list[tuple[Any, str, Any, Any]] = []
        self._finder = _Finder(self._seams, self._patch)

    def put_on(self) -> None:
        sys.meta_path.insert(0, self._finder)
        for name in self._seams:
            if name in sys.modules:
                self._patch(import_module(name))  # waits for a thread that is in the middle of it

    def take_off(self) -> None:
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        while self._on:
            owner, name, patch, before = self._on.pop()
            if vars(owner).get(name) is patch:
                setattr(owner, name, before)

    def _patch(self, module: ModuleType) -> None:
        """All seams of a module, or none."""
        seams = self._seams[module.__name__]
        owners = [getattr(module, seam.owner, None) for seam in seams]
        if not all(map(_fits, seams, owners)):
            library = module.__name__.partition(".")[0]
            version = getattr(sys.modules.get(library), "__version__", None)
            warn("not_instrumented", "its requests are not charged", library=library, version=version)
            return
        for seam, owner in zip(seams, owners, strict=True):
            original = getattr(owner, seam.name)
            patch = functools.wraps(original)(seam.wrap(original))
            self._on.append((owner, seam.name, patch, vars(owner)[seam.name]))
            setattr(owner, seam.name, patch)


def _fits(seam: Seam, owner: Any) -> bool:
    if owner is None or seam.name not in vars(owner):
        return False
    import inspect  # late: few processes import a library

    try:
        known = inspect.signature(getattr(owner, seam.name)).parameters
    except (ValueError, TypeError):
        return False
    return all(name in known for name in seam.parameters)


class Waiting:
    """Calls `begin` before the first of these modules is imported, and is gone then."""

    def __init__(self, names: Iterable[str], begin: Callable[[], None]) -> None:
        self._names = frozenset(names)
        self._begin = begin

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._begin()
        return _found(self, fullname, path, target)  # by what `begin` has put there


def _found(by: object, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
    """What the other finders find."""
    for finder in sys.meta_path:
        if finder is not by and (find := getattr(finder, "find_spec", None)) is not None:
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                return spec
    return None


class _Finder:
    """Lets others find a module, and has it patched once it is loaded."""

    def __init__(self, names: Iterable[str], patch: Callable[[ModuleType], None]) -> None:
        self._names = frozenset(names)
        self._patch = patch

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        spec = _found(self, fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = cast("Any", _Loader(spec.loader, self._patch))
        return spec


class _Loader:
    """A loader that is out of the way again once the module is loaded."""

    def __init__(self, loader: Any, patch: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._patch = patch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._patch(module)
