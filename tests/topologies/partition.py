"""The network parts: the primary is cut off with one machine, which goes on charging it; the others promote another.

Three machines in network namespaces, each with a server, a sentinel and a process that charges. When the network is
whole again the old primary becomes a replica and its charges of that time are lost; the machine that made them puts
them back.
What was granted on both sides beyond the limit is stated, with and without `min-replicas-to-write 1`.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from support.servers import executables, until
from topologies.charging import Crew, Outcome
from topologies.network import Network

MACHINES = ("a", "b", "c")
PORT, SENTINEL_PORT = 7_000, 7_100
DOWN_AFTER_MS = 1_000
PARTED_S = 4.0
"""Both sides have a primary for so long."""

UNITS = 600
WHO = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main")


def run(server: str, *, min_replicas: int) -> Outcome:
    outcome = Outcome()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "crew").mkdir()
        network = stack.enter_context(Network(MACHINES))
        first = network.address("a")
        for machine in MACHINES:
            options = ["--min-replicas-to-write", str(min_replicas), "--min-replicas-max-lag", "1"]
            options += [] if machine == "a" else ["--replicaof", first, str(PORT)]
            start(stack, network, machine, folder, [executables()[server], *server_options(folder, machine), *options])
        for machine in MACHINES:
            config = folder / f"sentinel-{machine}.conf"
            config.write_text(
                f"port {SENTINEL_PORT}\nbind 0.0.0.0\nprotected-mode no\ndir {folder / machine}\n"
                f"sentinel monitor main {first} {PORT} 2\nsentinel down-after-milliseconds main {DOWN_AFTER_MS}\n"
                "sentinel failover-timeout main 3000\n"
            )
            start(stack, network, machine, folder, [executables()[server], str(config), "--sentinel"])
        until(partial(all_know, network), "the sentinels do not know each other, or the replicas do not follow")
        hosts = ",".join(f"{network.address(machine)}:{SENTINEL_PORT}" for machine in MACHINES)
        url = f"redis+sentinel://{hosts}/main/0"
        crew = stack.enter_context(Crew(url, folder / "crew", UNITS, lambda machine: network.command(machine, [])))
        crew.start(*MACHINES)
        time.sleep(1)
        network.cut("a")
        cut_s = time.time()
        until(lambda: first not in ask(network, "b", SENTINEL_PORT, *WHO), "nobody takes over")
        time.sleep(PARTED_S)
        network.join("a")
        until(lambda: "role:slave" in ask(network, "a", PORT, "INFO", "replication"), "it stays a primary")
        joined_ms = (time.time() + 1) * 1_000
        until(
            lambda: {machine for machine, e in crew.decisions() if e["asked_ms"] > joined_ms} == {*MACHINES},
            "not all are back",
        )
        primary = next(m for m in MACHINES if "role:master" in ask(network, m, PORT, "INFO", "replication"))
        outcome.take(crew, f"unix://{folder / primary / 'redis.sock'}")
        others = [e for machine, e in crew.decisions() if machine != "a" and e["admitted"]]
        back_ms = [e["ms"] for e in others if e["asked_ms"] > (cut_s + 0.5) * 1_000]
        outcome.back_s = min(back_ms, default=cut_s * 1_000) / 1_000 - cut_s
        outcome.check(outcome.lost > 0, "nothing was lost")
    return outcome


def all_know(network: Network) -> bool:
    """Whether each sentinel knows the other two, and both replicas: it looks for them every 10 s only, and one that is
    elected before that finds nobody to promote, and tries again after twice the failover-timeout."""
    answers = [ask(network, machine, SENTINEL_PORT, "SENTINEL", "MASTER", "main").split("\n") for machine in MACHINES]
    facts = [dict(zip(words[::2], words[1::2], strict=False)) for words in answers]
    return all((each.get("num-slaves"), each.get("num-other-sentinels")) == ("2", "2") for each in facts)


def server_options(folder: Path, machine: str) -> list[str]:
    (folder / machine).mkdir()
    options = ["--port", str(PORT), "--bind", "0.0.0.0", "--protected-mode", "no", "--save", ""]  # noqa: S104
    options += ["--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1"]
    options += ["--dir", str(folder / machine), "--unixsocket", str(folder / machine / "redis.sock")]
    return options


def start(stack: ExitStack, network: Network, machine: str, folder: Path, command: Sequence[str]) -> None:
    with (folder / f"{machine}.server.log").open("ab") as log:
        process = subprocess.Popen(network.command(machine, command), stdout=log, stderr=log)
    stack.callback(process.wait)
    stack.callback(process.kill)


def ask(network: Network, machine: str, port: int, *command: str) -> str:
    """What a server of a machine says, asked there."""
    tool = ["redis-cli", "-p", str(port), *command]
    return subprocess.run(network.command(machine, tool), capture_output=True, text=True, check=False).stdout
