"""Regional fetch jobs: run, schedule and plan them; the local store and the upstream emulator.

This folder is installed as `quota.jobs`, so that a folder `jobs/` of the user's own keeps its name.
"""

if __name__ != "quota.jobs":
    raise ImportError(
        "quota-ledger's package for jobs is quota.jobs: write for example `from quota.jobs.job import Page`"
    )
