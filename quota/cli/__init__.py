"""The command line: `quota`. Each command opens a session, calls one public function and prints the result.

What is the same for all commands:

    entry.py           where the process begins; Ctrl-C works while the rest is imported
    program.py         finds the module of the command; streams, errors and the exit status
    options.py         options that several commands share
    rehearsal.py       copies of ledger and store, for a command with `--clock`
    output.py          printing, tables that fit any width, errors and logging

Where each command stands:

    deciding.py        charge, peek, exec, refund, settle, prove; `site/` begins each Python of `exec --auto`
    reports.py         status, spend, log, explain, reopen
    reconcile.py       reconcile
    configuration.py   init, check, doctor; `doctor.py` has the findings of the last two
    book.py            costs; book list, show, check, try, diff, new; `drafts.py` has the drafts
    ledger.py          ledger move, repair, scripts
    inbound.py         inbound status, top, rotate
    serving.py         dashboard, proxy
"""
