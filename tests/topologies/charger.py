"""One process that charges, as a machine of its own: `python -m topologies.charger URL UNITS FOLDER FINISH`.

It writes a line for each decision, and goes on until the file FINISH appears.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from contextlib import closing
from pathlib import Path

from quota.common.clock import host_clock
from quota.ledger.factory import open_ledger
from support.setup import budget_of, limit

PROJECT = "charged"
METHOD = "videos.list"
NOTES = "decisions.jsonl"


def main() -> None:
    url, units, folder, finish = sys.argv[1:]
    notes = os.open(Path(folder, NOTES), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with closing(open_ledger(url)) as ledger:
        budget = budget_of(ledger, limit(int(units)), project=PROJECT, folder=Path(folder))
        while not Path(finish).exists():
            asked_ms = host_clock()
            decision = budget.charge(METHOD)
            event = {"asked_ms": asked_ms, "ms": host_clock(), "id": decision.id, "reason": decision.reason}
            os.write(notes, json.dumps({**event, "admitted": decision.admitted}).encode() + b"\n")
            time.sleep(random.uniform(0.015, 0.06))


if __name__ == "__main__":
    main()
