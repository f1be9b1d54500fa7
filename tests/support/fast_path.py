"""Random histories of charge.lua as it is, beside the same script without its fast path: two projects in step.

    python -m support.fast_path REDIS_PORT SEED OPERATIONS       (in the folder `tests`)

After each operation the answers are the same, and, again and again, so is everything stored.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import redis

from quota.ledger.redis_scripts import script

if TYPE_CHECKING:
    from collections.abc import Sequence

WINDOWS_MS = (2_000, 60_000, 600_000)
EDGE_MS = 420_000
RETENTION_MS = 700_000
METHODS = ("videos.list", "search.list", "odd,|*%")
VIEWS = {
    "*|*|*|W": METHODS,
    "units|*|*|W": METHODS,
    "units|search.list|*|W": ("search.list",),
    "units|search.list,videos.list|*|W|calls": ("videos.list", "search.list"),
    "units|odd%2C%7C%2A%25|nightly,|W": ("odd,|*%",),
    "*|*|nightly|W|calls": METHODS,
}
"""What limits count, with the methods of the calls that they are asked about."""

GARBAGE = (
    "",
    "0",
    "1",
    "-1",
    "1.5",
    "nan",
    "inf",
    "1e400",
    "x",
    " 7",
    "0x10",
    "007",
    "9007199254740993",
    "1 2 3",
    "a b",
)
PROJECTS = ("fast", "slow")
PARTS = ("log", "state", "corrections", "history")


def without_fast_path(text: str) -> str:
    cut = re.sub(r"^-- >>> fast path\n.*?^-- <<< fast path\n", "", text, flags=re.MULTILINE | re.DOTALL)
    assert cut != text
    return cut


def as_list(reply: Any, *, commit: bool) -> Any:
    """What the one line of text says, as the list would say it."""
    if not isinstance(reply, str):
        return reply
    outcome, now_ms, last, epoch, *used = reply.split(" ")
    leaving = used[len(used) // 2 :] if outcome == "REFUSED" else []
    used = used[: len(used) - len(leaving)]
    charge_id = last if commit and outcome == "ADMITTED" else ""
    return [outcome, charge_id, now_ms, last, " ".join(leaving), epoch, "", *used]


def _keys(project: str) -> list[str]:
    return [f"quota:{{{project}}}:{part}" for part in PARTS]


@dataclass
class Pair:
    client: redis.Redis
    seed: int
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        text = script("charge")[0]
        self.charge_shas = [self.client.script_load(text), self.client.script_load(without_fast_path(text))]
        others = ("settle", "exhaust", "swap", "fence", "repay", "repair", "roll_up")
        self.shas = {name: self.client.script_load(script(name)[0]) for name in others}
        self.client.delete(*(key for project in PROJECTS for key in _keys(project)))
        self.now_ms = self.latest_ms = 1_793_000_000_000 + self.random.randrange(10**9)
        self.numbers = 0
        self.ids: list[str] = []
        self.seen: list[Any] = ["", "0-0"]
        self.granted = ""
        self.retention_ms = RETENTION_MS
        self.gaps_ms = self.random.choice(((0, 1, 3), (40, 700, 2_000), (0, 500, 5_000, 9_000), (9_000, 20_000)))
        self.cap = self.random.choice((30, 300, 10**6))
        self.rare = self.random.choice((0.005, 0.02, 0.15))
        # Mostly the same limits, of which each counts every call: as in production, where the fast path is for them.
        counting_all = [name for name in VIEWS if VIEWS[name] == METHODS and "nightly" not in name]
        self.usual = self.random.choices([(n, w) for n in counting_all for w in (*WINDOWS_MS, 0)], k=1 + self.seed % 3)
        self.wild = self.random.choice((0.0, 0.05, 0.3, 1.0))

    def run(self, operations: int) -> Counter[str]:
        for number in range(operations):
            self._turn_clock()
            if self.random.random() < self.rare:
                self._something_rare()
            else:
                self._decide()
            if number % 40 == 39:
                self._compare_stored()
        self._compare_stored()
        return self.counts

    def _turn_clock(self) -> None:
        r = self.random
        self.now_ms += r.choice(self.gaps_ms)
        if r.random() < self.rare / 4:
            self.now_ms += r.choice((-1, -3_000, -70_000, -650_000, 59_000, 600_000, 3 * RETENTION_MS, 30 * 86_400_000))
        self.latest_ms = self.now_ms = max(self.now_ms, self.latest_ms - 3_000_000)

    # -- both at once --------------------------------------------------------------------------------------------------

    def _both(self, words: Sequence[tuple[str, Sequence[str], Sequence[object]]]) -> list[Any]:
        with self.client.pipeline(transaction=False) as pipe:
            for sha, keys, args in words:
                pipe.evalsha(sha, len(keys), *keys, *map(str, args))
            return pipe.execute(raise_on_error=False)

    def _run(self, name: str, *args: object, parts: int = 3) -> Any:
        replies = self._both([(self.shas[name], self._of(project, name, parts), args) for project in PROJECTS])
        assert str(replies[0]) == str(replies[1]), (name, args, replies)
        self.counts[name] += 1
        return replies[0]

    def _of(self, project: str, name: str, parts: int) -> list[str]:
        keys = _keys(project)
        if name == "repair":
            aside = f"quota:{{{project}}}:repair"
            return [*keys[:3], f"{aside}:log", f"{aside}:corrections", keys[3]]
        return keys[:parts]

    def _charge(self, args: list[object]) -> Any:
        """One call of each to its verdict; they go the same number of steps."""
        commit = str(args[2]).startswith("1")
        while True:
            replies = self._both(
                [(sha, _keys(project)[:3], args) for sha, project in zip(self.charge_shas, PROJECTS, strict=True)]
            )
            fast, slow = (as_list(reply, commit=commit) for reply in replies)
            if isinstance(fast, Exception) or isinstance(slow, Exception):
                assert _said(fast) == _said(slow), (args, fast, slow)
                self.counts["error"] += 1
                return None
            assert not isinstance(replies[1], str)
            assert fast == slow, (self.now_ms, args, fast, slow)
            if isinstance(replies[0], str):
                self.counts[f"fast {'charge' if commit else 'peek'} {fast[0]}"] += 1
            elif str(args[2]).endswith("t"):
                self.counts[f"slow {fast[0]}"] += 1
            if fast[0] != "MORE":
                return fast

    def _compare_stored(self) -> None:
        stored = []
        for project in PROJECTS:
            log, state, corrections, _ = _keys(project)
            lives = [self.client.pttl(key) for key in (log, state, corrections)]
            stored.append(
                (self.client.xrange(log), self.client.hgetall(state), self.client.hgetall(corrections), lives)
            )
        (fast_log, fast_state, *fast), (slow_log, slow_state, *slow) = stored
        assert fast_log == slow_log
        # Without a state, the retention is what is left of the log's lifetime (L14).
        retentions = [int(state.pop("retention_ms", 0)) for state in (fast_state, slow_state)]
        assert abs(retentions[0] - retentions[1]) < 60_000
        different = {name for name in {*fast_state, *slow_state} if fast_state.get(name) != slow_state.get(name)}
        assert not different, {name: (fast_state.get(name), slow_state.get(name)) for name in different}
        assert fast[0] == slow[0]
        assert all(a != -1 and abs(a - b) < 60_000 for a, b in zip(fast[1], slow[1], strict=True)), (fast, slow)

    # -- one decision --------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        r = self.random
        args = self._arguments(r.choice(("1t", "1t", "1t", "1t", "1", "0t", "0")))
        if r.random() < self.rare / 4:  # hostile: nothing that is wrong may be decided, or written, any quicker
            args[r.randrange(len(args))] = r.choice(GARBAGE)
            if r.random() < 0.3:
                del args[-r.randrange(1, 6) :]
        reply = self._charge(args)
        if reply is None:
            return
        if reply[0] in ("ADMITTED", "REFUSED", "EXHAUSTED") and r.random() < 0.9:
            self.seen = [reply[5], reply[3]]
        elif reply[0] == "GRANTED":
            self.granted = reply[4]
        elif reply[0] == "BEHIND":
            self.seen = [reply[5], reply[3]] if reply[5] else ["", "0-0"]
        if reply[0] == "ADMITTED" and reply[1]:
            self.ids = [*self.ids[-300:], reply[1]]
            if r.random() < self.rare / 4:
                self._charge([*args[:8], r.choice((0, 5, 400)), *args[9:]])
                self._charge(args)

    def _arguments(self, how: str) -> list[object]:
        r = self.random
        self.numbers += 1
        units = r.choice((1, 1, 1, 5, 100, 0)) if r.random() < 0.5 else 1
        method, bucket = r.choice(METHODS), r.choice(("units", "units", "units", "search")) if self.wild else "units"
        caller_ms = self.now_ms + r.choice((0, 0, 3, -900, 4_999, -4_999)) if r.random() < 0.9 else 0
        if r.random() < self.rare / 2:
            caller_ms = self.now_ms + r.choice((5_000, 5_001, -5_001, -60_000, -3_600_000, -3_600_001))
        words = " ".join(map(str, self.seen)) if self.seen[0] else ""
        if words and r.random() < 0.3 and self.ids:
            words += f" {r.choice(self.ids)}" if r.random() < 0.7 else f" {r.choice(self.ids[-3:])} {self.ids[-1]}"
        if r.random() < self.rare / 4:
            words = r.choice(("", "another 5-0", f"{words} {self.now_ms}-77", f"{words} x", "!x 1-1"))
        granted = "other=1:1:1" if r.random() < self.rare / 8 else self.granted
        expected = r.choice((words, words, f"{words} @{granted}", f"{words} @{granted}", ""))
        closed_by = r.choice(("units", "units", "units,search", "", "search,uploads,units"))
        args: list[object] = [
            *(self.now_ms, max(caller_ms, 0), how, units if bucket == "units" else f"search={units}"),
            *(method, r.choice(("nightly", "", "odd,job")), "US", f"{r.randrange(10**6):06}-{self.numbers}", -1),
            *(self.retention_ms, r.choice((0, 0, 1_000)), closed_by, expected),
        ]
        limits = self.usual
        if r.random() < self.wild:
            names = [n for n in VIEWS if method in VIEWS[n] and (bucket == "units" or not n.startswith("units"))]
            limits = [(r.choice(names), r.choice((*WINDOWS_MS, 0))) for _ in range(r.choice((0, 1, 2, 3, 5)))]
        for name, window_ms in limits:
            edge = self.now_ms // EDGE_MS * EDGE_MS - (EDGE_MS if r.random() < 0.2 else 0)
            span = window_ms or f"{edge} {edge + EDGE_MS} {edge + 2 * EDGE_MS}"
            cost = 1 if name.endswith("calls") else units
            cost = r.choice((0, cost, 7)) if how.startswith("0") and r.random() < 0.3 else cost
            args += [name.replace("W", str(window_ms)), self.cap if r.random() < 0.9 else r.choice((0, 3)), cost, span]
        return args

    # -- everything else -----------------------------------------------------------------------------------------------

    def _something_rare(self) -> None:
        r, now_ms = self.random, self.now_ms
        kind = r.random()
        if kind < 0.4 and self.ids:
            self._run("settle", r.choice(self.ids), r.choice((0, 0, 1, 3, 120)), parts=4)
        elif kind < 0.5:
            until_ms = now_ms + r.choice((1, 5_000, 60_000))
            self._run("exhaust", now_ms, r.choice(("units", "search")), f"{until_ms} {now_ms} said", self.retention_ms)
        elif kind < 0.55:
            self._lift(r.choice(("units", "search")))
        elif kind < 0.6:
            grants = r.choice(("", f"units=900:{now_ms}:{now_ms + 9_000}"))
            self._change("granted", f"={grants}" if grants else "-")
        elif kind < 0.63:
            name = r.choice(list(VIEWS)).replace("W", str(r.choice(WINDOWS_MS)))
            until_ms = now_ms + r.choice((1_000, 30_000))
            report = f"{self.seen[0] or 'e1'} 7:{until_ms} 0:0:0:0:9007199254740991 {self.seen[1]}"
            begun = ("epoch", f"=n{self.numbers}", "unlogged_until_ms", f"={until_ms}")
            self._change(f"unlogged:{name}", f"={report}", *begun)
        elif kind < 0.67:
            charge = (self.numbers, 3, "videos.list", "nightly", "US", f"r{self.numbers}")
            self._run("repay", now_ms, 0, "machine", self.retention_ms, *charge)
        elif kind < 0.7:
            for _ in range(99):
                if self._run("repair", now_ms, now_ms, f"r{self.numbers}") != "MORE":
                    break
        elif kind < 0.76:
            part = r.choice((0, 1, 2, 2))
            self.client.delete(*(_keys(project)[part] for project in PROJECTS))
            self.counts["deleted"] += 1
        elif kind < 0.8:
            self._run("roll_up", now_ms, now_ms, parts=4)
        elif kind < 0.85:
            self.retention_ms = RETENTION_MS + r.choice((0, 0, 1_000, 200_000))
        elif kind < 0.9:
            self.cap = r.choice((3, 30, 300, 10**6))
        elif kind < 0.94:
            self._in_a_field()
        else:
            self.gaps_ms = r.choice(((0, 1), (5, 100), (700, 4_000), (9_000, 15_000)))

    def _lift(self, bucket: str) -> None:
        """As `StateChanges.reopen`."""
        closed = f"closed:{bucket}"
        record = self._run("swap", self.now_ms, self.retention_ms, "", 1, closed)[2]
        if record is not None:
            self._change(closed, "-", f"reopened:{bucket}", f'={self.now_ms} "because"\n{record}')

    def _change(self, field: str, *becomes: str) -> None:
        words = (self.now_ms, self.retention_ms)
        seen = self._run("swap", *words, "", 1, field)[1]
        self._run("swap", *words, seen, 1, field, field, *becomes)

    def _in_a_field(self) -> None:
        """A fence for one decision; or another format."""
        field, value = self.random.choice((("epoch", "!>redis://elsewhere"), ("epoch", "!x"), ("format", "3")))
        before = [self.client.hget(_keys(project)[1], field) for project in PROJECTS]
        if None in before:
            return
        for project in PROJECTS:
            self.client.hset(_keys(project)[1], field, value)
        self._decide()
        for project, old in zip(PROJECTS, before, strict=True):
            self.client.hset(_keys(project)[1], field, str(old))


def _said(reply: Any) -> str:
    """The scripts' own words; of Lua's only that there were any."""
    text = str(reply)
    return "Lua" if isinstance(reply, Exception) and ("user_script" in text or "attempt to" in text) else text


def main() -> None:
    port, seed, operations = map(int, sys.argv[1:])
    with redis.Redis(port=port, decode_responses=True) as client:
        print(f"seed {seed}: {dict(Pair(client, seed).run(operations))}")


if __name__ == "__main__":
    main()
