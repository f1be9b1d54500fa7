"""A chaos run: real processes, a real Redis behind a failing network, and a count at the end of what really happened.

    scene.py        the numbers of a run: machines, workers, limits, and the folders where everything lies
    plan.py         which faults strike when: a pure function of the seed
    upstream.py     the emulator as a process of its own, which writes down every request that reached it
    journal.py      what each worker says it did, one line an event, written so that a kill loses none
    worker.py       one worker: ticks of the real runner, calls of the real client, or charges and plain HTTP
    pages.py        the fetch function of the ticks
    server.py       Redis with its append-only file, copies of it, and its log as it was before a loss
    supervisor.py   starts all of that, does what the plan says, heals, waits for the last tick
    evidence.py     reads everything back: wire, journals, ledger, allowances, stores
    verdict.py      holds them against each other
    __main__.py     one run and its table

`python -m chaos` (in the folder `tests`) is one run; `make chaos` does that.
"""
