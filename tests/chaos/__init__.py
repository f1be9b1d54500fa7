"""A chaos run: real processes, a real Redis behind a failing network, and a count at the end of what really happened.

    scene.py      the numbers of a run, and the folder where everything lies
    worker.py     one worker: ticks of the real runner, calls of the real client, or charges and plain HTTP
    course.py     starts all of that, strikes, heals, and waits for the last tick
    judge.py      reads everything back, and holds it against each other
    __main__.py   one run and its table

`python -m chaos` (in the folder `tests`) is one run; `make chaos` does that. `support.torture` shows on the log alone
what a log, a union or a journal must hold after any loss. Here requests leave and pages are stored.
"""
