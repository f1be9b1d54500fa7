"""Regional fetch jobs: run, schedule and plan them; the local store and the upstream emulator.

    job               what a job consists of: read it first
    runner            one run of a job; `run_job` is the door
    attempts          one step of a run, tried again where that may help, and what its errors mean
    fetches, walks    the built-in fetch functions, and how they go down long lists
    places            whose the regions of a job are, and where it stands in them
    lock              one run at a time on a machine
    progress          what a run says as it goes on
    interruption      signals, while a page in flight may still be stored
    afterwards        what follows a run: metrics, notices, a health check
    tick              `quota run`, which every tick loads
    commands, data    the other commands: those that run something, and those about what jobs keep
    checks            what `quota check` and `quota doctor` ask
    dashboard         what the page and `quota spend` ask

and in folders `store/`, `schedule/`, `plan/`, `api/` and `emulator/`.

This folder is installed as `quota.jobs`, so that a folder `jobs/` of the user's own keeps its name.
"""

if __name__ != "quota.jobs":
    raise ImportError(
        "quota-ledger's package for jobs is quota.jobs: write for example `from quota.jobs.job import Page`"
    )
