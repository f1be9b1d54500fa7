"""The command line: `quota`. Each command opens a session, calls one public function and prints the result.

What is the same for all commands:

    entry.py           where the process begins; Ctrl-C works while the rest is imported
    program.py         finds the module of the command; streams, errors and the exit status
    options.py         options that several commands share
    rehearsal.py       copies of ledger and store, for a command with `--clock`
    output.py          printing, tables that fit any width, errors and logging

Where each command stands:

    deciding.py        charge, peek, exec, refund, settle; `site/` begins each Python that `exec --auto` starts
    reports.py         status, spend, log, explain, reopen; `render.py` shows what they found
    reconcile.py       reconcile
    configuration.py   init, check, doctor; `doctor.py` has the findings of the last two
    book.py            costs; book list, show, check, try, diff, new; `recorded.py` reads recorded answers
    ledger.py          ledger move, repair, scripts
    inbound.py         inbound status, top, rotate
    serving.py         dashboard, proxy
    prove.py           prove
"""
