"""A worker process: asks one storage as long as it admits, then each millisecond. It prints when it was admitted, by
the storage's clock. It ends at a refusal that comes MORE_MS after the first one.

    python -m support.inbound_worker URL ALGORITHM NUMBER WINDOW_MS MORE_MS [AHEAD_MS]

AHEAD_MS is how much this host's clock is ahead of the truth; the storage's own is not changed.
"""

from __future__ import annotations

import sys
import time
from unittest.mock import patch

from quota.common.clock import host_clock
from quota.inbound import redis_storage
from quota.inbound.contract import Limit, Policy
from quota.inbound.rules import open_storage
from support.patience import be_patient


def main(url: str, algorithm: str, number: str, window_ms: str, more_ms: str, ahead_ms: str = "0") -> None:
    burst = int(number) if algorithm == "gcra" else 0
    policy = Policy("a", (Limit(int(number), int(window_ms), burst),), algorithm)  # type: ignore[arg-type]
    be_patient()
    storage = open_storage(url)
    ends_ms = None
    with patch.object(redis_storage, "host_clock", lambda: host_clock() + int(ahead_ms)):
        for _ in range(100_000):
            decision = storage.decide(policy, "ann")
            if decision.admitted:
                print(decision.now_ms, flush=True)
            elif ends_ms is not None and decision.now_ms > ends_ms:
                break
            else:
                ends_ms = ends_ms or decision.now_ms + int(more_ms)
                time.sleep(0.001)  # else a refusal costs as much of the machine as there is
    storage.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
