"""Instruments a Python that `quota exec --auto` starts, and goes on with the sitecustomize that this one hides.

It is read by whatever Python the program needs, so it is written for old ones, too. A Python that it cannot instrument
does not go on: what it sends would not be charged.
"""

import os
import sys


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

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
    hidden = PathFinder.find_spec("sitecustomize")
    if hidden is not None and hidden.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(hidden)
        hidden.loader.exec_module(module)


_instrument()
_go_on()
