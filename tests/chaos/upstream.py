"""The emulated upstream as a process of its own: `python -m chaos.upstream QUOTA WIRE_FILE`.

Prints its address, then writes a line for every request that reached it: when, under which call's name, for how many
units, and whether its quota covered it.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from quota.jobs.emulator.usage import Charge
from support.emulator import Emulator


class WritingEmulator(Emulator):
    def __init__(self, path: str, quota: int) -> None:
        self._wire = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  # as long as the process
        super().__init__(quota=quota)

    def _arrive_with_faults(self, request: Any, kinds: Any) -> Any:
        arrived_ms = time.time_ns() // 1_000_000
        method, charge, fault = super()._arrive_with_faults(request, kinds)
        line = {
            "ms": arrived_ms,
            "call": request.params.get("quotaUser", ""),
            "method": method,
            "units": charge.units if isinstance(charge, Charge) else 0,
            "refused": not isinstance(charge, Charge) or charge.refused,
        }
        self._wire.write(json.dumps(line, separators=(",", ":")) + "\n")
        return method, charge, fault


if __name__ == "__main__":
    emulator = WritingEmulator(sys.argv[2], int(sys.argv[1]))
    print(emulator.address, flush=True)
    emulator.serve_forever()
