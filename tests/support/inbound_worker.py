"""A worker process: asks one storage as long as it admits, then each millisecond. It prints when it was admitted, by
the storage's clock.

    python -m support.inbound_worker URL ALGORITHM NUMBER WINDOW_MS SECONDS [AHEAD_MS]

AHEAD_MS is how much this host's clock is ahead of the truth; the storage's own is not changed.
"""

from __future__ import annotations

import sys
import time
from unittest.mock import patch

from quota.common.clock import host_clock
from quota.errors import StorageAway
from quota.inbound import redis_storage
from quota.inbound.contract import Limit, Policy
from quota.inbound.rules import open_storage


def main(url: str, algorithm: str, number: str, window_ms: str, seconds: str, ahead_ms: str = "0") -> None:
    burst = int(number) if algorithm == "gcra" else 0
    policy = Policy("a", (Limit(int(number), int(window_ms), burst),), algorithm)  # type: ignore[arg-type]
    storage = open_storage(url)
    ends_s = time.monotonic() + float(seconds)
    with patch.object(redis_storage, "host_clock", lambda: host_clock() + int(ahead_ms)):
        while time.monotonic() < ends_s:
            try:
                decision = storage.decide(policy, "ann")
            except StorageAway:  # a machine that was busy for a while: what was counted was not admitted
                continue
            if decision.admitted:
                print(decision.now_ms, flush=True)
            else:
                time.sleep(0.001)  # else a refusal costs as much of the machine as there is
    storage.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
