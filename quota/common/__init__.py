"""Helpers for every other package. They know nothing of quotas.

clock.py         times in milliseconds, and as text
text.py          text for people, logs and programs
log.py           a line of the log, and warnings; `log_lines.py` formats them
redact.py        keeps secrets out of messages
files.py         files and folders: of our own, named by a user, or shipped; and who could change them
sqlite_file.py   a SQLite file that processes share
fork.py          keeps a forked child from using its parent's resources
findings.py      the findings of `quota check` and `quota doctor`, also about folders
hosts.py         hosts, addresses and connections
"""
