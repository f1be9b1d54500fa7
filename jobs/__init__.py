"""Regional fetch jobs: run, schedule and plan them; the local store and the upstream emulator.

    job               the parts of a job: read it first
    runner            one run of a job; `run_job` is the door
    endings           the reports of a run, by how it ended
    attempts          one step of a run with its retries, and what its errors mean
    fetches           the built-in fetch functions
    places            who may cover the regions of a job, and where it stands in them
    lock              keeps the runs of one machine apart
    progress          shows the progress of a run
    interruption      signals, and the time to store the page in flight
    afterwards        what follows a run: metrics, notices, a health check
    tick              `quota run`, the only command that every tick loads
    ticks             when each tick of each job starts, and lines for cron
    scheduler         `quota schedule`, the process that starts them
    commands, data    the other commands: `commands` runs things, `data` reads what jobs stored
    contributions     what jobs add to `quota check`, `doctor`, `dashboard`, `spend` and `status`

The folders are `store/`, `plan/`, `api/` and `emulator/`.

This folder is installed as `quota.jobs`, so that a user's own folder `jobs/` keeps its name.
"""

if __name__ != "quota.jobs":
    raise ImportError(
        "quota-ledger's package for jobs is quota.jobs: write for example `from quota.jobs.job import Page`"
    )
