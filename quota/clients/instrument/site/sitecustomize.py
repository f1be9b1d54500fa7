"""Instruments a Python that `quota exec --auto` starts, and goes on with the sitecustomize that this one hides.

It is read by whatever Python the program needs, so it is written for old ones, too. A Python that it cannot instrument
does not go on: what it sends would not be charged.

Others put their folder before ours, and not all of them go on with what they hide: OpenTelemetry's does not. So ours
comes first again in the PYTHONPATH of what this process starts, and of what takes its place.
"""

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


def _instrument() -> None:
    try:
        if sys.version_info < (3, 11):  # noqa: UP036
            raise ImportError("quota needs Python 3.11 or newer")
        try:
            import quota.auto
        except ImportError:
            sys.path.append(os.environ["QUOTA_AUTO_HOME"])  # at the end: the program's own packages come first
            import quota.auto
        quota.auto.instrument_by_environment()
    except Exception as error:
        said = "quota: %s cannot be instrumented, so it does not run: %s\n" % (sys.executable, error)  # noqa: UP031
        os.write(2, said.encode("utf-8", "replace"))
        os._exit(78)


def _go_on() -> None:
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
    hidden = PathFinder.find_spec("sitecustomize")
    if hidden is not None and hidden.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(hidden)
        hidden.loader.exec_module(module)


def _come_first(environment: "MutableMapping[str, str]") -> None:
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    if _HERE in folders[1:]:
        environment["PYTHONPATH"] = os.pathsep.join([_HERE] + [one for one in folders if one != _HERE])


def _come_first_in_what_takes_our_place() -> None:
    execv, execve = os.execv, os.execve

    def ours(path: "Any", argv: "Any") -> None:
        _come_first(os.environ)
        execv(path, argv)

    def ours_with(path: "Any", argv: "Any", env: "Any") -> None:
        env = dict(env)
        _come_first(env)
        execve(path, argv, env)

    os.execv, os.execve = ours, ours_with  # type: ignore[assignment]  # all functions of this kind end in these


_instrument()
_come_first_in_what_takes_our_place()
try:
    _go_on()
finally:
    _come_first(os.environ)
