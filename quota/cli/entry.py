"""The entry point of the command `quota`. Importing the rest takes a moment, and Ctrl-C must work during it too."""

import os
import signal


def _end(number: int, _frame: object) -> None:
    os._exit(128 + number)


def main() -> None:
    """Run the command line. Once imported, it handles Ctrl-C itself."""
    before = signal.getsignal(signal.SIGINT)
    catches = before is signal.default_int_handler  # a script starts background jobs with SIGINT ignored; keep that
    if catches:
        signal.signal(signal.SIGINT, _end)
    from quota.cli.program import main

    try:
        if catches:
            signal.signal(signal.SIGINT, before)
        main()
    except KeyboardInterrupt:  # before `main` could catch it, or after
        os._exit(128 + signal.SIGINT)
    finally:
        if catches:
            signal.signal(signal.SIGINT, _end)
