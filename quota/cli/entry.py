"""What the command `quota` starts. Importing the rest takes a moment, in which Ctrl-C must end it as it does later."""

import os
import signal


def _end(number: int, _frame: object) -> None:
    os._exit(128 + number)


def main() -> None:
    """Run the command line. Its own code handles Ctrl-C once it is imported."""
    before = signal.getsignal(signal.SIGINT)
    catches = before is signal.default_int_handler  # and is not told to ignore it, as what a script starts with `&` is
    if catches:
        signal.signal(signal.SIGINT, _end)
    from quota.cli.commands import main

    if catches:
        signal.signal(signal.SIGINT, before)
    try:
        main()
    finally:
        if catches:
            signal.signal(signal.SIGINT, _end)
