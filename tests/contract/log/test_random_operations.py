"""Random operations on the log in memory and on another log get the same answers.

Authors read, decide and append with old and new knowledge, correct, change facts, fence, replace, trim and keep views,
under a clock that jumps, and of two projects.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from contract.log.logs import NOW_MS, Clock, Place, charge, correction, marker, others
from quota.ledger.log import ANY, LEASE_MS, Append, Log, Room
from quota.ledger.sqlite_log import SqliteLog
from quota.rules.entry import END, START, Entry, Id, id_text
from quota.terms.limits import DAY_MS, Selector

OPERATIONS = 500
FIELDS = ("facts", "claim:a", "place:b")
VIEWS = ("view:v", "view:w")
WEIGHTS = {
    "append": 12,
    "read_on": 6,
    "correct": 4,
    "change": 3,
    "replace": 3,
    "fence": 1,
    "keep_views": 2,
    "begin": 2,
    "read": 2,
    "trim": 1,
    "add_past": 1,
}


def plain(answer: Any) -> Any:
    """Each kind of log answers with sequences of its own kind. The numbers of markers are drawn by the log."""
    if isinstance(answer, (list, tuple)) and not (len(answer) == 2 and all(type(part) is int for part in answer)):
        return [plain(part) for part in answer]
    return dict(answer) if isinstance(answer, dict) else answer


class Pair:
    """Two logs that are asked the same."""

    def __init__(self, ours: Log, clock: Clock, dice: random.Random) -> None:
        self.clock, self.dice = clock, dice
        self.logs: tuple[Log, Log] = (SqliteLog(clock=clock), ours)
        self.project = "p"
        self.marks_of: dict[str, list[tuple[str, Id]]] = {"p": [("", START)], "q": [("", START)]}
        self.words: Counter[str] = Counter()
        self.charges: list[Entry] = []
        self.fences = [""]

    def ask(self, what: Callable[[Log], Any]) -> Any:
        expected, answer = map(what, self.logs)
        assert plain(answer) == plain(expected)
        return answer

    def step(self) -> None:
        dice = self.dice
        self.clock.now_ms += dice.choice((0, 0, 0, 1, 500, LEASE_MS, 3_600_000, -1, -70_000))
        self.project = dice.choice("pppq")
        getattr(self, dice.choices([*WEIGHTS], [*WEIGHTS.values()])[0])()

    @property
    def marks(self) -> list[tuple[str, Id]]:
        """What authors have read at some time."""
        return self.marks_of[self.project]

    def mark(self) -> tuple[str, Id]:
        """What some author has read: most of the log, or of one that was there before."""
        dice, beginning = self.dice, self.logs[0].begin(self.project)
        if dice.random() < 0.1:
            return dice.choice(self.marks)
        entries = self.logs[0].read(self.project, START, END, 5_000)[-6:]
        return beginning.epoch, dice.choice([beginning.tip, *(entry.id for entry in entries)])

    # -- operations --------------------------------------------------------------------------------------------------

    def append(self, *entries: Entry, room: int | None = None) -> None:
        dice = self.dice
        epoch, seen = self.mark()
        bucket = dice.choice(("units", "searches"))
        entries = entries or tuple(
            charge(dice.choice((0, 1, 5, 100)), bucket=bucket) for _ in range(dice.choice((1, 3)))
        )
        if dice.random() < 0.1:
            entries = (others(dice.randrange(50), bucket=bucket),)
        selector = Selector((bucket,), count=dice.choice(("units", "calls")))
        request = Append(
            epoch=epoch,
            seen=seen,
            entries=entries,
            room=dice.choice((-1, 0, 1, 10, 500, ANY - 1, ANY)) if room is None else room,
            now_ms=self.clock.now_ms - dice.choice((0, 0, 0, 5, -1)),
            latest_ms=self.clock.now_ms + dice.choice((0, 10, 10, -1)),
            must=[dice.choice(self.marks)[1] for _ in range(dice.choice((0, 0, 0, 0, 0, 0, 0, 1, 2)))],
            rooms=[Room(selector, dice.randrange(20)), Room(Selector(), 500)] if dice.random() < 0.3 else (),
            seq=dice.getrandbits(40),
            new_epoch=f"e{dice.getrandbits(30)}",
        )
        for _ in range(dice.choice((1, 1, 2))):  # the answer was lost, and it is asked again
            reply = self.ask(lambda log: log.append(self.project, request))
            self.words[reply.word] += 1
            if reply.id is not None:
                self.marks.append((reply.epoch, reply.id))
                self.charges += [each._replace(id=reply.id) for each in entries[:1] if each.kind == "charge"]

    def read_on(self) -> None:
        epoch, seen = self.mark()
        reply = self.ask(lambda log: log.append(self.project, Append(epoch, seen)))
        self.words[reply.word] += 1
        self.marks.extend((reply.epoch, entry.id) for entry in reply.unseen[-1:])

    def correct(self) -> None:
        if self.charges:
            of = self.dice.choice(self.charges[-10:])
            self.append(correction(of, self.dice.randrange(120)), room=ANY)
            keys = [each.key for each in self.charges[-20:]]
            self.ask(lambda log: log.corrections(self.project, keys))

    def change(self) -> None:
        dice = self.dice
        stands = self.ask(lambda log: log.change(self.project, dict.fromkeys(FIELDS), {}))
        expected = {name: stands.state.get(name) for name in FIELDS if dice.random() < 0.7}
        if dice.random() < 0.2:
            expected["facts"] = "something else"
        becomes = {dice.choice(FIELDS): dice.choice(("x", "y\tz", "", None))}
        mark = marker() if dice.random() < 0.3 else None
        if mark is None:
            self.ask(lambda log: log.change(self.project, expected, becomes))
            return
        memory, ours = (log.change(self.project, expected, becomes, mark) for log in self.logs)
        assert plain(ours._replace(tip=memory.tip)) == plain(memory)
        if ours.done:
            self.even_out()

    def even_out(self) -> None:
        """Each log has drawn a number for its marker. Give both markers the same number, as a repair does."""
        epoch = self.logs[0].begin(self.project).epoch
        entries = list(self.logs[0].read(self.project, START, END, 5_000))
        for log in self.logs:
            assert log.begin(self.project).tip[0] == entries[-1].id[0]
            _, fence = log.fence(self.project, epoch, "repair")
            assert log.replace(self.project, fence, log.begin(self.project).tip, entries, epoch)

    def keep_views(self) -> None:
        epoch, head = self.mark()
        kept = {self.dice.choice(VIEWS).removeprefix("view:"): f"{epoch} 5 0-0 {id_text(head)} -"}
        self.ask(lambda log: log.keep_views(self.project, epoch, kept))

    def begin(self) -> None:
        views = self.dice.choice((VIEWS, VIEWS[:1], ()))
        self.ask(lambda log: log.begin(self.project, (*views, *FIELDS)))
        self.ask(lambda log: log.projects())

    def read(self) -> None:
        after, through = (self.dice.choice(self.marks)[1] for _ in range(2))
        count = self.dice.choice((1, 7, 1_000))
        self.ask(lambda log: log.read(self.project, after, through, count))
        self.ask(lambda log: log.past(self.project, after, END, count))

    def fence(self) -> None:
        epoch, token = self.mark()[0], self.dice.choice(("ours", "theirs"))
        self.fences.append(self.ask(lambda log: log.fence(self.project, epoch, token))[1])
        if self.dice.random() < 0.8:
            self.replace()

    def replace(self) -> None:
        dice, beginning = self.dice, self.logs[0].begin(self.project)
        kept = [entry for entry in self.logs[0].read(self.project, START, END, 5_000) if dice.random() < 0.9]
        entries = dice.choice((kept, kept, kept, []))
        epoch = f"r{dice.getrandbits(30)}"
        fence = beginning.epoch if dice.random() < 0.9 else dice.choice(self.fences)
        tip = beginning.tip if dice.random() < 0.95 else dice.choice(self.marks)[1]
        self.ask(lambda log: log.replace(self.project, fence, tip, entries, epoch))

    def trim(self) -> None:
        before_ms, count = self.clock.now_ms - self.dice.choice((0, 3_600_000)), self.dice.choice((1, 5, 50))
        self.ask(lambda log: log.trim(self.project, before_ms, count))

    def add_past(self) -> None:
        entries = [charge(id=(NOW_MS - DAY_MS + self.dice.randrange(5), n)) for n in range(3)]
        self.ask(lambda log: log.add_past(self.project, entries))


@pytest.mark.parametrize("place", ["redis"], indirect=True)
@pytest.mark.parametrize("seed", range(5))
def test_redis_answers_as_sqlite(place: Place, clock: Clock, seed: int) -> None:
    pair = Pair(place.open(clock), clock, random.Random(seed))
    for _ in range(OPERATIONS):
        pair.step()
    assert all(pair.words[word] >= 5 for word in ("APPENDED", "READ", "AGAIN", "CLOCK", "BEHIND")), pair.words
    for pair.project in "pq":
        pair.ask(lambda log: log.begin(pair.project, (*VIEWS, *FIELDS)))
        pair.ask(lambda log: log.read(pair.project, START, END, 5_000))
        pair.ask(lambda log: log.past(pair.project, START, END, 5_000))
        pair.ask(lambda log: log.corrections(pair.project, [entry.key for entry in pair.charges]))
