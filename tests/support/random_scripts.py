"""Random calls of the scripts themselves, each verdict held against a plain sum over everything ever charged.

    python -m support.random_scripts REDIS_PORT SEED OPERATIONS       (in the folder `tests`)

Beyond `support.random_operations`: charge.lua with chunks of 3 entries, so that almost every question is asked in
several parts while others charge, settle and turn the clock in between; several charges in one step; views that idle
for longer than the log is kept; two limits on one view; repeats of lost answers and originals that come after their
repeat; an evicted state, which a repayment may meet first.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from typing import Any

import redis

from quota.ledger.redis_scripts import script
from support.replies import words_of

WINDOWS_MS = (40, 300, 2_500)
SLACK_MS = 400
"""How far the clocks go back at most, and what the log is kept for beyond its longest window."""

MIN_RETENTION_MS = max(WINDOWS_MS) + SLACK_MS
EDGE_MS = 700
METHODS = ("a", "b", "odd,|*%")
KEYS = ("quota:{p}:log", "quota:{p}:state", "quota:{p}:corrections")
SELECTORS = {"*|*|*": METHODS, "units|a|*": ("a",), "units|b,odd%2C%7C%2A%25|*": ("b", "odd,|*%")}


SMALLER = {
    "local CHUNK, MAX_ENTRIES = 250, 250": "local CHUNK, MAX_ENTRIES = 3, 7",
    "local MAINTENANCE_EVERY_MS = 60000": "local MAINTENANCE_EVERY_MS = 4",
}
"""Smaller pieces, and more often."""


@dataclass
class Spent:
    ms: int
    seq: int
    units: int
    method: str

    @property
    def id(self) -> str:
        return f"{self.ms}-{self.seq}"


@dataclass(frozen=True)
class LimitCheck:
    """One limit: a selector, a window in ms (0 = calendar, edges every EDGE_MS), and the number it may not exceed."""

    selector: str
    window_ms: int
    calls: bool
    cap: int

    @property
    def view(self) -> str:
        window = f"{self.window_ms}ms" if self.window_ms else "edges"
        return f"{self.selector}|{window}" + ("|calls" if self.calls else "")

    def counts(self, spent: Spent) -> int:
        if spent.method not in SELECTORS[self.selector]:
            return 0
        return min(spent.units, 1) if self.calls else spent.units

    def cost(self, spents: list[Spent]) -> int:
        return sum(map(self.counts, spents))


@dataclass
class RandomScripts:
    client: redis.Redis
    seed: int
    log: list[Spent] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        text = script("charge")[0]
        for usual, small in SMALLER.items():
            assert text.count(usual) == 1, f"{usual} has another spelling now"
            text = text.replace(usual, small)
        self.charge_script = self.client.register_script(text)
        self.repay_script = self.client.register_script(script("repay")[0])
        self.settle_script = self.client.register_script(script("settle")[0])
        self.clock_ms = self.latest_ms = 1_793_000_000_000
        self.attempt_keys = 0
        self.settling = 0.1 if self.seed % 2 else 0.001
        self.client.delete(*KEYS)

    def run(self, operations: int) -> dict[str, int]:
        for _ in range(operations):
            self._turn_clock()
            choice = self.random.random()
            if choice < self.settling and self.log:
                self._settle()
            elif choice < self.settling * 1.1:
                self.client.delete(KEYS[1])
                if self.random.random() < 0.5:
                    self._repay()
            elif choice < 0.14:
                self._repeat()
            else:
                self._decide(commit=choice < 0.9)
        return self.counts

    def _turn_clock(self) -> None:
        step = self.random.choice((0, 0, 1, 1, 2, 5, 30))
        if self.random.random() < 0.03:
            step = self.random.choice((-1, -30, -SLACK_MS, 250, 900, 4_000))
        self.clock_ms = max(self.clock_ms + step, self.latest_ms - SLACK_MS)
        self.latest_ms = max(self.latest_ms, self.clock_ms)

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def _checks(self, spents: list[Spent]) -> list[LimitCheck]:
        r = self.random
        windows = (*WINDOWS_MS, 0)
        # The longest window is asked about in bursts only, so that its views idle while the log is trimmed.
        if self.latest_ms // 1_500 % 2:
            windows = (40, 300, 0)
        chosen = [
            LimitCheck(selector, r.choice(windows), r.random() < 0.3, r.choice((3, 20, 60, 10**6, 2**53 - 1)))
            for selector in r.sample(sorted(SELECTORS), r.randrange(1, 4))
            if any(spent.method in SELECTORS[selector] for spent in spents)
        ]
        if chosen and r.random() < 0.2:
            chosen.append(chosen[0])
        return chosen

    def _call(
        self, checks: list[LimitCheck], spents: list[Spent], idempotency_key: str, *, commit: bool, age_ms: int
    ) -> list[Any]:
        """One script call to its verdict; between its parts the world goes on."""
        while True:
            args: list[object] = [
                self.clock_ms,
                0,
                int(commit),
                "\n".join(str(spent.units) for spent in spents),
                "\n".join(spent.method for spent in spents),
                "\n".join(["job"] * len(spents)),
                "\n".join(["US"] * len(spents)),
                "\n".join([idempotency_key, *(f"{idempotency_key}.{n}" for n in range(1, len(spents)))]),
            ]
            args += [age_ms, MIN_RETENTION_MS, 0, "units", ""]
            for check in checks:
                edge = self.clock_ms // EDGE_MS * EDGE_MS
                span = check.window_ms or f"{edge} {edge + EDGE_MS} {edge + 2 * EDGE_MS}"
                args += [check.view, check.cap, check.cost(spents), span]
            reply: list[Any] = words_of(self.charge_script(KEYS, args))
            assert all(self.client.pttl(key) != -1 for key in KEYS), "a key without a lifetime"
            if reply[0] != "MORE":
                return reply
            self._count("more")
            self._turn_clock()
            if self.random.random() < self.settling and self.log:
                self._settle()
            if self.random.random() < 0.1:
                self._decide(commit=True)

    def _new(self) -> tuple[list[Spent], str]:
        self.attempt_keys += 1
        number = self.random.choice((1, 1, 1, 1, 2, 5, 9))
        several = [Spent(0, 0, self.random.choice((1, 1, 2, 9)), self.random.choice(METHODS)) for _ in range(number)]
        return several, f"t{self.attempt_keys}"

    def _used(self, check: LimitCheck) -> int:
        cutoff = self.clock_ms - check.window_ms if check.window_ms else self.clock_ms // EDGE_MS * EDGE_MS - 1
        return sum(check.counts(spent) for spent in self.log if spent.ms > cutoff)

    def _decide(self, *, commit: bool) -> tuple[list[LimitCheck], list[Spent], str, list[Any]]:
        spents, idempotency_key = self._new()
        checks = self._checks(spents)
        reply = self._call(checks, spents, idempotency_key, commit=commit, age_ms=-1)
        self._check(checks, spents, reply, commit=commit)
        return checks, spents, idempotency_key, reply

    def _check(self, checks: list[LimitCheck], spents: list[Spent], reply: list[Any], *, commit: bool) -> None:
        used = [self._used(check) for check in checks]
        fits = all(u + check.cost(spents) <= check.cap for u, check in zip(used, checks, strict=True))
        outcome = "ADMITTED" if fits else "REFUSED"
        ids = []
        if fits and commit:
            for spent in spents:
                self._append(spent)
                ids.append(spent.id)
            # Two limits on one view see the charges once.
            used = [u + check.cost(spents) for u, check in zip(used, checks, strict=True)]
        want = [outcome, " ".join(ids), [str(u) for u in used]]
        got = [reply[0], reply[1], reply[7:]]
        assert got == want, f"at {self.clock_ms} {checks}: got {got}, want {want}"
        self._count(outcome.lower())
        if len(spents) > 1:
            self._count(f"several {outcome.lower()}")

    def _append(self, spent: Spent) -> None:
        last = self.log[-1] if self.log else Spent(0, 0, 0, "")
        spent.ms, spent.seq = (self.clock_ms, 0) if self.clock_ms > last.ms else (last.ms, last.seq + 1)
        self.log.append(spent)

    def _repay(self) -> None:
        self.attempt_keys += 1
        spent = Spent(0, 0, self.random.choice((1, 9)), self.random.choice(METHODS))
        charge = (self.attempt_keys, spent.units, spent.method, "job", "US", f"t{self.attempt_keys}")
        assert self.repay_script(KEYS, [self.clock_ms, 0, "machine", MIN_RETENTION_MS, *charge]) == 1
        self._append(spent)
        self._count("repaid")

    def _repeat(self) -> None:
        """The answer is lost, or the question: asked again it is charged once, and a late original not at all."""
        if self.random.random() < 0.5:
            checks, spents, idempotency_key, reply = self._decide(commit=True)
            if self.log and self.random.random() < 0.3:
                self._settle()
            again = self._call(checks, spents, idempotency_key, commit=True, age_ms=SLACK_MS)
            if reply[0] == "ADMITTED":
                assert again[:2] == reply[:2], "the repeat of a charge is that charge"
                assert again[7:] == [str(self._used(check)) for check in checks]
            else:
                self._check(checks, spents, again, commit=True)
            self._count("repeated")
        else:
            spents, idempotency_key = self._new()
            checks = self._checks(spents)
            self._check(checks, spents, self._call(checks, spents, idempotency_key, commit=True, age_ms=5), commit=True)
        if self.client.hexists(KEYS[1], f"retried:{idempotency_key}"):
            late = self._call(checks, spents, idempotency_key, commit=True, age_ms=-1)
            assert (late[0], late[1]) == ("RETRIED", "")
            self._count("late")

    def _settle(self) -> None:
        spent = self.random.choice([s for s in self.log if s.ms >= self.latest_ms - MIN_RETENTION_MS] or self.log[-1:])
        units = self.random.choice((0, 1, spent.units + 3))
        if self.settle_script((*KEYS, "quota:{p}:history"), [spent.id, units]):
            spent.units = units
            self._count("settled")
        else:
            assert spent.ms < self.latest_ms - MIN_RETENTION_MS
        self.log = [s for s in self.log if s.ms >= self.latest_ms - MIN_RETENTION_MS - SLACK_MS] or self.log[-1:]


def main() -> None:
    port, seed, operations = map(int, sys.argv[1:])
    with redis.Redis(port=port, decode_responses=True) as client:
        print(f"seed {seed}: {RandomScripts(client, seed).run(operations)}")


if __name__ == "__main__":
    main()
