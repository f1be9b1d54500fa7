"""A process that charges all the time: `python -m support.charger CONFIG JOURNAL STOP`, with QUOTA_STATE_DIR set.

Each charge is a session of its own, as cron would start it, so it follows an edited configuration. What it was told is
a line of JSON in the file JOURNAL. It ends once the file STOP exists and it owes nothing, after a last decision.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

import quota

REST_S = 0.03


class _Noted(logging.Handler):
    def __init__(self, journal: int) -> None:
        super().__init__(logging.WARNING)
        self._journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        os.write(self._journal, json.dumps({"warning": record.getMessage()}).encode() + b"\n")


def main() -> None:
    config, journal_path, stop = sys.argv[1:]
    journal = os.open(journal_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    logging.getLogger("quota").addHandler(_Noted(journal))
    while True:
        stopping = Path(stop).exists()
        try:
            with quota.open(config) as session:
                budget = session.budget()
                decision = budget.charge("videos.list")
                owes = budget.owed_units()
        except quota.QuotaError as error:
            os.write(journal, json.dumps({"error": str(error)}).encode() + b"\n")
            owes = 1
        else:
            told = {"id": decision.id, "source": decision.source, "reason": decision.reason, "detail": decision.detail}
            os.write(journal, json.dumps(told).encode() + b"\n")
        if stopping and not owes:
            return
        time.sleep(REST_S)


if __name__ == "__main__":
    main()
