"""Machines on one Linux: network namespaces, joined by a bridge in a namespace of its own.

They reach each other and nothing else; whoever runs this needs root. A machine can be cut off and joined again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from types import TracebackType

HUB = "hub"
"""The machine in the middle, which stands on the bridge itself."""


def why_not() -> str:
    """What namespaces lack here; "" if they can be made."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip` (Debian's package iproute2)"
    return ""


class Network:
    """`with Network(["web1", "web2"]) as network`: these machines and the hub."""

    def __init__(self, machines: Sequence[str]) -> None:
        self._machines = tuple(machines)
        self._prefix = f"quota-{os.getpid()}-"

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._remove()

    def address(self, machine: str) -> str:
        return f"10.77.0.{1 if machine == HUB else self._machines.index(machine) + 2}"

    def command(self, machine: str, command: Sequence[str]) -> list[str]:
        """A command, as one that runs on a machine."""
        return ["ip", "netns", "exec", self._prefix + machine, *command]

    def cut(self, machine: str) -> None:
        """Nothing reaches it, and it reaches nothing: packets are lost, connections stay."""
        self._on_hub("link", "set", "dev", machine, "down")

    def join(self, machine: str) -> None:
        self._on_hub("link", "set", "dev", machine, "up")

    def _make(self) -> None:
        for machine in (HUB, *self._machines):
            _ip("netns", "add", self._prefix + machine)
            _ip("-n", self._prefix + machine, "link", "set", "lo", "up")
        self._on_hub("link", "add", "name", "bridge", "type", "bridge")
        self._on_hub("addr", "add", f"{self.address(HUB)}/24", "dev", "bridge")
        self._on_hub("link", "set", "dev", "bridge", "up")
        for machine in self._machines:
            there = self._prefix + machine
            self._on_hub("link", "add", "name", machine, "type", "veth", "peer", "name", "eth0", "netns", there)
            self._on_hub("link", "set", "dev", machine, "master", "bridge", "up")
            _ip("-n", there, "addr", "add", f"{self.address(machine)}/24", "dev", "eth0")
            _ip("-n", there, "link", "set", "eth0", "up")

    def _on_hub(self, *arguments: str) -> None:
        _ip("-n", self._prefix + HUB, *arguments)

    def _remove(self) -> None:
        for machine in (HUB, *self._machines):
            subprocess.run(["ip", "netns", "del", self._prefix + machine], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
