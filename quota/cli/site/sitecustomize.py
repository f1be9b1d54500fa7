"""Instruments a Python that `quota exec --auto` starts, then runs the sitecustomize that this file hides.

Any Python of the program reads this file, so it has no annotations and no other syntax that Python 2.7 lacks. It ends a
Python that it cannot instrument, because that Python's requests would not be charged.

A program may start another Python with an environment of its own. Others put their folder before this one:
OpenTelemetry does, and its sitecustomize runs no other. So every program that this process starts, or becomes, gets
this folder first again.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
# ruff: noqa: RUF005, UP031

import os
import sys

if sys.version_info < (3, 11):  # noqa: UP036
    try:
        why = "quota needs Python 3.11 or newer"
        sys.stderr.write("quota: %s cannot be instrumented, so it does not run: %s\n" % (sys.executable, why))
        sys.stderr.flush()  # before 3.9 it is buffered, unless it is a terminal
    finally:
        os._exit(78)

_HERE = os.path.dirname(os.path.abspath(__file__))
_GIVEN = {name: text for name, text in os.environ.items() if name.startswith("QUOTA_")}


def _instrument():
    try:
        try:
            import quota.auto
        except ImportError:
            sys.path.append(os.environ["QUOTA_AUTO_HOME"])  # last: the program's own packages come first
            import quota.auto
        quota.auto.instrument_by_environment(_GIVEN)
    except Exception as error:
        text = "quota: %s cannot be instrumented, so it does not run: %s\n" % (sys.executable, error)
        os.write(2, text.encode("utf-8", "replace"))
        os._exit(78)


def _go_on():
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
    hidden = PathFinder.find_spec("sitecustomize")
    if hidden is not None and hidden.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(hidden)
        hidden.loader.exec_module(module)


def _instrumented(environment):
    """The given environment, with the variables that instrument a Python."""
    instrumented = dict(_GIVEN)
    instrumented.update((os.fsdecode(name), os.fsdecode(text)) for name, text in environment.items())
    folders = instrumented.get("PYTHONPATH")
    others = [folder for folder in folders.split(os.pathsep) if folder != _HERE] if folders else []
    instrumented["PYTHONPATH"] = os.pathsep.join([_HERE] + others)
    return instrumented


def _keep_our_environment():
    for name, text in _instrumented(os.environ).items():
        if os.environ.get(name) != text:  # write only changes: other threads may be reading
            os.environ[name] = text


def _instrument_what_is_started():
    import _posixsubprocess  # subprocess and multiprocessing start programs with it

    execv, execve, fork_exec, system = os.execv, os.execve, _posixsubprocess.fork_exec, os.system
    name_program = sys.modules["quota.auto"].name_program

    def ours(path, argv):
        name_program([path] + list(argv[1:]))
        _keep_our_environment()
        execv(path, argv)

    def ours_with(path, argv, env):
        name_program([path] + list(argv[1:]))
        execve(path, argv, _instrumented(env))

    def forked(args, programs, closes, passed, cwd, env, *more):
        # By the file that will run: `executable`, `cwd` and the child's own PATH may name another than `args` do here.
        paths = [os.path.join(os.fsencode(cwd or ""), os.fsencode(program)) for program in programs]
        there = [path for path in paths if os.access(path, os.X_OK)]
        name_program(list((there or args)[:1]) + list(args[1:]))
        if env is None:
            _keep_our_environment()
        else:
            given = _instrumented(dict(pair.split(b"=", 1) for pair in env))
            env = [os.fsencode(name) + b"=" + os.fsencode(text) for name, text in given.items()]
        return fork_exec(args, programs, closes, passed, cwd, env, *more)

    def spawning(spawn):
        def spawned(path, argv, env, **options):
            name_program([path] + list(argv[1:]))
            return spawn(path, argv, _instrumented(os.environ if env is None else env), **options)

        return spawned

    def by_shell(command):
        name_program(["sh", "-c", command])
        _keep_our_environment()
        return system(command)

    started = {"system": by_shell, "execv": ours, "execve": ours_with}  # all functions of os that exec end in these
    started.update((name, spawning(getattr(os, name))) for name in ("posix_spawn", "posix_spawnp"))
    for name, start in started.items():
        start.__module__, start.__qualname__ = "os", name  # by these it travels to a pool of processes
        setattr(os, name, start)
    _posixsubprocess.fork_exec = forked
    if "subprocess" in sys.modules:
        sys.modules["subprocess"]._fork_exec = forked  # type: ignore[attr-defined]


_instrument()
_instrument_what_is_started()
try:
    _go_on()
finally:
    _keep_our_environment()
