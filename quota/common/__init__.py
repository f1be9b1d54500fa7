"""What every other room uses. It knows nothing of quotas.

A file for each idea:

    clock.py         times in milliseconds, and as text
    text.py          text for people, logs and programs
    log.py           a line of the log, and warnings; `log_lines.py` writes them, once there is a log
    redact.py        keeps secrets out of messages
    files.py         files and folders: made safely, named by somebody, shipped; and who could change them
    sqlite_file.py   a SQLite file that processes share
    fork.py          what a forked child must not share with its parent
    findings.py      what `quota check` and `quota doctor` say, also of folders
    hosts.py         hosts, addresses and connections
    functions.py     what a call makes, and several calls at once

"""
